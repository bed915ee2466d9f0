"""FedRec++: the model of FedMF to the bit, what denoisers and the server see, and the settings that go together."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate, random
from coterie.data.keyed_order import key_hash
from coterie.errors import RunError
from coterie.evaluation.holdout import TRAIN
from coterie.privacy.attacks.scoring import mean_auc
from coterie.rounds import policy
from coterie.rounds.sides import User
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import Member, SumPlan
from coterie.studies.in_process import InProcess, train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.systems.fedmf.host import FedMfHost
from coterie.systems.fedmf.mathematics import moving
from coterie.systems.fedmf.server import FedMfServer
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.fedmf.study.denoised import rated_shares
from coterie.systems.fedmf.study.fillings import own_direction
from coterie.systems.registry import combination
from coterie.systems.shared.host_data import HostData
from coterie.systems.visibility import matrix
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan

SPEC: dict[str, Any] = {"users": 90, "items": 120, "interactions": 2_200, "genres": 4}
DATA = generate(SyntheticSpec(**SPEC))
SPLIT = random(DATA, validation=0.1, seed=3)
FEW = 10


def run_of(secure_sum: str = "denoised", hosts: int = 3, **changes: Any) -> RunSettings:
    fedmf = {"factors": 4, "min_touch": 2, **changes.pop("fedmf", {"samples": 1})}
    rounds = {
        "cohorts": "all",
        "passes": 6,
        "evaluate_every": 3,
        "party_per_user": True,
        "min_cohort": FEW,
        "min_sum": FEW,
        **changes.pop("rounds", {}),
    }
    return RunSettings.model_validate(
        {
            "system": "fedmf",
            "secure_sum": secure_sum,
            "data": {"synthetic": SPEC},
            "fedmf": fedmf,
            "rounds": rounds,
            "federation": {"hosts": hosts},
            **changes,
        }
    )


def trained(run: RunSettings) -> InProcess:
    return train_in_process(run, make_feed(run, load(run), 0), run_id="a-run", seed=0, see=lambda event: None)


@pytest.fixture(scope="module")
def plain() -> InProcess:
    return trained(run_of("clear", fedmf={}))


@pytest.mark.parametrize(
    ("hosts", "fedmf"),
    [
        (3, {"samples": 1}),
        (5, {"samples": 3, "filling": "hybrid", "fill_after": 2}),
        (3, {"samples": 1, "resample": True}),
    ],
)
def test_the_model_is_that_of_fedmf_without_sampled_items_to_the_bit(
    plain: InProcess, hosts: int, fedmf: dict[str, Any]
) -> None:
    made = trained(run_of(hosts=hosts, fedmf=fedmf))
    for arrays, expected in (
        (made.trained.arrays, plain.trained.arrays),
        (made.trained.best, plain.trained.best),
    ):
        assert arrays.keys() == expected.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert [one["metrics"] for one in made.known["history"]] == [
        one["metrics"] for one in plain.known["history"]
    ]
    assert all(not one["left_out"] and not one["withdrawn"] for one in made.known["rounds"])


def test_without_denoisers_sampled_items_change_the_model(plain: InProcess) -> None:
    noisy = trained(run_of("clear"))
    assert not np.array_equal(noisy.trained.arrays["model.items"], plain.trained.arrays["model.items"])
    assert noisy.trained.arrays["supports"].sum() > 1.5 * plain.trained.arrays["supports"].sum()


def test_cohorts_of_groups_come_to_the_model_of_fedmf_too() -> None:
    rounds = {"cohorts": "groups", "cohort": 45, "group": 45}
    one, other = (
        trained(run_of(name, fedmf=fedmf, rounds=rounds))
        for name, fedmf in (("denoised", {"samples": 1}), ("clear", {}))
    )
    np.testing.assert_array_equal(one.trained.arrays["model.items"], other.trained.arrays["model.items"])


# --- what is seen ----------------------------------------------------------------------------------------------------


def side_of(**fedmf: Any) -> FedMfHost:
    settings = FedMfSettings.model_validate({"factors": 6, "min_touch": 1, **fedmf})
    data = HostData(DATA.users, DATA.items, DATA.user, DATA.item, SPLIT.part, DATA.rating)
    return FedMfHost(settings, data, key_hash(DATA.users, 0), 0, lambda private: private)


def seen(side: FedMfHost, purpose: Purpose, floor: int = FEW) -> dict[int, NDArray[np.uint32]]:
    """Return what each user submits, and the noise in it, by user; with a model that has learned something."""
    plan = SumPlan(
        "run",
        1,
        purpose.value,
        "denoised",
        bytes(32),
        bytes(32),
        (Member(bytes(32), "d"),),
        noise_floor=floor,
    )
    server = FedMfServer(side.settings, 120, 0, 1)
    model = server.model({**server.initial(), "popularity": np.ones(120, np.float32)})
    rng = np.random.default_rng(4)
    drawn = rng.normal(0, 0.3, model["items"].shape) * moving(side.settings)[1]
    model["items"] = (model["items"] + drawn).astype(np.float32)
    members = {user: [User(user, 0)] for user in range(len(DATA.users))}
    return dict(side.contributions(plan, model, None, members))


def rated(user: int) -> NDArray[np.bool_]:
    found = np.zeros(120, np.bool_)
    found[DATA.item[(DATA.user == user) & (SPLIT.part == TRAIN)]] = True
    return found


@pytest.mark.parametrize("purpose", [Purpose.SUPPORTS, Purpose.TRAIN])
def test_what_is_left_without_the_noise_is_what_fedmf_sends(purpose: Purpose) -> None:
    apart = seen(side_of(samples=1), purpose)
    bare = seen(side_of(), purpose, floor=0)
    for user, (codes, noise) in apart.items():
        np.testing.assert_array_equal(codes - noise, bare[user])
        assert noise.any()
    # Without a floor of noise, as in a sum in clear, a contribution names nothing apart.
    clear = seen(side_of(samples=1), purpose, floor=0)
    for user, codes in clear.items():
        np.testing.assert_array_equal(codes, apart[user][0])


@pytest.mark.parametrize("purpose", [Purpose.SUPPORTS, Purpose.TRAIN])
def test_the_server_and_one_denoiser_together_tell_rated_from_sampled_items(purpose: Purpose) -> None:
    """Also what a denoiser would tell that added up the noise of one user, or of two lists that differ by one."""
    side = side_of(samples=1)
    name = "supports" if purpose is Purpose.SUPPORTS else "items"
    layout, made = side.layout(purpose), seen(side, purpose)
    sum_of_two = made[0][1] + made[1][1]
    for user, noise in ((0, sum_of_two - made[1][1]), (5, made[5][1])):
        codes = made[user][0]
        alone = layout.decode(codes, 1)[name].reshape(120, -1).any(axis=1)
        both = layout.decode(codes - noise, 1)[name].reshape(120, -1).any(axis=1)
        own = rated(user)
        assert mean_auc(both[alone].astype(float), own[alone][None])[0] == 1
        np.testing.assert_array_equal(both, own)
        # The server alone sees that about half of what moved was rated.
        assert own[alone].mean() < 0.6


@pytest.mark.parametrize("filling", ["average", "hybrid"])
def test_a_denoiser_sees_sampled_items_and_the_direction_of_the_users_factor(filling: str) -> None:
    side = side_of(samples=1, filling=filling, **({"fill_after": 0} if filling == "hybrid" else {}))
    before = side.private["factors"].astype(np.float64)
    layout, made = side.layout(Purpose.TRAIN), seen(side, Purpose.TRAIN)
    server = FedMfServer(side.settings, 120, 0, 1)
    items = server.initial()["model.items"].astype(np.float64)
    rng = np.random.default_rng(4)
    items = (items + rng.normal(0, 0.3, items.shape) * moving(side.settings)[1]).astype(np.float32)
    moves, found = moving(side.settings)[1], []
    for user, (_, noise) in made.items():
        change = noise.view(np.int32)[layout.places["items"]].reshape(120, -1) * layout["items"].step
        touched = change.any(axis=1)
        assert not (touched & rated(user)).any()
        own = np.where(moves > 0, before[user], 0)
        _, direction = own_direction(change[touched], items[touched].astype(np.float64), side.settings)
        found.append(abs(direction @ own) / np.linalg.norm(own))
    assert np.mean(found) > 0.9


def test_sums_of_noise_tell_what_few_users_of_a_group_touch() -> None:
    side = side_of(samples=1)
    layout, made = side.layout(Purpose.SUPPORTS), seen(side, Purpose.SUPPORTS)

    def attacked(users: range) -> tuple[float, float]:
        touched = {user: layout.decode(made[user][0], 1)["supports"] > 0 for user in users}
        sampled = np.sum([made[user][1].view(np.int32) for user in users], axis=0)
        scores = rated_shares(touched, sampled)
        areas = [mean_auc(scores[user][own], rated(user)[own][None])[0] for user, own in touched.items()]
        known = np.concatenate([scores[user][own] for user, own in touched.items()])
        return float(np.mean([one for one in areas if one is not None])), float(
            np.mean((known == 0) | (known == 1))
        )

    alone, (few, surely_few), (many, surely_many) = (
        attacked(range(1)),
        attacked(range(3)),
        attacked(range(90)),
    )
    # Over one user a sum of noise is that user's noise; the more users, the less it tells.
    assert alone == (1.0, 1.0)
    assert few > many + 0.05
    assert surely_few > surely_many + 0.2
    assert many > 0.5


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fedmf": {}}, "fedmf.samples 0: without sampled items there is no noise"),
        (
            {"federation": {"hosts": 2}},
            "federation.hosts 2: each user has two denoisers on hosts of others; expected 3",
        ),
        ({"federation": {"hosts": 1}}, "federation.hosts 1: each user has two denoisers"),
        ({"rounds": {"party_per_user": False}}, "hosts would add up their users' before"),
        (
            {"rounds": {"cohorts": "groups", "cohort": 29, "group": 29, "min_cohort": 5}},
            "rounds.cohort 29: users are divided among at least 3 groups of denoisers, with rounds.min_sum 10 users",
        ),
        (
            {"rounds": {"aggregation": {"rule": "median"}}},
            "rule 'median' with secure_sum 'denoised': the server sees no single contribution without noise",
        ),
        ({"system": "fcf", "split": {"kind": "temporal"}}, "its users add no noise to their contributions"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        run_of(**changes)


def test_a_cohort_whose_groups_are_too_small_is_abandoned_with_the_reason() -> None:
    run = run_of(rounds={"min_sum": 40, "min_cohort": 40})
    with pytest.raises(
        RunError, match=r"a denoiser would serve a group of \d+ users; the plan's floor is 40"
    ):
        trained(run)


def test_what_denoisers_see_is_a_warning_and_declared() -> None:
    run = run_of()
    assert any("the server and one denoiser together" in one for one in run.own.warnings(run))
    assert combination("fedmf", "denoised").allowed
    assert not combination("fpl", "denoised").allowed
    rows = matrix("fedmf", "users", "denoised")
    clear = matrix("fedmf", "users", "clear")
    assert rows["client"]["user_noise"].allowed
    assert not rows["cos"]["user_noise"].allowed
    assert rows["cos"]["noise_sum"].allowed
    assert rows["cos"]["sealed_noise"].allowed
    for role in ("cos", "client"):
        assert not any(clear[role][kind].allowed for kind in ("user_noise", "sealed_noise", "noise_sum"))
        assert rows[role]["user_update"] == clear[role]["user_update"]


def test_evaluations_have_no_noise_and_their_plans_say_so() -> None:
    rounds = RoundsPlan(min_sum=7)
    assert policy.noise_floor(rounds, "denoised", Purpose.TRAIN) == 7
    assert policy.noise_floor(rounds, "denoised", Purpose.SUPPORTS) == 7
    assert policy.noise_floor(rounds, "denoised", Purpose.EVALUATE) == 0
    assert policy.noise_floor(rounds, "clear", Purpose.TRAIN) == 0
    plan = SumPlan("run", 1, "train", "denoised", bytes(32), bytes(32), (Member(bytes(32), "d"),))
    assert dataclasses.replace(plan, noise_floor=3).hash != plan.hash
