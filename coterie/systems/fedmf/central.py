r"""FedMF trained with all ratings in one place, equal but for rounding to a federation of all users.

Steps and initial factors are the same, but written over the list of ratings instead of user by user, without cohorts,
sums, bounds and quantisation.  There are no stragglers in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.systems.fedmf.mathematics import initial, initial_factors, moving, scaled
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.shared import optimisers

__all__ = ["CentralFactors", "train"]


@dataclass(frozen=True, eq=False)
class CentralFactors:
    """Factors of all users and items after some rounds.

    Parameters
    ----------
    users : ndarray of float64, shape (n_users, K)
    items : ndarray of float64, shape (n_items, K)
    """

    users: NDArray[np.float64]
    items: NDArray[np.float64]


def train(
    user: NDArray[np.integer],
    item: NDArray[np.integer],
    rating: NDArray[np.floating],
    settings: FedMfSettings,
    keys: Sequence[int] | NDArray[np.integer],
    n_items: int,
    *,
    rounds: int,
    seed: int,
    trained: NDArray[np.bool_] | None = None,
    optimiser: optimisers.ServerOptimiser | None = None,
) -> Iterator[CentralFactors]:
    """Train FedMF centrally, and yield the factors before the first round and after each one.

    Parameters
    ----------
    user, item : ndarray of int, shape (N,)
        Positions of user and item; no pair twice.
    rating : ndarray of float, shape (N,)
    settings : FedMfSettings
    keys : sequence of int
        Each user's own number, from which its initial factor is drawn.
    n_items, rounds, seed : int
    trained : ndarray of bool, shape (n_items,), optional
        Items whose rows move; all if left out.
    optimiser : ServerOptimiser, optional
        Optimiser that moves the factors of items along the change of a round; that change itself if left out.
    """
    p = initial_factors(settings, keys).astype(np.float64)
    q = initial(settings, n_items, seed)["items"].astype(np.float64)
    of_users, of_items = moving(settings)
    opened = np.ones(n_items, np.bool_) if trained is None else trained
    rating = scaled(settings, rating)
    of_user, of_item = np.bincount(user, minlength=len(p)), np.bincount(item, minlength=n_items)
    averaged = settings.steps == "mean"
    by_user = (np.maximum(of_user, 1) if averaged else np.ones(len(p)))[:, None]
    by_item = (np.maximum(of_item, 1) if averaged else np.ones(n_items))[:, None]
    active = (of_user > 0)[:, None]
    travelled = settings.local_epochs * settings.rate
    own, common = np.zeros((len(item) if settings.scaffold else 0, q.shape[1])), np.zeros_like(q)
    moments = (
        {} if optimiser is None else optimisers.initial_state(optimiser, {"items": q.astype(np.float32)})
    )
    yield CentralFactors(p, q)
    for _ in range(rounds):
        rows = q[item]  # each rating has its own copy, as each user has
        for _ in range(settings.local_epochs):
            mine = p[user]
            missed = rating - (mine * rows).sum(axis=1)
            pulled = _summed(user, missed[:, None] * rows, len(p))
            slope = active * (-2 * pulled / by_user + 2 * settings.ridge * p)
            step = -2 * missed[:, None] * mine + 2 * settings.ridge * rows
            step += settings.proximal * (rows - q[item])
            if settings.scaffold:
                step = optimisers.corrected(step, own, common[item])
            rows = rows - settings.rate * (opened[item][:, None] * of_items * step)
            p = p - settings.private_rate * (of_users * slope)
        change = _summed(item, rows - q[item], n_items) / by_item
        if settings.scaffold:
            own = optimisers.next_control(own, common[item], rows - q[item], travelled)
            common = optimisers.next_common(common, change, travelled, 1.0)
        if optimiser is None:
            q = q + change
        else:
            before = {"items": q.astype(np.float32)}
            moved, moments = optimisers.step(optimiser, before, moments, {"items": change})
            q = moved["items"].astype(np.float64)
        yield CentralFactors(p, q)


def _summed(index: NDArray[np.integer], values: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Return sums of the rows of ``values`` by index, float64 (n, K)."""
    columns = [np.bincount(index, weights=column, minlength=n) for column in values.T]
    return np.stack(columns, axis=1)
