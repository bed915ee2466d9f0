"""Representation of invertible elements modulo n^2 as pairs: ``c = a (1 + b n)``, *unit* a and *shift* b below n.

The pair is unique, because ``1 + n`` generates the elements that are 1 modulo n, and ``(1 + n)^b = 1 + b n``.
Multiplying elements multiplies units and adds shifts, so a plaintext is added to a shift, and a long product takes
multiplications of half the length only.  At the end the product of units is reduced below n, and its quotient goes to
the shift.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import gmpy2
from gmpy2 import mpz

__all__ = ["inverses", "join", "split"]


def split(elements: Iterable[mpz], modulus: mpz) -> tuple[list[mpz], list[mpz]]:
    """Return the units and the shifts of elements.

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
    """Return the elements modulo n^2 that have these units and shifts."""
    return [unit + unit * shift % modulus * modulus for unit, shift in zip(units, shifts, strict=True)]


def inverses(values: Sequence[mpz], modulus: mpz) -> list[mpz]:
    """Return the inverse of each value, with one inversion in all (Montgomery).

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
