"""FedMF's sides of server and host: what each hands over, trained in one process under every sum."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from coterie.config.run import EncryptionSettings, RunSettings
from coterie.data import SyntheticSpec, generate, random
from coterie.data.keyed_order import key_hash
from coterie.errors import ConfigError, DataError
from coterie.evaluation.baselines import damped_mean
from coterie.evaluation.holdout import TEST, TRAIN
from coterie.evaluation.rated import figures
from coterie.rounds.sides import Summed, User
from coterie.rounds.training import Purpose
from coterie.studies.in_process import train_in_process, train_plan
from coterie.studies.run_data import load, make_feed
from coterie.studies.run_plan import run_plan
from coterie.systems.fedmf.host import FedMfHost
from coterie.systems.fedmf.mathematics import predicted
from coterie.systems.fedmf.server import FedMfServer
from coterie.systems.fedmf.settings import FIGURES, MEASURES, FedMfSettings
from coterie.systems.fedmf.study.references import fedmf_references, mean_scores
from coterie.systems.registry import ratings_of
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.metric_segments import LARGEST, names_of

SPEC = {"users": 60, "items": 80, "interactions": 1_500, "genres": 4}
DATA = generate(SyntheticSpec(**SPEC))
SPLIT = random(DATA, validation=0.1, seed=3)
PLAN = FedMfSettings(biases=False, factors=4, min_touch=1)
SEVERAL = range(3)
"""Seeds of divisions of the data: a comparison of figures must come out the same for each, or in their mean."""


def settings(hosts=2, passes=10, evaluate_every=5, **more):
    rounds = {"group": 60, "passes": passes, "evaluate_every": evaluate_every, **more.pop("rounds", {})}
    given = {
        "system": "fedmf",
        "data": {"synthetic": SPEC},
        "rounds": rounds,
        "federation": {"hosts": hosts},
        **more,
    }
    return RunSettings.model_validate(given)


def trained(seed=0, **given):
    """Return what a run in one process comes to."""
    run = settings(**given)
    feed = make_feed(run, load(run), seed)
    return train_in_process(run, feed, run_id="a-run", seed=seed, see=lambda event: None)


def held(part=SPLIT.part, rating=DATA.rating):
    return HostData(DATA.users, DATA.items, DATA.user, DATA.item, part, rating)


def host(plan=PLAN, data=None):
    keys = key_hash(DATA.users, 0)
    return FedMfHost(plan, held() if data is None else data, keys, 0, lambda private: private)


def model_of(plan=PLAN, groups=1):
    server = FedMfServer(plan, len(DATA.items), 0, groups)
    arrays = server.initial()
    arrays["popularity"] = np.bincount(DATA.item, minlength=len(DATA.items)).astype(np.float32)
    return server.model(arrays)


def sums(side, purpose, model, opened=None, users=range(60)):
    """Return the decoded sum of some users of one member."""
    asked = SimpleNamespace(purpose=purpose.value, round=1, pass_number=0, noise_floor=0)
    ((_, codes),) = side.contributions(asked, model, opened, {0: [User(n, 0) for n in users]})
    return side.layout(purpose).decode(codes, len(users))


def test_settings_come_back_from_the_plan_as_they_were():
    for given in (
        {},
        {"biases": False},
        {"steps": "sum"},
        {"steps": "sum", "biases": True},
        {"local_epochs": 20, "ridge": 0.0},
        {"local_epochs": 20.0, "ridge": 0},
        {"local_epochs": 2, "proximal": 0.5, "stragglers": 0.25},
        {"scaffold": True},
    ):
        plan = FedMfSettings(**given, min_touch=5)
        assert FedMfSettings.from_json(plan.to_json()) == plan


def test_a_plan_has_corrections_of_local_steps_only_where_they_are_set():
    plain, corrected = (FedMfSettings(local_epochs=2, proximal=mu).to_json() for mu in (0.0, 0.5))
    assert "proximal" not in plain
    assert "stragglers" not in plain
    assert "scaffold" not in plain
    assert '"proximal":0.5' in corrected


def test_equal_settings_are_equal_texts_however_they_were_written():
    assert (
        FedMfSettings(local_epochs=3.0, ridge=0).to_json()
        == FedMfSettings(local_epochs=3, ridge=0.0).to_json()
    )


def test_the_range_of_ratings_is_read_from_the_plan():
    assert ratings_of("fedmf", PLAN.to_json()) == (0.5, 5.0)


@pytest.mark.parametrize(
    "change",
    [
        {"min_touch": 0},
        {"more": 1},
        {"learning": 3},
        {"local_epochs": 0},
        {"local_epochs": True},
        {"local_epochs": 1.5},
        {"rate": None},
        {"rate": math.nan},
        {"ridge": math.inf},
        {"steps": "median"},
        {"lowest": 4.0, "highest": 3.0},
    ],
    ids=str,
)
def test_settings_that_are_not_of_the_system_are_refused(change):
    text = json.dumps({**json.loads(PLAN.to_json()), **change})
    with pytest.raises(ConfigError):
        FedMfSettings.from_json(text)


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"biases": False},
        {"biases": False, "local_epochs": 5},
        {"steps": "sum", "rate": 3e-3, "private_rate": 1e-3},
    ],
    ids=str,
)
def test_it_predicts_ratings_better_than_the_mean_of_an_item_does(way):
    run = settings()
    for seed in SEVERAL:
        known = trained(seed, passes=20, evaluate_every=10, fedmf={"min_touch": 1, **way}).known
        assert known["phase"] == "done"
        assert tuple(sorted(known["chosen"]["metrics"])) == tuple(sorted(FIGURES))
        feed = make_feed(run, load(run), seed)
        data, own = feed.dataset, feed.split.train
        means = damped_mean(data.item[own], data.rating[own], len(data.items))
        table = np.broadcast_to(means, (len(data.users), len(data.items)))
        beside = figures(feed.rated().measure(table.__getitem__))
        assert known["chosen"]["metrics"]["rmse"] < beside["rmse"] - 0.01


def test_the_version_with_the_lowest_error_on_validation_items_counts():
    # Twice as many factors as a user has ratings, and nothing that holds them: the error grows again.
    fedmf = {
        "biases": False,
        "factors": 30,
        "ridge": 0.0,
        "rate": 0.1,
        "private_rate": 0.1,
        "local_epochs": 30,
        "min_touch": 1,
    }
    few = {"synthetic": {**SPEC, "interactions": 900}}
    found = []
    for seed in SEVERAL:
        known = trained(seed, passes=8, evaluate_every=2, rounds={"patience": 0}, data=few, fedmf=fedmf).known
        errors = [one["metrics"]["validation_rmse"] for one in known["history"]]
        assert known["chosen"]["metrics"]["validation_rmse"] == min(errors)
        found.append((errors[0], min(errors), errors[-1]))
    first, lowest, last = np.mean(found, axis=0)
    assert lowest + 0.01 < last < first - 0.05


def test_figures_in_a_sum_are_those_of_all_users_at_one_place():
    made = trained(passes=5)
    last = made.known["history"][-1]
    run = settings()
    feed = make_feed(run, load(run), 0)
    server = FedMfServer(run.fedmf, len(DATA.items), 0, 1)
    width = run.fedmf.width
    model, factors = server.model(made.trained.arrays), np.empty((60, width), np.float32)
    for number, side in enumerate(made.hosts):
        factors[np.unique(feed.dataset.user[feed.host[feed.dataset.user] == number])] = side.private[
            "factors"
        ]
    rated = dataclasses.replace(feed.rated(), training=True)
    table = predicted(run.fedmf, factors @ model["items"].T)
    expected = figures(rated.measure(table.__getitem__))
    for name in FIGURES:
        assert last["metrics"][name] == pytest.approx(expected[name], abs=2e-3), name
    own = feed.split.train
    mine = table[feed.dataset.user[own], feed.dataset.item[own]]
    train_rmse = np.sqrt(((mine - feed.dataset.rating[own]) ** 2).mean())
    assert last["metrics"]["train_rmse"] == pytest.approx(train_rmse, abs=2e-3)


@pytest.mark.parametrize(
    ("secure_sum", "hosts", "users"),
    [("clear", 1, False), ("clear", 3, True), ("masked", 3, False), ("masked", 3, True)],
)
@pytest.mark.parametrize(
    "way", [{}, {"steps": "sum"}, {"proximal": 0.5, "stragglers": 0.5}, {"scaffold": True}], ids=str
)
def test_numbers_depend_neither_on_the_sum_nor_on_how_users_are_spread(way, secure_sum, hosts, users):
    fedmf = {"local_epochs": 2, **way}
    plain = trained(passes=2, evaluate_every=2, fedmf=fedmf)
    other = trained(
        hosts=hosts,
        passes=2,
        evaluate_every=2,
        secure_sum=secure_sum,
        rounds={"party_per_user": users},
        fedmf=fedmf,
    )
    assert other.known["history"][-1]["metrics"] == plain.known["history"][-1]["metrics"]


@pytest.mark.parametrize("fedmf", [{}, {"scaffold": True}], ids=str)
def test_an_encrypted_sum_changes_no_number(fedmf):
    run = settings(passes=2, evaluate_every=1, fedmf=fedmf)
    feed = make_feed(run, load(run), 0)
    plan = run_plan(run, run_id="a-run", seed=0)
    plan.secure_sum = "encrypted"
    key = EncryptionSettings(bits=1024, comparison=True, obfuscators="short")
    encrypted = train_plan(plan, feed, hosts=2, see=lambda event: None, encryption=key)
    clear = train_in_process(run, feed, run_id="a-run", seed=0, see=lambda event: None)
    assert [one["metrics"] for one in encrypted.known["history"]] == [
        one["metrics"] for one in clear.known["history"]
    ]


@pytest.mark.parametrize("way", [{}, {"scaffold": True}], ids=str)
def test_all_ratings_in_one_place_come_to_the_same_errors_but_for_rounding(way):
    given = {"passes": 10, "evaluate_every": 5, "fedmf": {"local_epochs": 3, **way}}
    run = settings(**given)
    for seed in SEVERAL:
        federated = trained(seed, **given).known["history"]
        beside = fedmf_references(run, make_feed(run, load(run), seed), seed)
        assert [one["epoch"] for one in beside["mf"].history] == [0, 5, 10]
        for one, other in zip(federated, beside["mf"].history, strict=True):
            for name in ("rmse", "train_rmse", "validation_rmse"):
                assert one["metrics"][name] == pytest.approx(other["metrics"][name], abs=1e-3), name
        assert federated[-1]["metrics"]["rmse"] < federated[0]["metrics"]["rmse"] - 0.05
        assert beside["means"].metrics["rmse"] < beside["item_mean"].metrics["rmse"] - 0.01


def test_the_mean_of_items_and_users_is_what_both_say():
    run = settings()
    feed = make_feed(run, load(run), 0)
    data, own = feed.dataset, feed.split.train
    scores = mean_scores(feed)
    mine = own & (data.user == 7)
    by_item = damped_mean(data.item[own], data.rating[own], len(data.items))
    more = (data.rating[mine] - by_item[data.item[mine]]).sum() / (np.count_nonzero(mine) + 5)
    np.testing.assert_allclose(scores[7], by_item + more, rtol=1e-5)


def test_groups_train_only_items_that_enough_of_their_own_users_have_rated():
    made = trained(passes=2, evaluate_every=2, rounds={"cohorts": "groups", "cohort": 20, "group": 20})
    arrays = made.trained.arrays
    assert len(arrays["supports"]) == 3
    opened = arrays["supports"] >= 3
    assert 0 < opened[0].mean() < 1
    found = sums(host(), Purpose.TRAIN, model_of(), opened)
    assert not found["items"][~opened[0]].any()
    assert found["items"][opened[0]].any(axis=1).mean() > 0.9
    first = FedMfServer(settings().fedmf, 80, 0, 3).initial()["model.items"]
    moved = (arrays["model.items"] != first).any(axis=1)
    np.testing.assert_array_equal(moved, opened.any(axis=0))


def test_the_server_divides_by_the_raters_that_a_cohort_has_or_is_expected_to_have():
    server = FedMfServer(PLAN.model_copy(update={"min_touch": 2}), 3, 0, 2)
    arrays = server.initial()
    for group, supports in enumerate(([4, 1, 2], [2, 3, 0])):
        summed = Summed(
            Purpose.SUPPORTS, {"supports": np.array(supports, float)}, 5, 0, group, np.ones(2), 10
        )
        arrays = server.apply(arrays, summed)
    change = np.ones((3, 4))

    def moved(shares):
        summed = Summed(Purpose.TRAIN, {"items": change}, 5, 0, 0, np.array(shares), 10)
        return (server.apply(arrays, summed)["model.items"] - arrays["model.items"])[:, 0]

    np.testing.assert_allclose(moved([1, 1]), [1 / 6, 1 / 3, 1 / 2], rtol=1e-5)
    # Where nobody of the cohort is expected to have rated an item, nothing is made of what is there.
    np.testing.assert_allclose(moved([1, 0]), [1 / 4, 0, 1 / 2], rtol=1e-5)
    np.testing.assert_allclose(moved([0.5, 0.5]), [1 / 3, 1 / 1.5, 1], rtol=1e-5)
    np.testing.assert_allclose(server.model(arrays)["popularity"], [1, 1, 1])


def test_users_without_ratings_contribute_nothing_and_keep_their_first_factors():
    part = np.where(DATA.user < 5, TEST, SPLIT.part)
    side, model = host(data=held(part)), model_of()
    before = side.private["factors"].copy()
    assert not sums(side, Purpose.TRAIN, model, users=range(5))["items"].any()
    np.testing.assert_array_equal(side.private["factors"], before)
    assert sums(side, Purpose.TRAIN, model)["items"].any()
    np.testing.assert_array_equal(side.private["factors"][:5], before[:5])
    assert (side.private["factors"][5:] != before[5:]).any(axis=1).all()


def test_interactions_without_a_rating_neither_teach_nor_count():
    rating = np.where(np.arange(len(DATA)) % 2, DATA.rating, np.nan)
    side, model = host(data=held(rating=rating)), model_of()
    own = (SPLIT.part == TRAIN) & np.isfinite(rating)
    supports = sums(side, Purpose.SUPPORTS, model)["supports"]
    np.testing.assert_array_equal(supports, np.bincount(DATA.item[own], minlength=80))


@pytest.mark.parametrize("rating", [0.0, 5.5])
def test_a_rating_out_of_range_is_refused(rating):
    with pytest.raises(DataError, match=r"ratings of this host out of range: 1; expected 0.5 to 5") as caught:
        host(data=held(rating=np.where(np.arange(len(DATA)) == 7, rating, DATA.rating)))
    assert "fedmf.lowest" in str(caught.value.hint)


def test_the_sums_of_squares_are_over_all_ratings_together():
    side, model = host(), model_of()
    found = sums(side, Purpose.EVALUATE, model)
    totals = FedMfServer(PLAN, 80, 0, 1).measured(Purpose.EVALUATE, found)
    assert tuple(totals) == names_of(MEASURES)
    assert totals["ratings"][0] == np.count_nonzero(SPLIT.part == TEST)
    assert totals["train_ratings"][0] == np.count_nonzero(SPLIT.part == TRAIN)


def test_the_sums_of_squares_are_whole_on_a_wide_range_of_ratings():
    # One user alone has errors whose squares are above the largest value that a metric may have.
    plan = FedMfSettings(factors=4, min_touch=1, biases=True, lowest=0, highest=10_000)
    side = host(plan, held(rating=np.where(DATA.rating > 2, 10_000.0, 0.0).astype(np.float32)))
    found = sums(side, Purpose.EVALUATE, model_of(plan))
    totals = FedMfServer(plan, 80, 0, 1).measured(Purpose.EVALUATE, found)
    exact = side.measured["squared_error"]
    assert np.nanmax(exact) > LARGEST
    assert totals["squared_error"][0] == pytest.approx(np.nansum(exact), rel=1e-3)


def test_what_is_recommended_is_scored_by_the_factor_that_the_user_kept():
    side, model = host(), model_of()
    sums(side, Purpose.TRAIN, model)
    expected = model["items"] @ side.private["factors"][9]
    np.testing.assert_allclose(side.recommend(model, 9), expected, rtol=1e-5)
