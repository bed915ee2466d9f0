"""Models that predict ratings: means, biases, and factors with biases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.baselines import damped_mean, damped_offset
from coterie.evaluation.central.interactions import Interactions
from coterie.evaluation.central.model import Central, hyperparameter
from coterie.evaluation.search import Choices, LogUniform

__all__ = ["BiasedMf", "GlobalMean", "ItemMean", "UserItemBiases"]

_DAMPING = LogUniform(0.3, 50.0)


class _Biases(Central):
    """Base of models that predict a user's bias plus an item's mean."""

    learned = ("item_mean",)

    user_bias: NDArray[np.floating]
    item_mean: NDArray[np.floating]

    def _scores(self, users: NDArray[np.integer]) -> NDArray[np.floating]:
        scores: NDArray[np.floating] = self.user_bias[users][:, None] + self.item_mean
        return scores

    def _of_people(self, people: Interactions) -> NDArray[np.floating]:
        scores: NDArray[np.floating] = self._bias_of(people)[:, None] + self.item_mean
        return scores

    def _bias_of(self, data: Interactions) -> NDArray[np.floating]:
        """Return each user's bias by its ratings, (n_users,)."""
        return np.zeros(data.n_users)


@dataclass
class GlobalMean(_Biases):
    """Global mean: the mean of all training ratings, for every user and item."""

    name = "global-mean"
    label = "Global mean"

    def _learn(self, data: Interactions) -> None:
        self.item_mean = np.full(data.n_items, self._ratings(data).mean())
        self.user_bias = self._bias_of(data)


@dataclass
class ItemMean(_Biases):
    """Item mean: the mean of an item's training ratings, shrunk towards the mean of all (`damped_mean`)."""

    name = "item-mean"
    label = "Item mean"

    strength: float = hyperparameter(5.0, _DAMPING, above=0)

    def _learn(self, data: Interactions) -> None:
        self.item_mean = damped_mean(
            data.item.astype(np.int32), self._ratings(data), data.n_items, self.strength
        )
        self.user_bias = self._bias_of(data)


@dataclass
class UserItemBiases(_Biases):
    """User and item biases: the damped mean of an item plus the damped offset of a user (`damped_offset`).

    The item's mean is that of Koren (2010, section 2.1): first items, then users from what items leave.
    """

    name = "biases"
    label = "User and item biases"

    item_strength: float = hyperparameter(5.0, _DAMPING, above=0)
    user_strength: float = hyperparameter(5.0, _DAMPING, above=0)

    def _learn(self, data: Interactions) -> None:
        item = data.item.astype(np.int32)
        self.item_mean = damped_mean(item, self._ratings(data), data.n_items, self.item_strength)
        self.user_bias = self._bias_of(data)

    def _bias_of(self, data: Interactions) -> NDArray[np.floating]:
        user, item = data.user.astype(np.int32), data.item.astype(np.int32)
        rating = self._ratings(data)
        return damped_offset(user, item, rating, self.item_mean, data.n_users, self.user_strength)


@dataclass
class BiasedMf(Central):
    r"""Biases and factors: :math:`\hat r_{ui} = \mu + b_u + b_i + p_u^T q_i` (Koren et al., 2009).

    Minimises :math:`\sum (r_{ui} - \hat r_{ui})^2 + \lambda \sum_u |I_u| (b_u^2 + \|p_u\|^2) + \lambda \sum_i |U_i|
    (b_i^2 + \|q_i\|^2)` (the weighted ridge of Zhou et al., 2008), by solving for all users, then for all items.

    Parameters
    ----------
    factors : int
    ridge : float
        :math:`\lambda`.
    epochs : int
        Number of times that users and items are solved for.
    """

    name = "biased-mf"
    label = "Biased MF"
    note = "alternating least squares with a weighted ridge (Koren et al., 2009; Zhou et al., 2008)"
    learned = ("mean", "items")

    factors: int = hyperparameter(16, Choices((4, 8, 16, 32)), least=1)
    ridge: float = hyperparameter(0.1, LogUniform(0.02, 0.5), above=0)
    epochs: int = hyperparameter(15, Choices((5, 10, 15, 30)), least=1)

    def _learn(self, data: Interactions) -> None:
        rating = self._ratings(data)
        rng = np.random.default_rng(self.seed)
        self.mean = np.array([rating.mean()])
        # The first column of either side is the bias, by which the other side's 1 is multiplied.
        self.users = np.zeros((data.n_users, 1 + self.factors))
        self.items = rng.normal(0, 0.1, (data.n_items, 1 + self.factors))
        self.items[:, 0] = 0
        rest = rating - self.mean
        by_user = _by_row(data.user, data.n_users)
        by_item = _by_row(data.item, data.n_items)
        for _ in range(self.epochs):
            self._solve(self.users, by_user, data.item, rest, self.items)
            self._solve(self.items, by_item, data.user, rest, self.users)

    def _solve(
        self,
        solved: NDArray[np.float64],
        rows: list[NDArray[np.intp]],
        other: NDArray[np.integer],
        rest: NDArray[np.float64],
        others: NDArray[np.float64],
    ) -> None:
        """Solve for bias and factors of each row, with the other side fixed; a row without ratings has 0."""
        for row, places in enumerate(rows):
            if not len(places):
                solved[row] = 0
                continue
            facing = others[other[places]]
            design = np.column_stack([np.ones(len(places)), facing[:, 1:]])
            normal = design.T @ design
            normal[np.diag_indices(len(normal))] += self.ridge * len(places)
            solved[row] = np.linalg.solve(normal, design.T @ (rest[places] - facing[:, 0]))

    def _scores(self, users: NDArray[np.integer]) -> NDArray[np.floating]:
        return self._predicted(self.users[users])

    def _of_people(self, people: Interactions) -> NDArray[np.floating]:
        own = np.zeros((people.n_users, 1 + self.factors))
        by_user = _by_row(people.user, people.n_users)
        self._solve(own, by_user, people.item, self._ratings(people) - self.mean, self.items)
        return self._predicted(own)

    def _predicted(self, own: NDArray[np.float64]) -> NDArray[np.floating]:
        scores: NDArray[np.floating] = (
            self.mean + own[:, :1] + self.items[:, 0] + own[:, 1:] @ self.items[:, 1:].T
        )
        return scores


def _by_row(row: NDArray[np.integer], n: int) -> list[NDArray[np.intp]]:
    """Return the positions of each row's ratings."""
    order = np.argsort(row, kind="stable")
    return np.split(order, np.searchsorted(row[order], np.arange(1, n)))
