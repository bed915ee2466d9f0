"""Beside ``phe``: keys both ways, what either encrypts the other adds and decrypts."""

import subprocess
import sys

import numpy as np
import phe
import pytest
from gmpy2 import mpz
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.paillier import Mode, Packing, RunningSum, decrypt_vector, encrypt, from_bytes, to_bytes
from coterie.crypto.paillier.decryption import decrypt
from coterie.crypto.paillier.elements import split
from coterie.crypto.paillier.stock import (
    from_stock,
    public_from_stock,
    secret_from_stock,
    to_stock,
    to_stock_public,
    to_stock_secret,
)
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

from ..paillier_keys import BITS, SET_PUBLIC, key, obfuscators

PACKING = Packing(BITS, 16, 32)
MODES = [
    (mode, subgroup) for mode in Mode for subgroup in (False, True) if subgroup or mode is not Mode.SUBGROUP
]


def codes_from(seed: int, count: int = 60) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**16, count)


def stock_vector(seed: int, subgroup: bool = False) -> list[phe.EncryptedNumber]:
    """Return packed plaintexts that ``phe`` encrypted."""
    public = to_stock_public(key(subgroup=subgroup).public)
    return [public.encrypt(int(plaintext)) for plaintext in PACKING.pack(codes_from(seed))]


@pytest.mark.parametrize(("mode", "subgroup"), MODES)
def test_stock_decrypts_every_mode(mode: Mode, subgroup: bool) -> None:
    secret, codes = key(subgroup=subgroup), codes_from(1)
    vector = encrypt(codes, PACKING, obfuscators(mode, subgroup=subgroup))
    stock = to_stock_secret(secret)
    assert [stock.decrypt(number) for number in to_stock(vector)] == PACKING.pack(codes)


@pytest.mark.parametrize("subgroup", [False, True])
def test_stock_reads_the_largest_plaintext_as_it_is(subgroup: bool) -> None:
    """It takes the upper third of its range for negative numbers, and the middle for overflow."""
    codes = np.full(PACKING.slots, 32 * 65535)
    vector = encrypt(codes, PACKING, obfuscators(Mode.PUBLIC, subgroup=subgroup), addends=32)
    (number,) = to_stock(vector)
    assert to_stock_secret(key(subgroup=subgroup)).decrypt(number) == PACKING.pack(codes, 32)[0]


@settings(max_examples=10)
@given(st.integers(-(1 << 1000), 1 << 1000))
def test_stock_ciphertexts_decrypt_here(number: int) -> None:
    public = to_stock_public(key().public)
    halves = split([mpz(public.encrypt(number).ciphertext())], key().public.n)
    (found,) = decrypt(key(), *halves, Mode.KEY_HOLDER)
    assert found == number % public.n


@settings(max_examples=8)
@given(
    st.lists(st.tuples(st.integers(0, 2**32), st.sampled_from([None, *MODES[:5:2]])), min_size=2, max_size=6)
)
def test_mixed_sums_are_right_here_and_there(parts) -> None:
    """Each vector is encrypted here in some mode, or there; both sums are decrypted by both."""
    secret, public = key(), key().public
    stock_public, stock_secret = to_stock_public(public), to_stock_secret(secret)
    ours, theirs = RunningSum(public, PACKING, 60), None
    for seed, which in parts:
        if which is None:
            numbers = stock_vector(seed)
            vector = from_stock(numbers, public, PACKING, 60)
        else:
            vector = encrypt(codes_from(seed), PACKING, obfuscators(which[0], subgroup=False))
            numbers = to_stock(vector)
        ours.add(vector)
        theirs = numbers if theirs is None else [a + b for a, b in zip(theirs, numbers, strict=True)]
    assert theirs is not None
    assert theirs[0].public_key == stock_public
    codes = sum(codes_from(seed) for seed, _ in parts)
    expected = PACKING.pack(codes, len(parts))
    assert [stock_secret.decrypt(number) for number in theirs] == expected
    assert [stock_secret.decrypt(number) for number in to_stock(ours.total())] == expected
    for total in (ours.total(), from_stock(theirs, public, PACKING, 60, addends=len(parts))):
        assert decrypt_vector(total, secret).tolist() == codes.tolist()


def test_stock_ciphertexts_under_a_subgroup_key_take_the_long_exponent() -> None:
    secret, codes = key(subgroup=True), codes_from(3)
    theirs = from_stock(stock_vector(3, subgroup=True), secret.public, PACKING, 60)
    total = RunningSum(secret.public, PACKING, 60)
    total.add(encrypt(codes_from(3), PACKING, obfuscators(Mode.SUBGROUP)))
    total.add(theirs)
    assert total.total().mode is Mode.KEY_HOLDER
    assert decrypt_vector(total.total(), secret).tolist() == (2 * codes).tolist()
    with pytest.raises(VerificationError):
        decrypt(secret, theirs.units, theirs.shifts, Mode.SUBGROUP)


def test_stock_vectors_travel_as_ours() -> None:
    vector = from_stock(stock_vector(5), key().public, PACKING, 60)
    assert from_bytes(to_bytes(vector), key().public, PACKING, 60) == vector


@pytest.mark.parametrize("subgroup", [False, True])
def test_keys_go_there_and_back(subgroup: bool) -> None:
    secret = key(subgroup=subgroup)
    public, stock = secret.public, to_stock_secret(secret)
    assert stock.public_key == to_stock_public(public)
    again = secret_from_stock(stock, public)
    assert [factor.prime for factor in again.factors] == [factor.prime for factor in secret.factors]
    codes = codes_from(2)
    vector = encrypt(codes, PACKING, obfuscators(Mode.KEY_HOLDER, subgroup=subgroup))
    assert decrypt_vector(vector, again).tolist() == codes.tolist()
    fields = public.set_public, public.created, public.run
    record = public_from_stock(to_stock_public(public), *fields, comparison=True)
    assert record.n == public.n
    # Of a subgroup key the base is not in theirs.
    assert (record == public) is not subgroup


def test_a_key_that_stock_made_decrypts_and_no_more() -> None:
    stock_public, stock = phe.generate_paillier_keypair(n_length=BITS)
    public = public_from_stock(stock_public, SET_PUBLIC, 0, "run", comparison=True)
    secret = secret_from_stock(stock, public)
    halves = split([mpz(stock_public.encrypt(7).ciphertext())], public.n)
    assert decrypt(secret, *halves, Mode.KEY_HOLDER) == [7]
    with pytest.raises(VerificationError):
        secret.check()


def test_a_short_stock_key_is_refused_outside_comparisons() -> None:
    with pytest.raises(CryptoError, match="of 1024 bits"):
        public_from_stock(to_stock_public(key().public), SET_PUBLIC, 0, "run")


def test_a_secret_key_of_another_record_is_refused() -> None:
    with pytest.raises(VerificationError) as caught:
        secret_from_stock(to_stock_secret(key()), key("other").public)
    assert caught.value.reason is Reason.WRONG_KEY


def test_numbers_that_are_no_packed_plaintexts_are_refused() -> None:
    numbers = stock_vector(1)
    public = to_stock_public(key().public)
    with pytest.raises(CryptoError, match="exponent"):
        from_stock([public.encrypt(0.5), *numbers[1:]], key().public, PACKING, 60)
    with pytest.raises(CryptoError, match="ciphertexts for 60 values"):
        from_stock(numbers[1:], key().public, PACKING, 60)
    with pytest.raises(CryptoError, match="33 addends"):
        from_stock(numbers, key().public, PACKING, 60, addends=33)
    other = to_stock_public(key("other").public).encrypt(1)
    with pytest.raises(VerificationError) as caught:
        from_stock([other, *numbers[1:]], key().public, PACKING, 60)
    assert caught.value.reason is Reason.WRONG_KEY
    for none in (0, public.n, int(key().factors[0].prime)):
        number = phe.EncryptedNumber(public, none)
        number.obfuscate()
        with pytest.raises(VerificationError) as caught:
            from_stock([number, *numbers[1:]], key().public, PACKING, 60)
        assert caught.value.reason is Reason.MALFORMED


def test_numbers_that_stock_did_not_obfuscate_yet_are_obfuscated_on_their_way() -> None:
    public = to_stock_public(key().public)
    plain = [public.encrypt(int(one), r_value=1) for one in PACKING.pack(codes_from(1))]
    bare = {number.ciphertext(be_secure=False) for number in plain}
    vector = from_stock(plain, key().public, PACKING, 60)
    assert not bare & {int(residue) for residue in vector.residues}
    assert decrypt_vector(vector, key()).tolist() == codes_from(1).tolist()


def test_phe_is_imported_only_to_convert() -> None:
    """A distributor of Coterie without ``phe`` need not have it."""
    program = (
        "import sys; sys.modules['phe'] = None; import coterie.crypto.paillier, coterie.crypto.paillier.stock"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
