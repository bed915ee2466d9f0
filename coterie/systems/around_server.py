"""Base of what stands around a system's side at the server, and changes a part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Growing, ServerSide, Summed, ToldServerSide
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout

__all__ = ["AroundServer"]


class AroundServer:
    """Server's side that does what the side in it does; subclasses replace some of its methods.

    Parameters
    ----------
    side : ServerSide
    """

    def __init__(self, side: ServerSide) -> None:
        self.asks_supports = side.asks_supports
        self.needs_every_sum = side.needs_every_sum
        self.metrics = side.metrics
        self._side = side

    def initial(self) -> Arrays:
        """Return the arrays before the first round."""
        return self._side.initial()

    def grown(self, arrays: Arrays) -> Arrays:
        """Return arrays with rows for groups that came later, where the system keeps any by group."""
        return self._side.grown(arrays) if isinstance(self._side, Growing) else arrays

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of contributions for a purpose."""
        return self._side.layout(purpose)

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum."""
        return self._side.apply(arrays, summed)

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return the model that participants fetch."""
        return self._side.model(arrays)

    def opened(self, arrays: Arrays) -> NDArray[np.bool_] | None:
        """Return which items each group may train; None when there is no such list."""
        return self._side.opened(arrays)

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return the metrics in a sum: sum and count over users, by name."""
        return self._side.measured(purpose, sums)

    def figures(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
        """Return an evaluation's figures, value and number of users by name."""
        return self._side.figures(totals)

    def told(self, arrays: Arrays, answers: Sequence[Arrays]) -> Arrays:
        """Return the arrays with data owners' answers, for systems that ask them."""
        return cast(ToldServerSide, self._side).told(arrays, answers)
