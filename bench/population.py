"""Measure what a device that comes, goes or polls costs the COS, in a population of which most only wait.

A real run at the COS, with its store; the devices are calls in this process, without sockets.  Each figure is to be the
same at every size: nothing at the COS may cost a party or an event as much as there are devices.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from coterie_cos.rounds_run import RoundsRun
from coterie_cos.summing import Surroundings

from bench.rows import Ask, Row, lower
from coterie.crypto.beacon import Beacon
from coterie.errors import PeerError
from coterie.rounds.conductor import Conductor
from coterie.rounds.population import Population
from coterie.rounds.training import Purpose, TrainingPhase
from coterie.store import cos as store
from coterie.store.engine import Term, Writer, open_sqlite
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.telemetry.accounting import Accounting
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire

_COHORT = 100
_EVENTS = 500


def rows(ask: Ask) -> Iterator[Row]:
    """Measure joins, devices that come back, and steps of a round, at two sizes."""
    small, large = ask.size((20_000, 200_000), (200, 400))
    found = {size: asyncio.run(_measured(size, ask.size(_EVENTS, 20))) for size in (small, large)}
    for name, what in (
        ("join", "a device that registers, with its event in the store"),
        ("return", "an absent device that is heard again, with its event in the store"),
        ("tick", "one of the two looks a second at who is silent"),
        (
            "check-in",
            "a device that checks in and is told when to come back, in a run whose cohorts are drawn",
        ),
        ("step", f"waking the {_COHORT} devices of a cohort while all others hold polls"),
    ):
        yield lower(
            f"population.{name}",
            found[large][name] * 1e6,
            found[small][name] * 1e6,
            "CPU us",
            f"COS, {large} devices against {small}: {what}",
        )


async def _measured(size: int, events: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="coterie-bench-") as folder:
        engine = open_sqlite(Path(folder) / "cos.db", "cos")
        writer = Writer(engine)
        run = _run(Path(folder), writer, size)
        with engine.begin() as connection:
            row = {"run_id": "bench", "request": b"", "plan_hash": b"", "state": run.state_json()}
            connection.execute(store.runs.insert(), row)
        try:
            return await _timed(run, size, events)
        finally:
            await run.drop()
            writer.close()


async def _timed(run: RoundsRun, size: int, events: int) -> dict[str, float]:
    found = {}
    devices = [f"client/{n}" for n in range(size)]
    run.registry.add("data-owner/zoo", [os.urandom(32)], {0: wire.Participant(name="zoo")})
    await run.joined("data-owner/zoo", catalogue=False, more=True)
    for device in devices:
        run.registry.add(device, [os.urandom(32)], {})
    run.take_up_parties(dict.fromkeys(devices, True))

    before = time.process_time()
    for n in range(events):
        run.registry.add(f"client/late-{n}", [os.urandom(32)], {})
        await run.joined(f"client/late-{n}", catalogue=False, more=True)
    found["join"] = (time.process_time() - before) / events

    some = random.Random(0).sample(devices, events)
    for device in some:
        await run.left(device)
    run.take_up_parties(dict.fromkeys(devices, True) | dict.fromkeys(some, False))
    before = time.process_time()
    for device in some:
        if run.heard(device):
            await run.returned(device)
    found["return"] = (time.process_time() - before) / events

    before = time.process_time()
    for _ in range(events):
        await run.tick()
    found["tick"] = (time.process_time() - before) / events

    found["check-in"] = await _checked_in(run, devices, events)

    polls = [asyncio.create_task(run.poll(device, run._revision, 20)) for device in devices]
    await asyncio.sleep(0)
    steps = min(20, size // _COHORT)
    before = time.process_time()
    for n in range(steps):
        run.touch(devices[n * _COHORT : (n + 1) * _COHORT])
        await asyncio.sleep(0)
    found["step"] = (time.process_time() - before) / steps
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    return found


async def _checked_in(run: RoundsRun, devices: list[str], events: int) -> float:
    """Return the CPU seconds of a check-in, in the midst of a pass whose cohorts are drawn."""
    people = run.registry.people([run.registry.slots_of(device)[0] for device in devices])
    slots = tuple(run.registry.slots_of(device)[0] for device in devices)
    gathering, parts = run.state, -(-len(devices) // _COHORT)
    run._conductor = Conductor(run.plan, Population(*people), run._side(1, 1), run._half)
    run.state = run._published = replace(
        gathering,
        phase=TrainingPhase.ROUNDS,
        purpose=Purpose.TRAIN,
        users=slots,
        parts=parts,
        part=parts // 2,
    )
    # The drawing of a pass is looked at once.
    run.due_s(devices[0])
    some = random.Random(1).sample(devices, events)
    before = time.process_time()
    for device in some:
        answer = await run.poll(device, 0, 20, checks_in=True)
        if not answer.come_back_ms:
            raise AssertionError(f"{device} was not told when to come back")
    took = (time.process_time() - before) / events
    run.state = run._published = gathering
    run._conductor = run._turns = None
    return took


def _run(folder: Path, writer: Writer, size: int) -> RoundsRun:
    """Return a run that gathers, and that no number of devices begins."""
    rounds = wire.RoundsPlan(
        cohorts=wire.CohortKind.COHORT_KIND_RANDOM,
        cohort=_COHORT,
        beacon=bytes(32),
        party_per_user=True,
        passes=1,
        min_cohort=1,
        min_sum=1,
        step_timeout_ms=60_000,
    )
    settings = FedNcfSettings(model="gmf", dim=3, min_touch=1).to_json()
    plan = wire.RunPlan(run_id="bench", system="fedncf", secure_sum="clear", settings=settings, rounds=rounds)
    request = operator.StartRunRequest(
        plan=plan,
        expect_owners=1,
        expect_users=10 * size,
        phase_timeout_ms=3_600_000,
        party_timeout_ms=3_600_000,
        check_in_ms=3_600_000,
    )

    async def commit(run_id: str, population: Population) -> Beacon:
        raise PeerError("there is no third party")

    around = Surroundings(
        folder, Term(writer), lambda: (0, 0), Accounting(), bytes(32), lambda _: False, commit
    )
    return RoundsRun(request, around)
