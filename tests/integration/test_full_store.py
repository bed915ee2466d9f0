"""An orchestration server whose volume is full: it refuses, lives, and goes on from what is durable."""

import asyncio
import contextlib
import json
import os
import sqlite3
import time

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from coterie.errors import CoterieError
from coterie.secure_sum.protocol import Step
from coterie.store.room import MARGIN
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire

from ..volumes import fill, small_volume
from .playing import ITEMS, SOON_S, STEPS, World

LARGE = FedNcfSettings(model="neumf", dim=1024, mlp_embedding=1024, layers=(1,), min_touch=1)
"""Rows of 2048 values, 1024 for each part of the model."""


@pytest.fixture(scope="module")
def people(shared_third_party):
    async def enrol():
        return {
            "left": await shared_third_party.enrol("client", "full-left", 3),
            "right": await shared_third_party.enrol("client", "full-right", 3),
            "owner": await shared_third_party.enrol("data-owner", "full-owner", 1),
        }

    return asyncio.run(enrol())


@pytest.fixture
async def full_cos(shared_third_party, tmp_path, calls):
    """A COS on a small volume of its own."""
    cos = calls.Member("cos", f"full-{time.monotonic_ns()}", shared_third_party, tmp_path)
    with small_volume(cos.state, "3m"):
        cos.start()
        yield cos
        await cos.release()
        if cos.running:
            await asyncio.to_thread(cos.stop)


def lines(service, event):
    """Return the lines of a service's log that say something."""
    found = map(json.loads, service.log.read_text().splitlines())
    return [line for line in found if line["event"] == event]


def said(service, event):
    return len(lines(service, event))


async def told(condition):
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("secure_sum", "step"), [("clear", Step.SUBMIT), ("masked", Step.SHARE)])
async def test_a_round_that_found_no_room_is_taken_up_where_it_was_durable(
    full_cos, certificates, people, calls, secure_sum, step
):
    operator = calls.Operating(full_cos, certificates["operator"])
    run = await World(full_cos, operator, people, calls, secure_sum=secure_sum).begin(
        "left", "right", passes=1
    )
    left, right = run.hosts["left"], run.hosts["right"]
    while True:
        tasks = [await host.task(wire.TaskKind.TASK_KIND_ROUND) for host in (left, right)]
        plan = await left.plan(tasks[0].round.round)
        if plan.purpose == "train" and STEPS[tasks[0].step][0] is step:
            break
        for host, task in zip((left, right), tasks, strict=True):
            await host.answer(task)
    before = [event async for event in events(run)]
    ballast = await asyncio.to_thread(fill, full_cos.state)
    # The step closes with these answers, which cannot be kept.
    await left.answer(tasks[0])
    await right.answer(tasks[1])
    await told(lambda: not full_cos.healthy())
    assert full_cos.metric("coterie_condition", condition="store") == 0

    # Whoever asks for something is told why it is not done, also who only looks.
    for call in (
        lambda: operator.stub.GetReport(operating.GetReportRequest(run_id=run.run)),
        lambda: operator.stub.StopRun(operating.StopRunRequest(run_id=run.run)),
        lambda: left.stub.Poll(wire.PollRequest(run_id=run.run)),
        lambda: operator.start("another"),
    ):
        why = await calls.refused(call)
        assert (why.code, why.reason, why.field) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "STORE_FULL",
            "store",
        )
    assert full_cos.running
    assert not full_cos.healthy()

    ballast.unlink()
    await told(full_cos.healthy)
    for host in (left, right):
        host.clock = 0
    # Nothing that was told before is told otherwise.
    assert [event async for event in events(run)][: len(before)] == before
    finished = await asyncio.gather(left.play(), right.play())
    assert [task.reason for task in finished] == ["", ""]
    report = await run.report()
    assert report["version"] == 1
    numbers = [one["round"] for one in report["rounds"]]
    assert numbers == sorted(set(numbers))
    assert all(one["summed"] == 6 for one in report["rounds"])


async def test_a_cos_with_room_for_rows_only_stays_refusing_until_a_version_fits(
    full_cos, certificates, people, calls
):
    operator = calls.Operating(full_cos, certificates["operator"])
    run = World(full_cos, operator, people, calls)
    await run.begin("left", "right", passes=2, settings=LARGE)
    left, right = run.hosts["left"], run.hosts["right"]
    while (await run.report())["version"] < 1:
        for host in (left, right):
            await host.answer(await host.task(wire.TaskKind.TASK_KIND_ROUND))
    tasks = [await host.task(wire.TaskKind.TASK_KIND_ROUND) for host in (left, right)]
    size = len(ITEMS) * LARGE.width * 4
    ballast = await asyncio.to_thread(fill, full_cos.state)
    for host, task in zip((left, right), tasks, strict=True):
        await host.answer(task)
    await told(lambda: not full_cos.healthy())
    with contextlib.closing(sqlite3.connect(full_cos.state / "cos.db")) as beside:

        def commits():
            """Return a number that changes with each commit of the COS."""
            return beside.execute("PRAGMA data_version").fetchone()

        # Room for thousands of rows, and not for the next version beside them.
        os.truncate(ballast, ballast.stat().st_size - MARGIN - size // 2)
        before = commits()
        # It tries whether it can write, and looks for room after that: by its second try it has not found any.
        for _ in range(2):
            await told(lambda before=before: commits() != before)
            before = commits()
            assert not full_cos.healthy()
    assert (await calls.refused(lambda: run.report())).reason == "STORE_FULL"
    (line,) = lines(full_cos, "the store takes no writes")
    assert line["needed_bytes"] >= size + MARGIN
    ballast.unlink()
    await told(full_cos.healthy)
    for host in (left, right):
        host.clock = 0
    finished = await asyncio.gather(left.play(), right.play())
    assert [task.reason for task in finished] == ["", ""]
    assert (await run.report())["version"] == 2
    assert said(full_cos, "the store takes no writes") == said(full_cos, "the store takes writes again") == 1


async def test_a_service_whose_volume_is_full_waits_for_room_before_it_starts(
    full_cos, certificates, people, calls
):
    operator = calls.Operating(full_cos, certificates["operator"])
    run = await World(full_cos, operator, people, calls).begin("left", "right", passes=1)
    await full_cos.release()
    assert await asyncio.to_thread(full_cos.stop) == 0
    ballast = await asyncio.to_thread(fill, full_cos.state)
    for again in (True, False):
        full_cos.start(healthy=False)
        await told(lambda: full_cos.answers() and full_cos.listens())
        assert not full_cos.healthy()
        assert full_cos.metric("coterie_condition", condition="store") == 0
        run.operator = calls.Operating(full_cos, certificates["operator"])
        why = await calls.refused(run.operator.stub.ListRuns(operating.ListRunsRequest()))
        assert (why.code, why.reason, why.field) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "STORE_FULL",
            "store",
        )
        health = HealthStub(full_cos.channel(certificates["operator"]))
        answer = await health.Check(HealthCheckRequest())
        assert answer.status == HealthCheckResponse.NOT_SERVING
        if again:
            # It ends when it is told to, and well.
            await full_cos.release()
            assert await asyncio.to_thread(full_cos.stop) == 0
    ballast.unlink()
    await told(full_cos.healthy)
    listed = await run.operator.stub.ListRuns(operating.ListRunsRequest())
    assert [one.plan.run_id for one in listed.runs] == [run.run]
    # Once by each of the two processes, however long they waited.
    assert said(full_cos, "no room to start") == 2
    assert said(full_cos, "there is room to start") == 1


async def test_a_first_start_without_room_waits_and_enrols_then(shared_third_party, tmp_path, calls):
    host = calls.Member("cos", f"first-{time.monotonic_ns()}", shared_third_party, tmp_path)
    with small_volume(host.state, "2m"):
        ballast = await asyncio.to_thread(fill, host.state)
        host.start(healthy=False)
        await told(lambda: host.answers() and said(host, "no room to start"))
        assert [path.name for path in host.state.iterdir() if path.stat().st_size] == ["ballast"]
        ballast.unlink()
        await told(host.healthy)
        assert await asyncio.to_thread(host.stop) == 0


async def events(run):
    """Yield the numbered events so far."""
    request = operating.WatchRunRequest(run_id=run.run)
    async for event in run.operator.stub.WatchRun(request):
        if not event.number:
            return
        yield event


async def test_a_third_party_without_room_refuses_and_takes_the_same_token_later(start_third_party):
    third_party = start_third_party()
    settings = third_party.settings(
        "late", third_party.token("client", "late", participants=2), timeout_s=2.0
    )
    with third_party.without_room():
        await told(lambda: not third_party.healthy())
        with pytest.raises(CoterieError, match="the store is full"):
            await third_party.enrol_with("client", settings, 2)
        assert third_party.metric("coterie_refusals_total", reason="STORE_FULL") >= 1
    await told(third_party.healthy)
    enrolled = await third_party.enrol_with("client", settings, 2)
    assert len(enrolled.bundles) == 2
