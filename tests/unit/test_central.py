"""Central models: each against an independent formula, on small data with every odd case in it."""

from __future__ import annotations

import dataclasses
import math
from importlib import util
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, DataError, PreflightError
from coterie.evaluation.central import (
    PREDICTORS,
    RANKERS,
    Als,
    BiasedMf,
    Bpr,
    Central,
    Ease,
    GlobalMean,
    Ials,
    Idcf,
    Interactions,
    ItemKnn,
    ItemMean,
    MostPopular,
    Random,
    RidgeFoldIn,
    UserItemBiases,
    UserKnn,
)
from coterie.evaluation.holdout import TEST, TRAIN, VALIDATION
from coterie.evaluation.leave_one_out import LeaveOneOut
from coterie.evaluation.search import Choices

USERS, ITEMS = 14, 11
NEEDS_IMPLICIT = pytest.mark.skipif(util.find_spec("implicit") is None, reason="needs the package implicit")


def interactions(seed: int = 0, ratings: bool = False) -> Interactions:
    """One user without interactions, one with a single one, one that has every item; one item that nobody has."""
    rng = np.random.default_rng(seed)
    table = rng.random((USERS, ITEMS)) < 0.4
    table[0], table[1], table[2] = False, False, True
    table[1, 3] = True
    table[:, ITEMS - 1] = False
    table[2, : ITEMS - 1] = True
    user, item = np.nonzero(table)
    mixed = rng.permutation(len(user))
    rating = rng.integers(1, 6, len(user)).astype(np.float32) if ratings else None
    return Interactions(USERS, ITEMS, user[mixed], item[mixed], rating)


def matrix(data: Interactions) -> np.ndarray:
    table = np.zeros((data.n_users, data.n_items))
    table[data.user, data.item] = 1
    return table


def scores(model: Central, data: Interactions) -> np.ndarray:
    return model.fit(data).score(np.arange(data.n_users))


INDUCTIVE = (RidgeFoldIn, Idcf)

ALL = [
    *(
        pytest.param(one, marks=NEEDS_IMPLICIT if one in (Als, Bpr) else ())
        for one in (*RANKERS, *PREDICTORS, *INDUCTIVE)
    )
]


@pytest.mark.parametrize("kind", ALL)
def test_a_model_scores_the_same_items_alike_and_the_same_seed_gives_the_same_scores(
    kind: type[Central],
) -> None:
    data = interactions(ratings=True)
    model = kind(seed=3).fit(data)
    every = model.score(np.arange(USERS))
    assert (every.dtype, every.shape) == (np.float32, (USERS, ITEMS))
    assert np.isfinite(every).all()
    users, items = np.array([5, 2]), np.array([[4, 1, 9], [0, 0, 10]])
    assert (model.score(users, items) == every[users[:, None], items]).all()
    assert (kind(seed=3).fit(data).score(np.arange(USERS)) == every).all()


@pytest.mark.parametrize("kind", ALL)
def test_recommendations_leave_out_what_the_user_has(kind: type[Central]) -> None:
    data = interactions(ratings=True)
    model = kind().fit(data)
    for user in range(USERS):
        found = model.recommend(user, 4)
        unseen = [item for item in range(ITEMS) if not matrix(data)[user, item]]
        assert set(found) <= set(unseen)
        assert len(found) == min(4, len(unseen))
        own = model.score(np.array([user]))[0]
        assert all(own[a] > own[b] or (own[a] == own[b] and a < b) for a, b in pairwise(found))
    with pytest.raises(ValueError, match="k is 0; expected at least 1"):
        model.recommend(0, 0)
    with pytest.raises(ValueError, match=f"user is {USERS}; expected 0 to {USERS - 1}"):
        model.recommend(USERS, 1)


def test_a_user_who_has_every_item_is_recommended_nothing() -> None:
    data = Interactions(2, 3, np.array([0, 0, 0, 1]), np.array([0, 1, 2, 1]))
    assert len(MostPopular().fit(data).recommend(0, 5)) == 0
    assert MostPopular().fit(data).recommend(1, 5).tolist() == [0, 2]


def test_popularity_counts_and_chance_differs_by_its_seed() -> None:
    data = interactions()
    assert (scores(MostPopular(), data) == matrix(data).sum(axis=0)).all()
    assert (scores(Random(seed=1), data) != scores(Random(seed=2), data)).any()


def naive_similarity(table: np.ndarray, k: int, shrink: float) -> np.ndarray:
    """Similarities of columns, of which row j of the result keeps the k nearest of column j."""
    n = table.shape[1]
    kept = np.zeros((n, n))
    for one in range(n):
        found = []
        for other in range(n):
            shared = sum(table[row, one] * table[row, other] for row in range(len(table)))
            if other != one and shared:
                size = math.sqrt(sum(table[:, one]) * sum(table[:, other]))
                found.append((-shared / (size + shrink), other))
        for negative, other in sorted(found)[:k]:
            kept[one, other] = -negative
    return kept


@pytest.mark.parametrize("k", [1, 3, 50])
@pytest.mark.parametrize("shrink", [0.0, 7.5])
def test_neighbours_are_those_of_a_naive_loop(k: int, shrink: float) -> None:
    data = interactions(1)
    table = matrix(data)
    of_items = np.einsum("uj,ij->ui", table, naive_similarity(table, k, shrink))
    assert scores(ItemKnn(k, shrink), data) == pytest.approx(of_items, abs=1e-6)
    of_users = naive_similarity(table.T, k, shrink) @ table
    assert scores(UserKnn(k, shrink), data) == pytest.approx(of_users, abs=1e-6)


def test_ease_solves_the_constrained_least_squares_of_every_column() -> None:
    data = interactions(2)
    table, ridge = matrix(data), 1.7
    model = Ease(ridge).fit(data)
    for column in range(ITEMS):
        # The column's own weight is 0: least squares over all other items, with the ridge as further rows.
        others = [item for item in range(ITEMS) if item != column]
        design = np.vstack([table[:, others], math.sqrt(ridge) * np.eye(ITEMS - 1)])
        target = np.concatenate([table[:, column], np.zeros(ITEMS - 1)])
        expected = np.linalg.lstsq(design, target, rcond=None)[0]
        assert model.weights[others, column] == pytest.approx(expected, abs=1e-9)
        assert model.weights[column, column] == 0
    assert model.score(np.arange(USERS)) == pytest.approx(table @ model.weights, abs=1e-6)


def test_ease_takes_the_type_that_fits_and_refuses_a_catalogue_that_fits_none() -> None:
    data = interactions(2)
    exact = 3 * ITEMS**2 * 8 / 2**20
    assert Ease(memory_mb=exact).fit(data).weights.dtype == np.float64
    assert Ease(memory_mb=exact / 2).fit(data).weights.dtype == np.float32
    assert Ease.objection(ITEMS) == ""
    assert "EASE on 100000 items needs" in Ease.objection(100_000)
    with pytest.raises(PreflightError, match=r"EASE on 11 items needs 1 MB .* expected at most 0\.0001 MB"):
        Ease(memory_mb=1e-4).fit(data)


def ials_loss(model: Ials, table: np.ndarray, users: np.ndarray, items: np.ndarray) -> float:
    """The loss as it is written: over observed pairs, over all pairs, and the scaled ridge."""
    loss = 0.0
    for u in range(USERS):
        for i in range(ITEMS):
            predicted = float(users[u] @ items[i])
            loss += model.alpha0 * predicted**2 + (table[u, i] * (predicted - 1) ** 2)
    for factors, counts, others in ((users, table.sum(axis=1), ITEMS), (items, table.sum(axis=0), USERS)):
        for row, count in zip(factors, counts, strict=True):
            loss += model.ridge * (count + model.alpha0 * others) ** model.nu * float(row @ row)
    return loss


@pytest.mark.parametrize("nu", [0.0, 0.5, 1.0])
def test_a_half_step_of_ials_is_where_the_gradient_is_zero(nu: float) -> None:
    data = interactions(4)
    table = matrix(data)
    model = Ials(factors=3, ridge=0.05, alpha0=0.3, nu=nu, epochs=2).fit(data)
    users, items = model.user_factors, model.item_factors
    assert (users[0] == 0).all()  # the user without interactions
    step = 1e-4
    for u in range(1, USERS):
        for f in range(3):
            up, down = users.copy(), users.copy()
            up[u, f] += step
            down[u, f] -= step
            # The loss is quadratic in a user's factors, so the central difference is exact.
            slope = (ials_loss(model, table, up, items) - ials_loss(model, table, down, items)) / (2 * step)
            assert abs(slope) < 1e-7
    before, after = (Ials(3, 0.05, 0.3, nu, epochs=n).fit(data) for n in (1, 8))
    assert ials_loss(model, table, after.user_factors, after.item_factors) < ials_loss(
        model, table, before.user_factors, before.item_factors
    )


def test_means_and_biases_are_their_closed_forms() -> None:
    data = interactions(5, ratings=True)
    rating = data.rated()
    overall = rating.mean()
    assert scores(GlobalMean(), data) == pytest.approx(np.full((USERS, ITEMS), overall), abs=1e-6)
    item = np.zeros(ITEMS)
    for i in range(ITEMS):
        own = rating[data.item == i]
        item[i] = (own.sum() + 2.0 * overall) / (len(own) + 2.0)
    assert scores(ItemMean(2.0), data) == pytest.approx(np.broadcast_to(item, (USERS, ITEMS)), abs=1e-6)
    user = np.zeros(USERS)
    for u in range(USERS):
        mine = data.user == u
        user[u] = (rating[mine] - item[data.item[mine]]).sum() / (mine.sum() + 3.0)
    assert scores(UserItemBiases(2.0, 3.0), data) == pytest.approx(user[:, None] + item, abs=1e-5)


def test_a_half_step_of_biased_factors_is_where_the_gradient_is_zero() -> None:
    data = interactions(6, ratings=True)
    model = BiasedMf(factors=2, ridge=0.2, epochs=3).fit(data)
    rating, users, items = data.rated(), model.users, model.items
    for i in range(ITEMS):
        mine = data.item == i
        own, facing = items[i], users[data.user[mine]]
        error = rating[mine] - model.mean - own[0] - facing[:, 0] - facing[:, 1:] @ own[1:]
        design = np.column_stack([np.ones(mine.sum()), facing[:, 1:]])
        assert design.T @ error - 0.2 * mine.sum() * own == pytest.approx(np.zeros(3), abs=1e-9)
    assert (items[ITEMS - 1] == 0).all()  # the item that nobody rated
    assert (users[0] == 0).all()
    predicted = model.score(np.arange(USERS))
    assert predicted[0, ITEMS - 1] == pytest.approx(model.mean)


def test_a_user_who_is_folded_in_has_the_ridge_s_least_loss_at_the_items_of_biased_mf() -> None:
    data = interactions(6, ratings=True)
    fit = {"factors": 2, "ridge": 0.2, "epochs": 3}
    model, plain = RidgeFoldIn(**fit, own_ridge=1.5).fit(data), BiasedMf(**fit).fit(data)
    assert (model.items == plain.items).all()
    rating = data.rated()
    for u in range(USERS):
        mine = data.user == u
        own, facing = model.users[u], model.items[data.item[mine]]
        error = rating[mine] - model.mean - own[0] - facing[:, 0] - facing[:, 1:] @ own[1:]
        design = np.column_stack([np.ones(mine.sum()), facing[:, 1:]])
        assert design.T @ error - 1.5 * own == pytest.approx(np.zeros(3), abs=1e-9)
    assert (model.users[0] == 0).all()


def two_tastes() -> Interactions:
    """Forty users of two kinds, who like either the first half of the items or the second; a tenth is unrated."""
    rng = np.random.default_rng(4)
    user, item = np.nonzero(rng.random((40, 20)) < 0.9)
    liked = (user < 20) == (item < 10)
    return Interactions(40, 20, user, item, np.where(liked, 5.0, 1.0).astype(np.float32))


def test_idcf_mixes_key_users_and_tells_users_by_what_they_like() -> None:
    data = two_tastes()
    key_users = BiasedMf(factors=2).fit(data).users[:, 1:]
    model = Idcf(factors=2, keys=40).fit(data)
    mixed = model.users[:, 1:]
    assert (mixed.min(axis=0) >= key_users.min(axis=0) - 1e-12).all()
    assert (mixed.max(axis=0) <= key_users.max(axis=0) + 1e-12).all()
    table = model.score(np.arange(40))
    assert table[:20, :10].min() > table[:20, 10:].max()
    assert table[20:, 10:].min() > table[20:, :10].max()


def test_idcf_learns_its_attention_by_steps() -> None:
    data = two_tastes()

    def error(steps: int) -> float:
        table = Idcf(factors=2, keys=10, steps=steps).fit(data).score(np.arange(40))
        return float(np.mean((table[data.user, data.item] - data.rated()) ** 2))

    assert error(100) < 0.8 * error(0)


def test_where_all_ratings_are_equal_every_model_predicts_them() -> None:
    data = dataclasses.replace(interactions(7), rating=np.full(len(interactions(7)), 4.0, np.float32))
    for kind in (*PREDICTORS, *INDUCTIVE):
        assert scores(kind(), data) == pytest.approx(np.full((USERS, ITEMS), 4.0), abs=1e-5)


@NEEDS_IMPLICIT
def test_factors_of_implicit_rank_what_users_have_first() -> None:
    # Two groups of users with items of their own.
    table = np.kron(np.eye(2), np.ones((10, 5)))
    table[np.arange(20), np.tile(np.arange(10), 2) % 5 + np.repeat([0, 5], 10)] = 0
    data = Interactions(20, 10, *np.nonzero(table))
    for kind in (Als, Bpr, Ials, Ease, ItemKnn, UserKnn):
        found = kind().fit(data).score(np.arange(20))
        own = [found[u, (u // 10) * 5 : (u // 10) * 5 + 5].mean() for u in range(20)]
        other = [found[u, (1 - u // 10) * 5 : (1 - u // 10) * 5 + 5].mean() for u in range(20)]
        assert np.mean(own) > np.mean(other)


@pytest.mark.parametrize("kind", PREDICTORS)
def test_a_model_of_ratings_asks_for_ratings(kind: type[Central]) -> None:
    with pytest.raises(DataError, match=f"{kind.label}: these interactions have no ratings"):
        kind().fit(interactions())


@pytest.mark.parametrize("kind", ALL)
def test_one_interaction_is_enough(kind: type[Central]) -> None:
    data = Interactions(2, 3, np.array([1]), np.array([2]), np.array([3.0]))
    assert np.isfinite(kind().fit(data).score(np.arange(2))).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_users": 0}, "0 users and 3 items"),
        ({"user": np.array([0, 2])}, "user holds 0 to 2; expected 0 to 1"),
        ({"item": np.array([-1, 0])}, "item holds -1 to 0"),
        ({"item": np.array([1])}, "expected one shape"),
        ({"user": np.array([1, 1]), "item": np.array([2, 2])}, "1 interactions repeat a user and an item"),
        ({"rating": np.array([1.0, np.nan])}, "a rating is not a finite number"),
    ],
)
def test_interactions_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    right = {"n_users": 2, "n_items": 3, "user": np.array([0, 1]), "item": np.array([0, 2])}
    Interactions(**right)
    with pytest.raises(DataError, match=message):
        Interactions(**{**right, **given})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Ease, {"ridge": 0.0}, r"ease-central: ridge is 0\.0; expected more than 0"),
        (Ease, {"ridge": math.nan}, "ease-central: ridge is nan; expected a finite number"),
        (Ease, {"ridge": "much"}, "ridge is 'much'; expected a finite number"),
        (ItemKnn, {"neighbours": 0}, "item-knn: neighbours is 0; expected at least 1"),
        (ItemKnn, {"neighbours": 2.5}, r"neighbours is 2\.5; expected a whole number"),
        (ItemKnn, {"neighbours": True}, "neighbours is True; expected a whole number"),
        (Ials, {"facters": 3}, r"ials-central has no hyper-parameter 'facters'.*'factors'"),
        (MostPopular, {"ridge": 1}, "popularity has no hyper-parameter 'ridge'; it has none"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(
    kind: type[Central], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind.of(options, seed=0)


def test_every_value_that_tuning_may_draw_is_allowed() -> None:
    for kind in (*RANKERS, *PREDICTORS):
        for name, space in kind.space().items():
            ends = space.values if isinstance(space, Choices) else (space.low, space.high)
            for value in ends:
                assert getattr(kind.of({name: value}, seed=0), name) == value


# --- the protocol that judges all of them ----------------------------------------------------------------------


def loo(part: list[int], negatives: list[list[int]], n_items: int = 5) -> LeaveOneOut:
    """One user with items 0, 1, ... in the parts given."""
    n = len(part)
    return LeaveOneOut(
        n_items, np.zeros(n, int), np.arange(n), np.array(part), np.array(negatives, np.int32).reshape(1, -1)
    )


def test_equal_scores_count_against_the_model() -> None:
    held = loo([TRAIN, VALIDATION, TEST], [[3, 4]])
    found = dataclasses.replace(held, k=2).measure(lambda u, i: np.zeros(i.shape), lambda u: np.zeros((1, 5)))
    assert (found["hit_ratio@2"][0], found["hit_ratio_all@2"][0]) == (0, 0)


def test_a_user_without_a_test_item_has_no_value_and_one_without_candidates_hits() -> None:
    data = Interactions(1, 5, np.array([0]), np.array([0]))
    model = MostPopular().fit(data)
    found = loo([TRAIN], [[3, 4]]).measure(model.score, model.score)
    assert all(np.isnan(values).all() for values in found.values())
    # Every other item is seen or absent: the test item stands alone.
    found = loo([TRAIN, TRAIN, TRAIN, VALIDATION, TEST], [[-1]]).measure(model.score, model.score)
    assert (found["hit_ratio@10"][0], found["hit_ratio_all@10"][0]) == (1, 1)


# --- people who were not in training -------------------------------------------------------------------------------

FOLDING = [one for one in (*RANKERS, *PREDICTORS) if one.folds_in]
EXACT = [Ease, ItemKnn, MostPopular, Ials, GlobalMean, ItemMean, UserItemBiases]
"""Models whose users are scored by what is learned of items alone: the last step of training is theirs."""


def learned(kind: type[Central], data: Interactions) -> tuple[Central, Central]:
    """Return a fitted model, and one that has only its arrays."""
    given = {"factors": 5} if "factors" in kind.defaults() else {}
    fitted = kind.of(given, 3).fit(data)
    copied = {name: array.copy() for name, array in fitted.arrays().items()}
    return fitted, kind.of(given, 3).with_arrays(copied)


@pytest.mark.parametrize("kind", EXACT)
def test_users_of_the_training_have_the_same_scores_as_people_with_their_histories(
    kind: type[Central],
) -> None:
    data = interactions(ratings=kind in PREDICTORS)
    fitted, kept = learned(kind, data)
    np.testing.assert_allclose(kept.score_people(data), fitted.score(np.arange(USERS)), rtol=1e-6)


@pytest.mark.parametrize("kind", FOLDING)
def test_a_person_has_the_same_scores_whoever_is_scored_beside_it(kind: type[Central]) -> None:
    if kind is Als and util.find_spec("implicit") is None:
        pytest.skip("needs the package implicit")
    data = interactions(ratings=kind in PREDICTORS)
    _, kept = learned(kind, data)
    own = data.user == 5
    alone = Interactions(
        1,
        ITEMS,
        np.zeros(own.sum(), np.int64),
        data.item[own],
        None if data.rating is None else data.rating[own],
    )
    scores = kept.score_people(alone)
    assert scores.dtype == np.float32
    if kind is not Random:  # everybody is given the same order
        np.testing.assert_allclose(scores[0], kept.score_people(data)[5], rtol=1e-5, atol=1e-7)
    assert np.isfinite(scores).all()


@NEEDS_IMPLICIT
@pytest.mark.parametrize("alpha", [1.0, 8.0])
def test_people_are_folded_into_als_as_implicit_recalculates_them(alpha: float) -> None:
    from implicit.cpu.als import AlternatingLeastSquares
    from scipy.sparse import csr_matrix

    data = interactions()
    fitted = Als(factors=4, alpha=alpha, regularization=0.3).fit(data)
    theirs = AlternatingLeastSquares(
        factors=4, alpha=alpha, regularization=0.3, dtype=np.float64, num_threads=1
    )
    theirs.item_factors = np.ascontiguousarray(fitted.item_factors)
    rows = csr_matrix((np.ones(len(data), np.float32), (data.user, data.item)), shape=(USERS, ITEMS))
    own = theirs.recalculate_user(np.arange(USERS), rows)
    np.testing.assert_allclose(
        fitted.score_people(data), (own @ fitted.item_factors.T).astype(np.float32), rtol=1e-4, atol=1e-6
    )


def test_a_person_s_biases_and_factors_are_where_the_loss_of_biased_factors_is_least() -> None:
    data = interactions(ratings=True)
    fitted = BiasedMf(factors=3).fit(data)
    assert data.rating is not None
    own = data.user == 5
    item, rating = data.item[own], data.rating[own].astype(np.float64)
    alone = Interactions(1, ITEMS, np.zeros(len(item), np.int64), item, rating)
    design = np.column_stack([np.ones(len(item)), fitted.items[item, 1:]])
    rest = rating - fitted.mean - fitted.items[item, 0]
    ridge = np.sqrt(fitted.ridge * len(item)) * np.eye(4)
    expected = np.linalg.lstsq(np.vstack([design, ridge]), np.append(rest, np.zeros(4)), rcond=None)[0]
    np.testing.assert_allclose(
        fitted.score_people(alone)[0],
        fitted.mean + fitted.items[:, 0] + expected[0] + fitted.items[:, 1:] @ expected[1:],
        rtol=1e-5,
    )


@NEEDS_IMPLICIT
@pytest.mark.parametrize("kind", [Ials, Als, Bpr])
def test_users_factors_give_their_scores(kind: type[Central]) -> None:
    fitted, kept = learned(kind, interactions())
    users = np.array([4, 2])
    vectors = fitted.user_vectors(users)
    assert vectors.shape == (2, kept.vector_length)
    np.testing.assert_allclose(kept.score_vectors(vectors), fitted.score(users), rtol=1e-5, atol=1e-7)


def test_a_model_that_scores_by_its_users_gives_no_arrays() -> None:
    fitted = UserKnn().fit(interactions())
    with pytest.raises(ConfigError, match="serves nobody but the users of its training"):
        fitted.arrays()
    with pytest.raises(ConfigError, match="no recommendations for people who were not in training"):
        fitted.score_people(interactions())
    with pytest.raises(ConfigError, match="have no vector"):
        fitted.score_vectors(np.zeros((1, 2)))
    with pytest.raises(DataError, match="arrays counts; expected weights"):
        Ease().with_arrays({"counts": np.zeros(3)})
