"""A table of one system that is not a paper's, ready to be trained: its rows fit the data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.studies.tables.paper_table import PaperTable, evaluate

__all__ = ["PreparedTable"]

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
