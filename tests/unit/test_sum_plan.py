"""The plan of one sum: what is in its hash, how it travels, and what is refused when it arrives."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.plan import VERSION, Member, SumInput, SumPlan, layout_hash
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire


def named(number: int) -> bytes:
    """Return the id of a made-up participant."""
    return hashlib.sha256(number.to_bytes(4, "big")).digest()


MEMBERS = (
    Member(named(1), "client/north", 3),
    Member(named(2), "client/south"),
    Member(named(3), "client/north", 2),
    Member(named(4), "client/east"),
)
PLAN = SumPlan(
    run_id="spring",
    round=7,
    purpose="train",
    secure_sum="masked",
    run_plan_sha256=named(98),
    model_version=6,
    model_sha256=named(100),
    layout_sha256=named(101),
    inputs=(SumInput("catalogue", named(103)), SumInput("open-items", named(104))),
    members=MEMBERS,
    degree=3,
    threshold=2,
    min_sum=5,
    pass_number=2,
    part=4,
    population_sha256=named(105),
    beacon=named(106),
)
HOLDERS = (Member(named(5), "holder/one"), Member(named(6), "holder/two"))
ENCRYPTED = dataclasses.replace(
    PLAN,
    secure_sum="encrypted",
    degree=0,
    threshold=0,
    key_id=named(102),
    code_bits=16,
    holders=HOLDERS,
)


BOUND = (
    *(named(98), 6, named(100), named(101), 2),
    *("catalogue", named(103), "open-items", named(104)),
)
"""What contributions depend on, as the hash has it."""


def packed(label: str, *fields: bytes | str | int) -> bytes:
    """Return explicit bytes, written out a second time: label, then each field after 4 bytes of length."""
    contents = [
        field.encode()
        if isinstance(field, str)
        else struct.pack(">Q", field)
        if isinstance(field, int)
        else field
        for field in fields
    ]
    return f"coterie/v1/{label}".encode() + b"".join(struct.pack(">I", len(one)) + one for one in contents)


# --- the hash


def test_the_hash_is_over_the_explicit_bytes_of_plan_and_members_in_order() -> None:
    members: list[bytes | str | int] = []
    for member in MEMBERS:
        members += [member.participant, member.device, member.users]
    fields = ("spring", 7, "train", "masked", *BOUND, 3, 2, 5, named(105), named(106), 2, 4, 4, *members)
    assert PLAN.hash == hashlib.sha256(packed("sum-plan", VERSION, *fields)).digest()


def test_of_an_encrypted_sum_key_and_holders_follow() -> None:
    members: list[bytes | str | int] = []
    for member in MEMBERS:
        members += [member.participant, member.device, member.users]
    members += [named(102), 16, 2, named(5), "holder/one", named(6), "holder/two", 0]
    fields = ("spring", 7, "train", "encrypted", *BOUND, 0, 0, 5, named(105), named(106), 2, 4, 4, *members)
    assert ENCRYPTED.hash == hashlib.sha256(packed("sum-plan", VERSION, *fields)).digest()


def test_members_are_named_by_their_positions() -> None:
    assert PLAN.participants((2, 0)) == (named(3).hex(), named(1).hex())
    assert PLAN.participants(()) == ()


def other(value: Any) -> Any:
    """Return another value of a field's type."""
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:] if value else named(0)
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, int):
        return value + 1
    return value[:-1] if value else HOLDERS


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SumPlan)])
def test_every_field_of_the_plan_is_in_its_hash(field: str) -> None:
    changed = dataclasses.replace(ENCRYPTED, **{field: other(getattr(ENCRYPTED, field))})
    assert changed.hash != ENCRYPTED.hash


@pytest.mark.parametrize("position", range(2))
@pytest.mark.parametrize("field", SumInput._fields)
def test_every_field_of_every_input_is_in_the_hash(field: str, position: int) -> None:
    inputs = list(PLAN.inputs)
    inputs[position] = inputs[position]._replace(**{field: other(getattr(inputs[position], field))})
    assert dataclasses.replace(PLAN, inputs=tuple(inputs)).hash != PLAN.hash


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Member)])
@pytest.mark.parametrize("position", range(len(MEMBERS)))
def test_every_field_of_every_member_is_in_the_hash(field: str, position: int) -> None:
    members = list(MEMBERS)
    changed = {field: other(getattr(MEMBERS[position], field))}
    members[position] = dataclasses.replace(MEMBERS[position], **changed)
    assert dataclasses.replace(PLAN, members=tuple(members)).hash != PLAN.hash


@pytest.mark.parametrize("field", ["beacon", "run_id", "purpose", "pass_number", "part"])
def test_the_graphs_seed_is_of_the_beacon_and_of_the_cohorts_name(field: str) -> None:
    changed = dataclasses.replace(PLAN, **{field: other(getattr(PLAN, field))})
    assert changed.graph_seed != PLAN.graph_seed


@pytest.mark.parametrize(
    "field",
    sorted(
        {one.name for one in dataclasses.fields(SumPlan)}
        - {"beacon", "run_id", "purpose", "pass_number", "part"}
    ),
)
def test_nothing_else_that_a_server_chooses_is_in_the_graphs_seed(field: str) -> None:
    changed = dataclasses.replace(PLAN, **{field: other(getattr(PLAN, field))})
    assert changed.hash != PLAN.hash or field in ("key_id", "code_bits", "holders", "sparse_floor")
    assert changed.graph_seed == PLAN.graph_seed


def test_without_a_beacon_the_graph_follows_from_the_plans_hash() -> None:
    window = dataclasses.replace(PLAN, population_sha256=b"", beacon=b"")
    assert SumPlan.from_wire(window.to_wire()) == window
    assert window.graph_seed == window.hash


def test_the_order_of_members_is_in_the_hash() -> None:
    assert dataclasses.replace(PLAN, members=MEMBERS[::-1]).hash != PLAN.hash


@given(st.text(max_size=6), st.text(max_size=6), st.integers(0, 12))
def test_text_that_moves_from_one_field_into_the_next_is_another_plan(left: str, right: str, at: int) -> None:
    joined = left + right
    first = dataclasses.replace(PLAN, purpose=left, secure_sum=right)
    moved = dataclasses.replace(PLAN, purpose=joined[:at], secure_sum=joined[at:])
    assert (first.hash == moved.hash) == ((left, right) == (joined[:at], joined[at:]))


LAYOUT = Layout(
    (
        Segment("items", (5, 3), 0.25, 16, over="touched"),
        Segment.whole("touched", (5,), 1),
        Segment("network", (7,), 2.0, 12),
    )
)


def test_the_layouts_hash_is_over_the_explicit_bytes_of_its_segments() -> None:
    fields: list[bytes | str | int] = [3]
    fields += ["items", 2, 5, 3, struct.pack(">d", 0.25), 16, "touched", 1]
    fields += ["touched", 1, 5, struct.pack(">d", 1.0), 2, "", 0]
    fields += ["network", 1, 7, struct.pack(">d", 2.0), 12, "", 1]
    assert layout_hash(LAYOUT) == hashlib.sha256(packed("layout", *fields)).digest()


@pytest.mark.parametrize(
    "change",
    [{"name": "net"}, {"shape": (8,)}, {"shape": (7, 1)}, {"bound": 2.5}, {"bits": 13}, {"clip": False}],
    ids=str,
)
def test_whatever_changes_what_a_code_means_changes_the_layouts_hash(change: dict[str, Any]) -> None:
    changed = dataclasses.replace(LAYOUT.segments[2], **change)
    assert layout_hash(Layout((*LAYOUT.segments[:2], changed))) != layout_hash(LAYOUT)
    without = dataclasses.replace(LAYOUT.segments[0], over="")
    assert layout_hash(Layout((without, *LAYOUT.segments[1:]))) != layout_hash(LAYOUT)


def test_a_cohort_counts_its_users_and_names_each_connection_once_in_the_order_of_appearance() -> None:
    assert PLAN.users == 7
    assert PLAN.devices == ("client/north", "client/south", "client/east")


# --- on the wire


members_of_any_plan = st.lists(
    st.tuples(st.integers(0, 2**16), st.sampled_from(["a", "b", "client/ü"]), st.integers(1, 2**31)),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one[0],
)


@settings(max_examples=60)
@given(
    members=members_of_any_plan,
    run_id=st.text(max_size=5),
    round_=st.integers(1, 2**32 - 1),
    purpose=st.sampled_from(["train", "evaluate", "supports"]),
    secure_sum=st.sampled_from(["clear", "masked"]),
    numbers=st.tuples(*[st.integers(0, 2**32 - 1)] * 3),
    data=st.data(),
)
def test_a_plan_comes_back_from_the_wire_as_it_was_with_the_same_hash(
    members: list[tuple[int, str, int]],
    run_id: str,
    round_: int,
    purpose: str,
    secure_sum: str,
    numbers: tuple[int, int, int],
    data: st.DataObject,
) -> None:
    degree = data.draw(st.integers(0, len(members) - 1))
    plan = SumPlan(
        run_id,
        round_,
        purpose,
        secure_sum,
        named(round_),
        named(1),
        tuple(Member(named(number), device, users) for number, device, users in members),
        degree,
        data.draw(st.integers(0, degree)),
        *numbers,
    )
    back = SumPlan.from_wire(wire.SumPlan.FromString(plan.to_wire().SerializeToString()))
    assert back == plan
    assert back.hash == plan.hash


def test_every_field_of_the_message_is_carried() -> None:
    # No sum has neighbours and holders, but a message may.
    plan = dataclasses.replace(ENCRYPTED, degree=3, threshold=2, sparse_floor=2)
    message = plan.to_wire()
    assert {field.name for field, _ in message.ListFields()} == {
        field.name for field in wire.SumPlan.DESCRIPTOR.fields
    } - {"noise_floor"}
    for field in wire.SumPlan.DESCRIPTOR.fields:
        # What a member cannot read off the message cannot be in the hash that it computes itself.
        if field.name in ("version", "members", "devices", "holders", "inputs", "noise_floor"):
            continue
        changed = wire.SumPlan.FromString(message.SerializeToString())
        if field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64):
            setattr(changed, field.name, getattr(message, field.name) - 1)
        else:
            setattr(changed, field.name, other(getattr(message, field.name)))
        assert SumPlan.from_wire(changed).hash != plan.hash, field.name
    for name in ("participant", "device"):
        changed = wire.SumPlan.FromString(message.SerializeToString())
        setattr(changed.holders[1], name, other(getattr(message.holders[1], name)))
        assert SumPlan.from_wire(changed).hash != plan.hash, name


def test_noise_is_in_the_hash_of_a_plan_and_in_no_plan_with_key_holders() -> None:
    noisy = dataclasses.replace(PLAN, secure_sum="denoised", noise_floor=3)
    message = noisy.to_wire()
    assert SumPlan.from_wire(message) == noisy
    for floor in (0, 2):
        message.noise_floor = floor
        assert SumPlan.from_wire(message).hash != noisy.hash
    message = ENCRYPTED.to_wire()
    message.noise_floor = 3
    with pytest.raises(Refusal, match="bad noise_floor"):
        SumPlan.from_wire(message)


def bad(field: str, value: Any) -> Callable[[wire.SumPlan], None]:
    """Return what sets a field of a message."""
    return lambda message: setattr(message, field, value)


def member(field: str, value: Any) -> Callable[[wire.SumPlan], None]:
    """Return what sets a field of a message's second member."""
    return lambda message: setattr(message.members[1], field, value)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("version", bad("version", VERSION + 1)),
        ("version", bad("version", 0)),
        ("version", bad("version", 1)),
        ("round", bad("round", 0)),
        ("run_plan_sha256", bad("run_plan_sha256", b"")),
        ("inputs.sha256", lambda message: setattr(message.inputs[1], "sha256", bytes(31))),
        ("inputs.name", lambda message: setattr(message.inputs[1], "name", "catalogue")),
        ("inputs.name", lambda message: setattr(message.inputs[1], "name", "a")),
        ("model_sha256", bad("model_sha256", b"")),
        ("model_sha256", bad("model_sha256", bytes(31))),
        ("layout_sha256", bad("layout_sha256", bytes(33))),
        ("population_sha256", bad("population_sha256", bytes(31))),
        ("beacon", bad("beacon", bytes(31))),
        ("beacon", bad("beacon", b"")),
        ("beacon", bad("population_sha256", b"")),
        ("members", lambda message: message.ClearField("members")),
        ("members", member("participant", named(1))),
        ("members.participant", member("participant", bytes(31))),
        ("members.participant", member("participant", b"")),
        ("members.device", member("device", 3)),
        ("members.users", member("users", 0)),
        ("devices", lambda message: message.devices.append("client/north")),
        ("degree", bad("degree", 4)),
        ("threshold", bad("threshold", 4)),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_plan_that_cannot_be_is_refused_with_the_field_that_is_wrong(
    field: str, change: Callable[[wire.SumPlan], None]
) -> None:
    message = PLAN.to_wire()
    SumPlan.from_wire(message)
    change(message)
    with pytest.raises(Refusal, match=f"round {message.round} has a bad {field} ") as refused:
        SumPlan.from_wire(message)
    assert refused.value.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
    assert refused.value.field == field
    assert refused.value.expected


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("key_id", bad("key_id", b"")),
        ("key_id", bad("key_id", bytes(31))),
        ("code_bits", bad("code_bits", 0)),
        ("code_bits", bad("code_bits", 32)),
        ("holders", lambda message: message.holders.append(message.holders[0])),
        ("holders.participant", lambda message: setattr(message.holders[0], "participant", bytes(31))),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_plan_without_a_right_key_or_right_holders_is_refused(
    field: str, change: Callable[[wire.SumPlan], None]
) -> None:
    message = ENCRYPTED.to_wire()
    SumPlan.from_wire(message)
    change(message)
    with pytest.raises(Refusal, match=f"has a bad {field} "):
        SumPlan.from_wire(message)


def test_each_task_of_each_holder_has_a_number_of_its_own_behind_the_members() -> None:
    numbers = [ENCRYPTED.respondent(holder, task) for holder in range(2) for task in range(2)]
    assert sorted(numbers) == [4, 5, 6, 7]
    assert [ENCRYPTED.asked_of(number) for number in numbers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {ENCRYPTED.device_of(number) for number in ENCRYPTED.numbers_of(5)} == {"holder/two"}
    assert ENCRYPTED.numbers_of(3) == (3,)
    assert ENCRYPTED.by_device == {
        "client/north": [0, 2],
        "client/south": [1],
        "client/east": [3],
        "holder/one": [4, 6],
        "holder/two": [5, 7],
    }
    assert PLAN.by_device == {"client/north": [0, 2], "client/south": [1], "client/east": [3]}


def test_the_limits_themselves_are_accepted() -> None:
    complete = dataclasses.replace(PLAN, degree=3, threshold=3, round=1)
    assert SumPlan.from_wire(complete.to_wire()) == complete
    alone = dataclasses.replace(PLAN, members=MEMBERS[:1], degree=0, threshold=0, secure_sum="clear")
    assert SumPlan.from_wire(alone.to_wire()) == alone


def test_connections_that_speak_for_nobody_do_not_change_the_plan() -> None:
    message = PLAN.to_wire()
    message.devices.append("client/west")
    assert SumPlan.from_wire(message).hash == PLAN.hash
