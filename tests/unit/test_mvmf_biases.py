"""FedMVMF with biases: steps against formulas, what never moves, ranges of ratings, means, and the attack."""

import json
from typing import Any

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate
from coterie.data.dataset import Dataset
from coterie.data.keyed_order import key_hash
from coterie.secure_sum.contribution import Contribution
from coterie.studies.in_process import InProcess, train_in_process
from coterie.studies.run_data import Feed, load, make_feed
from coterie.systems.fedmf.study.references import fedmf_means
from coterie.systems.fedmvmf.settings import FedMvmfPlan, FedMvmfSettings
from coterie.systems.fedmvmf.study.biased_reconstruction import reconstruct
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.factor_steps import UserData, contribute, local_step
from coterie.systems.shared.factors import (
    apply,
    from_attributes,
    gradients,
    initial,
    initial_factors,
    initial_server_state,
    layout,
)
from coterie.systems.shared.study.reconstruction import Marginals, Seen, seen_in_sum

K, ITEMS, ATTRIBUTES = 3, 30, 4
PLAN = FactorSettings(biases=True, weights="obs-only", factors=K, ridge=0.7, side=0.5)
SEVERAL = range(3)
DATA = generate(SyntheticSpec(users=60, items=80, interactions=1_500, genres=4))


def model_of(
    settings: FactorSettings = PLAN, attributes: int = ATTRIBUTES
) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(2)
    found = initial(settings, ITEMS, attributes, 1)
    found["items"][:, 1:] = rng.normal(0, 0.4, (ITEMS, K + 1))
    found["attributes"][:] = rng.normal(0, 0.4, (attributes, K + 2))
    return found


def user_of(seed: int = 0, attributes: int = ATTRIBUTES) -> UserData:
    rng = np.random.default_rng(seed)
    told = rng.integers(0, 2, attributes).astype(np.float32)
    return UserData(rng.choice(ITEMS, 12, replace=False), rng.uniform(0.5, 5, 12).astype(np.float32), told)


def cost(user: UserData, p: np.ndarray[Any, Any], q: np.ndarray[Any, Any], u: np.ndarray[Any, Any]) -> float:
    """Return what the user's factor minimises, with ratings from -1 to 1; constants apart."""
    wanted = (user.ratings.astype(np.float64) - 2.75) / 2.25
    missed, told = wanted - q[user.items] @ p, user.attributes - u @ p
    return float(missed @ missed + PLAN.side * (told @ told) + PLAN.ridge * (p @ p))


def test_a_user_solves_for_its_bias_and_its_factor_beside_a_1() -> None:
    model, user = model_of(), user_of()
    (update,) = local_step(model, [user], PLAN, [7], seed=1, round_=1)
    q, u = (model[name].astype(np.float64) for name in ("items", "attributes"))
    p = update.factor.astype(np.float64)
    assert p[1] == 1
    for place in (0, 2, 3, 4):
        moved = np.eye(K + 2)[place] * 1e-4
        slope = (cost(user, p + moved, q, u) - cost(user, p - moved, q, u)) / 2e-4
        assert slope == pytest.approx(0, abs=1e-4)
    assert abs(p[0]) > 0.01
    wanted = (user.ratings - 2.75) / 2.25
    order = np.argsort(user.items)
    np.testing.assert_allclose(update.errors, (wanted - q[user.items] @ p)[order], rtol=1e-4, atol=1e-5)
    # The value of a row that never moves is not sent; rows of attributes move in every value.
    assert not update.item_gradients[:, 0].any()
    np.testing.assert_allclose(update.item_gradients[:, 1], update.errors)
    np.testing.assert_allclose(update.attribute_gradients[:, 0], update.attribute_errors * p[0], rtol=1e-6)


def test_a_step_of_a_user_under_sgd_moves_everything_but_the_1() -> None:
    settings = PLAN.model_copy(update={"update": "sgd", "private_rate": 0.01})
    model, user = model_of(), user_of()
    first = initial_factors(settings, [7])
    (update,) = local_step(model, [user], settings, [7], seed=1, round_=1, factors=first)
    np.testing.assert_array_equal(first[0, :2], (0, 1))
    assert update.kept[1] == 1
    q, u, p = model["items"].astype(float), model["attributes"].astype(float), first[0].astype(float)
    for place in (0, 2, 3, 4):
        moved = np.eye(K + 2)[place] * 1e-4
        slope = (cost(user, p + moved, q, u) - cost(user, p - moved, q, u)) / 2e-4
        assert update.kept[place] - p[place] == pytest.approx(-0.01 * slope, rel=1e-3, abs=1e-6)


def test_the_servers_gradient_leaves_the_1_of_a_row() -> None:
    model = model_of()
    sums = {"items": np.ones((ITEMS, K + 2)), "attributes": np.ones((ATTRIBUTES, K + 2))}
    found = gradients(model, sums, np.ones((ITEMS, K + 2)), PLAN)
    assert not found["items"][:, 0].any()
    expected = -2 + 2 * PLAN.ridge * model["items"].astype(float) - 2 * PLAN.side
    np.testing.assert_allclose(found["items"][:, 1:], expected[:, 1:], rtol=1e-6)
    assert found["attributes"].all()


@pytest.mark.parametrize("one", [0, 1])
def test_a_factor_from_attributes_alone_is_the_solution_beside_a_1(one: int) -> None:
    model = model_of()
    told = np.array([[1, 0, np.nan, 1]], np.float32)
    found = from_attributes(told, model["attributes"], PLAN, one=one)[0].astype(np.float64)
    assert found[one] == 1
    u, x = model["attributes"].astype(np.float64)[[0, 1, 3]], np.array([1.0, 0, 1])
    free = [place for place in range(K + 2) if place != one]
    slope = -2 * PLAN.side * (x - u @ found) @ u + 2 * PLAN.ridge * found
    np.testing.assert_allclose(slope[free], 0, atol=1e-5)


def run_of(passes: int = 10, hosts: int = 2, **given: Any) -> RunSettings:
    mvmf = {"min_touch": 1, **given.pop("mvmf", {})}
    rounds = {"passes": passes, "evaluate_every": 5, "group": 60, "choose_by": "validation_rmse"}
    synthetic = {"users": 60, "items": 80, "interactions": 1_500, "genres": 4}
    return RunSettings.model_validate(
        {
            "system": "fedmvmf",
            "data": {"synthetic": synthetic},
            "mvmf": mvmf,
            "rounds": {**rounds, **given.pop("rounds", {})},
            "federation": {"hosts": hosts},
            **given,
        }
    )


def trained(run: RunSettings, feed: Feed, seed: int = 0) -> InProcess:
    return train_in_process(run, feed, run_id="a-run", seed=seed, see=lambda event: None)


@pytest.mark.parametrize("seed", SEVERAL)
def test_it_is_never_worse_than_the_means_of_items_and_users(seed: int) -> None:
    run = run_of(passes=40)
    feed = make_feed(run, load(run), seed)
    chosen = trained(run, feed, seed).known["chosen"]["metrics"]
    means = fedmf_means(feed)["means"]
    assert chosen["validation_rmse"] <= means["validation_rmse"] + 0.005
    assert chosen["rmse"] <= means["rmse"] + 0.005


def test_ones_never_move_and_predictions_are_ratings() -> None:
    run = run_of()
    made = trained(run, make_feed(run, load(run), 0))
    items = made.trained.arrays["model.items"]
    assert (items[:, 0] == 1).all()
    assert np.abs(items[:, 1]).max() > 0.05
    side = made.hosts[0]
    model = {"items": items, "attributes": made.trained.arrays["model.attributes"], "popularity": np.ones(80)}
    factor = side.factors(model, np.array([0]))[0]
    assert factor[1] == 1
    np.testing.assert_allclose(side.recommend(model, 0), 2.75 + 2.25 * (items @ factor), rtol=1e-4)


def test_ratings_of_another_range_are_predicted_as_well_by_the_same_settings() -> None:
    run = run_of()
    feed = make_feed(run, load(run), 0)
    plain = trained(run, feed).known["history"][-1]["metrics"]
    other = run_of(mvmf={"lowest": 10, "highest": 100})
    data = feed.dataset
    wide = Dataset(**{**vars(data), "rating": (data.rating * 20).astype(np.float32)})
    found = trained(other, make_feed(other, wide, 0)).known["history"][-1]["metrics"]
    for name in ("rmse", "validation_rmse"):
        assert found[name] == pytest.approx(20 * plain[name], rel=1e-2)


@pytest.mark.parametrize(("secure_sum", "hosts", "users"), [("clear", 3, True), ("masked", 3, False)])
def test_numbers_depend_neither_on_the_sum_nor_on_how_users_are_spread(
    secure_sum: str, hosts: int, users: bool
) -> None:
    plain, other = run_of(5, 1), run_of(5, hosts, secure_sum=secure_sum, rounds={"party_per_user": users})
    found = [trained(run, make_feed(run, load(run), 0)).known["history"] for run in (plain, other)]
    assert found[0][-1]["metrics"] == found[1][-1]["metrics"]


@pytest.mark.parametrize("weights", ["incl-unc", "sampled"])
def test_biases_with_weights_on_unrated_items_are_refused(weights: str) -> None:
    with pytest.raises(ValueError, match=f"biases with weights '{weights}': .* expected weights 'obs-only'"):
        FedMvmfSettings.model_validate({"preset": "ratings", "weights": weights})


def test_weights_on_unrated_items_or_no_biases_mean_the_published_form_where_no_preset_is_given() -> None:
    for given in ({"weights": "incl-unc"}, {"biases": False}, {"samples": 3.0}, {"resample": True}):
        assert FedMvmfSettings.model_validate(given).preset == "paper"
        assert not FedMvmfSettings.model_validate(given).biases
    assert FedMvmfSettings(factors=7).width == 9


def test_a_plan_of_the_published_form_is_the_text_that_it_was() -> None:
    plan = FedMvmfPlan(preset="paper", attribute_names=("age",))
    assert "biases" not in json.loads(plan.to_json())
    assert FedMvmfPlan.from_json(plan.to_json()) == plan
    # Before there were biases, weights on rated items alone meant none.
    old = FedMvmfPlan(biases=False, weights="obs-only")
    assert "biases" not in json.loads(old.to_json())
    assert not FedMvmfPlan.from_json(old.to_json()).biases
    new = FedMvmfPlan()
    assert json.loads(new.to_json())["biases"] is True
    assert FedMvmfPlan.from_json(new.to_json()) == new


# --- The server as attacker ---------------------------------------------------------------------------------------


def seen_by(
    settings: FactorSettings, attributes: int, rounds: int = 3
) -> tuple[list[Seen], Seen, list[UserData]]:
    """Return what the server sees of each user in clear in a round, the sum over all, and the users."""
    rng, n_items = np.random.default_rng(5), len(DATA.items)
    people = [
        UserData(
            DATA.item[DATA.user == u],
            DATA.rating[DATA.user == u],
            rng.integers(0, 2, attributes).astype(np.float32),
        )
        for u in range(60)
    ]
    keys, shape = key_hash(DATA.users, 0), layout(settings, n_items, attributes)
    model = initial(settings, n_items, attributes, 1)
    state, kept = initial_server_state(settings, model), initial_factors(settings, keys)
    for round_ in range(rounds):
        whole, alone = Contribution(shape), [Contribution(shape) for _ in people]
        updates = local_step(model, people, settings, keys, seed=1, round_=round_, factors=kept)
        for update in sorted(updates, key=lambda one: one.index):
            for one in (whole, alone[update.index]):
                contribute(update, one)
                one.count()
        before = model
        model, state = apply(model, state, shape.decode(whole.codes(), 60), settings, users=60)

    def seen(one: Contribution) -> Seen:
        return seen_in_sum(one.codes(), shape, before["items"], before["attributes"], users=one.users)

    return [seen(one) for one in alone], seen(whole), people


def marginals(attributes: int) -> Marginals:
    stars = np.unique(DATA.rating).tolist()
    told = np.full((60, attributes), 0.5)
    return Marginals.of(DATA.item, DATA.rating, told, stars, len(DATA.items))


def right(found: np.ndarray[Any, Any], user: UserData) -> float:
    return float((np.abs(found[user.items] - user.ratings) < 0.25).mean())


@pytest.mark.parametrize("attributes", [0, 6])
def test_a_contribution_in_clear_is_a_users_ratings_and_attributes(attributes: int) -> None:
    settings = FedMvmfSettings()
    alone, _, people = seen_by(settings, attributes)
    shares, others = [], 0
    for seen, user in zip(alone, people, strict=True):
        found = reconstruct(seen, settings, marginals(attributes), first=False)
        others += int(np.isin(np.flatnonzero(found.rated == np.inf), user.items, invert=True).sum())
        shares.append(right(found.ratings, user))
        np.testing.assert_array_equal(found.attributes, user.attributes)
    # Now and then an error is rounded to nothing, and the rating not seen.
    assert others == 0
    assert np.mean(shares) > 0.99


def test_a_sum_over_everybody_tells_no_more_than_the_commonest_rating_of_each_item() -> None:
    settings, known = FedMvmfSettings(), marginals(0)
    _, whole, people = seen_by(settings, 0)
    table = reconstruct(whole, settings, known, first=False).ratings
    guess = known.stars[known.shares.argmax(axis=1)]
    assert np.mean([right(table, one) for one in people]) < np.mean([right(guess, one) for one in people])
