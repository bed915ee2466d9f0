"""A run's population at the server: durable before the third party is asked, and one for each run, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from coterie_cos.rounds_run import RoundsRun
from coterie_cos.summing import Surroundings

from coterie.crypto.beacon import Beacon
from coterie.errors import PeerError
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

SETTINGS = FedNcfSettings(model="gmf", dim=3, min_touch=1)
DRAWN = Beacon(b"b" * 32, b"s" * 64)
HOSTS = ("client/b", "client/a")
SOON_S = 20.0


class Stand:
    """A run of two hosts with two users each, and a third party that answers as a test says."""

    def __init__(self, folder: Path) -> None:
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
        rounds = wire.RoundsPlan(
            cohorts=wire.CohortKind.COHORT_KIND_ALL, passes=1, min_cohort=1, min_sum=1, step_timeout_ms=60_000
        )
        plan = wire.RunPlan(
            run_id="run", system="fedncf", secure_sum="clear", settings=SETTINGS.to_json(), rounds=rounds
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
        )
        return RoundsRun(self.request, around)

    async def commit(self, run_id: str, population: Population) -> Beacon:
        """Answer for the third party."""
        assert run_id == "run"
        self.asked.append(population)
        with self.engine.connect() as connection:
            self.kept.append(connection.execute(sa.select(store.populations)).one())
        if self.refused.intersection(population.participants):
            raise Refusal(ErrorReason.ERROR_REASON_REVOKED, "a participant was revoked")
        answer = self.answers.pop(0)
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
            self.run.registry.add(party, participants, owners)
            with self.engine.begin() as connection:
                for participant in participants:
                    message = owners.get(0, wire.Participant()).SerializeToString()
                    slot = self.run.registry.slot_of(participant)
                    row = {"run_id": "run", "slot": slot, "participant": participant, "party": party}
                    connection.execute(store.participants.insert(), {**row, "message": message})
            await self.run.joined(party, catalogue=False, more=True)

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


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    one = Stand(tmp_path)
    yield one
    await one.run.drop()
    one.writer.close()


EVERYBODY = [b"\x00" * 32, b"\x01" * 32, b"\x0a" * 32, b"\x0b" * 32]
WHERE = ["client/b", "client/b", "client/a", "client/a"]


async def test_the_population_is_durable_before_the_third_party_is_asked_and_its_beacon_before_rounds_begin(
    stand: Stand,
) -> None:
    stand.answers = [DRAWN]
    await stand.come()
    await stand.until(lambda: stand.training)
    # The third user was enough: hosts that come later are not in it.
    (asked,), (kept,) = stand.asked, stand.kept
    assert asked == Population(EVERYBODY, WHERE)
    assert (kept.beacon, kept.signature) == (b"", b"")
    assert stand.population == Population(EVERYBODY, WHERE, *DRAWN)
    await stand.restart()
    assert stand.training
    assert stand.population == Population(EVERYBODY, WHERE, *DRAWN)
    assert len(stand.asked) == 1


async def test_a_server_that_restarts_before_it_has_the_beacon_asks_for_the_same_population(
    stand: Stand,
) -> None:
    stand.answers = [PeerError("away"), DRAWN]
    await stand.come()
    await stand.until(lambda: len(stand.asked) == 1)
    await stand.restart()
    # A user who comes meanwhile is not in it: the third party may have taken the first population.
    stand.run.registry.add("client/c", [b"\x05" * 32], {})
    await stand.run.joined("client/c", catalogue=False, more=True)
    await stand.until(lambda: stand.training)
    assert stand.asked == [Population(EVERYBODY, WHERE)] * 2


async def test_while_the_third_party_is_away_the_run_gathers_on_and_says_why(stand: Stand) -> None:
    stand.answers = [PeerError("away")]
    await stand.come()
    await stand.until(lambda: bool(stand.run._census.says))
    assert stand.run.phase == operator.RunPhase.RUN_PHASE_GATHER
    stand.run._gather_since -= 3601
    await stand.until(lambda: stand.run.over)
    assert "the third party drew no beacon: away" in stand.run.reason


async def test_a_user_who_is_revoked_meanwhile_is_left_out_of_another_population(stand: Stand) -> None:
    stand.answers, stand.refused = [DRAWN], {EVERYBODY[1]}
    await stand.come()
    await stand.until(lambda: len(stand.asked) == 1)
    stand.gone.add(EVERYBODY[1])
    await stand.until(lambda: stand.training)
    assert stand.population.participants == [EVERYBODY[0], *EVERYBODY[2:]]


@pytest.mark.parametrize(
    "reason", [ErrorReason.ERROR_REASON_CONFLICT, ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT]
)
async def test_a_population_that_the_third_party_refuses_for_good_ends_the_run(
    stand: Stand, reason: ErrorReason.ValueType
) -> None:
    stand.answers = [Refusal(reason, "this run has another population")]
    await stand.come()
    await stand.until(lambda: stand.run.over)
    assert stand.run.reason == "the third party refuses the population: this run has another population"
    assert len(stand.asked) == 1
