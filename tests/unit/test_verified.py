"""Signatures that are checked once."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto import verified as module
from coterie.crypto.identity import Identity, countersign
from coterie.crypto.verification import Reason, VerificationError
from coterie.crypto.verified import Verified

IDENTITY = Identity.generate()
DIRECTORY = Ed25519PrivateKey.generate()
DIRECTORY_KEY = DIRECTORY.public_key().public_bytes_raw()
BUNDLE = countersign(IDENTITY.bundle(1, (100, 200)), DIRECTORY)


@pytest.fixture
def checks(monkeypatch):
    """How often a signature was really checked."""
    made = []
    whole = module.Ed25519PublicKey.from_public_bytes

    class Counting:
        @staticmethod
        def from_public_bytes(public):
            made.append(public)
            return whole(public)

    monkeypatch.setattr(module, "Ed25519PublicKey", Counting)
    return made


def test_the_same_signature_is_checked_once(checks):
    memory, signature = Verified(), IDENTITY.sign("advert", b"x", 3)
    for _ in range(3):
        memory.signature("it", IDENTITY.signing_public, signature, "advert", b"x", 3)
    assert len(checks) == 1


@pytest.mark.parametrize("change", ["signature", "key", "purpose", "field"])
def test_anything_else_is_checked_and_refused(checks, change):
    memory, signature = Verified(), IDENTITY.sign("advert", b"x")
    memory.signature("it", IDENTITY.signing_public, signature, "advert", b"x")
    given = {
        "signature": (IDENTITY.signing_public, bytes(64), "advert", b"x"),
        "key": (Identity.generate().signing_public, signature, "advert", b"x"),
        "purpose": (IDENTITY.signing_public, signature, "submit", b"x"),
        "field": (IDENTITY.signing_public, signature, "advert", b"y"),
    }[change]
    for _ in range(2):
        with pytest.raises(VerificationError) as caught:
            memory.signature("it", *given)
        assert caught.value.reason is Reason.BAD_SIGNATURE
    assert len(checks) == 3


def test_parts_that_are_cut_otherwise_are_not_the_same(checks):
    memory, signature = Verified(), IDENTITY.sign("advert", b"x")
    memory.signature("it", IDENTITY.signing_public, signature, "advert", b"x")
    with pytest.raises(VerificationError):
        memory.signature("it", IDENTITY.signing_public + signature[:1], signature[1:], "advert", b"x")


def test_what_is_forgotten_is_checked_again(checks):
    memory = Verified(most=1)
    signatures = [IDENTITY.sign("advert", field) for field in (b"x", b"y")]
    for place in (0, 1, 0):
        memory.signature("it", IDENTITY.signing_public, signatures[place], "advert", (b"x", b"y")[place])
    assert len(checks) == 3


def test_a_bundle_expires_also_when_its_signatures_are_known():
    memory = Verified()
    memory.bundle(BUNDLE, DIRECTORY_KEY, 150)
    memory.bundle(BUNDLE, DIRECTORY_KEY, 199)
    for now, reason in ((99, Reason.NOT_YET_VALID), (200, Reason.EXPIRED)):
        with pytest.raises(VerificationError) as caught:
            memory.bundle(BUNDLE, DIRECTORY_KEY, now)
        assert caught.value.reason is reason


@pytest.mark.parametrize(
    "changed",
    [{"version": 2}, {"agreement_public": bytes(32)}, {"countersignature": bytes(64)}, {"not_after": 300}],
)
def test_a_bundle_that_was_changed_is_refused(changed):
    memory = Verified()
    memory.bundle(BUNDLE, DIRECTORY_KEY, 150)
    with pytest.raises(VerificationError):
        memory.bundle(replace(BUNDLE, **changed), DIRECTORY_KEY, 150)


def test_a_bundle_known_under_one_directory_is_not_known_under_another():
    memory = Verified()
    memory.bundle(BUNDLE, DIRECTORY_KEY, 150)
    with pytest.raises(VerificationError) as caught:
        memory.bundle(BUNDLE, Ed25519PrivateKey.generate().public_key().public_bytes_raw(), 150)
    assert caught.value.reason is Reason.BAD_COUNTERSIGNATURE
