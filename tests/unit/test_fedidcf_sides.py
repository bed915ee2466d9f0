"""FedIDCF's sides of server and host: who contributes what in which pass, and runs in one process."""

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate, random
from coterie.data.keyed_order import key_hash
from coterie.rounds.sides import User, combining
from coterie.rounds.training import Purpose
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.systems.fedidcf.host import FedIdcfHost
from coterie.systems.fedidcf.server import FedIdcfServer
from coterie.systems.fedidcf.settings import FedIdcfSettings
from coterie.systems.shared.host_data import HostData

SPEC = {"users": 80, "items": 60, "interactions": 2_000, "genres": 4}
DATA = generate(SyntheticSpec(**SPEC))
SPLIT = random(DATA, validation=0.1, seed=3)
LEARNING = {"factors": 4, "hidden": 4, "local_epochs": 3, "factor_passes": 4, "latents": 30}
PLAN = FedIdcfSettings(**LEARNING)
USERS = range(80)


def settings(**more):
    rounds = {"cohorts": "all", "passes": 10, "evaluate_every": 2, **more.pop("rounds", {})}
    given = {
        "system": "fedidcf",
        "data": {"synthetic": SPEC},
        "rounds": rounds,
        "fedidcf": {**LEARNING, **more.pop("fedidcf", {})},
        "federation": {"hosts": 2},
        **more,
    }
    return RunSettings.model_validate(given)


def trained(**given):
    run = settings(**given)
    feed = make_feed(run, load(run), 0)
    return train_in_process(run, feed, run_id="a-run", seed=0, see=lambda event: None)


def host(plan=PLAN, users=DATA.users):
    data = HostData(users, DATA.items, DATA.user, DATA.item, SPLIT.part, DATA.rating)
    return FedIdcfHost(plan, data, key_hash(users, 0), 0, lambda private: private)


def plan_of(purpose, pass_number):
    given = {"purpose": purpose.value, "round": 1 + pass_number, "pass_number": pass_number, "noise_floor": 0}
    return type("Plan", (), given)()


def sums_of(side, server, pass_number, purpose=Purpose.TRAIN):
    model = server.model({**server.initial(), "popularity": np.ones(60, np.float32)})
    members = {0: [User(n, 0) for n in USERS]}
    opened = np.ones((1, 60), np.bool_)
    ((_, codes),) = side.contributions(plan_of(purpose, pass_number), model, opened, members)
    return server.layout(purpose).decode(codes, 80)


@pytest.fixture(scope="module")
def run():
    return trained()


def test_query_users_are_in_no_sum_of_items_and_of_training():
    side, server = host(), FedIdcfServer(PLAN, 60, 0, 1)
    keys = np.flatnonzero(side.trains)
    assert 0 < len(keys) < 80
    own = np.isin(DATA.user, keys) & (SPLIT.part == 0)
    supports = sums_of(side, server, 0, Purpose.SUPPORTS)["supports"]
    assert (supports == np.bincount(DATA.item[own], minlength=60)).all()
    before = side.private["factors"].copy()
    sums_of(side, server, 0)
    moved = (side.private["factors"] != before).any(axis=1)
    assert (np.flatnonzero(moved) == keys).all()


def test_a_pass_sums_its_own_segments_alone():
    side, server = host(), FedIdcfServer(PLAN, 60, 0, 1)
    n = side.trains.sum()
    for pass_number, expected in (
        (0, {"items"}),
        (4, {"values", "squares", "liked", "key_users"}),
        (5, set()),
    ):
        sums = sums_of(side, server, pass_number)
        assert {name for name, value in sums.items() if np.any(value)} - {"touched"} == expected
    found = sums_of(side, server, 4)
    vectors = side.private["factors"][side.trains, 2:].astype(np.float64)
    assert found["key_users"] == [n]
    assert found["values"] / n == pytest.approx(vectors.mean(axis=0), abs=1e-4)
    assert found["squares"] / n == pytest.approx((vectors**2).mean(axis=0), abs=1e-3)


def test_hosts_are_asked_for_key_users_only_and_for_combinations_when_they_are_needed():
    side = host()
    assert combining(side) is side
    for pass_number, publishes, lacks in ((3, 0, False), (4, 0, False), (5, side.trains.sum(), False)):
        plan = plan_of(Purpose.TRAIN, pass_number)
        assert len(side.key_users(plan, USERS)) == publishes
        assert side.lacks_latents(plan) == lacks
    assert side.lacks_latents(plan_of(Purpose.TRAIN, 6))
    side.take_latents(np.zeros((30, 4)))
    assert not side.lacks_latents(plan_of(Purpose.TRAIN, 6))


def test_a_run_predicts_key_users_by_factors_and_query_users_by_the_attention(run):
    history = [one["metrics"] for one in run.known["history"]]
    assert history[-1]["key_rmse"] < history[0]["rmse"] - 0.1
    last, users = history[-1], run.known["history"][-1]["users"]
    assert users["key_rmse"] + users["query_rmse"] == 80
    assert last["with_latents"] == 1
    assert abs(last["query_rmse"] - last["fold_in_query_rmse"]) < 0.05
    assert last["query_rmse"] != last["biases_query_rmse"]
    assert last["query_spread"] > 0.01
    assert run.known["chosen"]["epoch"] > PLAN.factor_passes


def test_vectors_of_query_users_differ(run):
    rows = np.concatenate([side.private["factors"][~side.trains] for side in run.hosts])
    assert len(np.unique(rows[:, 2:], axis=0)) == len(rows)


def test_hosts_of_a_run_have_the_same_combinations(run):
    first, second = (side.latents for side in run.hosts)
    assert first.shape == (30, 4)
    assert (first == second).all()


def test_a_run_is_the_same_again(run):
    assert [one["metrics"] for one in trained().known["history"]] == [
        one["metrics"] for one in run.known["history"]
    ]


@pytest.mark.parametrize("secure_sum", ["masked", "shared-key"])
def test_a_sum_changes_no_number(run, secure_sum):
    hidden = trained(
        secure_sum=secure_sum, federation={"hosts": 3}, encryption={"bits": 1024, "comparison": True}
    )
    assert [one["metrics"] for one in hidden.known["history"]] == [
        one["metrics"] for one in run.known["history"]
    ]


def test_with_too_few_key_users_query_users_have_biases_and_the_run_says_so():
    found = trained(fedidcf={"query": 0.9}, rounds={"passes": 8})
    last = found.known["history"][-1]["metrics"]
    assert last["with_latents"] == 0
    # Errors are rounded as they are sent.
    assert last["query_rmse"] == pytest.approx(last["biases_query_rmse"], abs=1e-5)


def test_of_few_key_users_some_may_be_lost_before_they_publish(run, monkeypatch):
    all_of_them = FedIdcfHost.key_users
    # The first key user of each of the two hosts does not publish.
    monkeypatch.setattr(
        FedIdcfHost, "key_users", lambda side, plan, users: all_of_them(side, plan, users)[1:]
    )
    found = trained(fedidcf={"latents": 200}, rounds={"passes": 8})
    count = sum(int(side.trains.sum()) for side in run.hosts)
    assert found.known["history"][-1]["metrics"]["with_latents"] == 1
    assert {side.latents.shape for side in found.hosts} == {(count * 4 // 5, 4)}


def test_a_new_user_is_served_by_a_fold_in(run):
    side, model = host(), run.hosts[0]
    server = FedIdcfServer(PLAN, 60, 0, 1)
    finished = server.model(run.trained.best)
    side.fold_in(finished)
    scores = side.recommend(finished, 3)
    assert scores.shape == (60,)
    assert scores.std() > 0
    assert model.latents is not None


def test_sums_that_may_have_few_key_users_are_warned_of():
    few = settings(fedidcf={"query": 0.9}, rounds={"cohorts": "groups", "cohort": 40, "group": 40})
    assert any("fewer than 5 key users" in one for one in few.own.warnings(few))
    many = settings(rounds={"cohorts": "groups", "cohort": 40, "group": 40})
    assert not any("key users" in one for one in many.own.warnings(many) if "fewer" in one)
    hidden = settings(secure_sum="masked")
    assert any("is its vector" in one for one in many.own.warnings(many))
    assert not any("is its vector" in one for one in hidden.own.warnings(hidden))


def test_an_abandoned_sum_is_formed_again_as_the_second_phase_needs_moments():
    assert FedIdcfServer(PLAN, 60, 0, 1).needs_every_sum


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"rounds": {"passes": 6}}, "expected rounds.passes above 6"),
        ({"rounds": {"patience": 3}}, "may have no second phase"),
        ({"rounds": {"choose_by": "validation_rmse"}}, "expected one of validation_attention_rmse"),
        ({"rounds": {"privacy": {"place": "local", "noise": 1, "clip": 1}}}, "no epsilon counts them"),
        ({"rounds": {"aggregation": {"rule": "median"}}}, "expected rule 'sum'"),
        ({"secure_sum": "encrypted"}, "need that for pseudo meta-latents"),
        (
            {"secure_sum": "shared-key", "federation": {"hosts": 3}, "encryption": {"rotate_every": 3}},
            "combined once, under the key of the sums",
        ),
        ({"split": {"kind": "leave-last-out"}}, "split.kind"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given, match):
    with pytest.raises(ValidationError, match=match):
        settings(**given)
