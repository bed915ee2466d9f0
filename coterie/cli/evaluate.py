"""``coterie evaluate`` and ``coterie tune``: reproduce a paper's table, and tune its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.options import DataOption, JsonOption, SetOption, with_data
from coterie.cli.output import Output

if TYPE_CHECKING:
    from coterie.config.run import RunSettings
    from coterie.studies.tables import PaperTable

__all__ = ["evaluate", "tune"]

_TableOption = Annotated[
    str,
    typer.Option(
        "--table",
        metavar="NAME",
        help="Name of the table; an unknown name prints the known ones.",
    ),
]
_FileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="Run whose settings apply to every row. Absent: the table's own."),
]
_RowsOption = Annotated[
    str | None,
    typer.Option(
        "--rows", metavar="A,B", help="Rows or studies to compute, by their names in the JSON. Absent: all."
    ),
]
_OutOption = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder for the table's files.")]
_OUT = Path("runs/tables")


def evaluate(
    table: _TableOption,
    file: _FileArgument = None,
    data: DataOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Compute one seed only.")] = False,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="0,1,2", help="Seeds to compute. Absent: the table's.")
    ] = None,
    rows: _RowsOption = None,
    trials: Annotated[
        Path | None,
        typer.Option(
            "--trials",
            metavar="FILE",
            help="Trials of `coterie tune`. Absent: those in FOLDER, where there are any.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted evaluation from its files in FOLDER.")
    ] = False,
    sets: SetOption = None,
    out: _OutOption = _OUT,
    json: JsonOption = False,
) -> None:
    """Recompute a paper's table and print it beside the paper's.

    Versions and settings are chosen on validation data, never on test data. A row that can be tuned and has no trials
    is marked as untuned.
    """
    output = Output("evaluate", as_json=json)
    from coterie.launch.federation import run_federation
    from coterie.studies import tables

    found, settings = _prepared(table, file, data, sets)
    known, path = _trials(found, settings, trials, out)
    if known is not None and not found.enumerate_options:
        output.say(f"trials: {path}")
    made, written = tables.evaluate(
        found,
        settings,
        seeds=(0,) if quick else _numbers(seeds) or found.seeds,
        out=out,
        names=_names(rows),
        trials=known,
        resume=resume,
        services=run_federation,
        say=output.say,
    )
    _print(output, made)
    output.say(f"table: {written}")
    output.finish({"path": written, "table": made})


def tune(
    table: _TableOption,
    file: _FileArgument = None,
    data: DataOption = None,
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="Number of trials for each row.")] = 12,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of split, training and search.")] = 0,
    rows: _RowsOption = None,
    sets: SetOption = None,
    out: _OutOption = _OUT,
    json: JsonOption = False,
) -> None:
    """Search the settings of a table's rows at random.

    Every row gets the same number of trials, judged on validation data. Trials are kept in a JSON file: the next call
    continues from it, and `coterie evaluate` takes the best ones.
    """
    output = Output("tune", as_json=json)
    from coterie.errors import ConfigError
    from coterie.launch.federation import run_federation
    from coterie.studies import tables
    from coterie.studies.run_data import load, make_feed

    found, settings = _prepared(table, file, data, sets)
    if found.enumerate_options:
        raise ConfigError(
            f"the table {found.name} tries every combination of its rows' settings itself",
            hint=f"`coterie evaluate --table {found.name}` tunes while it evaluates",
        )
    dataset = load(settings)
    settings = found.prepare(settings, dataset)
    feed = make_feed(settings, dataset, seed)
    path = out / f"{tables.stem(found, settings, dataset)}-trials.json"
    about = {
        "table": found.name,
        "dataset": dataset.name,
        "split_sha256": feed.split.sha256(dataset),
        "choose_by": found.choose_by,
        "seed": seed,
    }
    known = tables.Trials.read(path) if path.exists() else tables.Trials(about)
    if known.about != about:
        differing = ", ".join(name for name in about if known.about.get(name) != about[name])
        raise ConfigError(
            f"{path} holds trials of another search (other {differing})", hint="--out names another folder"
        )
    made = tables.tune(
        tables.chosen_rows(found, _names(rows), dataset.name),
        settings,
        feed,
        seed,
        trials=trials,
        choose_by=found.choose_by,
        known=known,
        services=run_federation,
        keep=lambda these: these.write(path),
        say=output.say,
    )
    best = {name: made.best(name) for name in made.rows}
    for name, options in best.items():
        shown = (
            "no trial had a result" if options is None else ", ".join(f"{k} {v}" for k, v in options.items())
        )
        output.say(f"{name}: {shown}")
    output.say(f"trials: {path}")
    output.finish({"path": path, "trials": {**made.about, "rows": made.rows}, "best": best})


def _prepared(
    name: str, file: Path | None, data: Path | None, sets: Sequence[str] | None
) -> tuple[PaperTable, RunSettings]:
    from coterie.config.load import load
    from coterie.config.run import RunSettings
    from coterie.studies import tables
    from coterie.telemetry.logs import configure

    table = tables.find(name)
    # The user's settings come later, and override the table's system.
    given = [] if table.system is None else [f"system={table.system!r}"]
    given = with_data([*given, *(sets or ())], data)
    configure("error", service="launcher")
    base = table.settings if file is None else None
    return table, load(RunSettings, file, sets=given, base=base).settings


def _trials(
    table: PaperTable, settings: RunSettings, given: Path | None, out: Path
) -> tuple[Any, Path | None]:
    """Return trials and their file: those named, else those that ``tune`` wrote, else None for both."""
    from coterie.studies import tables
    from coterie.studies.run_data import load

    if given is not None:
        return tables.Trials.read(given), given
    dataset = load(settings)
    path = out / f"{tables.stem(table, table.prepare(settings, dataset), dataset)}-trials.json"
    return (tables.Trials.read(path), path) if path.exists() else (None, None)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in _names(text))
    except ValueError:
        numbers = (-1,)
    if any(number < 0 for number in numbers) or len(set(numbers)) < len(numbers):
        raise typer.BadParameter(f"{text!r}; expected distinct numbers, as in 0,1,2", param_hint="--seeds")
    return numbers


def _print(output: Output, made: Mapping[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Printed

    for block in made["blocks"]:
        printed = Printed(title=block["title"], title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for number, column in enumerate(block["columns"]):
            printed.add_column(column, justify="right" if number else "left", no_wrap=not number)
        for row in block["rows"]:
            printed.add_row(*row)
        output.say(printed, *block["notes"])
    output.say(f"paper: {made['paper']}")
