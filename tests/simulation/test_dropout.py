"""Masked sums with members missing from each point on: exact, or abandoned as the thresholds say."""

import hashlib
from collections.abc import Mapping

import numpy as np
import pytest

from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import Step
from coterie.studies.local_rounds import Members, run_round
from tests.simulation.rig.sums import LAYOUT, halves, identity

STEPS = MaskedServer.steps


def plan_of(devices: list[str], degree: int, threshold: int, min_sum: int = 1, number: int = 1) -> SumPlan:
    return SumPlan(
        run_id="dropout",
        round=number,
        purpose="train",
        secure_sum="masked" if degree else "clear",
        model_sha256=hashlib.sha256(b"model").digest(),
        layout_sha256=hashlib.sha256(b"layout").digest(),
        members=tuple(Member(identity(n).participant_id, device) for n, device in enumerate(devices)),
        degree=degree,
        threshold=threshold,
        min_sum=min_sum,
    )


def vectors(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    widths = np.repeat([segment.bits for segment in LAYOUT.segments], [s.size for s in LAYOUT.segments])
    return [rng.integers(1, 2.0**widths).astype(np.uint32) for _ in range(count)]


class Leaving:
    """A host whose members answer up to a step of their own, and then no more."""

    def __init__(self, member_half, codes, last: Mapping[int, Step]) -> None:
        self._members = Members(member_half, lambda plan, asked: [(n, codes[n]) for n in asked])
        self._last = last

    def answer(self, plan, step, briefings):
        there = {
            member: briefing
            for member, briefing in briefings.items()
            if member not in self._last or STEPS.index(step) < STEPS.index(self._last[member])
        }
        return self._members.answer(plan, step, there)


def outcome(count: int, threshold: int, gone: Mapping[int, Step], min_sum: int = 1):
    server, member = halves("masked")
    codes = vectors(count)
    host = Leaving(member, codes, gone)
    plan = plan_of(["h"] * count, count - 1, threshold, min_sum)
    return run_round(plan, LAYOUT, server(), {"h": host}), codes


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("lost", [1, 2, 3, 4])
@pytest.mark.parametrize(("count", "threshold"), [(7, 4), (8, 4), (8, 6)])
def test_a_round_survives_as_many_as_leave_everybody_enough_neighbours(count, threshold, lost, step):
    gone = dict.fromkeys(range(0, 2 * lost, 2), step)
    result, codes = outcome(count, threshold, gone)
    stay = count - lost
    if stay - 1 < threshold:
        # With one neighbour fewer than the threshold, the masks of those that stay could not be undone.
        assert result.total is None
        assert result.reason.startswith(step.value)
        return
    in_sum = [n for n in range(count) if n not in gone or step in (Step.CONFIRM, Step.UNMASK)]
    assert result.reason == ""
    assert result.submitters == tuple(in_sum)
    assert np.array_equal(result.total, sum(codes[n] for n in in_sum).astype(np.uint32))


def test_a_round_survives_somebody_missing_at_every_step():
    gone = dict(enumerate(STEPS))
    result, codes = outcome(12, 6, gone)
    assert result.submitters == tuple(range(3, 12))
    assert np.array_equal(result.total, sum(codes[3:]).astype(np.uint32))


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_a_sum_over_fewer_users_than_the_floor_is_abandoned(lost):
    result, _ = outcome(7, 4, dict.fromkeys(range(lost), Step.SUBMIT), min_sum=6)
    assert (result.total is None) is (lost > 1)
    if lost > 1:
        assert "the plan's floor is 6" in result.reason


@pytest.mark.parametrize("step", STEPS)
def test_all_members_of_one_host_lost_is_recovered_or_abandoned_as_the_threshold_says(step):
    server, member = halves("masked")
    codes = vectors(8)
    devices = ["a"] * 2 + ["b"] * 3 + ["c"] * 3
    plan = plan_of(devices, 7, 4)
    for lost, survives in (("a", True), ("b", True)):
        hosts = {
            name: Leaving(member, codes, {n: step for n, one in enumerate(devices) if one == lost})
            for name in "abc"
        }
        result = run_round(plan, LAYOUT, server(), hosts)
        assert (result.total is not None) is survives
    hosts = {
        name: Leaving(member, codes, {n: step for n, one in enumerate(devices) if one != "c"})
        for name in "abc"
    }
    assert run_round(plan, LAYOUT, server(), hosts).total is None


@pytest.mark.parametrize("seed", range(5))
def test_masked_and_clear_rounds_of_the_same_vectors_give_the_same_sum(seed):
    codes = vectors(6, seed)
    totals = []
    for secure_sum, degree in (("clear", 0), ("masked", 5)):
        server, member = halves(secure_sum)
        host = Leaving(member, codes, {seed: Step.SUBMIT})
        plan = plan_of(["h"] * 6, degree, 3 if degree else 0)
        totals.append(run_round(plan, LAYOUT, server(), {"h": host}).total)
    assert np.array_equal(totals[0], totals[1])
    assert np.array_equal(totals[0], sum(codes[n] for n in range(6) if n != seed).astype(np.uint32))
