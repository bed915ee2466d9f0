"""The server's copy of the model: what a sum is decoded to, in the open and sealed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.rounds.conductor import Conductor, new_training
from coterie.rounds.model_state import ModelState, OpenModel, SealedVersions
from coterie.rounds.population import Population
from coterie.rounds.sides import Arrays, Summed
from coterie.rounds.training import Purpose, Training, begin_round, means, step
from coterie.secure_sum.contribution import ImpossibleSumError, Layout, Segment
from coterie.secure_sum.protocol import Applied
from coterie.secure_sum.registry import server_half
from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan, RunPlan
from coterie.wire.v1.rounds_pb2 import SealedModel

USERS = 4
LAYOUT = Layout((Segment.whole("items", (3,), 1),))


class Side:
    """A system that counts items and measures how many were told; it remembers what it applied."""

    asks_supports = False
    needs_every_sum = False
    metrics = ("told",)
    figures = staticmethod(means)

    def __init__(self) -> None:
        self.applied: list[Summed] = []

    def initial(self) -> Arrays:
        return {"items": np.zeros(3)}

    def layout(self, purpose: Purpose) -> Layout:
        return LAYOUT

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        self.applied.append(summed)
        return {"items": arrays["items"] + summed.sums["items"]}

    def measured(self, purpose: Purpose, sums: Any) -> dict[str, tuple[float, float]]:
        return {"told": (float(sums["items"].sum()), float(USERS))}


@pytest.fixture
def side() -> Side:
    return Side()


@pytest.fixture
def conductor(side: Side) -> Conductor:
    rounds = RoundsPlan(
        cohorts=CohortKind.COHORT_KIND_ALL, cohort=USERS, group=USERS, beacon=bytes(32), passes=1
    )
    population = Population([bytes([n]) * 32 for n in range(USERS)], ["device"] * USERS)
    return Conductor(RunPlan(run_id="run", rounds=rounds), population, side, server_half("clear"))  # type: ignore[arg-type]


@pytest.fixture
def state(conductor: Conductor) -> Training:
    begun = new_training(conductor.plan, conductor.side)
    return begin_round(step(begun, conductor.started(range(USERS))))


def codes(*values: int) -> Any:
    """Return the codes of a sum over all users: each adds 2 to the code of a whole number up to 1."""
    return np.array(values, np.uint32) + 2 * USERS


def test_a_sum_is_decoded_once_and_applied_by_the_system_s_side_to_the_arrays_of_then(
    side: Side, conductor: Conductor, state: Training
) -> None:
    decoded = OpenModel(conductor).decode(state, codes(1, 0, 4), USERS)
    assert decoded.measured == {"told": (5.0, USERS)}
    assert side.applied == []
    np.testing.assert_array_equal(decoded.apply({"items": np.ones(3)})["items"], [2, 1, 5])
    (summed,) = side.applied
    assert (summed.users, summed.population, summed.purpose) == (USERS, USERS, state.purpose)


def test_what_holders_applied_takes_the_place_of_the_sealed_version(
    side: Side, conductor: Conductor, state: Training
) -> None:
    kept = SealedVersions(conductor)
    made = SealedModel(key_id=bytes(32), round=1, sealed=b"sealed").SerializeToString()
    decoded = kept.decode(state, Applied(made, {"told": (5.0, 4.0)}), USERS)
    assert decoded.measured == {"told": (5.0, 4.0)}
    assert kept.model(decoded.apply(kept.initial())) == made
    measuring = kept.decode(state, codes(1, 0, 4), USERS)
    assert measuring.measured == {"told": (5.0, USERS)}
    assert kept.model(measuring.apply(kept.initial())) == kept.model(kept.initial())
    assert side.applied == []


@pytest.mark.parametrize("kind", [OpenModel, SealedVersions])
def test_an_impossible_sum_is_not_decoded(kind: Any, conductor: Conductor, state: Training) -> None:
    kept: ModelState = kind(conductor)
    with pytest.raises(ImpossibleSumError):
        kept.decode(state, codes(1, 0, USERS + 1), USERS)
