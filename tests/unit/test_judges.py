"""Simple judges in the report of a run: one mechanism for all systems that rank items."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.evaluation.baselines import from_table, popularity
from coterie.evaluation.selection import measured_once
from coterie.studies import judges
from coterie.studies.judges import JUDGES, references
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.study import study_of
from coterie.systems.registry import systems

SMALL = {"data": {"synthetic": {"users": 40, "items": 60, "interactions": 800}}}
SHORT = {"rounds": {"passes": 1, "cohort": 20, "group": 20, "evaluate_every": 1}}


def run(system: str, **more: Any) -> tuple[RunSettings, Feed]:
    settings = RunSettings.model_validate({**SMALL, **SHORT, "system": system, **more})
    return settings, make_feed(settings, load(settings), 0)


def has_judges(system: str) -> bool:
    try:
        return study_of(system).judged is not None
    except ConfigError:
        return False


@pytest.mark.parametrize("system", [name for name in systems() if has_judges(name)])
def test_judges_of_a_system_have_the_metrics_that_its_runs_show(system: str) -> None:
    settings, feed = run(system)
    found = references(settings, feed, 0)
    for model in JUDGES:
        row = found[model.name.replace("-", "_")]
        assert set(settings.description.shown) <= row.metrics.keys()
        assert row.history == []


def test_a_system_that_predicts_ratings_keeps_its_own_references() -> None:
    for system in (name for name, one in systems().items() if one.needs.ratings):
        assert study_of(system).judged is None


def test_popularity_is_measured_as_ever() -> None:
    settings, feed = run("fedncf")
    data, train = feed.dataset, feed.split.train
    counts = popularity(data.item[train], np.ones(int(train.sum()), np.bool_), len(data.items))
    table = np.broadcast_to(counts, (len(data.users), len(data.items)))
    expected = measured_once(feed.leave_one_out(), *from_table(table)).metrics
    assert references(settings, feed, 0)["popularity"].metrics == dict(expected)


def test_where_likes_are_learned_judges_learn_what_is_liked() -> None:
    _, feed = run("drift")
    data, liked = feed.dataset, feed.split.train & feed.positive
    assert 0 < liked.sum() < feed.split.train.sum()
    assert sorted(zip(feed.training().user, feed.training().item, strict=True)) == sorted(
        zip(data.user[liked], data.item[liked], strict=True)
    )


def test_on_a_large_catalogue_models_of_items_by_items_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, feed = run("fedncf")
    monkeypatch.setattr(judges, "_LARGEST_CATALOGUE", 59)
    found = references(settings, feed, 0)
    assert {"popularity", "random"} <= found.keys()
    assert not {"item_knn", "ease_central"} & found.keys()
