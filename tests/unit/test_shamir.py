"""Secret sharing, against a small implementation by the textbook."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto import shamir
from coterie.errors import CryptoError

P = 2**256 + 297

secrets = st.binary(min_size=32, max_size=32)


@st.composite
def shared(draw, most=40):
    """A threshold, points of holders, and some secrets."""
    threshold = draw(st.integers(1, most))
    largest = draw(st.sampled_from([most + 12, shamir._TABLE, shamir._TABLE + 1, 2**32 - 1]))
    holders = draw(
        st.lists(st.integers(1, largest), min_size=threshold, max_size=threshold + 12, unique=True)
    )
    return threshold, holders, draw(st.lists(secrets, min_size=1, max_size=3))


def lagrange(shares: dict[int, int], at: int) -> int:
    """The value at a point of the polynomial through shares, one fraction at a time."""
    total = 0
    for x, y in shares.items():
        top = bottom = 1
        for other in shares:
            if other != x:
                top = top * (at - other) % P
                bottom = bottom * (x - other) % P
        total += y * top * pow(bottom, P - 2, P)
    return total % P


@given(shared(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_any_threshold_of_shares_gives_the_secret(sharing, random):
    threshold, holders, values = sharing
    shares = shamir.split(values, threshold, holders)
    for place, secret in enumerate(values):
        chosen = random.sample(range(len(holders)), threshold)
        some = {holders[i]: shares[i][place] for i in chosen}
        assert shamir.reconstruct(some) == int.from_bytes(secret)
        assert lagrange(some, 0) == int.from_bytes(secret)


@given(shared(most=10))
@settings(deadline=None, max_examples=25)
def test_every_share_lies_on_the_polynomial_through_threshold_others(sharing):
    threshold, holders, values = sharing
    shares = shamir.split(values, threshold, holders)
    first = {holders[i]: shares[i][0] for i in range(threshold)}
    for holder, share in zip(holders, shares, strict=True):
        assert 0 <= share[0] < P
        assert lagrange(first, holder) == share[0] == shamir.interpolate(first, holder)


@given(shared(), st.data())
@settings(deadline=None, max_examples=30)
def test_nearly_the_same_holders_give_the_secret_by_the_weights_of_all_of_them(sharing, data):
    threshold, holders, values = sharing
    shares = dict(zip(holders, shamir.split(values, threshold, holders), strict=True))
    among = tuple(holders[: threshold + 1])
    left = data.draw(st.sampled_from(among))
    some = {x: shares[x][0] for x in among if x != left}
    if len(some) == threshold:
        assert shamir.reconstruct(some, among) == int.from_bytes(values[0])


@given(secrets, secrets, st.integers(2, 20))
@settings(deadline=None, max_examples=30)
def test_one_share_too_few_fits_every_secret(secret, other, threshold):
    holders = list(range(1, threshold + 1))
    shares = shamir.split([secret], threshold, holders)
    short = {x: share[0] for x, share in zip(holders[1:], shares[1:], strict=True)}
    # With the missing share chosen to suit, the same shares give any other secret.
    fitting = lagrange({0: int.from_bytes(other), **short}, 1)
    assert shamir.reconstruct({1: fitting, **short}) == int.from_bytes(other)


@given(st.integers(1, 20), st.integers(20, 60), st.data())
@settings(deadline=None, max_examples=40)
def test_shares_are_the_values_of_the_polynomial_that_was_drawn(threshold, most, data):
    coefficients = st.lists(st.integers(0, P - 1), min_size=threshold, max_size=threshold)
    rows = data.draw(st.lists(coefficients, min_size=1, max_size=3))

    def value(row, x):
        terms, factor = 0, 1
        for degree, coefficient in enumerate(row):
            terms += coefficient * factor
            factor *= x - degree
        return terms % P

    holders = data.draw(st.permutations(range(1, most + 1)))[:threshold]
    expected = [tuple(value(row, x) for row in rows) for x in holders]
    assert shamir._tabulate(rows, holders, max(holders)) == expected
    assert shamir._evaluate(rows, holders, max(holders)) == expected


def test_the_table_s_last_point_and_longest_polynomial_are_right():
    rows, holders = [[P - 1] * shamir._TABLE] * 2, list(range(1, shamir._TABLE + 1))
    assert shamir._tabulate(rows, holders, shamir._TABLE) == [
        shamir._evaluate(rows, [x], x)[0] for x in holders
    ]


def test_every_polynomial_can_be_drawn_in_one_way():
    # Over a small field all of them are counted: as many as there are coefficients, and each once.
    small = 7
    drawn = {
        tuple((a + b * x + c * x * (x - 1)) % small for x in range(small))
        for a in range(small)
        for b in range(small)
        for c in range(small)
    }
    powers = {
        tuple((a + b * x + c * x * x) % small for x in range(small))
        for a in range(small)
        for b in range(small)
        for c in range(small)
    }
    assert drawn == powers
    assert len(drawn) == small**3


def test_a_wrong_share_gives_another_secret():
    secret = os.urandom(32)
    shares = {x: share[0] for x, share in enumerate(shamir.split([secret], 5, range(1, 8)), start=1)}
    some = {x: shares[x] for x in (1, 2, 4, 5, 7)}
    some[4] = (some[4] + 1) % P
    assert shamir.reconstruct(some) != int.from_bytes(secret)


def test_coefficients_are_drawn_again_when_they_are_not_below_the_prime(monkeypatch):
    too_large, right = b"\xff" * 33, (5).to_bytes(33)
    drawn = iter([too_large, P.to_bytes(33), right])
    rest = os.urandom

    def urandom(count):
        return b"".join(next(drawn, rest(33)) for _ in range(count // 33))

    monkeypatch.setattr(shamir.os, "urandom", urandom)
    (share,) = shamir.split([bytes(32)], 2, [1, 2])[:1]
    assert share == (5,)


def test_the_same_secret_is_shared_differently_each_time():
    secret = os.urandom(32)
    assert shamir.split([secret], 2, [1, 2]) != shamir.split([secret], 2, [1, 2])


def test_with_a_threshold_of_one_the_share_is_the_secret():
    secret = os.urandom(32)
    assert shamir.split([secret], 1, [7, 9]) == [(int.from_bytes(secret),)] * 2


def test_the_modulus_is_the_first_prime_above_all_secrets():
    def passes(n: int, base: int) -> bool:
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        value = pow(base, odd, n)
        return value in (1, n - 1) or any((value := value * value % n) == n - 1 for _ in range(twos - 1))

    assert shamir.PRIME == P
    assert all(passes(P, base) for base in range(2, 60))
    # To base 3: 2^256 + 1 is a Fermat number, which passes to base 2 without being a prime.
    assert not any(passes(2**256 + step, 3) for step in range(1, 297, 2))


@pytest.mark.parametrize(
    ("values", "threshold", "holders"),
    [
        ([bytes(31)], 1, [1]),
        ([bytes(32)], 0, [1]),
        ([bytes(32)], 3, [1, 2]),
        ([bytes(32)], 2, [1, 1]),
        ([bytes(32)], 2, [0, 1]),
        ([bytes(32)], 2, [1, 2**32]),
    ],
    ids=["short secret", "no threshold", "few holders", "twice", "zero", "large"],
)
def test_what_cannot_be_shared_is_refused(values, threshold, holders):
    with pytest.raises(CryptoError):
        shamir.split(values, threshold, holders)


def test_weights_of_a_point_that_appears_twice_are_refused():
    with pytest.raises(CryptoError):
        shamir.weights([3, 4, 3])
