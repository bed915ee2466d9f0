"""Inputs of sums: a member takes part only under the hashes of what it uses itself."""

from __future__ import annotations

import dataclasses

import pytest

from coterie.rounds.inputs import CATALOGUE, OPEN_ITEMS, check_inputs, check_run, inputs_of, named_inputs
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import Member, SumInput, SumPlan
from coterie.secure_sum.protocol import Declined
from coterie.wire.v1.orchestrator_pb2 import RunPlan

RUN = RunPlan(run_id="run", system="fedncf", secure_sum="masked", settings='{"rate":1}')
HASHES = {CATALOGUE: bytes([1]) * 32, OPEN_ITEMS: bytes([2]) * 32}
BOTH = (CATALOGUE, OPEN_ITEMS)
PLAN = SumPlan(
    "run",
    1,
    "train",
    "masked",
    bytes(32),
    bytes(32),
    (Member(bytes(32), "client/a"),),
    run_plan_sha256=plan_hash(RUN),
    inputs=named_inputs(BOTH, HASHES),
)


def test_open_items_are_an_input_of_training_where_groups_open_items() -> None:
    assert inputs_of(Purpose.TRAIN, opens=True) == BOTH
    assert inputs_of(Purpose.TRAIN, opens=False) == (CATALOGUE,)
    for purpose in (Purpose.SUPPORTS, Purpose.EVALUATE):
        assert inputs_of(purpose, opens=True) == (CATALOGUE,)


def test_inputs_are_named_in_order_and_those_that_the_model_holds_are_left_out() -> None:
    assert named_inputs(BOTH[::-1], HASHES) == (
        SumInput(CATALOGUE, HASHES[CATALOGUE]),
        SumInput(OPEN_ITEMS, HASHES[OPEN_ITEMS]),
    )
    assert named_inputs(BOTH, {CATALOGUE: HASHES[CATALOGUE]}) == (SumInput(CATALOGUE, HASHES[CATALOGUE]),)


def test_a_member_takes_part_under_its_own_hashes() -> None:
    check_inputs(PLAN, BOTH, HASHES)
    check_run(PLAN, RUN)


@pytest.mark.parametrize("name", BOTH)
def test_another_input_than_the_plan_names_is_declined_by_name(name: str) -> None:
    with pytest.raises(Declined, match=f"the input '{name}' that the server sent is not the one"):
        check_inputs(PLAN, BOTH, {**HASHES, name: bytes(32)})


def test_an_input_that_the_plan_leaves_out_or_adds_is_declined() -> None:
    with pytest.raises(Declined, match="does not name its input 'open-items'"):
        check_inputs(dataclasses.replace(PLAN, inputs=PLAN.inputs[:1]), BOTH, HASHES)
    with pytest.raises(Declined, match="names an input 'open-items', on which nothing"):
        check_inputs(PLAN, (CATALOGUE,), HASHES)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_id": "other"}, "of run 'other'"),
        ({"secure_sum": "clear"}, "a sum 'clear'"),
        ({"run_plan_sha256": bytes(32)}, "another plan than the one that was accepted"),
    ],
)
def test_a_sum_of_another_run_or_plan_is_declined(change: dict[str, object], reason: str) -> None:
    with pytest.raises(Declined, match=reason):
        check_run(dataclasses.replace(PLAN, **change), RUN)  # type: ignore[arg-type]
