"""FCF: federated collaborative filtering of implicit feedback, users' factors solved for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.sides import HostSide, Keep, ServerSide
from coterie.systems.description import IN_ROUNDS, System
from coterie.systems.fcf.host import CHOOSE_BY, FcfHost, FcfPlan
from coterie.systems.fcf.settings import FcfOptions
from coterie.systems.shared import factors
from coterie.systems.shared.declared_rounds import declared_in_rounds
from coterie.systems.shared.factor_server import MvmfServer
from coterie.systems.shared.host_data import HostData

__all__ = ["SYSTEM"]


def _server(settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    return MvmfServer(FcfPlan.from_json(settings).mvmf(), n_items, seed, groups)


def _host(settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: Keep) -> HostSide:
    plan = FcfPlan.from_json(settings)
    private = keep({"factors": factors.initial_factors(plan.learning.mvmf(), keys)})
    return FcfHost(plan, data, keys, private, seed)


def _fewest(settings: str) -> int:
    return factors.fewest_users(FcfPlan.from_json(settings).learning.mvmf())


SYSTEM = System(
    name="fcf",
    title="FCF",
    paper="Ammad-ud-din et al., Federated Collaborative Filtering, 2019",
    page="docs/systems/fedmf.md",
    settings=FcfOptions,
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted", "shared-key"),
    declared=declared_in_rounds,
    shown=("ndcg@10", "precision@10", "recall@10"),
    usual={
        "split": {"kind": "random"},
        # As in the paper everybody is in each round; a sum over so many shows little of any group.
        "rounds": {"cohorts": "all", "group": 1000, "choose_by": CHOOSE_BY},
    },
    server=_server,
    host=_host,
    fewest=_fewest,
    study="coterie.systems.fcf.study",
)
