r"""Attention of FedIDCF: a user's weights of pseudo meta-latents, from what the user likes.

With rows of items :math:`q_j` and biases :math:`b_j` of phase 1, a user has a bias fitted by itself and a direction,

.. math::

    b_u = \frac{\sum_j (r_{uj} - b_j)}{n_u + 3}, \qquad
    d_u = \frac{\sum_j (r_{uj} - b_j - b_u) q_j}{n_u + 10},

and with pseudo meta-latents :math:`p_k`

.. math::

    c = \operatorname{softmax}_k\Bigl(\frac{(d_u W_q)(p_k W_k)}{\sqrt h}\Bigr), \qquad p_u = \sum_k c_k p_k.

The paper prints :math:`e^T [W_q d, W_k p_k]` without an exponential, which is not bounded; with one the user's part
cancels in the normalisation, and everybody gets the same vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["LIKED_SHRINK", "USER_SHRINK", "Attention", "Told", "gradients_of", "told"]

_Floats = NDArray[np.float64]

USER_SHRINK = 3.0
"""Ratings of 0 that a user's bias counts beside its own."""

LIKED_SHRINK = 10.0
"""Ratings of 0 that a user's direction counts beside its own."""


class Told(NamedTuple):
    """What ratings tell about a user."""

    bias: float
    liked: _Floats
    """Direction, shape (K,)."""


def told(rows: NDArray[np.floating], ratings: NDArray[np.floating]) -> Told:
    """Return a user's bias and direction.

    Parameters
    ----------
    rows : ndarray of float, shape (n, K + 2)
        Rows (1, b_j, q_j) of the items that the user has rated; none gives a bias of 0.
    ratings : ndarray of float, shape (n,)
        On the scale from -1 to 1.
    """
    wide = rows.astype(np.float64)
    missed = ratings.astype(np.float64) - wide[:, 1]
    bias = float(missed.sum() / (len(missed) + USER_SHRINK))
    liked = np.einsum("j,jk->k", missed - bias, wide[:, 2:]) / (len(missed) + LIKED_SHRINK)
    return Told(bias, liked)


class Attention:
    """The attention at one version of the model.

    Parameters
    ----------
    model : mapping
        ``query`` and ``key``, (K, h) each.
    latents : ndarray of float64, shape (count, K)
        Pseudo meta-latents with mean and variance of key users.
    unit : float
        Root mean square of the values of key users' directions, above 0.
    """

    def __init__(self, model: Mapping[str, NDArray[np.float32]], latents: _Floats, unit: float) -> None:
        self.query, self.key = model["query"].astype(np.float64), model["key"].astype(np.float64)
        self.latents = latents
        self._unit = unit
        self._scaled = latents / max(float(latents.std(axis=0).mean()), 1e-12)
        self._inner = np.einsum("ck,kh->ch", self._scaled, self.key)
        self._root = float(np.sqrt(self.query.shape[1]))

    def weights(self, liked: _Floats) -> _Floats:
        """Return a user's weights of pseudo meta-latents, shape (count,); they sum to 1."""
        asked = np.einsum("k,kh->h", liked / self._unit, self.query)
        scores = np.einsum("ch,h->c", self._inner, asked) / self._root
        grown = np.exp(scores - scores.max())
        found: _Floats = grown / grown.sum()
        return found

    def vector(self, liked: _Floats) -> _Floats:
        """Return a user's vector, shape (K,)."""
        found: _Floats = np.einsum("c,ck->k", self.weights(liked), self.latents)
        return found

    def gradients(self, liked: _Floats, slope: _Floats) -> tuple[_Floats, _Floats]:
        """Return a user's gradients of both parameters, shape (K, h) each.

        Parameters
        ----------
        liked : ndarray of float64, shape (K,)
        slope : ndarray of float64, shape (K,)
            Gradient of the user's loss along its vector.
        """
        weights = self.weights(liked)
        along = np.einsum("ck,k->c", self.latents, slope)
        by_score = weights * (along - np.einsum("c,c->", weights, along)) / self._root
        direction = liked / self._unit
        asked = np.einsum("k,kh->h", direction, self.query)
        by_query = np.outer(direction, np.einsum("c,ch->h", by_score, self._inner))
        by_key = np.outer(np.einsum("c,ck->k", by_score, self._scaled), asked)
        return by_query, by_key


def gradients_of(
    attention: Attention,
    rows: NDArray[np.floating],
    ratings: NDArray[np.floating],
    rng: np.random.Generator,
) -> tuple[_Floats, _Floats]:
    """Return a user's gradients of both parameters, by half of its ratings, for the vector that the other half gives.

    Parameters
    ----------
    attention : Attention
    rows, ratings
        As for `told`.
    rng : Generator
        Draws which ratings are told, and which are predicted.
    """
    wide, wanted = rows.astype(np.float64), ratings.astype(np.float64)
    shown = rng.random(len(wanted)) < 0.5
    known, asked = told(wide[shown], wanted[shown]), wide[~shown]
    found = known.bias + asked[:, 1] + np.einsum("jk,k->j", asked[:, 2:], attention.vector(known.liked))
    slope = np.einsum("j,jk->k", 2 * (found - wanted[~shown]), asked[:, 2:])
    return attention.gradients(known.liked, slope)
