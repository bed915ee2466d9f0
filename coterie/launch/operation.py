"""The whole of ``coterie operate`` and ``coterie resume``: one run on services elsewhere, from enrolment to report."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Mapping
from typing import Any

from coterie.config.operate import OperateSettings
from coterie.crypto.identity import load_signing_key
from coterie.errors import PreflightError, RunError
from coterie.launch.operator_connection import OperatorConnection
from coterie.launch.order import Order
from coterie.studies.outcome import SeedOutcome, from_cos, together, write
from coterie.telemetry.report import Report
from coterie.wire.v1 import operator_pb2 as wire

__all__ = ["enrolled_operator", "operate", "reported"]

Watcher = Callable[[wire.WatchRunResponse], None]
"""Callback that receives each event of the run."""


async def operate(
    settings: OperateSettings,
    order: Order,
    watcher: Watcher,
    *,
    resume: bool = False,
    told: Callable[[str], None] = lambda text: None,
) -> Report:
    """Start or resume the run of an order, watch it, and write and return its report.

    An operator that was stopped can carry out the same order again: the run continues meanwhile, and its events are
    read from the first.

    Parameters
    ----------
    settings : OperateSettings
        The operator's configuration.
    order : Order
        The run.
    watcher : callable
        Receives each event.
    resume : bool, optional
        Whether the run is one that has failed, which is resumed.
    told : callable, optional
        Receives why there is no page, where a package is missing for it.

    Returns
    -------
    Report
        The content of ``report.json``, without traffic and CPU time: every party keeps its own account of these.

    Raises
    ------
    RunError
        The run ended without a result, or the COS cannot be reached.
    CertificateError, PeerError
        The operator cannot enrol, or the COS refuses.
    """
    started, begun = datetime.datetime.now(datetime.UTC), time.perf_counter()
    operator = await enrolled_operator(settings)
    try:
        if resume:
            await operator.resume(order.run_id)
        else:
            await operator.start(order.request(load_signing_key(settings.signs)))
        async with contextlib.aclosing(operator.watch(order.run_id)) as events:
            async for event in events:
                watcher(event)
        known = await operator.report(order.run_id)
    finally:
        await operator.close()
    if known["phase"] != "done":
        again = f"; `coterie resume {order.run_id}` goes on where it failed" if known["resumable"] else ""
        raise RunError(
            f"the run ended before its time: {known['reason']}",
            hint=f"the logs of the services say more{again}",
        )
    report = reported(order, known).having(
        started=started.isoformat(timespec="seconds"), duration_s=round(time.perf_counter() - begun, 1)
    )
    if lacking := write(report, settings.output):
        told(lacking)
    return report


def reported(order: Order, known: Mapping[str, Any]) -> Report:
    """Return the report of an order's run from the facts that the COS knows of it; without when it was started.

    Parameters
    ----------
    order : Order
    known : mapping
        Facts as `OperatorConnection.report` returns them.
    """
    course = from_cos(known)
    if order.protection:
        course = course.having(protection=order.protection)
    outcome = SeedOutcome(order.seed, order.split_sha256, course, order.reference or None)
    return together(order.settings, order.dataset, order.run_id, [outcome])


async def enrolled_operator(settings: OperateSettings) -> OperatorConnection:
    """Make an operator's folders, enrol the operator unless that was done, and connect to its COS.

    Raises
    ------
    PreflightError
        A folder cannot be made.
    CertificateError, PeerError
        The operator cannot enrol, or the COS refuses.
    """
    try:
        settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(f"cannot use the folder {error.filename}: {error.strerror}") from error
    return await OperatorConnection.enrolled(settings, settings.cos, thirdparty=settings.thirdparty)
