"""EASE: its closed form beside ridge regressions, codes that count pairs, its sides in one process."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate, leave_last_out
from coterie.data.keyed_order import key_hash
from coterie.errors import ConfigError, DataError
from coterie.privacy.attacks.scoring import Truth
from coterie.rounds.sides import Summed, User, scorer_of
from coterie.rounds.training import Purpose
from coterie.secure_sum.noise_stream import SEED_BYTES, noise_stream
from coterie.studies.floors import require_open
from coterie.studies.in_process import train_in_process
from coterie.studies.judges import references
from coterie.studies.outcome import SeedOutcome, about, from_cos, together
from coterie.studies.run_data import load, make_feed
from coterie.systems.ease.host import EaseHost
from coterie.systems.ease.mathematics import (
    diagonal_of,
    nearest_noise_free,
    packing,
    pair_places,
    pairs_of,
    precision,
    rows_of,
    scores,
    symmetric,
    triangle,
)
from coterie.systems.ease.report import EaseReport
from coterie.systems.ease.server import EaseServer
from coterie.systems.ease.settings import METRICS, EaseSettings
from coterie.systems.ease.study.attacks import attack_pairs
from coterie.systems.registry import combination, system_named
from coterie.systems.shared.host_data import HostData

ITEMS, USERS = 30, 50
SPEC = {"users": 60, "items": 80, "interactions": 1_500, "genres": 4}
DATA = generate(SyntheticSpec(**SPEC))
PART = leave_last_out(DATA).part


def histories(users=USERS, items=ITEMS, share=0.25):
    return (np.random.default_rng(0).random((users, items)) < share).astype(np.float64)


def settings(**more):
    given = {
        "system": "ease",
        "data": {"synthetic": SPEC},
        "federation": {"hosts": 2},
        "ease": {"ridge": 50.0},
    }
    return RunSettings.model_validate({**given, **more})


def trained(**given):
    run = settings(**given)
    return train_in_process(run, make_feed(run, load(run), 0), run_id="a-run", seed=0, see=lambda event: None)


# --- Mathematics --------------------------------------------------------------------------------------------------


def test_scores_are_those_of_a_ridge_regression_of_each_item_on_the_others():
    x, ridge = histories(), 7.0
    inverse = symmetric(precision(triangle(x.T @ x), ridge))
    weights = np.zeros((ITEMS, ITEMS))
    for j in range(ITEMS):
        others = np.arange(ITEMS) != j
        rest = x[:, others]
        weights[others, j] = np.linalg.solve(rest.T @ rest + ridge * np.eye(ITEMS - 1), rest.T @ x[:, j])
    for u in range(USERS):
        found = scores(inverse.__getitem__, np.diag(inverse), np.ones(ITEMS, bool), np.flatnonzero(x[u]))
        np.testing.assert_allclose(found, x[u] @ weights, rtol=1e-4, atol=1e-5)


def test_a_closed_item_scores_below_every_open_one():
    x = histories()
    opened = np.arange(ITEMS) % 3 > 0
    inverse = symmetric(precision(triangle(x[:, opened].T @ x[:, opened]), 7.0))
    found = scores(inverse.__getitem__, np.diag(inverse), opened, np.flatnonzero(x[0]))
    assert len(set(found[~opened])) == 1
    assert found[~opened].max() < found[opened].min()
    other = x[0].copy()
    other[~opened] = 1
    np.testing.assert_array_equal(
        found, scores(inverse.__getitem__, np.diag(inverse), opened, np.flatnonzero(other))
    )


def test_single_rows_and_the_diagonal_are_those_of_the_whole_matrix():
    numbered = np.arange(float(pairs_of(9)))
    whole, rows = symmetric(numbered), np.array([8, 0, 4])
    np.testing.assert_array_equal(rows_of(numbered, rows), whole[rows])
    np.testing.assert_array_equal(diagonal_of(numbered), np.diag(whole))
    assert not len(diagonal_of(np.zeros(0)))


def test_without_open_items_all_score_the_same():
    nothing = precision(np.zeros(0), 500.0)
    assert nothing.shape == (0,)
    assert not scores(symmetric(nothing).__getitem__, nothing, np.zeros(ITEMS, bool), np.arange(4)).any()


def test_pairs_of_fewer_users_than_the_floor_do_not_change_the_model():
    x = histories()
    gram = x.T @ x
    cut = np.where((gram < 4) & ~np.eye(ITEMS, dtype=bool), 0, gram)
    assert (cut != gram).any()
    np.testing.assert_array_equal(
        precision(triangle(gram), 7.0, min_pairs=4), precision(triangle(cut), 7.0, min_pairs=4)
    )
    assert (precision(triangle(gram), 7.0) != precision(triangle(gram), 7.0, min_pairs=4)).any()


@pytest.mark.parametrize("ridge", [1.0, 100.0])
def test_counts_without_the_small_ones_lose_eigenvalues_below_0_only_where_the_ridge_does_not_outweigh_them(
    ridge,
):
    # Without its small counts this matrix has an eigenvalue of -2.
    gram = np.array([[5.0, 5.0, 1.0], [5.0, 5.0, 5.0], [1.0, 5.0, 5.0]])
    cut = np.where(gram < 2, 0, gram)
    least = np.linalg.eigvalsh(cut).min()
    assert least < -2
    whole = nearest_noise_free(cut, 0.0) if ridge < 2 else cut
    expected = np.linalg.inv(whole + ridge * np.eye(3))
    np.testing.assert_allclose(
        symmetric(precision(triangle(gram), ridge, min_pairs=2)), expected, rtol=1e-5, atol=1e-6
    )


def test_noise_that_makes_counts_impossible_leaves_equations_that_can_be_solved():
    noise = np.random.default_rng(3).normal(0, 30, (ITEMS, ITEMS))
    noisy = histories().T @ histories() + np.triu(noise) + np.triu(noise, 1).T
    assert np.linalg.eigvalsh(noisy).min() < -50
    assert np.linalg.eigvalsh(nearest_noise_free(noisy, 0.0)).min() > -1e-6
    found = symmetric(precision(triangle(noisy), 1.0, spread=30.0))
    assert np.linalg.eigvalsh(found.astype(float)).min() > 0


@pytest.mark.parametrize(
    ("counts", "ridge", "words"),
    [
        ([1.0, 0.0, 1.0], 0.0, "a ridge of 0.0; expected a number above 0"),
        ([1.0, 0.0, 1.0], -1.0, "expected a number above 0"),
        ([1.0, 0.0, 1.0], math.nan, "expected a number above 0"),
        ([1e9, 1e9, 1e9], 1e-3, "too ill-conditioned"),
        ([1.0, math.inf, 1.0], 1.0, "not finite"),
    ],
    ids=str,
)
def test_equations_that_cannot_be_solved_are_refused(counts, ridge, words):
    with pytest.raises(ValueError, match=words):
        precision(np.array(counts), ridge)


# --- Codes --------------------------------------------------------------------------------------------------------


def test_the_place_of_a_pair_is_where_it_stands_in_the_triangle():
    numbered = np.arange(float(pairs_of(9)))
    items = np.array([0, 3, 4, 8])
    expected = triangle(symmetric(numbered)[np.ix_(items, items)])
    np.testing.assert_array_equal(pair_places(items, 9), expected)


@pytest.mark.parametrize("digits", [1, 2, 3])
@pytest.mark.parametrize("variance", [0, 4])
def test_counts_come_out_of_codes_as_they_went_in_for_as_many_users_as_there_is_room(digits, variance):
    packed, pairs = packing(digits, variance), 101
    room = packed.segment(pairs)
    users = min((2**32 - 1) // (2**room.bits - 1), 2**20)
    rng = np.random.default_rng(0)
    furthest = math.ceil(12 * math.sqrt(users * variance))
    counts = rng.integers(-furthest, users + furthest + 1, pairs)
    counts[:4] = -furthest, users + furthest, users + furthest, -furthest
    codes = packed.packed(counts)
    np.testing.assert_array_equal(packed.counts(codes.astype(float), pairs), counts)
    assert np.abs(codes).max() <= users * packed.largest


@pytest.mark.parametrize(("digits", "users"), [(1, 1_000_000), (2, 32_768), (3, 1_024)])
def test_exact_counts_have_the_room_that_the_setting_promises(digits, users):
    assert EaseSettings(packed=digits).room >= users


def test_a_contribution_over_a_catalogue_of_movielens_1m_is_below_14_megabytes():
    assert 4 * EaseSettings().layout(Purpose.TRAIN, 3_706).size < 14e6


def host(options, keep=lambda private: private):
    data = HostData(DATA.users, DATA.items, DATA.user, DATA.item, PART, DATA.rating)
    return EaseHost(options, data, key_hash(DATA.users, 0), 0, keep)


def asked(purpose, number=1):
    return SimpleNamespace(
        purpose=purpose.value, round=number, run_id="a-run", pass_number=0, part=0, inputs=()
    )


def summed(side, options, purpose, opened=None, model=None, number=1):
    members = {0: [User(n, 0) for n in range(len(DATA.users))]}
    ((_, codes),) = side.contributions(asked(purpose, number), model or {}, opened, members)
    return options.layout(purpose, len(DATA.items)).decode(codes, len(DATA.users))


def matrix():
    table = np.zeros((len(DATA.users), len(DATA.items)))
    train = PART == 0
    table[DATA.user[train], DATA.item[train]] = 1
    return table


def test_the_sums_are_the_supports_and_the_pairs_of_open_items():
    options = EaseSettings(min_touch=5)
    x = matrix()
    np.testing.assert_array_equal(summed(host(options), options, Purpose.SUPPORTS)["supports"], x.sum(axis=0))
    opened = x.sum(axis=0) >= 15
    codes = summed(host(options), options, Purpose.TRAIN, opened[None])["pairs"]
    counted = symmetric(options.packing.counts(codes, pairs_of(len(DATA.items))))
    np.testing.assert_array_equal(counted, (x * opened).T @ (x * opened))


def test_a_user_of_more_items_counts_by_a_sample_that_is_the_same_in_both_sums_and_runs():
    options = EaseSettings(most_items=7)
    side, everything = host(options), np.ones((1, len(DATA.items)), bool)
    supports = summed(side, options, Purpose.SUPPORTS)["supports"]
    codes = summed(side, options, Purpose.TRAIN, everything)["pairs"]
    counted = symmetric(options.packing.counts(codes, pairs_of(len(DATA.items))))
    np.testing.assert_array_equal(np.diag(counted), supports)
    assert supports.sum() == np.minimum(matrix().sum(axis=1), 7).sum()
    np.testing.assert_array_equal(summed(host(options), options, Purpose.SUPPORTS)["supports"], supports)


def test_noise_lies_on_every_count_and_its_mean_is_the_count():
    options = EaseSettings(most_items=40, noise=2.0)
    exact = EaseSettings(most_items=40)
    everything = np.ones((1, len(DATA.items)), bool)
    pairs, users = pairs_of(len(DATA.items)), len(DATA.users)
    noisy = options.packing.counts(summed(host(options), options, Purpose.TRAIN, everything)["pairs"], pairs)
    true = exact.packing.counts(summed(host(exact), exact, Purpose.TRAIN, everything)["pairs"], pairs)
    off = noisy - true
    spread = math.sqrt(users * options.variance)
    assert np.abs(off).max() < 12 * spread
    # The mean of so many draws: within eight of its standard deviations.
    assert abs(off.mean()) < 8 * spread / math.sqrt(pairs)
    assert 0.8 * spread < off.std() < 1.2 * spread
    supports = summed(host(options), options, Purpose.SUPPORTS)["supports"]
    off = supports - summed(host(exact), exact, Purpose.SUPPORTS)["supports"]
    assert off.any()
    assert np.abs(off).max() < 12 * spread / options.parts


# --- Settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ridge": 0.0}, "greater than or equal to 0.001"),
        ({"ridge": -5.0}, "greater than or equal to 0.001"),
        ({"ridge": math.inf}, "finite number"),
        ({"min_touch": 0}, "greater than or equal to 1"),
        ({"packed": 4}, "less than or equal to 3"),
        ({"noise": 2.0}, "noise 2.0 with most_items 0; expected 1 or more, and a limit"),
        ({"noise": 0.5, "most_items": 20}, "expected 1 or more"),
        ({"delta": 1.0}, "less than 1"),
    ],
    ids=str,
)
def test_settings_out_of_their_range_are_refused(change, words):
    with pytest.raises(ValidationError) as caught:
        EaseSettings(**change)
    assert words in str(caught.value)


def test_counts_that_do_not_fit_a_code_are_refused():
    with pytest.raises(ValidationError, match="packed 3: 3 counts with noise of variance 10000 do not fit"):
        EaseSettings(packed=3, noise=100.0, most_items=10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split": {"kind": "random"}}, "expected one of 'leave-last-out', 'leave-random-out'"),
        ({"rounds": {"cohorts": "groups"}}, "ease learns from one sum"),
        ({"rounds": {"passes": 2}}, "expected 'all' and 1"),
        ({"rounds": {"choose_by": "validation_rmse"}}, "'validation_rmse' is not measured"),
        ({"secure_sum": "shared-key"}, "to the same model to the bit"),
    ],
    ids=str,
)
def test_runs_that_it_does_not_fit_are_refused(change, words):
    with pytest.raises((ValidationError, ConfigError), match=words):
        settings(**change)


def test_settings_come_back_from_the_plan_as_they_were():
    plan = EaseSettings(ridge=12.5, noise=1.5, most_items=30, packed=1)
    assert EaseSettings.from_json(plan.to_json()) == plan
    with pytest.raises(ConfigError):
        EaseSettings.from_json(json.dumps({**json.loads(plan.to_json()), "ridge": 0}))


def test_the_description_says_why_it_does_not_run_under_a_shared_key():
    assert "to the bit" in system_named("ease").objection("hosts", "shared-key")
    found = combination("ease", "shared-key")
    assert (found.allowed, "to the bit" in found.why) == (False, True)
    assert all(combination("ease", each).allowed for each in ("clear", "masked", "encrypted"))


def test_a_warning_says_what_exact_counts_tell_and_another_what_noise_protects():
    (exact,) = settings().own.warnings(settings())
    assert "a pair of one user is that user's" in exact
    run = settings(ease={"noise": 2.0, "most_items": 20})
    (noisy,) = run.own.warnings(run)
    assert "Metrics have no noise" in noisy


def test_a_catalogue_whose_pairs_are_too_large_is_refused_with_what_would_help():
    options = EaseSettings()
    assert not options.too_many_items(3_706)
    words = options.too_many_items(20_000)
    assert "20,000 items are a contribution of 400 MB" in words
    assert "expected at most 64 MB (ease.most_mb)" in words
    assert not EaseSettings(most_mb=401).too_many_items(20_000)
    run = settings(ease={"most_mb": 0.005})
    with pytest.raises(DataError, match=r"80 items are a contribution of 0.00648 MB"):
        require_open(run, make_feed(run, load(run), 0))


# --- In rounds ----------------------------------------------------------------------------------------------------


def test_it_ranks_held_out_items_better_than_popularity_and_chance():
    # Enough users that the order does not hang on a few hits.
    run = RunSettings.model_validate({"system": "ease", "ease": {"ridge": 100.0}})
    feed = make_feed(run, load(run), 0)
    known = train_in_process(run, feed, run_id="a-run", seed=0, see=lambda event: None).known
    beside = references(run, feed, 0)
    assert set(known["chosen"]["metrics"]) == set(METRICS)
    found = known["chosen"]["metrics"]["hit_ratio@10"]
    assert known["chosen"]["version"] == 1
    assert found > beside["popularity"].metrics["hit_ratio@10"] + 0.1
    assert abs(found - beside["ease_central"].metrics["hit_ratio@10"]) < 0.05


@pytest.mark.parametrize(
    ("secure_sum", "hosts", "users"),
    [("clear", 3, True), ("clear", 1, False), ("masked", 3, False), ("masked", 3, True)],
)
def test_numbers_depend_neither_on_the_sum_nor_on_how_users_are_spread(secure_sum, hosts, users):
    plain = trained()
    other = trained(rounds={"party_per_user": users}, secure_sum=secure_sum, federation={"hosts": hosts})
    for name, value in plain.trained.arrays.items():
        np.testing.assert_array_equal(other.trained.arrays[name], value)
    assert [one["metrics"] for one in other.known["history"]] == [
        one["metrics"] for one in plain.known["history"]
    ]


def test_a_run_whose_items_are_all_closed_ends_and_says_so():
    made = trained(ease={"min_touch": 61})
    assert made.known["phase"] == "done"
    assert made.known["closed_share"] == 1
    assert (
        not made.hosts[0]
        .recommend(EaseServer(EaseSettings(min_touch=61), 80, 0, 1).model(made.trained.arrays), 0)
        .any()
    )


@pytest.mark.parametrize("ease", [{}, {"popularity": 0.5}, {"min_touch": 61}])
def test_scores_of_many_users_have_the_bits_of_those_that_one_is_given(ease):
    made = trained(ease=ease)
    model = EaseServer(EaseSettings(**ease), 80, 0, 1).model(made.trained.arrays)
    own = made.hosts[0]
    many, one = scorer_of(own, model, 1000), scorer_of(own, model, 1)
    assert many != one
    for user in range(5):
        np.testing.assert_array_equal(many(user), one(user))
        np.testing.assert_array_equal(many(user), own.recommend(model, user))


def test_an_abandoned_sum_of_pairs_is_formed_again(monkeypatch):
    contributions, lost = EaseHost.contributions, []

    def drop_once(side, plan, model, opened, members):
        if plan.purpose == Purpose.TRAIN.value and not lost:
            lost.append(plan.round)
            return iter(())
        return contributions(side, plan, model, opened, members)

    monkeypatch.setattr(EaseHost, "contributions", drop_once)
    made = trained(secure_sum="masked", federation={"hosts": 3})
    assert lost
    assert (made.known["abandoned"], made.known["chosen"]["version"]) == (1, 1)
    np.testing.assert_array_equal(made.trained.arrays["precision"], trained().trained.arrays["precision"])


def test_noise_is_the_same_when_a_sum_is_formed_again_and_different_for_every_other_sum():
    options = EaseSettings(most_items=40, noise=2.0)
    seeds = bytes(range(SEED_BYTES))

    def drawn(seed=seeds, **changes):
        plan = SimpleNamespace(**{**vars(asked(Purpose.TRAIN)), **changes})
        return noise_stream(seed, plan, "ease-noise")(64)

    assert drawn() == drawn(round=7)
    others = [
        {"purpose": "supports"},
        {"run_id": "b-run"},
        {"pass_number": 1},
        {"part": 1},
        {"inputs": (("open-items", bytes(32)),)},
        {"seed": bytes(SEED_BYTES)},
    ]
    assert len({drawn(), *(drawn(**each) for each in others)}) == len(others) + 1

    # A host that restarts has its seeds back, and so its noise; another host draws its own.
    kept = {}
    side = host(options, lambda private: kept.setdefault("private", private))
    again = host(options, lambda private: kept["private"])
    first = summed(side, options, Purpose.SUPPORTS)["supports"]
    np.testing.assert_array_equal(first, summed(again, options, Purpose.SUPPORTS, number=9)["supports"])
    assert (first != summed(host(options), options, Purpose.SUPPORTS)["supports"]).any()


def test_the_report_of_a_run_with_noise_has_its_epsilon():
    run = settings(ease={"noise": 2.0, "most_items": 20})
    feed = make_feed(run, load(run), 0)
    known = train_in_process(run, feed, run_id="a-run", seed=0, see=lambda event: None).known
    report = together(run, about(feed.dataset), "a-run", [SeedOutcome(0, "", from_cos(known, EaseReport))])
    assert report.epsilon == pytest.approx(run.own.epsilon(60, 80))
    ((name, text),) = report.facts()
    assert (name, "at delta 1e-05" in text) == ("Differential privacy", True)
    assert EaseReport.read(json.loads(json.dumps(report.content()))).epsilon == report.epsilon
    assert settings().own.epsilon(60, 80) is None


# --- Attacks ------------------------------------------------------------------------------------------------------


def lonely():
    """Return histories, of which many users have an item of their own, and what is true of them."""
    rng = np.random.default_rng(4)
    x = rng.random((40, 120)) < 0.08 + 0.3 * (np.arange(120) < 20)
    x[:, 80:] = False
    x[np.arange(40), 80 + np.arange(40)] = True
    user, item = np.nonzero(x)
    return x.astype(float), Truth(user, item, np.ones(len(user), bool), 40, 120)


def test_a_sum_without_floors_gives_away_the_history_of_each_user_who_alone_has_an_item():
    x, true = lonely()
    found = attack_pairs([(tuple(range(40)), x.T @ x)], true)
    assert found["singles"]["histories"] == found["singles"]["precision"] == 1
    assert found["pairs"]["auc"] == 1
    assert found["pairs"]["popularity_auc"] < 0.95


def test_with_floors_and_noise_the_same_attack_finds_no_more_than_popularity():
    x, true = lonely()
    opened = x.sum(axis=0) >= 5
    y = x * opened
    noise = np.random.default_rng(1).normal(0, 15, (120, 120))
    noisy = y.T @ y + np.triu(noise) + np.triu(noise, 1).T
    found = attack_pairs([(tuple(range(40)), noisy)], true)
    assert found["singles"]["histories"] == 0
    assert found["pairs"]["auc"] < found["pairs"]["popularity_auc"] + 0.05


def test_the_server_applies_sums_and_serves_open_items_and_the_model():
    options = EaseSettings(min_touch=3, min_pairs=1, ridge=7.0)
    side = EaseServer(options, ITEMS, 0, 1)
    x = histories()
    arrays = side.initial()
    assert set(side.model(arrays)) == {"open"}

    def one(purpose, **sums):
        return Summed(purpose, sums, USERS, 0, 0, np.ones(1), USERS)

    arrays = side.apply(arrays, one(Purpose.SUPPORTS, supports=x.sum(axis=0)))
    assert side.opened(arrays).all()
    counts = triangle(x.T @ x).astype(np.int64)
    arrays = side.apply(arrays, one(Purpose.TRAIN, pairs=options.packing.packed(counts)))
    np.testing.assert_array_equal(side.model(arrays)["precision"], precision(counts, 7.0))
    assert side.apply(arrays, one(Purpose.EVALUATE)) is arrays
