"""Server optimisers, and what clients add to their steps."""

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.systems.shared.optimisers import (
    SERVER_OPTIMISERS,
    ServerOptimiser,
    adam,
    add_proximal,
    corrected,
    initial_state,
    next_control,
    step,
)


def changes(rounds=6, seed=0):
    rng = np.random.default_rng(seed)
    return [{"items": rng.standard_normal((4, 3)), "network": rng.standard_normal(5)} for _ in range(rounds)]


def model(seed=1):
    rng = np.random.default_rng(seed)
    return {
        "items": rng.standard_normal((4, 3)).astype(np.float32),
        "network": rng.standard_normal(5).astype(np.float32),
    }


def run(optimiser, sequence):
    here = model()
    state = initial_state(optimiser, here)
    for change in sequence:
        here, state = step(optimiser, here, state, change)
    return here


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("fedadam", "Adam", {"betas": (0.9, 0.99), "eps": 1e-8}),
        ("fedadagrad", "Adagrad", {"eps": 1e-8}),
        ("fedsgd", "SGD", {}),
    ],
)
def test_a_server_optimiser_is_pytorchs_on_the_negative_change(name, kind, options):
    torch = pytest.importorskip("torch")
    beta1 = 0.9 if name == "fedadam" else 0.0
    found = run(ServerOptimiser(name, rate=0.05, beta1=beta1), changes())
    for key, value in model().items():
        parameter = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        theirs = getattr(torch.optim, kind)([parameter], lr=0.05, **options)
        for change in changes():
            parameter.grad = -torch.tensor(change[key])
            theirs.step()
        np.testing.assert_allclose(found[key], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_fedyogi_moves_the_second_moment_by_a_bounded_amount():
    # By hand: v1 = .01 * 4 = .04; the square .01 is smaller: v2 = .04 - .01 * .01; m as in Adam.
    optimiser = ServerOptimiser("fedyogi", rate=1.0, beta1=0.0, beta2=0.99, tau=1e-12)
    here = {"items": np.zeros(1, np.float32)}
    state = initial_state(optimiser, here)
    here, state = step(optimiser, here, state, {"items": np.array([2.0])})
    np.testing.assert_allclose(here["items"], 2 / np.sqrt(0.04 / 0.01), rtol=1e-5)
    here, state = step(optimiser, here, state, {"items": np.array([0.1])})
    np.testing.assert_allclose(state["second.items"], 0.04 - 0.01 * 0.01, rtol=1e-5)
    np.testing.assert_allclose(here["items"], 1 + 0.1 / np.sqrt(0.0399 / (1 - 0.99**2)), rtol=1e-5)


def test_fedavg_adds_the_change_whatever_the_rate():
    found = run(ServerOptimiser("fedavg", rate=0.3), changes(2))
    first, second = changes(2)
    for name, value in model().items():
        np.testing.assert_allclose(found[name], value + first[name] + second[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SERVER_OPTIMISERS)
def test_a_step_changes_nothing_that_it_was_given(name):
    optimiser = ServerOptimiser(name)
    here, change = model(), changes(1)[0]
    state = initial_state(optimiser, here)
    before = [{key: value.copy() for key, value in each.items()} for each in (here, state, change)]
    moved, left = step(optimiser, here, state, change)
    for was, now in zip(before, (here, state, change), strict=True):
        for key in was:
            np.testing.assert_array_equal(was[key], now[key])
    assert moved.keys() == here.keys()
    assert left.keys() == state.keys()
    for each in (*moved.values(), *left.values()):
        assert each.dtype == np.float32


def test_a_state_written_and_read_goes_on_as_if_nothing_had_happened():
    optimiser = ServerOptimiser("fedadam")
    here = model()
    state = initial_state(optimiser, here)
    for change in changes(3):
        here, state = step(optimiser, here, state, change)
    copies = {
        key: np.frombuffer(value.tobytes(), np.float32).reshape(value.shape) for key, value in state.items()
    }
    one, two = (step(optimiser, here, each, changes(4)[3])[0] for each in (state, copies))
    for key in one:
        np.testing.assert_array_equal(one[key], two[key])


def test_adam_in_place_is_pytorchs_with_a_count_of_steps_for_each_user():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    value = rng.standard_normal((3, 4)).astype(np.float32)
    first, second = np.zeros_like(value), np.zeros_like(value)
    steps = np.zeros(3, np.int32)
    theirs = [torch.tensor(row, requires_grad=True) for row in value.copy()]
    optimisers = [torch.optim.Adam([row], lr=0.02) for row in theirs]
    for users in ([0, 1, 2], [1, 2], [2], [0, 2]):
        gradient = rng.standard_normal((len(users), 4)).astype(np.float32)
        steps[users] += 1
        part, one, two = value[users], first[users], second[users]
        adam(part, gradient, one, two, steps[users], 0.02)
        value[users], first[users], second[users] = part, one, two
        for user, row in zip(users, gradient, strict=True):
            theirs[user].grad = torch.tensor(row)
            optimisers[user].step()
    for row, other in zip(value, theirs, strict=True):
        np.testing.assert_allclose(row, other.detach(), rtol=1e-5, atol=1e-6)


def test_the_proximal_term_is_the_derivative_of_its_penalty():
    rng = np.random.default_rng(4)
    here, start, gradient = (rng.standard_normal(5).astype(np.float32) for _ in range(3))
    found = gradient.copy()
    add_proximal(found, here, start, 0.3)
    for k in range(5):
        moved = here.astype(np.float64)
        moved[k] += 1e-4
        slope = 0.15 * (np.sum((moved - start) ** 2) - np.sum((here.astype(np.float64) - start) ** 2)) / 1e-4
        np.testing.assert_allclose(found[k] - gradient[k], slope, rtol=1e-2, atol=1e-4)


def test_with_control_variates_unlike_clients_agree_on_the_common_minimum():
    # Quadratics with different curvature: many local steps without correction end beside the common minimum.
    curvature = np.array([[1.0], [10.0]], np.float32)
    centre = np.array([[1.0], [-1.0]], np.float32)
    best = (curvature * centre).sum() / curvature.sum()
    ends = {}
    for scaffold in (False, True):
        w = np.zeros(1, np.float32)
        own, common = np.zeros((2, 1), np.float32), np.zeros(1, np.float32)
        for _ in range(300):
            local = np.repeat(w[None], 2, axis=0)
            for _ in range(10):
                gradient = curvature * (local - centre)
                local -= np.float32(0.05) * (corrected(gradient, own, common) if scaffold else gradient)
            if scaffold:
                new = next_control(own, common, local - w, np.float32(0.5))
                common = common + (new - own).mean(axis=0)
                own = new
            w = local.mean(axis=0)
        ends[scaffold] = abs(w[0] - best)
    assert ends[True] < 1e-3
    assert ends[False] > 0.1


def test_the_next_control_variate_is_the_mean_of_the_gradients_taken():
    rng = np.random.default_rng(5)
    taken = rng.standard_normal((4, 3)).astype(np.float32)
    own, common = rng.standard_normal((2, 3)).astype(np.float32)
    delta = -0.1 * sum(corrected(each, own, common) for each in taken)
    np.testing.assert_allclose(
        next_control(own, common, delta, np.float32(0.4)), taken.mean(axis=0), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "wrong", [{"name": "adamw"}, {"rate": 0.0}, {"rate": float("nan")}, {"beta1": 1.0}, {"tau": 0.0}]
)
def test_a_server_optimiser_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError):
        ServerOptimiser(**wrong)
