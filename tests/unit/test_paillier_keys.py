"""Paillier keys: their form, what is refused, and that nothing shows them."""

import math
import pickle

import pytest
from gmpy2 import mpz
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.paillier import primes
from coterie.crypto.paillier.keys import Factor, PublicKey, SecretKey, generate
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

from ..paillier_keys import BITS, SET_PUBLIC, key


def record(public: PublicKey, **changes) -> PublicKey:
    """Return a record with some of its fields changed."""
    fields = {name: getattr(public, name) for name in ("n", "set_public", "bits", "created", "run", "base")}
    return PublicKey(**fields | changes, comparison=True)


def require_form(secret: SecretKey, bits: int, order_bits: int) -> None:
    """Assert what the module says of the factors."""
    (p, k), (q, other) = ((int(factor.prime), int(factor.order)) for factor in secret.factors)
    n = int(secret.public.n)
    assert p * q == n
    assert n.bit_length() == secret.public.bits == bits
    assert k != other
    for prime, order in ((p, k), (q, other)):
        rest, nothing = divmod(prime - 1, 2 * order)
        assert nothing == 0
        assert all(primes.is_prime(mpz(one)) for one in (prime, order, rest))
        assert prime.bit_length() == bits // 2
        assert prime >> (bits // 2 - 3) == 7
        assert order.bit_length() == order_bits
        assert prime % 4 == 3
    assert math.gcd(p - 1, q - 1) == 2
    assert math.gcd(n, (p - 1) * (q - 1)) == 1


def test_both_factors_have_the_form_that_modes_and_security_rest_on() -> None:
    require_form(key(), BITS, 40)
    assert not key().public.subgroup


def test_a_subgroup_key_has_a_base_of_exactly_the_two_prime_orders() -> None:
    secret = key(subgroup=True)
    require_form(secret, BITS, 320)
    base = int(secret.public.base)
    for prime, order in secret.factors:
        # A prime order is exact where the element is not 1.
        assert base % int(prime) != 1
        assert pow(base, int(order), int(prime)) == 1


def test_a_key_has_3072_bits_unless_said_otherwise() -> None:
    secret = generate("run", SET_PUBLIC)
    require_form(secret, 3072, 40)
    secret.check()


def test_two_keys_have_nothing_in_common() -> None:
    one, other = key(), key("other")
    assert math.gcd(int(one.public.n), int(other.public.n)) == 1
    assert one.public != other.public
    assert {factor.order for factor in one.factors}.isdisjoint(factor.order for factor in other.factors)


@pytest.mark.parametrize(("bits", "comparison"), [(1024, False), (2032, False), (1008, True), (2056, False)])
def test_short_and_odd_lengths_are_refused_before_anything_is_drawn(bits: int, comparison: bool) -> None:
    with pytest.raises(CryptoError, match=f"of {bits} bits"):
        generate("run", SET_PUBLIC, bits=bits, comparison=comparison)


def test_a_short_key_is_refused_by_who_does_not_compare_with_a_paper() -> None:
    public = key().public
    with pytest.raises(CryptoError, match="comparisons with the papers"):
        PublicKey(public.n, public.set_public, public.bits, public.created, public.run)


def test_each_field_of_the_record_is_in_its_id() -> None:
    # The base must stay below the other modulus.
    keys = (key(subgroup=True).public, key("other", subgroup=True).public)
    public, other = sorted(keys, key=lambda one: one.n)
    changes = {
        "n": other.n,
        "set_public": bytes(32),
        "created": public.created + 1,
        "run": "another run",
        "base": public.base**2 % public.n,
    }
    ids = {record(public, **{name: value}).key_id for name, value in changes.items()}
    assert public.key_id not in ids
    assert len(ids) == len(changes)
    assert record(public) == public
    assert hash(record(public)) == hash(public)


def test_a_record_that_cannot_be_right_is_refused() -> None:
    public = key(subgroup=True).public
    n, top = public.n, mpz(1) << (BITS - 1)
    factor = next(int(one.prime) for one in key(subgroup=True).factors)
    with_small_factor = (top // 65521 + 1 | 1) * 65521
    assert with_small_factor.bit_length() == BITS
    for changes, said in [
        ({"n": n + 1}, "even or does not have the declared"),
        ({"n": n >> 1 | 1}, "even or does not have the declared"),
        ({"n": n << 1 | 1}, "even or does not have the declared"),
        ({"n": with_small_factor}, "a factor below 65536"),
        ({"set_public": bytes(31)}, "set key has 31 bytes"),
        ({"base": n}, "base of the subgroup"),
        ({"base": -public.base}, "base of the subgroup"),
        ({"base": mpz(1)}, "base of the subgroup"),
        ({"base": n - 1}, "base of the subgroup"),
        ({"base": mpz(factor)}, "base of the subgroup"),
        ({"base": mpz(factor + 1)}, "base of the subgroup"),
    ]:
        with pytest.raises(VerificationError, match=said) as caught:
            record(public, **changes)
        assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("subgroup", [False, True])
def test_a_secret_key_comes_back_from_its_bytes(subgroup: bool) -> None:
    secret = key(subgroup=subgroup)
    content = secret.to_bytes()
    assert len(content) == BITS // 8 + 2 * (40 if subgroup else 5)
    again = SecretKey.from_bytes(secret.public, content)
    assert again.factors == secret.factors
    assert again.to_bytes() == content


def test_bytes_of_another_key_or_damaged_ones_are_refused() -> None:
    secret, other = key(), key("other")
    content = secret.to_bytes()
    for damaged, reason in [
        (content[:-1], Reason.MALFORMED),
        (content + b"\0", Reason.MALFORMED),
        (other.to_bytes(), Reason.WRONG_KEY),
        (bytes(len(content)), Reason.WRONG_KEY),
        (bytes([content[0] ^ 1]) + content[1:], Reason.WRONG_KEY),
        (content[:-1] + bytes([content[-1] ^ 2]), Reason.MALFORMED),
        (content[:-5] + bytes(5), Reason.MALFORMED),
        (content[: BITS // 8] + content[-5:] + content[-10:-5], Reason.MALFORMED),
    ]:
        with pytest.raises(VerificationError) as caught:
            SecretKey.from_bytes(secret.public, damaged)
        assert caught.value.reason is reason


def test_one_and_the_modulus_are_no_factors() -> None:
    public = key().public
    with pytest.raises(VerificationError, match="two factors"):
        SecretKey(public, Factor(mpz(1), mpz(0)), Factor(public.n, mpz(0)))
    with pytest.raises(VerificationError, match="two factors"):
        SecretKey(public, Factor(mpz(-1), mpz(0)), Factor(-public.n, mpz(0)))


K = mpz(2**40 - 87)
"""A prime."""


def factor_with(offset: int, k: mpz = K, lead: int = 15 << 467) -> Factor:
    """Return the prime 2 k r + 1 whose r is so far above a number: it is prime for the offsets below."""
    found = 2 * k * (lead + offset) + 1
    assert primes.is_prime(k)
    assert primes.is_prime(found)
    assert found.bit_length() == BITS // 2
    return Factor(found, k)


def test_factors_of_another_size_fail_the_check() -> None:
    lower = factor_with(78903, lead=13 << 467)
    shorter = factor_with(55811, k=mpz(2**39 - 7), lead=15 << 468)
    right = key("other").factors[0]
    for wrong, said in [(lower, "half its length"), (shorter, "no order of 40 bits")]:
        assert primes.is_prime(wrong.rest)
        secret = SecretKey(record(key().public, n=wrong.prime * right.prime), wrong, right)
        with pytest.raises(VerificationError, match=said):
            secret.check()


def test_factors_that_are_primes_of_another_form_fail_the_check() -> None:
    wrong, right = factor_with(1661), key("other").factors[0]
    assert not primes.is_prime(wrong.rest)
    public = record(key().public, n=wrong.prime * right.prime)
    with pytest.raises(VerificationError, match="not of the form"):
        SecretKey(public, wrong, right).check()


def test_factors_that_share_an_order_fail_the_check() -> None:
    p, q = factor_with(34301), factor_with(191321)
    for one in (p, q):
        assert primes.is_prime(one.rest)
        right = key("other").factors[0]
        SecretKey(record(key().public, n=one.prime * right.prime), one, right).check()
    with pytest.raises(VerificationError, match="different primes"):
        SecretKey(record(key().public, n=p.prime * q.prime), p, q).check()


def test_a_base_of_another_order_fails_the_check() -> None:
    secret = key(subgroup=True)
    n = secret.public.n
    for base in (mpz(4), secret.public.base * 4 % n, n - secret.public.base):
        with pytest.raises(VerificationError, match="base of the subgroup"):
            SecretKey(record(secret.public, base=base), *secret.factors).check()


def test_a_key_whose_form_is_not_known_fails_the_check_and_has_no_bytes() -> None:
    secret = key()
    bare = SecretKey(secret.public, *(Factor(factor.prime, mpz(0)) for factor in secret.factors))
    assert secret.own
    assert not bare.own
    with pytest.raises(VerificationError):
        bare.check()
    with pytest.raises(CryptoError, match="made elsewhere"):
        bare.to_bytes()


def test_the_factors_appear_in_no_text() -> None:
    secret = key()
    said = [repr(secret), str(secret), f"{secret}", repr(secret.public)]
    for damaged in (secret.to_bytes()[:-1], key("other").to_bytes(), secret.to_bytes()[:-5] + bytes(5)):
        with pytest.raises(VerificationError) as caught:
            SecretKey.from_bytes(secret.public, damaged)
        said.append(str(caught.value))
    parts = [part for one in (secret, key("other")) for factor in one.factors for part in factor]
    hidden = [str(part) for part in parts] + [f"{part:x}" for part in parts]
    assert not [part for part in hidden for text in said if part in text]


def test_a_secret_key_is_never_pickled() -> None:
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(key())


@given(st.integers(1, 1 << 80))
def test_what_is_drawn_is_below(below: int) -> None:
    assert 0 <= primes.uniform(mpz(below)) < below


def test_everything_below_is_drawn_and_what_is_not_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Eight bits: 250 and above are drawn again, and nothing is folded back.
    drawn = iter(bytes([255, 250, 249, 0, 251, 7]))
    monkeypatch.setattr("os.urandom", lambda size: bytes(next(drawn) for _ in range(size)))
    assert [primes.uniform(mpz(250)) for _ in range(3)] == [249, 0, 7]


@given(st.integers(1 << 17, 1 << 40))
def test_small_factors_are_found(number: int) -> None:
    odd = number | 1
    expected = any(odd % factor == 0 for factor in range(3, 1 << 16, 2))
    assert primes.has_small_factor(mpz(odd)) == expected


@given(st.integers(2, 10_000))
def test_primes_are_told_from_other_numbers(number: int) -> None:
    assert primes.is_prime(mpz(number)) == all(number % factor for factor in range(2, math.isqrt(number) + 1))
