"""Fixed-base exponentiation: many powers of one element modulo m^2, by a table.

The exponent's bytes are its digits: row i of the table holds the base to the powers d 256^i, and a power is the product
of one entry of each row.

Entries are pairs of a unit and a shift (``elements``).  Only units are multiplied; they are half as long as m^2, so the
product of two needs no reduction, which halves the work.
"""

from __future__ import annotations

import gmpy2
from gmpy2 import mpz

__all__ = ["FixedBase"]

_DIGITS = 256


class FixedBase:
    """A table of powers of one element, with 256 entries as long as m^2 for each byte of the exponent.

    Look-ups take time that depends on the exponent, through the caches of the processor.

    Parameters
    ----------
    base : mpz
        Invertible modulo m.
    modulus : mpz
        The number m, not its square.
    exponent_bytes : int
        Bytes of every exponent.
    """

    __slots__ = ("_modulus", "_shifts", "_square", "_units", "exponent_bytes")

    def __init__(self, base: mpz, modulus: mpz, exponent_bytes: int) -> None:
        self.exponent_bytes = exponent_bytes
        self._modulus, self._square = modulus, modulus * modulus
        self._units: list[list[mpz]] = []
        self._shifts: list[list[mpz]] = []
        rest, unit = gmpy2.f_divmod(base, modulus)
        inverse = gmpy2.invert(unit, modulus)
        step = unit, inverse, rest * inverse % modulus
        for _ in range(exponent_bytes):
            entry = mpz(1), mpz(1), mpz(0)
            units, shifts = [], []
            for _ in range(_DIGITS):
                units.append(entry[0])
                shifts.append(entry[2])
                entry = self._product(entry, step)
            self._units.append(units)
            self._shifts.append(shifts)
            step = entry

    def _product(self, one: tuple[mpz, mpz, mpz], other: tuple[mpz, mpz, mpz]) -> tuple[mpz, mpz, mpz]:
        """Return the product of two elements, each given as unit, the unit's inverse modulo m, and shift."""
        # a1 a2 = a + c m = a (1 + c / a m)
        carry, unit = gmpy2.f_divmod(one[0] * other[0], self._modulus)
        inverse = one[1] * other[1] % self._modulus
        return unit, inverse, (one[2] + other[2] + carry * inverse) % self._modulus

    def power(self, exponent: bytes) -> mpz:
        """Return the base to the power of a little-endian exponent, modulo m^2."""
        units = [row[digit] for row, digit in zip(self._units, exponent, strict=True)]
        square, product = self._square, mpz(1)
        if len(units) % 2:
            product = units.pop()
        for one, other in zip(units[::2], units[1::2], strict=True):
            product = product * (one * other) % square
        shift = sum([row[digit] for row, digit in zip(self._shifts, exponent, strict=True)]) % self._modulus
        return product * (1 + shift * self._modulus) % square
