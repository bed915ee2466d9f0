"""A real data owner in DRIFT's shielded form: a visit is answered once, and changes nothing where it is wrong."""

import asyncio
import contextlib
import sqlite3

import numpy as np
import pytest

from coterie.crypto.identity import PublicPrekey
from coterie.crypto.sealed import (
    Agreement,
    Direction,
    OpeningSession,
    SealingSession,
    SenderProcess,
    encode_records,
)
from coterie.net.enrolment import saved_bundles
from coterie.parties.party import Registrant
from coterie.systems.drift.blocks import Block
from coterie.systems.drift.mathematics import initial_item_rows
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.shielded import visit
from coterie.wire.refusal import reason_name
from coterie.wire.v1 import data_owner_pb2 as wire
from coterie.wire.v1.data_owner_pb2_grpc import DataOwnerStub
from coterie.wire.v1.orchestrator_pb2 import ParticipantKind, RoundsPlan
from coterie.wire.visit import Reply, Visit

RUN, USERS, DIM = "visits", 30, 4
ITEMS = [f"item-{n:02}" for n in range(12)]
SETTINGS = DriftSettings(form="shielded", dim=DIM, rate=0.25, ridge=0.0)
RECORDS = ([0, 1, 2, 3, 4], [False, True, False, True, True])
"""Two blocks: one complete, one that trails."""
BLOCKS = [Block(0, (0,), (1,)), Block(0, (2,), (3, 4))]


@pytest.fixture(scope="module")
def stand(shared_third_party, shared_cos, certificates, tmp_path_factory, calls):
    folder = tmp_path_factory.mktemp("shielded-owner")
    (folder / "items.csv").write_text("\n".join(["item", *ITEMS]) + "\n")
    service = calls.Member(
        "data-owner", "shielded-owner", shared_third_party, folder, participants=1,
        cos={"address": shared_cos.address, "name": shared_cos.name}, run=RUN,
        owners=[{"name": "only", "items": folder / "items.csv"}],
    )  # fmt: skip

    async def prepare():
        # More users than will ever come: the run stays in its first phase, and no window is opened.
        await calls.Operating(shared_cos, certificates["operator"]).start(
            RUN, owners=1, users=USERS + 1, form="shielded", epochs=3,
            settings=SETTINGS.for_plan(), rounds=RoundsPlan(step_timeout_ms=60_000),
        )  # fmt: skip
        host = await shared_third_party.enrol("client", "shielded-host", USERS)
        kind = ParticipantKind.PARTICIPANT_KIND_USER
        members = [
            Registrant(one, bundle, kind) for one, bundle in zip(host.identities, host.bundles, strict=True)
        ]
        await calls.party_at(shared_cos, host, RUN).register(members)
        await shared_cos.release()
        return host

    service.start(healthy=False)
    host = asyncio.run(prepare())
    service.wait_for_health(True)
    yield service, host, iter(host.identities)
    service.stop()


class Visitor:
    """A user who visits the owner, on the test's own connection."""

    def __init__(self, service, host, user):
        self.service, self.host, self.user = service, host, user
        (self.owner,) = [bundle.participant_id for bundle in saved_bundles(service.state)]

    async def connect(self):
        self.stub = self.service.channel(self.host).stub(DataOwnerStub)
        request = wire.OwnerInfoRequest(run_id=RUN, owner=self.owner)
        offered = (await self.stub.OwnerInfo(request)).prekey
        prekey = PublicPrekey(RUN, offered.prekey_id, offered.public, offered.expiry, offered.signature)
        agreement = Agreement.of_user(self.user, self.owner, prekey)
        self.sealing = SealingSession(agreement, Direction.TO_OWNER, SenderProcess())
        self.opening = OpeningSession(agreement, Direction.TO_USER)
        return self

    def batch(self, payload, first=1, count=0):
        sealed = self.sealing.seal(first, payload, count)
        return wire.SealedBatch(
            user=self.user.participant_id, header=sealed.header, ciphertext=sealed.ciphertext
        )

    async def brings(self, visit, items=RECORDS[0], flags=RECORDS[1], first=1):
        """Visit with records."""
        payload = encode_records(np.array(items, np.uint32), np.array(flags)) + visit.to_bytes()
        batch = self.batch(payload, first, len(items))
        request = wire.SubmitInteractionsRequest(run_id=RUN, owner=self.owner, batches=[batch])
        (response,) = [one async for one in self.stub.SubmitInteractions(iter([request]), timeout=30)]
        return response

    async def comes(self, payload, epoch, count=0):
        """Visit without records."""
        request = wire.UpdateVectorRequest(
            run_id=RUN, owner=self.owner, epoch=epoch, visits=[self.batch(payload, 1, count)]
        )
        return await self.stub.UpdateVector(request, timeout=30)

    def reply(self, response):
        assert not response.refused
        return Reply.from_bytes(
            self.opening.open(response.replies[0].header, response.replies[0].ciphertext), DIM
        )


@pytest.fixture
async def visitor(stand):
    service, host, unused = stand
    yield await Visitor(service, host, next(unused)).connect()
    await service.release()


def rows(service, table):
    with contextlib.closing(sqlite3.connect(service.state / "data_owner.db")) as connection:
        return connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()


def row(value):
    return np.full(DIM, value, np.float32)


def made_of(blocks, start):
    return visit(blocks, start, initial_item_rows(len(ITEMS), SETTINGS, 7), SETTINGS)


async def test_a_visit_is_answered_with_the_step_that_its_blocks_make(visitor):
    response = await visitor.brings(Visit(1, 1, False, row(0.5)))
    assert response.durable == [5]
    reply, expected = visitor.reply(response), made_of(BLOCKS[:1], row(0.5))
    assert (reply.number, reply.blocks, reply.held) == (1, 1, 1)
    np.testing.assert_allclose(reply.step, expected.step, atol=1e-6)
    assert reply.loss == pytest.approx(expected.loss)
    # The trailing block counts when nothing more comes, and what has run in this epoch does not run again.
    reply = visitor.reply(await visitor.comes(Visit(2, 1, True, row(0.2)).to_bytes(), 1))
    assert (reply.number, reply.blocks, reply.held) == (2, 1, 2)
    np.testing.assert_allclose(reply.step, made_of(BLOCKS[1:], row(0.2)).step, atol=1e-6)


async def test_in_each_later_epoch_every_block_runs_once_however_often_the_user_comes(visitor):
    await visitor.brings(Visit(1, 1, True, row(0.5)))
    for epoch, number, expected in ((2, 2, BLOCKS), (2, 3, []), (3, 4, BLOCKS), (3, 5, [])):
        reply = visitor.reply(await visitor.comes(Visit(number, epoch, True, row(0.1)).to_bytes(), epoch))
        assert reply.blocks == len(expected), (epoch, number)
        np.testing.assert_allclose(reply.step, made_of(expected, row(0.1)).step, atol=1e-6)


async def test_a_visit_that_is_made_again_gets_the_same_reply_and_counts_once_also_after_a_kill(
    stand, visitor
):
    service, host, _ = stand
    first = visitor.reply(await visitor.brings(Visit(1, 1, True, row(0.5))))
    before = rows(service, "visits"), rows(service, "gradients")
    # Another process of the user, which does not know what became of it, and has more to send meanwhile.
    again = await Visitor(service, host, visitor.user).connect()
    response = await again.brings(
        Visit(1, 1, True, row(9.0)), [*RECORDS[0], 5, 6], [*RECORDS[1], False, True]
    )
    assert (response.duplicates, list(response.durable)) == (1, [5])
    np.testing.assert_array_equal(again.reply(response).step, first.step)
    await service.release()
    service.kill()
    service.start()
    later = await Visitor(service, host, visitor.user).connect()
    response = await later.comes(Visit(1, 1, True, row(3.0)).to_bytes(), 1)
    assert response.duplicates == 1
    np.testing.assert_array_equal(later.reply(response).step, first.step)
    assert (rows(service, "visits"), rows(service, "gradients")) == before
    # It goes on where it stood: the blocks and what has run of them are the same.
    reply = later.reply(await later.comes(Visit(2, 2, True, row(0.1)).to_bytes(), 2))
    assert (reply.blocks, reply.held) == (2, 2)


def altered(data):
    return data[:-1] + bytes([data[-1] ^ 1])


async def test_what_is_wrong_with_a_visit_is_refused_and_changes_nothing(stand, visitor):
    service, _, unused = stand
    await visitor.brings(Visit(1, 1, True, row(0.5)))
    before = rows(service, "visits"), rows(service, "gradients")

    async def reasons(response):
        response = await response
        assert not response.replies[0].ciphertext
        return [(reason_name(one.reason), one.expected) for one in response.refused]

    good = Visit(2, 2, True, row(0.1))
    cases = {
        "a gap": (visitor.comes(Visit(3, 2, True, row(0.1)).to_bytes(), 2), ("SEQUENCE_MISMATCH", 2)),
        "records that are there": (visitor.brings(good, first=3), ("SEQUENCE_MISMATCH", 2)),
        "another epoch than said": (visitor.comes(good.to_bytes(), 3), ("INVALID_FIELD", 0)),
        "an epoch that never comes": (
            visitor.comes(Visit(2, 9, True, row(0.1)).to_bytes(), 9),
            ("INVALID_FIELD", 0),
        ),
        "a short row": (visitor.comes(good.to_bytes()[:-4], 2), ("WRONG_SHAPE", 0)),
        "no number": (visitor.comes(Visit(2, 2, True, row(np.nan)).to_bytes(), 2), ("NOT_FINITE", 0)),
        "an unknown item": (visitor.brings(good, [99], [True], first=6), ("UNKNOWN_ITEM", 0)),
        "no visit": (
            visitor.comes(encode_records(np.array([1], np.uint32), np.array([True])), 2, count=1),
            ("WRONG_SHAPE", 0),
        ),
    }
    for what, (call, expected) in cases.items():
        assert await reasons(call) == [expected], what
    stranger = await Visitor(service, visitor.host, next(unused)).connect()
    batch = stranger.batch(good.to_bytes())
    batch.user = visitor.user.participant_id
    spoiled = visitor.batch(good.to_bytes())
    spoiled.ciphertext = altered(spoiled.ciphertext)
    for one in (batch, spoiled):
        request = wire.UpdateVectorRequest(run_id=RUN, owner=visitor.owner, epoch=2, visits=[one])
        assert await reasons(visitor.stub.UpdateVector(request)) == [("NOT_AUTHENTIC", 0)]
    assert (rows(service, "visits"), rows(service, "gradients")) == before
    assert visitor.reply(await visitor.comes(good.to_bytes(), 2)).blocks == 2


async def test_a_reply_opens_for_its_user_only(stand, visitor):
    service, host, unused = stand
    response = await visitor.brings(Visit(1, 1, True, row(0.5)))
    other = await Visitor(service, host, next(unused)).connect()
    with pytest.raises(Exception, match="does not open"):
        other.opening.open(response.replies[0].header, response.replies[0].ciphertext)
    assert visitor.reply(response).blocks == 2


async def test_users_of_one_message_stand_for_themselves(stand):
    service, host, unused = stand
    one, two = [await Visitor(service, host, next(unused)).connect() for _ in range(2)]
    payload = encode_records(np.array(RECORDS[0], np.uint32), np.array(RECORDS[1]))
    good = one.batch(payload + Visit(1, 1, True, row(0.5)).to_bytes(), 1, 5)
    bad = two.batch(payload + Visit(2, 1, True, row(0.5)).to_bytes(), 1, 5)
    request = wire.SubmitInteractionsRequest(run_id=RUN, owner=one.owner, batches=[bad, good])
    (response,) = [answer async for answer in one.stub.SubmitInteractions(iter([request]), timeout=30)]
    assert [(refused.index, refused.expected) for refused in response.refused] == [(0, 1)]
    assert list(response.durable) == [0, 5]
    replied = response.replies[1]
    assert Reply.from_bytes(one.opening.open(replied.header, replied.ciphertext), DIM).blocks == 2
    await service.release()


async def test_the_operators_flush_is_of_the_published_form(stand, certificates, calls):
    service, _, _ = stand
    stub = service.channel(certificates["operator"]).stub(DataOwnerStub)
    refusal = await calls.refused(stub.Flush(wire.FlushRequest(run_id=RUN)))
    assert refusal.reason == "WRONG_SYSTEM"
    await service.release()
