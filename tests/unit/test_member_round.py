"""A member's half of a round: what it sends, what it keeps first, when it sits out."""

import numpy as np
import pytest

from coterie.rounds.ledger import Entry, Ledger, revealed_hash
from coterie.rounds.member_round import Decline, Journal, Keep, MemberRound, Send, SitOut, Train
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import Declined, Step

CODES = np.arange(4, dtype=np.uint32)

STEPS = MaskedServer.steps


class Half:
    """Answers with the step and the briefing; a briefing of ``decline`` is declined."""

    made = 0

    def __init__(self, submitters: tuple[int, ...] = (0, 1)) -> None:
        self.submitters = submitters
        Half.made += 1
        self.number = Half.made
        self.forgotten = False

    def answer(self, step, briefing, codes=None):
        if briefing == b"decline":
            raise Declined(f"does not like {step.value}")
        if (step is Step.SUBMIT) != (codes is not None):
            raise AssertionError("codes belong to SUBMIT")
        return b"%d %s %s" % (self.number, step.value.encode(), briefing)

    def forget(self):
        self.forgotten = True


@pytest.fixture(autouse=True)
def _count():
    Half.made = 0


def plan_of(
    number: int = 7,
    purpose: str = "train",
    model: bytes = b"m" * 32,
    place: tuple[int, int] = (0, 0),
) -> SumPlan:
    return SumPlan(
        run_id="run",
        round=number,
        purpose=purpose,
        secure_sum="masked",
        model_sha256=model,
        layout_sha256=bytes(32),
        pass_number=place[0],
        part=place[1],
        members=(Member(bytes(32), "h"), Member(b"1" * 32, "h")),
    )


def member(journal: Journal | None = None, **fields) -> MemberRound:
    return MemberRound(plan_of(**fields), journal or Journal(), Half)


def through(one: MemberRound, upto: Step = Step.UNMASK) -> list:
    """Take a member through all steps before one and return all effects."""
    effects = []
    for step in STEPS:
        if step is upto:
            return effects
        effects += one.asked(step, b"b")
        if step is Step.SUBMIT:
            effects += one.trained(CODES)
    return effects


def test_a_member_keeps_that_it_joined_before_it_says_anything():
    assert member().asked(Step.ADVERTISE, b"") == [
        Keep(Journal(joined=7)),
        Send(Step.ADVERTISE, b"1 advertise "),
    ]


def test_a_member_of_a_clear_sum_joins_before_it_trains():
    one = member()
    assert one.asked(Step.SUBMIT, b"b") == [Keep(Journal(joined=7)), Train()]
    message = b"1 submit b"
    kept = Journal(joined=7, contribution=one.plan.hash + message)
    assert one.trained(CODES) == [Keep(kept), Send(Step.SUBMIT, message)]


def test_joining_forgets_the_contribution_of_an_older_round_and_keeps_the_ledger():
    ledger = Ledger((Entry("supports", 1, 2, bytes(32)),))
    one = member(Journal(6, b"old", ledger))
    (keep, _) = one.asked(Step.ADVERTISE, b"")
    assert keep == Keep(Journal(7, b"", ledger))


def test_every_step_is_answered_in_order():
    one = member()
    effects = [*through(one), *one.asked(Step.UNMASK, b"b")]
    assert [effect.step for effect in effects if isinstance(effect, Send)] == list(STEPS)
    assert Half.made == 1


@pytest.mark.parametrize("step", [step for step in STEPS if step is not Step.SUBMIT])
def test_the_same_question_gets_the_same_bytes_and_keeps_nothing(step):
    one = member()
    through(one, step)
    first = one.asked(step, b"b")[-1]
    assert one.asked(step, b"b") == [first]
    assert one.asked(step, b"something else") == [first]


def test_a_contribution_is_made_once_however_often_it_is_asked_for():
    one = member()
    through(one, Step.SUBMIT)
    assert one.asked(Step.SUBMIT, b"b") == [Train()]
    assert one.asked(Step.SUBMIT, b"b") == []
    sent = one.trained(CODES)[-1]
    assert one.asked(Step.SUBMIT, b"b") == [sent]
    assert one.asked(Step.SUBMIT, b"other") == [sent]
    assert one.trained(CODES + 1) == [], "a second vector is never made"
    assert one.failed("too late for that") == []
    assert one.asked(Step.SUBMIT, b"b") == [sent]


def test_a_contribution_that_nobody_asked_for_is_not_made():
    one = member()
    through(one, Step.SUBMIT)
    assert one.trained(CODES) == []


def test_the_briefing_of_a_contribution_is_the_first_one():
    one = member()
    through(one, Step.SUBMIT)
    one.asked(Step.SUBMIT, b"first")
    one.asked(Step.SUBMIT, b"second")
    assert one.trained(CODES)[-1].message == b"1 submit first"


def test_a_member_that_cannot_train_sits_out_and_forgets_its_secrets():
    one = member()
    through(one, Step.SUBMIT)
    one.asked(Step.SUBMIT, b"b")
    half = one._half
    assert one.failed("the local step diverged") == [SitOut("the local step diverged"), Decline()]
    assert half.forgotten
    assert one.trained(CODES) == []
    assert one.failed("again") == []
    assert one.asked(Step.SUBMIT, b"b") == [Decline()]


@pytest.mark.parametrize("step", [step for step in STEPS if step is not Step.SUBMIT])
def test_a_member_that_declines_says_why_once_and_takes_no_further_part(step):
    one = member()
    through(one, step)
    half = one._half
    effects = one.asked(step, b"decline")
    assert effects[-2:] == [SitOut(f"does not like {step.value}"), Decline()]
    assert not any(isinstance(effect, Send) for effect in effects)
    assert half is None or half.forgotten
    assert all(one.asked(later, b"b") == [Decline()] for later in Step)


def test_that_it_joined_is_kept_also_when_it_declines_at_once():
    assert member().asked(Step.ADVERTISE, b"decline")[0] == Keep(Journal(joined=7))


def test_a_contribution_that_is_declined_is_not_sent():
    one = member()
    through(one, Step.SUBMIT)
    one.asked(Step.SUBMIT, b"decline")
    assert one.trained(CODES) == [SitOut("does not like submit"), Decline()]
    assert one.journal.contribution == b""


# --- restarts --------------------------------------------------------------------------------------------------------


def test_a_round_at_or_below_the_last_one_is_refused():
    for joined in (7, 8, 100):
        one = member(Journal(joined=joined))
        assert one.reason
        assert all(one.asked(step, b"b") == [Decline()] for step in Step)
    assert Half.made == 0


def test_a_restart_before_the_contribution_was_kept_sits_the_round_out():
    one = member()
    through(one, Step.SUBMIT)
    again = member(one.journal)
    assert again.reason == "restarted in round 7 before its contribution was safe"
    assert all(again.asked(step, b"b") == [Decline()] for step in Step)
    assert again.trained(CODES) == []


def test_after_a_restart_the_same_bytes_are_sent_and_nothing_is_revealed():
    one = member()
    through(one, Step.CONFIRM)
    again = member(one.journal)
    message = b"1 submit b"
    assert again.asked(Step.SUBMIT, b"b") == [Send(Step.SUBMIT, message)]
    assert again.asked(Step.CONFIRM, b"b") == [
        SitOut("restarted in round 7: its secrets are gone"),
        Decline(),
    ]
    assert again.asked(Step.UNMASK, b"b") == [Decline()]
    assert Half.made == 1


def test_after_a_restart_unmask_gets_nothing():
    one = member()
    through(one, Step.UNMASK)
    assert member(one.journal).asked(Step.UNMASK, b"b") == [
        SitOut("restarted in round 7: its secrets are gone"),
        Decline(),
    ]


@pytest.mark.parametrize("step", [Step.ADVERTISE, Step.SHARE])
def test_an_old_question_that_was_late_does_not_keep_a_restarted_member_from_sending(step):
    one = member()
    through(one, Step.CONFIRM)
    again = member(one.journal)
    assert again.asked(step, b"b") == []
    assert again.asked(Step.SUBMIT, b"b") == [Send(Step.SUBMIT, b"1 submit b")]


@pytest.mark.parametrize("other", [{"model": b"n" * 32}, {"purpose": "evaluate"}])
def test_a_contribution_is_not_sent_under_another_plan_of_the_same_number(other):
    """A server restored from a backup begins a round once more."""
    one = member()
    through(one, Step.CONFIRM)
    again = member(one.journal, **other)
    assert again.reason == "round 7 was joined under another plan"
    assert all(again.asked(step, b"b") == [Decline()] for step in Step)
    assert Half.made == 1


def test_a_closed_round_is_forgotten_and_answers_nothing():
    one = member()
    through(one, Step.CONFIRM)
    half = one._half
    assert one.close() == [Keep(Journal(joined=7))]
    assert half.forgotten
    assert one.close() == []
    assert all(one.asked(step, b"b") == [] for step in Step)
    assert one.trained(CODES) == []
    assert member(one.journal).reason


def test_closing_a_round_without_a_contribution_keeps_nothing():
    one = member()
    through(one, Step.SHARE)
    assert one.close() == []


# --- which sums are revealed -----------------------------------------------------------------------------------------


def revealed(journal: Journal, submitters: tuple[int, ...] = (0, 1), **fields) -> tuple[Journal, list]:
    one = MemberRound(plan_of(**fields), journal, lambda: Half(submitters))
    through(one)
    effects = one.asked(Step.UNMASK, b"b")
    one.close()
    return one.journal, effects


def test_what_is_revealed_is_in_the_ledger_durably_before_it_is_sent():
    _, effects = revealed(Journal())
    assert effects[0] == Keep(effects[0].journal)
    assert effects[0].journal.ledger.last("train") == Entry("train", 0, 0, revealed_hash(plan_of(), (0, 1)))
    assert isinstance(effects[1], Send)


def test_a_sum_is_revealed_again_over_the_same_members_only():
    journal, _ = revealed(Journal(), number=1)
    again, effects = revealed(journal, number=2)
    assert isinstance(effects[-1], Send)
    assert again.ledger == journal.ledger
    one = MemberRound(plan_of(number=3), journal, lambda: Half((0,)))
    effects = through(one, Step.UNMASK)
    assert [type(one) for one in effects[-2:]] == [SitOut, Decline], "at CONFIRM, before anybody counts on it"
    assert "over other members" in effects[-2].reason
    _, effects = revealed(journal, number=3, model=b"n" * 32)
    assert isinstance(effects[-1], Decline), "of another model"


def test_passes_and_parts_never_go_back_and_each_purpose_counts_on_its_own():
    journal, _ = revealed(Journal(), number=1, place=(3, 1))
    for number, place in enumerate([(2, 1), (3, 0), (0, 0)], 2):
        one = MemberRound(plan_of(number=number, place=place), journal, Half)
        assert one.asked(Step.ADVERTISE, b"") == [Decline()]
        assert "which was revealed already" in one.reason
    for number, fields in enumerate(
        [{"place": (3, 2)}, {"place": (4, 0)}, {"place": (0, 0), "purpose": "evaluate"}], 5
    ):
        _, effects = revealed(journal, (0,), number=number, **fields)
        assert isinstance(effects[-1], Send), fields


def test_a_sum_that_was_not_revealed_binds_nobody():
    one = member(number=1)
    through(one, Step.UNMASK)
    one.close()
    _, effects = revealed(one.journal, (0,), number=2)
    assert isinstance(effects[-1], Send)


def test_an_answer_repeated_is_in_the_ledger_once():
    one = member()
    through(one)
    one.asked(Step.UNMASK, b"b")
    held = one.journal.ledger
    assert one.asked(Step.UNMASK, b"b") == [Send(Step.UNMASK, b"1 unmask b")]
    assert one.journal.ledger == held


def test_a_member_whose_contributions_cost_privacy_makes_one_for_each_place():
    one = MemberRound(plan_of(number=3), Journal(), Half, once=True)
    through(one)
    journal = one.journal
    assert journal.ledger.sent == (("train", 0, 0),)
    # Restarted in the round: the same bytes again.
    again = MemberRound(plan_of(number=3), journal, Half, once=True)
    assert [effect.message for effect in again.asked(Step.SUBMIT, b"b")] == [journal.contribution[32:]]
    # Asked in another round for the same place: nothing.
    repeated = MemberRound(plan_of(number=4), journal, Half, once=True)
    assert repeated.asked(Step.SUBMIT, b"b") == [Decline()]
    assert "each costs privacy" in repeated.reason
    later = MemberRound(plan_of(number=4, place=(1, 0)), journal, Half, once=True)
    assert Train() in later.asked(Step.SUBMIT, b"b")


def test_sums_of_items_are_repeated_because_their_noise_is_too():
    one = MemberRound(plan_of(number=3, purpose="supports"), Journal(), Half, once=True)
    through(one)
    assert one.journal.ledger.sent == ()


def test_without_noise_a_contribution_is_in_no_ledger():
    one = member(number=3)
    through(one)
    assert one.journal.ledger.sent == ()
