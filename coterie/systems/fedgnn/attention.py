r"""The attention layer of FedGNN over many users' graphs at once: hidden embeddings, predictions and their gradients.

Users' graphs are padded to one number of items.  Products by the layer are of a user's own matrices, and NumPy adds up
everything else itself: a user's numbers have the same bits on one kind of machine, whichever users share its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.systems.fedgnn.mathematics import EMBEDDED, parts_of_layer, sloped
from coterie.systems.shared.biases import ITEM, USER

__all__ = ["GraphGradients", "Graphs", "gradients", "hidden"]


class Graphs(NamedTuple):
    """The graphs of ``n`` users with ``w`` items and ``m`` neighbours at most."""

    users: NDArray[np.float64]
    """Users' own rows, (n, K + 2)."""
    items: NDArray[np.float64]
    """Rows of their items, (n, w, K + 2)."""
    rated: NDArray[np.float64]
    """1 where there is an item, else 0; (n, w)."""
    neighbours: NDArray[np.float64]
    """Embeddings of their neighbours, (n, m, K)."""
    known: NDArray[np.float64]
    """1 where there is a neighbour, else 0; (n, m)."""


class GraphGradients(NamedTuple):
    r"""Derivatives of a user's mean squared error over its items, for each user.

    Those by rows of items are those of the *sum* of squared errors: the server divides by an item's raters.
    """

    missed: NDArray[np.float64]
    """Rating less prediction, (n, w); 0 where there is no item."""
    users: NDArray[np.float64]
    """(n, K + 2)."""
    items: NDArray[np.float64]
    """(n, w, K + 2)."""
    layers: NDArray[np.float64]
    """(n, K + 2, K), or (1, K + 2, K) for a common layer."""


class _Attention(NamedTuple):
    own: NDArray[np.float64]
    """Weight of the user's own node before normalisation, (n,)."""
    items: NDArray[np.float64]
    """(n, w)."""
    neighbours: NDArray[np.float64]
    """(n, m)."""
    slopes: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
    """Of LeakyReLU at the three."""
    total: NDArray[np.float64]
    """Sum of the weights, (n,)."""
    gathered: NDArray[np.float64]
    """Weighted sum of all nodes, (n, K)."""


def hidden(layer: NDArray[np.floating], graphs: Graphs) -> NDArray[np.float64]:
    """Return users' hidden rows :math:`(b_u, 1, h)`, (n, K + 2), of all nodes of their graphs.

    Parameters
    ----------
    layer : ndarray, shape (K + 2, K)
    graphs : Graphs
    """
    found = _attention(np.broadcast_to(layer, (len(graphs.users), *layer.shape)).astype(np.float64), graphs)
    weights = parts_of_layer(layer)[0]
    rows = graphs.users.copy()
    mean = found.gathered / found.total[:, None]
    rows[:, EMBEDDED] += np.einsum("kl,nl->nk", weights, mean)
    return rows


def _attention(layers: NDArray[np.float64], graphs: Graphs) -> _Attention:
    """Attend with each user's own layer (n, K + 2, K)."""
    p, q, x = graphs.users[:, EMBEDDED], graphs.items[:, :, EMBEDDED], graphs.neighbours
    left, right = layers[:, -2], layers[:, -1]
    by_user = np.einsum("nk,nk->n", p, left)
    logits = (
        by_user + np.einsum("nk,nk->n", p, right),
        by_user[:, None] + np.einsum("nwk,nk->nw", q, right),
        by_user[:, None] + np.einsum("nmk,nk->nm", x, right),
    )
    slopes = (sloped(logits[0]), sloped(logits[1]), sloped(logits[2]))
    own, items, others = (logit * slope for logit, slope in zip(logits, slopes, strict=True))
    # Any common shift leaves the softmax as it is; this one keeps the exponentials finite.
    highest = np.maximum(own, np.where(graphs.rated > 0, items, -np.inf).max(axis=1, initial=-np.inf))
    highest = np.maximum(highest, np.where(graphs.known > 0, others, -np.inf).max(axis=1, initial=-np.inf))
    own = np.exp(own - highest)
    items = graphs.rated * np.exp(np.minimum(items - highest[:, None], 0.0))
    others = graphs.known * np.exp(np.minimum(others - highest[:, None], 0.0))
    total = own + items.sum(axis=1) + others.sum(axis=1)
    gathered = own[:, None] * p + np.einsum("nw,nwk->nk", items, q) + np.einsum("nm,nmk->nk", others, x)
    return _Attention(own, items, others, slopes, total, gathered)


def gradients(layers: NDArray[np.float64], graphs: Graphs, ratings: NDArray[np.float64]) -> GraphGradients:
    r"""Return errors and derivatives, each item predicted by the graph without it.

    Without item :math:`j` the weights' sum is :math:`D_j = Z - e_j`, the mean of the nodes
    :math:`m_j = (S - e_j q_j) / D_j`.  The derivative by :math:`m_j` is :math:`t_j = g_j W^T q_j` for
    :math:`g_j = -2 (r_j - \hat r_j)`; those by :math:`S`, :math:`Z` and the single weights follow from it.

    Parameters
    ----------
    layers : ndarray of float64, shape (n, K + 2, K)
        Each user's own copy of the layer.
    graphs : Graphs
    ratings : ndarray of float64, shape (n, w)
        On the scale from -1 to 1; any value where there is no item.
    """
    p, q, x = graphs.users[:, EMBEDDED], graphs.items[:, :, EMBEDDED], graphs.neighbours
    weights, left, right = layers[:, :-2], layers[:, -2], layers[:, -1]
    found = _attention(layers, graphs)
    without = found.total[:, None] - found.items
    mean = (found.gathered[:, None, :] - found.items[:, :, None] * q) / without[:, :, None]
    turned = np.matmul(q, weights)
    product = np.einsum("nwk,nk->nw", q, p) + np.einsum("nwk,nwk->nw", turned, mean)
    biases = graphs.users[:, USER, None] + graphs.items[:, :, ITEM]
    missed = graphs.rated * (ratings - biases - product)
    error = -2 * missed

    by_mean = error[:, :, None] * turned / without[:, :, None]
    of_mean = np.einsum("nwk,nwk->nw", by_mean, mean)
    by_gathered = by_mean.sum(axis=1)
    by_total = -of_mean.sum(axis=1)
    # Derivatives by the weights before normalisation, times these weights and the slopes: those by the logits.
    of_own = (np.einsum("nk,nk->n", by_gathered, p) + by_total) * found.own * found.slopes[0]
    left_out = np.einsum("nwk,nwk->nw", by_mean, q) - of_mean
    of_items = np.einsum("nwk,nk->nw", q, by_gathered) + by_total[:, None] - left_out
    of_items = of_items * found.items * found.slopes[1]
    of_others = np.einsum("nmk,nk->nm", x, by_gathered) + by_total[:, None]
    of_others = of_others * found.neighbours * found.slopes[2]
    of_all = of_own + of_items.sum(axis=1) + of_others.sum(axis=1)

    by_users, by_items = np.zeros_like(graphs.users), np.zeros_like(graphs.items)
    errors_by_row = np.einsum("nw,nwk->nk", error, q)
    by_users[:, USER] = error.sum(axis=1)
    by_users[:, EMBEDDED] = (
        errors_by_row + found.own[:, None] * by_gathered + of_own[:, None] * right + of_all[:, None] * left
    )
    by_items[:, :, ITEM] = error
    by_items[:, :, EMBEDDED] = (
        error[:, :, None] * (p[:, None, :] + np.matmul(mean, weights.swapaxes(1, 2)))
        + found.items[:, :, None] * (by_gathered[:, None, :] - by_mean)
        + of_items[:, :, None] * right[:, None, :]
    )
    by_layers = np.empty((len(p), *layers.shape[1:]))
    by_layers[:, :-2] = np.matmul((error[:, :, None] * q).swapaxes(1, 2), mean)
    by_layers[:, -2] = of_all[:, None] * p
    by_layers[:, -1] = (
        of_own[:, None] * p + np.einsum("nw,nwk->nk", of_items, q) + np.einsum("nm,nmk->nk", of_others, x)
    )
    rated = np.maximum(graphs.rated.sum(axis=1), 1.0)
    return GraphGradients(missed, by_users / rated[:, None], by_items, by_layers / rated[:, None, None])
