r"""Mathematics of FPL, federated pair-wise learning (Anelli et al., 2022): scores, first rows, the server's step.

A user's score of an item is :math:`\hat x_{ui} = b_i + p_u q_i`.  Here an item's row is :math:`(b_i, q_i)` and a user's
factor :math:`(1, p_u)`, whose first value never moves: the score is their product.

A user keeps its items and :math:`p_u`; the orchestration server has the rows.  In a round users climb the
log-likelihood of the order of triples (u, i, j), :math:`\ln \sigma(\hat x_{ui} - \hat x_{uj})`, and contribute what
moves the rows (`coterie.systems.fpl.local_step`); the server takes a step along the sum (`apply`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.fpl.settings import FplSettings
from coterie.systems.shared import factors
from coterie.systems.shared.optimisers import Arrays, initial_state, step

__all__ = ["apply", "fewest_users", "initial", "initial_factors", "initial_server_state", "layout", "scores"]

_ITEMS, _FACTORS = 0, 1
"""First element of the key under which each use of a seed draws; `coterie.systems.fpl.local_step` has the others."""

_SPREAD = 0.1
"""Standard deviation of the initial factors."""


def initial(settings: FplSettings, n_items: int, seed: int) -> Arrays:
    """Return version 0 of the shared model: ``items``, float32 (n_items, 1 + K), with biases of 0."""
    items = _drawn(settings, n_items, seed, _ITEMS)
    items[:, 0] = 0
    return {"items": items}


def initial_factors(settings: FplSettings, keys: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
    """Return users' initial factors, float32 (users, 1 + K), each drawn from the user's own number."""
    found = np.empty((len(keys), settings.width), np.float32)
    for row, key in enumerate(keys):
        found[row] = _drawn(settings, 1, int(key), _FACTORS)[0]
    found[:, 0] = 1
    return found


def _drawn(settings: FplSettings, rows: int, seed: int, use: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(use,)))
    return rng.normal(0.0, _SPREAD, (rows, settings.width)).astype(np.float32)


def initial_server_state(settings: FplSettings, model: Mapping[str, NDArray[np.float32]]) -> Arrays:
    """Return the state of the server's optimiser before the first round."""
    return initial_state(settings.server, model)


def layout(settings: FplSettings, n_items: int) -> Layout:
    """Return the one segment of a contribution: ``items`` (n_items, 1 + K), updates of biases and factors."""
    return Layout((Segment("items", (n_items, settings.width), settings.item_bound, settings.bits),))


def apply(
    model: Mapping[str, NDArray[np.float32]],
    state: Mapping[str, NDArray[np.float32]],
    sums: Mapping[str, NDArray[np.floating]],
    settings: FplSettings,
) -> tuple[Arrays, Arrays]:
    r"""Return model and optimiser's state after a round.

    With ``fedsgd`` this is the paper's global aggregation, :math:`\Theta + \alpha \sum_u \Delta \Theta_u`.

    Parameters
    ----------
    model, state : mapping
        Model that users fetched, and state before the round; neither is changed.
    sums : mapping
        `Layout.decode` of a sum.
    settings : FplSettings
    """
    return step(settings.server, model, state, {"items": sums["items"]})


def fewest_users(settings: FplSettings) -> int:
    r"""Return the number of users below which a sum has fewer than two unknowns per value, whatever they have.

    Without the ridge, which the server knows, a user's update of an item is a number times the user's factor, or nearly
    so: the user has one number for each of :math:`m` items, and the sum has :math:`m (1 + K)` values.
    """
    return 2 * settings.width


def scores(
    model: Mapping[str, NDArray[np.float32]],
    users: NDArray[np.float32],
    opened: NDArray[np.bool_],
) -> NDArray[np.float32]:
    """Return users' scores of all items, float32 (users, n_items).

    Nothing is learned of closed items: they have one score, below that of every open one.

    Parameters
    ----------
    model : mapping
    users : ndarray of float32, shape (users, 1 + K)
        Users' factors.
    opened : ndarray of bool, shape (n_items,)

    Notes
    -----
    A user's scores have the same bits whichever other users are given (`coterie.systems.shared.factors.scores`).
    """
    found = factors.scores(model, users)
    found[:, ~opened] = found.min(axis=1, keepdims=True, initial=0) - 1
    return found
