"""Hand users' sealed requests on to the third party, for any of its services: the COS sees whose they are, no more.

A user has one upload of a kind in an epoch.  Otherwise a host with few users could pretend to be many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import sqlalchemy as sa

from coterie.errors import CoterieError
from coterie.net.retry import Retry
from coterie.net.server import current_peer
from coterie.net.status import from_rpc_error
from coterie.store import cos as store
from coterie.wire.refusal import LATER, ErrorReason, Refusal
from coterie.wire.v1.expansion_pb2 import SealedRequest
from coterie_cos.run import Run

__all__ = ["SealedRelay", "relayed_request"]

_CALL_S = 8.0
"""Longest time for one call, seconds: less than callers wait, so that they are told who does not answer."""
_RETRY = Retry(limit_s=5.0)
_ID = 32
_LAST_EPOCH = 1 << 31


def relayed_request(request: Any, expected: str) -> tuple[str, SealedRequest]:
    """Return which request a relay message carries, and the sealed request in it.

    Raises
    ------
    Refusal
        INVALID_FIELD when it carries none.
    """
    which = request.WhichOneof("request")
    if which is None:
        raise _invalid("request", "a relay of nothing", expected)
    inner: SealedRequest = getattr(request, which).request
    return which, inner


class SealedRelay:
    """The relay of one kind of uploads, and of requests about them.

    Parameters
    ----------
    find : callable
        Returns a run by id, or raises a Refusal.
    peer : str
        The third party, for messages.
    read : callable
        Runs a function on a connection that reads the store.
    table : sqlalchemy.Table
        Table of the store with users' uploads of this kind.
    service : str
        Name of the third party's service in reports.
    """

    def __init__(
        self,
        find: Callable[[str], Run],
        peer: str,
        read: Callable[[Callable[[sa.Connection], Any]], Awaitable[Any]],
        table: sa.Table,
        service: str,
    ) -> None:
        self._find = find
        self._peer = peer
        self._read = read
        self._table = table
        self._service = service
        self._known: dict[tuple[str, int], dict[int, bytes]] = {}

    async def publish(self, slot: int, inner: SealedRequest, rpc: Callable[..., Any], request: Any) -> Any:
        """Hand an upload on, after noting durably that it is this user's.

        Raises
        ------
        Refusal
            CONFLICT for a second upload in an epoch, STALE for an epoch long past, WRONG_STATE once the run is over;
            what the third party refuses, or NOT_READY where it does not answer.
        """
        with self._taken(slot, inner, "publish", after=False) as run:
            fresh = await self._claim(run, slot, inner)
            try:
                return await self._call(rpc, request)
            except Refusal as refusal:
                if fresh and refusal.reason not in LATER:
                    await self._release(run, slot, inner)
                raise

    async def ask(self, slot: int, inner: SealedRequest, rpc: Callable[..., Any], request: Any) -> Any:
        """Hand a question about the user's own upload on.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT about another upload, WRONG_STATE once the run is over; as `publish` otherwise.
        """
        with self._taken(slot, inner, "ask", after=False) as run:
            await self._check_own(run, slot, inner)
            return await self._call(rpc, request)

    async def forget(self, slot: int, inner: SealedRequest, rpc: Callable[..., Any], request: Any) -> Any:
        """Hand an order to forget the user's own upload on, also when the run is over; the user may have another.

        Raises
        ------
        Refusal
            As `ask`.
        """
        with self._taken(slot, inner, "forget", after=True) as run:
            await self._check_own(run, slot, inner)
            answer = await self._call(rpc, request)
            await self._release(run, slot, inner)
            return answer

    @contextlib.contextmanager
    def _taken(self, slot: int, inner: SealedRequest, request: str, *, after: bool) -> Iterator[Run]:
        """Give the run of a request, which is charged to the caller's party and counted by what becomes of it."""
        run, party = self._find(inner.run_id), str(current_peer())
        try:
            self._check(run, party, slot, inner, after=after)
            with run.charged("Relay", party):
                yield run
        except Refusal as refusal:
            run.count_relayed(store.Relayed(self._service, party, request, refusal.name))
            raise
        run.count_relayed(store.Relayed(self._service, party, request, ""))

    @staticmethod
    def _check(run: Run, party: str, slot: int, inner: SealedRequest, *, after: bool) -> None:
        run.registry.own_slot(party, slot, owner=False)
        if not 1 <= inner.epoch < _LAST_EPOCH:
            raise _invalid("request.epoch", f"epoch {inner.epoch}", "1 to 2^31 - 1")
        if len(inner.upload_id) != _ID:
            raise _invalid("request.upload_id", f"{len(inner.upload_id)} bytes", f"{_ID} bytes")
        if run.over and not after:
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_STATE,
                "the run is over",
                field="request.run_id",
                expected="a run that goes on; uploads can still be forgotten",
            )

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

    async def _claim(self, run: Run, slot: int, inner: SealedRequest) -> bool:
        """Note durably that an upload is this user's; refuse a second one, and epochs long past.

        Returns
        -------
        bool
            Whether it was not noted before.
        """
        run_id = run.plan.run_id

        def write(connection: sa.Connection) -> dict[int, bytes]:
            held = store.uploads_of(connection, self._table, run_id, slot)
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
            store.claim_upload(connection, self._table, run_id, slot, inner.epoch, inner.upload_id)
            return store.uploads_of(connection, self._table, run_id, slot)

        if (await self._held(run, slot)).get(inner.epoch) == inner.upload_id:
            return False
        with run.writing():
            self._known[run_id, slot] = await run.term.run(write)
        return True

    async def _check_own(self, run: Run, slot: int, inner: SealedRequest) -> None:
        held = (await self._held(run, slot)).get(inner.epoch, inner.upload_id)
        # Restored from a backup, the COS may know of none: the secret, which the third party checks, decides then.
        if held != inner.upload_id:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                "the user has no such upload in this epoch",
                field="request.upload_id",
                expected="the upload that was published for this slot",
            )

    async def _release(self, run: Run, slot: int, inner: SealedRequest) -> None:
        run_id = run.plan.run_id

        def write(connection: sa.Connection) -> dict[int, bytes]:
            store.release_upload(connection, self._table, run_id, slot, inner.epoch)
            return store.uploads_of(connection, self._table, run_id, slot)

        with run.writing():
            self._known[run_id, slot] = await run.term.run(write)

    async def _held(self, run: Run, slot: int) -> dict[int, bytes]:
        """Return the user's uploads by epoch; they are durable whenever they are in memory."""
        key = run.plan.run_id, slot
        if key not in self._known:
            self._known[key] = await self._read(
                lambda connection: store.uploads_of(connection, self._table, *key)
            )
        return self._known[key]


def _invalid(field: str, message: str, expected: str) -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, message, field=field, expected=expected)
