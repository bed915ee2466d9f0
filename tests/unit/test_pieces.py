from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from coterie.wire.chunks import CHUNK_BYTES, fill
from coterie.wire.pieces import (
    TOGETHER,
    check_pieces,
    first_piece,
    further_piece,
    pieces,
    pieces_of_stream,
)
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Chunk, RoundRef, SlotRange


def piece(data: bytes, *more: wire.SubmitRequest) -> wire.SubmitRequest:
    return wire.SubmitRequest(chunk=Chunk(data=data, last=True), more=more)


async def test_pieces_of_one_message_are_those_of_several_messages() -> None:
    async def messages() -> AsyncIterator[wire.SubmitRequest]:
        for message in (piece(b"1", piece(b"2"), piece(b"3")), piece(b"4")):
            yield wire.SubmitRequest.FromString(message.SerializeToString())

    assert [one async for one in pieces_of_stream(messages())] == [piece(b"%d" % n) for n in range(1, 5)]


@st.composite
def chunked(draw: st.DrawFn) -> tuple[wire.SubmitRequest, bytes, int]:
    """Draw what a piece has besides its chunk, a payload, and where a chunk of it begins."""
    head = wire.SubmitRequest(
        kind=wire.SubmitKind.SUBMIT_KIND_VECTOR, sha256=draw(st.sampled_from((b"", bytes(32))))
    )
    if draw(st.booleans()):
        head.round.CopyFrom(RoundRef(run_id="run", round=draw(st.integers(0, 2**32 - 1))))
        head.slots.append(SlotRange(first=draw(st.integers(0, 2**31)), count=1))
    size = draw(st.sampled_from((0, 1, 100, 127, 128, 16_383, 16_384, CHUNK_BYTES - 1, CHUNK_BYTES)))
    before = draw(st.integers(0, 2)) * CHUNK_BYTES
    return head, bytes(before) + b"x" * size, before


def of(head: wire.SubmitRequest, payload: bytes, offset: int) -> wire.SubmitRequest:
    found = wire.SubmitRequest()
    found.CopyFrom(head)
    fill(found.chunk, payload, offset)
    return found


@given(chunked(), st.lists(chunked(), max_size=3), st.none() | st.integers(0, 2**40))
def test_written_pieces_are_the_bytes_of_the_message_that_has_them(
    first: tuple[wire.SubmitRequest, bytes, int],
    further: list[tuple[wire.SubmitRequest, bytes, int]],
    cursor: int | None,
) -> None:
    poll = None if cursor is None else wire.PollRequest(run_id="run", cursor=cursor)
    message = of(*first)
    message.more.extend(of(*one) for one in further)
    if poll is not None:
        message.poll.CopyFrom(poll)
    written = b"".join(
        (*first_piece(*first, poll), *(part for one in further for part in further_piece(*one)))
    )
    assert written == message.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (piece(b"", piece(b"", piece(b""))), "INVALID_FIELD"),
        (piece(b"", wire.SubmitRequest(poll=wire.PollRequest())), "INVALID_FIELD"),
        (wire.SubmitRequest.FromString(b"\x3a\x00" * TOGETHER), "TOO_LARGE"),
    ],
    ids=["pieces within pieces", "a poll within pieces", "very many pieces"],
)
def test_pieces_that_nobody_sends_are_refused(message: wire.SubmitRequest, reason: str) -> None:
    for read in (lambda: check_pieces(message.SerializeToString()), lambda: list(pieces(message))):
        with pytest.raises(Refusal) as refused:
            read()
        assert refused.value.name == reason


# What follows would not be found before all was parsed.
UNREADABLE = b"\xff"


@pytest.mark.parametrize(
    "data",
    [
        b"\x3a\x00" * 4096,
        # Its number takes three bytes in place of one.
        b"\xba\x80\x00\x00" * 4096,
        b"\x1a\x00" * (1 << 15) + b"\x0a\x00",
        b"\x3a\x80\x80\x04" + b"\x1a\x00" * (1 << 15),
        b"\x9a\x06\x00" * (1 << 15) + b"\x0a\x00",
    ],
    ids=["pieces", "long tags", "empty slots", "empty slots in a piece", "unknown fields"],
)
def test_what_would_take_much_memory_when_parsed_is_refused_by_its_bytes(data: bytes) -> None:
    with pytest.raises(Refusal, match="in one message") as refused:
        check_pieces(data + UNREADABLE)
    assert refused.value.name == "TOO_LARGE"


@pytest.mark.parametrize("field", [6, 7], ids=["poll", "more"])
def test_what_a_piece_must_not_have_is_refused_by_its_bytes(field: int) -> None:
    # One piece, which ends in the middle of what it must not have.
    inner = bytes([field << 3 | 2, 2, 0xFF, 0xFF])
    with pytest.raises(Refusal, match="pieces or a poll of its own"):
        check_pieces(bytes([7 << 3 | 2, len(inner)]) + inner)


def test_what_parties_send_passes() -> None:
    scattered = [SlotRange(first=3 * place, count=1 + place % 2) for place in range(100_000)]
    whole = piece(b"x" * 300_000, *(piece(b"%d" % place) for place in range(4095)))
    whole.slots.extend(scattered)
    whole.more[0].slots.extend(scattered)
    whole.poll.run_id = "run"
    check_pieces(whole.SerializeToString())
    check_pieces(b"")


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"\x3a\x05\x00", b"\x00\x00", b"\x3b", b"\x09\x00", b"\x80" * 11 + b"\x00", b"\x3a\x01\xff"],
    ids=["a tag", "a length", "field 0", "a group", "eight bytes", "a long number", "a piece"],
)
def test_bytes_that_are_no_message_are_no_message_before_they_are_parsed(data: bytes) -> None:
    with pytest.raises(DecodeError):
        wire.SubmitRequest.FromString(data)
    with pytest.raises(DecodeError):
        check_pieces(data)
