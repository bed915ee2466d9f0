from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from coterie.rounds.plan import plan_hash
from coterie.wire.v1.orchestrator_pb2 import RunPlan

PLAN: dict[str, Any] = {
    "run_id": "spring",
    "system": "drift",
    "form": "published",
    "secure_sum": "clear",
    "dim": 16,
    "rate": 0.2,
    "ridge": 1e-3,
    "theta": 2,
    "item_bias": True,
    "seed": 2**64 - 1,
    "max_staleness": 2000,
    "epochs": 10,
    "min_users": 20,
}
FIELDS = list(RunPlan.DESCRIPTOR.fields)


def other(field: FieldDescriptor, value: Any) -> Any:
    """Return another value of a field's type."""
    if field.type == FieldDescriptor.TYPE_STRING:
        return value + "x"
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not value
    return value / 2 if field.type == FieldDescriptor.TYPE_FLOAT else value // 2


def test_the_hash_is_over_the_explicit_bytes_that_the_protocol_describes() -> None:
    """Each field in the contract's order, 4 bytes of length before its content."""
    contents = []
    for field in FIELDS:
        value = PLAN[field.name]
        if field.type == FieldDescriptor.TYPE_STRING:
            contents.append(value.encode())
        elif field.type == FieldDescriptor.TYPE_FLOAT:
            contents.append(struct.pack(">f", value))
        else:
            contents.append(struct.pack(">Q", int(value)))
    packed = b"coterie/v1/plan" + b"".join(struct.pack(">I", len(one)) + one for one in contents)
    assert plan_hash(RunPlan(**PLAN)) == hashlib.sha256(packed).digest()


def test_the_plan_of_this_test_names_every_field() -> None:
    assert {field.name for field in FIELDS} == PLAN.keys()


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_field_of_the_plan_is_in_its_hash(field: FieldDescriptor) -> None:
    changed = {**PLAN, field.name: other(field, PLAN[field.name])}
    assert plan_hash(RunPlan(**changed)) != plan_hash(RunPlan(**PLAN))


@given(st.text(max_size=6), st.text(max_size=6), st.integers(0, 6))
def test_text_that_moves_from_one_field_into_the_next_is_another_plan(left: str, right: str, at: int) -> None:
    joined = left + right
    moved = {"run_id": joined[:at], "system": joined[at:]}
    same = (joined[:at], joined[at:]) == (left, right)
    first = plan_hash(RunPlan(**{**PLAN, "run_id": left, "system": right}))
    assert (plan_hash(RunPlan(**{**PLAN, **moved})) == first) == same


@given(st.binary(max_size=8))
def test_the_hash_survives_the_wire_whatever_the_serialisation_says(unknown: bytes) -> None:
    """Serialised messages are not canonical; the hash does not depend on them."""
    plan = RunPlan(**PLAN)
    # An unknown field (number 1000, bytes), as a later release may send it.
    sent = plan.SerializeToString() + b"\xc2\x3e" + bytes([len(unknown)]) + unknown
    assert plan_hash(RunPlan.FromString(sent)) == plan_hash(plan)


def test_rates_count_as_the_single_precision_that_travels() -> None:
    assert plan_hash(RunPlan(**{**PLAN, "rate": 0.2 + 1e-12})) == plan_hash(RunPlan(**PLAN))
