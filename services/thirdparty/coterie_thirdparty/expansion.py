"""Match users who have items in common: sealed uploads of tags in, sealed embeddings of neighbours out.

Requests of users come through the COS, so that this service never learns who sent them.  Checks of graph keys save a
run from mistakes; no party relies on them: holders check record and roster themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import structlog
from google.protobuf.message import Message

from coterie.crypto import clocks
from coterie.crypto.graph_key import GraphRecord
from coterie.crypto.roster import load_roster_key
from coterie.crypto.verification import VerificationError
from coterie.errors import CertificateError, StoreError
from coterie.net.server import current_peer
from coterie.net.uncancelled import completed
from coterie.parties.graph_matching import GraphMatching
from coterie.parties.graph_records import graph_record_from_wire, graph_record_to_wire
from coterie.parties.key_records import roster_from_wire
from coterie.parties.request_checks import check_run, refusal_of
from coterie.store.expansion import ExpansionStore
from coterie.store.thirdparty import ThirdPartyStore
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import LATER, ErrorReason, Refusal
from coterie.wire.v1 import expansion_pb2 as wire
from coterie.wire.v1.expansion_pb2_grpc import GraphExpansionServicer
from coterie_thirdparty.paillier import ROSTER_KEY
from coterie_thirdparty.sealing_keys import SealingKeys
from coterie_thirdparty.storing import storing

__all__ = ["GraphExpansion"]

_log = structlog.get_logger("coterie.thirdparty")

M = TypeVar("M", bound=Message)

_ID = 32
_MOST_ENVELOPE = 1 << 10
_HOLD_MS = 20_000
_PURGE_S = 3600.0


class GraphExpansion(GraphExpansionServicer):
    """The gRPC servicer of graph expansion.

    Parameters
    ----------
    store : ExpansionStore
        Keeps graph keys, uploads and tags.
    directory : ThirdPartyStore
        Knows who speaks for whom, and who is revoked.
    keys : SealingKeys
        Open users' requests.
    state : Path
        State folder, with the operator's public key for rosters.
    accounting : Accounting
        Counts CPU time for opening and sealing.
    store_holds : callable
        Called with whether the store of graphs works.
    """

    def __init__(
        self,
        store: ExpansionStore,
        directory: ThirdPartyStore,
        keys: SealingKeys,
        state: Path,
        accounting: Accounting,
        store_holds: Callable[[bool], None],
    ) -> None:
        self._store = store
        self._directory = directory
        self._keys = keys
        self._roster_key = state / ROSTER_KEY
        self._accounting = accounting
        self._store_holds = store_holds
        self._matching = GraphMatching(store, keys.find, lambda: accounting.activity("sealed"))
        self._changed = asyncio.Event()
        self._stopping = False
        self._purged = -_PURGE_S

    def release(self) -> None:
        """Answer all waiting callers, and hold no call from now on."""
        self._stopping = True
        self._wake()

    async def tend(self) -> None:
        """Write to the store, so that one that fails is noticed; once an hour delete expired graphs."""
        if time.monotonic() - self._purged < _PURGE_S:
            now = 0
        else:
            now = clocks.now()
        try:
            if gone := await self._store.purge(now):
                _log.info("deleted expired graphs", graphs=gone)
        except StoreError as error:
            _log.error("the store of graphs does not work", message=error.message)
            self._store_holds(False)
            return
        self._store_holds(True)
        if now:
            self._purged = time.monotonic()

    # --- keys ------------------------------------------------------------------------------------------------------

    async def SealingKey(  # noqa: N802 - the contract's name
        self, request: wire.SealingKeyRequest, context: Any
    ) -> wire.SealingKeyResponse:
        """Return the key to which requests are sealed now."""
        try:
            key = (await asyncio.to_thread(self._keys.current)).public
        except CertificateError as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "the third party cannot keep a new key",
                field="store",
                expected="the same request later",
            ) from error
        return wire.SealingKeyResponse(
            key_id=key.key_id, public=key.public, expiry=key.expiry, signature=key.signature
        )

    async def PublishGraphKey(  # noqa: N802 - the contract's name
        self, request: wire.PublishGraphKeyRequest, context: Any
    ) -> wire.PublishGraphKeyResponse:
        """Take the graph key of a run's next epoch from the holder that made it."""
        await completed(self._publish_key(str(current_peer()), request))
        return wire.PublishGraphKeyResponse()

    async def _publish_key(self, party: str, request: wire.PublishGraphKeyRequest) -> None:
        record = graph_record_from_wire(request.record)
        check_run(record.run, "record.run_id")
        with storing(self._store_holds):
            revoked = frozenset((await self._directory.revocations()).participants)
        await asyncio.to_thread(self._check, record, request, revoked)
        others = [holder for holder in record.holders if holder != record.generator]
        if [one.holder for one in request.envelopes] != others:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"{len(request.envelopes)} envelopes for {len(others)} other holders, or in another order",
                field="envelopes",
                expected="one for each holder but the generator, in the order of the record",
            )
        if any(not 0 < len(one.sealed) <= _MOST_ENVELOPE for one in request.envelopes):
            raise Refusal(
                ErrorReason.ERROR_REASON_TOO_LARGE,
                "an envelope that is empty or too long",
                field="envelopes.sealed",
                expected=f"1 to {_MOST_ENVELOPE} bytes",
            )
        with storing(self._store_holds):
            await self._directory.check_speaks(party, record.generator, "record.generator_public")
            fresh = await self._store.publish_graph(
                record.run,
                record.epoch,
                record.generator,
                record.expiry,
                graph_record_to_wire(record).SerializeToString(deterministic=True),
                {one.holder: one.sealed for one in request.envelopes},
            )
        if fresh:
            _log.info("graph key", run=record.run, epoch=record.epoch, by=party, holders=len(record.holders))
            self._wake()

    def _check(
        self, record: GraphRecord, request: wire.PublishGraphKeyRequest, revoked: Collection[bytes]
    ) -> None:
        try:
            operator = load_roster_key(self._roster_key)
        except CertificateError as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "the third party does not know the operator's key for rosters",
                field="roster",
                expected=f"{ROSTER_KEY} in its state folder",
            ) from error
        try:
            record.verify(
                roster_from_wire(request.roster),
                operator,
                run=record.run,
                now=clocks.now(),
                revoked=revoked,
            )
        except VerificationError as error:
            raise refusal_of(error, "record", "a record and a roster that hold now") from error

    async def GraphKey(  # noqa: N802 - the contract's name
        self, request: wire.GraphKeyRequest, context: Any
    ) -> wire.GraphKeyResponse:
        """Return the newest graph key, and the envelope for one of the caller's participants."""
        check_run(request.run_id, "run_id")
        if len(request.participant) != _ID:
            raise _invalid("participant", f"{len(request.participant)} bytes", f"{_ID} bytes")
        with storing(self._store_holds):
            await self._directory.check_speaks(str(current_peer()), request.participant, "participant")
            ends = time.monotonic() + min(request.hold_ms, _HOLD_MS) / 1000
            while True:
                changed = self._changed
                kept = await self._store.newest(request.run_id)
                left = ends - time.monotonic()
                if (kept is not None and kept.epoch > request.held_epoch) or left <= 0 or self._stopping:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left)
            if kept is None:
                return wire.GraphKeyResponse()
            sealed = await self._store.envelope(kept.graph, request.participant)
            least = await self._store.least_epoch(request.run_id)
        return wire.GraphKeyResponse(
            record=wire.GraphRecord.FromString(kept.record), sealed=sealed, least_epoch=least
        )

    async def ReplaceGraphKey(  # noqa: N802 - the contract's name
        self, request: wire.ReplaceGraphKeyRequest, context: Any
    ) -> wire.ReplaceGraphKeyResponse:
        """Have the graph key of a run replaced by its holders."""
        return await completed(self._replace(str(current_peer()), request.run_id))

    async def _replace(self, party: str, run_id: str) -> wire.ReplaceGraphKeyResponse:
        check_run(run_id, "run_id")
        with storing(self._store_holds):
            epoch = await self._store.replace_key(run_id)
        _log.info("graph key to be replaced", run=run_id, epoch=epoch, by=party)
        return wire.ReplaceGraphKeyResponse(epoch=epoch)

    # --- requests of users, through the COS --------------------------------------------------------------------------

    async def PublishTags(  # noqa: N802 - the contract's name
        self, request: wire.PublishTagsRequest, context: Any
    ) -> wire.PublishTagsResponse:
        """Take the tags of an upload, or more of them."""
        return await completed(self._recorded(request.request, self._matching.publish(request.request)))

    async def Neighbours(  # noqa: N802 - the contract's name
        self, request: wire.NeighboursRequest, context: Any
    ) -> wire.NeighboursResponse:
        """Return the neighbours of an upload."""
        return await self._recorded(request.request, self._matching.neighbours(request.request))

    async def Forget(  # noqa: N802 - the contract's name
        self, request: wire.ForgetRequest, context: Any
    ) -> wire.ForgetResponse:
        """Delete what an upload brought."""
        return await completed(self._recorded(request.request, self._matching.forget(request.request)))

    async def ExpansionState(  # noqa: N802 - the contract's name
        self, request: wire.ExpansionStateRequest, context: Any
    ) -> wire.ExpansionStateResponse:
        """Return the counters of a run's newest graph."""
        check_run(request.run_id, "run_id")
        with storing(self._store_holds):
            found = await self._store.counts(request.run_id)
        if found is None:
            return wire.ExpansionStateResponse()
        return wire.ExpansionStateResponse(
            epoch=found.epoch,
            uploads=found.uploads,
            tags=found.tags,
            served_tags=found.served_tags,
            questions=found.questions,
            neighbours=found.neighbours,
            refusals=[
                wire.RefusedExpansion(reason=reason, count=count)
                for reason, count in sorted(found.refused.items())
            ],
        )

    # --- parts -----------------------------------------------------------------------------------------------------

    async def _recorded(self, request: wire.SealedRequest, work: Awaitable[M]) -> M:
        """Await the answer to a request; count a refusal that will not pass in the store, too."""
        try:
            with storing(self._store_holds):
                return await work
        except Refusal as refusal:
            if refusal.reason not in LATER and 1 <= request.epoch < 1 << 31:
                _log.warning("refused a request of graph expansion", run=request.run_id, reason=refusal.name)
                with contextlib.suppress(StoreError):
                    await self._store.refused(request.run_id, request.epoch, refusal.name)
            raise

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _invalid(field: str, message: str, expected: str) -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, message, field=field, expected=expected)
