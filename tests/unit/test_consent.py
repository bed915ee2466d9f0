"""Consent clause by clause: what is outside is refused with the clause's words, what is inside is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coterie.config.services import ConsentSettings, OwnerConsentSettings
from coterie.rounds.consent import Consent, OwnerConsent
from coterie.rounds.privacy import epsilon, privacy_of
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import Member, SumPlan
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan, RunPlan

METRICS = ("hit_ratio@10", "ndcg@10")
OPEN = Consent(min_cohort=1, min_sum=1, experiment=True)
"""Accepts everything."""


def run_plan(**rounds: Any) -> RunPlan:
    floors = {"min_cohort": 20, "min_sum": 20, "experiment": True}
    return RunPlan(system="fedncf", secure_sum="masked", rounds=RoundsPlan(**{**floors, **rounds}))


def sum_plan(devices: int = 3, users: int = 30, min_sum: int = 20) -> SumPlan:
    per_device = [users // devices] * devices
    per_device[0] += users - sum(per_device)
    members = tuple(Member(bytes([n]) * 32, f"client/{n}", count) for n, count in enumerate(per_device))
    return SumPlan("run", 1, "train", "masked", bytes(32), bytes(32), members, min_sum=min_sum)


def test_a_run_inside_every_clause_is_accepted() -> None:
    strict = Consent(("fedncf",), ("masked",), 20, 20, True, 5, METRICS)
    assert strict.objections(run_plan(), METRICS) == []
    assert strict.objections_to_round(sum_plan(), 4) == []


@pytest.mark.parametrize(
    ("clause", "words"),
    [
        ({"systems": ("drift", "fcf")}, "'fedncf' is not among those accepted: drift, fcf"),
        ({"secure_sums": ("clear",)}, "'masked'; accepted is: clear"),
        ({"min_cohort": 21}, "floor of a cohort is 20; accepted is 21"),
        ({"min_sum": 21}, "floor of a sum is 20; accepted is 21"),
        ({"experiment": False}, "floors count users"),
        ({"metrics": ("ndcg@10",)}, "may not leave are asked for: hit_ratio@10"),
        ({"metrics": ()}, "hit_ratio@10, ndcg@10"),
    ],
)
def test_a_run_outside_one_clause_is_refused_for_that_clause_alone(
    clause: dict[str, Any], words: str
) -> None:
    inside = {"min_cohort": 20, "min_sum": 20, "experiment": True}
    (objection,) = Consent(**{**inside, **clause}).objections(run_plan(), METRICS)
    assert words in objection


def test_every_clause_that_is_not_met_is_named() -> None:
    consent = Consent(("drift",), ("clear",), 30, 30, False, 0, ())
    assert len(consent.objections(run_plan(), METRICS)) == 6


def test_a_run_without_rounds_is_held_against_system_and_sum_only() -> None:
    plan = RunPlan(system="drift", secure_sum="clear")
    assert Consent(min_cohort=1000, min_sum=1000, metrics=()).objections(plan) == []
    assert len(Consent(systems=("fedncf",), secure_sums=("masked",)).objections(plan)) == 2


def test_a_small_cohort_is_refused_by_users_in_an_experiment_and_by_devices_elsewhere() -> None:
    plan = sum_plan(devices=3, users=30)
    assert Consent(min_cohort=30, min_sum=1, experiment=True).objections_to_round(plan, 0) == []
    (users,) = Consent(min_cohort=31, min_sum=1, experiment=True).objections_to_round(plan, 0)
    assert "30 users; accepted is 31" in users
    assert Consent(min_cohort=3, min_sum=1).objections_to_round(plan, 0) == []
    (devices,) = Consent(min_cohort=4, min_sum=1).objections_to_round(plan, 0)
    assert "3 devices; accepted is 4" in devices


def test_members_that_are_revoked_count_for_no_floor() -> None:
    plan = sum_plan(devices=3, users=30)
    (users,) = Consent(min_cohort=21, min_sum=1, experiment=True).objections_to_round(plan, 0, {2})
    assert "20 users without 1 members that are revoked; accepted is 21" in users
    assert Consent(min_cohort=2, min_sum=1).objections_to_round(plan, 0, {2}) == []
    (devices,) = Consent(min_cohort=3, min_sum=1).objections_to_round(plan, 0, {2})
    assert "2 devices without 1 members that are revoked; accepted is 3" in devices


def test_a_low_floor_of_one_sum_is_refused() -> None:
    (objection,) = Consent(min_cohort=1, min_sum=21, experiment=True).objections_to_round(sum_plan(), 0)
    assert "floor of the sum is 20 users; accepted is 21" in objection


def test_rounds_of_a_day_are_counted_and_none_means_any_number() -> None:
    limited = Consent(min_cohort=1, min_sum=1, experiment=True, rounds_per_day=3)
    assert limited.objections_to_round(sum_plan(), 2) == []
    (objection,) = limited.objections_to_round(sum_plan(), 3)
    assert "3 rounds today; accepted are 3" in objection
    assert OPEN.objections_to_round(sum_plan(), 10**6) == []


def test_a_host_of_one_user_counts_devices_unless_told_otherwise() -> None:
    assert not ConsentSettings().consent(1).experiment
    assert ConsentSettings().consent(2).experiment
    assert not ConsentSettings(experiment=False).consent(2).experiment
    assert ConsentSettings(experiment=True).consent(1).experiment


def test_configured_clauses_arrive_in_the_consent() -> None:
    settings = ConsentSettings(
        systems=("fedncf",),
        secure_sums=("masked",),
        min_cohort=2,
        min_sum=3,
        rounds_per_day=4,
        metrics=("a",),
        sparse=True,
    )
    assert settings.consent(5) == Consent(("fedncf",), ("masked",), 2, 3, True, 4, ("a",), True)


def test_contributions_that_show_where_there_is_something_are_refused_unless_they_are_accepted() -> None:
    plan = dataclasses.replace(sum_plan(), sparse_floor=20)
    (run,), (one,) = OPEN.objections(run_plan(sparse=True)), OPEN.objections_to_round(plan, 0)
    assert "show the server in which places" in run
    assert one == run
    accepting = dataclasses.replace(OPEN, sparse=True, min_sum=20)
    assert accepting.objections(run_plan(sparse=True)) == []
    assert accepting.objections_to_round(plan, 0) == []
    (low,) = accepting.objections_to_round(dataclasses.replace(plan, sparse_floor=19), 0)
    assert "floor of a place of the sum is 19 users; accepted is 20" in low


@pytest.mark.parametrize(
    ("clause", "words"),
    [
        ({}, None),
        ({"systems": ("drift",)}, "'fedncf' is not among those accepted: drift"),
        ({"secure_sums": ("clear",)}, "'masked'; accepted is: clear"),
        ({"k_min": 6}, "the floor of users behind a row that leaves an owner is 5; accepted is 6 or more"),
        ({"experiment": False}, "floors count users"),
    ],
)
def test_owners_refuse_a_run_outside_a_clause_of_theirs(clause: dict[str, Any], words: str | None) -> None:
    inside = {"systems": ("fedncf",), "secure_sums": ("masked",), "k_min": 5, "experiment": True}
    found = OwnerConsent(**{**inside, **clause}).objections(run_plan(), 5)
    assert found == [] if words is None else words in found[0]
    assert len(found) <= 1


def test_owners_that_hold_no_rows_back_have_no_floor_to_object_to() -> None:
    assert OwnerConsent(k_min=100, experiment=True).objections(run_plan()) == []


def test_configured_clauses_arrive_in_the_consent_of_owners() -> None:
    assert OwnerConsentSettings().consent() == OwnerConsent()
    given = {"systems": ["drift"], "secure_sums": ["masked"], "k_min": 9, "experiment": True}
    assert OwnerConsentSettings.model_validate(given).consent() == OwnerConsent(
        ("drift",), ("masked",), 9, True
    )


def test_a_run_that_may_cost_more_than_is_accepted_is_refused_and_one_without_noise_as_well() -> None:
    terms = {"place": "local", "mechanism": "gaussian", "noise": 8.0, "clip": 1.0, "most_items": 9}
    private = {**terms, "most_metrics": 1.0, "delta": 1e-5, "epsilon": 0.0}
    run = run_plan(passes=10, evaluate_every=5, privacy=private)
    assert OPEN.objections(run) == []
    most = epsilon(privacy_of(run.rounds), {Purpose.TRAIN: 10 + 3 + 1})
    assert dataclasses.replace(OPEN, max_epsilon=most + 1e-6).objections(run) == []
    # Whatever epsilon the plan states.
    (refused,) = dataclasses.replace(OPEN, max_epsilon=most - 1e-3).objections(run)
    assert f"may cost a user an epsilon of {most:.4g} at delta 1e-05; accepted is an epsilon of" in refused
    (exact,) = dataclasses.replace(OPEN, max_epsilon=100.0).objections(run_plan())
    assert "sums are exact" in exact
    per_value = {**private, "mechanism": "laplace", "per_value": True}
    (endless,) = dataclasses.replace(OPEN, max_epsilon=1e9).objections(run_plan(passes=1, privacy=per_value))
    assert "an epsilon of inf" in endless
    assert ConsentSettings(max_epsilon=3).consent(1).max_epsilon == 3
