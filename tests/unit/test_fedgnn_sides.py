"""FedGNN's sides of server and host: what each hands over, and runs in one process."""

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate, random
from coterie.data.keyed_order import key_hash
from coterie.evaluation.holdout import TRAIN
from coterie.rounds.sides import Summed, User, expanding
from coterie.rounds.training import Purpose
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.systems.fedgnn.host import FedGnnHost
from coterie.systems.fedgnn.neighbours import published_items
from coterie.systems.fedgnn.server import SHARED, SHARERS, FedGnnServer
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.shared.host_data import HostData

SPEC = {"users": 60, "items": 80, "interactions": 1_500, "genres": 4}
DATA = generate(SyntheticSpec(**SPEC))
SPLIT = random(DATA, validation=0.1, seed=3)
AROUND = FedGnnSettings(factors=4, neighbours=8, tags=10)


def settings(**more):
    rounds = {"group": 60, "passes": 6, "evaluate_every": 2, **more.pop("rounds", {})}
    given = {
        "system": "fedgnn",
        "data": {"synthetic": SPEC},
        "rounds": rounds,
        "fedgnn": {"factors": 4, "local_epochs": 3},
        "federation": {"hosts": 2},
        **more,
    }
    return RunSettings.model_validate(given)


def trained(**given):
    run = settings(**given)
    feed = make_feed(run, load(run), 0)
    return train_in_process(run, feed, run_id="a-run", seed=0, see=lambda event: None)


def host(plan=AROUND):
    data = HostData(DATA.users, DATA.items, DATA.user, DATA.item, SPLIT.part, DATA.rating)
    return FedGnnHost(plan, data, key_hash(DATA.users, 0), 0, lambda private: private)


def test_groups_sum_what_users_rated_and_beside_it_what_they_publish():
    side, server = host(), FedGnnServer(AROUND, len(DATA.items), 0, 1)
    plan = type("Plan", (), {"purpose": "supports", "round": 1, "pass_number": 0, "noise_floor": 0})()
    ((_, codes),) = side.contributions(plan, {}, None, {0: [User(n, 0) for n in range(60)]})
    sums = server.layout(Purpose.SUPPORTS).decode(codes, 60)
    own = SPLIT.part == TRAIN
    assert (sums["supports"] == np.bincount(DATA.item[own], minlength=len(DATA.items))).all()
    published = np.zeros(len(DATA.items))
    for user in range(60):
        items = DATA.item[own & (DATA.user == user)]
        published[published_items(items, int(side.keys[user]), len(DATA.items), 10, 0)] += 1
    assert (sums[SHARED] == published).all()
    assert published.sum() < own.sum()
    summed = Summed(Purpose.SUPPORTS, sums, 60, 0, 0, np.ones(1), 60)
    model = server.model(server.apply(server.initial(), summed))
    users = side.sharers(model)
    # Levels are a quarter of a doubling wide, and of items below the floor nobody is told more than that.
    near = published >= 5
    assert (np.abs(users[near] - published[near]) <= 0.1 * published[near] + 1).all()
    assert len(set(users[~near].tolist())) <= 1
    assert SHARERS in model


def test_a_run_without_neighbours_tells_and_sums_nothing_of_them():
    plain = FedGnnSettings(factors=4)
    server = FedGnnServer(plain, 80, 0, 1)
    assert [one.name for one in server.layout(Purpose.SUPPORTS).segments] == ["supports"]
    assert SHARERS not in server.model(server.initial())
    assert expanding(host(plain)) is None
    assert expanding(host()) is not None
    assert "with_neighbours" not in server.metrics


def test_users_publish_and_ask_when_it_is_due_and_only_those_who_rated():
    side = host(AROUND.model_copy(update={"neighbours_after": 3, "refresh": 4}))
    users = [0, 1, 2]

    def plan(pass_number):
        return type("Plan", (), {"pass_number": pass_number})()

    found = []
    for pass_number in range(12):
        due, curious = side.due(plan(pass_number), users), side.curious(plan(pass_number), users)
        for user in due:
            side.published(plan(pass_number), user)
        for user in curious:
            side.met(plan(pass_number), user, [])
        found.append((bool(due), bool(curious)))
    assert [n for n, (due, _) in enumerate(found) if due] == [2, 6, 10]
    assert [n for n, (_, curious) in enumerate(found) if curious] == [3, 7, 11]


def test_the_least_epoch_grows_with_publications():
    plan = AROUND.model_copy(update={"neighbours_after": 3, "refresh": 4, "rotate_every": 6})
    side = host(plan)
    # Publications are in passes 2, 6, 10, 14, 18: after 0, 4, 8, 12 and 16 passes.
    epochs = [side.epoch(type("Plan", (), {"pass_number": n})()) for n in range(20)]
    assert epochs == [1] * 10 + [2] * 4 + [3] * 6
    kept = host(AROUND)
    assert kept.epoch(type("Plan", (), {"pass_number": 1000})()) == 1


def test_neighbours_are_kept_in_an_order_of_their_own_up_to_the_most():
    side = host()
    plan = type("Plan", (), {"pass_number": 2})()
    found = [np.full(4, value, np.float32) for value in range(12)]
    side.met(plan, 5, found)
    once = side.private["neighbours"][5].copy()
    side.met(plan, 5, found[::-1])
    assert (side.private["neighbours"][5] == once).all()
    assert side.private["met"][5].tolist() == [8, 3, 0]


def test_training_gets_better_and_neighbours_change_what_is_learned():
    plain = trained()
    around = trained(fedgnn={"factors": 4, "local_epochs": 3, "neighbours": 8, "tags": 10})
    for made in (plain, around):
        found = [one["metrics"]["rmse"] for one in made.known["history"]]
        assert found[-1] < found[0] - 0.1
    first, last = (
        [made.known["history"][which]["metrics"]["rmse"] for made in (around, plain)] for which in (1, -1)
    )
    # Errors are rounded as they are sent, and so differ in the last digits.
    assert np.isclose(*first, atol=1e-5)
    assert not np.isclose(*last, atol=1e-5)
    shares = [one["metrics"]["with_neighbours"] for one in around.known["history"]]
    assert shares[:2] == [0, 0]
    assert shares[-1] == 1


@pytest.mark.parametrize("secure_sum", ["masked", "encrypted", "shared-key"])
def test_a_sum_changes_no_number(secure_sum):
    given = {
        "fedgnn": {"factors": 3, "local_epochs": 2, "neighbours": 6, "tags": 8, "samples": 1},
        "rounds": {"passes": 3, "evaluate_every": 3},
        "federation": {"hosts": 3},
        "encryption": {"bits": 1024, "comparison": True},
    }
    clear, hidden = trained(**given), trained(secure_sum=secure_sum, **given)
    assert [one["metrics"] for one in clear.known["history"]] == [
        one["metrics"] for one in hidden.known["history"]
    ]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"rounds": {"passes": 300}, "fedgnn": {"neighbours": 4, "refresh": 2}},
            "expected fedgnn.refresh 5 or more",
        ),
        (
            {"rounds": {"passes": 300}, "fedgnn": {"neighbours": 4, "refresh": 2, "rotate_every": 128}},
            "or fedgnn.rotate_every from 2 to 127",
        ),
        (
            {
                "fedgnn": {"neighbours": 4},
                "rounds": {"privacy": {"place": "local", "noise": 1, "clip": 1}},
            },
            "embeddings that users share",
        ),
        ({"split": {"kind": "leave-last-out"}}, "split.kind"),
        ({"rounds": {"choose_by": "validation_hit_ratio@10"}}, "choose_by"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given, match):
    with pytest.raises(ValidationError, match=match):
        settings(**given)


def test_a_user_with_items_of_its_own_alone_trains_without_neighbours(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["user,item,rating,timestamp"]
    for user in range(40):
        lines += [
            f"u{user},i{item},{1 + (user + item) % 5},{item}" for item in rng.choice(20, 10, replace=False)
        ]
    lines += [f"alone,own{item},{1 + item % 5},{item}" for item in range(10)]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(lines) + "\n")
    made = trained(
        data={"path": str(path)},
        rounds={"group": 41, "passes": 4},
        fedgnn={"factors": 4, "local_epochs": 3, "neighbours": 8, "tags": 10},
    )
    last = made.known["history"][-1]["metrics"]
    assert last["with_neighbours"] == pytest.approx(40 / 41)
    assert last["neighbours_current"] == 1
    assert np.isfinite(last["rmse"])


def test_a_key_that_is_replaced_lets_users_ask_as_long_as_the_run_lasts():
    made = settings(
        rounds={"passes": 300}, fedgnn={"factors": 4, "neighbours": 4, "refresh": 2, "rotate_every": 127}
    )
    assert made.rounds.passes == 300
