"""A run whose key has a revoked holder: the server opens no round until the other holders have made another key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from coterie_cos.rounds_run import RoundsRun
from coterie_cos.summing import Surroundings

from coterie.crypto.beacon import Beacon
from coterie.crypto.key_record import KeyFields, KeyRecord
from coterie.rounds.population import Population
from coterie.store import cos as store
from coterie.store.engine import Term, Writer, open_sqlite
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.telemetry.accounting import Accounting
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from tests.paillier_keys import key

SETTINGS = FedNcfSettings(model="gmf", dim=3, min_touch=1)
HOSTS = ("client/a", "client/b", "client/c")
HOLDERS = tuple(bytes([n + 1]) * 32 for n in range(len(HOSTS)))
MOST = 5
STEP_MS = 50
"""Nobody answers, so that each round is abandoned after this time."""
SOON_S = 60.0
USERS = tuple(bytes([n + 11]) * 32 for n in range(len(HOSTS)))


def record(epoch: int, holders: tuple[bytes, ...]) -> KeyRecord:
    """Return a key as the third party tells it; the server checks no signatures."""
    return KeyRecord(KeyFields.of(key(f"epoch-{epoch}").public), epoch, holders, bytes(32), bytes(64))


class Stand:
    """A run of three hosts, each a holder of the key, with one user each."""

    def __init__(self, folder: Path, secure_sum: str) -> None:
        engine = open_sqlite(folder / "cos.db", "cos")
        self.writer = Writer(engine)
        self.gone: set[bytes] = set()
        rounds = wire.RoundsPlan(
            cohorts=wire.CohortKind.COHORT_KIND_ALL,
            beacon=bytes(32),
            passes=1,
            min_cohort=1,
            min_sum=1,
            step_timeout_ms=STEP_MS,
            experiment=True,
        )
        plan = wire.RunPlan(
            run_id="run", system="fedncf", secure_sum=secure_sum, settings=SETTINGS.to_json(), rounds=rounds
        )
        request = operator.StartRunRequest(
            plan=plan,
            expect_users=len(USERS),
            phase_timeout_ms=3_600_000,
            party_timeout_ms=3_600_000,
            most_abandoned=MOST,
        )
        around = Surroundings(
            folder,
            Term(self.writer),
            lambda: (0, 0),
            Accounting(),
            bytes(32),
            self.gone.__contains__,
            self.commit,
        )
        self.run = RoundsRun(request, around)
        row = {"run_id": "run", "request": b"", "plan_hash": b"", "state": self.run.state_json()}
        with engine.begin() as connection:
            connection.execute(store.runs.insert(), row)

    async def commit(self, run_id: str, population: Population) -> Beacon:
        raise AssertionError("the plan names the beacon")

    async def come(self) -> None:
        """Register everybody."""
        owner = wire.Participant(kind=wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER, name="zoo")
        self.run.registry.add("data-owner/zoo", [b"o" * 32], {0: owner})
        await self.run.joined("data-owner/zoo", catalogue=False, more=True)
        for host, user, holder in zip(HOSTS, USERS, HOLDERS, strict=True):
            self.run.registry.add(host, [user], {})
            self.run.registry.add(host, [holder], {}, holders=True)
            await self.run.joined(host, catalogue=False, more=True)

    async def until(self, holds: Callable[[], object]) -> None:
        """Let the clock tick until a condition holds, or the run is over."""
        async with asyncio.timeout(SOON_S):
            while not (holds() or self.run.over):
                await self.run.tick()
                await asyncio.sleep(0.01)

    @property
    def told(self) -> list[str]:
        """What the run has waited for, as watchers were told; empty words where it goes on."""
        return [event.wait.reason for event in self.run._events if event.HasField("wait")]

    def opened(self, epoch: int) -> bool:
        """Whether a round is in progress under the key of an epoch."""
        current = self.run._sums.current
        return current is not None and current.state.plan.key_id == record(epoch, HOLDERS).key_id


@pytest.fixture(params=["encrypted", "shared-key"])
async def stand(request: Any, tmp_path: Path) -> AsyncIterator[Stand]:
    one = Stand(tmp_path, request.param)
    yield one
    await one.run.drop()
    one.writer.close()


async def test_no_round_is_opened_under_a_key_with_a_revoked_holder_and_the_next_key_lets_the_run_go_on(
    stand: Stand,
) -> None:
    await stand.come()
    await stand.run.new_key(record(1, HOLDERS))
    await stand.until(lambda: stand.opened(1))
    stand.gone.add(HOLDERS[2])
    await stand.until(lambda: stand.told)
    assert stand.run.reason == ""
    assert stand.told == [
        "another key is needed, and not made yet: 1 of 3 holders of the key of epoch 1 are revoked"
    ]
    # Time for many rounds that nobody joins, of which a few in a row would end the run.
    abandoned = stand.run.state.abandoned
    ends = time.monotonic() + 4 * MOST * STEP_MS / 1e3
    await stand.until(lambda: time.monotonic() > ends)
    assert (stand.run.over, stand.run.state.abandoned) == (False, abandoned)

    await stand.run.new_key(record(2, HOLDERS[:2]))
    await stand.until(lambda: stand.opened(2))
    assert stand.opened(2)
    await stand.until(lambda: len(stand.told) > 1)
    assert stand.told[1:] == [""]
