r"""Evaluation of predicted ratings: the order of a user's rated items, the search for liked ones, RMSE and MAE.

The protocol of MVMF (6.3 and appendix .2), with two candidate sets that must not be mixed up:

- ``ndcg_rated@k`` orders the user's *own rated* held-out items, so that it asks which of the items that a user took
  up it liked best.  A ranking by mean ratings is hard to beat there, and a random one is far from 0.
- ``precision@k``, ``recall@k`` and ``f1@k`` look for liked items (rated ``relevant_from`` or better) among *all*
  items that the user has not been seen with.  Most liked items are popular ones; mean ratings do badly.

As in `Holdout`, the same code measures at a client host, for references and for trivial rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError
from coterie.evaluation.holdout import TEST, TRAIN, VALIDATION
from coterie.evaluation.leave_one_out import ScoreAll
from coterie.evaluation.metrics import ranking

__all__ = ["RELEVANT_FROM", "Rated", "figures", "figures_of", "graded_ndcg"]

RELEVANT_FROM = 4.0
"""Lowest rating of an item that counts as liked (MVMF, appendix .2)."""

_PRINTED_RANKS = 5
"""Last rank of the sum in the paper's (54), though it is called DCG@10."""

_USERS_AT_ONCE = 256

_TRAINING = "train_"
_ERRORS = ("squared_error", "absolute_error", "ratings")
"""Sums over a user's ratings from which RMSE and MAE are computed."""


def graded_ndcg(
    user: NDArray[np.integer],
    scores: NDArray[np.floating],
    rating: NDArray[np.floating],
    n_users: int,
    k: int = 10,
) -> NDArray[np.float64]:
    r"""Return each user's NDCG over items with ratings.

    :math:`\sum_{i \le k} 2^{x_i - 1} / \log_2(i + 1)`, where :math:`x_i` is the rating of the item at rank :math:`i` by
    score, over the largest value that an order of the same items has (MVMF, (50) and (54)).  The gain of a rating of 1
    is 1, not 0: whatever the order, much of the ideal is reached.

    Equal scores count against the model: among them the lowest rating comes first.  Scores are compared as float32.

    Parameters
    ----------
    user : ndarray of int, shape (N,)
        Below ``n_users``.
    scores, rating : ndarray of float, shape (N,)
        Score and rating of one item of the user each; finite.
    n_users : int
    k : int
        At least 1.

    Returns
    -------
    ndarray of float64, shape (n_users,)
        NaN for users without an item.

    Raises
    ------
    ValueError
        Shapes that differ, or ``k`` below 1.
    """
    if not user.shape == scores.shape == rating.shape or user.ndim != 1:
        raise ValueError(
            f"user {user.shape}, scores {scores.shape}, rating {rating.shape}; expected one shape (N,)"
        )
    if k < 1:
        raise ValueError(f"k is {k}; expected at least 1")
    counts = np.bincount(user, minlength=n_users)
    first = np.cumsum(counts) - counts
    rank = np.arange(len(user)) - np.repeat(first, counts)
    discount = np.where(rank < k, 1 / np.log2(rank + 2.0), 0.0)
    best = np.full(n_users, -np.inf)
    np.maximum.at(best, user, rating)

    def gained(order: NDArray[np.intp]) -> NDArray[np.float64]:
        # A factor of each user, which leaves the quotient as it is, keeps gains on wide ranges of ratings finite.
        gain = np.exp2(rating[order] - best[user[order]]) * discount
        return np.bincount(user[order], weights=gain, minlength=n_users).astype(np.float64)

    reached = gained(np.lexsort((rating, -scores.astype(np.float32), user)))
    ideal = gained(np.lexsort((-rating, user)))
    found: NDArray[np.float64] = np.divide(reached, ideal, out=np.full(n_users, np.nan), where=counts > 0)
    return found


@dataclass(frozen=True, eq=False)
class Rated:
    """The hold-out of explicit ratings of ``n_users`` users for ``n_items`` items.

    Parameters
    ----------
    n_users, n_items : int
    user, item : ndarray of int, shape (N,)
        Positions of user and item; no pair twice.
    rating : ndarray of float, shape (N,)
    part : ndarray of int, shape (N,)
        ``TRAIN``, ``VALIDATION`` or ``TEST``.
    k : int
        Ranks that count.
    relevant_from : float
        Lowest rating of an item that counts as liked.
    among : ndarray of bool, shape (n_items,), optional
        Items that are ranked in the search among all unseen ones; for cold items these alone, as the paper's figures
        can only mean.  All items if left out.
    training : bool
        Whether errors over the training part are measured, too: how well a model fits what it learned from.

    Raises
    ------
    ValueError
        Arrays that do not fit each other, ``k`` below 1.
    """

    n_users: int
    n_items: int
    user: NDArray[np.integer]
    item: NDArray[np.integer]
    rating: NDArray[np.floating]
    part: NDArray[np.integer]
    k: int = 10
    relevant_from: float = RELEVANT_FROM
    among: NDArray[np.bool_] | None = None
    training: bool = False

    def __post_init__(self) -> None:
        shapes = [each.shape for each in (self.user, self.item, self.rating, self.part)]
        if len(set(shapes)) > 1 or self.user.ndim != 1:
            raise ValueError(f"user, item, rating and part have shapes {shapes}; expected one shape (N,)")
        for name, index, size in (("user", self.user, self.n_users), ("item", self.item, self.n_items)):
            if len(index) and not 0 <= index.min() <= index.max() < size:
                raise ValueError(f"{name} holds {index.min()} to {index.max()}; expected 0 to {size - 1}")
        if self.among is not None and self.among.shape != (self.n_items,):
            raise ValueError(f"among has shape {self.among.shape}; expected ({self.n_items},)")
        if self.k < 1:
            raise ValueError(f"k is {self.k}; expected at least 1")

    def names(self) -> tuple[str, ...]:
        """Return the keys of `measure`, in its order."""
        prefixes = ("", "validation_") if (self.part == VALIDATION).any() else ("",)
        stems = ("ndcg_rated@{k}", "ndcg_rated_printed@{k}", "precision@{k}", "recall@{k}", "ndcg@{k}")
        found = [prefix + stem.format(k=self.k) for prefix in prefixes for stem in (*stems, *_ERRORS)]
        return (*found, *(_TRAINING + name for name in _ERRORS if self.training))

    def measure(
        self, score_all: ScoreAll, users: NDArray[np.intp] | None = None
    ) -> dict[str, NDArray[np.float64]]:
        """Compute every metric of each user from predicted ratings.

        Parameters
        ----------
        score_all : callable
            Predicted ratings of all items for some users: positions (n,) to float (n, n_items), finite.
        users : ndarray of int, shape (n,), optional
            Measure these only; all if left out.

        Returns
        -------
        dict of str to ndarray of float64, shape (n_users,)
            NaN where a user has nothing to measure.

            ``ndcg_rated@k``
                `graded_ndcg` over the user's test items.
            ``ndcg_rated_printed@k``
                The same as (54) prints it: the sums end at rank 5.
            ``precision@k``, ``recall@k``, ``ndcg@k``
                `ranking` of all items that the user has not been seen with in training or validation, with the liked
                test items as relevant ones.  Users who liked none of their test items have no value.
            ``squared_error``, ``absolute_error``, ``ratings``
                Sums over the user's test items, and their number; `figures` makes RMSE and MAE of them.
            ``validation_...``
                The same for the validation part, where only training items have been seen.
            ``train_squared_error``, ``train_absolute_error``, ``train_ratings``
                The same for the training part, if ``training``.

        Raises
        ------
        RunError
            A score that is not finite: the model has diverged.
        ValueError
            Scores of another shape.
        """
        found = {name: np.full(self.n_users, np.nan) for name in self.names()}
        for chosen in self._batches(users):
            scores = score_all(chosen)
            if scores.shape != (len(chosen), self.n_items):
                raise ValueError(
                    f"scores have shape {scores.shape}; expected ({len(chosen)}, {self.n_items})"
                )
            self._judge("", TEST, (TRAIN, VALIDATION), chosen, scores, found)
            if (self.part == VALIDATION).any():
                self._judge("validation_", VALIDATION, (TRAIN,), chosen, scores, found)
            if self.training:
                row, _, predicted, rating = self._predicted(TRAIN, chosen, scores)
                for name, value in _errors(row, predicted, rating, len(chosen)).items():
                    found[_TRAINING + name][chosen] = value
        return found

    def _judge(
        self,
        prefix: str,
        held: int,
        seen: tuple[int, ...],
        chosen: NDArray[np.intp],
        scores: NDArray[np.floating],
        found: dict[str, NDArray[np.float64]],
    ) -> None:
        n, k = len(chosen), self.k
        place, rows = self._rows_of(chosen)
        row, item, predicted, rating = self._predicted(held, chosen, scores)
        candidates = np.ones((n, self.n_items), np.bool_)
        if self.among is not None:
            candidates[:] = self.among
        known = np.isin(self.part[rows], seen)
        candidates[place[known], self.item[rows[known]]] = False
        relevant = np.zeros((n, self.n_items), np.bool_)
        relevant[row, item] = rating >= self.relevant_from
        ranked = ranking(scores, relevant, candidates, k)
        values = {
            f"ndcg_rated@{k}": graded_ndcg(row, predicted, rating, n, k),
            f"ndcg_rated_printed@{k}": graded_ndcg(row, predicted, rating, n, min(k, _PRINTED_RANKS)),
            f"precision@{k}": ranked[f"precision@{k}"],
            f"recall@{k}": ranked[f"recall@{k}"],
            f"ndcg@{k}": ranked[f"ndcg@{k}"],
            **_errors(row, predicted, rating, n),
        }
        for name, value in values.items():
            found[prefix + name][chosen] = value

    def _predicted(
        self, part: int, chosen: NDArray[np.intp], scores: NDArray[np.floating]
    ) -> tuple[NDArray[np.intp], NDArray[np.integer], NDArray[np.float64], NDArray[np.float64]]:
        """Return the ratings of a part: position among the users chosen, item, predicted and true rating."""
        place, rows = self._rows_of(chosen)
        mine = self.part[rows] == part
        row, item, rating = place[mine], self.item[rows[mine]], self.rating[rows[mine]].astype(np.float64)
        predicted = scores[row, item].astype(np.float64)
        if not np.isfinite(predicted).all():
            raise RunError(
                "a predicted rating is not a finite number",
                hint="the model has diverged: a lower learning rate or more regularisation",
            )
        return row, item, predicted, rating

    def _batches(self, users: NDArray[np.intp] | None) -> Iterator[NDArray[np.intp]]:
        told = np.ones(len(self.part), np.bool_) if self.training else self.part != TRAIN
        counts = np.bincount(self.user[told], minlength=self.n_users)
        among = np.arange(self.n_users) if users is None else users
        measured = among[counts[among] > 0]
        for first in range(0, len(measured), _USERS_AT_ONCE):
            yield measured[first : first + _USERS_AT_ONCE]

    @cached_property
    def _by_user(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return rows user by user, (N,), and the bounds of each user's rows, (U + 1,)."""
        order = np.argsort(self.user, kind="stable")
        return order, np.searchsorted(self.user[order], np.arange(self.n_users + 1))

    def _rows_of(self, chosen: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the ratings of some users: position among these, and row."""
        order, bounds = self._by_user
        counts = bounds[chosen + 1] - bounds[chosen]
        starts = np.repeat(bounds[chosen] - (np.cumsum(counts) - counts), counts)
        return np.repeat(np.arange(len(chosen)), counts), order[starts + np.arange(int(counts.sum()))]


def _errors(
    row: NDArray[np.intp], predicted: NDArray[np.float64], rating: NDArray[np.float64], n: int
) -> dict[str, NDArray[np.float64]]:
    """Return the sums of errors over each user's ratings, float64 (n,); NaN where there are none."""
    counts = np.bincount(row, minlength=n)
    values = (
        _summed(row, (predicted - rating) ** 2, counts),
        _summed(row, np.abs(predicted - rating), counts),
        np.where(counts > 0, counts, np.nan),
    )
    return dict(zip(_ERRORS, values, strict=True))


def _summed(
    row: NDArray[np.intp], values: NDArray[np.float64], counts: NDArray[np.intp]
) -> NDArray[np.float64]:
    total = np.bincount(row, weights=values, minlength=len(counts))
    return np.where(counts > 0, total, np.nan)


def figures(measured: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    r"""Return the figures of a table from the metrics that `Rated.measure` returns.

    Parameters
    ----------
    measured : mapping of str to ndarray of float64, shape (n_users,)

    Returns
    -------
    dict of str to float
        As `figures_of`, without the numbers of users.
    """
    totals = {
        name: (float(np.nansum(value)), float(np.count_nonzero(~np.isnan(value))))
        for name, value in measured.items()
    }
    return {name: value for name, (value, _) in figures_of(totals).items()}


def user_errors(measured: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Return each user's own errors, ``user_rmse`` and ``user_mae``, from the metrics that `Rated.measure` returns.

    A root of a mean over all ratings belongs to no user; users are compared by these.
    """
    count = measured["ratings"]
    return {
        "user_rmse": np.sqrt(measured["squared_error"] / count),
        "user_mae": measured["absolute_error"] / count,
    }


def figures_of(totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
    r"""Return the figures of a table from sums over users of the metrics that `Rated.measure` returns.

    Parameters
    ----------
    totals : mapping of str to (float, float)
        Sum over the users that have a value, and their number.

    Returns
    -------
    dict of str to (float, int)
        Value, and number of users behind it: means over the users that have a value; instead of the sums of errors
        ``rmse`` and ``mae`` over all ratings of these users together; and ``f1@k``, :math:`2 P R / (P + R)` of the
        *mean* precision and recall (53), which is not the mean of users' own.
    """
    found = {
        name: (total / count, round(count))
        for name, (total, count) in totals.items()
        if count > 0 and not name.endswith(_ERRORS)
    }
    for prefix in ("", "validation_", _TRAINING):
        for name in [each for each in found if each.startswith(f"{prefix}precision@")]:
            precision, users = found[name]
            recall = found[name.replace("precision", "recall")][0]
            both = precision + recall
            found[name.replace("precision", "f1")] = (2 * precision * recall / both if both else 0.0, users)
        ratings, rated = totals.get(f"{prefix}ratings", (0.0, 0.0))
        if not ratings:
            continue
        if f"{prefix}squared_error" in totals:
            mean = totals[f"{prefix}squared_error"][0] / ratings
            found[f"{prefix}rmse"] = (math.sqrt(max(mean, 0.0)), round(rated))
        if f"{prefix}absolute_error" in totals:
            found[f"{prefix}mae"] = (totals[f"{prefix}absolute_error"][0] / ratings, round(rated))
    return found
