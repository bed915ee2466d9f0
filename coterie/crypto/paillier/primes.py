"""Prime generation for Paillier keys, ``p = 2 k p' + 1`` with primes ``k`` and ``p'``, and uniform integers.

All randomness is the operating system's.  Primality is tested by GMP's Baillie-PSW with further rounds of Miller-Rabin:
no composite is known that passes, but a pass is no proof.
"""

from __future__ import annotations

import os
from functools import cache

import gmpy2
from gmpy2 import mpz

__all__ = ["SMALL_PRIMES_BELOW", "draw_prime", "has_small_factor", "is_prime", "uniform"]

SMALL_PRIMES_BELOW = 1 << 16
"""Bound of the prime factors that ``has_small_factor`` looks for."""

_ROUNDS = 25  # the first 24 are Baillie-PSW


def uniform(below: mpz) -> mpz:
    """Draw an integer uniformly from [0, ``below``), by rejection."""
    bits = int(below).bit_length()
    excess = -bits % 8
    while True:
        drawn = mpz.from_bytes(os.urandom((bits + 7) // 8), "little") >> excess
        if drawn < below:
            return drawn


@cache
def _small_primes() -> mpz:
    """Return the product of the odd primes below 2^16."""
    return gmpy2.primorial(SMALL_PRIMES_BELOW) // 2


def has_small_factor(number: mpz) -> bool:
    """Return whether an odd prime below 2^16 divides a number above 2^16."""
    return bool(gmpy2.gcd(number, _small_primes() % number) != 1)


def is_prime(number: mpz) -> bool:
    """Return whether a number passes the primality test; no composite is known that does."""
    return bool(gmpy2.is_prime(number, _ROUNDS))


def draw_prime(bits: int, order_bits: int) -> tuple[mpz, mpz]:
    """Draw a prime ``p = 2 k p' + 1`` whose three highest bits are set.

    ``p'`` is drawn once and ``k`` until ``p`` is prime.  Then p = 3 modulo 4, and the order of every element but 1 and
    -1 has ``k`` or ``p'`` as a factor.

    Parameters
    ----------
    bits : int
        Length of p.
    order_bits : int
        Length of k.

    Returns
    -------
    p, k : mpz
    """
    rest_bits = bits - 1 - order_bits
    # Four bits are set in p', so a fifteenth of all k gives a p of the right size.
    lowest = mpz(15) << (rest_bits - 4)
    while True:
        rest = (lowest + uniform(mpz(1) << (rest_bits - 4))) | 1
        if not has_small_factor(rest) and is_prime(rest):
            break
    lowest, end = -((mpz(-7) << (bits - 4)) // rest), mpz(1) << order_bits
    while True:
        order = (lowest + uniform(end - lowest)) | 1
        # Most candidates are composite, which is quicker to see of the shorter number.
        if is_prime(order):
            prime = 2 * order * rest + 1
            if not has_small_factor(prime) and is_prime(prime):
                return prime, order
