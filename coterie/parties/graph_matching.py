"""Match uploads of a graph that share tags: opens users' sealed requests, checks them, answers them from the store.

The third party's service answers with it, and so do runs in one process, which have a third party of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

from google.protobuf.message import Message

from coterie.crypto.graph_key import GraphRecord
from coterie.crypto.graph_requests import (
    Kind,
    SealingSecret,
)
from coterie.crypto.graph_tags import TAG_BYTES
from coterie.parties.graph_records import graph_record_from_wire
from coterie.parties.opened_requests import OpenedRequest, check_request, open_sealed, parsed
from coterie.store.expansion import ExpansionStore, KeptGraph, TagPublication
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import expansion_pb2 as wire

__all__ = ["GraphMatching"]

M = TypeVar("M", bound=Message)


class _Opened(NamedTuple):
    """A sealed request about a graph."""

    kept: KeptGraph
    record: GraphRecord
    request: OpenedRequest


class GraphMatching:
    """Answers users' requests from the store of graphs.

    Parameters
    ----------
    store : ExpansionStore
    find : callable
        Gives the secret to which a request was sealed, by the key's id; raises UNKNOWN_PREKEY.
    sealing : callable
        Makes a context for opening and sealing, which takes most of the time.

    Notes
    -----
    Every method raises `Refusal` for a request that cannot be answered, and `StoreError` when the store fails.
    """

    def __init__(
        self,
        store: ExpansionStore,
        find: Callable[[bytes], SealingSecret],
        sealing: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._store = store
        self._find = find
        self._sealing = sealing

    async def publish(self, request: wire.SealedRequest) -> wire.PublishTagsResponse:
        """Take the tags of an upload, or more of them."""
        opened = await self._open(Kind.PUBLISH, request)
        upload = parsed(wire.TagUpload, opened.request)
        _check_tags(upload.tags, opened.record.terms.most_tags)
        expected = opened.record.terms.sealed_bytes
        if len(upload.embedding) != expected:
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_SHAPE,
                f"a sealed embedding of {len(upload.embedding)} bytes",
                field="embedding",
                expected=f"{expected} bytes: salt, {opened.record.terms.dimension} floats, tag",
            )
        if not 1 <= upload.sequence < 1 << 31:
            raise _invalid("sequence", str(upload.sequence), "1 to 2^31 - 1")
        publication = TagPublication(
            opened.request.place.upload_id, upload.sequence, upload.tags, upload.embedding
        )
        await self._store.publish(opened.kept, publication, opened.record.terms.most_tags)
        return wire.PublishTagsResponse()

    async def neighbours(self, request: wire.SealedRequest) -> wire.NeighboursResponse:
        """Return the neighbours of an upload."""
        opened = await self._open(Kind.NEIGHBOURS, request)
        query = parsed(wire.NeighbourQuery, opened.request)
        terms = opened.record.terms
        _check_tags(query.tags, terms.most_tags)
        asked = [query.tags[at : at + TAG_BYTES] for at in range(0, len(query.tags), TAG_BYTES)]
        found = await self._store.neighbours(
            opened.kept, opened.request.place.upload_id, asked, terms.most_neighbours
        )
        places = {tag: at for at, tag in enumerate(asked)}
        answer = wire.NeighbourAnswer(
            neighbours=[
                wire.Neighbour(embedding=one.embedding, tags=sorted(places[tag] for tag in one.tags))
                for one in found
            ]
        )
        with self._sealing():
            sealed = opened.request.answer.seal(answer.SerializeToString())
        return wire.NeighboursResponse(sealed=sealed)

    async def forget(self, request: wire.SealedRequest) -> wire.ForgetResponse:
        """Delete what an upload brought."""
        opened = await self._open(Kind.FORGET, request)
        parsed(wire.ForgetOrder, opened.request)
        await self._store.forget(opened.kept, opened.request.place.upload_id)
        return wire.ForgetResponse()

    async def _open(self, kind: Kind, request: wire.SealedRequest) -> _Opened:
        check_request(request)
        kept = await self._store.graph(request.run_id, request.epoch)
        with self._sealing():
            found = open_sealed(kind, request, self._find)
        return _Opened(kept, graph_record_from_wire(wire.GraphRecord.FromString(kept.record)), found)


def _check_tags(held: bytes, most: int) -> None:
    if len(held) % TAG_BYTES:
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_SHAPE,
            f"tags of {len(held)} bytes together",
            field="tags",
            expected=f"{TAG_BYTES} bytes each",
        )
    if len(held) > most * TAG_BYTES:
        raise Refusal(
            ErrorReason.ERROR_REASON_TOO_LARGE,
            f"{len(held) // TAG_BYTES} tags",
            field="tags",
            expected=f"at most {most}",
        )
    tags = [held[at : at + TAG_BYTES] for at in range(0, len(held), TAG_BYTES)]
    if any(before >= after for before, after in itertools.pairwise(tags)):
        raise _invalid("tags", "tags that are not ascending, or come twice", "ascending, each once")


def _invalid(field: str, message: str, expected: str) -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, message, field=field, expected=expected)
