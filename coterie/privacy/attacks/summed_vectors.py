"""The contributions to a sum in clear, as the COS received them: read from its transcripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from coterie.errors import DataError, StoreError
from coterie.privacy.attacks.reconstruction import (
    Marginals,
    Reconstruction,
    Rules,
    Seen,
    reconstruct,
    seen_in_message,
)
from coterie.privacy.payloads import Assembly
from coterie.privacy.transcript import decode, message_class, read_transcript
from coterie.wire.layout import ImpossibleSumError, Layout
from coterie.wire.v1.orchestrator_pb2 import SubmitKind, SubmitRequest

__all__ = ["SentVector", "read_vectors", "reconstruct_senders"]

Factors = tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]
"""Q (m, K) and U (l, K) of a version."""


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


def reconstruct_senders(
    vectors: Iterable[SentVector],
    layout: Layout,
    versions: Mapping[int, Factors],
    rules: Rules,
    marginals: Marginals,
) -> dict[int, Reconstruction]:
    """Reconstruct every user of FedMVMF that was a party of its own, by the last that it sent.

    Parameters
    ----------
    vectors : iterable of SentVector
        Of training rounds, in the order of their arrival.
    layout : Layout
        Of the plan.
    versions : mapping of int to (ndarray, ndarray)
        What was fetched in each round; rounds that are not in it are passed over.
    rules : Rules
    marginals : Marginals

    Returns
    -------
    dict of int to Reconstruction
        By slot.  With SGD by the last two rounds where they follow each other, otherwise by the last.
    """
    last: dict[int, list[tuple[int, Seen]]] = {}
    for vector in vectors:
        if len(vector.slots) != 1 or vector.round not in versions:
            continue
        try:
            seen = seen_in_message(vector.message, layout, *versions[vector.round])
        except (DataError, ImpossibleSumError):
            # Refused by the COS as well.
            continue
        kept = last.setdefault(vector.slots[0], [])
        kept[:] = [*kept[-1:], (vector.round, seen)]
    found = {}
    for slot, sent in last.items():
        before, after = sent[0], sent[-1]
        if rules.update == "sgd" and after[0] == before[0] + 1:
            found[slot] = reconstruct(before[1], rules, marginals, second=after[1])
        else:
            found[slot] = reconstruct(after[1], rules, marginals)
    return found
