"""FedGNN trained with all ratings in one place, equal but for rounding to a federation of all users.

Users take the same steps; there are no cohorts, no sums of codes and no bounds.  Neighbours are known exactly: a user's
are drawn among all who rated an item that it rated, and their embeddings are those of the round.  Two simpler models
take the same steps: the product of embeddings without the layer, and biases alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coterie.systems.fedgnn.local_step import Neighbours, hidden_rows, local_step
from coterie.systems.fedgnn.mathematics import EMBEDDED, apply, initial, initial_factors
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared.factor_steps import UserData

__all__ = ["CentralGraph", "Form", "co_raters", "train"]

Form = Literal["graph", "product", "biases"]

_DRAWN = 10
"""First element of the key of the draw of neighbours; `coterie.systems.fedgnn.neighbours` has a lower one."""


@dataclass(frozen=True, eq=False)
class CentralGraph:
    """Hidden rows of all users and rows of items after some rounds.

    Parameters
    ----------
    users : ndarray of float32, shape (n_users, K + 2)
    items : ndarray of float32, shape (n_items, K + 2)
    """

    users: NDArray[np.float32]
    items: NDArray[np.float32]


def train(
    users: Sequence[UserData],
    settings: FedGnnSettings,
    keys: NDArray[np.integer],
    n_items: int,
    *,
    rounds: int,
    seed: int,
    trained: NDArray[np.bool_] | None = None,
    form: Form = "graph",
) -> Iterator[CentralGraph]:
    """Train centrally, and yield the rows before the first round and after each one.

    Parameters
    ----------
    users : sequence of UserData
        Each with ratings.
    settings : FedGnnSettings
    keys : ndarray of int, shape (n_users,)
        Each user's own number.
    n_items, rounds, seed : int
    trained : ndarray of bool, shape (n_items,), optional
        Items whose rows move; all if left out.
    form : {"graph", "product", "biases"}
        With the layer, without it, or without embeddings.
    """
    model, rows = initial(settings, n_items, seed), initial_factors(settings, keys)
    taken = settings
    if form != "graph":
        model["layer"][:] = 0
        taken = settings.model_copy(update={"layer_rate": 0.0, "neighbours": 0})
    if form == "biases":
        model["items"][:, EMBEDDED] = rows[:, EMBEDDED] = 0
    raters = np.bincount(np.concatenate([user.items for user in users]), minlength=n_items).astype(np.float64)
    around = co_raters(users, taken.neighbours, n_items, seed) if taken.neighbours else None
    known: Neighbours | None = None
    yield CentralGraph(hidden_rows(model, users, rows, known), model["items"])
    for round_ in range(rounds):
        if around is not None and round_ >= settings.neighbours_after:
            known = rows[around[0]][:, :, EMBEDDED], around[1]
        items, layer = np.zeros((n_items, settings.width)), np.zeros(model["layer"].shape)
        kept = rows.copy()
        for one in local_step(
            model, users, taken, keys, rows=rows, seed=seed, round_=round_, allowed=trained, neighbours=known
        ):
            items[one.rows] += one.change
            layer += one.layer
            kept[one.index] = one.kept
        model, rows = apply(model, {"items": items, "layer": layer}, raters=raters, users=len(users)), kept
        yield CentralGraph(hidden_rows(model, users, rows, known), model["items"])


def co_raters(
    users: Sequence[UserData], most: int, n_items: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw neighbours of each user among those who rated an item that it rated.

    Returns
    -------
    ndarray of int64, shape (n_users, most)
        Positions; 0 beyond the number.
    ndarray of int64, shape (n_users,)
        Number of neighbours.
    """
    rated = np.zeros((len(users), n_items), np.bool_)
    for place, user in enumerate(users):
        rated[place, user.items] = True
    found, counts = np.zeros((len(users), most), np.int64), np.zeros(len(users), np.int64)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_DRAWN,)))
    for place, user in enumerate(users):
        others = np.flatnonzero(rated[:, user.items].any(axis=1))
        drawn = rng.permutation(others[others != place])[:most]
        found[place, : len(drawn)], counts[place] = drawn, len(drawn)
    return found, counts
