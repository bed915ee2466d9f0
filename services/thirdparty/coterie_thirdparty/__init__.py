"""Run the third party, which is certificate authority and directory of public keys."""
