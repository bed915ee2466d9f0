"""What systems that predict ratings measure of a user, and the figures that an evaluation comes to."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.systems.shared.metric_segments import LARGEST, Measure

__all__ = ["CHOOSE_BY", "FIGURES", "MEASURES", "choosable"]

_PARTS = ("", "validation_")
_RANKED = ("ndcg_rated@10", "precision@10", "recall@10")
_SUMS = ("squared_error", "ratings")

MEASURES: tuple[str | Measure, ...] = (
    *(prefix + name for prefix in _PARTS for name in _RANKED),
    *(Measure(prefix + name, LARGEST) for prefix in _PARTS for name in _SUMS),
)
"""What a user's measurement has (`coterie.evaluation.rated`); those of a sum of squares may be above 1."""

FIGURES = tuple(prefix + name for prefix in _PARTS for name in (*_RANKED, "f1@10", "rmse"))
"""What an evaluation comes to."""

CHOOSE_BY = "validation_ndcg_rated@10"
"""By what the version that counts is chosen unless a run says otherwise."""


def choosable(figures: Sequence[str]) -> list[str]:
    """Return the figures by which a version can be chosen: those of the validation part."""
    return [name for name in figures if name.startswith("validation_")]
