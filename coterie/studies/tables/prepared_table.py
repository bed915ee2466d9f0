"""Tables of one system that are not a paper's, ready to be trained: their rows fit the data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.errors import ConfigError, CoterieError
from coterie.studies.tables.paper_table import PaperTable, evaluate
from coterie.studies.tables.tasks import TASKS, ComparedTask
from coterie.systems.description import System
from coterie.systems.registry import system_named, systems

__all__ = ["PreparedTable", "one_of_each_task", "task_of", "that_fit"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class PreparedTable:
    """A table of one system on a data set.

    Attributes
    ----------
    table : PaperTable
    settings : RunSettings
        Settings of every row, but for the row's own options.
    dataset : Dataset
    """

    table: PaperTable
    settings: RunSettings
    dataset: Dataset

    def evaluated(
        self,
        *,
        seeds: Sequence[int],
        out: Path,
        names: Sequence[str] = (),
        resume: bool = False,
        say: Say = lambda _: None,
    ) -> tuple[dict[str, Any], Path]:
        """Train the rows with every seed; return the table's content and its file.

        Parameters
        ----------
        seeds : sequence of int
        out : Path
        names : sequence of str
            Rows to train; all if empty.
        resume : bool
            Whether to load cells that an earlier evaluation left.
        say : callable
            Receives a line about every cell.
        """
        return evaluate(
            self.table,
            self.settings,
            seeds=seeds,
            out=out,
            names=names,
            resume=resume,
            say=say,
            dataset=self.dataset,
        )


def that_fit(
    systems: Iterable[System], prepare: Callable[[System], PreparedTable], say: Say
) -> Iterator[PreparedTable]:
    """Yield the tables of systems that have one on the data; say of the others why they are left out."""
    for system in systems:
        try:
            yield prepare(system)
        except CoterieError as error:
            say(f"{system.title} is left out: {error}")


def one_of_each_task(
    names: Sequence[str], prepare: Callable[[System], PreparedTable], say: Say, nothing: str
) -> list[PreparedTable]:
    """Return the tables of some systems, or of one system for each task, the first that fits the data.

    Parameters
    ----------
    names : sequence of str
        Systems that are asked for; may be empty.
    prepare : callable
        Returns a system's table.
    say : callable
        Receives a line about a system that is left out, with the reason.
    nothing : str
        Says that there is no table.

    Raises
    ------
    ConfigError
        A system that is asked for is unknown or has no table, or none has one.
    """
    asked = [system_named(name) for name in dict.fromkeys(names)]
    if asked:
        return [prepare(system) for system in asked]
    found: list[PreparedTable] = []
    for task in TASKS:
        found += islice(that_fit(filter(task.solved_by, systems().values()), prepare, say), 1)
    if not found:
        raise ConfigError(nothing, hint="the lines above have the reasons")
    return found


def task_of(system: System, table: str) -> ComparedTask:
    """Return the task that a system solves.

    Raises
    ------
    ConfigError
        It solves none of `TASKS`, and so has no table of this kind.
    """
    task = next((task for task in TASKS if task.solved_by(system)), None)
    if task is None:
        raise ConfigError(
            f"{system.name} has no table of {table}: it is not trained in one process in rounds"
        )
    return task
