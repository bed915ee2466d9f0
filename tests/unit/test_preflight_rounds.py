"""Findings of preflight about a run in rounds."""

from __future__ import annotations

import re
from typing import Any

from coterie.config.run import RunSettings
from coterie.launch.preflight import Finding, check_run


def findings(**given: Any) -> list[Finding]:
    small = {"synthetic": {"users": 60, "items": 50, "interactions": 900}}
    settings = RunSettings.model_validate({"system": "fedncf", "data": small, **given})
    return [one for one in check_run(settings) if one.check in ("rounds", "split")]


def test_a_run_that_can_be_made_names_its_sum_and_parties() -> None:
    split, rounds = findings(rounds={"cohort": 30, "group": 30})
    assert [split.status, rounds.status] == ["ok", "ok"]
    assert rounds.note == "secure sum clear, hosts as parties"


def test_hosts_with_few_users_are_no_warning_where_metrics_are_part_of_the_sum() -> None:
    split, *_ = findings(rounds={"cohort": 30, "group": 30}, federation={"hosts": 6})
    assert split.status == "ok"


def test_what_cohorts_give_away_is_a_warning() -> None:
    _, _, *warned = findings(rounds={"cohorts": "random", "cohort": 30, "group": 30})
    assert [one.status for one in warned] == ["warn", "warn"]
    assert "Random cohorts" in warned[0].problem


def test_a_masked_sum_that_bears_no_dropout_is_a_warning_that_names_the_number() -> None:
    rounds = {"cohort": 30, "group": 30}
    _, _, *warned = findings(rounds=rounds, secure_sum="masked", federation={"hosts": 3})
    assert any("over 3 client hosts bears no dropout" in one.problem for one in warned)
    _, _, *warned = findings(rounds=rounds, secure_sum="masked", federation={"hosts": 7})
    assert not any("bears no dropout" in one.problem for one in warned)


def test_users_who_cannot_fill_a_cohort_fail_the_check() -> None:
    _, rounds = findings(rounds={"min_cohort": 70, "min_sum": 70, "cohort": 70, "group": 70})
    assert rounds.status == "fail"
    assert "a cohort has 60 of 60 users" in rounds.problem


NOISE = {"place": "local", "noise": 4.0, "clip": 0.5}
ROUNDS = {"cohort": 30, "group": 30, "min_sum": 20}


def test_what_noise_costs_and_takes_for_granted_is_in_the_findings() -> None:
    _, _, *warned = findings(rounds={**ROUNDS, "privacy": NOISE})
    assert any("has an epsilon of at most" in one.problem for one in warned)
    assert not any("colluders" in one.problem or "keep it to themselves" in one.problem for one in warned)
    shared = {**NOISE, "place": "distributed", "colluders": 4}
    _, _, *warned = findings(
        secure_sum="masked", rounds={**ROUNDS, "privacy": shared}, federation={"hosts": 7}
    )
    assert any("hosts of all but 4 users" in one.problem for one in warned)


def test_noise_without_room_in_the_codes_fails_the_check_and_the_nearest_that_fits_is_named() -> None:
    _, rounds = findings(rounds={**ROUNDS, "privacy": {**NOISE, "noise": 4e5}})
    assert rounds.status == "fail"
    assert "has no room in a code" in rounds.problem
    named = re.search(r"rounds.privacy.noise (\S+) is the nearest that fits", rounds.fix)
    assert named is not None
    _, rounds, *_ = findings(rounds={**ROUNDS, "privacy": {**NOISE, "noise": float(named[1])}})
    assert rounds.status == "ok"
