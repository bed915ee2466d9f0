"""The printed table and the verdict of a comparison of systems with central models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from coterie.evaluation.selection import lower_is_better
from coterie.studies.tables.paper_table import PaperTable, PrintedTable, Results
from coterie.studies.tables.printed_tables import ABSENT, shown
from coterie.studies.tables.row import Row
from coterie.studies.tables.tasks import ComparedTask

__all__ = ["NAME", "compared_table"]

NAME = "compare"
"""Name of the table on the command line."""


def compared_table(task: ComparedTask, rows: tuple[Row, ...], notes: tuple[str, ...]) -> PaperTable:
    """Return the table of a task.

    Parameters
    ----------
    task : ComparedTask
    rows : tuple of Row
        Central models, and systems with their defaults (`Row.defaults`).
    notes : tuple of str
        Remarks on the data, and on rows that are left out.
    """
    central = tuple(row.name for row in rows if not row.defaults)

    def compared(results: Results) -> list[tuple[str, str]]:
        best = _best(results, central, task)
        return [] if best is None else [(row.name, best) for row in rows if row.name != best]

    return PaperTable(
        name=f"{NAME}-{task.name}",
        title=f"{task.title}: systems beside central models",
        paper="",
        settings={},
        prepare=lambda settings, _: settings,
        rows=lambda: rows,
        sections=(lambda results: _printed(task, central, notes, results),),
        headline=task.headline,
        choose_by=task.choose_by,
        compared=compared,
        compared_by=tuple(task.compared_by.values()),
        verdict=lambda results: _verdict(task, central, results),
    )


def _best(results: Results, names: Sequence[str], task: ComparedTask) -> str | None:
    """Return the row that is best by the mean over seeds of the validation metric; the first among equals."""
    means = {name: float(np.mean(v)) for name in names if (v := results.values(name, task.choose_by))}
    if not means:
        return None
    return (min if lower_is_better(task.choose_by) else max)(means, key=means.__getitem__)


def _printed(
    task: ComparedTask, central: Sequence[str], notes: Sequence[str], results: Results
) -> PrintedTable:
    best = _best(results, central, task)
    by = task.compared_by[task.headline]
    lines = [
        (
            row.label,
            "one place" if row.name in central else "federated",
            *(shown(results.values(row.name, metric)) for metric in task.columns),
            _difference(results, row.name, best, by),
            _tuned(results, row.name),
        )
        for row in results.rows
    ]
    seeds = (
        "1 seed" if len(results.seeds) == 1 else f"means of {len(results.seeds)} seeds ±standard deviation"
    )
    return PrintedTable(
        f"{task.title}, {results.dataset}, {seeds}",
        ("row", "data", *task.columns.values(), "minus best central\n(95% over users)", "tuned"),
        tuple(lines),
        (
            _verdict(task, central, results)["text"],
            *_counted(task, results),
            *_protected(results),
            *(
                f"{row.label} has no figures: {why}."
                for row in results.rows
                if (why := results.failure(row.name))
            ),
            *notes,
        ),
    )


def _difference(results: Results, row: str, best: str | None, metric: str) -> str:
    found = None if best is None or row == best else results.difference(row, best, metric)
    return ABSENT if found is None else f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"


def _tuned(results: Results, row: str) -> str:
    tuned = str(results.cells[row][0].record["tuned"])
    if tuned != "tuned":
        return tuned
    budget = results.budgets[row]
    return f"{budget} trial{'' if budget == 1 else 's'}"


def _counted(task: ComparedTask, results: Results) -> Iterator[str]:
    """Yield a line on users without a value, and one on what differences compare where that is not the column."""
    per_user = next(iter(results.cells.values()))[0].per_user
    by = task.compared_by[task.headline]
    if per_user is not None:
        known = ~np.isnan(per_user[by])
        yield f"{int(known.sum())} of {len(known)} users have something to measure; the others are not counted."
    if by != task.headline:
        yield f"Differences are means over users of each user's own {task.columns[task.headline]}."


def _protected(results: Results) -> Iterator[str]:
    """Yield a line on each federated row's sum and cohorts, and on the share that closed items hold back."""
    for row in results.rows:
        facts = [
            cell.record["facts"] for cell in results.cells[row.name] if "cohorts" in cell.record["facts"]
        ]
        if not facts:
            continue
        held = [one["withheld"] for one in facts if "withheld" in one]
        back = f"; closed items hold back {np.mean(held):.1%} of the training interactions" if held else ""
        yield f"{row.label}: sum {facts[0]['secure_sum']}, cohorts {facts[0]['cohorts']}{back}."


def _verdict(task: ComparedTask, central: Sequence[str], results: Results) -> dict[str, Any]:
    """Return the best central and the best federated row, each chosen on validation data, and their difference."""
    labels = {row.name: row.label for row in results.rows}
    federated = [row.name for row in results.rows if row.name not in central]
    best, rival = _best(results, central, task), _best(results, federated, task)
    made: dict[str, Any] = {"metric": task.headline, "central": best, "federated": rival}
    heading = task.columns[task.headline]

    def named(row: str) -> str:
        return f"{labels[row]} ({heading} {shown(results.values(row, task.headline))})"

    text = "There is no central model." if best is None else f"The best central model is {named(best)}"
    if best is not None and rival is None:
        text += "; no federated row has figures."
    if best is not None and rival is not None:
        by = task.compared_by[task.headline]
        found = results.difference(rival, best, by)
        if found is not None:
            made["difference"] = {"metric": by, **dataclasses.asdict(found)}
        text += f", the best federated row {named(rival)}: {_difference(results, rival, best, by)}."
    return {**made, "text": f"Verdict: {text}"}
