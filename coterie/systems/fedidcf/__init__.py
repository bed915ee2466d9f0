"""FedIDCF: FedMF of some users, and an attention over encrypted means of their vectors for those who never trained."""

from __future__ import annotations

from coterie.systems.description import IN_ROUNDS, DataNeeds, System
from coterie.systems.fedidcf.declared import declared
from coterie.systems.fedidcf.host import FedIdcfHost
from coterie.systems.fedidcf.report import IdcfReport
from coterie.systems.fedidcf.server import FedIdcfServer
from coterie.systems.fedidcf.settings import CHOOSE_BY, FedIdcfSettings
from coterie.systems.shared.factors import fewest_users
from coterie.systems.shared.from_plan import from_plan

__all__ = ["SYSTEM"]


def _objection(form: str, secure_sum: str) -> str:
    """Return why FedIDCF does not run under a sum; empty where it does."""
    if secure_sum == "encrypted":
        return "a run has one Paillier key, and its hosts need that for pseudo meta-latents, not decrypting clients"
    return ""


SYSTEM = System(
    name="fedidcf",
    title="FedIDCF",
    paper="Wu et al., IDCF, 2021, in its federated form",
    page="docs/systems/fedidcf.md",
    settings=FedIdcfSettings,
    forms=IN_ROUNDS,
    objection=_objection,
    sums=("clear", "masked", "shared-key"),
    declared=declared,
    shown=("rmse", "query_rmse", "biases_query_rmse", "with_latents"),
    usual={
        "split": {"kind": "random"},
        # A sum over all users shows little of any group.
        "rounds": {"cohorts": "all", "group": 1000, "choose_by": CHOOSE_BY, "passes": 120, "patience": 0},
    },
    needs=DataNeeds(ratings=True),
    server=from_plan(FedIdcfSettings, FedIdcfServer),
    host=from_plan(FedIdcfSettings, FedIdcfHost),
    ratings=lambda text: FedIdcfSettings.from_json(text).rating_range,
    fewest=lambda text: fewest_users(FedIdcfSettings.from_json(text).factor_settings()),
    folds_in=True,
    report=IdcfReport,
    study="coterie.systems.fedidcf.study",
)
