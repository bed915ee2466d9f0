"""DRIFT: asynchronous learning across data owners, in its published form and in one that shields users."""

from __future__ import annotations

from coterie.secure_sum.registry import KEYED
from coterie.systems.description import DataNeeds, Driver, System
from coterie.systems.drift.declared import declared
from coterie.systems.drift.report import DriftReport
from coterie.systems.drift.settings import DriftSettings

__all__ = ["SYSTEM"]

_NO_ROUNDS = "a sum needs rounds, and the published form has none"

_GIVES = {
    ("published", "clear"): "asynchronous, no rounds: each owner's update in clear",
    (
        "shielded",
        "clear",
    ): "users keep their rows; the server sees each owner's sum over a window, of rows with k_min users",
    (
        "shielded",
        "masked",
    ): "users keep their rows; the server sees sums of at least three owners over a window, and of no single one",
}

_OBJECTIONS = {
    (
        "published",
        "masked",
    ): f"{_NO_ROUNDS}: each owner's update is applied by itself; the shielded form has windows",
    **{("published", under): _NO_ROUNDS for under in KEYED},
    **{("shielded", under): "windows are summed in clear or masked" for under in KEYED},
}

SYSTEM = System(
    name="drift",
    title="DRIFT",
    paper="DRIFT, 2022",
    page="docs/systems/drift.md",
    settings=DriftSettings,
    moved={"study.theta": "compare_theta"},
    forms={"published": Driver.ASYNCHRONOUS, "shielded": Driver.WINDOWS},
    sums=("clear", "masked"),
    objection=lambda form, secure_sum: _OBJECTIONS.get((form, secure_sum), ""),
    gives=lambda form, secure_sum: _GIVES[form, secure_sum],
    declared=declared,
    shown=("ndcg@10", "map@10", "ndcg_test_items@10"),
    needs=DataNeeds(likes=True, owners_by_genre=True),
    seeded_users=True,
    report=DriftReport,
    study="coterie.systems.drift.study",
)
