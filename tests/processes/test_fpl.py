"""FPL over real processes: the numbers of one process, recommendations, and the attacks on what users send."""

import asyncio
import json

import numpy as np
import pytest

from coterie.evaluation.holdout import TRAIN
from coterie.launch import local_run
from coterie.launch.federation import run_federation
from coterie.launch.local_run import LocalRun
from coterie.studies import experiment
from coterie.studies.run_data import load, make_feed

from .one_process import assert_equal_to_one_process

BASE = {
    "system": "fpl",
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
    "rounds": {"passes": 4, "evaluate_every": 2},
    "fpl": {"factors": 4, "pi": 0.6, "pi_spread": 0.2},
    "federation": {"hosts": 3},
}


@pytest.mark.parametrize(("secure_sum", "users"), [("clear", False), ("masked", False), ("masked", True)])
def test_services_and_one_process_come_to_equal_numbers(small, federation, secure_sum, users):
    rounds = {**BASE["rounds"], "party_per_user": users}
    settings = small(**{**BASE, "rounds": rounds}, secure_sum=secure_sum)
    assert_equal_to_one_process(settings, federation)


def test_a_run_has_a_report_and_a_user_is_recommended_what_it_has_not(small, tmp_path):
    settings = small(**BASE, output=tmp_path, reference=True)
    report, folder = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
    assert {"item_knn", "ease_central", "popularity", "random"} <= set(report.reference)
    json.loads((folder / "report.json").read_text())
    assert "pFPL+" in (folder / "report.html").read_text()

    data = (feed := make_feed(settings, load(settings), 0)).dataset
    found = asyncio.run(local_run.recommend(LocalRun.at(folder), data.users[3], 5))
    had = data.item[(data.user == 3) & (feed.split.part == TRAIN)]
    suggested = [one.item for one in found.suggestions]
    assert len(set(suggested)) == 5
    assert not set(suggested) & {data.items[item] for item in had}
    scores = [one.score for one in found.suggestions]
    assert scores == sorted(scores, reverse=True)
    assert np.isfinite(scores).all()


@pytest.fixture(scope="module")
def attacked(small, tmp_path_factory):
    """Return a function that runs a federation of single users to its end and returns the attacks of its report."""

    def run(secure_sum, passes, **options):
        settings = small(
            **{
                **BASE,
                "rounds": {"passes": passes, "evaluate_every": passes, "party_per_user": True},
                "fpl": {"factors": 4, "min_touch": 1, **options},
                "federation": {"hosts": 2, "attacks": True},
                "secure_sum": secure_sum,
                "output": tmp_path_factory.mktemp("attacked"),
            }
        )
        report, _ = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
        return report.content()["attacks"]

    return run


def test_in_clear_signs_are_the_items_of_users_that_send_everything(attacked):
    found = attacked("clear", 1, pi=1.0)["signs"]
    assert found["auc"] > 0.999
    assert (found["precision"], found["recall"]) == (1, 1)


def test_in_clear_a_share_of_0_hides_items_from_signs_but_not_from_absence_over_rounds(attacked):
    found = attacked("clear", 12, pi=0.0)
    assert found["signs"]["recall"] == 0
    assert found["absence"]["rounds"] == 12
    assert found["absence"]["auc"] > found["absence"]["popularity_auc"] + 0.1
    assert found["absence"]["auc"] > 0.95


def test_a_masked_sum_tells_no_more_than_popularity(attacked):
    found = attacked("masked", 4, pi=1.0)
    for name in ("signs", "absence"):
        assert found[name]["users"] == 60
        assert found[name]["auc"] < found[name]["popularity_auc"] + 0.02
        assert found[name]["precision"] < 0.6
