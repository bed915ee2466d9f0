"""Shamir's secret sharing over 2^256 + 297 (docs/spec/masked-sum.md)."""

PRIME = 2**256 + 297


def split(secret, coefficients, points):
    """Return the shares at points of the polynomial with a secret and further coefficients, constant term first."""
    found = []
    for x in points:
        value = 0
        for coefficient in reversed([secret, *coefficients]):
            value = (value * x + coefficient) % PRIME
        found.append(value)
    return found


def at_zero(shares):
    """Return the value at 0 of the polynomial through shares by point."""
    total = 0
    for x, share in shares.items():
        weight = 1
        for other in shares:
            if other != x:
                weight = weight * other * pow(other - x, -1, PRIME) % PRIME
        total = (total + weight * share) % PRIME
    return total


def to_bytes(share):
    """Return a share as it is revealed, 33 bytes."""
    return share.to_bytes(33, "big")
