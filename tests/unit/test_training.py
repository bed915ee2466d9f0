"""A run of rounds: which sum comes next, when it ends, and which version is chosen."""

from __future__ import annotations

import dataclasses
import json
import random
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.rounds.prefix import Prefix
from coterie.rounds.training import (
    PURPOSES,
    TRANSITIONS,
    Event,
    Grown,
    Purpose,
    RoundAbandoned,
    RoundSummed,
    ServerBehind,
    Started,
    Training,
    TrainingPhase,
    TrainingResumed,
    TrainingStopped,
    begin_round,
    step,
)

SUPPORTS, EVALUATE, TRAIN = Purpose.SUPPORTS, Purpose.EVALUATE, Purpose.TRAIN
STARTED = Started(users=(4, 2, 9), groups=2, parts=3, evaluation_parts=2)


def new(**changes: Any) -> Training:
    """Return a run that has not begun: four passes, an evaluation after every second."""
    plan: dict[str, Any] = {
        "passes": 4,
        "evaluate_every": 2,
        "patience": 0,
        "choose_by": "ndcg@10",
        "supports": True,
        "most_abandoned": 5,
    }
    return Training(**{**plan, **changes})


def after(state: Training, *events: Event) -> Training:
    for event in events:
        state = step(state, event)
    return state


def measured(value: float, users: float = 10.0, name: str = "ndcg@10") -> RoundSummed:
    """Return a sum of metrics with this mean."""
    return RoundSummed({name: (value * users, users)})


def evaluated(state: Training, values: Iterable[float | None]) -> Training:
    """Go on until the run ends: each evaluation finds the next of these means, or is abandoned for None."""
    found = iter(values)
    while not state.phase.ended:
        if state.purpose is EVALUATE:
            value = next(found)
            state = step(state, RoundAbandoned("too few") if value is None else measured(value))
        else:
            state = step(state, RoundSummed())
    return state


def quick(**changes: Any) -> Training:
    """Return a run of one cohort a pass, evaluated after each, whose groups are not asked."""
    plan = {"supports": False, "evaluate_every": 1, "passes": 6, **changes}
    return step(new(**plan), Started((1, 2), groups=1, parts=1, evaluation_parts=1))


# --- which sum comes next


def test_a_run_gathers_until_it_is_started_and_then_knows_its_population() -> None:
    state = step(new(), STARTED)
    assert new().phase is TrainingPhase.GATHER
    assert state.phase is TrainingPhase.ROUNDS
    assert (state.users, state.groups, state.parts, state.evaluation_parts) == ((4, 2, 9), 2, 3, 2)


@pytest.mark.parametrize(("supports", "first"), [(True, SUPPORTS), (False, EVALUATE)])
def test_groups_are_asked_for_their_items_first_where_the_system_wants_to_know(
    supports: bool, first: Purpose
) -> None:
    state = step(new(supports=supports), STARTED)
    assert (state.purpose, state.part) == (first, 0)


def test_each_cohort_is_visited_once_in_each_pass_and_the_model_is_measured_first_between_and_last() -> None:
    visited: list[tuple[Purpose, int, int]] = []
    state = step(new(), STARTED)
    while not state.phase.ended:
        visited.append((state.purpose, state.part, state.pass_number))
        state = step(state, measured(0.5) if state.purpose is EVALUATE else RoundSummed())
    supports = [(SUPPORTS, part, 0) for part in range(2)]
    evaluation = {passes: [(EVALUATE, part, passes) for part in range(2)] for passes in (0, 2, 4)}
    training = {passes: [(TRAIN, part, passes) for part in range(3)] for passes in range(4)}
    assert visited == [
        *supports,
        *evaluation[0],
        *training[0],
        *training[1],
        *evaluation[2],
        *training[2],
        *training[3],
        *evaluation[4],
    ]
    assert state.phase is TrainingPhase.DONE
    assert state.reason == ""


def test_groups_that_are_drawn_anew_are_asked_for_their_items_again_before_they_train() -> None:
    visited: list[tuple[Purpose, int]] = []
    state = step(new(redraw=2, passes=5, evaluate_every=4), STARTED)
    while not state.phase.ended:
        if (state.purpose, state.pass_number) not in visited:
            visited.append((state.purpose, state.pass_number))
        state = step(state, measured(0.5) if state.purpose is EVALUATE else RoundSummed())
    asked = [(SUPPORTS, 0), (EVALUATE, 0), (TRAIN, 0), (TRAIN, 1), (SUPPORTS, 2), (TRAIN, 2), (TRAIN, 3)]
    assert visited == [*asked, (EVALUATE, 4), (SUPPORTS, 4), (TRAIN, 4), (EVALUATE, 5)]


def test_groups_that_are_drawn_anew_are_not_asked_by_a_system_that_never_asks() -> None:
    state = evaluated(step(new(redraw=1, supports=False), STARTED), [0.5] * 9)
    assert state.phase is TrainingPhase.DONE
    assert state.version == 4 * 3


def test_a_group_that_could_not_be_asked_after_a_drawing_is_asked_again() -> None:
    state = step(new(redraw=1, passes=3, evaluate_every=3), STARTED)
    while (state.purpose, state.pass_number) != (SUPPORTS, 1):
        state = step(state, measured(0.5) if state.purpose is EVALUATE else RoundSummed())
    again = after(state, RoundAbandoned("too few"))
    assert (again.purpose, again.part, again.pass_number) == (SUPPORTS, 0, 1)
    assert after(again, RoundSummed(), RoundSummed()).purpose is TRAIN


def test_the_last_pass_is_measured_even_where_none_is_due() -> None:
    state = evaluated(quick(passes=5, evaluate_every=3), [0.1, 0.2, 0.3])
    assert [one.pass_number for one in state.evaluations] == [0, 3, 5]


def test_a_run_without_passes_is_measured_once() -> None:
    state = evaluated(quick(passes=0), [0.1])
    assert [(one.version, one.pass_number) for one in state.evaluations] == [(0, 0)]


def test_only_a_sum_of_training_makes_a_version() -> None:
    state = after(step(new(), STARTED), RoundSummed(), RoundSummed(), measured(0.1), measured(0.1))
    assert (state.purpose, state.version) == (TRAIN, 0)
    assert step(state, RoundSummed()).version == 1


def test_round_numbers_only_grow_whatever_becomes_of_the_rounds() -> None:
    state, taken = step(new(), STARTED), []
    for event in (
        RoundSummed(),
        RoundAbandoned("x"),
        RoundSummed(),
        RoundAbandoned("x"),
        measured(0.5),
        RoundSummed(),
    ):
        state = begin_round(state)
        taken.append(state.round)
        state = step(state, event)
    assert taken == [1, 2, 3, 4, 5, 6]


# --- what is measured


def test_an_evaluation_is_the_mean_over_the_users_of_all_its_sums() -> None:
    state = after(step(new(supports=False), STARTED), measured(0.2, 30), measured(0.6, 10))
    (one,) = state.evaluations
    assert one.metrics == {"ndcg@10": pytest.approx(0.3)}
    assert one.users == {"ndcg@10": 40}
    assert state.measured == {}
    assert state.chosen == one


def test_metrics_over_nobody_have_no_mean() -> None:
    nobody = RoundSummed({"ndcg@10": (3.0, 6.0), "recall@10": (0.0, 0.0)})
    state = after(step(new(supports=False), STARTED), nobody, nobody)
    assert state.evaluations[0].metrics == {"ndcg@10": 0.5}
    assert state.evaluations[0].users == {"ndcg@10": 12}


def test_metrics_within_a_sum_of_training_are_no_evaluation() -> None:
    state = step(quick(), measured(0.1))
    assert len(step(state, measured(0.9)).evaluations) == 1
    assert step(state, measured(0.9)).measured == {}


def test_an_evaluation_without_one_of_its_cohorts_is_compared_with_none() -> None:
    """Over fewer users than the others it could be the best by chance."""
    state = after(step(new(supports=False), STARTED), measured(0.2, 30), RoundAbandoned("too few"))
    assert not state.evaluations
    assert not state.measured
    assert state.purpose is TRAIN
    while state.purpose is TRAIN:
        state = step(state, RoundSummed())
    state = after(state, measured(0.1, 30), measured(0.3, 30))
    assert state.evaluations[0].users == {"ndcg@10": 60}


def test_an_evaluation_of_which_every_cohort_was_abandoned_measures_nothing_and_training_goes_on() -> None:
    state = after(step(new(supports=False), STARTED), RoundAbandoned("too few"), RoundAbandoned("too few"))
    assert state.evaluations == ()
    assert state.chosen is None
    assert (state.purpose, state.phase) == (TRAIN, TrainingPhase.ROUNDS)


def test_the_best_evaluation_is_chosen_and_of_equals_the_first() -> None:
    state = evaluated(quick(), [0.1, 0.4, 0.3, 0.4, 0.2, 0.4, 0.1])
    assert state.best == 1
    assert state.chosen is not None
    assert state.chosen.version == 1
    assert state.chosen.metrics["ndcg@10"] == pytest.approx(0.4)


def test_of_errors_the_lowest_is_chosen_and_ends_a_run_when_it_is_not_undercut() -> None:
    state = quick(choose_by="validation_rmse", passes=50, patience=2)
    for value in [0.9, 0.7, 0.8, 0.6, 0.6, 0.7]:
        state = after(step(state, measured(value, name="validation_rmse")), *[RoundSummed()] * state.parts)
    assert state.phase is TrainingPhase.DONE
    assert state.best == 3


def test_an_evaluation_without_the_metric_to_choose_by_is_never_chosen() -> None:
    state = step(quick(), measured(0.9, name="recall@10"))
    assert len(state.evaluations) == 1
    assert state.chosen is None
    state = after(state, RoundSummed(), measured(0.1))
    assert state.best == 1


# --- when it ends


def test_a_run_ends_early_when_so_many_evaluations_were_no_better() -> None:
    state = evaluated(quick(passes=50, patience=2), [0.1, 0.3, 0.2, 0.4, 0.4, 0.3])
    assert state.phase is TrainingPhase.DONE
    assert len(state.evaluations) == 6
    assert state.pass_number == 5
    assert state.best == 3


def test_a_run_without_patience_goes_through_all_its_passes() -> None:
    state = evaluated(quick(patience=0), [0.9, *[0.1] * 6])
    assert state.pass_number == 6
    assert state.best == 0


def test_evaluations_that_were_abandoned_do_not_use_up_patience() -> None:
    state = evaluated(quick(passes=6, patience=2), [0.5, None, None, None, 0.4, None, 0.3])
    assert state.pass_number == 6
    assert [one.pass_number for one in state.evaluations] == [0, 4, 6]


def test_as_many_rounds_abandoned_in_a_row_as_told_fail_the_run_and_the_last_ones_reason_is_given() -> None:
    state = quick(most_abandoned=3)
    for number in range(1, 3):
        state = step(state, RoundAbandoned(f"reason {number}"))
        assert state.phase is TrainingPhase.ROUNDS
    state = step(state, RoundAbandoned("submit: too few"))
    assert state.phase is TrainingPhase.FAILED
    assert state.reason == "3 rounds in a row were abandoned; the last one: submit: too few"


def test_a_round_that_is_summed_ends_a_row_of_abandoned_ones() -> None:
    state = quick(passes=50)
    for _ in range(3):
        state = after(state, *[RoundAbandoned("x")] * 4, RoundSummed())
    assert state.phase is TrainingPhase.ROUNDS
    assert state.abandoned == 12


def test_an_abandoned_round_of_training_is_not_repeated_and_makes_no_version() -> None:
    state = after(step(new(supports=False), STARTED), measured(0.1), measured(0.1), RoundAbandoned("x"))
    assert (state.purpose, state.part, state.version, state.abandoned) == (TRAIN, 1, 0, 1)


def test_a_group_that_could_not_be_asked_for_its_items_is_asked_again() -> None:
    state = after(step(new(), STARTED), RoundSummed(), RoundAbandoned("x"))
    assert (state.purpose, state.part) == (SUPPORTS, 1)
    assert step(state, RoundSummed()).purpose is EVALUATE


def to_the_end(state: Training) -> Training:
    """Return a run after all its passes; nothing that comes is better than what was."""
    while not state.phase.ended:
        state = step(state, measured(0.1) if state.purpose is EVALUATE else RoundSummed())
    return state


def test_a_run_that_is_stopped_has_failed_for_that_reason_and_one_whose_passes_are_over_is_done() -> None:
    state = step(quick(), measured(0.3))
    stopped = step(state, TrainingStopped("the operator asked"))
    assert (stopped.phase, stopped.reason) == (TrainingPhase.FAILED, "the operator asked")
    finished = to_the_end(state)
    assert (finished.phase, finished.reason) == (TrainingPhase.DONE, "")
    assert finished.chosen == stopped.chosen == state.evaluations[0]


@pytest.mark.parametrize(
    "end", [lambda state: step(state, TrainingStopped("x")), to_the_end], ids=["stopped", "finished"]
)
@pytest.mark.parametrize(
    "event",
    [STARTED, RoundSummed(), measured(0.9), RoundAbandoned("y"), TrainingStopped("y")],
    ids=lambda event: type(event).__name__,
)
def test_a_run_that_has_ended_does_not_change_any_more(
    end: Callable[[Training], Training], event: Event
) -> None:
    ended = end(after(quick(), measured(0.1)))
    assert step(ended, event) == ended


# --- the store


plans = st.fixed_dictionaries(
    {
        "passes": st.integers(0, 4),
        "evaluate_every": st.integers(1, 5),
        "patience": st.integers(0, 3),
        "supports": st.booleans(),
        "redraw": st.integers(0, 3),
        "repeats_train": st.booleans(),
    }
)
beginnings = st.builds(
    Started,
    users=st.lists(st.integers(0, 2**32 - 1), max_size=4, unique=True).map(tuple),
    groups=st.integers(1, 3),
    parts=st.integers(1, 3),
    evaluation_parts=st.integers(1, 3),
)
sums: st.SearchStrategy[Mapping[str, tuple[float, float]]] = st.dictionaries(
    st.sampled_from(["ndcg@10", "recall@10", "loss"]),
    st.tuples(st.floats(-10, 10), st.integers(0, 50).map(float)),
)
outcomes = st.one_of(st.builds(RoundSummed, sums), st.builds(RoundAbandoned, st.text(max_size=4)))


def most_rounds(state: Training) -> int:
    """Return how many rounds a run can have: sums that are repeated at most five times in a row, others once."""
    passes = state.passes * state.parts * (5 if state.repeats_train else 1)
    evaluations = (state.passes + 1) * state.evaluation_parts
    drawings = 1 + (state.passes // state.redraw if state.redraw else 0)
    return (5 * state.groups * drawings if state.supports else 0) + passes + evaluations


@settings(max_examples=200)
@given(plan=plans, beginning=beginnings, data=st.data())
def test_every_run_ends_whatever_becomes_of_its_rounds(
    plan: dict[str, Any], beginning: Started, data: st.DataObject
) -> None:
    state = step(new(**plan), beginning)
    most, summed, abandoned = most_rounds(state), 0, 0
    for number in range(1, most + 1):
        if state.phase.ended:
            break
        before = state = begin_round(state)
        assert before.round == number
        event = data.draw(outcomes)
        state = step(before, event)
        summed += isinstance(event, RoundSummed) and before.purpose is TRAIN
        abandoned += isinstance(event, RoundAbandoned)
        assert state.version == summed
        assert state.version - before.version in (0, 1)
        assert state.pass_number - before.pass_number in (0, 1)
        assert state.evaluations[: len(before.evaluations)] == before.evaluations
        assert state.users == beginning.users
        assert Training.from_json(state.to_json()) == state
    assert state.phase.ended
    assert (state.phase is TrainingPhase.FAILED) == (state.abandoned_in_a_row == 5)
    assert bool(state.reason) == (state.phase is TrainingPhase.FAILED)
    assert state.abandoned == abandoned
    if state.chosen is not None:
        best = state.chosen.metrics["ndcg@10"]
        values = [one.metrics.get("ndcg@10", float("-inf")) for one in state.evaluations]
        assert best == max(values)
        assert state.best == values.index(best)


def test_every_field_comes_back_from_json() -> None:
    state = begin_round(
        after(step(new(patience=2), STARTED), RoundAbandoned("x"), RoundSummed(), RoundSummed())
    )
    state = after(state, measured(0.25), measured(0.5), *[RoundSummed()] * 6, measured(1 / 3))
    state = dataclasses.replace(
        state, reason="because", abandoned_in_a_row=2, partial=True, bound=("ab",), repeats_train=True
    )
    state = dataclasses.replace(
        state, may_pass=True, resumes=1, same_members=True, trained=("cd",), taken=((3, 1, 2, 5),), tries=1
    )
    state = dataclasses.replace(state, users_apart=True)
    plain = json.loads(state.to_json())
    assert plain.keys() == {field.name for field in dataclasses.fields(Training)}
    fresh = new()
    same = {
        field.name
        for field in dataclasses.fields(Training)
        if getattr(state, field.name) == getattr(fresh, field.name)
    }
    # Every field that a run may change has another value than at the beginning: none can get lost unseen.
    assert same == {"passes", "evaluate_every", "choose_by", "supports", "redraw", "most_abandoned"}
    assert Training.from_json(state.to_json(), state.users) == state


def test_the_written_state_does_not_grow_with_users_whose_slots_follow_each_other() -> None:
    def written(users: tuple[int, ...]) -> str:
        return step(new(), dataclasses.replace(STARTED, users=users)).to_json()

    # Two hosts, registered one after the other, in the order of their names.
    assert len(written((*range(500, 9_999), *range(500)))) < len(written(tuple(range(0, 20, 2)))) + 20


def test_the_written_state_does_not_grow_with_users_whom_the_store_has_apart() -> None:
    order = random.Random(1).sample(range(20_000), 20_000)
    state = step(new(), dataclasses.replace(STARTED, users=Prefix(array("I", order[:19_000]))))
    apart = dataclasses.replace(state, users_apart=True).to_json()
    assert len(apart) < 1_000 < len(state.to_json())
    # The store may have a wave that is not taken in yet.
    assert Training.from_json(apart, order).users == tuple(order[:19_000])
    assert Training.from_json(apart).users == ()
    with pytest.raises(ValueError, match="a run of 19000 users, of whom the store has 18999"):
        Training.from_json(apart, order[:18_999])


# --- resuming


def gave_up(state: Training) -> Training:
    """Return a run that has failed for a cause that may pass."""
    return step(state, TrainingStopped("no sum was formed for 9 s", may_pass=True))


def test_a_resumed_run_goes_on_where_it_failed_with_its_counters_at_zero() -> None:
    started = step(new(supports=False), STARTED)
    state = begin_round(after(started, measured(0.1), measured(0.1), RoundSummed(), RoundAbandoned("x")))
    failed = gave_up(state)
    assert (failed.phase, failed.may_pass) == (TrainingPhase.FAILED, True)
    resumed = step(failed, TrainingResumed())
    assert resumed == dataclasses.replace(state, abandoned_in_a_row=0, resumes=1)
    # Its evaluations are those of a run that never failed.
    assert to_the_end(resumed).evaluations == to_the_end(state).evaluations


def test_a_run_that_failed_while_it_gathered_gathers_again() -> None:
    resumed = step(gave_up(new()), TrainingResumed())
    assert resumed == new(resumes=1)
    assert step(resumed, STARTED).phase is TrainingPhase.ROUNDS


def test_a_run_that_abandoned_too_many_sums_forms_the_last_of_them_again_unless_others_are_bound_to_it() -> (
    None
):
    state = after(step(new(supports=False, most_abandoned=2), STARTED), RoundSummed(), RoundSummed())
    failed = after(state, RoundAbandoned("x"), RoundAbandoned("y"))
    resumed = step(failed, TrainingResumed())
    assert (resumed.purpose, resumed.part, resumed.abandoned) == (TRAIN, 1, 2)
    assert (resumed.abandoned_in_a_row, resumed.reason, resumed.may_pass) == (0, "", False)
    # Members of a sum that was about to be revealed take part in no other at its place: it is lost.
    failed = after(state, RoundAbandoned("x"), RoundAbandoned("y", ("ab",)))
    resumed = step(failed, TrainingResumed())
    assert (resumed.purpose, resumed.part, resumed.bound) == (TRAIN, 2, ())


def test_a_group_is_asked_again_over_those_who_are_bound() -> None:
    state = after(step(new(most_abandoned=1), STARTED), RoundAbandoned("x", ("ab",)))
    resumed = step(state, TrainingResumed())
    assert (resumed.purpose, resumed.part, resumed.bound) == (SUPPORTS, 0, ("ab",))


def test_a_system_that_needs_every_sum_forms_a_sum_of_training_again_over_those_who_are_bound() -> None:
    state = after(
        step(new(supports=False, repeats_train=True, most_abandoned=3), STARTED), RoundSummed(), RoundSummed()
    )
    assert (state.purpose, state.part) == (TRAIN, 0)
    again = step(state, RoundAbandoned("x", ("ab",)))
    assert (again.purpose, again.part, again.version, again.bound) == (TRAIN, 0, 0, ("ab",))
    # A later attempt that binds nobody new keeps those who are bound, and so does a run that is resumed.
    failed = after(again, RoundAbandoned("y"), RoundAbandoned("z"))
    resumed = step(failed, TrainingResumed())
    assert (resumed.purpose, resumed.part, resumed.bound) == (TRAIN, 0, ("ab",))
    summed = step(resumed, RoundSummed())
    assert (summed.purpose, summed.part, summed.version, summed.bound) == (TRAIN, 1, 1, ())


def test_sums_of_training_are_all_over_the_members_of_the_first_where_a_system_says_so() -> None:
    plan = {"repeats_train": True, "evaluate_every": 1, "most_abandoned": 1}
    for bound in (True, False):
        state = quick(same_members=bound, **plan)
        state = after(state, measured(0.5))
        assert (state.purpose, state.only) == (TRAIN, ())
        state = step(state, RoundSummed(submitters=("ab", "cd")))
        # Anybody may be in an evaluation.
        assert (state.purpose, state.only) == (EVALUATE, ())
        state = step(state, measured(0.5))
        assert (state.purpose, state.only) == (TRAIN, ("ab", "cd") if bound else ())
        resumed = after(Training.from_json(state.to_json()), RoundAbandoned("x"), TrainingResumed())
        assert resumed.only == state.only
        # Those to whom members are bound at this place go before.
        assert after(state, RoundAbandoned("x", ("ab",)), TrainingResumed()).only == ("ab",)


@pytest.mark.parametrize(("needed", "next_one"), [(True, (TRAIN, 0)), (False, (EVALUATE, 0))])
def test_a_server_from_a_backup_repeats_a_sum_of_training_that_is_needed(
    needed: bool, next_one: tuple[Purpose, int]
) -> None:
    plan = {"passes": 1, "evaluate_every": 1, "repeats_train": needed}
    state = step(new(**plan), Started((1, 2), groups=1, parts=1, evaluation_parts=1))
    state = step(state, RoundSummed())
    assert state.purpose is EVALUATE
    followed = step(state, ServerBehind(9, {"train": (0, 0)}))
    assert (followed.purpose, followed.part) == next_one
    assert followed.round == 9


def test_an_evaluation_that_lost_a_sum_is_compared_with_no_other_after_the_run_was_resumed() -> None:
    state = step(new(supports=False, most_abandoned=1), STARTED)
    resumed = step(step(state, RoundAbandoned("x", ("ab",))), TrainingResumed())
    assert (resumed.part, resumed.partial) == (1, True)


@pytest.mark.parametrize("stopped", [TrainingStopped("enough"), ServerBehind(9, {"supports": (3, 0)})])
def test_a_run_that_has_failed_for_good_stays_failed(stopped: Event) -> None:
    failed = after(step(new(redraw=1), STARTED), stopped)
    assert failed.phase is TrainingPhase.FAILED
    assert step(failed, TrainingResumed()) == failed


def test_a_run_that_is_done_stays_done_and_one_that_goes_on_is_not_resumed() -> None:
    started = step(new(supports=False), STARTED)
    done = to_the_end(started)
    assert step(done, TrainingResumed()) == done
    with pytest.raises(AssertionError, match="does not come in phase rounds"):
        step(started, TrainingResumed())


def test_a_run_can_be_resumed_again() -> None:
    state = step(new(), STARTED)
    for number in range(1, 4):
        state = step(gave_up(state), TrainingResumed())
        assert (state.phase, state.resumes) == (TrainingPhase.ROUNDS, number)


# --- users who come later


def grown(state: Training, from_pass: int) -> Training:
    return step(state, Grown((*state.users, 7, 8), 3, 4, 2, from_pass))


def at_pass(state: Training, number: int) -> Training:
    """Go on until a pass is about to train."""
    while (state.purpose, state.pass_number, state.part) != (TRAIN, number, 0):
        state = step(state, measured(0.5) if state.purpose is EVALUATE else RoundSummed())
    return state


def test_the_groups_of_users_who_come_later_are_asked_for_their_items_and_all_train_from_then_on() -> None:
    state = grown(at_pass(step(new(), STARTED), 1), 1)
    assert state.users == (4, 2, 9, 7, 8)
    visited = []
    while not state.phase.ended:
        visited.append((state.purpose, state.part, state.pass_number))
        state = step(state, measured(0.5) if state.purpose is EVALUATE else RoundSummed())
    asked, trained = visited[0], [one for one in visited if one[0] is TRAIN]
    # The two groups of the beginning are not asked again.
    assert asked == (SUPPORTS, 2, 1)
    assert trained == [(TRAIN, part, passes) for passes in (1, 2, 3) for part in range(4)]


def test_a_system_that_does_not_ask_for_items_trains_users_who_come_later_at_once() -> None:
    state = grown(at_pass(step(new(supports=False), STARTED), 2), 2)
    assert (state.purpose, state.part, state.parts, state.groups) == (TRAIN, 0, 4, 3)


def test_a_group_that_came_later_and_does_not_answer_is_asked_three_times_and_then_done_without() -> None:
    state = grown(at_pass(step(new(), STARTED), 1), 1)
    for _ in range(2):
        state = step(state, RoundAbandoned("too few"))
        assert (state.purpose, state.part) == (SUPPORTS, 2)
    state = step(state, RoundAbandoned("too few"))
    assert (state.purpose, state.part, state.phase) == (TRAIN, 0, TrainingPhase.ROUNDS)
    # A group of the beginning is asked until it answers.
    first = step(new(), STARTED)
    for _ in range(4):
        first = step(first, RoundAbandoned("too few"))
        assert (first.purpose, first.part) == (SUPPORTS, 0)


def test_each_group_of_a_wave_is_asked_three_times_however_many_do_not_answer() -> None:
    before = at_pass(step(new(), STARTED), 1)
    # More sums than may be abandoned in a row elsewhere.
    state = step(before, Grown((*before.users, 7, 8), 6, 4, 2, 1))
    asked = []
    while state.purpose is SUPPORTS:
        asked.append(state.part)
        state = step(state, RoundAbandoned("too few"))
    assert asked == [part for part in (2, 3, 4, 5) for _ in range(3)]
    assert (state.phase, state.purpose, state.part) == (TrainingPhase.ROUNDS, TRAIN, 0)
    assert (state.abandoned, state.abandoned_in_a_row) == (12, 0)
    assert Training.from_json(state.to_json()) == state


def test_a_server_from_a_backup_that_asked_a_wave_for_its_items_goes_on_where_its_members_are() -> None:
    asks = grown(at_pass(step(new(), STARTED), 1), 1)
    assert (asks.purpose, asks.part) == (SUPPORTS, 2)
    followed = step(asks, ServerBehind(20, {"supports": (1, 2), "train": (1, 1)}))
    assert (followed.phase, followed.round) == (TrainingPhase.ROUNDS, 20)
    assert (followed.purpose, followed.pass_number, followed.part) == (TRAIN, 1, 2)
    # Groups of the beginning say their items once.
    first = step(step(new(), STARTED), ServerBehind(20, {"train": (1, 1)}))
    assert first.phase is TrainingPhase.FAILED


def test_a_server_that_was_behind_does_not_ask_groups_again_that_have_trained() -> None:
    state = at_pass(step(new(), STARTED), 3)
    late = grown(dataclasses.replace(state, part=1), 1)
    assert (late.purpose, late.part, late.groups, late.parts) == (TRAIN, 1, 3, 4)


# --- the tables


PLACES = [purpose.value for purpose in Purpose]


def more(state: Training) -> Grown:
    """Return the event that two more users take part from the present pass on, as a group of their own."""
    users = (*state.users, 20 + len(state.users), 21 + len(state.users))
    return Grown(users, state.groups + 1, state.parts + 1, state.evaluation_parts, state.pass_number)


def wandered(draw: random.Random) -> tuple[set[Any], set[Any]]:
    """Return the phases and the purposes that followed each other in a run in which anything may happen."""
    state = new(supports=draw.random() < 0.7, redraw=draw.choice([0, 1, 2]), patience=draw.choice([0, 1]))
    phases, purposes = set(), set()
    for _ in range(60):
        event: Event
        if state.phase is TrainingPhase.GATHER:
            event = draw.choice([STARTED, STARTED, STARTED, TrainingStopped("enough", may_pass=True)])
        elif state.phase is TrainingPhase.FAILED:
            event = TrainingResumed()
        else:
            summed = measured(draw.random())
            event = draw.choice(
                [
                    *[summed] * 12,
                    *[RoundAbandoned("too few", ("ab",))] * draw.choice([1, 30]),
                    ServerBehind(
                        state.round + 1, {draw.choice(PLACES): (draw.randrange(5), draw.randrange(3))}
                    ),
                    TrainingStopped("enough", may_pass=draw.random() < 0.5),
                    *([] if state.redraw else [more(state)]),
                ]
            )
        before, state = state, step(state, event)
        phases.add((before.phase, type(event), state.phase))
        if isinstance(event, ServerBehind):
            # It may lead to any purpose.
            continue
        if before.phase is TrainingPhase.ROUNDS and state.phase is TrainingPhase.ROUNDS:
            purposes.add((before.purpose, state.purpose))
    return phases, purposes


def test_runs_take_the_transitions_of_the_tables_and_no_others() -> None:
    phases, purposes = set(), set()
    for seed in range(2000):
        more_phases, more_purposes = wandered(random.Random(seed))
        phases |= more_phases
        purposes |= more_purposes
    ended = {
        (phase, event, phase)
        for phase in (TrainingPhase.DONE, TrainingPhase.FAILED)
        for event in TRANSITIONS[phase]
    }
    listed = {
        (phase, event, following)
        for phase, by_event in TRANSITIONS.items()
        for event, those in by_event.items()
        for following in those
    }
    assert phases | ended == listed
    assert purposes == {(purpose, following) for purpose, those in PURPOSES.items() for following in those}


@pytest.mark.parametrize("event", [RoundSummed(), RoundAbandoned("too few")])
def test_nothing_is_summed_before_a_run_has_begun(event: Event) -> None:
    with pytest.raises(AssertionError, match="does not come in phase gather"):
        step(new(), event)
