"""``coterie evaluate`` and ``coterie tune``: make a paper's table, compare systems, floors or rules, and tune rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.options import DataOption, JsonOption, SetOption, with_data
from coterie.cli.output import Output, columns

if TYPE_CHECKING:
    from coterie.config.run import RunSettings
    from coterie.studies.tables import PaperTable, Trials
    from coterie.studies.tables.compare import Comparison
    from coterie.studies.tables.every_table import MadeTable
    from coterie.studies.tables.prepared_table import PreparedTable
    from coterie.studies.tables.tuning import Search

__all__ = ["evaluate", "tune"]

_TableOption = Annotated[
    str,
    typer.Option(
        "--table",
        metavar="NAME",
        help="Name of a paper's table; `compare`: systems beside central models; `floors`: what groups and "
        "floors of a system cost and hide; `poisoning`: users who lie, and rules against them; `privacy`: what noise "
        "costs, by epsilon; or `fold-in`: users who never train. Several names, or `all`, make all of them. "
        "An unknown name prints the known ones.",
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
_SystemsOption = Annotated[
    str | None,
    typer.Option(
        "--systems",
        metavar="A,B",
        help="`compare`, `floors`, `poisoning`, `privacy` and `fold-in` only: systems, by name. Absent: all that fit "
        "the data set; one for each task with `poisoning` and `privacy`.",
    ),
]
_OutOption = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder for the table's files.")]
_OUT = Path("runs/tables")
_COMPARE = "compare"
_FLOORS = "floors"
_POISONING = "poisoning"
_PRIVACY = "privacy"
_FOLD_IN = "fold-in"
_UNTUNED = (_FLOORS, _POISONING, _PRIVACY, _FOLD_IN)
"""Tables that tune nothing, and are of any system."""
_ALL = "all"
_MOST_JOBS = 4
"""Tables that are made at once unless more are asked for: each holds its data and models."""
_SLOWEST = 10
_SEEDS = (0, 1, 2)


def evaluate(
    table: _TableOption,
    file: _FileArgument = None,
    data: DataOption = None,
    systems: _SystemsOption = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Compute one seed only, with few passes; `compare`, `floors`, `poisoning` and `privacy` also take few "
            "trials or rows. Several tables go to FOLDER/quick.",
        ),
    ] = False,
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
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget",
            metavar="N",
            min=1,
            help="`compare` only: trials by which each central model is tuned. Absent: 8, or 2 with --quick.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted evaluation from its files in FOLDER.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            metavar="N",
            min=1,
            help="Tables that are made at once, where there are several. Absent: as many as cores, at most 4.",
        ),
    ] = None,
    sets: SetOption = None,
    out: _OutOption = _OUT,
    json: JsonOption = False,
) -> None:
    """Make a paper's table, or compare systems, floors or rules.

    Versions and settings are chosen on validation data, never on test data. A row that can be tuned and has no trials
    is marked as untuned. A paper's table is printed beside the paper's figures. `--table compare` sets systems beside
    central models, which it tunes itself, with equally many trials for each; systems take trials of `coterie tune`, or
    else their defaults. `--table floors` trains a system with groups and floors of several sizes, `--table poisoning`
    with users who lie under each rule of aggregation, `--table privacy` with noise of several sizes in either place,
    `--table fold-in` without some users, whom the model then serves.
    `--table all` makes every table, some at once, and sums up what
    each came to and where the time went; with `--resume` it goes on after an interruption.
    """
    output = Output("evaluate", as_json=json)
    names = _names(table)
    several = _ALL in names or len(names) > 1
    if several:
        _refuse("several tables", FILE=file, rows=rows, trials=trials)
        out = out / "quick" if quick else out
    elif table in _UNTUNED:
        _refuse(f"the table {table}, which tunes nothing", trials=trials, budget=budget)
    elif table != _COMPARE:
        _refuse("a paper's table", systems=systems, budget=budget)
    make = partial(
        _made,
        file=file,
        data=data,
        systems=systems,
        quick=quick,
        seeds=_numbers(seeds),
        rows=_names(rows),
        trials=trials,
        budget=budget,
        resume=resume,
        sets=sets,
        out=out,
    )
    if several:
        workers = min(os.cpu_count() or 1, _MOST_JOBS) if jobs is None else jobs
        _evaluate_several(output, _known_tables(names), make, out=out, jobs=workers)
        return
    made = make(output, table)
    for one in made:
        _print(output, one)
    if table in (_COMPARE, *_UNTUNED):
        output.finish({"tables": [_finished(one) for one in made]})
    else:
        output.finish(_finished(made[0]))


def tune(
    table: _TableOption,
    file: _FileArgument = None,
    data: DataOption = None,
    systems: _SystemsOption = None,
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="Number of trials for each row.")] = 12,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of split, training and search.")] = 0,
    rows: _RowsOption = None,
    search: Annotated[
        str,
        typer.Option(
            "--search",
            metavar="HOW",
            help="`random`, or `tpe`: a tree-structured Parzen estimator (Optuna; extra `tune`) that learns from the "
            "trials so far.",
        ),
    ] = "random",
    sets: SetOption = None,
    out: _OutOption = _OUT,
    json: JsonOption = False,
) -> None:
    """Search the settings of a table's rows.

    Every row gets the same number of trials, judged on validation data. Trials are kept in a JSON file: the next call
    continues from it, and `coterie evaluate` takes the best ones.
    """
    from coterie.studies.tables.tuning import search_of

    how = search_of(search)
    output = Output("tune", as_json=json)
    if table == _COMPARE:
        _tune_compared(
            output,
            _compared(output, file, data, sets, systems, _names(rows)),
            out=out,
            trials=trials,
            seed=seed,
            how=how,
        )
        return
    from coterie.errors import ConfigError

    if table in _UNTUNED:
        raise ConfigError(f"nothing of the table {table} is tuned", hint="`coterie evaluate` makes it")
    _refuse("a paper's table", systems=systems)
    from coterie.launch.federation import run_federation
    from coterie.studies import tables
    from coterie.studies.floors import fitted
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
    settings = fitted(settings, feed)
    path = out / f"{tables.stem(found, settings, dataset)}-trials.json"
    about = {
        "table": found.name,
        "dataset": dataset.name,
        "split_sha256": feed.split.sha256(dataset),
        "choose_by": found.choose_by,
        "seed": seed,
    }
    made = tables.tune(
        tables.chosen_rows(found, _names(rows), dataset.name),
        settings,
        feed,
        seed,
        trials=trials,
        choose_by=found.choose_by,
        known=tables.Trials.continued(path, about),
        services=run_federation,
        keep=lambda these: these.write(path),
        say=output.say,
        search=how,
    )
    output.finish(_told(output, path, made))


def _told(output: Output, path: Path, made: Trials) -> dict[str, Any]:
    """Print the best options of every row, and return what the JSON says of the trials."""
    best = {name: made.best(name) for name in made.rows}
    for name, options in best.items():
        shown = (
            "no trial had a result" if options is None else ", ".join(f"{k} {v}" for k, v in options.items())
        )
        output.say(f"{name}: {shown}")
    output.say(f"trials: {path}")
    return {"path": path, "trials": {**made.about, "rows": made.rows}, "best": best}


def _compared(
    output: Output,
    file: Path | None,
    data: Path | None,
    sets: Sequence[str] | None,
    systems: str | None,
    rows: Sequence[str] = (),
    *,
    quick: bool = False,
) -> list[Comparison]:
    """Return the tables that compare systems on the data set that the options name."""
    from coterie.errors import ConfigError
    from coterie.studies.tables.compare import comparisons

    if rows:
        raise ConfigError(
            f"--rows {','.join(rows)} with the table {_COMPARE}", hint="--systems names the systems"
        )
    names = _names(systems)
    return comparisons(_given(file, data, sets, names), names, quick=quick, say=output.say)


def _prepared_tables(
    output: Output,
    table: str,
    file: Path | None,
    data: Path | None,
    sets: Sequence[str] | None,
    systems: str | None,
    *,
    quick: bool,
) -> list[PreparedTable]:
    """Return the tables of floors, of poisoning, of privacy or of fold-in on the data set that the options name."""
    from coterie.studies.tables.folded import folded_tables
    from coterie.studies.tables.noise_cost import noise_tables
    from coterie.studies.tables.poisoned import poisoned_tables
    from coterie.studies.tables.trade_off import trade_offs

    names = _names(systems)
    makers = {
        _FLOORS: trade_offs,
        _POISONING: poisoned_tables,
        _PRIVACY: noise_tables,
        _FOLD_IN: folded_tables,
    }
    return makers[table](_given(file, data, sets, names), names, quick=quick, say=output.say)


def _given(
    file: Path | None, data: Path | None, sets: Sequence[str] | None, names: Sequence[str]
) -> Mapping[str, Any]:
    """Return the nested values of a run's keys that the options give, for any of some systems."""
    from coterie.config.load import load
    from coterie.config.run import RunSettings
    from coterie.errors import ConfigError
    from coterie.systems.registry import system_named
    from coterie.systems.registry import systems as registered
    from coterie.telemetry.logs import configure

    for name in names:
        system_named(name)
    configure("error", service="launcher")
    first: ConfigError | None = None
    # The settings must make a run of one system here; for every other one they are checked where its row is made.
    for name in names or [name for name, system in registered().items() if system.in_rounds]:
        try:
            return load(RunSettings, file, sets=[*with_data(sets, data), f"system={name!r}"]).given
        except ConfigError as error:
            first = first or error
    raise first or ConfigError(
        "no system in rounds is installed", hint="`coterie systems` lists what there is"
    )


def _made(
    output: Output,
    name: str,
    *,
    file: Path | None,
    data: Path | None,
    systems: str | None,
    quick: bool,
    seeds: tuple[int, ...],
    rows: Sequence[str],
    trials: Path | None,
    budget: int | None,
    resume: bool,
    sets: Sequence[str] | None,
    out: Path,
) -> list[MadeTable]:
    """Make the tables of one name: a paper's table is one; the others are one for each task or system."""
    if name in _UNTUNED:
        return _each_made(
            output,
            _prepared_tables(output, name, file, data, sets, systems, quick=quick),
            seeds=(0,) if quick else seeds or _SEEDS,
            out=out,
            rows=rows,
            resume=resume,
        )
    if name == _COMPARE:
        return _compared_made(
            output,
            _compared(output, file, data, sets, systems, rows, quick=quick),
            seeds=(0,) if quick else seeds or _SEEDS,
            out=out,
            budget=budget,
            quick=quick,
            trials=trials,
            resume=resume,
        )
    from coterie.launch.federation import run_federation
    from coterie.studies import tables
    from coterie.studies.tables.every_table import MadeTable

    found, settings = _prepared(name, file, data, sets)
    known, path = _trials(found, settings, trials, out)
    if known is not None and not found.enumerate_options:
        output.say(f"trials: {path}")
    made, written = tables.evaluate(
        found,
        settings,
        seeds=(0,) if quick else seeds or found.seeds,
        out=out,
        names=rows,
        trials=known,
        resume=resume,
        services=run_federation,
        say=output.say,
        quick=quick,
    )
    return [MadeTable(made, written)]


def _known_tables(names: Sequence[str]) -> list[str]:
    """Return the names of the tables to make, each once; all of them where ``all`` is among the given ones."""
    from coterie.studies import tables

    ours = (_COMPARE, *_UNTUNED)
    every = [*tables.tables(), *ours]
    for name in names:
        if name not in (_ALL, *ours):
            tables.find(name)
    return every if _ALL in names else list(dict.fromkeys(names))


class _Named(Output):
    """Output of a table that is made beside others: each line begins with the table's name."""

    def __init__(self, command: str, name: str, *, as_json: bool) -> None:
        super().__init__(command, as_json=as_json)
        self._name = name

    def say(self, *prose: Any) -> None:
        super().say(*(f"{self._name}: {one}" if isinstance(one, str) else one for one in prose))


def _evaluate_several(
    output: Output,
    names: Sequence[str],
    make: Callable[[Output, str], Sequence[MadeTable]],
    *,
    out: Path,
    jobs: int,
) -> None:
    """Make tables, print each, and sum up; a training that failed fails the command at the end."""
    from coterie.errors import RunError
    from coterie.studies.tables.every_table import SUMMARY, in_turn, side_by_side, write_summary

    def printed(name: str) -> Sequence[MadeTable]:
        made = make(output, name)
        for one in made:
            _print(output, one)
        return made

    if min(jobs, len(names)) > 1:
        # Cores are for tables; products that share them would only wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        apart = {name: _Named(output.command, name, as_json=output.as_json) for name in names}
        outcomes = side_by_side({name: partial(make, apart[name], name) for name in names}, jobs, output.say)
        for outcome in outcomes:
            for one in outcome.made:
                _print(output, one)
    else:
        outcomes = in_turn({name: partial(printed, name) for name in names}, output.say)
    found = write_summary(outcomes, out)
    _print_summary(output, found)
    output.say(f"summary: {out / SUMMARY}")
    if found["failed"]:
        raise RunError(
            f"{len(found['failed'])} of {len(names)} tables failed: {', '.join(found['failed'])}",
            hint="--resume makes what is lacking",
        )
    output.finish({"path": out / SUMMARY, **found})


def _print_summary(output: Output, found: Mapping[str, Any]) -> None:
    tables = columns("table", "data", "rows", "best row by validation", "test figure", "seconds")
    for one in found["tables"]:
        value = "none" if one["value"] is None else f"{one['metric']} {one['value']:.4f}"
        tables.add_row(
            one["table"],
            one["dataset"],
            str(one["rows"]),
            one["best"] or "none",
            value,
            f"{one['seconds']:.0f}",
        )
    slowest = columns("row", "table", "seconds")
    for row in found["rows"][:_SLOWEST]:
        slowest.add_row(row["row"], row["table"], f"{row['seconds']:.0f}")
    output.say("", "All tables", tables)
    output.say(*(f"{one['table']}: {one['verdict']}" for one in found["tables"] if one["verdict"]))
    output.say(*(f"{name} is left out: {why}" for name, why in found["left_out"].items()))
    output.say(*(f"{name} failed: {why}" for name, why in found["failed"].items()))
    rows, this = (sum(one["seconds"] for one in found["tables"]), sum(found["seconds"].values()))
    output.say(
        "",
        f"Training of all rows: {rows:.0f} s; this call: {this:.0f} s. The rows that took longest:",
        slowest,
    )


def _finished(one: MadeTable) -> dict[str, Any]:
    """Return what the JSON says of a table."""
    trials = {} if one.trials is None else {"trials": one.trials}
    return {"path": one.path, **trials, "table": one.content}


def _each_made(
    output: Output,
    found: Sequence[PreparedTable],
    *,
    seeds: Sequence[int],
    out: Path,
    rows: Sequence[str],
    resume: bool,
) -> list[MadeTable]:
    from coterie.studies.tables.every_table import MadeTable

    return [
        MadeTable(*one.evaluated(seeds=seeds, out=out, names=rows, resume=resume, say=output.say))
        for one in found
    ]


def _compared_made(
    output: Output,
    found: Sequence[Comparison],
    *,
    seeds: Sequence[int],
    out: Path,
    budget: int | None,
    quick: bool,
    trials: Path | None,
    resume: bool,
) -> list[MadeTable]:
    from coterie.errors import DataError
    from coterie.studies.tables import Trials
    from coterie.studies.tables.compare import budget_of
    from coterie.studies.tables.every_table import MadeTable

    given = None if trials is None else Trials.read(trials)
    tables = [one.table.name for one in found]
    if given is not None and given.about.get("table") not in tables:
        raise DataError(
            f"{trials} holds trials of table {given.about.get('table')}; expected {' or '.join(tables)}",
            hint=f"`coterie tune --table {_COMPARE}` makes trials",
        )
    done = []
    for one in found:
        # A file of trials is of one of the tables; the other has the folder's.
        mine = given if given is not None and given.about["table"] == one.table.name else None
        known = one.tuned(out, budget_of(budget, quick=quick), given=mine, central=True, say=output.say)
        made, written = one.evaluated(known, seeds=seeds, out=out, resume=resume, say=output.say)
        done.append(MadeTable(made, written, one.trials_path(out)))
    return done


def _tune_compared(
    output: Output, found: Sequence[Comparison], *, out: Path, trials: int, seed: int, how: Search
) -> None:
    from coterie.errors import ConfigError

    if seed:
        raise ConfigError(f"--seed {seed} with the table {_COMPARE}, whose search has the seed 0")
    output.finish(
        {
            "tables": [
                _told(output, one.trials_path(out), one.tuned(out, trials, say=output.say, search=how))
                for one in found
            ]
        }
    )


def _refuse(place: str, **given: object) -> None:
    """Refuse options that a table does not have."""
    from coterie.errors import ConfigError

    if named := [
        f"--{name}" if name.islower() else name for name, value in given.items() if value is not None
    ]:
        raise ConfigError(
            f"{' and '.join(named)} with {place}", hint="`coterie evaluate --help` says which tables have it"
        )


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


def _print(output: Output, one: MadeTable) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Printed

    for block in one.content["blocks"]:
        printed = Printed(title=block["title"], title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for number, column in enumerate(block["columns"]):
            printed.add_column(column, justify="right" if number else "left", no_wrap=not number)
        for row in block["rows"]:
            printed.add_row(*row)
        output.say(printed, *block["notes"])
    if one.content["paper"]:
        output.say(f"paper: {one.content['paper']}")
    output.say(f"table: {one.path}")
    if one.trials is not None:
        output.say(f"trials: {one.trials}")
