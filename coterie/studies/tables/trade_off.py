"""The table of floors: what groups and `min_touch` of a system cost in quality, and what the counts of groups tell.

A row is the system with one size of groups and one floor.  Larger groups close fewer items and tell less of each user,
higher floors close more.  The knee is the row that a run should have; no test figure chooses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.evaluation.selection import SelectedModel
from coterie.studies.floors import MOST_CLOSED, MOST_TOLD, floors, group_sizes
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.tables.command import command_of
from coterie.studies.tables.compare import fitting
from coterie.studies.tables.federated_rows import federated_row, settings_of
from coterie.studies.tables.paper_table import PaperTable, PrintedTable, Results
from coterie.studies.tables.prepared_table import PreparedTable, task_of, that_fit
from coterie.studies.tables.printed_tables import ABSENT, shown
from coterie.studies.tables.row import Engine, Options, Row, with_options
from coterie.studies.tables.tasks import ComparedTask
from coterie.systems.description import System
from coterie.systems.registry import system_named, systems
from coterie.systems.shared.problems import FEWEST_BEHIND

__all__ = ["NAME", "FloorPoint", "knee", "trade_offs"]

NAME = "floors"
"""Name of the table on the command line."""

_FIRST_GROUP = 100
_FLOORS = (FEWEST_BEHIND, 10)
_NO_FLOOR = 1
_QUICK_PASSES = 10

Say = Callable[[str], None]


@dataclass(frozen=True)
class FloorPoint:
    """One point of the trade-off, as means over the seeds.

    Attributes
    ----------
    row : str
        Name of the row.
    group, min_touch : int
        Fewest users of a group, and fewest users of a group behind an item that the group trains.
    closed : float
        Share of users' training items that is closed.
    told : float
        By how much the counts of the groups tell users' items better than popularity, in AUC.
    """

    row: str
    group: int
    min_touch: int
    closed: float
    told: float

    @property
    def excess(self) -> float:
        """The larger of closed share and told AUC, in units of its bound; at most 1 where both are within."""
        return max(self.closed / MOST_CLOSED, self.told / MOST_TOLD)


def knee(points: Sequence[FloorPoint]) -> FloorPoint | None:
    """Return the point that a run should have.

    Candidates have a floor of at least `FEWEST_BEHIND`.  Among those within both bounds, `MOST_CLOSED` and
    `MOST_TOLD`, it is the one with the smallest groups, and with the highest floor for these groups.  Where none is
    within, it is the one with the least `FloorPoint.excess`.

    Parameters
    ----------
    points : sequence of FloorPoint

    Returns
    -------
    FloorPoint or None
        None without candidates.
    """
    candidates = [point for point in points if point.min_touch >= FEWEST_BEHIND]
    return min(
        candidates, key=lambda point: (max(point.excess, 1), point.group, -point.min_touch), default=None
    )


def trade_offs(
    given: Mapping[str, Any],
    names: Sequence[str] = (),
    *,
    quick: bool = False,
    say: Say = lambda _: None,
) -> list[PreparedTable]:
    """Return the tables of floors on a data set, one for each system.

    Parameters
    ----------
    given : mapping
        Nested values of a run's keys.  ``rounds.group`` is the smallest group of the table instead of 100, and a
        system's ``min_touch`` its only floor instead of 3 and 10.
    names : sequence of str
        Systems; by default all that close items by group and fit the data.
    quick : bool
        Whether rows have the smallest groups and the whole population only, and train for a few passes.
    say : callable
        Receives a line about a system that is left out, with the reason.

    Raises
    ------
    ConfigError
        A system that is asked for is unknown, has no floors or does not fit the data; or none has a table.
    """
    asked = [system_named(name) for name in dict.fromkeys(names)]
    if asked:
        return [_trade_off(system, given, quick) for system in asked]
    found = list(that_fit(systems().values(), lambda system: _trade_off(system, given, quick), say))
    if not found:
        raise ConfigError("no system has floors on this data", hint="the lines above have the reasons")
    return found


def _trade_off(system: System, given: Mapping[str, Any], quick: bool) -> PreparedTable:
    task = task_of(system, NAME)
    own = settings_of(system, given, task)
    if own.rounds.cohorts not in ("groups", "all"):
        raise ConfigError(
            f"rounds.cohorts {own.rounds.cohorts!r}: floors of groups do not bound what such cohorts tell; expected "
            "'groups' or 'all'"
        )
    if own.rounds.fit_groups:
        raise ConfigError("rounds.fit_groups true: the table has groups of several sizes; expected false")
    dataset, notes = fitting(task, load(own))
    if "min_touch" not in type(own.own).model_fields or floors(own, make_feed(own, dataset, 0)) is None:
        raise ConfigError(f"{system.name} has no table of floors: with these settings it closes no items")
    users = len(np.unique(dataset.user))
    rows = tuple(_rows(system, given, own, task, users, quick))
    if own.rounds.choose_by != task.choose_by:
        notes.append(f"Versions are chosen by {own.rounds.choose_by}.")
    if quick:
        notes.append(f"Quick: rows train for at most {_QUICK_PASSES} passes.")
    return PreparedTable(_table(system, task, rows, tuple(notes), given), own, dataset)


def _rows(
    system: System, given: Mapping[str, Any], own: RunSettings, task: ComparedTask, users: int, quick: bool
) -> Iterator[Row]:
    """Yield the rows: every size with every floor, and the whole population without a floor."""
    table = system.table
    base = federated_row(system, given, task, _QUICK_PASSES if quick else None)
    sizes = list(group_sizes(given.get("rounds", {}).get("group", _FIRST_GROUP), users))
    least = given.get(table, {}).get("min_touch")
    chosen = _FLOORS if least is None else (least,)
    if quick:
        sizes, chosen = sorted({sizes[0], sizes[-1]}), chosen[:1]
    grid = [(size, floor) for size in sizes for floor in chosen]
    if (users, _NO_FLOOR) not in grid:
        grid.append((users, _NO_FLOOR))
    for size, floor in grid:
        options = {**base.options, "rounds.group": size, f"{table}.min_touch": floor}
        if own.rounds.cohorts == "groups":
            options["rounds.cohort"] = size
        # Settings that make no run are refused before anything is trained.
        with_options(own, options)
        whole = size == users
        yield dataclasses.replace(
            base,
            name=f"{'everybody' if whole else f'group-{size}'}-min-touch-{floor}",
            label=f"{'everybody' if whole else f'groups of {size}'}, floor {floor}",
            engine=_with_floors(base),
            options=options,
            space={},
        )


def _with_floors(base: Row) -> Engine:
    """Return the engine of a system's row that also measures what the groups close and tell."""

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        trained = base.train(settings, options, feed, seed)
        found = floors(with_options(settings, options), feed)
        if found is None:
            return trained
        figures = {"closed_share": found.closed, "closed_held_out": found.held_out}
        if found.auc is not None and found.popularity_auc is not None:
            figures |= {"attack_auc": found.auc, "popularity_auc": found.popularity_auc}
        return dataclasses.replace(
            trained,
            metrics={**trained.metrics, **figures},
            facts={**trained.facts, "groups": found.groups},
        )

    return engine


def _table(
    system: System,
    task: ComparedTask,
    rows: tuple[Row, ...],
    notes: tuple[str, ...],
    given: Mapping[str, Any],
) -> PaperTable:
    return PaperTable(
        name=f"{NAME}-{system.name}",
        title=f"Floors of {system.title}",
        paper="",
        settings={},
        prepare=lambda settings, _: settings,
        rows=lambda: rows,
        sections=(
            lambda results: _printed(
                system, task, (command_of(NAME, system.name, rows, given, results), *notes), results
            ),
        ),
        headline=task.headline,
        choose_by=task.choose_by,
        verdict=lambda results: _verdict(system, task, results),
    )


def _points(system: System, task: ComparedTask, results: Results) -> Iterator[FloorPoint]:
    """Yield the points of rows that were trained to a figure."""
    for row in results.rows:
        if results.values(row.name, task.choose_by):
            attack, popularity = (_mean(results, row.name, name) for name in ("attack_auc", "popularity_auc"))
            yield FloorPoint(
                row.name,
                row.options["rounds.group"],
                row.options[f"{system.table}.min_touch"],
                _mean(results, row.name, "closed_share"),
                attack - popularity,
            )


def _mean(results: Results, row: str, metric: str) -> float:
    values = results.values(row, metric)
    return float(np.mean(values)) if values else 0.0


def _printed(system: System, task: ComparedTask, notes: Sequence[str], results: Results) -> PrintedTable:
    best = _verdict(system, task, results)
    heading = task.columns[task.headline]
    lines = [
        (
            row.label + (" (knee)" if row.name == best["row"] else ""),
            str(results.cells[row.name][0].record["facts"].get("groups", ABSENT)),
            *(
                shown(results.values(row.name, metric))
                for metric in (
                    "closed_share",
                    "closed_held_out",
                    "attack_auc",
                    "popularity_auc",
                    task.choose_by,
                    task.headline,
                )
            ),
        )
        for row in results.rows
    ]
    seeds = (
        "1 seed" if len(results.seeds) == 1 else f"means of {len(results.seeds)} seeds ±standard deviation"
    )
    unmeasured = not any(results.values(row.name, "attack_auc") for row in results.rows)
    return PrintedTable(
        f"Floors of {system.title}, {results.dataset}, {seeds}",
        (
            "row",
            "groups",
            "closed",
            "closed,\nheld out",
            "AUC of\ncounts",
            "AUC of\npopularity",
            f"{heading},\nvalidation",
            f"{heading},\ntest",
        ),
        tuple(lines),
        (
            best["text"],
            f"The knee is the row with the smallest groups, and then the highest floor, that closes at most "
            f"{MOST_CLOSED:.0%} of users' training items and whose counts tell at most {MOST_TOLD:.2f} more than "
            f"popularity in AUC, among floors of at least {FEWEST_BEHIND}; else the one that exceeds these bounds "
            "least. Test figures choose nothing.",
            *(["The attack on the counts was not run: the data set is too large."] if unmeasured else []),
            *notes,
        ),
    )


def _verdict(system: System, task: ComparedTask, results: Results) -> dict[str, Any]:
    """Return the knee, JSON-ready, with a sentence about it."""
    point = knee(list(_points(system, task, results)))
    if point is None:
        return {
            "row": None,
            "text": f"There is no knee: no row with a floor of at least {FEWEST_BEHIND} has figures.",
        }
    labels = {row.name: row.label for row in results.rows}
    within = point.excess <= 1
    what = "The knee is" if within else "No row is within both bounds; the least bad is"
    return {
        **dataclasses.asdict(point),
        "within": within,
        "text": (
            f"{what} {labels[point.row]}: {point.closed:.1%} of users' training items are closed, and the counts of "
            f"its groups exceed popularity by {point.told:.3f} in AUC."
        ),
    }
