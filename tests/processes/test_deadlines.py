"""Deadlines that pass while the parties return for whom a run waits: it goes on, or is resumed, and counts once."""

import asyncio
import signal
from typing import Any

import pytest

from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.operator_pb2_grpc import OperatorStub

from .patience import ANOTHER_FORM, PAUSE_S, WAIT_S

GIVE_UP_S = 6.0
AROUND_S = (-1.0, -0.3, 0.0, 0.3, 1.0)
"""When parties return, before or after the deadline, seconds."""
FEDERATION = {"hosts": 3, "party_timeout_s": 2.0, "give_up_s": GIVE_UP_S}
ROUNDS = {
    "system": "fedncf",
    "split": {"kind": "leave-last-out"},
    "data": {"synthetic": {"users": 24, "items": 60, "interactions": 700}},
    "rounds": {"cohort": 24, "group": 24, "passes": 50_000, "evaluate_every": 50_000, "patience": 0},
    "federation": FEDERATION,
}
DRIFT = {
    "drift": {"form": "shielded", "dim": 8, "epochs": 5_000, "k_min": 3, "window": 40},
    "federation": {**FEDERATION, "owners": 3, "min_users": 10},
}


class Resumable:
    """The operator of a running federation, who resumes its run whenever it has given up."""

    def __init__(self, running):
        self.running, self.resumed = running, 0
        self._channel = running.channel("cos/cos")
        self._stub: Any = self._channel.stub(OperatorStub)

    async def look(self):
        """Return the version of the model; resume the run if it has failed."""
        state = await self.running.run_state()
        if state.phase == wire.RUN_PHASE_FAILED:
            assert state.resumable, state.reason
            await self._stub.ResumeRun(wire.ResumeRunRequest(run_id="test", resumes=self.resumed))
            self.resumed += 1
        return state.version

    async def goes_on(self):
        """Wait for another version of the model."""
        before = await self.look()
        async with asyncio.timeout(WAIT_S):
            while await self.look() <= before:
                await asyncio.sleep(PAUSE_S)

    async def close(self):
        await self._channel.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "given_up_s"),
    [
        (ROUNDS, GIVE_UP_S),
        # DRIFT counts from when nobody is there.
        pytest.param(DRIFT, GIVE_UP_S + FEDERATION["party_timeout_s"], marks=ANOTHER_FORM),
    ],
    ids=["rounds", "windows"],
)
async def test_a_deadline_that_passes_while_parties_return_loses_nothing(small, federation, kind, given_up_s):
    async with federation(small(**kind, secure_sum="masked")) as running:
        await running.start()
        operator = Resumable(running)
        hosts = running.parties("client")
        for around_s in AROUND_S:
            await operator.goes_on()
            for host in hosts:
                running.signal(host, signal.SIGSTOP)
            # What is tested is this moment.
            await asyncio.sleep(given_up_s + around_s)
            for host in hosts:
                running.signal(host, signal.SIGCONT)
        await operator.goes_on()
        await operator.goes_on()
        report = await running.report()
        await operator.close()
        await running.stop()
    assert running.ended_well()
    formed = [one["round"] for one in report["rounds"] if not one["reason"]]
    assert formed == sorted(set(formed))
    assert len(report["resumes"]) == operator.resumed
