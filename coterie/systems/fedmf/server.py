"""FedMF in rounds: its plan, and the side of the server.

Rounds of SUPPORTS and of EVALUATE are as in FedMVMF; an evaluation measures the fit of the training part, too.  With
mean steps the server divides by the raters that it expects in the cohort, from what groups said once: counts that
travelled in each round would give users' items away (``docs/systems/fedncf.md``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed, named, unnamed
from coterie.secure_sum.contribution import Layout
from coterie.systems.fedmf.mathematics import FedMfSettings, apply, initial, layout
from coterie.systems.shared import factor_server as mvmf
from coterie.systems.shared.metric_segments import LARGEST, Measure
from coterie.systems.shared.rated_server import RatedPlan, RatedServer

__all__ = ["CHOOSE_BY", "FIGURES", "MEASURES", "FedMfPlan", "FedMfServer"]

MEASURES: tuple[str | Measure, ...] = (
    *mvmf.MEASURES,
    Measure("train_squared_error", LARGEST),
    Measure("train_ratings", LARGEST),
)
"""What a user's measurement has (`coterie.evaluation.rated`)."""

FIGURES = (*mvmf.FIGURES, "train_rmse")
"""What an evaluation comes to."""

CHOOSE_BY = "validation_rmse"
"""By what the version that counts is chosen unless a run says otherwise: the lowest."""

_MODEL = "model."


@dataclass(frozen=True)
class FedMfPlan(RatedPlan):
    """What the plan of a run says about FedMF.

    Parameters
    ----------
    learning : FedMfSettings
    min_touch : int
        Fewest users of a group that must have rated an item for the group to train it.

    Raises
    ------
    ConfigError
        A value out of its range.
    """

    system: ClassVar[str] = "FedMF"

    learning: FedMfSettings
    min_touch: int = 3

    @classmethod
    def _of(cls, plain: dict[str, Any]) -> FedMfPlan:
        return cls(FedMfSettings(**plain.pop("learning")), **plain)

    @property
    def measures(self) -> tuple[str | Measure, ...]:
        """What a user's measurement has."""
        return MEASURES

    def of_training(self, n_items: int) -> Layout:
        """Return what a contribution to a round of training looks like."""
        return layout(self.learning, n_items)


class FedMfServer(RatedServer):
    """The side of the orchestration server.

    Parameters
    ----------
    plan : FedMfPlan
    n_items : int
    seed : int
        Of the run.
    groups : int
        Groups of the population.
    """

    def __init__(self, plan: FedMfPlan, n_items: int, seed: int, groups: int) -> None:
        super().__init__(plan, n_items, seed, groups)
        self.plan = plan

    def initial(self) -> Arrays:
        """Return version 0 of the model, and no supports."""
        model = initial(self.plan.learning, self._n_items, self._seed)
        return {**named(_MODEL, model), **self.no_supports()}

    def trained(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum of training."""
        raters = self._expected(arrays, summed.shares)
        model = apply(unnamed(_MODEL, arrays), summed.sums, self.plan.learning, raters=raters)
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
