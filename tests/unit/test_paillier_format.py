"""Encrypted vectors as bytes: what is sent, and what is refused on arrival."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.paillier import EncryptedVector, Mode, Packing, encrypt
from coterie.crypto.paillier.format import HEADER_BYTES, from_bytes, size, to_bytes
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError

from ..paillier_keys import BITS, key, obfuscators

PACKING = Packing(BITS, 16, 32)
COUNT = 100
WIDTH = BITS // 8
"""Bytes of a unit, and of a shift."""


def made(mode: Mode = Mode.PUBLIC, **which) -> EncryptedVector:
    rows = PACKING.ciphertexts(COUNT)
    return encrypt(np.arange(COUNT), PACKING, obfuscators(mode, **which), pads=list(range(rows)))


def refused(content: bytes, reason: Reason, **changes) -> str:
    """Assert that a vector is refused, and return what is said."""
    expected = {"public": key().public, "packing": PACKING, "count": COUNT}
    with pytest.raises(VerificationError) as caught:
        from_bytes(content, **expected | changes)
    assert caught.value.reason is reason
    return str(caught.value)


@pytest.mark.parametrize("mode", Mode)
def test_a_vector_comes_back_from_its_bytes(mode: Mode) -> None:
    one = made(mode)
    content = to_bytes(one)
    assert len(content) == size(one.public, PACKING, COUNT)
    assert from_bytes(content, one.public, PACKING, COUNT) == one
    assert from_bytes(content, one.public, PACKING, COUNT, addends=7).addends == 7


def test_the_bytes_are_those_of_the_book() -> None:
    one = made()
    header = struct.pack(">BBBBII", 1, 2, 21, 16, 32, COUNT) + one.public.key_id
    assert HEADER_BYTES == len(header) == 44
    pairs = zip(one.units, one.shifts, strict=True)
    assert to_bytes(one) == header + b"".join(int(part).to_bytes(WIDTH) for pair in pairs for part in pair)


def test_a_vector_of_no_values_is_a_header() -> None:
    empty = encrypt(np.zeros(0, int), PACKING, obfuscators(Mode.PUBLIC))
    assert len(to_bytes(empty)) == HEADER_BYTES
    assert from_bytes(to_bytes(empty), key().public, PACKING, 0) == empty


def test_an_update_takes_few_bytes_for_each_value() -> None:
    """44,824 values of FedNeuMF at 3,072 bits."""

    class Long:
        modulus_bytes = 384

    assert size(Long, Packing(3072, 16, 32), 44_824) / 44_824 < 5.6
    assert size(Long, Packing(3072, 24, 256), 44_824) / 44_824 < 9


def test_headers_that_say_something_else_are_refused() -> None:
    content, public = to_bytes(made()), key().public
    assert "under key" in refused(content, Reason.WRONG_KEY, public=key("other").public)
    for changes in (
        {"packing": Packing(BITS, 24, 32)},
        {"packing": Packing(BITS, 16, 33)},
        {"packing": Packing(BITS, 16, 31)},
        {"count": COUNT - 1},
    ):
        assert "w, b, C, N" in refused(content, Reason.MALFORMED, **changes)
    assert "format 2" in refused(b"\2" + content[1:], Reason.BAD_VERSION)
    for mode in (0, 4, 5, 255):
        assert f"mode {mode}" in refused(content[:1] + bytes([mode]) + content[2:], Reason.MALFORMED)
    from_bytes(content, public, PACKING, COUNT)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_header_with_any_byte_changed_is_refused_or_names_another_mode(place: int, change: int) -> None:
    one = made()
    content = bytearray(to_bytes(one))
    content[place] ^= change
    try:
        found = from_bytes(bytes(content), one.public, PACKING, COUNT)
    except VerificationError:
        return
    assert place == 1
    assert found.mode in (Mode.KEY_HOLDER, Mode.SHORT)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 2 * WIDTH, -1])
def test_truncated_vectors_are_refused(length: int) -> None:
    refused(to_bytes(made())[:length], Reason.MALFORMED)


def test_more_bytes_than_there_are_ciphertexts_are_refused() -> None:
    refused(to_bytes(made()) + b"\0", Reason.MALFORMED)
    refused(to_bytes(made()) + to_bytes(made())[-2 * WIDTH :], Reason.MALFORMED)


@pytest.mark.parametrize("place", [0, 2])
def test_ciphertexts_that_are_none_are_refused(place: int) -> None:
    n, p = key().public.n, key().factors[0].prime
    content = bytearray(to_bytes(made()))
    start = HEADER_BYTES + 2 * place * WIDTH
    out_of_range = f"ciphertext {place} is zero or not below n"
    for wrong, said in [
        (0, out_of_range),
        (n, out_of_range),
        ((1 << BITS) - 1, out_of_range),
        (p, "not invertible"),
        (p * 77, "not invertible"),
    ]:
        content[start : start + WIDTH] = int(wrong).to_bytes(WIDTH)
        assert said in refused(bytes(content), Reason.MALFORMED)
    content = bytearray(to_bytes(made()))
    for shift in (n, (1 << BITS) - 1):
        content[start + WIDTH : start + 2 * WIDTH] = int(shift).to_bytes(WIDTH)
        assert out_of_range in refused(bytes(content), Reason.MALFORMED)
    for shift in (0, n - 1):
        content[start + WIDTH : start + 2 * WIDTH] = int(shift).to_bytes(WIDTH)
        from_bytes(bytes(content), key().public, PACKING, COUNT)


def test_two_ciphertexts_whose_product_is_not_invertible_do_not_make_up_for_each_other() -> None:
    (p, _), (q, _) = key().factors
    content = bytearray(to_bytes(made()))
    for place, wrong in enumerate((p, q)):
        start = HEADER_BYTES + 2 * place * WIDTH
        content[start : start + WIDTH] = int(wrong).to_bytes(WIDTH)
    assert "not invertible" in refused(bytes(content), Reason.MALFORMED)


def test_more_addends_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(CryptoError, match="33 addends"):
        from_bytes(to_bytes(made()), key().public, PACKING, COUNT, addends=33)
