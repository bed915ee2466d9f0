"""Encrypted vectors: what is added under encryption is what is added in clear."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.paillier import HolderObfuscators, PublicObfuscators, generate
from coterie.crypto.paillier.decryption import decrypt
from coterie.crypto.paillier.obfuscators import Mode, Pool
from coterie.crypto.paillier.packing import Packing
from coterie.crypto.paillier.vector import EncryptedVector, RunningSum, decrypt_vector, encrypt
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

from ..paillier_keys import BITS, SET_PUBLIC, key, obfuscators

PACKING = Packing(BITS, 16, 32)
SUMS = (Mode.KEY_HOLDER, Mode.PUBLIC, Mode.SHORT)


def drawn(seed: int, count: int, packing: Packing = PACKING) -> np.ndarray:
    """Return codes from a seed."""
    return np.random.default_rng(seed).integers(1, 2**packing.code_bits, count, dtype=np.uint32)


def pads_of(seed: int, count: int) -> list[int]:
    """Return pads from a seed, often at their bounds."""
    rng, n = np.random.default_rng(seed), int(key().public.n)
    return [
        (0, n - 1, int.from_bytes(rng.bytes(BITS // 8 + 16)) % n)[min(int(rng.integers(0, 6)), 2)]
        for _ in range(PACKING.ciphertexts(count))
    ]


def vector(seed: int, size: int = 50, mode: Mode = Mode.KEY_HOLDER, **which) -> EncryptedVector:
    return encrypt(drawn(seed, size), PACKING, obfuscators(mode, **which))


def summed(*vectors: EncryptedVector) -> EncryptedVector:
    total = RunningSum(vectors[0].public, vectors[0].packing, vectors[0].count)
    for one in vectors:
        total.add(one)
    return total.total()


@settings(max_examples=20)
@given(
    st.integers(0, 120),
    st.lists(st.tuples(st.integers(0, 2**32), st.sampled_from(SUMS)), min_size=1, max_size=32),
)
def test_the_sum_under_encryption_is_the_sum_of_integers(size: int, parts) -> None:
    total = RunningSum(key().public, PACKING, size)
    codes, pads = np.zeros(size, np.int64), [0] * PACKING.ciphertexts(size)
    for seed, mode in parts:
        one, its_pads = drawn(seed, size), pads_of(seed, size)
        total.add(encrypt(one, PACKING, obfuscators(mode), pads=its_pads))
        codes += one
        pads = [so_far + pad for so_far, pad in zip(pads, its_pads, strict=True)]
    assert decrypt_vector(total.total(), key(), pads).tolist() == codes.tolist()
    assert total.total().mode is max(mode for _, mode in parts)


@pytest.mark.parametrize("code_bits", [16, 24])
def test_as_many_addends_as_there_is_room_for_with_the_largest_codes(code_bits: int) -> None:
    packing = Packing(BITS, code_bits, 8)
    most = 2**code_bits - 1
    one = encrypt(np.full(60, most), packing, obfuscators(Mode.PUBLIC))
    assert set(decrypt_vector(summed(*[one] * 8), key()).tolist()) == {8 * most}
    with pytest.raises(CryptoError, match="9 addends"):
        summed(*[one] * 9)


def test_at_3072_bits_an_update_is_summed_and_decrypted() -> None:
    secret = generate("run", SET_PUBLIC)
    packing = Packing(3072, 16, 32)
    sources = HolderObfuscators(secret), PublicObfuscators(secret.public, Mode.SHORT)
    parts = [drawn(seed, 400, packing) for seed in range(2)]
    total = summed(*(encrypt(part, packing, source) for part, source in zip(parts, sources, strict=True)))
    assert len(total.units) == 3
    assert decrypt_vector(total, secret).tolist() == (parts[0].astype(int) + parts[1]).tolist()


def test_vectors_of_the_subgroup_are_decrypted_by_either_exponent() -> None:
    secret, codes = key(subgroup=True), drawn(1, 50)
    total = summed(vector(1, mode=Mode.SUBGROUP), vector(1, mode=Mode.SUBGROUP, holder=True))
    assert total.mode is Mode.SUBGROUP
    for mode in (Mode.SUBGROUP, Mode.KEY_HOLDER):
        plaintexts = decrypt(secret, total.units, total.shifts, mode)
        assert plaintexts == [2 * one for one in PACKING.pack(codes)]


def test_a_sum_of_subgroup_and_other_vectors_takes_the_long_exponent() -> None:
    codes = drawn(1, 50)
    total = summed(vector(1, mode=Mode.SUBGROUP), vector(1, mode=Mode.PUBLIC, subgroup=True))
    assert total.mode is Mode.PUBLIC
    assert decrypt_vector(total, key(subgroup=True)).tolist() == (2 * codes).tolist()


def test_what_is_not_of_the_subgroup_is_refused_under_the_short_exponent() -> None:
    other = vector(1, mode=Mode.PUBLIC, subgroup=True)
    with pytest.raises(VerificationError, match="SUBGROUP") as caught:
        decrypt(key(subgroup=True), other.units, other.shifts, Mode.SUBGROUP)
    assert caught.value.reason is Reason.MALFORMED
    other = vector(1)
    with pytest.raises(CryptoError, match="with a subgroup key"):
        decrypt(key(), other.units, other.shifts, Mode.SUBGROUP)


def test_the_same_codes_are_never_the_same_ciphertexts() -> None:
    for mode in SUMS:
        one, other = vector(1, mode=mode), vector(1, mode=mode)
        assert not set(one.units + one.shifts) & set(other.units + other.shifts)
        assert not set(one.residues) & set(other.residues)


def test_a_pool_serves_vectors() -> None:
    pool = Pool(obfuscators(Mode.PUBLIC))
    pool.fill(3)
    codes = drawn(4, 200)
    assert PACKING.ciphertexts(200) == 5
    assert decrypt_vector(encrypt(codes, PACKING, pool), key()).tolist() == codes.tolist()
    assert len(pool) == 0


def test_nothing_is_drawn_for_codes_that_are_refused() -> None:
    pool = Pool(obfuscators(Mode.PUBLIC))
    pool.fill(3)
    with pytest.raises(CryptoError, match="next slot"):
        encrypt(np.array([2**16]), PACKING, pool)
    with pytest.raises(CryptoError, match="2 pads for 1 plaintexts"):
        encrypt(np.array([1]), PACKING, pool, pads=[0, 0])
    assert len(pool) == 3


def test_vectors_of_several_users_count_as_several() -> None:
    of_three = encrypt(np.full(10, 3 * 65535), PACKING, obfuscators(Mode.PUBLIC), addends=3)
    total = summed(of_three, of_three, vector(1, 10))
    assert total.addends == 7
    assert decrypt_vector(total, key()).tolist() == (6 * 65535 + drawn(1, 10).astype(int)).tolist()
    with pytest.raises(CryptoError, match="33 addends"):
        summed(*[of_three] * 11)


def test_sums_of_sums_are_sums() -> None:
    halves = [summed(vector(1), vector(2)), summed(vector(3))]
    assert (
        decrypt_vector(summed(*halves), key()).tolist()
        == sum(drawn(seed, 50).astype(int) for seed in (1, 2, 3)).tolist()
    )


def test_what_does_not_fit_is_refused_and_changes_no_sum() -> None:
    total = RunningSum(key().public, PACKING, 50)
    total.add(vector(1))
    wider = Packing(BITS, 24, 32)
    wrong = [
        (encrypt(drawn(1, 50), PACKING, obfuscators(Mode.PUBLIC, "other")), Reason.WRONG_KEY),
        (vector(1, 51), Reason.MALFORMED),
        (encrypt(drawn(1, 50, wider), wider, obfuscators(Mode.PUBLIC)), Reason.MALFORMED),
    ]
    for one, reason in wrong:
        with pytest.raises(VerificationError) as caught:
            total.add(one)
        assert caught.value.reason is reason
    with pytest.raises(CryptoError, match="33 addends"):
        total.add(replace(vector(1), addends=32))
    assert decrypt_vector(total.total(), key()).tolist() == drawn(1, 50).tolist()
    assert total.addends == 1


def test_a_sum_of_nothing_is_refused() -> None:
    with pytest.raises(CryptoError, match="no vectors"):
        RunningSum(key().public, PACKING, 50).total()


def test_another_key_does_not_decrypt() -> None:
    with pytest.raises(VerificationError) as caught:
        decrypt_vector(vector(1), key("other"))
    assert caught.value.reason is Reason.WRONG_KEY
    # And what it would give is not what was encrypted.
    one = vector(1)
    found = decrypt(key("other"), one.units, one.shifts, Mode.KEY_HOLDER)
    assert not set(found) & set(PACKING.pack(drawn(1, 50)))


@pytest.mark.parametrize("times", [0, 1, 12345])
def test_what_is_not_invertible_is_refused(times: int) -> None:
    one = vector(1)
    for part in (key().public.n, key().factors[0].prime, key().factors[1].prime):
        with pytest.raises(VerificationError, match="not invertible"):
            decrypt(key(), [one.units[0], part * times], one.shifts[:2], Mode.KEY_HOLDER)


def test_a_sum_beyond_what_its_addends_can_be_is_refused() -> None:
    """Anybody can add a constant: one that leaves the bounds is seen without the pads."""
    one = vector(1)
    for place in (17, PACKING.slots * PACKING.slot_bits):
        added = (one.shifts[0] + (1 << place)) % one.public.n
        with pytest.raises(VerificationError) as caught:
            decrypt_vector(replace(one, shifts=(added, *one.shifts[1:])), key())
        assert caught.value.reason is Reason.MALFORMED


def test_ciphertexts_as_numbers_are_those_of_paillier() -> None:
    """(1 + m n) times an n-th power, and their products those of sums."""
    one, other = vector(1), vector(2, mode=Mode.PUBLIC)
    n, square = int(one.public.n), int(one.public.n_squared)
    phi = int((key().factors[0].prime - 1) * (key().factors[1].prime - 1))
    for residue, plaintext in zip(one.residues, PACKING.pack(drawn(1, 50)), strict=True):
        power = int(residue) * pow(1 + int(plaintext) * n, -1, square) % square
        assert pow(power, phi, square) == 1
    products = [a * b % square for a, b in zip(one.residues, other.residues, strict=True)]
    assert summed(one, other).residues == products


def test_a_vector_has_the_ciphertexts_that_its_values_need() -> None:
    one = vector(1)
    for changes in (
        {"count": 100},
        {"packing": Packing(3072, 16, 32)},
        {"units": one.units[:1]},
        {"shifts": one.shifts[:1]},
    ):
        with pytest.raises(CryptoError):
            replace(one, **changes)


def test_ciphertexts_and_keys_appear_in_no_text() -> None:
    one = vector(1)
    text = repr(one)
    assert "50 values" in text
    assert not [part for part in (*one.units, *one.shifts) if str(part) in text or f"{part:x}" in text]


@settings(max_examples=15)
@given(st.lists(st.integers(0, (1 << 1020) - 1), min_size=1, max_size=3), st.sampled_from(SUMS))
def test_any_plaintext_comes_back(plaintexts, mode: Mode) -> None:
    n, drawn_now = key().public.n, obfuscators(mode).draw(len(plaintexts))
    units = [unit for unit, _ in drawn_now]
    shifts = [(shift + plaintext) % n for (_, shift), plaintext in zip(drawn_now, plaintexts, strict=True)]
    assert decrypt(key(), units, shifts, mode) == plaintexts
    # Any part of them, so that several can decrypt a vector.
    assert decrypt(key(), units[1:], shifts[1:], mode) == plaintexts[1:]
