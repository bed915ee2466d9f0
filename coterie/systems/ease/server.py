"""Server's side of EASE: opens items, forms the model from one sum of pairs or a few of a sketch, serves it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed
from coterie.rounds.training import Purpose, means
from coterie.secure_sum.contribution import Layout
from coterie.systems.ease.mathematics import pair_places, pairs_of, precision
from coterie.systems.ease.settings import METRICS, EaseSettings
from coterie.systems.ease.sketch import directions, factors_of, low_rank_model, signs
from coterie.systems.shared.metric_segments import measured_in
from coterie.systems.shared.popularity import LEVELS, levels

__all__ = ["EaseServer"]

_SERVED = ("factors", "scale", "apart", "core", "own")
"""Arrays of the model of a sketch, beside the open items."""


class EaseServer:
    """Server's side of EASE.

    Parameters
    ----------
    settings : EaseSettings
    n_items : int
    seed : int
        Seed of the run, from which the first columns of a sketch are drawn.
    groups : int
        Groups of the population; one unless the run's file says otherwise.
    """

    asks_supports = True
    # There is one sum of TRAIN, or there are few; without the first nothing is learned.
    needs_every_sum = True
    # Two sums of a sketch are nearly one sum of the same values: a user in one alone would be their difference.
    same_members = True
    metrics = METRICS
    figures = staticmethod(means)

    def __init__(self, settings: EaseSettings, n_items: int, seed: int, groups: int) -> None:
        self._settings = settings
        self._n_items = n_items
        self._groups = groups
        self._seed = seed

    def initial(self) -> Arrays:
        """Return no supports, and a model of no open items."""
        counted = {
            "supports": np.zeros((self._groups, self._n_items), np.uint32),
            "group_users": np.zeros(self._groups, np.uint32),
        }
        if not self._settings.sketch:
            return {**counted, "precision": np.zeros(0, np.float32)}
        return {
            **counted,
            "probes": np.zeros((0, 0), np.float32),
            "products": np.zeros((0, 0), np.float64),
            **{name: np.zeros(0, np.float32) for name in _SERVED},
        }

    @property
    def too_many_items(self) -> str:
        """Return why the catalogue is too large for the settings; empty where it is not."""
        return self._settings.too_many_items(self._n_items)

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        return self._settings.layout(purpose, self._n_items)

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum: supports of a group, or the model that sums of pairs or of a sketch make."""
        settings = self._settings
        if summed.purpose is Purpose.SUPPORTS:
            supports, users = arrays["supports"].copy(), arrays["group_users"].copy()
            counted = np.rint(summed.sums["supports"])
            supports[summed.part] = np.maximum(counted, 0).astype(np.uint32)
            users[summed.part] = summed.users
            return {**arrays, "supports": supports, "group_users": users}
        if summed.purpose is not Purpose.TRAIN:
            return arrays
        if settings.sketch:
            return self._sketched(arrays, summed)
        counts = settings.packing.counts(summed.sums["pairs"], pairs_of(self._n_items))
        places = pair_places(np.flatnonzero(self._open(arrays)), self._n_items)
        made = precision(
            counts[places],
            settings.ridge,
            min_pairs=settings.min_pairs,
            spread=math.sqrt(settings.variance * summed.users),
        )
        return {**arrays, "precision": made}

    def _sketched(self, arrays: Arrays, summed: Summed) -> Arrays:
        settings, opened = self._settings, self._open(arrays)
        probes, products = (
            signs(self._seed, self._n_items, settings.sketch)[opened],
            summed.sums["sketch"][opened],
        )
        if summed.pass_number:
            told = directions(self.model(arrays))
            if told is None:
                # No item is open.
                return arrays
            probes = np.hstack([arrays["probes"], told])
            products = np.hstack([arrays["products"], products])
        supports = arrays["supports"].sum(axis=0, dtype=np.int64)[opened]
        step = self.layout(Purpose.TRAIN)["sketch"].step
        factors = factors_of(probes, products, 2 * settings.sketch, step, int(supports.max(initial=0)))
        made = low_rank_model(factors, supports, settings.ridge, settings.sketch)
        return {**arrays, "probes": probes, "products": products, **made}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return the model that participants fetch.

        Returns
        -------
        dict
            ``open``, 1 for open items and 0 for closed ones, (I,), and ``precision``, the upper triangle of P over the
            n open items, (n (n + 1) / 2,), or the arrays of `low_rank_model`; absent until the model is trained, and
            where no item is open.  With a weight of popularity also the items' levels, (I,).
        """
        settings, opened = self._settings, self._open(arrays)
        found = {"open": opened.astype(np.float32)}
        if settings.popularity:
            found[LEVELS] = levels(arrays["supports"].sum(axis=0), opened, settings.min_touch)
        served = _SERVED if settings.sketch else ("precision",)
        if arrays[served[0]].size:
            found |= {name: arrays[name] for name in served}
        return found

    def opened(self, arrays: Arrays) -> NDArray[np.bool_]:
        """Return which items each group may train: those that enough users of all groups together have."""
        return np.tile(self._open(arrays), (self._groups, 1))

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum over users and number of users of each metric in a sum."""
        return measured_in(sums, METRICS)

    def _open(self, arrays: Arrays) -> NDArray[np.bool_]:
        settings = self._settings
        # Of the many items that nobody has, noise alone lifts one in 44 above twice its standard deviation.
        noise = 2 * math.sqrt(settings.variance * int(arrays["group_users"].sum())) / settings.parts
        opened: NDArray[np.bool_] = arrays["supports"].sum(axis=0) >= settings.min_touch + noise
        return opened
