"""Server's side of FPL: rounds of SUPPORTS and EVALUATE are those of `RatedServer`; it moves the rows of items."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed, named, unnamed
from coterie.rounds.training import Purpose
from coterie.systems.fpl.mathematics import apply, initial, initial_server_state, layout
from coterie.systems.fpl.settings import FplSettings
from coterie.systems.shared.rated_server import Layouts, RatedServer
from coterie.systems.shared.taken_up import MEASURES

__all__ = ["FplServer", "layouts"]

_MODEL, _SERVER = "model.", "server."


def layouts(settings: FplSettings, n_items: int) -> Layouts:
    """Return the layouts of contributions, by purpose of a sum."""
    return Layouts(n_items, layout(settings, n_items), MEASURES)


class FplServer(RatedServer):
    """Server's side of FPL.

    Parameters
    ----------
    settings : FplSettings
    n_items : int
    seed : int
        Seed of the run.
    groups : int
        Groups of the population.
    """

    def __init__(self, settings: FplSettings, n_items: int, seed: int, groups: int) -> None:
        super().__init__(layouts(settings, n_items), settings.min_touch, seed, groups)
        self.settings = settings
        self.asks_supports = settings.closes_items

    def initial(self) -> Arrays:
        """Return version 0 of the model, the optimiser's state, and no supports."""
        model = initial(self.settings, self._n_items, self._seed)
        return {
            **named(_MODEL, model),
            **named(_SERVER, initial_server_state(self.settings, model)),
            **self.no_supports(),
        }

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the server's arrays after a sum."""
        if summed.purpose is not Purpose.TRAIN:
            return super().apply(arrays, summed)
        model, state = apply(unnamed(_MODEL, arrays), unnamed(_SERVER, arrays), summed.sums, self.settings)
        return {**arrays, **named(_MODEL, model), **named(_SERVER, state)}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return the rows of items, and ``popularity``: 1 for items that are open to any group, else 0.

        Where popularity has a weight in scores, its levels are there, too.
        """
        found = np.minimum(arrays["popularity"], 1) if self.asks_supports else np.ones(self._n_items)
        told = self.told_levels(arrays) if self.settings.popularity else {}
        return {**unnamed(_MODEL, arrays), "popularity": found.astype(np.float32), **told}

    def opened(self, arrays: Arrays) -> NDArray[np.bool_]:
        """Return which items each group may train: all where no group was asked for its items."""
        return super().opened(arrays) if self.asks_supports else np.ones(arrays["supports"].shape, np.bool_)
