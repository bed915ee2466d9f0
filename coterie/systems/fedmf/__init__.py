"""FedMF: federated matrix factorisation of ratings by gradient steps of each user."""

from __future__ import annotations

from coterie.systems.description import IN_ROUNDS, DataNeeds, System
from coterie.systems.fedmf.host import FedMfHost
from coterie.systems.fedmf.server import FedMfServer
from coterie.systems.fedmf.settings import CHOOSE_BY, FedMfSettings
from coterie.systems.shared.declared_rounds import declared_with_sparse
from coterie.systems.shared.factor_report import FactorReport
from coterie.systems.shared.factors import fewest_users
from coterie.systems.shared.from_plan import from_plan

__all__ = ["SYSTEM"]

SYSTEM = System(
    name="fedmf",
    title="FedMF",
    paper="Chai et al., Secure Federated Matrix Factorization, 2020",
    page="docs/systems/fedmf.md",
    settings=FedMfSettings,
    forms=IN_ROUNDS,
    sums=("clear", "denoised", "masked", "encrypted", "shared-key"),
    declared=declared_with_sparse,
    shown=("rmse", "train_rmse", "ndcg_rated@10"),
    usual={
        "split": {"kind": "random"},
        # As in the paper all users are in each round; a sum over all of them shows little of any group.
        # Beside biases factors begin near 0 and grow slowly; patience ends most runs before that.
        "rounds": {"cohorts": "all", "group": 1000, "choose_by": CHOOSE_BY, "passes": 300},
    },
    needs=DataNeeds(ratings=True),
    server=from_plan(FedMfSettings, FedMfServer),
    host=from_plan(FedMfSettings, FedMfHost),
    stepped=("model.items",),
    ratings=lambda text: FedMfSettings.from_json(text).rating_range,
    fewest=lambda text: fewest_users(FedMfSettings.from_json(text).factor_settings()),
    folds_in=True,
    report=FactorReport,
    grows=True,
    study="coterie.systems.fedmf.study",
)
