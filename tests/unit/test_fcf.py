"""FCF: the mathematics of FedMVMF with other settings is that of the paper; its sides in one process."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate, random
from coterie.data.keyed_order import key_hash
from coterie.errors import ConfigError
from coterie.evaluation.holdout import TEST, TRAIN
from coterie.evaluation.leave_one_out import RANKED
from coterie.evaluation.metrics import ranking
from coterie.rounds.sides import User
from coterie.rounds.training import Purpose
from coterie.studies.in_process import train_in_process
from coterie.studies.judges import references
from coterie.studies.run_data import load, make_feed
from coterie.systems.fcf.host import FcfHost
from coterie.systems.fcf.settings import FcfSettings
from coterie.systems.registry import ratings_of, server_side
from coterie.systems.shared.factor_steps import UserData, local_step
from coterie.systems.shared.factors import gradients, initial
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.taken_up import FIGURES, MEASURES, taken_up

ITEMS, USERS, K = 30, 8, 3
OPTIONS = FcfSettings(factors=K, confidence=7.0, ridge=1.3)
SPEC = {"users": 60, "items": 80, "interactions": 1_500, "genres": 4}
DATA = generate(SyntheticSpec(**SPEC))
SPLIT = random(DATA, validation=0.1, seed=3)
PLAN = FcfSettings(factors=4, min_touch=1)


def taken():
    """Return which items users have taken up, bool (USERS, ITEMS)."""
    return np.random.default_rng(0).random((USERS, ITEMS)) < 0.25


def objective(y, p, q, options):
    """Return the cost as printed, over all users and items."""
    return ((1 + options.confidence * y) * (y - p @ q.T) ** 2).sum() + options.ridge * (
        (p**2).sum() + (q**2).sum()
    )


def contributed(y, q, options):
    """Return the factors that users solve for, and the sum of what they contribute."""
    model = {"items": q.astype(np.float32), "attributes": np.empty((0, K), np.float32)}
    users = [UserData(np.flatnonzero(row), np.ones(int(row.sum()))) for row in y]
    p, total = np.empty((USERS, K)), np.zeros((ITEMS, K))
    for update in local_step(model, users, options.factor_settings(), range(USERS), seed=1, round_=1):
        p[update.index] = update.factor
        total[update.rows] += update.item_gradients
    return model, p, total


def test_a_user_solves_for_the_factor_with_which_the_printed_cost_is_least():
    y, q = taken(), np.random.default_rng(1).normal(size=(ITEMS, K))
    _, p, _ = contributed(y, q, OPTIONS)
    for u in range(USERS):
        weight = np.diag(1 + OPTIONS.confidence * y[u])
        printed = np.linalg.solve(
            q.T @ weight @ q + OPTIONS.ridge * np.eye(K), q.T @ weight @ y[u].astype(float)
        )
        np.testing.assert_allclose(p[u], printed, rtol=1e-4, atol=1e-6)


def test_the_server_steps_along_the_derivative_of_the_printed_cost_divided_by_its_largest_weight():
    y, q = taken(), np.random.default_rng(1).normal(size=(ITEMS, K)).astype(np.float32).astype(np.float64)
    model, p, total = contributed(y, q, OPTIONS)
    found = gradients(model, {"items": total}, None, OPTIONS.factor_settings())["items"]
    h = 1e-5
    for j in range(0, ITEMS, 7):
        for f in range(K):
            up, down = q.copy(), q.copy()
            up[j, f] += h
            down[j, f] -= h
            slope = (objective(y, p, up, OPTIONS) - objective(y, p, down, OPTIONS)) / (2 * h)
            assert found[j, f] == pytest.approx(slope / (1 + OPTIONS.confidence), rel=1e-3, abs=1e-3)


def test_every_open_item_has_a_row_whether_it_was_taken_up_or_not():
    y, q = taken(), np.random.default_rng(1).normal(size=(ITEMS, K))
    _, _, total = contributed(y, q, OPTIONS)
    assert total.any(axis=1).all()
    model = {"items": q.astype(np.float32), "attributes": np.empty((0, K), np.float32)}
    allowed = np.arange(ITEMS) % 3 > 0
    user = UserData(np.flatnonzero(y[0]), np.ones(int(y[0].sum())))
    (update,) = local_step(model, [user], OPTIONS.factor_settings(), [0], seed=1, round_=1, allowed=allowed)
    np.testing.assert_array_equal(update.rows, np.flatnonzero(allowed))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"confidence": 0.0}, "greater than 0"),
        ({"confidence": math.nan}, "finite number"),
        ({"ridge": 0.0}, "greater than 0"),
        ({"ridge": math.inf}, "finite number"),
        ({"factors": 0}, "greater than or equal to 1"),
        ({"item_bound": math.nan}, "finite number"),
        ({"bits": 7}, "greater than or equal to 8"),
        ({"server_optimiser": "adam"}, "'fedsgd', 'fedadagrad', 'fedadam' or 'fedyogi'"),
    ],
    ids=str,
)
def test_settings_out_of_their_range_are_refused(change, words):
    with pytest.raises(ValidationError) as caught:
        FcfSettings(**change)
    (found,) = caught.value.errors()
    assert found["loc"] == tuple(change)
    assert words in found["msg"]


@pytest.mark.parametrize("change", [{"confidence": 1e-20}, {"confidence": 1e308, "ridge": 1e-20}], ids=str)
def test_settings_whose_weights_floating_point_cannot_tell_apart_are_refused(change):
    with pytest.raises(ValueError, match=r"confidence is 1e.*; expected 1 \+ confidence above 1"):
        FcfSettings(**change)


def test_settings_come_back_from_the_plan_as_they_were():
    plan = FcfSettings(confidence=2.0, server_optimiser="fedsgd", server_rate=1e-3, min_touch=5)
    assert FcfSettings.from_json(plan.to_json()) == plan
    assert ratings_of("fcf", plan.to_json()) is None


@pytest.mark.parametrize(
    "change", [{"min_touch": 0}, {"more": 1}, {"learning": {}}, {"confidence": -1}, {"ridge": "5"}], ids=str
)
def test_settings_that_are_not_of_the_system_are_refused(change):
    text = json.dumps({**json.loads(PLAN.to_json()), **change})
    with pytest.raises(ConfigError):
        FcfSettings.from_json(text)


# --- In rounds ----------------------------------------------------------------------------------------------------


def settings(**more):
    rounds = {"group": 60, "passes": 20, "evaluate_every": 10, **more.pop("rounds", {})}
    given = {
        "system": "fcf",
        "data": {"synthetic": SPEC},
        "rounds": rounds,
        "federation": {"hosts": 2},
        **more,
    }
    return RunSettings.model_validate(given)


def trained(**given):
    run = settings(**given)
    return train_in_process(run, make_feed(run, load(run), 0), run_id="a-run", seed=0, see=lambda event: None)


def host(data):
    keys = key_hash(DATA.users, 0)
    return FcfHost(PLAN, data, keys, 0, lambda private: private)


def held(rating=DATA.rating):
    return HostData(DATA.users, DATA.items, DATA.user, DATA.item, SPLIT.part, rating)


def model_of():
    side = server_side("fcf", PLAN.to_json(), len(DATA.items), 0, 1)
    arrays = side.initial()
    arrays["popularity"] = np.ones(len(DATA.items), np.float32)
    return side.model(arrays)


def test_it_finds_what_users_take_up_better_than_chance_and_every_figure_is_there():
    known = trained(rounds={"passes": 30}, fcf={"factors": 4}).known
    assert tuple(sorted(known["chosen"]["metrics"])) == tuple(sorted(FIGURES))
    run = settings()
    beside = references(run, make_feed(run, load(run), 0), 0)
    assert set(beside["random"].metrics) == set(FIGURES)
    assert known["history"][-1]["metrics"]["ndcg@10"] > 1.5 * beside["random"].metrics["ndcg@10"]
    assert known["chosen"]["metrics"]["ndcg@10"] > known["history"][0]["metrics"]["ndcg@10"]


def test_how_something_was_rated_changes_nothing():
    asked = SimpleNamespace(purpose=Purpose.TRAIN.value, round=1, pass_number=0)
    members = {0: [User(n, 0) for n in range(60)]}
    found = []
    for rating in (DATA.rating, np.full(len(DATA), np.nan)):
        ((_, codes),) = host(held(rating)).contributions(asked, model_of(), None, members)
        found.append(codes)
    np.testing.assert_array_equal(*found)


def test_what_is_measured_is_the_ranking_of_all_unseen_items():
    side, model = host(held()), model_of()
    found = side.measure(model, np.arange(60))
    scores = side.factors(model, np.arange(60)) @ model["items"].T
    relevant, seen = np.zeros((60, 80), bool), np.zeros((60, 80), bool)
    relevant[DATA.user[SPLIT.part == TEST], DATA.item[SPLIT.part == TEST]] = True
    seen[DATA.user[SPLIT.part != TEST], DATA.item[SPLIT.part != TEST]] = True
    expected = ranking(scores, relevant, ~seen)
    for name in ("ndcg@10", "precision@10", "recall@10"):
        np.testing.assert_allclose(found[name], expected[name])
    assert set(MEASURES) <= set(found)


def test_items_that_others_are_ranked_among_are_no_interactions():
    part = np.where(np.arange(len(DATA)) % 5 == 0, RANKED, SPLIT.part)
    data = taken_up(HostData(DATA.users, DATA.items, DATA.user, DATA.item, part, DATA.rating))
    np.testing.assert_array_equal(np.isfinite(data.rating), part != RANKED)
    assert set(data.rating[part == TRAIN]) == {1.0}


@pytest.mark.parametrize(
    ("secure_sum", "hosts", "users"), [("clear", 3, True), ("masked", 3, False), ("masked", 3, True)]
)
def test_numbers_depend_neither_on_the_sum_nor_on_how_users_are_spread(secure_sum, hosts, users):
    few = {"passes": 2, "evaluate_every": 1}
    plain = trained(rounds=few)
    other = trained(
        rounds={**few, "party_per_user": users}, secure_sum=secure_sum, federation={"hosts": hosts}
    )
    assert [one["metrics"] for one in other.known["history"]] == [
        one["metrics"] for one in plain.known["history"]
    ]


def test_items_that_too_few_of_a_group_have_taken_up_stay_as_they_were():
    run = settings(rounds={"passes": 2}, fcf={"min_touch": 15})
    made = train_in_process(run, make_feed(run, load(run), 0), run_id="a-run", seed=0, see=lambda event: None)
    arrays = made.trained.arrays
    opened = (arrays["supports"] >= 15).any(axis=0)
    assert 0 < opened.mean() < 1
    first = initial(run.fcf.factor_settings(), 80, 0, 0)["items"]
    # The ridge draws all rows a little; only open ones are taught.
    still = np.abs(arrays["model.items"] - first).max(axis=1)
    assert arrays["popularity"][~opened].max() == 0
    assert still[opened].min() > 0
