"""The best items that a user has not seen, by the scores of a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_unseen"]


def best_unseen(
    items: Sequence[str], scores: NDArray[np.floating], seen: set[int], k: int
) -> tuple[list[str], list[float]]:
    """Return keys and scores of the best unseen items; ties are in the order of the catalogue.

    When all scores are equal, nothing is known of the user, and nothing is recommended.
    """
    if len(scores) > 1 and (scores == scores[0]).all():
        return [], []
    order = _first(scores, k + len(seen))
    best = [int(item) for item in order if int(item) not in seen][:k]
    return [items[item] for item in best], [float(scores[item]) for item in best]


def _first(scores: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """Return the positions of the highest scores in their order; equal scores in the order of positions."""
    if count < len(scores) and not np.isnan(scores).any():
        # Only what is at least as high as the last one is sorted.
        lowest = np.partition(scores, len(scores) - count)[len(scores) - count]
        near = np.flatnonzero(scores >= lowest)
        return near[np.argsort(-scores[near], kind="stable")[:count]]
    return np.argsort(-scores, kind="stable")[:count]
