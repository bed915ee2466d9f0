"""Answer the operator's calls to the COS: start, stop, resume, list and watch runs, fetch reports."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from coterie.net.server import current_peer
from coterie.net.uncancelled import completed
from coterie.rounds.plan_hash import plan_hash
from coterie.telemetry.audit_log import record
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.operator_pb2_grpc import OperatorServicer
from coterie_cos.run import Run, being_resumed

__all__ = ["Operator"]


class Operator(OperatorServicer):
    """The gRPC servicer that the operator's command-line tool calls.

    Parameters
    ----------
    runs : mapping
        All runs by id.
    start : callable
        Creates a run durably, or returns the existing run with the same id and plan.
    resume : callable
        Takes up durably a run that has failed.
    check : callable
        Raises a StoreError while the store takes no writes.
    """

    def __init__(
        self,
        runs: Mapping[str, Run],
        start: Callable[[wire.StartRunRequest], Awaitable[Run]],
        resume: Callable[[wire.ResumeRunRequest], Awaitable[None]],
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self._runs = runs
        self._start = start
        self._resume = resume

    def find(self, run_id: str) -> Run:
        """Return a run by its id.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when there is no run of this id; NOT_READY while it is restored from the store.
        StoreError
            When the store takes no writes now: state in memory may never become durable.
        """
        # A standby knows no runs, but there are some.
        self._check()
        run = self._runs.get(run_id)
        if run is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                "no such run",
                field="run_id",
                expected="a run that the operator has started",
            )
        run.term.check()
        if run.dropped:
            raise being_resumed()
        return run

    async def StartRun(self, request: wire.StartRunRequest, context: Any) -> wire.StartRunResponse:  # noqa: N802
        """Create a run, or return the existing one with the same plan."""
        run = await self._start(request)
        record("operator", command="start", run=request.plan.run_id, by=str(current_peer()))
        return wire.StartRunResponse(plan_hash=plan_hash(run.plan))

    async def StopRun(self, request: wire.StopRunRequest, context: Any) -> wire.StopRunResponse:  # noqa: N802
        """End a run before its time."""
        reason = request.reason or "stopped by the operator"
        await completed(self.find(request.run_id).stop(reason))
        record("operator", command="stop", run=request.run_id, by=str(current_peer()), reason=reason)
        return wire.StopRunResponse()

    async def ResumeRun(self, request: wire.ResumeRunRequest, context: Any) -> wire.ResumeRunResponse:  # noqa: N802
        """Take up a run that has failed, from where it failed."""
        await self._resume(request)
        record("operator", command="resume", run=request.run_id, by=str(current_peer()))
        return wire.ResumeRunResponse()

    async def ListRuns(self, request: wire.ListRunsRequest, context: Any) -> wire.ListRunsResponse:  # noqa: N802
        """Return the state of all runs."""
        self._check()
        for run in self._runs.values():
            run.term.check()
        return wire.ListRunsResponse(runs=[run.summary() for run in self._runs.values()])

    async def GetRun(self, request: wire.GetRunRequest, context: Any) -> wire.GetRunResponse:  # noqa: N802
        """Return one run's state."""
        return wire.GetRunResponse(run=self.find(request.run_id).summary())

    async def WatchRun(  # noqa: N802
        self, request: wire.WatchRunRequest, context: Any
    ) -> AsyncGenerator[wire.WatchRunResponse, None]:
        """Stream a run's events until it has ended."""
        async with contextlib.aclosing(self.find(request.run_id).watch(request.from_event)) as events:
            async for event in events:
                yield event

    async def GetReport(self, request: wire.GetReportRequest, context: Any) -> wire.GetReportResponse:  # noqa: N802
        """Return a run's report as JSON."""
        return wire.GetReportResponse(json=self.find(request.run_id).report())
