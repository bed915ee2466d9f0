"""``coterie operate``: start a run on services that run elsewhere, watch it, and write its report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.options import JsonOption, SetOption
from coterie.cli.output import Output

if TYPE_CHECKING:
    from coterie.wire.v1.operator_pb2 import WatchRunResponse

__all__ = ["operate"]


def operate(
    config: Annotated[
        Path,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Configuration of the operator, written by `coterie bootstrap`.",
        ),
    ],
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Start the run that `coterie bootstrap` prepared, and report.

    Enrols the operator, starts the run at the orchestration server, watches it to its end, and writes report.json
    and report.html into the folder that the configuration names. Started again, it goes on watching the same run.
    """
    output = Output("operate", as_json=json)
    from coterie.config.load import load
    from coterie.config.operate import OperateSettings

    settings = load(OperateSettings, config, sets=sets or (), relative_to=config.parent).settings

    import asyncio

    from coterie.cli.progress import ProgressDisplay, headline
    from coterie.launch.operation import operate as carry_out
    from coterie.launch.order import Order
    from coterie.telemetry.logs import configure
    from coterie.telemetry.report_text import tables

    configure("warning", service="operator")
    order = Order.load(settings.order)
    run = order.settings
    output.say(f"run {order.run_id}: {headline(run)}")
    with ProgressDisplay(output.console, run) as progress:

        def show(event: WatchRunResponse) -> None:
            progress.update(order.seed, event)

        report = asyncio.run(carry_out(settings, order, show))
    output.say(*tables(report))
    output.say(f"report: {settings.output / 'report.html'}")
    output.finish({"folder": settings.output, "report": report.content()})
