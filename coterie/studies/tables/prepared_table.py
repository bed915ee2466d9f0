"""Tables of one system that are not a paper's, ready to be trained: their rows fit the data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.errors import CoterieError
from coterie.studies.tables.paper_table import PaperTable, evaluate
from coterie.systems.description import System

__all__ = ["PreparedTable", "that_fit"]

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
