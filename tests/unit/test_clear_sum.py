"""The sum in clear, both halves."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.secure_sum.clear import ClearMember, ClearServer
from coterie.secure_sum.codes import codes_of
from coterie.secure_sum.contribution import Contribution, Layout, Segment
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import Declined, PlanFields, Step
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire

LAYOUT = Layout((Segment("dense", (4,), 0.5, 12, over="count"), Segment.whole("count", (), 20)))
SERVER = ClearServer()


def plan_of(*users, min_sum=1):
    members = tuple(Member(bytes([n]) * 32, f"device-{n}", each) for n, each in enumerate(users))
    return SumPlan("run", 1, "train", "clear", bytes(32), layout_hash(LAYOUT), members, min_sum=min_sum)


def contribution(rng, users):
    found = Contribution(LAYOUT)
    for _ in range(users):
        found.add("dense", rng.uniform(-0.5, 0.5, 4), rng)
        found.add("count", np.array(float(rng.integers(0, 20))), rng)
        found.count()
    return found.codes()


def submit(plan, codes, member):
    message = ClearMember().answer(Step.SUBMIT, b"", codes)
    return SERVER.vector(plan, {}, {}, member, message, LAYOUT)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 2**32), st.randoms())
@settings(deadline=None)
def test_the_sum_is_that_of_all_contributions_in_any_order(users, seed, random):
    plan, rng = plan_of(*users), np.random.default_rng(seed)
    codes = [contribution(rng, each) for each in users]
    order = random.sample(range(len(users)), len(users))
    running = np.zeros(LAYOUT.size, np.uint32)
    for member in order:
        running = running + submit(plan, codes[member], member).addend
    total = SERVER.unmask(plan, {}, running)
    assert np.array_equal(total.codes, np.sum(codes, axis=0, dtype=np.uint32))
    assert total.wrong == ()
    assert LAYOUT.possible(total.codes, sum(users))


def test_a_contribution_travels_as_it_is():
    codes = np.arange(LAYOUT.size, dtype=np.uint32)
    message = ClearMember().answer(Step.SUBMIT, b"", codes)
    assert np.array_equal(codes_of(message, LAYOUT.size)[1], codes)


def field(number, data):
    return bytes([number << 3 | 2, len(data)]) + data


FIRST, SECOND = (np.arange(n, n + LAYOUT.size, dtype="<u4").tobytes() for n in (0, 100))
FORMS = {
    "codes first": (field(1, FIRST) + field(3, b"s" * 64), FIRST),
    "codes last": (field(3, b"s" * 64) + field(1, FIRST), FIRST),
    "codes twice": (field(1, FIRST) + field(1, SECOND), SECOND),
    "codes again after others": (field(1, FIRST) + field(3, b"s") + field(1, SECOND), SECOND),
    "codes taken back": (field(1, FIRST) + field(1, b""), b""),
    "a length of more bytes than it needs": (
        bytes([0x0A, 0x80 | len(FIRST), 0x80, 0]) + FIRST,
        FIRST,
    ),
    "an unknown field": (field(1, FIRST) + field(15, b"x"), FIRST),
    "no codes": (field(3, b"s"), b""),
    "nothing": (b"", b""),
}


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_those_that_a_parser_of_the_whole_message_finds(form):
    """Who replays a transcript parses the whole message; the server must add the same codes."""
    message, codes = FORMS[form]
    assert wire.SummedVector.FromString(message).codes == codes
    if not codes:
        with pytest.raises(Refusal) as refused:
            codes_of(message, LAYOUT.size)
        assert refused.value.reason == ErrorReason.ERROR_REASON_WRONG_SHAPE
        return
    rest, found = codes_of(message, LAYOUT.size)
    assert found.tobytes() == codes
    assert rest.codes == b""
    assert rest.signature == wire.SummedVector.FromString(message).signature


@given(st.binary(max_size=40))
@settings(deadline=None)
def test_any_bytes_are_parsed_as_the_whole_message_is(tail):
    message = field(1, FIRST) + tail
    try:
        expected = wire.SummedVector.FromString(message)
    except DecodeError:
        with pytest.raises(Refusal):
            codes_of(message, LAYOUT.size)
        return
    if len(expected.codes) != 4 * LAYOUT.size:
        with pytest.raises(Refusal):
            codes_of(message, LAYOUT.size)
        return
    rest, found = codes_of(message, LAYOUT.size)
    assert found.tobytes() == expected.codes
    assert (list(rest.left_out), rest.signature) == (list(expected.left_out), expected.signature)


def test_the_codes_of_a_contribution_are_not_copied():
    # So many that their length takes three bytes, and they begin at a multiple of four.
    codes = np.arange(10_000, dtype=np.uint32)
    message = ClearMember().answer(Step.SUBMIT, b"", codes)
    found = codes_of(message, codes.size)[1]
    assert np.shares_memory(found, np.frombuffer(message, np.uint8))
    assert np.array_equal(found, codes)


def test_the_note_is_the_hash_of_the_message():
    plan, codes = plan_of(2), contribution(np.random.default_rng(0), 2)
    one, same = submit(plan, codes, 0), submit(plan, codes, 0)
    assert one.note == same.note
    assert len(one.note) == 32
    assert submit(plan, contribution(np.random.default_rng(1), 2), 0).note != one.note


@pytest.mark.parametrize("users", [1, 3])
def test_a_contribution_beyond_its_bounds_is_refused(users):
    plan = plan_of(users)
    codes = contribution(np.random.default_rng(0), users)
    codes[0] = users * (2**12 - 1) + 1
    with pytest.raises(Refusal, match="beyond the bounds") as caught:
        submit(plan, codes, 0)
    assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_FIELD


def test_a_contribution_for_more_users_than_the_plan_says_is_refused():
    # Every code of three users at its largest, under a plan that has two.
    codes = np.array([3 * (2**12 - 1)] * 4 + [3 * 60], np.uint32)
    submit(plan_of(3), codes, 0)
    with pytest.raises(Refusal, match="beyond the bounds"):
        submit(plan_of(2), codes, 0)


def test_a_contribution_of_another_length_is_refused():
    short = wire.SummedVector(codes=bytes(4 * LAYOUT.size - 1)).SerializeToString()
    with pytest.raises(Refusal, match="19 bytes") as caught:
        SERVER.vector(plan_of(1), {}, {}, 0, short, LAYOUT)
    assert caught.value.reason == ErrorReason.ERROR_REASON_WRONG_SHAPE


def test_bytes_that_are_no_contribution_are_refused():
    with pytest.raises(Refusal, match="no SummedVector"):
        SERVER.vector(plan_of(1), {}, {}, 0, b"\xff\xff\xff", LAYOUT)


def test_the_floor_counts_users():
    plan = plan_of(3, 4, 5, min_sum=8)
    assert SERVER.shortfall(plan, {}, Step.SUBMIT, {0: b"", 2: b""}) == ""
    assert "7 users submitted, the plan's floor is 8" in SERVER.shortfall(
        plan, {}, Step.SUBMIT, {0: b"", 1: b""}
    )


def test_everybody_is_asked_and_needs_to_know_nothing():
    plan = plan_of(1, 1, 1)
    assert SERVER.expected(plan, {}, Step.SUBMIT) == (0, 1, 2)
    assert SERVER.pieces(plan, {}, Step.SUBMIT, 1).whole == b""
    assert SERVER.plan_fields(1, LAYOUT) == PlanFields()


@pytest.mark.parametrize("step", [step for step in Step if step is not Step.SUBMIT])
def test_there_is_no_other_step(step):
    with pytest.raises(Refusal, match="no such step"):
        SERVER.check(plan_of(1), {}, step, 0, b"")
    with pytest.raises(Declined, match=step.value):
        ClearMember().answer(step, b"")


def test_a_member_without_a_contribution_declines():
    with pytest.raises(Declined):
        ClearMember().answer(Step.SUBMIT, b"")


def test_there_is_nothing_to_forget():
    member = ClearMember()
    member.forget()
    assert member.answer(Step.SUBMIT, b"", np.zeros(1, np.uint32))
