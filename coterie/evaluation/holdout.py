"""The hold-out of a temporal or random split, and the ranking metrics of a report on it.

The same code measures at a client host (for its own users), for the centralised reference and for trivial rows, so
that rows of a table differ by their scores only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.metrics import pair_loss, ranking

__all__ = ["TEST", "TRAIN", "VALIDATION", "Holdout", "headline", "ranked_names", "sums"]

TRAIN, VALIDATION, TEST = 0, 1, 2
"""Numbers of a split's parts."""

_USERS_AT_ONCE = 256

Scores = Callable[[NDArray[np.intp]], NDArray[np.floating]]
"""Returns the scores of users, given by position (n,), for all items: float (n, I)."""


@dataclass(frozen=True)
class Holdout:
    """Interactions of ``n_users`` users with ``n_items`` items, divided into parts.

    Parameters
    ----------
    user, item : ndarray of int, shape (N,)
        Positions of user and item.
    positive : ndarray of bool, shape (N,)
        Whether the user liked the item.
    part : ndarray of int, shape (N,)
        ``TRAIN``, ``VALIDATION`` or ``TEST``.
    """

    n_users: int
    n_items: int
    user: NDArray[np.integer]
    item: NDArray[np.integer]
    positive: NDArray[np.bool_]
    part: NDArray[np.integer]

    def measure(
        self, scores: Scores, k: int = 10, *, only: Literal["validation", "test"] | None = None
    ) -> dict[str, NDArray[np.float64]]:
        """Compute every metric of each user from scores.

        Parameters
        ----------
        scores : callable
        k : int
        only : {"validation", "test"}, optional
            Part whose metrics are computed alone, where the other's are not needed.

        Returns
        -------
        dict of str to ndarray of float64, shape (n_users,)
            ``map@k``, ``ndcg@k``... over all items that the user has not interacted with in training or validation;
            ``..._test_items@k`` over the user's own test items; ``validation_...`` the same on the validation part,
            where only training items are excluded; ``test_loss``, the mean pair loss on the test part.  NaN where a
            user has nothing to measure.
        """
        collected: dict[str, list[NDArray[np.float64]]] = {}
        for chosen in self._batches():
            for name, values in self._measure(chosen, scores(chosen), k, only).items():
                collected.setdefault(name, []).append(values)
        return {name: np.concatenate(values) for name, values in collected.items()}

    def _batches(self) -> Iterator[NDArray[np.intp]]:
        for first in range(0, self.n_users, _USERS_AT_ONCE):
            yield np.arange(first, min(first + _USERS_AT_ONCE, self.n_users))

    def _measure(
        self, chosen: NDArray[np.intp], scores: NDArray[np.floating], k: int, only: str | None
    ) -> dict[str, NDArray[np.float64]]:
        inside = (self.user >= chosen[0]) & (self.user <= chosen[-1])
        row, item = self.user[inside] - chosen[0], self.item[inside]
        liked, part = self.positive[inside], self.part[inside]

        def cells(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
            grid = np.zeros((len(chosen), self.n_items), bool)
            grid[row[mask], item[mask]] = True
            return grid

        train, validation, test = (cells(part == which) for which in (TRAIN, VALIDATION, TEST))
        test_liked = cells((part == TEST) & liked)
        unseen = ~(train | validation)
        found = {}
        if only != "validation":
            found = {
                **ranking(scores, test_liked, unseen, k),
                **_renamed(ranking(scores, test_liked, test, k), suffix="_test_items"),
                "test_loss": pair_loss(scores, test_liked, test & ~test_liked),
            }
        # Whether any user has a validation part, not these alone, so that every figure has a value for every user.
        if only != "test" and (self.part == VALIDATION).any():
            validation_liked = cells((part == VALIDATION) & liked)
            over_unseen = ranking(scores, validation_liked, ~train, k)
            over_own = ranking(scores, validation_liked, validation, k)
            found |= _renamed(over_unseen, prefix="validation_")
            found |= _renamed(over_own, prefix="validation_", suffix="_items")
        return found


def ranked_names(k: int = 10) -> tuple[str, ...]:
    """Return the names of all metrics between 0 and 1 that `Holdout.measure` may find, in a fixed order."""
    nothing = np.zeros((1, 1), bool)
    found = ranking(np.zeros((1, 1)), nothing, nothing, k)
    return tuple(
        name
        for prefix, suffix in (("", ""), ("", "_test_items"), ("validation_", ""), ("validation_", "_items"))
        for name in _renamed(found, prefix=prefix, suffix=suffix)
    )


def _renamed(
    metrics: dict[str, NDArray[np.float64]], *, prefix: str = "", suffix: str = ""
) -> dict[str, NDArray[np.float64]]:
    renamed = {}
    for name, values in metrics.items():
        stem, at, rank = name.partition("@")
        renamed[f"{prefix}{stem}{suffix}{at}{rank}"] = values
    return renamed


def sums(measured: dict[str, NDArray[np.float64]]) -> tuple[list[str], NDArray[np.float64]]:
    """Return the metrics' names, and for each the sum over users with a value and their number, float64 (m, 2)."""
    names = list(measured)
    rows = [(np.nansum(measured[name]), np.count_nonzero(~np.isnan(measured[name]))) for name in names]
    return names, np.array(rows, np.float64).reshape(-1, 2)


def headline(measured: dict[str, NDArray[np.float64]]) -> dict[str, float]:
    """Return the mean of each metric over the users with a value."""
    names, rows = sums(measured)
    return {name: float(total / count) for name, (total, count) in zip(names, rows, strict=True) if count}
