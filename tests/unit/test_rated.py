"""Explicit ratings: graded NDCG, precision and recall over unseen items, errors; against loops and another library."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data import SyntheticSpec, cold_items, generate, random
from coterie.errors import RunError
from coterie.evaluation import Rated, damped_mean, figures, graded_ndcg
from coterie.evaluation.holdout import TEST, TRAIN, VALIDATION

from ..other_metrics import ranx

DATA = generate(SyntheticSpec(users=40, items=70, interactions=1_200))
SPLIT = random(DATA, train=0.6, validation=0.3, seed=1)


def holdout(**more):
    more = {"n_items": len(DATA.items), "part": SPLIT.part, **more}
    return Rated(n_users=len(DATA.users), user=DATA.user, item=DATA.item, rating=DATA.rating, **more)


def some_scores(seed=0):
    # Coarse, so that there are equal ones.
    return np.round(np.random.default_rng(seed).normal(3, 1, (len(DATA.users), len(DATA.items))), 1)


def plain_dcg(ratings, k):
    return sum(2 ** (x - 1) / math.log2(i + 1) for i, x in enumerate(ratings[:k], 1))


def plain(scores, part, seen, k=10, among=None):
    """Return the definitions of the docstring, one user at a time."""
    found = []
    for user in range(len(DATA.users)):
        mine = DATA.user == user
        held = [
            (float(np.float32(scores[user, i])), float(r), int(i))
            for i, r in zip(DATA.item[mine & part], DATA.rating[mine & part], strict=True)
        ]
        if not held:
            found.append([math.nan] * 6)
            continue
        by_score = [rating for _, rating, _ in sorted(held, key=lambda one: (-one[0], one[1]))]
        best = sorted(by_score, reverse=True)
        liked = {item for _, rating, item in held if rating >= 4}
        known = set(DATA.item[mine & seen].tolist())
        unseen = [i for i in range(len(DATA.items)) if i not in known and (among is None or among[i])]
        liked &= set(unseen)
        top = sorted(unseen, key=lambda i: (-np.float32(scores[user, i]), i in liked))[:k]
        hits = len(liked & set(top))
        found.append(
            [
                plain_dcg(by_score, k) / plain_dcg(best, k),
                plain_dcg(by_score, 5) / plain_dcg(best, 5),
                hits / k if liked else math.nan,
                hits / len(liked) if liked else math.nan,
                sum((scores[user, i] - r) ** 2 for _, r, i in held),
                sum(abs(scores[user, i] - r) for _, r, i in held),
            ]
        )
    return np.array(found).T


NAMES = (
    "ndcg_rated@10",
    "ndcg_rated_printed@10",
    "precision@10",
    "recall@10",
    "squared_error",
    "absolute_error",
)


def test_each_metric_is_its_definition():
    scores = some_scores()
    found = holdout().measure(scores.__getitem__)
    assert tuple(found) == holdout().names()
    for prefix, part, seen in (
        ("", SPLIT.test, ~SPLIT.test),
        ("validation_", SPLIT.validation, SPLIT.train),
    ):
        for name, expected in zip(NAMES, plain(scores, part, seen), strict=True):
            np.testing.assert_allclose(found[prefix + name], expected, rtol=1e-9, err_msg=prefix + name)
        counts = np.bincount(DATA.user[part], minlength=len(DATA.users))
        np.testing.assert_array_equal(np.nan_to_num(found[f"{prefix}ratings"]), counts)


def test_cold_items_are_ranked_among_themselves():
    split = cold_items(DATA, 0.3, seed=2)
    cold = np.zeros(len(DATA.items), bool)
    cold[DATA.item[split.test]] = True
    scores = some_scores(1)
    found = holdout(part=split.part, among=cold).measure(scores.__getitem__)
    expected = plain(scores, split.test, split.train, among=cold)
    for name, values in zip(NAMES, expected, strict=True):
        np.testing.assert_allclose(found[name], values, rtol=1e-9, err_msg=name)
    every = holdout(part=split.part).measure(scores.__getitem__)
    assert np.nanmean(found["recall@10"]) > np.nanmean(every["recall@10"])


def test_graded_ndcg_agrees_with_another_library():
    library = ranx()
    rng = np.random.default_rng(0)
    users, each = 30, 12
    user = np.repeat(np.arange(users), each)
    rating = rng.integers(1, 6, len(user))
    scores = rng.permutation(len(user)).astype(np.float64)  # none equal
    names = [f"{u:02d}" for u in range(users)]  # their order by name is that of the rows

    def by_user(values):
        return {name: {str(n): values[u * each + n] for n in range(each)} for u, name in enumerate(names)}

    # The library takes a gain as it is; ours is 2^(x - 1).
    gains = library.Qrels(by_user((2 ** (rating - 1)).tolist()))
    theirs = library.evaluate(gains, library.Run(by_user(scores.tolist())), "ndcg@10", return_mean=False)
    np.testing.assert_allclose(graded_ndcg(user, scores, rating, users), theirs, rtol=1e-9)


def test_graded_ndcg_is_the_same_on_a_range_that_is_moved_and_finite_on_wide_ones():
    user, rating = np.array([0, 0, 0, 1, 1]), np.array([1.0, 3.0, 5.0, 2.0, 4.0])
    scores = np.array([0.1, 0.9, 0.5, 0.7, 0.2])
    usual = graded_ndcg(user, scores, rating, 2)
    for moved in (-5_000, 5_000):
        np.testing.assert_allclose(graded_ndcg(user, scores, rating + moved, 2), usual)
    wide = graded_ndcg(user, scores, rating * 1_000, 2)
    # Of ratings so far apart the best one alone decides, which is at rank 2 of both users.
    np.testing.assert_allclose(wide, 1 / math.log2(3))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=8), st.integers(1, 12))
def test_equal_scores_count_against_the_model(rated, k):
    scores = np.array([score for score, _ in rated], np.float64)
    rating = np.array([x for _, x in rated], np.float64)
    user = np.zeros(len(rated), int)
    found = graded_ndcg(user, scores, rating, 1, k)[0]
    # No way to break the ties is worse, and the ideal order is 1.
    worst = scores - 1e-3 * rating
    assert found == pytest.approx(graded_ndcg(user, worst, rating, 1, k)[0])
    assert found <= graded_ndcg(user, scores + 1e-3 * rating, rating, 1, k)[0] + 1e-12
    assert graded_ndcg(user, rating, rating, 1, k)[0] == pytest.approx(1)


def test_ratings_by_chance_are_far_from_zero():
    # A warning that the docstring gives: with gains from 1 to 16 most of the ideal is reached by any order.
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(400), 10)
    rating = rng.choice([1, 2, 3, 4, 5], len(user), p=[0.06, 0.11, 0.27, 0.34, 0.22])
    assert 0.7 < np.mean(graded_ndcg(user, rng.random(len(user)), rating, 400)) < 0.9


def test_users_with_nothing_held_out_or_nothing_liked_have_no_value():
    rated = Rated(
        3,
        6,
        user=np.array([0, 0, 1, 1]),
        item=np.array([0, 1, 2, 3]),
        rating=np.array([5.0, 3.0, 4.0, 5.0]),
        part=np.array([TRAIN, TEST, TRAIN, TEST]),
    )
    found = rated.measure(lambda users: np.zeros((len(users), 6)))
    assert "validation_precision@10" not in found
    assert np.isnan(found["ndcg_rated@10"]).tolist() == [False, False, True]
    assert np.isnan(found["precision@10"]).tolist() == [True, False, True]
    assert found["ndcg_rated@10"][0] == 1  # one item has one order
    assert figures(found)["rmse"] == pytest.approx(math.sqrt((9 + 25) / 2))


def test_figures_are_means_over_users_and_errors_over_ratings():
    measured = {
        "precision@10": np.array([0.1, 0.3, math.nan]),
        "recall@10": np.array([0.5, 0.1, math.nan]),
        "squared_error": np.array([8.0, 1.0, math.nan]),
        "absolute_error": np.array([4.0, 1.0, math.nan]),
        "ratings": np.array([2.0, 1.0, math.nan]),
        "validation_precision@10": np.array([0.0, 0.0, 0.0]),
        "validation_recall@10": np.array([0.0, 0.0, 0.0]),
    }
    found = figures(measured)
    assert set(found) == {
        "precision@10",
        "recall@10",
        "f1@10",
        "rmse",
        "mae",
        "validation_precision@10",
        "validation_recall@10",
        "validation_f1@10",
    }
    # (53): of the means 0.2 and 0.3, which is not the mean of 1/6 and 0.15.
    assert found["f1@10"] == pytest.approx(2 * 0.2 * 0.3 / 0.5)
    assert found["rmse"] == pytest.approx(math.sqrt(3))
    assert found["mae"] == pytest.approx(5 / 3)
    assert found["validation_f1@10"] == 0


def test_errors_over_training_ratings_are_measured_only_where_they_are_asked_for():
    scores, data = some_scores(), holdout()
    found = holdout(training=True).measure(scores.__getitem__)
    own = data.part == TRAIN
    missed = scores[data.user[own], data.item[own]].astype(np.float64) - data.rating[own]
    assert figures(found)["train_rmse"] == pytest.approx(math.sqrt((missed**2).mean()))
    assert figures(found)["train_mae"] == pytest.approx(np.abs(missed).mean())
    plain = data.measure(scores.__getitem__)
    assert not any(name.startswith("train_") for name in plain)
    for name, values in plain.items():
        np.testing.assert_array_equal(found[name], values)


def test_some_users_alone_have_the_values_that_they_have_among_all():
    scores = some_scores()
    every = holdout().measure(scores.__getitem__)
    some = holdout().measure(scores.__getitem__, np.array([7, 3]))
    for name, values in some.items():
        np.testing.assert_array_equal(values[[3, 7]], every[name][[3, 7]])
        assert np.isnan(np.delete(values, [3, 7])).all()


def test_a_model_that_diverged_is_named():
    def diverged(users):
        return np.full((len(users), len(DATA.items)), np.nan)

    with pytest.raises(RunError, match="not a finite number") as caught:
        holdout().measure(diverged)
    assert "lower learning rate" in str(caught.value.hint)


def test_scores_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="scores have shape"):
        holdout().measure(lambda users: np.zeros((len(users), 3)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"n_items": 5}, "item holds"),
        ({"part": SPLIT.part[1:]}, "shapes"),
        ({"among": np.ones(3, bool)}, "among has shape"),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        holdout(**wrong)


@pytest.mark.parametrize(
    ("user", "k", "message"), [(np.zeros(2, int), 10, "shape"), (np.zeros(3, int), 0, "k is 0")]
)
def test_graded_ndcg_refuses_what_does_not_fit(user, k, message):
    with pytest.raises(ValueError, match=message):
        graded_ndcg(user, np.zeros(3), np.ones(3), 1, k)


def test_a_damped_mean_is_drawn_towards_the_mean_of_all_ratings():
    item = np.array([0, 0, 1], np.int32)
    found = damped_mean(item, np.array([5.0, 4.0, 1.0]), 3, strength=2)
    overall = 10 / 3
    np.testing.assert_allclose(found, [(9 + 2 * overall) / 4, (1 + 2 * overall) / 3, overall], rtol=1e-6)
    with pytest.raises(ValueError, match="strength is 0"):
        damped_mean(item, np.ones(3), 3, strength=0)


def test_a_popular_rated_item_is_worth_ordering_by_its_mean():
    train = SPLIT.part != TEST
    means = damped_mean(DATA.item[train], DATA.rating[train], len(DATA.items))
    by_mean = holdout().measure(lambda users: np.broadcast_to(means, (len(users), len(means))))
    by_chance = holdout().measure(some_scores(5).__getitem__)
    assert np.nanmean(by_mean["ndcg_rated@10"]) > np.nanmean(by_chance["ndcg_rated@10"])
    assert (SPLIT.part == VALIDATION).any()
