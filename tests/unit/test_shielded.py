"""A run of DRIFT's shielded form as a state machine, and what its sums look like."""

import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.evaluation.holdout import TEST, TRAIN, VALIDATION, Holdout, ranked_names
from coterie.secure_sum.contribution import Contribution
from coterie.systems.drift import shielded_run
from coterie.systems.drift.published_run import (
    CatalogueChanged,
    OwnerJoined,
    PartyLost,
    PartySeen,
    RunResumed,
    Stopped,
    UsersJoined,
)
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.shielded_run import (
    LOSSES,
    EvaluationFormed,
    Event,
    NumberTaken,
    Shielded,
    ShieldedAbandoned,
    ShieldedPhase,
    ShieldedPurpose,
    VisitsDelivered,
    VisitsReported,
    Windowed,
    add_measured,
    due,
    evaluation_layout,
    lacking,
    measured_in,
    next_sum,
    step,
    waiting_for,
)
from coterie.wire.v1.orchestrator_pb2 import RunPlan
from tests.transition_table import observed, printed, reached


def after(state, *events):
    for event in events:
        state = step(state, event)
    return state


def gathered(**changes):
    """Return a run with three owners (slots 0 to 2) and two hosts, whose first epoch has begun."""
    state = Shielded(epochs=2, expect_owners=3, expect_users=4, window=10)
    owners = [OwnerJoined(slot, f"data-owner/{slot}") for slot in range(3)]
    hosts = [UsersJoined("client/a", 2), UsersJoined("client/b", 2)]
    return replace(after(state, *owners, CatalogueChanged(1), *hosts), **changes)


def test_the_first_epoch_begins_when_everybody_expected_has_come():
    state = Shielded(epochs=2, expect_owners=1, expect_users=2, window=10)
    state = after(state, OwnerJoined(0, "data-owner/x"), UsersJoined("client/a", 1))
    assert (state.phase, next_sum(state)) == (ShieldedPhase.GATHER, None)
    assert waiting_for(state) == "1 of 1 data owners and 1 of 2 users came"
    assert after(state, UsersJoined("client/a", 2)).epoch == 1
    assert gathered().phase is ShieldedPhase.VISIT


def test_a_window_is_due_after_enough_visits_wherever_they_were_made():
    state = after(gathered(), VisitsReported(0, 4, 1), VisitsReported(1, 5, 1))
    assert not due(state)
    assert next_sum(state) is None
    assert next_sum(state, in_time=True) is ShieldedPurpose.WINDOW
    state = after(state, VisitsReported(2, 1, 0))
    assert due(state)
    assert next_sum(state) is ShieldedPurpose.WINDOW


def test_visits_are_counted_in_all_so_that_saying_so_twice_changes_nothing():
    state = after(gathered(), VisitsReported(0, 4, 1))
    assert after(state, VisitsReported(0, 4, 1)) == state
    assert after(state, VisitsReported(0, 3, 1)).visits == 4


def test_without_visits_time_alone_opens_no_window():
    assert next_sum(gathered(), in_time=True) is None


def test_what_a_window_had_is_not_due_again_and_what_came_meanwhile_is():
    state = after(
        gathered(), VisitsReported(0, 12, 1), NumberTaken(), VisitsReported(1, 9, 1), Windowed([0, 1])
    )
    assert (state.version, state.closed, state.round) == (1, 1, 1)
    assert not due(state)
    assert due(after(state, VisitsReported(1, 10, 1)))
    assert {slot: owner.summed for slot, owner in state.owners.items()} == {0: 1, 1: 1, 2: 0}


def test_an_abandoned_window_is_over_changes_nothing_and_stays_due():
    state = after(gathered(), VisitsReported(0, 12, 1), NumberTaken())
    lost = after(state, ShieldedAbandoned(ShieldedPurpose.WINDOW, "two owners"))
    assert (lost.version, lost.closed, lost.abandoned) == (0, 1, 1)
    assert due(lost)
    assert all(owner.summed == 0 for owner in lost.owners.values())


def visited(state, epoch=None):
    epoch = epoch or state.epoch
    return after(
        state,
        VisitsDelivered("client/a", epoch, state.catalogue),
        VisitsDelivered("client/b", epoch, state.catalogue),
    )


def test_an_epoch_ends_with_a_window_of_the_rest_and_an_evaluation():
    state = visited(after(gathered(), VisitsReported(0, 3, 1)))
    assert (state.phase, next_sum(state)) == (ShieldedPhase.CLOSE, ShieldedPurpose.WINDOW)
    state = after(state, NumberTaken(), Windowed([0, 1, 2]))
    assert (state.phase, next_sum(state)) == (ShieldedPhase.EVALUATE, ShieldedPurpose.EVALUATE)
    state = after(state, NumberTaken(), EvaluationFormed())
    assert (state.phase, state.epoch, next_sum(state)) == (ShieldedPhase.VISIT, 2, None)
    state = after(visited(state), NumberTaken(), Windowed([]), NumberTaken(), EvaluationFormed())
    assert state.phase is ShieldedPhase.DONE


def test_a_window_that_was_open_when_the_last_host_was_done_is_not_the_last():
    state = visited(after(gathered(), VisitsReported(0, 12, 1), NumberTaken()))
    state = after(state, Windowed([0]))
    assert (state.phase, next_sum(state)) == (ShieldedPhase.CLOSE, ShieldedPurpose.WINDOW)


def test_a_host_that_delivered_to_an_older_catalogue_is_waited_for():
    state = after(
        gathered(), CatalogueChanged(2), VisitsDelivered("client/a", 1, 2), VisitsDelivered("client/b", 1, 1)
    )
    assert state.phase is ShieldedPhase.VISIT
    assert waiting_for(state) == "client/b"
    assert after(state, VisitsDelivered("client/b", 1, 2)).phase is ShieldedPhase.CLOSE


def test_nobody_waits_for_a_host_that_is_gone_and_everybody_for_one_that_is_back():
    state = after(gathered(), VisitsDelivered("client/a", 1, 1))
    assert after(state, PartyLost("client/b")).phase is ShieldedPhase.CLOSE
    assert after(state, PartySeen("client/b")).phase is ShieldedPhase.VISIT
    owners = after(gathered(), PartyLost("data-owner/1")).owners
    assert [owner.present for owner in owners.values()] == [True, False, True]


def test_an_epoch_lacks_all_owners_or_all_hosts_and_says_who_they_are():
    owners, hosts = tuple(f"data-owner/{slot}" for slot in range(3)), ("client/a", "client/b")
    assert lacking(gathered()) == ("", ())
    assert lacking(after(gathered(), PartyLost("data-owner/1"), PartyLost("client/b"))) == ("", ())
    away = after(gathered(), *map(PartyLost, owners))
    assert lacking(away) == ("no data owner is there", owners)
    assert lacking(after(away, PartySeen("data-owner/2"))) == ("", ())
    assert lacking(after(gathered(), *map(PartyLost, hosts))) == ("no client host is there", hosts)
    # After the visits an epoch needs owners until its last window; what an evaluation needs, its sum knows.
    closing = visited(gathered())
    assert closing.phase is ShieldedPhase.CLOSE
    assert lacking(after(closing, *map(PartyLost, hosts))) == ("", ())
    assert lacking(after(closing, *map(PartyLost, owners))) == ("no data owner is there", owners)
    assert lacking(
        after(Shielded(1, 1, 1, 1), OwnerJoined(0, "data-owner/0"), PartyLost("data-owner/0"))
    ) == (
        "",
        (),
    )


def test_a_host_with_new_users_has_its_visits_still_to_make():
    state = after(gathered(), VisitsDelivered("client/a", 1, 1), UsersJoined("client/a", 3))
    assert state.hosts["client/a"].epoch == 0
    assert after(state, UsersJoined("client/b", 2)).hosts["client/b"].users == 2


def test_the_last_window_of_an_epoch_is_tried_three_times():
    state = visited(gathered())
    for _ in range(3):
        assert state.phase is ShieldedPhase.CLOSE
        state = after(state, NumberTaken(), ShieldedAbandoned(ShieldedPurpose.WINDOW, "late"))
    assert state.phase is ShieldedPhase.EVALUATE


def test_too_many_abandoned_sums_in_a_row_end_the_run_and_one_that_is_formed_begins_the_count_anew():
    state = gathered(epochs=100, most_abandoned=10)
    for _ in range(9):
        state = after(
            state, VisitsReported(0, 99, 0), NumberTaken(), ShieldedAbandoned(ShieldedPurpose.WINDOW, "late")
        )
    assert after(state, NumberTaken(), Windowed([0])).abandoned_in_a_row == 0
    state = after(state, NumberTaken(), ShieldedAbandoned(ShieldedPurpose.WINDOW, "late"))
    assert state.phase is ShieldedPhase.FAILED
    assert state.reason == "10 sums in a row were abandoned; the last one: late"


def test_a_run_without_a_single_evaluation_has_failed():
    state = gathered(epochs=1)
    state = after(
        visited(state),
        NumberTaken(),
        Windowed([]),
        NumberTaken(),
        ShieldedAbandoned(ShieldedPurpose.EVALUATE, "late"),
    )
    assert (state.phase, state.reason) == (ShieldedPhase.FAILED, "no evaluation could be formed")


def test_an_ended_run_does_not_change():
    state = after(gathered(), Stopped("enough"))
    assert (state.phase, state.reason) == (ShieldedPhase.FAILED, "enough")
    assert after(state, VisitsReported(0, 99, 0), NumberTaken(), Windowed([0])) == state
    assert next_sum(state) is None


def test_a_run_that_may_be_resumed_notes_what_parties_did_since_and_goes_on_where_it_failed():
    before = gathered()
    failed = after(before, Stopped("nobody was there", may_pass=True))
    assert (failed.phase, failed.may_pass, failed.reason) == (ShieldedPhase.FAILED, True, "nobody was there")
    meanwhile = after(failed, VisitsReported(0, 99, 0), NumberTaken(), PartyLost("client/b"))
    assert (meanwhile.phase, meanwhile.visits, meanwhile.round) == (failed.phase, 99, before.round)
    resumed = after(Shielded.from_json(meanwhile.to_json()), RunResumed())
    assert (resumed.phase, resumed.epoch, resumed.reason) == (before.phase, before.epoch, "")
    assert (resumed.resumes, resumed.may_pass, resumed.visits) == (1, False, 99)
    assert not {"may_pass", "failed_in", "resumes"} & json.loads(before.to_json()).keys()


def test_a_run_whose_sums_were_abandoned_too_often_may_be_resumed():
    state = gathered(most_abandoned=1)
    state = after(state, NumberTaken(), ShieldedAbandoned(ShieldedPurpose.WINDOW, "late"))
    assert (state.phase, state.may_pass, state.closed) == (ShieldedPhase.FAILED, True, 1)
    resumed = after(state, RunResumed())
    assert (resumed.phase, resumed.abandoned_in_a_row) == (ShieldedPhase.VISIT, 0)


events = st.one_of(
    st.builds(VisitsReported, st.integers(0, 2), st.integers(0, 60), st.integers(0, 9)),
    st.builds(
        VisitsDelivered, st.sampled_from(["client/a", "client/b"]), st.integers(1, 3), st.integers(0, 2)
    ),
    st.builds(PartyLost, st.sampled_from(["client/a", "data-owner/1"])),
    st.builds(PartySeen, st.sampled_from(["client/a", "data-owner/1"])),
    st.builds(CatalogueChanged, st.integers(0, 3)),
    st.sampled_from(["summed", "abandoned"]),
)


@given(st.lists(events, max_size=40))
def test_whatever_happens_numbers_only_grow_and_the_store_gives_back_what_it_was_given(happened):
    state = gathered()
    for event in happened:
        before = state
        if isinstance(event, str):
            purpose = next_sum(state, in_time=True)
            if purpose is None:
                continue
            state = step(state, NumberTaken())
            done = Windowed([0]) if purpose is ShieldedPurpose.WINDOW else EvaluationFormed()
            state = step(state, done if event == "summed" else ShieldedAbandoned(purpose, "late"))
        else:
            state = step(state, event)
        for name in ("round", "closed", "version", "epoch", "catalogue", "visits", "counted"):
            assert getattr(state, name) >= getattr(before, name), name
        assert state.version <= state.round
        assert state.closed <= state.round
        assert state.epoch <= state.epochs
        assert Shielded.from_json(state.to_json()) == state


# --- what is summed ----------------------------------------------------------------------------------------------


def test_an_owners_vector_has_zeros_where_nothing_may_leave_and_sums_over_owners():
    settings = DriftSettings(form="shielded", dim=3, window_bound=8.0)
    layout, rng = settings.window_layout(5), np.random.default_rng(0)
    total, expected = np.zeros(layout.size, np.uint32), np.zeros((5, 3))
    for items in ([0, 3], [3], []):
        one, gradient = Contribution(layout), rng.normal(0, 1, (len(items), 3)).astype(np.float32)
        one.add("gradient", gradient, rng, rows=np.array(items, np.int64))
        one.count()
        total += one.codes()
        expected[items] += gradient
    sums = layout.decode(total, 3)["gradient"]
    np.testing.assert_allclose(sums, expected, atol=3 * layout["gradient"].step)
    assert not sums[[1, 2, 4]].any()
    assert layout.capacity >= 200


def test_metrics_of_users_become_means_over_those_that_have_them():
    layout, total = evaluation_layout(), np.zeros(evaluation_layout().size, np.uint32)
    for values in ({"ndcg@10": 0.5, "train_loss": 0.25}, {"ndcg@10": 1.0, "map@10": float("nan")}):
        one = Contribution(layout)
        add_measured(one, values, np.random.default_rng(1))
        total += one.codes()
    found = measured_in(layout.decode(total, 2))
    assert found.keys() == {"ndcg@10", "train_loss"}
    assert found["ndcg@10"] == (pytest.approx(0.75, abs=1e-4), 2)
    assert found["train_loss"] == (pytest.approx(0.25, abs=1e-3), 1)


def test_every_metric_that_is_measured_has_a_place():
    part = np.array([TRAIN, VALIDATION, TEST, TEST])
    holdout = Holdout(1, 4, np.zeros(4, int), np.arange(4), np.array([True, True, True, False]), part)
    measured = holdout.measure(lambda chosen: np.zeros((len(chosen), 4)))
    assert set(measured) | {"train_loss"} == {*ranked_names(), *LOSSES}


def test_settings_travel_as_json_and_others_are_refused():
    settings = DriftSettings(form="shielded", k_min=7, window=3, rate=0.25, ridge=0.5)
    plan = RunPlan(form="shielded")
    settings.fill(plan)
    assert DriftSettings.from_plan(plan) == settings
    for text, named in (
        ('{"k_min":0}', "k_min"),
        ('{"k_min":2.5}', "k_min"),
        ('{"bits":30}', "window_bits"),
        ('{"bound":NaN}', "window_bound"),
        ('{"window":0}', "window"),
        ('{"window_s":0}', "window_s"),
        ('{"join_s":0}', "join_s"),
        ('{"other":1}', "other"),
        ('{"dim":3}', "dim"),
        ("[]", "list"),
        ("nothing", "Expecting value"),
    ):
        plan.settings = text
        with pytest.raises(ConfigError, match=named):
            DriftSettings.from_plan(plan)


# --- the printed table -------------------------------------------------------------------------------------------


def moves(state, summed):
    """Yield what may come in a state while a sum is open for a purpose, or none."""
    yield OwnerJoined(0, "owner")
    yield from (UsersJoined(host, 1) for host in ("first", "second"))
    yield from (VisitsDelivered(host, state.epoch, state.catalogue) for host in state.hosts)
    for party in ("owner", "first", "second"):
        yield PartyLost(party)
        yield PartySeen(party)
    if summed is not None:
        yield Windowed((0,)) if summed is ShieldedPurpose.WINDOW else EvaluationFormed()
        yield ShieldedAbandoned(summed, "too few")
    elif state.phase is not ShieldedPhase.GATHER:
        yield NumberTaken()


def others(state):
    """Yield what else may come, and leads to no other phase later."""
    yield CatalogueChanged(1)
    yield Stopped("no more")
    yield RunResumed()
    yield from (VisitsReported(slot, 1, 0) for slot in state.owners)


def decisive(state):
    """Return a state with everything at rest that decides no phase, so that there are few of them."""
    row = state.abandoned_in_a_row
    gathering = state.phase is ShieldedPhase.GATHER
    return replace(
        state,
        round=0,
        closed=0,
        version=0,
        captured=0,
        abandoned=0,
        evaluations=min(state.evaluations, 1),
        # Three in a row end an epoch, ten the run: the third and the tenth are tried, those between are like the third.
        abandoned_in_a_row=row if row in (0, 9) else 2,
        owners={
            slot: replace(owner, summed=0, present=owner.present or not gathering)
            for slot, owner in state.owners.items()
        },
    )


def test_the_printed_table_is_what_step_does_in_every_phase_with_every_event():
    def onward(pair):
        state, summed = pair
        if state.phase.ended:
            return
        for event in moves(state, summed):
            after = decisive(step(state, event))
            if isinstance(event, NumberTaken):
                evaluates = state.phase is ShieldedPhase.EVALUATE
                yield after, ShieldedPurpose.EVALUATE if evaluates else ShieldedPurpose.WINDOW
            else:
                yield (
                    after,
                    None if isinstance(event, Windowed | EvaluationFormed | ShieldedAbandoned) else summed,
                )
        if state.abandoned_in_a_row == 2:
            yield replace(state, abandoned_in_a_row=9), summed

    def seen():
        first = Shielded(epochs=2, expect_owners=1, expect_users=2, window=1, most_abandoned=10)
        for state, summed in reached((first, None), onward, repr):
            for event in (*moves(state, summed), *others(state)):
                name = type(event).__name__
                yield name, state.phase, step(state, event).phase
                for ended in (ShieldedPhase.DONE, ShieldedPhase.FAILED):
                    yield name, ended, step(replace(state, phase=ended, may_pass=False), event).phase
                failed = step(state, Stopped("no more", may_pass=True))
                yield name, failed.phase, step(failed, event).phase

    table = printed(shielded_run.__doc__)
    assert {name for name, _ in table} == {one.__name__ for one in get_args(Event)}
    assert {phase for _, phase in table} == {phase.value for phase in ShieldedPhase}
    assert table.pop(("RunResumed", "failed")) == {"(back)"}
    found = observed(seen())
    assert found.pop(("RunResumed", "failed")) == {"gather", "visit", "close", "evaluate", "failed"}
    assert {pair: phases for pair, phases in table.items() if phases} == found
