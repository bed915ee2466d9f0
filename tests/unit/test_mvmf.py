"""FedMVMF: settings, the gradient of the cost, the item server's step, cold start, the server's step."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coterie.errors import ConfigError, DataError
from coterie.secure_sum.contribution import Segment
from coterie.systems.fedmvmf.mathematics import initial_features, item_server_step
from coterie.systems.fedmvmf.settings import FedMvmfSettings
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.factor_steps import UserData, local_step, sample
from coterie.systems.shared.factors import (
    apply,
    fewest_users,
    from_attributes,
    gradients,
    initial,
    initial_factors,
    initial_server_state,
    layout,
    scores,
    unknowns_per_equation,
)
from coterie.systems.shared.optimisers import ServerOptimiser

USERS, ITEMS, ATTRIBUTES, FEATURES = 7, 23, 5, 4
WEIGHTS = ("obs-only", "incl-unc", "sampled")


def make(**options):
    return FactorSettings(**{"factors": 3, "side": 0.7, "ridge": 1.3, **options})


def world(seed=0):
    """Return ratings, attributes of users and features of items, some of them missing."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(USERS, ATTRIBUTES)).astype(np.float32)
    y = rng.normal(size=(ITEMS, FEATURES)).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = np.nan
    y[rng.random(y.shape) < 0.2] = np.nan
    users = []
    for u in range(USERS):
        items = rng.choice(ITEMS, rng.integers(0, 12), replace=False)
        users.append(UserData(items, rng.integers(1, 6, len(items)).astype(np.float32), x[u]))
    return users, x, y


def weights_of(users, options):
    """Return c and r, (USERS, ITEMS), written down from (3) and (36)."""
    c, r = np.zeros((USERS, ITEMS)), np.zeros((USERS, ITEMS))
    for u, user in enumerate(users):
        if options.weights == "incl-unc":
            c[u] = options.uncertainty
        if len(user.sampled):
            share = min(1.0, options.samples * len(user.items) / len(user.sampled))
            c[u, user.sampled] = options.uncertainty * share
        c[u, user.items] = 1
        r[u, user.items] = user.ratings
    return c, r


def cost(torch, factors, data, options):
    """Return J of equation (3), with missing attributes left out."""
    p, q, u, v = factors
    c, r, x, y = data
    known_x, known_y = ~torch.isnan(x), ~torch.isnan(y)
    side = ((x - p @ u.T)[known_x] ** 2).sum() + ((y - q @ v.T)[known_y] ** 2).sum()
    ridge = sum((each**2).sum() for each in factors)
    return (c * (r - p @ q.T) ** 2).sum() + options.side * side + options.ridge * ridge


@pytest.mark.parametrize("update", ["semi-als", "sgd"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_sums_of_a_round_give_the_derivative_of_the_cost(weights, update):
    torch = pytest.importorskip("torch")
    options = make(weights=weights, update=update)
    users, x, y = world()
    keys = np.arange(USERS) + 50
    users = sample(users, keys, options, ITEMS, seed=2)
    model = initial(options, ITEMS, ATTRIBUTES, 1)
    model = {name: 4 * value for name, value in model.items()}
    kept, features = initial_factors(options, keys), initial_features(options, FEATURES, 3)

    p = np.zeros((USERS, 3), np.float32)
    moved = np.zeros((USERS, 3), np.float32)
    sums = {"items": np.zeros((ITEMS, 3)), "attributes": np.zeros((ATTRIBUTES, 3))}
    for one in local_step(model, users, options, keys, seed=1, round_=1, factors=kept):
        sums["items"][one.rows] += one.item_gradients
        sums["attributes"] += one.attribute_gradients
        p[one.index], moved[one.index] = one.factor, one.kept
    v, pull = item_server_step(model["items"], y, features, options)
    found = gradients(model, sums, pull, options)

    used = v if update == "semi-als" else features
    factors = [
        torch.tensor(each.astype(np.float64), requires_grad=True)
        for each in (p, model["items"], model["attributes"], used)
    ]
    c, r = weights_of(users, options)
    total = cost(torch, factors, [torch.tensor(each.astype(np.float64)) for each in (c, r, x, y)], options)
    total.backward()
    by_p, by_q, by_u, by_v = (each.grad.numpy() for each in factors)
    close = {"rtol": 2e-5, "atol": 2e-5}
    np.testing.assert_allclose(found["items"], by_q, **close)
    np.testing.assert_allclose(found["attributes"], by_u, **close)
    if update == "semi-als":
        # Solved for: there the derivative is zero.
        np.testing.assert_allclose(by_p, 0, atol=2e-4)
        np.testing.assert_allclose(by_v, 0, atol=2e-4)
    else:
        np.testing.assert_array_equal(p, kept)
        np.testing.assert_allclose(moved, kept - options.private_rate * by_p, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(v, features - options.feature_rate * by_v, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_losses_of_users_add_up_to_their_part_of_the_cost(weights):
    torch = pytest.importorskip("torch")
    options = make(weights=weights)
    users, x, _ = world()
    users = sample(users, np.arange(USERS), options, ITEMS, seed=2)
    model = initial(options, ITEMS, ATTRIBUTES, 1)
    updates = list(local_step(model, users, options, np.arange(USERS), seed=1, round_=1))
    p = np.stack([one.factor for one in sorted(updates, key=lambda one: one.index)])
    nothing = np.zeros((ITEMS, 0))
    factors = [torch.tensor(each.astype(np.float64)) for each in (p, model["items"], model["attributes"])]
    data = [torch.tensor(each.astype(np.float64)) for each in (*weights_of(users, options), x, nothing)]
    total = cost(torch, [*factors, torch.zeros((0, 3), dtype=torch.float64)], data, options)
    shared = options.ridge * sum(float((each**2).sum()) for each in factors[1:])
    assert sum(one.loss for one in updates) == pytest.approx(float(total) - shared, rel=1e-6)


def test_the_printed_gradient_of_user_features_lacks_the_weight_of_side_information():
    # Equation (5) without lambda_1 is right for lambda_1 = 1 only.
    sums = {"items": np.zeros((ITEMS, 3)), "attributes": np.ones((ATTRIBUTES, 3))}
    model = initial(make(), ITEMS, ATTRIBUTES, 1)
    found = gradients(model, sums, None, make(side=3.0))["attributes"]
    np.testing.assert_allclose(found, -6 + 2 * 1.3 * model["attributes"].astype(np.float64))


def test_a_part_of_the_users_stands_for_all_of_them():
    options = make()
    model = initial(options, ITEMS, ATTRIBUTES, 1)
    state = initial_server_state(options, model)
    rng = np.random.default_rng(0)
    sums = {"items": rng.normal(size=(ITEMS, 3)), "attributes": rng.normal(size=(ATTRIBUTES, 3))}
    double = {name: 2 * value for name, value in sums.items()}
    some, _ = apply(model, state, sums, options, users=5, population=10)
    every, _ = apply(model, state, double, options, users=10, population=10)
    for name in model:
        np.testing.assert_allclose(some[name], every[name], rtol=1e-6)


def test_more_users_than_there_are_cannot_be_in_a_sum():
    options = make()
    model = initial(options, ITEMS, 0, 1)
    state = initial_server_state(options, model)
    for users, population in ((11, 10), (0, 10), (0, None)):
        with pytest.raises(ConfigError, match="users"):
            apply(model, state, {"items": np.zeros((ITEMS, 3))}, options, users=users, population=population)


def test_the_server_takes_the_papers_step_of_adam():
    options = make()
    model = initial(options, ITEMS, ATTRIBUTES, 1)
    state = initial_server_state(options, model)
    rng = np.random.default_rng(0)
    first = {name: np.zeros(value.shape) for name, value in model.items()}
    second = {name: np.zeros(value.shape) for name, value in model.items()}
    expected = {name: value.astype(np.float64) for name, value in model.items()}
    for t in (1, 2, 3):
        sums = {"items": rng.normal(size=(ITEMS, 3)), "attributes": rng.normal(size=(ATTRIBUTES, 3))}
        pull = rng.normal(size=(ITEMS, 3))
        slope = gradients(model, sums, pull, options)
        model, state = apply(model, state, sums, options, users=3, pull=pull)
        for name, g in slope.items():
            first[name] = 0.5 * first[name] + 0.5 * g
            second[name] = 0.99 * second[name] + 0.01 * g * g
            step = first[name] / (1 - 0.5**t) / (np.sqrt(second[name] / (1 - 0.99**t)) + 1e-8)
            expected[name] -= 0.05 * step
            np.testing.assert_allclose(model[name], expected[name], rtol=1e-4, atol=1e-5)


# --- Cold start ---------------------------------------------------------------------------------------------------


def test_a_new_user_is_the_printed_formula_where_every_attribute_is_known():
    options, rng = make(), np.random.default_rng(3)
    x, table = rng.normal(size=(4, ATTRIBUTES)), rng.normal(size=(ATTRIBUTES, 3))
    printed = x @ table @ np.linalg.inv(table.T @ table + 1.3 / 0.7 * np.eye(3))
    np.testing.assert_allclose(from_attributes(x, table, options), printed, rtol=1e-5)


def test_a_missing_attribute_is_as_if_there_were_no_such_attribute():
    options, rng = make(), np.random.default_rng(3)
    x, table = rng.normal(size=(1, ATTRIBUTES)), rng.normal(size=(ATTRIBUTES, 3))
    x[0, 2] = np.nan
    left = np.delete(np.arange(ATTRIBUTES), 2)
    np.testing.assert_allclose(
        from_attributes(x, table, options), from_attributes(x[:, left], table[left], options), rtol=1e-5
    )
    # Zero would say "no" instead of "not known".
    zero = np.nan_to_num(x)
    assert np.abs(from_attributes(x, table, options) - from_attributes(zero, table, options)).max() > 1e-2


def test_who_has_no_attribute_at_all_is_at_the_origin():
    options = make()
    assert not from_attributes(np.full((2, 3), np.nan), np.ones((3, 3)), options).any()
    assert from_attributes(np.empty((2, 0)), np.empty((0, 3)), options).shape == (2, 3)
    assert not from_attributes(np.ones((2, 3)), np.ones((3, 3)), make(side=0.0)).any()


def test_a_user_without_ratings_takes_part_with_its_attributes_alone():
    options = make()
    model = initial(options, ITEMS, ATTRIBUTES, 1)
    x = np.array([1, 0, np.nan, 1, 0], np.float32)
    user = UserData(np.empty(0, np.int64), np.empty(0, np.float32), x)
    (user,) = sample([user], [9], options, ITEMS, seed=1)
    (update,) = local_step(model, [user], options, [9], seed=1, round_=1)
    assert len(user.sampled) == len(update.rows) == 0
    np.testing.assert_allclose(
        update.factor, from_attributes(x[None], model["attributes"], options)[0], rtol=1e-5, atol=1e-8
    )
    assert update.attribute_errors[2] == 0
    assert np.abs(np.delete(update.attribute_errors, 2)).min() > 0


def test_an_item_without_features_is_not_pulled():
    options, (_, _, y) = make(), world()
    y[4] = np.nan
    v, pull = item_server_step(initial(options, ITEMS, 0, 1)["items"], y, np.zeros((FEATURES, 3)), options)
    assert not pull[4].any()
    assert np.abs(pull).max() > 0
    assert not from_attributes(y[[4]], v, options).any()


@pytest.mark.parametrize("update", ["semi-als", "sgd"])
def test_without_features_the_item_server_pulls_nothing(update):
    options = make(update=update)
    v, pull = item_server_step(
        initial(options, ITEMS, 0, 1)["items"], np.empty((ITEMS, 0)), np.empty((0, 3)), options
    )
    assert v.shape == (0, 3)
    assert not pull.any()


@pytest.mark.parametrize(
    ("values", "rows"), [(np.ones((2, 3)), 4), (np.ones(3), 3), (np.array([[1, np.inf, 0]]), 3)]
)
def test_attributes_that_do_not_fit_are_refused(values, rows):
    with pytest.raises(DataError, match="attribute"):
        from_attributes(values, np.ones((rows, 3)), make())


@pytest.mark.parametrize("shape", [(ITEMS - 1, FEATURES), (ITEMS, FEATURES + 1), (ITEMS,)])
def test_features_that_do_not_fit_are_refused(shape):
    with pytest.raises(DataError, match="features of shape"):
        item_server_step(np.ones((ITEMS, 3)), np.ones(shape), np.ones((FEATURES, 3)), make())


# --- Shapes and settings ------------------------------------------------------------------------------------------


def test_first_rows_do_not_depend_on_how_many_follow():
    few, many = initial(make(), 3, 2, 5), initial(make(), 9, 4, 5)
    for name in few:
        np.testing.assert_array_equal(few[name], many[name][: len(few[name])])
    assert np.abs(few["items"][:2] - few["attributes"]).max() > 0  # streams of their own
    assert np.abs(initial(make(), 3, 2, 6)["items"] - few["items"]).max() > 0
    np.testing.assert_array_equal(initial_factors(make(), [4, 8])[1], initial_factors(make(), [8])[0])


def test_a_contribution_has_a_row_for_each_item_and_attribute():
    extra = Segment.whole("more", (2,), 1)
    found = layout(make(bits=12), ITEMS, ATTRIBUTES, (extra,))
    assert [(each.name, each.shape, each.bits) for each in found.segments] == [
        ("items", (ITEMS, 3), 12),
        ("attributes", (ATTRIBUTES, 3), 12),
        ("more", (2,), extra.bits),
    ]
    assert [each.name for each in layout(make(), ITEMS, 0).segments] == ["items"]


def test_scores_of_some_items_are_those_of_all_items():
    options = make()
    model, p = initial(options, ITEMS, 0, 1), initial_factors(options, range(4))
    some = np.array([[3, 5], [0, 0], [22, 1], [9, 8]])
    every = scores(model, p)
    assert every.shape == (4, ITEMS)
    assert every.dtype == np.float32
    np.testing.assert_allclose(scores(model, p, some), np.take_along_axis(every, some, 1), rtol=1e-5)


def test_the_paper_counts_unknowns_below_its_equation_41():
    options = make(factors=6)
    assert unknowns_per_equation(900, users=10, n_items=45, n_attributes=5, settings=options) == 950 / 300


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 9))
def test_below_so_many_users_a_sum_has_fewer_than_two_unknowns_for_each_value(factors, n_items, n_attributes):
    options = make(factors=factors)
    users = fewest_users(options)

    def most(users):
        return unknowns_per_equation(
            users * n_items, users=users, n_items=n_items, n_attributes=n_attributes, settings=options
        )

    assert most(users) == pytest.approx(2)
    assert most(users - 1) < 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"factors": 0}, "greater than or equal to 1"),
        ({"weights": "dense"}, "'obs-only', 'incl-unc' or 'sampled'"),
        ({"update": "als"}, "'semi-als' or 'sgd'"),
        ({"uncertainty": 1.0}, "less than 1"),
        ({"uncertainty": math.nan}, "finite number"),
        ({"samples": 0.0}, "greater than 0"),
        ({"side": -1.0}, "greater than or equal to 0"),
        ({"ridge": 0.0}, "greater than 0"),
        ({"ridge": math.inf}, "finite number"),
        ({"private_rate": math.nan}, "finite number"),
        ({"feature_rate": -1e-4}, "greater than 0"),
        ({"lowest": -math.inf}, "finite number"),
        ({"highest": math.inf}, "finite number"),
        ({"bits": 7}, "greater than or equal to 8"),
        ({"bits": 32}, "less than or equal to 31"),
        ({"item_bound": 0.0}, "greater than 0"),
        ({"attribute_bound": math.inf}, "finite number"),
        ({"server_optimiser": "sgd"}, "'fedsgd', 'fedadagrad', 'fedadam' or 'fedyogi'"),
        ({"server_rate": math.nan}, "finite number"),
        ({"server_beta1": 1.0}, "less than 1"),
        ({"min_touch": 0}, "greater than or equal to 1"),
        ({"momentum": 0.5}, "not permitted"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_with_their_name(options, words):
    with pytest.raises(ValidationError) as caught:
        make(**options)
    (found,) = caught.value.errors()
    assert found["loc"] == tuple(options)
    assert words in found["msg"]


def test_a_range_of_ratings_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match=r"lowest is 4.0, highest 3.0; expected the lowest rating"):
        make(lowest=4.0, highest=3.0)


def test_the_defaults_are_the_papers_table_2():
    paper = FedMvmfSettings(preset="paper")
    assert (paper.factors, paper.uncertainty, paper.side, paper.ridge, paper.samples) == (6, 0.1, 1, 10, 1)
    assert paper.server == ServerOptimiser("fedadam", 0.05, 0.5, 0.99, 1e-8)
    assert not paper.biases
    assert paper == FedMvmfSettings(weights="sampled")
    usual = FedMvmfSettings()
    assert (usual.preset, usual.biases, usual.weights, usual.width) == ("ratings", True, "obs-only", 22)
    others = [FedMvmfSettings(preset="top-n"), FedMvmfSettings(preset="both")]
    assert (others[0].factors, others[0].weights, others[0].ridge) == (20, "incl-unc", 3)
    assert others[1].samples == 3
