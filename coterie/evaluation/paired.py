"""Paired comparison of two rows of a table: the mean difference over users, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PairedDifference", "paired_difference"]

_ELEMENTS_AT_ONCE = 1 << 21
"""Weights of resamples that are in memory together: 16 MB."""


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference of a metric, first row minus second, with its intervals.

    Parameters
    ----------
    mean : float
        Over all users and seeds that both rows have.
    low, high : float
        Interval over users: what another sample of such users would give, with these seeds.
    low_with_seeds, high_with_seeds : float
        Interval over users and seeds: what other users and other seeds would give. It is wide if
        there are few seeds.
    confidence : float
        Confidence of both intervals, as a share.
    users, seeds : int
        Numbers of users and seeds that were compared.
    """

    mean: float
    low: float
    high: float
    low_with_seeds: float
    high_with_seeds: float
    confidence: float
    users: int
    seeds: int


def paired_difference(
    first: Sequence[NDArray[np.floating]],
    second: Sequence[NDArray[np.floating]],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedDifference:
    """Compare two rows user by user.

    The intervals are percentiles of a bootstrap. A user is drawn with its values of all seeds, as these belong
    together; for the second interval seeds are drawn, too, independently of the users (the pigeonhole bootstrap of
    Owen, 2007, which rather errs towards too wide an interval).

    Parameters
    ----------
    first, second : sequence of ndarray of float, shape (U,)
        A metric of each user, one array for each seed; the same users in the same order, and the same seeds in the
        same order. NaN where a user has nothing to measure.
    confidence : float
        Above 0 and below 1.
    resamples : int
        At least 1.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    Difference

    Raises
    ------
    ValueError
        Shapes that differ, no seed, an argument out of range, or not one user with a value in both rows.
    """
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(
            f"confidence {confidence}, resamples {resamples}; expected a share between 0 and 1, and at least 1"
        )
    if not first or [one.shape for one in first] != [one.shape for one in second]:
        raise ValueError(
            f"shapes {[one.shape for one in first]} and {[one.shape for one in second]}; expected the same, "
            "one array (U,) for each seed"
        )
    difference = np.stack([np.asarray(a, np.float64) - b for a, b in zip(first, second, strict=True)])
    known = ~np.isnan(difference)
    compared = known.any(axis=0)
    if not compared.any():
        raise ValueError("no user has a value in both rows")
    difference, known = np.where(known, difference, 0.0)[:, compared], known[:, compared].astype(np.float64)
    seeds, users = difference.shape

    rng = np.random.default_rng(seed)
    over_users, over_both = [], []
    step = max(1, _ELEMENTS_AT_ONCE // users)
    for begin in range(0, resamples, step):
        count = min(step, resamples - begin)
        user_weights = rng.multinomial(users, np.full(users, 1 / users), size=count).astype(np.float64)
        seed_weights = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=count).astype(np.float64)
        totals, numbers = user_weights @ difference.T, user_weights @ known.T
        over_users.append(_mean(totals.sum(axis=1), numbers.sum(axis=1)))
        over_both.append(_mean((totals * seed_weights).sum(axis=1), (numbers * seed_weights).sum(axis=1)))
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.nanquantile(np.concatenate(over_users), tails).tolist()
    low_with_seeds, high_with_seeds = np.nanquantile(np.concatenate(over_both), tails).tolist()
    return PairedDifference(
        mean=float(difference.sum() / known.sum()),
        low=low,
        high=high,
        low_with_seeds=low_with_seeds,
        high_with_seeds=high_with_seeds,
        confidence=confidence,
        users=users,
        seeds=seeds,
    )


def _mean(totals: NDArray[np.float64], numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return totals divided by numbers; NaN for a resample without any known value."""
    return np.divide(totals, numbers, out=np.full_like(totals, np.nan), where=numbers > 0)
