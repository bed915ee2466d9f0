"""Graph expansion at a client host: publish what its users may share, ask for their neighbours, have them forgotten.

A system's side of the host calls `Expansion` with each user's items and embedding.  Everything is sealed to the third
party and goes through the COS; neither the third party nor the COS learns which item or whose neighbour it is.
"""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
import structlog
from google.protobuf.message import DecodeError

from coterie.crypto import clocks
from coterie.crypto.explicit import encode
from coterie.crypto.graph_requests import AnswerKey, Kind, UploadPlace, upload_id_of
from coterie.crypto.graph_tags import bucket_counts, bucket_of, choose_items, item_tag
from coterie.crypto.verification import VerificationError
from coterie.errors import CryptoError, PeerError
from coterie.net.channel import CallTarget
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.parties.graph_keys import GraphHolding
from coterie.parties.sealed_requests import RequestSealer, is_gone
from coterie.parties.upload_file import read_upload, write_upload
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import expansion_pb2 as wire
from coterie.wire.v1.expansion_pb2_grpc import ExpansionRelayStub

if TYPE_CHECKING:
    from coterie.wire.v1.expansion_pb2_grpc import ExpansionRelayAsyncStub

__all__ = ["Expansion", "GraphNeighbour", "UserUpload"]

_log = structlog.get_logger("coterie.expansion")

_CALL_S = 10.0
"""Longest time for one call, seconds: a round that is about to be answered waits for it."""
_SECRET = 32


class GraphNeighbour(NamedTuple):
    """A user, without name, who has items in common with another."""

    items: tuple[str, ...]
    """Keys of the items that both have published, ascending."""
    embedding: npt.NDArray[np.float32]
    """Its embedding, shape (d,)."""


class UserUpload:
    """What a host keeps of one user's uploads in one run: the user's secret, and the upload of the newest epoch.

    Parameters
    ----------
    path : Path, optional
        File of this user and run, mode 0600; made at the first use.  Without one nothing outlives the object.
    slot : int
        The user's slot in the run.
    seed : bytes, optional
        32 bytes from which all secrets of the user follow, for experiments: the same user then publishes the same
        items in the same buckets in every run, and meets the same neighbours.  Whoever knows it knows the secrets.

    Raises
    ------
    CertificateError
        When the file is damaged, or readable by others.
    """

    def __init__(self, path: Path | None, slot: int, seed: bytes = b"") -> None:
        self.slot = slot
        self._path = path
        self._seed = seed
        self.user_secret = seed or os.urandom(_SECRET)
        self.epoch = 0
        self.secret = b""
        """Secret of the upload, 32 bytes; empty without an upload."""
        self.sequence = 0
        """Publications that the third party acknowledged."""
        self.tags: dict[str, bytes] = {}
        """Tags by item, of those published in this epoch and about to be."""
        self.pending = b""
        """Content of a publication that is not acknowledged yet, which is sent again after a restart."""
        self.older: tuple[int, bytes] | None = None
        """Epoch and secret of the upload before: the third party keeps the graph before the newest one, too."""
        self._begun = 0
        if path is not None and path.exists():
            self._read(path)

    def run_of(self, run: str) -> str:
        """Return the run in whose name the user draws items and buckets: in experiments the same name for all."""
        return "" if self._seed else run

    @property
    def upload_id(self) -> bytes:
        """Id of the upload, 32 bytes."""
        return upload_id_of(self.secret)

    def begin(self, epoch: int) -> None:
        """Begin the upload of an epoch with a new secret; durable with the next `save`."""
        self._begun += 1
        fresh = os.urandom(_SECRET)
        if self._seed:
            # Numbered, because a forgotten upload never comes back.
            fresh = hmac.digest(self._seed, encode("graph-experiment", epoch, self._begun), "sha256")
        if self.secret:
            self.older = self.epoch, self.secret
        self.epoch, self.secret, self.sequence = epoch, fresh, 0
        self.tags, self.pending = {}, b""

    def end(self) -> None:
        """Forget the upload, and keep the user's secret; durable with the next `save`."""
        self.secret, self.sequence, self.tags, self.pending = b"", 0, {}, b""

    def save(self) -> None:
        """Write the file, durably.

        Raises
        ------
        CertificateError
            When it cannot be written.
        """
        if self._path is None:
            return
        content = {
            "user_secret": self.user_secret.hex(),
            "epoch": self.epoch,
            "secret": self.secret.hex(),
            "sequence": self.sequence,
            "tags": {item: tag.hex() for item, tag in self.tags.items()},
            "pending": base64.b64encode(self.pending).decode(),
            "begun": self._begun,
            "older": None if self.older is None else [self.older[0], self.older[1].hex()],
        }
        write_upload(self._path, content)

    def _read(self, path: Path) -> None:
        with read_upload(path) as content:
            self.user_secret = bytes.fromhex(content["user_secret"])
            self.epoch, self.sequence = int(content["epoch"]), int(content["sequence"])
            self.secret = bytes.fromhex(content["secret"])
            self.tags = {item: bytes.fromhex(tag) for item, tag in content["tags"].items()}
            self.pending = base64.b64decode(content["pending"])
            # Files of earlier releases have no number.
            self._begun = int(content.get("begun", 0))
            if older := content.get("older"):
                self.older = int(older[0]), bytes.fromhex(older[1])


async def _unnoted(size: int) -> None:
    """Note nothing."""


class Expansion:
    """Calls of graph expansion for the users of one host in one run.

    Parameters
    ----------
    cos : CallTarget
        To the COS, at which the users are registered: a `Channel`.
    thirdparty : CallTarget
        To the third party, for its sealing key only.
    directory_key : bytes
        The directory's raw Ed25519 public key, 32 bytes, as enrolment left it in the state folder.
    retry : Retry, optional
        Retries of calls, all of which may be repeated.
    clock : callable, optional
        Gives Unix seconds.

    Notes
    -----
    Every method raises `Refusal` when COS or third party refuse, and `PeerError` when they cannot be reached.
    """

    def __init__(
        self,
        cos: CallTarget,
        thirdparty: CallTarget,
        directory_key: bytes,
        retry: Retry | None = None,
        clock: Callable[[], float] = clocks.now_s,
    ) -> None:
        self._relay: ExpansionRelayAsyncStub = cos.stub(lambda inner: ExpansionRelayStub(inner))
        self._peers = cos.peer, thirdparty.peer
        self._retry = retry or Retry()
        self._sealer = RequestSealer(thirdparty, directory_key, self._retry, clock)

    async def publish(
        self,
        user: UserUpload,
        holding: GraphHolding,
        items: Collection[str],
        users: Mapping[str, int],
        embedding: npt.NDArray[np.float32],
        note: Callable[[int], Awaitable[None]] = _unnoted,
    ) -> None:
        """Publish a user's items and embedding, or what is new of them since the last time in this epoch.

        A publication that was not acknowledged before, perhaps before a restart, is sent again first.

        Parameters
        ----------
        user : UserUpload
        holding : GraphHolding
            Of the newest epoch.
        items : collection of str
            Keys of all items that the user has; at most ``most_tags`` of them are published.
        users : mapping of str to int
            Number of users who publish each item, the same mapping at all hosts in one epoch; 0 where it has none.
        embedding : ndarray of float32, shape (d,)
        note : callable, optional
            Notes the bytes of each publication that is about to be sent.

        Raises
        ------
        CryptoError
            When the embedding has another length, or values that are not finite.
        """
        secrets, terms = holding.secrets, holding.record.terms
        if embedding.shape != (terms.dimension,):
            raise CryptoError(f"an embedding of shape {embedding.shape}, expected ({terms.dimension},)")
        if user.epoch != secrets.epoch or not user.secret:
            user.begin(secrets.epoch)
        if user.pending:
            await note(len(user.pending))
            await self._send(user, holding)
        run = user.run_of(secrets.run)
        chosen = choose_items(user.user_secret, run, items, terms.most_tags, list(user.tags))
        fresh = chosen[len(user.tags) :]
        counts = bucket_counts(np.array([users.get(item, 0) for item in fresh], np.int64), terms.bucket_users)
        added = {}
        for item, count in zip(fresh, counts, strict=True):
            bucket = bucket_of(user.user_secret, run, secrets.epoch, item, int(count))
            added[item] = item_tag(secrets.tag_key, secrets.run, secrets.epoch, item, bucket)
        content = wire.TagUpload(
            secret=user.secret,
            sequence=user.sequence + 1,
            tags=b"".join(sorted(added.values())),
            embedding=secrets.seal_embedding(embedding),
        )
        user.tags |= added
        user.pending = content.SerializeToString()
        user.save()
        await note(len(user.pending))
        await self._send(user, holding)

    async def neighbours(self, user: UserUpload, holding: GraphHolding) -> list[GraphNeighbour]:
        """Return the neighbours of a user, over all items that it published in the epoch of ``holding``.

        Embeddings that do not open are left out, and counted in the log.

        Raises
        ------
        PeerError
            When the user has published nothing in this epoch, or the answer is none.
        """
        secrets, terms = holding.secrets, holding.record.terms
        if user.epoch != secrets.epoch or not user.sequence:
            raise PeerError(
                f"the user at slot {user.slot} has published nothing in epoch {secrets.epoch}",
                hint="publish first",
            )
        named = {tag: item for item, tag in user.tags.items()}
        tags = sorted(named)
        query = wire.NeighbourQuery(secret=user.secret, tags=b"".join(tags))

        def ask(request: wire.SealedRequest) -> wire.RelayRequest:
            return wire.RelayRequest(slot=user.slot, neighbours=wire.NeighboursRequest(request=request))

        response, answer = await self._call(
            Kind.NEIGHBOURS, user, secrets.run, query.SerializeToString(), ask
        )
        try:
            found = wire.NeighbourAnswer.FromString(answer.open(response.neighbours.sealed))
        except (VerificationError, DecodeError) as error:
            raise PeerError(f"{self._peers[1]}: an answer that cannot be read: {error}") from error
        neighbours, unusable = [], 0
        for one in found.neighbours:
            try:
                embedding = secrets.open_embedding(one.embedding, terms.dimension)
                items = tuple(sorted({named[tags[at]] for at in one.tags}))
            except (VerificationError, IndexError):
                unusable += 1
                continue
            neighbours.append(GraphNeighbour(items, embedding))
        if unusable:
            _log.warning("neighbours that cannot be used", run=secrets.run, neighbours=unusable)
        return neighbours

    async def reach(self) -> None:
        """Return once the third party has answered a call; raises as every method."""
        await self._sealer.reach()

    async def forget(self, user: UserUpload, run: str) -> None:
        """Have a user's uploads deleted at the third party, of this epoch and of the one before, and forget them here.

        One that the third party has no more, or never received, counts as deleted.
        """
        if user.older is not None:
            await self._delete(
                user.slot, UploadPlace(run, user.older[0], upload_id_of(user.older[1])), user.older[1]
            )
            user.older = None
            user.save()
        if not (secret := user.secret):
            return
        await self._delete(user.slot, UploadPlace(run, user.epoch, user.upload_id), secret)
        # Meanwhile the user may have published anew.
        if user.secret == secret:
            user.end()
            user.save()

    async def _delete(self, slot: int, place: UploadPlace, secret: bytes) -> None:
        order = wire.ForgetOrder(secret=secret).SerializeToString()

        def forgetting(request: wire.SealedRequest) -> Awaitable[wire.RelayResponse]:
            return self._relayed(wire.RelayRequest(slot=slot, forget=wire.ForgetRequest(request=request)))

        try:
            await self._sealer.ask(Kind.FORGET, place, order, forgetting)
        except Refusal as refusal:
            if not is_gone(refusal):
                raise

    async def _send(self, user: UserUpload, holding: GraphHolding) -> None:
        """Send the pending publication, and keep durably that it was acknowledged."""

        def publishing(request: wire.SealedRequest) -> wire.RelayRequest:
            return wire.RelayRequest(slot=user.slot, publish=wire.PublishTagsRequest(request=request))

        await self._call(Kind.PUBLISH, user, holding.secrets.run, user.pending, publishing)
        user.sequence, user.pending = user.sequence + 1, b""
        user.save()

    async def _call(
        self,
        kind: Kind,
        user: UserUpload,
        run: str,
        content: bytes,
        relaying: Callable[[wire.SealedRequest], wire.RelayRequest],
    ) -> tuple[wire.RelayResponse, AnswerKey]:
        place = UploadPlace(run, user.epoch, user.upload_id)
        return await self._sealer.ask(kind, place, content, lambda sealed: self._relayed(relaying(sealed)))

    async def _relayed(self, request: wire.RelayRequest) -> wire.RelayResponse:
        async def attempt() -> wire.RelayResponse:
            response: wire.RelayResponse = await self._relay.Relay(request, timeout=_CALL_S)
            return response

        try:
            return await self._retry(attempt)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peers[0]) from error
