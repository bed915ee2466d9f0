"""The contributions to a sum in clear, as the COS received them: read from its transcripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from coterie.errors import StoreError
from coterie.privacy.payloads import Assembly
from coterie.privacy.transcript import decode, message_class, read_transcript
from coterie.wire.v1.orchestrator_pb2 import SubmitKind, SubmitRequest

__all__ = ["SentVector", "read_vectors"]


@dataclass(frozen=True)
class SentVector:
    """One contribution.

    Attributes
    ----------
    round : int
    slots : tuple of int
        Whose users it covers: with users as parties one, with hosts as parties several.
    message : bytes
        The serialised ``SummedVector``.
    """

    round: int
    slots: tuple[int, ...]
    message: bytes


def read_vectors(paths: Iterable[Path | str], run_id: str) -> Iterator[SentVector]:
    """Read the vectors that members of a run submitted, in the order of their arrival.

    Parameters
    ----------
    paths : iterable of Path
        Transcripts of the COS, oldest first.
    run_id : str
        The run.

    Yields
    ------
    SentVector
        The first of each round and member; a message that cannot be read is left out, as the COS refused it.
    """
    assembly = Assembly()
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for path in paths:
        for entry in read_transcript(path):
            if entry.side != "server" or entry.direction != "received":
                continue
            if message_class(entry) is not SubmitRequest:
                continue
            try:
                message = decode(entry)
                if not isinstance(message, SubmitRequest) or not message.HasField("chunk"):
                    continue
                whole = assembly.add(entry, message, message.chunk)
            except (DecodeError, StoreError):
                continue
            if whole is None or not isinstance(whole.first, SubmitRequest):
                continue
            head = whole.first
            if head.kind != SubmitKind.SUBMIT_KIND_VECTOR or head.round.run_id != run_id:
                continue
            slots = tuple(slot for one in head.slots for slot in range(one.first, one.first + one.count))
            if slots and (head.round.round, slots) not in seen:
                seen.add((head.round.round, slots))
                yield SentVector(head.round.round, slots, bytes(whole.data))
