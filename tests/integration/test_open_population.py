"""Plans whose population is open, at a real orchestration server: which of them it starts no run for."""

import pytest

from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.wire.v1.operator_pb2 import StartRunRequest
from coterie.wire.v1.orchestrator_pb2 import CohortKind, RoundsPlan, RunPlan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"redraw": 50}, "groups are drawn anew"),
        ({"experiment": True}, "does not in an experiment"),
        ({"cohorts": CohortKind.COHORT_KIND_RANDOM}, "expected cohorts of groups, or all"),
        ({"most_users": 1}, "at most 1 users, and the run waits for 2"),
        ({"most_users": 70_000}, "a sum has room for 65537 users"),
        # Two users at the beginning are a group of their own, and a cohort of 100 then has fifty groups.
        (
            {"group": 60, "cohort": 100, "most_users": 1000},
            "a sum has room for 256 users, and one may come to 1000",
        ),
    ],
    ids=["redraw", "experiment", "random", "fewer than expected", "more than sums hold", "than cohorts"],
)
async def test_the_server_starts_no_run_whose_population_cannot_be_open(operator, calls, changes, words):
    settings = FedNcfSettings(bits=24).to_json()
    plan = RunPlan(run_id="open", system="fedncf", form="hosts", secure_sum="masked", settings=settings)
    usual = {"cohorts": CohortKind.COHORT_KIND_GROUPS, "cohort": 2, "group": 2, "min_cohort": 2, "min_sum": 2}
    rest = {"passes": 9, "evaluate_every": 1, "step_timeout_ms": 1000, "most_users": 9}
    plan.rounds.CopyFrom(RoundsPlan(**{**usual, **rest, **changes}))
    request = StartRunRequest(
        plan=plan, expect_owners=1, expect_users=2, phase_timeout_ms=60_000, party_timeout_ms=60_000
    )
    why = await calls.refused(operator.stub.StartRun(request))
    assert (why.reason, why.field) == ("INVALID_FIELD", "plan.rounds.most_users")
    assert words in why.text
