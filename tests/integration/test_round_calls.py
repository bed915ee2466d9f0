"""A step of a round in one call, at the sockets of a real server: attached answers, submissions that wait."""

import asyncio
import hashlib

import pytest

from coterie.privacy.transcript import TranscriptWriter, decode, read_transcript
from coterie.rounds.conductor import model_from_bytes
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Step
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2

from .playing import STEPS

KINDS = wire.FetchKind
ALL = [
    KINDS.FETCH_KIND_SUM_PLAN,
    KINDS.FETCH_KIND_MODEL,
    KINDS.FETCH_KIND_OPEN_ITEMS,
    KINDS.FETCH_KIND_BRIEFINGS,
]
SOON_S = 60.0


@pytest.fixture(scope="module")
def people(shared_third_party):
    async def enrol():
        return {
            "left": await shared_third_party.enrol("client", "calls-left", 3),
            "right": await shared_third_party.enrol("client", "calls-right", 3),
            "owner": await shared_third_party.enrol("data-owner", "calls-owner", 1),
        }

    return asyncio.run(enrol())


async def poll(host, **asked):
    """Poll until there is a task."""
    cursor = 0
    async with asyncio.timeout(SOON_S):
        while True:
            request = wire.PollRequest(run_id=host.world.run, cursor=cursor, hold_ms=2000, **asked)
            response = await host.stub.Poll(request)
            if response.tasks:
                return response
            cursor = response.revision


def answers(response):
    return {one.request.kind: one.response for one in response.attached}


async def contribution(host, plan, task):
    """Return the item of the host's only member for a step of a clear sum."""
    people = {one.participant_id for one in host.enrolled.bundles}
    own = next(n for n, one in enumerate(plan.members) if one.participant in people)
    slots = host.slots_of(plan, own)
    message = host.half(plan, own).answer(STEPS[task.step][0], b"", host.codes(plan, slots))
    return STEPS[task.step][1], plan.round, slots, message


async def test_a_poll_brings_plan_and_model_along_unless_the_caller_has_them(world):
    run = await world().begin("left", "right")
    left = run.hosts["left"]
    response = await poll(left, attach=ALL)
    (task,) = response.tasks
    found = answers(response)
    plan = SumPlan.from_wire(rounds_pb2.SumPlan.FromString(found[KINDS.FETCH_KIND_SUM_PLAN].chunk.data))
    assert plan.round == task.round.round
    model = found[KINDS.FETCH_KIND_MODEL]
    assert hashlib.sha256(model.chunk.data).digest() == model.sha256 == plan.model_sha256
    assert model_from_bytes(model.chunk.data).keys() == (await run.model()).keys()

    found = answers(await poll(left, attach=ALL, held_sha256=[model.sha256]))
    assert found[KINDS.FETCH_KIND_MODEL].unchanged
    assert not found[KINDS.FETCH_KIND_MODEL].HasField("chunk")
    assert not (await poll(left, attach=ALL, round=plan.round)).attached
    assert not (await poll(left)).attached


async def test_a_submission_waits_for_the_next_task_and_brings_it(world):
    run = await world().begin("left", "right")
    left, right = run.hosts["left"], run.hosts["right"]
    first = await poll(left)
    (task,) = first.tasks
    plan = await left.plan(task.round.round)

    async def submission(host):
        requests = [one async for one in host.requests([await contribution(host, plan, task)])]
        requests[0].poll.CopyFrom(
            wire.PollRequest(run_id=run.run, cursor=first.revision, hold_ms=15_000, attach=ALL)
        )
        return requests

    own = await submission(left)
    async with run.cos.asked("Submit", *own):
        waiting = asyncio.ensure_future(left.stub.Submit(iter(own)))
    assert not waiting.done()
    await right.stub.Submit(iter(await submission(right)))
    async with asyncio.timeout(SOON_S):
        response = await waiting
    assert response.accepted == 1
    (following,) = response.next.tasks
    assert following.round.round == plan.round + 1
    assert KINDS.FETCH_KIND_SUM_PLAN in answers(response.next)


async def test_members_are_told_the_same_by_briefings_that_share_their_parts(world):
    run = await world(secure_sum="masked", per_user=True).begin("left", "right")
    hosts = [run.hosts["left"], run.hosts["right"]]
    for host in hosts:
        await host.answer(await host.task(wire.TaskKind.TASK_KIND_ROUND))
    response = await poll(hosts[0], attach=ALL)
    (task,) = response.tasks
    assert STEPS[task.step][0] is Step.SHARE
    message = wire.Briefings.FromString(answers(response)[KINDS.FETCH_KIND_BRIEFINGS].chunk.data)
    # Six members, each told of the five others: each advertisement is there once.
    assert len(message.parts) == 6
    for member, briefing in (await hosts[0].briefings(task)).items():
        told = rounds_pb2.Adverts.FromString(briefing)
        assert [one.member for one in told.adverts] == [n for n in range(6) if n != member]
    # Nobody is told what members of another host are.
    assert len(message.briefings) == 3


@pytest.mark.parametrize("rpc", ["Poll", "Submit"])
def test_a_transcript_shows_what_was_attached_as_fetches(tmp_path, rpc):
    attached = wire.Attachment(
        request=wire.FetchRequest(kind=KINDS.FETCH_KIND_MODEL, version=3),
        response=wire.FetchResponse(version=3, unchanged=True),
    )
    answer = wire.PollResponse(revision=1, attached=[attached])
    if rpc == "Submit":
        answer = wire.SubmitResponse(accepted=1, next=answer)
    with TranscriptWriter(tmp_path / "t", "client/here") as writer:
        writer.side("client").record(
            rpc=rpc, peer="cos/cos", direction="received", payload=answer.SerializeToString()
        )
    entries = list(read_transcript(tmp_path / "t"))
    assert [(one.rpc, one.direction) for one in entries] == [
        (rpc, "received"),
        ("Fetch", "sent"),
        ("Fetch", "received"),
    ]
    assert [decode(one) for one in entries[1:]] == [attached.request, attached.response]
