"""What groups close to learning and show, before a run."""

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coterie.config.run import RunSettings
from coterie.errors import ConfigError, DataError
from coterie.launch.bootstrap import bootstrap
from coterie.launch.preflight import check_run
from coterie.studies.experiment import run
from coterie.studies.floors import MOST_CLOSED, curve, fitted, floors, require_open, sufficient
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.run_plan import run_plan
from coterie.telemetry.report_rounds import rounds_lines

USERS = 90
SPARSE = {"synthetic": {"users": USERS, "items": 400, "interactions": 1500}}
DENSE = {"synthetic": {"users": USERS, "items": 40, "interactions": 1800}}


def run_of(data: dict[str, Any] = SPARSE, group: int = 30, **given: Any) -> RunSettings:
    return RunSettings.model_validate(
        {
            "system": "fcf",
            "split": {"kind": "random"},
            "data": data,
            "rounds": {"group": group, "cohort": group, "passes": 1, "evaluate_every": 1},
            "federation": {"hosts": 2},
            **given,
        }
    )


def feed_of(settings: RunSettings) -> Feed:
    return make_feed(settings, load(settings), 0)


@pytest.mark.parametrize("system", ["fcf", "fedncf"])
def test_one_group_closes_what_a_run_closes_and_what_counting_finds(system: str) -> None:
    kind = "random" if system == "fcf" else "leave-last-out"
    settings = run_of(group=USERS, system=system, split={"kind": kind})
    feed = feed_of(settings)
    found = floors(settings, feed)
    assert found is not None
    data, train = feed.dataset, feed.split.train
    pairs = set(zip(data.user[train].tolist(), data.item[train].tolist(), strict=True))
    least = settings.own.min_touch  # type: ignore[attr-defined]
    users_of = Counter(item for _, item in pairs)
    assert found.closed == pytest.approx(sum(n for n in users_of.values() if n < least) / len(pairs))
    known = train_in_process(settings, feed, run_id="run", seed=0, see=lambda _: None).known
    assert found.closed == pytest.approx(known["closed_share"])
    # One group shows what everybody knows.
    assert found.auc == found.popularity_auc


def test_larger_groups_close_less_and_tell_less() -> None:
    settings = run_of(group=10)
    found = list(curve(settings, feed_of(settings)))
    assert [one.group for one in found] == [10, 20, 40, 90]
    assert [one.groups for one in found] == [9, 4, 2, 1]
    for smaller, larger in itertools.pairwise(found):
        assert smaller.closed > larger.closed
        assert smaller.held_out >= larger.held_out
        assert smaller.auc is not None
        assert larger.auc is not None
        assert smaller.auc > larger.auc
    assert found[0].costly


def test_the_smallest_groups_that_close_little_are_found_or_else_one_group() -> None:
    dense = run_of(DENSE, group=5)
    better = sufficient(dense, feed_of(dense))
    assert better is not None
    assert better.closed <= MOST_CLOSED
    assert 1 < better.groups < 18
    sparse = run_of(group=10)
    better = sufficient(sparse, feed_of(sparse))
    assert better is not None
    assert (better.groups, better.closed > MOST_CLOSED) == (1, True)


@pytest.mark.parametrize("system", ["fcf", "fedncf"])
def test_groups_fitted_to_the_data_are_in_the_plan_and_stay_when_fitted_again(system: str) -> None:
    kind = "random" if system == "fcf" else "leave-last-out"
    small = {"group": 20, "cohort": 20, "passes": 1, "evaluate_every": 1, "fit_groups": True}
    settings = run_of(DENSE, system=system, split={"kind": kind}, rounds=small)
    feed = feed_of(settings)
    made = fitted(settings, feed)
    better = sufficient(settings, feed)
    assert better is not None
    assert made.rounds.group == better.group
    assert not better.costly or better.groups == 1
    plan = run_plan(made, run_id="run", seed=0).rounds
    assert (plan.group, plan.cohort) == (made.rounds.group, made.rounds.cohort)
    # Where everybody is in each cohort, its size says nothing.
    assert made.rounds.cohort == (made.rounds.group if made.rounds.cohorts == "groups" else 20)
    assert fitted(made, feed) == made
    as_set = run_of(DENSE, group=20, system=system, split={"kind": kind})
    assert fitted(as_set, feed) is as_set


def test_a_run_with_fitted_groups_reports_them_and_what_they_close(tmp_path: Path) -> None:
    rounds = {"group": 20, "cohort": 20, "passes": 1, "evaluate_every": 1, "fit_groups": True}
    settings = run_of(rounds=rounds, reference=False, output=tmp_path)
    warned: list[str] = []
    report, _ = asyncio.run(run(settings, "run", lambda *_: None, None, warn=warned.append))
    # On such sparse data one group of everybody closes least, and still too much.
    assert report.settings["rounds"]["group"] == USERS
    assert report.groups == 1
    assert report.floors.fitted
    assert report.floors.groups == 1
    assert report.closed_share == pytest.approx(report.floors.closed)
    assert any(report.floors.text in line for line in warned)
    assert dict(rounds_lines(report))["Groups, fitted to the data"] == report.floors.text
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    assert content["floors"]["group"] == USERS
    assert "fitted to the data" in (tmp_path / "run" / "report.html").read_text()


def test_preflight_fits_groups_as_the_run_will() -> None:
    rounds = {"group": 5, "cohort": 5, "min_cohort": 5, "min_sum": 5, "passes": 1, "fit_groups": True}
    settings = run_of(DENSE, rounds=rounds)
    (finding,) = [one for one in check_run(settings) if one.check == "floors"]
    assert finding.status == "ok"
    group = fitted(settings, feed_of(settings)).rounds.group
    assert group > 5
    assert f"rounds.group={group}, fitted to the data" in finding.note


def test_a_federation_across_machines_has_an_explicit_number(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rounds\.fit_groups = true: across machines the data is at the hosts"
    ):
        bootstrap(run_of(rounds={"fit_groups": True}), tmp_path / "federation", "run")


def test_a_system_that_closes_nothing_has_no_floors() -> None:
    settings = run_of(system="fedncf", split={"kind": "leave-last-out"}, fedncf={"touch": "exact"})
    assert floors(settings, feed_of(settings)) is None
    assert sufficient(settings, feed_of(settings)) is None


def test_data_whose_items_nobody_shares_are_refused_with_what_would_help() -> None:
    settings = run_of(fcf={"min_touch": 1000})
    with pytest.raises(DataError, match="every item is closed to learning") as refused:
        require_open(settings, feed_of(settings))
    assert "fcf.min_touch" in str(refused.value.hint)
    (finding,) = [one for one in check_run(settings) if one.check == "floors"]
    assert finding.status == "fail"


def test_preflight_says_what_floors_cost_and_which_groups_cost_less() -> None:
    (finding,) = [one for one in check_run(run_of(DENSE, group=5)) if one.check == "floors"]
    assert finding.status == "warn"
    assert "of users' training items" in finding.problem
    assert "AUC" in finding.problem
    assert "rounds.group=" in finding.fix
    (finding,) = [one for one in check_run(run_of(group=USERS)) if one.check == "floors"]
    assert finding.status == "warn"
    assert "no group is larger" in finding.fix
    (finding,) = [one for one in check_run(run_of(DENSE, group=USERS)) if one.check == "floors"]
    assert finding.status == "ok"
