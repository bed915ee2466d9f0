"""Mathematics of Popular: the weight that a user adds to an item's score, and the layout of a contribution."""

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.leave_one_out import metric_names
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.shared.metric_segments import measure_segments

__all__ = ["METRICS", "layout", "scores", "weight"]

METRICS = metric_names()
"""Metrics of an evaluation, which ranks the held-out item among sampled items and among all unseen ones."""


def weight(n: int, damping: float) -> float:
    """Return the weight that a user with n items, at least 1, adds to the score of each: n^-damping, at most 1."""
    return float(n**-damping)


def scores(items: NDArray[np.float64], touched: NDArray[np.float64], min_touch: int) -> NDArray[np.float32]:
    """Return the scores that participants fetch, float32 (I, 1): 0 for items of fewer than min_touch users."""
    return np.where(touched[:, None] >= min_touch, items, 0).astype(np.float32)


def layout(purpose: Purpose, n_items: int, bits: int) -> Layout:
    """Return the segments of a contribution, with the largest value of one user and its bits."""
    if purpose is not Purpose.TRAIN:
        return Layout(measure_segments(METRICS))
    return Layout((Segment("items", (n_items, 1), 1.0, bits), Segment.whole("touched", (n_items,), 1)))
