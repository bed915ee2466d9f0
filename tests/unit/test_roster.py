"""Rosters: who may be sent secrets that clients share, as the operator's offline key says."""

import hashlib
import os
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.clocks import CLOCK_SKEW_S, moment
from coterie.crypto.roster import MOST_MEMBERS, Roster, load_roster_key, save_roster_key
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError

OPERATOR = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEY = OPERATOR.public_key().public_bytes_raw()
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
MEMBERS = tuple(sorted(hashlib.sha256(bytes([one])).digest() for one in range(5)))
NOW = 1_800_000_000


def signed(members=MEMBERS, begin=NOW - 10, end=NOW + 10, **how):
    return Roster.sign(OPERATOR, members, begin, end, **how)


def refused(roster, *, key=KEY, purpose="paillier", run="a-run", now=NOW):
    with pytest.raises(VerificationError) as failed:
        roster.verify(key, purpose=purpose, run=run, now=now)
    return failed.value


def test_a_roster_of_the_operator_holds_for_its_purpose_run_and_time():
    signed().verify(KEY, purpose="paillier", run="a-run", now=NOW)
    signed(run="a-run").verify(KEY, purpose="paillier", run="a-run", now=NOW)
    signed(purpose="graph-tags").verify(KEY, purpose="graph-tags", run="any", now=NOW - 10)


def test_members_may_be_given_in_any_order_and_are_kept_ascending():
    assert signed(MEMBERS[::-1]) == signed()
    assert signed(iter(MEMBERS)).members == MEMBERS


def test_a_roster_of_somebody_else_is_refused_with_the_key_that_was_expected():
    other = OTHER.public_key().public_bytes_raw()
    error = refused(signed(), key=other)
    assert error.reason is Reason.BAD_SIGNATURE
    assert other.hex()[:16] in error.message


@pytest.mark.parametrize(
    ("how", "reason", "named"),
    [
        ({"purpose": "graph-tags"}, Reason.WRONG_PURPOSE, "'paillier'"),
        ({"run": "b-run"}, Reason.WRONG_RUN, "'b-run'"),
        ({"now": NOW + 10 + CLOCK_SKEW_S}, Reason.EXPIRED, moment(NOW + 10)),
        ({"now": NOW - 11 - CLOCK_SKEW_S}, Reason.NOT_YET_VALID, moment(NOW - 10)),
    ],
)
def test_a_roster_for_something_else_or_another_time_is_refused(how, reason, named):
    error = refused(signed(run="a-run"), **how)
    assert (error.reason, named in error.message) == (reason, True)


@pytest.mark.parametrize(
    "change",
    [
        {"members": MEMBERS[:-1]},
        {"members": (*MEMBERS, b"\xff" * 32)},
        {"purpose": "other"},
        {"run": "a-run"},
        {"issued": NOW - 11},
        {"expiry": NOW + 11},
        {"signature": bytes(64)},
    ],
)
def test_nothing_of_a_signed_roster_can_be_changed(change):
    assert refused(replace(signed(), **change)).reason is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"members": MEMBERS[::-1]}, "not ascending"),
        ({"members": (MEMBERS[0], *MEMBERS)}, "on it twice"),
        ({"members": ()}, "0 members"),
        ({"members": tuple(one.to_bytes(32) for one in range(MOST_MEMBERS + 1))}, "members, expected 1 to"),
        ({"members": (b"short",)}, "32 bytes"),
        ({"purpose": "Upper"}, "purpose"),
        ({"expiry": NOW - 10}, "expires"),
        ({"signature": bytes(63)}, "63 bytes"),
    ],
)
def test_a_roster_of_another_form_is_refused_before_its_signature_is_looked_at(change, said):
    error = refused(replace(signed(), **change))
    assert (error.reason, said in error.message) == (Reason.MALFORMED, True)


def test_nobody_can_be_listed_twice():
    with pytest.raises(VerificationError, match="twice"):
        signed((*MEMBERS, MEMBERS[2]))


def test_who_is_revoked_is_no_longer_eligible():
    assert signed().eligible({MEMBERS[1], MEMBERS[3]}) == (MEMBERS[0], MEMBERS[2], MEMBERS[4])


@given(
    st.sets(st.binary(min_size=32, max_size=32), min_size=1, max_size=20),
    st.integers(0, 2**40),
    st.integers(1, 2**40),
    st.from_regex(r"[a-z0-9]{1,8}(-[a-z0-9]{1,4})?", fullmatch=True),
    st.sampled_from(["", "a-run", "run-2"]),
)
def test_what_is_written_as_text_is_read_as_the_same_roster(members, issued, lasts, purpose, run):
    roster = Roster.sign(OPERATOR, members, issued, issued + lasts, purpose=purpose, run=run)
    assert Roster.from_text(roster.to_text()) == roster
    assert Roster.from_text(roster.to_text().replace("\n", "\r\n")) == roster


def test_a_file_that_is_no_roster_or_was_edited_is_refused():
    text = signed().to_text()
    for damaged in (
        "",
        "hello",
        text.replace("purpose: paillier\n", ""),
        text + text,
        text.replace("member: ", "member: g", 1),
        text.replace("run: *", "run: *\nrun: *"),
        text.replace("-----END", "---END"),
    ):
        with pytest.raises(VerificationError, match="lines are not those of a roster"):
            Roster.from_text(damaged)


def test_a_roster_file_is_public_and_read_back(tmp_path):
    path = tmp_path / "roster.txt"
    before = os.umask(0o077)
    signed().save(path)
    os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    assert Roster.load(path) == signed()
    with pytest.raises(CertificateError, match="cannot read the roster"):
        Roster.load(tmp_path / "absent")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CertificateError, match="no text"):
        Roster.load(path)


def test_the_operators_public_key_is_read_back_from_its_file_and_no_other(tmp_path):
    path = tmp_path / "roster.pub"
    save_roster_key(path, KEY)
    assert load_roster_key(path) == KEY
    assert path.read_text().startswith("-----BEGIN PUBLIC KEY-----")
    path.write_text("no key")
    with pytest.raises(CertificateError, match="no Ed25519 public key"):
        load_roster_key(path)
