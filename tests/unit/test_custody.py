"""Custody of a Paillier key: sealed for one holder, checked in full, kept in a private file."""

import os
import pickle
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coterie.crypto.custody import HeldKey, countersign_record, open_sealed, seal_for, sign_record
from coterie.crypto.key_record import KeyFields, KeyTerms
from coterie.crypto.paillier import SecretKey
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError

from ..custody import TERMS, bundle, held, ids, people

ANNA, BERTA, CARLA = people(3)
HOLDERS = ids((ANNA, BERTA, CARLA))


def record_of(secrets=None, holders=HOLDERS):
    return sign_record(ANNA, secrets or held(), holders)


def refused(call, *arguments):
    with pytest.raises(VerificationError) as failed:
        call(*arguments)
    return failed.value.reason


def test_what_is_sealed_for_a_holder_opens_to_the_same_secrets():
    record = record_of()
    opened = open_sealed(BERTA, record, seal_for(bundle(BERTA), held(), record), TERMS)
    assert opened.secret.to_bytes() == held().secret.to_bytes()
    assert (opened.epoch, opened.key_id) == (1, record.key_id)
    # The set key is the same too: both agree alike with a contributor.
    assert opened.agree(CARLA.agreement_public) == held().agree(CARLA.agreement_public)
    assert opened.agree(CARLA.agreement_public) == CARLA.agree(record.key.set_public)
    assert opened.public.set_public == record.key.set_public


def test_no_two_envelopes_are_alike_and_none_shows_a_secret():
    record = record_of()
    first, second = (seal_for(bundle(BERTA), held(), record) for _ in range(2))
    assert first[:32] != second[:32]
    secret = held().secret.to_bytes()
    for at in range(0, len(secret) - 8, 8):
        assert secret[at : at + 8] not in first


def test_an_envelope_opens_for_its_holder_only():
    record = record_of()
    sealed = seal_for(bundle(BERTA), held(), record)
    assert refused(open_sealed, CARLA, record, sealed, TERMS) is Reason.NOT_AUTHENTIC


@pytest.mark.parametrize("change", [{"epoch": 2}, {"generator_public": CARLA.signing_public}])
def test_an_envelope_opens_under_its_own_record_only(change):
    record = record_of()
    sealed = seal_for(bundle(BERTA), held(), record)
    assert refused(open_sealed, BERTA, replace(record, **change), sealed, TERMS) is Reason.NOT_AUTHENTIC


def test_an_envelope_of_another_key_or_run_does_not_open():
    sealed = seal_for(bundle(BERTA), held(), record_of())
    for other in (held(name="other"), held("b-run")):
        assert refused(open_sealed, BERTA, record_of(other), sealed, TERMS) is Reason.NOT_AUTHENTIC


@pytest.mark.parametrize("at", [0, 31, 32, 100, -1])
def test_an_envelope_of_which_a_bit_was_changed_does_not_open(at):
    record = record_of()
    sealed = bytearray(seal_for(bundle(BERTA), held(), record))
    sealed[at] ^= 1
    assert refused(open_sealed, BERTA, record, bytes(sealed), TERMS) in (
        Reason.NOT_AUTHENTIC,
        Reason.MALFORMED,
    )
    assert refused(open_sealed, BERTA, record, bytes(sealed[:40]), TERMS) is Reason.MALFORMED


def test_an_envelope_with_an_ephemeral_key_of_low_order_is_refused():
    sealed = seal_for(bundle(BERTA), held(), record_of())
    assert refused(open_sealed, BERTA, record_of(), bytes(32) + sealed[32:], TERMS) is Reason.MALFORMED


def sealed_content(monkeypatch, record, content):
    """Seal any content, as a generator that lies can."""
    monkeypatch.setattr(HeldKey, "_sealable", lambda self: content)
    sealed = seal_for(bundle(BERTA), held(), record)
    monkeypatch.undo()
    return sealed


def test_a_generator_that_seals_another_secret_than_the_records_is_found_out(monkeypatch):
    record, other = record_of(), held(name="other")
    right = held()._sealable()
    for content, reason in (
        (right[:32] + other.secret.to_bytes(), Reason.WRONG_KEY),
        (bytes(32) + right[32:], Reason.WRONG_KEY),
        (right[:-1], Reason.MALFORMED),
        (right[:31], Reason.MALFORMED),
        (right[:-1] + bytes([right[-1] ^ 1]), Reason.MALFORMED),
    ):
        sealed = sealed_content(monkeypatch, record, content)
        assert refused(open_sealed, BERTA, record, sealed, TERMS) is reason


def test_a_key_that_the_run_does_not_ask_for_is_not_even_opened():
    record = record_of()
    sealed = seal_for(bundle(BERTA), held(), record)
    assert refused(open_sealed, BERTA, record, sealed, KeyTerms()) is Reason.MALFORMED


def test_nothing_is_sealed_for_somebody_who_is_no_holder_or_under_another_record():
    record = record_of(holders=ids((ANNA, BERTA)))
    assert refused(seal_for, bundle(CARLA), held(), record) is Reason.NOT_LISTED
    assert refused(seal_for, bundle(BERTA), held(name="other"), record) is Reason.WRONG_KEY


def test_nobody_countersigns_without_the_secret_or_without_being_a_holder():
    record = record_of(holders=ids((ANNA, BERTA)))
    assert refused(countersign_record, BERTA, held(name="other"), record) is Reason.WRONG_KEY
    assert refused(countersign_record, BERTA, held(epoch=2), record) is Reason.WRONG_KEY
    assert refused(countersign_record, CARLA, held(), record) is Reason.NOT_LISTED
    assert refused(countersign_record, ANNA, held(), record) is Reason.NOT_LISTED


def test_a_held_key_with_another_set_secret_is_refused():
    assert refused(HeldKey, 1, held().secret, X25519PrivateKey.generate()) is Reason.WRONG_KEY


@pytest.mark.parametrize("subgroup", [False, True])
def test_a_held_key_is_read_back_from_a_file_that_nobody_else_can_read(tmp_path, subgroup):
    path = tmp_path / "key"
    secrets = HeldKey.generate("a-run", 7, TERMS._replace(subgroup=subgroup))
    before = os.umask(0)
    secrets.save(path)
    os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    again = HeldKey.load(path, TERMS)
    assert (again.epoch, again.public, again.public.run) == (7, secrets.public, "a-run")
    assert again.secret.to_bytes() == secrets.secret.to_bytes()
    assert again.agree(BERTA.agreement_public) == secrets.agree(BERTA.agreement_public)
    path.chmod(0o640)
    with pytest.raises(CertificateError, match="0640"):
        HeldKey.load(path, TERMS)


def test_a_damaged_or_destroyed_file_is_no_key(tmp_path):
    path = tmp_path / "key"
    held().save(path)
    content = path.read_bytes()
    for damaged in (content[:-1], content[:30], b"", content[:-33] + b"x" + content[-32:]):
        path.write_bytes(damaged)
        with pytest.raises(CertificateError, match=r"damaged|does not hold"):
            HeldKey.load(path, TERMS)
    path.write_bytes(content)
    with pytest.raises(CertificateError, match="2048"):
        HeldKey.load(path)
    HeldKey.destroy(path)
    with pytest.raises(CertificateError, match="cannot read"):
        HeldKey.load(path, TERMS)


def test_secrets_are_neither_shown_nor_pickled():
    text = repr(held()) + str(held())
    assert held().key_id.hex()[:16] in text
    assert str(int(held().secret.factors[0].prime))[:20] not in text
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(held())
    assert isinstance(held().secret, SecretKey)


def test_the_record_of_a_key_carries_its_public_half():
    assert record_of().key == KeyFields.of(held().public)
    assert record_of().key.public_key(TERMS) == held().public
