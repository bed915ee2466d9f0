"""What systems that learn from users' own items share at the server: supports, open items, measures.

Each group first sums which items its users have rated: items with fewer than ``min_touch`` raters in a group stay
closed for it, because a row that one user of a cohort touches is that user's row, whatever protects the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.rated import figures_of
from coterie.rounds.sides import Arrays, Summed
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.shared.metric_segments import Measure, measure_segments, measured_in, names_of

__all__ = ["Layouts", "RatedServer", "open_anywhere"]


@dataclass(frozen=True)
class Layouts:
    """What contributions look like, for both sides of a system and for the attacks on their transcripts.

    Attributes
    ----------
    n_items : int
    training : Layout
        Of a contribution to a round of training.
    measures : sequence of str or Measure
        What a user's measurement has.
    """

    n_items: int
    training: Layout
    measures: Sequence[str | Measure]

    def layout(self, purpose: Purpose) -> Layout:
        """Return what a contribution of a purpose looks like."""
        match purpose:
            case Purpose.SUPPORTS:
                return Layout((Segment.whole("supports", (self.n_items,), 1),))
            case Purpose.EVALUATE:
                return Layout(measure_segments(self.measures))
            case Purpose.TRAIN:
                return self.training


class RatedServer(ABC):
    """The side of the orchestration server, but for its first arrays, training and what participants fetch.

    Parameters
    ----------
    layouts : Layouts
        Of the same settings as at hosts.
    min_touch : int
        Fewest users of a group that must have rated an item for the group to train it.
    seed : int
        Of the run.
    groups : int
        Groups of the population.
    """

    asks_supports = True

    def __init__(self, layouts: Layouts, min_touch: int, seed: int, groups: int) -> None:
        self.metrics = names_of(layouts.measures)
        self._layouts = layouts
        self._min_touch = min_touch
        self._n_items = layouts.n_items
        self._seed = seed
        self._groups = groups

    def no_supports(self) -> Arrays:
        """Return what is kept of supports before groups are asked."""
        return {
            "supports": np.zeros((self._groups, self._n_items), np.uint32),
            "popularity": np.zeros(self._n_items, np.float32),
        }

    def layout(self, purpose: Purpose) -> Layout:
        """Return what a contribution of a purpose looks like."""
        return self._layouts.layout(purpose)

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum."""
        match summed.purpose:
            case Purpose.EVALUATE:
                return arrays
            case Purpose.SUPPORTS:
                return self._supported(arrays, summed)
            case Purpose.TRAIN:
                return self.trained(arrays, summed)

    @abstractmethod
    def initial(self) -> Arrays:
        """Return everything that is kept, before the first round."""

    @abstractmethod
    def trained(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum of training."""

    @abstractmethod
    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return what participants fetch."""

    def _supported(self, arrays: Arrays, summed: Summed) -> Arrays:
        own = summed.sums["supports"].astype(np.uint32)
        supports = arrays["supports"].copy()
        supports[summed.part] = own
        popularity = arrays["popularity"]
        # What users draw by stays the same during a run, also when groups are drawn anew.
        if summed.pass_number == 0:
            popularity = popularity + np.where(own >= self._min_touch, own, 0).astype(np.float32)
        return {**arrays, "supports": supports, "popularity": popularity}

    def opened(self, arrays: Arrays) -> NDArray[np.bool_]:
        """Return which items each group may train.

        What was closed to all groups at first stays closed when they are drawn anew: it is a new item for the run.
        """
        opened: NDArray[np.bool_] = (arrays["supports"] >= self._min_touch) & (arrays["popularity"] > 0)
        return opened

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum and count over users of the metrics in a sum."""
        return measured_in(sums, self._layouts.measures)

    def figures(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
        """Return means over users, F1 of the mean precision and recall, and RMSE over all ratings together."""
        return figures_of(totals)


def open_anywhere(model: Mapping[str, NDArray[np.float32]]) -> NDArray[np.bool_]:
    """Return which items any group may train, bool (I,), as a model that was fetched tells."""
    opened: NDArray[np.bool_] = model["popularity"] > 0
    return opened
