"""Sealed intake at a real data owner: what is altered, repeated, misplaced or not allowed changes nothing there."""

import asyncio
import contextlib
import shutil
import sqlite3
import ssl
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import grpc
import numpy as np
import pytest

from coterie.crypto.identity import Identity, PublicPrekey
from coterie.crypto.sealed import (
    RECORD_DTYPE,
    Agreement,
    Direction,
    SealingSession,
    SenderProcess,
    encode_records,
)
from coterie.net.authorisation import ALLOWED
from coterie.net.enrolment import saved_bundles
from coterie.parties.party import Registrant
from coterie.wire.refusal import reason_name
from coterie.wire.v1 import data_owner_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef
from coterie.wire.v1.data_owner_pb2_grpc import DataOwnerStub
from coterie.wire.v1.operator_pb2 import StopRunRequest
from coterie.wire.v1.orchestrator_pb2 import DeliveryStatus, FetchKind, ParticipantKind, SubmitKind
from coterie.wire.v1.thirdparty_pb2 import RevokeRequest

RUN = "intake"
USERS = 250
SOON_S = 60.0
"""Bound for what happens at once."""

DRAMA = [f"drama-{n}" for n in range(20)]
COMEDY = [f"comedy-{n}" for n in range(20)]
BOTH = ["both-0", "both-1"]


@dataclass(frozen=True)
class Stand:
    """A process with two data owners in a run that waits for more users; the test is a host with users."""

    service: object
    host: object
    owners: dict[str, bytes]
    unused: Iterator[Identity]

    def rows(self) -> list[tuple]:
        """Return everything that the owners have stored."""
        query = 'SELECT number, owner, user, "first", length, records FROM batches ORDER BY number'
        with contextlib.closing(sqlite3.connect(self.service.state / "data_owner.db")) as connection:
            return connection.execute(query).fetchall()

    def stored(self, user: Identity, owner: str = "drama") -> list[tuple[int, int]]:
        """Return a user's records at an owner as (sequence number, item)."""
        found = []
        for _, held_by, of, first, length, records in self.rows():
            if (held_by, of) == (self.owners[owner], user.participant_id):
                items = np.frombuffer(records, RECORD_DTYPE)["item"].tolist()
                assert len(items) == length
                found += list(enumerate(items, first))
        return found


def items_file(folder, name, keys):
    path = folder / f"{name}.csv"
    path.write_text("\n".join(["item", *keys]) + "\n")
    return path


def owners_in(folder, **items):
    return [{"name": name, "items": items_file(folder, name, keys)} for name, keys in items.items()]


async def join(calls, cos, host, run, count=None):
    """Register the users of a host at the COS."""
    kind = ParticipantKind.PARTICIPANT_KIND_USER
    pairs = list(zip(host.identities, host.bundles, strict=True))[:count]
    await calls.party_at(cos, host, run).register([Registrant(one, bundle, kind) for one, bundle in pairs])


@pytest.fixture(scope="module")
def shared_stand(shared_third_party, shared_cos, certificates, tmp_path_factory, calls):
    folder = tmp_path_factory.mktemp("owner")
    service = calls.Member(
        "data-owner",
        "intake-owner",
        shared_third_party,
        folder,
        participants=2,
        cos={"address": shared_cos.address, "name": shared_cos.name},
        run=RUN,
        owners=owners_in(folder, drama=[*DRAMA, *BOTH], comedy=[*COMEDY, *BOTH]),
    )

    async def prepare():
        # More users than will ever come: the run stays in its first phase, and nobody trains.
        await calls.Operating(shared_cos, certificates["operator"]).start(RUN, owners=2, users=USERS + 1)
        host = await shared_third_party.enrol("client", "intake-host", USERS)
        await join(calls, shared_cos, host, RUN, USERS - 1)
        await shared_cos.release()
        return host

    service.start(healthy=False)
    host = asyncio.run(prepare())
    service.wait_for_health(True)
    ids = [bundle.participant_id for bundle in saved_bundles(service.state)]
    names = ("drama", "comedy")
    yield Stand(service, host, dict(zip(names, ids, strict=True)), iter(host.identities[: USERS - 1]))
    service.stop()


@pytest.fixture
async def stand(shared_stand):
    yield shared_stand
    await shared_stand.service.release()


class Sender:
    """A user's side of sealed delivery to one owner, on the test's own connection."""

    def __init__(self, stub, owner, user, prekey, *, run=RUN):
        self.stub, self.owner, self.user, self.run, self.prekey = stub, owner, user, run, prekey
        agreement = Agreement.of_user(user, owner, prekey)
        self.session = SealingSession(agreement, Direction.TO_OWNER, SenderProcess())

    def batch(self, first, items=(0,), *, positive=True, count=None, session=None, user=None, payload=None):
        """Seal records; ``items`` are indices of the catalogue."""
        if payload is None:
            payload = encode_records(np.array(items, np.uint32), np.full(len(items), positive))
        sealed = (session or self.session).seal(first, payload, len(items) if count is None else count)
        return wire.SealedBatch(
            user=(user or self.user).participant_id, header=sealed.header, ciphertext=sealed.ciphertext
        )

    def message(self, *batches, owner=None, run=None):
        return wire.SubmitInteractionsRequest(
            run_id=self.run if run is None else run, owner=owner or self.owner, batches=batches
        )

    async def send(self, *batches):
        """Send one message; return its answer."""
        return (await self.send_all(self.message(*batches)))[0]

    async def send_all(self, *messages):
        async def requests():
            for message in messages:
                yield message

        return [one async for one in self.stub.SubmitInteractions(requests(), timeout=30)]


async def prekey_of(stub, owner, run=RUN):
    offered = (await stub.OwnerInfo(wire.OwnerInfoRequest(run_id=run, owner=owner))).prekey
    return PublicPrekey(run, offered.prekey_id, offered.public, offered.expiry, offered.signature)


async def sender_of(stand, user=None, owner="drama", *, tls=None):
    stub = stand.service.channel(tls or stand.host).stub(DataOwnerStub)
    return Sender(
        stub,
        stand.owners[owner],
        user or next(stand.unused),
        await prekey_of(stub, stand.owners[owner]),
    )


@pytest.fixture
async def sender(stand):
    """A user that has three records at the owner called drama."""
    found = await sender_of(stand)
    assert (await found.send(found.batch(1, [0, 1, 2]))).durable == [3]
    return found


def refusals(response):
    """Return (index, reason, expected) of the refused batches."""
    return [(one.index, reason_name(one.reason), one.expected) for one in response.refused]


@contextlib.contextmanager
def nothing_changes(stand):
    """Check that the store holds the same afterwards, and that the log names no user and no item."""
    before = stand.rows()
    logged = len(stand.service.log.read_bytes())
    yield
    assert stand.rows() == before
    written = stand.service.log.read_bytes()[logged:].decode()
    assert not any(key in written for key in (*DRAMA, *COMEDY, *BOTH))
    assert not any(user.participant_id.hex()[:16] in written for user in stand.host.identities)


async def takes_the_next(stand, sender, at=3):
    """Whether the service goes on: the user's next record is accepted, once."""
    assert (await sender.send(sender.batch(at + 1, [5]))).durable == [at + 1]
    assert stand.stored(sender.user) == [*enumerate(range(at), 1), (at + 1, 5)]
    return True


# --- Altered -----------------------------------------------------------------------------------------------------

# Where each field of the header lies (docs/protocol.md).
FIELDS = {
    "version": (0, ">B"),
    "direction": (1, ">B"),
    "zero": (2, ">H"),
    "session_id": (4, ">Q"),
    "prekey_id": (36, ">Q"),
    "counter": (44, ">Q"),
    "first_sequence": (52, ">Q"),
    "count": (60, ">I"),
}


def with_field(header, field, change):
    """Return a header with one field changed by a function on numbers."""
    offset, layout = FIELDS[field]
    altered = bytearray(header)
    (held,) = struct.unpack_from(layout, header, offset)
    struct.pack_into(layout, altered, offset, change(held))
    return bytes(altered)


@pytest.mark.parametrize(
    ("field", "change", "reason"),
    [
        ("version", lambda _: 2, "INVALID_FIELD"),
        ("version", lambda _: 0, "INVALID_FIELD"),
        ("direction", lambda _: 2, "NOT_AUTHENTIC"),
        ("direction", lambda _: 3, "NOT_AUTHENTIC"),
        ("zero", lambda _: 1, "INVALID_FIELD"),
        ("session_id", lambda held: held ^ 1, "NOT_AUTHENTIC"),
        ("prekey_id", lambda held: held ^ 1, "UNKNOWN_PREKEY"),
        ("counter", lambda held: held + 1, "NOT_AUTHENTIC"),
        ("first_sequence", lambda held: held + 1, "NOT_AUTHENTIC"),
        ("first_sequence", lambda _: 0, "NOT_AUTHENTIC"),
        ("first_sequence", lambda _: 2**64 - 1, "NOT_AUTHENTIC"),
        ("count", lambda held: held + 1, "NOT_AUTHENTIC"),
        ("count", lambda _: 0, "INVALID_FIELD"),
        ("count", lambda _: 1025, "INVALID_FIELD"),
        ("count", lambda _: 2**32 - 1, "INVALID_FIELD"),
    ],
)
async def test_a_batch_with_an_altered_header_is_refused(stand, sender, field, change, reason):
    good = sender.batch(4, [3, 4])
    bad = wire.SealedBatch(
        user=good.user, header=with_field(good.header, field, change), ciphertext=good.ciphertext
    )
    with nothing_changes(stand):
        response = await sender.send(bad)
        assert refusals(response) == [(0, reason, 0)]
        assert response.durable == [0]
    assert await takes_the_next(stand, sender)


def test_every_field_of_the_header_is_altered_in_a_test():
    ends = [*[offset for offset, _ in FIELDS.values()][1:], 64]
    session = FIELDS["session_id"][0]
    for (offset, layout), end in zip(FIELDS.values(), ends, strict=True):
        # All of the header is covered; of the session id the first eight of 32 bytes.
        assert offset + (32 if offset == session else struct.calcsize(layout)) == end


@pytest.mark.parametrize(
    "alter",
    [
        lambda text: bytes([text[0] ^ 1]) + text[1:],
        lambda text: text[:-1] + bytes([text[-1] ^ 1]),
        lambda text: text[:-1],
        lambda text: text + b"\0",
        lambda _: b"",
    ],
    ids=["first byte", "tag", "short", "long", "empty"],
)
async def test_a_batch_with_an_altered_ciphertext_is_refused(stand, sender, alter):
    bad = sender.batch(4, [3, 4])
    bad.ciphertext = alter(bad.ciphertext)
    with nothing_changes(stand):
        assert refusals(await sender.send(bad)) == [(0, "NOT_AUTHENTIC", 0)]
    assert await takes_the_next(stand, sender)


@pytest.mark.parametrize("alter", [lambda header: header[:-1], lambda header: header + b"\0", lambda _: b""])
async def test_a_header_of_another_length_is_refused(stand, sender, alter):
    bad = sender.batch(4)
    bad.header = alter(bad.header)
    with nothing_changes(stand):
        assert refusals(await sender.send(bad)) == [(0, "INVALID_FIELD", 0)]
    assert await takes_the_next(stand, sender)


async def test_one_bad_batch_of_a_message_harms_no_other(stand, sender):
    other = await sender_of(stand)
    bad = sender.batch(4)
    bad.ciphertext = bad.ciphertext[::-1]
    response = await sender.send(bad, other.batch(1, [7]), sender.batch(4, [5]))
    assert refusals(response) == [(0, "NOT_AUTHENTIC", 0)]
    assert response.durable == [0, 1, 4]
    assert stand.stored(other.user) == [(1, 7)]
    assert stand.stored(sender.user) == [(1, 0), (2, 1), (3, 2), (4, 5)]


# --- Repeated, reordered, missing --------------------------------------------------------------------------------


async def test_a_replayed_batch_is_acknowledged_again_and_counted_once(stand, sender):
    replayed = sender.batch(4, [5])
    assert (await sender.send(replayed)).durable == [4]
    with nothing_changes(stand):
        for _ in range(2):
            response = await sender.send(replayed)
            assert (list(response.durable), response.duplicates, refusals(response)) == ([4], 1, [])
        # In one message with itself, and sealed anew as after a restart of the sender.
        again = Sender(sender.stub, sender.owner, sender.user, sender.prekey)
        response = await sender.send(replayed, again.batch(4, [5]), again.batch(2, [1, 2]))
        assert (list(response.durable), response.duplicates, refusals(response)) == ([4, 4, 4], 3, [])
    assert (await again.send(again.batch(5, [6]))).durable == [5]


async def test_the_same_batch_twice_in_one_message_counts_once(stand, sender):
    batch = sender.batch(4, [3])
    response = await sender.send(batch, batch)
    assert (list(response.durable), response.duplicates) == ([4, 4], 1)
    assert stand.stored(sender.user) == [(1, 0), (2, 1), (3, 2), (4, 3)]


async def test_a_replay_from_the_connection_of_another_host_changes_nothing(
    stand, sender, third_party, tmp_path
):
    replayed = sender.batch(1, [0, 1, 2])
    thief = third_party.issue(tmp_path / "tls", "client", "eavesdropper")
    theirs = stand.service.channel(thief).stub(DataOwnerStub)
    with nothing_changes(stand):
        response = (
            await Sender(theirs, sender.owner, sender.user, sender.prekey).send_all(sender.message(replayed))
        )[0]
        assert (response.duplicates, refusals(response)) == (1, [])
    assert await takes_the_next(stand, sender)


async def test_reordered_batches_are_taken_once_they_come_in_order(stand, sender):
    early, late = sender.batch(4, [3]), sender.batch(5, [4])
    response = await sender.send(late, early)
    assert refusals(response) == [(0, "SEQUENCE_MISMATCH", 4)]
    assert response.durable == [4, 4]
    assert (await sender.send(late)).durable == [5]
    assert stand.stored(sender.user) == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]


async def test_messages_of_a_stream_are_taken_in_their_order(stand, sender):
    messages = [sender.message(sender.batch(4 + n, [n])) for n in range(10)]
    answers = await sender.send_all(*messages)
    assert [list(answer.durable) for answer in answers] == [[4 + n] for n in range(10)]
    assert [number for number, _ in stand.stored(sender.user)] == list(range(1, 14))


@pytest.mark.parametrize(
    ("first", "count"),
    [(5, 1), (6, 3), (2**63, 1), (2**64 - 2, 1)],
    ids=["next but one", "far", "2^63", "end"],
)
async def test_a_gap_is_refused_and_the_number_that_is_due_is_named(stand, sender, first, count):
    with nothing_changes(stand):
        response = await sender.send(sender.batch(first, list(range(count))))
        assert refusals(response) == [(0, "SEQUENCE_MISMATCH", 4)]
        assert response.durable == [3]
    assert await takes_the_next(stand, sender)


@pytest.mark.parametrize(("first", "count"), [(3, 2), (1, 4), (0, 4)])
async def test_a_batch_that_overlaps_what_is_durable_is_refused(stand, sender, first, count):
    with nothing_changes(stand):
        response = await sender.send(sender.batch(first, list(range(count))))
        assert refusals(response) == [(0, "SEQUENCE_MISMATCH", 4)]
    assert await takes_the_next(stand, sender)


async def test_a_user_has_a_sequence_of_its_own_at_each_owner(stand, sender):
    comedy = await sender_of(stand, sender.user, "comedy")
    index = len(DRAMA) + len(BOTH)
    assert (await comedy.send(comedy.batch(1, [index, index + 1]))).durable == [2]
    assert stand.stored(sender.user, "comedy") == [(1, index), (2, index + 1)]
    assert await takes_the_next(stand, sender)


async def test_the_same_records_from_many_streams_at_once_count_once(stand):
    user = next(stand.unused)
    senders = [await sender_of(stand, user) for _ in range(6)]
    numbers = range(1, 21)

    async def deliver(sender):
        for first in numbers:
            while True:
                response = await sender.send(sender.batch(first, [first % 20]))
                if not response.refused:
                    break
                assert refusals(response)[0][1] == "SEQUENCE_MISMATCH"

    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as tasks:
        for sender in senders:
            tasks.create_task(deliver(sender))
    assert stand.stored(user) == [(n, n % 20) for n in numbers]


# --- For somebody else -------------------------------------------------------------------------------------------


async def test_a_batch_sealed_for_one_owner_is_refused_by_the_other(stand, sender):
    # For drama's prekey, handed to comedy: comedy does not hold it.
    with nothing_changes(stand):
        message = sender.message(sender.batch(1, [20]), owner=stand.owners["comedy"])
        (response,) = await sender.send_all(message)
        assert refusals(response) == [(0, "UNKNOWN_PREKEY", 0)]
    # For comedy, under the prekey of drama: the owner is part of what is authenticated.
    crossed = Agreement.of_user(sender.user, stand.owners["comedy"], sender.prekey)
    session = SealingSession(crossed, Direction.TO_OWNER, SenderProcess())
    with nothing_changes(stand):
        assert refusals(await sender.send(sender.batch(4, session=session))) == [(0, "NOT_AUTHENTIC", 0)]
    assert await takes_the_next(stand, sender)


async def test_a_batch_in_the_direction_of_replies_is_refused(stand, sender):
    agreement = Agreement.of_user(sender.user, sender.owner, sender.prekey)
    session = SealingSession(agreement, Direction.TO_USER, SenderProcess())
    with nothing_changes(stand):
        assert refusals(await sender.send(sender.batch(4, session=session))) == [(0, "NOT_AUTHENTIC", 0)]
    assert await takes_the_next(stand, sender)


async def test_a_batch_sealed_for_another_run_is_refused(stand, sender):
    held = sender.prekey
    other = PublicPrekey("another", held.prekey_id, held.public, held.expiry, held.signature)
    foreign = Sender(sender.stub, sender.owner, sender.user, other)
    with nothing_changes(stand):
        assert refusals(await sender.send(foreign.batch(4))) == [(0, "NOT_AUTHENTIC", 0)]
    assert await takes_the_next(stand, sender)


async def test_nobody_seals_for_a_user_whose_keys_it_does_not_hold(stand, sender):
    # A host with a certificate and users of its own, which names somebody else's user.
    thief = await sender_of(stand)
    with nothing_changes(stand):
        response = await thief.send(thief.batch(4, [9], user=sender.user))
        assert refusals(response) == [(0, "NOT_AUTHENTIC", 0)]
        # Nor does it learn how many records the owner holds of that user.
        assert response.durable == [0]
    assert await takes_the_next(stand, sender)


@pytest.mark.parametrize("case", ["run", "owner", "no owner", "short owner"])
async def test_a_message_for_no_such_run_or_owner_is_refused_whole(stand, sender, calls, case):
    message = sender.message(sender.batch(4, [11]))
    match case:
        case "run":
            message.run_id = "another"
        case "owner":
            message.owner = Identity.generate().participant_id
        case "no owner":
            message.ClearField("owner")
        case "short owner":
            message.owner = message.owner[:8]
    with nothing_changes(stand):
        why = await calls.refused(lambda: sender.stub.SubmitInteractions(calls.each(message)))
        assert (why.code, why.reason, why.field) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ROUND", "owner")
        batch = message.batches[0]
        assert why.says_nothing_of(sender.user.participant_id, batch.header, batch.ciphertext, "drama-11")
    assert await takes_the_next(stand, sender)


# --- Who may send ------------------------------------------------------------------------------------------------


async def test_a_user_that_nobody_registered_is_refused(stand, sender, third_party):
    stranger = Identity.generate()
    enrolled = (await third_party.enrol("client", "intake-elsewhere", 1)).identities[0]
    for user in (stranger, enrolled, stand.host.identities[-1]):
        unknown = await sender_of(stand, user)
        with nothing_changes(stand):
            response = await unknown.send(unknown.batch(1))
            assert refusals(response) == [(0, "UNKNOWN_PARTICIPANT", 0)]
            assert response.durable == [0]
    assert await takes_the_next(stand, sender)


async def test_a_user_that_is_no_id_at_all_is_refused(stand, sender):
    bad = sender.batch(1)
    for user in (b"", b"short", sender.user.participant_id + b"x"):
        bad.user = user
        with nothing_changes(stand):
            assert refusals(await sender.send(bad)) == [(0, "UNKNOWN_PARTICIPANT", 0)]
    assert await takes_the_next(stand, sender)


async def test_a_user_registered_later_is_taken(stand, cos, third_party, calls):
    late = await third_party.enrol("client", "intake-late", 1)
    sender = await sender_of(stand, late.identities[0], tls=late)
    assert refusals(await sender.send(sender.batch(1))) == [(0, "UNKNOWN_PARTICIPANT", 0)]
    await join(calls, cos, late, RUN)
    assert (await sender.send(sender.batch(1))).durable == [1]


async def test_a_revoked_user_is_refused_and_the_others_of_its_host_are_not(
    stand, sender, third_party, certificates
):
    victim = await sender_of(stand)
    assert (await victim.send(victim.batch(1, [0]))).durable == [1]
    operator = third_party.directory(certificates["operator"])
    await operator.Revoke(RevokeRequest(participants=[victim.user.participant_id]))
    async with asyncio.timeout(SOON_S):
        # Until the owner has heard of it the batch is a duplicate.
        while not (response := await victim.send(victim.batch(1, [0]))).refused:
            await asyncio.sleep(0.02)
    with nothing_changes(stand):
        response = await victim.send(victim.batch(2, [1]))
        assert refusals(response) == [(0, "REVOKED", 0)]
    assert await takes_the_next(stand, sender)


async def test_a_revoked_host_is_cut_off_in_the_middle_of_a_stream(
    stand, sender, third_party, certificates, calls, tmp_path
):
    tls = third_party.issue(tmp_path / "tls", "client", "cut-off")
    theirs = Sender(stand.service.channel(tls).stub(DataOwnerStub), sender.owner, sender.user, sender.prekey)
    proceed = asyncio.Event()

    async def requests():
        yield theirs.message(theirs.batch(4, [3]))
        await proceed.wait()

    stream = theirs.stub.SubmitInteractions(requests(), timeout=30)
    assert (await anext(stream)).durable == [4]
    await third_party.directory(certificates["operator"]).Revoke(
        RevokeRequest(certificates=[tls.identity().fingerprint])
    )
    why = await asyncio.wait_for(calls.refused(stream), SOON_S)
    proceed.set()
    assert (why.code, why.reason) == (grpc.StatusCode.PERMISSION_DENIED, "REVOKED")
    # The user is not revoked: a connection that still holds may bring its records.
    assert (await sender.send(sender.batch(5, [5]))).durable == [5]


@pytest.mark.parametrize("role", ["cos", "data-owner", "client", "thirdparty", "operator"])
@pytest.mark.parametrize("method", [name for name in ALLOWED if "/coterie.v1.DataOwner/" in name])
async def test_each_rpc_is_for_its_roles_only(stand, certificates, calls, method, role):
    with nothing_changes(stand):
        outcome = await calls.with_nothing(stand.service.channel(certificates[role]), method)
    assert (outcome == "WRONG_ROLE") == (role not in ALLOWED[method])


async def test_nobody_delivers_without_a_certificate_or_with_one_of_another_authority(
    stand, sender, third_party, calls, tmp_path
):
    from coterie.crypto.authority import Authority

    foreign = third_party.issue(tmp_path / "tls", "client", "foreign", authority=Authority.create("other", 1))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        stand.service.handshake(foreign)
    call = stand.service.channel(foreign).stub(DataOwnerStub).OwnerInfo(wire.OwnerInfoRequest(), timeout=5)
    assert await calls.code_of(call) == grpc.StatusCode.UNAVAILABLE
    assert await takes_the_next(stand, sender)


async def test_an_expired_certificate_cannot_connect(stand, sender, third_party, calls, tmp_path):
    past = datetime.now(UTC) - timedelta(days=3)
    expired = third_party.issue(tmp_path / "tls", "client", "expired", now=past)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        stand.service.handshake(expired)
    call = stand.service.channel(expired).stub(DataOwnerStub).OwnerInfo(wire.OwnerInfoRequest(), timeout=5)
    assert await calls.code_of(call) == grpc.StatusCode.UNAVAILABLE
    assert await takes_the_next(stand, sender)


async def test_a_certificate_that_expires_on_an_open_connection_sends_nothing_more(
    stand, sender, third_party, calls, tmp_path
):
    issued = datetime.now(UTC) - timedelta(days=1) + timedelta(seconds=3)
    tls = third_party.issue(tmp_path / "tls", "client", "ending", now=issued)
    stub = stand.service.channel(tls).stub(DataOwnerStub)
    question = wire.OwnerInfoRequest(run_id=RUN, owner=sender.owner)
    await stub.OwnerInfo(question)
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                await stub.OwnerInfo(question)
            except grpc.aio.AioRpcError:
                break
            await asyncio.sleep(0.05)
    with nothing_changes(stand):
        batch = sender.batch(4, [11])
        why = await calls.refused(lambda: stub.SubmitInteractions(calls.each(sender.message(batch))))
        assert (why.code, why.reason, why.field) == (
            grpc.StatusCode.UNAUTHENTICATED,
            "BAD_SIGNATURE",
            "certificate",
        )
        assert why.says_nothing_of(sender.user.participant_id, batch.ciphertext)
    assert await takes_the_next(stand, sender)


# --- What is inside ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "items",
    [[len(DRAMA) + len(BOTH)], [10_000], [2**32 - 1], [0, 1, 10_000]],
    ids=["the other owner's", "nobody's", "largest number", "one of three"],
)
async def test_a_record_of_an_item_that_is_not_the_owners_is_refused(stand, sender, items):
    with nothing_changes(stand):
        assert refusals(await sender.send(sender.batch(4, items))) == [(0, "UNKNOWN_ITEM", 0)]
    assert await takes_the_next(stand, sender)


@pytest.mark.parametrize(
    ("payload", "count"),
    [
        (bytes(5), 2),
        (bytes(10), 1),
        (bytes(4), 1),
        (b"", 1),
        (b"\0\0\0\0\2", 1),
        (b"\0\0\0\0\1\0\0\0\0\xff", 2),
        (b"", 0),
        (bytes(5 * 1025), 1025),
    ],
    ids=["one for two", "two for one", "short", "none", "flag 2", "flag 255", "count 0", "count 1025"],
)
async def test_authentic_bytes_that_are_no_records_are_refused(stand, sender, payload, count):
    with nothing_changes(stand):
        response = await sender.send(sender.batch(4, payload=payload, count=count))
        assert refusals(response) == [(0, "INVALID_FIELD", 0)]
    assert await takes_the_next(stand, sender)


async def test_a_message_above_four_mebibytes_is_refused_below_the_servicer(stand, sender, calls):
    message = sender.message(wire.SealedBatch(user=sender.user.participant_id, ciphertext=bytes(5 << 20)))
    with nothing_changes(stand):
        code = await calls.code_of(lambda: sender.stub.SubmitInteractions(calls.each(message)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await takes_the_next(stand, sender)


async def test_too_many_batches_in_one_message_are_refused_whole(stand, sender, calls):
    batch = sender.batch(4, [11])
    with nothing_changes(stand):
        message = sender.message(*[batch] * 1025)
        why = await calls.refused(lambda: sender.stub.SubmitInteractions(calls.each(message)))
        assert (why.code, why.reason, why.field) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "TOO_LARGE",
            "batches",
        )
        assert "1024" in why.expected
        assert why.says_nothing_of(sender.user.participant_id, batch.ciphertext)
    assert await takes_the_next(stand, sender)


async def test_the_largest_message_that_is_allowed_is_taken(stand, sender):
    batches = [sender.batch(4 + n, [n % 20]) for n in range(1024)]
    response = await sender.send(*batches)
    assert list(response.durable) == [4 + 1023] * 1024
    assert len(stand.stored(sender.user)) == 3 + 1024


async def test_an_empty_message_is_answered(stand, sender):
    with nothing_changes(stand):
        response = await sender.send()
        assert (list(response.durable), refusals(response)) == ([], [])


async def test_owner_info_tells_the_number_of_items_and_a_prekey_of_the_owner(stand, sender, calls):
    bundles = {one.participant_id: one for one in saved_bundles(stand.service.state)}
    for name, keys in (("drama", DRAMA), ("comedy", COMEDY)):
        owner = stand.owners[name]
        info = await sender.stub.OwnerInfo(wire.OwnerInfoRequest(run_id=RUN, owner=owner))
        assert info.items == len(keys) + len(BOTH)
        prekey = await prekey_of(sender.stub, owner)
        prekey.verify(bundles[owner].signing_public, int(time.time()))
    why = await calls.refused(sender.stub.OwnerInfo(wire.OwnerInfoRequest(run_id="no", owner=owner)))
    assert (why.reason, why.field) == ("UNKNOWN_ROUND", "owner")


# --- The store ---------------------------------------------------------------------------------------------------


async def test_a_store_that_does_not_write_refuses_everything_and_keeps_what_it_has(stand, sender, calls):
    database = stand.service.state / "data_owner.db"

    def change(statement):
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute(statement)
            connection.commit()

    change("CREATE TRIGGER broken BEFORE INSERT ON batches BEGIN SELECT RAISE(ABORT, 'no'); END")
    try:
        other = await sender_of(stand)
        with nothing_changes(stand):
            batch = sender.batch(4, [11])
            message = sender.message(batch, other.batch(1, [12]))
            why = await calls.refused(lambda: sender.stub.SubmitInteractions(calls.each(message)))
            assert (why.code, why.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
            assert why.says_nothing_of(
                sender.user.participant_id, other.user.participant_id, batch.ciphertext, "drama-11"
            )
            # What is durable is still known, and acknowledged again.
            response = await sender.send(sender.batch(1, [0, 1, 2]))
            assert (list(response.durable), response.duplicates) == ([3], 1)
    finally:
        change("DROP TRIGGER broken")
    assert await takes_the_next(stand, sender)
    assert (await other.send(other.batch(1, [12]))).durable == [1]


async def test_a_sender_that_goes_away_during_the_write_finds_its_records_counted_once(stand, sender):
    batch = sender.batch(4, [3])
    await stand.service.give_up_while_held("data_owner.db", "SubmitInteractions", sender.send(batch))
    # As after a crash of the sender: it sends what it has no acknowledgement for.
    response = await sender.send(batch)
    assert (list(response.durable), response.duplicates) == ([4], 1)
    assert stand.stored(sender.user) == [*enumerate(range(4), 1)]
    assert (await sender.send(sender.batch(5, [4]))).durable == [5]


# --- Restarts and backups ----------------------------------------------------------------------------------------


def copy_store(service, to):
    """Copy the owner's database as a backup does."""
    to.touch(mode=0o600)
    with (
        contextlib.closing(sqlite3.connect(service.state / "data_owner.db")) as live,
        contextlib.closing(sqlite3.connect(to)) as backup,
    ):
        live.backup(backup)


def restore_store(service, backup):
    """Put a backup in the place of the database, as an operator does while the service is down."""
    for file in service.state.glob("data_owner.db*"):
        file.unlink()
    shutil.copy(backup, service.state / "data_owner.db")


@pytest.fixture
async def own_stand(start_member, third_party, cos, operator, calls, tmp_path):
    """An owner of the test's own, which it may stop."""
    run = f"backup-{time.monotonic_ns()}"
    await operator.start(run, owners=1, users=2, epochs=10_000)
    host = await third_party.enrol("client", f"host-{run}", 2)
    await join(calls, cos, host, run)
    service = await asyncio.to_thread(
        start_member,
        "data-owner",
        f"owner-{run}",
        third_party,
        participants=1,
        cos={"address": cos.address, "name": cos.name},
        run=run,
        owners=owners_in(tmp_path, drama=DRAMA),
    )
    owner = saved_bundles(service.state)[0].participant_id
    stand = Stand(service, host, {"drama": owner}, iter(host.identities))

    async def connect(user):
        await service.release()
        stub = service.channel(host).stub(DataOwnerStub)
        return Sender(stub, owner, user, await prekey_of(stub, owner, run), run=run)

    return stand, connect


async def test_a_killed_owner_still_has_what_it_acknowledged(own_stand):
    stand, connect = own_stand
    user = stand.host.identities[0]
    sender = await connect(user)
    kept = sender.batch(1, [0, 1, 2])
    assert (await sender.send(kept)).durable == [3]
    stand.service.kill()
    await asyncio.to_thread(stand.service.start)
    after = await connect(user)
    # The same bytes open also after the restart: the prekey is kept.
    response = await after.send(kept)
    assert (list(response.durable), response.duplicates) == ([3], 1)
    assert (await after.send(sender.batch(4, [3]))).durable == [4]
    assert stand.stored(user) == [(1, 0), (2, 1), (3, 2), (4, 3)]


async def test_an_owner_restored_from_a_backup_says_what_it_has_and_gets_the_rest_once(own_stand, tmp_path):
    stand, connect = own_stand
    user, other = stand.host.identities
    sender = await connect(user)
    assert (await sender.send(sender.batch(1, [0, 1]))).durable == [2]
    copy_store(stand.service, tmp_path / "backup.db")
    assert (await sender.send(sender.batch(3, [2, 3, 4]))).durable == [5]
    theirs = await connect(other)
    assert (await theirs.send(theirs.batch(1, [9]))).durable == [1]
    stand.service.stop()
    restore_store(stand.service, tmp_path / "backup.db")
    await asyncio.to_thread(stand.service.start)

    sender, theirs = await connect(user), None
    # A sender that goes on where it was acknowledged learns what the owner has.
    response = await sender.send(sender.batch(6, [5]))
    assert refusals(response) == [(0, "SEQUENCE_MISMATCH", 3)]
    assert response.durable == [2]
    # It sends everything from there on again: accepted once.
    assert (await sender.send(sender.batch(3, [2, 3, 4, 5]))).durable == [6]
    theirs = await connect(other)
    assert refusals(await theirs.send(theirs.batch(2, [8]))) == [(0, "SEQUENCE_MISMATCH", 1)]
    assert (await theirs.send(theirs.batch(1, [9, 8]))).durable == [2]
    assert stand.stored(user) == [(n + 1, n) for n in range(6)]
    assert stand.stored(other) == [(1, 9), (2, 8)]


async def test_an_owner_restored_to_before_what_it_has_trained_goes_on_with_what_comes_back(
    own_stand, operator, cos, calls, tmp_path
):
    stand, connect = own_stand
    run, user = stand.service.keys["run"], stand.host.identities[0]

    async def comes_to(reached):
        async with asyncio.timeout(SOON_S):
            while not reached(await operator.state(run)):
                await asyncio.sleep(0.02)

    def records(sender, first, last):
        return [sender.batch(n, [n], positive=n % 2 == 0) for n in range(first, last + 1)]

    sender = await connect(user)
    await sender.send(*records(sender, 1, 2))
    copy_store(stand.service, tmp_path / "backup.db")
    # Four more blocks, and an update of at least two of them.
    await sender.send(*records(sender, 3, 11))
    await comes_to(lambda state: state.version >= 1)
    stand.service.stop()
    restore_store(stand.service, tmp_path / "backup.db")
    await asyncio.to_thread(stand.service.start)

    await deliver(calls, cos, stand.host, run)
    await comes_to(lambda state: state.epoch >= 3)
    sender = await connect(user)
    assert refusals(await sender.send(*records(sender, 12, 12))) == [(0, "SEQUENCE_MISMATCH", 3)]
    assert (await sender.send(*records(sender, 3, 12))).durable[-1] == 12
    reached = (await operator.state(run)).epoch
    await comes_to(lambda state: state.epoch >= reached + 2)
    assert stand.stored(user) == [(n, n) for n in range(1, 13)]
    assert stand.service.healthy()


async def test_a_sender_restored_from_a_backup_is_told_that_the_owner_is_ahead(own_stand):
    stand, connect = own_stand
    user = stand.host.identities[0]
    sender = await connect(user)
    assert (await sender.send(sender.batch(1, [0, 1, 2, 3]))).durable == [4]
    # The restored outbox ends at 2: whatever it sends, the owner names 4 and changes nothing.
    restored = await connect(user)
    with nothing_changes(stand):
        response = await restored.send(restored.batch(3, [7]))
        assert (list(response.durable), response.duplicates) == ([4], 1)
        assert list((await restored.send(restored.batch(3, [7, 7, 7]))).durable) == [4]


async def test_an_owner_whose_run_is_stopped_stops_training_and_stays(
    own_stand, operator, cos, calls, certificates
):
    stand, connect = own_stand
    run = stand.service.keys["run"]
    sender = await connect(stand.host.identities[0])
    # Blocks of a negative and a positive each.
    for n in range(8):
        assert (await sender.send(sender.batch(n + 1, [n], positive=bool(n % 2)))).durable == [n + 1]
    await deliver(calls, cos, stand.host, run)
    async with asyncio.timeout(SOON_S):
        while (await operator.state(run)).epoch < 4:
            await asyncio.sleep(0.02)
    await operator.stub.StopRun(StopRunRequest(run_id=run, reason="enough"))
    stopped = (await operator.state(run)).version
    async with asyncio.timeout(SOON_S):
        while "the run has ended" not in stand.service.log.read_text():
            await asyncio.sleep(0.02)
    # Whatever was under way has been answered by now: nothing was applied, and nobody gave up because of it.
    await (
        stand.service.channel(certificates["operator"])
        .stub(DataOwnerStub)
        .Flush(wire.FlushRequest(run_id=run))
    )
    assert (await operator.state(run)).version == stopped
    assert stand.service.healthy()
    assert "cannot go on" not in stand.service.log.read_text()
    assert stand.service.stop() == 0


async def deliver(calls, cos, host, run):
    """Report as a host that everything is delivered."""
    party = calls.party_at(cos, host, run)
    await party.register(
        [
            Registrant(one, bundle, ParticipantKind.PARTICIPANT_KIND_USER)
            for one, bundle in zip(host.identities, host.bundles, strict=True)
        ]
    )
    version, _ = await party.fetch(FetchKind.FETCH_KIND_CATALOGUE)
    status = DeliveryStatus(catalogue_version=version, records=8)
    await party.submit(SubmitKind.SUBMIT_KIND_DELIVERED, RoundRef(run_id=run), status)


async def test_an_owner_before_it_has_joined_refuses_and_is_not_healthy(
    start_member, third_party, cos, certificates, calls, tmp_path
):
    service = await asyncio.to_thread(
        start_member,
        "data-owner",
        "early-owner",
        third_party,
        healthy=False,
        participants=1,
        cos={"address": cos.address, "name": cos.name},
        run="never-started",
        owners=owners_in(tmp_path, drama=DRAMA),
    )
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(service.answers):
            await asyncio.sleep(0.05)
    stub = service.channel(certificates["client"]).stub(DataOwnerStub)
    async with asyncio.timeout(SOON_S):
        # First it waits for the list of revocations, then for the run.
        while (why := await calls.refused(stub.OwnerInfo(wire.OwnerInfoRequest()))).field == "revocations":
            await asyncio.sleep(0.05)
    assert (why.code, why.reason, why.field) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY", "run_id")
    assert not service.healthy()
