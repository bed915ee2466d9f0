"""The table that compares systems: every system that fits the data beside central models, on one split.

Systems are those that are registered.  Each is trained in one process and measured from the scores that hosts compute
for their users; central models learn with all data in one place and are tuned on validation data with equally many
trials.  Ranking and the prediction of ratings are tables of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.tables.central_rows import central_row
from coterie.studies.tables.compared_table import compared_table
from coterie.studies.tables.federated_rows import federated_row, settings_of
from coterie.studies.tables.paper_table import PaperTable, evaluate, stem
from coterie.studies.tables.row import QUICK_PASSES, Row, quick_note
from coterie.studies.tables.tasks import TASKS, ComparedTask
from coterie.studies.tables.tuning import Search, Trials, tune
from coterie.systems.description import System
from coterie.systems.registry import system_named, systems

__all__ = ["BUDGET", "Comparison", "budget_of", "comparisons", "divided_by", "fitting"]

BUDGET = 8
"""Trials of each central model, unless another number is asked for."""

_QUICK_BUDGET = 2
_SEARCHED = 0
"""Seed of the split, the training and the draws of the search."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """One task's table on a data set.

    Attributes
    ----------
    task : ComparedTask
    table : PaperTable
    settings : RunSettings
        Settings by which the data is divided.
    dataset : Dataset
    """

    task: ComparedTask
    table: PaperTable
    settings: RunSettings
    dataset: Dataset

    def tuned(
        self,
        out: Path,
        trials: int,
        *,
        given: Trials | None = None,
        central: bool = False,
        say: Say = lambda _: None,
        search: Search = "random",
    ) -> Trials:
        """Tune the table's rows on validation data, with equally many trials for each, and return all trials.

        Trials are kept in ``TABLE-DATA-trials.json``, from which the next search continues.

        Parameters
        ----------
        out : Path
            Folder of the file.
        trials : int
            Number of trials of each row.
        given : Trials, optional
            Trials of another file; they count for rows of which there are none in this one.
        central : bool
            Whether only central models are tuned.
        say : callable
            Receives a line about every trial.
        search : {"random", "tpe"}
            As for `tune`.

        Raises
        ------
        ConfigError, DataError
            A file holds trials of another search.
        """
        feed = make_feed(self.settings, self.dataset, _SEARCHED)
        path = self.trials_path(out)
        known = Trials.continued(path, self.about(feed))
        if given is not None:
            self._refuse_other(given, known)
            for name, these in given.rows.items():
                known.rows.setdefault(name, these)
        rows = [row for row in self.table.rows() if not (central and row.defaults)]
        return tune(
            rows,
            self.settings,
            feed,
            _SEARCHED,
            trials=trials,
            choose_by=self.task.choose_by,
            known=known,
            keep=lambda these: these.write(path),
            say=say,
            search=search,
        )

    def about(self, feed: Feed) -> dict[str, Any]:
        """Return what the file of trials says of the search."""
        return {
            "table": self.table.name,
            "dataset": self.dataset.name,
            "split_sha256": feed.split.sha256(feed.dataset),
            "choose_by": self.task.choose_by,
            "seed": _SEARCHED,
        }

    def trials_path(self, out: Path) -> Path:
        """Return the file of the table's trials in a folder."""
        return out / f"{stem(self.table, self.settings, self.dataset)}-trials.json"

    def evaluated(
        self,
        trials: Trials,
        *,
        seeds: Sequence[int],
        out: Path,
        resume: bool = False,
        say: Say = lambda _: None,
    ) -> tuple[dict[str, Any], Path]:
        """Train every row with every seed; return the table's content and its file."""
        return evaluate(
            self.table,
            self.settings,
            seeds=seeds,
            out=out,
            trials=trials,
            resume=resume,
            say=say,
            dataset=self.dataset,
        )

    def _refuse_other(self, given: Trials, known: Trials) -> None:
        differing = [key for key, value in known.about.items() if given.about.get(key) != value]
        if differing:
            raise DataError(
                f"the trials were made for another search (other {', '.join(differing)}); expected those of table "
                f"{self.table.name} on {self.dataset.name}",
                hint="`coterie tune --table compare` makes trials",
            )


def comparisons(
    given: Mapping[str, Any],
    names: Sequence[str] = (),
    *,
    quick: bool = False,
    say: Say = lambda _: None,
) -> list[Comparison]:
    """Return the tables that compare systems on a data set, one for each task that there is a row for.

    Parameters
    ----------
    given : mapping
        Nested values of a run's keys, such as the data's path; they apply to every system.
    names : sequence of str
        Systems to compare; by default all that fit the data.
    quick : bool
        Whether federated rows train for a few passes only.
    say : callable
        Receives a line about a task that is left out, with the reason.

    Raises
    ------
    ConfigError
        A system that is asked for is unknown or does not fit the data, with the reason; or nothing can be compared.
    """
    asked = [system_named(name) for name in dict.fromkeys(names)]
    for system in asked:
        if not any(task.solved_by(system) for task in TASKS):
            raise ConfigError(f"{system.name} cannot be compared: {_unsolved(system)}")
    found = []
    for task in TASKS:
        of_task = [system for system in asked if task.solved_by(system)]
        if asked and not of_task:
            continue
        try:
            found.append(_comparison(task, given, of_task, quick))
        except CoterieError as error:
            if asked:
                raise
            say(f"{task.title} is left out: {error}")
    if not found:
        raise ConfigError("nothing can be compared on this data", hint="the lines above have the reasons")
    return found


def budget_of(budget: int | None, *, quick: bool) -> int:
    """Return the number of trials of each central model."""
    return budget or (_QUICK_BUDGET if quick else BUDGET)


def _comparison(
    task: ComparedTask, given: Mapping[str, Any], asked: Sequence[System], quick: bool
) -> Comparison:
    settings = divided_by(task, given)
    dataset, notes = fitting(task, load(settings))
    rows: list[Row] = []
    for model in task.models:
        if why := model.objection(len(dataset.items)):
            notes.append(f"Left out: {why}.")
        else:
            rows.append(central_row(model, task))
    for system in asked or systems().values():
        if not task.solved_by(system):
            continue
        try:
            own = settings_of(system, given, task)
            # Data that a system cannot learn from is refused before anything is trained.
            make_feed(own, dataset, _SEARCHED)
            rows.append(federated_row(system, given, task, QUICK_PASSES if quick else None))
            if own.rounds.choose_by != task.choose_by:
                notes.append(f"Versions of {rows[-1].label} are chosen by {own.rounds.choose_by}.")
        except (ConfigError, DataError) as error:
            if asked:
                raise ConfigError(f"{system.name} does not fit {dataset.name}: {error}") from error
            notes.append(f"{system.title} does not fit the data: {error}.")
    if not asked:
        notes += [
            f"{system.title} is not in the table: {_unsolved(system)}."
            for system in systems().values()
            if not any(one.solved_by(system) for one in TASKS)
        ]
    if quick:
        notes.append(quick_note(QUICK_PASSES))
    return Comparison(task, compared_table(task, tuple(rows), tuple(notes)), settings, dataset)


def _unsolved(system: System) -> str:
    if not system.in_rounds:
        return "its data owners work side by side, so it is not trained in one process"
    return "it learns from likes and dislikes, central models from all interactions"


def divided_by(task: ComparedTask, given: Mapping[str, Any]) -> RunSettings:
    """Return settings of a run with the task's split, of the first system that allows it and asks the data for nothing.

    Raises
    ------
    ConfigError
        The given keys make no run of any system.
    """
    first: ConfigError | None = None
    for system in systems().values():
        if system.in_rounds and not system.needs.likes and not system.needs.ratings:
            try:
                return settings_of(system, given, task)
            except ConfigError as error:
                first = first or error
    raise first or ConfigError(f"no system that is installed can be measured by the split {task.split}")


def fitting(task: ComparedTask, dataset: Dataset) -> tuple[Dataset, list[str]]:
    """Return the data set as a task needs it, with remarks for below the table.

    Parameters
    ----------
    task : ComparedTask
    dataset : Dataset
        One without times gets equal ones where the task holds out each user's last interaction.

    Raises
    ------
    DataError
        Ratings are to be predicted and all are equal.
    """
    if task.ratings and len(np.unique(dataset.rating)) < 2:
        raise DataError(f"all ratings of {dataset.name} are equal: there is nothing to predict")
    if task.split == "leave-last-out" and dataset.time is None:
        # All at the same second: ties are broken by a seeded hash, so that the held-out item is a random one.
        timeless = dataclasses.replace(dataset, time=np.zeros(len(dataset), np.int64))
        return timeless, ["The data has no times: a random interaction of each user is held out."]
    return dataset, []
