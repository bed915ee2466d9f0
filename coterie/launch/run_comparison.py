"""Comparison of two finished runs: settings that differ, metrics with their differences, and costs.

Where both runs kept the figures of single users and have the same split, differences have an interval over the users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.errors import DataError, RunError
from coterie.evaluation.paired import PairedDifference, paired_difference
from coterie.launch.kept_runs import KeptRun
from coterie.studies.users_figures import USERS, read_users
from coterie.telemetry.quantities import ABSENT, MINUS, count, duration, measure, signed, volume
from coterie.telemetry.report import Average, Report
from coterie.telemetry.report_facts import Metric, costs, flatten, metric_list
from coterie.telemetry.report_parts import ReportTable

__all__ = [
    "ComparedMetric",
    "Cost",
    "RunComparison",
    "SettingDifference",
    "compare_kept",
    "comparison_tables",
]

_ALL_UNSET = "not set"

_OWN = ("name", "output")
"""Settings that say nothing about what a run learns."""


@dataclass(frozen=True)
class SettingDifference:
    """A setting that two runs have differently, in words; ``not set`` where a run has none."""

    key: str
    first: str
    second: str


@dataclass(frozen=True)
class ComparedMetric:
    """A metric of two runs: means over their seeds, and the difference.

    Attributes
    ----------
    metric : Metric
    first, second : Average
    difference : float or None
        Second minus first; None where a run has no value.
    paired : PairedDifference or None
        The same over the users that both runs measured, with its interval.
    """

    metric: Metric
    first: Average
    second: Average
    difference: float | None
    paired: PairedDifference | None = None


@dataclass(frozen=True)
class Cost:
    """What two runs cost, by one measure; None where a report does not say."""

    name: str
    unit: str
    first: float | None
    second: float | None


@dataclass(frozen=True)
class RunComparison:
    """Two finished runs beside each other.

    Attributes
    ----------
    first, second : KeptRun
    settings : tuple of SettingDifference
    metrics : tuple of ComparedMetric
    costs : tuple of Cost
    unpaired : str
        Why there are no intervals over users; empty where there are.
    notes : tuple of str
        What a reader should know of the reports.
    """

    first: KeptRun
    second: KeptRun
    settings: tuple[SettingDifference, ...]
    metrics: tuple[ComparedMetric, ...]
    costs: tuple[Cost, ...]
    unpaired: str
    notes: tuple[str, ...]


def compare_kept(first: KeptRun, second: KeptRun) -> RunComparison:
    """Compare two finished runs.

    Raises
    ------
    RunError
        A run has not finished, or its report cannot be read.
    DataError
        Figures of users that a run kept cannot be read.
    """
    ours, theirs = _report(first), _report(second)
    unpaired, paired = _paired(first, second, ours, theirs)
    found = []
    for one in metric_list([ours, theirs]):
        a, b = (report.metrics.get(one.key, Average()) for report in (ours, theirs))
        if a.mean is None and b.mean is None:
            continue
        difference = None if a.mean is None or b.mean is None else b.mean - a.mean
        found.append(ComparedMetric(one, a, b, difference, paired.get(one.key)))
    notes = [f"{one.run_id}: {one.note}" for one in (first, second) if one.note]
    if ours.dataset.name != theirs.dataset.name:
        notes.append(
            f"the runs are on other data sets, {ours.dataset.name} and {theirs.dataset.name}: "
            "their figures say nothing of each other"
        )
    return RunComparison(
        first, second, _settings(ours, theirs), tuple(found), _costs(ours, theirs), unpaired, tuple(notes)
    )


def _report(run: KeptRun) -> Report:
    if run.status != "finished" or run.report is None:
        raise RunError(
            f"run {run.run_id} has no figures to compare: it is {run.status}",
            hint="`coterie runs list` shows which runs have finished",
        )
    return run.report


def _settings(first: Report, second: Report) -> tuple[SettingDifference, ...]:
    ours, theirs = dict(flatten(first.settings)), dict(flatten(second.settings))
    found = []
    for key in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(key, _ALL_UNSET), theirs.get(key, _ALL_UNSET)
        if a != b and key not in _OWN:
            found.append(SettingDifference(key, a, b))
    return tuple(found)


def _costs(first: Report, second: Report) -> tuple[Cost, ...]:
    a, b = costs(first), costs(second)
    rows = (
        Cost("Messages", "bytes", a.bytes_total, b.bytes_total),
        Cost("Calls", "count", a.calls, b.calls),
        Cost("CPU time", "seconds", a.cpu_seconds, b.cpu_seconds),
        Cost("CPU time for security", "seconds", a.security_seconds, b.security_seconds),
        Cost("Duration", "seconds", first.duration_s, second.duration_s),
    )
    return tuple(row for row in rows if row.first is not None or row.second is not None)


# --- by users ----------------------------------------------------------------------------------------------------


def _paired(
    first: KeptRun, second: KeptRun, ours: Report, theirs: Report
) -> tuple[str, dict[str, PairedDifference]]:
    """Return why users are not compared, empty where they are, and the paired differences by metric."""
    if set(ours.seeds) != set(theirs.seeds):
        return f"other seeds: {_listed(ours.seeds)} and {_listed(theirs.seeds)}", {}
    splits = [_splits(report) for report in (ours, theirs)]
    for seed in ours.seeds:
        a, b = (one.get(seed, "") for one in splits)
        if not a or a != b:
            return f"other splits of the data for seed {seed}", {}
    figures = []
    for run, report in ((first, ours), (second, theirs)):
        kept = [_users(run, seed, several=len(report.seeds) > 1) for seed in ours.seeds]
        if not all(kept):
            return (
                f"run {run.run_id} kept no figures of its users (`federation.per_user_metrics = true` keeps them)",
                {},
            )
        figures.append([one or {} for one in kept])
    found = {}
    for key in figures[0][0]:
        by_run = [[one.get(key, {}) for one in run] for run in figures]
        users = sorted({user for run in by_run for one in run for user in one})
        arrays = [[np.array([one.get(user, np.nan) for user in users]) for one in run] for run in by_run]
        try:
            found[key] = paired_difference(arrays[1], arrays[0])
        except ValueError:
            # No user has this metric in both runs.
            continue
    return "" if found else "no metric that both runs measured of each user", found


def _splits(report: Report) -> Mapping[int, str]:
    if not report.per_seed:
        return dict.fromkeys(report.seeds, report.dataset.split_sha256)
    return {int(one.seed): one.split_sha256 for one in report.per_seed if one.seed is not None}


def _users(run: KeptRun, seed: int, *, several: bool) -> dict[str, dict[str, float]] | None:
    folder: Path = run.folder / f"seed-{seed}" if several else run.folder
    try:
        return read_users(folder)
    except DataError as error:
        raise DataError(
            error.message, hint=f"without {USERS} the runs are compared by their means"
        ) from error


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds)) or "none"


# --- as tables ---------------------------------------------------------------------------------------------------


def comparison_tables(found: RunComparison) -> list[ReportTable]:
    """Return a comparison as tables of texts, the first run's column before the second's."""
    tables = [_metrics_table(found), _costs_table(found)]
    if found.settings:
        rows = [[one.key, one.first, one.second] for one in found.settings]
        tables.append(ReportTable("Settings that differ", ["Setting", "A", "B"], rows, numeric=False))
    else:
        tables.append(
            ReportTable("Settings that differ", ["Setting", "A", "B"], [], "All settings are equal.")
        )
    return tables


def _metrics_table(found: RunComparison) -> ReportTable:
    paired = any(one.paired is not None for one in found.metrics)
    rows = []
    for one in found.metrics:
        lower = ", lower is better" if one.metric.lower_is_better else ""
        row = [
            one.metric.full_label + lower,
            _scored(one.first),
            _scored(one.second),
            signed(one.difference, 4),
        ]
        if paired:
            row.append(ABSENT if one.paired is None else _interval(one.paired))
        rows.append(row)
    columns = ["Metric", "A", "B", f"B {MINUS} A", *(["95% over users"] if paired else [])]
    if found.unpaired:
        note = f"No interval over users: {found.unpaired}."
    else:
        users = max((one.paired.users for one in found.metrics if one.paired is not None), default=0)
        note = f"Intervals are of the paired difference over {count(users)} users (bootstrap)."
    return ReportTable("Metrics", columns, rows, note)


def _scored(value: Average) -> str:
    return measure(value.mean) + ("" if value.std is None else f" ± {measure(value.std)}")


def _interval(one: PairedDifference) -> str:
    return f"{signed(one.low, 4)} to {signed(one.high, 4)}"


_UNITS = {"bytes": volume, "seconds": duration, "count": count}


def _costs_table(found: RunComparison) -> ReportTable:
    rows = []
    for one in found.costs:
        written = _UNITS[one.unit]
        ratio = ABSENT if not one.first or one.second is None else f"{one.second / one.first:.2f}"
        rows.append([one.name, written(one.first), written(one.second), ratio])
    return ReportTable("Costs", ["Cost", "A", "B", "B / A"], rows)
