"""The table of poisoning: what users who lie do to a system under each rule of aggregation.

A row is a rule with an attack.  Figures are of the honest users alone; the version is chosen by the validation metric
of all users, because a server does not know who lies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.evaluation.central import ScoreItems
from coterie.evaluation.holdout import TRAIN
from coterie.evaluation.selection import SelectedModel, lower_is_better
from coterie.evaluation.threads import one_thread
from coterie.rounds.sides import HostSide
from coterie.secure_sum.aggregation import Aggregation, check_aggregation
from coterie.studies.in_process import HostMaker
from coterie.studies.poisoning import (
    POISONINGS,
    NormRecorder,
    Poisoning,
    chosen_liars,
    poisoned_host,
    pushed_item,
)
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.tables.compare import fitting
from coterie.studies.tables.federated_rows import settings_of, trained
from coterie.studies.tables.paper_table import PaperTable, PrintedTable, Results
from coterie.studies.tables.prepared_table import PreparedTable, one_of_each_task, task_of
from coterie.studies.tables.printed_tables import ABSENT
from coterie.studies.tables.row import Options, Row, with_options
from coterie.studies.tables.tasks import ComparedTask
from coterie.systems.description import System
from coterie.systems.registry import ratings_of
from coterie.systems.shared.host_data import HostData

__all__ = ["LIARS", "NAME", "poisoned_tables"]

NAME = "poisoning"
"""Name of the table on the command line."""

LIARS = 0.1
"""Share of users who lie."""

_ASSUMED = 0.2
"""Share of liars that rules assume: twice the true one, which nobody knows."""

_PASSES, _QUICK_PASSES = 20, 6
_QUICK_RULES = ("sum", "bounded", "median", "distance", "norm-bound")
_QUICK_ATTACKS = ("none", "label-flip", "boosted", "sybils", "zeros")
_TOP = 10

_FAILED = "failed"
"""Cell of a row whose run ended without a model: no figure says how bad that is."""

_BOUNDED = "bounded"
"""Row whose hosts bound norms, and whose server adds."""

_LABELS = {
    "sum": "sum",
    _BOUNDED: "sum, norm bound at the hosts",
    "median": "median",
    "trimmed-mean": "trimmed mean",
    "krum": "Krum",
    "distance": "distance",
    "spectral": "spectral",
    "norm-bound": "norm bound at the server",
}

Say = Callable[[str], None]
Values = dict[str, NDArray[np.float64]]


def poisoned_tables(
    given: Mapping[str, Any],
    names: Sequence[str] = (),
    *,
    quick: bool = False,
    say: Say = lambda _: None,
) -> list[PreparedTable]:
    """Return the tables of poisoning on a data set, one for each system.

    Parameters
    ----------
    given : mapping
        Nested values of a run's keys.  ``rounds.aggregation.norm_bound`` is the bound of norms instead of the median of
        users' norms in a first round without liars; ``rounds.aggregation.byzantine`` is what rules assume instead of
        0.2, and ``rounds.passes`` the passes instead of 20.
    names : sequence of str
        Systems; by default one that predicts ratings and one that ranks, of those that fit the data.
    quick : bool
        Whether rows have the main rules and attacks only, and train for a few passes.
    say : callable
        Receives a line about a system that is left out, with the reason.

    Raises
    ------
    ConfigError
        A system that is asked for is unknown, bounds no norms or does not fit the data; or none has a table.
    """
    return one_of_each_task(
        names, lambda system: _poisoned(system, given, quick), say, "no system can be poisoned on this data"
    )


def _poisoned(system: System, given: Mapping[str, Any], quick: bool) -> PreparedTable:
    task = task_of(system, NAME)
    rounds = given.get("rounds", {})
    terms = rounds.get("aggregation", {})
    if "rule" in terms:
        raise ConfigError(
            f"rounds.aggregation.rule {terms['rule']!r}: rows have rules of their own; expected none"
        )
    byzantine = terms.get("byzantine", _ASSUMED)
    bound = terms.get("norm_bound", 0.0)
    check_aggregation(Aggregation("sum", byzantine, bound), "clear")
    passes = _QUICK_PASSES if quick else rounds.get("passes", _PASSES)
    # One host, whose liars know each other; each user is a member of its own.
    federation = {**given.get("federation", {}), "hosts": 1}
    usual = {**rounds, "party_per_user": True, "passes": passes, "aggregation": {"byzantine": byzantine}}
    # Rules need single contributions, which a server has in clear only.
    own = settings_of(
        system, {**given, "secure_sum": "clear", "rounds": usual, "federation": federation}, task
    )
    # Refused here by a system whose hosts bound no norms, and not once rows are trained.
    with_options(own, {"rounds.aggregation.norm_bound": bound or 1.0})
    dataset, notes = fitting(task, load(own))
    pushed_item(make_feed(own, dataset, 0))
    if own.rounds.choose_by != task.choose_by:
        notes.append(f"Versions are chosen by {own.rounds.choose_by}.")
    notes.append(f"Rows train for at most {passes} passes.")
    rules = _QUICK_RULES if quick else tuple(_LABELS)
    attacks = _QUICK_ATTACKS if quick else tuple(POISONINGS)
    study = _Study(own, task, bound)
    rows = tuple(study.row(rule, POISONINGS[attack]) for rule in rules for attack in attacks)
    return PreparedTable(_table(system, task, rows, byzantine, tuple(notes)), own, dataset)


# --- rows --------------------------------------------------------------------------------------------------------


class _Study:
    """Makes the rows of one system's table, which share the bound of norms of each seed."""

    def __init__(self, own: RunSettings, task: ComparedTask, bound: float) -> None:
        self._own = own
        self._task = task
        self._bound = bound
        self._bounds: dict[int, float] = {}

    def row(self, rule: str, attack: Poisoning) -> Row:
        """Return the row of a rule with an attack."""
        return Row(
            f"{rule}-{attack.name}",
            f"{_LABELS[rule]}, {attack.title}",
            partial(self._trained, rule, attack),
            options={"rule": rule, "attack": attack.name, "rounds.passes": self._own.rounds.passes},
        )

    def _trained(
        self,
        rule: str,
        attack: Poisoning,
        settings: RunSettings,
        options: Options,
        feed: Feed,
        seed: int,
    ) -> SelectedModel:
        mine = make_feed(self._own, feed.dataset, seed)
        liars, target = chosen_liars(mine, LIARS, seed), pushed_item(mine)
        changes: dict[str, Any] = {"rounds.aggregation.rule": "sum" if rule == _BOUNDED else rule}
        bound = 0.0
        if rule in (_BOUNDED, "norm-bound"):
            bound = self._bound_of(mine, seed)
            changes["rounds.aggregation.norm_bound"] = bound
        run = with_options(self._own, changes)
        ratings = ratings_of(run.system, run.own.for_plan(run, mine.attribute_names))
        make_host = _hosts_of(attack, mine, liars, target, ratings, seed)
        with one_thread():
            found = trained(run, mine, seed, _of_honest(self._task, liars, target), make_host)
        facts = {"liars": int(liars.sum()), "pushed": mine.dataset.items[target]}
        return dataclasses.replace(
            found, facts={**found.facts, **facts, **({"norm_bound": bound} if bound else {})}
        )

    def _bound_of(self, feed: Feed, seed: int) -> float:
        """Return the given bound, or the median of users' norms in a first round without liars."""
        if self._bound:
            return self._bound
        if seed not in self._bounds:
            norms: list[float] = []
            first = with_options(self._own, {"rounds.passes": 1, "rounds.evaluate_every": 1})
            with one_thread():
                trained(first, feed, seed, self._task, lambda _, data, make: NormRecorder(make(data), norms))
            if not norms:
                raise ConfigError("no user contributed to a first round, so that there is no usual norm")
            self._bounds[seed] = float(np.median(norms))
        return self._bounds[seed]


def _hosts_of(
    attack: Poisoning,
    feed: Feed,
    liars: NDArray[np.bool_],
    target: int,
    ratings: tuple[float, float] | None,
    seed: int,
) -> HostMaker:
    """Return the function that makes hosts with the liars among their users."""

    def made(number: int, data: HostData, make: Callable[[HostData], HostSide]) -> HostSide:
        # Users of a host are in the order of the data set.
        users = np.unique(feed.dataset.user[feed.host[feed.dataset.user] == number])
        return poisoned_host(attack, liars[users], target, ratings, seed, data, make)

    return made


def _of_honest(task: ComparedTask, liars: NDArray[np.bool_], target: int) -> ComparedTask:
    """Return a task that measures honest users only, and whether the pushed item is among their best ten."""

    def per_user(feed: Feed, score: ScoreItems) -> Values:
        values = {name: np.where(liars, np.nan, value) for name, value in task.per_user(feed, score).items()}
        return {**values, "pushed": np.where(liars, np.nan, _shown(feed, score, target))}

    def summed_up(values: Values) -> dict[str, float]:
        own = {name: value for name, value in values.items() if name != "pushed"}
        return {**task.summed_up(own), "pushed": float(np.nanmean(values["pushed"]))}

    return dataclasses.replace(task, per_user=per_user, summed_up=summed_up)


def _shown(feed: Feed, score: ScoreItems, target: int) -> NDArray[np.float64]:
    """Return whether an item is among the best ten of a user's unseen ones, 1 or 0; NaN for those who have seen it."""
    data = feed.dataset
    seen = np.zeros((len(data.users), len(data.items)), np.bool_)
    train = feed.split.part == TRAIN
    seen[data.user[train], data.item[train]] = True
    found = np.full(len(data.users), np.nan)
    for user in np.flatnonzero(~seen[:, target] & (feed.host >= 0)).tolist():
        scores = np.asarray(score(np.array([user])))[0]
        unseen = scores[~seen[user]]
        # Ties count against the item.
        found[user] = np.count_nonzero(unseen >= scores[target]) <= _TOP
    return found


# --- printing ----------------------------------------------------------------------------------------------------


def _table(
    system: System, task: ComparedTask, rows: tuple[Row, ...], byzantine: float, notes: tuple[str, ...]
) -> PaperTable:
    return PaperTable(
        name=f"{NAME}-{system.name}",
        title=f"Poisoning of {system.title}",
        paper="",
        settings={},
        prepare=lambda settings, _: settings,
        rows=lambda: rows,
        sections=(
            lambda results: _values(system, task, results),
            lambda results: _damages(system, task, results, byzantine, notes),
        ),
        headline=task.headline,
        choose_by=task.choose_by,
        verdict=lambda results: _verdict(task, results),
    )


def _printed(
    results: Results, title: str, cell: Callable[[str, str], str], notes: tuple[str, ...] = ()
) -> PrintedTable:
    """Return a block with a row for each rule and a column for each attack that was trained."""
    pairs = [(row.options["rule"], row.options["attack"]) for row in results.rows]
    rules, attacks = (list(dict.fromkeys(pair[n] for pair in pairs)) for n in (0, 1))
    lines = [
        (_LABELS[rule], *(cell(rule, attack) if (rule, attack) in pairs else ABSENT for attack in attacks))
        for rule in rules
    ]
    headings = (POISONINGS[attack].title.replace(", ", ",\n") for attack in attacks)
    return PrintedTable(title, ("rule", *headings), tuple(lines), notes)


def _mean(results: Results, rule: str, attack: str, metric: str) -> float | None:
    """Return the mean over the seeds; None without values, or where the run of a seed failed."""
    values = results.values(f"{rule}-{attack}", metric)
    return float(np.mean(values)) if values and not results.failure(f"{rule}-{attack}") else None


def _number(results: Results, rule: str, attack: str, value: float | None, form: str) -> str:
    if results.failure(f"{rule}-{attack}"):
        return _FAILED
    return ABSENT if value is None else format(value, form)


def _values(system: System, task: ComparedTask, results: Results) -> PrintedTable:
    seeds = "1 seed" if len(results.seeds) == 1 else f"means of {len(results.seeds)} seeds"
    heading = task.columns[task.headline]
    return _printed(
        results,
        f"Poisoning of {system.title}, {results.dataset}: {heading} of honest users, {seeds}",
        lambda rule, attack: _number(
            results, rule, attack, _mean(results, rule, attack, task.headline), ".4f"
        ),
    )


def _damage(task: ComparedTask, results: Results, rule: str, attack: str) -> float | None:
    """Return by how much a row is worse than the plain sum without an attack; None where either has no figure."""
    base, value = _mean(results, "sum", "none", task.headline), _mean(results, rule, attack, task.headline)
    if base is None or value is None:
        return None
    return value - base if lower_is_better(task.headline) else base - value


def _damages(
    system: System, task: ComparedTask, results: Results, byzantine: float, notes: tuple[str, ...]
) -> PrintedTable:
    def cell(rule: str, attack: str) -> str:
        damage = _number(results, rule, attack, _damage(task, results, rule, attack), "+.4f")
        pushed = _mean(results, rule, attack, "pushed")
        if attack not in ("none", "push") or pushed is None:
            return damage
        return f"{damage} ({pushed:.1%})"

    facts = [cell.record["facts"] for cells in results.cells.values() for cell in cells]
    bounds = sorted({round(one["norm_bound"], 4) for one in facts if "norm_bound" in one})
    assumed = f"{byzantine:.0%} of members" if byzantine < 1 else f"{byzantine:.0f} members"
    return _printed(
        results,
        f"Damage of {task.columns[task.headline]}, {results.dataset}",
        cell,
        (
            f"{LIARS:.0%} of the users lie; rules assume {assumed}. Figures are of the other users. Damage is by how "
            "much a row is worse than the plain sum without an attack.",
            "In brackets: share of them to whom the pushed item is among the best ten of their unseen ones.",
            *([f"Bound of norms: {', '.join(map(str, bounds))}."] if bounds else []),
            *_reasons(results),
            *notes,
        ),
    )


def _reasons(results: Results) -> list[str]:
    """Return a line for each reason for which runs failed, with the rows."""
    rows: dict[str, list[str]] = {}
    for row in results.rows:
        why = results.failure(row.name)
        if why:
            rows.setdefault(why, []).append(row.name)
    return [f"Failed ({', '.join(names)}): {why}." for why, names in rows.items()]


def _verdict(task: ComparedTask, results: Results) -> dict[str, Any]:
    """Return all damages and failed runs by rule and attack, JSON-ready, with a sentence about the worst ones.

    A run that fails is worse than any damage.  Rules are compared that have a damage for every attack of the table.
    """
    damages: dict[str, dict[str, float]] = {}
    failed: dict[str, list[str]] = {}
    for row in results.rows:
        rule, attack = row.options["rule"], row.options["attack"]
        damage = _damage(task, results, rule, attack)
        if results.failure(row.name):
            failed.setdefault(rule, []).append(attack)
        elif damage is not None:
            damages.setdefault(rule, {})[attack] = damage
    found = {"damages": damages, "failed": failed}
    if "none" not in damages.get("sum", {}):
        return {**found, "text": "Without figures of the plain sum there is no damage to compare."}
    if "sum" in failed:
        names = " and ".join(POISONINGS[attack].title for attack in failed["sum"])
        harm = f"The plain sum fails with {names}."
    else:
        attack = max(damages["sum"], key=lambda name: damages["sum"][name])
        harm = (
            f"The attack that harms the plain sum most is {POISONINGS[attack].title}: "
            f"{damages['sum'][attack]:+.4f}."
        )
    attacks = {row.options["attack"] for row in results.rows}
    worst = {rule: max(of.values()) for rule, of in damages.items() if set(of) == attacks}
    if not worst:
        return {**found, "text": f"{harm} No rule has figures with every attack."}
    least = min(worst, key=lambda rule: worst[rule])
    return {
        **found,
        "text": f"{harm} The rule whose worst damage is least is {_LABELS[least]}: {worst[least]:+.4f}.",
    }
