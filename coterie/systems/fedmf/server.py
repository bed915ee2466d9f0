"""Server's side of FedMF.

Rounds of SUPPORTS and of EVALUATE are those of `RatedServer`; an evaluation also measures errors on the training part.
For mean steps the server divides by the number of raters that it expects in the cohort, computed from the supports of
groups: exact counts in each round would disclose users' items (``docs/systems/fedncf.md``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed, named, unnamed
from coterie.rounds.training import Purpose
from coterie.systems.fedmf.mathematics import apply, initial, layout
from coterie.systems.fedmf.settings import MEASURES, FedMfSettings
from coterie.systems.shared.rated_measures import on_range
from coterie.systems.shared.rated_server import Layouts, RatedServer

__all__ = ["FedMfServer", "layouts"]

_MODEL = "model."


def layouts(settings: FedMfSettings, n_items: int) -> Layouts:
    """Return the layouts of contributions, by purpose of a sum."""
    return Layouts(n_items, layout(settings, n_items), on_range(MEASURES, *settings.rating_range))


class FedMfServer(RatedServer):
    """Server's side of FedMF.

    Parameters
    ----------
    settings : FedMfSettings
    n_items : int
    seed : int
        Seed of the run.
    groups : int
        Groups of the population.
    shape : Layouts, optional
        Layouts of contributions of a system that is built on FedMF; FedMF's own if left out.
    """

    def __init__(
        self, settings: FedMfSettings, n_items: int, seed: int, groups: int, shape: Layouts | None = None
    ) -> None:
        super().__init__(shape or layouts(settings, n_items), settings.min_touch, seed, groups)
        self.settings = settings

    def initial(self) -> Arrays:
        """Return version 0 of the model, and no supports."""
        model = initial(self.settings, self._n_items, self._seed)
        return {**named(_MODEL, model), **self.no_supports()}

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the server's arrays after a sum."""
        if summed.purpose is not Purpose.TRAIN:
            return super().apply(arrays, summed)
        raters = self._expected(arrays, summed.shares)
        share = self._share(arrays, summed.shares) if self.settings.scaffold else None
        model = apply(unnamed(_MODEL, arrays), summed.sums, self.settings, raters=raters, share=share)
        return {**arrays, **named(_MODEL, model)}

    def _share(self, arrays: Arrays, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of the groups that train each item that is in a cohort.

        Participants can compute it from two versions of the control variates.  They know it from the lists of open
        items, which a share of raters would not follow from.
        """
        opened = self.opened(arrays)
        found: NDArray[np.float64] = (shares @ opened) / np.maximum(opened.sum(axis=0), 1)
        return found

    def _expected(self, arrays: Arrays, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the expected raters of each item in a cohort, given the share of each group that is in it."""
        open_ones = np.where(self.opened(arrays), arrays["supports"], 0).astype(np.float64)
        found: NDArray[np.float64] = shares @ open_ones
        return found

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return item factors, any control variates, and ``popularity``: 1 for items open to any group, else 0."""
        popularity = np.minimum(arrays["popularity"], 1).astype(np.float32)
        return {**unnamed(_MODEL, arrays), "popularity": popularity}
