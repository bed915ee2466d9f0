"""The sketch of EASE: its sums beside whole matrices, its model beside exact EASE, its limits, attacks on it."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate, leave_last_out
from coterie.data.keyed_order import key_hash
from coterie.errors import DataError, RunError
from coterie.privacy.attacks.scoring import Truth
from coterie.rounds.sides import User
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import UnboundedValueError
from coterie.studies.floors import require_open
from coterie.studies.in_process import train_in_process
from coterie.studies.judges import references
from coterie.studies.run_data import load, make_feed
from coterie.systems.ease.host import EaseHost
from coterie.systems.ease.mathematics import precision, scores, symmetric, triangle
from coterie.systems.ease.server import EaseServer
from coterie.systems.ease.settings import EaseSettings
from coterie.systems.ease.sketch import (
    directions,
    factors_of,
    low_rank_model,
    scorer,
    signs,
    sketch_segment,
)
from coterie.systems.ease.study.attacks import Sketched, attack_pairs, attack_sketch
from coterie.systems.ease.study.recovery import left_out, prior, recovered
from coterie.systems.shared.host_data import HostData

SPEC = {"users": 60, "items": 80, "interactions": 1_500, "genres": 4}
DATA = generate(SyntheticSpec(**SPEC))
PART = leave_last_out(DATA).part
USERS, ITEMS, COLUMNS = len(DATA.users), len(DATA.items), 12


def settings(ease=None, **more):
    given = {
        "system": "ease",
        "data": {"synthetic": SPEC},
        "federation": {"hosts": 2},
        "ease": {"ridge": 50.0, "sketch": COLUMNS, **(ease or {})},
        "rounds": {"passes": 2},
    }
    return RunSettings.model_validate({**given, **more})


def trained(**given):
    run = settings(**given)
    return train_in_process(run, make_feed(run, load(run), 0), run_id="a-run", seed=0, see=lambda event: None)


def matrix():
    table = np.zeros((USERS, ITEMS))
    train = PART == 0
    table[DATA.user[train], DATA.item[train]] = 1
    return table


def histories(users, items, share=0.2, seed=0):
    return (np.random.default_rng(seed).random((users, items)) < share).astype(np.float64)


def made(x, probes, rank, ridge=20.0):
    """Return the model of exact products of histories."""
    gram = x.T @ x
    model = low_rank_model(factors_of(probes, gram @ probes, rank), x.sum(axis=0), ridge, rank)
    return {"open": np.ones(x.shape[1], np.float32), **model}


def exact_scores(x, ridge, user):
    inverse = symmetric(precision(triangle(x.T @ x), ridge))
    everything = np.ones(x.shape[1], bool)
    return scores(inverse.__getitem__, np.diag(inverse), everything, np.flatnonzero(x[user]))


# --- Columns and codes --------------------------------------------------------------------------------------------


def test_signs_are_bits_of_a_hash_of_the_seed():
    found = signs(7, 40, 8)
    assert found.shape == (40, 8)
    assert set(np.unique(found)) == {-1.0, 1.0}
    assert abs(found.mean()) < 0.3
    np.testing.assert_array_equal(found, signs(7, 40, 8))
    assert (found != signs(8, 40, 8)).any()
    # Pinned: hosts of another language or release come to the same.
    assert "".join("-" if one < 0 else "+" for one in signs(0, 4, 4).ravel()) == "+++++-++-++++--+"


@pytest.mark.parametrize("bits", [8, 16, 24])
@pytest.mark.parametrize("items", [1, 80, 3_706, 100_000])
def test_a_step_is_a_power_of_2_and_no_value_is_beyond_the_bound(items, bits):
    segment = sketch_segment(items, 4, bits)
    assert math.log2(segment.step) == round(math.log2(segment.step))
    assert 1.001 * items <= segment.bound < 2.1 * max(items, 1)
    assert not segment.clip


@pytest.mark.parametrize(("bits", "users"), [(16, 65_537), (17, 32_768), (12, 1_048_832)])
def test_a_sum_has_the_room_that_the_setting_promises(bits, users):
    options = EaseSettings(sketch=8, sketch_bits=bits)
    assert options.room == users
    options.layout(Purpose.TRAIN, ITEMS).require_capacity(users)
    with pytest.raises(ValueError, match=f"has room for {users}; use fewer bits"):
        options.layout(Purpose.TRAIN, ITEMS).require_capacity(users + 1)
    assert options.narrower(settings()) == "a lower ease.sketch_bits"


def host(options):
    data = HostData(DATA.users, DATA.items, DATA.user, DATA.item, PART, DATA.rating)
    return EaseHost(options, data, key_hash(DATA.users, 0), 0, lambda private: private)


def summed(options, model, opened, pass_number):
    plan = SimpleNamespace(
        purpose="train", round=3, run_id="a-run", pass_number=pass_number, part=0, inputs=()
    )
    members = {0: [User(n, 0) for n in range(USERS)]}
    ((_, codes),) = host(options).contributions(plan, model, opened, members)
    return options.layout(Purpose.TRAIN, ITEMS).decode(codes, USERS)["sketch"]


def test_the_first_sum_is_exactly_the_counts_times_signs_and_a_further_one_is_rounded():
    options = EaseSettings(sketch=COLUMNS)
    x = matrix()
    opened = x.sum(axis=0) >= 15
    assert 0 < opened.sum() < ITEMS
    gram = (x * opened).T @ (x * opened)
    first = summed(options, {}, opened[None], 0)
    np.testing.assert_array_equal(first, gram @ signs(0, ITEMS, COLUMNS))
    columns = signs(0, ITEMS, COLUMNS)[opened]
    factors = factors_of(columns, first[opened], COLUMNS)
    model = {
        "open": opened.astype(np.float32),
        **low_rank_model(factors, x.sum(axis=0)[opened], 50.0, COLUMNS),
    }
    told = directions(model)
    np.testing.assert_allclose(np.square(told).sum(axis=0), opened.sum(), rtol=1e-5)
    second, step = summed(options, model, opened[None], 1), sketch_segment(ITEMS, COLUMNS, 16).step
    off = second[opened] - gram[np.ix_(opened, opened)] @ told
    assert not second[~opened].any()
    assert off.any()
    spread = step / 2 * np.sqrt(x.sum(axis=0)[opened])
    assert (np.abs(off) < 6 * spread[:, None]).all()
    assert abs(off.mean()) < 6 * spread.mean() / math.sqrt(off.size)


def test_a_member_refuses_columns_that_are_larger_than_the_bound_allows():
    options = EaseSettings(sketch=COLUMNS)
    model = {
        "open": np.ones(ITEMS, np.float32),
        "factors": np.full((ITEMS, COLUMNS), 100.0, np.float32),
        "scale": np.ones(COLUMNS, np.float32),
    }
    with pytest.raises(UnboundedValueError, match="segment sketch"):
        summed(options, model, np.ones((1, ITEMS), bool), 1)


# --- The model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 60])
def test_a_sketch_of_as_many_columns_as_there_are_items_is_exact(columns):
    x = histories(50, 40)
    probes = np.random.default_rng(1).choice([-1.0, 1.0], (40, columns))
    model = made(x, probes, columns)
    for user in range(5):
        np.testing.assert_allclose(
            scorer(model)(np.flatnonzero(x[user])), exact_scores(x, 20.0, user), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("users", [1, 2, 9])
def test_fewer_users_than_columns_leave_nothing_out(users):
    x = histories(users, 40, 0.4)
    model = made(x, signs(0, 40, 12), 12)
    assert np.linalg.matrix_rank(model["factors"]) == np.linalg.matrix_rank(x)
    for user in range(users):
        np.testing.assert_allclose(
            scorer(model)(np.flatnonzero(x[user])), exact_scores(x, 20.0, user), rtol=1e-3, atol=1e-4
        )


def test_errors_of_rounding_are_not_taken_for_counts_where_there_are_fewer_users_than_columns():
    x = histories(4, 60, 0.5)
    gram, columns, step = x.T @ x, signs(0, 60, 30), 0.25
    rounded = (
        gram @ columns
        + np.random.default_rng(2).uniform(-step, step, (60, 30)) * np.sqrt(x.sum(axis=0))[:, None]
    )
    kept = factors_of(columns, rounded, 30, step, 4)
    assert np.linalg.norm(kept @ kept.T - gram) < 0.1 * np.linalg.norm(gram)
    # Without the step they would be: small eigenvalues are divided by.
    blown = factors_of(columns, rounded, 30)
    assert np.linalg.norm(blown @ blown.T - gram) > np.linalg.norm(kept @ kept.T - gram)
    assert np.linalg.matrix_rank(kept) <= 4 < np.linalg.matrix_rank(blown)


def test_users_with_equal_items_and_items_with_equal_users_are_no_obstacle():
    x = np.zeros((10, 20))
    x[:, :6] = 1
    model = made(x, signs(0, 20, 8), 8)
    found = scorer(model)(np.arange(3))
    assert np.isfinite(found).all()
    assert len(set(found[3:6].tolist())) == 1
    assert found[3] > found[6]
    np.testing.assert_allclose(scorer(model)(np.arange(6)), exact_scores(x, 20.0, 0), rtol=1e-4, atol=1e-6)


def test_nobody_with_any_item_leaves_a_model_that_ranks_nothing():
    model = made(np.zeros((5, 20)), signs(0, 20, 8), 8)
    assert not model["factors"].any()
    assert not model["scale"].any()
    assert not scorer(model)(np.arange(3)).any()


def test_a_further_sum_brings_the_stand_in_nearer():
    x = histories(300, 120, 0.1, 5) + (np.arange(120) < 20)
    x = np.minimum(x, 1)
    x[:150, 60:90] = histories(150, 30, 0.6, 6)
    gram, columns = x.T @ x, signs(0, 120, 10)
    off = []
    probes, products = columns, gram @ columns
    for _ in range(3):
        factors = factors_of(probes, products, 10)
        off.append(np.linalg.norm(factors @ factors.T - gram))
        told = directions(low_rank_model(factors, x.sum(axis=0), 20.0, 10))
        probes, products = np.hstack([probes, told]), np.hstack([products, gram @ told])
    assert off[1] < 0.95 * off[0]
    assert off[2] < off[1]


def test_closed_items_rank_behind_all_open_ones_and_a_user_scores_alike_alone_and_beside_others():
    x = histories(80, 30)
    opened = np.arange(30) % 3 > 0
    y = x[:, opened]
    model = {**made(y, signs(0, 20, 8), 8), "open": opened.astype(np.float32)}
    score = scorer(model)
    found = score(np.flatnonzero(x[0]))
    assert len(set(found[~opened].tolist())) == 1
    assert found[~opened].max() < found[opened].min()
    np.testing.assert_array_equal(found, scorer(model)(np.flatnonzero(x[0])))
    assert not scorer({"open": opened.astype(np.float32)})(np.arange(4)).any()


@pytest.mark.parametrize(
    ("supports", "ridge", "words"),
    [
        ([3, 1], 0.0, "expected a number above 0"),
        ([3, 1], math.nan, "expected a number above 0"),
        ([10**9, 1], 1e-3, "too ill-conditioned"),
    ],
    ids=str,
)
def test_equations_that_cannot_be_solved_are_refused(supports, ridge, words):
    with pytest.raises(ValueError, match=words):
        low_rank_model(np.ones((2, 1)), np.array(supports), ridge, 1)


def test_products_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        factors_of(np.ones((3, 1)), np.array([[1.0], [math.nan], [0.0]]), 1)


# --- Settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sketch": -1}, "greater than or equal to 0"),
        ({"sketch": 1_001}, "less than or equal to 1000"),
        ({"sketch": 8, "sketch_bits": 7}, "greater than or equal to 8"),
        ({"sketch": 8, "sketch_bits": 25}, "less than or equal to 24"),
        ({"sketch": 8, "min_pairs": 3}, "no counts of single pairs"),
        ({"sketch": 8, "noise": 2.0, "most_items": 20}, "noise 2.0 with sketch 8"),
    ],
    ids=str,
)
def test_settings_out_of_their_range_are_refused(change, words):
    with pytest.raises(ValidationError) as caught:
        EaseSettings(**change)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"rounds": {"passes": 4}},
            "rounds.passes 4: ease learns from a few sums.*expected 'all' and 1 to 3",
        ),
        ({"rounds": {"cohorts": "groups", "passes": 2}}, "expected 'all' and 1 to 3"),
        ({"ease": {"sketch": 0}, "rounds": {"passes": 2}}, "expected 'all' and 1"),
        ({"rounds": {"aggregation": {"norm_bound": 1.0}}}, "expected 'sum' and 0"),
    ],
    ids=str,
)
def test_runs_that_it_does_not_fit_are_refused(change, words):
    with pytest.raises(ValidationError, match=words):
        settings(**change)


def test_a_plan_without_a_sketch_is_that_of_earlier_releases_and_one_with_it_comes_back():
    assert "sketch" not in EaseSettings().to_json()
    assert EaseSettings().min_pairs == 3
    options = EaseSettings(sketch=32, sketch_bits=12)
    assert options.min_pairs == 1
    assert json.loads(options.to_json())["sketch"] == 32
    assert EaseSettings.from_json(options.to_json()) == options
    assert EaseSettings.from_json(EaseSettings().to_json()) == EaseSettings()


@pytest.mark.parametrize(
    ("ease", "words"),
    [
        ({"sketch": 81}, r"a sketch of 81 columns \(ease.sketch\) over 80 items; expected at most as many"),
        (
            {"sketch": 80, "most_mb": 0.02},
            r"80 columns over 80 items are a contribution of 0.0256 MB.*fewer columns",
        ),
        ({"sketch": 0, "most_mb": 0.005}, r"a sketch of them \(ease.sketch\)"),
    ],
    ids=str,
)
def test_a_catalogue_that_a_sketch_does_not_fit_is_refused_before_the_run(ease, words):
    run = settings(ease=ease, rounds={"passes": 1})
    with pytest.raises(DataError, match=words):
        require_open(run, make_feed(run, load(run), 0))


def test_a_contribution_over_a_catalogue_of_movielens_1m_is_below_1_megabyte_a_sum():
    options = EaseSettings(sketch=64)
    assert 4 * options.layout(Purpose.TRAIN, 3_706).size < 1e6
    assert not options.too_many_items(100_000)


def test_a_warning_says_what_a_sketch_tells():
    run = settings()
    (warning,) = run.own.warnings(run)
    assert "nearly as much as all counts of pairs" in warning


# --- In rounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secure_sum", "hosts", "users"),
    [("clear", 3, True), ("clear", 1, False), ("masked", 3, False), ("masked", 3, True)],
)
def test_numbers_depend_neither_on_the_sum_nor_on_how_users_are_spread(secure_sum, hosts, users):
    plain = trained()
    rounds = {"party_per_user": users, "passes": 2}
    other = trained(rounds=rounds, secure_sum=secure_sum, federation={"hosts": hosts})
    assert plain.trained.arrays["products"].shape[1] == 2 * COLUMNS
    for name, value in plain.trained.arrays.items():
        np.testing.assert_array_equal(other.trained.arrays[name], value)
    assert [one["metrics"] for one in other.known["history"]] == [
        one["metrics"] for one in plain.known["history"]
    ]


def test_it_ranks_held_out_items_nearly_as_exact_counts_do_and_better_than_popularity():
    run = RunSettings.model_validate(
        {"system": "ease", "ease": {"ridge": 100.0, "sketch": 32}, "rounds": {"passes": 2}}
    )
    feed = make_feed(run, load(run), 0)
    known = train_in_process(run, feed, run_id="a-run", seed=0, see=lambda event: None).known
    beside = references(run, feed, 0)
    assert [one["version"] for one in known["history"]] == [0, 1, 2]
    found = known["chosen"]["metrics"]["hit_ratio@10"]
    assert found > beside["popularity"].metrics["hit_ratio@10"] + 0.1
    assert abs(found - beside["ease_central"].metrics["hit_ratio@10"]) < 0.05


def test_a_user_is_recommended_by_the_scores_that_its_host_measures():
    run = trained()
    side = EaseServer(settings().own, ITEMS, 0, 1)
    model = side.model(run.trained.arrays)
    own = run.hosts[0]
    assert set(model) == {"open", "factors", "scale", "apart", "core", "own"}
    found = own.recommend(model, 3)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, scorer(model)(own._items[3]))


def test_a_run_whose_items_are_all_closed_ends_and_says_so():
    run = trained(ease={"min_touch": 61})
    assert run.known["phase"] == "done"
    assert run.known["closed_share"] == 1
    model = EaseServer(settings().own, ITEMS, 0, 1).model(run.trained.arrays)
    assert not run.hosts[0].recommend(model, 0).any()


def losing(monkeypatch, passes, times):
    """Let the members of a host with user 0 be silent in sums of a pass, so many times."""
    contributions, lost = EaseHost.contributions, []

    def silent(side, plan, model, opened, members):
        here = plan.purpose == "train" and plan.pass_number == passes and len(members) and 0 in members
        if here and len(lost) < times:
            lost.append(plan.round)
            return iter(())
        return contributions(side, plan, model, opened, members)

    monkeypatch.setattr(EaseHost, "contributions", silent)
    return lost


@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
def test_a_further_sum_waits_for_the_members_of_the_first_and_is_formed_over_no_others(
    monkeypatch, secure_sum
):
    lost = losing(monkeypatch, 1, 2)
    run = trained(secure_sum=secure_sum, federation={"hosts": 3})
    assert len(lost) == 2
    assert (run.known["abandoned"], run.known["history"][-1]["version"]) == (2, 2)
    np.testing.assert_array_equal(run.trained.arrays["factors"], trained().trained.arrays["factors"])


def test_a_run_fails_where_a_member_of_the_first_sum_stays_away(monkeypatch):
    losing(monkeypatch, 1, 1_000)
    with pytest.raises(RunError, match="members are missing over whom alone the sum may be formed"):
        trained(secure_sum="clear", federation={"hosts": 3})


def test_members_that_are_away_in_the_first_sum_are_not_in_a_further_one(monkeypatch):
    losing(monkeypatch, 0, 1)
    run = trained(secure_sum="clear", federation={"hosts": 3})
    assert run.known["abandoned"] == 0
    assert len(run.trained.state.trained) == 2


# --- Attacks ------------------------------------------------------------------------------------------------------


def lonely():
    """Return histories, of which each user has an item of its own, and what is true of them."""
    rng = np.random.default_rng(4)
    x = rng.random((40, 120)) < 0.04 + 0.3 * (np.arange(120) < 20)
    x[:, 80:] = False
    x[np.arange(40), 80 + np.arange(40)] = True
    user, item = np.nonzero(x)
    return x.astype(float), Truth(user, item, np.ones(len(user), bool), 40, 120)


def sketched(x, columns, floor=1):
    opened = x.sum(axis=0) >= floor
    y = x[:, opened]
    probes = signs(3, x.shape[1], columns)[opened]
    return Sketched(tuple(range(len(x))), opened, y.sum(axis=0), probes, y.T @ (y @ probes))


def test_a_sketch_without_floors_gives_histories_away_and_floors_stop_that():
    x, true = lonely()
    found = attack_sketch([sketched(x, 40)], true)
    assert found["singles"]["histories"] > 0.9
    assert found["singles"]["precision"] > 0.95
    floored = attack_sketch([sketched(x, 40, floor=5)], true)
    assert floored["singles"]["histories"] == 0
    assert floored["singles"]["recall"] == 0


def test_fewer_products_than_a_history_has_items_do_not_give_it_away():
    x, true = lonely()
    assert attack_sketch([sketched(x, 3)], true)["singles"]["histories"] < 0.2


def test_counts_that_the_sketch_stands_in_for_tell_as_much_as_exact_ones_where_it_has_all_columns():
    x, true = lonely()
    exact = attack_pairs([(tuple(range(40)), x.T @ x)], true)["pairs"]
    whole = attack_sketch([sketched(x, 120)], true)["pairs"]
    few = attack_sketch([sketched(x, 8)], true)["pairs"]
    assert abs(whole["auc"] - exact["auc"]) < 0.01
    assert few["popularity_auc"] < few["auc"] < whole["auc"]


def test_a_history_is_found_by_its_products():
    rng = np.random.default_rng(1)
    columns, truth = rng.choice([-1.0, 1.0], (200, 50)), rng.random(200) < 0.06
    products = truth @ columns
    found, cost = recovered(columns, products, np.full(200, -2.5), np.zeros(0, int), 1.0)
    np.testing.assert_array_equal(found, truth)
    assert cost == pytest.approx(2.5 * truth.sum())


def test_the_difference_of_two_sums_gives_a_left_out_user_away_which_is_why_both_have_the_same_members():
    x = histories(80, 150, 0.1, 9)
    first = signs(0, 150, 32)
    factors = factors_of(first, x.T @ (x @ first), 32)
    second = directions(low_rank_model(factors, x.sum(axis=0), 20.0, 32))
    odds, right = prior(x.sum(axis=0), 80), 0
    for user in range(5):
        rest = np.delete(x, user, axis=0)
        found = left_out((first, second), (x.T @ (x @ first), rest.T @ (rest @ second)), odds)
        right += int((found == (x[user] > 0)).all())
    assert right == 5
    # Over the same members the sums differ by nothing.
    same = left_out((first, second), (x.T @ (x @ first), x.T @ (x @ second)), odds)
    assert not any((same == (x[user] > 0)).all() for user in range(80))
