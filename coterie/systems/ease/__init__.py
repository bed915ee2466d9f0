"""EASE: an item-item model in closed form, from one sum over all users of the pairs of items that each has."""

from __future__ import annotations

from coterie.systems.description import IN_ROUNDS, System
from coterie.systems.ease.declared import declared
from coterie.systems.ease.host import EaseHost
from coterie.systems.ease.report import EaseReport
from coterie.systems.ease.server import EaseServer
from coterie.systems.ease.settings import EaseSettings
from coterie.systems.shared.from_plan import from_plan

__all__ = ["SYSTEM"]

_EVERYBODY = 1_000_000
"""Fewest users of a group: no population of so many pairs is divided, and items are counted in all of it."""


def _objection(form: str, secure_sum: str) -> str:
    if secure_sum != "shared-key":
        return ""
    return (
        "hosts that share a key must come to the same model to the bit, and EASE solves equations by a library whose "
        "last bits depend on the processor; each of these hosts would also learn all counts of pairs"
    )


SYSTEM = System(
    name="ease",
    title="EASE",
    paper="Steck, Embarrassingly Shallow Autoencoders for Sparse Data, 2019",
    page="docs/systems/ease.md",
    settings=EaseSettings,
    forms=IN_ROUNDS,
    sums=("clear", "masked", "encrypted"),
    objection=_objection,
    declared=declared,
    # The first two are among 100 sampled items, the others among all unseen ones.
    shown=("hit_ratio@10", "ndcg@10", "hit_ratio_all@10", "ndcg_all@10"),
    usual={
        "split": {"kind": "leave-last-out"},
        # One sum over everybody: there is no other that could be subtracted from it.
        "rounds": {"cohorts": "all", "group": _EVERYBODY, "passes": 1, "evaluate_every": 1},
    },
    server=from_plan(EaseSettings, EaseServer),
    host=from_plan(EaseSettings, EaseHost),
    folds_in=True,
    report=EaseReport,
    study="coterie.systems.ease.study",
)
