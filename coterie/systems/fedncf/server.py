"""Server's side of FedNCF: makes the model, applies the sums of rounds, opens items to groups.

Under ``touch = "once"`` each group first sums which items its users have.  Items with fewer than ``min_touch``
supporters stay closed for that group: the sum of a row that a single participant touches *is* that participant's row,
even under masks or encryption.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, Summed, named, unnamed, with_groups
from coterie.rounds.training import Purpose, means
from coterie.secure_sum.contribution import Layout
from coterie.systems.fedncf.mathematics import apply, expected_touches, initial, initial_server_state
from coterie.systems.fedncf.purposes import layout_of, metrics_of
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.systems.shared.metric_segments import measured_in
from coterie.systems.shared.popularity import LEVELS, levels

__all__ = ["FedNcfServer"]

_MODEL, _SERVER = "model.", "server."
_BY_GROUP = ("supports", "group_users")


class FedNcfServer:
    """Server's side of FedNCF.

    Parameters
    ----------
    settings : FedNcfSettings
    n_items : int
    seed : int
        Seed of the run.
    groups : int
        Groups of the population.
    """

    needs_every_sum = False

    def __init__(self, settings: FedNcfSettings, n_items: int, seed: int, groups: int) -> None:
        self.settings = settings
        self.asks_supports = settings.asks_supports
        self.metrics = metrics_of(Purpose.EVALUATE)
        self._n_items = n_items
        self._seed = seed
        self._groups = groups

    @classmethod
    def of_plan(cls, settings: str, n_items: int, seed: int, groups: int) -> Self:
        """Build the side from the settings of a plan, JSON.

        Raises
        ------
        ConfigError
            The text holds no settings of FedNCF.
        """
        return cls(FedNcfSettings.from_json(settings), n_items, seed, groups)

    def initial(self) -> Arrays:
        """Return version 0 of the model, the optimiser's state, and no supports."""
        model = initial(self.settings, self._n_items, self._seed)
        arrays = named(_MODEL, model) | named(_SERVER, initial_server_state(self.settings, model))
        if self.asks_supports:
            arrays["supports"] = np.zeros((self._groups, self._n_items), np.uint32)
            arrays["group_users"] = np.zeros(self._groups, np.uint32)
        return arrays

    def grown(self, arrays: Arrays) -> Arrays:
        """Return the arrays with rows for groups that came later, which support no item before they are asked."""
        if not self.asks_supports:
            return arrays
        return {**arrays, **{name: with_groups(arrays[name], self._groups) for name in _BY_GROUP}}

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of this purpose."""
        return layout_of(self.settings, purpose, self._n_items)

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the server's arrays after a sum of any purpose."""
        if summed.purpose is Purpose.EVALUATE:
            return arrays
        if summed.purpose is Purpose.SUPPORTS:
            supports, users = arrays["supports"].copy(), arrays["group_users"].copy()
            supports[summed.part] = summed.sums["supports"].astype(np.uint32)
            users[summed.part] = summed.users
            return {**arrays, "supports": supports, "group_users": users}
        model, state = apply(
            unnamed(_MODEL, arrays),
            unnamed(_SERVER, arrays),
            summed.sums,
            self.settings,
            users=summed.users,
            global_round=summed.pass_number,
            expected=self._expected(arrays, summed.shares),
            population=summed.population,
        )
        return {**arrays, **named(_MODEL, model), **named(_SERVER, state)}

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return item embeddings and network, and the items' levels where popularity has a weight."""
        found, opened = unnamed(_MODEL, arrays), self.opened(arrays)
        if self.settings.popularity and opened is not None:
            counted = np.where(opened, arrays["supports"], 0).sum(axis=0)
            found[LEVELS] = levels(counted, counted > 0, self.settings.min_touch)
        return found

    def opened(self, arrays: Arrays) -> NDArray[np.bool_] | None:
        """Return which items each group may train; None where groups are not asked for their items."""
        if not self.asks_supports:
            return None
        opened: NDArray[np.bool_] = arrays["supports"] >= self.settings.min_touch
        return opened

    def measured(
        self, purpose: Purpose, sums: Mapping[str, NDArray[np.float64]]
    ) -> dict[str, tuple[float, float]]:
        """Return sum over users and number of users of each metric in a sum."""
        return measured_in(sums, metrics_of(purpose))

    def figures(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
        """Return the mean over users of each metric, and the number of users."""
        return means(totals)

    def _expected(self, arrays: Arrays, shares: NDArray[np.float64]) -> NDArray[np.float64] | None:
        opened = self.opened(arrays)
        if opened is None:
            return None
        total = np.zeros(self._n_items)
        for group in np.flatnonzero(shares):
            support = np.where(opened[group], arrays["supports"][group], 0).astype(np.float64)
            users = int(arrays["group_users"][group])
            if users and support.any():
                mean = float(support.sum()) / users
                touched = expected_touches(support, mean, self.settings, users=users)
                total += shares[group] * touched
        return total
