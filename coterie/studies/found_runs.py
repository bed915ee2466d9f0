"""The finished runs of a folder, by their reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coterie.telemetry.report import Report

__all__ = ["found_runs"]


def found_runs(folder: Path) -> list[tuple[dict[str, Any], dict[str, float | None]]]:
    """Return facts and mean metrics of each run of a folder, by the time of its start.

    A folder without a readable report is left out.
    """
    found = []
    for path in folder.glob("*/report.json"):
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
        found.append((facts, {name: one.mean for name, one in report.metrics.items()}))
    return sorted(found, key=lambda one: (one[0]["started"] or "", one[0]["run"]))
