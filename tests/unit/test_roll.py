"""Delegations of a whole host: they hold for exactly the users of the roll, for its connection, run and time."""

from dataclasses import replace

import pytest

from coterie.crypto.clocks import CLOCK_SKEW_S
from coterie.crypto.identity import Delegation, Identity
from coterie.crypto.roll import RollDelegation, roll_of
from coterie.crypto.verification import Reason, VerificationError

SHOWN, RUN, NOW = bytes(range(32)), "run", 1_000_000
USERS = [Identity.generate() for _ in range(5)]
IDS = [one.participant_id for one in USERS]


@pytest.fixture
def signed():
    return RollDelegation.sign(USERS[0], SHOWN, RUN, NOW + 60, roll_of(IDS))


def reason_of(claim, ids=IDS, first=USERS[0], shown=SHOWN, run=RUN, now=NOW):
    with pytest.raises(VerificationError) as caught:
        claim.verify(first.signing_public, shown, run, now, roll_of(ids))
    return caught.value.reason


def test_a_roll_holds_for_its_users_until_it_expires(signed):
    signed.verify(USERS[0].signing_public, SHOWN, RUN, NOW + 59 + CLOCK_SKEW_S, roll_of(IDS))
    assert reason_of(signed, now=NOW + 60 + CLOCK_SKEW_S) is Reason.EXPIRED


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([*IDS, Identity.generate().participant_id], id="one more"),
        pytest.param(IDS[:-1], id="one less"),
        pytest.param([*IDS, IDS[-1]], id="one twice"),
        pytest.param([IDS[0], IDS[2], IDS[1], *IDS[3:]], id="another order"),
        pytest.param([*IDS[:-1], Identity.generate().participant_id], id="another user"),
    ],
)
def test_no_user_can_be_added_left_out_or_exchanged(signed, others):
    assert reason_of(signed, others) is Reason.BAD_SIGNATURE


def test_the_claim_cannot_be_made_to_fit_other_users(signed):
    others = [*IDS, Identity.generate().participant_id]
    altered = replace(signed, root=roll_of(others).root(), size=len(others))
    assert reason_of(altered, others) is Reason.BAD_SIGNATURE
    alone = RollDelegation.sign(Identity.generate(), SHOWN, RUN, NOW + 60, roll_of(IDS))
    assert reason_of(alone) is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"shown": bytes(32)}, Reason.WRONG_CERTIFICATE),
        ({"run": "other"}, Reason.WRONG_RUN),
        ({"first": USERS[1]}, Reason.BAD_SIGNATURE),
    ],
)
def test_a_roll_is_worth_nothing_elsewhere(signed, given, reason):
    assert reason_of(signed, **given) is reason


@pytest.mark.parametrize(
    "change",
    [
        {"certificate_fingerprint": bytes(31)},
        {"expiry": -1},
        {"expiry": NOW + 61},
        {"root": b""},
        {"size": 4},
        {"signature": b""},
    ],
)
def test_every_altered_field_of_a_roll_is_noticed(signed, change):
    assert reason_of(replace(signed, **change)) in {Reason.MALFORMED, Reason.BAD_SIGNATURE}


def test_a_roll_is_no_delegation_of_one_user(signed):
    claim = Delegation(signed.certificate_fingerprint, signed.run_id, signed.expiry, signed.signature)
    with pytest.raises(VerificationError):
        claim.verify(USERS[0].signing_public, SHOWN, RUN, NOW)
