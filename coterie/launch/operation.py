"""One run from the operator's side, on services that run elsewhere: enrol, start, watch, report."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable

from coterie.config.operate import OperateSettings
from coterie.errors import PreflightError, RunError
from coterie.launch.operator import Operator
from coterie.launch.order import Order
from coterie.studies.outcome import SeedOutcome, from_cos, together, write
from coterie.telemetry.report import Report
from coterie.wire.v1 import operator_pb2 as wire

__all__ = ["operate"]

Watcher = Callable[[wire.WatchRunResponse], None]
"""Called with each event."""


async def operate(settings: OperateSettings, order: Order, watcher: Watcher) -> Report:
    """Carry out an order and write its report.

    An operator that was stopped carries the same order out again: the run goes on meanwhile, and is watched from
    its first event.

    Parameters
    ----------
    settings : OperateSettings
        The operator.
    order : Order
        What to run.
    watcher : callable
        Sees each event.

    Returns
    -------
    Report
        What ``report.json`` holds.  Traffic and CPU time are not in it: every party keeps its own account.

    Raises
    ------
    RunError
        The run ended without a result, or the COS cannot be reached.
    CertificateError, PeerError
        The operator cannot enrol, or the COS refuses.
    """
    started, begun = datetime.datetime.now(datetime.UTC), time.perf_counter()
    try:
        settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(f"cannot use the folder {error.filename}: {error.strerror}") from error
    operator = await Operator.enrolled(settings, settings.cos, thirdparty=settings.thirdparty)
    try:
        await operator.start(order.request())
        async with contextlib.aclosing(operator.watch(order.run_id)) as events:
            async for event in events:
                watcher(event)
        known = await operator.report(order.run_id)
    finally:
        await operator.close()
    if known["phase"] != "done":
        raise RunError(
            f"the run ended before its time: {known['reason']}", hint="the logs of the services say more"
        )
    course = from_cos(known)
    if order.protection:
        course = course.having(protection=order.protection)
    outcome = SeedOutcome(order.seed, order.split_sha256, course, order.reference or None)
    report = together(order.settings, order.dataset, order.run_id, [outcome]).having(
        started=started.isoformat(timespec="seconds"), duration_s=round(time.perf_counter() - begun, 1)
    )
    write(report, settings.output)
    return report
