"""The table of fold-in: users who never train beside trained users of the same run, for every system that serves them.

A part of the users is left out of a run whole, its validation items too.  Afterwards the model and their own training
items serve them.  A central model that learns from all users says how far the two groups differ in themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.evaluation.central import BiasedMf, Ease
from coterie.evaluation.selection import SelectedModel, lower_is_better
from coterie.evaluation.threads import one_thread
from coterie.studies.floors import fitted
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.tables.compare import fitting
from coterie.studies.tables.federated_rows import (
    federated_name,
    run_facts,
    score_of,
    settings_of,
)
from coterie.studies.tables.paper_table import PaperTable, PrintedTable, Results
from coterie.studies.tables.prepared_table import PreparedTable
from coterie.studies.tables.printed_tables import ABSENT, shown
from coterie.studies.tables.row import QUICK_PASSES, Options, Row, quick_note, with_options
from coterie.studies.tables.tasks import TASKS, ComparedTask
from coterie.studies.unseen_users import chosen_users, of_users, served
from coterie.systems.description import System
from coterie.systems.registry import check_folds_in, system_named, systems

__all__ = ["FEW", "FOLDED", "NAME", "SHARE", "UNSEEN", "few_items", "folded_tables"]

NAME = "fold-in"
"""Name of the table on the command line."""

SHARE = 0.3
"""Share of the users who never train."""

FEW = (5, 20)
"""Numbers of training items that users who never train bring at most, beside all of theirs."""

FOLDED, UNSEEN = "folded_", "unseen_"
"""Before a metric's name: trained users as if they had never trained, and users who never trained."""

_CENTRAL = "central"
"""Name of the row of a central model that learns from all users."""

_USERS_AT_ONCE = 256

Say = Callable[[str], None]


def few_items(most: int) -> str:
    """Return what stands before a metric's name for users who never trained and bring at most so many items."""
    return f"{UNSEEN}{most}_"


def folded_tables(
    given: Mapping[str, Any],
    names: Sequence[str] = (),
    *,
    quick: bool = False,
    say: Say = lambda _: None,
) -> list[PreparedTable]:
    """Return the tables of fold-in on a data set, one for each task.

    Parameters
    ----------
    given : mapping
        Nested values of a run's keys.
    names : sequence of str
        Systems; by default all that serve users who never took part and fit the data.
    quick : bool
        Whether rows train for a few passes.
    say : callable
        Receives a line about a system that is left out, with the reason.

    Raises
    ------
    ConfigError
        A system that is asked for is unknown, serves no such users or does not fit the data; or none has a row.
    """
    asked = [system_named(name) for name in dict.fromkeys(names)]
    for system in asked:
        check_folds_in(system.name)
    found = []
    for task in TASKS:
        chosen = [one for one in asked or systems().values() if one.folds_in and task.solved_by(one)]
        if chosen and (table := _table(task, chosen, given, quick=quick, strict=bool(asked), say=say)):
            found.append(table)
    if not found:
        raise ConfigError("no system serves new users on this data", hint="the lines above have the reasons")
    return found


def _table(
    task: ComparedTask,
    chosen: Sequence[System],
    given: Mapping[str, Any],
    *,
    quick: bool,
    strict: bool,
    say: Say,
) -> PreparedTable | None:
    rows: list[Row] = []
    first: RunSettings | None = None
    for system in chosen:
        try:
            own = settings_of(system, given, task)
            dataset, _ = fitting(task, load(own))
            make_feed(own, dataset, 0)
        except CoterieError as error:
            if strict:
                raise
            say(f"{system.title} is left out: {error}")
            continue
        first = first or own
        rows.append(_row(own, task, quick))
    if first is None:
        return None
    dataset, notes = fitting(task, load(first))
    if quick:
        notes.append(quick_note(QUICK_PASSES))
    return PreparedTable(_printable(task, (*rows, _everybody(task)), tuple(notes)), first, dataset)


def _row(own: RunSettings, task: ComparedTask, quick: bool) -> Row:
    options = {"rounds.passes": min(own.rounds.passes, QUICK_PASSES)} if quick else {}

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        run = with_options(own, options)
        mine = make_feed(run, feed.dataset, seed)
        unseen = chosen_users(mine, SHARE)
        facts: dict[str, Any] = {"system": run.system, "secure_sum": run.secure_sum}
        try:
            with one_thread():
                found = served(fitted(run, of_users(mine, ~unseen)), mine, seed, unseen, FEW)
        except RunError as error:
            return SelectedModel(({"step": 0, "metrics": {}},), 0, {}, facts={**facts, "failed": str(error)})
        groups = {"": (found.kept, ~unseen), FOLDED: (found.folded, ~unseen), UNSEEN: (found.folded, unseen)}
        groups |= {few_items(most): (table, unseen) for most, table in found.few.items()}
        counted = {"unseen": int(unseen.sum()), "trained": int((~unseen).sum())}
        return _measured(task, mine, groups, {**facts, **run_facts(run, found.made), **counted})

    return Row(federated_name(own.system), own.own.label(own), engine, options=options, defaults=True)


def _everybody(task: ComparedTask) -> Row:
    """Return the row of a central model that learns from all users: between its two groups lie users alone."""
    model = BiasedMf if task.ratings else Ease

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        fit = model.of(options, seed).fit(feed.training(ratings=task.ratings))
        users = np.arange(len(feed.dataset.users))
        table = np.zeros((len(users), len(feed.dataset.items)), np.float32)
        for some in np.array_split(users, -(-len(users) // _USERS_AT_ONCE)):
            table[some] = fit.score(some)
        unseen = chosen_users(feed, SHARE)
        return _measured(task, feed, {"": (table, ~unseen), UNSEEN: (table, unseen)}, {})

    return Row(_CENTRAL, f"{model.label}: all train", engine, options=model.defaults(), note=model.note)


def _measured(
    task: ComparedTask,
    feed: Feed,
    groups: Mapping[str, tuple[NDArray[np.float32], NDArray[np.bool_]]],
    facts: Mapping[str, Any],
) -> SelectedModel:
    """Return metrics of groups of users, each from a table of scores, under names that begin with the group's."""
    metrics: dict[str, float] = {}
    counted: dict[str, int] = {}
    for prefix, (table, users) in groups.items():
        values = task.per_user(feed, score_of(table))
        of_group = {name: np.where(users, value, np.nan) for name, value in values.items()}
        metrics |= {prefix + name: value for name, value in task.summed_up(of_group).items()}
        counted |= {prefix + name: int(np.isfinite(value).sum()) for name, value in of_group.items()}
    return SelectedModel(({"step": 0, "metrics": metrics},), 0, metrics, counted, facts=facts)


def _printable(task: ComparedTask, rows: tuple[Row, ...], notes: tuple[str, ...]) -> PaperTable:
    return PaperTable(
        name=f"{NAME}-{task.name}",
        title=f"{task.title}: users who never train",
        paper="",
        settings={},
        prepare=lambda settings, _: settings,
        rows=lambda: rows,
        sections=tuple(partial(_printed, task, metric, notes) for metric in list(task.columns)[:2]),
        headline=task.headline,
        choose_by=task.choose_by,
        verdict=lambda results: _verdict(task, results),
    )


def _printed(task: ComparedTask, metric: str, notes: Sequence[str], results: Results) -> PrintedTable:
    heading = task.columns[metric]
    lines = [
        (
            row.label,
            *(
                shown(results.values(row.name, prefix + metric))
                for prefix in ("", FOLDED, UNSEEN, *map(few_items, FEW))
            ),
            _signed(_differences(results, row.name, metric)),
            _signed(_beside_central(results, row.name, metric)),
        )
        for row in results.rows
    ]
    seeds = (
        "1 seed" if len(results.seeds) == 1 else f"means of {len(results.seeds)} seeds ±standard deviation"
    )
    facts = results.cells[results.rows[0].name][0].record["facts"]
    counted = [f"{facts['trained']} users train, {facts['unseen']} do not."] if "trained" in facts else []
    return PrintedTable(
        f"{task.title} for users who never train: {heading}, {results.dataset}, {seeds}",
        (
            "row",
            "trained",
            "trained,\nfolded in",
            "never trained,\nfolded in",
            *(f"by at most\n{most} items" for most in FEW),
            "never trained\nminus trained",
            "less that of the\ncentral model",
        ),
        tuple(lines),
        (
            _verdict(task, results)["text"],
            *counted,
            "The two groups are of different users. The central model learns from both: the last column takes "
            "its difference out.",
            *_unmeasured(results),
            *notes,
        ),
    )


def _unmeasured(results: Results) -> Iterator[str]:
    for row in results.rows:
        if why := results.failure(row.name):
            yield f"{row.label} has no figures: {why}."


def _differences(results: Results, row: str, metric: str) -> list[float]:
    """Return users who never trained minus trained users, one for each seed with figures."""
    pairs = zip(results.values(row, UNSEEN + metric), results.values(row, metric), strict=True)
    return [unseen - trained for unseen, trained in pairs]


def _beside_central(results: Results, row: str, metric: str) -> list[float]:
    """Return the differences less those of the central model; none for its own row."""
    own, other = (_differences(results, name, metric) for name in (row, _CENTRAL))
    if row == _CENTRAL or len(own) != len(other):
        return []
    return [one - both for one, both in zip(own, other, strict=True)]


def _signed(values: Sequence[float]) -> str:
    if not values:
        return ABSENT
    spread = f" ±{np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):+.4f}{spread}"


def _verdict(task: ComparedTask, results: Results) -> dict[str, Any]:
    """Return what new users lose in each row beside its trained users, JSON-ready, with a sentence about the most."""
    metric, worse = task.headline, 1 if lower_is_better(task.headline) else -1
    lost = {
        row.label: worse * float(np.mean(found))
        for row in results.rows
        if row.name != _CENTRAL and (found := _differences(results, row.name, metric))
    }
    if not lost:
        return {"row": None, "text": "No system has figures."}
    label = max(lost, key=lost.__getitem__)
    found = _differences(results, _CENTRAL, metric)
    both = worse * float(np.mean(found)) if found else None
    most = ", and no more with another system" if len(lost) > 1 else ""
    text = f"In {task.columns[metric]} users who never trained {_losing(lost[label])} trained ones with {label}{most}"
    if both is not None:
        text += f"; with the central model, for which all train, the same users {_losing(both)} the others"
    return {"row": label, "metric": metric, "lost": lost, "central": both, "text": f"{text}."}


def _losing(lost: float) -> str:
    return f"lose {lost:.4f} beside" if lost > 0 else f"are {-lost:.4f} better than"
