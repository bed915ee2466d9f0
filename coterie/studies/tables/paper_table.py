"""Reproduction of a paper's table: every row is trained with every seed; the result is blocks of text and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.errors import ConfigError, DataError, nearest
from coterie.evaluation.paired import PairedDifference, paired_difference
from coterie.evaluation.selection import lower_is_better
from coterie.studies.floors import fitted
from coterie.studies.outcome import about, surroundings
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.services_run import RunServices
from coterie.studies.tables.cell import Also, Cell, train_cell
from coterie.studies.tables.compact import row_lines
from coterie.studies.tables.kept_file import write_whole
from coterie.studies.tables.row import (
    PASSES,
    QUICK_PASSES,
    Options,
    Row,
    enumerated,
    limited,
    quick_note,
    shortened,
    with_options,
)
from coterie.studies.tables.tuning import Trials

__all__ = ["MakePrintedTable", "PaperTable", "PrintedTable", "Results", "chosen_rows", "evaluate", "stem"]

Say = Callable[[str], None]

_SPLIT = "split."
"""Prefix of a row's options that divide the data in another way than the table's settings."""


@dataclass(frozen=True)
class PrintedTable:
    """One printed table.

    Parameters
    ----------
    title : str
    columns : tuple of str
        Headings; the first column names the rows.
    rows : tuple of tuple of str
    notes : tuple of str
        Lines below the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Results:
    """Results of a table's rows, for the sections that print them.

    Parameters
    ----------
    dataset : str
        Name of the data set.
    seeds : tuple of int
    rows : tuple of Row
        In the table's order.
    cells : mapping of str to sequence of Cell
        Cells by row, one for each seed in the order of ``seeds``.
    budgets : mapping of str to int
        Number of trials by which a row was tuned, by row.
    tried : mapping of str to sequence of Cell
        All cells of all options, by row, for rows that were tuned by enumeration.
    """

    dataset: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    cells: Mapping[str, Sequence[Cell]]
    budgets: Mapping[str, int] = field(default_factory=dict)
    tried: Mapping[str, Sequence[Cell]] = field(default_factory=dict)
    _compared: dict[tuple[str, str, str], PairedDifference | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def values(self, row: str, metric: str, *, best_on_test: bool = False) -> list[float]:
        """Return the values of a row's metric, one for each seed that has it."""
        values = []
        for cell in self.cells.get(row, ()):
            source = cell.record["best_on_test"] if best_on_test else cell.record
            if source is not None and metric in source["metrics"]:
                values.append(float(source["metrics"][metric]))
        return values

    def failure(self, row: str) -> str:
        """Return why a training of a row failed, of the first seed where one did; empty if all ended."""
        facts = (cell.record["facts"] for cell in self.cells.get(row, ()))
        return next((str(one["failed"]) for one in facts if "failed" in one), "")

    def difference(self, first: str, second: str, metric: str) -> PairedDifference | None:
        """Return the paired difference of two rows over users; None when a row has no values of single users."""
        asked = first, second, metric
        if asked not in self._compared:
            self._compared[asked] = self._difference(*asked)
        return self._compared[asked]

    def _difference(self, first: str, second: str, metric: str) -> PairedDifference | None:
        pairs = [
            (one.per_user[metric], other.per_user[metric])
            for one, other in zip(self.cells.get(first, ()), self.cells.get(second, ()), strict=False)
            if one.per_user is not None and other.per_user is not None
            if metric in one.per_user and metric in other.per_user
        ]
        if not pairs:
            return None
        return paired_difference([one for one, _ in pairs], [other for _, other in pairs])


Pairs = Sequence[tuple[str, str]]
"""Pairs of rows by name."""

MakePrintedTable = Callable[[Results], PrintedTable | None]
"""Function that makes a block from results; None when there is nothing to show."""


@dataclass(frozen=True)
class PaperTable:
    """A paper's table that ``coterie evaluate`` can reproduce.

    Parameters
    ----------
    name : str
        Name on the command line.
    title : str
    paper : str
        The paper, and which of its tables and figures.
    settings : mapping
        Settings of a run, as nested keys of TOML, for every cell when the user gives no file of a run.
    prepare : callable
        Completes these settings for a data set, with the split that the table needs.
    rows : callable
        Returns the rows that can be trained here.
    sections : tuple of MakePrintedTable
    headline, choose_by : str
        The metric of the paper, and the validation metric that chooses versions and options.
    compared : tuple of (str, str), or callable
        Pairs of rows that are compared user by user, the first minus the second; or a function that finds them in the
        results.
    compared_by : tuple of str
        Metrics of this comparison.
    seeds : tuple of int
        Default seeds.
    enumerate_options : bool
        Whether the rows are tuned by trying every combination with all seeds while the table is made, instead of by
        ``coterie tune``.
    suffix : callable
        Returns a suffix of the names of the table's files, for settings that make it another table.
    studies : mapping of str to tuple of str
        Groups of rows, by name, that are trained only when they are asked for.
    always : tuple of str
        Rows of these groups that are trained in any case.
    also : callable, optional
        Returns, for settings and data set, the function that computes further metrics of users, or None.
    system : str, optional
        System of every row, where ``settings`` names none.
    verdict : callable, optional
        Sums the results up, JSON-ready, for the table's file.
    passes : str
        Key of a run, or option of a row, that says how many passes a training makes.
    quick_passes : int
        Passes after which the rows of the quick table end at the latest.
    """

    name: str
    title: str
    paper: str
    settings: Mapping[str, Any]
    prepare: Callable[[RunSettings, Dataset], RunSettings]
    rows: Callable[[], tuple[Row, ...]]
    sections: tuple[MakePrintedTable, ...]
    headline: str
    choose_by: str
    compared: Pairs | Callable[[Results], Pairs] = ()
    compared_by: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    enumerate_options: bool = False
    suffix: Callable[[RunSettings], str] = lambda _: ""
    studies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    always: tuple[str, ...] = ()
    also: Callable[[RunSettings, Dataset], Also | None] = lambda _settings, _dataset: None
    system: str | None = None
    verdict: Callable[[Results], Mapping[str, Any]] | None = None
    passes: str = PASSES
    quick_passes: int = QUICK_PASSES


def stem(table: PaperTable, settings: RunSettings, dataset: Dataset) -> str:
    """Return the common prefix of the names of a table's files."""
    return f"{table.name}-{dataset.name}{table.suffix(settings)}"


def chosen_rows(table: PaperTable, names: Sequence[str] | None, dataset: str) -> tuple[Row, ...]:
    """Return the rows to train, with their options on a data set: those asked for, else all but the table's studies.

    Parameters
    ----------
    table : PaperTable
    names : sequence of str, optional
        Names of rows or of studies.
    dataset : str
        Name of the data set.

    Raises
    ------
    ConfigError
        There is no such row or study.
    """
    rows = {row.name: row.on(dataset) for row in table.rows()}
    if not names:
        apart = {name for study in table.studies.values() for name in study}.difference(table.always)
        return tuple(row for row in rows.values() if row.name not in apart)
    wanted: set[str] = set()
    for name in names:
        if name not in rows and name not in table.studies:
            guess = nearest(name, (*rows, *table.studies))
            raise ConfigError(
                f"the table {table.name} has no row {name!r}; it has {', '.join((*rows, *table.studies))}",
                hint=f"did you mean {guess!r}?" if guess else None,
            )
        wanted.update(table.studies.get(name, (name,)))
    return tuple(row for row in rows.values() if row.name in wanted)


def evaluate(
    table: PaperTable,
    settings: RunSettings,
    *,
    seeds: Sequence[int],
    out: Path,
    names: Sequence[str] | None = None,
    trials: Trials | None = None,
    resume: bool = False,
    services: RunServices | None = None,
    say: Say = lambda _: None,
    dataset: Dataset | None = None,
    quick: bool = False,
) -> tuple[dict[str, Any], Path]:
    """Train every row of a table with every seed, and write the table's JSON.

    Parameters
    ----------
    table : PaperTable
    settings : RunSettings
        Settings of the run, which name the data set.
    seeds : sequence of int
    out : Path
        Folder for the table's files.
    names : sequence of str, optional
        Rows or studies to train; by default all rows that belong to no study.
    trials : Trials, optional
        Trials that tune the rows; without them a row that could be tuned is marked as untuned.
    resume : bool
        Load cells that an earlier evaluation left below ``out``.
    services : callable, optional
        Runs federations, for rows that are trained over services.
    say : callable
        Receives a line about every cell.
    dataset : Dataset, optional
        The data set; read as the settings say if left out.
    quick : bool
        Whether rows that are runs train for ``table.quick_passes`` passes at most, and try one choice instead of all.

    Returns
    -------
    made : dict
        Content of the file (docs/metrics.md).
    path : Path
        The file.

    Raises
    ------
    CoterieError
        The data set cannot be used, or a row cannot be trained.
    """
    dataset = dataset or load(settings)
    settings = table.prepare(settings, dataset)
    if settings.rounds.fit_groups:
        settings = fitted(settings, make_feed(settings, dataset, seeds[0]))
    rows = chosen_rows(table, names, dataset.name)
    if quick:
        rows = tuple(shortened(row, table.quick_passes, table.passes) for row in rows)
        settings = limited(settings, table.passes, table.quick_passes)
    folder = out / stem(table, settings, dataset)
    feeds: dict[tuple[str, int], Feed] = {}

    def feed_of(options: Options, seed: int) -> Feed:
        """Return the data divided by a row's own split options, or else by the table's settings."""
        own = {name: value for name, value in options.items() if name.startswith(_SPLIT)}
        key = json.dumps(own, sort_keys=True), seed
        if key not in feeds:
            feeds[key] = make_feed(with_options(settings, own), dataset, seed)
        return feeds[key]

    also = table.also(settings, dataset)
    if trials is not None:
        _refuse_other_trials(trials, table, dataset)

    def cells_of(row: Row, options: Options, tuned: str, place: Path) -> list[Cell]:
        cells = []
        for seed in seeds:
            cell = train_cell(
                row,
                options,
                settings,
                feed_of(options, seed),
                seed,
                tuned=tuned,
                best_by=table.headline,
                folder=place,
                resume=resume,
                also=also,
                services=services,
            )
            cells.append(cell)
            shown = cell.record["metrics"].get(table.headline)
            value = "no value" if shown is None else f"{shown:.4f}"
            what = "".join(f", {name} {options[name]}" for name in row.space if table.enumerate_options)
            say(
                f"{row.name}{what}, seed {seed}: {table.headline} {value} at step {cell.record['step']}"
                f"  ({cell.record['seconds']:.0f} s{', taken over' if cell.taken_over else ''})"
            )
        return cells

    cells: dict[str, list[Cell]] = {}
    tried: dict[str, list[Cell]] = {}
    budgets: dict[str, int] = {}
    for row in rows:
        if row.space and table.enumerate_options:
            every = [
                cells_of(row, options, "tuned", folder / f"trial-{number}")
                for number, options in enumerate(enumerated(row))
            ]
            cells[row.name] = max(every, key=lambda these: _score(these, table.choose_by))
            tried[row.name] = [cell for these in every for cell in these]
            budgets[row.name] = len(every)
            continue
        tunable = row.like or (row.name if row.space or row.defaults else None)
        best = None if trials is None or tunable is None else trials.best(tunable)
        if best is not None and tunable is not None and trials is not None:
            budgets[row.name] = trials.budget(tunable)
        tuned = _how_tuned(row, best is not None, tunable is not None, dataset.name)
        options = {**row.options, **(best or {})} if row.like is None else {**(best or {}), **row.options}
        cells[row.name] = cells_of(row, options, tuned, folder)

    results = Results(dataset.name, tuple(seeds), rows, cells, budgets, tried)
    blocks = [block for section in table.sections if (block := section(results)) is not None]
    if blocks and quick:
        blocks[-1] = replace(blocks[-1], notes=(*blocks[-1].notes, quick_note(table.quick_passes)))
    made = {
        "table": table.name,
        "title": table.title,
        "paper": table.paper,
        "dataset": about(dataset),
        "seeds": list(seeds),
        "headline": table.headline,
        "chosen_by": table.choose_by,
        "rows": [{"table": table.name, **cell.record} for row in rows for cell in cells[row.name]],
        "tried": [{"table": table.name, **cell.record} for these in tried.values() for cell in these],
        "summary": [_summary(row, results) for row in rows],
        "differences": _differences(table, results),
        **({} if table.verdict is None else {"verdict": table.verdict(results)}),
        "blocks": [asdict(block) for block in blocks],
        "settings": settings.model_dump(mode="json", exclude={"output"}),
        **surroundings(),
    }
    path = out / f"{folder.name}.json"
    write_whole(path, row_lines(made))
    return made, path


def _how_tuned(row: Row, by_trials: bool, tunable: bool, dataset: str) -> str:
    if by_trials:
        return "tuned"
    if not tunable:
        return "fixed"
    return "found before" if dataset in row.found else "untuned"


def _score(cells: Sequence[Cell], choose_by: str) -> float:
    """Return the mean over seeds of the metric that chooses options, negated for errors, so that more is better.

    Minus infinity when a seed has no value.
    """
    values = [cell.record["metrics"].get(choose_by, np.nan) for cell in cells]
    mean = float(np.mean(values)) * (-1 if lower_is_better(choose_by) else 1)
    return mean if np.isfinite(mean) else -np.inf


def _summary(row: Row, results: Results) -> dict[str, Any]:
    cells = results.cells[row.name]
    names = list(dict.fromkeys(name for cell in cells for name in cell.record["metrics"]))
    tested = list(
        dict.fromkeys(
            name for cell in cells for name in (cell.record["best_on_test"] or {}).get("metrics", ())
        )
    )
    return {
        "row": row.name,
        "label": row.label,
        "note": row.note,
        "tuned": cells[0].record["tuned"],
        "trials": results.budgets.get(row.name, 0),
        "options": cells[0].record["options"],
        "metrics": {name: _mean_std(results.values(row.name, name)) for name in names},
        "best_on_test": {
            name: _mean_std(results.values(row.name, name, best_on_test=True)) for name in tested
        },
        "users": cells[0].record["users"],
    }


def _mean_std(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": float(np.mean(values)),
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
    }


def _differences(table: PaperTable, results: Results) -> list[dict[str, Any]]:
    pairs = table.compared(results) if callable(table.compared) else table.compared
    return [
        {"first": first, "second": second, "metric": metric, **asdict(difference)}
        for first, second in pairs
        for metric in table.compared_by
        if (difference := results.difference(first, second, metric)) is not None
    ]


def _refuse_other_trials(trials: Trials, table: PaperTable, dataset: Dataset) -> None:
    made_for = trials.about.get("table"), trials.about.get("dataset")
    if made_for != (table.name, dataset.name):
        raise DataError(
            f"the trials were made for table {made_for[0]} on {made_for[1]}; "
            f"expected {table.name} on {dataset.name}",
            hint="`coterie tune` makes trials",
        )
