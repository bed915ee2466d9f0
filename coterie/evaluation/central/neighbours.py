"""Nearest neighbours by cosine similarity: of users, and of items."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.central.interactions import Interactions, Lists
from coterie.evaluation.central.model import Central, hyperparameter
from coterie.evaluation.search import Choices, LogUniform

__all__ = ["ItemKnn", "UserKnn", "together"]

_SIZES = Choices((20, 50, 100, 200, 400))


def together(rows: Lists, columns: Lists) -> Iterator[NDArray[np.intp]]:
    """Yield, for each row, the number of entries that it shares with every row.

    Parameters
    ----------
    rows, columns : Lists
        Entries of ``n`` rows; and, for each entry, the rows that have it.

    Yields
    ------
    ndarray of int, shape (n,)
        At the row's own position, its number of entries.
    """
    n = len(rows.lengths)
    for row in range(n):
        yield np.bincount(columns.entries[columns.places(rows[row])], minlength=n)


@dataclass(frozen=True)
class _Nearest:
    """Neighbours of each row: ``lists`` names them, ``weights`` has their similarities in the same order."""

    lists: Lists
    weights: NDArray[np.float64]


def _nearest(rows: Lists, columns: Lists, k: int, shrink: float) -> _Nearest:
    r"""Return the ``k`` rows most similar to each row, by :math:`c_{ij} / (\sqrt{n_i n_j} + s)` above 0.

    Among equal similarities the row with the lower number comes first.
    """
    sizes = rows.lengths
    entries, weights, counts = [], [], []
    for row, shared in enumerate(together(rows, columns)):
        shared[row] = 0
        others = np.flatnonzero(shared)
        similar = shared[others] / (np.sqrt(sizes[row] * sizes[others].astype(np.float64)) + shrink)
        best = np.sort(np.argsort(-similar, kind="stable")[:k])
        entries.append(others[best])
        weights.append(similar[best])
        counts.append(len(best))
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.intp)
    return _Nearest(Lists(bounds, np.concatenate(entries).astype(np.intp)), np.concatenate(weights))


@dataclass
class UserKnn(Central):
    r"""Neighbouring users: an item scores by the similarities of the nearest users who have it.

    :math:`s_{uv} = |I_u \cap I_v| / (\sqrt{|I_u| |I_v|} + \text{shrink})` (Herlocker et al., 1999; the shrinkage after
    Bell and Koren, 2007).
    """

    name = "user-knn"
    label = "User-kNN"
    note = "cosine with shrinkage (Herlocker et al., 1999)"
    folds_in = False
    refusal = "its neighbours are those users, with their histories"

    neighbours: int = hyperparameter(100, _SIZES, least=1)
    shrink: float = hyperparameter(10.0, LogUniform(0.1, 200.0), least=0)

    def _learn(self, data: Interactions) -> None:
        self._near = _nearest(data.items_of, data.users_of, self.neighbours, self.shrink)

    def _scores(self, users: NDArray[np.integer]) -> NDArray[np.floating]:
        data, near = self._data, self._near
        scores = np.zeros((len(users), data.n_items))
        for row, user in enumerate(users.tolist()):
            others = near.lists[user]
            weights = near.weights[near.lists.bounds[user] : near.lists.bounds[user + 1]]
            items = data.items_of.entries[data.items_of.places(others)]
            of_items = np.repeat(weights, data.items_of.lengths[others])
            scores[row] = np.bincount(items, weights=of_items, minlength=data.n_items)
        return scores


@dataclass
class ItemKnn(Central):
    r"""Neighbouring items: an item scores by its similarities to those of its nearest items that the user has.

    :math:`s_{ij} = |U_i \cap U_j| / (\sqrt{|U_i| |U_j|} + \text{shrink})` (Deshpande and Karypis, 2004).
    """

    name = "item-knn"
    label = "Item-kNN"
    note = "cosine with shrinkage (Deshpande and Karypis, 2004)"
    learned = ("bounds", "neighbours_of", "similarities")

    neighbours: int = hyperparameter(100, _SIZES, least=1)
    shrink: float = hyperparameter(10.0, LogUniform(0.1, 200.0), least=0)

    def _learn(self, data: Interactions) -> None:
        near = _nearest(data.users_of, data.items_of, self.neighbours, self.shrink)
        # By neighbour: the items that have it among their nearest, so that a user's items are looked up at once.
        item = np.repeat(np.arange(data.n_items), near.lists.lengths)
        order = np.lexsort((item, near.lists.entries))
        bounds = np.zeros(data.n_items + 1, np.intp)
        np.cumsum(np.bincount(near.lists.entries, minlength=data.n_items), out=bounds[1:])
        self.bounds, self.neighbours_of, self.similarities = bounds, item[order], near.weights[order]

    def _scores(self, users: NDArray[np.integer]) -> NDArray[np.floating]:
        return self._similar(self._data, users)

    def _of_people(self, people: Interactions) -> NDArray[np.floating]:
        return self._similar(people, np.arange(people.n_users))

    def _similar(self, data: Interactions, users: NDArray[np.integer]) -> NDArray[np.floating]:
        near = Lists(self.bounds, self.neighbours_of)
        scores = np.zeros((len(users), data.n_items))
        for row, user in enumerate(users.tolist()):
            places = near.places(data.items_of[user])
            scores[row] = np.bincount(
                near.entries[places], weights=self.similarities[places], minlength=data.n_items
            )
        return scores
