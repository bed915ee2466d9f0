"""The log's entries and heads, and the evidence that convicts a third party and nobody else."""

import dataclasses

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.merkle import Tree
from coterie.crypto.transparency import (
    BUNDLE,
    CERTIFICATE,
    Evidence,
    FalseLogError,
    LogBreach,
    LogKey,
    SignedHead,
    certificate_statement,
    contradiction,
    entry_leaf,
    validate_kind,
)
from coterie.crypto.verification import Reason, VerificationError

DIRECTORY = Ed25519PrivateKey.generate()
PUBLIC = DIRECTORY.public_key().public_bytes_raw()
KEY = LogKey(Ed25519PrivateKey.generate(), DIRECTORY)
OTHER = "thirdparty/directory"


def tree_of(*entries):
    tree = Tree()
    for entry in entries:
        tree.append(entry_leaf(CERTIFICATE, entry))
    return tree


def head(*entries, at):
    tree = tree_of(*entries)
    return KEY.sign(len(tree), tree.root(), at)


def test_a_head_verifies_under_the_directorys_key_and_nothing_else():
    signed = head(b"a", b"b", at=7)
    signed.verify(PUBLIC)
    # A new key of the log is as good as the one before: the directory certifies it.
    LogKey(Ed25519PrivateKey.generate(), DIRECTORY).sign(2, signed.root, 8).verify(PUBLIC)
    uncertified = LogKey(Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()).sign(2, signed.root, 7)
    for wrong in (
        dataclasses.replace(signed, size=3),
        dataclasses.replace(signed, root=bytes(32)),
        dataclasses.replace(signed, root=signed.root[:31]),
        dataclasses.replace(signed, time_ms=8),
        dataclasses.replace(signed, time_ms=1 << 63),
        dataclasses.replace(signed, log_key=uncertified.log_key),
        dataclasses.replace(signed, signature=b""),
        dataclasses.replace(signed, certification=signed.signature),
        uncertified,
    ):
        with pytest.raises(VerificationError):
            wrong.verify(PUBLIC)
    with pytest.raises(VerificationError):
        signed.verify(bytes(32))


def test_kinds_and_statements_are_told_apart_in_a_leaf():
    leaves = {entry_leaf(kind, text) for kind in (BUNDLE, CERTIFICATE) for text in (b"", b"a", b"ab")}
    assert len(leaves) == 6


@pytest.mark.parametrize("kind", ["", "A", "a_b", "-a", "a-", "a" * 33, "kind of"])
def test_a_kind_of_another_form_is_refused(kind):
    with pytest.raises(ValueError, match="no kind of an entry"):
        validate_kind(kind)


@pytest.mark.parametrize(
    "chain", [b"", b"text", b"-----BEGIN CERTIFICATE-----\n?\n-----END CERTIFICATE-----"]
)
def test_what_is_no_chain_has_no_statement(chain):
    with pytest.raises(VerificationError) as failed:
        certificate_statement(chain)
    assert failed.value.reason == Reason.MALFORMED


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=2, max_size=2))
def test_heads_that_one_log_signed_in_turn_never_contradict_each_other(grown):
    entries, at, heads = [], 0, []
    for more, later in grown:
        entries += [f"{len(entries)}".encode()] * more
        at += later
        heads.append(head(*entries, at=at))
    assert contradiction(*heads) is None
    assert contradiction(*heads[::-1]) is None


def test_two_roots_of_one_size_and_a_log_that_lost_entries_contradict():
    one, other = head(b"a", b"b", at=5), head(b"a", b"c", at=5)
    assert contradiction(one, other) == LogBreach.TWO_LOGS
    shorter = head(b"a", at=6)
    for pair in ((one, shorter), (shorter, one)):
        assert contradiction(*pair) == LogBreach.WENT_BACK
    assert contradiction(head(b"a", at=4), one) is None


@pytest.mark.parametrize(
    "evidence",
    [
        Evidence.of(OTHER, LogBreach.TWO_LOGS, head(b"a", at=1), head(b"b", at=1)),
        Evidence.of(OTHER, LogBreach.WENT_BACK, head(b"a", at=2), head(b"a", b"b", at=1)),
        Evidence.of(OTHER, LogBreach.NOT_CONSISTENT, head(b"a", at=1), head(b"b", b"c", at=2)),
        Evidence(OTHER, LogBreach.NOT_LOGGED, (head(b"a", at=1),), BUNDLE, b"statement"),
    ],
)
def test_evidence_comes_back_from_its_file_and_names_the_third_party(evidence):
    again = Evidence.from_json(evidence.to_json())
    assert again == evidence
    assert OTHER in again.text()
    assert again.convicts(PUBLIC) == (evidence.finding in (LogBreach.TWO_LOGS, LogBreach.WENT_BACK))
    error = FalseLogError(again)
    assert (error.reason == Reason.NOT_LOGGED) == (evidence.finding == LogBreach.NOT_LOGGED)
    assert error.exit_code == 31


def test_evidence_with_heads_that_nobody_signed_convicts_nobody():
    forged = dataclasses.replace(head(b"a", at=1), root=bytes(32))
    evidence = Evidence.of(OTHER, LogBreach.TWO_LOGS, head(b"a", at=1), forged)
    with pytest.raises(VerificationError):
        evidence.convicts(PUBLIC)


def test_the_log_itself_refutes_an_accusation_that_is_false():
    entries = [b"a", b"b", b"c"]
    tree, leaves = tree_of(*entries), frozenset(entry_leaf(CERTIFICATE, one) for one in entries)
    small, large = head(b"a", at=1), head(*entries, at=2)
    false = Evidence.of(OTHER, LogBreach.NOT_CONSISTENT, small, large)
    assert false.refuted_by([tree.root(1), tree.root(3)], leaves)
    true = Evidence.of(OTHER, LogBreach.NOT_CONSISTENT, small, head(b"x", b"b", b"c", at=2))
    assert not true.refuted_by([tree.root(1), tree.root(3)], leaves)
    for statement, refuted in ((b"b", True), (b"x", False)):
        missing = Evidence(OTHER, LogBreach.NOT_LOGGED, (large,), CERTIFICATE, statement)
        assert missing.refuted_by([tree.root(3)], leaves) == refuted


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        Evidence.of(OTHER, LogBreach.TWO_LOGS, head(b"a", at=1), head(b"b", at=1))
        .to_json()
        .replace(b"two-logs", b"not-logged"),
        Evidence.of(OTHER, LogBreach.TWO_LOGS, head(b"a", at=1), head(b"b", at=1))
        .to_json()
        .replace(b"two-logs", b"anything"),
    ],
)
def test_what_is_no_evidence_is_refused(text):
    with pytest.raises(VerificationError) as failed:
        Evidence.from_json(text)
    assert failed.value.reason == Reason.MALFORMED


@pytest.mark.parametrize("change", [{"size": "1"}, {"root": 3}, {"signature": "zz"}, {"time_ms": True}])
def test_what_is_no_head_is_refused(change):
    with pytest.raises(VerificationError):
        SignedHead.from_json({**head(b"a", at=1).to_json(), **change})
