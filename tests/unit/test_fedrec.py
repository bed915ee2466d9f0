"""FedRec: rows of sampled items, what they count as rated with, what they hide and do not."""

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate, random
from coterie.data.keyed_order import key_hash
from coterie.errors import ConfigError
from coterie.evaluation.holdout import TRAIN
from coterie.rounds.sides import User
from coterie.rounds.training import Purpose
from coterie.studies.in_process import InProcess, train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.systems.fedmf.host import FedMfHost
from coterie.systems.fedmf.local_step import FedMfUpdate, local_step
from coterie.systems.fedmf.mathematics import initial, initial_factors, moving, scaled
from coterie.systems.fedmf.server import FedMfServer
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.fedmf.study.fillings import suspicion
from coterie.systems.shared.factor_steps import UserData
from coterie.systems.shared.host_data import HostData

ITEMS, KEYS = 60, [7, 1001, 5]
SPEC: dict[str, Any] = {"users": 60, "items": 80, "interactions": 1_500, "genres": 4}
DATA = generate(SyntheticSpec(**SPEC))
SPLIT = random(DATA, validation=0.1, seed=3)
WAYS: dict[str, dict[str, Any]] = {
    "biases": {},
    "mean": {"biases": False},
    "printed, 3 epochs": {"steps": "sum", "rate": 0.01, "private_rate": 0.002, "local_epochs": 3},
}


def plan(**given: Any) -> FedMfSettings:
    return FedMfSettings.model_validate({"factors": 3, "ridge": 0.1, "samples": 1.0, "min_touch": 1, **given})


def people(sampled: bool = True, sizes: tuple[int, ...] = (3, 14, 9)) -> list[UserData]:
    rng = np.random.default_rng(0)
    found = []
    for size in sizes:
        drawn = rng.permutation(ITEMS)[: 2 * size]
        ratings = rng.integers(1, 6, size).astype(np.float32)
        found.append(UserData(drawn[:size], ratings, sampled=drawn[size:] if sampled else drawn[:0]))
    return found


def model_of(settings: FedMfSettings) -> dict[str, NDArray[np.float32]]:
    model = initial(settings, ITEMS, 1)
    model["items"] += moving(settings)[1] * np.random.default_rng(5).normal(0, 0.3, model["items"].shape)
    return {"items": model["items"].astype(np.float32)}


def stepped(settings: FedMfSettings, users: list[UserData], **more: Any) -> list[FedMfUpdate]:
    found = local_step(
        model_of(settings),
        users,
        settings,
        KEYS,
        factors=initial_factors(settings, KEYS),
        seed=1,
        round_=3,
        **more,
    )
    return sorted(found, key=lambda one: one.index)


def by_hand(
    settings: FedMfSettings, user: UserData, first: NDArray[np.float64], predicts: bool
) -> NDArray[np.float64]:
    """Return the changes of the rows of sampled items, step by step."""
    q = model_of(settings)["items"].astype(np.float64)
    own, p = q.copy(), first.copy()
    of_users, of_items = moving(settings)
    ratings = scaled(settings, user.ratings).astype(np.float64)
    mean = ratings.mean()
    share = len(user.items) if settings.steps == "mean" else 1
    filled = {item: q[item] @ p if predicts else mean for item in user.sampled}
    for _ in range(settings.local_epochs):
        at, next_p = p.copy(), p - settings.private_rate * of_users * 2 * settings.ridge * p
        for item, rating in zip(user.items, ratings, strict=True):
            missed = rating - at @ own[item]
            next_p = next_p + settings.private_rate * of_users * 2 * missed * own[item] / share
            own[item] = own[item] - settings.rate * of_items * (
                -2 * missed * at + 2 * settings.ridge * own[item]
            )
        for item, rating in filled.items():
            missed = rating - at @ own[item]
            own[item] = own[item] - settings.rate * of_items * (
                -2 * missed * at + 2 * settings.ridge * own[item]
            )
        p = next_p
    return (own - q)[np.sort(user.sampled)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("predicts", [False, True])
def test_sampled_items_step_as_if_rated_with_the_mean_or_the_prediction(way: str, predicts: bool) -> None:
    settings = plan(**WAYS[way])
    factors = initial_factors(settings, KEYS).astype(np.float64)
    for update, user, p in zip(
        stepped(settings, people(), predicts=predicts), people(), factors, strict=True
    ):
        np.testing.assert_array_equal(update.sampled, np.sort(user.sampled))
        np.testing.assert_allclose(update.noise, by_hand(settings, user, p, predicts), rtol=1e-4, atol=1e-6)
        assert np.abs(update.noise).max() > 0


@pytest.mark.parametrize("way", WAYS)
def test_rated_rows_and_the_users_own_factor_are_those_without_sampled_items_to_the_bit(way: str) -> None:
    plain = plan(**WAYS[way]).model_copy(update={"samples": 0.0})
    for one, other in zip(
        stepped(plan(**WAYS[way]), people()), stepped(plain, people(sampled=False)), strict=True
    ):
        for name in ("rows", "change", "kept"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert not len(other.sampled)


def test_nothing_leaves_of_closed_sampled_items() -> None:
    opened = np.arange(ITEMS) % 3 > 0
    for update in stepped(plan(), people(), allowed=opened):
        assert len(update.sampled)
        assert opened[update.sampled].all()
        assert opened[update.rows].all()


def host(settings: FedMfSettings) -> FedMfHost:
    data = HostData(DATA.users, DATA.items, DATA.user, DATA.item, SPLIT.part, DATA.rating)
    return FedMfHost(settings, data, key_hash(DATA.users, 0), 0, lambda private: private)


def touched(side: FedMfHost, purpose: Purpose, user: int, round_: int = 1, pass_number: int = 0) -> Any:
    asked: Any = SimpleNamespace(purpose=purpose.value, round=round_, pass_number=pass_number, noise_floor=0)
    server = FedMfServer(side.settings, 80, 0, 1)
    model = server.model({**server.initial(), "popularity": np.ones(80, np.float32)})
    ((_, codes),) = side.contributions(asked, model, None, {0: [User(user, 0)]})
    name = "supports" if purpose is Purpose.SUPPORTS else "items"
    found = side.layout(purpose).decode(codes, 1)[name]
    return np.flatnonzero(found.reshape(80, -1).any(axis=1))


def rated(user: int) -> NDArray[np.integer]:
    return np.unique(DATA.item[(DATA.user == user) & (SPLIT.part == TRAIN)])


def test_a_user_touches_the_same_power_of_two_of_items_in_supports_and_every_round() -> None:
    side = host(plan())
    for user in range(5):
        supports = touched(side, Purpose.SUPPORTS, user)
        assert set(rated(user)) < set(supports)
        assert len(supports) >= min(2 * len(rated(user)), 80)
        assert len(supports) in (2, 4, 8, 16, 32, 64, 80)
        for round_ in (1, 2):
            np.testing.assert_array_equal(touched(side, Purpose.TRAIN, user, round_), supports)


def test_items_drawn_anew_in_each_round_have_the_rated_ones_in_common() -> None:
    side = host(plan(resample=True))
    rounds = [touched(side, Purpose.TRAIN, 2, round_) for round_ in range(1, 9)]
    own = rated(2)
    for one in rounds:
        assert len(one) == min(2 * len(own), 80)
    common = set.intersection(*map(set, rounds))
    assert set(own) <= common
    assert len(common) <= len(own) + 1


def test_predictions_take_the_place_of_means_after_the_warm_up() -> None:
    settings = plan(filling="hybrid", fill_after=4)
    assert [settings.predicts(passed) for passed in (0, 3, 4, 9)] == [False, False, True, True]
    assert not plan().predicts(1_000)


def run_of(secure_sum: str = "clear", hosts: int = 2, **fedmf: Any) -> RunSettings:
    return RunSettings.model_validate(
        {
            "system": "fedmf",
            "secure_sum": secure_sum,
            "data": {"synthetic": SPEC},
            "fedmf": {"min_touch": 1, **fedmf},
            "rounds": {"passes": 10, "evaluate_every": 5, "group": 60},
            "federation": {"hosts": hosts},
        }
    )


def trained(run: RunSettings) -> InProcess:
    return train_in_process(run, make_feed(run, load(run), 0), run_id="a-run", seed=0, see=lambda event: None)


@pytest.mark.parametrize(("secure_sum", "hosts"), [("masked", 3), ("clear", 5)])
def test_numbers_depend_neither_on_the_sum_nor_on_how_users_are_spread(secure_sum: str, hosts: int) -> None:
    given: dict[str, Any] = {"samples": 1, "filling": "hybrid", "fill_after": 5}
    one, other = trained(run_of(**given)), trained(run_of(secure_sum, hosts, **given))
    assert [each["metrics"] for each in one.known["history"]] == [
        each["metrics"] for each in other.known["history"]
    ]


def test_predictions_as_filling_cost_less_than_means() -> None:
    def error(**given: Any) -> float:
        return float(trained(run_of(**given)).known["history"][-1]["metrics"]["rmse"])

    plain, hybrid, average = error(), error(samples=3, filling="hybrid", fill_after=3), error(samples=3)
    assert plain < hybrid < average - 0.01


@pytest.mark.parametrize("filling", ["average", "hybrid"])
@pytest.mark.parametrize("way", WAYS)
def test_what_rows_say_tells_sampled_items_from_rated_ones(way: str, filling: str) -> None:
    settings = plan(**WAYS[way], filling=filling, **({"fill_after": 0} if filling == "hybrid" else {}))
    predicts = filling == "hybrid"
    users = people(sizes=(20, 28, 24))
    right = []
    for update, user in zip(stepped(settings, users, predicts=predicts), users, strict=True):
        change = np.zeros((ITEMS, settings.width))
        change[update.rows], change[update.sampled] = update.change, update.noise
        found = suspicion(change, model_of(settings)["items"], settings, predicts=predicts)
        own, others = found[user.items], found[user.sampled]
        right.append((own[:, None] > others[None]).mean())
        assert (np.delete(found, user.touched) == -1).all()
    assert np.mean(right) > 0.85


def test_a_plan_without_samples_is_the_text_that_it_was() -> None:
    text = FedMfSettings().to_json()
    assert not {"samples", "filling", "fill_after", "resample"} & set(json.loads(text))
    assert hashlib.sha256(text.encode()).hexdigest() == BEFORE
    assert FedMfSettings.from_json(text) == FedMfSettings()
    sampled = plan(filling="hybrid", fill_after=0)
    assert FedMfSettings.from_json(sampled.to_json()) == sampled
    with pytest.raises(ConfigError, match="samples: Input should be"):
        FedMfSettings.from_json(sampled.to_json().replace('"samples":1.0', '"samples":-1.0'))


BEFORE = "fdb464886e12530753301064546bb96f57268bcfce5ef806b4f0b1528ac71617"  # pragma: allowlist secret


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"samples": -1}, "greater than or equal to 0"),
        ({"samples": 1, "filling": "median"}, "'average' or 'hybrid'"),
        ({"samples": 1, "filling": "hybrid", "fill_after": -1}, "greater than or equal to 0"),
        ({"filling": "hybrid"}, "filling 'hybrid' and resample False without samples"),
        ({"resample": True}, "resample True without samples; expected samples above 0"),
        (
            {"fill_after": 3},
            "fill_after 3 with filling 'average', .* expected filling 'hybrid', or no fill_after",
        ),
        ({"samples": 1, "fill_after": 0}, "fill_after 0 with filling 'average'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        FedMfSettings.model_validate(given)


@pytest.mark.parametrize(
    ("secure_sum", "more", "words"),
    [
        ("clear", {}, "their errors tell them apart in clear"),
        ("masked", {}, "sampled items cost quality without hiding more"),
        ("masked", {"resample": True}, "fewer than fedmf.min_touch may be behind a row"),
    ],
)
def test_what_sampled_items_do_not_hide_is_a_warning(
    secure_sum: str, more: dict[str, Any], words: str
) -> None:
    run = run_of(secure_sum, samples=1, **more)
    assert any(words in one for one in run.own.warnings(run))
    assert not any("ampled items" in one for one in run_of(secure_sum).own.warnings(run_of(secure_sum)))
