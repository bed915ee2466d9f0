"""FedMVMF at the clients: many users at once, contributions, sampled items, bad data."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import DataError
from coterie.secure_sum.contribution import Contribution, UnboundedValueError
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.factor_steps import UserData, contribute, local_step, sample, user_factors
from coterie.systems.shared.factors import initial, initial_factors, layout

ITEMS, ATTRIBUTES = 60, 4
KEYS = [101, 7, 33, 4_000_000_000_000, 12, 5]
SIZES = (3, 30, 9, 0, 14, 22)
WAYS = {
    "obs-only": {"weights": "obs-only"},
    "incl-unc": {"weights": "incl-unc"},
    "sampled": {},
    "sgd": {"update": "sgd", "private_rate": 1e-3},
    "sgd, all items": {"update": "sgd", "private_rate": 1e-3, "weights": "incl-unc"},
}


def make(**options):
    return FactorSettings(**{"factors": 3, "ridge": 1.3, "side": 0.7, **options})


def people(sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    users = []
    for size in sizes:
        x = rng.integers(0, 2, ATTRIBUTES).astype(np.float32)
        x[rng.random(ATTRIBUTES) < 0.2] = np.nan
        items = rng.choice(ITEMS, size, replace=False)
        users.append(UserData(items, rng.integers(1, 6, size).astype(np.float32), x))
    return users


def prepared(options, users=None, keys=KEYS, **more):
    return sample(people() if users is None else users, keys, options, ITEMS, seed=1, **more)


def train(options, users=None, keys=KEYS, round_=3, **more):
    users = prepared(options) if users is None else users
    model = {name: 5 * value for name, value in initial(options, ITEMS, ATTRIBUTES, 1).items()}
    factors = initial_factors(options, keys)
    found = local_step(model, users, options, keys, seed=1, round_=round_, factors=factors, **more)
    return sorted(found, key=lambda one: one.index)


def one_user(options, model, user, kept):
    """Return p, c (r - p q) for all items, and x - p u, from the printed formulas (8), (9), (10)."""
    q, u = model["items"].astype(np.float64), model["attributes"].astype(np.float64)
    c = np.full(ITEMS, options.uncertainty if options.weights == "incl-unc" else 0.0)
    if len(user.sampled):
        c[user.sampled] = options.uncertainty * min(1, options.samples * len(user.items) / len(user.sampled))
    c[user.items] = 1
    r = np.zeros(ITEMS)
    r[user.items] = user.ratings
    known = np.flatnonzero(~np.isnan(user.attributes))
    x, u_known = user.attributes[known].astype(np.float64), u[known]
    if options.update == "semi-als":
        left = q.T @ np.diag(c) @ q + options.side * u_known.T @ u_known + options.ridge * np.eye(3)
        p = (r * c @ q + options.side * x @ u_known) @ np.linalg.inv(left)
        after = p
    else:
        p = kept.astype(np.float64)
        slope = (
            -2 * (c * (r - q @ p)) @ q
            - 2 * options.side * (x - u_known @ p) @ u_known
            + 2 * options.ridge * p
        )
        after = p - options.private_rate * slope
    missed = np.zeros(ATTRIBUTES)
    missed[known] = x - u_known @ p
    return p, after, c * (r - q @ p), missed


@pytest.mark.parametrize("way", WAYS)
def test_many_users_at_once_are_the_printed_formulas_one_at_a_time(way):
    options = make(**WAYS[way])
    users = prepared(options)
    model = {name: 5 * value for name, value in initial(options, ITEMS, ATTRIBUTES, 1).items()}
    for update, user, key in zip(train(options), users, KEYS, strict=True):
        p, after, errors, missed = one_user(options, model, user, initial_factors(options, [key])[0])
        # Solved in float64 and rounded to float32.
        close = {"rtol": 1e-5, "atol": 1e-6}
        np.testing.assert_allclose(update.factor, p, **close)
        np.testing.assert_allclose(update.kept, after, **close)
        np.testing.assert_allclose(update.attribute_errors, missed, **close)
        np.testing.assert_allclose(update.errors, errors[update.rows], **close)
        np.testing.assert_allclose(update.item_gradients, np.outer(errors[update.rows], p), **close)
        assert not np.delete(errors, update.rows).any()
        assert (np.diff(update.rows) > 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_user_contributes_the_same_bits_alone_and_beside_others(way):
    options = make(**WAYS[way])
    together, users = train(options), prepared(options)
    for u in reversed(range(len(KEYS))):
        (alone,) = train(options, [users[u]], [KEYS[u]])
        for name in ("rows", "errors", "attribute_errors", "factor", "kept", "loss"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(together[u], name))
        assert alone.rng.random() == together[u].rng.random()


@pytest.mark.parametrize("way", ["sampled", "incl-unc"])
def test_a_host_of_many_users_sums_what_they_contribute_elsewhere(way):
    options, users = make(**WAYS[way]), prepared(make(**WAYS[way]))

    def host(chosen):
        contribution = Contribution(layout(options, ITEMS, ATTRIBUTES))
        for update in train(options, [users[u] for u in chosen], [KEYS[u] for u in chosen]):
            contribute(update, contribution)
            contribution.count()
        return contribution.codes()

    whole = host(range(6))
    np.testing.assert_array_equal(host([4, 0]) + host([5, 3, 1]) + host([2]), whole)
    # And decoded it is the sum but for the rounding of each user.
    shape = layout(options, ITEMS, ATTRIBUTES)
    found, exact = shape.decode(whole, 6), np.zeros((ITEMS, 3))
    for update in train(options):
        exact[update.rows] += update.item_gradients
    assert np.abs(found["items"] - exact).max() <= 6 * shape["items"].step
    assert np.abs(found["items"] - exact).max() > 0
    attributes = sum(update.attribute_gradients for update in train(options))
    assert np.abs(found["attributes"] - attributes).max() <= 6 * shape["attributes"].step


def test_each_round_rounds_anew_and_repeats_itself():
    options = make()
    draws = [train(options, round_=round_)[0].rng.random() for round_ in (1, 2, 1)]
    assert draws[0] == draws[2] != draws[1]


def test_values_beyond_the_bound_are_clipped_and_counted():
    options = make(item_bound=0.5)
    contribution = Contribution(layout(options, ITEMS, ATTRIBUTES))
    beyond = 0
    for update in train(options):
        contribute(update, contribution)
        beyond += int(np.count_nonzero(np.abs(update.item_gradients) > 0.5))
    assert contribution.clipped == beyond > 0


def test_a_step_that_diverged_sends_nothing():
    options = make(update="sgd")
    model = initial(options, ITEMS, ATTRIBUTES, 1)
    (update,) = local_step(
        model,
        prepared(options)[:1],
        options,
        KEYS[:1],
        seed=1,
        round_=1,
        factors=np.full((1, 3), np.nan, np.float32),
    )
    with pytest.raises(UnboundedValueError):
        contribute(update, Contribution(layout(options, ITEMS, ATTRIBUTES)))


@pytest.mark.parametrize("weights", ["obs-only", "incl-unc", "sampled"])
def test_factors_to_score_with_are_those_that_users_contribute_with(weights):
    options = make(weights=weights)
    users = prepared(options)
    model = {name: 5 * value for name, value in initial(options, ITEMS, ATTRIBUTES, 1).items()}
    found = user_factors(model, users, options)
    np.testing.assert_array_equal(found, np.stack([update.factor for update in train(options)]))


def test_stepping_needs_the_factors_that_users_kept():
    options = make(update="sgd")
    model = initial(options, ITEMS, ATTRIBUTES, 1)
    for factors in (None, np.zeros((5, 3), np.float32)):
        with pytest.raises(ValueError, match="factors that users kept"):
            list(local_step(model, prepared(options), options, KEYS, seed=1, round_=1, factors=factors))


@pytest.mark.parametrize("weights", ["obs-only", "incl-unc", "sampled"])
def test_nothing_leaves_of_closed_items_though_their_ratings_teach_the_user(weights):
    options = make(weights=weights)
    allowed = np.arange(ITEMS) % 3 > 0
    users = prepared(options, allowed=allowed)
    model = {name: 5 * value for name, value in initial(options, ITEMS, ATTRIBUTES, 1).items()}
    for update, user in zip(train(options, users, allowed=allowed), users, strict=True):
        assert allowed[update.rows].all()
        assert allowed[user.sampled].all()
        # Weights: rated items 1, closed ones too; unrated ones only where they are open.
        c = np.where(allowed, options.uncertainty if weights == "incl-unc" else 0.0, 0.0)
        shown = np.count_nonzero(allowed[user.items])
        if len(user.sampled):
            c[user.sampled] = options.uncertainty * min(1, options.samples * shown / len(user.sampled))
        c[user.items] = 1
        r = np.zeros(ITEMS)
        r[user.items] = user.ratings
        q, u = model["items"].astype(np.float64), model["attributes"].astype(np.float64)
        known = ~np.isnan(user.attributes)
        left = (q.T * c) @ q + options.side * u[known].T @ u[known] + options.ridge * np.eye(3)
        p = np.linalg.solve(left, (r * c) @ q + options.side * user.attributes[known] @ u[known])
        np.testing.assert_allclose(update.factor, p, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(update.errors, (c * (r - q @ p))[update.rows], rtol=1e-4, atol=1e-5)
        missed = np.nan_to_num(user.attributes - u @ p)
        expected = (c * (r - q @ p) ** 2).sum() + options.side * missed @ missed + options.ridge * p @ p
        assert update.loss == pytest.approx(expected, rel=1e-5)


# --- Sampled items ------------------------------------------------------------------------------------------------


def rated(items):
    items = np.array(sorted(items), np.int64)
    return UserData(items, np.full(len(items), 3.0, np.float32))


def drawn(items, options=None, key=9, **more):
    (user,) = sample([rated(items)], [key], options or make(), ITEMS, seed=1, **more)
    return set(user.sampled.tolist())


@given(st.sets(st.integers(0, ITEMS - 1), min_size=1), st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 5))
def test_rated_and_sampled_items_together_are_a_power_of_two_or_everything(items, ratio, key):
    options = make(samples=ratio)
    sampled = drawn(items, options, key)
    assert not sampled & items
    together = len(items) + len(sampled)
    assert together == ITEMS or together.bit_count() == 1
    assert len(sampled) >= min(ratio * len(items), ITEMS - len(items))
    assert together == ITEMS or together < 2 * math.ceil((1 + ratio) * len(items))
    assert drawn(items, options, key) == sampled


@given(st.sets(st.integers(0, ITEMS - 1), min_size=1, max_size=ITEMS - 1), st.data())
def test_a_newly_rated_item_takes_the_place_of_a_sampled_one(items, data):
    before = drawn(items)
    new = data.draw(st.integers(0, ITEMS - 1).filter(lambda item: item not in items))
    after = drawn(items | {new})
    if len(items) + 1 + len(after) != len(items) + len(before):
        # The next power of two: what was there stays, and more comes.
        assert before - {new} <= after
    elif new in before:
        assert after == before - {new}
    else:
        assert after < before
        assert len(after) == len(before) - 1


def test_sampled_items_are_drawn_by_popularity_and_from_the_users_own_number():
    popularity = np.where(np.arange(ITEMS) < 20, 50.0, 1.0)
    chosen = [drawn({0, 30}, make(samples=3.0), key, popularity=popularity) for key in range(300)]
    popular = np.mean([len([item for item in each if item < 20]) for each in chosen])
    # Of 6 items, at first odds of 950 to 39.
    assert 5.2 < popular < 6
    assert len({frozenset(each) for each in chosen}) > 250
    uniform = [
        len([item for item in drawn({0, 30}, make(samples=3.0), key) if item < 20]) for key in range(300)
    ]
    assert 1.6 < np.mean(uniform) < 2.3


def test_redrawn_items_are_the_papers_uniform_and_new_in_each_round():
    options = make(resample=True, samples=1.5)
    popularity = np.where(np.arange(ITEMS) < 20, 1e9, 1.0)
    rounds = [drawn({1, 2, 3, 50}, options, round_=n, popularity=popularity) for n in range(300)]
    assert {len(each) for each in rounds} == {6}
    assert len({frozenset(each) for each in rounds}) > 290
    counts = np.bincount([item for each in rounds for item in each], minlength=ITEMS)
    assert not counts[[1, 2, 3, 50]].any()
    expected = 300 * 6 / 56
    assert np.abs(np.delete(counts, [1, 2, 3, 50]) - expected).max() < 5 * math.sqrt(expected)


def test_sampled_items_together_weigh_the_papers_share_of_the_rated_ones():
    options = make()
    (user,) = sample([rated(range(9))], [4], options, ITEMS, seed=1)
    assert len(user.sampled) == 23  # 32 in all
    model = {name: 5 * value for name, value in initial(options, ITEMS, 0, 1).items()}
    (update,) = local_step(model, [user], options, [4], seed=1, round_=1)
    predicted = model["items"] @ update.factor
    place = np.searchsorted(update.rows, user.sampled)
    np.testing.assert_allclose(
        update.errors[place], -options.uncertainty * 9 / 23 * predicted[user.sampled], rtol=1e-4
    )


@pytest.mark.parametrize("weights", ["obs-only", "incl-unc"])
def test_other_weights_sample_nothing(weights):
    assert not drawn({1, 2}, make(weights=weights))


# --- Bad data -----------------------------------------------------------------------------------------------------


def user(items, ratings, attributes=(0,) * ATTRIBUTES, sampled=()):
    return UserData(
        np.array(items, np.int64),
        np.array(ratings, np.float32),
        np.array(attributes, np.float32),
        np.array(sampled, np.int64),
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: user([1, 2], [3]), "expected one for each"),
        (lambda: user([1, 1], [3, 4]), "twice"),
        (lambda: user([1], [3], sampled=[1]), "twice"),
        (lambda: user([-1], [3]), "below 0"),
        (lambda: user([1], [math.nan]), "not a finite number"),
        (lambda: user([1], [3], [math.inf, 0, 0, 0]), "infinite"),
        (lambda: user([[1]], [[3]]), "one dimension"),
    ],
)
def test_data_that_is_wrong_by_itself_is_refused(build, message):
    with pytest.raises(DataError, match=message):
        build()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (user([ITEMS], [3]), f"user 1 has an item beyond the {ITEMS}"),
        (user([1], [3], sampled=[ITEMS]), "user 1 has an item beyond"),
        (user([1, 2], [3, 5.5]), "user 1 has a rating out of range; expected 0.5 to 5"),
        (user([1], [0]), "user 1 has a rating out of range"),
        (user([1], [3], [0.0]), f"user 1 has 1 attributes; the model has {ATTRIBUTES}"),
    ],
)
def test_data_that_does_not_fit_the_model_is_refused_by_position(wrong, message):
    options = make()
    model = initial(options, ITEMS, ATTRIBUTES, 1)
    with pytest.raises(DataError, match=message) as caught:
        list(local_step(model, [user([1], [3]), wrong], options, [1, 2], seed=1, round_=1))
    assert "5.5" not in str(caught.value)  # no private value
    with pytest.raises(DataError, match=message):
        user_factors(model, [user([1], [3]), wrong], options)


def test_sampled_items_are_refused_where_the_weights_want_none():
    options = make(weights="obs-only")
    model = initial(options, ITEMS, ATTRIBUTES, 1)
    with pytest.raises(DataError, match="user 0 has sampled items"):
        list(local_step(model, [user([1], [3], sampled=[2])], options, [1], seed=1, round_=1))


@pytest.mark.parametrize("popularity", [np.ones(ITEMS - 1), np.full(ITEMS, -1.0), np.full(ITEMS, math.nan)])
def test_a_popularity_that_cannot_be_one_is_refused(popularity):
    with pytest.raises(DataError, match="popularity"):
        drawn({1}, popularity=popularity)


def test_changed_data_has_its_order_made_anew():
    before = user([5, 1], [3, 4])
    after = replace(before, sampled=np.array([0, 9]))
    assert before.touched.tolist() == [5, 1]
    assert after.touched[after.ascending].tolist() == [0, 1, 5, 9]
    assert (after.last, after.span) == (9, (3.0, 4.0))
