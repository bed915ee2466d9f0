"""The graph keys of a run at one holder: make the key of an epoch or receive it, store it, replace it.

The first holder on the operator's roster that is not revoked makes the key of an epoch; any holder may rotate, and does
where the third party says that an operator had the key replaced.  The first key published is the key of the epoch.
The folder of a holder has for each epoch::

    RUN.EPOCH.graph-draft   secrets that this holder drew and has not published for certain
    RUN.EPOCH.graph         secrets of a key that the third party has

Secrets are on disk before their record is published, so a holder that restarts has what it published.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import grpc
import structlog

from coterie.crypto import clocks
from coterie.crypto.graph_key import (
    GRAPH,
    GraphRecord,
    GraphSecrets,
    GraphTerms,
    open_graph_secrets,
    seal_graph_secrets,
    sign_graph_record,
)
from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.keyfile import destroy_private_file
from coterie.crypto.roster import Roster
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError, PeerError
from coterie.net.channel import Channel
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.parties.graph_records import graph_record_from_wire, graph_record_to_wire
from coterie.parties.key_records import roster_to_wire
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import expansion_pb2 as wire
from coterie.wire.v1.expansion_pb2_grpc import GraphExpansionStub

if TYPE_CHECKING:
    from coterie.wire.v1.expansion_pb2_grpc import GraphExpansionAsyncStub

__all__ = ["GraphHolding", "GraphKeys", "GraphTrust"]

_log = structlog.get_logger("coterie.custody")

_LOOK_S = 5.0
_CALL_S = 10.0
_MOST_MADE = 3


def _nobody() -> Collection[bytes]:
    return frozenset()


@dataclass(frozen=True)
class GraphTrust:
    """The roster and revocations by which a holder checks a run's graph keys; from its own configuration.

    Parameters
    ----------
    run : str
    roster : Roster
        Participants that may hold the secrets, of the purpose ``graph``.
    roster_key : bytes
        The operator's raw Ed25519 public key for rosters, 32 bytes.
    revoked : callable
        Gives the ids of all revoked participants, as known now.
    clock : callable
        Gives Unix seconds.
    """

    run: str
    roster: Roster
    roster_key: bytes
    revoked: Callable[[], Collection[bytes]] = _nobody
    clock: Callable[[], float] = clocks.now_s

    def verify(self, record: GraphRecord) -> None:
        """Check a graph record.

        Raises
        ------
        VerificationError
            As `GraphRecord.verify`.
        """
        record.verify(
            self.roster, self.roster_key, run=self.run, now=int(self.clock()), revoked=self.revoked()
        )


class GraphHolding(NamedTuple):
    """The graph key of an epoch, as one of its holders has it."""

    record: GraphRecord
    """Verified."""
    secrets: GraphSecrets


class GraphKeys:
    """Makes, receives, stores and rotates a run's graph keys for one holder.

    Parameters
    ----------
    channel : Channel
        To the third party, with a certificate of the party that speaks for the holder.
    identity : Identity
        Keys of the holder, which is on the roster.
    trust : GraphTrust
    folder : Path
        Folder of this holder alone; made when absent, mode 0700.
    bundles : callable
        Gives verified bundles of participants, without unknown ones: ``Directory.bundles``.
    terms : GraphTerms
        Terms of keys that this holder makes, and that it demands of others' keys.
    valid_s : int, optional
        Validity of the keys that this holder makes, seconds; not beyond the roster's.
    timeout_s : float, optional
        Time after which to give up without a key, seconds.
    retry : Retry, optional
        Retries of calls to the third party.
    """

    def __init__(
        self,
        channel: Channel,
        identity: Identity,
        trust: GraphTrust,
        folder: Path,
        bundles: Callable[[Iterable[bytes]], Awaitable[Mapping[bytes, Bundle]]],
        terms: GraphTerms,
        *,
        valid_s: int = 30 * 24 * 3600,
        timeout_s: float = 600.0,
        retry: Retry | None = None,
    ) -> None:
        terms.check()
        self._peer = channel.peer
        self._stub: GraphExpansionAsyncStub = channel.stub(lambda inner: GraphExpansionStub(inner))
        self._identity = identity
        self._trust = trust
        self._folder = folder
        self._bundles = bundles
        self._terms = terms
        self._valid_s = valid_s
        self._timeout_s = timeout_s
        self._retry = retry or Retry()
        self._one_at_a_time = asyncio.Lock()

    async def ensure(self, least: int = 1) -> GraphHolding:
        """Hold the newest graph key of the run: receive and check it, or make the first one.

        A key with a revoked holder, one that expired, and one older than was held before are replaced by that of the
        next epoch.

        Parameters
        ----------
        least : int
            Lowest epoch that will do; a key of a lower one is replaced by whichever holder comes first.

        Raises
        ------
        VerificationError
            When the third party's record does not verify, or has other terms.
        CertificateError
            When this holder is not on the roster, or its files cannot be used.
        PeerError
            When there is no key in time, or the third party cannot be reached; `Refusal` when it refuses.
        """
        return await self._reach(least)

    async def rotate(self) -> GraphHolding:
        """Hold a key of an epoch above the newest one held so far: make it, unless another holder did.

        Raises
        ------
        VerificationError, CertificateError, PeerError
            As `ensure`.
        """
        return await self._reach(self._highest() + 1, make=True)

    async def _reach(self, least: int, *, make: bool = False) -> GraphHolding:
        async with self._one_at_a_time:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise CertificateError(f"cannot make the folder {self._folder}: {error.strerror}") from error
            ends = time.monotonic() + self._timeout_s
            held = made = 0
            while True:
                own_turn = make or self._eligible()[0] == self._identity.participant_id
                hold_s = 0.0 if own_turn else min(_LOOK_S, max(0.0, ends - time.monotonic()))
                response = await self._newest(held, hold_s)
                record = graph_record_from_wire(response.record) if response.HasField("record") else None
                newest = 0 if record is None else record.epoch
                # By one epoch at a time, whatever the third party says.
                needed = max(least, min(response.least_epoch, newest + 1) if newest else 0)
                wanted = max(needed, self._highest())
                own_turn = own_turn or 0 < newest < needed
                if record is not None and newest >= wanted and not self._outdated(record):
                    return await asyncio.to_thread(self._take, record, response.sealed)
                if own_turn:
                    if made == _MOST_MADE:
                        raise PeerError(
                            f"{self._peer} takes graph keys of run {self._trust.run} and hands out none of them"
                        )
                    made += 1
                    # Above all that was held before, also where the third party has lost its store.
                    await self._make(max(newest, self._highest()) + 1)
                    held = 0
                    continue
                held = newest
                if time.monotonic() >= ends:
                    raise PeerError(
                        f"no holder has published a graph key for run {self._trust.run} "
                        f"after {self._timeout_s:g} s",
                        hint=f"does the first holder run, {self._eligible()[0].hex()[:16]}?",
                    )

    def _eligible(self) -> tuple[bytes, ...]:
        """Return the participants that may hold the secrets now, after checking that this holder is among them."""
        trust, own = self._trust, self._identity.participant_id
        trust.roster.verify(trust.roster_key, purpose=GRAPH, run=trust.run, now=int(trust.clock()))
        found = trust.roster.eligible(trust.revoked())
        if own not in found:
            raise CertificateError(
                f"participant {own.hex()[:16]} is not on the roster of graph key holders, or was revoked",
                hint="the operator signs one that names it: `coterie certs roster --purpose graph`",
            )
        return found

    def _outdated(self, record: GraphRecord) -> bool:
        record.check()
        revoked = self._trust.revoked()
        return record.expiry <= self._trust.clock() or any(one in revoked for one in record.holders)

    def _take(self, record: GraphRecord, sealed: bytes) -> GraphHolding:
        """Return the secrets of a published key: from this holder's folder, or from the envelope."""
        self._trust.verify(record)
        if record.terms != self._terms:
            raise VerificationError(
                Reason.MALFORMED,
                f"a graph key with the terms {tuple(record.terms)}, expected {tuple(self._terms)}",
                hint="all holders of a run need the same settings",
            )
        path, draft = self._path(record.epoch, "graph"), self._path(record.epoch, "graph-draft")
        for held in (path, draft):
            if held.exists():
                secrets = GraphSecrets.load(held)
                if (secrets.run, secrets.epoch, secrets.key_id) == (record.run, record.epoch, record.key_id):
                    if held == draft:
                        draft.rename(path)
                    return GraphHolding(record, secrets)
                if held == path:
                    raise VerificationError(
                        Reason.OLD_EPOCH, f"epoch {record.epoch} of the graph had another key before"
                    )
        if record.generator == self._identity.participant_id:
            raise CertificateError(
                f"this holder made the graph key of epoch {record.epoch}, and it is not in {self._folder}",
                hint="restore the folder, or rotate",
            )
        if self._identity.participant_id not in record.holders or not sealed:
            raise VerificationError(
                Reason.NOT_LISTED,
                f"the graph key of epoch {record.epoch} was not sealed for this holder",
                hint="rotate",
            )
        secrets = open_graph_secrets(self._identity, record, sealed)
        secrets.save(path)
        destroy_private_file(draft)
        _log.info("graph key received", run=record.run, epoch=record.epoch)
        return GraphHolding(record, secrets)

    async def _make(self, epoch: int) -> None:
        """Draw, store and publish the key of an epoch; another holder may be first."""
        trust, own = self._trust, self._identity.participant_id
        holders = self._eligible()
        others = [holder for holder in holders if holder != own]
        found = await self._bundles(others)
        if missing := [holder.hex()[:16] for holder in others if holder not in found]:
            raise PeerError(
                f"holders of the graph key without key bundles: {', '.join(missing)}",
                hint="they have to enrol first",
            )
        secrets = GraphSecrets.generate(trust.run, epoch)
        expiry = min(int(trust.clock()) + self._valid_s, trust.roster.expiry)
        record = sign_graph_record(self._identity, secrets, self._terms, expiry, holders)
        request = wire.PublishGraphKeyRequest(
            record=graph_record_to_wire(record),
            envelopes=[
                wire.SealedGraphKey(holder=one, sealed=seal_graph_secrets(found[one], secrets, record))
                for one in others
            ],
            roster=roster_to_wire(trust.roster),
        )
        await asyncio.to_thread(secrets.save, self._path(epoch, "graph-draft"))

        async def attempt() -> wire.PublishGraphKeyResponse:
            response: wire.PublishGraphKeyResponse = await self._stub.PublishGraphKey(
                request, timeout=_CALL_S
            )
            return response

        try:
            await self._retry(attempt)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error, self._peer)
            first = ErrorReason.ERROR_REASON_CONFLICT
            if not isinstance(failure, Refusal) or failure.reason != first:
                raise failure from error
            # Another holder was first, and its key is taken next.
            return
        _log.info("graph key published", run=trust.run, epoch=epoch, holders=len(holders))

    async def _newest(self, held: int, hold_s: float) -> wire.GraphKeyResponse:
        request = wire.GraphKeyRequest(
            run_id=self._trust.run,
            participant=self._identity.participant_id,
            held_epoch=held,
            hold_ms=int(1000 * hold_s),
        )

        async def attempt() -> wire.GraphKeyResponse:
            response: wire.GraphKeyResponse = await self._stub.GraphKey(request, timeout=hold_s + _CALL_S)
            return response

        try:
            return await self._retry(attempt)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error

    def _path(self, epoch: int, kind: str) -> Path:
        return self._folder / f"{self._trust.run}.{epoch}.{kind}"

    def _highest(self) -> int:
        """Return the highest epoch whose key the third party had; 0 when there is none."""
        found = self._folder.glob(f"{self._trust.run}.*.graph")
        return max((int(path.stem.rpartition(".")[2]) for path in found), default=0)
