"""Signatures that are checked once."""

import pickle
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto import verified as module
from coterie.crypto.clocks import CLOCK_SKEW_S
from coterie.crypto.identity import Identity, countersign
from coterie.crypto.verification import Reason, VerificationError
from coterie.crypto.verified import HostRound, Verified

IDENTITY = Identity.generate()
DIRECTORY = Ed25519PrivateKey.generate()
DIRECTORY_KEY = DIRECTORY.public_key().public_bytes_raw()
BUNDLE = countersign(IDENTITY.bundle(1, (10_100, 10_200)), DIRECTORY, "client/host-0")


@pytest.fixture
def checks(monkeypatch):
    """How often a signature was really checked."""
    made = []
    whole = module.check_signature

    def counting(public, *given):
        made.append(public)
        whole(public, *given)

    monkeypatch.setattr(module, "check_signature", counting)
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
    memory.bundle(BUNDLE, DIRECTORY_KEY, 10_150)
    memory.bundle(BUNDLE, DIRECTORY_KEY, 10_199 + CLOCK_SKEW_S)
    for now, reason in (
        (10_099 - CLOCK_SKEW_S, Reason.NOT_YET_VALID),
        (10_200 + CLOCK_SKEW_S, Reason.EXPIRED),
    ):
        with pytest.raises(VerificationError) as caught:
            memory.bundle(BUNDLE, DIRECTORY_KEY, now)
        assert caught.value.reason is reason


@pytest.mark.parametrize(
    "changed",
    [{"version": 2}, {"agreement_public": bytes(32)}, {"countersignature": bytes(64)}, {"not_after": 300}],
)
def test_a_bundle_that_was_changed_is_refused(changed):
    memory = Verified()
    memory.bundle(BUNDLE, DIRECTORY_KEY, 10_150)
    with pytest.raises(VerificationError):
        memory.bundle(replace(BUNDLE, **changed), DIRECTORY_KEY, 10_150)


def test_a_bundle_known_under_one_directory_is_not_known_under_another():
    memory = Verified()
    memory.bundle(BUNDLE, DIRECTORY_KEY, 10_150)
    with pytest.raises(VerificationError) as caught:
        memory.bundle(BUNDLE, Ed25519PrivateKey.generate().public_key().public_bytes_raw(), 10_150)
    assert caught.value.reason is Reason.BAD_COUNTERSIGNATURE


def test_what_was_signed_here_is_not_checked_and_what_was_not_is(checks):
    memory = Verified()
    signature = memory.sign(IDENTITY, "advert", b"x", 3)
    assert signature == IDENTITY.sign("advert", b"x", 3)
    memory.signature("it", IDENTITY.signing_public, signature, "advert", b"x", 3)
    assert not checks
    for fields in ((b"x", 4), (b"y", 3)):
        with pytest.raises(VerificationError):
            memory.signature("it", IDENTITY.signing_public, signature, "advert", *fields)
    assert len(checks) == 2


def test_a_question_is_asked_once_and_another_one_again():
    host, asked = HostRound(), []
    find = lambda *given: asked.append(given) or len(asked)  # noqa: E731
    assert [host.once("this", find, 1), host.once("this", find, 2), host.once("that", find, 3)] == [1, 1, 2]
    assert asked == [(1,), (3,)]


def test_what_could_not_be_found_is_asked_again():
    host, answers = HostRound(), iter([VerificationError(Reason.MALFORMED, "no"), None])

    def find():
        answer = next(answers)
        if answer is not None:
            raise answer
        return 7

    with pytest.raises(VerificationError):
        host.once("this", find)
    assert host.once("this", find) == 7


def test_a_host_remembers_no_more_than_its_bound():
    host = HostRound(most=2)
    for question in range(5):
        assert host.once(question, lambda: 1) == 1
        host.have(bytes([question]))
        host.between((b"u", bytes([0])), (bytes([question]), bytes([question])), lambda: 1)
    assert len(host._known) == len(host._secrets) == 2
    # What is beyond is found again.
    found = iter("ab")
    assert [host.once(4, next, found) for _ in range(2)] == ["a", "b"]


def test_a_secret_of_two_members_is_found_by_the_first_and_taken_by_the_second():
    host, found = HostRound(), iter("abc")
    one, other = (b"u", b"key of u"), (b"v", b"key of v")
    for _, public in (one, other):
        host.have(public)
    assert [host.between(one, other, next, found), host.between(other, one, next, found)] == ["a", "a"]
    assert not host._secrets
    # It is gone: asked again, it is found again.
    assert host.between(other, one, next, found) == "b"


@pytest.mark.parametrize(
    "peer",
    [(b"w", b"key of v"), (b"v", b"key of w"), (b"v", b"key of nobody here")],
    ids=["another member with the same key", "another key", "a key that is not held here"],
)
def test_a_secret_is_of_these_two_members_and_keys_alone(peer):
    host = HostRound()
    for public in (b"key of u", b"key of v", b"key of w"):
        host.have(public)
    assert host.between((b"u", b"key of u"), (b"v", b"key of v"), lambda: "theirs") == "theirs"
    assert host.between((b"u", b"key of u"), peer, lambda: "another") == "another"
    assert host.between((b"v", b"key of v"), (b"u", b"key of u"), lambda: "new") == "theirs"


def test_masks_wait_for_members_of_this_host_that_have_not_taken_theirs():
    host, one, other = HostRound(), (b"u", b"key of u"), (b"v", b"key of v")
    assert host.wait_for(one, 3) is None
    for _, public in (one, other):
        host.have(public)
    waiting = host.wait_for(one, 3)
    waiting.vector[:] = 7
    waiting.peers.add(b"v")
    assert host.wait_for(one, 3) is waiting
    assert host.wait_for(one, 4) is None
    assert host.take(one, 3) is waiting
    # Once, and nothing more waits.
    assert not host.take(one, 3).peers
    assert host.wait_for(one, 3) is None
    assert not host._waiting


def test_no_more_masks_wait_than_the_bound():
    host = HostRound(most_waiting=2 * 12)
    members = [(bytes([n]), bytes([n])) for n in range(4)]
    for _, public in members:
        host.have(public)
    assert [host.wait_for(member, 3) is not None for member in members] == [True, True, False, False]


def test_masks_of_another_length_are_not_taken():
    host, one = HostRound(), (b"u", b"key of u")
    host.have(one[1])
    host.wait_for(one, 3).peers.add(b"v")
    assert not host.take(one, 4).peers
    assert not host._waiting


def test_a_round_is_remembered_for_as_long_as_somebody_is_in_it():
    memory = Verified()
    first, second = memory.round(b"this plan"), memory.round(b"this plan")
    assert first is second
    assert memory.round(b"another plan") is not first
    del first
    assert len(memory._rounds) == 1
    del second
    assert len(memory._rounds) == 0


def test_what_a_host_remembers_of_a_round_is_never_pickled():
    with pytest.raises(TypeError):
        pickle.dumps(HostRound())
