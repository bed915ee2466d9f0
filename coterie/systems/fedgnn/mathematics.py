r"""Mathematics of FedGNN (Wu et al., *Federated Graph Neural Network for Privacy-Preserving Recommendation*, 2021).

A user's graph has its own node :math:`p`, the items that it rated, :math:`q_j`, and neighbours :math:`x_v`: users who
have items in common with it, without names.  One graph attention layer (Veličković et al., 2018) with one head makes
the user's hidden embedding,

.. math::

    s_n = \operatorname{LeakyReLU}(a_l p + a_r x_n), \qquad
    \alpha = \operatorname{softmax}(s), \qquad
    h = p + W \sum_n \alpha_n x_n,

over all nodes, the user's own included; the hidden embedding of an item, whose only node in its own graph is itself, is
:math:`q_j`.  A rating is predicted as :math:`b_u + b_j + h q_j` on the scale from -1 to 1.  In training :math:`h` for
item :math:`j` leaves :math:`j` out of the graph: an item that is to be predicted is not in it later either.

The paper has no biases and no :math:`p +`; ``docs/systems/fedgnn.md`` says what they are worth.  Rows hold biases as in
`coterie.systems.shared.biases`: :math:`(b_u, 1, p)` and :math:`(1, b_j, q_j)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared import factors
from coterie.systems.shared.optimisers import Arrays

__all__ = [
    "EMBEDDED",
    "apply",
    "initial",
    "initial_factors",
    "layout",
    "parts_of_layer",
    "sloped",
]

EMBEDDED = slice(2, None)
"""Place of the embedding in a row; the biases' columns come first."""

_SLOPE = 0.2
"""Slope of LeakyReLU below 0, as in the paper on graph attention."""

_LAYER = 6
"""First element of the key of the draw of the layer; `coterie.systems.shared.factors` has lower ones."""

_LAYER_SPREAD = 0.05
_SPREAD = 3.0
"""First embeddings beside those of other factorisations: with biases a product of small ones grows slowly."""


def initial(settings: FedGnnSettings, n_items: int, seed: int) -> Arrays:
    """Return version 0 of the shared model.

    Returns
    -------
    dict of str to ndarray of float32
        ``items`` (n_items, K + 2); ``layer`` (K + 2, K), the rows of ``W``, then ``a_l`` and ``a_r``.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_LAYER,)))
    layer = rng.normal(0.0, _LAYER_SPREAD, (settings.factors + 2, settings.factors)).astype(np.float32)
    items = _spread(factors.initial(settings.factor_settings(), n_items, 0, seed)["items"])
    return {"items": items, "layer": layer}


def initial_factors(
    settings: FedGnnSettings, keys: Sequence[int] | NDArray[np.integer]
) -> NDArray[np.float32]:
    """Return users' initial rows :math:`(b_u, 1, p)`, float32 (users, K + 2), each drawn from the user's own number."""
    return _spread(factors.initial_factors(settings.factor_settings(), keys))


def _spread(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows with embeddings further apart."""
    rows[:, EMBEDDED] *= np.float32(_SPREAD)
    return rows


def layout(settings: FedGnnSettings, n_items: int) -> Layout:
    """Return the segments of a contribution: ``items`` (n_items, K + 2) and ``layer`` (K + 2, K), changes of both."""
    layer = Segment("layer", (settings.factors + 2, settings.factors), settings.layer_bound, settings.bits)
    return factors.layout(settings.factor_settings(), n_items, 0, (layer,))


def parts_of_layer(
    layer: NDArray[np.floating],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return ``W`` (K, K), ``a_l`` (K,) and ``a_r`` (K,) of a layer, float64."""
    whole = layer.astype(np.float64)
    return whole[:-2], whole[-2], whole[-1]


def sloped(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the slope of LeakyReLU at each value."""
    found: NDArray[np.float64] = np.where(logits > 0, 1.0, _SLOPE)
    return found


def apply(
    model: Mapping[str, NDArray[np.float32]],
    sums: Mapping[str, NDArray[np.floating]],
    *,
    raters: NDArray[np.floating],
    users: float,
) -> Arrays:
    r"""Make the next version of the model from the sums of a round.

    Parameters
    ----------
    model : mapping
        Version of the model that users fetched.
    sums : mapping
        `Layout.decode` of a layout that begins with `layout`.
    raters : ndarray of float, shape (n_items,)
        Number of raters of each item among the users of the sums, or its expectation.
    users : float
        Number of users of the sums.

    Returns
    -------
    dict of str to ndarray of float32
        ``items``, moved by the mean change of each row over its raters, and ``layer``, by the mean over users.
    """
    change = np.asarray(sums["items"], np.float64)
    divisor = np.asarray(raters, np.float64)[:, None]
    change = np.divide(change, divisor, out=np.zeros_like(change), where=divisor > 0)
    layer = np.asarray(sums["layer"], np.float64) / max(users, 1.0)
    return {
        "items": (model["items"] + change).astype(np.float32),
        "layer": (model["layer"] + layer).astype(np.float32),
    }
