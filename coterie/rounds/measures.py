"""Metrics inside a contribution: sums and counts over users, never a user's own value.

A member evaluates the version that it fetched before it trains, and what it measured travels in the same vector as
its update, under the same protection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.wire.layout import Contribution, Segment

__all__ = ["add_measures", "measure_segments", "measured_in"]

_BITS = 16
"""Codes of a metric: steps of 3e-5, and room for sums over 65,537 users."""


def measure_segments(names: Sequence[str]) -> tuple[Segment, ...]:
    """Return the segments for metrics between 0 and 1: ``metrics`` and how many users they cover, ``measured``."""
    shape = (len(names),)
    return (Segment("metrics", shape, 1.0, _BITS), Segment.whole("measured", shape, 1))


def add_measures(contribution: Contribution, values: NDArray[np.float64], rng: np.random.Generator) -> None:
    """Add one user's metrics, float64 (m,); NaN where there is nothing to measure."""
    there = np.isfinite(values)
    contribution.add("metrics", np.where(there, values, 0.0), rng)
    contribution.add("measured", there.astype(np.float64), rng)


def measured_in(
    sums: Mapping[str, NDArray[np.float64]], names: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Return sum and number of users of each metric from decoded sums."""
    if "metrics" not in sums:
        return {}
    return {
        name: (float(total), float(count))
        for name, total, count in zip(names, sums["metrics"], sums["measured"], strict=True)
    }
