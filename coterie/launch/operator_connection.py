"""The operator's client of the COS: enrols, starts or resumes a run, watches its events, fetches its report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from coterie.config.base import CosPeer, Peer
from coterie.crypto.authority import logical_name
from coterie.errors import RunError
from coterie.launch.service_counts import service_counts
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import Enrolling, enrol
from coterie.net.meter import Meter
from coterie.net.renewal import Renewal
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error, waits_for_store
from coterie.rounds.plan_hash import plan_hash
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.operator_pb2_grpc import OperatorStub
from coterie.wire.versions import UnsupportedVersionError, release

__all__ = ["PATIENCE_S", "OperatorConnection"]

PATIENCE_S = 60.0
"""How long the COS, which may be restarting, can be silent before the operator gives up, seconds."""

_WATCH_S = 24 * 3600.0
_PAUSE_S = 0.2

T = TypeVar("T")


def _nothing_to_check() -> None:
    """Check nothing: the default of `OperatorConnection` where no local processes have to be watched."""


async def _while_checked(work: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
    """Await a long task, calling a check every 0.2 s; cancel the task when the check raises."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_PAUSE_S)
            check()
        return await task
    finally:
        task.cancel()


class OperatorConnection:
    """A connection to the COS with an operator's certificate.

    Parameters
    ----------
    channel : Channel
        Channel to the COS.
    check : callable
        Called before each attempt and at each event; an exception of it ends the call.  The launcher of local
        processes raises one when a process has ended.
    """

    def __init__(self, channel: Channel, check: Callable[[], None] = _nothing_to_check) -> None:
        self._renewing: asyncio.Task[None] | None = None
        self._to_thirdparty: Callable[[], Channel] | None = None
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
    ) -> OperatorConnection:
        """Enrol, unless there is a certificate already, and connect to the COS.

        Parameters
        ----------
        settings : ServiceSettings, or the like
            Name, state folder, and how to enrol.
        cos : Peer
            The orchestration server.
        check : callable
            As for the class; also called while enrolling.
        thirdparty : Peer, optional
            The third party, which renews the certificate, and says for the report what its services did; without it
            nothing is renewed.

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
                standbys=peer.standbys if isinstance(peer, CosPeer) else (),
            )

        operator = cls(channel_to("cos", cos), check)
        if thirdparty is not None:
            operator._to_thirdparty = lambda: channel_to("thirdparty", thirdparty)
            renewal = Renewal(
                tls,
                lambda: channel_to("thirdparty", thirdparty),
                lambda: operator._channel.renew(tls.channel_credentials()),
            )
            operator._renewing = asyncio.create_task(renewal.run())
        return operator

    async def start(self, request: wire.StartRunRequest) -> None:
        """Ask the COS to create a run; repeating the same request changes nothing.

        Raises
        ------
        UnsupportedVersionError
            The COS computes another hash of the plan, and so is of an older release; the run was stopped.
        """
        response = await self._ask(lambda: self._stub.StartRun(request))
        if response.plan_hash != plan_hash(request.plan):
            await self.stop(request.plan.run_id, "the operator and the cos are of releases that do not fit")
            raise UnsupportedVersionError(
                f"{self._channel.peer} computes another hash of the plan than release {release()} here",
                field="plan_hash",
                expected="an upgrade of the cos, to the operator's release",
            )

    async def stop(self, run_id: str, reason: str) -> None:
        """Ask the COS to end a run now; the model stays as it is.

        Raises
        ------
        Refusal
            WRONG_STATE when the run has ended; UNKNOWN_ROUND when there is no such run.
        """
        request = wire.StopRunRequest(run_id=run_id, reason=reason)
        await self._ask(lambda: self._stub.StopRun(request))

    async def runs(self) -> list[wire.RunState]:
        """Return the states of all runs that the COS knows, oldest first."""
        response = await self._ask(lambda: self._stub.ListRuns(wire.ListRunsRequest()))
        return list(response.runs)

    async def resume(self, run_id: str) -> None:
        """Ask the COS to take up a run that has failed.

        Raises
        ------
        Refusal
            WRONG_STATE when the run has not failed, or failed for good; UNKNOWN_ROUND when there is no such run.
        """
        resumes = (await self.state(run_id)).resumes
        request = wire.ResumeRunRequest(run_id=run_id, resumes=resumes)
        await self._ask(lambda: self._stub.ResumeRun(request))

    async def watch(self, run_id: str) -> AsyncGenerator[wire.WatchRunResponse, None]:
        """Yield a run's events from the first until the run has ended; none is lost when the COS restarts.

        Raises
        ------
        RunError
            The COS cannot be reached for too long.
        """
        following, heard = 1, time.monotonic()
        while True:
            request = wire.WatchRunRequest(run_id=run_id, from_event=following)
            try:
                # Closed with this generator: by the time of garbage collection the event loop may be gone.
                async with contextlib.aclosing(self._stub.WatchRun(request, timeout=_WATCH_S)) as events:
                    async for event in events:
                        heard = time.monotonic()
                        # Progress events have no number: the COS does not store them.
                        following = event.number + 1 if event.number else following
                        self._check()
                        yield event
                return
            except grpc.aio.AioRpcError as error:
                self._check()
                if waits_for_store(error):
                    # The COS is alive, and goes on once its store takes writes again.
                    heard = time.monotonic()
                if time.monotonic() - heard > PATIENCE_S:
                    raise RunError(f"the COS cannot be reached: {error.details()}") from error
                await asyncio.sleep(_PAUSE_S)

    async def report(self, run_id: str) -> dict[str, Any]:
        """Return the COS's facts about a run, for the report, and counters of the third party's services in it."""
        request = wire.GetReportRequest(run_id=run_id)
        response = await self._ask(lambda: self._stub.GetReport(request))
        report: dict[str, Any] = json.loads(response.json)
        asked: dict[str, Any] = report.get("third_party", {})
        if asked and self._to_thirdparty is not None:
            channel = self._to_thirdparty()
            try:
                found = await service_counts(channel, run_id, asked)
            finally:
                await channel.close()
            for service, counts in found.items():
                asked[service] |= counts
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
