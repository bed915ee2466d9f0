"""The runs of a folder, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from coterie.api.frames import records_frame
from coterie.launch.kept_runs import finished_runs

if TYPE_CHECKING:
    import polars as pl

__all__ = ["runs"]

_COLUMNS = ("run", "system", "label", "secure_sum", "dataset", "started", "seconds", "folder")


def runs(folder: str | Path = "runs") -> pl.DataFrame:
    """Return the finished runs of a folder, those of the command included, by the time of their start.

    Parameters
    ----------
    folder : str or Path

    Returns
    -------
    polars.DataFrame
        Columns run, system, label, secure_sum, dataset, started, seconds and folder, then the metrics of all runs; null
        where a run has none.  A folder without a readable report is left out.
    """
    found = [{**facts, **metrics} for facts, metrics in finished_runs(Path(folder))]
    return records_frame(found, _COLUMNS)
