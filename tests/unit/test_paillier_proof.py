"""Proofs of decryption, pads, and products of many powers."""

import math
from types import SimpleNamespace

import gmpy2
import numpy as np
import pytest
from gmpy2 import mpz
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.paillier import Mode, Packing, encrypt
from coterie.crypto.paillier.decryption import decrypt
from coterie.crypto.paillier.multi_power import multi_power
from coterie.crypto.paillier.pads import contributor_key, pad_sums, pads, sums_hash
from coterie.crypto.paillier.proof import check, prove
from coterie.crypto.verification import VerificationError

from ..paillier_keys import key, obfuscators

PACKING = Packing(1024, 16, 32)
COUNT = 3 * PACKING.slots
SECRET = key("one")
PUBLIC = SECRET.public


@given(
    bases=st.lists(st.integers(1, 2**64), max_size=20),
    data=st.data(),
    modulus=st.integers(2, 2**64),
)
def test_a_product_of_powers_is_that_of_the_powers(bases, data, modulus):
    exponents = [data.draw(st.integers(0, 2**40)) for _ in bases]
    expected = 1 % modulus
    for base, exponent in zip(bases, exponents, strict=True):
        expected = expected * pow(base, exponent, modulus) % modulus
    assert multi_power([mpz(base) for base in bases], exponents, mpz(modulus)) % modulus == expected


@pytest.fixture(scope="module", params=[Mode.KEY_HOLDER, Mode.PUBLIC, Mode.SUBGROUP])
def decrypted(request):
    mode = request.param
    name = "sub" if mode is Mode.SUBGROUP else "one"
    secret = key(name, subgroup=mode is Mode.SUBGROUP)
    codes = np.random.default_rng(0).integers(1, 2**16, COUNT)
    vector = encrypt(codes, PACKING, obfuscators(mode, name), pads=[5, 6, 7])
    plaintexts = decrypt(secret, vector.units, vector.shifts, mode)
    return secret, vector, plaintexts


def test_right_plaintexts_are_proved(decrypted):
    secret, vector, plaintexts = decrypted
    proof = prove(secret, b"about", vector.units, vector.shifts, plaintexts)
    assert len(proof) == 128
    check(secret.public, b"about", vector.units, vector.shifts, plaintexts, proof)


def test_a_part_without_ciphertexts_is_proved_too():
    check(PUBLIC, b"", [], [], [], prove(SECRET, b"", [], [], []))


@settings(max_examples=20, deadline=None)
@given(place=st.integers(0, 2), change=st.integers(1, 2**900))
def test_no_other_plaintexts_pass_with_any_proof_that_their_holder_can_make(decrypted_once, place, change):
    vector, plaintexts = decrypted_once
    lie = list(plaintexts)
    lie[place] = (lie[place] + change) % PUBLIC.n
    honest = prove(SECRET, b"about", vector.units, vector.shifts, plaintexts)
    made = prove(SECRET, b"about", vector.units, vector.shifts, lie)
    for proof in (honest, made):
        with pytest.raises(VerificationError, match="not what is in the ciphertexts"):
            check(PUBLIC, b"about", vector.units, vector.shifts, lie, proof)


@pytest.fixture(scope="module")
def decrypted_once():
    codes = np.random.default_rng(1).integers(1, 2**16, COUNT)
    vector = encrypt(codes, PACKING, obfuscators(Mode.PUBLIC), pads=[1, 2, 3])
    return vector, decrypt(SECRET, vector.units, vector.shifts, vector.mode)


def test_a_proof_is_about_its_ciphertexts_in_their_order_and_its_context_only(decrypted_once):
    vector, plaintexts = decrypted_once
    proof = prove(SECRET, b"about", vector.units, vector.shifts, plaintexts)
    units, shifts = vector.units[::-1], vector.shifts[::-1]
    with pytest.raises(VerificationError):
        check(PUBLIC, b"about", units, shifts, plaintexts[::-1], proof)
    with pytest.raises(VerificationError):
        check(PUBLIC, b"something else", vector.units, vector.shifts, plaintexts, proof)


def test_proofs_and_plaintexts_out_of_range_are_refused(decrypted_once):
    vector, plaintexts = decrypted_once
    size, n = PUBLIC.modulus_bytes, int(PUBLIC.n)
    proof = prove(SECRET, b"", vector.units, vector.shifts, plaintexts)
    p = int(SECRET.factors[0].prime)
    for bad in (b"", proof + b"\0", bytes(size), n.to_bytes(size, "big"), p.to_bytes(size, "big")):
        with pytest.raises(VerificationError, match="out of range"):
            check(PUBLIC, b"", vector.units, vector.shifts, plaintexts, bad)
    for wrong in (plaintexts[:-1], [plaintexts[0] + n, *plaintexts[1:]], [mpz(-1), *plaintexts[1:]]):
        with pytest.raises(VerificationError, match="out of range"):
            check(PUBLIC, b"", vector.units, vector.shifts, wrong, proof)
    assert math.gcd(int.from_bytes(proof), n) == 1


def test_the_proof_is_the_product_of_the_roots_of_the_obfuscators(decrypted_once):
    vector, plaintexts = decrypted_once
    proof = mpz.from_bytes(prove(SECRET, b"", vector.units, vector.shifts, plaintexts), "big")
    # c = (1 + m n) r^n: the n-th power of the proof is what is left of the ciphertexts' product without plaintexts.
    phi = (SECRET.factors[0].prime - 1) * (SECRET.factors[1].prime - 1)
    assert (
        gmpy2.powmod(gmpy2.powmod(proof, PUBLIC.n, PUBLIC.n), gmpy2.invert(PUBLIC.n, phi), PUBLIC.n) == proof
    )


def test_pads_of_a_contributor_are_numbers_below_n_of_its_own_for_each_plan():
    one = contributor_key(bytes(32), "run", bytes(32), b"a" * 32)
    other = contributor_key(bytes(32), "run", bytes(32), b"b" * 32)
    plan, another = b"p" * 32, b"q" * 32
    found = [pads(one, plan, PUBLIC, 9), pads(one, another, PUBLIC, 9), pads(other, plan, PUBLIC, 9)]
    numbers = [number for row in found for number in row]
    assert len(set(numbers)) == 27
    assert all(0 <= number < PUBLIC.n for number in numbers)
    assert max(numbers) > PUBLIC.n // 2
    assert pads(one, plan, PUBLIC, 4) == found[0][:4]


@given(count=st.integers(0, 7), contributors=st.integers(0, 40), data=st.data())
@settings(max_examples=30, deadline=None)
def test_sums_of_pads_are_those_of_the_pads_that_were_sent(count, contributors, data):
    keys = [contributor_key(bytes([n]) * 32, "run", bytes(32), bytes(32)) for n in range(contributors)]
    each = [pads(one, b"p" * 32, PUBLIC, count) for one in keys]
    whole = [sum(row[at] for row in each) % PUBLIC.n for at in range(count)]
    assert pad_sums(keys, b"p" * 32, PUBLIC, count) == whole
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    sent = [np.array(data.draw(flags), np.bool_) for _ in keys]
    some = [
        sum(row[at] for row, own in zip(each, sent, strict=True) if own[at]) % PUBLIC.n for at in range(count)
    ]
    assert pad_sums(keys, b"p" * 32, PUBLIC, count, sent) == some


def test_pads_are_longer_than_any_length_of_n_by_128_bits():
    # 2,064 bits are no whole number of words of 32 bits.
    odd = SimpleNamespace(n=(mpz(1) << 2064) - 1, bits=2064)
    one = contributor_key(bytes(32), "run", bytes(32), b"a" * 32)
    found = pads(one, bytes(32), odd, 20)
    assert max(found) > odd.n // 2
    assert found[:3] == pads(one, bytes(32), odd, 3)


def test_a_hash_of_sums_of_pads_is_about_their_numbers_order_plan_and_place():
    plan, sums = b"p" * 32, [mpz(5), mpz(7)]
    others = [
        sums_hash(b"q" * 32, 0, sums, 128),
        sums_hash(plan, 1, sums, 128),
        sums_hash(plan, 0, sums[::-1], 128),
        sums_hash(plan, 0, [mpz(5), mpz(8)], 128),
        sums_hash(plan, 0, sums[:1], 128),
    ]
    assert len({sums_hash(plan, 0, sums, 128), *others}) == 6
