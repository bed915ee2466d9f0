"""The operator's end of a federation: enrol, start a run, watch it, ask for what the COS knows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from coterie.config.base import Peer
from coterie.crypto.authority import logical_name
from coterie.errors import RunError
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import Enrolling, enrol
from coterie.net.meter import Meter
from coterie.net.renewal import Renewal
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error, waits_for_store
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.operator_pb2_grpc import OperatorStub

__all__ = ["PATIENCE_S", "Operator"]

PATIENCE_S = 60.0
"""How long the COS may be silent before the operator gives up, seconds: it may be starting again."""

_WATCH_S = 24 * 3600.0
_PAUSE_S = 0.2

T = TypeVar("T")


def _nothing_to_check() -> None:
    """Stand for no condition beside the connection."""


async def _while_checked(work: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
    """Wait for something that may take long, and end it when the check raises."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_PAUSE_S)
            check()
        return await task
    finally:
        task.cancel()


class Operator:
    """A connection to the COS with an operator's certificate.

    Parameters
    ----------
    channel : Channel
        To the COS.
    check : callable
        Called before each attempt and at each event; what it raises ends the call.  The launcher of local
        processes raises there when one of them has ended.
    """

    def __init__(self, channel: Channel, check: Callable[[], None] = _nothing_to_check) -> None:
        self._renewing: asyncio.Task[None] | None = None
        self._channel = channel
        self._check = check
        self._stub: Any = channel.stub(OperatorStub)

    @classmethod
    async def enrolled(
        cls,
        settings: Enrolling,
        cos: Peer,
        check: Callable[[], None] = _nothing_to_check,
        *,
        thirdparty: Peer | None = None,
    ) -> Operator:
        """Enrol where there is no certificate yet, and connect.

        Parameters
        ----------
        settings : ServiceSettings, or the like
            Name, state folder, and how to enrol.
        cos : Peer
            The orchestration server.
        check : callable
            As of the class.
        thirdparty : Peer, optional
            Where the certificate is renewed; it is not where this is absent.

        Raises
        ------
        CertificateError
            The token is missing, used or made for another party.
        PeerError
            The third party cannot be reached.
        """
        tls = TlsFiles(settings.state / "tls")
        await _while_checked(enrol("operator", settings, tls, []), check)

        def channel_to(role: str, peer: Peer) -> Channel:
            return connect(
                peer.address,
                tls.channel_credentials(),
                tls_name=logical_name(role, peer.name),
                peer=f"{role}/{peer.name}",
                meter=Meter(),
            )

        operator = cls(channel_to("cos", cos), check)
        if thirdparty is not None:
            renewal = Renewal(
                tls,
                lambda: channel_to("thirdparty", thirdparty),
                lambda: operator._channel.renew(tls.channel_credentials()),
            )
            operator._renewing = asyncio.create_task(renewal.run())
        return operator

    async def start(self, request: wire.StartRunRequest) -> None:
        """Create a run; the same request again changes nothing."""
        await self._ask(lambda: self._stub.StartRun(request))

    async def watch(self, run_id: str) -> AsyncGenerator[wire.WatchRunResponse, None]:
        """Yield a run's events from the first until it has ended; none is missed when the COS restarts.

        Raises
        ------
        RunError
            The COS cannot be reached for too long.
        """
        following, heard = 1, time.monotonic()
        while True:
            request = wire.WatchRunRequest(run_id=run_id, from_event=following)
            try:
                # Closed with this generator, and not when somebody finds time to collect it: the loop may be gone then.
                async with contextlib.aclosing(self._stub.WatchRun(request, timeout=_WATCH_S)) as events:
                    async for event in events:
                        heard = time.monotonic()
                        # Progress is not numbered: it is not kept.
                        following = event.number + 1 if event.number else following
                        self._check()
                        yield event
                return
            except grpc.aio.AioRpcError as error:
                self._check()
                if waits_for_store(error):
                    # It lives, and goes on once its store takes writes again.
                    heard = time.monotonic()
                if time.monotonic() - heard > PATIENCE_S:
                    raise RunError(f"the COS cannot be reached: {error.details()}") from error
                await asyncio.sleep(_PAUSE_S)

    async def report(self, run_id: str) -> dict[str, Any]:
        """Return what the COS knows about a run."""
        request = wire.GetReportRequest(run_id=run_id)
        response = await self._ask(lambda: self._stub.GetReport(request))
        report: dict[str, Any] = json.loads(response.json)
        return report

    async def state(self, run_id: str) -> wire.RunState:
        """Return the state of a run."""
        response = await self._ask(lambda: self._stub.GetRun(wire.GetRunRequest(run_id=run_id)))
        state: wire.RunState = response.run
        return state

    async def close(self) -> None:
        """Close the connection."""
        if self._renewing is not None:
            self._renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewing
        await self._channel.close()

    async def _ask(self, attempt: Callable[[], Awaitable[T]]) -> T:
        async def checked() -> T:
            self._check()
            return await attempt()

        try:
            return await Retry(limit_s=PATIENCE_S)(checked)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._channel.peer) from error
