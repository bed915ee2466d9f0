"""Server's side of FedGNN.

Rounds of SUPPORTS and of EVALUATE are those of `RatedServer`; an evaluation also measures errors on the training part.
The server divides changes of rows by the number of raters that it expects in the cohort, computed from the supports of
groups: exact counts in each round would disclose users' items (``docs/systems/fedncf.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed, named, unnamed
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.fedgnn.mathematics import apply, initial, layout
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared.popularity import levels
from coterie.systems.shared.rated_measures import on_range
from coterie.systems.shared.rated_server import Layouts, RatedServer

__all__ = ["SHARED", "SHARERS", "FedGnnServer", "GraphLayouts", "layouts"]

_MODEL = "model."

LEAST_USERS = 5
"""Fewest users with a tag for which the third party shows them: how many fewer there are is told to nobody."""


SHARED, SHARERS = "shared", "sharers"
"""Segment of SUPPORTS with the items that users publish, and array of a fetched model with how many publish each."""


@dataclass(frozen=True)
class GraphLayouts(Layouts):
    """Layouts of a run with neighbours: groups also sum which items their users publish under tags."""

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        found = super().layout(purpose)
        if purpose is not Purpose.SUPPORTS:
            return found
        return Layout((*found.segments, Segment.whole(SHARED, (self.n_items,), 1)))


def layouts(settings: FedGnnSettings, n_items: int) -> Layouts:
    """Return the layouts of contributions, by purpose of a sum."""
    make = GraphLayouts if settings.neighbours else Layouts
    return make(n_items, layout(settings, n_items), on_range(settings.measures, *settings.rating_range))


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
        shared = {SHARED: np.zeros(self._n_items, np.float32)} if self.settings.neighbours else {}
        return {**named(_MODEL, model), **self.no_supports(), **shared}

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the server's arrays after a sum."""
        if summed.purpose is not Purpose.TRAIN:
            found = super().apply(arrays, summed)
            # As with popularity: what users publish stays the same during a run.
            if SHARED in summed.sums and summed.pass_number == 0:
                found[SHARED] = arrays[SHARED] + summed.sums[SHARED].astype(np.float32)
            return found
        open_ones = np.where(self.opened(arrays), arrays["supports"], 0).astype(np.float64)
        raters = summed.shares @ open_ones
        model = apply(unnamed(_MODEL, arrays), summed.sums, raters=raters, users=summed.users)
        return {**arrays, **named(_MODEL, model)}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return embeddings of items, the layer, and ``popularity``: 1 for items open to any group, else 0.

        With neighbours also ``sharers``, a level of how many users publish each item under tags.
        """
        popularity = np.minimum(arrays["popularity"], 1).astype(np.float32)
        found = {**unnamed(_MODEL, arrays), "popularity": popularity}
        if self.settings.neighbours:
            shared = arrays[SHARED]
            found[SHARERS] = levels(shared, shared >= LEAST_USERS, LEAST_USERS)
        return found
