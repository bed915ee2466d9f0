"""Events of a run in rounds, for tests of the live page."""

from __future__ import annotations

from collections.abc import Iterator

from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan, RunPlan

STEPS = ("advertise", "share", "submit", "confirm", "unmask", "unmask sum", "apply sum")


def state(done: int, hosts: int = 4) -> wire.RunState:
    return wire.RunState(
        plan=RunPlan(rounds=RoundsPlan(cohort=20)),
        phase=wire.RunPhase.RUN_PHASE_ROUNDS,
        epoch=done,
        version=done * 3,
        owners_alive=1,
        hosts_alive=hosts,
        users=hosts * 100,
        items=400,
    )


def evaluations(first: int, end: int, hosts: int = 4) -> Iterator[wire.WatchRunResponse]:
    for done in range(first, end):
        metrics = wire.MetricsEvent(
            epoch=done, names=["hit_ratio@10", "ndcg@10"], means=[0.1 + done / 50, 0.05 + done / 90]
        )
        yield wire.WatchRunResponse(state=state(done, hosts), metrics=metrics)


def lost(party: str) -> Iterator[wire.WatchRunResponse]:
    yield wire.WatchRunResponse(state=state(3), party=wire.PartyEvent(party=party, change="lost"))


def rounds(first: int, end: int, hosts: int = 4) -> Iterator[wire.WatchRunResponse]:
    for number in range(first, end):
        for step in STEPS:
            now = wire.RoundProgress(
                round=number, purpose="train", phase=step, members=hosts, answered=hosts - 1
            )
            progress = wire.ProgressEvent(
                updates=number, bytes_in=number * 100_000, bytes_out=number * 90_000, round=now
            )
            yield wire.WatchRunResponse(state=state(1, hosts), progress=progress)
        ended = wire.RoundEvent(
            round=number,
            purpose="train",
            users=hosts * 100,
            members=hosts,
            summed=hosts * 100,
            phases=STEPS,
            seconds=[0.01 * (one + number % 5) for one in range(len(STEPS))],
            bytes_in=100_000,
        )
        yield wire.WatchRunResponse(state=state(1, hosts), round=ended)


def events(hosts: int = 4) -> Iterator[wire.WatchRunResponse]:
    """Yield the events of a run: parties join, rounds are summed, the model is evaluated after each of three passes."""
    names = ["data-owner/catalogue", *(f"client/host-{number}" for number in range(hosts))]
    for name in names:
        yield wire.WatchRunResponse(state=state(0, hosts), party=wire.PartyEvent(party=name, change="joined"))
    began = wire.PhaseEvent(phase=wire.RunPhase.RUN_PHASE_ROUNDS, epoch=1)
    yield wire.WatchRunResponse(state=state(1, hosts), phase=began)
    yield from rounds(1, 13, hosts)
    yield from evaluations(1, 4, hosts)
