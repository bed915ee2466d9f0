"""iALS: factors of users solved for where they are, factors of items by one secure sum in each round."""

from __future__ import annotations

from coterie.systems.description import IN_ROUNDS, System
from coterie.systems.ials.host import IalsHost
from coterie.systems.ials.mathematics import row_values
from coterie.systems.ials.server import IalsServer
from coterie.systems.ials.settings import IalsSettings
from coterie.systems.shared.declared_rounds import declared_in_rounds
from coterie.systems.shared.from_plan import from_plan

__all__ = ["SYSTEM"]

_EVERYBODY = 1_000_000
"""Fewest users of a group: a smaller population is not divided, and items are counted in all of it."""


def _fewest(text: str) -> int:
    # From a sum over fewer users than an item has values, single users might be solved for.
    settings = IalsSettings.from_json(text)
    return row_values(settings.factors, with_products=settings.with_products) + 1


SYSTEM = System(
    name="ials",
    title="iALS",
    paper="Rendle et al., Revisiting the Performance of iALS on Item Recommendation Benchmarks, 2022",
    page="docs/systems/ials.md",
    settings=IalsSettings,
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted", "shared-key"),
    declared=declared_in_rounds,
    # The first two are among 100 sampled items, the others among all unseen ones.
    shown=("hit_ratio@10", "ndcg@10", "hit_ratio_all@10", "ndcg_all@10"),
    usual={
        "split": {"kind": "leave-last-out"},
        "rounds": {"cohorts": "all", "group": _EVERYBODY, "passes": 8, "evaluate_every": 1},
    },
    server=from_plan(IalsSettings, IalsServer),
    host=from_plan(IalsSettings, IalsHost),
    fewest=_fewest,
    folds_in=True,
    study="coterie.systems.ials.study",
)
