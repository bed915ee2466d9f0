"""Contributions that come through intakes: each counts once, and what was acknowledged is in the sum."""

import asyncio
import hashlib

import numpy as np
import pytest
from coterie_cos.sums import Sums
from coterie_cos.taking import Taking

from coterie.crypto.authority import PeerIdentity
from coterie.errors import StoreError
from coterie.secure_sum.protocol import Step
from coterie.secure_sum.steps import KIND_OF
from coterie.store import contributions
from coterie.store.engine import Term, Writer
from coterie.store.postgres import DatabaseAddress, open_postgres
from coterie.store.tenure import Tenure
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef, SlotRange

from .. import postgres
from .test_sums import MEMBERS, PARTIES, SOON_S, Round

PLACE = ("run", 1)


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


class Parted(Round):
    """A round at a coordinator whose members come through two intakes."""

    def __init__(self, folder, at):
        self.at = at
        super().__init__(folder)
        self.intakes = [
            Taking(at.engine(), None, Accounting(), limit_s=30.0, max_uploads=8, max_payload=1 << 20)
            for _ in range(2)
        ]

    def keep(self):
        self.engine, writing = open_postgres(self.at, "cos")
        self.tenure = Tenure()
        self.writer = Writer(writing, tenure=self.tenure)
        with self.engine.begin() as connection:
            contributions.make_tables(connection)

    def made(self):
        term = Term(self.writer)
        return Sums(
            "run", self.server(), self.folder, term, Accounting(), lambda participant: False, intakes=True
        )

    async def submitting(self):
        """Answer the steps before, and return each member's contribution."""
        for step in (Step.ADVERTISE, Step.SHARE):
            await self.reached(step)
            self.answer(step)
        await self.reached(Step.SUBMIT)
        told = self.briefings(Step.SUBMIT)
        return [
            self.members[member].answer(Step.SUBMIT, told[member], self.codes[member])
            for member in range(MEMBERS)
        ]

    async def send(self, intake, member, message, party=None):
        """Send a member's contribution through an intake; return whether it was taken, when it is acknowledged."""
        taking = self.intakes[intake]
        if await taking.opened(PLACE) is None:
            return False
        head = wire.SubmitRequest(
            round=RoundRef(run_id="run", round=1),
            kind=KIND_OF[Step.SUBMIT],
            slots=[SlotRange(first=member, count=1)],
            sha256=hashlib.sha256(message).digest(),
        )
        role, _, name = (party or PARTIES[member % 2]).partition("/")
        peer = PeerIdentity(role=role, name=name, fingerprint=b"")
        async with asyncio.timeout(SOON_S):
            return await taking.take(peer, head, message)

    async def total_of_rest(self, members):
        """Let members answer the last steps; return the sum."""
        for step in (Step.CONFIRM, Step.UNMASK):
            await self.reached(step)
            self.answer(step, members)
        return await self.total()


@pytest.fixture
async def parted(tmp_path, server):
    at = DatabaseAddress(**server.keys(server.database()))
    one = Parted(tmp_path, at)
    await one.reached(Step.ADVERTISE)
    yield one
    for intake in one.intakes:
        intake.close()
    one.sums.end()
    await asyncio.gather(one.worker, return_exceptions=True)
    one.writer.close()


async def test_contributions_through_two_intakes_that_come_twice_count_once(parted):
    messages = await parted.submitting()
    everybody = [(intake, member) for member in range(MEMBERS) for intake in (0, 1)]
    # The same contributions through both intakes at the same time, and once more.
    taken = await asyncio.gather(
        *(parted.send(intake, member, messages[member]) for intake, member in everybody)
    )
    assert taken == [True] * (2 * MEMBERS)
    assert await parted.send(0, 3, messages[3])
    with parted.engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT count(*) FROM intake_senders").scalar_one()
        parts = connection.exec_driver_sql("SELECT count(*) FROM intake_parts").scalar_one()
    assert rows == MEMBERS
    # Those that arrive together are written as one sum.
    assert parts < MEMBERS
    await parted.sums.gather()
    assert np.array_equal(await parted.total_of_rest(range(MEMBERS)), parted.clear)
    # Nothing of the sum is left for intakes.
    with parted.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM intake_parts").scalar_one() == 0


async def test_what_was_acknowledged_is_there_when_another_coordinator_goes_on(parted):
    messages = await parted.submitting()
    for member in range(4):
        assert await parted.send(0, member, messages[member])
    await parted.sums.gather()
    parted.restart()
    await parted.sums.gather()
    assert parted.open.state.asked == (4, 5)
    # An intake that ended was acknowledged: the other one knows it, and a member that sends again is not counted twice.
    for member in (3, 4, 5):
        assert await parted.send(1, member, messages[member])
    await parted.sums.gather()
    assert np.array_equal(await parted.total_of_rest(range(MEMBERS)), parted.clear)


async def test_a_step_is_closed_with_what_was_acknowledged_and_nothing_is_taken_after_it(parted):
    messages = await parted.submitting()
    for member in range(5):
        assert await parted.send(member % 2, member, messages[member])
    # The coordinator has not looked yet, and does not wait any longer.
    assert parted.open.state.submitters == ()
    for party in PARTIES:
        parted.sums.lost(party)
    await parted.reached(Step.CONFIRM)
    assert parted.open.state.submitters == tuple(range(5))
    assert await parted.send(0, 5, messages[5]) is False
    total = await parted.total_of_rest(range(5))
    assert np.array_equal(total, sum(parted.codes[:5], np.zeros_like(parted.clear)))


async def test_an_intake_refuses_other_bytes_slots_of_another_and_what_does_not_fit(parted):
    messages = await parted.submitting()
    assert await parted.send(0, 2, messages[2])
    for intake, member, message, party, reason in (
        (1, 2, messages[4], None, ErrorReason.ERROR_REASON_BAD_SIGNATURE),
        (1, 3, messages[3], PARTIES[0], ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT),
        (1, MEMBERS, messages[3], None, ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT),
        (1, 3, b"\xff", None, ErrorReason.ERROR_REASON_INVALID_FIELD),
    ):
        with pytest.raises(Refusal) as refused:
            await parted.send(intake, member, message, party)
        assert refused.value.reason == reason
    # The same contribution in other bytes is another one.
    twin = messages[2] + b"\x78\x00"
    with pytest.raises(Refusal, match="another message") as refused:
        await parted.send(1, 2, twin)
    assert refused.value.reason == ErrorReason.ERROR_REASON_CONFLICT


async def test_a_coordinator_that_was_taken_over_closes_no_sum(parted):
    messages = await parted.submitting()
    # Another one begins a tenure, as after a partition of the first from the database.
    with parted.engine.begin() as connection:
        Tenure().begin(connection)
    with pytest.raises(StoreError, match="taken this one's database over"):
        await parted.sums.gather()
    for party in PARTIES:
        parted.sums.lost(party)
    await asyncio.gather(parted.worker, return_exceptions=True)
    # Its writes are refused: the sum is open as before, and intakes take contributions for the next coordinator.
    assert await parted.send(0, 1, messages[1])
