"""Rankings that know no user: random order and popularity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.baselines import popularity, random_scores
from coterie.evaluation.central.interactions import Interactions
from coterie.evaluation.central.model import Central

__all__ = ["MostPopular", "Random"]


@dataclass
class Random(Central):
    """Random order: every item of every user has a random score."""

    name = "random"
    label = "Random order"

    def _learn(self, data: Interactions) -> None:
        self._table = random_scores(data.n_users, data.n_items, self.seed)

    def _scores(self, users: NDArray[np.integer]) -> NDArray[np.floating]:
        scores: NDArray[np.floating] = self._table[users]
        return scores

    def _of_people(self, people: Interactions) -> NDArray[np.floating]:
        # All draw alike: the same model gives the same order again.
        return np.broadcast_to(random_scores(1, people.n_items, self.seed), (people.n_users, people.n_items))


@dataclass
class MostPopular(Central):
    """Popularity: an item scores by its number of training interactions."""

    name = "popularity"
    label = "Popularity"
    learned = ("counts",)

    def _learn(self, data: Interactions) -> None:
        self.counts = popularity(data.item.astype(np.int32), np.ones(len(data), np.bool_), data.n_items)

    def _scores(self, users: NDArray[np.integer]) -> NDArray[np.floating]:
        return np.broadcast_to(self.counts, (len(users), len(self.counts)))

    def _of_people(self, people: Interactions) -> NDArray[np.floating]:
        return self._scores(np.arange(people.n_users))
