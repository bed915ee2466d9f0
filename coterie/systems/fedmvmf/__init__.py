"""FedMVMF: federated multi-view matrix factorisation; PrivMVMF under an encrypted sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable
from coterie.rounds.sides import HostSide, Keep, OwnerSide, ServerSide
from coterie.systems.description import IN_ROUNDS, DataNeeds, System
from coterie.systems.fedmvmf.declared import declared
from coterie.systems.fedmvmf.owner import MvmfOwner
from coterie.systems.fedmvmf.settings import MvmfOptions
from coterie.systems.shared import factors
from coterie.systems.shared.factor_host import MvmfHost
from coterie.systems.shared.factor_server import CHOOSE_BY, MvmfPlan, MvmfServer
from coterie.systems.shared.host_data import HostData

__all__ = ["SYSTEM"]


def _server(settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    return MvmfServer(MvmfPlan.from_json(settings), n_items, seed, groups)


def _host(settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: Keep) -> HostSide:
    plan = MvmfPlan.from_json(settings)
    private = keep({"factors": factors.initial_factors(plan.learning, keys)})
    return MvmfHost(plan, data, keys, private, seed)


def _owner(settings: str, items: NDArray[np.integer], features: AttributeTable, seed: int) -> OwnerSide:
    return MvmfOwner(MvmfPlan.from_json(settings), items, features, seed)


def _ratings(settings: str) -> tuple[float, float]:
    learning = MvmfPlan.from_json(settings).learning
    return learning.lowest, learning.highest


def _fewest(settings: str) -> int:
    return factors.fewest_users(MvmfPlan.from_json(settings).learning)


SYSTEM = System(
    name="fedmvmf",
    title="FedMVMF",
    paper="Mai and Pang, Privacy-preserving multi-view matrix factorization (PrivMVMF), 2023",
    page="docs/systems/mvmf.md",
    settings=MvmfOptions,
    table="mvmf",
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted"),
    declared=declared,
    shown=("ndcg_rated@10", "precision@10", "recall@10", "rmse"),
    usual={
        "split": {"kind": "random"},
        # As in the paper everybody is in each round; a sum over so many shows little of any group.
        "rounds": {"cohorts": "all", "group": 1000, "choose_by": CHOOSE_BY},
    },
    needs=DataNeeds(ratings=True),
    server=_server,
    host=_host,
    owner=_owner,
    ratings=_ratings,
    fewest=_fewest,
    study="coterie.systems.fedmvmf.study",
)
