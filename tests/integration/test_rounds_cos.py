"""Rounds at the orchestration server's sockets: the test plays the hosts, step by step, clear and masked."""

import asyncio

import numpy as np
import pytest

from coterie.secure_sum.clear import ClearMember
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.protocol import Step
from coterie.systems.ease.settings import EaseSettings
from coterie.systems.fedncf.mathematics import initial
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub
from coterie.wire.v1.thirdparty_pb2 import RevokeRequest

from .playing import ITEMS, SETTINGS, SOON_S, STEPS, World, at_once


@pytest.fixture(scope="module")
def people(shared_third_party):
    async def enrol():
        return {
            "left": await shared_third_party.enrol("client", "rounds-left", 3),
            "right": await shared_third_party.enrol("client", "rounds-right", 3),
            "third": await shared_third_party.enrol("client", "rounds-third", 3),
            "owner": await shared_third_party.enrol("data-owner", "rounds-owner", 1),
        }

    return asyncio.run(enrol())


STEP_MS = 1500
"""Longest time of a step that is waited out: enough for six runs at once on a machine that halts now and then."""

FORMS = pytest.mark.parametrize(
    ("secure_sum", "per_user"),
    [("clear", False), ("clear", True), ("masked", False), ("masked", True)],
    ids=["clear-hosts", "clear-users", "masked-hosts", "masked-users"],
)


@FORMS
async def test_a_run_goes_through_supports_evaluations_and_training_to_its_end(world, secure_sum, per_user):
    run = await world(secure_sum=secure_sum, per_user=per_user).begin("left", "right", passes=2)
    finished = await asyncio.gather(*(host.play() for host in run.hosts.values()))
    assert [task.reason for task in finished] == ["", ""]
    report = await run.report()
    assert report["phase"] == "done"
    assert report["version"] == 2
    assert [one["purpose"] for one in report["rounds"]] == [
        "supports",
        "evaluate",
        "train",
        "evaluate",
        "train",
        "evaluate",
    ]
    assert all(one["summed"] == 6 and not one["reason"] for one in report["rounds"])
    assert [one["metrics"]["hit_ratio@10"] for one in report["history"]] == pytest.approx([0.5] * 3, abs=1e-4)
    assert report["history"][-1]["users"]["hit_ratio@10"] == 6


@FORMS
async def test_the_model_moves_by_the_sum_of_all_contributions(world, secure_sum, per_user):
    run = await world(secure_sum=secure_sum, per_user=per_user).begin("left", "right", passes=1)
    await asyncio.gather(*(host.play() for host in run.hosts.values()))
    before, after = initial(SETTINGS, len(ITEMS), 7), await run.model(1)
    # Every user moved item 0; the first step of Adam is as long as its rate, whatever the gradient.
    assert np.allclose(after["items"][0] - before["items"][0], SETTINGS.server_rate, rtol=1e-3)
    assert np.array_equal(after["items"][1:], before["items"][1:])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            EaseSettings(most_mb=1e-4),
            "12 items are a contribution of 0.000156 MB for each member; expected at most",
        ),
        (EaseSettings(sketch=13), "a sketch of 13 columns (ease.sketch) over 12 items"),
    ],
    ids=["pairs", "sketch"],
)
async def test_a_catalogue_that_is_too_large_for_the_settings_of_a_run_ends_it_before_its_first_round(
    world, settings, words
):
    run = await world().begin("left", "right", system="ease", settings=settings)
    report = await run.report()
    assert (report["phase"], report["rounds"]) == ("failed", [])
    assert words in report["reason"]


async def test_who_submits_twice_is_summed_once_and_other_bytes_are_refused(world):
    run = await world(per_user=True).begin("left", "right")
    left = run.hosts["left"]
    task = await left.task(wire.TaskKind.TASK_KIND_ROUND)
    assert await left.answer(task) == []
    (number, _, member), message = next(iter(left.sent.items()))
    plan = await left.plan(number)
    slots = left.slots_of(plan, member)
    kind = wire.SubmitKind.SUBMIT_KIND_VECTOR
    assert await left.submit([(kind, number, slots, message)]) == []
    assert await left.submit([(kind, number, slots, message[:-1] + b"\x01")]) == ["CONFLICT"]
    await asyncio.gather(*(host.play() for host in run.hosts.values()))
    assert [one["summed"] for one in (await run.report())["rounds"]] == [6, 6, 6, 6]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, n, s: (m, n + 1, s), "UNKNOWN_ROUND"),
        (lambda m, n, s: (m, n, s[:0]), "UNKNOWN_PARTICIPANT"),
        (lambda m, n, s: (m[:-4], n, s), "INVALID_FIELD"),
        (lambda m, n, s: (b"", n, s), "WRONG_SHAPE"),
        (
            lambda m, n, s: (rounds_pb2.SummedVector(codes=bytes(4 * 12)).SerializeToString(), n, s),
            "INVALID_FIELD",
        ),
        (
            lambda m, n, s: (rounds_pb2.SummedVector(codes=b"\xff" * 4 * 12).SerializeToString(), n, s),
            "INVALID_FIELD",
        ),
        (lambda m, n, s: (rounds_pb2.SummedVector(codes=bytes(8)).SerializeToString(), n, s), "WRONG_SHAPE"),
    ],
    ids=[
        "future-round",
        "nobody",
        "truncated",
        "empty",
        "below-the-bound",
        "above-the-bound",
        "wrong-length",
    ],
)
async def test_a_bad_contribution_is_refused_with_its_reason_and_changes_nothing(world, change, reason):
    run = await world(per_user=True).begin("left", "right")
    left = run.hosts["left"]
    task = await left.task(wire.TaskKind.TASK_KIND_ROUND)
    plan = await left.plan(task.round.round)
    member = min(await left.briefings(task))
    slots = left.slots_of(plan, member)
    good = ClearMember().answer(Step.SUBMIT, b"", left.codes(plan, slots))
    message, number, bad_slots = change(good, plan.round, slots)
    kind = wire.SubmitKind.SUBMIT_KIND_VECTOR
    assert await left.submit([(kind, number, bad_slots, message)]) == [reason]
    await asyncio.gather(*(host.play() for host in run.hosts.values()))
    report = await run.report()
    assert report["rounds"][0]["summed"] == 6
    assert sum(one["refused"] for one in report["rounds"]) == (0 if reason == "UNKNOWN_ROUND" else 1)


async def test_a_host_may_not_speak_for_the_members_of_another(world):
    run = await world(per_user=True).begin("left", "right")
    left, right = run.hosts["left"], run.hosts["right"]
    task = await left.task(wire.TaskKind.TASK_KIND_ROUND)
    plan = await left.plan(task.round.round)
    message = ClearMember().answer(Step.SUBMIT, b"", left.codes(plan, right.party.slots[:1]))
    kind = wire.SubmitKind.SUBMIT_KIND_VECTOR
    assert await left.submit([(kind, plan.round, right.party.slots[:1], message)]) == ["UNKNOWN_PARTICIPANT"]


async def test_steps_that_take_too_long_are_closed_and_sums_formed_or_abandoned(world):
    """A host of users as members falls silent at a step, in each round; runs wait for their steps, all at once."""
    masked = {f"masked, {step.value}": drops_when_masked(world, step) for step in MaskedServer.steps}
    await at_once({"clear": below_the_floor_when_clear(world), **masked})


async def below_the_floor_when_clear(world):
    run = await world(per_user=True).begin("left", "right", min_sum=6, step_timeout_ms=STEP_MS)
    run.hosts["right"].drops = frozenset({Step.SUBMIT})
    finished = await run.hosts["left"].play()
    assert "rounds in a row were abandoned" in finished.reason
    report = await run.report()
    assert report["version"] == 0
    reasons = [one["reason"] for one in report["rounds"]]
    assert {reason.split(":")[0] for reason in reasons} == {"submit"}
    # A round in which the machine was too slow for the left host has nobody.
    assert any("3 users submitted, the plan's floor is 6" in reason for reason in reasons), reasons


async def drops_when_masked(world, step):
    """One host of three is one third of the neighbours, more than the threshold bears."""
    run = await world(secure_sum="masked", per_user=True).begin(
        "left", "right", "third", min_sum=6, step_timeout_ms=STEP_MS
    )
    run.hosts["third"].drops = frozenset({step})
    finished = await asyncio.gather(*(host.play() for host in run.hosts.values()))
    report = await run.report()
    # Nine members: seven of eight neighbours reconstruct.  Three that drop are too many at any step.
    assert all("abandoned" in task.reason for task in finished)
    assert report["version"] == 0
    # None gets further; before it, a machine that is too slow for the other hosts may have ended a round.
    order = [one.value for one in MaskedServer.steps]
    ended_in = [one["reason"].split(":")[0] for one in report["rounds"]]
    assert max(order.index(one) for one in ended_in) == order.index(step.value), ended_in


async def test_members_that_decline_are_not_waited_for_and_only_whole_members_can(world):
    # A step may take an hour here.
    run = await world(per_user=True).begin("left", "right", "third", min_sum=3)
    left, right = run.hosts["left"], run.hosts["right"]
    task = await right.task(wire.TaskKind.TASK_KIND_ROUND)
    kind, number = wire.SubmitKind.SUBMIT_KIND_DECLINED, task.round.round
    own = right.party.slots
    assert await right.submit([(kind, number, left.party.slots[:1], b"")]) == ["UNKNOWN_PARTICIPANT"]
    assert await right.submit([(kind, number, own, b"why")]) == ["INVALID_FIELD"]
    assert await right.submit([(kind, number, [], b"")]) == ["UNKNOWN_PARTICIPANT"]
    # One of three first, then the others; the same again changes nothing.
    assert await right.submit([(kind, number, own[:1], b"")]) == []
    task = await right.task(wire.TaskKind.TASK_KIND_ROUND)
    assert [(part.first, part.count) for part in task.slots] == [(own[1], 2)]
    assert await right.submit([(kind, number, own, b""), (kind, number, own, b"")]) == []

    async def decline():
        while (task := await right.task()).kind != wire.TaskKind.TASK_KIND_FINISH:
            await right.submit([(kind, task.round.round, own, b"")])
        return task

    await asyncio.gather(left.play(), run.hosts["third"].play(), decline())
    report = await run.report()
    assert report["phase"] == "done", report["reason"]
    assert [(one["summed"], one["dropped"]) for one in report["rounds"]] == [(6, 3)] * 4


async def test_a_host_that_is_one_member_cannot_decline_for_some_of_its_users(world):
    run = await world().begin("left", "right", "third")
    left, right = run.hosts["left"], run.hosts["right"]
    task = await right.task(wire.TaskKind.TASK_KIND_ROUND)
    kind, number = wire.SubmitKind.SUBMIT_KIND_DECLINED, task.round.round
    assert await right.submit([(kind, number, right.party.slots[:2], b"")]) == ["UNKNOWN_PARTICIPANT"]
    assert await right.submit([(kind, number, right.party.slots, b"")]) == []
    for host in (left, run.hosts["third"]):
        await host.answer(await host.task(wire.TaskKind.TASK_KIND_ROUND))
    assert (await left.task(wire.TaskKind.TASK_KIND_ROUND)).round.round > number
    assert (await run.report())["rounds"][0]["summed"] == 6


@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
async def test_a_participant_that_is_revoked_is_in_no_further_round_and_nobody_waits_for_it(
    world, shared_third_party, certificates, secure_sum
):
    enrolled = await shared_third_party.enrol("client", f"revoked-{secure_sum}", 20)
    there = world(secure_sum=secure_sum, per_user=True)
    there.people = {**there.people, "large": enrolled}
    run = await there.begin("large", users=20, passes=2)
    large = run.hosts["large"]
    # A round is open when it happens; the step may take an hour.
    task = await large.task(wire.TaskKind.TASK_KIND_ROUND)
    victim = enrolled.bundles[7].participant_id
    await shared_third_party.directory(certificates["operator"]).Revoke(RevokeRequest(participants=[victim]))
    async with asyncio.timeout(SOON_S):
        while sum(part.count for part in task.slots) == 20:
            task = await large.task(wire.TaskKind.TASK_KIND_ROUND)
    assert (await large.play()).reason == ""
    report = await run.report()
    assert [(one["members"], one["summed"]) for one in report["rounds"]] == [(20, 19)] * 6


async def test_hosts_that_are_gone_for_a_moment_find_the_run_still_there(world):
    run = await world(per_user=True).begin("left", "right")
    for host in run.hosts.values():
        await host.party.leave()
    async with asyncio.timeout(SOON_S):
        # Without anybody to wait for, rounds are abandoned as soon as they are opened.
        while not (await run.report())["rounds"]:
            await asyncio.sleep(0.02)
    for host in run.hosts.values():
        await host.register()
    finished = await asyncio.gather(*(host.play() for host in run.hosts.values()))
    assert [task.reason for task in finished] == ["", ""]
    report = await run.report()
    assert report["phase"] == "done"
    assert "nobody else is expected" in report["rounds"][0]["reason"]
    assert report["version"] == 1


GIVE_UP_MS = 15_000
"""Longest time without a sum, in runs that give up: much longer than a sum takes on a busy machine."""


async def left_alone_answers(step, left, right):
    """Go up to a step of the first round that trains; only the left host answers it.  Return the plan of its sum."""
    while True:
        tasks = [await host.task(wire.TaskKind.TASK_KIND_ROUND) for host in (left, right)]
        plan = await left.plan(tasks[0].round.round)
        if plan.purpose == "train" and STEPS[tasks[0].step][0] is step:
            break
        for host, task in zip((left, right), tasks, strict=True):
            await host.answer(task)
    await left.answer(tasks[0])
    return plan


async def resume(run, resumes=0):
    await run.operator.stub.ResumeRun(operating.ResumeRunRequest(run_id=run.run, resumes=resumes))


@pytest.mark.parametrize("step", MaskedServer.steps, ids=lambda step: step.value)
async def test_a_run_that_gave_up_in_a_step_goes_on_with_it_once_it_is_resumed(world, calls, step):
    run = await world(secure_sum="masked").begin("left", "right", limits={"give_up_ms": GIVE_UP_MS})
    left, right = run.hosts["left"], run.hosts["right"]
    # The right host is silent until the run has failed.
    plan = await left_alone_answers(step, left, right)
    failed = [await host.task(wire.TaskKind.TASK_KIND_FINISH) for host in (left, right)]
    why = f"no sum was formed for 15 s; round {plan.round} waits in its step {step.value}; missing: client/rounds-right"
    assert [(task.resumable, task.reason) for task in failed] == [(True, why)] * 2
    state = await run.operator.state(run.run)
    assert (state.phase, state.resumable, state.resumes) == (operating.RunPhase.RUN_PHASE_FAILED, True, 0)

    refused = await calls.refused(resume(run, resumes=3))
    assert (refused.reason, refused.field) == ("WRONG_STATE", "run_id")
    await resume(run)
    # The operator's answer may have been lost: asking again changes nothing.
    await resume(run)
    state = await run.operator.state(run.run)
    assert (state.phase, state.resumable, state.resumes) == (operating.RunPhase.RUN_PHASE_ROUNDS, False, 1)
    refused = await calls.refused(resume(run, resumes=1))
    assert refused.reason == "WRONG_STATE"
    assert "the run has not failed: it is in phase rounds" in refused.text
    finished = await asyncio.gather(left.play(), right.play())
    assert [(task.reason, task.resumable) for task in finished] == [("", False)] * 2
    report = await run.report()
    assert (report["phase"], report["version"]) == ("done", 1)
    ((round_, failure),) = [(one["round"], one["failure"]) for one in report["resumes"]]
    assert (round_, failure) == (plan.round, why)
    phases = [one["phase"] for one in report["phases"]]
    assert phases == ["gather", "supports", "rounds", "failed", "rounds", "done"][-len(phases) :]
    # The round in which it failed is the one that is summed.
    assert [one["round"] for one in report["rounds"]] == list(range(1, len(report["rounds"]) + 1))
    assert all(one["summed"] == 6 and not one["reason"] for one in report["rounds"])
    numbers = [event.number async for event in events(run) if event.number]
    assert numbers == list(range(1, len(numbers) + 1))
    why = await calls.refused(resume(run, resumes=1))
    assert why.reason == "WRONG_STATE"
    assert "the run is done" in why.text


async def test_a_run_that_gave_up_after_abandoned_rounds_says_why_they_were_and_who_is_missing(world):
    limits = {"give_up_ms": 8_000}
    run = await world(secure_sum="masked").begin("left", "right", limits=limits, step_timeout_ms=2_000)
    left, right = run.hosts["left"], run.hosts["right"]
    # Nobody has missed the right host yet, so that the run does not wait for it.
    right.drops = frozenset({Step.ADVERTISE})
    failed = await left.play()
    assert failed.reason == (
        "no sum was formed for 8 s; the last sum was abandoned: advertise: 0 users have enough neighbours left, "
        "the plan's floor is 4; 1 of 2 members is missing, and masks bear the loss of 0 of a member's 1 neighbour; "
        "no time is left; missing: client/rounds-right"
    )
    assert failed.resumable


def events(run):
    return run.operator.stub.WatchRun(operating.WatchRunRequest(run_id=run.run))


async def test_a_run_to_which_too_few_came_gathers_again_once_it_is_resumed(world):
    run = await world().begin("left", users=6, phase_s=2.0)
    failed = await run.hosts["left"].task(wire.TaskKind.TASK_KIND_FINISH)
    assert failed.resumable
    assert "3 of 6 users came" in failed.reason
    # The others come while the run has failed, and find it so.
    right = run.host("right")
    await right.register()
    assert (await right.task()).resumable
    await resume(run)
    finished = await asyncio.gather(run.hosts["left"].play(), right.play())
    assert [task.reason for task in finished] == ["", ""]
    assert (await run.report())["phase"] == "done"


async def test_a_run_that_abandoned_too_many_sums_goes_on_once_it_is_resumed(world):
    run = await world(per_user=True).begin("left", "right", min_sum=6, step_timeout_ms=STEP_MS)
    right = run.hosts["right"]
    right.drops = frozenset({Step.SUBMIT})
    for host in run.hosts.values():
        failed = await host.play()
        assert "rounds in a row were abandoned" in failed.reason
        assert failed.resumable
    right.drops = frozenset()
    await resume(run)
    await asyncio.gather(*(host.play() for host in run.hosts.values()))
    report = await run.report()
    assert report["phases"][-1]["phase"] in ("done", "failed")
    assert any(one["summed"] == 6 for one in report["rounds"])


async def test_a_run_that_its_operator_stopped_is_not_resumed(world, calls):
    run = await world().begin("left", "right")
    await run.operator.stub.StopRun(operating.StopRunRequest(run_id=run.run, reason="enough"))
    why = await calls.refused(resume(run))
    assert why.reason == "WRONG_STATE"
    assert "the run has failed for good: enough" in why.text
    assert not (await run.hosts["left"].task(wire.TaskKind.TASK_KIND_FINISH)).resumable


async def test_a_cos_killed_right_after_a_resume_goes_on(
    start_member, shared_third_party, certificates, people, calls
):
    cos = start_member("cos", "killed-after-resume", shared_third_party)
    operator = calls.Operating(cos, certificates["operator"])
    run = await World(cos, operator, people, calls, secure_sum="masked").begin(
        "left", "right", limits={"give_up_ms": GIVE_UP_MS}
    )
    failed = await run.hosts["left"].task(wire.TaskKind.TASK_KIND_FINISH)
    assert failed.resumable
    await resume(run)
    cos.kill()
    await cos.release()
    cos.start()
    run.operator = calls.Operating(cos, certificates["operator"])
    for host in run.hosts.values():
        host.party = calls.party_at(cos, host.enrolled, run.run)
        host.stub = cos.channel(host.enrolled).stub(OrchestratorStub)
        await host.register()
        host.clock = 0
    finished = await asyncio.gather(*(host.play() for host in run.hosts.values()))
    assert [task.reason for task in finished] == ["", ""]
    report = await run.report()
    (resumed,) = report["resumes"]
    assert resumed["failure"].startswith(
        "no sum was formed for 15 s; round 1 waits in its step advertise; missing: "
    )
    assert all(one["summed"] == 6 for one in report["rounds"])


@pytest.mark.parametrize(
    ("secure_sum", "step"),
    [("clear", Step.SUBMIT), *(("masked", step) for step in MaskedServer.steps)],
    ids=lambda value: getattr(value, "value", value),
)
async def test_a_cos_killed_in_a_step_goes_on_with_it_after_its_restart(
    start_member, shared_third_party, certificates, people, calls, secure_sum, step
):
    cos = start_member("cos", f"killed-{secure_sum}-{step.value}", shared_third_party)
    operator = calls.Operating(cos, certificates["operator"])
    run = await World(cos, operator, people, calls, secure_sum=secure_sum).begin("left", "right", passes=1)
    left, right = run.hosts["left"], run.hosts["right"]
    # The COS dies before the right host answers.
    await left_alone_answers(step, left, right)
    cos.kill()
    await cos.release()
    cos.start()
    for host in (left, right):
        host.party = calls.party_at(cos, host.enrolled, run.run)
        host.stub = cos.channel(host.enrolled).stub(OrchestratorStub)
        await host.register()
        host.clock = 0
    finished = await asyncio.gather(left.play(), right.play())
    assert [task.reason for task in finished] == ["", ""]
    run.operator = calls.Operating(cos, certificates["operator"])
    report = await run.report()
    assert report["version"] == 1
    numbers = [one["round"] for one in report["rounds"]]
    assert numbers == sorted(set(numbers))
    assert all(one["summed"] == 6 for one in report["rounds"])
