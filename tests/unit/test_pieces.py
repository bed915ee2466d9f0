from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coterie.wire.pieces import TOGETHER, pieces, pieces_of_stream
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Chunk


def piece(data: bytes, *more: wire.SubmitRequest) -> wire.SubmitRequest:
    return wire.SubmitRequest(chunk=Chunk(data=data, last=True), more=more)


async def test_pieces_of_one_message_are_those_of_several_messages() -> None:
    async def messages() -> AsyncIterator[wire.SubmitRequest]:
        for message in (piece(b"1", piece(b"2"), piece(b"3")), piece(b"4")):
            yield wire.SubmitRequest.FromString(message.SerializeToString())

    assert [one async for one in pieces_of_stream(messages())] == [piece(b"%d" % n) for n in range(1, 5)]


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
    with pytest.raises(Refusal) as refused:
        list(pieces(message))
    assert refused.value.name == reason
