"""Sealed requests to graph expansion and their answers; against a computation of the test's own."""

import hashlib
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.clocks import CLOCK_SKEW_S
from coterie.crypto.graph_requests import (
    Kind,
    SealingSecret,
    UploadPlace,
    open_request,
    pad,
    seal_request,
    unpad,
    upload_id_of,
)
from coterie.crypto.verification import Reason

from .test_graph_key import explicit, reason

DIRECTORY = Ed25519PrivateKey.generate()
SECRET = SealingSecret.of(bytes(range(32)), b"keyid-01", 2_000_000_000, DIRECTORY)
PLACE = UploadPlace("a-run", 3, upload_id_of(bytes(32)))


def test_an_upload_is_named_by_the_hash_of_its_secret():
    assert PLACE.upload_id == hashlib.sha256(explicit("graph-upload", bytes(32))).digest()
    assert reason(upload_id_of, bytes(31)) is Reason.MALFORMED


def test_a_request_is_sealed_as_the_book_says():
    sealed, _ = seal_request(Kind.PUBLISH, PLACE, SECRET.public, b"content")
    context = explicit(
        "expansion-request", "publish", "a-run", 3, PLACE.upload_id, b"keyid-01", sealed[:32],
        SECRET.public.public,
    )  # fmt: skip
    shared = X25519PrivateKey.from_private_bytes(bytes(range(32))).exchange(
        X25519PublicKey.from_public_bytes(sealed[:32])
    )
    key = HKDF(SHA256(), 32, salt=None, info=context).derive(shared)
    padded = AESGCM(key).decrypt(bytes(12), sealed[32:], context)
    assert padded == (7).to_bytes(4, "big") + b"content" + bytes(4096 - 11)
    assert open_request(Kind.PUBLISH, PLACE, SECRET, sealed)[0] == b"content"


def test_an_answer_is_sealed_as_the_book_says_and_opens_for_who_asked():
    sealed, mine = seal_request(Kind.NEIGHBOURS, PLACE, SECRET.public, b"question")
    _, theirs = open_request(Kind.NEIGHBOURS, PLACE, SECRET, sealed)
    answer = theirs.seal(b"answer")
    assert mine.open(answer) == b"answer"
    info = explicit("expansion-answer", hashlib.sha256(sealed).digest())
    key = HKDF(SHA256(), 32, salt=answer[:32], info=info).derive(SECRET.agree(sealed[:32]))
    assert AESGCM(key).decrypt(bytes(12), answer[32:], info) == pad(b"answer")
    # Asked again, the third party answers under another salt, so that no key seals twice.
    assert theirs.seal(b"other")[:32] != answer[:32]
    _, stranger = seal_request(Kind.NEIGHBOURS, PLACE, SECRET.public, b"question")
    assert reason(stranger.open, answer) is Reason.NOT_AUTHENTIC
    assert reason(mine.open, answer[:40]) is Reason.MALFORMED


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (Kind.FORGET, PLACE),
        (Kind.PUBLISH, PLACE._replace(run="b-run")),
        (Kind.PUBLISH, PLACE._replace(epoch=4)),
        (Kind.PUBLISH, PLACE._replace(upload_id=bytes(32))),
    ],
)
def test_a_request_is_not_taken_for_another(kind, place):
    sealed, _ = seal_request(Kind.PUBLISH, PLACE, SECRET.public, b"content")
    assert reason(open_request, kind, place, SECRET, sealed) is Reason.NOT_AUTHENTIC


def test_an_altered_or_cut_request_does_not_open():
    sealed, _ = seal_request(Kind.PUBLISH, PLACE, SECRET.public, b"content")
    for place in (0, 40, len(sealed) - 1):
        bad = bytearray(sealed)
        bad[place] ^= 1
        assert reason(open_request, Kind.PUBLISH, PLACE, SECRET, bytes(bad)) is Reason.NOT_AUTHENTIC
    assert reason(open_request, Kind.PUBLISH, PLACE, SECRET, sealed[:47]) is Reason.MALFORMED


def test_the_directory_signs_the_key_until_its_expiry():
    public, now = SECRET.public, int(time.time())
    public.verify(DIRECTORY.public_key().public_bytes_raw(), now)
    stranger = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    assert reason(public.verify, stranger, now) is Reason.BAD_SIGNATURE
    directory = DIRECTORY.public_key().public_bytes_raw()
    assert reason(public.verify, directory, public.expiry + CLOCK_SKEW_S) is Reason.EXPIRED
    assert reason(public._replace(expiry=public.expiry + 1).verify, directory, now) is Reason.BAD_SIGNATURE
    assert reason(public._replace(public=b"short").verify, directory, now) is Reason.MALFORMED


@given(st.binary(max_size=9000))
def test_contents_are_padded_to_powers_of_two_and_come_back(content):
    padded = pad(content)
    assert len(padded) in (4096, 8192, 16384)
    assert len(padded) == 4096 or len(padded) < 2 * (len(content) + 4)
    assert unpad(padded) == content


@pytest.mark.parametrize(
    "noise", [b"", bytes(3), bytes(4095), b"\0\0\x0f\xfd" + bytes(4092), bytes(4095) + b"x"]
)
def test_what_is_not_padded_is_refused(noise):
    assert reason(unpad, noise) is Reason.MALFORMED


def test_requests_of_few_and_of_many_tags_have_one_length():
    few, many = (seal_request(Kind.PUBLISH, PLACE, SECRET.public, bytes(size))[0] for size in (32, 32 * 100))
    assert len(few) == len(many)
