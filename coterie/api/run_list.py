"""The runs of a folder, as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.api.frames import records_frame
from coterie.telemetry.report import Report

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
    for path in Path(folder).glob("*/report.json"):
        try:
            report = Report.read(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
        facts: dict[str, Any] = {
            "run": report.run_id,
            "system": report.system,
            "label": report.label,
            "secure_sum": report.secure_sum,
            "dataset": report.dataset.name,
            "started": report.started,
            "seconds": report.duration_s,
            "folder": str(path.parent),
        }
        found.append({**facts, **{name: one.mean for name, one in report.metrics.items()}})
    return records_frame(sorted(found, key=lambda one: (one["started"] or "", one["run"])), _COLUMNS)
