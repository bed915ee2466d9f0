"""``coterie runs``: list, show, compare, take up, export and remove the runs of a folder."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.exits import exits
from coterie.cli.options import JsonOption
from coterie.cli.output import Output, columns, printable
from coterie.errors import ConfigError, DataError, PeerError, PreflightError, RunError

if TYPE_CHECKING:
    from rich.table import Table

    from coterie.launch.kept_runs import KeptRun
    from coterie.launch.run_comparison import RunComparison
    from coterie.telemetry.report_parts import ReportTable

__all__ = ["app"]

app = typer.Typer(help="List, compare, resume, export and remove runs of this machine.", no_args_is_help=True)

_In = Annotated[
    Path, typer.Option("--in", metavar="FOLDER", help="Folder of the runs, `output` of their files.")
]
_Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Id of the run, a part of it that no other has, its folder, or `newest`."
    ),
]
_RUNS = Path("runs")
_KINDS = ("csv", "tensorboard", "mlflow", "model")

_AGES = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


@app.command("list", epilog=exits(RunError))
def list_runs(folder: _In = _RUNS, as_json: JsonOption = False) -> None:
    """List runs, the newest last, with how each stands.

    A run is running, finished, failed, or interrupted: its launcher was killed or stopped.
    """
    output = Output("runs list", as_json=as_json)
    from coterie.launch.kept_runs import kept_runs

    found = kept_runs(folder)
    if found:
        output.say(_listed(found))
        output.say(*(f"{one.run_id}: {one.note}" for one in found if one.note))
    else:
        output.say(f"there is no run in {folder}")
    output.finish({"folder": folder, "runs": [_facts(one) for one in found]})


@app.command(epilog=exits(RunError))
def show(run: _Run = "newest", folder: _In = _RUNS, as_json: JsonOption = False) -> None:
    """Show a run: how it stands, its figures and costs.

    Of a run without a report, the command says why it has none and where the logs are.
    """
    output = Output("runs show", as_json=as_json)
    from coterie.launch.kept_runs import run_named
    from coterie.telemetry.quantities import volume
    from coterie.telemetry.report_text import tables

    one = run_named(run, folder)
    output.say(f"run {one.run_id}: {one.status}" + (f", {one.reason}" if one.reason else ""))
    if one.note:
        output.say(f"note: {one.note}")
    if one.started:
        output.say(f"started: {one.began.isoformat(timespec='seconds')}")
    if one.report is not None:
        output.say(*tables(one.report))
    elif one.status != "running":
        output.say(f"settings: {_settled(one)}", f"logs of its processes: {one.folder}/*/log.jsonl")
    output.say(f"folder: {one.folder}, {volume(one.size())}")
    report = None if one.report is None else one.report.content()
    output.finish({**_facts(one), "size": one.size(), "report": report})


@app.command(epilog=exits(PreflightError, DataError, RunError))
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A finished run, as RUN of `coterie runs show`.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with the comparison, too.")
    ] = None,
    folder: _In = _RUNS,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs: settings that differ, metrics and costs.

    Differences have intervals over the users where both runs kept figures of their users
    (`federation.per_user_metrics`) and have the same split; otherwise it is said why they have none.
    """
    output = Output("runs compare", as_json=as_json)
    from coterie.launch.kept_runs import run_named
    from coterie.launch.run_comparison import compare_kept, comparison_tables

    found = compare_kept(run_named(first, folder), run_named(second, folder))
    tables = comparison_tables(found)
    for name, one in (("A", found.first), ("B", found.second)):
        output.say(f"{name}: {_named(one)}")
    output.say(*(f"note: {note}" for note in found.notes))
    for table in tables:
        output.say("", *_drawn(table))
    if html is not None:
        from coterie.telemetry.comparison_html import write_comparison
        from coterie.telemetry.report_parts import Fact

        facts = [Fact(name, _named(one)) for name, one in (("A", found.first), ("B", found.second))]
        title = f"{found.first.run_id} and {found.second.run_id}"
        write_comparison(html, title, facts, found.notes, tables)
        output.say("", f"page: {html}")
    output.finish(_compared(found))


@app.command(epilog=exits(ConfigError, PreflightError, DataError, PeerError, RunError, interrupted=True))
def resume(
    run: _Run,
    go_on: Annotated[
        bool,
        typer.Option("--go-on", help="Go on from the stores even where a sum in progress is lost by that."),
    ] = False,
    folder: _In = _RUNS,
    as_json: JsonOption = False,
) -> None:
    """Take up a run that was interrupted, and write its report.

    For a run of `coterie run` whose launcher was killed or stopped, or whose machine went down. Seeds that had
    finished are kept. A federation in progress goes on from the stores of its services, or begins anew where a sum
    would be lost otherwise: figures are those of an undisturbed run. Refused where data of the run has changed.
    `coterie resume` takes up a run across machines.
    """
    output = Output("runs resume", as_json=as_json)
    from coterie.launch.kept_runs import run_named

    kept = run_named(run, folder)
    if kept.status == "finished":
        output.say(f"run {kept.run_id} has finished: {kept.folder / 'report.html'}")
        output.finish(_facts(kept))
        return

    from coterie.launch.fork_server import fork_server
    from coterie.launch.taking_up import interrupted

    found = interrupted(kept, go_on=go_on)
    if not found.record.in_process:
        fork_server()

    from coterie.cli.run import carry_out

    if found.why:
        output.say(found.why)
    carry_out(output, found.settings, kept.run_id, found.take_up, in_process=found.record.in_process)


@app.command(epilog=exits(ConfigError, PreflightError, PeerError, RunError))
def export(
    run: _Run,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="KIND", help="csv, tensorboard or mlflow (extras of these names), or model."
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="PLACE",
            help="Folder; for mlflow a file of SQLite or the address of a tracking server. Absent: for csv and model a "
            "folder in that of the run, else beside the runs.",
        ),
    ] = None,
    folder: _In = _RUNS,
    as_json: JsonOption = False,
) -> None:
    """Write a finished run's figures for another program, or its model.

    csv writes metrics, history, rounds, costs and settings as files. tensorboard and mlflow get curves, final figures,
    costs and settings. model writes what `coterie runs model` does.
    """
    output = Output("runs export", as_json=as_json)
    from coterie.launch.kept_runs import run_named

    if to not in _KINDS:
        raise ConfigError(f"--to {to!r}; expected {', '.join(_KINDS)}")
    one = run_named(run, folder)
    if one.report is None:
        raise RunError(f"run {one.run_id} has no figures to export: it is {one.status}")
    made: Any
    if to == "model":
        from coterie.launch.model_folder import model_of_run

        made = model_of_run(one).save(Path(out) if out else one.folder / "model")
        output.say(f"folder: {made}")
    elif to == "csv":
        from coterie.telemetry.run_export import to_csv

        place = Path(out) if out else one.folder / "csv"
        made = to_csv(one.report, place)
        output.say(f"{len(made)} files in {place}")
    elif to == "tensorboard":
        from coterie.telemetry.run_export_tensorboard import to_tensorboard

        made = to_tensorboard(one.report, Path(out) if out else one.folder.parent / "tensorboard")
        output.say(f"events in {made}", f"tensorboard --logdir {made.parent}")
    else:
        from coterie.telemetry.run_export_mlflow import to_mlflow

        store = out or str(one.folder.parent / "mlflow.db")
        files = [one.folder / name for name in ("report.json", "report.html")]
        made = to_mlflow(one.report, store, tuple(file for file in files if file.is_file()))
        output.say(f"run {made} of the experiment coterie in {store}")
    output.finish({"run": one.run_id, "to": to, "made": made})


@app.command(epilog=exits(DataError, RunError))
def model(
    run: _Run,
    to: Annotated[Path, typer.Argument(metavar="TO", help="Folder to write; empty, or of a model.")],
    licence: Annotated[
        str, typer.Option("--licence", metavar="TEXT", help="Licence of the model, for its card.")
    ] = "",
    folder: _In = _RUNS,
    as_json: JsonOption = False,
) -> None:
    """Write the model of a finished run into a folder.

    The folder holds the arrays (safetensors), the items, a card with data, split, sums, epsilon and figures, and
    the hash of each file. `coterie serve-model` serves it, `coterie.load_model` reads it.
    """
    output = Output("runs model", as_json=as_json)
    from coterie.launch.kept_runs import run_named
    from coterie.launch.model_folder import model_of_run

    made = model_of_run(run_named(run, folder), licence=licence)
    made.save(to)
    output.say(f"{made!r}", f"folder: {to}")
    output.finish({"folder": to, "system": made.system, "version": made.version, "items": len(made.items)})


@app.command(epilog=exits(ConfigError, PreflightError, RunError, interrupted=True))
def prune(
    keep: Annotated[
        int | None, typer.Option("--keep", metavar="N", min=0, help="Keep the N newest runs.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="Remove only runs older than this, as 30d or 12h."),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Remove only runs that failed or were interrupted.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    folder: _In = _RUNS,
    as_json: JsonOption = False,
) -> None:
    """Remove runs that fit every condition given, after asking.

    At least one condition is needed. A run goes with its whole folder: stores, keys, logs, model and report. Running
    ones stay, and so does everything in FOLDER that is no run.
    """
    output = Output("runs prune", as_json=as_json)
    from coterie.launch.kept_runs import freed_by, kept_runs, prunable, remove
    from coterie.telemetry.quantities import volume

    if keep is None and older_than is None and not failed:
        raise ConfigError(
            "nothing says which runs are to go",
            hint="--keep N, --older-than 30d or --failed; `--keep 0` means all of them",
        )
    age = None if older_than is None else _seconds(older_than)
    chosen = prunable(kept_runs(folder), keep=keep, older_than_s=age, failed=failed)
    size = freed_by(chosen)
    if not chosen:
        output.say("no run fits: nothing is removed")
    else:
        output.say(_listed(chosen), f"{len(chosen)} runs, {volume(size)}")
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise ConfigError("nobody can be asked whether these runs are to go; expected --yes")
            if not typer.confirm(f"Remove these {len(chosen)} runs?"):
                output.say("nothing is removed")
                return
        for one in chosen:
            remove(one)
        output.say(f"removed {len(chosen)} runs, {volume(size)}")
    removed = [{"run": one.run_id, "folder": one.folder} for one in chosen]
    output.finish({"folder": folder, "removed": removed, "bytes": size})


def _seconds(age: str) -> float:
    found = re.fullmatch(r"(\d+)([mhdw])", age.strip())
    if found is None:
        raise ConfigError(
            f"--older-than {age!r}; expected a number and m, h, d or w (minutes, hours, days, weeks), as 30d"
        )
    return int(found[1]) * float(_AGES[found[2]])


def _listed(runs: Sequence[KeptRun]) -> Table:
    from coterie.telemetry.quantities import duration, measure
    from coterie.telemetry.report_facts import leading_metric, run_label

    table = columns()
    # Ids are copied from here, so they are never folded.
    for name in ("Run", "Status"):
        table.add_column(name, no_wrap=True)
    for name in ("Model", "Sum", "Data", "Figure", "Time"):
        table.add_column(name, overflow="fold")
    for one in runs:
        report = one.report
        if report is None:
            table.add_row(one.run_id, one.status, _settled(one), "", "", "", "")
            continue
        leading = leading_metric(report)
        known = None if leading is None else report.metrics.get(leading.key)
        figure = f"{leading.label} {measure(known.mean)}" if leading and known else ""
        cells = (run_label(report), report.secure_sum, report.dataset.name, figure)
        table.add_row(one.run_id, one.status, *map(printable, cells), duration(report.duration_s))
    return table


def _settled(run: KeptRun) -> str:
    """Return what a run without a report was to train, from its settings."""
    known = (run.settings.get("system"), run.settings.get("secure_sum"))
    return printable(", ".join(str(one) for one in known if one))


def _named(run: KeptRun) -> str:
    from coterie.telemetry.report_facts import run_label

    if run.report is None:
        return run.run_id
    report = run.report
    return printable(f"{run.run_id}, {run_label(report)} on {report.dataset.name}, sums {report.secure_sum}")


def _facts(run: KeptRun) -> dict[str, Any]:
    report = run.report
    return {
        "run": run.run_id,
        "status": run.status,
        "reason": run.reason,
        "note": run.note,
        "started": run.started,
        "seconds": None if report is None else report.duration_s,
        "system": run.settings.get("system") if report is None else report.system,
        "label": None if report is None else report.label,
        "secure_sum": run.settings.get("secure_sum") if report is None else report.secure_sum,
        "dataset": None if report is None else report.dataset.name,
        "metrics": {} if report is None else {name: one.mean for name, one in report.metrics.items()},
        "folder": run.folder,
    }


def _drawn(table: ReportTable) -> list[Any]:
    """Return a table of a comparison for the terminal."""
    from rich.text import Text

    made = columns()
    for number, name in enumerate(table.columns):
        made.add_column(name, justify="right" if table.numeric and number else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return [
        Text(table.caption, style="bold"),
        *([made] if table.rows else []),
        *([table.note] if table.note else []),
    ]


def _compared(found: RunComparison) -> dict[str, Any]:
    metrics = {
        one.metric.key: {
            "first": one.first.mean,
            "second": one.second.mean,
            "difference": one.difference,
            "paired": one.paired,
        }
        for one in found.metrics
    }
    return {
        "first": _facts(found.first),
        "second": _facts(found.second),
        "settings": found.settings,
        "metrics": metrics,
        "costs": found.costs,
        "unpaired": found.unpaired,
        "notes": found.notes,
    }
