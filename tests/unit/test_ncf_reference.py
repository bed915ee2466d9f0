"""The rows beside a run: trained and measured on the same split by the same code."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.config.run import RunSettings
from coterie.evaluation.leave_one_out import CHOOSE_BY, metric_names
from coterie.studies.judges import references
from coterie.studies.run_data import Feed, load, make_feed


def rows(**given: Any) -> tuple[Feed, Any]:
    small = {"data": {"synthetic": {"users": 40, "items": 60, "interactions": 800}}}
    settings = RunSettings.model_validate({**small, **given})
    feed = make_feed(settings, load(settings), 0)
    return feed, references(settings, feed, 0)


@pytest.mark.parametrize("model", ["gmf", "mlp", "neumf"])
def test_the_federations_own_model_is_trained_with_all_data_in_one_place(model: str) -> None:
    _, found = rows(system="fedncf", fedncf={"model": model}, rounds={"passes": 3, "cohort": 20, "group": 20})
    central = found["ncf"]
    assert [one["epoch"] for one in central.history] == [1, 2, 3]
    assert central.history[-1]["train_loss"] < central.history[0]["train_loss"]
    # The version that counts is the best by the validation item, the first of equals.
    chosen = max(central.history, key=lambda one: one["metrics"][CHOOSE_BY])
    assert central.metrics[CHOOSE_BY] == chosen["metrics"][CHOOSE_BY]
    assert set(metric_names()) <= central.metrics.keys()


def test_rows_that_know_no_user_stand_beside_with_every_metric() -> None:
    _, found = rows(system="fedncf", rounds={"passes": 1, "cohort": 20, "group": 20})
    always = {"ncf", "popularity", "item_knn", "ease_central", "random"}
    assert always <= found.keys() <= {*always, "als"}
    for row in found.values():
        assert set(metric_names()) <= row.metrics.keys()
    assert found["popularity"].history == []


def test_drift_keeps_its_own_rows_and_gains_the_simple_judges() -> None:
    _, found = rows(drift={"epochs": 1, "dim": 4})
    own = {"saros", "random", "popularity", "positive_share"}
    assert set(found) == {*own, "item_knn", "ease_central"}
