"""Match uploads of a graph that share tags: opens users' sealed requests, checks them, answers them from the store.

The third party's service answers with it, and so do runs in one process, which have a third party of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from coterie.crypto.graph_key import GraphRecord
from coterie.crypto.graph_requests import (
    AnswerKey,
    Kind,
    SealingSecret,
    UploadPlace,
    open_request,
    upload_id_of,
)
from coterie.crypto.graph_tags import TAG_BYTES
from coterie.crypto.verification import VerificationError
from coterie.parties.graph_records import graph_record_from_wire
from coterie.parties.request_checks import check_run, refusal_of
from coterie.store.expansion import ExpansionStore, KeptGraph, TagPublication
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import expansion_pb2 as wire

__all__ = ["GraphMatching"]

M = TypeVar("M", bound=Message)

_ID = 32
_KEY_ID = 8
_MOST_SEALED = 1 << 20


class _Opened(NamedTuple):
    """A sealed request, opened and checked."""

    kept: KeptGraph
    record: GraphRecord
    place: UploadPlace
    content: bytes
    answer: AnswerKey


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
        upload = _parsed(wire.TagUpload, opened)
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
        publication = TagPublication(opened.place.upload_id, upload.sequence, upload.tags, upload.embedding)
        await self._store.publish(opened.kept, publication, opened.record.terms.most_tags)
        return wire.PublishTagsResponse()

    async def neighbours(self, request: wire.SealedRequest) -> wire.NeighboursResponse:
        """Return the neighbours of an upload."""
        opened = await self._open(Kind.NEIGHBOURS, request)
        query = _parsed(wire.NeighbourQuery, opened)
        terms = opened.record.terms
        _check_tags(query.tags, terms.most_tags)
        asked = [query.tags[at : at + TAG_BYTES] for at in range(0, len(query.tags), TAG_BYTES)]
        found = await self._store.neighbours(
            opened.kept, opened.place.upload_id, asked, terms.most_neighbours
        )
        places = {tag: at for at, tag in enumerate(asked)}
        answer = wire.NeighbourAnswer(
            neighbours=[
                wire.Neighbour(embedding=one.embedding, tags=sorted(places[tag] for tag in one.tags))
                for one in found
            ]
        )
        with self._sealing():
            sealed = opened.answer.seal(answer.SerializeToString())
        return wire.NeighboursResponse(sealed=sealed)

    async def forget(self, request: wire.SealedRequest) -> wire.ForgetResponse:
        """Delete what an upload brought."""
        opened = await self._open(Kind.FORGET, request)
        _parsed(wire.ForgetOrder, opened)
        await self._store.forget(opened.kept, opened.place.upload_id)
        return wire.ForgetResponse()

    async def _open(self, kind: Kind, request: wire.SealedRequest) -> _Opened:
        check_run(request.run_id, "request.run_id")
        _check_epoch(request.epoch)
        for field, length in (("upload_id", _ID), ("key_id", _KEY_ID)):
            held = len(getattr(request, field))
            if held != length:
                raise _invalid(f"request.{field}", f"{held} bytes", f"{length} bytes")
        if len(request.sealed) > _MOST_SEALED:
            raise Refusal(
                ErrorReason.ERROR_REASON_TOO_LARGE,
                f"a sealed request of {len(request.sealed)} bytes",
                field="request.sealed",
                expected=f"at most {_MOST_SEALED} bytes",
            )
        kept = await self._store.graph(request.run_id, request.epoch)
        place = UploadPlace(request.run_id, request.epoch, request.upload_id)
        try:
            with self._sealing():
                content, answer = open_request(kind, place, self._find(request.key_id), request.sealed)
        except VerificationError as error:
            raise refusal_of(error, "request.sealed", "a request sealed for this call and upload") from error
        record = graph_record_from_wire(wire.GraphRecord.FromString(kept.record))
        return _Opened(kept, record, place, content, answer)


def _parsed(cls: type[M], opened: _Opened) -> M:
    """Parse the content of a request, and check that its secret is the upload's."""
    try:
        content = cls.FromString(opened.content)
    except DecodeError:
        raise _invalid("request.sealed", "content that does not parse", f"a {cls.DESCRIPTOR.name}") from None
    try:
        same = upload_id_of(content.secret) == opened.place.upload_id  # type: ignore[attr-defined]
    except VerificationError as error:
        raise refusal_of(error, "secret", "32 bytes") from error
    if not same:
        raise Refusal(
            ErrorReason.ERROR_REASON_NOT_AUTHENTIC,
            "the secret is not that of the upload's id",
            field="secret",
            expected="the secret that the upload was published with",
        )
    return content


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


def _check_epoch(epoch: int) -> None:
    if not 1 <= epoch < 1 << 31:
        raise _invalid("request.epoch", f"epoch {epoch}", "1 to 2^31 - 1")


def _invalid(field: str, message: str, expected: str) -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, message, field=field, expected=expected)
