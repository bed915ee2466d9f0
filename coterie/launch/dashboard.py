"""The whole of ``coterie dashboard``: an operator's page for a federation that stands, with its runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from coterie.config.operate import OperateSettings
from coterie.crypto.identity import load_signing_key
from coterie.launch.kept_runs import finished_runs
from coterie.launch.latency import round_trips
from coterie.launch.operation import enrolled_operator, reported
from coterie.launch.operator_connection import OperatorConnection
from coterie.launch.order import Order
from coterie.net.credentials import TlsFiles
from coterie.studies.outcome import write
from coterie.telemetry.report import Report
from coterie.telemetry.run_words import phase_words
from coterie.web.run_actions import RunActions
from coterie.wire.v1 import operator_pb2 as wire

__all__ = ["DashboardPage", "keep_dashboard"]

_LOOK_S = 3.0


class DashboardPage(Protocol):
    """The page that a dashboard fills."""

    def update(self, seed: int, event: wire.WatchRunResponse) -> None:
        """Show one event of the run."""

    def ended(self, report: Report, path: Path) -> None:
        """Show the result of the run."""

    def failed(self, message: str) -> None:
        """Show that the run has failed."""

    def goes_on(self) -> None:
        """Show that the run goes on after a failure."""

    def show_network(self, pairs: Sequence[Mapping[str, Any]], without: Sequence[Mapping[str, Any]]) -> None:
        """Show median round trips between services."""

    def show_runs(self, runs: list[Mapping[str, Any]]) -> None:
        """Show the runs of the federation."""


async def keep_dashboard(
    settings: OperateSettings,
    order: Order,
    page: DashboardPage,
    actions: RunActions,
    *,
    start_now: bool = False,
) -> None:
    """Show a federation's runs, and the run of an order as it goes on, until cancelled.

    Parameters
    ----------
    settings : OperateSettings
        The operator's configuration.
    order : Order
        The run that the operator may start, stop and resume.
    page : DashboardPage
    actions : RunActions
        What the page may do to the run.
    start_now : bool
        Whether the run is started at once.

    Raises
    ------
    PreflightError
        A folder cannot be made.
    RunError
        The COS cannot be reached.
    CertificateError, PeerError
        The operator cannot enrol, or the COS refuses.
    """
    operator = await enrolled_operator(settings)

    async def start() -> None:
        await operator.start(order.request(load_signing_key(settings.signs)))

    async def stop(reason: str) -> None:
        await operator.stop(order.run_id, f"stopped from the operator's page: {reason or 'no reason given'}")

    async def resume() -> None:
        await operator.resume(order.run_id)

    async def measure() -> None:
        page.show_network(*await round_trips(TlsFiles(settings.state / "tls"), settings.cos))

    async def list_runs() -> dict[str, wire.RunState]:
        states = await operator.runs()
        known = {row["run"]: row for row in found_rows(settings.output.parent)}
        page.show_runs([{**known.get(one.plan.run_id, {}), **_row(one)} for one in reversed(states)])
        return {one.plan.run_id: one for one in states}

    try:
        if start_now:
            await start()
        seen_resumes = -1
        while True:
            state = (await list_runs()).get(order.run_id)
            if state is None:
                actions.offer(start=start)
            elif state.resumes > seen_resumes:
                if seen_resumes >= 0:
                    page.goes_on()
                seen_resumes = state.resumes
                actions.offer(stop=stop, measure=measure)
                await _watch(operator, order, page, list_runs)
                known = await operator.report(order.run_id)
                if known["phase"] == "done":
                    report = reported(order, known)
                    write(report, settings.output)
                    page.ended(report, settings.output / "report.html")
                    actions.offer()
                else:
                    page.failed(known["reason"])
                    actions.offer(start=resume if known["resumable"] else None, resumes=True)
            await asyncio.sleep(_LOOK_S)
    finally:
        actions.offer()
        await operator.close()


async def _watch(operator: OperatorConnection, order: Order, page: DashboardPage, list_runs: Any) -> None:
    """Show the events of a run until it has ended, and list all runs now and then."""

    async def keep_listing() -> None:
        while True:
            await asyncio.sleep(_LOOK_S * 5)
            await list_runs()

    listing = asyncio.create_task(keep_listing())
    try:
        async with contextlib.aclosing(operator.watch(order.run_id)) as events:
            async for event in events:
                page.update(order.seed, event)
    finally:
        listing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listing


def found_rows(folder: Path) -> list[dict[str, Any]]:
    """Return a page's rows of the finished runs of a folder."""
    return [
        {
            **facts,
            "state": "finished",
            "metrics": {name: one for name, one in metrics.items() if one is not None},
        }
        for facts, metrics in finished_runs(folder)
    ]


def _row(state: wire.RunState) -> dict[str, Any]:
    plan = state.plan
    return {
        "run": plan.run_id,
        "system": plan.system,
        "secure_sum": plan.secure_sum,
        "state": state.reason or phase_words(state.phase),
    }
