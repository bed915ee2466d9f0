"""Several tables, in turn or side by side: what each came to, which did not fit the data, and where the time went."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, CoterieError, DataError, PreflightError
from coterie.evaluation.selection import lower_is_better
from coterie.studies.tables.kept_file import write_whole

__all__ = [
    "SUMMARY",
    "MadeTable",
    "Spent",
    "TableOutcome",
    "in_turn",
    "side_by_side",
    "spent",
    "summary_of",
    "write_summary",
]

SUMMARY = "summary.json"
"""File of the summary, in the folder of the tables."""

_UNFIT = (ConfigError, DataError, PreflightError)
"""Errors of a table that the data or the settings do not suit, raised before anything is trained."""


@dataclass(frozen=True)
class MadeTable:
    """A table that was made.

    Attributes
    ----------
    content : mapping
        As its file has it.
    path : Path
    trials : Path, optional
        File of the trials by which its rows were tuned while it was made.
    """

    content: Mapping[str, Any]
    path: Path
    trials: Path | None = None


MakeTables = Callable[[], Sequence[MadeTable]]
"""Function that makes the tables of one name: one, or one for each task or system."""


@dataclass(frozen=True)
class TableOutcome:
    """What became of the tables of one name.

    Attributes
    ----------
    name : str
    made : tuple of MadeTable
        Empty for a table that was left out or that failed.
    seconds : float
        Seconds of this call; rows that were taken over cost none.
    why : str
        Reason for which there is no table.
    failed : bool
        Whether the reason is a training that failed, and not data or settings that do not suit the table.
    """

    name: str
    made: tuple[MadeTable, ...] = ()
    seconds: float = 0.0
    why: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Spent:
    """Time that one row of a table took in whichever call it was trained, trials included, seconds."""

    table: str
    row: str
    seconds: float


def in_turn(
    jobs: Mapping[str, MakeTables], say: Callable[[str], None] = lambda _: None
) -> list[TableOutcome]:
    """Make tables one after the other; one that cannot be made does not keep the others from it.

    Parameters
    ----------
    jobs : mapping of str to MakeTables
        By name of the table, in the order in which they are made.
    say : callable
        Receives a line before and after each.

    Returns
    -------
    list of TableOutcome
        In the order of ``jobs``.
    """
    outcomes = []
    for number, (name, make) in enumerate(jobs.items(), 1):
        say(f"--- {name}: table {number} of {len(jobs)} ---")
        outcomes.append(_outcome(name, make))
        say(_ended(outcomes[-1]))
    return outcomes


def side_by_side(
    jobs: Mapping[str, MakeTables], workers: int, say: Callable[[str], None] = lambda _: None
) -> list[TableOutcome]:
    """Make tables in several processes at once; the figures are those of `in_turn`, the times are not.

    Parameters
    ----------
    jobs : mapping of str to MakeTables
        By name of the table; functions that another process can be given.
    workers : int
        Processes, at least 1.
    say : callable
        Receives a line after each.

    Returns
    -------
    list of TableOutcome
        In the order of ``jobs``.
    """
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        futures = {name: pool.submit(_outcome, name, make) for name, make in jobs.items()}
        try:
            for number, future in enumerate(as_completed(futures.values()), 1):
                say(f"{_ended(future.result())} ({number} of {len(jobs)} tables)")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures.values()]


def _end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, even if that was killed.

    Otherwise it would go on making tables, and write into the files of the evaluation that is resumed.
    """
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _outcome(name: str, make: MakeTables) -> TableOutcome:
    begun = time.perf_counter()
    try:
        made, why, failed = tuple(make()), "", False
    except CoterieError as error:
        made, why, failed = (), str(error), not isinstance(error, _UNFIT)
    return TableOutcome(name, made, round(time.perf_counter() - begun, 1), why, failed)


def _ended(outcome: TableOutcome) -> str:
    if outcome.why:
        return f"{outcome.name}: {'failed: ' if outcome.failed else 'left out: '}{outcome.why}"
    return f"{outcome.name}: {outcome.seconds:.0f} s"


def spent(outcomes: Sequence[TableOutcome]) -> list[Spent]:
    """Return the time of every row, the longest first."""
    found = [one for outcome in outcomes for made in outcome.made for one in _rows_of(made)]
    return sorted(found, key=lambda one: -one.seconds)


def _rows_of(made: MadeTable) -> Iterator[Spent]:
    """Yield the rows of a table with their seconds: of all seeds and of all trials."""
    rows: dict[str, float] = {}
    # A row that was tuned by enumeration stands among the tried ones, too.
    tried = {one["row"] for one in made.content["tried"]}
    cells = [one for one in made.content["rows"] if one["row"] not in tried]
    for cell in (*cells, *made.content["tried"]):
        rows[cell["row"]] = rows.get(cell["row"], 0.0) + cell["seconds"]
    if made.trials is not None and made.trials.exists():
        for row, trials in json.loads(made.trials.read_text("utf-8"))["rows"].items():
            if row in rows:
                rows[row] += sum(trial["seconds"] for trial in trials)
    for row, seconds in rows.items():
        yield Spent(made.path.stem, row, round(seconds, 1))


def summary_of(outcomes: Sequence[TableOutcome]) -> dict[str, Any]:
    """Return the summary, JSON-ready.

    Returns
    -------
    dict
        ``tables``: for each table ``table`` (name of its file without the ending), ``dataset``, ``path``, ``rows`` (how
        many), ``best`` (the row that is best by the metric on validation data, None without one), ``metric``, ``value``
        (of the test part), ``chosen_by``, ``verdict`` (a sentence, where the table has one), ``seconds`` of all its
        rows; ``left_out`` and ``failed``: reason by name; ``seconds``: of this call, by name; ``rows``: the time of
        every row, the longest first.
    """
    rows = spent(outcomes)
    took: dict[str, float] = {}
    for one in rows:
        took[one.table] = took.get(one.table, 0.0) + one.seconds
    return {
        "tables": [
            {**_told(made), "seconds": round(took.get(made.path.stem, 0.0), 1)}
            for outcome in outcomes
            for made in outcome.made
        ],
        "left_out": {one.name: one.why for one in outcomes if one.why and not one.failed},
        "failed": {one.name: one.why for one in outcomes if one.failed},
        "seconds": {one.name: one.seconds for one in outcomes},
        "rows": [{"table": one.table, "row": one.row, "seconds": one.seconds} for one in rows],
    }


def write_summary(outcomes: Sequence[TableOutcome], folder: Path) -> dict[str, Any]:
    """Write the summary into the tables' folder and return it."""
    made = summary_of(outcomes)
    write_whole(folder / SUMMARY, json.dumps(made, indent=1, default=float))
    return made


def _told(made: MadeTable) -> dict[str, Any]:
    content = made.content
    metric, by = content["headline"], content["chosen_by"]
    means = {
        one["row"]: mean
        for one in content["summary"]
        if (mean := one["metrics"].get(by, {}).get("mean")) is not None
    }
    best = (min if lower_is_better(by) else max)(means, key=means.__getitem__) if means else None
    figures = {one["row"]: one["metrics"].get(metric, {}).get("mean") for one in content["summary"]}
    labels = {one["row"]: one["label"] for one in content["summary"]}
    return {
        "table": made.path.stem,
        "dataset": content["dataset"]["name"],
        "path": str(made.path),
        "rows": len(content["summary"]),
        "best": None if best is None else labels[best],
        "metric": metric,
        "value": None if best is None else figures[best],
        "chosen_by": by,
        "verdict": content.get("verdict", {}).get("text"),
    }
