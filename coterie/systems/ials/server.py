"""Server's side of federated iALS: opens items, solves for their factors by the sums of a round."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError
from coterie.rounds.sides import Arrays, Summed
from coterie.rounds.training import Purpose, means
from coterie.secure_sum.contribution import ImpossibleSumError, Layout
from coterie.systems.ials.mathematics import initial_items, item_factors
from coterie.systems.ials.settings import METRICS, IalsSettings
from coterie.systems.shared.metric_segments import measured_in
from coterie.systems.shared.popularity import LEVELS, levels

__all__ = ["IalsServer"]

_ITEMS = "model.items"


class IalsServer:
    """Server's side of federated iALS.

    Parameters
    ----------
    settings : IalsSettings
    n_items : int
    seed : int
        Seed of the run, by which the first factors are drawn.
    groups : int
        Groups of the population; one unless the run's file says otherwise.
    """

    asks_supports = True
    needs_every_sum = False
    metrics = METRICS
    figures = staticmethod(means)

    def __init__(self, settings: IalsSettings, n_items: int, seed: int, groups: int) -> None:
        self._settings = settings
        self._n_items = n_items
        self._seed = seed
        self._groups = groups

    def initial(self) -> Arrays:
        """Return version 0 of the items' factors, and no supports."""
        return {
            _ITEMS: initial_items(self._n_items, self._settings.factors, self._seed),
            "supports": np.zeros((self._groups, self._n_items), np.uint32),
        }

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        return self._settings.layout(purpose, self._n_items)

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum: supports of a group, or factors of all open items.

        Raises
        ------
        ImpossibleSumError
            The equations of an item have no single solution: the rounding of codes outweighs the ridge, or a
            contribution is none that a user can make.
        """
        settings = self._settings
        if summed.purpose is Purpose.SUPPORTS:
            supports = arrays["supports"].copy()
            supports[summed.part] = summed.sums["supports"].astype(np.uint32)
            return {**arrays, "supports": supports}
        if summed.purpose is not Purpose.TRAIN:
            return arrays
        # Users who are absent are missing from the equations and from their ridge alike.
        present = np.add.reduce(summed.shares[:, None] * arrays["supports"], axis=0)
        try:
            items = item_factors(
                summed.sums,
                np.where(self._openings(arrays) > 0, present, 0.0),
                summed.users,
                whole=self._openings(arrays) > 1,
                ridge=settings.ridge,
                alpha0=settings.alpha0,
                nu=settings.nu,
            )
        except DataError as error:
            raise ImpossibleSumError(
                f"{error}: ials.ridge {settings.ridge:g} beside codes of ials.bits {settings.bits} for factors of norm "
                f"up to ials.user_bound {settings.user_bound:g}; expected a larger ridge, more bits or a smaller bound"
            ) from error
        return {**arrays, _ITEMS: items}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return the model that participants fetch.

        Returns
        -------
        dict
            ``items``, float32 (I, d), 0 for closed items, and ``open``, float32 (I,): 2 for items of which products are
            summed, 1 for other open ones, 0 for closed ones.  With a weight of popularity also the items' levels, (I,).
        """
        settings, opening = self._settings, self._openings(arrays)
        found = {"items": arrays[_ITEMS] * (opening > 0)[:, None], "open": opening}
        if settings.popularity:
            found[LEVELS] = levels(arrays["supports"].sum(axis=0), opening > 0, settings.min_touch)
        return found

    def opened(self, arrays: Arrays) -> NDArray[np.bool_]:
        """Return which items each group may train: those that enough users of all groups together have."""
        return np.tile(self._openings(arrays) > 0, (self._groups, 1))

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum over users and number of users of each metric in a sum."""
        return measured_in(sums, METRICS)

    def _openings(self, arrays: Arrays) -> NDArray[np.float32]:
        settings, supports = self._settings, arrays["supports"].sum(axis=0)
        opened = supports >= settings.min_touch
        whole = opened & settings.with_products & (supports >= settings.min_products)
        found: NDArray[np.float32] = opened.astype(np.float32) + whole
        return found
