"""Server's side of a matrix factorisation: FCF uses it as it is, FedMVMF adds features from data owners.

Each group first sums which items its users have rated, as in FedNCF: items with fewer than ``min_touch`` raters in a
group stay closed for it.  The model carries the number of raters of each open item over all groups: users draw
unrated items in proportion to it, so that these look like rated ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed, named, unnamed
from coterie.rounds.training import Purpose
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.factors import apply, initial, initial_server_state
from coterie.systems.shared.rated_server import Layouts, RatedServer

__all__ = ["FactorServer"]

_MODEL, _SERVER = "model.", "server."


class FactorServer(RatedServer):
    """Server's side of a matrix factorisation.

    Parameters
    ----------
    settings : FactorSettings
    layouts : Layouts
    seed : int
        Seed of the run.
    groups : int
        Groups of the population.
    n_attributes : int
        Attributes of a user; 0 where none are known.
    """

    def __init__(
        self, settings: FactorSettings, layouts: Layouts, seed: int, groups: int, n_attributes: int = 0
    ) -> None:
        super().__init__(layouts, settings.min_touch, seed, groups)
        self.settings = settings
        self._n_attributes = n_attributes

    def initial(self) -> Arrays:
        """Return version 0 of the model, the optimiser's state, and no supports."""
        model = initial(self.settings, self._n_items, self._n_attributes, self._seed)
        return {
            **named(_MODEL, model),
            **named(_SERVER, initial_server_state(self.settings, model)),
            **self.no_supports(),
        }

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum; training consumes ``pull``, which item servers sent, if there is one."""
        if summed.purpose is not Purpose.TRAIN:
            return super().apply(arrays, summed)
        kept = {name: value for name, value in arrays.items() if name != "pull"}
        model, state = apply(
            unnamed(_MODEL, arrays),
            unnamed(_SERVER, arrays),
            summed.sums,
            self.settings,
            users=summed.users,
            population=summed.population,
            pull=arrays.get("pull"),
        )
        return {**kept, **named(_MODEL, model), **named(_SERVER, state)}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return item and attribute factors, and the number of raters of each item that is open to any group.

        Unless unrated items are sampled, ``popularity`` is 1 for items that are open to any group and 0 for the others.
        """
        model = unnamed(_MODEL, arrays)
        popularity = arrays["popularity"].astype(np.float32)
        if self.settings.weights != "sampled":
            popularity = np.minimum(popularity, 1)
        if not self._n_attributes:
            del model["attributes"]
        return {**model, "popularity": popularity.astype(np.float32)}
