"""A run of two hosts at the COS, with its store and without processes, for tests of populations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from coterie_cos.rounds_run import RoundsRun
from coterie_cos.summing import Surroundings

from coterie.crypto.beacon import Beacon
from coterie.rounds.population import Population
from coterie.rounds.training import TrainingPhase
from coterie.store import cos as store
from coterie.store.engine import Term, Writer, open_sqlite
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Population as PopulationMessage
from coterie.wire.v1.common_pb2 import Waves

SETTINGS = FedNcfSettings(model="gmf", dim=3, min_touch=1)
DRAWN = Beacon(b"b" * 32, b"s" * 64)
HOSTS = ("client/b", "client/a")
SOON_S = 20.0


class Stand:
    """A run of two hosts with two users each, and a third party that answers as a test says.

    Parameters
    ----------
    folder : Path
    settings : FedNcfSettings
    **rounds
        Fields of the plan's rounds.
    """

    def __init__(self, folder: Path, settings: FedNcfSettings = SETTINGS, **rounds: Any) -> None:
        self.folder = folder
        self.engine = open_sqlite(folder / "cos.db", "cos")
        self.writer = Writer(self.engine)
        self.gone: set[bytes] = set()
        self.refused: set[bytes] = set()
        """Users whom the third party refuses as revoked; the server hears of `gone` only."""
        self.answers: list[Beacon | Exception] = []
        self.asked: list[Population] = []
        self.kept: list[Any] = []
        """Rows of the store at each call of the third party."""
        self.kept_waves: list[list[Any]] = []
        self.signed: list[Population | Exception] = []
        """What the third party answers when it is asked for waves; in the end the population that the server has."""
        usual = {"cohorts": wire.CohortKind.COHORT_KIND_ALL, "passes": 1, "min_cohort": 1, "min_sum": 1}
        plan = wire.RunPlan(
            run_id="run",
            system="fedncf",
            secure_sum="clear",
            settings=settings.to_json(),
            rounds=wire.RoundsPlan(**{**usual, "step_timeout_ms": 60_000, **rounds}),
        )
        self.request = operator.StartRunRequest(
            plan=plan,
            expect_owners=1,
            expect_users=3,
            phase_timeout_ms=3_600_000,
            party_timeout_ms=3_600_000,
        )
        self.run = self._new()
        row = {"run_id": "run", "request": b"", "plan_hash": b"", "state": self.run.state_json()}
        with self.engine.begin() as connection:
            connection.execute(store.runs.insert(), row)

    def _new(self) -> RoundsRun:
        around = Surroundings(
            self.folder,
            Term(self.writer),
            lambda: (0, 0),
            Accounting(),
            bytes(32),
            self.gone.__contains__,
            self.commit,
            learn_waves=self.learn,
        )
        return RoundsRun(self.request, around)

    async def commit(self, run_id: str, population: Population) -> Beacon:
        """Answer for the third party."""
        assert run_id == "run"
        self.asked.append(population)
        with self.engine.connect() as connection:
            self.kept.append(connection.execute(sa.select(store.populations)).one())
            self.kept_waves.append(list(connection.execute(sa.select(store.waves))))
        if self.refused.intersection(population.participants):
            raise Refusal(ErrorReason.ERROR_REASON_REVOKED, "a participant was revoked")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def learn(self, run_id: str, population: Population) -> Population:
        """Answer for the third party which waves there are."""
        assert run_id == "run"
        answer = self.signed.pop(0) if self.signed else population
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def come(self) -> None:
        """Register a data owner and all hosts."""
        owner = wire.Participant(kind=wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER, name="zoo")
        parties = {"data-owner/zoo": [b"o" * 32]}
        parties |= {party: [bytes([10 * n]) * 32, bytes([10 * n + 1]) * 32] for n, party in enumerate(HOSTS)}
        for party, participants in parties.items():
            owners = {0: owner} if party.startswith("data-owner") else {}
            await self.join(party, participants, owners)

    async def join(
        self, party: str, participants: Sequence[bytes], owners: Mapping[int, wire.Participant] | None = None
    ) -> None:
        """Register a party."""
        owners = owners or {}
        self.run.registry.add(party, participants, owners)
        with self.engine.begin() as connection:
            user = wire.Participant(kind=wire.ParticipantKind.PARTICIPANT_KIND_USER)
            message, slot_of = owners.get(0, user).SerializeToString(), self.run.registry.slot_of
            rows = [(slot_of(one) or 0, one, party, message) for one in participants]
            store.save_participants(connection, "run", rows)
        await self.run.joined(party, catalogue=False, more=True)

    def back_up(self) -> None:
        """Keep a copy of the store as it is now."""
        with self.engine.connect() as connection:
            connection.exec_driver_sql(f"VACUUM INTO '{self.folder / 'backup.db'}'")

    async def restore(self) -> None:
        """Restart the server with the store as it was when `back_up` was called."""
        await self.run.drop()
        self.writer.close()
        self.engine.dispose()
        for file in self.folder.glob("cos.db*"):
            file.unlink()
        (self.folder / "backup.db").rename(self.folder / "cos.db")
        self.engine = open_sqlite(self.folder / "cos.db", "cos")
        self.writer = Writer(self.engine)
        await self.restart()

    async def restart(self) -> None:
        await self.run.drop()
        self.run = self._new()
        with self.engine.connect() as connection:
            row = connection.execute(sa.select(store.runs)).one()
            self.run.restore(connection, row.state, row.snapshot)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not holds():
                await self.run.tick()
                await asyncio.sleep(0.02)

    @property
    def training(self) -> bool:
        """Whether the run has begun, durably."""
        return self.run._published.phase is TrainingPhase.ROUNDS

    @property
    def population(self) -> Population:
        payload = self.run.payload(
            "client/a", "client", wire.FetchRequest(kind=wire.FetchKind.FETCH_KIND_POPULATION)
        )[1]
        return Population.from_wire(PopulationMessage.FromString(payload))

    def waves_after(self, count: int) -> Waves:
        kind = wire.FetchKind.FETCH_KIND_WAVES
        payload = self.run.payload("client/a", "client", wire.FetchRequest(kind=kind, version=count))[1]
        return Waves.FromString(payload)
