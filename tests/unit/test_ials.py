"""iALS: a round beside least squares with all data in one place, equal bits, its sides in one process, bad input."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate, leave_last_out
from coterie.data.keyed_order import key_hash
from coterie.errors import ConfigError, DataError
from coterie.privacy.attacks.scoring import Truth
from coterie.rounds.sides import Summed, User
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import ImpossibleSumError
from coterie.studies.in_process import train_in_process
from coterie.studies.judges import references
from coterie.studies.run_data import load, make_feed
from coterie.systems.ials.host import IalsHost
from coterie.systems.ials.mathematics import (
    UserEquations,
    bounded,
    item_factors,
    layout,
    products,
    row_values,
    solve,
    symmetric,
)
from coterie.systems.ials.server import IalsServer
from coterie.systems.ials.settings import METRICS, IalsSettings
from coterie.systems.ials.study.attacks import attack_span
from coterie.systems.registry import combination, fewest_users
from coterie.systems.shared.host_data import HostData

ITEMS, USERS, D = 30, 50, 4
SPEC = {"users": 60, "items": 80, "interactions": 1_500, "genres": 4}
DATA = generate(SyntheticSpec(**SPEC))
PART = leave_last_out(DATA).part
WEIGHTS = {"ridge": 0.05, "alpha0": 0.3, "nu": 0.75}


def taken():
    """Return which items users have, float64 (USERS, ITEMS)."""
    return (np.random.default_rng(0).random((USERS, ITEMS)) < 0.25).astype(np.float64)


def matrix():
    """Return which users of `DATA` have which items in training, float64 (users, items)."""
    table = np.zeros((len(DATA.users), len(DATA.items)))
    table[DATA.user[PART == 0], DATA.item[PART == 0]] = 1
    return table


def dense(x, others, ridge, alpha0, nu):
    """Return the rows' factors with the least cost, by least squares over all pairs with square roots of weights."""
    n, d = len(others), others.shape[1]
    found = np.zeros((len(x), d))
    for row in range(len(x)):
        # (y - 1)^2 + alpha0 y^2 where there is an entry, alpha0 y^2 elsewhere, and the ridge.
        scale = math.sqrt(ridge * (x[row].sum() + alpha0 * n) ** nu)
        left = np.concatenate([x[row, :, None] * others, math.sqrt(alpha0) * others, scale * np.eye(d)])
        right = np.concatenate([x[row], np.zeros(n + d)])
        found[row] = np.linalg.lstsq(left, right, rcond=None)[0]
    return found


def settings(**more):
    given = {
        "system": "ials",
        "data": {"synthetic": SPEC},
        "rounds": {"passes": 3},
        "federation": {"hosts": 2},
        "ials": {"factors": D, "min_touch": 5, "products": "item", "min_products": 10},
    }
    return RunSettings.model_validate({**given, **more})


def trained(**given):
    run = settings(**given)
    return train_in_process(run, make_feed(run, load(run), 0), run_id="a-run", seed=0, see=lambda event: None)


def host(options, order=slice(None)):
    data = HostData(
        DATA.users, DATA.items, DATA.user[order], DATA.item[order], PART[order], DATA.rating[order]
    )
    return IalsHost(options, data, key_hash(DATA.users, 0), 0, lambda private: private)


def asked(purpose, number=1):
    return SimpleNamespace(purpose=purpose.value, round=number, pass_number=0)


def everybody(users=range(60)):
    return {0: [User(n, 0) for n in users]}


def at_first(options):
    """Return the server's side and its arrays after the supports of all users."""
    side = IalsServer(options, len(DATA.items), 0, 1)
    ((_, codes),) = host(options).contributions(asked(Purpose.SUPPORTS), {}, None, everybody())
    return side, side.apply(side.initial(), summed(side, Purpose.SUPPORTS, codes))


def summed(side, purpose, codes, users=60):
    sums = side.layout(purpose).decode(codes, users)
    share = users / len(DATA.users)
    return Summed(purpose, sums, users, 0, 0, np.array([share]), len(DATA.users))


# --- Mathematics --------------------------------------------------------------------------------------------------


def test_users_get_the_factors_of_the_least_cost():
    x, q = taken(), np.random.default_rng(1).normal(size=(ITEMS, D)).astype(np.float32)
    found = UserEquations(q, np.ones(ITEMS, bool), **WEIGHTS).solved([np.flatnonzero(row) for row in x])
    np.testing.assert_allclose(found, dense(x, q.astype(float), **WEIGHTS), rtol=1e-5, atol=1e-8)


def test_items_get_the_factors_of_the_least_cost():
    x, p = taken(), np.random.default_rng(1).normal(size=(USERS, D))
    sums = {
        "products": x.T @ products(p),
        "users": x.T @ p,
        "gram": products(p).sum(axis=0),
    }
    found = item_factors(sums, x.sum(axis=0), USERS, whole=np.ones(ITEMS, bool), **WEIGHTS)
    np.testing.assert_allclose(found, dense(x.T, p, **WEIGHTS), rtol=1e-5, atol=1e-6)


def test_triangles_stand_for_symmetric_matrices():
    vectors = np.random.default_rng(2).normal(size=(7, D))
    np.testing.assert_array_equal(symmetric(products(vectors), D), vectors[:, :, None] * vectors[:, None, :])
    assert row_values(32, with_products=True) == 560
    assert row_values(32, with_products=False) == 32


@pytest.mark.parametrize("d", [1, 2, 5, 16])
def test_equations_are_solved(d):
    rng = np.random.default_rng(d)
    half = rng.normal(size=(9, d, d))
    normal, right = half @ half.transpose(0, 2, 1) + 0.1 * np.eye(d), rng.normal(size=(9, d))
    found = solve(normal, right)
    np.testing.assert_allclose(found, np.linalg.solve(normal, right[:, :, None])[:, :, 0], rtol=1e-6)
    for one in range(9):
        np.testing.assert_array_equal(solve(normal[[one]], right[[one]])[0], found[one])


def test_nothing_to_solve_is_solved():
    assert solve(np.empty((0, D, D)), np.empty((0, D))).shape == (0, D)


@pytest.mark.parametrize(
    ("normal", "words"),
    [
        (np.zeros((2, 2)), "too ill-conditioned to be solved"),
        (np.ones((2, 2)), "too ill-conditioned"),
        (np.array([[1.0, 2.0], [2.0, 1.0]]), "too ill-conditioned"),
        (np.full((2, 2), math.inf), "not finite"),
        (np.full((2, 2), math.nan), "not finite"),
    ],
    ids=["zero", "singular", "indefinite", "infinite", "nan"],
)
def test_equations_without_a_single_solution_are_refused(normal, words):
    with pytest.raises(DataError, match=words):
        solve(np.stack([np.eye(2), normal]), np.ones((2, 2)))


def test_without_a_ridge_fewer_users_than_factors_leave_equations_that_are_refused():
    p = np.random.default_rng(1).normal(size=(2, D))
    sums = {"products": products(p).sum(axis=0)[None], "users": p.sum(axis=0)[None], "gram": np.zeros(10)}
    with pytest.raises(DataError, match="too ill-conditioned"):
        item_factors(sums, np.array([2.0]), 2, whole=np.ones(1, bool), ridge=0.0, alpha0=0.1, nu=1.0)


def test_a_factor_beyond_the_bound_is_shortened_and_others_stay_as_they_are():
    users = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    found = bounded(users, 1.0)
    np.testing.assert_allclose(found[0], [0.6, 0.8])
    np.testing.assert_array_equal(found[1:], users[1:])


def test_a_round_is_an_epoch_with_all_data_in_one_place_up_to_the_rounding_of_codes():
    options = IalsSettings(
        factors=D, min_touch=1, products="item", min_products=1, bits=24, user_bound=8.0, **WEIGHTS
    )
    side, arrays = at_first(options)
    x = matrix()
    for number in range(1, 4):
        model = side.model(arrays)
        p = dense(x[:, model["open"] > 0], model["items"][model["open"] > 0].astype(float), **WEIGHTS)
        ((_, codes),) = host(options).contributions(
            asked(Purpose.TRAIN, number), model, side.opened(arrays), everybody()
        )
        arrays = side.apply(arrays, summed(side, Purpose.TRAIN, codes))
        expected = dense(x.T, p, **WEIGHTS)
        np.testing.assert_allclose(side.model(arrays)["items"], expected, rtol=1e-3, atol=2e-3)


# --- Equal bits ---------------------------------------------------------------------------------------------------


def test_a_user_contributes_the_same_codes_alone_and_among_others_and_in_whichever_order_its_items_come():
    options = IalsSettings(factors=D, min_touch=5, nu=0.75)
    side, arrays = at_first(options)
    model, opened = side.model(arrays), side.opened(arrays)
    plan = asked(Purpose.TRAIN)
    together = dict(
        host(options).contributions(plan, model, opened, {n: [User(n, 0)] for n in range(len(DATA.users))})
    )
    backwards = host(options, slice(None, None, -1))
    for n in (0, 7, 59):
        ((_, alone),) = backwards.contributions(plan, model, opened, {5: [User(n, 0)]})
        np.testing.assert_array_equal(alone, together[n])
    ((_, of_all),) = host(options).contributions(plan, model, opened, everybody())
    np.testing.assert_array_equal(sum(together.values()), of_all)


@pytest.mark.parametrize(
    ("secure_sum", "hosts", "users"),
    [("clear", 3, True), ("clear", 1, False), ("masked", 3, False), ("masked", 3, True)],
)
def test_numbers_depend_neither_on_the_sum_nor_on_how_users_are_spread(secure_sum, hosts, users):
    plain = trained()
    other = trained(
        rounds={"passes": 3, "party_per_user": users}, secure_sum=secure_sum, federation={"hosts": hosts}
    )
    for name, value in plain.trained.arrays.items():
        np.testing.assert_array_equal(other.trained.arrays[name], value)
    assert [one["metrics"] for one in other.known["history"]] == [
        one["metrics"] for one in plain.known["history"]
    ]


# --- In rounds ----------------------------------------------------------------------------------------------------


def test_closed_items_are_in_no_contribution_and_score_0():
    options = IalsSettings(factors=D, min_touch=20, products="item", min_products=25)
    side, arrays = at_first(options)
    opened = side.opened(arrays)
    assert 0 < opened.mean() < 1
    model = side.model(arrays)
    ((_, codes),) = host(options).contributions(asked(Purpose.TRAIN), model, opened, everybody())
    sums = side.layout(Purpose.TRAIN).decode(codes, len(DATA.users))
    assert not sums["users"][~opened[0]].any()
    assert sums["users"][opened[0]].any(axis=1).all()
    whole = matrix().sum(axis=0) >= 25
    assert 0 < whole.sum() < opened.sum()
    assert not sums["products"][~whole].any()
    assert sums["products"][whole].any(axis=1).all()
    arrays = side.apply(arrays, summed(side, Purpose.TRAIN, codes))
    scores = host(options).recommend(side.model(arrays), 3)
    assert not scores[~opened[0]].any()
    assert scores[opened[0]].all()


def test_an_evaluation_changes_nothing():
    side, arrays = at_first(IalsSettings(factors=D))
    layout_ = side.layout(Purpose.EVALUATE)
    after = side.apply(arrays, summed(side, Purpose.EVALUATE, layout_.zeros(60)))
    assert after is arrays


def test_absent_users_are_missing_from_the_equations_and_from_their_ridge():
    options = IalsSettings(factors=D, min_touch=5, bits=24)
    side, arrays = at_first(options)
    present = range(40)
    model, opened = side.model(arrays), side.opened(arrays)
    ((_, codes),) = host(options).contributions(asked(Purpose.TRAIN), model, opened, everybody(present))
    whole = summed(side, Purpose.TRAIN, codes, 40)
    after = side.apply(arrays, whole)["model.items"]
    share = 40 / 60 * arrays["supports"][0]
    expected = item_factors(
        whole.sums, share * opened[0], 40, whole=model["open"] > 1, ridge=0.01, alpha0=0.3, nu=1.0
    )
    np.testing.assert_allclose(after, expected, rtol=1e-5)


def test_a_sum_that_has_no_solution_is_not_applied_and_says_which_settings_decide():
    side, arrays = at_first(IalsSettings(factors=D, min_touch=5))
    sums = side.layout(Purpose.TRAIN).decode(side.layout(Purpose.TRAIN).zeros(60), 60)
    sums["gram"] = sums["gram"] - 100.0
    forged = Summed(Purpose.TRAIN, sums, 60, 0, 0, np.array([1.0]), 60)
    with pytest.raises(
        ImpossibleSumError, match=r"ials\.ridge 0\.01 beside codes of ials\.bits 16 .* expected a larger"
    ):
        side.apply(arrays, forged)


def test_a_run_whose_codes_are_too_coarse_for_its_ridge_abandons_rounds():
    options = {
        "min_touch": 5,
        "products": "item",
        "min_products": 10,
        "bits": 8,
        "user_bound": 40.0,
        "ridge": 1e-5,
    }
    assert trained(ials=options).known["abandoned"] > 0


def test_it_ranks_held_out_items_better_than_popularity_and_like_the_central_model():
    # Enough users that the order does not hang on a few hits.
    run = RunSettings.model_validate({"system": "ials", "ials": {"factors": 8}})
    feed = make_feed(run, load(run), 0)
    known = train_in_process(run, feed, run_id="a-run", seed=0, see=lambda event: None).known
    beside = references(run, feed, 0)
    assert set(known["chosen"]["metrics"]) == set(METRICS)
    found = known["chosen"]["metrics"]["hit_ratio@10"]
    assert found > beside["popularity"].metrics["hit_ratio@10"] + 0.1
    assert abs(found - beside["ials"].metrics["hit_ratio@10"]) < 0.08


def test_a_run_whose_items_are_all_closed_ends_and_says_so():
    made = trained(ials={"factors": D, "min_touch": 61})
    assert made.known["phase"] == "done"
    assert made.known["closed_share"] == 1
    side = IalsServer(IalsSettings(factors=D, min_touch=61), 80, 0, 1)
    assert not made.hosts[0].recommend(side.model(made.trained.arrays), 0).any()


# --- Settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"factors": 0}, "greater than or equal to 1"),
        ({"factors": 129}, "less than or equal to 128"),
        ({"ridge": 0.0}, "greater than or equal to 0.000001"),
        ({"ridge": -5.0}, "greater than or equal to 0.000001"),
        ({"ridge": math.inf}, "finite number"),
        ({"alpha0": 0.0}, "greater than 0"),
        ({"nu": -0.5}, "greater than or equal to 0"),
        ({"nu": math.nan}, "finite number"),
        ({"user_bound": 0.0}, "greater than 0"),
        ({"bits": 7}, "greater than or equal to 8"),
        ({"min_touch": 0}, "greater than or equal to 1"),
        ({"min_products": 0}, "greater than or equal to 1"),
        ({"products": "none"}, "'average' or 'item'"),
    ],
    ids=str,
)
def test_settings_out_of_their_range_are_refused(change, words):
    with pytest.raises(ValidationError) as caught:
        IalsSettings(**change)
    (found,) = caught.value.errors()
    assert found["loc"] == tuple(change)
    assert words in found["msg"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split": {"kind": "random"}}, "expected one of 'leave-last-out', 'leave-random-out', 'published'"),
        ({"rounds": {"cohorts": "groups"}}, "forgets who is not in it; expected 'all'"),
        ({"rounds": {"choose_by": "validation_rmse"}}, "'validation_rmse' is not measured"),
    ],
    ids=str,
)
def test_runs_that_it_does_not_fit_are_refused(change, words):
    with pytest.raises((ValidationError, ConfigError), match=words):
        settings(**change)


def test_settings_come_back_from_the_plan_as_they_were():
    plan = IalsSettings(factors=24, ridge=0.5, nu=0.5, min_touch=5)
    assert IalsSettings.from_json(plan.to_json()) == plan
    with pytest.raises(ConfigError):
        IalsSettings.from_json(json.dumps({**json.loads(plan.to_json()), "ridge": 0}))


def test_it_runs_under_every_sum_over_more_users_than_a_row_has_values():
    assert all(combination("ials", each).allowed for each in ("clear", "masked", "encrypted", "shared-key"))
    assert fewest_users("ials", IalsSettings(factors=16, products="item").to_json()) == 153
    assert fewest_users("ials", IalsSettings(factors=16).to_json()) == 17


def test_products_of_no_more_users_than_factors_get_a_warning():
    run = settings(ials={"factors": 16, "products": "item", "min_products": 16})
    assert "a few such items with one user in common show who has them" in run.own.warnings(run)[0]
    for fine in ({"products": "item", "min_products": 17}, {"min_products": 1}):
        run = settings(ials={"factors": 16, **fine})
        assert not any("with one user in common" in one for one in run.own.warnings(run))


def test_products_of_items_get_a_warning_of_what_all_rounds_together_tell():
    run = settings(secure_sum="masked", rounds={"passes": 8}, ials={"factors": 16, "products": "item"})
    assert any("8 rounds hold 1216 combinations" in one for one in run.own.warnings(run))
    run = settings(secure_sum="masked", rounds={"passes": 8}, ials={"factors": 16})
    assert run.own.warnings(run) == []


def test_the_products_of_fewer_users_than_factors_tell_who_is_behind_them():
    p = np.random.default_rng(1).normal(size=(20, 8))
    members = np.arange(5)

    def outside(users):
        """Return how much of each user lies outside the space that the sum of products of some users spans."""
        values, vectors = np.linalg.eigh(symmetric(products(p[users]).sum(axis=0), 8))
        return np.linalg.norm(p @ vectors[:, values < 1e-9], axis=1)

    assert outside(members)[members].max() < 1e-6 < outside(members)[5:].min()
    assert not outside(np.arange(9)).any()


@pytest.mark.parametrize(("products", "passes", "succeeds"), [("item", 6, True), ("average", 1, False)])
def test_sums_of_many_rounds_complete_histories_and_those_of_a_few_narrow_ones_do_not(
    products, passes, succeeds
):
    spec = {"users": 40, "items": 100, "interactions": 1_500, "genres": 4}
    options = {"factors": D, "min_touch": 3, "min_products": 5, "products": products}
    run = settings(data={"synthetic": spec}, ials=options)
    feed = make_feed(run, load(run), 0)
    data, part = feed.dataset, feed.split.part
    pairs = data.user[part == 0], data.item[part == 0]
    truth = Truth(*pairs, np.ones(len(pairs[0]), bool), 40, 100)
    own = IalsSettings(**options)
    host_ = IalsHost(
        own,
        HostData(data.users, data.items, data.user, data.item, part, data.rating),
        key_hash(data.users, 0),
        0,
        lambda private: private,
    )
    side = IalsServer(own, 100, 0, 1)
    arrays, found = side.initial(), []
    for number, purpose in enumerate([Purpose.SUPPORTS, *[Purpose.TRAIN] * passes]):
        model, opened = side.model(arrays), side.opened(arrays)
        ((_, codes),) = host_.contributions(asked(purpose, number), model, opened, everybody(range(40)))
        sums = side.layout(purpose).decode(codes, 40)
        found.append(sums)
        arrays = side.apply(arrays, Summed(purpose, sums, 40, 0, 0, np.array([1.0]), 40))
    figures = attack_span(found[1:], found[0]["supports"], own, truth)
    assert figures["rounds"] == passes
    assert figures["users"] >= 35
    assert (figures["auc"] > 0.95) == succeeds, figures
    assert (figures["auc"] > figures["popularity_auc"] + 0.1) == succeeds, figures


def test_a_row_of_the_layout_has_as_many_values_as_documented():
    found = layout(10, 32, 2.0, 16, with_products=True)
    assert found.size == 10 * 560 + 528
    assert found.capacity >= 65_000
    assert layout(10, 32, 2.0, 16, with_products=False).size == 10 * 32 + 528


def test_the_products_of_the_mean_user_stand_in_where_none_are_summed():
    x, p = taken(), np.random.default_rng(1).normal(size=(USERS, D))
    n = x.sum(axis=0)
    mean = x.T @ p / n[:, None]
    sums = {"users": x.T @ p, "gram": products(p).sum(axis=0)}
    found = item_factors(sums, n, USERS, whole=np.zeros(ITEMS, bool), **WEIGHTS)
    for j in range(ITEMS):
        normal = 0.3 * p.T @ p + n[j] * np.outer(mean[j], mean[j])
        normal += 0.05 * (n[j] + 0.3 * USERS) ** 0.75 * np.eye(D)
        np.testing.assert_allclose(found[j], np.linalg.solve(normal, n[j] * mean[j]), rtol=1e-5, atol=1e-6)
    exact = {**sums, "products": x.T @ products(p)}
    whole = n > np.median(n)
    mixed = item_factors(exact, n, USERS, whole=whole, **WEIGHTS)
    everywhere = item_factors(exact, n, USERS, whole=np.ones(ITEMS, bool), **WEIGHTS)
    np.testing.assert_array_equal(mixed[whole], everywhere[whole])
    np.testing.assert_array_equal(mixed[~whole], found[~whole])
