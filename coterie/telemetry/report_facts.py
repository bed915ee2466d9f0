"""Facts derived from a report (metrics, rows, costs), for the HTML page and for the terminal.

Every part of a report is optional: absent parts are empty here, and unknown numbers are None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from coterie.telemetry.accounting import SECURITY
from coterie.telemetry.quantities import count, measure
from coterie.telemetry.report import AttackFigures, Average, EvaluationPart, ReferenceRow, Report

__all__ = [
    "Costs",
    "Metric",
    "ResultRow",
    "Score",
    "costs",
    "epoch_positions",
    "flatten",
    "headline",
    "leading_metric",
    "metric",
    "metric_list",
    "metrics",
    "restarted_note",
    "row_label",
    "rows",
    "run_label",
    "summary",
    "taught",
    "verdict",
]

_ROWS = {
    "als": ("ALS", "alternating least squares with all data in one place"),
    "means": (
        "Item and user mean",
        "mean of the item, drawn towards that of all, and what the user gives more or less",
    ),
    "item_mean": ("Item mean", "items by mean rating, drawn towards that of all"),
    "popularity": ("Popularity", "items by number of interactions"),
    "positive_share": ("Positive share", "items by share of positives"),
    "random": ("Random order", "no learning"),
}
"""Labels and notes of the reference rows that any system may have; other rows carry their own."""
_RANKED = {
    "ndcg": "NDCG",
    "map": "MAP",
    "hit_ratio": "Hit ratio",
    "precision": "Precision",
    "recall": "Recall",
    "f1": "F1",
    "ndcg_printed": "NDCG",
}
_ERRORS = {"rmse": "RMSE", "mae": "MAE"}
_SUFFIXES = {"ndcg_printed": " as printed"}
_ORDER = {stem: place for place, stem in enumerate([*_RANKED, *_ERRORS])}
_VALIDATION = "validation_"
_TRAINING = "train_"
_HEADLINE_AT_MOST = 6
_HEADLINE = ("ndcg", "map", *_ERRORS)
_EVERYTHING = "_all"
"""Suffix of keys for a ranking of all unseen items, where keys without it are of a ranking of sampled items."""
_RATED = "_rated"
"""Suffix of keys for a ranking of the user's own rated test items."""
_POPULATIONS = {
    name: place
    for place, name in enumerate(
        ("rated test items", "sampled items", "all unseen items", "new items", "test items")
    )
}


@dataclass(frozen=True)
class Metric:
    """One metric of a report.

    Attributes
    ----------
    key : str
        Key in the report, such as ``ndcg_test_items@10``.
    label : str
        Name for a reader, such as ``NDCG@10``.
    population : str
        The items that are ranked; empty for a metric without a ranking.
    on_validation : bool
        Whether the metric was measured on the validation part, which chooses among versions.
    lower_is_better : bool
        Whether a smaller value is better (losses and errors).
    """

    key: str
    label: str
    population: str
    lower_is_better: bool
    on_validation: bool = False

    @property
    def is_loss(self) -> bool:
        """Whether the metric is a loss, which is drawn with the training loss and not by itself."""
        return self.key.endswith("_loss")

    @property
    def full_label(self) -> str:
        """Name, population and part of the data, in one line."""
        part = "on validation data" if self.on_validation and self.population != "validation items" else ""
        parts = (self.label, self.population, part)
        return ", ".join(text for text in parts if text)


@dataclass(frozen=True)
class Score:
    """A metric of one system: mean and standard deviation over the seeds, None where not measured."""

    mean: float | None
    std: float | None
    best: bool

    @property
    def mean_text(self) -> str:
        """The mean as text."""
        return measure(self.mean)

    @property
    def spread_text(self) -> str:
        """The standard deviation as text; empty when there is none."""
        return "" if self.mean is None or self.std is None else f"± {measure(self.std)}"


@dataclass(frozen=True)
class ResultRow:
    """One line of the result table: the run or a reference row, with scores in the order of the asked metrics."""

    name: str
    label: str
    note: str
    scores: tuple[Score, ...]
    is_run: bool


@dataclass(frozen=True)
class Costs:
    """Total costs of a run over all services and RPCs; None where the report has no account."""

    calls: int | None
    errors: int | None
    bytes_out: float | None
    bytes_in: float | None
    cpu_seconds: float | None
    security_seconds: float | None
    protections: Mapping[str, float]
    """CPU seconds by protection, in the order of `SECURITY`; protections without any are left out."""

    @property
    def bytes_total(self) -> float | None:
        """Message bytes in both directions."""
        if self.bytes_out is None or self.bytes_in is None:
            return None
        return self.bytes_out + self.bytes_in

    @property
    def security_share(self) -> float | None:
        """Share of the CPU time spent on protecting data."""
        if not self.cpu_seconds or self.security_seconds is None:
            return None
        return self.security_seconds / self.cpu_seconds

    @property
    def protection_shares(self) -> dict[str, float]:
        """Share of the CPU time spent on each protection."""
        total = self.cpu_seconds
        return {name: seconds / total for name, seconds in self.protections.items()} if total else {}


def run_label(report: Report, otherwise: str = "this run") -> str:
    """Return the run's label, which names the trained model as its paper does; without one, the system's name."""
    return report.label or report.system or otherwise


def row_label(report: Report, name: str) -> str:
    """Return the label of a reference row; the key itself when there is no label."""
    return _of_row(report, name)[0]


def _of_row(report: Report, name: str) -> tuple[str, str]:
    """Return label and note of a reference row."""
    label, note = _ROWS.get(name, (name, ""))
    own = report.reference.get(name, ReferenceRow())
    return own.label or label, own.note or note


def taught(report: Report) -> tuple[str, Sequence[EvaluationPart]]:
    """Return the first reference row that learned and its evaluations; else the first row's name and no evaluations."""
    for name, reference in _references(report):
        if reference.history:
            return name, reference.history
    return next((name for name, _ in _references(report)), ""), ()


def metric(key: str, *, sampled: bool = False, new_items: bool = False) -> Metric:
    """Return the metric that a key of the report stands for.

    Parameters
    ----------
    key : str
    sampled : bool
        Whether keys without ``_all`` are of a ranking of sampled items, as with one held-out item.
    new_items : bool
        Whether whole items were held out, so that only these are ranked in place of all unseen items.

    >>> metric("ndcg_test_items@10").full_label
    'NDCG@10, test items'
    """
    base, at, cutoff = key.partition("@")
    stem, validation = _stem(key), key.startswith(_VALIDATION)
    if base.endswith("_loss"):
        label = base.replace("_", " ").capitalize()
        return Metric(key, label, "", lower_is_better=True, on_validation=validation)
    name = (_RANKED | _ERRORS).get(stem, stem.replace("_", " "))
    label = f"{name}{at}{cutoff}{_SUFFIXES.get(stem, '')}"
    population = ""
    if base.startswith(_TRAINING):
        population = "training items"
    elif base.endswith("_items") and stem != base:
        population = "validation items" if validation else "test items"
    elif base.endswith(_RATED):
        population = "rated validation items" if validation else "rated test items"
    elif stem in _RANKED:
        everything = "new items" if new_items else "all unseen items"
        population = "sampled items" if sampled and not base.endswith(_EVERYTHING) else everything
    return Metric(key, label, population, lower_is_better=stem in _ERRORS, on_validation=validation)


def metrics(report: Report) -> list[Metric]:
    """Return the metrics of the run and its reference rows: ordered by population, then losses, validation last."""
    keys = list(report.metrics)
    for _, reference in _references(report):
        keys += [key for key in reference.metrics if key not in keys]
    return _in_order(keys, [report])


def metric_list(reports: Sequence[Report]) -> list[Metric]:
    """Return the metrics of several runs without their reference rows, in the order of `metrics`."""
    return _in_order(list(dict.fromkeys(key for report in reports for key in report.metrics)), reports)


def _in_order(keys: Sequence[str], reports: Sequence[Report]) -> list[Metric]:
    sampled = any(f"{_EVERYTHING}@" in key for key in keys)
    splits = [report.settings.get("split") for report in reports]
    new_items = any(isinstance(split, Mapping) and split.get("kind") == "cold-items" for split in splits)
    found = [metric(key, sampled=sampled, new_items=new_items) for key in keys]

    def order(one: Metric) -> tuple[bool, bool, int, int]:
        place = _ORDER.get(_stem(one.key), len(_ORDER))
        return one.on_validation, one.is_loss, _POPULATIONS.get(one.population, len(_POPULATIONS) - 1), place

    return sorted(found, key=order)


def headline(report: Report) -> list[Metric]:
    """Return the metrics of the first table: all if there are at most six, else NDCG, MAP, errors and losses.

    Metrics on validation data serve to choose versions and are never among them.
    """
    found = [one for one in metrics(report) if not one.on_validation]
    if len(found) <= _HEADLINE_AT_MOST:
        return found
    chosen = [one for one in found if one.is_loss or _stem(one.key) in _HEADLINE]
    return chosen or found[:_HEADLINE_AT_MOST]


def _stem(key: str) -> str:
    base = key.partition("@")[0].removeprefix(_TRAINING)
    if base.startswith(_VALIDATION):
        base = base.removeprefix(_VALIDATION).removesuffix("_items")
    return base.removesuffix("_test_items").removesuffix(_EVERYTHING).removesuffix(_RATED)


def leading_metric(report: Report) -> Metric | None:
    """Return the one metric that represents the run; None without any.

    It is the hit ratio among sampled items if one item is held out, else the first NDCG, else the first metric.
    """
    found = [one for one in metrics(report) if not one.is_loss and not one.on_validation]
    if found and found[0].population == "sampled items":
        return next((one for one in found if one.key.startswith("hit_ratio@")), found[0])
    return next((one for one in found if one.key.startswith("ndcg@")), found[0] if found else None)


def verdict(report: Report) -> str:
    """Return how the run does against its best reference row, by the leading metric, in words; empty without either."""
    leading = leading_metric(report)
    if leading is None:
        return ""
    known = [(row, mean) for row in rows(report, [leading]) if (mean := row.scores[0].mean) is not None]
    ours = next((mean for row, mean in known if row.is_run), None)
    others = [(mean, row.label) for row, mean in known if not row.is_run]
    if ours is None or not others:
        return ""
    best, label = (min if leading.lower_is_better else max)(others, key=lambda one: one[0])
    behind = ours > best if leading.lower_is_better else ours < best
    place = "equal to" if measure(ours) == measure(best) else "behind" if behind else "ahead of"
    words = (
        f"{place} {label}, the best baseline, in {leading.full_label}: {measure(ours)} and {measure(best)}"
    )
    return words + _in_users(report, leading, ours - best)


def _in_users(report: Report, leading: Metric, difference: float) -> str:
    """Return how many users a difference in hit ratio is, in words; empty for other metrics and several seeds."""
    users = report.history[-1].users if report.history else 0
    if not users or len(report.seeds) > 1 or not leading.key.startswith("hit_ratio"):
        return ""
    return f", a difference of {round(abs(difference) * users)} of {count(users)} users"


def summary(report: Report) -> list[str]:
    """Return what came of a run, a sentence each: its quality beside others', and what attacks found.

    Attacks are represented by the one whose AUC is furthest above that of popularity; that of the second federation
    (``beside``) stands beside it.
    """
    label = run_label(report)
    found = [f"{label} is {words}."] if (words := verdict(report)) else []
    second = report.beside
    what = "" if second is None else second.label or ", ".join(second.changes)
    if second is not None and second.failed:
        found.append(f"Beside it, {what}: no result, as it failed ({second.failed}).")
    attack = _furthest(report.attacks)
    if attack is None:
        return found
    words = (
        "From what the server received, the best attack tells a user's items from others with an AUC of "
        f"{measure(attack.reached)}, popularity alone with {measure(attack.popularity_auc)}"
    )
    found.append(words + ".")
    if second is not None and (other := _furthest(second.attacks)) is not None:
        found.append(f"Beside it, {what}: an AUC of {measure(other.reached)}.")
    return found


def restarted_note(report: Report) -> str:
    """Return what figures of costs lack of processes that were started again; empty where there was none."""
    again = sorted(report.restarted)
    return f"; of {', '.join(again)} only since the last start" if again else ""


def _furthest(attacks: Mapping[str, AttackFigures]) -> AttackFigures | None:
    """Return the attack whose AUC is furthest above that of popularity; None where no AUC is known."""
    known = [(gained, one) for one in attacks.values() if (gained := one.gained) is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def rows(report: Report, columns: Sequence[Metric]) -> list[ResultRow]:
    """Return the lines of the result table: the run, then its reference rows, without lines that have no score.

    The best score of each metric is marked if at least two lines have one; scores that are equal at the digits shown
    count as equal.
    """
    tables = {"": report.metrics, **{name: row.metrics for name, row in _references(report)}}
    best = {column.key: _best(column, list(tables.values())) for column in columns}

    def score(column: Metric, values: Mapping[str, Average]) -> Score:
        known = values.get(column.key, Average())
        best_here = known.mean is not None and measure(known.mean) == best[column.key]
        return Score(known.mean, known.std, best=best_here)

    found = []
    for name, values in tables.items():
        scores = tuple(score(column, values) for column in columns)
        if all(one.mean is None for one in scores):
            continue
        label, note = _of_row(report, name) if name else (run_label(report), report.form)
        found.append(ResultRow(name, label, note, scores, is_run=not name))
    return found


def costs(report: Report) -> Costs:
    """Return the total traffic and CPU time of a run."""
    traffic, services = report.traffic.values(), report.cpu_seconds.values()
    protections = dict.fromkeys(SECURITY.values(), 0.0)
    for row in services:
        for activity, protection in SECURITY.items():
            protections[protection] += row.activities.get(activity) or 0.0
    calls, errors = _sum(row.calls for row in traffic), _sum(row.errors for row in traffic)
    return Costs(
        calls=None if calls is None else round(calls),
        errors=None if errors is None else round(errors),
        bytes_out=_sum(row.bytes_out for row in traffic),
        bytes_in=_sum(row.bytes_in for row in traffic),
        cpu_seconds=_sum(row.total for row in services),
        security_seconds=_sum(row.security for row in services),
        protections={name: seconds for name, seconds in protections.items() if seconds},
    )


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None when none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def epoch_positions(history: Sequence[EvaluationPart]) -> list[tuple[float, EvaluationPart]]:
    """Return evaluations with their positions on an axis of epochs, for plots.

    The last evaluation of epoch e is at e.  Earlier ones of the same epoch are between e - 1 and e, at the share of
    the epoch's model versions that were made by then, or evenly spaced if versions are not known.

    Returns
    -------
    list of (float, Evaluation)
        In order of epoch and version; entries without an epoch are left out.
    """

    def order(entry: EvaluationPart) -> tuple[float, float]:
        return entry.epoch or 0.0, entry.version or 0.0

    known = sorted((entry for entry in history if entry.epoch is not None), key=order)
    placed: list[tuple[float, EvaluationPart]] = []
    begun = 0.0
    for epoch, group in groupby(known, key=lambda entry: order(entry)[0]):
        members = list(group)
        ended = order(members[-1])[1]
        for position, entry in enumerate(members, start=1):
            done = position / len(members)
            if ended > begun:
                done = min(1.0, max(0.0, (order(entry)[1] - begun) / (ended - begun)))
            placed.append((max(0.0, epoch - 1 + done), entry))
        begun = max(begun, ended)
    return placed


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as pairs of dotted key and value in words."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        else:
            yield name, _written(value)


def _written(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_written(one) for one in value) or "none"
    if isinstance(value, str) and re.fullmatch(r"\s*", value):
        return "empty"
    return str(value)


def _references(report: Report) -> list[tuple[str, ReferenceRow]]:
    found = report.reference
    order = [*(name for name in found if name not in _ROWS), *(name for name in _ROWS if name in found)]
    return [(name, found[name]) for name in order]


def _best(column: Metric, tables: Sequence[Mapping[str, Average]]) -> str | None:
    means = [mean for values in tables if (mean := values.get(column.key, Average()).mean) is not None]
    if len(means) < 2:
        return None
    return measure(min(means) if column.lower_is_better else max(means))
