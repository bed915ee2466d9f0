"""Elements modulo n^2 as pairs of a unit and a shift."""

import math

import pytest
from gmpy2 import mpz
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.paillier.elements import inverses, join, split

moduli = st.integers(3, 1 << 96).map(lambda number: mpz(number | 1))


@st.composite
def elements(draw):
    """A modulus n and some invertible numbers below n^2."""
    modulus = draw(moduli)
    found = draw(st.lists(st.integers(1, int(modulus) ** 2 - 1), max_size=6))
    return modulus, [mpz(one) for one in found if math.gcd(one, modulus) == 1]


@given(elements())
def test_a_pair_stands_for_its_element_and_no_other(case) -> None:
    n, numbers = case
    units, shifts = split(numbers, n)
    assert all(0 < unit < n and 0 <= shift < n for unit, shift in zip(units, shifts, strict=True))
    pairs = zip(units, shifts, strict=True)
    assert [unit * (1 + shift * n) % n**2 for unit, shift in pairs] == numbers
    assert join(units, shifts, n) == numbers


@given(elements())
def test_products_multiply_units_and_add_shifts(case) -> None:
    n, numbers = case
    units, shifts = split(numbers, n)
    (unit,), (above,) = split([mpz(math.prod(units)) % n**2], n)
    assert join([unit], [(above + sum(shifts)) % n], n) == [math.prod(numbers) % n**2]


@given(elements())
def test_inverses_are_found_together(case) -> None:
    n, numbers = case
    found = inverses(numbers, n)
    assert len(found) == len(numbers)
    assert all(value * inverse % n == 1 for value, inverse in zip(numbers, found, strict=True))


@pytest.mark.parametrize("number", [0, 35, 5, 7, 35 * 4, 10])
def test_what_is_not_invertible_has_no_pair(number: int) -> None:
    with pytest.raises(ZeroDivisionError):
        split([mpz(2), mpz(number), mpz(3)], mpz(35))
