"""Sections shared by several tables: our figures beside the paper's, curves, paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coterie.studies.tables.paper_table import MakePrintedTable, PrintedTable, Results

__all__ = ["ABSENT", "PaperLine", "beside", "curves", "differences", "shown"]

ABSENT = "\N{EN DASH}"
"""Text of a cell without a figure."""


@dataclass(frozen=True)
class PaperLine:
    """A line of `beside`, which shows a row's figures beside the paper's.

    Parameters
    ----------
    row : str
        Name of the row. A row without results is shown with the paper's figures alone.
    label : str
    paper : mapping of str to float
        The paper's figures for this data set, by metric.
    best_on_test : bool
        Show the version that is best on the test part: the paper's practice, not ours.
    variant : bool
        Leave the line out while the row has no results, since another line has the paper's figures.
    """

    row: str
    label: str
    paper: Mapping[str, float] = field(default_factory=dict)
    best_on_test: bool = False
    variant: bool = False


def beside(
    title: str,
    entries: Mapping[str, Sequence[PaperLine]],
    metrics: Mapping[str, str],
    more: Mapping[str, str] | None = None,
    notes: tuple[str, ...] = (),
    digits: int = 3,
) -> MakePrintedTable:
    """Return a section with the paper's figures and ours, row by row.

    Parameters
    ----------
    title : str
    entries : mapping of str to sequence of PaperLine
        Lines by name of the data set; those under ``""`` are for any other data set.
    metrics : mapping of str to str
        Heading by metric, for figures that the paper has.
    more : mapping of str to str, optional
        Heading by metric, for figures that the paper does not have.
    notes : tuple of str
    digits : int
        Decimals of our figures.
    """
    more = more or {}

    def section(results: Results) -> PrintedTable | None:
        lines = [
            entry
            for entry in entries.get(results.dataset, entries.get("", ()))
            if entry.row in results.cells or not entry.variant
        ]
        if not any(entry.row in results.cells for entry in lines):
            return None
        used = {m: head for m, head in more.items() if any(results.values(entry.row, m) for entry in lines)}
        columns = (
            "row",
            *(f"paper\n{head}" for head in metrics.values()),
            *metrics.values(),
            *used.values(),
            "tuned",
        )
        return PrintedTable(
            f"{title}, {results.dataset}, {_seeds(results)}",
            columns,
            tuple(_line(entry, results, metrics, used, digits) for entry in lines),
            notes,
        )

    return section


def _line(
    entry: PaperLine, results: Results, metrics: Mapping[str, str], more: Mapping[str, str], digits: int
) -> tuple[str, ...]:
    def ours(metric: str) -> str:
        return shown(results.values(entry.row, metric, best_on_test=entry.best_on_test), digits)

    cells = results.cells.get(entry.row, ())
    budget = results.budgets.get(entry.row, 0)
    tuned = cells[0].record["tuned"] if cells else ABSENT
    return (
        entry.label,
        *(f"{entry.paper[metric]:.2f}" if metric in entry.paper else ABSENT for metric in metrics),
        *(ours(metric) for metric in metrics),
        *(ours(metric) for metric in more),
        f"{budget} trials" if tuned == "tuned" else tuned,
    )


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean over seeds and their standard deviation as text; `ABSENT` without values."""
    if not values:
        return ABSENT
    spread = f" ±{np.std(values, ddof=1):.{digits}f}".replace("±0.", "±.") if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def curves(
    title: str, rows: Mapping[str, str], metric: str, steps: Sequence[int], notes: tuple[str, ...] = ()
) -> MakePrintedTable:
    """Return a section with a learning curve: a metric over the steps of training, as means over the seeds.

    After the steps come the value of the chosen version and the highest value, which papers report.

    Parameters
    ----------
    title : str
    rows : mapping of str to str
        Label by row.
    metric : str
        A metric of the history.
    steps : sequence of int
        Steps to print, each by the last version up to it. The whole curve is in the JSON.
    notes : tuple of str
    """

    def section(results: Results) -> PrintedTable | None:
        lines = []
        for name, label in rows.items():
            histories = [cell.record["history"] for cell in results.cells.get(name, ())]
            if not histories:
                continue
            values = []
            for step in steps:
                reached = [
                    [entry for entry in history if entry["step"] <= step and metric in entry["metrics"]]
                    for history in histories
                    if history[-1]["step"] >= step
                ]
                found = [entries[-1]["metrics"][metric] for entries in reached if entries]
                values.append(f"{np.mean(found):.3f}" if found else ABSENT)
            best = [max(e["metrics"].get(metric, -np.inf) for e in history) for history in histories]
            highest = shown([value for value in best if np.isfinite(value)])
            lines.append((label, *values, shown(results.values(name, metric)), highest))
        if not lines:
            return None
        columns = ("row", *(f"step {step}" for step in steps), "version that counts", "highest")
        return PrintedTable(
            f"{title}, {results.dataset}, {_seeds(results)}: {metric}", columns, tuple(lines), notes
        )

    return section


def differences(title: str, pairs: Sequence[tuple[str, str]], metrics: Sequence[str]) -> MakePrintedTable:
    """Return a section with paired differences over users, the first row minus the second."""

    def section(results: Results) -> PrintedTable | None:
        labels = {row.name: row.label for row in results.rows}
        lines = []
        for first, second in pairs:
            for metric in metrics:
                found = results.difference(first, second, metric)
                if found is not None:
                    lines.append(
                        (
                            f"{labels[first]} minus {labels[second]}",
                            metric,
                            f"{found.mean:+.4f}",
                            f"{found.low:+.4f} to {found.high:+.4f}",
                            f"{found.low_with_seeds:+.4f} to {found.high_with_seeds:+.4f}",
                            str(found.users),
                            str(found.seeds),
                        )
                    )
        if not lines:
            return None
        columns = ("rows", "metric", "mean", "95% over users", "95% over users and seeds", "users", "seeds")
        return PrintedTable(f"{title}, {results.dataset}", columns, tuple(lines))

    return section


def _seeds(results: Results) -> str:
    count = len(results.seeds)
    return "1 seed" if count == 1 else f"means of {count} seeds ±standard deviation"
