"""Base of the server's side of systems that learn from users' own items: supports, open items, metrics.

Each group first sums which items its users have rated: items with fewer than ``min_touch`` raters in a group stay
closed for it, because the sum of a row that a single user of a cohort touches is that user's own row, even under masks
or encryption.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.rated import figures_of
from coterie.rounds.sides import Arrays, Summed, with_groups
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.shared.metric_segments import Measure, measure_segments, measured_in, names_of
from coterie.systems.shared.popularity import LEVELS, levels

__all__ = ["Layouts", "RatedServer", "open_anywhere"]


@dataclass(frozen=True)
class Layouts:
    """Layouts of contributions by purpose, for both sides of a system and for attacks on their transcripts.

    Attributes
    ----------
    n_items : int
    training : Layout
        Layout of a contribution to a round of training.
    measures : sequence of str or Measure
        Metrics measured for each user.
    """

    n_items: int
    training: Layout
    measures: Sequence[str | Measure]

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        match purpose:
            case Purpose.SUPPORTS:
                return Layout((Segment.whole("supports", (self.n_items,), 1),))
            case Purpose.EVALUATE:
                return Layout(measure_segments(self.measures))
            case Purpose.TRAIN:
                return self.training


class RatedServer(ABC):
    """Base of the server's side; subclasses add first arrays, training and the model that participants fetch.

    Parameters
    ----------
    layouts : Layouts
        Layouts of contributions, from the same settings as at hosts.
    min_touch : int
        Fewest users of a group that must have rated an item for the group to train it.
    seed : int
        Seed of the run.
    groups : int
        Groups of the population.
    """

    asks_supports = True
    needs_every_sum = False

    def __init__(self, layouts: Layouts, min_touch: int, seed: int, groups: int) -> None:
        self.metrics = names_of(layouts.measures)
        self._layouts = layouts
        self._min_touch = min_touch
        self._n_items = layouts.n_items
        self._seed = seed
        self._groups = groups

    def no_supports(self) -> Arrays:
        """Return the arrays of supports before any group was asked: zeros."""
        return {
            "supports": np.zeros((self._groups, self._n_items), np.uint32),
            "popularity": np.zeros(self._n_items, np.float32),
        }

    def grown(self, arrays: Arrays) -> Arrays:
        """Return the arrays with rows for groups that came later, which support no item before they are asked."""
        return {**arrays, "supports": with_groups(arrays["supports"], self._groups)}

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        return self._layouts.layout(purpose)

    @abstractmethod
    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the server's arrays after a sum that trains nothing; subclasses add what training changes."""
        return self._supported(arrays, summed) if summed.purpose is Purpose.SUPPORTS else arrays

    @abstractmethod
    def initial(self) -> Arrays:
        """Return all arrays that the server keeps, before the first round."""

    @abstractmethod
    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return the model that participants fetch."""

    def _supported(self, arrays: Arrays, summed: Summed) -> Arrays:
        own = summed.sums["supports"].astype(np.uint32)
        supports = arrays["supports"].copy()
        supports[summed.part] = own
        popularity = arrays["popularity"]
        # Users sample items by popularity, which stays the same during a run, even when groups are drawn anew.
        if summed.pass_number == 0:
            popularity = popularity + np.where(own >= self._min_touch, own, 0).astype(np.float32)
        return {**arrays, "supports": supports, "popularity": popularity}

    def told_levels(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return the levels of popularity as a part of the model that participants fetch."""
        counted = arrays["popularity"]
        return {LEVELS: levels(counted, counted > 0, self._min_touch)}

    def opened(self, arrays: Arrays) -> NDArray[np.bool_]:
        """Return which items each group may train.

        An item that was closed to all groups at first stays closed when groups are drawn anew or come later: the run
        treats it as a new item.
        """
        opened: NDArray[np.bool_] = (arrays["supports"] >= self._min_touch) & (arrays["popularity"] > 0)
        return opened

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum over users and number of users of each metric in a sum."""
        return measured_in(sums, self._layouts.measures)

    def figures(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
        """Return means over users, F1 of the mean precision and recall, and RMSE over all ratings together."""
        return figures_of(totals)


def open_anywhere(model: Mapping[str, NDArray[np.float32]]) -> NDArray[np.bool_]:
    """Return which items any group may train, bool (I,), by the popularity in a fetched model."""
    opened: NDArray[np.bool_] = model["popularity"] > 0
    return opened
