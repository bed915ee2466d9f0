"""FedNCF: federated neural collaborative filtering, with GMF, MLP or NeuMF."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import HostSide, Keep, ServerSide
from coterie.systems.description import IN_ROUNDS, System
from coterie.systems.fedncf.mathematics import Private, initial_private
from coterie.systems.fedncf.settings import FedNcfOptions
from coterie.systems.fedncf.sides import FedNcfHost, FedNcfPlan, FedNcfServer
from coterie.systems.shared.declared_rounds import declared_in_rounds
from coterie.systems.shared.host_data import HostData

__all__ = ["SYSTEM"]


def _server(settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    return FedNcfServer(FedNcfPlan.from_json(settings), n_items, seed, groups)


def _host(settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: Keep) -> HostSide:
    plan = FedNcfPlan.from_json(settings)
    private = Private(**keep(dict(initial_private(plan.learning, keys).arrays())))
    return FedNcfHost(plan, data.leave_one_out(seed), keys, private, seed)


SYSTEM = System(
    name="fedncf",
    title="FedNCF",
    paper="Perifanis and Efraimidis, Federated Neural Collaborative Filtering, 2022",
    page="docs/systems/fedncf.md",
    settings=FedNcfOptions,
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted", "shared-key"),
    declared=declared_in_rounds,
    # The first two are among 100 sampled items, the others among all unseen ones.
    shown=("hit_ratio@10", "ndcg@10", "hit_ratio_all@10", "ndcg_all@10"),
    usual={"split": {"kind": "leave-last-out"}, "rounds": {"passes": 300}},
    server=_server,
    host=_host,
    study="coterie.systems.fedncf.study",
)
