"""The population of a run: its order, how it travels, and what is refused when it arrives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.rounds.population import Population, canonical_order, check_canonical
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import common_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan, RunPlan

IDS = [bytes([n]) * 32 for n in (3, 1, 2, 0)]
USERS = [(5, IDS[0], "client/b"), (2, IDS[1], "client/a"), (9, IDS[2], "client/b"), (1, IDS[3], "client/c")]


@given(st.permutations(USERS))
def test_users_stand_in_the_order_of_their_ids_however_they_came(users: list[tuple[int, bytes, str]]) -> None:
    order = canonical_order(users, RunPlan())
    assert order == [1, 2, 9, 5]
    ids = {slot: participant for slot, participant, _ in USERS}
    check_canonical([ids[slot] for slot in order])


def test_users_of_an_experiment_that_can_be_repeated_stand_by_device_and_slot_whatever_their_keys() -> None:
    plan = RunPlan(rounds=RoundsPlan(beacon=bytes(32)))
    assert canonical_order(USERS, plan) == [2, 5, 9, 1]
    others = [(slot, participant[::-1], device) for slot, participant, device in USERS[::-1]]
    assert canonical_order(others, plan) == [2, 5, 9, 1]


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=9), st.data())
def test_a_population_travels_whole(participants: list[bytes], data: st.DataObject) -> None:
    devices = data.draw(st.lists(st.text(max_size=5), min_size=len(participants), max_size=len(participants)))
    population = Population(participants, devices, b"b" * 32, b"s" * 64)
    back = Population.from_wire(wire.Population.FromString(population.to_wire().SerializeToString()))
    assert back == population
    assert back.hash("run") == population.hash("run")


def change(field: str, value: object) -> Callable[[wire.Population], None]:
    def make(message: wire.Population) -> None:
        message.ClearField(field)  # type: ignore[arg-type]
        message.MergeFrom(wire.Population(**{field: value}))  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    ("field", "made"),
    [
        ("participants", change("participants", b"")),
        ("participants", change("participants", bytes(95))),
        ("device", change("device", [0])),
        ("device", change("device", [0, 2])),
        ("devices", change("devices", ["client/a", "client/a"])),
    ],
)
def test_a_population_that_cannot_be_is_refused_with_the_field_that_is_wrong(
    field: str, made: Callable[[wire.Population], None]
) -> None:
    message = Population(IDS[:2], ["client/a", "client/b"]).to_wire()
    Population.from_wire(message)
    made(message)
    with pytest.raises(Refusal, match=f"the population has a bad {field}") as refused:
        Population.from_wire(message)
    assert refused.value.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
    assert refused.value.field == f"population.{field}"


def test_a_beacon_is_the_plans_where_it_names_one() -> None:
    population = Population(IDS[:1], ["client/a"], b"b" * 32)
    assert population.drawn(RunPlan()) == b"b" * 32
    named = RunPlan(rounds=RoundsPlan(beacon=b"p" * 32))
    assert dataclasses.replace(population, beacon=b"").drawn(named) == b"p" * 32
