"""Masks: published vectors, both keystreams, sealed shares."""

import hashlib
import hmac
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto import masking
from coterie.crypto.explicit import encode
from coterie.crypto.masking import Keystream, RoundKey, add_masks
from coterie.crypto.verification import VerificationError

P = 2**256 + 297
CHUNK = masking._CHUNK

keys = st.binary(min_size=32, max_size=32)


def hkdf(secret: bytes, info: bytes, length: int = 32) -> bytes:
    """RFC 5869 without salt, from HMAC."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    found, block = b"", b""
    for count in range(1, -(-length // 32) + 1):
        block = hmac.digest(extracted, block + info + bytes([count]), "sha256")
        found += block
    return found[:length]


def counter_blocks(key: bytes, count: int) -> np.ndarray:
    """The keystream block by block, from AES alone."""
    blocks = b"".join(bytes(12) + number.to_bytes(4) for number in range(2, 2 + count))
    encryptor = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    return np.frombuffer(encryptor.update(blocks), "<u4")


def test_hkdf_without_salt_is_that_of_rfc_5869():
    published = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    assert hkdf(b"\x0b" * 22, b"", 42).hex() == published


@given(keys, keys, keys, keys)
@settings(max_examples=20)
def test_keys_are_derived_with_their_labels(secret, plan, one, other):
    low, high = sorted((one, other))
    assert masking.share_key(secret, plan, one, other) == hkdf(secret, encode("share", plan, one, other))
    assert masking.share_keys(secret, plan, one, other) == (
        masking.share_key(secret, plan, one, other),
        masking.share_key(secret, plan, other, one),
    )
    assert masking.own_mask_key(secret, plan, one) == hkdf(secret, encode("own-mask", plan, one))
    for pair in ((one, other), (other, one)):
        assert masking.pair_mask_key(secret, plan, *pair) == hkdf(
            secret, encode("pair-mask", plan, low, high)
        )
    assert masking.seed_hash(plan, secret) == hashlib.sha256(encode("seed", plan, secret)).digest()


def test_share_keys_have_a_direction():
    secret, plan, one, other = (bytes([n]) * 32 for n in range(4))
    assert masking.share_key(secret, plan, one, other) != masking.share_key(secret, plan, other, one)


def test_key_agreement_is_that_of_rfc_7748():
    alice = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    bob = RoundKey(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    assert bob.public == masking.public_of(bob.secret)
    assert bob.agree(alice).hex() == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"


@pytest.mark.parametrize("way", Keystream)
def test_a_mask_begins_with_the_published_block_of_aes_256_gcm(way):
    # Test case 14 of the specification of GCM (McGrew and Viega): zero key, zero nonce, one block of zeros.
    vector = np.zeros(4, np.uint32)
    add_masks(vector, [bytes(32)], way=way)
    assert vector.astype("<u4").tobytes().hex() == "cea7403d4d606b6e074ec5d3baf39d18"


@given(keys, st.sampled_from([1, 3, 4, 5, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7]))
@settings(deadline=None, max_examples=30)
def test_both_keystreams_are_aes_in_counter_mode(key, length):
    expected = counter_blocks(key, -(-length // 4))[:length]
    for way in Keystream:
        vector = np.zeros(length, np.uint32)
        add_masks(vector, [key], way=way)
        assert np.array_equal(vector, expected)


@given(
    st.lists(keys, max_size=5), st.lists(keys, max_size=5), st.integers(0, 3000), st.integers(0, 2**32 - 1)
)
@settings(deadline=None, max_examples=30)
def test_what_is_added_can_be_subtracted(plus, minus, length, value):
    vector = np.full(length, value, np.uint32)
    add_masks(vector, plus, minus)
    expected = np.full(length, value, np.uint32)
    for key in plus:
        expected += counter_blocks(key, length // 4 + 1)[:length]
    for key in minus:
        expected -= counter_blocks(key, length // 4 + 1)[:length]
    assert np.array_equal(vector, expected)
    add_masks(vector, minus, plus)
    assert np.all(vector == value)


def test_more_masks_than_contexts_are_open_at_a_time_are_all_added():
    many = [number.to_bytes(32) for number in range(700)]
    vector = np.zeros(5, np.uint32)
    add_masks(vector, many, many[:1])
    expected = sum(counter_blocks(key, 2)[:5].astype(np.uint64) for key in many[1:])
    assert np.array_equal(vector, expected.astype(np.uint32))


shares = st.one_of(st.integers(0, P - 1), st.sampled_from([0, 1, 2**256 - 1, 2**256, P - 1]))


@given(keys, shares, shares)
def test_shares_are_opened_as_they_were_sealed(key, seed_share, mask_share):
    sealed = masking.seal_share(key, seed_share, mask_share)
    assert len(sealed) == masking.SEALED_SHARE_BYTES == 81
    assert masking.open_share(key, sealed) == (seed_share, mask_share)


@given(keys, shares, shares, st.integers(0, 81 * 8 - 1))
def test_a_sealed_share_with_any_bit_turned_does_not_open(key, seed_share, mask_share, bit):
    sealed = bytearray(masking.seal_share(key, seed_share, mask_share))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(VerificationError):
        masking.open_share(key, bytes(sealed))


@pytest.mark.parametrize(
    "plain",
    [bytes(64), bytes(66), b"\x04" + bytes(64), b"\x02" + (297).to_bytes(32) + bytes(32)],
    ids=["short", "long", "a third top bit", "not below the prime"],
)
def test_what_was_sealed_but_is_no_pair_of_shares_is_refused(plain):
    sealed = masking.AESGCM(bytes(32)).encrypt(bytes(12), plain, None)
    with pytest.raises(VerificationError, match="share"):
        masking.open_share(bytes(32), sealed)


@pytest.mark.parametrize("wrong", [b"", bytes(32), bytes(34), P.to_bytes(33), b"\xff" * 33])
def test_bytes_that_are_no_share_are_refused(wrong):
    with pytest.raises(VerificationError):
        masking.share_from_bytes(wrong)


@given(shares)
def test_a_revealed_share_keeps_its_value(share):
    assert masking.share_from_bytes(masking.share_to_bytes(share)) == share


@pytest.mark.parametrize(
    "public",
    [
        bytes(32),
        (1).to_bytes(32, "little"),
        (2**255 - 20).to_bytes(32, "little"),
        bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
        b"short",
    ],
    ids=["zero", "one", "minus one", "order eight", "short"],
)
def test_keys_on_which_nothing_can_be_agreed_are_refused(public):
    with pytest.raises(VerificationError):
        masking.require_usable(public)
    with pytest.raises(VerificationError):
        RoundKey().agree(public)


def test_a_usable_key_is_taken():
    masking.require_usable(RoundKey().public)


def usable(public):
    try:
        masking.require_usable(public)
    except VerificationError:
        return False
    return True


def agreeable(public):
    try:
        RoundKey().agree(public)
    except VerificationError:
        return False
    return True


def test_every_encoding_of_a_point_of_low_order_is_refused_as_by_the_agreement():
    for point in masking._LOW_ORDER:
        # Also those that are not reduced, and with the top bit, which is ignored.
        for number in {point, point + 2**255 - 19}:
            for top in (0, 2**255) if number < 2**255 else ():
                public = (number + top).to_bytes(32, "little")
                assert not usable(public)
                assert not agreeable(public)


@given(
    st.one_of(
        keys,
        st.integers(0, 64).map(lambda number: number.to_bytes(32, "little")),
        st.integers(2**255 - 64, 2**255 + 64).map(lambda number: number.to_bytes(32, "little")),
    )
)
@settings(max_examples=150, deadline=None)
def test_a_key_is_usable_where_something_can_be_agreed_with_it(public):
    assert usable(public) is agreeable(public)


def test_a_wiped_key_agrees_on_nothing_and_holds_nothing():
    key = RoundKey()
    key.wipe()
    assert key.secret == bytes(32)
    with pytest.raises(VerificationError):
        key.agree(RoundKey().public)


def test_the_secret_of_a_key_is_neither_shown_nor_pickled():
    key = RoundKey()
    assert key.secret.hex()[:8] not in repr(key)
    with pytest.raises(TypeError):
        pickle.dumps(key)


@given(st.lists(keys, min_size=1, max_size=6, unique=True), st.integers(1, 3 * CHUNK), st.data())
@settings(max_examples=15, deadline=None)
def test_a_mirror_gets_the_mask_with_the_other_sign(found, size, data):
    plus = data.draw(st.lists(st.sampled_from(found), unique=True))
    minus = [key for key in found if key not in plus]
    mirrored = data.draw(st.lists(st.sampled_from(found), unique=True))
    vector, expected = np.zeros(size, np.uint32), np.zeros(size, np.uint32)
    mirrors = {key: np.full(size, 3, np.uint32) for key in mirrored}
    add_masks(vector, plus, minus, mirrors=mirrors)
    add_masks(expected, plus, minus)
    assert np.array_equal(vector, expected)
    for key, mirror in mirrors.items():
        other = np.full(size, 3, np.uint32)
        add_masks(other, *(([], [key]) if key in plus else ([key], [])))
        assert np.array_equal(mirror, other)
