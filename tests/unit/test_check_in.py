"""Check-ins at the COS: when a host is told to come back, until when it counts as present, and what it costs."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from coterie_cos.plan_ranges import check_ranges
from coterie_cos.turns import Turns

from coterie.rounds.conductor import Conductor
from coterie.rounds.population import Population
from coterie.rounds.training import Purpose, Training
from coterie.secure_sum.registry import server_half
from coterie.systems.server_step import planned_server_side
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from tests.population_stand import DRAWN, HOSTS, SETTINGS, Stand

STEP_S, LONGEST_S, PATIENCE_S = 60.0, 600.0, 40.0


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    one = Stand(tmp_path)
    one.request.check_in_ms = int(LONGEST_S * 1000)
    one.request.party_timeout_ms = int(PATIENCE_S * 1000)
    one.answers = [DRAWN]
    one.run = one._new()
    yield one
    one.writer.close()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets time pass."""
    real, passed = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])

    def pass_by(seconds: float) -> None:
        passed[0] += seconds

    return pass_by


async def _told(stand: Stand, party: str) -> float:
    """Let a host check in; return the time after which it is told to come back, seconds."""
    revision = stand.run._told.get(party, (0, []))[0]
    answer = await stand.run.poll(party, revision, 20, checks_in=True)
    return answer.come_back_ms / 1e3


async def _gathering(stand: Stand) -> Stand:
    stand.request.expect_users = 5
    stand.run = stand._new()
    await stand.come()
    return stand


async def test_a_host_is_answered_at_once_and_comes_back_in_the_second_half_of_half_a_step(
    stand: Stand,
) -> None:
    await _gathering(stand)
    told = [await _told(stand, "client/a") for _ in range(200)]
    assert STEP_S / 4 <= min(told) < max(told) <= STEP_S / 2
    assert max(told) - min(told) > STEP_S / 5
    await stand.run.drop()


async def test_a_run_may_ask_hosts_to_come_back_sooner(stand: Stand) -> None:
    stand.request.check_in_ms = 10_000
    await _gathering(stand)
    told = [await _told(stand, "client/a") for _ in range(50)]
    assert 5.0 <= min(told) <= max(told) <= 10.0
    await stand.run.drop()


async def test_polls_of_all_are_held_in_runs_without_check_ins_and_of_hosts_that_do_not_check_in(
    stand: Stand,
) -> None:
    await _gathering(stand)
    answer = await stand.run.poll("client/a", 0, 0)
    assert not answer.come_back_ms
    # Data owners are few, and called by hosts: they are not sent away.
    answer = await stand.run.poll("data-owner/zoo", 0, 0, checks_in=True)
    assert not answer.come_back_ms
    stand.request.check_in_ms = 0
    answer = await stand.run.poll("client/a", 0, 0, checks_in=True)
    assert not answer.come_back_ms
    await stand.run.drop()


async def test_a_host_that_rests_counts_as_present_until_it_comes_back_and_as_long_as_others_are_silent(
    stand: Stand, later: Callable[[float], None]
) -> None:
    await _gathering(stand)
    due_s = await _told(stand, "client/a")
    later(due_s + PATIENCE_S - 1)
    await stand.run.tick()
    assert [stand.run.present(party) for party in ("client/a", "client/b")] == [True, False]
    assert "client/a" not in stand.run.silent()
    later(2)
    await stand.run.tick()
    assert not stand.run.present("client/a")
    assert "client/a" in stand.run.silent()
    assert stand.run.heard("client/a")
    assert stand.run.present("client/a")
    await stand.run.drop()


async def test_a_call_of_its_own_does_not_shorten_the_time_that_a_host_has(
    stand: Stand, later: Callable[[float], None]
) -> None:
    await _gathering(stand)
    stand.request.party_timeout_ms = 1000
    due_s = await _told(stand, "client/a")
    later(1)
    # Its user asks for something.
    assert not stand.run.heard("client/a")
    later(due_s - 2)
    await stand.run.tick()
    assert stand.run.present("client/a")
    await stand.run.drop()


async def test_a_host_that_holds_polls_again_is_missed_as_soon_as_others(
    stand: Stand, later: Callable[[float], None]
) -> None:
    await _gathering(stand)
    await _told(stand, "client/a")
    await stand.run.poll("client/a", 0, 0)
    later(PATIENCE_S + 1)
    await stand.run.tick()
    assert not stand.run.present("client/a")
    # What the server noted of the time before is forgotten with it.
    later(LONGEST_S)
    assert stand.run.heard("client/a")
    await stand.run.tick()
    assert (stand.run.present("client/a"), stand.run._away) == (True, [])
    await stand.run.drop()


async def test_after_a_restart_of_the_server_hosts_have_the_longest_time_to_come_back(
    stand: Stand, later: Callable[[float], None]
) -> None:
    await _gathering(stand)
    await _told(stand, "client/a")
    await stand.restart()
    later(LONGEST_S + PATIENCE_S - 1)
    await stand.run.tick()
    assert [stand.run.present(party) for party in (*HOSTS, "data-owner/zoo")] == [True, True, False]
    later(2)
    await stand.run.tick()
    assert not any(map(stand.run.present, HOSTS))
    await stand.run.drop()


async def test_a_host_waits_here_while_the_sum_in_progress_needs_it_and_comes_back_for_the_next_one(
    stand: Stand,
) -> None:
    await stand.come()
    await stand.until(lambda: stand.run._sums.current is not None and stand.run._sums.current.durable)
    answer = await stand.run.poll("client/a", 0, 0, checks_in=True)
    (task,) = answer.tasks
    assert not answer.come_back_ms
    slots = list(stand.run.registry.slots_of("client/a"))
    head = wire.SubmitRequest(kind=wire.SubmitKind.SUBMIT_KIND_DECLINED, round=task.round)
    stand.run.submitted_at_once("client/a", head, slots, b"")
    # It is done with this sum, and may be in one that takes its place.
    assert STEP_S / 4 <= await _told(stand, "client/a") <= STEP_S / 2
    await stand.run.drop()


async def test_a_host_that_came_after_the_population_was_fixed_comes_back_as_late_as_may_be(
    stand: Stand,
) -> None:
    await stand.come()
    await stand.until(lambda: stand.training)
    stand.run.registry.add("client/late", [b"l" * 32], {})
    await stand.run.joined("client/late", catalogue=False, more=True)
    assert LONGEST_S / 2 <= await _told(stand, "client/late") <= LONGEST_S
    await stand.run.drop()


async def test_a_host_that_checks_in_without_pause_is_noted_once(
    stand: Stand, later: Callable[[float], None]
) -> None:
    await _gathering(stand)
    for _ in range(1000):
        due_s = await _told(stand, "client/a")
    # Another entry only where it was to come sooner than at every time before.
    assert len(stand.run._away) < 30
    later(due_s + PATIENCE_S - 1)
    await stand.run.tick()
    assert stand.run.present("client/a")
    later(2)
    await stand.run.tick()
    assert (stand.run.present("client/a"), stand.run._looks_at) == (False, {})
    await stand.run.drop()


async def test_a_host_that_is_asked_to_come_sooner_than_before_is_missed_then(
    stand: Stand, later: Callable[[float], None]
) -> None:
    await _gathering(stand)
    stand.run._step_s = 4 * LONGEST_S
    assert await _told(stand, "client/a") >= LONGEST_S / 2
    stand.run._step_s = STEP_S
    due_s = await _told(stand, "client/a")
    later(due_s + PATIENCE_S + 1)
    await stand.run.tick()
    assert not stand.run.present("client/a")
    await stand.run.drop()


async def test_nobody_is_asked_to_come_back_within_a_second(stand: Stand) -> None:
    await _gathering(stand)
    stand.run._step_s = 2.2
    assert {await _told(stand, "client/a") >= 1.0 for _ in range(50)} == {True}
    # It holds its poll.
    stand.run._step_s = 1.9
    answer = await stand.run.poll("client/a", 0, 0, checks_in=True)
    assert not answer.come_back_ms
    await stand.run.drop()


@pytest.mark.parametrize(("check_in_ms", "fits"), [(0, True), (1, False), (999, False), (1000, True)])
def test_a_run_whose_hosts_are_to_come_back_at_once_again_and_again_is_refused(
    check_in_ms: int, fits: bool
) -> None:
    request = operator.StartRunRequest(
        plan=wire.RunPlan(run_id="run"), phase_timeout_ms=1, party_timeout_ms=1, check_in_ms=check_in_ms
    )
    if fits:
        check_ranges(request, {})
        return
    with pytest.raises(Refusal) as refused:
        check_ranges(request, {})
    assert (refused.value.field, refused.value.expected) == ("check_in_ms", "0, or 1000 to 86400000")


# --- how many sums come first ------------------------------------------------------------------------------------


def _turns(cohorts: wire.CohortKind.ValueType, users: int = 60) -> tuple[Turns, Conductor, Training]:
    rounds = wire.RoundsPlan(
        cohorts=cohorts, cohort=10, group=5, beacon=bytes(32), passes=9, party_per_user=True
    )
    plan = wire.RunPlan(
        run_id="run", system="fedncf", secure_sum="clear", settings=SETTINGS.to_json(), rounds=rounds
    )
    population = Population(
        [n.to_bytes(32, "big") for n in range(users)], [f"client/{n}" for n in range(users)]
    )
    conductor = Conductor(plan, population, planned_server_side(plan, 3, 1), server_half("clear", bytes(32)))
    slots = tuple(range(100, 100 + users))
    parts = len(conductor.groups())
    state = Training(
        passes=9,
        evaluate_every=1,
        patience=0,
        choose_by="m",
        supports=False,
        users=slots,
        groups=parts,
        parts=6,
        evaluation_parts=6,
        purpose=Purpose.TRAIN,
    )
    return Turns(conductor, slots), conductor, state


@pytest.mark.parametrize("kind", ["COHORT_KIND_RANDOM", "COHORT_KIND_GROUPS"])
@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.EVALUATE, Purpose.SUPPORTS])
def test_a_user_is_in_the_sum_that_the_turns_name_and_in_none_before(kind: str, purpose: Purpose) -> None:
    turns, conductor, state = _turns(wire.CohortKind.Value(kind))
    state = dataclasses.replace(state, purpose=purpose, pass_number=2)
    parts = len(conductor.groups(2)) if purpose is Purpose.SUPPORTS else 6
    for part in range(parts):
        now = dataclasses.replace(state, part=part)
        for place in range(60):
            ahead = turns.sums_before(now, [100 + place], begun=False)
            cohorts = [
                conductor.cohort(dataclasses.replace(now, part=one)).tolist() for one in range(part, parts)
            ]
            wanted = next((n for n, cohort in enumerate(cohorts) if place in cohort), parts - part)
            assert ahead == wanted


def test_a_sum_in_progress_may_end_at_any_moment() -> None:
    turns, conductor, state = _turns(wire.CohortKind.COHORT_KIND_RANDOM)
    following = conductor.cohort(dataclasses.replace(state, part=1))
    assert turns.sums_before(state, [100 + int(following[0])], begun=False) == 1
    assert turns.sums_before(state, [100 + int(following[0])], begun=True) == 0


def test_a_host_of_several_users_has_the_turn_of_the_first_of_them() -> None:
    turns, conductor, state = _turns(wire.CohortKind.COHORT_KIND_RANDOM)
    some = [100 + int(conductor.cohort(dataclasses.replace(state, part=part))[0]) for part in (4, 2, 5)]
    assert turns.sums_before(state, some, begun=False) == 2


def test_anybody_may_be_next_where_cohorts_are_drawn_independently_or_are_everybody() -> None:
    for kind in (wire.CohortKind.COHORT_KIND_INDEPENDENT, wire.CohortKind.COHORT_KIND_ALL):
        turns, _, state = _turns(kind)
        assert {turns.sums_before(state, [slot], begun=False) for slot in range(100, 160)} == {0.0}


def test_nobody_waits_for_slots_outside_the_population() -> None:
    turns, _, state = _turns(wire.CohortKind.COHORT_KIND_RANDOM)
    assert turns.sums_before(state, [3], begun=False) == math.inf
    assert turns.sums_before(state, [2**31], begun=False) == math.inf
    assert math.isfinite(turns.sums_before(state, np.array([3, 100]).tolist(), begun=False))
