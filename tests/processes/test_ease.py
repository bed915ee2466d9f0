"""EASE over real processes: the numbers of one process under each sum, recommendations, attacks on its sum of pairs."""

import asyncio
import json

import numpy as np
import pytest

from coterie.evaluation.holdout import TRAIN
from coterie.launch import local_run
from coterie.launch.federation import run_federation
from coterie.launch.local_run import LocalRun
from coterie.studies import experiment
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.systems.ease.settings import EaseSettings
from coterie.systems.registry import server_side

from .one_process import assert_equal_to_one_process

BASE = {
    "system": "ease",
    "split": {"kind": "leave-last-out"},
    "data": {"synthetic": {"users": 60, "items": 60, "interactions": 1500}},
    "ease": {"ridge": 50.0, "min_touch": 5, "min_pairs": 2, "popularity": 0.01},
    "federation": {"hosts": 3},
    # A short key, drawn quickly.
    "encryption": {"bits": 1024, "comparison": True, "obfuscators": "short"},
}
SUMS = {
    "clear": {},
    "masked": {},
    "masked, users": {"rounds": {"party_per_user": True}},
    "encrypted": {},
}


@pytest.mark.parametrize("kind", SUMS)
def test_services_and_one_process_come_to_equal_numbers(small, federation, kind):
    settings = small(**BASE, **SUMS[kind], secure_sum=kind.partition(",")[0])
    report = assert_equal_to_one_process(settings, federation)
    assert report["chosen"]["version"] == 1


def test_a_run_has_a_report_and_a_user_is_recommended_what_scores_highest(small, tmp_path):
    settings = small(**BASE, output=tmp_path, reference=True)
    report, folder = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
    assert {"ease_central", "item_knn", "popularity", "random"} == set(report.reference)
    json.loads((folder / "report.json").read_text())
    assert "EASE" in (folder / "report.html").read_text()

    feed = make_feed(settings, load(settings), 0)
    data = feed.dataset
    user = data.users[3]
    found = asyncio.run(local_run.recommend(LocalRun.at(folder), user, 5))
    alone = train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None)
    side = server_side("ease", settings.own.for_plan(settings), len(data.items), 0, 1)
    host = int(feed.host[3])
    hosted = feed.hosted(host)
    position = list(hosted.users).index(user)
    scores = alone.hosts[host].recommend(side.model(alone.trained.arrays), position)
    scores[hosted.item[(hosted.user == position) & (hosted.part == TRAIN)]] = -np.inf
    best = [item for item in np.argsort(-scores, kind="stable")[:5] if np.isfinite(scores[item])]
    assert [one.item for one in found.suggestions] == [data.items[item] for item in best]


SKETCHED = {
    **BASE,
    "ease": {"ridge": 50.0, "min_touch": 5, "sketch": 16},
    "rounds": {"passes": 2, "evaluate_every": 2},
}


@pytest.mark.parametrize("kind", SUMS)
def test_services_and_one_process_come_to_equal_numbers_by_a_sketch(small, federation, kind):
    given = {**SKETCHED, "rounds": {**SKETCHED["rounds"], **SUMS[kind].get("rounds", {})}}
    settings = small(**given, secure_sum=kind.partition(",")[0])
    report = assert_equal_to_one_process(settings, federation)
    assert report["chosen"]["version"] == 2


FEW_USERS = {"users": 40, "items": 300, "interactions": 1600}
"""Few users with few of many items."""

MANY_USERS = {"users": 400, "items": 100, "interactions": 8000}
"""So many users that items stay open above the noise."""


def attacked(small, tmp_path, synthetic, **options):
    """Return the report of a run whose sums were attacked."""
    given = {
        **BASE,
        "data": {"synthetic": synthetic},
        "ease": options,
        "federation": {"hosts": 2, "attacks": True},
    }
    settings = small(**given, secure_sum="masked", output=tmp_path)
    report, _ = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
    return report


def test_a_sum_without_floors_gives_histories_away(small, tmp_path):
    report = attacked(small, tmp_path, FEW_USERS, min_touch=1, min_pairs=1)
    found = report.content()["attacks"]
    assert found["singles"]["histories"] > 0.3
    assert found["singles"]["precision"] == 1
    assert found["pairs"]["auc"] > found["pairs"]["popularity_auc"] + 0.1


def test_a_sketch_without_floors_gives_histories_away_and_one_with_floors_does_not(small, tmp_path):
    def found(name, **options):
        given = {
            **BASE,
            "data": {"synthetic": FEW_USERS},
            "ease": {"sketch": 60, **options},
            "rounds": {"passes": 2},
            "federation": {"hosts": 2, "attacks": True},
        }
        settings = small(**given, secure_sum="masked", output=tmp_path / name)
        report, _ = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
        return report.content()["attacks"]

    plain = found("plain", min_touch=1)
    assert plain["singles"]["histories"] > 0.1
    assert plain["singles"]["precision"] > 0.7
    assert plain["pairs"]["auc"] > plain["pairs"]["popularity_auc"] + 0.05
    floored = found("floored", min_touch=10)
    assert floored["singles"]["histories"] == floored["singles"]["recall"] == 0


def test_with_floors_and_noise_the_attack_finds_no_more_than_popularity_and_the_report_has_epsilon(
    small, tmp_path
):
    options = {"min_touch": 10, "min_pairs": 5, "most_items": 30, "ridge": 500.0}
    plain = attacked(small, tmp_path / "plain", MANY_USERS, **options).content()["attacks"]["pairs"]
    assert plain["auc"] > plain["popularity_auc"] + 0.02
    report = attacked(small, tmp_path / "noisy", MANY_USERS, noise=4.0, **options)
    assert report.closed_share < 0.9
    found = report.content()["attacks"]
    assert found["singles"]["histories"] == 0
    assert found["pairs"]["auc"] < found["pairs"]["popularity_auc"] + 0.02
    expected = EaseSettings(most_items=30, noise=4.0).epsilon(report.dataset.users, report.dataset.items)
    assert report.epsilon == pytest.approx(expected)
