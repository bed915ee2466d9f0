"""Popularity in scores: levels of items, what they tell, and the same rule in every system that ranks items."""

import dataclasses
import json

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.systems.registry import server_side, system_named, systems
from coterie.systems.shared.popularity import LEVELS, levels, with_popularity
from coterie.systems.shared.taken_up import TAKEN_UP, taken_up

RANKING = ("ease", "ials", "fcf", "fpl", "fedncf")
"""Systems whose scores may have popularity in them."""

ONE_HELD_OUT = ("ease", "ials", "fedncf")
"""Systems that are measured by one held-out item of each user; the others by all held-out ones."""

CLOSED_ARE_PLAIN = ("fpl", "fedncf")
"""Systems that score closed items by themselves; the others begin at 0 for them."""

SPEC = {"users": 60, "items": 90, "interactions": 900, "genres": 4}
WEIGHT, FLOOR = 0.25, 3


def settings(system, popularity=WEIGHT, **more):
    own = {"min_touch": FLOOR, "popularity": popularity, **more.pop("own", {})}
    rounds = {"passes": 1, "evaluate_every": 1, **more.pop("rounds", {})}
    return RunSettings.model_validate(
        {
            "system": system,
            "split": {"kind": "leave-last-out"},
            "data": {"synthetic": SPEC},
            "federation": {"hosts": 2},
            "rounds": rounds,
            system_named(system).table: own,
            **more,
        }
    )


def trained(run):
    feed = make_feed(run, load(run), 0)
    made = train_in_process(run, feed, run_id="a-run", seed=0, see=lambda event: None)
    side = server_side(run.system, run.own.for_plan(run), len(feed.dataset.items), 0, made.known["groups"])
    return feed, made, side.model(made.trained.arrays)


# --- Levels -------------------------------------------------------------------------------------------------------


def test_a_level_is_the_logarithm_of_the_number_of_users_in_quarters():
    users = np.array([4, 5, 6, 64, 1024])
    found = levels(users, np.ones(5, bool), 3)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [2.0, 2.25, 2.5, 6.0, 10.0])
    np.testing.assert_allclose(found, np.log2(users), atol=0.125)


def test_closed_items_have_one_level_below_that_of_every_open_one_whoever_has_them():
    opened = np.array([True, False, False, False, True])
    one = levels(np.array([3, 0, 1, 2, 50]), opened, 3)
    other = levels(np.array([3, 2, 2, 0, 50]), opened, 3)
    np.testing.assert_array_equal(one, other)
    assert len(set(one[~opened])) == 1
    assert one[~opened].max() < one[opened].min()


def test_one_user_more_rarely_changes_a_level_and_exact_counts_always_would():
    users = np.arange(20, 500)
    opened = np.ones(len(users), bool)
    changed = levels(users, opened, 3) != levels(users + 1, opened, 3)
    # From 20 to 500 users there are 4 log2(25) steps of a level.
    assert 17 <= np.count_nonzero(changed) <= 20
    assert (np.log2(users) != np.log2(users + 1)).all()


def test_scores_are_as_they_are_without_a_weight_and_need_no_levels():
    scores = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert with_popularity(scores, {}, 0.0) is scores
    found = with_popularity(scores, {LEVELS: np.array([1, 2, 4], np.float32)}, 0.5)
    np.testing.assert_array_equal(found, scores + np.array([0.5, 1, 2]))
    items = np.array([[2, 0], [1, 2]])
    some = with_popularity(np.take_along_axis(scores, items, 1), {LEVELS: np.array([1, 2, 4])}, 0.5, items)
    np.testing.assert_array_equal(some, np.take_along_axis(found, items, 1))


# --- Systems ------------------------------------------------------------------------------------------------------


def test_every_system_in_rounds_that_ranks_items_has_the_setting():
    found = {
        name
        for name, one in systems().items()
        if one.in_rounds and "popularity" in one.settings.model_fields and name in RANKING
    }
    assert found == set(RANKING)


@pytest.mark.parametrize("system", RANKING)
def test_a_score_is_the_systems_own_and_the_weighted_level(system):
    feed, made, model = trained(settings(system))
    plain_feed, plain, bare = trained(settings(system, popularity=0.0))
    assert LEVELS not in bare
    data, train = feed.dataset, feed.split.train
    counted = np.bincount(data.item[train], minlength=len(data.items))
    closed = counted < FLOOR
    assert 0 < np.count_nonzero(closed) < len(closed)
    np.testing.assert_array_equal(model[LEVELS], levels(counted, ~closed, FLOOR))
    for host, (one, other) in enumerate(zip(made.hosts, plain.hosts, strict=True)):
        assert len(feed.hosted(host).users) == len(plain_feed.hosted(host).users)
        for user in range(5):
            with_it, without = one.recommend(model, user), other.recommend(bare, user)
            expected = without + np.float32(WEIGHT) * model[LEVELS]
            if system not in CLOSED_ARE_PLAIN:
                expected[closed] = np.float32(WEIGHT) * model[LEVELS][closed]
            np.testing.assert_array_equal(with_it, expected)


@pytest.mark.parametrize("system", RANKING)
def test_hosts_measure_the_scores_by_which_they_recommend(system):
    feed, made, model = trained(settings(system))
    for number, host in enumerate(made.hosts):
        data = feed.hosted(number)
        found = judged(system, data, np.stack([host.recommend(model, u) for u in range(len(data.users))]))
        assert {"ndcg_all@10", "ndcg@10"} & found.keys() & host.measured.keys()
        for name in host.measured.keys() & found.keys():
            np.testing.assert_array_equal(host.measured[name], found[name])


def judged(system, data, scores):
    """Return users' metrics by their scores of all items, by the hold-out of a system."""
    if system not in ONE_HELD_OUT:
        rated = dataclasses.replace(taken_up(data).rated(), relevant_from=TAKEN_UP)
        return rated.measure(lambda users: scores[users])
    return data.leave_one_out(0).measure(
        lambda users, items: np.take_along_axis(scores[users], items, 1), lambda users: scores[users]
    )


@pytest.mark.parametrize("system", ["ease", "ials", "fcf"])
def test_popularity_lifts_the_ranking_where_few_items_have_users_enough(system):
    sparse = {"data": {"synthetic": {"users": 400, "items": 900, "interactions": 2_000, "genres": 4}}}
    own = {"ridge": 50.0, "min_pairs": 1} if system == "ease" else {}

    def found(weight):
        run = settings(system, popularity=weight, own=own, **sparse)
        return trained(run)[1].known["chosen"]["metrics"]["validation_ndcg@10"]

    assert found(0.02) > 1.15 * found(0.0)


@pytest.mark.parametrize("system", RANKING)
def test_a_plan_without_popularity_says_nothing_of_it(system):
    run = settings(system, popularity=0.0)
    assert "popularity" not in json.loads(run.own.for_plan(run))
    assert run.own.from_json(run.own.for_plan(run)) == run.own
    weighed = settings(system)
    assert json.loads(weighed.own.for_plan(weighed))["popularity"] == WEIGHT
    assert weighed.own.from_json(weighed.own.for_plan(weighed)) == weighed.own


@pytest.mark.parametrize("system", RANKING)
@pytest.mark.parametrize("wrong", [-0.1, 101.0, float("nan"), "much"])
def test_a_weight_out_of_its_range_is_refused_by_the_name_of_its_key(system, wrong):
    with pytest.raises(ValueError, match="popularity"):
        settings(system, popularity=wrong)


@pytest.mark.parametrize(
    ("system", "own", "instead"),
    [
        ("fpl", {"min_touch": 1}, "min_touch above 1"),
        ("fedncf", {"touch": "exact"}, "touch 'once'"),
        ("fedncf", {"aggregation": "simple"}, "touch 'once'"),
    ],
)
def test_popularity_that_no_sum_counts_is_refused_with_what_would_help(system, own, instead):
    with pytest.raises(ValueError, match=rf"{system}\.popularity 0\.25: .*{instead}"):
        settings(system, own=own)
    settings(system, popularity=0.0, own=own)
