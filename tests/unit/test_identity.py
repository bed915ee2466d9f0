from __future__ import annotations

import copy
import hashlib
import os
import pickle
import stat
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.clocks import CLOCK_SKEW_S, moment
from coterie.crypto.explicit import encode
from coterie.crypto.identity import (
    GRACE_SECONDS,
    Bundle,
    Delegation,
    Identities,
    Identity,
    KeptBundles,
    Prekey,
    PublicPrekey,
    Validity,
    check_newer,
    countersign,
    load_many,
    load_signing_key,
    participant_id,
    save_many,
    save_signing_key,
)
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError, CryptoError

NOW = 1_700_000_000
VALIDITY = Validity(NOW - 10, NOW + 1000)

# RFC 8032, section 7.1, tests 1 to 3: secret key, public key, message, signature.
ED25519_VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]

# RFC 7748, section 6.1: private and public key of Alice and of Bob, and what they share.
ALICE = (
    "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
    "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a",
)
BOB = (
    "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
    "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f",
)
SHARED = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"


def x25519(private: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(private))


def secrets_of(identity: Identity) -> tuple[bytes, bytes]:
    return identity._signing.private_bytes_raw(), identity._agreement.private_bytes_raw()


@pytest.fixture(scope="module")
def user() -> Identity:
    return Identity.generate()


@pytest.fixture(scope="module")
def other() -> Identity:
    return Identity.generate()


@pytest.fixture(scope="module")
def directory() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture(scope="module")
def directory_public(directory) -> bytes:
    return directory.public_key().public_bytes_raw()


@pytest.fixture(scope="module")
def enrolled(user, directory) -> Bundle:
    return countersign(user.bundle(3, VALIDITY), directory, "client/host-0")


def reason_of(call, *arguments) -> Reason:
    with pytest.raises(VerificationError) as caught:
        call(*arguments)
    assert isinstance(caught.value, CryptoError)
    return caught.value.reason


# Published vectors, through our own interface where it takes raw input.


@pytest.mark.parametrize(("secret", "public", "message", "signature"), ED25519_VECTORS)
def test_ed25519_agrees_with_rfc_8032(secret, public, message, signature):
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret))
    assert Identity(key, X25519PrivateKey.generate()).signing_public.hex() == public
    assert key.sign(bytes.fromhex(message)).hex() == signature
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(
        bytes.fromhex(signature), bytes.fromhex(message)
    )


def test_x25519_agrees_with_rfc_7748():
    alice = Identity(Ed25519PrivateKey.generate(), x25519(ALICE[0]))
    bob = Identity(Ed25519PrivateKey.generate(), x25519(BOB[0]))
    assert (alice.agreement_public.hex(), bob.agreement_public.hex()) == (ALICE[1], BOB[1])
    assert alice.agree(bob.agreement_public).hex() == SHARED
    assert bob.agree(alice.agreement_public).hex() == SHARED


def test_a_prekey_agrees_with_rfc_7748():
    public = PublicPrekey("run", bytes(8), bytes.fromhex(BOB[1]), NOW, bytes(64))
    assert Prekey(x25519(BOB[0]), public).agree(bytes.fromhex(ALICE[1])).hex() == SHARED


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31)])
def test_a_public_key_of_low_order_is_refused(user, point):
    assert reason_of(user.agree, point) is Reason.MALFORMED


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_public_key_of_another_size_is_refused(user, size):
    assert reason_of(user.agree, bytes(size)) is Reason.MALFORMED


# Identities.


def test_the_participant_id_is_the_hash_of_the_signing_key(user, enrolled):
    expected = hashlib.sha256(user.signing_public).digest()
    assert user.participant_id == enrolled.participant_id == participant_id(user.signing_public) == expected


def test_two_identities_differ_in_everything(user, other):
    assert user.participant_id != other.participant_id
    assert user.agreement_public != other.agreement_public


def test_a_signature_is_over_explicit_bytes_of_its_purpose(user):
    Ed25519PublicKey.from_public_bytes(user.signing_public).verify(
        user.sign("some-purpose", b"a", 1), encode("some-purpose", b"a", 1)
    )


def test_an_identity_survives_saving_in_a_file_that_only_its_owner_reads(user, tmp_path):
    path = tmp_path / "user.key"
    umask = os.umask(0)
    try:
        user.save(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secrets_of(Identity.load(path)) == secrets_of(user)
    assert [entry.name for entry in tmp_path.iterdir()] == ["user.key"]


def test_saving_replaces_an_open_file_with_a_private_one(user, tmp_path):
    path = tmp_path / "user.key"
    path.write_bytes(b"old")
    path.chmod(0o644)
    user.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_many_identities_keep_their_order(tmp_path):
    identities = [Identity.generate() for _ in range(20)]
    save_many(tmp_path / "users.key", identities)
    loaded = load_many(tmp_path / "users.key")
    assert [i.participant_id for i in loaded] == [i.participant_id for i in identities]
    assert [i.agreement_public for i in loaded] == [i.agreement_public for i in identities]


def test_drawn_identities_are_the_same_whenever_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("coterie.crypto.identity._MADE", 4)
    few = Identities().more(2)
    many = few.more(7)
    assert (len(few), len(many), len(Identities())) == (2, 9, 0)
    ids = [one.participant_id for one in many]
    assert ids[:2] == [one.participant_id for one in few]
    assert len(set(ids)) == len({one.agreement_public for one in many}) == 9
    assert [many[n].participant_id for n in range(-9, 9)] == ids + ids
    assert [one.participant_id for one in many[2:5]] == ids[2:5]
    with pytest.raises(IndexError):
        many[9]
    save_many(tmp_path / "users.key", many)
    again = load_many(tmp_path / "users.key")
    assert [secrets_of(one) for one in again] == [secrets_of(one) for one in many]
    bundle = again[8].bundle(1, (0, 10))
    bundle.verify_signature()
    assert many[0].agree(again[1].agreement_public) == again[1].agree(many[0].agreement_public)


def test_identities_show_no_secret_and_are_never_pickled():
    drawn = Identities().more(2)
    assert repr(drawn) == "<2 identities>"
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(drawn)


def test_bundles_are_kept_whole_with_and_without_a_countersignature():
    directory = Ed25519PrivateKey.generate()
    plain = [one.bundle(n + 1, (n, n + 2**40)) for n, one in enumerate(Identities().more(3))]
    signed = [countersign(one, directory, f"client/{n % 2}") for n, one in enumerate(plain)]
    kept = KeptBundles([*plain, *signed])
    assert kept == [*plain, *signed]
    assert (len(kept), kept[-1], kept[1:3]) == (6, signed[2], plain[1:3])
    assert list(kept.ids()) == [one.participant_id for one in [*plain, *signed]]
    assert kept != plain
    for field, value in (("signature", b"short"), ("signing_public", bytes(33)), ("version", 2**63)):
        with pytest.raises(VerificationError) as refused:
            KeptBundles([replace(signed[0], **{field: value})])
        assert refused.value.reason is Reason.MALFORMED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"countersignature": b""}, Reason.NOT_COUNTERSIGNED),
        ({"countersignature": bytes(64)}, Reason.BAD_COUNTERSIGNATURE),
        ({"party": "client/other"}, Reason.BAD_COUNTERSIGNATURE),
        ({"party": ""}, Reason.BAD_VERSION),
        ({"signature": bytes(64)}, Reason.BAD_COUNTERSIGNATURE),
        ({"agreement_public": bytes(32)}, Reason.BAD_COUNTERSIGNATURE),
        ({"version": 2}, Reason.BAD_COUNTERSIGNATURE),
        ({"not_after": 20}, Reason.BAD_COUNTERSIGNATURE),
        ({"signing_public": bytes(31)}, Reason.MALFORMED),
    ],
)
def test_the_countersignature_of_ones_own_bundle_covers_everything(change, reason):
    directory = Ed25519PrivateKey.generate()
    key = directory.public_key().public_bytes_raw()
    bundle = countersign(Identity.generate().bundle(1, (0, 10**6)), directory, "client/host")
    bundle.verify_countersignature(key, 10)
    with pytest.raises(VerificationError) as refused:
        replace(bundle, **change).verify_countersignature(key, 10)
    assert refused.value.reason is reason
    with pytest.raises(VerificationError) as refused:
        bundle.verify_countersignature(key, 10**7)
    assert refused.value.reason is Reason.EXPIRED


def test_a_file_of_two_identities_is_not_loaded_as_one(user, other, tmp_path):
    save_many(tmp_path / "users.key", [user, other])
    with pytest.raises(CertificateError, match="holds 2 identities, expected 1"):
        Identity.load(tmp_path / "users.key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_file_that_others_can_use_is_refused(user, tmp_path, mode):
    path = tmp_path / "user.key"
    user.save(path)
    path.chmod(mode)
    with pytest.raises(CertificateError, match=f"mode {mode:04o}, expected 0600"):
        Identity.load(path)


def test_a_missing_key_file_is_named(tmp_path):
    with pytest.raises(CertificateError, match=r"nobody\.key"):
        Identity.load(tmp_path / "nobody.key")


def test_a_key_file_that_cannot_be_written_is_named(user, tmp_path):
    with pytest.raises(CertificateError, match="nowhere"):
        user.save(tmp_path / "nowhere" / "user.key")


@given(cut=st.integers(min_value=1, max_value=200), position=st.integers(min_value=0), flip=st.booleans())
def test_a_damaged_key_file_is_refused_and_shows_no_secret(tmp_path_factory, cut, position, flip):
    user = Identity.generate()
    path = tmp_path_factory.mktemp("damaged") / "user.key"
    user.save(path)
    content = bytearray(path.read_bytes())
    if flip:
        content[position % len(content)] ^= 0x10
    else:
        del content[-min(cut, len(content)) :]
    path.write_bytes(content)
    with pytest.raises(CertificateError) as caught:
        Identity.load(path)
    assert all(secret.hex() not in str(caught.value) for secret in secrets_of(user))


def test_a_key_file_of_another_kind_is_refused(user, tmp_path):
    path = tmp_path / "key"
    Prekey.generate(user, "run", NOW).save(path)
    with pytest.raises(CertificateError, match="does not hold identities"):
        Identity.load(path)
    user.save(path)
    with pytest.raises(CertificateError, match="does not hold a prekey"):
        Prekey.load(path)


def test_the_key_of_a_directory_survives_saving(directory, tmp_path):
    path = tmp_path / "directory.key"
    save_signing_key(path, directory)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_signing_key(path).private_bytes_raw() == directory.private_bytes_raw()


@pytest.mark.parametrize("show", [repr, str, "{}".format])
def test_nothing_that_prints_shows_a_secret(user, show):
    prekey = Prekey.generate(user, "run", NOW)
    shown = show(user) + show(prekey)
    for secret in (*secrets_of(user), prekey._private.private_bytes_raw()):
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown


def test_secrets_are_neither_pickled_nor_copied(user):
    for holder in (user, Prekey.generate(user, "run", NOW)):
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(holder)
        with pytest.raises(TypeError, match="never pickled"):
            copy.deepcopy(holder)


# Bundles.


def test_a_countersigned_bundle_verifies_within_its_validity(enrolled, directory_public):
    enrolled.verify(directory_public, VALIDITY.not_before)
    enrolled.verify(directory_public, VALIDITY.not_after - 1)


def test_a_bundle_is_signed_over_its_explicit_bytes(user, enrolled, directory_public):
    fields = (user.signing_public, user.agreement_public, 3, *VALIDITY)
    Ed25519PublicKey.from_public_bytes(user.signing_public).verify(
        enrolled.signature, encode("bundle", *fields)
    )
    Ed25519PublicKey.from_public_bytes(directory_public).verify(
        enrolled.countersignature,
        encode("bundle-countersignature-2", *fields, enrolled.signature, "client/host-0"),
    )


def test_a_bundle_outside_its_validity_is_refused(enrolled, directory_public):
    first, last = VALIDITY.not_before - CLOCK_SKEW_S, VALIDITY.not_after + CLOCK_SKEW_S - 1
    enrolled.verify(directory_public, first)
    enrolled.verify(directory_public, last)
    assert reason_of(enrolled.verify, directory_public, first - 1) is Reason.NOT_YET_VALID
    assert reason_of(enrolled.verify, directory_public, last + 1) is Reason.EXPIRED


def test_a_bundle_that_begins_later_is_refused_with_both_times_and_their_difference(
    enrolled, directory_public
):
    with pytest.raises(VerificationError) as refused:
        enrolled.verify(directory_public, VALIDITY.not_before - 86_400)
    begins, clock = moment(VALIDITY.not_before), moment(VALIDITY.not_before - 86_400)
    assert (
        refused.value.message
        == f"the key bundle is valid from {begins}, and this machine's clock says {clock}"
    )
    assert "this machine's clock is 86400 s behind that of the one that made it" in refused.value.hint


def test_a_bundle_without_the_directory_is_refused(user, directory_public):
    assert reason_of(user.bundle(1, VALIDITY).verify, directory_public, NOW) is Reason.NOT_COUNTERSIGNED


def test_a_bundle_of_another_directory_is_refused(enrolled):
    stranger = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    assert reason_of(enrolled.verify, stranger, NOW) is Reason.BAD_COUNTERSIGNATURE


def test_the_signature_of_a_participant_is_no_countersignature(enrolled, directory_public):
    forged = replace(enrolled, countersignature=enrolled.signature)
    assert reason_of(forged.verify, directory_public, NOW) is Reason.BAD_COUNTERSIGNATURE


@pytest.mark.parametrize("party", ["client/host-1", "data-owner/host-0", "client/host-00"])
def test_a_bundle_that_says_another_party_is_refused(enrolled, directory_public, party):
    assert enrolled.role == "client"
    altered = replace(enrolled, party=party)
    assert reason_of(altered.verify, directory_public, NOW) is Reason.BAD_COUNTERSIGNATURE
    # The directory vouches for a party that did enrol it; whoever expects another one says so.
    enrolled.require_party("client/host-0")
    assert reason_of(enrolled.require_party, party) is Reason.WRONG_PARTY


@pytest.mark.parametrize("party", ["", "client/host-0"], ids=["as-it-was", "with-a-party"])
def test_a_bundle_that_an_earlier_release_countersigned_is_refused(user, directory, directory_public, party):
    bundle = user.bundle(3, VALIDITY)
    old = encode("bundle-countersignature", *bundle.signed_fields(), bundle.signature)
    told = replace(bundle, countersignature=directory.sign(old), party=party)
    expected = Reason.BAD_COUNTERSIGNATURE if party else Reason.BAD_VERSION
    assert reason_of(told.verify, directory_public, NOW) is expected


@pytest.mark.parametrize(
    "change",
    [
        {"agreement_public": b"\x09" + bytes(31)},
        {"version": 4},
        {"not_before": NOW - 11},
        {"not_after": NOW + 1001},
        {"signature": bytes(64)},
        {"signature": b""},
    ],
)
def test_every_altered_field_of_a_bundle_is_noticed(enrolled, directory_public, change):
    altered = replace(enrolled, **change)
    assert reason_of(altered.verify, directory_public, NOW) is Reason.BAD_SIGNATURE


def test_a_bundle_with_the_signing_key_of_another_is_refused(enrolled, other, directory_public):
    altered = replace(enrolled, signing_public=other.signing_public)
    assert reason_of(altered.verify, directory_public, NOW) is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    "change",
    [
        {"signing_public": bytes(31)},
        {"agreement_public": bytes(33)},
        {"version": -1},
        {"version": 2**63},
        {"not_before": -5},
        {"not_after": NOW - 10},
    ],
)
def test_a_malformed_bundle_is_refused_before_its_signature_is_looked_at(enrolled, directory_public, change):
    altered = replace(enrolled, **change)
    assert reason_of(altered.verify, directory_public, NOW) is Reason.MALFORMED


def test_the_directory_countersigns_only_what_the_participant_signed(user, directory):
    altered = replace(user.bundle(1, VALIDITY), version=2)
    assert reason_of(countersign, altered, directory, "client/host-0") is Reason.BAD_SIGNATURE


def test_a_lower_version_never_replaces_a_higher_one(user):
    old, new = user.bundle(1, VALIDITY), user.bundle(2, VALIDITY)
    check_newer(old, new)
    assert reason_of(check_newer, new, old) is Reason.OLD_VERSION


def test_the_same_version_is_accepted_only_with_the_same_content(user, directory):
    old = user.bundle(1, VALIDITY)
    check_newer(old, countersign(old, directory, "client/host-0"))
    longer = user.bundle(1, Validity(VALIDITY.not_before, VALIDITY.not_after + 1))
    assert reason_of(check_newer, old, longer) is Reason.OLD_VERSION


def test_a_bundle_never_replaces_that_of_another_participant(user, other):
    both = user.bundle(1, VALIDITY), other.bundle(2, VALIDITY)
    assert reason_of(check_newer, *both) is Reason.WRONG_PARTICIPANT


# Delegations.

FINGERPRINT = bytes(range(32))


def test_a_delegation_holds_for_its_certificate_and_run_until_it_expires(user):
    delegation = Delegation.sign(user, FINGERPRINT, "run-1", NOW + 60)
    delegation.verify(user.signing_public, FINGERPRINT, "run-1", NOW + CLOCK_SKEW_S + 59)
    verify, over = delegation.verify, NOW + CLOCK_SKEW_S + 60
    assert reason_of(verify, user.signing_public, FINGERPRINT, "run-1", over) is Reason.EXPIRED
    assert reason_of(verify, user.signing_public, bytes(32), "run-1", NOW) is Reason.WRONG_CERTIFICATE
    assert reason_of(verify, user.signing_public, FINGERPRINT, "run-2", NOW) is Reason.WRONG_RUN


def test_a_delegation_of_another_participant_is_refused(user, other):
    delegation = Delegation.sign(other, FINGERPRINT, "run", NOW + 60)
    reason = reason_of(delegation.verify, user.signing_public, FINGERPRINT, "run", NOW)
    assert reason is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    "change",
    [
        {"certificate_fingerprint": bytes(32)},
        {"run_id": "run-2"},
        {"expiry": NOW + 61},
        {"signature": bytes(64)},
    ],
)
def test_every_altered_field_of_a_delegation_is_noticed(user, change):
    altered = replace(Delegation.sign(user, FINGERPRINT, "run", NOW + 60), **change)
    arguments = user.signing_public, altered.certificate_fingerprint, altered.run_id, NOW
    assert reason_of(altered.verify, *arguments) is Reason.BAD_SIGNATURE


def test_a_delegation_over_something_that_is_no_fingerprint_is_refused(user):
    assert reason_of(Delegation.sign, user, b"short", "run", NOW) is Reason.MALFORMED
    altered = replace(Delegation.sign(user, FINGERPRINT, "run", NOW + 60), certificate_fingerprint=b"")
    assert reason_of(altered.verify, user.signing_public, b"", "run", NOW) is Reason.MALFORMED


# Prekeys.


def test_a_prekey_may_be_sealed_for_until_it_expires_and_lives_an_hour_longer(user):
    prekey = Prekey.generate(user, "run", NOW)
    prekey.public.verify(user.signing_public, NOW + CLOCK_SKEW_S - 1)
    assert reason_of(prekey.public.verify, user.signing_public, NOW + CLOCK_SKEW_S) is Reason.EXPIRED
    # Owner and user may each be off by the tolerated time, and the prekey is still held.
    assert 2 * CLOCK_SKEW_S < GRACE_SECONDS
    assert GRACE_SECONDS == 3600
    assert not prekey.expired(NOW + 3599)
    assert prekey.expired(NOW + 3600)


def test_prekeys_have_ids_and_keys_of_their_own(user):
    one, two = (Prekey.generate(user, "run", NOW).public for _ in range(2))
    assert len(one.prekey_id) == 8
    assert one.prekey_id != two.prekey_id
    assert one.public != two.public


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": "run-2"}, Reason.BAD_SIGNATURE),
        ({"prekey_id": bytes(8)}, Reason.BAD_SIGNATURE),
        ({"public": b"\x09" + bytes(31)}, Reason.BAD_SIGNATURE),
        ({"expiry": NOW + 1}, Reason.BAD_SIGNATURE),
        ({"signature": bytes(64)}, Reason.BAD_SIGNATURE),
        ({"prekey_id": bytes(9)}, Reason.MALFORMED),
        ({"public": bytes(31)}, Reason.MALFORMED),
        ({"expiry": -1}, Reason.MALFORMED),
    ],
)
def test_every_altered_field_of_a_prekey_is_noticed(user, change, reason):
    altered = replace(Prekey.generate(user, "run", NOW).public, **change)
    assert reason_of(altered.verify, user.signing_public, NOW - 1) is reason


def test_the_prekey_of_another_owner_is_refused(user, other):
    public = Prekey.generate(other, "run", NOW).public
    assert reason_of(public.verify, user.signing_public, NOW - 1) is Reason.BAD_SIGNATURE


def test_a_prekey_survives_saving_and_is_gone_when_destroyed(user, tmp_path):
    path = tmp_path / "owner.prekey"
    prekey = Prekey.generate(user, "rün", NOW)
    prekey.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    loaded = Prekey.load(path)
    assert loaded.public == prekey.public
    assert loaded.agree(user.agreement_public) == prekey.agree(user.agreement_public)
    Prekey.destroy(path)
    assert not path.exists()
    Prekey.destroy(path)
