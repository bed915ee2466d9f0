"""``coterie run``: run a federation on this machine, from the first process to the report."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.options import (
    DataOption,
    HostsOption,
    JsonOption,
    PageOption,
    SetOption,
    WatchOption,
    with_data,
)
from coterie.cli.output import Output

if TYPE_CHECKING:
    from coterie.config.page import PageSettings
    from coterie.config.run import RunSettings
    from coterie.launch.federation import Federation
    from coterie.studies.experiment import Stage, Watcher
    from coterie.telemetry.report import Report
    from coterie.wire.v1.operator_pb2 import WatchRunResponse

    Warn = Callable[[str], None]
    Begun = Callable[[Federation], None]
    Work = Callable[[Watcher, Warn, Stage, Begun], Coroutine[Any, Any, tuple[Report, Path]]]

__all__ = ["carry_out", "run", "written"]


def run(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="File that describes the run, as examples/drift.toml."),
    ] = None,
    data: DataOption = None,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help="In place of FILE: a small run with synthetic data, under a minute long."
        ),
    ] = False,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process", help="Train in this process, without services; for systems that learn in rounds."
        ),
    ] = False,
    hosts: HostsOption = None,
    watch: WatchOption = False,
    page: PageOption = None,
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Train a federation on this machine and write its report.

    Every service runs as a process of its own, on loopback, with mutual TLS. report.json, report.html, logs and stores
    are written into runs/ID; `output` in FILE names another folder. An examples/NAME.toml that is not there is
    taken from the installed package.
    """
    output = Output("run", as_json=json)
    if (file is None) == (not demo):
        raise typer.BadParameter(
            "both FILE and --demo; expected one of them"
            if demo
            else "expected FILE, or --demo for a first run"
        )
    if hosts is not None and in_process:
        raise typer.BadParameter("--hosts and --in-process; expected one of them")
    output.say(f"reading {file or 'the demonstration'}")
    from coterie.config.load import load
    from coterie.config.run import RunSettings
    from coterie.launch.examples import DEMO, example

    chosen = example(DEMO) if file is None else file if file.exists() else example(file)
    if hosts is not None:
        sets = [*(sets or ()), f"ray.address={hosts!r}"]
    settings = load(RunSettings, chosen, sets=with_data(sets, data)).settings
    if not in_process:
        from coterie.launch.fork_server import fork_server

        # Imports the services' modules while this process reads the data; a wrong configuration starts nothing.
        fork_server()
        from coterie.launch.replicas import require_one_process

        require_one_process(settings)
    if settings.ray.address and not in_process:
        from coterie.launch.ray_cluster import require_answer

        require_answer(settings.ray)

    from coterie.cli.live_page import page_settings

    paged = page_settings(watch=watch, file=page)

    from functools import partial

    from coterie.launch.federation import run_federation
    from coterie.launch.preflight import require_room
    from coterie.studies import experiment
    from coterie.studies.run_plan import new_run_id

    run_id = new_run_id(settings.name)

    def work(
        show: Watcher, warn: Warn, stage: Stage, begun: Begun
    ) -> Coroutine[Any, Any, tuple[Report, Path]]:
        services = None if in_process else partial(run_federation, begun=begun)
        return experiment.run(settings, run_id, show, services, warn=warn, stage=stage, check=require_room)

    carry_out(output, settings, run_id, work, in_process=in_process, paged=paged)


def carry_out(
    output: Output,
    settings: RunSettings,
    run_id: str,
    work: Work,
    *,
    in_process: bool,
    paged: PageSettings | None = None,
) -> None:
    """Run or take up a run, show its progress, and print its report.

    Parameters
    ----------
    output : Output
    settings : RunSettings
    run_id : str
    work : callable
        Runs it, given a watcher, and callables that receive warnings, what begins, and a federation before its start.
    in_process : bool
        Whether it is trained in this process.
    paged : PageSettings, optional
        Where the live page is; None for no page.
    """
    import asyncio

    from coterie.cli.live_page import live_page
    from coterie.cli.progress import ProgressDisplay, headline
    from coterie.errors import PeerError, RunError
    from coterie.studies.run_record import RUN_RECORD
    from coterie.telemetry.logs import configure

    configure("warning", service="launcher")
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

        try:
            report, folder = asyncio.run(work(show, warn, stage, live.follow))
        except KeyboardInterrupt:
            left = settings.output / run_id
            if (left / RUN_RECORD).is_file():
                output.say(
                    f"interrupted: nothing runs any more; stores and logs of the run so far are in {left}, and "
                    f"`coterie runs resume {left}` takes it up"
                )
            else:
                output.say("interrupted before the run began: nothing runs, and nothing of it was kept")
            raise
        except (RunError, PeerError):
            if (settings.output / run_id / RUN_RECORD).is_file():
                output.say(
                    f"once the cause is mended, `coterie runs resume {settings.output / run_id}` takes the run up"
                )
            raise
        live.ended(report, folder / "report.html")
    _print(output, report, folder)


def written(folder: Path) -> Path:
    """Return the page of a run's report; the report itself where a package was missing for the page."""
    page = folder / "report.html"
    return page if page.is_file() else folder / "report.json"


def _print(output: Output, report: Report, folder: Path) -> None:
    from coterie.telemetry.report_text import tables

    output.say(*tables(report, plain=not output.console.is_terminal))
    output.say(f"report: {written(folder)}")
    output.finish({"folder": folder, "report": report.content()})
