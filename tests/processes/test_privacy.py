"""Noise in contributions over real processes: attacks that read them without it, plan, consent, report and receipt."""

import asyncio

import pytest

from coterie.launch.federation import run_federation
from coterie.studies import experiment
from coterie.wire.v1.client_pb2 import DisclosureReceiptRequest
from coterie.wire.v1.client_pb2_grpc import UserAgentStub

USERS = 60
BASE = {
    "system": "fedmf",
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": USERS, "items": 80, "interactions": 1500}},
    "rounds": {"cohorts": "all", "passes": 2, "evaluate_every": 1, "party_per_user": True},
    "federation": {"hosts": 2, "attacks": True},
    "fedmf": {"min_touch": 1},
}
LOCAL = {"place": "local", "noise": 8.0, "clip": 0.25}


@pytest.fixture(scope="module")
def reported(small, tmp_path_factory):
    """Return a function that runs a federation to its end, once, and returns its report."""
    made = {}

    def run(name, **given):
        if name not in made:
            output = tmp_path_factory.mktemp("private")
            settings = small(**{**BASE, **given, "output": output})
            report, _ = asyncio.run(
                experiment.run(settings, "test", lambda seed, event: None, run_federation)
            )
            made[name] = report.content()
        return made[name]

    return run


def test_contributions_without_noise_tell_what_users_have_rated_and_with_local_noise_they_do_not(reported):
    plain = reported("plain")["attacks"]
    private = reported("local", rounds={**BASE["rounds"], "privacy": LOCAL})["attacks"]
    for name in ("reconstruction", "lengths"):
        assert plain[name]["auc"] > 0.999 > plain[name]["popularity_auc"] + 0.1
        assert 0.4 < private[name]["auc"] < 0.6
    assert plain["reconstruction"]["ratings"] > 0.95
    assert private["reconstruction"]["rated"] < private["reconstruction"]["rated_guess"] + 0.05
    # Counts of items in clear, one report of each user.
    assert plain["disaggregate"]["counts_auc"] > 0.999
    assert private["disaggregate"]["counts_auc"] < 0.6


def test_the_report_says_what_the_run_cost_and_what_the_plan_allowed(reported):
    assert reported("plain")["privacy"] == {}
    found = reported("local", rounds={**BASE["rounds"], "privacy": LOCAL})["privacy"]
    assert (found["place"], found["mechanism"], found["sums"]) == ("local", "gaussian", 6)
    assert found["epsilon"] == found["epsilon_median"] == pytest.approx(found["epsilon_planned"])
    assert 2 < found["epsilon"] < 4


def test_the_published_noise_for_each_value_is_reported_with_the_epsilon_of_all_of_a_users_data(reported):
    rounds = {**BASE["rounds"], "evaluate_every": 2}
    private = {"place": "local", "mechanism": "laplace", "noise": 2.0, "clip": 0.1, "per_value": True}
    found = reported("per value", rounds={**rounds, "privacy": private})["privacy"]
    # A unit for each value of each sum: 80 counts once, 18 numbers of metrics twice, 80 rows of 21 values twice.
    assert found["epsilon"] > 2 * 80 * 21
    assert found["epsilon_planned"] is None
    assert "protects no user as a whole" in found["text"]


async def receipt(running, host):
    """Return the receipt of a user of a host."""
    names, users = running.stores.user_names(), running.stores.users()
    name = next(name for name, who in names.items() if users[who][0] == f"client/host-{host}")
    channel = running.channel(f"client/host-{host}")
    try:
        return await channel.stub(UserAgentStub).DisclosureReceipt(DisclosureReceiptRequest(user=name))
    finally:
        await channel.close()


async def test_distributed_noise_is_in_a_masked_sum_and_hosts_tell_their_users_what_it_cost(
    small, federation
):
    private = {"place": "distributed", "noise": 4.0, "clip": 0.5, "colluders": 3}
    rounds = {**BASE["rounds"], "party_per_user": False, "privacy": private}
    settings = small(**{**BASE, "secure_sum": "masked", "rounds": rounds, "federation": {"hosts": 3}})
    async with federation(settings) as running:
        await running.start()
        await running.ended()
        left = await receipt(running, 0)
        report = await running.finish()
    found = report["privacy"]
    assert (found["sums"], report["abandoned"]) == (6, 0)
    costs = [event.metrics.epsilon for event in running.events if event.HasField("metrics")]
    assert len(costs) == 3
    assert costs == sorted(set(costs))
    assert costs[-1] == pytest.approx(found["epsilon"])
    (update,) = [one.protection for one in left.disclosures if one.kind == "model update (masked)"]
    assert f"distributed noise, epsilon {found['epsilon']:.4g} at delta 1e-05 in 6 sums so far" in update


async def test_a_host_that_accepts_less_than_the_run_may_cost_takes_no_part_and_says_why(small, federation):
    rounds = {**BASE["rounds"], "party_per_user": False, "privacy": LOCAL}
    settings = small(**{**BASE, "rounds": rounds, "federation": {"hosts": 3}})
    keys = {"client/host-0": {"consent": {"max_epsilon": 1.0}}}
    async with federation(settings, keys=keys) as running:
        await running.start()
        await running.ended()
        left, refused = await receipt(running, 1), (await receipt(running, 0)).declined
        report = await running.finish()
    assert any("may cost a user an epsilon of" in one.reason for one in refused)
    assert all("accepted is an epsilon of 1 or less" in one.reason for one in refused)
    assert any("local noise, epsilon" in one.protection for one in left.disclosures)
    assert {one["summed"] for one in report["rounds"]} == {40}
