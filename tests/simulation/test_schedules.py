"""Hundreds of schedules of rounds under faults; with `COTERIE_FULL` set thousands, and `make prove` runs many more."""

import dataclasses
import json
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.simulation.rig.faults import CHOICES, Drawn, Fault, Replayed
from tests.simulation.rig.schedule import Found, Scenario, find, run
from tests.simulation.rig.sums import KEYED, SUMS, halves, layout_of
from tests.simulation.rig.world import PATIENCE_S, World

FULL = bool(os.environ.get("COTERIE_FULL"))
COUNTS = (
    {"clear": 1600, "masked": 400, "encrypted": 200, "shared-key": 200}
    if FULL
    else {"clear": 400, "masked": 100, "encrypted": 100, "shared-key": 100}
)
"""Schedules of each sum, the first ones of which are among `SOME`."""
PART = 50
FEW = {"clear": 60, "masked": 15, "encrypted": 10, "shared-key": 10}
SOME = {"clear": 300, "masked": 60, "encrypted": 80, "shared-key": 80}
"""Schedules of each sum that together meet every fault, and break rounds off at each step."""
CORPUS = sorted((Path(__file__).parent / "found").glob("*.json"))


def checked(seed: int, secure_sum: str):
    """Run a schedule, in which every round is right or abandoned with a reason; return it, its watch, its faults."""
    scenario = Scenario.drawn(seed, secure_sum)
    faults = scenario.faults()
    try:
        return scenario, run(scenario, faults), faults
    except Exception:
        found = find(scenario)
        assert found is not None, f"{scenario} failed once, and not again"
        pytest.fail(f"{found}\nto keep as tests/simulation/found/NAME.json:\n{found.to_json()}")


PARTS = [
    pytest.param(secure_sum, range(first, min(first + PART, count)), id=f"{secure_sum}-{first}")
    for secure_sum, count in COUNTS.items()
    # Those before are checked where they are counted, below.
    for first in range(SOME[secure_sum], count, PART)
]


@pytest.mark.parametrize(("secure_sum", "seeds"), PARTS)
def test_whatever_goes_wrong_every_round_is_right_or_abandoned_with_a_reason(secure_sum, seeds):
    for seed in seeds:
        checked(seed, secure_sum)


@pytest.mark.parametrize("secure_sum", SUMS)
@pytest.mark.parametrize("seed", range(5))
def test_without_faults_every_round_is_applied_over_everybody(seed, secure_sum):
    scenario = Scenario.drawn(seed, secure_sum)
    scenario = dataclasses.replace(scenario, rounds=3)
    watch = run(scenario, Replayed(()))
    everybody = tuple(range(sum(map(len, scenario.hosts))))
    assert watch.applied == dict.fromkeys((1, 2, 3), everybody)
    assert watch.abandoned == {}


@pytest.mark.parametrize(("secure_sum", "count"), FEW.items())
def test_a_server_that_dies_again_and_again_loses_no_round_and_nobody(secure_sum, count):
    crashes = 0
    for seed in range(count):
        scenario = Scenario.drawn(seed, secure_sum)
        faults = Drawn(random.Random(seed), {"cos": 0.3}, most_crashes=8)
        watch = run(scenario, faults)
        everybody = tuple(range(sum(map(len, scenario.hosts))))
        assert watch.applied == dict.fromkeys(range(1, scenario.rounds + 1), everybody), faults.recorded
        crashes += len(faults.recorded)
    assert crashes > 4 * count


@pytest.mark.parametrize(("secure_sum", "count"), FEW.items())
def test_messages_lost_or_repeated_now_and_then_lose_no_round_and_nobody(secure_sum, count):
    for seed in range(count):
        scenario = Scenario.drawn(seed, secure_sum)
        # One in each round at most: two polls of one host lost in a row are longer than a step.
        drawn = Drawn(random.Random(seed), {"message": 0.1}, most=scenario.rounds)
        run(scenario, drawn)
        faults = Replayed(fault for fault in drawn.recorded if fault.what != "delay")
        watch = run(scenario, faults)
        everybody = tuple(range(sum(map(len, scenario.hosts))))
        assert watch.applied == dict.fromkeys(range(1, scenario.rounds + 1), everybody), faults.recorded


@pytest.mark.parametrize("occasion", range(16))
def test_a_host_that_restarts_in_a_clear_round_is_in_its_sum_once_its_contribution_is_kept(occasion):
    # Where h0 can die in each round: before it keeps that it has joined; before it trains, after that, before it keeps
    # its contribution; before it sends it, after that.  Between the rounds: before and after it forgets the first.
    scenario = Scenario(1, "clear", ((1,), (1,)), 2, 1)
    watch = run(scenario, Replayed([Fault("host h0", occasion, "crash", 1.0)]))
    assert watch.applied == {
        1: (1,) if occasion in (1, 2, 3) else (0, 1),
        2: (1,) if occasion in (9, 10, 11) else (0, 1),
    }


def duration(scenario: Scenario, faults) -> float:
    """Return how long a schedule takes, in its own seconds."""
    server_half, member_half = halves(scenario.secure_sum)
    rng = np.random.default_rng(scenario.seed)
    everybody, layout = scenario.members(), layout_of(scenario.secure_sum)
    world = World(everybody, layout, server_half, member_half, faults, rng, scenario.rounds, scenario.min_sum)
    world.run()
    return world.clock.now


@pytest.mark.parametrize("occasion", range(16))
def test_nobody_waits_out_a_step_for_a_host_that_came_back_without_its_secrets(occasion):
    # It dies once, at each point of a masked round; it comes back at once, and says what nobody can see from outside.
    scenario = Scenario(1, "masked", ((1,),) * 5, 1, 3)
    faults = Replayed([Fault("host h0", occasion, "crash", 0.1)])
    # A poll of the process that died is answered in vain, and after that many seconds it is asked again.
    assert duration(scenario, faults) < PATIENCE_S


@pytest.mark.parametrize("secure_sum", SUMS)
def test_nobody_waits_out_a_step_for_a_member_whose_local_step_failed(secure_sum):
    scenario = Scenario(1, secure_sum, ((1,),) * 5, 1, 3)
    assert duration(scenario, Replayed([Fault("train h0", 0, "fail")])) < PATIENCE_S
    assert duration(scenario, Replayed([Fault("train h0", 0, "hang")])) > PATIENCE_S


def test_the_next_round_waits_longer_after_each_that_was_abandoned():
    scenario = Scenario(1, "clear", ((1,),), 4, 1)
    failing = [Fault("train h0", number, "fail") for number in range(3)]
    # One, two and four seconds; a round that is abandoned takes a little less time than one that is applied.
    assert 6 < duration(scenario, Replayed(failing)) - duration(scenario, Replayed(())) < 7


_AT_DECRYPT = dict.fromkeys(
    ("what was decrypted is not what is in the sum", "3 key holders came to as many models"), "decrypt"
)
"""Reasons that name no step, and the step that they are of."""


@pytest.mark.parametrize(("secure_sum", "count"), SOME.items())
def test_every_round_is_right_or_abandoned_and_schedules_reach_what_they_are_for(secure_sum, count):
    faults, refused, abandoned, partly = Counter(), Counter(), Counter(), 0
    for seed in range(count):
        scenario, watch, drawn = checked(seed, secure_sum)
        faults.update((fault.place.partition(" ")[0], fault.what) for fault in drawn.recorded)
        refused += watch.refusals
        abandoned.update(reason.partition(":")[0] for reason in watch.abandoned.values())
        partly += sum(len(members) < sum(map(len, scenario.hosts)) for members in watch.applied.values())
    kinds = set(CHOICES) - ({"deceit"} if secure_sum == "clear" else set())
    kinds -= set() if secure_sum in KEYED else {"decrypt"}
    assert set(faults) == {(kind, what) for kind in kinds for what in CHOICES[kind]}
    assert set(refused) >= {"conflict", "garbage", "long", "short", "bound", "wrong step", "stranger"}
    steps = {
        "clear": {"submit"},
        "masked": {"share", "submit", "confirm", "unmask"},
        # No majority to confirm is rarer than what this many schedules meet.
        "encrypted": {"submit", "decrypt"},
        "shared-key": {"submit", "decrypt"},
    }[secure_sum]
    reached = {_AT_DECRYPT.get(reason, reason) for reason in abandoned}
    assert steps <= reached, "rounds are broken off at each step"
    assert partly > 0, "and completed without some members"


def test_the_same_seed_gives_the_same_schedule():
    scenario = Scenario.drawn(11, "clear")
    first, second = scenario.faults(), scenario.faults()
    outcomes = [run(scenario, faults) for faults in (first, second)]
    assert first.recorded == second.recorded
    assert outcomes[0].applied == outcomes[1].applied
    assert outcomes[0].abandoned == outcomes[1].abandoned


@pytest.mark.parametrize("seed", range(20))
def test_a_recorded_schedule_can_be_played_again(seed):
    scenario = Scenario.drawn(seed, "clear")
    drawn = scenario.faults()
    watch = run(scenario, drawn)
    again = run(scenario, Replayed(drawn.recorded))
    assert (again.applied, again.abandoned, again.refusals) == (
        watch.applied,
        watch.abandoned,
        watch.refusals,
    )


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_schedule_that_failed_once_does_not_fail_again(path):
    found = Found.from_json(path.read_text(encoding="utf-8"))
    assert found.again() is None


def test_a_found_schedule_comes_back_from_its_file():
    found = Found(Scenario.drawn(3, "masked"), (Fault("cos", 4, "crash", 2.5),), "what happened")
    assert Found.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["faults"] == [
        {"place": "cos", "number": 4, "what": "crash", "amount": 2.5}
    ]
