"""FedMVMF: federated multi-view matrix factorisation; PrivMVMF under an encrypted sum."""

from __future__ import annotations

from coterie.systems.description import IN_ROUNDS, DataNeeds, System
from coterie.systems.fedmvmf.declared import declared
from coterie.systems.fedmvmf.host import FedMvmfHost
from coterie.systems.fedmvmf.owner import FedMvmfOwner
from coterie.systems.fedmvmf.server import FedMvmfServer
from coterie.systems.fedmvmf.settings import FedMvmfPlan, FedMvmfSettings
from coterie.systems.shared.factor_report import FactorReport
from coterie.systems.shared.factors import fewest_users
from coterie.systems.shared.from_plan import from_plan
from coterie.systems.shared.rated_measures import CHOOSE_BY

__all__ = ["SYSTEM"]

SYSTEM = System(
    name="fedmvmf",
    title="FedMVMF",
    paper="Mai and Pang, Privacy-preserving multi-view matrix factorization (PrivMVMF), 2023",
    page="docs/systems/mvmf.md",
    settings=FedMvmfSettings,
    table="mvmf",
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted"),
    declared=declared,
    shown=("ndcg_rated@10", "precision@10", "recall@10", "rmse"),
    usual={
        "split": {"kind": "random"},
        # As in the paper all users are in each round; a sum over all of them shows little of any group.
        "rounds": {"cohorts": "all", "group": 1000, "choose_by": CHOOSE_BY},
    },
    needs=DataNeeds(ratings=True),
    server=from_plan(FedMvmfPlan, FedMvmfServer),
    host=from_plan(FedMvmfPlan, FedMvmfHost),
    owner=from_plan(FedMvmfPlan, FedMvmfOwner),
    ratings=lambda text: FedMvmfPlan.from_json(text).rating_range,
    fewest=lambda text: fewest_users(FedMvmfPlan.from_json(text)),
    folds_in=True,
    report=FactorReport,
    study="coterie.systems.fedmvmf.study",
)
