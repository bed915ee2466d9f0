"""Pieces of a submission, several of which travel in one message where the COS speaks version 2 of the protocol.

A message costs a call's two sides about as much as 50 kB of content.  Members of one host, whose messages of most steps
are short, therefore send them together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire

__all__ = ["SINCE", "TOGETHER", "TOGETHER_BYTES", "pieces", "pieces_of_stream"]

SINCE = 2
"""Version of the protocol from which on pieces travel together, and a whole item needs no hash."""

TOGETHER_BYTES = 384 << 10
"""Most bytes of payload in one message of several pieces: longer messages cost more for each byte."""

TOGETHER = 4096
"""Most pieces of one message, sent or taken: a piece without content takes two bytes, and much memory when read."""


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
        raise Refusal(
            ErrorReason.ERROR_REASON_TOO_LARGE,
            f"{len(message.more) + 1} pieces in one message",
            field="more",
            expected=f"at most {TOGETHER}",
        )
    further = list(message.more)
    message.ClearField("more")
    yield message
    for piece in further:
        if piece.more or piece.HasField("poll"):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "a further piece of a message with pieces or a poll of its own",
                field="more",
                expected="pieces of items only",
            )
        yield piece


async def pieces_of_stream(requests: AsyncIterator[wire.SubmitRequest]) -> AsyncIterator[wire.SubmitRequest]:
    """Yield the pieces of all messages of a stream; raises as `pieces`."""
    async for message in requests:
        for piece in pieces(message):
            yield piece
