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
    order = np.argsort(-scores, kind="stable")[: k + len(seen)]
    best = [int(item) for item in order if int(item) not in seen][:k]
    return [items[item] for item in best], [float(scores[item]) for item in best]
