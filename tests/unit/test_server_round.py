"""The server's half of a round: every transition, every refusal, every point where it can die."""

import collections.abc
import dataclasses
import hashlib
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.rounds.server_round import (
    TRANSITIONS,
    Apply,
    Arrived,
    End,
    MembersDeclined,
    MembersLost,
    MembersRevoked,
    PartsArrived,
    Resumed,
    RoundOpened,
    RoundState,
    Save,
    Seal,
    SumApplied,
    SumPhase,
    Tick,
    Unmask,
    Unmasked,
    UnmaskFailed,
    advance,
)
from coterie.secure_sum.clear import ClearMember, ClearServer
from coterie.secure_sum.codes import CodesSum
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import Pieces, Step, Total, Vector, bad_message
from coterie.wire.refusal import ErrorReason, Refusal

LAYOUT = Layout((Segment.whole("counts", (3,), 7),))


class Stepwise(CodesSum):
    """A sum with every step and no secrets: each step asks those of the one before; two are needed."""

    name = "stepwise"
    steps = MaskedServer.steps

    def expected(self, plan, closed, step):
        if step is Step.ADVERTISE:
            return tuple(range(len(plan.members)))
        return tuple(sorted(closed[self.steps[self.steps.index(step) - 1]]))

    def pieces(self, plan, closed, step, member, running=None, subject=None):
        return Pieces(own=f"{step.value} for {member}".encode())

    def check(self, plan, closed, step, member, message):
        if message == b"bad":
            raise bad_message(step, "bad", "something else")

    def vector(self, plan, closed, notes, member, message, layout, sha256=b""):
        if message == b"bad":
            raise bad_message(Step.SUBMIT, "bad", "something else")
        return Vector(np.frombuffer(message, "<u4"), hashlib.sha256(message).digest() + b"note")

    def shortfall(self, plan, closed, step, arrived):
        return "" if len(arrived) >= 2 else f"{len(arrived)} are too few"

    def unmask(self, plan, closed, running):
        return Total(running)


def plan_of(members: int = 3, min_sum: int = 2, users: int = 1) -> SumPlan:
    return SumPlan(
        run_id="run",
        round=4,
        purpose="train",
        secure_sum="clear",
        model_sha256=bytes(32),
        layout_sha256=bytes(32),
        members=tuple(Member(bytes([n]) * 32, f"h{n}", users) for n in range(members)),
        min_sum=min_sum,
    )


def opened(half=None, members: int = 3, min_sum: int = 2) -> RoundState:
    state = RoundState.begin(plan_of(members, min_sum), LAYOUT, half or ClearServer(), patience_s=10.0)
    state, effects = advance(state, RoundOpened(0.0))
    assert effects == [Save()]
    return state


def codes(value: int) -> np.ndarray:
    return np.full(LAYOUT.size, value, np.uint32)


def vector(value: int) -> bytes:
    return ClearMember().answer(Step.SUBMIT, b"", codes(value))


def submit(member: int, value: int = 9, now: float = 1.0) -> Arrived:
    return Arrived(member, Step.SUBMIT, vector(value), now)


def play(state: RoundState, *events):
    """Return the state after all events and the effects of the last one."""
    effects = []
    for event in events:
        state, effects = advance(state, event)
    return state, effects


def refused(state: RoundState, event) -> Refusal:
    running = None if state.running is None else state.running.copy()
    with pytest.raises(Refusal) as caught:
        advance(state, event)
    if running is not None:
        assert np.array_equal(state.running, running)
    return caught.value


# --- the table of transitions ----------------------------------------------------------------------------------------


class Replaceable(Stepwise):
    """One step, in which another member stands in for each that is gone; whoever answers first is wrong once."""

    steps = (Step.SUBMIT,)

    def expected(self, plan, closed, step):
        return (0, 1)

    def stand_ins(self, plan, closed, step, arrived, asked, gone):
        return tuple(sorted(set(range(len(plan.members))).difference(asked)))[: len(gone)]


def parts_of(members):
    """Return one part with contributions of these members; none where there are no members."""
    notes = {member: bytes(32) for member in members}
    return ((notes, codes(9)),) if notes else ()


def walked(half, draw: random.Random) -> set[tuple[SumPhase, type, SumPhase]]:
    """Return the transitions of one round in which anything may happen at any time."""
    state = RoundState.begin(plan_of(4), LAYOUT, half, draw.choice([0.0, 5.0, 5.0]))
    state = replace(state, parted=draw.random() < 0.3)
    found = set()

    def take(event) -> None:
        nonlocal state
        before = state.phase
        try:
            state, _ = advance(state, event)
        except Refusal:
            return
        found.add((before, type(event), state.phase))

    take(RoundOpened(0.0))
    pace = draw.choice([0.25, 2.0])
    for number in range(40):
        now, some = number * pace, frozenset([draw.randrange(4)])
        message = vector(9) if isinstance(half, ClearServer) else codes(9).tobytes()
        events = [
            Arrived(draw.randrange(4), state.step, message, now),
            PartsArrived(parts_of(some.difference(state.arrived)), now, draw.random() < 0.5),
            MembersLost(some, now),
            MembersDeclined(some, now),
            MembersRevoked(some, now),
            Resumed(now),
            Tick(now),
        ]
        if state.phase is SumPhase.UNMASK:
            events += [Unmasked(codes(18)), UnmaskFailed("wrong", now, tuple(some))]
        if state.phase is SumPhase.APPLY:
            events += [SumApplied(draw.choice(["", "impossible"]))]
        take(draw.choice(events))
    for event in (
        Unmasked(codes(18)),
        UnmaskFailed("wrong", 11.0),
        SumApplied(),
        RoundOpened(11.0),
        Resumed(11.0),
    ):
        if state.phase.ended:
            take(event)
    return found


def test_rounds_take_the_transitions_of_the_table_and_no_others():
    taken = set()
    for seed in range(3000):
        taken |= walked((ClearServer(), Stepwise(), Replaceable())[seed % 3], random.Random(seed))
    listed = {
        (phase, event, after)
        for phase, by_event in TRANSITIONS.items()
        for event, afters in by_event.items()
        for after in afters
    }
    assert taken == listed


# --- contributions in parts ------------------------------------------------------------------------------------------


def parted(members: int = 4) -> RoundState:
    return replace(opened(members=members), parted=True)


def test_a_sum_in_parts_is_sealed_before_it_is_closed_without_somebody():
    state, effects = advance(parted(), PartsArrived(parts_of([0, 1]), 1.0))
    assert (effects, state.submitters) == ([], (0, 1))
    state, effects = advance(state, Tick(99.0))
    assert effects == [Seal()]
    # Asked once.
    assert advance(state, Tick(100.0))[1] == []
    # What was acknowledged meanwhile is in the sum.
    state, effects = advance(state, PartsArrived(parts_of([2]), 101.0, last=True))
    assert effects == [Save(Step.SUBMIT), Unmask()]
    assert state.submitters == (0, 1, 2)
    assert np.array_equal(state.running, codes(18))


def test_a_sum_in_parts_with_everybody_needs_no_seal_and_counts_nobody_twice():
    state, effects = advance(parted(), PartsArrived(parts_of([0, 1, 2, 3]), 1.0))
    assert effects == [Save(Step.SUBMIT), Unmask()]
    again, effects = advance(state, PartsArrived(parts_of([0]), 2.0))
    assert (again, effects) == (state, [])
    with pytest.raises(AssertionError, match="counted once"):
        play(parted(), PartsArrived(parts_of([0]), 1.0), PartsArrived(parts_of([0, 1]), 2.0))


def test_a_sum_in_parts_is_sealed_before_it_is_closed_without_a_member_that_was_revoked():
    state, effects = advance(parted(), MembersRevoked(frozenset([3]), 0.5))
    state, effects = advance(state, PartsArrived(parts_of([0, 1, 2]), 1.0))
    assert effects == [Seal()]
    # An intake had acknowledged the member's contribution before it heard of the revocation.
    state, effects = advance(state, PartsArrived(parts_of([3]), 2.0, last=True))
    assert effects == [Save(Step.SUBMIT), Unmask()]
    assert state.submitters == (0, 1, 2, 3)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_a_sum_in_parts_has_everybody_whom_an_intake_acknowledged(seed):
    for number in range(400):
        draw = random.Random(1000 * seed + number)
        state, acknowledged, under_way, open_ = parted(), set(), set(), True
        for moment in range(40):
            one, now = draw.randrange(4), moment * 0.5
            if open_ and draw.random() < 0.3 and one not in acknowledged:
                acknowledged.add(one)
                under_way.add(one)
            event = draw.choice(
                [
                    PartsArrived(parts_of(under_way), now),
                    MembersLost(frozenset([one]), now),
                    MembersDeclined(frozenset([one]), now),
                    MembersRevoked(frozenset([one]), now),
                    Tick(now),
                ]
            )
            state, effects = advance(state, event)
            if isinstance(event, PartsArrived):
                under_way.clear()
            if Seal() in effects:
                open_ = False
                state, effects = advance(state, PartsArrived(parts_of(under_way), now, last=True))
                under_way.clear()
            if state.phase is not SumPhase.COLLECT:
                break
        if state.phase is SumPhase.UNMASK:
            assert set(state.submitters) == acknowledged
            # Intakes take nothing more: the sum is sealed, or has everybody.
            assert not open_ or acknowledged == {0, 1, 2, 3}


def test_a_contribution_that_comes_beside_the_parts_is_to_come_through_an_intake():
    assert refused(parted(), submit(0)).reason == ErrorReason.ERROR_REASON_NOT_READY


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        (SumPhase.COLLECT, Unmasked(codes(1))),
        (SumPhase.COLLECT, SumApplied()),
        (SumPhase.UNMASK, SumApplied()),
        (SumPhase.APPLY, RoundOpened(1.0)),
    ],
    ids=lambda value: value.value if isinstance(value, SumPhase) else type(value).__name__,
)
def test_what_a_phase_does_not_have_is_a_fault_of_the_service(phase, event):
    state = dataclasses.replace(opened(), phase=phase)
    with pytest.raises(AssertionError, match=f"no {type(event).__name__} in phase {phase.value}"):
        advance(state, event)


# --- the way through -------------------------------------------------------------------------------------------------


def test_nobody_is_asked_before_the_round_is_opened():
    state = RoundState.begin(plan_of(), LAYOUT, ClearServer(), 10.0)
    assert state.asked == ()
    assert opened().asked == (0, 1, 2)


def test_a_clear_round_goes_through():
    state, effects = play(opened(), submit(0, 1), submit(1, 2))
    assert (state.phase, state.asked, state.submitters, effects) == (SumPhase.COLLECT, (2,), (0, 1), [])
    state, effects = advance(state, submit(2, 3))
    assert state.phase is SumPhase.UNMASK
    assert effects == [Save(Step.SUBMIT), Unmask()]
    assert np.array_equal(state.running, codes(6))
    state, effects = advance(state, Unmasked(state.running))
    assert state.phase is SumPhase.APPLY
    (effect,) = effects
    assert isinstance(effect, Apply)
    assert effect.users == 3
    assert np.array_equal(effect.total, codes(6))
    state, effects = advance(state, SumApplied())
    assert (state.phase, effects, state.reason) == (SumPhase.DONE, [End()], "")


def test_each_step_closes_into_the_next_with_its_messages_saved():
    state = opened(Stepwise())
    for step, after in zip(Stepwise.steps, Stepwise.steps[1:], strict=False):
        assert state.step is step
        assert state.briefing(1) == f"{step.value} for 1".encode()
        message = codes(1).tobytes() if step is Step.SUBMIT else b"fine"
        state, effects = play(state, *(Arrived(member, step, message, 1.0) for member in range(3)))
        assert effects == [Save(step)]
        assert (state.step, state.arrived, state.deadline) == (after, {}, 11.0)
    assert state.closed[Step.SHARE] == {0: b"fine", 1: b"fine", 2: b"fine"}
    assert state.closed[Step.SUBMIT][0].endswith(b"note")
    state, effects = play(state, *(Arrived(member, Step.UNMASK, b"fine", 1.0) for member in range(3)))
    assert effects == [Save(Step.UNMASK), Unmask()]


def test_users_are_those_of_the_submitters():
    state = RoundState.begin(plan_of(3, 1, users=5), LAYOUT, ClearServer(), 10.0)
    state, _ = play(state, RoundOpened(0.0), submit(0, 9), submit(2, 9))
    assert state.users == 10


@pytest.mark.parametrize("there", [{0, 1}, {1, 2}])
def test_at_the_deadline_a_step_goes_on_without_those_that_are_late(there):
    state, effects = play(opened(), *(submit(member) for member in there), Tick(9.9))
    assert effects == []
    state, effects = advance(state, Tick(10.0))
    assert effects == [Save(Step.SUBMIT), Unmask()]
    assert set(state.submitters) == there
    assert refused(state, submit(3 - sum(there), now=10.5)).name == "UNKNOWN_ROUND"


def test_a_message_that_comes_with_the_deadline_still_counts():
    state, effects = play(opened(), submit(0), submit(1, now=10.0))
    assert effects == [Save(Step.SUBMIT), Unmask()]
    assert state.submitters == (0, 1)


def test_below_the_floor_the_round_is_abandoned_with_the_reason():
    state, effects = play(opened(), submit(0), Tick(10.0))
    assert state.phase is SumPhase.ABANDONED
    assert effects == [Save(), End()]
    assert state.reason == "submit: 1 users submitted, the plan's floor is 2; no time is left"


def test_a_round_whose_members_are_all_lost_is_abandoned_at_once():
    state, effects = play(opened(), MembersLost(frozenset({0, 1, 2}), 1.0))
    assert state.phase is SumPhase.ABANDONED
    assert effects == [Save(), End()]
    assert "nobody else is expected" in state.reason


def test_lost_members_are_not_waited_for():
    state, effects = play(opened(), MembersLost(frozenset({2}), 1.0), submit(0), submit(1))
    assert effects == [Save(Step.SUBMIT), Unmask()]
    assert state.submitters == (0, 1)


def test_what_a_lost_member_sent_stays():
    state, _ = play(opened(), submit(0, 5), MembersLost(frozenset({0, 2}), 1.0), submit(1, 6))
    assert state.submitters == (0, 1)
    assert np.array_equal(state.running, codes(11))


def test_a_lost_member_that_is_heard_is_waited_for_again():
    state = opened(Stepwise())
    state, _ = play(state, MembersLost(frozenset({2}), 1.0), Arrived(2, Step.ADVERTISE, b"fine", 1.0))
    assert state.lost == frozenset()
    state, _ = play(state, *(Arrived(member, Step.ADVERTISE, b"fine", 1.0) for member in (0, 1)))
    state, effects = play(state, *(Arrived(member, Step.SHARE, b"fine", 1.0) for member in (0, 1)))
    assert (state.step, effects) == (Step.SHARE, [])


def test_a_lost_member_that_repeats_itself_is_waited_for_again():
    state, _ = play(opened(), submit(0), MembersLost(frozenset({0, 1}), 1.0), submit(0))
    assert state.lost == {1}


def test_a_step_closes_when_everybody_has_answered_but_those_that_decline():
    state, effects = play(opened(), submit(0), MembersDeclined(frozenset({1}), 1.0), submit(2))
    assert effects == [Save(Step.SUBMIT), Unmask()]
    assert state.submitters == (0, 2)


def test_the_last_word_may_be_that_somebody_declines():
    state, effects = play(opened(), submit(0), submit(2), MembersDeclined(frozenset({1}), 1.0))
    assert effects == [Save(Step.SUBMIT), Unmask()]
    assert state.submitters == (0, 2)


def test_who_declines_counts_towards_no_floor():
    state, effects = play(opened(), submit(0), MembersDeclined(frozenset({1, 2}), 1.0))
    assert effects == [Save(), End()]
    assert state.reason == "submit: 1 users submitted, the plan's floor is 2; nobody else is expected"


def test_who_declined_is_asked_no_more_and_waited_for_in_no_later_step():
    state, _ = play(
        opened(Stepwise()), *(Arrived(member, Step.ADVERTISE, b"fine", 1.0) for member in (0, 1, 2))
    )
    state, _ = play(state, Arrived(2, Step.SHARE, b"fine", 1.0), MembersDeclined(frozenset({2}), 1.0))
    assert state.asked == (0, 1)
    state, _ = play(state, *(Arrived(member, Step.SHARE, b"fine", 1.0) for member in (0, 1)))
    assert (state.step, state.expected, state.asked) == (Step.SUBMIT, {0, 1, 2}, (0, 1))
    # Its message of before was late: it counts, and nothing more is expected from it.
    sent = [Arrived(member, Step.SUBMIT, codes(9).tobytes(), 1.0) for member in (0, 2, 1)]
    state, effects = play(state, *sent)
    assert effects == [Save(Step.SUBMIT)]
    assert (state.step, state.asked) == (Step.CONFIRM, (0, 1))


def test_a_restarted_server_asks_those_that_declined_again():
    state, _ = play(opened(), submit(0), MembersDeclined(frozenset({1}), 1.0))
    resumed, _ = advance(durable(state), Resumed(50.0))
    assert resumed.asked == (0, 1, 2)


def test_a_revoked_member_is_neither_asked_nor_waited_for_nor_taken():
    state, _ = play(opened(), MembersRevoked(frozenset({1}), 1.0))
    assert state.asked == (0, 2)
    assert refused(state, submit(1)).name == "UNKNOWN_PARTICIPANT"
    state, effects = play(state, submit(0), submit(2))
    assert effects == [Save(Step.SUBMIT), Unmask()]
    assert state.submitters == (0, 2)


def test_who_answered_the_first_step_before_it_was_revoked_takes_part_to_the_end():
    adverts = [Arrived(member, Step.ADVERTISE, b"fine", 1.0) for member in (0, 1, 2)]
    state, _ = play(opened(Stepwise()), adverts[0], MembersRevoked(frozenset({0}), 1.0), adverts[1])
    assert state.asked == (2,)
    state, _ = play(state, adverts[2], MembersRevoked(frozenset({1}), 1.0))
    assert (state.step, state.asked) == (Step.SHARE, (0, 1, 2))


def test_a_round_of_which_too_many_are_revoked_is_abandoned_at_once():
    state, effects = play(opened(), MembersRevoked(frozenset({0, 1}), 1.0), submit(2))
    assert effects == [Save(), End()]
    assert "1 users submitted, the plan's floor is 2" in state.reason


def test_a_step_that_waits_for_nobody_is_not_opened_in_vain():
    """Everybody has answered and is gone: the next step's shortfall is known at once, and its saves are in order."""
    state = opened(Stepwise())
    state, _ = play(state, Arrived(0, Step.ADVERTISE, b"fine", 1.0), Arrived(1, Step.ADVERTISE, b"fine", 1.0))
    state, _ = advance(state, MembersLost(frozenset({0, 1}), 1.0))
    state, effects = advance(state, MembersLost(frozenset({2}), 1.0))
    assert state.phase is SumPhase.ABANDONED
    assert effects == [Save(Step.ADVERTISE), Save(), End()]
    assert state.reason.startswith("share: 0 are too few")


@pytest.mark.parametrize(
    ("event", "reason"),
    [(UnmaskFailed("too few answers are right", 0.0), "too few answers are right")],
)
def test_a_sum_that_cannot_be_formed_abandons_the_round(event, reason):
    state, effects = play(opened(), submit(0), submit(1), submit(2), event)
    assert (state.phase, state.reason, effects) == (SumPhase.ABANDONED, reason, [Save(), End()])


def test_an_impossible_sum_abandons_the_round():
    state, _ = play(opened(), submit(0), submit(1), submit(2))
    state, effects = play(state, Unmasked(codes(1)), SumApplied("beyond its bounds"))
    assert (state.phase, state.reason, effects) == (SumPhase.ABANDONED, "beyond its bounds", [Save(), End()])


@pytest.mark.parametrize("ended", [SumPhase.DONE, SumPhase.ABANDONED])
@pytest.mark.parametrize(
    "event",
    [
        RoundOpened(1.0),
        Resumed(1.0),
        Tick(99.0),
        MembersLost(frozenset({0}), 1.0),
        MembersDeclined(frozenset({0}), 1.0),
        MembersRevoked(frozenset({0}), 1.0),
        Unmasked(codes(1)),
        UnmaskFailed("x", 0.0),
        SumApplied(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_nothing_happens_to_a_round_that_has_ended(ended, event):
    state = dataclasses.replace(opened(), phase=ended)
    assert advance(state, event) == (state, [])


@pytest.mark.parametrize(
    ("events", "out_of_turn"),
    [
        ([], RoundOpened(1.0)),
        ([], Unmasked(codes(1))),
        ([], UnmaskFailed("x", 0.0)),
        ([], SumApplied()),
        ([submit(0), submit(1), submit(2)], SumApplied()),
        ([submit(0), submit(1), submit(2), Unmasked(codes(1))], Unmasked(codes(1))),
        ([submit(0), submit(1), submit(2), Unmasked(codes(1))], UnmaskFailed("x", 0.0)),
    ],
)
def test_what_a_service_was_not_asked_for_is_a_fault_of_the_service(events, out_of_turn):
    state, _ = play(opened(), *events) if events else (opened(), [])
    with pytest.raises(AssertionError, match="expects"):
        advance(state, out_of_turn)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_the_same_bytes_again_are_acknowledged_and_counted_once():
    state, _ = advance(opened(), submit(0, 5))
    again, effects = advance(state, submit(0, 5))
    assert effects == []
    assert np.array_equal(again.running, codes(5))
    assert again == state


def test_other_bytes_of_the_same_member_are_a_conflict():
    state, _ = advance(opened(), submit(0, 5))
    assert refused(state, submit(0, 6)).name == "CONFLICT"


def test_after_the_close_the_same_bytes_are_acknowledged_and_others_are_a_conflict():
    state, _ = play(opened(), submit(0, 5), submit(1, 5), submit(2, 5))
    assert advance(state, submit(0, 5)) == (state, [])
    assert refused(state, submit(0, 6)).name == "CONFLICT"
    done, _ = play(state, Unmasked(codes(15)), SumApplied())
    assert advance(done, submit(2, 5)) == (done, [])
    assert refused(done, submit(2, 6)).name == "CONFLICT"


def test_a_repetition_in_another_step_is_compared_with_the_bytes_that_were_closed():
    state = opened(Stepwise())
    state, _ = play(state, *(Arrived(member, Step.ADVERTISE, b"fine", 1.0) for member in range(3)))
    assert advance(state, Arrived(0, Step.ADVERTISE, b"fine", 1.0)) == (state, [])
    assert refused(state, Arrived(0, Step.ADVERTISE, b"other", 1.0)).name == "CONFLICT"


def test_a_late_contribution_is_refused_and_names_what_is_open():
    state, _ = play(opened(), submit(0), submit(1), Tick(10.0))
    refusal = refused(state, submit(2, now=10.1))
    assert (refusal.name, refusal.expected) == ("UNKNOWN_ROUND", "the next round")


@pytest.mark.parametrize("step", [step for step in Stepwise.steps if step is not Step.ADVERTISE])
def test_a_message_for_a_step_that_is_not_open_is_refused(step):
    refusal = refused(opened(Stepwise()), Arrived(0, step, codes(1).tobytes(), 1.0))
    assert (refusal.name, refusal.expected) == ("UNKNOWN_ROUND", "advertise")


@pytest.mark.parametrize("member", [3, 1000])
def test_somebody_outside_the_cohort_is_refused(member):
    assert refused(opened(), submit(member)).name == "UNKNOWN_PARTICIPANT"


def test_a_member_that_missed_a_step_takes_no_part_in_the_next():
    state, _ = play(
        opened(Stepwise()), *(Arrived(n, Step.ADVERTISE, b"fine", 1.0) for n in (0, 1)), Tick(10.0)
    )
    assert state.asked == (0, 1)
    assert refused(state, Arrived(2, Step.SHARE, b"fine", 11.0)).name == "UNKNOWN_PARTICIPANT"


def test_what_the_sum_refuses_changes_nothing():
    state = opened(Stepwise())
    assert refused(state, Arrived(0, Step.ADVERTISE, b"bad", 1.0)).name == "INVALID_FIELD"
    assert state.asked == (0, 1, 2)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\xff\xff", "INVALID_FIELD"),
        (vector(9)[:-4], "INVALID_FIELD"),
        (ClearMember().answer(Step.SUBMIT, b"", np.ones(4, np.uint32)), "WRONG_SHAPE"),
        (ClearMember().answer(Step.SUBMIT, b"", np.ones(2, np.uint32)), "WRONG_SHAPE"),
        (vector(0), "INVALID_FIELD"),
        (vector(16), "INVALID_FIELD"),
        (vector(2**32 - 1), "INVALID_FIELD"),
    ],
)
def test_a_contribution_that_does_not_fit_is_refused(message, reason):
    assert refused(opened(), Arrived(0, Step.SUBMIT, message, 1.0)).name == reason


def test_the_states_before_keep_their_sum():
    before = opened()
    first, _ = advance(before, submit(0, 5))
    advance(first, submit(1, 6))
    assert np.array_equal(before.running, codes(0))
    assert np.array_equal(first.running, codes(5))


@given(st.data())
def test_where_messages_lie_is_not_the_machines_affair(data):
    def beside(held, member, message):
        kept.append(message)
        return Beside(held, member)

    class Beside(dict):
        """Messages by where they are in a list."""

        def __init__(self, held, member):
            super().__init__({**getattr(held, "places", {}), member: len(kept) - 1})
            self.places = dict(self)

        def __getitem__(self, member):
            return kept[self.places[member]]

        get = collections.abc.Mapping.get

    kept = []
    here = opened(Stepwise())
    there = dataclasses.replace(here, keep=beside)
    for step in MaskedServer.steps:
        for member in data.draw(st.permutations(range(3))):
            bad = Arrived(member, step, b"bad", 1.0)
            assert refused(there, bad).name == refused(here, bad).name
            message = codes(member).tobytes() if step is Step.SUBMIT else data.draw(st.binary(max_size=2))
            event = Arrived(member, step, message, 1.0)
            here, effects = advance(here, event)
            there, same = advance(there, event)
            assert [type(one) for one in same] == [type(one) for one in effects]
            # The same bytes again are no news, other ones a conflict; wherever the first are.
            assert advance(there, event)[1] == []
            if step is not Step.SUBMIT:
                other = dataclasses.replace(event, message=message + b"!")
                assert refused(there, other).name == refused(here, other).name == "CONFLICT"
    assert there.phase is here.phase


# --- what survives ---------------------------------------------------------------------------------------------------


def durable(state: RoundState) -> RoundState:
    """Return what is left of a state that was saved: no message of the open step."""
    return RoundState(
        state.plan,
        state.layout,
        state.half,
        state.patience_s,
        state.step,
        state.phase,
        closed=state.closed,
        running=state.running if Step.SUBMIT in state.closed else None,
        reason=state.reason,
    )


def test_submit_opens_again_after_a_restart_with_its_full_time_and_nothing_summed():
    state, _ = play(opened(), submit(0, 5), MembersLost(frozenset({2}), 1.0))
    state, effects = advance(durable(state), Resumed(100.0))
    assert effects == []
    assert (state.phase, state.step, state.asked, state.deadline) == (
        SumPhase.COLLECT,
        Step.SUBMIT,
        (0, 1, 2),
        110.0,
    )
    assert np.array_equal(state.running, codes(0))
    state, _ = play(state, submit(0, 5, 101.0), submit(1, 6, 101.0), submit(2, 7, 101.0))
    assert np.array_equal(state.running, codes(18))


@pytest.mark.parametrize("step", MaskedServer.steps)
def test_a_restart_in_each_step_goes_on_with_that_step(step):
    state = opened(Stepwise())
    for one in Stepwise.steps[: Stepwise.steps.index(step)]:
        message = codes(2).tobytes() if one is Step.SUBMIT else b"fine"
        state, _ = play(state, *(Arrived(member, one, message, 1.0) for member in range(3)))
    state, _ = advance(state, Arrived(0, step, codes(2).tobytes(), 1.0))
    resumed, effects = advance(durable(state), Resumed(50.0))
    assert (resumed.step, resumed.asked, effects) == (step, (0, 1, 2), [])
    if Step.SUBMIT in resumed.closed:
        assert np.array_equal(resumed.running, codes(6))
        assert resumed.submitters == (0, 1, 2)


def test_a_restart_while_the_sum_is_computed_computes_it_again():
    state, _ = play(opened(), submit(0), submit(1), submit(2))
    resumed, effects = advance(durable(state), Resumed(50.0))
    assert effects == [Unmask()]
    assert resumed.phase is SumPhase.UNMASK
    assert np.array_equal(resumed.running, state.running)
    # Nobody dropped out by the restart.
    assert set(resumed.answered) == set(state.answered) == {0, 1, 2}


def test_a_restart_before_the_model_was_changed_computes_the_sum_again():
    state, _ = play(opened(), submit(0), submit(1), submit(2))
    applying, _ = advance(state, Unmasked(state.running))
    _, effects = advance(durable(applying), Resumed(50.0))
    assert effects == [Unmask()]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(0, 5), st.integers(1, 15)),
            st.tuples(st.just("lost"), st.integers(0, 4), st.just(0)),
            st.tuples(st.just("declined"), st.integers(0, 4), st.just(0)),
            st.tuples(st.just("tick"), st.integers(0, 12), st.just(0)),
            st.tuples(st.just("restart"), st.just(0), st.just(0)),
        ),
        max_size=30,
    )
)
def test_whatever_happens_the_sum_is_that_of_the_submitters_each_once(events):
    state = opened(members=5, min_sum=3)
    now, sent = 0.0, {}
    for what, number, value in events:
        before = state
        try:
            if what == "submit":
                state, _ = advance(state, submit(number, value, now))
                sent.setdefault(number, value)
            elif what == "lost":
                state, _ = advance(state, MembersLost(frozenset({number}), now))
            elif what == "declined":
                state, _ = advance(state, MembersDeclined(frozenset({number}), now))
            elif what == "tick":
                now += number
                state, _ = advance(state, Tick(now))
            elif not state.phase.ended:
                state, _ = advance(durable(state), Resumed(now))
                if state.phase is SumPhase.COLLECT:
                    sent = {}
        except Refusal:
            assert state is before
        if state.phase is SumPhase.ABANDONED:
            assert state.running is None
            return
        assert np.array_equal(state.running, codes(sum(sent[member] for member in state.submitters)))
        if before.phase is not SumPhase.COLLECT:
            assert state.submitters == before.submitters
        if state.phase is SumPhase.UNMASK:
            assert state.users >= 3
