"""Intersection attack: tells a user's rated items from its sampled ones by what it touched in several rounds.

Where unrated items are sampled to hide the rated ones, and drawn anew in each round, the rated ones are what all
rounds have in common.  Where they are drawn once and kept, all rounds show the same items, and the second says nothing
that the first did not: what remains is that the rated items are among those touched, and popularity between these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from coterie.errors import DataError
from coterie.privacy.attacks.scoring import mean_auc

__all__ = ["IntersectReport", "intersect", "report"]

Flags = npt.NDArray[np.bool_]


class IntersectReport(TypedDict):
    """Means over users, after some rounds; None where no user has a value.

    ``precision`` and ``recall``: of the items touched in every round, as the rated ones.  ``auc``: by the number of
    rounds in which an item was touched, popularity between equals, over all items; ``popularity_auc`` by popularity
    alone.  ``auc_touched``, ``popularity_auc_touched``: the same among the items that were touched at all, where
    popularity is all that is left once the first round has been seen.
    """

    rounds: int
    users: int
    precision: float | None
    recall: float | None
    auc: float | None
    popularity_auc: float | None
    auc_touched: float | None
    popularity_auc_touched: float | None


def intersect(rounds: Sequence[Flags]) -> Flags:
    """Return the items that a user touched in every round.

    Parameters
    ----------
    rounds : sequence of ndarray of bool, shape (m,)
        At least one.

    Raises
    ------
    DataError
        No round, or rounds over different numbers of items.
    """
    if not rounds or len({each.shape for each in rounds}) != 1:
        raise DataError(f"{len(rounds)} rounds to intersect; expected at least one, all over the same items")
    return np.asarray(np.logical_and.reduce(rounds))


def report(
    rounds: Sequence[Flags], rated: Flags, popularity: npt.NDArray[np.floating]
) -> list[IntersectReport]:
    """Attack after each round, and judge the results.

    Parameters
    ----------
    rounds : sequence of ndarray of bool, shape (n, m)
        Items that each of n users touched.
    rated : ndarray of bool, shape (n, m)
        The truth.
    popularity : ndarray, shape (m,)
        Number of users who rated each item, as publicly known.

    Returns
    -------
    list of IntersectReport
        One for each round.

    Raises
    ------
    DataError
        Arrays that do not fit each other.
    """
    if any(each.shape != rated.shape for each in rounds) or popularity.shape != rated.shape[1:]:
        raise DataError(
            f"rounds or popularity that do not fit {rated.shape[0]} users, {rated.shape[1]} items"
        )
    public = np.asarray(popularity, np.float64)
    between = public / (2 * max(float(public.max(initial=0)), 1.0))
    counts = np.zeros(rated.shape)
    found = []
    for at, touched in enumerate(rounds):
        counts += touched
        common = counts == at + 1
        hits = (common & rated).sum(axis=1)
        named, wanted = common.sum(axis=1), rated.sum(axis=1)
        scores = counts + between
        seen = counts > 0
        found.append(
            IntersectReport(
                rounds=at + 1,
                users=int(np.count_nonzero(wanted)),
                precision=_mean(hits[named > 0] / named[named > 0]),
                recall=_mean(hits[wanted > 0] / wanted[wanted > 0]),
                auc=mean_auc(scores, rated)[0],
                popularity_auc=mean_auc(public, rated)[0],
                auc_touched=_among(scores, rated, seen),
                popularity_auc_touched=_among(np.broadcast_to(public, rated.shape), rated, seen),
            )
        )
    return found


def _among(scores: npt.NDArray[np.float64], rated: Flags, seen: Flags) -> float | None:
    """Return the mean AUC over each user's touched items."""
    areas = [mean_auc(scores[u][seen[u]], rated[u][seen[u]][None])[0] for u in range(len(rated))]
    return _mean(np.array([area for area in areas if area is not None]))


def _mean(values: npt.NDArray[np.floating]) -> float | None:
    return float(values.mean()) if len(values) else None
