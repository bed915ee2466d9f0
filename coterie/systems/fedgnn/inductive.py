r"""Users who never trained (FedIGNN): each fits its own row only, beside rows of items and a layer that stay.

From several random starts a user takes steps along its own derivative on all ratings but some that it holds out, and
the start that predicts these best is fitted again on all.  Nothing leaves the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.systems.fedgnn.attention import Graphs, gradients
from coterie.systems.fedgnn.local_step import stacked_graphs
from coterie.systems.fedgnn.mathematics import initial_factors
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared.biases import moving, scaled
from coterie.systems.shared.factor_steps import UserData

__all__ = ["STARTS", "STEPS", "fitted_rows"]

STARTS = 3
"""Random starts of a user."""
STEPS = 100
"""Steps from each start."""

_HELD_OUT, _START = 11, 12
"""First elements of the keys of draws; `coterie.systems.fedgnn.central` has a lower one."""

_SHARE = 0.1
"""Share of a user's ratings that it holds out to choose a start; at least one, unless there is one only."""


def fitted_rows(
    model: Mapping[str, NDArray[np.float32]],
    users: Sequence[UserData],
    settings: FedGnnSettings,
    keys: NDArray[np.integer],
    *,
    seed: int,
) -> NDArray[np.float32]:
    """Return rows of users with ratings who never trained, float32 (users, K + 2).

    Parameters
    ----------
    model : mapping
        A finished version.
    users : sequence of UserData
    settings : FedGnnSettings
    keys : ndarray of int, shape (users,)
        Each user's own number.
    seed : int
        Seed of the run.
    """
    starts = [_start(settings, keys, seed, which) for which in range(STARTS)]
    found = starts[0].copy()
    for stack, graphs, places in stacked_graphs(model["items"].astype(np.float64), users, found):
        ratings, held = np.zeros(places.shape), np.zeros(places.shape)
        for row, position in enumerate(stack):
            user = users[position]
            ratings[row, : len(user.items)] = scaled(settings, user.ratings)
            held[row, _held_out(len(user.items), int(keys[position]), seed)] = 1.0
        layers = np.repeat(model["layer"].astype(np.float64)[None], len(stack), axis=0)
        errors = []
        for start in starts:
            rows = start[stack].astype(np.float64)
            fitted = _fitted(
                layers, graphs._replace(users=rows), ratings, settings, graphs.rated * (1 - held)
            )
            missed = gradients(layers, graphs._replace(users=fitted), ratings).missed
            errors.append((held * missed * missed).sum(axis=1))
        best = np.argmin(np.stack(errors), axis=0)
        rows = np.stack([starts[which][user] for which, user in zip(best, stack, strict=True)])
        whole = _fitted(
            layers, graphs._replace(users=rows.astype(np.float64)), ratings, settings, graphs.rated
        )
        found[stack] = whole.astype(np.float32)
    return found


def _fitted(
    layers: NDArray[np.float64],
    graphs: Graphs,
    ratings: NDArray[np.float64],
    settings: FedGnnSettings,
    rated: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return users' rows after all steps on the ratings marked, which alone are in their graphs; (n, K + 2)."""
    of_users, now = moving(settings)[0], graphs._replace(rated=rated)
    for _ in range(STEPS):
        slope = gradients(layers, now, ratings).users + 2 * settings.ridge * now.users
        now = now._replace(users=now.users - settings.private_rate * of_users * slope)
    return now.users


def _start(settings: FedGnnSettings, keys: NDArray[np.integer], seed: int, which: int) -> NDArray[np.float32]:
    """Return users' first rows of a start; those of the first one are a trained user's."""
    if not which:
        return initial_factors(settings, keys)
    drawn = [
        int(np.random.SeedSequence(int(key), spawn_key=(_START, seed, which)).generate_state(1, np.uint64)[0])
        for key in keys
    ]
    return initial_factors(settings, drawn)


def _held_out(ratings: int, key: int, seed: int) -> NDArray[np.int64]:
    """Return the places of the ratings that a user holds out."""
    count = 0 if ratings < 2 else max(1, int(ratings * _SHARE))
    rng = np.random.default_rng(np.random.SeedSequence(key, spawn_key=(_HELD_OUT, seed)))
    return rng.permutation(ratings)[:count]
