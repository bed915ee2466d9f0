"""Server's side of FedIDCF: FedMF's in the first passes; then moments of key users, and steps of the attention.

The server has no Paillier key: it never learns a vector, nor a pseudo meta-latent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed, named, unnamed
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.fedidcf.mathematics import initial, layout, no_moments
from coterie.systems.fedidcf.settings import ERRORS, MEASURES, SPREAD, FedIdcfSettings, Stage
from coterie.systems.fedmf.server import FedMfServer
from coterie.systems.shared import optimisers
from coterie.systems.shared.optimisers import ServerOptimiser
from coterie.systems.shared.rated_measures import on_range
from coterie.systems.shared.rated_server import Layouts

__all__ = ["MOST_SPREAD", "QUERY_USERS", "VECTORS", "FedIdcfServer", "IdcfLayouts", "layouts"]

_MODEL, _ADAM, MOMENTS = "model.", "adam.", "moments"

VECTORS, QUERY_USERS = "query_vectors", "query_users"
"""Segments of EVALUATE: sums over query users of their vectors and of the squares of these, and their number."""

MOST_SPREAD = 16.0
"""Largest value of a vector in `VECTORS`, in spreads of key users."""

_PARAMETERS = ("query", "key")


@dataclass(frozen=True)
class IdcfLayouts(Layouts):
    """Layouts of contributions: an evaluation also sums vectors of query users, for their spread.

    Attributes
    ----------
    factors : int
    """

    factors: int

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        found = super().layout(purpose)
        if purpose is not Purpose.EVALUATE:
            return found
        vectors = Segment(VECTORS, (self.factors,), MOST_SPREAD, 16, measures=True)
        squares = Segment(f"{VECTORS}_squares", (1,), MOST_SPREAD**2, 20, measures=True)
        return Layout((*found.segments, vectors, squares, Segment.whole(QUERY_USERS, (1,), 1)))


def layouts(settings: FedIdcfSettings, n_items: int) -> IdcfLayouts:
    """Return the layouts of contributions, by purpose of a sum."""
    measures = on_range(MEASURES, *settings.rating_range)
    return IdcfLayouts(n_items, layout(settings, n_items), measures, settings.factors)


class FedIdcfServer(FedMfServer):
    """Server's side of FedIDCF.

    Parameters
    ----------
    settings : FedIdcfSettings
    n_items : int
    seed : int
        Seed of the run.
    groups : int
        Groups of the population.
    """

    settings: FedIdcfSettings
    # Without the sum of moments there is no second phase.
    needs_every_sum = True

    def __init__(self, settings: FedIdcfSettings, n_items: int, seed: int, groups: int) -> None:
        super().__init__(settings, n_items, seed, groups, layouts(settings, n_items))
        self._optimiser = ServerOptimiser("fedadam", settings.attention_rate, 0.9, 0.999, 1e-8)

    def initial(self) -> Arrays:
        """Return version 0 of the model, and no supports and moments."""
        model = initial(self.settings, self._n_items, self._seed)
        attention = {name: model[name] for name in _PARAMETERS}
        return {
            **named(_MODEL, model),
            **named(_ADAM, optimisers.initial_state(self._optimiser, attention)),
            **self.no_supports(),
            MOMENTS: no_moments(self.settings),
        }

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the server's arrays after a sum."""
        if summed.purpose is not Purpose.TRAIN:
            return super().apply(arrays, summed)
        match self.settings.stage(summed.pass_number):
            case Stage.FACTORS:
                moved = super().apply(arrays, summed)
                return {**arrays, "model.items": moved["model.items"]}
            case Stage.MOMENTS:
                found = [np.asarray(summed.sums[name], np.float64) for name in _MOMENTS]
                return {**arrays, MOMENTS: arrays[MOMENTS] + np.concatenate(found)}
            case Stage.PUBLISH:
                return arrays
            case Stage.ATTENTION:
                return self._attended(arrays, summed)

    def _attended(self, arrays: Arrays, summed: Summed) -> Arrays:
        learners = float(summed.sums["learners"][0])
        if learners < 1:
            return arrays
        model = unnamed(_MODEL, arrays)
        change = {name: -np.asarray(summed.sums[name], np.float64) / learners for name in _PARAMETERS}
        moved, moments = optimisers.step(
            self._optimiser, {name: model[name] for name in _PARAMETERS}, unnamed(_ADAM, arrays), change
        )
        return {**arrays, **named(_MODEL, moved), **named(_ADAM, moments)}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return rows of items, the attention, ``popularity`` as FedMF has it, and the sums of ``moments``."""
        return {**super().model(arrays), MOMENTS: arrays[MOMENTS].astype(np.float32)}

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum over users and number of users of each metric in a sum, and the sums of query users' vectors."""
        found = super().measured(purpose, sums)
        if QUERY_USERS in sums:
            users = float(sums[QUERY_USERS][0])
            for name in (VECTORS, f"{VECTORS}_squares"):
                for at, value in enumerate(np.asarray(sums[name], np.float64).tolist()):
                    found[f"{name}.{at}"] = (value, users)
        return found

    def figures(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
        """Return FedMF's figures, RMSE of each kind of user and prediction, and the spread of query users' vectors."""
        parts = {name: total for name, total in totals.items() if not name.startswith(VECTORS)}
        errors = tuple(f"{name}_squared_error" for name in ERRORS)
        apart = (*errors, *(f"{name}_ratings" for name in ERRORS))
        found = super().figures({name: total for name, total in parts.items() if name not in apart})
        for name, behind in ERRORS.items():
            ratings, users = totals.get(f"{behind or f'{name}_'}ratings", (0.0, 0.0))
            if ratings and f"{name}_squared_error" in totals:
                mean = totals[f"{name}_squared_error"][0] / ratings
                found[f"{name}_rmse"] = (math.sqrt(max(mean, 0.0)), round(users))
        sums = [total for name, total in totals.items() if name.startswith(f"{VECTORS}.")]
        squares, users = totals.get(f"{VECTORS}_squares.0", (0.0, 0.0))
        if users > 1 and squares:
            around = squares / users - sum((value / users) ** 2 for value, _ in sums)
            found[SPREAD] = (math.sqrt(max(around, 0.0)), round(users))
        return found


_MOMENTS = ("key_users", "liked", "values", "squares")
"""Segments of a contribution with the sums of `coterie.systems.fedidcf.mathematics.no_moments`, in order."""
