"""Client hosts: private histories, sealing, delivery, evaluation, recommendation."""
