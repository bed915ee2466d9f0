"""The table of privacy: what noise of differential privacy costs a system in quality, by epsilon.

A row is the system with noise of one size in one place: at each user (local), where the server sees contributions of
single users in clear, or inside a masked sum (distributed).  One row has noise for each value, as published, and states
the epsilon that it really has for a user's whole data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.evaluation.selection import SelectedModel, lower_is_better
from coterie.evaluation.threads import one_thread
from coterie.studies.floors import fitted
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.tables.command import command_of
from coterie.studies.tables.compare import fitting
from coterie.studies.tables.federated_rows import PRIVATE_SUM, settings_of, trained
from coterie.studies.tables.paper_table import PaperTable, PrintedTable, Results
from coterie.studies.tables.prepared_table import PreparedTable, one_of_each_task, task_of
from coterie.studies.tables.printed_tables import ABSENT, shown
from coterie.studies.tables.row import Options, Row, with_options
from coterie.studies.tables.tasks import ComparedTask
from coterie.systems.description import System

__all__ = ["NAME", "NOISES", "TOLERATED", "noise_tables"]

NAME = "privacy"
"""Name of the table on the command line."""

NOISES = (0.05, 0.25, 1.0, 4.0, 16.0)
"""Noise of the rows in each place, in multiples of the clip."""

TOLERATED = 0.05
"""By what part of the figure without noise a row may be worse, for the sentence below the table."""

_QUICK_NOISES = (1.0,)
_PASSES, _QUICK_PASSES = 10, 2
_CLIP = 1.0
_EXACT, _PER_VALUE = "exact", "per-value"
_PUBLISHED = {"mechanism": "laplace", "clip": 0.1, "noise": 2.0, "per_value": True}
"""Noise of Wu et al., 2021: values clipped at 0.1, Laplace noise of scale 0.2 on each."""

_OF_ROWS = ("place", "noise", "mechanism", "per_value")
"""Keys of `rounds.privacy` that differ between rows."""

_OF_SUMS = ("colluders",)
"""Keys of `rounds.privacy` that noise inside a sum alone has."""

_PRIVACY = "rounds.privacy."

Say = Callable[[str], None]


def noise_tables(
    given: Mapping[str, Any],
    names: Sequence[str] = (),
    *,
    quick: bool = False,
    say: Say = lambda _: None,
) -> list[PreparedTable]:
    """Return the tables of privacy on a data set, one for each system.

    Parameters
    ----------
    given : mapping
        Nested values of a run's keys.  Of ``rounds.privacy`` the bounds are those of all rows; ``rounds.passes`` is the
        number of passes instead of 10, after which rows are measured once unless ``rounds.evaluate_every`` is given.
    names : sequence of str
        Systems; by default one that predicts ratings and one that ranks, of those that fit the data.
    quick : bool
        Whether rows have one size of noise, and train for two passes.
    say : callable
        Receives a line about a system that is left out, with the reason.

    Raises
    ------
    ConfigError
        A system that is asked for is unknown, adds no noise or does not fit the data; or none has a table.
    """
    return one_of_each_task(
        names, lambda system: _table_of(system, given, quick), say, "no system adds noise on this data"
    )


def _table_of(system: System, given: Mapping[str, Any], quick: bool) -> PreparedTable:
    task = task_of(system, NAME)
    rounds = dict(given.get("rounds", {}))
    bounds = {"clip": _CLIP, **rounds.pop("privacy", {})}
    if set_ := [name for name in _OF_ROWS if name in bounds]:
        raise ConfigError(
            f"rounds.privacy.{set_[0]} {bounds[set_[0]]!r}: rows have noise of their own; expected none"
        )
    passes = _QUICK_PASSES if quick else rounds.get("passes", _PASSES)
    # Once, at the end: metrics cost privacy as well.  Nor does their noise end a run.
    usual = {"evaluate_every": passes, "patience": 0, **rounds, "passes": passes}
    own = settings_of(system, {**given, "rounds": usual}, task)
    dataset, notes = fitting(task, load(own))
    feed = make_feed(own, dataset, 0)
    rows = tuple(_rows(own, task, bounds, _QUICK_NOISES if quick else NOISES))
    if own.rounds.choose_by != task.choose_by:
        notes.append(f"Versions are chosen by {own.rounds.choose_by}.")
    notes.append(f"Rows train for at most {passes} passes.")
    delta = bounds.get("delta", own.rounds.privacy.delta)
    users = int(np.count_nonzero(feed.host >= 0))
    return PreparedTable(_table(system, task, rows, users, delta, tuple(notes), given), own, dataset)


def _rows(
    own: RunSettings, task: ComparedTask, bounds: Mapping[str, Any], noises: Sequence[float]
) -> Iterator[Row]:
    """Yield the rows: exact sums, noise of every size inside the sum and at each user, and noise for each value."""
    hidden = PRIVATE_SUM if own.secure_sum == "clear" else own.secure_sum
    inside = {"secure_sum": hidden}
    apart = {name: value for name, value in bounds.items() if name not in _OF_SUMS}
    alone = {"secure_sum": "clear", "rounds.party_per_user": True}
    engine = partial(_trained, own, task)
    yield Row(_EXACT, "no noise", engine, options={"secure_sum": own.secure_sum})
    for place, words, kind, own_bounds in (
        ("distributed", "inside the sum", inside, bounds),
        ("local", "at each user", alone, apart),
    ):
        for noise in noises:
            private = {**own_bounds, "place": place, "noise": noise}
            options = {**kind, **{_PRIVACY + name: value for name, value in private.items()}}
            # Refused here by a system that adds no noise, and not once rows are trained.
            with_options(own, options)
            yield Row(f"{place}-{noise:g}", words, engine, options=options)
    private = {**apart, **_PUBLISHED, "place": "local"}
    options = {**alone, **{_PRIVACY + name: value for name, value in private.items()}}
    yield Row(_PER_VALUE, "at each value, as published", engine, options=options)


def _trained(
    own: RunSettings, task: ComparedTask, settings: RunSettings, options: Options, feed: Feed, seed: int
) -> SelectedModel:
    """Train a run with a row's noise; noise that has no room in codes is a failure of this row alone."""
    run = with_options(own, options)
    mine = make_feed(run, feed.dataset, seed)
    try:
        with one_thread():
            # Not the version that is chosen by metrics, which have noise: that would be a figure of chance.
            found = trained(fitted(run, mine), mine, seed, task, last=True)
    except ConfigError as error:
        return SelectedModel(({"step": 0, "metrics": {}},), 0, {}, facts={"failed": str(error)})
    epsilon = found.facts.get("epsilon")
    return (
        found
        if epsilon is None
        else dataclasses.replace(found, metrics={**found.metrics, "epsilon": epsilon})
    )


# --- printing ----------------------------------------------------------------------------------------------------


def _table(
    system: System,
    task: ComparedTask,
    rows: tuple[Row, ...],
    users: int,
    delta: float,
    notes: tuple[str, ...],
    given: Mapping[str, Any],
) -> PaperTable:
    return PaperTable(
        name=f"{NAME}-{system.name}",
        title=f"Privacy of {system.title}",
        paper="",
        settings={},
        prepare=lambda settings, _: settings,
        rows=lambda: rows,
        sections=(
            lambda results: _printed(
                system,
                task,
                users,
                delta,
                (*notes, command_of(NAME, system.name, rows, given, results)),
                results,
            ),
        ),
        headline=task.headline,
        choose_by=task.choose_by,
        verdict=lambda results: _verdict(task, results),
    )


def _printed(
    system: System, task: ComparedTask, users: int, delta: float, notes: Sequence[str], results: Results
) -> PrintedTable:
    heading = task.columns[task.headline]
    lines = []
    for row in results.rows:
        noise, epsilon = row.options.get(f"{_PRIVACY}noise"), results.values(row.name, "epsilon")
        failed = bool(results.failure(row.name))
        lines.append(
            (
                row.label,
                ABSENT if noise is None else f"{noise:g}",
                _text(epsilon),
                *(
                    "failed" if failed else shown(results.values(row.name, metric))
                    for metric in (task.choose_by, task.headline)
                ),
            )
        )
    seeds = "1 seed" if len(results.seeds) == 1 else f"means of {len(results.seeds)} seeds"
    why = dict.fromkeys(filter(None, (results.failure(row.name) for row in results.rows)))
    return PrintedTable(
        f"Privacy of {system.title}, {results.dataset}, {users:,} users, {seeds}",
        ("noise", "in multiples\nof the clip", "epsilon", f"{heading},\nvalidation", f"{heading},\ntest"),
        tuple(lines),
        (
            _verdict(task, results)["text"],
            f"Epsilon at delta {delta:g} is that of the user with most sums, for all of a user's data. Noise at each "
            "user: the server has every user's contribution in clear. Noise inside the sum: it has the sum alone.",
            *_misled(results),
            *(f"Failed: {one}." for one in why),
            *notes,
        ),
    )


def _misled(results: Results) -> Iterator[str]:
    """Yield a line about the rows whose runs would have chosen another version than the last by metrics with noise."""
    rows = [
        row.name
        for row in results.rows
        if any(
            cell.record["facts"].get("chosen", cell.record["step"]) != cell.record["step"]
            for cell in results.cells[row.name]
        )
    ]
    if rows:
        yield f"Metrics with noise chose another version than the last: {', '.join(rows)}."


def _text(epsilon: Sequence[float]) -> str:
    """Return the mean of epsilon over the seeds as text."""
    mean = float(np.mean(epsilon)) if epsilon else 0.0
    return f"{mean:,.{0 if mean >= 100 else 1 if mean >= 10 else 2}f}" if epsilon else ABSENT


def _verdict(task: ComparedTask, results: Results) -> dict[str, Any]:
    """Return by how much noise makes each row worse, JSON-ready, with a sentence about the strictest good ones.

    A row is good if its validation figure is worse by at most `TOLERATED` of that without noise.
    """
    found: dict[str, dict[str, float]] = {}
    best: dict[str, tuple[float, str]] = {}
    for row in results.rows:
        place, epsilon = row.options.get(f"{_PRIVACY}place"), results.values(row.name, "epsilon")
        costs = [_worse(task, results, row.name, metric) for metric in (task.headline, task.choose_by)]
        if place is None or not epsilon or costs[0] is None or costs[1] is None:
            continue
        mean = float(np.mean(epsilon))
        found[row.name] = {"epsilon": mean, "cost": costs[0], "validation_cost": costs[1]}
        if costs[1] <= TOLERATED and row.name != _PER_VALUE:
            best[place] = min(best.get(place, (mean, row.name)), (mean, row.name))
    words = {"distributed": "inside the sum", "local": "at each user"}
    said = [
        f"{words[place]} {_text([best[place][0]])}" if place in best else f"{words[place]} none"
        for place in words
        # Nothing is said of a place without a row.
        if any(name.startswith(place) for name in found)
    ]
    text = (
        f"Least epsilon whose validation figure is at most {TOLERATED:.0%} worse than without noise: "
        f"{', '.join(said)}."
        if found
        else "Without figures of exact sums and of noise there is nothing to compare."
    )
    return {"costs": found, "best": {place: name for place, (_, name) in best.items()}, "text": text}


def _worse(task: ComparedTask, results: Results, row: str, metric: str) -> float | None:
    """Return by what part of its value a metric is worse than without noise; None where either has no figure."""
    base, value = results.values(_EXACT, metric), results.values(row, metric)
    if not base or not value:
        return None
    part = float(np.mean(value)) / max(float(np.mean(base)), 1e-12) - 1
    return part if lower_is_better(metric) else -part
