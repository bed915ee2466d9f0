"""Readings of precision, recall and NDCG: against loops, on ties, without relevant items, with few unrated ones."""

import math

import numpy as np
import pytest

from coterie.data import SyntheticSpec, generate, random
from coterie.errors import RunError
from coterie.evaluation import Rated
from coterie.evaluation.holdout import TEST, TRAIN, VALIDATION
from coterie.systems.fedmvmf.study import readings as module
from coterie.systems.fedmvmf.study.readings import (
    GAINS,
    OVER,
    RELEVANT,
    candidates,
    graded_readings,
    measure_readings,
    readings,
)

DATA = generate(SyntheticSpec(users=30, items=70, interactions=800))
SPLIT = random(DATA, train=0.6, validation=0.3, seed=1)
SAMPLED = (5, 20, 1000)
SEED = 3
USERS, ITEMS = len(DATA.users), len(DATA.items)


def rated(**more):
    given = {"user": DATA.user, "item": DATA.item, "rating": DATA.rating, "part": SPLIT.part, **more}
    return Rated(USERS, ITEMS, **given)


def some_scores(seed=0):
    # Coarse, so that there are equal ones; around what counts as liked.
    return np.round(np.random.default_rng(seed).normal(3.8, 0.7, (USERS, ITEMS)), 1)


def measured(scores, **more):
    return measure_readings(rated(), scores.__getitem__, seed=SEED, sampled=SAMPLED, **more)


def of_user(user, part):
    """Return ratings by item."""
    mine = (DATA.user == user) & part
    return dict(zip(DATA.item[mine].tolist(), DATA.rating[mine].tolist(), strict=True))


def items_of(name, user):
    """Return the candidates of a set by its name, as its sentence says, and the ratings that count."""
    tested, every = of_user(user, SPLIT.part == TEST), of_user(user, SPLIT.part >= 0)
    unrated = [i for i in range(ITEMS) if i not in every]
    if name.startswith("unseen"):
        return {*unrated, *tested}, tested
    if name.startswith("all"):
        return set(range(ITEMS)), every if name == "all-known" else tested
    if name.startswith("rated"):
        return set(tested), tested
    drawn = np.random.default_rng((SEED, user)).random(ITEMS)
    number = int(name.removeprefix("sampled-"))
    return {*tested, *sorted(unrated, key=lambda i: drawn[i])[:number]}, tested


def best_ten(scores, user, items, ratings):
    return sorted(items, key=lambda i: (-np.float32(scores[user, i]), ratings.get(i, 0)))[:10]


def is_relevant(name, rating):
    return {"liked": rating >= 4, "above": rating > 4, "rated": rating > 0}[name]


def plain_pair(scores, name, relevant, over):
    """Return precision and recall by their definitions, one user after the other."""
    each = []
    for user in np.unique(DATA.user[SPLIT.part == TEST]).tolist():
        items, ratings = items_of(name, user)
        best = best_ten(scores, user, items, ratings)
        if name.endswith("predicted"):
            best = [i for i in best if scores[user, i] >= 4]
        wanted = {i for i, rating in ratings.items() if is_relevant(relevant, rating)}
        few = name.endswith(("predicted", "short"))
        each.append((len(wanted & set(best)), len(best) if few else 10, len(wanted)))
    if over == "pooled":
        hits, recommended, wanted = np.sum(each, axis=0)
        return hits / recommended, hits / wanted
    pairs = [
        (hits / recommended if recommended else 0, hits / wanted if wanted else 0)
        for hits, recommended, wanted in each
        if wanted or over == "tested"
    ]
    return tuple(np.mean(pairs, axis=0))


def plain_ndcg(scores, name, gain, ranks):
    gains = {
        "printed": lambda x: 2 ** (x - 1) if x else 0,
        "zeros": lambda x: 2 ** (x - 1),
        "usual": lambda x: 2**x - 1,
    }
    each = []
    for user in np.unique(DATA.user[SPLIT.part == TEST]).tolist():
        items, ratings = items_of(name, user)
        orders = (
            [ratings.get(i, 0) for i in best_ten(scores, user, items, ratings)],
            sorted((ratings.get(i, 0) for i in items), reverse=True),
        )
        reached, ideal = (
            sum(gains[gain](x) / math.log2(i + 1) for i, x in enumerate(order[:ranks], 1)) for order in orders
        )
        each.append(reached / ideal)
    return np.mean(each)


@pytest.mark.parametrize("relevant", RELEVANT)
def test_precision_recall_and_f1_are_their_definitions_in_every_reading(relevant):
    scores = some_scores()
    found = measured(scores)
    names = [one for one in readings(SAMPLED) if one.relevant == relevant]
    assert len(names) == len(candidates(SAMPLED)) * len(OVER)
    for one in names:
        precision, recall = plain_pair(scores, one.candidates.name, one.relevant, one.over)
        assert found[f"precision@10/{one.name}"] == pytest.approx(precision, rel=1e-12), one.name
        assert found[f"recall@10/{one.name}"] == pytest.approx(recall, rel=1e-12), one.name
        f1 = 2 * precision * recall / (precision + recall)
        assert found[f"f1@10/{one.name}"] == pytest.approx(f1, rel=1e-12), one.name


@pytest.mark.parametrize("gain", GAINS)
def test_ndcg_is_its_definition_in_every_reading(gain):
    scores = some_scores(1)
    found = measured(scores)
    names = [one for one in graded_readings(SAMPLED) if one.gain == gain]
    assert {one.ranks for one in names} == {5, 10}
    for one in names:
        expected = plain_ndcg(scores, one.candidates.name, one.gain, one.ranks)
        assert found[f"ndcg/{one.name}"] == pytest.approx(expected, rel=1e-12), one.name


def test_every_reading_has_a_name_and_a_sentence_of_its_own():
    pairs, graded = readings(), graded_readings()
    for every in (pairs, graded):
        assert len({one.name for one in every}) == len({one.sentence for one in every}) == len(every)
    found = measured(some_scores())
    kinds = ("precision@10", "recall@10", "f1@10")
    names = {f"{kind}/{one.name}" for kind in kinds for one in readings(SAMPLED)}
    assert found.keys() == names | {f"ndcg/{one.name}" for one in graded_readings(SAMPLED)}


def test_two_readings_are_the_metrics_that_every_run_has():
    scores = some_scores(2)
    usual, found = rated().measure(scores.__getitem__), measured(scores)
    for metric in ("precision@10", "recall@10"):
        assert found[f"{metric}/unseen/liked/having"] == pytest.approx(np.nanmean(usual[metric]), rel=1e-12)
    for ranks, name in ((10, "ndcg_rated@10"), (5, "ndcg_rated_printed@10")):
        assert found[f"ndcg/rated/printed/{ranks}"] == pytest.approx(np.nanmean(usual[name]), rel=1e-12)


def test_more_sampled_items_than_a_user_has_unrated_ones_are_all_unseen_items():
    found = measured(some_scores())
    names = [name for name in found if "/sampled-1000/" in name]
    assert names
    for name in names:
        assert found[name] == found[name.replace("/sampled-1000/", "/unseen/")], name


def test_fewer_sampled_items_are_among_more_of_them():
    # Then more of them can only push out what is relevant.
    for seed in range(5):
        found = measured(some_scores(seed))
        hits = [found[f"recall@10/sampled-{number}/rated/tested"] for number in SAMPLED]
        assert hits[0] > hits[1] > hits[2]


def test_other_seeds_sample_other_items_and_change_nothing_else():
    scores = some_scores()
    one, other = (measure_readings(rated(), scores.__getitem__, seed=seed, sampled=(10,)) for seed in (0, 1))
    differing = {name.split("/")[1] for name in one if one[name] != other[name]}
    assert differing == {"sampled-10"}


def test_equal_scores_count_against_the_model():
    found = measured(np.full((USERS, ITEMS), 3.0))
    # Ten items that do not count come first, and among rated ones the lowest rating.
    assert found["precision@10/all/rated/tested"] == found["recall@10/all/liked/pooled"] == 0
    ratings = np.full((USERS, ITEMS), 3.0)
    for user, item, rating in zip(DATA.user, DATA.item, DATA.rating, strict=True):
        ratings[user, item] -= 1e-3 * rating
    for name in ("ndcg/rated/printed/10", "precision@10/rated/liked/having", "ndcg/rated/usual/5"):
        assert found[name] == pytest.approx(measured(ratings)[name], rel=1e-12)
        assert found[name] < measured(-ratings)[name]


def test_nobody_is_recommended_what_is_predicted_below_the_threshold():
    found = measured(np.full((USERS, ITEMS), 3.999))
    for over in OVER:
        assert found[f"precision@10/rated-predicted/liked/{over}"] == 0
        assert found[f"recall@10/unseen-predicted/rated/{over}"] == 0
    # Compared as float32, as scores are with each other.
    nearly = measured(np.full((USERS, ITEMS), 4 - 1e-9))
    assert nearly["precision@10/rated-predicted/rated/tested"] == 1


def test_scores_that_are_no_ratings_are_not_compared_with_one():
    every, some = measured(some_scores()), measured(some_scores(), predicts=False)
    assert {name for name in every if "-predicted/" in name} == every.keys() - some.keys()
    assert some == {name: every[name] for name in some}


def few(parts, ratings, user=(0, 0, 1, 1), item=(0, 1, 2, 3)):
    return Rated(3, 6, np.array(user), np.array(item), np.array(ratings), np.array(parts))


def test_users_without_a_relevant_item_count_where_the_reading_says_so():
    # User 0 disliked its test item, user 1 liked one of two and user 2 has none.
    given = few([TEST, TRAIN, TEST, TEST], [2.0, 5.0, 4.0, 3.0])
    found = measure_readings(
        given, lambda users: np.tile(np.arange(6.0, 0, -1), (len(users), 1)), sampled=(1,)
    )
    name = "rated-short/liked"
    assert found[f"precision@10/{name}/having"] == 1 / 2
    assert found[f"precision@10/{name}/tested"] == 1 / 4
    assert found[f"precision@10/{name}/pooled"] == 1 / 3
    assert [found[f"recall@10/{name}/{over}"] for over in OVER] == [1, 1 / 2, 1]
    assert found["precision@10/rated/liked/pooled"] == 1 / 20
    # 5 of user 0 is known from training, and above 4.
    assert found["recall@10/all-known/above/having"] == 1
    assert "recall@10/all/above/having" not in found


def test_what_nobody_has_a_value_for_is_left_out():
    disliked = few([TEST, TRAIN, TEST, VALIDATION], [2.0, 1.0, 3.0, 3.0])
    found = measure_readings(disliked, lambda users: np.ones((len(users), 6)))
    assert {name.split("/")[2] for name in found if not name.startswith("ndcg")} == {"rated"}
    untested = few([TRAIN] * 4, [5.0] * 4)
    assert measure_readings(untested, lambda users: np.ones((len(users), 6))) == {}


def test_figures_do_not_depend_on_how_many_users_are_measured_at_once(monkeypatch):
    scores = some_scores()
    together = measured(scores)
    monkeypatch.setattr(module, "_ELEMENTS_AT_ONCE", 4 * ITEMS)
    sizes = []

    def scored(users):
        sizes.append(len(users))
        return scores[users]

    apart = measure_readings(rated(), scored, seed=SEED, sampled=SAMPLED)
    assert max(sizes) == 4
    assert len(sizes) > 3
    assert apart == pytest.approx(together, rel=1e-12)


def test_the_order_of_interactions_is_of_no_importance():
    scores = some_scores()
    order = np.random.default_rng(0).permutation(len(DATA))
    mixed = rated(
        user=DATA.user[order], item=DATA.item[order], rating=DATA.rating[order], part=SPLIT.part[order]
    )
    assert measure_readings(mixed, scores.__getitem__, seed=SEED, sampled=SAMPLED) == measured(scores)


def test_a_model_that_diverged_is_named_before_anything_is_ranked():
    scores = some_scores()
    scores[5, 7] = np.inf
    with pytest.raises(RunError, match="not a finite number") as caught:
        measured(scores)
    assert "lower learning rate" in str(caught.value.hint)


@pytest.mark.parametrize("sampled", [(0,), (5, 5), (-1, 5)])
def test_numbers_of_sampled_items_that_are_none_are_refused(sampled):
    with pytest.raises(ValueError, match="expected different numbers of at least 1"):
        candidates(sampled)


def test_what_cannot_be_read_is_refused():
    scores = some_scores()
    with pytest.raises(ValueError, match="among is given"):
        measure_readings(rated(among=np.ones(ITEMS, bool)), scores.__getitem__)
    with pytest.raises(ValueError, match=r"scores have shape \(\d+, 3\)"):
        measure_readings(rated(), lambda users: np.zeros((len(users), 3)))
    with pytest.raises(ValueError, match="a rating is 0; expected ratings above 0"):
        measure_readings(rated(rating=np.zeros(len(DATA))), scores.__getitem__)
