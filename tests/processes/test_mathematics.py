"""The network changes no number: a federation learns the same as its mathematics in one process."""

import numpy as np
import pytest

from coterie.evaluation.holdout import TRAIN, headline
from coterie.systems.drift.mathematics import score
from coterie.systems.drift.sequential import run_in_process

from .recorded import OneOwner

ROUNDING = {"rtol": 1e-5, "atol": 1e-6}
"""Tolerance of float32 factors after thousands of updates added in another order; here the difference is 0."""

pytestmark = pytest.mark.xdist_group("one owner")


@pytest.fixture(params=[False, True], ids=["factors", "factors and item bias"])
def run(request, one_owner):
    return one_owner.run(item_bias=request.param)


def test_the_owner_receives_every_users_training_interactions_in_the_order_of_time(run):
    running, _ = run
    data, split = running.feed.dataset, running.feed.split
    names = running.stores.user_names()
    received = {user: records for (_, user), records in running.stores.stored().items()}
    assert len(received) == len(data.users)
    for user, name in enumerate(data.users):
        own = np.flatnonzero((data.user == user) & (split.part == TRAIN))
        own = own[np.argsort(data.time[own], kind="stable")]
        expected = [(data.items[data.item[n]], bool(running.feed.positive[n])) for n in own]
        assert received[names[name]] == expected


def test_one_owner_and_one_host_learn_the_factors_of_the_same_run_in_one_process(run):
    running, report = run
    users, items = running.stores.final()
    (stream,) = running.stores.streams().values()
    Upsilon, Psi = run_in_process(
        [stream],
        len(users),
        len(items),
        running.stores.learning(),
        epochs=OneOwner.EPOCHS,
        seed=running.plan().seed,
    )
    np.testing.assert_allclose(users, Upsilon, **ROUNDING)
    np.testing.assert_allclose(items, Psi, **ROUNDING)
    assert report["version"] == len(running.stores.applied()) > OneOwner.EPOCHS


def test_the_metrics_of_the_report_are_those_of_its_factors(run):
    running, report = run
    data, stores = running.feed.dataset, running.stores
    users, items = stores.final()
    slots, names, keys = stores.slots(), stores.user_names(), stores.item_keys()
    Upsilon = users[[slots[names[name]] for name in data.users]]
    Psi = items[[keys.index(key) for key in data.items]]
    expected = headline(running.feed.holdout().measure(lambda chosen: score(Upsilon[chosen], Psi)))
    reported = dict(report["history"][-1]["metrics"])
    assert reported.pop("train_loss") > 0
    assert reported == pytest.approx(expected, rel=1e-6)
