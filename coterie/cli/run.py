"""``coterie run``: run a federation on this machine, from the first process to the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.options import DataOption, JsonOption, PageOption, SetOption, WatchOption, with_data
from coterie.cli.output import Output

if TYPE_CHECKING:
    from coterie.telemetry.report import Report
    from coterie.wire.v1.operator_pb2 import WatchRunResponse

__all__ = ["run"]


def run(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File that describes the run, as examples/drift.toml.")
    ],
    data: DataOption = None,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process", help="Train in this process, without services; for systems that learn in rounds."
        ),
    ] = False,
    watch: WatchOption = False,
    page: PageOption = None,
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Train a federation on this machine and write its report.

    Every service runs as a process of its own, on loopback, with mutual TLS. report.json, report.html, logs and stores
    are written into runs/ID; `output` in FILE names another folder.
    """
    output = Output("run", as_json=json)
    output.say(f"reading {file}")
    from coterie.config.load import load
    from coterie.config.run import RunSettings

    settings = load(RunSettings, file, sets=with_data(sets, data)).settings

    from coterie.cli.live_page import live_page, page_settings
    from coterie.launch.fork_server import fork_server

    paged = page_settings(watch=watch, file=page)
    if not in_process:
        # The fork server imports the services' modules while this process reads the data.
        fork_server()

    import asyncio
    from functools import partial

    from coterie.cli.progress import ProgressDisplay, headline
    from coterie.launch.federation import run_federation
    from coterie.launch.preflight import require_room
    from coterie.studies import experiment
    from coterie.studies.run_plan import new_run_id
    from coterie.telemetry.logs import configure

    configure("warning", service="launcher")
    run_id = new_run_id(settings.name)
    line = headline(settings) + (", in process" if in_process else "")
    output.say(f"run {run_id}: {line}")
    with (
        live_page(output, paged, settings, run_id, line, settings.output) as live,
        ProgressDisplay(output.console, settings) as progress,
    ):

        def show(seed: int, event: WatchRunResponse) -> None:
            progress.update(seed, event)
            live.update(seed, event)

        def stage(text: str, federation: RunSettings | None) -> None:
            progress.stage(text, federation)
            live.stage(text, federation)

        def warn(warning: str) -> None:
            output.say(f"warning: {warning}")

        services = None if in_process else partial(run_federation, begun=live.follow)
        try:
            report, folder = asyncio.run(
                experiment.run(settings, run_id, show, services, warn=warn, stage=stage, check=require_room)
            )
        except KeyboardInterrupt:
            left = settings.output / run_id
            output.say(f"interrupted: nothing runs any more; stores and logs of the run so far are in {left}")
            raise
        live.ended(report, folder / "report.html")
    _print(output, report, folder)


def _print(output: Output, report: Report, folder: Path) -> None:
    from coterie.telemetry.report_text import tables

    output.say(*tables(report, plain=not output.console.is_terminal))
    output.say(f"report: {folder / 'report.html'}")
    output.finish({"folder": folder, "report": report.content()})
