"""FedMF with biases: steps against formulas written out, any range of ratings, means as what it begins with."""

from typing import Any

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.data.dataset import Dataset
from coterie.data.keyed_order import key_hash
from coterie.studies.in_process import InProcess, train_in_process
from coterie.studies.run_data import Feed, load, make_feed
from coterie.systems.fedmf.local_step import local_step
from coterie.systems.fedmf.mathematics import initial, initial_factors, moving, predicted, scaled, scores
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.fedmf.study.references import fedmf_means, fedmf_references
from coterie.systems.shared.factor_steps import UserData

ITEMS, KEYS = 30, [7, 1001]
PLAN = FedMfSettings(biases=True, factors=3, local_epochs=2, rate=0.1, private_rate=0.2, ridge=0.05)
SEVERAL = range(3)


def run_of(passes: int = 10, hosts: int = 2, **given: Any) -> RunSettings:
    fedmf = {"min_touch": 1, **given.pop("fedmf", {})}
    rounds = {"passes": passes, "evaluate_every": 5, "group": 60, **given.pop("rounds", {})}
    synthetic = {"users": 60, "items": 80, "interactions": 1_500, "genres": 4}
    return RunSettings.model_validate(
        {
            "system": "fedmf",
            "data": {"synthetic": synthetic},
            "fedmf": fedmf,
            "rounds": rounds,
            "federation": {"hosts": hosts},
            **given,
        }
    )


def trained(run: RunSettings, feed: Feed, seed: int = 0) -> InProcess:
    return train_in_process(run, feed, run_id="a-run", seed=seed, see=lambda event: None)


def test_a_users_steps_are_those_of_a_mean_of_two_biases_and_a_product() -> None:
    rng = np.random.default_rng(0)
    users = [
        UserData(rng.choice(ITEMS, n, replace=False), rng.uniform(0.5, 5, n).astype(np.float32))
        for n in (9, 14)
    ]
    model = {"items": initial(PLAN, ITEMS, 1)["items"]}
    model["items"][:, 1:] = rng.normal(0, 0.3, (ITEMS, 4)).astype(np.float32)
    kept = initial_factors(PLAN, KEYS)
    kept[:, 0] = (0.3, -0.2)
    for update in local_step(model, users, PLAN, KEYS, factors=kept, seed=0, round_=1):
        user, first = users[update.index], kept[update.index].astype(np.float64)
        # The bias of the user, its factor; the biases of its items, their factors.
        a, p = first[0], first[2:]
        b, q = (part.astype(np.float64) for part in np.split(model["items"][user.items, 1:], [1], axis=1))
        b = b[:, 0]
        wanted = (user.ratings.astype(np.float64) - 2.75) / 2.25
        for _ in range(PLAN.local_epochs):
            missed = wanted - (a + b + q @ p)
            a, p, b, q = (
                a - PLAN.private_rate * (-2 * missed.mean() + 2 * PLAN.ridge * a),
                p - PLAN.private_rate * (-2 * (missed @ q) / len(missed) + 2 * PLAN.ridge * p),
                b - PLAN.rate * (-2 * missed + 2 * PLAN.ridge * b),
                q - PLAN.rate * (-2 * missed[:, None] * p + 2 * PLAN.ridge * q),
            )
        np.testing.assert_allclose(update.kept, [a, 1, *p], rtol=1e-5, atol=1e-6)
        after = np.concatenate([np.ones((len(b), 1)), b[:, None], q], axis=1)[np.argsort(user.items)]
        np.testing.assert_allclose(update.change, after - model["items"][update.rows], rtol=1e-5, atol=1e-6)


def test_ones_never_move_and_a_prediction_is_on_the_range_of_ratings() -> None:
    run = run_of()
    made = trained(run, make_feed(run, load(run), 0))
    items = made.trained.arrays["model.items"]
    assert (items[:, 0] == 1).all()
    assert np.abs(items[:, 1]).max() > 0.1
    for side in made.hosts:
        factors = side.private["factors"]
        assert (factors[:, 1] == 1).all()
        found = side.recommend({"items": items}, 0)
        np.testing.assert_allclose(found, 2.75 + 2.25 * (items @ factors[0]), rtol=1e-5)


@pytest.mark.parametrize("seed", SEVERAL)
def test_it_is_never_worse_than_the_means_of_items_and_users(seed: int) -> None:
    run = run_of(passes=60)
    feed = make_feed(run, load(run), seed)
    chosen = trained(run, feed, seed).known["chosen"]["metrics"]
    assert chosen["rmse"] <= fedmf_means(feed)["means"]["rmse"] + 0.005
    assert chosen["validation_rmse"] <= fedmf_means(feed)["means"]["validation_rmse"] + 0.005


def test_ratings_of_another_range_are_predicted_as_well_by_the_same_rates() -> None:
    run = run_of()
    feed = make_feed(run, load(run), 0)
    plain = trained(run, feed).known["history"][-1]["metrics"]
    other = run_of(fedmf={"lowest": 10, "highest": 100})
    data = feed.dataset
    wide = Dataset(**{**vars(data), "rating": (data.rating * 20).astype(np.float32)})
    found = trained(other, make_feed(other, wide, 0)).known["history"][-1]["metrics"]
    for name in ("rmse", "train_rmse", "validation_rmse"):
        assert found[name] == pytest.approx(20 * plain[name], rel=1e-3)


def test_ratings_that_are_all_equal_are_predicted_so() -> None:
    plan = FedMfSettings(biases=True, lowest=4, highest=4)
    ratings = np.full(3, 4, np.float32)
    np.testing.assert_array_equal(scaled(plan, ratings), 0)
    np.testing.assert_array_equal(predicted(plan, np.array([0.0, 0.5], np.float32)), 4)


@pytest.mark.parametrize(("secure_sum", "hosts", "users"), [("clear", 3, True), ("masked", 3, False)])
def test_numbers_depend_neither_on_the_sum_nor_on_how_users_are_spread(
    secure_sum: str, hosts: int, users: bool
) -> None:
    plain, other = run_of(5, 1), run_of(5, hosts, secure_sum=secure_sum, rounds={"party_per_user": users})
    found = [trained(run, make_feed(run, load(run), 0)).known["history"] for run in (plain, other)]
    assert found[0][-1]["metrics"] == found[1][-1]["metrics"]


def test_all_ratings_in_one_place_come_to_the_same_errors_but_for_rounding() -> None:
    run = run_of()
    feed = make_feed(run, load(run), 0)
    beside = fedmf_references(run, feed, 0)["mf"].history
    for one, other in zip(trained(run, feed).known["history"], beside, strict=True):
        for name in ("rmse", "train_rmse", "validation_rmse"):
            assert one["metrics"][name] == pytest.approx(other["metrics"][name], abs=1e-3), name


def test_sizes_and_rates_that_are_not_given_suit_biases() -> None:
    biased = FedMfSettings()
    assert biased == FedMfSettings(biases=True)
    assert (biased.factors, biased.width, biased.local_epochs, biased.rate) == (20, 22, 5, 0.3)
    assert FedMfSettings(factors=4, rate=0.1).rate == 0.1
    assert FedMfSettings(biases=True, steps="sum").width == 22
    assert FedMfSettings.from_json(biased.to_json()) == biased
    plain = FedMfSettings(biases=False)
    assert (plain.width, plain.local_epochs) == (10, 1)
    users, items = moving(biased)
    assert (users.sum(), items.sum(), users[1], items[0]) == (21, 21, 0, 0)


def test_the_first_prediction_is_near_the_middle_of_the_range() -> None:
    plan = FedMfSettings(biases=True)
    first = scores(initial(plan, ITEMS, 0), initial_factors(plan, key_hash(["a", "b"], 0)))
    assert np.abs(predicted(plan, first) - 2.75).max() < 0.5
