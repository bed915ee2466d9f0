"""``coterie operate`` and ``coterie resume``: start or take up a run on services elsewhere, watch it, report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.options import JsonOption, PageOption, SetOption, WatchOption
from coterie.cli.output import Output
from coterie.cli.run import written

if TYPE_CHECKING:
    from coterie.wire.v1.operator_pb2 import WatchRunResponse

__all__ = ["ConfigOption", "operate", "resume"]

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Configuration of the operator, written by `coterie bootstrap`.",
    ),
]


def operate(
    config: ConfigOption,
    watch: WatchOption = False,
    page: PageOption = None,
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Start the run that `coterie bootstrap` prepared, and report.

    Enrols the operator, starts the run at the orchestration server, watches it to its end, and writes report.json
    and report.html into the folder that the configuration names. Started again, it goes on watching the same run.
    """
    _carry_out(Output("operate", as_json=json), config, sets, watch=watch, page=page)


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, as `coterie operate` shows it.")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Configuration of the operator, written by `coterie bootstrap`. Needed.",
        ),
    ] = None,
    watch: WatchOption = False,
    page: PageOption = None,
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Take up a run that has failed, and report.

    The run goes on where it failed, with the same parties, model and plan. It must be one in rounds that gave up:
    too long without a sum, too many sums abandoned in a row, or too few parties came. Watches the run to its end,
    and writes report.json and report.html as `coterie operate` does. `coterie runs resume` takes up a run of this
    machine that was interrupted.
    """
    if config is None:
        from coterie.errors import ConfigError

        raise ConfigError(
            "--config is missing: the configuration of the operator of a run across machines",
            hint=f"a run of `coterie run` on this machine is taken up by `coterie runs resume {run}`",
        )
    _carry_out(Output("resume", as_json=json), config, sets, run, watch=watch, page=page)


def _carry_out(
    output: Output,
    config: Path,
    sets: list[str] | None,
    resumed: str | None = None,
    *,
    watch: bool,
    page: Path | None,
) -> None:
    """Start the run of a configuration, or resume it if ``resumed`` is its id; watch it, and print its report."""
    from coterie.config.load import load
    from coterie.config.operate import OperateSettings
    from coterie.errors import ConfigError

    settings = load(OperateSettings, config, sets=sets or (), relative_to=config.parent).settings

    import asyncio

    from coterie.cli.live_page import live_page, page_settings
    from coterie.cli.progress import ProgressDisplay, headline
    from coterie.launch.operation import operate as carry_out
    from coterie.launch.order import Order
    from coterie.telemetry.logs import configure
    from coterie.telemetry.report_text import tables

    configure("warning", service="operator")
    order = Order.load(settings.order)
    if resumed not in (None, order.run_id):
        raise ConfigError(
            f"{config} is the configuration of run {order.run_id}, not of {resumed}",
            hint=f"`coterie resume {order.run_id}`, or the configuration of the other run",
        )
    run = order.settings
    output.say(f"run {order.run_id}: {headline(run)}")
    known = {row.label or name: row.metrics for name, row in order.reference.items()}
    with (
        live_page(
            output,
            page_settings(watch=watch, file=page),
            run,
            order.run_id,
            headline(run),
            settings.output.parent,
            references=known,
        ) as live,
        ProgressDisplay(output.console, run) as progress,
    ):

        def show(event: WatchRunResponse) -> None:
            progress.update(order.seed, event)
            live.update(order.seed, event)

        def told(lacking: str) -> None:
            output.say(f"warning: {lacking}")

        report = asyncio.run(carry_out(settings, order, show, resume=resumed is not None, told=told))
        live.ended(report, settings.output / "report.html")
    output.say(*tables(report, plain=not output.console.is_terminal))
    output.say(f"report: {written(settings.output)}")
    output.finish({"folder": settings.output, "report": report.content()})
