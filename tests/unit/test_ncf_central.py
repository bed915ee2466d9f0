"""GMF, MLP and NeuMF with all data in one place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.systems.fedncf.central import CentralSettings, instances, train
from coterie.systems.fedncf.networks import MODELS, Architecture, scores

SMALL = {"dim": 3, "mlp_embedding": 4, "layers": (6, 5)}
ITEMS = 30


def histories(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.choice(ITEMS, size, replace=False) for size in (5, 1, 12, 20)]


@given(
    st.lists(st.lists(st.integers(0, 11), unique=True, max_size=12), max_size=5),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=100)
def test_instances_are_all_interactions_and_items_without_one(lists, negatives, seed):
    data = [np.array(each, np.int64) for each in lists]
    user, item, label = instances(data, 12, negatives, np.random.default_rng(seed))
    for u, each in enumerate(data):
        mine = user == u
        if len(each) == 12:  # nothing to tell apart
            assert not mine.any()
            continue
        assert sorted(item[mine & (label == 1)].tolist()) == sorted(each.tolist())
        others = item[mine & (label == 0)]
        assert len(others) == negatives * len(each)
        assert not set(others.tolist()) & set(each.tolist())
        assert ((others >= 0) & (others < 12)).all()


def test_negatives_are_uniform_over_the_items_without_an_interaction():
    data = [np.array([0, 7, 8, 29]), np.arange(25)]
    user, item, label = instances(data, ITEMS, 5000, np.random.default_rng(0))
    for u, each in enumerate(data):
        times = np.bincount(item[(user == u) & (label == 0)], minlength=ITEMS)
        expected = 5000 * len(each) / (ITEMS - len(each))
        rest = np.setdiff1d(np.arange(ITEMS), each)
        assert np.abs(times[rest] - expected).max() < 5 * np.sqrt(expected)


@pytest.mark.parametrize("model", MODELS)
def test_training_is_pytorchs_adam_on_the_same_batches(model):
    torch = pytest.importorskip("torch")
    from tests.unit.test_ncf import torch_logits

    options = CentralSettings(Architecture(model, **SMALL), negatives=2, batch_size=32, rate=0.02)
    data = histories()
    found = train(data, ITEMS, options, epochs=2, seed=3)
    start = train(data, ITEMS, options, epochs=0, seed=3)
    tables = [torch.tensor(value, requires_grad=True) for value in (start.users, start.items, start.network)]
    optimiser = torch.optim.Adam(tables, lr=0.02)
    for epoch in (1, 2):
        rng = np.random.default_rng(np.random.SeedSequence(3, spawn_key=(1, epoch)))
        user, item, label = instances(data, ITEMS, 2, rng)
        order = rng.permutation(len(user))
        for first in range(0, len(order), 32):
            batch = order[first : first + 32]
            optimiser.zero_grad()
            logits = torch_logits(
                torch, options.architecture, tables[0][user[batch]], tables[1][item[batch]], tables[2]
            )
            torch.nn.functional.binary_cross_entropy_with_logits(
                logits, torch.tensor(label[batch])
            ).backward()
            optimiser.step()
    for ours, theirs in zip((found.users, found.items, found.network), tables, strict=True):
        np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-3, atol=1e-4)
    assert np.abs(found.items - start.items).max() > 0.02


def test_the_model_that_was_liked_best_is_kept_and_training_stops_when_none_is_better():
    options = CentralSettings(Architecture("gmf", **SMALL), patience=3)
    seen = []

    def judge(epoch, model, loss):
        seen.append(model.items.copy())
        return [0.1, 0.5, 0.4, 0.5, 0.2, 0.9][epoch - 1]

    found = train(histories(), ITEMS, options, epochs=6, seed=0, on_epoch=judge)
    assert len(seen) == 5
    np.testing.assert_array_equal(found.items, seen[1])


def test_central_training_learns_to_rank():
    options = CentralSettings(Architecture("neumf", **SMALL), batch_size=64, rate=0.02)
    rng = np.random.default_rng(0)
    data = [rng.choice(15, 8, replace=False) + 15 * (u % 2) for u in range(40)]
    model = train(data, ITEMS, options, epochs=12, seed=0)
    found = scores(options.architecture, model.items, model.network, model.users)
    own = np.arange(ITEMS) // 15 == np.arange(40)[:, None] % 2
    learnt = 0
    for u, items in enumerate(data):
        unseen = own[u].copy()
        unseen[items] = False
        learnt += np.median(found[u, unseen]) > np.quantile(found[u, ~own[u]], 0.9)
    # By chance it is so for one user in a hundred at most.
    assert learnt >= 35


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"batch_size": 0}, {"decay": 1.5}, {"rate": float("nan")}])
def test_central_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        CentralSettings(**wrong)
