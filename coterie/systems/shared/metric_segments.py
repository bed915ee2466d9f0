"""Metrics inside a contribution: sums and counts over users, never a user's own value.

A member evaluates the version that it fetched before it trains, and its metrics travel in the same vector as its
update, under the same protection.  Most metrics lie between 0 and 1.  A larger metric, such as a sum of squared
errors, declares its bound and travels as two values, its whole part and its fraction: so it is as exact as the others,
and a sum over as many users has room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.contribution import Contribution, Segment

__all__ = ["LARGEST", "Measure", "add_measures", "measure_segments", "measured_in", "names_of", "units_of"]

_BITS = 16
"""Bits of a metric's code: steps of 3e-5, and room for sums over 65,537 users."""

LARGEST = 2 ** (_BITS - 1) - 1
"""Largest bound that a metric may have: its whole part needs no more bits than the rest."""


@dataclass(frozen=True)
class Measure:
    """Metric that hosts measure for each user and that the secure sum adds up.

    Parameters
    ----------
    name : str
    bound : int
        Largest value of one user in units, 1 to `LARGEST`; the smallest is 0.  A larger one is cut off at it.
    unit : float
        Unit in which users send the metric, above 0.

    Raises
    ------
    ValueError
        A bound out of its range.
    """

    name: str
    bound: int = 1
    unit: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.bound <= LARGEST:
            raise ValueError(f"metric {self.name} is bounded by {self.bound}; expected 1 to {LARGEST}")


def names_of(measures: Sequence[str | Measure]) -> tuple[str, ...]:
    """Return the names of metrics; a name alone stands for a metric between 0 and 1."""
    return tuple(one if isinstance(one, str) else one.name for one in measures)


def units_of(measures: Sequence[str | Measure]) -> NDArray[np.float64]:
    """Return the units in which users send metrics, float64 (m,)."""
    return np.array([1.0 if isinstance(one, str) else one.unit for one in measures])


def _wide(measures: Sequence[str | Measure]) -> list[int]:
    """Return the bounds of the metrics that may be above 1, checking that they come last."""
    bounds = [1 if isinstance(one, str) else one.bound for one in measures]
    wide = [bound for bound in bounds if bound > 1]
    if sorted(bounds, key=lambda bound: bound > 1) != bounds:
        raise ValueError("a metric that may be above 1 stands before one that may not; expected it behind")
    return wide


def measure_segments(measures: Sequence[str | Measure], bits: int = _BITS) -> tuple[Segment, ...]:
    """Return the segments of a contribution for metrics; those that may be above 1 come last.

    Parameters
    ----------
    measures : sequence of str or Measure
    bits : int
        Bits to which each metric is rounded; with fewer a sum has room for more users.

    Returns
    -------
    tuple of Segment
        ``metrics``, only the fraction of a metric that may be above 1; ``measured``, how many users each covers; and,
        where some metric may be above 1, ``wholes``, the whole parts of those.
    """
    shape, wide = (len(measures),), _wide(measures)
    segments = (Segment("metrics", shape, 1.0, bits, measures=True), _metrics("measured", shape, 1))
    return (*segments, _metrics("wholes", (len(wide),), max(wide))) if wide else segments


def _metrics(name: str, shape: tuple[int, ...], largest: int) -> Segment:
    return replace(Segment.whole(name, shape, largest), measures=True)


def add_measures(contribution: Contribution, values: NDArray[np.float64], rng: np.random.Generator) -> None:
    """Add one user's metrics in their units, float64 (m,), in the order of the segments; NaN where there is nothing."""
    there = np.isfinite(values)
    values = np.where(there, values, 0.0)
    wide = next((one for one in contribution.layout.segments if one.name == "wholes"), None)
    if wide is not None:
        narrow = len(values) - wide.size
        large = contribution.bounded(np.minimum(values[narrow:], wide.bound))
        contribution.add("wholes", np.floor(large), rng)
        values = np.concatenate([values[:narrow], large - np.floor(large)])
    contribution.add("metrics", values, rng)
    contribution.add("measured", there.astype(np.float64), rng)


def measured_in(
    sums: Mapping[str, NDArray[np.float64]], measures: Sequence[str | Measure]
) -> dict[str, tuple[float, float]]:
    """Return each metric's sum and number of users from the decoded sums."""
    if "metrics" not in sums:
        return {}
    totals = sums["metrics"].astype(np.float64)
    if "wholes" in sums:
        totals[len(totals) - len(sums["wholes"]) :] += sums["wholes"]
    totals *= units_of(measures)
    return {
        name: (float(total), float(count))
        for name, total, count in zip(names_of(measures), totals, sums["measured"], strict=True)
    }
