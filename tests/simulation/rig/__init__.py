"""Rounds without a network: quickly and without faults (``rounds``), or under every fault that a seed can draw."""
