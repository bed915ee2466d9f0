"""FedGNN: a graph attention layer over each user's items and anonymous neighbours, trained in rounds."""

from __future__ import annotations

from coterie.systems.description import IN_ROUNDS, DataNeeds, System
from coterie.systems.fedgnn.declared import declared
from coterie.systems.fedgnn.host import FedGnnHost
from coterie.systems.fedgnn.server import FedGnnServer
from coterie.systems.fedgnn.settings import CHOOSE_BY, FedGnnSettings
from coterie.systems.shared.factor_report import FactorReport
from coterie.systems.shared.factors import fewest_users
from coterie.systems.shared.from_plan import from_plan

__all__ = ["SYSTEM"]

SYSTEM = System(
    name="fedgnn",
    title="FedGNN",
    paper="Wu et al., FedGNN, 2021",
    page="docs/systems/fedgnn.md",
    settings=FedGnnSettings,
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted", "shared-key"),
    declared=declared,
    shown=("rmse", "train_rmse", "with_neighbours", "neighbours_current"),
    usual={
        "split": {"kind": "random"},
        # A sum over all users shows little of any group; patience ends most runs before the last pass.
        "rounds": {"cohorts": "all", "group": 1000, "choose_by": CHOOSE_BY, "passes": 300},
    },
    needs=DataNeeds(ratings=True),
    server=from_plan(FedGnnSettings, FedGnnServer),
    host=from_plan(FedGnnSettings, FedGnnHost),
    stepped=("model.items", "model.layer"),
    ratings=lambda text: FedGnnSettings.from_json(text).rating_range,
    fewest=lambda text: fewest_users(FedGnnSettings.from_json(text).factor_settings()),
    folds_in=True,
    report=FactorReport,
    study="coterie.systems.fedgnn.study",
)
