"""FPL: federated pair-wise learning to rank, where users send a share of their positive updates."""

from __future__ import annotations

from coterie.systems.description import IN_ROUNDS, System
from coterie.systems.fpl.host import FplHost
from coterie.systems.fpl.mathematics import fewest_users
from coterie.systems.fpl.report import FplReport
from coterie.systems.fpl.server import FplServer
from coterie.systems.fpl.settings import PI, FplSettings
from coterie.systems.shared.declared_rounds import declared_in_rounds
from coterie.systems.shared.from_plan import from_plan
from coterie.systems.shared.taken_up import CHOOSE_BY

__all__ = ["SYSTEM"]

SYSTEM = System(
    name="fpl",
    title="FPL",
    paper="Anelli et al., User-Controlled Federated Matrix Factorization for Recommender Systems, 2022",
    page="docs/systems/fpl.md",
    settings=FplSettings,
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted", "shared-key"),
    declared=declared_in_rounds,
    shown=("ndcg@10", "precision@10", "recall@10"),
    usual={
        # pFPL and pFPL+ have all users in each round; a sum over all of them shows little of any group.
        "rounds": {"cohorts": "all", "group": 1000, "passes": 150, "choose_by": CHOOSE_BY},
    },
    server=from_plan(FplSettings, FplServer),
    host=from_plan(FplSettings, FplHost),
    fewest=lambda text: fewest_users(FplSettings.from_json(text)),
    preferences=(PI,),
    folds_in=True,
    report=FplReport,
    grows=True,
    study="coterie.systems.fpl.study",
)
