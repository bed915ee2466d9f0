"""Metrics of systems that predict ratings: those measured for each user, and the figures of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coterie.systems.shared.metric_segments import LARGEST, Measure

__all__ = ["CHOOSE_BY", "FIGURES", "MEASURES", "choosable", "on_range"]

_PARTS = ("", "validation_")
_RANKED = ("ndcg_rated@10", "precision@10", "recall@10")
_SUMS = ("squared_error", "ratings")

MEASURES: tuple[str | Measure, ...] = (
    *(prefix + name for prefix in _PARTS for name in _RANKED),
    *(Measure(prefix + name, LARGEST) for prefix in _PARTS for name in _SUMS),
)
"""Metrics measured for each user (`coterie.evaluation.rated`); squared errors and counts may be above 1."""

FIGURES = tuple(prefix + name for prefix in _PARTS for name in (*_RANKED, "f1@10", "rmse"))
"""Figures of an evaluation."""

CHOOSE_BY = "validation_ndcg_rated@10"
"""Figure by which the version that counts is chosen, unless a run names another one."""


_USUAL_RANGE = 5.0
"""Width of a range of ratings on which a user's sum of squared errors is far below the bound."""


def on_range(measures: Sequence[str | Measure], lowest: float, highest: float) -> tuple[str | Measure, ...]:
    """Return the metrics for ratings of a range: on a wide one squared errors are sent in larger units.

    Parameters
    ----------
    measures : sequence of str or Measure
    lowest, highest : float
        Range of ratings.
    """
    unit = max((highest - lowest) / _USUAL_RANGE, 1.0) ** 2
    return tuple(
        replace(one, unit=unit) if isinstance(one, Measure) and one.name.endswith("squared_error") else one
        for one in measures
    )


def choosable(figures: Sequence[str]) -> list[str]:
    """Return the figures by which a version can be chosen: those of the validation part."""
    return [name for name in figures if name.startswith("validation_")]
