"""Clients of the COS: register, answer tasks of sums, and hold and use Paillier keys, for hosts and key holders."""
