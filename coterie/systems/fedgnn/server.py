"""Server's side of FedGNN.

Rounds of SUPPORTS and of EVALUATE are those of `RatedServer`; an evaluation also measures errors on the training part.
The server divides changes of rows by the number of raters that it expects in the cohort, computed from the supports of
groups: exact counts in each round would disclose users' items (``docs/systems/fedncf.md``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed, named, unnamed
from coterie.rounds.training import Purpose
from coterie.systems.fedgnn.mathematics import apply, initial, layout
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared.rated_measures import on_range
from coterie.systems.shared.rated_server import Layouts, RatedServer

__all__ = ["FedGnnServer", "layouts"]

_MODEL = "model."


def layouts(settings: FedGnnSettings, n_items: int) -> Layouts:
    """Return the layouts of contributions, by purpose of a sum."""
    return Layouts(n_items, layout(settings, n_items), on_range(settings.measures, *settings.rating_range))


class FedGnnServer(RatedServer):
    """Server's side of FedGNN.

    Parameters
    ----------
    settings : FedGnnSettings
    n_items : int
    seed : int
        Seed of the run.
    groups : int
        Groups of the population.
    """

    def __init__(self, settings: FedGnnSettings, n_items: int, seed: int, groups: int) -> None:
        super().__init__(layouts(settings, n_items), settings.min_touch, seed, groups)
        self.settings = settings

    def initial(self) -> Arrays:
        """Return version 0 of the model, and no supports."""
        model = initial(self.settings, self._n_items, self._seed)
        return {**named(_MODEL, model), **self.no_supports()}

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the server's arrays after a sum."""
        if summed.purpose is not Purpose.TRAIN:
            return super().apply(arrays, summed)
        open_ones = np.where(self.opened(arrays), arrays["supports"], 0).astype(np.float64)
        raters = summed.shares @ open_ones
        model = apply(unnamed(_MODEL, arrays), summed.sums, raters=raters, users=summed.users)
        return {**arrays, **named(_MODEL, model)}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return embeddings of items, the layer, and ``popularity``: 1 for items open to any group, else 0."""
        popularity = np.minimum(arrays["popularity"], 1).astype(np.float32)
        return {**unnamed(_MODEL, arrays), "popularity": popularity}
