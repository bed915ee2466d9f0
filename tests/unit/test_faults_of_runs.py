"""A run whose server itself fails again and again ends, and says why; what an answer of the server has room for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coterie_cos.orchestrator import Orchestrator
from coterie_cos.rounds_run import RoundsRun
from coterie_cos.summing import Surroundings

from coterie.crypto.authority import PeerIdentity
from coterie.errors import StoreError
from coterie.net import server
from coterie.rounds.server_round import RoundState
from coterie.secure_sum.clear import ClearServer
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.store import cos as store
from coterie.store.engine import Term, Writer, open_sqlite
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.telemetry.accounting import Accounting
from coterie.wire.chunks import CHUNK_BYTES
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef
from tests.simulation.rig.sums import LAYOUT

PEER = PeerIdentity("client", "here", b"f" * 32)
SETTINGS = FedNcfSettings(model="gmf", dim=3, min_touch=1)
MOST = 10
SOON_S = 60.0


class Stand:
    """A run at a servicer, with one registered party."""

    def __init__(self, folder: Path) -> None:
        engine = self.engine = open_sqlite(folder / "cos.db", "cos")
        self.writer = Writer(engine)
        rounds = wire.RoundsPlan(
            cohorts=wire.CohortKind.COHORT_KIND_ALL, beacon=bytes(32), passes=1, step_timeout_ms=1000
        )
        plan = wire.RunPlan(
            run_id="run", system="fedncf", secure_sum="clear", settings=SETTINGS.to_json(), rounds=rounds
        )
        request = operator.StartRunRequest(plan=plan, phase_timeout_ms=3_600_000, party_timeout_ms=3_600_000)
        around = Surroundings(
            folder,
            Term(self.writer),
            lambda: (0, 0),
            Accounting(),
            bytes(32),
            lambda participant: False,
            self.commit_population,
        )
        self.run = RoundsRun(request, around)
        row = {"run_id": "run", "request": b"", "plan_hash": b"", "state": self.run.state_json()}
        with engine.begin() as connection:
            connection.execute(store.runs.insert(), row)
        for party in (str(PEER), "client/there"):
            self.run.registry.add(party, [party.encode().ljust(32, b"\0")], {})
        self.servicer = Orchestrator(
            lambda run_id: self.run,
            bytes(32),
            lambda participant: False,
            lambda leaves: asyncio.sleep(0, frozenset()),
            Accounting(),
            max_uploads=1,
            max_payload=1 << 20,
            stopping=asyncio.Event(),
        )

    async def commit_population(self, run_id: str, population: Any) -> Any:
        raise AssertionError("the plan names the beacon")

    async def poll(self, peer: PeerIdentity = PEER) -> wire.PollResponse:
        server._peer.set(peer)
        return await self.servicer.Poll(wire.PollRequest(run_id="run", hold_ms=0), None)

    async def fail(self, times: int, peer: PeerIdentity = PEER, error: type[Exception] = KeyError) -> None:
        for _ in range(times):
            with pytest.raises(error):
                await self.poll(peer)
        await self.run.tick()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    one = Stand(tmp_path)
    yield one
    one.writer.close()


def opening(run: RoundsRun) -> RoundState:
    """A sum of which no member is present, so that it is abandoned as soon as it is opened."""
    member = Member(b"f" * 32, "client/away", 1)
    plan = SumPlan("run", 1, "train", "clear", bytes(32), layout_hash(LAYOUT), (member,), 1)
    return RoundState.begin(plan, LAYOUT, ClearServer(), 60.0)


def broken(error: Exception) -> Any:
    def tasks(party: str) -> list[wire.Task]:
        raise error

    return tasks


async def test_a_run_whose_every_poll_fails_ends_and_names_the_fault(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as fault:
        fault.setattr(stand.run, "tasks", broken(KeyError("a private value")))
        await stand.fail(MOST - 1)
        assert not stand.run.over
        await stand.fail(1)
    assert stand.run.over
    assert stand.run.summary().phase == operator.RunPhase.RUN_PHASE_FAILED
    expected = "a fault of the orchestration server: Poll failed 10 times in a row, KeyError"
    assert stand.run.reason == expected
    # Parties learn it, and so does whoever watches.
    (task,) = (await stand.poll()).tasks
    assert (task.kind, task.reason) == (wire.TaskKind.TASK_KIND_FINISH, expected)
    async with asyncio.timeout(5):
        events = [event async for event in stand.run.watch(1)]
    assert events[-1].state.reason == expected


async def test_a_call_that_succeeds_begins_the_count_anew_and_others_do_not(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with monkeypatch.context() as fault:
            fault.setattr(stand.run, "tasks", broken(KeyError()))
            await stand.fail(MOST - 1)
        await stand.poll()
    assert not stand.run.over
    with monkeypatch.context() as fault:
        fault.setattr(stand.run, "tasks", broken(KeyError()))
        await stand.fail(MOST - 1)
    await stand.poll(PeerIdentity("client", "there", b"t" * 32))
    with monkeypatch.context() as fault:
        fault.setattr(stand.run, "tasks", broken(KeyError()))
        await stand.fail(1)
    assert stand.run.over


async def test_a_run_whose_clock_fails_again_and_again_ends_and_no_tick_raises(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken_clock() -> None:
        raise KeyError("a private value")

    with monkeypatch.context() as fault:
        fault.setattr(stand.run, "on_time", broken_clock)
        for _ in range(MOST - 1):
            await stand.run.tick()
    await stand.run.tick()
    assert not stand.run.over
    with monkeypatch.context() as fault:
        fault.setattr(stand.run, "on_time", broken_clock)
        for _ in range(MOST + 1):
            await stand.run.tick()
    assert stand.run.over
    assert (
        stand.run.reason
        == "a fault of the orchestration server: the clock failed 10 times in a row, KeyError"
    )


def fails(error: Exception) -> Any:
    async def count_abandoned(reason: str) -> None:
        raise error

    return count_abandoned


async def test_a_run_whose_sum_fails_by_a_fault_ends_and_names_the_fault(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand.run, "count_abandoned", fails(KeyError("a private value")))
    stand.run.skip_sum("too few came")
    async with asyncio.timeout(SOON_S):
        while not stand.run.over:
            await stand.run.tick()
            await asyncio.sleep(0.001)
    assert stand.run.summary().phase == operator.RunPhase.RUN_PHASE_FAILED
    assert stand.run.reason == "a fault of the orchestration server: KeyError"


async def test_a_run_whose_sum_fails_by_the_store_waits_to_be_restored(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = StoreError("no space is left", trouble="full")
    stand.run.term.lose(full)
    monkeypatch.setattr(stand.run, "count_abandoned", fails(full))
    stand.run.skip_sum("too few came")
    async with asyncio.timeout(SOON_S):
        await stand.run.drop()
    await stand.run.tick()
    assert not stand.run.over
    assert stand.run.reason == ""


async def test_a_sum_that_is_formed_after_the_run_has_stopped_changes_nothing(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []

    async def count_abandoned(reason: str) -> None:
        counted.append(reason)

    monkeypatch.setattr(stand.run, "count_abandoned", count_abandoned)
    stand.run.open_sum(opening(stand.run), {0: [0]})
    await stand.run.stop("enough")
    async with asyncio.timeout(SOON_S):
        await stand.run.drop()
    assert counted == []
    assert stand.run.reason == "enough"
    with stand.engine.connect() as connection:
        assert store.load_sum(connection, "run") is None


async def test_refusals_are_no_faults(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, "no", field="x")
    monkeypatch.setattr(stand.run, "tasks", broken(refusal))
    await stand.fail(3 * MOST, error=Refusal)
    assert not stand.run.over


async def test_what_does_not_fit_into_an_answer_is_left_out_and_what_comes_after_it_is_not(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = wire.FetchKind
    payloads = {
        kinds.FETCH_KIND_SUM_PLAN: b"plan",
        kinds.FETCH_KIND_OPEN_ITEMS: bytes(CHUNK_BYTES),
        kinds.FETCH_KIND_MODEL: b"model",
    }
    task = wire.Task(kind=wire.TaskKind.TASK_KIND_ROUND, round=RoundRef(run_id="run", round=1))
    monkeypatch.setattr(stand.run, "tasks", lambda party: [task])
    monkeypatch.setattr(stand.run, "payload", lambda party, role, fetch: (1, payloads[fetch.kind]))
    server._peer.set(PEER)
    response = await stand.servicer.Poll(wire.PollRequest(run_id="run", attach=list(payloads)), None)
    assert {one.request.kind: one.response.chunk.data for one in response.attached} == {
        kinds.FETCH_KIND_SUM_PLAN: b"plan",
        kinds.FETCH_KIND_MODEL: b"model",
    }
