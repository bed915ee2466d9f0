"""The example of docs/extending.md, trained as it stands there; every allowed combination for a round."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.secure_sum.registry import SUMS
from coterie.studies.in_process import InProcess, train_plan
from coterie.studies.run_data import Feed, load, make_feed
from coterie.systems.drift.sequential import run_in_process
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.study.references import in_time_order
from coterie.systems.fcf.settings import FcfSettings
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.registry import SYSTEMS, combination, combinations
from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan, RunPlan

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "extending" / "popular.py"
PAGE = ROOT / "docs" / "extending.md"
SETTINGS = {
    "fedncf": RunSettings(system="fedncf").fedncf.to_json(),
    "fedmvmf": FedMvmfPlan().to_json(),
    "fedmf": RunSettings(system="fedmf").fedmf.to_json(),
    "fcf": FcfSettings(factors=8).to_json(),
    "popular": "",
}
"""Settings of each rounds-based system for the rounds below."""


@pytest.fixture(scope="module")
def feed() -> Feed:
    settings = RunSettings.model_validate(
        {
            "system": "fedncf",
            "data": {"synthetic": {"users": 24, "items": 40, "interactions": 240}},
            "federation": {"hosts": 3},
        }
    )
    return make_feed(settings, load(settings), 0)


@pytest.fixture
def popular() -> Iterator[None]:
    """Enter the example's system, as a module that is imported does."""
    spec = importlib.util.spec_from_file_location("popular", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield
    del SYSTEMS["popular"]


def one_pass(system: str, secure_sum: str, feed: Feed, *, users: bool = False) -> InProcess:
    rounds = RoundsPlan(
        cohorts=CohortKind.COHORT_KIND_ALL,
        cohort=24,
        group=24,
        beacon=bytes(32),
        party_per_user=users,
        min_cohort=20,
        min_sum=20,
        experiment=True,
        passes=1,
        evaluate_every=1,
        choose_by="validation_ndcg@10",
    )
    plan = RunPlan(
        run_id="a-run",
        system=system,
        form="users" if users else "hosts",
        secure_sum=secure_sum,
        settings=SETTINGS[system],
        rounds=rounds,
    )
    return train_plan(plan, feed, hosts=3, see=lambda event: None)


@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
@pytest.mark.usefixtures("popular")
def test_the_example_counts_what_there_is_under_every_sum_that_it_offers(secure_sum: str, feed: Feed) -> None:
    assert combination("popular", secure_sum).allowed
    made = one_pass("popular", secure_sum, feed)
    data: Dataset = feed.dataset
    expected = np.bincount(data.item[feed.split.train], minlength=len(data.items))
    np.testing.assert_array_equal(made.trained.arrays["counts"], expected)
    before, after = made.known["history"]
    # Before the first round all scores are equal, which counts against them.
    assert before["metrics"]["hit_ratio@10"] == 0 < after["metrics"]["hit_ratio@10"]
    best = made.hosts[0].recommend({"counts": expected.astype(np.float32)}, 0)
    assert int(np.argmax(best)) == int(np.argmax(expected))


def test_the_lines_of_the_page_run_as_they_stand_there(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    monkeypatch.setitem(SYSTEMS, "popular", SYSTEMS["fedncf"])  # taken out again afterwards
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)  # a page of this repository
    found = names["trained"].known
    assert found["history"][0]["metrics"]["ndcg@10"] == 0 < found["chosen"]["metrics"]["ndcg@10"]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60


def cells() -> list[Any]:
    return [
        pytest.param(one.system, one.secure_sum, users, id=f"{one.system}-{one.secure_sum}{'-users' * users}")
        for one in combinations()
        if one.allowed and one.system != "drift"
        for users in (False, True)
    ]


@pytest.mark.parametrize(("system", "secure_sum", "users"), cells())
def test_every_allowed_combination_runs(system: str, secure_sum: str, users: bool, feed: Feed) -> None:
    known = one_pass(system, secure_sum, feed, users=users).known
    assert known["phase"] == "done"
    assert known["abandoned"] == 0
    assert known["version"] == 1
    assert {one["members"] for one in known["rounds"]} == {24 if users else 3}


def test_drift_in_clear_runs(feed: Feed) -> None:
    stream = in_time_order(feed, np.asarray(feed.split.train))
    users, items = len(feed.dataset.users), len(feed.dataset.items)
    Upsilon, Psi = run_in_process([stream], users, items, DriftSettings(dim=4), epochs=1, seed=0)
    assert np.isfinite(Upsilon).all()
    assert np.isfinite(Psi).all()


def test_every_system_and_sum_is_in_the_matrix() -> None:
    assert {(one.system, one.secure_sum) for one in combinations()} == {
        (system, secure_sum) for system in ("drift", *SYSTEMS) for secure_sum in SUMS
    }


def test_what_does_not_go_together_says_why() -> None:
    refused = [one for one in combinations() if not one.allowed]
    assert [(one.system, one.form, one.secure_sum) for one in refused] == [
        ("drift", "published", "masked"),
        ("drift", "published", "encrypted"),
        ("drift", "published", "shared-key"),
        ("drift", "shielded", "encrypted"),
        ("drift", "shielded", "shared-key"),
        ("fedmvmf", "", "shared-key"),
    ]
    assert all("needs rounds" in one.why for one in refused[:3])
    assert all("in clear or masked" in one.why for one in refused[3:5])
    assert "entered for clear, masked, encrypted only" in refused[5].why
    assert "no such system" in combination("sfpl", "clear").why
    assert "no such sum" in combination("fedncf", "shouted").why


def test_a_sum_for_which_a_system_is_not_entered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = SYSTEMS["fedncf"]
    monkeypatch.setitem(SYSTEMS, "fedncf", type(offered)(offered.server, offered.host, ("clear",)))
    assert combination("fedncf", "clear").allowed
    assert "for clear only" in combination("fedncf", "masked").why
    with pytest.raises(ValueError, match="for clear only"):
        RunSettings(system="fedncf", secure_sum="masked")
