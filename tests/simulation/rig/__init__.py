"""Simulate rounds in virtual time, without a network, under faults drawn from a seed."""
