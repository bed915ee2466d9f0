"""Relay users' requests of graph expansion to the third party: the COS sees whose they are, and not what is in them.

A user has one upload in an epoch.  Otherwise a host with few users could pretend to be many: it would have its tags
served although few users have them, and ask for more neighbours than one user may.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import sqlalchemy as sa

from coterie.errors import CoterieError
from coterie.net.channel import Channel
from coterie.net.retry import Retry
from coterie.net.server import current_peer
from coterie.net.status import from_rpc_error
from coterie.net.uncancelled import completed
from coterie.store import cos as store
from coterie.wire.refusal import LATER, ErrorReason, Refusal
from coterie.wire.v1 import expansion_pb2 as wire
from coterie.wire.v1.expansion_pb2_grpc import ExpansionRelayServicer, GraphExpansionStub
from coterie_cos.run import Run

if TYPE_CHECKING:
    from coterie.wire.v1.expansion_pb2_grpc import GraphExpansionAsyncStub

__all__ = ["ExpansionRelay"]

_CALL_S = 20.0
_RETRY = Retry(limit_s=5.0)
_ID = 32
_LAST_EPOCH = 1 << 31


class ExpansionRelay(ExpansionRelayServicer):
    """The gRPC servicer that hands users' sealed requests on to the third party.

    Parameters
    ----------
    find : callable
        Returns a run by id, or raises a Refusal.
    thirdparty : Channel
        To the third party.
    read : callable
        Runs a function on a connection that reads the store.
    """

    def __init__(
        self,
        find: Callable[[str], Run],
        thirdparty: Channel,
        read: Callable[[Callable[[sa.Connection], Any]], Awaitable[Any]],
    ) -> None:
        self._find = find
        self._peer = thirdparty.peer
        self._stub: GraphExpansionAsyncStub = thirdparty.stub(lambda inner: GraphExpansionStub(inner))
        self._read = read
        self._known: dict[tuple[str, int], dict[int, bytes]] = {}

    async def Relay(self, request: wire.RelayRequest, context: Any) -> wire.RelayResponse:  # noqa: N802
        """Hand a user's sealed request on, and the answer back."""
        return await completed(self._relayed(request))

    async def _relayed(self, request: wire.RelayRequest) -> wire.RelayResponse:
        which = request.WhichOneof("request")
        if which is None:
            raise _invalid("request", "a relay of nothing", "publish, neighbours or forget")
        inner: wire.SealedRequest = getattr(request, which).request
        run, party = self._find(inner.run_id), str(current_peer())
        run.registry.own_slot(party, request.slot, owner=False)
        if not 1 <= inner.epoch < _LAST_EPOCH:
            raise _invalid("request.epoch", f"epoch {inner.epoch}", "1 to 2^31 - 1")
        if len(inner.upload_id) != _ID:
            raise _invalid("request.upload_id", f"{len(inner.upload_id)} bytes", f"{_ID} bytes")
        if run.over and which != "forget":
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_STATE,
                "the run is over",
                field="request.run_id",
                expected="a run that goes on; uploads can still be forgotten",
            )
        with run.charged("Relay", party):
            if which == "publish":
                fresh = await self._claim(run, request.slot, inner)
                try:
                    taken = await self._call(self._stub.PublishTags, request.publish)
                except Refusal as refusal:
                    if fresh and refusal.reason not in LATER:
                        await self._release(run, request.slot, inner)
                    raise
                return wire.RelayResponse(publish=taken)
            await self._check_own(run, request.slot, inner)
            if which == "neighbours":
                return wire.RelayResponse(
                    neighbours=await self._call(self._stub.Neighbours, request.neighbours)
                )
            answer = await self._call(self._stub.Forget, request.forget)
            await self._release(run, request.slot, inner)
            return wire.RelayResponse(forget=answer)

    async def _call(self, rpc: Callable[..., Any], request: Any) -> Any:
        async def attempt() -> Any:
            return await rpc(request, timeout=_CALL_S)

        try:
            return await _RETRY(attempt)
        except grpc.aio.AioRpcError as error:
            failure: CoterieError = from_rpc_error(error, self._peer)
            if isinstance(failure, Refusal):
                raise failure from error
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "the third party does not answer",
                field="request",
                expected="the same request later; a run goes on without new neighbours",
            ) from error

    # --- one upload of a user in an epoch --------------------------------------------------------------------------

    async def _claim(self, run: Run, slot: int, inner: wire.SealedRequest) -> bool:
        """Note durably that an upload is this user's; refuse a second one, and epochs long past.

        Returns
        -------
        bool
            Whether it was not noted before.
        """
        run_id = run.plan.run_id

        def write(connection: sa.Connection) -> dict[int, bytes]:
            held = store.expansion_uploads_of(connection, run_id, slot)
            if held.get(inner.epoch) == inner.upload_id:
                return held
            if inner.epoch in held:
                raise Refusal(
                    ErrorReason.ERROR_REASON_CONFLICT,
                    "the user has another upload in this epoch",
                    field="request.upload_id",
                    expected="the same upload, or a new one after it was forgotten",
                )
            if held and inner.epoch < max(held) - 1:
                raise Refusal(
                    ErrorReason.ERROR_REASON_STALE,
                    f"epoch {inner.epoch}, and the user has an upload in {max(held)}",
                    field="request.epoch",
                    expected=f"at least {max(held) - 1}",
                )
            store.claim_expansion_upload(connection, run_id, slot, inner.epoch, inner.upload_id)
            return store.expansion_uploads_of(connection, run_id, slot)

        if (await self._held(run, slot)).get(inner.epoch) == inner.upload_id:
            return False
        with run.writing():
            self._known[run_id, slot] = await run.term.run(write)
        return True

    async def _check_own(self, run: Run, slot: int, inner: wire.SealedRequest) -> None:
        held = (await self._held(run, slot)).get(inner.epoch, inner.upload_id)
        # Restored from a backup, the COS may know of none: the secret, which the third party checks, decides then.
        if held != inner.upload_id:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                "the user has no such upload in this epoch",
                field="request.upload_id",
                expected="the upload that was published for this slot",
            )

    async def _release(self, run: Run, slot: int, inner: wire.SealedRequest) -> None:
        run_id = run.plan.run_id

        def write(connection: sa.Connection) -> dict[int, bytes]:
            store.release_expansion_upload(connection, run_id, slot, inner.epoch)
            return store.expansion_uploads_of(connection, run_id, slot)

        with run.writing():
            self._known[run_id, slot] = await run.term.run(write)

    async def _held(self, run: Run, slot: int) -> dict[int, bytes]:
        """Return the user's uploads by epoch; they are durable whenever they are in memory."""
        key = run.plan.run_id, slot
        if key not in self._known:
            self._known[key] = await self._read(
                lambda connection: store.expansion_uploads_of(connection, *key)
            )
        return self._known[key]


def _invalid(field: str, message: str, expected: str) -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, message, field=field, expected=expected)
