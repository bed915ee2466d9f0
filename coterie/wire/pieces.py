"""Pieces of a submission, several of which travel in one message where the COS speaks version 2 of the protocol.

A message costs a call's two sides about as much as 50 kB of content.  Members of one host, whose messages of most steps
are short, therefore send them together.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator

from google.protobuf.message import DecodeError

from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire

__all__ = ["SINCE", "TOGETHER", "TOGETHER_BYTES", "check_pieces", "pieces", "pieces_of_stream"]

SINCE = 2
"""Version of the protocol from which on pieces travel together, and a whole item needs no hash."""

TOGETHER_BYTES = 384 << 10
"""Most bytes of payload in one message of several pieces: longer messages cost more for each byte."""

TOGETHER = 4096
"""Most pieces of one message, sent or taken: a piece without content takes two bytes, and much memory when read."""

_MOST_FIELDS = 8 * TOGETHER
"""Most fields of one message and its pieces that are looked at, ranges of slots apart."""

_SLOTS, _POLL, _MORE = 3, 6, 7
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_SLOT_RANGES = re.compile(
    b"(?:%c(?:%s))++" % (_SLOTS << 3 | _BYTES, b"|".join(b"%c.{%d}" % (size, size) for size in range(2, 13))),
    re.DOTALL,
)
"""Ranges of slots, one after the other, none of them empty: a large cohort has very many."""


def check_pieces(data: bytes) -> None:
    """Look at the bytes of a submission's message, which would take much memory when parsed, before they are.

    Parameters
    ----------
    data : bytes
        A message of a caller.  Only its fields and those of its pieces are looked at, without their values.

    Raises
    ------
    Refusal
        TOO_LARGE for too many pieces or fields; INVALID_FIELD for a further piece that has pieces or a poll itself.
    DecodeError
        The bytes are no message.
    """
    further, left = 0, _MOST_FIELDS
    for field, begin, end in _fields(data, 0, len(data)):
        left -= 1
        if field == _MORE:
            further += 1
            if further == TOGETHER:
                raise _too_many(f"at least {TOGETHER + 1} pieces in one message", TOGETHER)
            for inner, _, _ in _fields(data, begin, end):
                left -= 1
                if inner in (_POLL, _MORE):
                    raise _nested()
                if left < 0:
                    break
        if left < 0:
            raise _too_many("very many fields in one message", _MOST_FIELDS)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of each field's value; ranges of slots are passed over."""
    while at < end:
        if found := _SLOT_RANGES.match(data, at, end):
            at = found.end()
            continue
        tag, at = _varint(data, at, end)
        field, kind = tag >> 3, tag & 7
        if not field or tag >= 1 << 32:
            raise DecodeError("no field has this number")
        begin = at
        if kind == _BYTES:
            length, begin = _varint(data, at, end)
            at = begin + length
        elif kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind == _EIGHT_BYTES:
            at += 8
        elif kind == _FOUR_BYTES:
            at += 4
        else:
            raise DecodeError("the contract has no groups")
        if at > end:
            raise DecodeError("the message ends within a field")
        yield (field if kind == _BYTES else 0), begin, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number that begins at a place, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise DecodeError("a number does not end")


def _too_many(what: str, most: int) -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_TOO_LARGE, what, field="more", expected=f"at most {most}")


def _nested() -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_INVALID_FIELD,
        "a further piece of a message with pieces or a poll of its own",
        field="more",
        expected="pieces of items only",
    )


def pieces(message: wire.SubmitRequest) -> Iterator[wire.SubmitRequest]:
    """Yield the pieces of a message in their order, as if each had come in a message of its own; it keeps the first.

    Raises
    ------
    Refusal
        TOO_LARGE for too many pieces; INVALID_FIELD for a further piece that has pieces or a poll itself.
    """
    if not message.more:
        yield message
        return
    if len(message.more) >= TOGETHER:
        raise _too_many(f"{len(message.more) + 1} pieces in one message", TOGETHER)
    further = list(message.more)
    message.ClearField("more")
    yield message
    for piece in further:
        if piece.more or piece.HasField("poll"):
            raise _nested()
        yield piece


async def pieces_of_stream(requests: AsyncIterator[wire.SubmitRequest]) -> AsyncIterator[wire.SubmitRequest]:
    """Yield the pieces of all messages of a stream; raises as `pieces`."""
    async for message in requests:
        for piece in pieces(message):
            yield piece
