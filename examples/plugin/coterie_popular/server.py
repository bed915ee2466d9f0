"""Server's side of Popular: adds the sums of rounds to the scores of items."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed
from coterie.rounds.training import Purpose, means
from coterie.secure_sum.contribution import Layout
from coterie.systems.shared.metric_segments import measured_in
from coterie_popular.mathematics import METRICS, layout, scores
from coterie_popular.settings import PopularSettings

__all__ = ["PopularServer"]


class PopularServer:
    """Server's side of Popular: keeps the score of each item, and the number of users who have it."""

    asks_supports = False
    needs_every_sum = False
    metrics = METRICS
    figures = staticmethod(means)

    def __init__(self, settings: PopularSettings, n_items: int) -> None:
        self._settings = settings
        self._n_items = n_items

    def initial(self) -> Arrays:
        """Return the server's arrays before the first round."""
        return {"items": np.zeros((self._n_items, 1)), "touched": np.zeros(self._n_items)}

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        return layout(purpose, self._n_items, self._settings.bits)

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum; an evaluation changes nothing."""
        if summed.purpose is not Purpose.TRAIN:
            return arrays
        return {name: held + summed.sums[name] for name, held in arrays.items()}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return the model that participants fetch."""
        return {"items": scores(arrays["items"], arrays["touched"], self._settings.min_touch)}

    def opened(self, arrays: Arrays) -> NDArray[np.bool_] | None:
        """Return None, because every group trains every item."""
        return None

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return each metric's sum over users and number of users."""
        return measured_in(sums, METRICS)
