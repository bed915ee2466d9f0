"""FedMF in rounds: the side of the server.

Rounds of SUPPORTS and of EVALUATE are those of `RatedServer`; an evaluation measures the fit of the training part, too.
With mean steps the server divides by the raters that it expects in the cohort, from what groups said once: counts that
travelled in each round would give users' items away (``docs/systems/fedncf.md``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed, named, unnamed
from coterie.systems.fedmf.mathematics import apply, initial, layout
from coterie.systems.fedmf.settings import MEASURES, FedMfSettings
from coterie.systems.shared.rated_server import Layouts, RatedServer

__all__ = ["FedMfServer", "layouts"]

_MODEL = "model."


def layouts(settings: FedMfSettings, n_items: int) -> Layouts:
    """Return what contributions look like."""
    return Layouts(n_items, layout(settings, n_items), MEASURES)


class FedMfServer(RatedServer):
    """The side of the orchestration server.

    Parameters
    ----------
    settings : FedMfSettings
    n_items : int
    seed : int
        Of the run.
    groups : int
        Groups of the population.
    """

    def __init__(self, settings: FedMfSettings, n_items: int, seed: int, groups: int) -> None:
        super().__init__(layouts(settings, n_items), settings.min_touch, seed, groups)
        self.settings = settings

    def initial(self) -> Arrays:
        """Return version 0 of the model, and no supports."""
        model = initial(self.settings, self._n_items, self._seed)
        return {**named(_MODEL, model), **self.no_supports()}

    def trained(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum of training."""
        raters = self._expected(arrays, summed.shares)
        model = apply(unnamed(_MODEL, arrays), summed.sums, self.settings, raters=raters)
        return {**arrays, **named(_MODEL, model)}

    def _expected(self, arrays: Arrays, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how many raters of items a cohort has: of whole groups exactly, of a share of one on the average."""
        open_ones = np.where(self.opened(arrays), arrays["supports"], 0).astype(np.float64)
        found: NDArray[np.float64] = shares @ open_ones
        return found

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return item factors, and for each item whether it is open anywhere: 1 or 0, not its supports."""
        popularity = np.minimum(arrays["popularity"], 1).astype(np.float32)
        return {**unnamed(_MODEL, arrays), "popularity": popularity}
