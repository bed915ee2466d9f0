"""Invertible elements modulo n^2 as pairs: ``c = a (1 + b n)`` with a *unit* a and a *shift* b, both below n.

Each has one such pair, because ``1 + n`` generates what is 1 modulo n, and ``(1 + n)^b = 1 + b n``.  Multiplying
elements multiplies units and adds shifts, so what is encrypted is added to a shift, and a long product takes products
of half the length only.  The product of units is brought below n at the end: what is above goes to the shift.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import gmpy2
from gmpy2 import mpz

__all__ = ["inverses", "join", "split"]


def split(elements: Iterable[mpz], modulus: mpz) -> tuple[list[mpz], list[mpz]]:
    """Return units and shifts.

    Raises
    ------
    ZeroDivisionError
        When an element is not invertible.
    """
    pairs = [gmpy2.f_divmod(element, modulus) for element in elements]
    units = [unit for _, unit in pairs]
    # a + c n = a (1 + c / a n)
    found = zip(pairs, inverses(units, modulus), strict=True)
    return units, [above * inverse % modulus for (above, _), inverse in found]


def join(units: Iterable[mpz], shifts: Iterable[mpz], modulus: mpz) -> list[mpz]:
    """Return elements modulo n^2."""
    return [unit + unit * shift % modulus * modulus for unit, shift in zip(units, shifts, strict=True)]


def inverses(values: Sequence[mpz], modulus: mpz) -> list[mpz]:
    """Return the inverse of each value, from that of their product (Montgomery).

    Raises
    ------
    ZeroDivisionError
        When a value is not invertible.
    """
    before, product = [], mpz(1)
    for value in values:
        before.append(product)
        product = product * value % modulus
    inverse, found = gmpy2.invert(product, modulus), []
    for value, rest in zip(reversed(values), reversed(before), strict=True):
        found.append(inverse * rest % modulus)
        inverse = inverse * value % modulus
    return found[::-1]
