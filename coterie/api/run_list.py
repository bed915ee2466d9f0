"""The runs of a folder, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.api.frames import records_frame
from coterie.launch.kept_runs import kept_runs

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
    found = []
    for one in kept_runs(Path(folder)):
        report = one.report
        if report is None:
            continue
        facts: dict[str, Any] = {
            "run": one.run_id,
            "system": report.system,
            "label": report.label,
            "secure_sum": report.secure_sum,
            "dataset": report.dataset.name,
            "started": one.started,
            "seconds": report.duration_s,
            "folder": str(one.folder),
        }
        found.append({**facts, **{name: metric.mean for name, metric in report.metrics.items()}})
    return records_frame(found, _COLUMNS)
