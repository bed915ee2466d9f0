"""The ledger of revealed sums: which sum may be revealed after which, and what a server may repeat."""

import dataclasses

import numpy as np
import pytest

from coterie.rounds.ledger import Entry, Ledger, revealed_hash
from coterie.rounds.server_round import Arrived, RoundOpened, RoundState, SumPhase, Tick, advance
from coterie.rounds.training import Purpose, RoundAbandoned, RoundSummed, Started, begin_round, step
from coterie.secure_sum.plan import Member, SumInput, SumPlan
from coterie.secure_sum.protocol import Declined, Step
from tests.simulation.rig.sums import LAYOUT, halves, identity
from tests.unit.test_training import new

COUNT = 7


def plan_of(number: int = 1, pass_number: int = 0, **changes) -> SumPlan:
    fields = halves("masked")[0]().plan_fields(COUNT, LAYOUT)
    plan = SumPlan(
        run_id="ledger",
        round=number,
        purpose="supports",
        secure_sum="masked",
        model_sha256=b"m" * 32,
        layout_sha256=b"l" * 32,
        inputs=(SumInput("catalogue", b"c" * 32),),
        members=tuple(Member(identity(n).participant_id, f"h{n}", 1 + n % 2) for n in range(COUNT)),
        pass_number=pass_number,
        **fields._asdict(),
    )
    return dataclasses.replace(plan, **changes)


MEMBERS = tuple(range(5))


@pytest.mark.parametrize(
    "changes",
    [{"round": 9}, {"threshold": 5}, {"min_sum": 3}, {"run_plan_sha256": b"r" * 32}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_sum_that_repeats_another_reveals_the_same(changes):
    assert revealed_hash(plan_of(**changes), MEMBERS) == revealed_hash(plan_of(), MEMBERS)


def test_what_is_revealed_does_not_depend_on_the_order_of_members():
    plan = plan_of()
    turned = dataclasses.replace(plan, members=plan.members[::-1])
    there = [COUNT - 1 - n for n in MEMBERS]
    assert revealed_hash(turned, there) == revealed_hash(plan, MEMBERS)


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "other"},
        {"purpose": "train"},
        {"pass_number": 1},
        {"part": 1},
        {"model_version": 1},
        {"model_sha256": b"n" * 32},
        {"layout_sha256": b"n" * 32},
        {"inputs": (SumInput("catalogue", b"d" * 32),)},
        {"inputs": ()},
        {"members": tuple(dataclasses.replace(one, users=3) for one in plan_of().members)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_any_other_sum_reveals_something_else(changes):
    assert revealed_hash(plan_of(**changes), MEMBERS) != revealed_hash(plan_of(), MEMBERS)


def test_other_members_or_other_places_of_a_sparse_sum_reveal_something_else():
    plan = plan_of()
    found = {
        revealed_hash(plan, MEMBERS),
        revealed_hash(plan, MEMBERS[1:]),
        revealed_hash(plan, (*MEMBERS, 5)),
        revealed_hash(plan, MEMBERS, b"\1"),
        revealed_hash(plan, MEMBERS, b"\2"),
    }
    assert len(found) == 5


def test_a_ledger_keeps_the_last_sum_of_each_purpose_and_comes_back_from_its_text():
    ledger = Ledger()
    for pass_number in range(50):
        for purpose in ("train", "supports", "evaluate"):
            ledger = ledger.with_revealed(plan_of(pass_number=pass_number, purpose=purpose), b"x" * 32)
    assert [one.purpose for one in ledger.entries] == ["evaluate", "supports", "train"]
    assert {one.place for one in ledger.entries} == {(49, 0)}
    assert Ledger.from_text(ledger.to_text()) == ledger
    assert Ledger.from_text("") == Ledger()
    assert len(ledger.to_text()) < 300


def test_contributions_that_cost_privacy_are_kept_by_place_and_come_back_from_the_text():
    first = plan_of(purpose="train", pass_number=2)
    ledger = (
        Ledger().with_revealed(plan_of(), b"r" * 32).with_sent(first).with_sent(plan_of(purpose="evaluate"))
    )
    assert Ledger.from_text(ledger.to_text()) == ledger
    for earlier in (
        first,
        plan_of(purpose="train", pass_number=1),
        plan_of(9, purpose="train", pass_number=2),
    ):
        assert "for part 0 of pass 2 (train) was made already, and each costs privacy" in ledger.sent_already(
            earlier
        )
    for later in (plan_of(purpose="train", pass_number=3), dataclasses.replace(first, part=1), plan_of()):
        assert ledger.sent_already(later) == ""
    # Only the last of each purpose is kept.
    assert len(ledger.with_sent(plan_of(purpose="train", pass_number=3)).sent) == 2
    assert ledger.with_revealed(plan_of(pass_number=1), b"r" * 32).sent == ledger.sent


@pytest.mark.parametrize("text", ["train", "train:1:2", "train:a:0:00", "train:0:0:xy", ","])
def test_what_is_no_ledger_is_not_read_as_one(text):
    with pytest.raises(ValueError, match=r"."):
        Ledger.from_text(text)


def test_a_ledger_refuses_what_differs_at_its_last_place_and_all_before():
    ledger = Ledger((Entry("supports", 2, 1, b"x" * 32),))
    assert ledger.with_revealed(plan_of(pass_number=2, part=1), b"x" * 32) == ledger
    with pytest.raises(Declined, match="over other members"):
        ledger.with_revealed(plan_of(pass_number=2, part=1), b"y" * 32)
    for pass_number, part in ((2, 0), (1, 5)):
        with pytest.raises(Declined, match="comes before part 1 of pass 2"):
            ledger.with_revealed(plan_of(pass_number=pass_number, part=part), b"x" * 32)


# --- the server's side -----------------------------------------------------------------------------------------------


class Round:
    """A masked round with real members, driven by hand."""

    def __init__(self, number: int = 1, only: frozenset[int] = frozenset()) -> None:
        server, member = halves("masked")
        plan = plan_of(
            number, min_sum=1, members=tuple(dataclasses.replace(m, users=1) for m in plan_of().members)
        )
        self.members = [member(plan, n) for n in range(COUNT)]
        self.state = RoundState.begin(plan, LAYOUT, server(), 1.0, only=only)
        self.state, _ = advance(self.state, RoundOpened(0.0))

    def answer(self, step: Step, without: tuple[int, ...] = ()) -> None:
        assert self.state.step is step
        codes = np.ones(LAYOUT.size, np.uint32)
        briefings = {n: self.state.briefing(n) for n in self.state.asked if n not in without}
        for n, briefing in briefings.items():
            message = self.members[n].answer(step, briefing, codes if step is Step.SUBMIT else None)
            self.state, _ = advance(self.state, Arrived(n, step, message, 0.0))
        if self.state.phase is SumPhase.COLLECT and self.state.step is step:
            self.state, _ = advance(self.state, Tick(self.state.deadline))


def test_a_round_that_ends_before_shares_are_asked_for_binds_nobody():
    one = Round()
    for this in (Step.ADVERTISE, Step.SHARE, Step.SUBMIT):
        assert one.state.bound == ()
        one.answer(this, without=(6,) if this is Step.SUBMIT else ())
    one.answer(Step.CONFIRM, without=tuple(range(5)))
    assert one.state.phase is SumPhase.ABANDONED
    assert one.state.bound == ()


def test_a_round_that_ends_after_shares_were_asked_for_binds_its_submitters():
    one = Round()
    for this in (Step.ADVERTISE, Step.SHARE, Step.SUBMIT, Step.CONFIRM):
        one.answer(this, without=(6,) if this is Step.SUBMIT else ())
    assert one.state.bound == (0, 1, 2, 3, 4, 5)
    one.answer(Step.UNMASK, without=tuple(range(5)))
    assert one.state.phase is SumPhase.ABANDONED
    assert one.state.bound == (0, 1, 2, 3, 4, 5)


def test_a_bound_round_asks_only_its_submitters_for_vectors_and_is_formed_over_all_of_them_or_not_at_all():
    only = frozenset(range(6))
    one = Round(2, only)
    for this in (Step.ADVERTISE, Step.SHARE):
        one.answer(this)
    assert set(one.state.asked) == only
    for this in (Step.SUBMIT, Step.CONFIRM, Step.UNMASK):
        one.answer(this)
    assert one.state.phase is SumPhase.UNMASK
    assert one.state.submitters == tuple(range(6))
    one = Round(2, only)
    for this in (Step.ADVERTISE, Step.SHARE):
        one.answer(this)
    one.answer(Step.SUBMIT, without=(3,))
    assert one.state.phase is SumPhase.ABANDONED
    assert one.state.reason.startswith("submit: 1 of the 6 members are missing")


def test_a_run_repeats_a_groups_items_over_the_same_members_and_no_other_sum():
    state = step(new(supports=True), Started(tuple(range(COUNT)), 2, 2, 1))
    state = step(begin_round(state), RoundAbandoned("nobody came"))
    assert (state.purpose, state.part, state.bound) == (Purpose.SUPPORTS, 0, ())
    state = step(begin_round(state), RoundAbandoned("too few shares", ("aa", "bb")))
    state = step(begin_round(state), RoundAbandoned("a member was away"))
    assert (state.part, state.bound) == (0, ("aa", "bb"))
    state = step(begin_round(state), RoundSummed())
    assert (state.part, state.bound) == (1, ())
    state = step(begin_round(state), RoundSummed())
    assert state.purpose is Purpose.EVALUATE
    state = step(begin_round(state), RoundAbandoned("too few shares", ("aa",)))
    assert (state.purpose, state.bound) == (Purpose.TRAIN, ())
