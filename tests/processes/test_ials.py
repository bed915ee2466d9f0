"""iALS over real processes: the numbers of one process in clear and masked, a report, recommendations, attacks."""

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

from .one_process import assert_equal_to_one_process

BASE = {
    "system": "ials",
    "split": {"kind": "leave-last-out"},
    "data": {"synthetic": {"users": 60, "items": 60, "interactions": 1500}},
    "rounds": {"passes": 2, "evaluate_every": 1},
    "ials": {"factors": 4, "min_touch": 5, "products": "item", "min_products": 10},
    "federation": {"hosts": 3},
}
SUMS = {
    "clear": {},
    "masked": {},
    "masked, users": {"rounds": {**BASE["rounds"], "party_per_user": True}},
}


@pytest.mark.parametrize("kind", SUMS)
def test_services_and_one_process_come_to_equal_numbers(small, federation, kind):
    settings = small(**{**BASE, **SUMS[kind]}, secure_sum=kind.partition(",")[0])
    assert_equal_to_one_process(settings, federation)


def test_a_run_has_a_report_and_a_user_is_recommended_what_scores_highest(small, tmp_path):
    settings = small(**BASE, secure_sum="masked", output=tmp_path, reference=True)
    report, folder = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
    assert {"ials", "popularity", "random"} <= set(report.reference)
    json.loads((folder / "report.json").read_text())
    assert "iALS" in (folder / "report.html").read_text()

    feed = make_feed(settings, load(settings), 0)
    data = feed.dataset
    user = data.users[3]
    found = asyncio.run(local_run.recommend(LocalRun.at(folder), user, 5))
    # Recommendations are by the version that was chosen, which is not the last one of necessity.
    passes = train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None).known["chosen"][
        "version"
    ]
    chosen = settings.model_copy(update={"rounds": settings.rounds.model_copy(update={"passes": passes})})
    alone = train_in_process(chosen, feed, run_id="test", seed=0, see=lambda event: None)
    side = server_side("ials", settings.own.for_plan(settings), len(data.items), 0, 1)
    host = int(feed.host[3])
    hosted = feed.hosted(host)
    position = list(hosted.users).index(user)
    scores = alone.hosts[host].recommend(side.model(alone.trained.arrays), position)
    scores[hosted.item[(hosted.user == position) & (hosted.part == TRAIN)]] = -np.inf
    best = [item for item in np.argsort(-scores, kind="stable")[:5] if np.isfinite(scores[item])]
    assert [one.item for one in found.suggestions] == [data.items[item] for item in best]
