"""FedMF and FCF over real processes: the numbers of the same run in one process, and what a user is recommended."""

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
from coterie.systems.registry import server_side

from .recorded import of_system

ROUNDS = {"cohort": 20, "group": 60, "passes": 4, "evaluate_every": 2}
BASE = {
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
    "rounds": ROUNDS,
    "federation": {"hosts": 3},
}
KINDS = {
    "fedmf, printed steps, users, masked": {
        "system": "fedmf",
        "secure_sum": "masked",
        "fedmf": {"steps": "sum", "rate": 1e-3, "private_rate": 1e-3, "local_epochs": 3},
        "rounds": {**ROUNDS, "party_per_user": True, "passes": 2},
    },
    "fedmf, random cohorts, clear": {
        "system": "fedmf",
        "rounds": {**ROUNDS, "cohorts": "independent", "cohort": 30},
    },
}


def same_numbers(report, alone):
    """Check a report against what one process makes of the same settings."""
    assert report["phase"] == "done"
    same = ("epoch", "version", "users", "metrics")
    assert [{key: one[key] for key in same} for one in report["history"]] == [
        {key: one[key] for key in same} for one in alone["history"]
    ]
    assert report["chosen"] == alone["chosen"]
    assert report["abandoned"] == 0
    assert report["history"][0]["metrics"] != report["history"][-1]["metrics"]
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_services_and_one_process_come_to_equal_numbers(small, federation, kind):
    settings = small(**{**BASE, **KINDS[kind]})

    async def to_the_end():
        async with federation(settings) as running:
            await running.start()
            return running, await running.finish()

    running, report = asyncio.run(to_the_end())
    alone = train_in_process(settings, running.feed, run_id="test", seed=0, see=lambda event: None)
    assert same_numbers(report, alone.known)


SYSTEMS = pytest.mark.parametrize("system", [of_system(system, system) for system in ("fedmf", "fcf")])


@SYSTEMS
@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
def test_a_recorded_run_and_one_process_come_to_equal_numbers(recorded, system, secure_sum):
    report = recorded.run(system, secure_sum).report
    assert same_numbers(report, recorded.alone(system, secure_sum).known)


@SYSTEMS
def test_the_masked_sum_changes_no_number(recorded, system):
    clear, masked = (recorded.run(system, secure_sum).report for secure_sum in ("clear", "masked"))
    assert [one["metrics"] for one in masked["history"]] == [one["metrics"] for one in clear["history"]]


@pytest.mark.parametrize("system", ["fedmf", "fcf"])
def test_a_run_has_a_report_and_a_user_is_recommended_what_its_own_factor_scores_highest(
    small, tmp_path, system
):
    settings = small(
        **{**BASE, "system": system, "federation": {"hosts": 2}}, output=tmp_path, reference=True
    )
    report, folder = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
    named = {"fedmf": {"mf", "means", "item_mean", "popularity", "random"}, "fcf": {"popularity", "random"}}
    assert named[system] <= set(report.reference)
    json.loads((folder / "report.json").read_text())
    page = (folder / "report.html").read_text()
    assert {"fedmf": "FedMF", "fcf": "FCF"}[system] in page
    assert ("training items" in page) is (system == "fedmf")

    feed = make_feed(settings, load(settings), 0)
    data = feed.dataset
    user = data.users[3]
    found = asyncio.run(local_run.recommend(LocalRun.at(folder), user, 5))
    assert found.version == report.chosen.version
    # What users keep is that of the version that counts.
    passes = report.chosen.epoch
    assert passes > 0
    rounds = settings.rounds.model_copy(update={"passes": passes, "evaluate_every": passes})
    again = settings.model_copy(update={"rounds": rounds})
    alone = train_in_process(again, feed, run_id="test", seed=0, see=lambda event: None)
    side = server_side(system, settings.own.for_plan(settings), len(data.items), 0, alone.known["groups"])
    host = int(feed.host[3])
    hosted = feed.hosted(host)
    position = list(hosted.users).index(user)
    scores = alone.hosts[host].recommend(side.model(alone.trained.arrays), position)
    # What is held out is nothing that the user has been seen with.
    scores[hosted.item[(hosted.user == position) & (hosted.part == TRAIN)]] = -np.inf
    best = np.argsort(-scores, kind="stable")[:5]
    assert [one.item for one in found.suggestions] == [data.items[item] for item in best]
