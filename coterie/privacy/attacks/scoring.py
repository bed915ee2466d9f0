"""Scores of an attacker's guesses, against the truth and beside those of popularity alone.

An attack that does no better than popularity learns nothing from the transcript, even where its AUC is far
above one half: most people watched the most popular films.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coterie.errors import DataError

__all__ = ["FlagAccuracies", "Truth", "flag_accuracies", "mean_auc", "with_popularity"]

Scores = npt.NDArray[np.float32] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class Truth:
    """The users' true interactions, which the attacker wants to know.

    Attributes
    ----------
    users : ndarray of int, shape (p,)
        Slot of each pair's user.
    items : ndarray of int, shape (p,)
        Index of its item.
    positive : ndarray of bool, shape (p,)
        Its flag.
    n_users, n_items : int
        Numbers of slots and items; ids are below.

    Raises
    ------
    DataError
        When the arrays do not fit each other or the numbers.
    """

    users: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    positive: npt.NDArray[np.bool_]
    n_users: int
    n_items: int

    def __post_init__(self) -> None:
        if not len(self.users) == len(self.items) == len(self.positive):
            raise DataError(
                f"{len(self.users)} users, {len(self.items)} items, {len(self.positive)} flags: not pairs"
            )
        for name, ids, limit in (("user", self.users, self.n_users), ("item", self.items, self.n_items)):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
                raise DataError(f"a {name} of the truth is outside 0 to {limit - 1}")

    def consumed(self) -> npt.NDArray[np.bool_]:
        """Return which user has which item, bool (n_users, n_items)."""
        matrix = np.zeros((self.n_users, self.n_items), dtype=np.bool_)
        matrix[self.users, self.items] = True
        return matrix

    def popularity(self) -> npt.NDArray[np.float64]:
        """Return the number of users who have each item, float64 (n_items,)."""
        return np.asarray(self.consumed().sum(axis=0), dtype=np.float64)


def with_popularity(
    scores: npt.NDArray[np.float32], popularity: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return scores, float64 (U, I), in which popularity breaks ties.

    An attacker can use both.  Interactions that never became part of a block leave no
    trace in any message, so scores alone may lie below popularity although every trained pair is known.
    """
    return scores + 1e-4 * popularity / max(float(popularity.max(initial=0)), 1.0)


def mean_auc(scores: Scores, consumed: npt.NDArray[np.bool_]) -> tuple[float | None, int]:
    """Return the mean AUC with which scores tell each user's items from the others.

    Parameters
    ----------
    scores : ndarray of float, shape (U, I) or (I,)
        Higher for items that the attacker holds to be the user's; one row stands for all users.
    consumed : ndarray of bool, shape (U, I)
        The truth.

    Returns
    -------
    auc : float or None
        Area under the ROC curve of each user's items against the rest, equal scores counted half, averaged
        over users; None without any.
    users : int
        Users counted: those with some items but not all.
    """
    held = consumed.sum(axis=1)
    counted = np.flatnonzero((held > 0) & (held < consumed.shape[1]))
    shared = _ranks(scores) if scores.ndim == 1 else None
    areas = [
        _area(shared if shared is not None else _ranks(scores[user]), consumed[user]) for user in counted
    ]
    return (float(np.mean(areas)) if areas else None), len(areas)


class FlagAccuracies(NamedTuple):
    """Shares of pairs whose flag was guessed right; None without any pair."""

    votes: float | None
    """Share by the attacker's votes."""
    majority: float | None
    """Share by the commonest flag of all, without a transcript."""
    item_majority: float | None
    """Share by each item's commonest flag among its other users, from public counts of likes without a transcript."""


def flag_accuracies(
    truth: Truth, votes: npt.NDArray[np.float32], chosen: npt.NDArray[np.bool_]
) -> FlagAccuracies:
    """Return the shares of flags guessed right, with and without a transcript.

    Parameters
    ----------
    truth : Truth
        p pairs.
    votes : ndarray of float32, shape (p,)
        Above zero where the attacker holds a pair to be positive, below where negative, zero where it cannot
        say and guesses the commonest flag.
    chosen : ndarray of bool, shape (p,)
        The pairs to guess.

    Returns
    -------
    FlagAccuracies
        The item's majority leaves the guessed pair out and falls back on the commonest flag where it is
        split.
    """
    if not chosen.any():
        return FlagAccuracies(None, None, None)
    likes = np.bincount(truth.items[truth.positive], minlength=truth.n_items)
    flags = np.bincount(truth.items, minlength=truth.n_items)
    common = bool(2 * likes.sum() >= flags.sum())
    # Twice the likes less the flags, without the pair itself: above zero when most others like the item.
    balance = 2 * (likes[truth.items] - truth.positive) - (flags[truth.items] - 1)
    guesses = (_or_common(votes, common), np.full(len(votes), common), _or_common(balance, common))
    return FlagAccuracies(*(float(np.mean((guess == truth.positive)[chosen])) for guess in guesses))


def _or_common(
    balance: npt.NDArray[np.float32] | npt.NDArray[np.int64], common: bool
) -> npt.NDArray[np.bool_]:
    return np.where(balance == 0, common, balance > 0)


def _ranks(scores: Scores) -> npt.NDArray[np.float64]:
    """Return ranks from 1, equal scores sharing their mean rank."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank: npt.NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return mean_rank[inverse]


def _area(ranks: npt.NDArray[np.float64], consumed: npt.NDArray[np.bool_]) -> float:
    inside = int(consumed.sum())
    outside = len(consumed) - inside
    return float((ranks[consumed].sum() - inside * (inside + 1) / 2) / (inside * outside))
