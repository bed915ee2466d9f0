"""A host that lies, over real processes: it spoils the plain sum of FedMF, and not what robust rules make of it."""

import asyncio
import dataclasses

import numpy as np
import pytest

from coterie.studies.in_process import train_in_process
from coterie.studies.poisoning import POISONINGS, poisoned_host
from coterie.studies.run_data import load, make_feed

from .patience import ANOTHER_FORM
from .poisoning_host import Poisoned

LIAR = 3
BASE = {
    "system": "fedmf",
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
    "rounds": {"passes": 6, "evaluate_every": 3, "patience": 0},
    "federation": {"hosts": 6},
}


def settings_with(small, **aggregation):
    return small(**{**BASE, "rounds": {**BASE["rounds"], "aggregation": aggregation}})


BOOSTED = POISONINGS["boosted"]
SILENT = dataclasses.replace(BOOSTED, lie=POISONINGS["zeros"].lie)
"""The same data as the liar's, but nothing sent: what the liar's own users lose by their flipped ratings alone."""


def alone(settings, feed, attack):
    """Train in one process, with the same host lying."""

    def made(number, data, make):
        if number != LIAR:
            return make(data)
        everybody = np.ones(len(data.users), np.bool_)
        return poisoned_host(attack, everybody, 0, settings.own.rating_range, 0, data, make)

    return train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None, make_host=made)


def rmse(known):
    """Return the error after the last pass, over all users: liars measure honestly."""
    return known["history"][-1]["metrics"]["rmse"]


@pytest.mark.parametrize(
    "rule",
    [
        "sum",
        "median",
        "trimmed-mean",
        *(pytest.param(rule, marks=ANOTHER_FORM) for rule in ("distance", "norm-bound")),
    ],
)
def test_a_lying_host_spoils_the_sum_and_not_what_a_rule_makes_of_it(small, tmp_path, rule):
    terms = {} if rule == "sum" else {"rule": rule, "byzantine": 1}
    if rule == "norm-bound":
        terms["norm_bound"] = 0.3
    settings = settings_with(small, **terms)
    feed = make_feed(settings, load(settings), 0)

    async def to_the_end():
        async with Poisoned(settings, feed, tmp_path, f"client/host-{LIAR}", "boosted") as running:
            await running.start()
            return await running.finish()

    report = asyncio.run(to_the_end())
    expected = alone(settings, feed, BOOSTED).known
    same = ("epoch", "version", "users", "metrics")
    assert [{key: one[key] for key in same} for one in report["history"]] == [
        {key: one[key] for key in same} for one in expected["history"]
    ]
    left_out = [one["left_out"] for one in report["rounds"]]
    assert left_out == [one["left_out"] for one in expected["rounds"]]
    assert (max(left_out) == 1) is (rule == "distance")
    silent = alone(settings_with(small), feed, SILENT).known
    damage = rmse(report) - rmse(silent)
    assert damage > 0.12 if rule == "sum" else damage < (0.08 if rule == "norm-bound" else 0.02)
