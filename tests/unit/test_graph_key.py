"""Graph keys: records, envelopes, sealed embeddings, files; against a computation of the test's own."""

import hashlib
import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.clocks import CLOCK_SKEW_S
from coterie.crypto.envelope import seal_envelope
from coterie.crypto.graph_key import (
    GraphSecrets,
    GraphTerms,
    open_graph_secrets,
    seal_graph_secrets,
)
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError, CryptoError

from ..custody import ROSTER_KEY, bundle, ids, people, roster
from ..graphs import TERMS, graph_roster, signed

TAG_KEY, GROUP_KEY = bytes(range(32)), bytes(range(32, 64))


def explicit(purpose, *fields):
    """Encode fields as the protocol book says, without the product's code."""
    out = b"coterie/v1/" + purpose.encode()
    for field in fields:
        content = (
            field
            if isinstance(field, bytes)
            else (field.to_bytes(8, "big") if isinstance(field, int) else field.encode())
        )
        out += len(content).to_bytes(4, "big") + content
    return out


def reason(call, *arguments, **named):
    with pytest.raises(VerificationError) as failed:
        call(*arguments, **named)
    return failed.value.reason


def key_id(run="a-run", epoch=3):
    return hashlib.sha256(explicit("graph-key", run, epoch, TAG_KEY, GROUP_KEY)).digest()


def test_the_id_of_a_key_commits_to_both_secrets_run_and_epoch():
    assert GraphSecrets("a-run", 3, TAG_KEY, GROUP_KEY).key_id == key_id()
    others = {
        GraphSecrets("a-run", 3, GROUP_KEY, TAG_KEY).key_id,
        GraphSecrets("b-run", 3, TAG_KEY, GROUP_KEY).key_id,
        GraphSecrets("a-run", 4, TAG_KEY, GROUP_KEY).key_id,
    }
    assert len(others | {key_id()}) == 4


def test_an_embedding_is_sealed_as_the_book_says():
    secrets = GraphSecrets("a-run", 3, TAG_KEY, GROUP_KEY)
    embedding = np.array([1.5, -2.25, 0.0, 3e-9], np.float32)
    sealed = secrets.seal_embedding(embedding)
    assert len(sealed) == TERMS.sealed_bytes == 32 + 16 + 16
    info = explicit("graph-embedding", "a-run", 3, key_id())
    key = HKDF(SHA256(), 32, salt=sealed[:32], info=info).derive(GROUP_KEY)
    assert AESGCM(key).decrypt(bytes(12), sealed[32:], info) == embedding.astype("<f4").tobytes()
    np.testing.assert_array_equal(secrets.open_embedding(sealed, 4), embedding)


def test_the_same_embedding_is_never_sealed_to_the_same_bytes():
    secrets = GraphSecrets("a-run", 3, TAG_KEY, GROUP_KEY)
    sealed = {secrets.seal_embedding(np.ones(4, np.float32)) for _ in range(50)}
    assert len({one[:32] for one in sealed}) == len(sealed) == 50


def test_an_embedding_of_other_secrets_run_epoch_or_bytes_does_not_open():
    secrets = GraphSecrets("a-run", 3, TAG_KEY, GROUP_KEY)
    sealed = secrets.seal_embedding(np.ones(4, np.float32))
    for other in (
        GraphSecrets("a-run", 4, TAG_KEY, GROUP_KEY),
        GraphSecrets("b-run", 3, TAG_KEY, GROUP_KEY),
        GraphSecrets("a-run", 3, TAG_KEY, TAG_KEY),
    ):
        assert reason(other.open_embedding, sealed, 4) is Reason.NOT_AUTHENTIC
    for place in (0, 31, 32, len(sealed) - 1):
        bad = bytearray(sealed)
        bad[place] ^= 1
        assert reason(secrets.open_embedding, bytes(bad), 4) is Reason.NOT_AUTHENTIC
    assert reason(secrets.open_embedding, sealed, 5) is Reason.MALFORMED
    assert reason(secrets.open_embedding, sealed[:-1], 4) is Reason.MALFORMED


@pytest.mark.parametrize("bad", [np.ones((2, 2), np.float32), np.ones(4), np.array([np.nan, 1], np.float32)])
def test_what_is_no_vector_of_finite_floats_is_not_sealed(bad):
    with pytest.raises(CryptoError):
        GraphSecrets("a-run", 3, TAG_KEY, GROUP_KEY).seal_embedding(bad)


def test_a_record_is_signed_as_the_book_says():
    record, secrets, holders = signed()
    fields = (
        "a-run", 1, secrets.key_id, 4, 8, 20, 16, record.expiry, holders[0].participant_id,
        b"".join(ids(holders)),
    )  # fmt: skip
    public = Ed25519PublicKey.from_public_bytes(holders[0].signing_public)
    public.verify(record.signature, explicit("graph-record", *fields))
    record.verify(graph_roster(holders), ROSTER_KEY, run="a-run", now=int(time.time()))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"epoch": 2}, Reason.BAD_SIGNATURE),
        ({"key_id": bytes(32)}, Reason.BAD_SIGNATURE),
        ({"terms": TERMS._replace(most_tags=9)}, Reason.BAD_SIGNATURE),
        ({"terms": TERMS._replace(bucket_users=4)}, Reason.MALFORMED),
        ({"terms": TERMS._replace(dimension=0)}, Reason.MALFORMED),
        ({"terms": GraphTerms(4096, 1024, 20, 1024)}, Reason.MALFORMED),
        ({"epoch": 0}, Reason.MALFORMED),
        ({"key_id": b"short"}, Reason.MALFORMED),
        ({"holders": ()}, Reason.MALFORMED),
        ({"signature": bytes(63)}, Reason.MALFORMED),
    ],
)
def test_a_record_that_was_changed_is_refused(change, expected):
    record, _, _ = signed()
    assert reason(replace(record, **change).check) is expected


def test_a_record_is_refused_without_the_operators_roster():
    record, _, holders = signed()
    now = int(time.time())

    def verifying(listed, **how):
        return reason(record.verify, listed, ROSTER_KEY, **{"run": "a-run", "now": now, **how})

    assert verifying(roster(holders)) is Reason.WRONG_PURPOSE
    assert verifying(graph_roster(holders[:2])) is Reason.NOT_LISTED
    assert verifying(graph_roster(holders, run="b-run")) is Reason.WRONG_RUN
    assert verifying(graph_roster(holders), run="b-run") is Reason.WRONG_RUN
    assert verifying(graph_roster(holders), revoked={ids(holders)[2]}) is Reason.REVOKED
    assert verifying(graph_roster(holders), now=record.expiry + CLOCK_SKEW_S) is Reason.EXPIRED
    assert verifying(graph_roster(holders, expires_in=60)) is Reason.MALFORMED


def test_an_envelope_is_sealed_as_the_book_says_and_opens_for_its_holder_only():
    record, secrets, holders = signed()
    sealed = seal_graph_secrets(bundle(holders[1]), secrets, record)
    context = explicit(
        "graph-envelope", "a-run", 1, record.key_id, holders[0].participant_id, holders[1].participant_id,
        sealed[:32], holders[1].agreement_public,
    )  # fmt: skip
    X25519PublicKey.from_public_bytes(sealed[:32])
    key = HKDF(SHA256(), 32, salt=None, info=context).derive(holders[1].agree(sealed[:32]))
    content = AESGCM(key).decrypt(bytes(12), sealed[32:], context)
    opened = open_graph_secrets(holders[1], record, sealed)
    assert opened.tag_key == content[:32] == secrets.tag_key
    assert opened.key_id == secrets.key_id
    assert reason(open_graph_secrets, holders[2], record, sealed) is Reason.NOT_AUTHENTIC
    assert reason(open_graph_secrets, holders[1], record, sealed[:47]) is Reason.MALFORMED
    assert reason(open_graph_secrets, holders[1], replace(record, epoch=2), sealed) is Reason.NOT_AUTHENTIC


def test_secrets_are_not_sealed_for_others_than_holders_or_under_another_record():
    record, secrets, holders = signed()
    stranger = people(1, "stranger")[0]
    assert reason(seal_graph_secrets, bundle(stranger), secrets, record) is Reason.NOT_LISTED
    other = GraphSecrets.generate("a-run", 1)
    assert reason(seal_graph_secrets, bundle(holders[1]), other, record) is Reason.WRONG_KEY


def test_a_generator_that_seals_other_secrets_to_one_holder_is_found_out():
    record, _, holders = signed()
    agreement = holders[1].agreement_public

    def context(public):
        people_ = holders[0].participant_id, holders[1].participant_id
        return explicit("graph-envelope", "a-run", 1, record.key_id, *people_, public, agreement)

    lie, _ = seal_envelope(agreement, bytes(64), context)
    assert reason(open_graph_secrets, holders[1], record, lie) is Reason.WRONG_KEY
    short, _ = seal_envelope(agreement, bytes(40), context)
    assert reason(open_graph_secrets, holders[1], record, short) is Reason.MALFORMED


def test_secrets_come_back_from_their_file_and_damage_is_noticed(tmp_path):
    secrets = GraphSecrets("a-run", 3, TAG_KEY, GROUP_KEY)
    secrets.save(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    back = GraphSecrets.load(tmp_path / "key")
    assert (back.run, back.epoch, back.key_id) == ("a-run", 3, key_id())
    content = bytearray((tmp_path / "key").read_bytes())
    content[-40] ^= 1
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(CertificateError):
        GraphSecrets.load(tmp_path / "key")


def test_secrets_are_neither_shown_nor_pickled():
    secrets = GraphSecrets("a-run", 3, TAG_KEY, GROUP_KEY)
    assert TAG_KEY.hex() not in repr(secrets)
    with pytest.raises(TypeError):
        pickle.dumps(secrets)


@given(st.binary(max_size=200))
def test_no_bytes_open_as_an_embedding(noise):
    with pytest.raises(VerificationError):
        GraphSecrets("a-run", 3, TAG_KEY, GROUP_KEY).open_embedding(noise, 4)
