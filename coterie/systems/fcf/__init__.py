"""FCF: federated collaborative filtering of implicit feedback; users' factors are solved for in each round."""

from __future__ import annotations

from coterie.systems.description import IN_ROUNDS, System
from coterie.systems.fcf.host import FcfHost, FcfServer
from coterie.systems.fcf.settings import FcfSettings
from coterie.systems.shared.declared_rounds import declared_in_rounds
from coterie.systems.shared.factor_report import FactorReport
from coterie.systems.shared.factors import fewest_users
from coterie.systems.shared.from_plan import from_plan
from coterie.systems.shared.taken_up import CHOOSE_BY

__all__ = ["SYSTEM"]

SYSTEM = System(
    name="fcf",
    title="FCF",
    paper="Ammad-ud-din et al., Federated Collaborative Filtering, 2019",
    page="docs/systems/fedmf.md",
    settings=FcfSettings,
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted", "shared-key"),
    declared=declared_in_rounds,
    shown=("ndcg@10", "precision@10", "recall@10"),
    usual={
        "split": {"kind": "random"},
        # As in the paper all users are in each round; a sum over all of them shows little of any group.
        "rounds": {"cohorts": "all", "group": 1000, "choose_by": CHOOSE_BY},
    },
    server=from_plan(FcfSettings, FcfServer),
    host=from_plan(FcfSettings, FcfHost),
    fewest=lambda text: fewest_users(FcfSettings.from_json(text).factor_settings()),
    folds_in=True,
    report=FactorReport,
    grows=True,
    study="coterie.systems.fcf.study",
)
