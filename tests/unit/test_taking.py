"""Contributions that come through intakes: each counts once, and what was acknowledged is in the sum."""

import asyncio
import hashlib
from dataclasses import replace

import numpy as np
import pytest
import sqlalchemy as sa
from coterie_cos.opened import to_json
from coterie_cos.sums import Sums
from coterie_cos.taking import Taking

from coterie.crypto.authority import PeerIdentity
from coterie.errors import StoreError
from coterie.net.server import _peer as current
from coterie.secure_sum.aggregation import Aggregation
from coterie.secure_sum.clear import ClearMember
from coterie.secure_sum.protocol import Step
from coterie.secure_sum.robust import RobustServer
from coterie.secure_sum.steps import KIND_OF
from coterie.store import contributions
from coterie.store import cos as store
from coterie.store.engine import Term, Writer
from coterie.store.postgres import DatabaseAddress, open_postgres
from coterie.store.tenure import Tenure
from coterie.telemetry.accounting import Accounting
from coterie.wire.chunks import split
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

    def __init__(self, folder, at, secure_sum="masked"):
        self.at = at
        self.revoked = set()
        super().__init__(folder, secure_sum)
        self.intakes = [
            Taking(
                at.engine(),
                None,
                Accounting(),
                revoked=lambda participant: participant in self.revoked,
                limit_s=30.0,
                max_uploads=8,
                max_payload=1 << 20,
            )
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
        head = wire.SubmitRequest(
            round=RoundRef(run_id="run", round=1),
            kind=KIND_OF[Step.SUBMIT],
            slots=[SlotRange(first=member, count=1)],
            sha256=hashlib.sha256(message).digest(),
        )
        party = party or PARTIES[member % 2]
        opened = await taking.opened_to(PLACE, party, head.slots)
        if opened is None:
            return False
        role, _, name = party.partition("/")
        peer = PeerIdentity(role=role, name=name, fingerprint=b"")
        async with asyncio.timeout(SOON_S):
            return await taking.take(peer, opened, head, message).done

    async def total_of_rest(self, members):
        """Let members answer the last steps; return the sum."""
        for step in (Step.CONFIRM, Step.UNMASK):
            await self.reached(step)
            self.answer(step, members)
        return await self.total()


def possible_codes(rng, layout):
    """Return codes of each member that are within the bounds of a layout."""
    widths = np.repeat([one.bits for one in layout.segments], [one.size for one in layout.segments])
    return [rng.integers(1, 2**widths).astype(np.uint32) for _ in range(MEMBERS)]


class Ruled(Parted):
    """A round in clear whose sum is a median of the single contributions."""

    def halves(self, secure_sum):
        return lambda: RobustServer(Aggregation("median")), lambda plan, member: ClearMember()

    def drawn(self, rng):
        return possible_codes(rng, self.layout)


@pytest.fixture
async def ruled(tmp_path, server):
    one = Ruled(tmp_path, DatabaseAddress(**server.keys(server.database())), "clear")
    await one.reached(Step.SUBMIT)
    yield one
    for intake in one.intakes:
        intake.close()
    one.sums.end()
    await asyncio.gather(one.worker, return_exceptions=True)
    one.writer.close()


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


async def test_the_first_contribution_is_written_at_once_and_later_ones_together_at_last_when_a_batch_is_full(
    parted, monkeypatch
):
    monkeypatch.setattr("coterie_cos.taking._APART_S", 3600.0)
    monkeypatch.setattr("coterie_cos.taking._BATCH", MEMBERS - 1)
    messages = await parted.submitting()
    assert await parted.send(0, 0, messages[0])
    sending = []
    for member in range(1, MEMBERS):
        sending.append(asyncio.create_task(parted.send(0, member, messages[member])))
        # They come one after the other, with time enough for each to be written alone.
        with parted.engine.connect() as connection:
            await asyncio.to_thread(connection.exec_driver_sql, "SELECT pg_sleep(0.02)")
    assert await asyncio.gather(*sending) == [True] * (MEMBERS - 1)
    with parted.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM intake_parts").scalar_one() == 2
    await parted.sums.gather()
    assert np.array_equal(await parted.total_of_rest(range(MEMBERS)), parted.clear)


async def test_what_was_acknowledged_is_there_when_another_coordinator_goes_on(parted):
    messages = await parted.submitting()
    for member in range(4):
        assert await parted.send(0, member, messages[member])
    await parted.sums.gather()
    parted.restart()
    await parted.sums.gather()
    assert parted.open.state.asked == (4, 5)
    assert [member for member in range(MEMBERS) if parted.open.state.asks(member)] == [4, 5]
    # An intake that ended was acknowledged: the other one knows it, and a member that sends again is not counted twice.
    for member in (3, 4, 5):
        assert await parted.send(1, member, messages[member])
    await parted.sums.gather()
    assert np.array_equal(await parted.total_of_rest(range(MEMBERS)), parted.clear)


async def test_contributions_to_a_rule_come_through_intakes_and_are_kept_apart_until_it_is_applied(ruled):
    half, plan = ruled.server(), ruled.plan
    messages = [ruled.members[n].answer(Step.SUBMIT, b"", ruled.codes[n]) for n in range(MEMBERS)]
    alone = half.begin(plan, ruled.layout)
    for member, message in enumerate(messages):
        alone = half.added(alone, half.vector(plan, {}, {}, member, message, ruled.layout))
    beyond = np.full(ruled.layout.size, 2**20, np.uint32)
    with pytest.raises(Refusal, match="beyond the bounds"):
        await ruled.send(0, 0, ruled.members[0].answer(Step.SUBMIT, b"", beyond))
    for member in range(MEMBERS):
        assert await ruled.send(member % 2, member, messages[member])
    await ruled.sums.gather()
    assert np.array_equal(await ruled.total(), half.unmask(plan, {}, alone).codes)


async def test_an_intake_refuses_members_who_are_revoked_once_a_sum_is_open(ruled):
    messages = [one.answer(Step.SUBMIT, b"", ruled.codes[n]) for n, one in enumerate(ruled.members)]
    assert await ruled.send(0, 0, messages[0])
    ruled.revoked |= {ruled.plan.members[member].participant for member in (0, 1)}
    for member in (0, 1):
        with pytest.raises(Refusal, match="takes no part") as refused:
            await ruled.send(1, member, messages[member])
        assert refused.value.reason == ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT
    assert await ruled.send(1, 2, messages[2])
    await ruled.sums.gather()
    # What was acknowledged before stays.
    assert ruled.open.state.submitters == (0, 2)


async def test_an_intake_takes_from_a_member_revoked_meanwhile_whom_others_count_on(parted):
    messages = await parted.submitting()
    parted.revoked.add(parted.plan.members[0].participant)
    assert await parted.send(0, 0, messages[0])


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


def copied(parted, *rounds):
    """Let sums of further rounds be open, as the first one is."""
    with parted.engine.begin() as connection:
        for round_ in rounds:
            for table, others in (
                ("sums", "plan, step, phase, reason, running"),
                ("intake_sums", "open, layout, slots, terms, plan_hash"),
                ("sum_messages", "step, member, message"),
            ):
                connection.exec_driver_sql(
                    f"INSERT INTO {table} (run_id, round, {others}) "
                    f"SELECT run_id, %s, {others} FROM {table} WHERE run_id = 'run' AND round = 1",
                    (round_,),
                )


def item(member, message, *, poll=False):
    """Return a member's contribution as the only message of an item."""
    request = wire.SubmitRequest(
        round=RoundRef(run_id="run", round=1),
        kind=KIND_OF[Step.SUBMIT],
        slots=[SlotRange(first=member, count=1)],
        sha256=hashlib.sha256(message).digest(),
        chunk=next(iter(split(message))),
    )
    if poll:
        request.poll.run_id = "run"
    return request


async def test_what_waits_when_its_sum_is_found_closed_is_handed_on_all_of_it(parted, monkeypatch):
    messages = await parted.submitting()
    monkeypatch.setattr("coterie_cos.taking._BATCH", 1)
    await parted.intakes[0].opened(PLACE)
    with parted.engine.begin() as connection:
        contributions.close_sum(connection, *PLACE)
    taken = await asyncio.gather(*(parted.send(0, member, messages[member]) for member in range(MEMBERS)))
    assert taken == [False] * MEMBERS


async def test_an_intake_takes_contributions_to_a_sum_that_it_has_forgotten_meanwhile(parted, monkeypatch):
    messages = await parted.submitting()
    copied(parted, 2, 3)
    monkeypatch.setattr("coterie_cos.taking._SUMS", 2)
    taking = parted.intakes[0]
    opened = await taking.opened(PLACE)
    await taking.opened(("run", 2))
    # The sum that was used last is remembered.
    assert await taking.opened(PLACE) is opened
    await taking.opened(("run", 3))
    assert await taking.opened(PLACE) is opened
    await taking.opened(("run", 2))
    await taking.opened(("run", 3))
    peer = PeerIdentity(role="client", name=PARTIES[0].partition("/")[2], fingerprint=b"")
    assert str(peer) == PARTIES[0]
    async with asyncio.timeout(SOON_S):
        assert await taking.take(peer, opened, item(0, messages[0]), messages[0]).done


async def test_a_stream_that_says_the_same_again_waits_once_and_is_read_no_further_than_its_share(
    parted, monkeypatch
):
    messages = await parted.submitting()
    monkeypatch.setattr("coterie_cos.taking._UNTAKEN", 3)
    taking, read = parted.intakes[0], 0
    role, _, name = PARTIES[0].partition("/")

    async def requests():
        nonlocal read
        for _ in range(12):
            read += 1
            yield item(0, messages[0])

    async def submitted():
        current.set(PeerIdentity(role=role, name=name, fingerprint=b""))
        return await taking.submit(requests(), None)

    with parted.engine.begin() as connection:
        # Nothing can be taken as long as this lock is held.
        connection.exec_driver_sql("SELECT 1 FROM intake_sums FOR UPDATE")
        call = asyncio.create_task(submitted())
        async with asyncio.timeout(SOON_S):
            while read < 3:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert read == 3
        assert len(taking._unsettled) == 1
    async with asyncio.timeout(SOON_S):
        assert (await call).accepted == 12
    assert not taking._unsettled


async def test_invented_runs_and_rounds_cost_the_database_one_look_and_open_sums_are_found(
    parted, monkeypatch
):
    messages = await parted.submitting()
    taking, looks = parted.intakes[0], []
    with parted.engine.begin() as connection:
        kept = {"run_id": "run", "request": b"", "plan_hash": b"", "state": "{}"}
        connection.execute(store.runs.insert(), kept)
    sa.event.listen(taking._engine, "begin", lambda connection: looks.append(connection))
    for invented in ("run\0", "", "Run", "r" * 64):
        assert await taking.opened((invented, 1)) is None
    assert not looks
    monkeypatch.setattr("coterie_cos.taking._MISSED_S", 600.0)
    for number in range(20):
        assert await taking.opened((f"invented-{number}", 1)) is None
    assert len(looks) == 1
    assert await parted.send(0, 0, messages[0])
    before = len(looks)
    for _ in range(20):
        assert await taking.opened(("run", 2)) is None
    assert len(looks) == before + 1
    monkeypatch.setattr("coterie_cos.taking._MISSED_S", 0.02)
    assert await taking.opened(("run", 3)) is None
    copied(parted, 3)
    async with asyncio.timeout(SOON_S):
        while await taking.opened(("run", 3)) is None:
            await asyncio.sleep(0.01)


class Coordinator:
    """Takes what an intake hands on."""

    def __init__(self):
        self.told = []

    async def answer(self, name, messages, context):
        self.told += [wire.SubmitRequest.FromString(message) async for message in messages]
        return wire.SubmitResponse(accepted=0).SerializeToString()

    async def answer_one(self, name, message, context):
        self.told.append(wire.SubmitRequest.FromString(message))
        return wire.SubmitResponse(next=wire.PollResponse(revision=7)).SerializeToString()


async def test_a_poll_that_comes_in_a_message_of_its_own_is_no_item(parted):
    messages = await parted.submitting()
    taking = parted.intakes[0]
    taking._relay = Coordinator()
    role, _, name = PARTIES[0].partition("/")
    current.set(PeerIdentity(role=role, name=name, fingerprint=b""))

    async def requests():
        yield wire.SubmitRequest(poll=wire.PollRequest(run_id="run"))
        yield item(0, messages[0])

    async with asyncio.timeout(SOON_S):
        response = await taking.submit(requests(), None)
    assert (response.accepted, response.next.revision, list(response.refused)) == (1, 7, [])
    assert [one.HasField("chunk") for one in taking._relay.told] == [False]


async def test_of_items_in_one_message_an_intake_takes_contributions_and_hands_on_each_other_once(parted):
    messages = await parted.submitting()
    taking = parted.intakes[0]
    taking._relay = Coordinator()
    role, _, name = PARTIES[0].partition("/")
    current.set(PeerIdentity(role=role, name=name, fingerprint=b""))
    other = item(0, b"declines")
    other.kind = wire.SubmitKind.SUBMIT_KIND_DECLINED
    together = wire.SubmitRequest()
    together.CopyFrom(other)
    together.more.extend([item(0, messages[0]), other])
    # A whole item needs no hash.
    together.more[0].ClearField("sha256")

    async def requests():
        yield wire.SubmitRequest.FromString(together.SerializeToString())

    async with asyncio.timeout(SOON_S):
        response = await taking.submit(requests(), None)
    assert (response.accepted, list(response.refused)) == (1, [])
    assert taking._relay.told == [other, other]


async def test_a_sum_that_is_opened_again_has_the_slots_that_are_asked_then(parted):
    await parted.submitting()
    with parted.engine.begin() as connection:
        contributions.open_sum(connection, *PLACE, "[]", {0: [(0, 1)]})
        found = contributions.read_open(connection, *PLACE, ())
        assert (found.layout, found.slots) == ("[]", {0: [(0, 1)]})


async def test_an_intake_that_knows_a_sum_takes_from_members_whom_a_later_coordinator_asks(
    parted, monkeypatch
):
    monkeypatch.setattr("coterie_cos.taking._MISSED_S", 0.0)
    messages = await parted.submitting()
    with parted.engine.begin() as connection:
        opened = contributions.read_open(connection, *PLACE, ())
        contributions.open_sum(
            connection, *PLACE, opened.layout, {0: opened.slots[0]}, plan_hash=parted.plan.hash
        )
    assert await parted.send(0, 0, messages[0])
    with pytest.raises(Refusal, match="and that is asked"):
        await parted.send(0, 5, messages[5])
    with parted.engine.begin() as connection:
        contributions.open_sum(connection, *PLACE, opened.layout, opened.slots, plan_hash=parted.plan.hash)
    assert await parted.send(0, 5, messages[5])


async def test_a_sum_of_another_plan_by_the_same_number_takes_nothing_that_was_checked_by_the_plan_before(
    ruled,
):
    messages = [one.answer(Step.SUBMIT, b"", ruled.codes[n]) for n, one in enumerate(ruled.members)]
    assert await ruled.send(0, 0, messages[0])
    # As in a database that was restored while the intake went on: members change places.
    other = replace(ruled.plan, members=ruled.plan.members[2:] + ruled.plan.members[:2])
    with ruled.engine.begin() as connection:
        contributions.forget(connection, "run")
        connection.execute(store.sums.update().values(plan=other.to_wire().SerializeToString()))
        slots = {member: [((member + 2) % MEMBERS, 1)] for member in range(MEMBERS)}
        contributions.open_sum(connection, *PLACE, to_json(ruled.layout), slots, plan_hash=other.hash)
    # Handed on, and sent again.
    assert not await ruled.send(0, 2, messages[2])
    assert await ruled.send(0, 2, messages[2])
    with ruled.engine.connect() as connection:
        (part,) = contributions.read_parts(connection, *PLACE, ())
    assert list(part.notes) == [0]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_a_sum_is_sealed_with_what_was_under_way_whatever_the_database_says_of_isolation(
    tmp_path, server, level
):
    name = server.database()
    server.sql(f"ALTER ROLE coterie IN DATABASE {name} SET default_transaction_isolation = '{level}'")
    server.sql(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
    engine = DatabaseAddress(**server.keys(name)).engine()
    with engine.begin() as connection:
        contributions.make_tables(connection)
        contributions.open_sum(connection, *PLACE, "[]", {0: [(0, 1)]})

    def sealed():
        with engine.begin() as connection:
            contributions.close_sum(connection, *PLACE)
            return contributions.read_parts(connection, *PLACE, ())

    one = contributions.Acknowledged(0, bytes(32), None, 4)
    async with asyncio.timeout(SOON_S):
        with engine.begin() as intake:
            taken = contributions.take(intake, *PLACE, [one], lambda *_: None, lambda _: b"sum")
            assert taken == {0: None}
            sealing = asyncio.create_task(asyncio.to_thread(sealed))
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watching:
                while not watching.exec_driver_sql(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                    "AND wait_event_type = 'Lock'"
                ).scalar_one():
                    await asyncio.sleep(0.01)
        assert [part.running for part in await sealing] == [b"sum"]


async def test_nothing_is_acknowledged_for_a_sum_after_its_run_ended_and_what_was_before_counts_when_it_goes_on(
    parted,
):
    messages = await parted.submitting()
    assert await parted.send(0, 0, messages[0])
    with parted.engine.begin() as connection:
        parted.sums.shut(connection)
    assert await parted.send(0, 1, messages[1]) is False
    assert await parted.send(1, 1, messages[1]) is False
    parted.restart()
    await parted.sums.gather()
    assert parted.open.state.submitters == (0,)


async def test_nothing_is_acknowledged_for_a_sum_that_was_abandoned(parted):
    messages = await parted.submitting()
    assert await parted.send(0, 0, messages[0])
    with parted.engine.begin() as connection:
        parted.sums.forget(connection)
    for intake in (0, 1):
        assert await parted.send(intake, 1, messages[1]) is False
    with parted.engine.connect() as connection:
        for table in ("sums", "intake_sums", "intake_senders", "intake_parts"):
            rows = connection.exec_driver_sql(f"SELECT count(*) FROM {table}")
            assert rows.scalar_one() == 0
