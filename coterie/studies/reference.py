"""Reference rows: other methods on the same data, split and metrics as a run, for its report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Reference"]


@dataclass(frozen=True)
class Reference:
    """One reference row, such as popularity or the same model with all data in one place.

    Attributes
    ----------
    metrics : dict
        Final metrics by name.
    history : list of dict
        Metrics by epoch, for a row that learns.
    label : str
        Name in the report; empty for the trivial rows, which the report labels itself.
    note : str
        One line that says what the row is.
    """

    metrics: dict[str, float]
    history: list[dict[str, Any]]
    label: str = ""
    note: str = ""
