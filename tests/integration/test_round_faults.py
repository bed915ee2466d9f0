"""Faults in rounds at the sockets: bad contributions, members that drop, a server killed in every step, divergence."""

import asyncio
import contextlib
import json
import time

import numpy as np
import pytest

from coterie.secure_sum.clear import ClearMember
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.protocol import Step
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub

from . import hosting, playing
from .playing import SETTINGS, STEPS, Host

VECTOR = wire.SubmitKind.SUBMIT_KIND_VECTOR


@pytest.fixture(scope="module")
def people(shared_third_party):
    async def enrol():
        return {
            "left": await shared_third_party.enrol("client", "faults-left", 3),
            "right": await shared_third_party.enrol("client", "faults-right", 3),
            "five": await shared_third_party.enrol("client", "faults-five", 5),
            "owner": await shared_third_party.enrol("data-owner", "faults-owner", 1),
        }

    return asyncio.run(enrol())


# --- bad contributions -------------------------------------------------------------------------------------------


def refused_by(cos, reason):
    """Return how many refusals of a reason to submitted items the server's metrics page counts."""
    return cos.metric("coterie_refusals_total", rpc="Submit", reason=reason)


async def test_bad_contributions_are_counted_on_the_metrics_page_and_in_the_report(
    start_member, shared_third_party, certificates, people, calls
):
    cos = await asyncio.to_thread(
        start_member, "cos", f"counting-{time.monotonic_ns()}", shared_third_party, max_payload_mb=1
    )
    operator = calls.Operating(cos, certificates["operator"])
    run = await playing.World(cos, operator, people, calls, per_user=True).begin("left", "right")
    left = run.hosts["left"]
    task = await left.task(wire.TaskKind.TASK_KIND_ROUND)
    plan = await left.plan(task.round.round)
    first, second = sorted(await left.briefings(task))[:2]
    good = ClearMember().answer(Step.SUBMIT, b"", left.codes(plan, left.slots_of(plan, first)))

    async def submit(message, number=plan.round, member=first):
        return await left.submit([(VECTOR, number, left.slots_of(plan, member), message)])

    assert await submit(good) == []
    # The same again is acknowledged and counts neither twice nor as refused.
    assert await submit(good) == []
    assert await submit(good[:-1] + b"\x01") == ["CONFLICT"]
    for codes, reason in ((bytes(8), "WRONG_SHAPE"), (b"\xff" * 4 * len(playing.ITEMS), "INVALID_FIELD")):
        message = rounds_pb2.SummedVector(codes=codes).SerializeToString()
        assert await submit(message, member=second) == [reason]
    assert await submit(good, number=plan.round + 7) == ["UNKNOWN_ROUND"]
    oversized = rounds_pb2.SummedVector(codes=bytes(2 << 20)).SerializeToString()
    sent = []

    def send():
        sent.append(oversized)
        return left.stub.Submit(items(left, plan, oversized))

    refused = await calls.refused(send)
    assert (refused.reason, refused.field) == ("TOO_LARGE", "chunk.data")

    await asyncio.gather(*(host.play() for host in run.hosts.values()))
    # Too late: the run is over.
    assert await submit(good) == ["UNKNOWN_ROUND"]
    report = await run.report()
    counted = {
        name: refused_by(cos, name)
        for name in ("CONFLICT", "INVALID_FIELD", "UNKNOWN_ROUND", "TOO_LARGE", "WRONG_SHAPE")
    }
    # It is sent again where gRPC has lost the answer.
    assert 1 <= counted.pop("TOO_LARGE") <= len(sent)
    assert counted == {
        "CONFLICT": 1,
        "INVALID_FIELD": 1,
        "UNKNOWN_ROUND": 2,
        "WRONG_SHAPE": 1,
    }
    # Of those, what named the open round and could be read.
    assert [one["refused"] for one in report["rounds"]] == [3, 0, 0, 0]
    assert [one["summed"] for one in report["rounds"]] == [6, 6, 6, 6]


async def items(host, plan, message):
    """Yield a contribution as a stream of chunks."""
    async for request in host.requests([(VECTOR, plan.round, host.party.slots[:1], message)]):
        yield request


async def test_an_impossible_sum_under_masks_abandons_its_round_and_the_run_goes_on(world):
    run = await world(secure_sum="masked", per_user=True).begin("left", "right", passes=2)
    liar, codes = run.hosts["left"], run.hosts["left"].codes

    def impossible(plan, slots):
        vector = codes(plan, slots)
        # What is under masks, nobody can look into; half of the modulus is beyond all that six users can add up to.
        return vector + np.uint32(1 << 31) if (plan.purpose, plan.pass_number) == ("train", 0) else vector

    liar.codes = impossible
    finished = await asyncio.gather(*(host.play() for host in run.hosts.values()))
    assert [task.reason for task in finished] == ["", ""]
    report = await run.report()
    reasons = {one["round"]: one["reason"] for one in report["rounds"] if one["reason"]}
    (reason,) = reasons.values()
    assert reason == "a sum is beyond what the contributions of 6 users can add up to"
    assert report["abandoned"] == 1
    assert report["version"] == 1
    assert report["phase"] == "done"


# --- members that drop -------------------------------------------------------------------------------------------

HOSTS = 15
"""Hosts of two users each."""
DROPPING = 3
"""Hosts that drop out of each round: 20% of the members."""


@pytest.fixture(scope="module")
def many(shared_third_party):
    async def enrol():
        owner = await shared_third_party.enrol("data-owner", "dropping-owner", 1)
        hosts = {
            f"host-{n}": await shared_third_party.enrol("client", f"dropping-{n}", 2) for n in range(HOSTS)
        }
        return {"owner": owner, **hosts}

    return asyncio.run(enrol())


class Dropping(Host):
    """A host that leaves rounds at given steps, and comes back for the next one."""

    def __init__(self, world, who, leaves):
        super().__init__(world, who)
        self.leaves = leaves
        """Step at which it is gone, by number of the round."""

    async def answer(self, task):
        number, step = task.round.round, STEPS[task.step][0]
        gone = self.leaves.get(number)
        if gone is None or MaskedServer.steps.index(step) < MaskedServer.steps.index(gone):
            return await super().answer(task)
        if step is gone and (number, "left") not in self.sent:
            self.sent[number, "left"] = b""
            await self.party.leave()
            await self.register()
        await asyncio.sleep(0.02)
        return []


async def test_a_fifth_of_the_members_dropped_at_random_in_every_round_is_recovered_from(
    cos, operator, many, calls
):
    rng = np.random.default_rng(5)
    run = playing.World(cos, operator, many, calls, secure_sum="masked", per_user=True)
    leaves = {f"host-{n}": {} for n in range(HOSTS)}
    for number in range(1, 9):
        for n in rng.choice(HOSTS, DROPPING, replace=False):
            leaves[f"host-{n}"][number] = Step(rng.choice([step.value for step in MaskedServer.steps]))
    run.host = lambda who: Dropping(run, who, leaves[who])
    await run.begin(*leaves, users=2 * HOSTS, passes=3, min_sum=20, min_cohort=20)
    finished = await asyncio.gather(*(host.play() for host in run.hosts.values()))
    assert {task.reason for task in finished} == {""}
    report = await run.report()
    assert report["phase"] == "done"
    assert report["version"] == 3
    assert len(report["rounds"]) == 8
    before_submitting = (Step.ADVERTISE, Step.SHARE, Step.SUBMIT)
    for one in report["rounds"]:
        gone = [at[one["round"]] for at in leaves.values() if one["round"] in at]
        # Whoever comes back too late for a round is missing in it, too.
        assert one["reason"] == ""
        assert one["dropped"] >= 2 * DROPPING
        assert 21 < one["summed"] <= 2 * (HOSTS - sum(step in before_submitting for step in gone))
    assert [one["metrics"]["hit_ratio@10"] for one in report["history"]] == pytest.approx([0.5] * 4, abs=1e-4)


# --- crashes -----------------------------------------------------------------------------------------------------


async def test_a_server_killed_in_every_step_goes_on_with_a_real_host_and_the_same_secrets(
    calls, third_party, start_member, certificates, tmp_path, people
):
    cos = await asyncio.to_thread(start_member, "cos", f"cos-{time.monotonic_ns()}", third_party)
    run = hosting.World(calls, third_party, start_member, certificates, tmp_path, cos)
    users = len(hosting.NAMES) + 5
    await run.begin(secure_sum="masked", per_user=True, users=users, settings=SETTINGS, passes=2)
    run.people, run.per_user = people, True
    played = Host(run, "five")
    await played.register()
    real = await asyncio.to_thread(run.host)
    # One step in each of the first five rounds: the real host has answered it, the played one has not.
    killed = dict(enumerate(MaskedServer.steps, start=1))
    while True:
        task = await played.task()
        if task.kind == wire.TaskKind.TASK_KIND_FINISH:
            break
        if killed.get(task.round.round) is STEPS[task.step][0]:
            del killed[task.round.round]
            await answered(run, task.round.round, len(hosting.NAMES))
            cos.kill()
            await cos.release()
            await asyncio.to_thread(cos.start)
            run.operator = calls.Operating(cos, certificates["operator"])
            played.party = calls.party_at(cos, played.enrolled, run.run)
            played.stub = cos.channel(played.enrolled).stub(OrchestratorStub)
            await played.register()
            played.clock = 0
            continue
        await played.answer(task)
    assert not killed
    assert task.reason == ""
    report = await run.over()
    assert report["version"] == 2
    assert [one["summed"] for one in report["rounds"]] == [users] * 6
    assert [one["round"] for one in report["rounds"]] == list(range(1, 7))
    sent, declined = await run.receipt(real, hosting.NAMES[0])
    assert declined == []
    # Each message is on the receipt once, however often it had to be sent.
    assert {
        sent[kind].count for kind in ("round keys", "sealed shares", "confirmation", "revealed shares")
    } == {6}
    assert sent["model update (masked)"].count == 2


async def answered(run, number, members):
    """Wait until so many members have answered the open step of a round."""
    request = operating.WatchRunRequest(run_id=run.run)
    async with contextlib.aclosing(run.operator.stub.WatchRun(request, timeout=hosting.SOON_S)) as events:
        async for event in events:
            now = event.progress.round
            if (now.round, now.answered) == (number, members):
                return
    pytest.fail("the run ended before")


# --- divergence --------------------------------------------------------------------------------------------------


async def test_a_local_step_that_diverges_sends_nothing_and_says_so(
    calls, third_party, start_member, certificates, tmp_path, cos
):
    run = hosting.World(calls, third_party, start_member, certificates, tmp_path, cos)
    settings = FedNcfSettings(model="gmf", dim=3, local_rate=3e38, min_touch=1)
    # Nobody waits out the hour that a step may take: the host says that nothing comes.
    await run.begin(settings=settings)
    host = await asyncio.to_thread(run.host)
    report = await run.over()
    # Whoever cannot train can still be measured.
    assert [(one["purpose"], one["summed"]) for one in report["rounds"]] == [
        ("supports", 5),
        ("evaluate", 5),
        ("train", 0),
        ("evaluate", 5),
    ]
    assert "0 users submitted" in report["rounds"][2]["reason"]
    sent, (declined,) = await run.receipt(host, hosting.NAMES[0])
    assert "model update (clear)" not in sent
    assert "not a finite number: the local step diverged" in declined.reason
    lines = [json.loads(line) for line in host.log.read_text().splitlines()]
    (said,) = [line for line in lines if line["event"] == "sits out"]
    assert said["round"] == 3
    assert "diverged" in said["reason"]
