"""Obfuscators: powers by a table, the four modes, and the pool."""

import math
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from gmpy2 import mpz
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.paillier.elements import join
from coterie.crypto.paillier.fixed_base import FixedBase
from coterie.crypto.paillier.keys import Factor, SecretKey
from coterie.crypto.paillier.obfuscators import HolderObfuscators, Mode, Pool, PublicObfuscators
from coterie.errors import CryptoError

from ..paillier_keys import BITS, key, obfuscators

EVERY = [
    (Mode.KEY_HOLDER, {}),
    (Mode.PUBLIC, {}),
    (Mode.SHORT, {}),
    (Mode.SUBGROUP, {}),
    (Mode.SUBGROUP, {"holder": True}),
    (Mode.KEY_HOLDER, {"subgroup": True}),
    (Mode.PUBLIC, {"subgroup": True}),
]


def elements(source, count: int) -> list[int]:
    """Return obfuscators as numbers below n^2."""
    return [int(one) for one in join(*zip(*source.draw(count), strict=True), source.public.n)]


def give(monkeypatch: pytest.MonkeyPatch, *drawn: bytes) -> None:
    """Let the operating system's randomness be this."""
    left = list(drawn)

    def urandom(size: int) -> bytes:
        found = left.pop(0)
        assert len(found) == size
        return found

    monkeypatch.setattr(os, "urandom", urandom)


# --- powers ------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(2, 1 << 96).map(lambda number: number | 1), st.integers(2, 1 << 200), st.data())
def test_powers_by_the_table_are_powers(modulus: int, base: int, data) -> None:
    while math.gcd(base, modulus) > 1:
        base += 1
    size = data.draw(st.integers(1, 4))
    table = FixedBase(mpz(base % modulus**2), mpz(modulus), size)
    exponents = data.draw(st.lists(st.integers(0, 256**size - 1), max_size=5))
    for exponent in [0, 1, 256**size - 1, *exponents]:
        found = table.power(exponent.to_bytes(size, "little"))
        assert found == pow(base, exponent, modulus**2)


def test_an_exponent_of_another_length_is_no_power() -> None:
    table = FixedBase(mpz(3), mpz(35), 2)
    for exponent in (b"", b"\1", b"\1\2\3"):
        with pytest.raises(ValueError, match="zip"):
            table.power(exponent)


# --- modes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "which"), EVERY)
def test_every_obfuscator_hides_zero_and_none_is_given_twice(mode: Mode, which) -> None:
    source = obfuscators(mode, **which)
    secret = key(subgroup=source.public.subgroup)
    phi = int((secret.factors[0].prime - 1) * (secret.factors[1].prime - 1))
    n_squared = int(source.public.n_squared)
    drawn = elements(source, 7)
    assert len(set(drawn)) == len(drawn)
    assert source.mode is mode
    for one in drawn:
        assert 1 < one < n_squared
        # The n-th powers modulo n^2 are what phi(n) takes to 1.
        assert pow(one, phi, n_squared) == 1


def test_a_holder_of_the_key_draws_from_all_n_th_powers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponent 1 gives the generator, and its order is all of p - 1 and q - 1."""
    source = obfuscators(Mode.KEY_HOLDER)
    one = (1).to_bytes(BITS // 16, "little")
    give(monkeypatch, one, one)
    (drawn,) = elements(source, 1)
    for prime, order in key().factors:
        square = int(prime) ** 2
        assert pow(drawn, int(prime) - 1, square) == 1
        for part in (2, order, (prime - 1) // (2 * order)):
            assert pow(drawn, int((prime - 1) // part), square) != 1


def test_exponents_of_a_holder_are_drawn_again_from_the_order_on(monkeypatch: pytest.MonkeyPatch) -> None:
    source, size = obfuscators(Mode.KEY_HOLDER), BITS // 16
    (p, _), (q, _) = key().factors
    last = int(p) - 2, int(q) - 2
    give(
        monkeypatch,
        (int(p) - 1).to_bytes(size, "little"),
        b"\xff" * size,
        last[0].to_bytes(size, "little"),
        (int(q) - 1).to_bytes(size, "little"),
        last[1].to_bytes(size, "little"),
        *((1).to_bytes(size, "little"), (1).to_bytes(size, "little")),
    )
    inverse, generator = elements(source, 2)
    assert inverse * generator % int(source.public.n_squared) == 1


@pytest.mark.parametrize(
    ("mode", "subgroup", "size"),
    [
        (Mode.PUBLIC, False, BITS // 16),
        (Mode.SHORT, False, 64),
        (Mode.SHORT, True, 64),
        (Mode.SUBGROUP, True, 96),
    ],
)
def test_the_public_draw_powers_of_the_base(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, subgroup: bool, size: int
) -> None:
    source = obfuscators(mode, subgroup=subgroup)
    public = source.public
    n, exponents = int(public.n), [os.urandom(size), bytes(size)]
    base = int(public.base if mode is Mode.SUBGROUP else public.derived_base)
    give(monkeypatch, *exponents)
    assert elements(source, 2) == [
        pow(pow(base, n, n * n), int.from_bytes(one, "little"), n * n) for one in exponents
    ]


def test_the_derived_base_is_minus_a_square_and_depends_on_the_modulus() -> None:
    secret = key()
    base = int(secret.public.derived_base)
    for prime, _ in secret.factors:
        # -1 is no square modulo a prime that is 3 modulo 4.
        assert pow(base, (int(prime) - 1) // 2, int(prime)) == int(prime) - 1
    assert base != key("other").public.derived_base


def test_obfuscators_of_the_subgroup_have_its_order() -> None:
    secret = key(subgroup=True)
    order = int(secret.factors[0].order * secret.factors[1].order)
    for holder in (False, True):
        for one in elements(obfuscators(Mode.SUBGROUP, holder=holder), 3):
            assert one != 1
            assert pow(one, order, int(secret.public.n_squared)) == 1


def test_modes_that_do_not_fit_the_key_are_refused() -> None:
    standard = key()
    for build, mode in [(HolderObfuscators, Mode.PUBLIC), (HolderObfuscators, Mode.SHORT)]:
        with pytest.raises(CryptoError, match=mode.name):
            build(standard, mode)
    with pytest.raises(CryptoError, match="need the secret key"):
        PublicObfuscators(standard.public, Mode.KEY_HOLDER)
    with pytest.raises(CryptoError, match="need a subgroup key"):
        HolderObfuscators(standard, Mode.SUBGROUP)
    with pytest.raises(CryptoError, match="need a subgroup key"):
        PublicObfuscators(standard.public, Mode.SUBGROUP)
    bare = SecretKey(standard.public, *(Factor(factor.prime, mpz(0)) for factor in standard.factors))
    with pytest.raises(CryptoError, match="only decrypts"):
        HolderObfuscators(bare)


def test_modes_with_a_further_assumption_say_so() -> None:
    assert [bool(mode.assumption) for mode in Mode] == [False, False, True, True]
    assert "512 bits" in Mode.SHORT.assumption
    assert "320 bits" in Mode.SUBGROUP.assumption


# --- the pool ----------------------------------------------------------------------------------------------------


class Counted:
    """Gives numbers from 0 on instead of obfuscators."""

    mode = Mode.PUBLIC

    def __init__(self) -> None:
        self.public = key().public
        self._next = count()

    def draw(self, number: int) -> list[mpz]:
        return [mpz(next(self._next)) for _ in range(number)]


def test_a_pool_gives_each_of_its_obfuscators_once_and_draws_what_it_lacks() -> None:
    pool = Pool(Counted())
    pool.fill(5)
    assert len(pool) == 5
    first = pool.draw(3)
    assert len(pool) == 2
    second = pool.draw(4)
    assert len(pool) == 0
    assert sorted(first + second) == list(range(7))
    assert pool.draw(1) == [7]
    assert pool.draw(0) == []
    assert (pool.mode, pool.public) == (Mode.PUBLIC, key().public)


def test_threads_never_take_the_same_obfuscator() -> None:
    pool = Pool(Counted())
    pool.fill(4000)
    with ThreadPoolExecutor(4) as threads:
        taken = [one for part in threads.map(lambda _: pool.draw(10), range(400)) for one in part]
    assert len(set(taken)) == 4000


def test_a_forked_child_has_none_of_its_parents_obfuscators() -> None:
    pool = Pool(Counted())
    pool.fill(9)
    child = os.fork()
    if not child:
        os._exit(len(pool))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(pool) == 9


def test_tables_of_a_secret_key_and_pools_are_never_pickled() -> None:
    source = obfuscators(Mode.KEY_HOLDER)
    pool = Pool(source)
    for one in (source, pool):
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(one)


def test_nothing_that_is_drawn_is_printed() -> None:
    pool = Pool(obfuscators(Mode.KEY_HOLDER))
    pool.fill(2)
    said = f"{pool!r} {obfuscators(Mode.KEY_HOLDER)!r} {obfuscators(Mode.PUBLIC)!r}"
    assert said.startswith("<Pool of 2 for <PublicKey")
    assert not [part for pair in pool.draw(2) for part in pair if str(part) in said or f"{part:x}" in said]
