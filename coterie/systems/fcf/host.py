"""Sides of FCF: the shared host and server of factorisations, with a rating of 1 for each interaction."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import KeepPrivate
from coterie.systems.fcf.mathematics import TAKEN_UP
from coterie.systems.fcf.settings import FcfSettings
from coterie.systems.shared.factor_host import FactorHost
from coterie.systems.shared.factor_server import FactorServer
from coterie.systems.shared.factor_steps import UserData
from coterie.systems.shared.factors import layout
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.rated_host import training_ratings
from coterie.systems.shared.rated_server import Layouts
from coterie.systems.shared.taken_up import MEASURES, taken_up

__all__ = ["FcfHost", "layouts", "server"]


def layouts(settings: FcfSettings, n_items: int) -> Layouts:
    """Return the layouts of contributions, by purpose of a sum."""
    return Layouts(n_items, layout(settings.factor_settings(), n_items, 0), MEASURES)


def server(settings: FcfSettings, n_items: int, seed: int, groups: int) -> FactorServer:
    """Build the server's side of FCF."""
    return FactorServer(settings.factor_settings(), layouts(settings, n_items), seed, groups)


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
