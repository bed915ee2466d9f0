"""Multi-exponentiation: products of many powers with short exponents, by buckets (Pippenger 1976)."""

from __future__ import annotations

from collections.abc import Sequence

from gmpy2 import mpz

__all__ = ["multi_power"]


def multi_power(bases: Sequence[mpz], exponents: Sequence[int], modulus: mpz) -> mpz:
    """Return the product of ``bases[k] ** exponents[k]`` modulo ``modulus``.

    The time depends on the exponents, which must not be secrets.

    Parameters
    ----------
    bases : sequence of mpz
    exponents : sequence of int
        At least 0, one for each base.
    modulus : mpz
    """
    longest = max((exponent.bit_length() for exponent in exponents), default=0)
    width = _window(len(bases), longest)
    mask, found = (1 << width) - 1, mpz(1)
    for window in reversed(range(-(-longest // width) if longest else 0)):
        for _ in range(width):
            found = found * found % modulus
        buckets: list[mpz | None] = [None] * (mask + 1)
        for base, exponent in zip(bases, exponents, strict=True):
            digit = exponent >> (window * width) & mask
            if digit:
                held = buckets[digit]
                buckets[digit] = base if held is None else held * base % modulus
        # The product of bucket d to the power d: each partial product from the top counts once more.
        below, total = None, None
        for held in reversed(buckets[1:]):
            if held is not None:
                below = held if below is None else below * held % modulus
            if below is not None:
                total = below if total is None else total * below % modulus
        if total is not None:
            found = found * total % modulus
    return found


def _window(count: int, bits: int) -> int:
    """Return the window's width in bits that needs the fewest multiplications."""
    return min(range(1, 17), key=lambda width: -(-bits // width) * (count + 2 ** (width + 1)))
