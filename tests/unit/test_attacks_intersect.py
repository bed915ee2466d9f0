"""Intersection of what a user touched: redrawn samples wash out, kept ones stay, and no sample hides nothing."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from coterie.errors import DataError
from coterie.privacy.attacks.intersect import IntersectReport, intersect, report
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.factor_steps import UserData, sample

USERS, ITEMS, ROUNDS = 80, 600, 5


@cache
def population() -> tuple[list[UserData], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    weight = 1 / (np.arange(ITEMS) + 10)
    users = []
    for _ in range(USERS):
        items = rng.choice(ITEMS, rng.integers(15, 50), replace=False, p=weight / weight.sum())
        users.append(UserData(items, rng.integers(1, 6, len(items)).astype(float)))
    rated = np.zeros((USERS, ITEMS), np.bool_)
    for row, user in zip(rated, users, strict=True):
        row[user.items] = True
    return users, rated, rated.sum(axis=0)


def attacked(settings: FactorSettings) -> list[IntersectReport]:
    users, rated, popularity = population()
    rounds = []
    for round_ in range(ROUNDS):
        touched = np.zeros(rated.shape, np.bool_)
        drawn = sample(users, range(USERS), settings, ITEMS, seed=3, popularity=popularity, round_=round_)
        for row, user in zip(touched, drawn, strict=True):
            row[user.touched] = True
            if settings.weights == "incl-unc":
                row[:] = True
        rounds.append(touched)
    return report(rounds, rated, popularity)


def test_samples_drawn_anew_are_gone_after_three_rounds() -> None:
    after = attacked(FactorSettings(resample=True))
    assert [each["recall"] for each in after] == [1.0] * ROUNDS
    assert after[0]["precision"] == pytest.approx(0.5)
    assert after[1]["precision"] > 0.85
    assert after[2]["precision"] > 0.97
    assert after[2]["auc_touched"] > 0.99 > after[2]["popularity_auc_touched"] + 0.1
    assert [each["rounds"] for each in after] == [1, 2, 3, 4, 5]
    assert after[0]["users"] == USERS


def test_kept_samples_say_nothing_new_after_the_first_round_and_then_only_popularity_is_left() -> None:
    after = attacked(FactorSettings())
    assert all({**each, "rounds": 1} == after[0] for each in after)
    assert after[0]["precision"] < 0.5
    assert after[0]["auc_touched"] == pytest.approx(after[0]["popularity_auc_touched"])


def test_that_an_item_was_touched_at_all_says_more_than_popularity_where_samples_are_kept() -> None:
    after = attacked(FactorSettings())
    assert after[0]["auc"] > after[0]["popularity_auc"] + 0.05


def test_without_samples_one_round_shows_every_rated_item() -> None:
    first = attacked(FactorSettings(weights="obs-only"))[0]
    assert first["precision"] == first["recall"] == first["auc"] == 1.0
    assert first["auc_touched"] is None  # nothing else was touched


def test_where_all_items_are_touched_only_popularity_is_left() -> None:
    first = attacked(FactorSettings(weights="incl-unc"))[0]
    assert first["auc"] == first["popularity_auc"] == first["auc_touched"]


def test_the_intersection_is_what_all_rounds_touched() -> None:
    rounds = [np.array([1, 1, 0, 1], bool), np.array([1, 0, 1, 1], bool), np.array([1, 0, 0, 1], bool)]
    assert intersect(rounds).tolist() == [True, False, False, True]
    assert intersect(rounds[:1]).tolist() == [True, True, False, True]


def test_users_without_ratings_are_not_counted() -> None:
    rated = np.array([[True, False, False], [False, False, False]])
    found = report([np.array([[True, True, False], [False, False, False]])], rated, np.ones(3))[0]
    assert (found["users"], found["recall"], found["precision"]) == (1, 1.0, 0.5)
    nobody = report([np.zeros((2, 3), np.bool_)], np.zeros((2, 3), np.bool_), np.zeros(3))[0]
    assert nobody["precision"] is nobody["recall"] is nobody["auc"] is None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="0 rounds"):
        intersect([])
    with pytest.raises(DataError, match="over the same items"):
        intersect([np.ones(3, np.bool_), np.ones(4, np.bool_)])
    with pytest.raises(DataError, match="2 users, 3 items"):
        report([np.ones((2, 4), np.bool_)], np.ones((2, 3), np.bool_), np.ones(3))
