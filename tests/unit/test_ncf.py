"""Scores, loss and gradients of GMF, MLP and NeuMF."""

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.systems.fedncf.networks import (
    MODELS,
    Architecture,
    gradients,
    initial_items,
    initial_network,
    scores,
)

SMALL = {"dim": 3, "mlp_embedding": 4, "layers": (6, 5)}


def problem(architecture, users=3, n=40, *, each=False, own=True, seed=0):
    rng = np.random.default_rng(seed)
    private = rng.standard_normal((users, architecture.width, n if each else 1)).astype(np.float32)
    rows = np.ones((users, architecture.width + 1, n), np.float32)
    rows[:, :-1] = rng.standard_normal((users, architecture.width, n))
    network = np.stack([initial_network(architecture, rng) for _ in range(users)])
    network += 0.1 * rng.standard_normal(network.shape).astype(np.float32)
    label = (rng.random((users, n)) < 0.3).astype(np.float32)
    weight = rng.random((users, n)).astype(np.float32)
    return private, rows, network if own else network[0], label, weight


@pytest.mark.parametrize(
    ("model", "width", "size"), [("gmf", 12, 13), ("mlp", 12, 2761), ("neumf", 24, 2773)]
)
def test_sizes_are_those_of_the_paper(model, width, size):
    architecture = Architecture(model)
    assert (architecture.width, architecture.network_size) == (width, size)
    if model == "neumf":  # rows with a touch count each, the network and one weight, on ML-100K
        assert 1682 * (width + 1) + size + 1 == 44_824


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_autograd(model, each):
    torch = pytest.importorskip("torch")
    architecture = Architecture(model, **SMALL)
    private, rows, network, label, weight = problem(architecture, each=each)
    found = gradients(architecture, private, rows, network, label, weight)
    for u in range(len(rows)):
        p, q, w = (
            torch.tensor(np.ascontiguousarray(value), dtype=torch.float64, requires_grad=True)
            for value in (private[u].T, rows[u, :-1].T, network[u])
        )
        logits = torch_logits(torch, architecture, p.expand(len(q), -1), q, w)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, torch.tensor(label[u], dtype=torch.float64), reduction="none"
        )
        loss = (losses * torch.tensor(weight[u])).sum()
        loss.backward()
        np.testing.assert_allclose(found.loss[u], loss.item(), rtol=1e-5)
        np.testing.assert_allclose(found.private[u].T, p.grad, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.rows[u].T, q.grad, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.network[u], w.grad, rtol=1e-4, atol=1e-5)


def torch_logits(torch, architecture, p, q, network):
    """Score as the papers write it: layer by layer on concatenated inputs."""
    G = architecture.gmf_width
    parts, start = [p[:, :G] * q[:, :G]], 0
    hidden = torch.cat([p[:, G:], q[:, G:]], 1)
    for m, k in architecture.matrices:
        layer = network[start : start + m * k].reshape(m, k)
        hidden = torch.relu(hidden @ layer[:, :-1].T + layer[:, -1])
        start += m * k
    if architecture.matrices:
        parts.append(hidden)
    return torch.cat(parts, 1) @ network[start:-1] + network[-1]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_users_gradients_have_the_same_bits_alone_and_in_a_stack(model, own):
    architecture = Architecture(model)
    private, rows, network, label, weight = problem(architecture, users=7, n=56, own=own)
    together = gradients(architecture, private, rows, network, label, weight)
    for u in range(7):
        one = slice(u, u + 1)
        alone = gradients(
            architecture, private[one], rows[one], network[one] if own else network, label[one], weight[one]
        )
        for name in ("loss", "private", "rows", "network"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[u])


@pytest.mark.parametrize("model", MODELS)
def test_instances_of_weight_zero_are_padding(model):
    architecture = Architecture(model, **SMALL)
    private, rows, network, label, weight = problem(architecture)
    weight[:, 30:] = 0
    padded = gradients(architecture, private, rows, network, label, weight)
    rows = rows.copy()
    rows[:, :-1, 30:] = 7.0
    np.testing.assert_array_equal(
        gradients(architecture, private, rows, network, label, weight).rows[:, :, :30],
        padded.rows[:, :, :30],
    )
    cut = gradients(architecture, private, rows[:, :, :30], network, label[:, :30], weight[:, :30])
    np.testing.assert_allclose(padded.network, cut.network, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(padded.private, cut.private, rtol=1e-4, atol=1e-5)
    assert not padded.rows[:, :, 30:].any()


def test_a_weight_counts_like_repeated_instances():
    architecture = Architecture("neumf", **SMALL)
    private, rows, network, label, weight = problem(architecture, n=8)
    weight[:] = 1
    twice = gradients(
        architecture, private, *(np.concatenate([x, x], -1) for x in (rows,)), network,
        np.concatenate([label, label], 1), np.concatenate([weight, weight], 1),
    )  # fmt: skip
    double = gradients(architecture, private, rows, network, label, 2 * weight)
    np.testing.assert_allclose(twice.network, double.network, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(twice.loss, double.loss, rtol=1e-5)


def test_extreme_scores_have_finite_loss_and_gradients():
    architecture = Architecture("gmf", dim=2)
    private = np.full((1, 2, 1), 1e4, np.float32)
    rows = np.ones((1, 3, 2), np.float32)
    rows[0, :2, 0] = -1e4
    network = np.ones(3, np.float32)
    label = np.array([[1.0, 0.0]], np.float32)
    with np.errstate(over="raise", invalid="raise"):
        found = gradients(architecture, private, rows, network, label, np.ones((1, 2), np.float32))
    assert np.isfinite(found.loss).all()
    assert np.isfinite(found.rows).all()


@pytest.mark.parametrize("model", MODELS)
def test_scores_are_the_logits_of_the_loss(model):
    torch = pytest.importorskip("torch")
    architecture = Architecture(model)
    rng = np.random.default_rng(1)
    items, network = initial_items(architecture, 50, rng), initial_network(architecture, rng)
    private = rng.standard_normal((4, architecture.width)).astype(np.float32)
    found = scores(architecture, items, network, private)
    assert found.shape == (4, 50)
    assert found.dtype == np.float32
    for u in range(4):
        logits = torch_logits(
            torch,
            architecture,
            torch.tensor(private[u]).expand(50, -1),
            torch.tensor(items),
            torch.tensor(network),
        )
        np.testing.assert_allclose(found[u], logits, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_scores_of_candidates_are_those_of_all_items_and_independent_of_other_users(model):
    architecture = Architecture(model)
    rng = np.random.default_rng(2)
    items, network = initial_items(architecture, 300, rng), initial_network(architecture, rng)
    private = rng.standard_normal((700, architecture.width)).astype(np.float32)
    candidates = rng.integers(0, 300, (700, 101))
    some = scores(architecture, items, network, private, candidates)
    every = scores(architecture, items, network, private)
    np.testing.assert_allclose(some, np.take_along_axis(every, candidates, 1), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(
        scores(architecture, items, network, private[5:6], candidates[5:6]), some[5:6]
    )
    np.testing.assert_array_equal(scores(architecture, items, network, private[5:6]), every[5:6])


def test_xavier_keeps_to_its_bounds_and_starts_biases_at_zero():
    architecture = Architecture("neumf")
    network = initial_network(architecture, np.random.default_rng(0))
    hidden, output = architecture.views(network)
    for matrix in hidden:
        bound = np.sqrt(6 / (matrix.shape[0] + matrix.shape[1] - 1))
        assert 0.9 * bound < np.abs(matrix[:, :-1]).max() <= bound
        assert not matrix[:, -1].any()
    assert output[-1] == 0
    items = initial_items(architecture, 5000, np.random.default_rng(0))
    assert 0.99 * np.sqrt(6 / 5012) < np.abs(items).max() <= np.sqrt(6 / 5012)


@pytest.mark.parametrize("wrong", [{"model": "svd"}, {"dim": 0}, {"layers": ()}, {"layers": (4, 0)}])
def test_an_architecture_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError):
        Architecture(**wrong)
