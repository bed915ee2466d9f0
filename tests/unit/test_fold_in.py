"""Users who never trained: what a finished model and their own data say of them, system by system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.data.keyed_order import key_hash
from coterie.errors import ConfigError
from coterie.rounds.sides import FoldsIn, HostSide
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.unseen_users import chosen_users, of_users, served, with_few
from coterie.systems import registry
from coterie.systems.fedmf.fold_in import PRIOR, folded_factors
from coterie.systems.fedmf.local_step import local_step
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.registry import check_folds_in, folded_in, folding_systems, systems
from coterie.systems.shared import factor_steps
from coterie.systems.shared.factor_steps import UserData

from .. import user_codes
from ..user_codes import CASES, NEW, USERS

Model = Mapping[str, NDArray[np.float32]]

FOLDING = {name for name, (system, _) in CASES.items() if systems()[system].folds_in}
KEEPING = {name for name in FOLDING if "private" in vars(user_codes.host(name))}
"""Cases whose users keep factors that `fold_in` may set."""


def folded(name: str, users: NDArray[np.intp] | None = None) -> tuple[HostSide, Model]:
    """Return the side of users who never trained, all of a case or some, and the model."""
    system, settings = CASES[name]
    data = user_codes._data(name)
    keys = key_hash(data.users, 0)
    if users is not None:
        own = np.isin(data.user, users)
        told = data.attributes
        data = replace(
            data,
            users=[data.users[user] for user in users],
            user=np.searchsorted(users, data.user[own]),
            item=data.item[own],
            part=data.part[own],
            rating=data.rating[own],
            attributes=None if told is None else replace(told, values=told.values[users]),
        )
        keys = keys[users]
    model = user_codes.model(name)
    return folded_in(system, settings, data, keys, 0, model), model


def test_every_system_says_whether_its_hosts_serve_new_users() -> None:
    for name, (system, _) in CASES.items():
        assert isinstance(user_codes.host(name), FoldsIn) == systems()[system].folds_in, name
    assert set(folding_systems()) == {"ease", "fcf", "fedgnn", "fedidcf", "fedmf", "fedmvmf", "fpl", "ials"}


@pytest.mark.parametrize("system", sorted(set(systems()) - set(folding_systems())))
def test_a_system_that_cannot_is_refused_with_the_names_of_those_that_can(system: str) -> None:
    with pytest.raises(ConfigError, match=f"{systems()[system].title} has no recommendations") as caught:
        check_folds_in(system)
    assert all(name in (caught.value.hint or "") for name in folding_systems())


@pytest.mark.parametrize("name", sorted(FOLDING))
def test_what_a_new_user_gets_does_not_depend_on_others_who_ask(name: str) -> None:
    side, model = folded(name)
    some = np.array([NEW, USERS // 2, USERS - 1])
    few, _ = folded(name, some)
    for position, user in enumerate(some.tolist()):
        np.testing.assert_array_equal(few.recommend(model, position), side.recommend(model, user))


@pytest.mark.parametrize("name", sorted(FOLDING))
def test_what_a_new_user_gets_depends_on_its_own_items(name: str) -> None:
    side, model = folded(name)
    found = np.stack([side.recommend(model, user) for user in range(NEW, USERS)])
    assert np.isfinite(found).all()
    assert len(np.unique(found, axis=0)) == len(found)


@pytest.mark.parametrize("name", sorted(FOLDING - KEEPING))
def test_where_users_keep_nothing_a_new_user_is_served_as_one_who_trained(name: str) -> None:
    side, model = folded(name)
    trained = user_codes.host(name)
    for user in range(USERS):
        np.testing.assert_array_equal(side.recommend(model, user), trained.recommend(model, user))


@pytest.mark.parametrize("name", ["fedmf", "fedmf epochs", "fedmf printed"])
def test_the_factor_of_a_new_user_of_fedmf_is_where_its_local_steps_lead(name: str) -> None:
    side: Any
    side, model = folded(name)
    given = FedMfSettings.from_json(CASES[name][1])
    assert given.biases == (name != "fedmf printed")
    for index in np.flatnonzero(side._rates).tolist():
        user, kept = side._users[index], side.private["factors"][[index]]
        # Rows that do not move, as for a user who only fits itself; the ridge counts as if there were more ratings.
        more = 1 + PRIOR / len(user.items) if given.biases else 1
        settings = given.model_copy(update={"rate": 1e-12, "ridge": more * given.ridge})

        def moved(factor: NDArray[np.float32]) -> float:
            (update,) = local_step(model, [user], settings, [0], factors=factor, seed=0, round_=1)  # noqa: B023
            return float(np.abs(update.kept - factor).max())

        elsewhere = kept + (0.1 * (kept != 1)).astype(np.float32)
        assert moved(kept) < 1e-2 * moved(elsewhere)


def test_a_new_user_with_few_ratings_is_near_the_average_one_and_with_many_as_it_rates() -> None:
    settings = FedMfSettings(factors=2, ridge=0.02)
    rng = np.random.default_rng(0)
    items = np.column_stack([np.ones(2_000), np.zeros(2_000), 0.3 * rng.standard_normal((2_000, 2))])
    model = {"items": items.astype(np.float32)}

    def bias(ratings: int) -> float:
        user = UserData(np.arange(ratings), np.full(ratings, 5.0))
        return float(folded_factors(model, [user], settings)[0, 0])

    # On the scale from -1 to 1 every rating is 1 above what an average user gives.
    found = [bias(n) for n in (1, 5, 50, 2_000)]
    assert found == sorted(found)
    assert 0.2 < found[0] < 0.5
    assert found[-1] > 0.95


def test_the_bias_that_an_item_adds_stays_beside_a_one_in_the_factor_of_a_new_user() -> None:
    side: Any = folded("fedmf")[0]
    assert (side.private["factors"][:, 1] == 1).all()
    assert (side.private["factors"][NEW:, 0] != 0).all()


def test_the_factor_of_a_new_user_of_fedmvmf_under_sgd_is_where_its_steps_lead() -> None:
    side: Any
    side, model = folded("fedmvmf sgd")
    settings = FedMvmfPlan.from_json(CASES["fedmvmf sgd"][1])
    index = np.flatnonzero(side._rates)
    allowed = np.ones(len(model["items"]), np.bool_)
    users = side._sampled(index, model, allowed, 0)
    kept = side.private["factors"][index]
    found = list(
        factor_steps.local_step(
            side._whole(model), users, settings, [0] * len(users), seed=0, round_=1, factors=kept
        )
    )
    assert len(found) == len(index)
    for update in found:
        np.testing.assert_allclose(update.kept, kept[update.index], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fpl", "fpl shares", "fpl one triple"])
def test_the_factor_of_a_new_user_of_fpl_puts_its_items_before_others(name: str) -> None:
    side: Any
    side, model = folded(name)
    before: Any = user_codes.host(name)

    def apart(one: Any, user: int) -> float:
        scores, own = one.recommend(model, user), np.zeros(len(model["items"]), np.bool_)
        own[one.items_of(user)] = True
        return float(np.log(1 / (1 + np.exp(scores[~own][None] - scores[own][:, None]))).mean())

    users = [user for user in range(USERS) if len(side.items_of(user))]
    gained = np.array([apart(side, user) - apart(before, user) for user in users])
    assert (gained > 0).all()
    assert (side.private["factors"][:, 0] == 1).all()


RUN = {
    "data": {"synthetic": {"users": 60, "items": 40, "interactions": 1200, "genres": 3}},
    "federation": {"hosts": 2},
    "secure_sum": "clear",
}
RUNS: dict[str, dict[str, Any]] = {
    "ease": {"split": {"kind": "leave-last-out"}},
    "ease, sketched": {"split": {"kind": "leave-last-out"}, "ease": {"sketch": 8}},
    "ease, popular": {"split": {"kind": "leave-last-out"}, "ease": {"popularity": 0.02}},
    "ials": {"split": {"kind": "leave-last-out"}, "ials": {"factors": 4}, "rounds": {"passes": 3}},
    "fcf": {"split": {"kind": "random"}, "fcf": {"factors": 4}, "rounds": {"passes": 3}},
    "fedmf": {"fedmf": {"factors": 4}, "rounds": {"passes": 40, "evaluate_every": 20}},
    "fedmvmf": {"mvmf": {"factors": 4}, "rounds": {"passes": 3}},
    "fpl": {"fpl": {"factors": 4}, "rounds": {"passes": 20, "evaluate_every": 10}},
}


def run_of(name: str) -> tuple[RunSettings, Feed]:
    settings = RunSettings.model_validate({**RUN, **RUNS[name], "system": name.partition(",")[0]})
    return settings, make_feed(settings, load(settings), 0)


@pytest.mark.parametrize("name", RUNS)
def test_users_held_out_of_a_run_are_in_no_sum_and_are_served_by_its_model(name: str) -> None:
    settings, feed = run_of(name)
    unseen = chosen_users(feed, 0.3)
    assert unseen.sum() == 18
    found = served(settings, feed, 0, unseen)
    assert {one["users"] for one in found.made.known["rounds"]} == {42}
    assert np.isfinite(found.folded).all()
    np.testing.assert_array_equal(found.kept[unseen], found.folded[unseen])
    if name not in ("fedmf", "fpl"):
        np.testing.assert_array_equal(found.kept, found.folded)
    else:
        # Trained users' factors are near those that follow from the model, and not these.
        assert (found.kept[~unseen] != found.folded[~unseen]).any()
        alike = np.mean([np.corrcoef(found.kept[user], found.folded[user])[0, 1] for user in range(60)])
        assert alike > 0.9


def test_the_model_of_a_run_does_not_depend_on_users_held_out_of_it() -> None:
    settings, feed = run_of("ease")
    unseen = chosen_users(feed, 0.3)
    other = np.where(unseen[feed.dataset.user], (feed.dataset.item + 7) % 40, feed.dataset.item)
    changed = replace(feed, dataset=replace(feed.dataset, item=other.astype(feed.dataset.item.dtype)))
    first, second = (served(settings, one, 0, unseen) for one in (feed, changed))
    np.testing.assert_array_equal(first.kept[~unseen], second.kept[~unseen])
    assert (first.kept[unseen] != second.kept[unseen]).any()
    for name, array in first.made.trained.arrays.items():
        np.testing.assert_array_equal(array, second.made.trained.arrays[name])


def test_other_seeds_hold_other_users_out_and_all_interactions_are_on_one_side() -> None:
    _, feed = run_of("ease")
    unseen = chosen_users(feed, 0.3)
    np.testing.assert_array_equal(unseen, chosen_users(feed, 0.3))
    assert (unseen != chosen_users(replace(feed, seed=1), 0.3)).any()
    inside, outside = of_users(feed, ~unseen).dataset, of_users(feed, unseen).dataset
    assert len(inside) + len(outside) == len(feed.dataset)
    assert not set(inside.user.tolist()) & set(outside.user.tolist())
    assert inside.items == feed.dataset.items


def test_of_a_user_who_brings_few_items_held_out_ones_are_measured_as_before() -> None:
    _, feed = run_of("ease")
    few = with_few(feed, 5)
    data, train = few.dataset, few.split.train
    np.testing.assert_array_equal(np.bincount(data.user[train], minlength=60), 5)
    held = [
        {*zip(one.dataset.user[~of].tolist(), one.dataset.item[~of].tolist(), strict=True)}
        for one, of in ((feed, feed.split.train), (few, train))
    ]
    assert held[0] == held[1]
    owned = {*zip(feed.dataset.user.tolist(), feed.dataset.item.tolist(), strict=True)}
    assert {*zip(data.user.tolist(), data.item.tolist(), strict=True)} < owned
    whole = with_few(feed, 1_000)
    assert len(whole.dataset) == len(feed.dataset)


def test_users_who_bring_few_items_are_served_by_these_alone() -> None:
    settings, feed = run_of("ease")
    unseen = chosen_users(feed, 0.3)
    found = served(settings, feed, 0, unseen, (5, 1_000))
    np.testing.assert_array_equal(found.few[1_000][unseen], found.folded[unseen])
    assert not found.few[5][~unseen].any()
    assert (found.few[5][unseen] != found.folded[unseen]).any(axis=1).all()


def test_a_system_that_says_it_serves_new_users_and_has_no_method_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = {**systems(), "fedncf": replace(systems()["fedncf"], folds_in=True)}
    monkeypatch.setattr(registry, "systems", lambda: said)
    name = next(name for name, (system, _) in CASES.items() if system == "fedncf")
    data = user_codes._data(name)
    with pytest.raises(ConfigError, match="its host has no fold_in"):
        folded_in(*CASES[name], data, key_hash(data.users, 0), 0, user_codes.model(name))
