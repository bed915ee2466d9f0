"""Sides of FCF: the shared host and server of factorisations, with a rating of 1 for each interaction."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import Arrays, KeepPrivate
from coterie.systems.fcf.mathematics import TAKEN_UP
from coterie.systems.fcf.settings import FcfSettings
from coterie.systems.shared.factor_host import FactorHost
from coterie.systems.shared.factor_server import FactorServer
from coterie.systems.shared.factor_steps import UserData
from coterie.systems.shared.factors import layout
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.popularity import with_popularity
from coterie.systems.shared.rated_host import training_ratings
from coterie.systems.shared.rated_server import Layouts, open_anywhere
from coterie.systems.shared.taken_up import MEASURES, taken_up

__all__ = ["FcfHost", "FcfServer", "layouts"]


def layouts(settings: FcfSettings, n_items: int) -> Layouts:
    """Return the layouts of contributions, by purpose of a sum."""
    return Layouts(n_items, layout(settings.factor_settings(), n_items, 0), MEASURES)


class FcfServer(FactorServer):
    """Server's side of FCF: that of a matrix factorisation, and levels of popularity where they count.

    Parameters
    ----------
    settings : FcfSettings
    n_items : int
    seed : int
        Seed of the run.
    groups : int
        Groups of the population.
    """

    def __init__(self, settings: FcfSettings, n_items: int, seed: int, groups: int) -> None:
        super().__init__(settings.factor_settings(), layouts(settings, n_items), seed, groups)
        self._weighs = settings.popularity > 0

    def model(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        """Return item factors, which items are open to any group, and levels where popularity has a weight."""
        return {**super().model(arrays), **(self.told_levels(arrays) if self._weighs else {})}


class FcfHost(FactorHost):
    """Host's side of FCF: that of a matrix factorisation, with a rating of 1 for each interaction.

    Parameters
    ----------
    settings : FcfSettings
    data : HostData
        Data of the users; an interaction counts, whatever its rating.
    keys, seed, keep
        As for `FactorHost`.
    """

    def __init__(
        self, settings: FcfSettings, data: HostData, keys: NDArray[np.uint64], seed: int, keep: KeepPrivate
    ) -> None:
        ones = taken_up(data)
        users = [
            UserData(items, ratings) for items, ratings in training_ratings(ones, TAKEN_UP, TAKEN_UP, "fcf")
        ]
        super().__init__(
            settings.factor_settings(), layouts(settings, len(data.items)), ones, keys, seed, keep, users
        )
        self._rated = dataclasses.replace(self._rated, relevant_from=TAKEN_UP)
        self._popularity = settings.popularity

    def _predicted(
        self, model: Mapping[str, NDArray[np.float32]], factors: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        found = super()._predicted(model, factors)
        if self._popularity:
            # Rows that nobody trains are not 0 before the ridge has drawn them there.
            found = np.where(open_anywhere(model), found, 0)
        return with_popularity(found, model, self._popularity)
