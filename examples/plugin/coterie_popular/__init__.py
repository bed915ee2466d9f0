"""Popular, an example of a learning system in a distribution of its own: an item scores by how many users have it."""

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import HostSide, KeepPrivate, ServerSide
from coterie.systems.description import IN_ROUNDS, System
from coterie.systems.shared.declared_rounds import declared_in_rounds
from coterie.systems.shared.host_data import HostData
from coterie_popular.host import PopularHost
from coterie_popular.server import PopularServer
from coterie_popular.settings import PopularSettings

__all__ = ["SYSTEM"]


def _server(settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    return PopularServer(PopularSettings.from_json(settings), n_items)


def _host(settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: KeepPrivate) -> HostSide:
    return PopularHost(PopularSettings.from_json(settings), data.leave_one_out(seed), keys, seed)


SYSTEM = System(
    name="popular",
    title="Popular",
    paper="no paper: the simplest system that there is",
    settings=PopularSettings,
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted", "shared-key"),
    declared=declared_in_rounds,
    shown=("hit_ratio@10", "ndcg@10"),
    # One pass counts every user once.
    usual={"split": {"kind": "leave-last-out"}, "rounds": {"passes": 1, "evaluate_every": 1}},
    server=_server,
    host=_host,
    folds_in=True,
    study="coterie_popular.study",
)
