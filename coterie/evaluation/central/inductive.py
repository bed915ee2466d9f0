"""Models of explicit ratings that serve users by their ratings alone, at item factors that biased MF has learned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.central.interactions import Interactions
from coterie.evaluation.central.model import hyperparameter
from coterie.evaluation.central.ratings import BiasedMf
from coterie.evaluation.search import Choices, LogUniform

__all__ = ["Idcf", "RidgeFoldIn"]

_BIAS_DAMPING = 3.0
_LIKED_DAMPING = 10.0


@dataclass
class RidgeFoldIn(BiasedMf):
    r"""Ridge fold-in: items of biased MF; bias and factors of every user by a ridge regression on its own ratings.

    Minimises :math:`\sum_i (r_{ui} - \mu - b_i - b_u - p_u^T q_i)^2 + \lambda' (b_u^2 + |p_u|^2)` for each user.

    Parameters
    ----------
    own_ridge : float
        :math:`\lambda'`, which does not grow with the number of the user's ratings.
    """

    name = "ridge-fold-in"
    folds_in = False
    refusal = "it is a row of a table, and kept in no folder"
    label = "Ridge fold-in"
    note = "every user is served as if it had never trained, by the items of biased MF"

    own_ridge: float = hyperparameter(5.0, LogUniform(1.0, 50.0), above=0)

    def _learn(self, data: Interactions) -> None:
        super()._learn(data)
        ridge = np.diag(np.full(1 + self.factors, self.own_ridge))
        # Items beside a 1 for the user's bias.
        rows = np.column_stack([np.ones(data.n_items), self.items[:, 1:]])
        rest = data.rated() - self.mean - self.items[data.item, 0]
        order = np.argsort(data.user, kind="stable")
        ends = np.searchsorted(data.user[order], np.arange(data.n_users + 1))
        for user in range(data.n_users):
            own = order[ends[user] : ends[user + 1]]
            known = rows[data.item[own]]
            self.users[user] = np.linalg.solve(known.T @ known + ridge, known.T @ rest[own])


@dataclass
class Idcf(BiasedMf):
    r"""IDCF: a user's factors are a mean of key users' ones, weighted by attention (after Wu et al., 2021).

    Biased MF gives items and key users.  A user's ratings say what it likes, :math:`d = \sum_i e_{ui} q_i / (n_u + s)`
    with the errors :math:`e` of biases; its factors are :math:`\sum_k c_k p_k` with
    :math:`c = \mathrm{softmax}_k((d W_q)(p_k W_k) / \sqrt h)`.  In each step of Adam on both matrices a random half of
    everybody's ratings says what users like, and the other half is predicted.

    Parameters
    ----------
    keys : int
        Most key users, drawn at random among users with ratings.
    hidden : int
        :math:`h`.
    steps : int
    rate : float
        Step size of Adam.
    """

    name = "idcf"
    folds_in = False
    refusal = "it is a row of a table, and kept in no folder"
    label = "IDCF, after the paper"
    note = "attention over key users of biased MF (Wu et al., 2021), without the paper's finetuning"

    keys: int = hyperparameter(500, least=1)
    hidden: int = hyperparameter(16, Choices((8, 16, 32)), least=1)
    steps: int = hyperparameter(100, Choices((50, 100, 200)), least=0)
    rate: float = hyperparameter(0.02, LogUniform(3e-3, 0.1), above=0)

    def _learn(self, data: Interactions) -> None:
        super()._learn(data)
        rng = np.random.default_rng([self.seed, 1])
        rated = np.flatnonzero(np.bincount(data.user, minlength=data.n_users))
        keys = self.users[rng.permutation(rated)[: self.keys], 1:]
        # Lengths around 1 on both sides of the attention.
        named = keys / max(float(keys.std()), 1e-12)
        shape = self.factors, self.hidden
        weights = [rng.normal(0, self.factors**-0.5, shape) for _ in range(2)]
        rating = data.rated()
        scale = max(float(self._liked(data, rating, np.ones(len(data), np.bool_))[1].std()), 1e-12)
        moments = [np.zeros((2, *shape)) for _ in weights]
        for step in range(1, self.steps + 1):
            told = rng.random(len(data)) < 0.5
            bias, liked = self._liked(data, rating, told)
            liked /= scale
            asked = ~told
            user, item = data.user[asked], data.item[asked]
            shares = _attended(liked, named, weights)
            mixed = shares @ keys
            missed = self._shifted(bias, user, item) + (mixed[user] * self.items[item, 1:]).sum(axis=1)
            missed -= rating[asked]
            slope = _summed(user, 2 * missed / max(len(missed), 1), self.items[item, 1:], data.n_users)
            along = slope @ keys.T
            inner = shares * (along - (shares * along).sum(axis=1, keepdims=True)) / np.sqrt(self.hidden)
            found = (
                liked.T @ (inner @ (named @ weights[1])),
                named.T @ (inner.T @ (liked @ weights[0])),
            )
            for parameter, gradient, (first, second) in zip(weights, found, moments, strict=True):
                first += 0.1 * (gradient - first)
                second += 0.001 * (gradient**2 - second)
                corrected = np.sqrt(second / (1 - 0.999**step)) + 1e-8
                parameter -= self.rate * first / (1 - 0.9**step) / corrected
        bias, liked = self._liked(data, rating, np.ones(len(data), np.bool_))
        self.users = np.column_stack([bias, _attended(liked / scale, named, weights) @ keys])

    def _shifted(
        self, bias: NDArray[np.float64], user: NDArray[np.integer], item: NDArray[np.integer]
    ) -> NDArray[np.float64]:
        """Return predictions by biases alone."""
        found: NDArray[np.float64] = self.mean + bias[user] + self.items[item, 0]
        return found

    def _liked(
        self, data: Interactions, rating: NDArray[np.float64], told: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return users' biases (U,) and what they like (U, K), by those ratings that are told."""
        user, item, own = data.user[told], data.item[told], rating[told]
        counts = np.bincount(user, minlength=data.n_users)
        nothing = np.zeros(data.n_users)
        over = np.bincount(user, own - self._shifted(nothing, user, item), data.n_users)
        bias: NDArray[np.float64] = over / (counts + _BIAS_DAMPING)
        missed = own - self._shifted(bias, user, item)
        liked = _summed(user, missed, self.items[item, 1:], data.n_users)
        return bias, liked / (counts + _LIKED_DAMPING)[:, None]


def _attended(
    liked: NDArray[np.float64], named: NDArray[np.float64], weights: list[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return each user's shares of key users, (U, keys); rows sum to 1."""
    scores = (liked @ weights[0]) @ (named @ weights[1]).T / np.sqrt(weights[0].shape[1])
    grown = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: NDArray[np.float64] = grown / grown.sum(axis=1, keepdims=True)
    return found


def _summed(
    user: NDArray[np.integer], weights: NDArray[np.float64], rows: NDArray[np.float64], n_users: int
) -> NDArray[np.float64]:
    """Return the weighted sum of each user's rows, (n_users, K)."""
    return np.stack([np.bincount(user, weights * column, n_users) for column in rows.T], axis=1)
