"""A row that stands beside a run: same data, same split, same metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Reference"]


@dataclass(frozen=True)
class Reference:
    """One row beside the federation's.

    Attributes
    ----------
    metrics : dict
        Final metrics by name.
    history : list of dict
        Metrics by epoch, where the row learns.
    label : str
        Its name for a reader; the report has words for the usual trivial rows.
    note : str
        What it is, in a line.
    """

    metrics: dict[str, float]
    history: list[dict[str, Any]]
    label: str = ""
    note: str = ""
