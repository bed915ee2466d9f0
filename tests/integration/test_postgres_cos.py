"""An orchestration server whose runs are in a real PostgreSQL, which goes away."""

import asyncio
import contextlib
import time

import grpc
import pytest

from coterie.cli.main import invoke
from coterie.secure_sum.protocol import Step
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire

from .. import postgres
from .playing import SOON_S, STEPS, World


@pytest.fixture(scope="module")
def server():
    # Over TLS, as across machines: the certificate, its authority and its name are verified.
    with postgres.running(tls=True) as one:
        yield one


@pytest.fixture(scope="module")
def people(shared_third_party):
    async def enrol():
        return {
            "left": await shared_third_party.enrol("client", "base-left", 3),
            "right": await shared_third_party.enrol("client", "base-right", 3),
            "owner": await shared_third_party.enrol("data-owner", "base-owner", 1),
        }

    return asyncio.run(enrol())


async def until(condition):
    async with asyncio.timeout(2 * SOON_S):
        while not condition():
            await asyncio.sleep(0.05)


async def submitting(run):
    """Play to the step of a round of training in which vectors are asked for; return the tasks."""
    left, right = run.hosts["left"], run.hosts["right"]
    while True:
        tasks = [await host.task(wire.TaskKind.TASK_KIND_ROUND) for host in (left, right)]
        plan = await left.plan(tasks[0].round.round)
        if plan.purpose == "train" and STEPS[tasks[0].step][0] is Step.SUBMIT:
            return tasks
        for host, task in zip((left, right), tasks, strict=True):
            await host.answer(task)


async def plays_on(run):
    """Play to the end of a run whose COS has taken it up again."""
    for host in run.hosts.values():
        host.clock = 0
    async with asyncio.timeout(2 * SOON_S):
        finished = await asyncio.gather(*(host.play() for host in run.hosts.values()))
    assert [task.reason for task in finished] == ["", ""]


async def summed_once(run):
    """Return the report of a run, each of whose rounds was summed over everybody, once."""
    report = await run.report()
    numbers = [one["round"] for one in report["rounds"]]
    assert (report["version"], numbers) == (1, sorted(set(numbers)))
    assert all(one["summed"] == 6 for one in report["rounds"])
    return report


async def test_a_cos_whose_database_is_lost_refuses_lives_and_goes_on(
    server, start_member, shared_third_party, certificates, people, calls
):
    keys = server.keys(server.database(), timeout_s=2.0)
    cos = start_member("cos", f"base-{time.monotonic_ns()}", shared_third_party, database=keys)
    assert not (cos.state / "cos.db").exists()
    operator = calls.Operating(cos, certificates["operator"])
    run = await World(cos, operator, people, calls, secure_sum="masked").begin("left", "right", passes=1)
    left, right = run.hosts["left"], run.hosts["right"]
    tasks = await submitting(run)

    # Another one on the same database does not come up.
    second = calls.Member(
        "cos", f"second-{time.monotonic_ns()}", shared_third_party, cos.folder, database=keys
    )
    second.start(healthy=False)
    assert await asyncio.to_thread(second.wait_for_end) == 40
    assert "another service uses database" in second.log.read_text()

    server.stop()
    # A COS that has noticed already takes no answer: a host waits until it does, or gives its answer again later.
    answers = [
        asyncio.ensure_future(host.answer(task)) for host, task in zip((left, right), tasks, strict=True)
    ]
    await until(lambda: not cos.healthy())
    why = await calls.refused(lambda: operator.stub.GetReport(operating.GetReportRequest(run_id=run.run)))
    assert (why.code, why.reason, why.field) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY", "store")
    server.start()
    await until(cos.healthy)
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*answers, return_exceptions=True)
    await plays_on(run)
    report = await summed_once(run)

    # After a restart everything is there.
    await cos.release()
    assert await asyncio.to_thread(cos.stop) == 0
    await asyncio.to_thread(cos.start)
    run.operator = calls.Operating(cos, certificates["operator"])
    again = await run.report()
    assert [again[key] for key in ("version", "rounds", "history")] == [
        report[key] for key in ("version", "rounds", "history")
    ]
    # Backed up while it runs, and taken back into a new folder and another database, where it goes on.
    archive = cos.folder / "cos.tar"
    assert invoke(["backup", "cos", str(archive), "--config", str(cos.config)]) == 0
    await cos.release()
    await asyncio.to_thread(cos.stop)
    moved = cos.folder / "moved"
    cos.state.rename(moved)
    cos.configure({**cos.keys, "database": server.keys(server.database(), timeout_s=2.0)})
    assert invoke(["restore", "cos", str(archive), "--config", str(cos.config)]) == 0
    await asyncio.to_thread(cos.start)
    run.operator = calls.Operating(cos, certificates["operator"])
    taken_back = await run.report()
    assert [taken_back[key] for key in ("version", "rounds", "history")] == [
        report[key] for key in ("version", "rounds", "history")
    ]
    before, after = (
        {path.name: path.read_bytes() for path in (folder / "models").rglob("*") if path.is_file()}
        for folder in (moved, cos.state)
    )
    assert before == after
    for log in (cos.log, second.log):
        assert postgres.PASSWORD not in log.read_text()


async def test_a_cos_whose_database_hangs_notices_refuses_lives_and_goes_on(
    server, start_member, shared_third_party, certificates, people, calls
):
    keys = server.keys(server.database(), timeout_s=1.0)
    cos = start_member("cos", f"hung-{time.monotonic_ns()}", shared_third_party, database=keys)
    operator = calls.Operating(cos, certificates["operator"])
    run = await World(cos, operator, people, calls, secure_sum="masked").begin("left", "right", passes=1)
    left, right = run.hosts["left"], run.hosts["right"]
    first, second = await submitting(run)

    # In the middle of a transaction: the COS waits for an answer that does not come.
    with server.hung():
        answers = [asyncio.ensure_future(left.answer(first)), asyncio.ensure_future(right.answer(second))]
        await until(lambda: not cos.healthy())
        async with asyncio.timeout(SOON_S):
            why = await calls.refused(lambda: run.report())
        assert (why.code, why.reason, why.field) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY", "store")
        assert cos.metric("coterie_condition", condition="store") == 0
    await until(cos.healthy)
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*answers, return_exceptions=True)

    # While nothing is written it is noticed, too.
    with server.hung():
        await until(lambda: not cos.healthy())
    await until(cos.healthy)
    await plays_on(run)
    await summed_once(run)
    assert cos.log.read_text().count("the store does not answer") >= 2
    assert postgres.PASSWORD not in cos.log.read_text()


async def test_a_cos_gets_a_standby_which_finds_versions_that_were_in_files_and_refuses_all_until_then(
    server, start_member, shared_third_party, certificates, people, calls, tmp_path
):
    keys = {"database": server.keys(server.database(), timeout_s=5.0)}
    name = f"pair-{time.monotonic_ns()}"
    first = start_member("cos", name, shared_third_party, **keys)
    operator = calls.Operating(first, certificates["operator"])
    run = await World(first, operator, people, calls, secure_sum="masked").begin("left", "right", passes=2)
    async with asyncio.timeout(2 * SOON_S):
        await asyncio.gather(*(host.play() for host in run.hosts.values()))
    report = await run.report()
    assert report["version"] == 2
    await first.release()
    assert await asyncio.to_thread(first.stop) == 0

    # From now on it has a standby.
    first.configure({**first.keys, "standby": True})
    await asyncio.to_thread(first.start)
    second = start_member("cos", name, shared_third_party, healthy=False, standby=True, **keys)

    def is_up():
        with contextlib.suppress(OSError):
            return second.metric("coterie_condition", condition="directory") == 1
        return False

    await until(is_up)
    assert second.metric("coterie_condition", condition="office") == 0
    other = calls.Operating(second, certificates["operator"])
    for run_id in (run.run, "never started"):
        why = await calls.refused(
            lambda run_id=run_id: other.stub.GetReport(operating.GetReportRequest(run_id=run_id))
        )
        assert (why.code, why.reason, why.field) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY", "store")
    assert not second.healthy()

    first.kill()
    await until(second.healthy)
    assert not list((second.state / "models").rglob("*.safetensors"))
    run.operator = other
    again = await run.report()
    assert [again[key] for key in ("version", "rounds", "history")] == [
        report[key] for key in ("version", "rounds", "history")
    ]
    # An archive would lack the versions, and is refused.
    assert invoke(["backup", "cos", str(tmp_path / "cos.tar"), "--config", str(second.config)]) == 40
    # Each version was taken over once.
    written = "SELECT count(*) FROM model_versions"
    assert int(server.sql(written, server_database(keys))) == len(
        list((first.state / "models").rglob("*.safetensors"))
    )


async def test_a_cos_that_waits_again_does_not_take_a_database_over_that_a_later_release_migrated(
    server, start_member, shared_third_party
):
    keys = {"database": server.keys(server.database(), timeout_s=5.0), "standby": True}
    name = f"older-{time.monotonic_ns()}"
    first = start_member("cos", name, shared_third_party, **keys)
    second = start_member("cos", name, shared_third_party, healthy=False, **keys)
    first.pause()
    await until(second.healthy)
    first.awake()
    await until(lambda: "another COS serves: this one waits" in first.log.read_text())
    assert not first.healthy()
    server.sql("UPDATE alembic_version SET version_num = 'cos_9999'", server_database(keys))
    second.kill()
    assert await asyncio.to_thread(first.wait_for_end) == 40
    assert "of a revision that this version does not know: cos_9999" in first.log.read_text()


def server_database(keys):
    return keys["database"]["url"].rpartition("/")[2].partition("?")[0]
