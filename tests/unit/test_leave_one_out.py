import dataclasses
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import leave_last_out, spread_users
from coterie.data.synthetic import SyntheticSpec, generate
from coterie.errors import RunError
from coterie.evaluation import (
    LeaveOneOut,
    als,
    from_factors,
    from_table,
    headline,
    popularity,
    sample_negatives,
)
from coterie.evaluation.holdout import TEST, TRAIN, VALIDATION
from coterie.evaluation.leave_one_out import NO_ITEM, RANKED, as_if_own_kept, metric_names

from ..other_metrics import ranx

DATA = generate(SyntheticSpec(users=40, items=150, interactions=900))
PART = leave_last_out(DATA).part


def sampled(k: int = 10, count: int = 100, seed: int = 0) -> LeaveOneOut:
    return LeaveOneOut.sampled(
        DATA.users, DATA.items, DATA.user, DATA.item, PART, seed=seed, count=count, k=k
    )


@st.composite
def holdouts(draw: st.DrawFn) -> tuple[LeaveOneOut, np.ndarray]:
    """Draw users with at most one item in each held-out part, negatives with gaps, and scores with ties."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_users, n_items, width = draw(st.integers(1, 5)), draw(st.integers(2, 14)), draw(st.integers(1, 6))
    rows: list[tuple[int, int, int]] = []
    negatives = np.full((n_users, width), NO_ITEM, np.int32)
    for user in range(n_users):
        items = rng.permutation(n_items)
        seen = items[: rng.integers(0, n_items + 1)]
        parts = np.zeros(len(seen), int)
        parts[:2] = rng.permutation([TEST, VALIDATION])[: len(seen)] if rng.random() < 0.7 else TRAIN
        if len(seen) and rng.random() < 0.2:
            parts[0] = TRAIN
        rows += [(user, int(item), int(part)) for item, part in zip(seen, parts, strict=True)]
        unseen = items[len(seen) :][:width]
        negatives[user, : len(unseen)] = unseen
        if len(seen) and len(unseen) and rng.random() < 0.2:
            negatives[user, 0] = seen[0]  # as in the published negatives: the held-out item among its own
    order = rng.permutation(len(rows))
    columns = np.array(rows, np.int64).reshape(-1, 3)[order]
    scores = rng.integers(-3, 4, (n_users, n_items)) / 4
    k = draw(st.integers(1, 5))
    return LeaveOneOut(n_items, columns[:, 0], columns[:, 1], columns[:, 2], negatives, k), scores


def plainly(holdout: LeaveOneOut, scores: np.ndarray, user: int) -> dict[str, float]:
    """Measure one user by the definitions, with lists."""
    own = {
        part: [
            int(i)
            for u, i, p in zip(holdout.user, holdout.item, holdout.part, strict=True)
            if (u, p) == (user, part)
        ]
        for part in (TRAIN, VALIDATION, TEST)
    }
    seen = {item for items in own.values() for item in items}
    drawn = [int(item) for item in holdout.negatives[user] if item != NO_ITEM]
    found = {}
    for prefix, held in (("", own[TEST]), ("validation_", own[VALIDATION])):
        among = drawn if not prefix else [item for item in drawn if item not in own[TEST] + own[VALIDATION]]
        unseen = [item for item in range(holdout.n_items) if item not in seen]
        for ranking, candidates in (("", among), ("_all", unseen)):
            hit = gain = math.nan
            if held:
                rank = 1 + sum(scores[user, item] >= scores[user, held[0]] for item in candidates)
                hit = float(rank <= holdout.k)
                gain = hit / math.log2(rank + 1)
            found[f"{prefix}hit_ratio{ranking}@{holdout.k}"] = hit
            found[f"{prefix}ndcg{ranking}@{holdout.k}"] = gain
    return found


@settings(max_examples=200)
@given(holdouts())
def test_every_figure_is_what_its_definition_says_user_by_user(case: tuple[LeaveOneOut, np.ndarray]) -> None:
    holdout, scores = case
    measured = holdout.measure(*from_table(scores))
    assert tuple(measured) == metric_names(holdout.k)
    for user in range(holdout.n_users):
        expected = plainly(holdout, scores, user)
        assert measured.keys() == expected.keys()
        for name, value in expected.items():
            assert measured[name][user] == pytest.approx(value, nan_ok=True), (name, user)


@given(holdouts(), st.randoms(use_true_random=False))
def test_negatives_that_are_listed_with_the_interactions_give_the_same_figures(
    case: tuple[LeaveOneOut, np.ndarray], random: Random
) -> None:
    held, scores = case
    rows = list(zip(held.user, held.item, held.part, strict=True))
    rows += [
        (user, item, RANKED) for user, row in enumerate(held.negatives) for item in row if item != NO_ITEM
    ]
    random.shuffle(rows)
    user, item, part = np.array(rows, np.int64).reshape(-1, 3).T
    listed = LeaveOneOut.ranked(held.n_users, held.n_items, user, item, part, held.k)
    expected = held.measure(*from_table(scores))
    for name, values in listed.measure(*from_table(scores)).items():
        np.testing.assert_array_equal(values, expected[name])


def test_the_figures_equal_those_of_an_independent_library() -> None:
    library = ranx()
    holdout = sampled()
    scores = np.random.default_rng(3).permutation(40 * 150).reshape(40, 150).astype(np.float32)
    measured = headline(holdout.measure(*from_table(scores)))
    seen = [set(DATA.item[DATA.user == user].tolist()) for user in range(40)]
    for prefix, held in (("", holdout.test), ("validation_", holdout.validation)):
        relevant = library.Qrels({str(u): {str(held[u]): 1} for u in range(40)})
        among = {
            "": [[*holdout.negatives[u].tolist(), held[u]] for u in range(40)],
            "_all": [[*(i for i in range(150) if i not in seen[u]), held[u]] for u in range(40)],
        }
        for ranking, candidates in among.items():
            run = library.Run(
                {str(u): {str(i): float(scores[u, i]) for i in candidates[u]} for u in range(40)}
            )
            theirs = library.evaluate(relevant, run, ["hit_rate@10", "ndcg@10"])
            assert measured[f"{prefix}hit_ratio{ranking}@10"] == pytest.approx(theirs["hit_rate@10"])
            assert measured[f"{prefix}ndcg{ranking}@10"] == pytest.approx(theirs["ndcg@10"])


def test_equal_scores_count_against_the_model() -> None:
    measured = sampled().measure(*from_table(np.zeros((40, 150), np.float32)))
    assert all(not values.any() for values in measured.values())


def test_negatives_are_distinct_items_that_the_user_never_interacted_with() -> None:
    negatives = sample_negatives(DATA.users, DATA.items, DATA.user, DATA.item, seed=1, count=50)
    for user in range(40):
        assert len(set(negatives[user].tolist()) - {NO_ITEM}) == 50
        assert not set(negatives[user].tolist()) & set(DATA.item[DATA.user == user].tolist())


def test_negatives_do_not_depend_on_hosts_or_on_the_order_of_users_items_and_rows() -> None:
    whole = sample_negatives(DATA.users, DATA.items, DATA.user, DATA.item, seed=1, count=50)
    expected = {user: {DATA.items[i] for i in whole[n]} for n, user in enumerate(DATA.users)}
    rng = np.random.default_rng(0)
    host = spread_users(40, 3, seed=2)
    for one in range(3):
        mine = rng.permutation(np.flatnonzero(host == one))
        new_user = np.full(40, -1)
        new_user[mine] = np.arange(len(mine))
        numbers = rng.permutation(150)  # new number of each item
        items = [""] * 150
        for old, new in enumerate(numbers):
            items[new] = DATA.items[old]
        rows = rng.permutation(np.flatnonzero(host[DATA.user] == one))
        users = [DATA.users[n] for n in mine]
        part = sample_negatives(
            users, items, new_user[DATA.user[rows]], numbers[DATA.item[rows]], seed=1, count=50
        )
        for position, user in enumerate(users):
            assert {items[i] for i in part[position]} == expected[user]


def test_negatives_follow_the_seed_and_differ_between_users() -> None:
    one = sample_negatives(DATA.users, DATA.items, DATA.user, DATA.item, seed=1, count=20)
    assert not np.array_equal(
        one, sample_negatives(DATA.users, DATA.items, DATA.user, DATA.item, seed=2, count=20)
    )
    none = np.array([], np.int32)
    fresh = sample_negatives(["a", "b"], DATA.items, none, none, seed=1, count=20)
    assert set(fresh[0].tolist()) != set(fresh[1].tolist())


def test_every_unseen_item_is_drawn_equally_often() -> None:
    none = np.array([], np.int32)
    drawn = sample_negatives(
        [f"u{n}" for n in range(3000)], [f"i{n}" for n in range(20)], none, none, seed=0, count=5
    )
    counts = np.bincount(drawn.ravel(), minlength=20)
    # 3000 draws of 5 among 20: 750 expected, standard deviation 24.
    assert abs(counts - 750).max() < 100


def test_a_user_with_few_unseen_items_is_ranked_among_all_of_them() -> None:
    user, item = np.zeros(3, int), np.array([0, 1, 2])
    holdout = LeaveOneOut.sampled(["u"], [f"i{n}" for n in range(5)], user, item, np.array([0, 1, 2]), seed=0)
    assert sorted(holdout.negatives[0].tolist()) == [NO_ITEM] * 98 + [3, 4]
    measured = holdout.measure(*from_table(np.array([[9.0, 8.0, 0.5, 1.0, 0.0]])))
    assert measured["ndcg@10"][0] == pytest.approx(1 / math.log2(3))


def test_users_without_a_held_out_item_are_not_asked_for_and_have_no_figure() -> None:
    part = PART.copy()
    part[DATA.user == 3] = TRAIN
    asked: list[int] = []

    def score(users: np.ndarray, items: np.ndarray) -> np.ndarray:
        asked.extend(users.tolist())
        return np.zeros(items.shape)

    holdout = LeaveOneOut.sampled(DATA.users, DATA.items, DATA.user, DATA.item, part, seed=0)
    measured = holdout.measure(score)
    assert asked == [user for user in range(40) if user != 3]
    assert tuple(measured) == metric_names(everything=False)
    assert np.flatnonzero(np.isnan(measured["hit_ratio@10"])).tolist() == [3]


def test_a_host_whose_users_have_nothing_to_measure_has_every_key_without_a_value() -> None:
    holdout = LeaveOneOut(4, np.array([0]), np.array([1]), np.array([TRAIN]), np.array([[2, 3]], np.int32))
    measured = holdout.measure(*from_table(np.zeros((1, 4))))
    assert tuple(measured) == metric_names()
    assert all(np.isnan(values).all() for values in measured.values())


def test_it_does_not_matter_how_many_users_are_scored_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(4).random((40, 150))
    whole = sampled().measure(*from_table(scores))
    monkeypatch.setattr("coterie.evaluation.leave_one_out._USERS_AT_ONCE", 7)
    for name, values in sampled().measure(*from_table(scores)).items():
        np.testing.assert_array_equal(values, whole[name])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_is_refused_unless_nobody_needs_it(value: float) -> None:
    holdout = sampled()
    scores = np.zeros((40, 150))
    trained = DATA.item[(DATA.user == 5) & (PART == TRAIN)][0]
    scores[5, trained] = value
    holdout.measure(*from_table(scores))
    scores[5, holdout.test[5]] = value
    with pytest.raises(RunError, match="expected a finite one"):
        holdout.measure(*from_table(scores))
    with pytest.raises(RunError, match="expected a finite one"):
        holdout.measure(from_table(np.zeros((40, 150)))[0], from_table(scores)[1])


def test_scores_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(40, 3\)"):
        sampled().measure(lambda users, items: np.zeros((len(users), 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item": np.zeros(3, int)}, "expected one shape"),
        ({"negatives": np.zeros((1, 2), np.int32)}, "a row for each user"),
        ({"n_items": 20}, "expected less than 20"),
        ({"part": np.full(len(PART), TEST)}, "two held-out items"),
        ({"k": 0}, "k is 0"),
    ],
)
def test_a_hold_out_that_does_not_fit_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(sampled(), **change)


def test_fewer_than_one_negative_is_refused() -> None:
    with pytest.raises(ValueError, match="count is 0"):
        sampled(count=0)


def test_factors_score_as_their_table_does() -> None:
    rng = np.random.default_rng(6)
    users, items = rng.normal(size=(40, 4)), rng.normal(size=(150, 4))
    by_factors, by_table = (
        sampled().measure(*one) for one in (from_factors(users, items), from_table(users @ items.T))
    )
    for name, values in by_table.items():
        np.testing.assert_array_equal(by_factors[name], values, err_msg=name)


def test_popularity_beats_chance_and_als_beats_both_on_the_synthetic_set() -> None:
    pytest.importorskip("implicit", reason="the extra 'baselines' is not installed")
    data = generate(SyntheticSpec(users=200, items=200, interactions=8000))
    split = leave_last_out(data)
    holdout = LeaveOneOut.sampled(data.users, data.items, data.user, data.item, split.part, seed=0)
    train = split.part == TRAIN
    known = popularity(data.item[train], np.ones(train.sum(), bool), 200)
    factors = als(data.user[train], data.item[train], 200, 200, factors=16, seed=0)
    again = als(data.user[train], data.item[train], 200, 200, factors=16, seed=0)
    np.testing.assert_array_equal(factors[0], again[0])
    found = [
        headline(holdout.measure(*scores))["hit_ratio@10"]
        for scores in (
            from_table(np.random.default_rng(0).random((200, 200))),
            from_table(np.broadcast_to(known, (200, 200))),
            from_factors(*factors),
        )
    ]
    assert found[0] < found[1] < found[2]


@given(st.integers(0, 2**32))
def test_the_other_reading_of_published_negatives_is_that_of_a_test_item_among_its_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.random((40, 150))
    whole = sampled(count=20)
    kept = whole.negatives.copy()
    own = rng.random(40) < 0.5
    kept[own, 0] = whole.test[own]
    removed = kept.copy()
    removed[own, 0] = NO_ITEM
    expected = dataclasses.replace(whole, negatives=kept).measure(*from_table(scores))
    measured = dataclasses.replace(whole, negatives=removed).measure(*from_table(scores))
    found = as_if_own_kept(measured, own)
    np.testing.assert_array_equal(found["hit_ratio_own_kept@10"], expected["hit_ratio@10"])
    np.testing.assert_allclose(found["ndcg_own_kept@10"], expected["ndcg@10"])
