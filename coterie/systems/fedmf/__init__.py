"""FedMF: federated matrix factorisation of ratings by gradient steps of each user."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import HostSide, Keep, ServerSide
from coterie.systems.description import IN_ROUNDS, DataNeeds, System
from coterie.systems.fedmf import mathematics
from coterie.systems.fedmf.host import FedMfHost
from coterie.systems.fedmf.server import CHOOSE_BY, FedMfPlan, FedMfServer
from coterie.systems.fedmf.settings import FedMfOptions
from coterie.systems.shared import factors
from coterie.systems.shared.declared_rounds import declared_with_sparse
from coterie.systems.shared.host_data import HostData

__all__ = ["SYSTEM"]


def _server(settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    return FedMfServer(FedMfPlan.from_json(settings), n_items, seed, groups)


def _host(settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: Keep) -> HostSide:
    plan = FedMfPlan.from_json(settings)
    private = keep({"factors": mathematics.initial_factors(plan.learning, keys)})
    return FedMfHost(plan, data, keys, private, seed)


def _ratings(settings: str) -> tuple[float, float]:
    learning = FedMfPlan.from_json(settings).learning
    return learning.lowest, learning.highest


def _fewest(settings: str) -> int:
    return factors.fewest_users(mathematics.shared(FedMfPlan.from_json(settings).learning))


SYSTEM = System(
    name="fedmf",
    title="FedMF",
    paper="Chai et al., Secure Federated Matrix Factorization, 2020",
    page="docs/systems/fedmf.md",
    settings=FedMfOptions,
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted", "shared-key"),
    declared=declared_with_sparse,
    shown=("rmse", "train_rmse", "ndcg_rated@10"),
    usual={
        "split": {"kind": "random"},
        # As in the paper everybody is in each round; a sum over so many shows little of any group.
        "rounds": {"cohorts": "all", "group": 1000, "choose_by": CHOOSE_BY},
    },
    needs=DataNeeds(ratings=True),
    server=_server,
    host=_host,
    ratings=_ratings,
    fewest=_fewest,
    study="coterie.systems.fedmf.study",
)
