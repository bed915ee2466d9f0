"""FedMF: its steps against derivatives and plain loops, many users at once, bad data."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.errors import ConfigError, DataError
from coterie.secure_sum.contribution import Contribution, UnboundedValueError
from coterie.systems.fedmf.central import train
from coterie.systems.fedmf.local_step import contribute, local_step
from coterie.systems.fedmf.mathematics import (
    apply,
    initial,
    initial_factors,
    layout,
)
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.shared import factor_steps, factors
from coterie.systems.shared.factor_steps import UserData

ITEMS, K = 60, 3
KEYS = [101, 7, 33, 4_000_000_000_000, 12, 5]
SIZES = (3, 30, 9, 0, 14, 22)
WAYS = {
    "printed": FedMfSettings(factors=K, steps="sum", rate=0.01, private_rate=0.002, ridge=0.3),
    "printed, 4 epochs": FedMfSettings(
        factors=K, steps="sum", rate=0.01, private_rate=0.002, ridge=0.3, local_epochs=4
    ),
    "mean": FedMfSettings(biases=False, factors=K, ridge=0.1),
    "mean, 5 epochs": FedMfSettings(biases=False, factors=K, ridge=0.1, local_epochs=5),
    "FedProx, 5 epochs": FedMfSettings(biases=False, factors=K, ridge=0.1, local_epochs=5, proximal=4.0),
}


def people(sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    return [
        UserData(rng.choice(ITEMS, size, replace=False), rng.integers(1, 6, size).astype(np.float32))
        for size in sizes
    ]


def model_of(options):
    return {name: 3 * value for name, value in initial(options, ITEMS, 1).items()}


def stepped(options, users=None, keys=KEYS, factors=None, round_=3, **more):
    users = people() if users is None else users
    kept = initial_factors(options, keys) if factors is None else factors
    found = local_step(model_of(options), users, options, keys, factors=kept, seed=1, round_=round_, **more)
    return sorted(found, key=lambda one: one.index)


def objective(user, p, q, ridge):
    """Return what one user's steps minimise, with the ridge of its own copies of rows."""
    missed = user.ratings.astype(np.float64) - q[user.items] @ p
    return (missed**2).sum() + ridge * (p @ p + (q[user.items] ** 2).sum())


def one_user(options, q, p, user, opened=None):
    """Return p and the change of every row by the printed formulas, rating by rating."""
    own, p = q.astype(np.float64).copy(), p.astype(np.float64)
    share = max(len(user.items), 1) if options.steps == "mean" else 1
    for _ in range(options.local_epochs):
        dp, dq = 2 * options.ridge * p, np.zeros_like(own)
        for item, rating in zip(user.items, user.ratings, strict=True):
            missed = float(rating) - p @ own[item]
            dp = dp - 2 * missed * own[item] / share
            if opened is None or opened[item]:
                pulled = options.proximal * (own[item] - q[item])
                dq[item] = -2 * missed * p + 2 * options.ridge * own[item] + pulled
        p, own = p - options.private_rate * dp, own - options.rate * dq
    return p, own - q


@pytest.mark.parametrize("way", WAYS)
def test_many_users_at_once_are_the_printed_steps_rating_by_rating(way):
    options, users = WAYS[way], people()
    factors = initial_factors(options, KEYS)
    q = model_of(options)["items"]
    for update, user, p in zip(stepped(options), users, factors, strict=True):
        kept, change = one_user(options, q, p, user)
        np.testing.assert_allclose(update.kept, kept, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(update.rows, np.sort(user.items))
        np.testing.assert_allclose(update.change, change[update.rows], rtol=1e-5, atol=1e-6)
        assert update.loss == pytest.approx(((user.ratings - q[user.items] @ p) ** 2).sum(), rel=1e-5)


def test_the_proximal_term_keeps_rows_near_the_fetched_ones():
    def moved(proximal):
        options = WAYS["mean, 5 epochs"].model_copy(update={"proximal": proximal})
        return sum(np.linalg.norm(one.change) for one in stepped(options))

    none, some, much = map(moved, (0.0, 1.0, 10.0))
    assert none > 1.005 * some > 1.005**2 * much > 0


def test_stragglers_send_what_a_part_of_their_epochs_gives():
    options = WAYS["FedProx, 5 epochs"].model_copy(update={"stragglers": 0.5})
    whole = {
        n: stepped(options.model_copy(update={"stragglers": 0.0, "local_epochs": n})) for n in range(1, 6)
    }
    taken = []
    for round_ in range(30):
        for found in stepped(options, round_=round_):
            if not found.rows.size:
                continue
            (epochs,) = (
                n
                for n, ones in whole.items()
                if np.array_equal(ones[found.index].change, found.change)
                and np.array_equal(ones[found.index].kept, found.kept)
            )
            taken.append(epochs)
    assert len(taken) == 150
    counts = np.bincount(taken, minlength=6)
    # Half take all 5 epochs, and the others any number from 1 to 5: 60 % of all take 5, and 10 % each other number.
    assert 0.48 < counts[5] / len(taken) < 0.72
    assert (counts[1:5] > 3).all()


def test_one_epoch_of_printed_steps_goes_against_the_derivative_of_what_is_minimised():
    options = WAYS["printed"]
    q = model_of(options)["items"].astype(np.float64)
    factors = initial_factors(options, KEYS).astype(np.float64)
    h = 1e-6
    for update, user, p in zip(stepped(options), people(), factors, strict=True):
        for f in range(K):
            moved = np.eye(K)[f] * h
            slope = objective(user, p + moved, q, options.ridge) - objective(
                user, p - moved, q, options.ridge
            )
            assert update.kept[f] - p[f] == pytest.approx(
                -options.private_rate * slope / (2 * h), rel=1e-4, abs=1e-6
            )
            for place, row in enumerate(update.rows):
                up, down = q.copy(), q.copy()
                up[row, f] += h
                down[row, f] -= h
                slope = objective(user, p, up, options.ridge) - objective(user, p, down, options.ridge)
                assert update.change[place, f] == pytest.approx(
                    -options.rate * slope / (2 * h), rel=1e-4, abs=1e-7
                )


def test_one_epoch_without_ridge_is_what_fedmvmf_contributes_times_twice_the_rate():
    options = WAYS["printed"].model_copy(update={"ridge": 0.0})
    first = initial_factors(options, KEYS)
    model = {**model_of(options), "attributes": np.empty((0, K), np.float32)}
    others = factor_steps.local_step(
        model, people(), options.factor_settings(), KEYS, seed=1, round_=3, factors=first
    )
    for update, other in zip(stepped(options), sorted(others, key=lambda one: one.index), strict=True):
        np.testing.assert_array_equal(update.rows, other.rows)
        np.testing.assert_allclose(
            update.change, 2 * options.rate * other.item_gradients, rtol=1e-5, atol=1e-8
        )


@pytest.mark.parametrize("way", WAYS)
def test_a_user_contributes_the_same_bits_alone_and_beside_others(way):
    options = WAYS[way]
    together, users = stepped(options), people()
    for u in reversed(range(len(KEYS))):
        (alone,) = stepped(options, [users[u]], [KEYS[u]])
        for name in ("rows", "change", "kept", "loss"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(together[u], name))
        assert alone.rng.random() == together[u].rng.random()


def test_a_host_of_many_users_sums_what_they_contribute_elsewhere():
    options, users = WAYS["mean, 5 epochs"], people()

    def host(chosen):
        contribution = Contribution(layout(options, ITEMS))
        for update in stepped(options, [users[u] for u in chosen], [KEYS[u] for u in chosen]):
            contribute(update, contribution)
            contribution.count()
        return contribution.codes()

    whole = host(range(6))
    np.testing.assert_array_equal(host([4, 0]) + host([5, 3, 1]) + host([2]), whole)
    shape = layout(options, ITEMS)
    found, exact = shape.decode(whole, 6)["items"], np.zeros((ITEMS, K))
    for update in stepped(options):
        exact[update.rows] += update.change
    assert 0 < np.abs(found - exact).max() <= 6 * shape["items"].step


@pytest.mark.parametrize("way", WAYS)
def test_nothing_leaves_of_closed_items_though_their_ratings_teach_the_user(way):
    options, allowed = WAYS[way], np.arange(ITEMS) % 3 > 0
    factors = initial_factors(options, KEYS)
    q = model_of(options)["items"]
    for update, user, p in zip(stepped(options, allowed=allowed), people(), factors, strict=True):
        kept, change = one_user(options, q, p, user, allowed)
        assert allowed[update.rows].all()
        np.testing.assert_allclose(update.kept, kept, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(update.change, change[update.rows], rtol=1e-5, atol=1e-6)


def test_changes_are_added_and_with_mean_steps_divided_by_raters():
    options = WAYS["mean"]
    model, change = model_of(options), np.random.default_rng(0).normal(size=(ITEMS, K))
    raters = np.arange(ITEMS) % 4.0
    found = apply(model, {"items": change}, options, raters=raters)["items"] - model["items"]
    np.testing.assert_allclose(
        found[raters > 0], (change / np.maximum(raters, 1)[:, None])[raters > 0], atol=1e-6
    )
    assert not found[raters == 0].any()
    added = apply(model, {"items": change}, WAYS["printed"])["items"]
    np.testing.assert_allclose(added, model["items"] + change, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_all_ratings_in_one_place_come_to_what_a_federation_of_everybody_does(way):
    options, users = WAYS[way], people()
    user = np.repeat(np.arange(6), [len(one.items) for one in users])
    item = np.concatenate([one.items for one in users])
    rating = np.concatenate([one.ratings for one in users]).astype(np.float64)
    raters = np.bincount(item, minlength=ITEMS).astype(np.float64)
    allowed = raters >= 2
    *_, central = train(user, item, rating, options, KEYS, ITEMS, rounds=4, seed=1, trained=allowed)
    model, factors = initial(options, ITEMS, 1), initial_factors(options, KEYS)
    has = [n for n, one in enumerate(users) if len(one.items)]
    for round_ in range(4):
        total = np.zeros((ITEMS, K))
        for update in local_step(
            model,
            [users[n] for n in has],
            options,
            [KEYS[n] for n in has],
            factors=factors[has],
            seed=1,
            round_=round_,
            allowed=allowed,
        ):
            total[update.rows] += update.change
            factors[has[update.index]] = update.kept
        model = apply(model, {"items": total}, options, raters=np.where(allowed, raters, 0))
    np.testing.assert_allclose(model["items"], central.items, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(factors, central.users, rtol=1e-4, atol=1e-5)
    assert np.abs(central.items - initial(options, ITEMS, 1)["items"]).max() > 1e-3


def test_each_round_rounds_anew_and_repeats_itself():
    draws = [stepped(WAYS["mean"], round_=round_)[0].rng.random() for round_ in (1, 2, 1)]
    assert draws[0] == draws[2] != draws[1]


def test_the_model_and_first_factors_are_those_of_fedmvmf():
    options = WAYS["mean"]
    np.testing.assert_array_equal(
        initial(options, ITEMS, 1)["items"], factors.initial(options.factor_settings(), ITEMS, 0, 1)["items"]
    )
    predicted = initial(options, ITEMS, 1)["items"] @ initial_factors(options, KEYS).T
    assert np.abs(predicted - 2.75).max() < 0.5


# --- Bad input ----------------------------------------------------------------------------------------------------


def test_steps_that_diverge_send_nothing():
    options = FedMfSettings(factors=K, steps="sum", rate=1e3, private_rate=1e3, local_epochs=60)
    update = stepped(options)[1]
    assert not np.isfinite(update.change).all()
    with pytest.raises(UnboundedValueError):
        contribute(update, Contribution(layout(options, ITEMS)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"local_epochs": 0}, "greater than or equal to 1"),
        ({"local_epochs": 1.5}, "valid integer"),
        ({"steps": "median"}, "'mean' or 'sum'"),
        ({"rate": math.nan}, "finite number"),
        ({"private_rate": 0.0}, "greater than 0"),
        ({"ridge": -1.0}, "greater than or equal to 0"),
        ({"ridge": math.nan}, "finite number"),
        ({"change_bound": math.inf}, "finite number"),
        ({"factors": 0}, "greater than or equal to 1"),
        ({"lowest": -math.inf}, "finite number"),
        ({"bits": 32}, "less than or equal to 31"),
        ({"min_touch": 0}, "greater than or equal to 1"),
        ({"proximal": -0.1}, "greater than or equal to 0"),
        ({"proximal": math.inf}, "finite number"),
        ({"stragglers": 1.5}, "less than or equal to 1"),
        ({"momentum": 0.5}, "not permitted"),
    ],
    ids=str,
)
def test_settings_out_of_their_range_are_refused(change, words):
    with pytest.raises(ValidationError) as caught:
        FedMfSettings(**change)
    (found,) = caught.value.errors()
    assert found["loc"] == tuple(change)
    assert words in found["msg"]


@pytest.mark.parametrize("change", [{"proximal": 0.1}, {"stragglers": 0.5}], ids=str)
def test_one_local_epoch_has_nothing_to_correct(change):
    with pytest.raises(
        ValidationError, match=r"local_epochs 1.*expected local_epochs above 1, or 0 for both"
    ):
        FedMfSettings(**change, local_epochs=1)
    assert FedMfSettings(**change, local_epochs=2).variant != FedMfSettings(local_epochs=2).variant


def test_a_range_of_ratings_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match=r"lowest is 5.5, highest 5"):
        FedMfSettings(lowest=5.5)


def user(items, ratings):
    return UserData(np.array(items, np.int64), np.array(ratings, np.float32))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (user([ITEMS], [3]), f"user 1 has an item beyond the {ITEMS}"),
        (user([1, 2], [3, 5.5]), "user 1 has a rating out of range; expected 0.5 to 5"),
        (user([1], [0]), "user 1 has a rating out of range"),
        (UserData(np.array([1]), np.ones(1), sampled=np.array([2])), "user 1 has sampled items"),
    ],
)
def test_data_that_does_not_fit_the_model_is_refused_by_position(wrong, message):
    with pytest.raises(DataError, match=message):
        stepped(WAYS["mean"], [user([1], [3]), wrong], [1, 2])


def test_a_rating_that_is_no_number_is_refused():
    with pytest.raises(DataError, match="not a finite number"):
        user([1], [math.nan])


def test_factors_of_others_are_refused():
    with pytest.raises(ValueError, match=r"factors have shape \(5, 3\)"):
        stepped(WAYS["mean"], factors=np.zeros((5, K), np.float32))


@pytest.mark.parametrize("raters", [None, np.ones(ITEMS - 1)])
def test_mean_steps_need_the_raters_of_every_item(raters):
    with pytest.raises(ConfigError, match="numbers of raters"):
        apply(model_of(WAYS["mean"]), {"items": np.zeros((ITEMS, K))}, WAYS["mean"], raters=raters)


@pytest.mark.parametrize(("lowest", "highest"), [(0, 100), (-10, 20), (-10, -1)])
def test_predictions_begin_at_the_middle_of_the_range_or_at_0_where_that_is_negative(
    lowest: float, highest: float
) -> None:
    options = FedMfSettings(biases=False, lowest=lowest, highest=highest)
    begun = initial_factors(options, range(20)) @ initial(options, 30, 0)["items"].T
    middle = max((lowest + highest) / 2, 0)
    np.testing.assert_allclose(begun, middle, rtol=0.2, atol=1)
