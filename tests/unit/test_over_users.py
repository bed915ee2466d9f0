"""How quality is spread over users: counts by value, means by activity, and the report's section on it."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.evaluation.holdout import TRAIN
from coterie.studies.run_data import load, make_feed
from coterie.studies.users_figures import over_users
from coterie.systems.reports import read_report
from coterie.telemetry.report_html import render


def test_the_spread_over_users_counts_values_and_means_by_activity() -> None:
    settings = RunSettings.model_validate(
        {"system": "fedncf", "data": {"synthetic": {"users": 25, "items": 60, "interactions": 600}}}
    )
    feed = make_feed(settings, load(settings), 0)
    users = feed.dataset.users
    held = np.bincount(feed.dataset.user[feed.split.part == TRAIN], minlength=len(users))
    values = {user: float(held[n] > np.median(held)) for n, user in enumerate(users)}
    del values[users[3]]
    found = over_users({"hit": values, "nothing": {}}, feed)
    assert found.keys() == {"hit"}
    spread = found["hit"]
    assert spread.users == sum(spread.counts) == len(users) - 1
    assert spread.counts[-1] == sum(values.values())
    assert sum(spread.counts[1:-1]) == 0
    # Never fewer than five users behind a mean.
    assert [one.users for one in spread.by_activity] == [6, 6, 6, 6]
    assert sum(one.users for one in spread.by_activity) == len(users) - 1
    assert (spread.by_activity[0].mean, spread.by_activity[-1].mean) == (0.0, 1.0)
    assert spread.by_activity[0].least == min(held[n] for n, user in enumerate(users) if user in values)
    total = sum(one.mean * one.users for one in spread.by_activity)
    assert total == pytest.approx(sum(values.values()))


def test_of_too_few_users_there_are_no_means_by_activity() -> None:
    settings = RunSettings.model_validate(
        {"system": "fedncf", "data": {"synthetic": {"users": 4, "items": 60, "interactions": 90}}}
    )
    feed = make_feed(settings, load(settings), 0)
    found = over_users({"hit": dict.fromkeys(feed.dataset.users, 1.0)}, feed)
    assert found["hit"].by_activity == ()


def spread(*, means: list[float], users: int = 5) -> dict[str, object]:
    return {
        "users": 2 * users,
        "counts": [3, 4, 3],
        "edges": [0.0, 0.3, 0.7, 1.0],
        "by_activity": [
            {"users": users, "least": n, "most": n + 2, "mean": mean} for n, mean in enumerate(means)
        ],
    }


def test_the_report_has_a_section_where_figures_of_users_were_kept() -> None:
    metrics = {"ndcg@10": 0.4, "hit_ratio@10": 0.5, "map@10": 0.2}
    known = {"metrics": metrics, "over_users": {"ndcg@10": spread(means=[0.25, 0.5])}}
    page = render(read_report(known))
    section = page.partition('<section id="users"')[2].partition("</section>")[0]
    assert "10 users; 30.0% of them are between 0 and 0.300." in section
    assert "Means by activity: users in 2 parts of nearly equal size" in section
    assert "0 to 2" in section
    assert "0.2500" in section
    assert '<section id="users"' not in render(read_report({"metrics": metrics}))


def test_metrics_of_the_same_users_share_a_table() -> None:
    kept = {"ndcg@10": spread(means=[0.1, 0.2]), "map@10": spread(means=[0.3, 0.4])}
    kept["hit_ratio@10"] = {**spread(means=[0.5, 0.6], users=4), "counts": [5, 0, 3]}
    page = render(read_report({"metrics": dict.fromkeys(kept, 0.4), "over_users": kept}))
    section = page.partition('<section id="users"')[2].partition("</section>")[0]
    assert section.count("Means by activity") == 2
    # A metric of zeros and ones has no plot.
    assert section.count("<figure>") == 2
