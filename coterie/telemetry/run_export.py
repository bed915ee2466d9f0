"""Figures of a report for other programs, and their form as a folder of CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from coterie.data.whole_file import whole_file
from coterie.errors import PreflightError
from coterie.telemetry.report import EvaluationPart, Report
from coterie.telemetry.report_facts import costs, flatten

__all__ = ["ScalarPoint", "began_at", "cost_figures", "final_figures", "plain_name", "points", "to_csv"]


@dataclass(frozen=True)
class ScalarPoint:
    """One value of a curve.

    Attributes
    ----------
    seed : int or None
        None where the report does not say.
    metric : str
        Key of the report, such as ``ndcg@10``, or ``train_loss``.
    step : int
        Number of the pass or epoch.
    time_s : float
        Seconds since the start of the run.
    value : float
    """

    seed: int | None
    metric: str
    step: int
    time_s: float
    value: float


def plain_name(metric: str) -> str:
    """Return a metric's name without characters that trackers refuse.

    >>> plain_name("hit_ratio@10")
    'hit_ratio_at_10'
    """
    return metric.replace("@", "_at_")


def began_at(report: Report) -> float:
    """Return the time at which the run began, Unix seconds; 0 where the report does not say."""
    try:
        found = datetime.fromisoformat(report.started)
    except ValueError:
        return 0.0
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def points(report: Report) -> list[ScalarPoint]:
    """Return the curves of a report: each evaluation of each seed."""
    first = report.seeds[0] if report.seeds else None
    histories: list[tuple[int | None, Sequence[EvaluationPart]]] = [(first, report.history)]
    if report.per_seed:
        histories = [(None if one.seed is None else int(one.seed), one.history) for one in report.per_seed]
    found = []
    for seed, history in histories:
        for place, one in enumerate(history):
            step = place if one.epoch is None else int(one.epoch)
            for metric, value in (*one.metrics.items(), ("train_loss", one.train_loss)):
                if value is not None:
                    found.append(ScalarPoint(seed, metric, step, one.time_s or 0.0, float(value)))
    return found


def final_figures(report: Report) -> list[tuple[str, str, float, float | None]]:
    """Return the figures of the run and of its baselines: row, metric, mean and standard deviation over the seeds."""
    rows = {"run": report.metrics, **{name: one.metrics for name, one in report.reference.items()}}
    return [
        (row, metric, float(one.mean), one.std)
        for row, metrics in rows.items()
        for metric, one in metrics.items()
        if one.mean is not None
    ]


def cost_figures(report: Report) -> dict[str, float]:
    """Return what a run cost, by name with its unit; without what the report does not say."""
    total = costs(report)
    known = {
        "messages_bytes": total.bytes_total,
        "calls": total.calls,
        "cpu_seconds": total.cpu_seconds,
        "security_seconds": total.security_seconds,
        "duration_seconds": report.duration_s,
        "epsilon": report.privacy.epsilon,
    }
    return {name: float(value) for name, value in known.items() if value is not None}


def to_csv(report: Report, folder: Path) -> list[Path]:
    """Write a report as CSV files: metrics, history, rounds, costs and settings.

    Parameters
    ----------
    report : Report
    folder : Path
        Made when missing; files of these names are replaced.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    PreflightError
        The folder cannot be written.
    """
    history = ((one.seed, one.step, one.time_s, one.metric, one.value) for one in points(report))
    rounds = (
        (
            *(one.round, one.time_s, one.purpose, one.pass_, one.users, one.summed, one.dropped),
            *(one.bytes_in, sum(spent or 0.0 for spent in one.seconds.values()), one.reason),
        )
        for one in report.rounds
    )
    tables: dict[str, tuple[Sequence[str], Iterable[Sequence[object]]]] = {
        "metrics": (("row", "metric", "mean", "std"), final_figures(report)),
        "history": (("seed", "epoch", "time_s", "metric", "value"), history),
        "rounds": (
            (
                *("round", "time_s", "purpose", "pass", "users", "summed", "dropped"),
                *("bytes_in", "seconds", "reason"),
            ),
            rounds,
        ),
        "costs": (("cost", "value"), cost_figures(report).items()),
        "settings": (("key", "value"), flatten(report.settings)),
    }
    made = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (head, rows) in tables.items():
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(head)
            writer.writerows(rows)
            with whole_file(folder / f"{name}.csv") as beside:
                beside.write_text(text.getvalue(), encoding="utf-8")
            made.append(folder / f"{name}.csv")
    except OSError as error:
        raise PreflightError(f"cannot write into {folder}: {error.strerror}") from error
    return made
