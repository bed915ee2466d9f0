"""The orchestration server at its sockets: the test plays data owner, client hosts and operator."""

import asyncio
import hashlib
import itertools
import json
import time
from dataclasses import replace

import grpc
import numpy as np
import pytest

from coterie.crypto.identity import Delegation, Identity
from coterie.net.authorisation import ALLOWED
from coterie.parties.party import Registrant
from coterie.rounds.plan_hash import plan_hash
from coterie.secure_sum.bundles import bundle_to_wire
from coterie.wire.chunks import CHUNK_BYTES, split
from coterie.wire.refusal import reason_name
from coterie.wire.tensor import from_wire, to_wire
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Delegation as WireDelegation
from coterie.wire.v1.common_pb2 import DType, RoundRef, SlotRange, Tensor
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub
from coterie.wire.v1.thirdparty_pb2 import RevokeRequest

SOON_S = 60.0
"""Bound for what happens at once."""

ITEMS = ["zebra", "yak", "xerus", "wolf", "vole"]
DIM, RATE = 4, 0.25
USER = wire.ParticipantKind.PARTICIPANT_KIND_USER
OWNER = wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER
JOIN = wire.RegisterIntent.REGISTER_INTENT_JOIN
LEAVE = wire.RegisterIntent.REGISTER_INTENT_LEAVE
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def people(shared_third_party):
    """Parties with certificates, which each test registers in a run of its own."""

    async def enrol():
        return {
            "host": await shared_third_party.enrol("client", "orchestrated-host", 3),
            "other-host": await shared_third_party.enrol("client", "orchestrated-other", 2),
            "owner": await shared_third_party.enrol("data-owner", "orchestrated-owner", 1),
            "other-owner": await shared_third_party.enrol("data-owner", "orchestrated-rival", 1),
        }

    return asyncio.run(enrol())


def members(
    enrolled, items=(), name="zoo", address="127.0.0.1:1", tls_name="zoo.data-owner.coterie.internal"
):
    """Return how the participants of a party register."""
    if enrolled.role == "client":
        return [
            Registrant(one, b, USER) for one, b in zip(enrolled.identities, enrolled.bundles, strict=True)
        ]
    return [
        Registrant(one, bundle, OWNER, name=name, address=address, tls_name=tls_name, items=items)
        for one, bundle in zip(enrolled.identities, enrolled.bundles, strict=True)
    ]


def floats(*shape, value=1.0, dtype=np.float32):
    return to_wire(np.full(shape, value, dtype))


def numbers(*ids):
    return to_wire(np.array(ids, np.uint32))


def as_ids(ids):
    return ids if isinstance(ids, Tensor) else numbers(*ids)


class World:
    """A run of the test's own with one data owner and a host of three users, in its first epoch."""

    def __init__(self, cos, operator, people, calls, run_id=None):
        self.run = run_id or f"world-{next(NUMBERS)}-{time.monotonic_ns()}"
        self.cos, self.operator, self.people, self.calls = cos, operator, people, calls
        self.owner, self.host = self.party("owner"), self.party("host")
        self.at_owner = cos.channel(people["owner"]).stub(OrchestratorStub)
        self.at_host = cos.channel(people["host"]).stub(OrchestratorStub)

    async def begin(self, *, owners=1, users=3, **changes):
        await self.operator.start(self.run, owners=owners, users=users, **changes)
        await self.owner.register(members(self.people["owner"], ITEMS))
        await self.host.register(members(self.people["host"]))
        return self

    def party(self, who):
        return self.calls.party_at(self.cos, self.people[who], self.run)

    def stub(self, who):
        return self.cos.channel(self.people[who]).stub(OrchestratorStub)

    @property
    def slot(self):
        return self.owner.slots[0]

    async def state(self):
        return await self.operator.state(self.run)

    # --- exchanges -----------------------------------------------------------------------------------------------

    def request(self, gradient=None, sequence=None, users=(), items=(), **fields):
        """Return a request of the owner; with a gradient it has the number 1 unless another is given."""
        request = wire.ExchangeRequest(
            run_id=self.run,
            owner=self.slot,
            sequence=sequence if sequence is not None else int(gradient is not None),
            users=as_ids(users),
            items=as_ids(items),
        )
        if gradient is not None:
            request.gradient.CopyFrom(gradient)
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    def gradient(self, *, users=None, items=(0, 2), value=1.0, **fields):
        """Return a gradient of one block that moves some rows by a quarter of ``value``."""
        users = self.host.slots[:2] if users is None else users
        rows = len(users) if not isinstance(users, Tensor) else 2
        columns = len(items) if not isinstance(items, Tensor) else 2
        usual = {
            "rows_version": 0,
            "epoch": 1,
            "first_block": 0,
            "blocks": 1,
            "loss": 0.5,
            "users": as_ids(users),
            "items": as_ids(items),
            "user_gradient": floats(rows, DIM, value=value),
            "item_gradient": floats(columns, DIM, value=-value),
        }
        return wire.Gradient(**{**usual, **fields})

    async def exchange(self, *arguments, **fields):
        return await self.at_owner.Exchange(self.request(*arguments, **fields))

    async def model(self):
        _, payload = await self.owner.fetch(wire.FetchKind.FETCH_KIND_MODEL)
        return from_wire(Tensor.FromString(payload), np.float32, (None, DIM), field="model")

    async def rows(self):
        _, payload = await self.host.fetch(wire.FetchKind.FETCH_KIND_USER_ROWS)
        return from_wire(Tensor.FromString(payload), np.float32, (None, DIM), field="rows")

    async def everything(self):
        """Return all that a refused call must leave as it was."""
        state = await self.state()
        _, catalogue = await self.owner.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE)
        progress = (await self.exchange()).progress
        model, rows = (await self.model()).tobytes(), (await self.rows()).tobytes()
        return state.SerializeToString(), catalogue, progress.SerializeToString(), model, rows

    async def goes_on(self):
        """Whether the run takes the owner's next gradient, and the model moves by just that."""
        before, rows = await self.model(), await self.rows()
        answer = await self.exchange()
        at = answer.progress
        epoch = max(at.epoch, 1)
        good = self.gradient(rows_version=answer.version, epoch=epoch, first_block=at.blocks)
        after = await self.exchange(good, at.sequence + 1, items=(0, 1))
        assert after.version == answer.version + 1
        assert (after.progress.sequence, after.progress.blocks) == (at.sequence + 1, at.blocks + 1)
        expected = before.copy()
        expected[[0, 2]] += np.float32(RATE)
        assert np.array_equal(await self.model(), expected)
        assert np.array_equal(from_wire(after.item_rows, np.float32, (2, DIM), field="rows"), expected[:2])
        expected = rows.copy()
        expected[:2] -= np.float32(RATE)
        assert np.array_equal(await self.rows(), expected)
        return True

    async def submit(self, *requests, who="host"):
        return await self.stub(who).Submit(self.calls.each(*requests))

    def item(self, kind, payload, *, slots=(), sha256=None, **round_):
        """Return the requests of one submitted item."""
        head = wire.SubmitRequest(
            round=RoundRef(**{"run_id": self.run, **round_}),
            kind=wire.SubmitKind.Value(f"SUBMIT_KIND_{kind}") if isinstance(kind, str) else kind,
            slots=slots,
            sha256=hashlib.sha256(payload).digest() if sha256 is None else sha256,
        )
        requests = []
        for chunk in split(payload):
            request = head if not requests else wire.SubmitRequest()
            request.chunk.CopyFrom(chunk)
            requests.append(request)
        return requests


@pytest.fixture
async def world(cos, operator, people, calls):
    return await World(cos, operator, people, calls).begin()


@pytest.fixture
def unchanged(world):
    """A context in which nothing of the world may change."""

    class Unchanged:
        async def __aenter__(self):
            self.before = await world.everything()

        async def __aexit__(self, kind, *_):
            if kind is None:
                assert await world.everything() == self.before
                assert await world.goes_on()

    return Unchanged()


# --- Who may call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["cos", "data-owner", "client", "thirdparty", "operator"])
@pytest.mark.parametrize(
    "method",
    [name for name in ALLOWED if "/coterie.v1.Orchestrator/" in name or "/coterie.v1.Operator/" in name],
)
async def test_each_rpc_is_for_its_roles_only(cos, certificates, calls, method, role):
    outcome = await calls.with_nothing(cos.channel(certificates[role]), method)
    assert (outcome == "WRONG_ROLE") == (role not in ALLOWED[method])


async def test_a_party_that_is_not_registered_learns_nothing_of_a_run(world, unchanged, calls):
    stranger = world.stub("other-host")
    async with unchanged:
        for call in (
            stranger.Poll(wire.PollRequest(run_id=world.run)),
            stranger.Fetch(wire.FetchRequest(run_id=world.run, kind=wire.FetchKind.FETCH_KIND_MODEL)),
            stranger.Recommend(wire.RecommendRequest(run_id=world.run, slot=world.host.slots[0], k=1)),
        ):
            why = await calls.refused(call)
            assert (why.code, why.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_PARTICIPANT")
        delivered = world.item("DELIVERED", wire.DeliveryStatus().SerializeToString())
        answer = await world.submit(*delivered, who="other-host")
        assert [reason_name(one.reason) for one in answer.refused] == ["UNKNOWN_PARTICIPANT"]
        rival = world.stub("other-owner")
        why = await calls.refused(rival.Exchange(world.request(world.gradient())))
        assert why.reason == "UNKNOWN_PARTICIPANT"


async def test_a_run_that_nobody_started_is_refused_by_every_rpc(world, calls):
    at, none = world.at_host, "no-such-run"
    for call in (
        at.Register(calls.each(wire.RegisterRequest(run_id=none, intent=JOIN))),
        at.Poll(wire.PollRequest(run_id=none)),
        at.Fetch(wire.FetchRequest(run_id=none)),
        at.Recommend(wire.RecommendRequest(run_id=none, k=1)),
        world.at_owner.Exchange(wire.ExchangeRequest(run_id=none)),
        world.operator.stub.StopRun(operating.StopRunRequest(run_id=none)),
        world.operator.stub.ResumeRun(operating.ResumeRunRequest(run_id=none)),
        world.operator.stub.GetRun(operating.GetRunRequest(run_id=none)),
        world.operator.stub.WatchRun(operating.WatchRunRequest(run_id=none)),
        world.operator.stub.GetReport(operating.GetReportRequest(run_id=none)),
    ):
        why = await calls.refused(call)
        assert (why.code, why.reason, why.field) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ROUND", "run_id")


# --- Register ----------------------------------------------------------------------------------------------------


def registration(world, who, **options):
    """Return the messages of a party's registration, to be spoiled."""
    party = world.party(who)
    expiry = int(time.time()) + 3600
    shown = party._fingerprint()
    participants = [party._participant(one, shown, expiry) for one in members(world.people[who], **options)]
    return wire.RegisterRequest(run_id=world.run, intent=JOIN, participants=participants)


def signed(identity, fingerprint, run, expiry):
    made = Delegation.sign(identity, fingerprint, run, expiry)
    return WireDelegation(
        certificate_fingerprint=made.certificate_fingerprint,
        run_id=made.run_id,
        expiry=made.expiry,
        signature=made.signature,
    )


async def test_registering_again_gives_the_same_slots_and_the_plan_with_its_hash(world):
    owner, host = list(world.owner.slots), list(world.host.slots)
    assert (owner, host) == ([0], [1, 2, 3])
    again = world.party("host")
    await again.register(members(world.people["host"]))
    assert again.slots == host
    assert again.plan == world.calls.plan(world.run)
    other = world.party("other-host")
    await other.register(members(world.people["other-host"]))
    assert other.slots == [4, 5]
    assert (await world.state()).users == 5


SPOILT = {
    "no delegation": lambda one, w: one.ClearField("delegation"),
    "a delegation to another certificate": lambda one, w: one.delegation.CopyFrom(
        signed(w.people["host"].identities[0], bytes(32), w.run, 2**40)
    ),
    "a delegation for another run": lambda one, w: one.delegation.CopyFrom(
        signed(w.people["host"].identities[0], w.people["host"].fingerprint, "other", 2**40)
    ),
    "a delegation that has expired": lambda one, w: one.delegation.CopyFrom(
        signed(w.people["host"].identities[0], w.people["host"].fingerprint, w.run, 1)
    ),
    "a delegation by somebody else": lambda one, w: one.delegation.CopyFrom(
        signed(Identity.generate(), w.people["host"].fingerprint, w.run, 2**40)
    ),
    "a longer delegation than was signed": lambda one, w: setattr(
        one.delegation, "expiry", one.delegation.expiry + 1
    ),
    "no bundle": lambda one, w: one.ClearField("bundle"),
    "a bundle without countersignature": lambda one, w: one.bundle.ClearField("countersignature"),
    "a bundle without its party": lambda one, w: one.bundle.ClearField("party"),
    "another party": lambda one, w: setattr(one.bundle, "party", "client/elsewhere"),
    "another agreement key": lambda one, w: setattr(
        one.bundle, "agreement_public", Identity.generate().agreement_public
    ),
    "another version": lambda one, w: setattr(one.bundle, "version", one.bundle.version + 1),
    "a longer validity": lambda one, w: setattr(one.bundle, "not_after", one.bundle.not_after + 1),
    "a key of another length": lambda one, w: setattr(one.bundle, "signing_public", b"short"),
    "a bundle of its own making": lambda one, w: one.bundle.CopyFrom(
        bundle_to_wire(replace(Identity.generate().bundle(1, (0, 2**40)), countersignature=bytes(64)))
    ),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
async def test_a_host_speaks_for_a_user_only_with_its_delegation_and_a_countersigned_bundle(
    world, unchanged, calls, spoil
):
    message = registration(world, "host")
    spoil(message.participants[0], world)
    async with unchanged:
        why = await calls.refused(lambda: world.at_host.Register(calls.each(message)))
        assert (why.code, why.reason) == (grpc.StatusCode.UNAUTHENTICATED, "BAD_SIGNATURE")
        assert why.field in ("participants", "bundle")


async def test_one_bad_participant_keeps_the_whole_registration_out(world, unchanged, calls):
    message = registration(world, "other-host")
    message.participants[1].ClearField("delegation")
    async with unchanged:
        why = await calls.refused(lambda: world.stub("other-host").Register(calls.each(message)))
        assert why.reason == "BAD_SIGNATURE"


async def test_a_delegation_to_one_host_is_worth_nothing_to_another(world, unchanged, calls):
    stolen = registration(world, "host")
    async with unchanged:
        why = await calls.refused(lambda: world.stub("other-host").Register(calls.each(stolen)))
        assert (why.reason, why.field) == ("BAD_SIGNATURE", "participants")


async def test_a_user_that_delegates_twice_stays_with_the_host_that_enrolled_it(world, unchanged, calls):
    victim = world.people["host"].identities[0]
    message = registration(world, "host")
    del message.participants[1:]
    message.participants[0].delegation.CopyFrom(
        signed(victim, world.people["other-host"].fingerprint, world.run, 2**40)
    )
    async with unchanged:
        why = await calls.refused(lambda: world.stub("other-host").Register(calls.each(message)))
        assert (why.code, why.reason) == (grpc.StatusCode.UNAUTHENTICATED, "BAD_SIGNATURE")
        assert "is of" in why.text
        assert why.says_nothing_of(victim.participant_id)


@pytest.mark.parametrize(
    ("who", "change", "reason", "field"),
    [
        ("host", lambda m: setattr(m.participants[0], "kind", OWNER), "INVALID_FIELD", "participants.kind"),
        ("host", lambda m: m.participants[0].ClearField("kind"), "INVALID_FIELD", "participants.kind"),
        ("owner", lambda m: setattr(m.participants[0], "kind", USER), "INVALID_FIELD", "participants.kind"),
        ("owner", lambda m: m.participants[0].ClearField("name"), "INVALID_FIELD", "participants.address"),
        ("owner", lambda m: m.participants[0].ClearField("address"), "INVALID_FIELD", "participants.address"),
        ("owner", lambda m: m.participants[0].ClearField("tls_name"), "INVALID_FIELD", "participants.address"),
        ("owner", lambda m: setattr(m, "items_of", 1) or m.items.append("ant"), "INVALID_FIELD", "items_of"),
        ("owner", lambda m: m.items.append(""), "INVALID_FIELD", "items"),
        ("host", lambda m: m.items.append("ant"), "INVALID_FIELD", "items"),
        ("host", lambda m: setattr(m.participants[0], "name", "ant bee"), "INVALID_FIELD", "participants.name"),
        ("host", lambda m: setattr(m.participants[0], "address", "ant:1"), "INVALID_FIELD", "participants.name"),
        ("host", lambda m: setattr(m.participants[0], "tls_name", "ant.bee"), "INVALID_FIELD", "participants.name"),
        ("host", lambda m: m.ClearField("intent"), "INVALID_FIELD", "intent"),
        ("host", lambda m: m.ClearField("participants"), "INVALID_FIELD", "items_of"),
        ("owner", lambda m: m.items.extend(["ant"] * 20_001), "TOO_LARGE", "participants"),
        ("host", lambda m: m.participants.extend([m.participants[0]] * 998), "TOO_LARGE", "participants"),
    ],
)  # fmt: skip
async def test_a_registration_that_does_not_fit_is_refused(
    world, unchanged, calls, who, change, reason, field
):
    message = registration(world, who)
    change(message)
    async with unchanged:
        why = await calls.refused(lambda: world.stub(who).Register(calls.each(message)))
        assert (why.reason, why.field) == (reason, field)
        assert why.expected


async def test_an_empty_registration_and_an_oversize_one_are_refused(world, unchanged, calls):
    async with unchanged:
        why = await calls.refused(lambda: world.at_host.Register(calls.each()))
        assert (why.code, why.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        huge = wire.RegisterRequest(run_id=world.run, intent=JOIN, items=["x" * (5 << 20)])
        code = await calls.code_of(lambda: world.at_owner.Register(calls.each(huge)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_registration_of_thousands_comes_in_several_messages(world, people):
    # The same participants again: a slot belongs to a participant, however often it is named.
    message = registration(world, "host")
    many = [wire.RegisterRequest(run_id=world.run, intent=JOIN, participants=message.participants)] * 400
    answer = await world.at_host.Register(world.calls.each(*many))
    slots = [slot for part in answer.slots for slot in range(part.first, part.first + part.count)]
    assert slots == world.host.slots * 400
    assert answer.plan_hash == plan_hash(answer.plan)


async def test_a_revoked_participant_cannot_register(world, third_party, certificates, calls):
    victim = await third_party.enrol("client", f"revoked-{next(NUMBERS)}", 1)
    await third_party.directory(certificates["operator"]).Revoke(
        RevokeRequest(participants=[victim.identities[0].participant_id])
    )
    world.people = {**world.people, "victim": victim}
    # Until the COS has heard of it: to leave changes nothing, and is checked like joining.
    message = registration(world, "victim")
    message.intent = LEAVE
    async with asyncio.timeout(SOON_S):
        while True:
            why = await calls.refused(lambda: world.stub("victim").Register(calls.each(message)))
            if why.reason == "REVOKED":
                break
            await asyncio.sleep(0.05)
    assert why.code == grpc.StatusCode.PERMISSION_DENIED
    assert why.says_nothing_of(victim.identities[0].participant_id)


async def test_who_never_joined_cannot_leave(world, unchanged, calls):
    async with unchanged:
        message = wire.RegisterRequest(run_id=world.run, intent=LEAVE)
        why = await calls.refused(lambda: world.stub("other-host").Register(calls.each(message)))
        assert why.reason == "UNKNOWN_PARTICIPANT"


# --- The item -> owners table ------------------------------------------------------------------------------------


async def table(party):
    """Return the catalogue as {item: names of owners}."""
    _, payload = await party.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE)
    catalogue = wire.Catalogue.FromString(payload)
    positions = iter(catalogue.owner_positions)
    found = {
        key: [catalogue.owners[next(positions)].name for _ in range(count)]
        for key, count in zip(catalogue.items, catalogue.owner_counts, strict=True)
    }
    assert next(positions, None) is None
    return catalogue, found


async def test_the_catalogue_says_which_owners_hold_each_item_and_where_they_are(world):
    rival = world.party("other-owner")
    await rival.register(members(world.people["other-owner"], ["wolf", "ant"], name="ants", address="ants:5"))
    catalogue, found = await table(world.host)
    assert found == {
        "zebra": ["zoo"],
        "yak": ["zoo"],
        "xerus": ["zoo"],
        "wolf": ["zoo", "ants"],
        "vole": ["zoo"],
        "ant": ["ants"],
    }
    assert [(one.slot, one.name, one.address) for one in catalogue.owners] == [
        (world.slot, "zoo", "127.0.0.1:1"),
        (rival.slots[0], "ants", "ants:5"),
    ]
    assert catalogue.owners[1].bundle == bundle_to_wire(world.people["other-owner"].bundles[0])


async def test_an_owner_that_leaves_is_no_longer_in_the_catalogue_and_items_keep_their_places(world):
    rival = world.party("other-owner")
    await rival.register(members(world.people["other-owner"], ["ant", "wolf"], name="ants"))
    before, _ = await table(world.host)
    await rival.leave()
    after, found = await table(world.host)
    assert after.version > before.version
    assert list(after.items) == list(before.items)
    assert (found["wolf"], found["ant"]) == (["zoo"], [])
    # It may come back, with other items: those that are new are added at the end.
    await rival.register(members(world.people["other-owner"], ["bee", "ant"], name="ants"))
    again, found = await table(world.host)
    assert list(again.items) == [*before.items, "bee"]
    assert (found["wolf"], found["ant"], found["bee"]) == (["zoo"], ["ants"], ["ants"])


async def test_an_owner_that_registers_again_makes_hosts_look_whether_it_still_has_what_they_sent(world):
    await deliver(world)
    before, held = await table(world.host)
    assert not (await world.at_host.Poll(wire.PollRequest(run_id=world.run))).tasks
    await world.owner.register(members(world.people["owner"], ITEMS))
    after, again = await table(world.host)
    assert (after.version, again) == (before.version + 1, held)
    (task,) = (await world.at_host.Poll(wire.PollRequest(run_id=world.run))).tasks
    assert (task.kind, task.version) == (wire.TaskKind.TASK_KIND_DELIVER, after.version)


async def test_a_party_that_left_is_not_lost_as_well(cos, operator, people, calls):
    world = World(cos, operator, people, calls)
    await world.begin(party_s=1.0)
    rival = world.party("other-owner")
    await rival.register(members(world.people["other-owner"], ["ant"], name="ants"))
    cursor = (await rival.stub.Poll(wire.PollRequest(run_id=world.run))).revision
    held = asyncio.create_task(
        rival.stub.Poll(wire.PollRequest(run_id=world.run, cursor=cursor, hold_ms=20_000))
    )
    await asyncio.sleep(0)
    await rival.leave()
    await held
    # The host falls silent twice, and is lost the second time well after the owner would be.
    changes = []
    async with asyncio.timeout(SOON_S):
        async for event in operator.stub.WatchRun(operating.WatchRunRequest(run_id=world.run)):
            if event.HasField("party"):
                changes.append((event.party.party, event.party.change))
            lost = changes.count(("client/orchestrated-host", "lost"))
            if lost == 2:
                break
            if lost and ("client/orchestrated-host", "returned") not in changes:
                await world.at_host.Poll(wire.PollRequest(run_id=world.run))
    later = changes[changes.index(("data-owner/orchestrated-rival", "left")) + 1 :]
    assert "data-owner/orchestrated-rival" not in {party for party, _ in later}


# --- Poll --------------------------------------------------------------------------------------------------------


async def test_asking_twice_gives_the_same_tasks(world):
    question = wire.PollRequest(run_id=world.run)
    first, second = await world.at_owner.Poll(question), await world.at_owner.Poll(question)
    assert first == second
    (task,) = first.tasks
    assert (task.kind, task.round.round) == (wire.TaskKind.TASK_KIND_INTAKE, 1)
    assert [(one.first, one.count) for one in task.slots] == [(world.slot, 1)]
    assert not task.flush
    (task,) = (await world.at_host.Poll(question)).tasks
    assert task.kind == wire.TaskKind.TASK_KIND_DELIVER
    assert task.version == (await table(world.host))[0].version


async def test_a_poll_waits_until_its_tasks_are_others_than_with_its_cursor(world):
    cursor = (await world.at_host.Poll(wire.PollRequest(run_id=world.run))).revision
    held = wire.PollRequest(run_id=world.run, cursor=cursor, hold_ms=20_000)
    waiting = asyncio.create_task(world.at_host.Poll(held))
    short = wire.PollRequest(run_id=world.run, cursor=cursor, hold_ms=50)
    assert (await world.at_host.Poll(short)).revision == cursor
    assert not waiting.done()
    await world.party("other-host").register(members(world.people["other-host"]))
    assert (await world.at_host.Poll(short)).revision >= cursor
    assert not waiting.done()
    rival = members(world.people["other-owner"], ["ant"], name="ants")
    await world.party("other-owner").register(rival)
    assert (await asyncio.wait_for(waiting, SOON_S)).revision > cursor


async def test_before_everybody_has_come_there_is_nothing_to_do(cos, operator, people, calls):
    world = await World(cos, operator, people, calls).begin(owners=2)
    question = wire.PollRequest(run_id=world.run)
    assert not (await world.at_host.Poll(question)).tasks
    assert not (await world.at_owner.Poll(question)).tasks
    assert (await world.state()).phase == operating.RunPhase.RUN_PHASE_GATHER
    why = await calls.refused(world.at_owner.Exchange(world.request(world.gradient())))
    assert (why.reason, why.field) == ("UNKNOWN_ROUND", "gradient.epoch")


# --- Fetch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "kind", "version", "reason", "field"),
    [
        ("host", "MODEL", 99, "UNKNOWN_ROUND", "version"),
        ("owner", "MODEL", 2**63, "UNKNOWN_ROUND", "version"),
        ("host", "USER_ROWS", 1, "UNKNOWN_ROUND", "version"),
        ("host", "UNSPECIFIED", 0, "INVALID_FIELD", "kind"),
        ("host", "ROSTER", 0, "INVALID_FIELD", "kind"),
        ("owner", 17, 0, "INVALID_FIELD", "kind"),
    ],
)
async def test_what_is_not_there_or_not_for_the_caller_cannot_be_fetched(
    world, unchanged, calls, who, kind, version, reason, field
):
    number = wire.FetchKind.Value(f"FETCH_KIND_{kind}") if isinstance(kind, str) else kind
    async with unchanged:
        request = wire.FetchRequest(run_id=world.run, kind=number, version=version)
        why = await calls.refused(world.stub(who).Fetch(request))
        assert (why.reason, why.field) == (reason, field)
        assert why.expected


async def test_a_host_gets_the_rows_of_its_own_users_and_the_roster_is_for_owners(world):
    other = world.party("other-host")
    await other.register(members(world.people["other-host"]))
    await world.exchange(world.gradient(users=[4]))
    assert len(await world.rows()) == 3
    _, payload = await other.fetch(wire.FetchKind.FETCH_KIND_USER_ROWS)
    rows = from_wire(Tensor.FromString(payload), np.float32, (2, DIM), field="rows")
    untouched = np.linalg.norm(rows, axis=1) < RATE
    # The gradient was for slot 4, the first of the other host.
    assert untouched.tolist() == [False, True]
    _, payload = await world.owner.fetch(wire.FetchKind.FETCH_KIND_ROSTER)
    roster = from_wire(Tensor.FromString(payload), np.uint8, (6, 32), field="roster")
    ids = [one.participant_id for who in ("host", "other-host") for one in world.people[who].identities]
    assert [row.tobytes() for row in roster] == [bytes(32), *ids]


async def test_what_the_caller_holds_is_not_sent_again(world):
    version, payload = await world.host.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE)
    sha256 = hashlib.sha256(payload).digest()
    again = await world.host.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE, held_sha256=sha256)
    assert again == (version, None)
    for held in (bytes(32), sha256[:31]):
        assert await world.host.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE, held_sha256=held) == (
            version,
            payload,
        )


async def test_a_model_larger_than_a_message_comes_in_chunks(cos, operator, people, calls):
    world = World(cos, operator, people, calls)
    await operator.start(world.run, owners=1, users=3, dim=64)
    keys = [f"item-{n}" for n in range(20_000)]
    await world.owner.register(members(people["owner"], keys))
    request = wire.FetchRequest(run_id=world.run, kind=wire.FetchKind.FETCH_KIND_MODEL)
    answers = [one async for one in world.at_owner.Fetch(request)]
    size = len(keys) * 64 * 4
    assert answers[0].total_bytes > size > 4 << 20
    assert len(answers) == -(-answers[0].total_bytes // CHUNK_BYTES)
    assert all(len(one.chunk.data) == CHUNK_BYTES for one in answers[:-1])
    assert not any(one.sha256 or one.total_bytes for one in answers[1:])
    payload = b"".join(one.chunk.data for one in answers)
    assert hashlib.sha256(payload).digest() == answers[0].sha256
    assert from_wire(Tensor.FromString(payload), np.float32, (20_000, 64), field="model").any()


# --- Exchange: gradients -----------------------------------------------------------------------------------------


def cut(tensor, by=1):
    return Tensor(dtype=tensor.dtype, shape=tensor.shape, data=tensor.data[:-by])


BAD_GRADIENTS = {
    "NaN": ({"item_gradient": floats(2, DIM, value=np.nan)}, "NOT_FINITE", "gradient.item_gradient"),
    "infinite": ({"user_gradient": floats(2, DIM, value=np.inf)}, "NOT_FINITE", "gradient.user_gradient"),
    "minus infinite": (
        {"user_gradient": floats(2, DIM, value=-np.inf)},
        "NOT_FINITE",
        "gradient.user_gradient",
    ),
    "NaN loss": ({"loss": float("nan")}, "NOT_FINITE", "gradient.loss"),
    "infinite loss": ({"loss": float("inf")}, "NOT_FINITE", "gradient.loss"),
    "a row too many": ({"item_gradient": floats(3, DIM)}, "WRONG_SHAPE", "gradient.item_gradient"),
    "a column too many": ({"item_gradient": floats(2, DIM + 1)}, "WRONG_SHAPE", "gradient.item_gradient"),
    "one axis": ({"user_gradient": floats(2 * DIM)}, "WRONG_SHAPE", "gradient.user_gradient"),
    "transposed": ({"user_gradient": floats(DIM, 2)}, "WRONG_SHAPE", "gradient.user_gradient"),
    "no gradient": ({"item_gradient": Tensor()}, "WRONG_SHAPE", "gradient.item_gradient"),
    "too few bytes": ({"item_gradient": cut(floats(2, DIM))}, "WRONG_SHAPE", "gradient.item_gradient"),
    "negative length": (
        {"item_gradient": Tensor(dtype=DType.DTYPE_FLOAT32, shape=[-2, -DIM], data=bytes(32))},
        "WRONG_SHAPE",
        "gradient.item_gradient",
    ),
    "huge shape": (
        {"item_gradient": Tensor(dtype=DType.DTYPE_FLOAT32, shape=[2**62, 2**62], data=bytes(32))},
        "WRONG_SHAPE",
        "gradient.item_gradient",
    ),
    "double precision": (
        {"item_gradient": floats(2, DIM, dtype=np.float64)},
        "WRONG_SHAPE",
        "gradient.item_gradient",
    ),
    "no such type": (
        {"item_gradient": Tensor(dtype=99, shape=[2, DIM], data=bytes(32))},
        "WRONG_SHAPE",
        "gradient.item_gradient",
    ),
    "ids as floats": ({"items": floats(2)}, "WRONG_SHAPE", "gradient.items"),
    "unknown item": ({"items": numbers(0, 5)}, "UNKNOWN_ITEM", "gradient.items"),
    "an item far beyond": ({"items": numbers(0, 2**32 - 1)}, "UNKNOWN_ITEM", "gradient.items"),
    "unknown user": ({"users": numbers(1, 4)}, "UNKNOWN_PARTICIPANT", "gradient.users"),
    "an item twice": ({"items": numbers(2, 2)}, "INVALID_FIELD", "gradient.items"),
    "items out of order": ({"items": numbers(2, 0)}, "INVALID_FIELD", "gradient.items"),
    "no blocks": ({"blocks": 0}, "SEQUENCE_MISMATCH", "gradient.first_block"),
    "a block left out": ({"first_block": 1}, "SEQUENCE_MISMATCH", "gradient.first_block"),
    "an epoch that has not begun": ({"epoch": 2}, "UNKNOWN_ROUND", "gradient.epoch"),
    "no epoch": ({"epoch": 0}, "UNKNOWN_ROUND", "gradient.epoch"),
    "rows of the future": ({"rows_version": 1}, "STALE", "gradient.rows_version"),
    "rows of the far future": ({"rows_version": 2**64 - 1}, "STALE", "gradient.rows_version"),
}


@pytest.mark.parametrize(("fields", "reason", "field"), BAD_GRADIENTS.values(), ids=BAD_GRADIENTS)
async def test_a_gradient_that_must_not_reach_the_model_is_refused(
    world, unchanged, calls, fields, reason, field
):
    async with unchanged:
        why = await calls.refused(world.at_owner.Exchange(world.request(world.gradient(**fields))))
        assert (why.reason, why.field) == (reason, field)
        assert why.expected
        assert why.code in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.NOT_FOUND,
        )


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"owner": 1}, "UNKNOWN_PARTICIPANT", "slot"),
        ({"owner": 99}, "UNKNOWN_PARTICIPANT", "slot"),
        ({"sequence": 2}, "SEQUENCE_MISMATCH", "sequence"),
        ({"sequence": 2**64 - 1}, "SEQUENCE_MISMATCH", "sequence"),
        ({"sequence": 0}, "INVALID_FIELD", "sequence"),
        ({"users": numbers(4)}, "UNKNOWN_PARTICIPANT", "users"),
        ({"items": numbers(5)}, "UNKNOWN_ITEM", "items"),
        ({"items": numbers(1, 1)}, "INVALID_FIELD", "items"),
        ({"items": floats(2)}, "WRONG_SHAPE", "items"),
        ({"run_id": "none"}, "UNKNOWN_ROUND", "run_id"),
    ],
)
async def test_an_exchange_around_a_good_gradient_that_does_not_fit_is_refused(
    world, unchanged, calls, fields, reason, field
):
    async with unchanged:
        why = await calls.refused(world.at_owner.Exchange(world.request(world.gradient(), **fields)))
        assert (why.reason, why.field) == (reason, field)


async def test_an_owner_neither_reads_nor_moves_rows_of_items_that_are_not_its_own(world, calls):
    rival = world.party("other-owner")
    await rival.register(members(world.people["other-owner"], ["wolf", "ant"], name="ants"))
    ant = 5
    before = await world.everything()
    for request in (
        world.request(world.gradient(items=(0, ant))),
        world.request(items=(0, ant)),
    ):
        why = await calls.refused(world.at_owner.Exchange(request))
        assert (why.code, why.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ITEM")
        assert why.field in ("gradient.items", "items")
    assert await world.everything() == before
    # What two owners hold, both may move.
    theirs = world.request(world.gradient(items=(3, ant)), owner=rival.slots[0])
    assert (await world.stub("other-owner").Exchange(theirs)).version == 1
    assert await world.goes_on()


async def test_a_gradient_without_a_sequence_number_is_refused(world, unchanged, calls):
    async with unchanged:
        why = await calls.refused(world.at_owner.Exchange(world.request(world.gradient(), sequence=0)))
        assert (why.reason, why.field) == ("INVALID_FIELD", "sequence")


async def test_a_cos_reports_the_exchanges_that_an_owner_says_are_lost_and_takes_the_next(world):
    request = operating.GetReportRequest(run_id=world.run)

    async def lost():
        report = json.loads((await world.operator.stub.GetReport(request)).json)
        return [(one["owner"], one["first"], one["last"]) for one in report["lost_exchanges"]]

    assert await lost() == []
    for _ in range(2):
        # An owner that got no answer says so again.
        answer = await world.at_owner.Exchange(world.request(sequence=5))
        assert answer.progress.sequence == 0
    assert await lost() == [(world.slot, 1, 5)]
    assert (await world.at_owner.Exchange(world.request(world.gradient()))).progress.sequence == 1
    # Nothing is lost of what the COS has.
    await world.at_owner.Exchange(world.request(sequence=1))
    assert await lost() == [(world.slot, 1, 5)]


async def test_nobody_exchanges_for_the_owner_of_another_party(world, unchanged, calls):
    rival = world.party("other-owner")
    await rival.register(members(world.people["other-owner"], ["ant"], name="ants"))
    async with unchanged:
        call = world.stub("other-owner").Exchange(world.request(world.gradient()))
        why = await calls.refused(call)
        assert (why.code, why.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_PARTICIPANT")


async def test_a_retry_is_answered_again_and_applied_once(world):
    first = world.request(world.gradient(), items=(0, 1))
    answer = await world.at_owner.Exchange(first)
    model = await world.model()
    for _ in range(3):
        assert await world.at_owner.Exchange(first) == answer
    together = await asyncio.gather(*[world.at_owner.Exchange(first) for _ in range(5)])
    assert all(one == answer for one in together)
    assert np.array_equal(await world.model(), model)
    assert (await world.state()).version == 1
    assert await world.goes_on()


async def test_a_number_with_other_bytes_is_a_conflict_and_an_old_number_is_too_late(world, unchanged, calls):
    await world.exchange(world.gradient(), 1)
    second = world.gradient(rows_version=1, first_block=1)
    await world.exchange(second, 2)
    async with unchanged:
        other = world.gradient(rows_version=1, first_block=1, value=2.0)
        why = await calls.refused(world.at_owner.Exchange(world.request(other, 2)))
        assert (why.code, why.reason) == (grpc.StatusCode.ALREADY_EXISTS, "CONFLICT")
        why = await calls.refused(world.at_owner.Exchange(world.request(world.gradient(), 1)))
        assert (why.reason, why.expected) == ("SEQUENCE_MISMATCH", "3")
        # The next number does not make old blocks count again.
        again = world.gradient(rows_version=2, first_block=1)
        why = await calls.refused(world.at_owner.Exchange(world.request(again, 3)))
        assert (why.reason, why.field) == ("SEQUENCE_MISMATCH", "gradient.first_block")


async def test_the_same_gradient_from_many_calls_at_once_is_applied_once(world):
    requests = [world.request(world.gradient(value=1.0 + n)) for n in range(8)]

    async def attempt(request):
        try:
            return await world.at_owner.Exchange(request)
        except grpc.aio.AioRpcError as error:
            return error.code()

    answers = await asyncio.gather(*map(attempt, requests))
    assert sum(isinstance(one, wire.ExchangeResponse) for one in answers) == 1
    assert answers.count(grpc.StatusCode.ALREADY_EXISTS) == 7
    assert (await world.state()).version == 1


async def test_a_gradient_on_rows_that_are_too_old_is_refused_and_one_at_the_bound_is_not(world, calls):
    for n in range(3):  # max_staleness of the plan
        await world.exchange(world.gradient(rows_version=n, first_block=n), n + 1)
    at_the_bound = world.gradient(rows_version=0, first_block=3)
    await world.exchange(at_the_bound, 4)
    before = await world.everything()
    why = await calls.refused(
        world.at_owner.Exchange(world.request(world.gradient(rows_version=0, first_block=4), 5))
    )
    assert (why.code, why.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE")
    assert "3" in why.expected
    assert await world.everything() == before
    report = json.loads(
        (await world.operator.stub.GetReport(operating.GetReportRequest(run_id=world.run))).json
    )
    assert report["staleness"] == {"max_staleness": 3, "refused": 1, "histogram": {"0": 3, "3": 1}}
    # Computed again on fresh rows, under the same number, it counts.
    assert (await world.exchange(world.gradient(rows_version=4, first_block=4), 5)).version == 5


async def test_a_user_whose_bias_is_fixed_cannot_be_moved_there(cos, operator, people, calls):
    world = await World(cos, operator, people, calls).begin(item_bias=True)
    before = await world.everything()
    why = await calls.refused(world.at_owner.Exchange(world.request(world.gradient())))
    assert (why.reason, why.field) == ("INVALID_FIELD", "gradient.user_gradient")
    assert await world.everything() == before
    moved = np.ones((2, DIM), np.float32)
    moved[:, -1] = 0
    assert (await world.exchange(world.gradient(user_gradient=to_wire(moved)))).version == 1
    assert (await world.rows())[:, -1].tolist() == [1, 1, 1]


async def test_an_oversize_exchange_is_refused_below_the_servicer(world, unchanged, calls):
    async with unchanged:
        huge = world.gradient(item_gradient=Tensor(dtype=DType.DTYPE_FLOAT32, data=bytes(5 << 20)))
        code = await calls.code_of(world.at_owner.Exchange(world.request(huge)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_stopped_run_takes_no_gradient_and_tells_everybody_why(world, calls):
    await world.exchange(world.gradient())
    model = await world.model()
    await world.operator.stub.StopRun(operating.StopRunRequest(run_id=world.run, reason="enough"))
    for stub in (world.at_owner, world.at_host):
        (task,) = (await stub.Poll(wire.PollRequest(run_id=world.run))).tasks
        assert (task.kind, task.reason) == (wire.TaskKind.TASK_KIND_FINISH, "enough")
    late = world.request(world.gradient(rows_version=1, first_block=1), 2)
    why = await calls.refused(world.at_owner.Exchange(late))
    assert (why.code, why.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
    assert np.array_equal(await world.model(), model)
    state = await world.state()
    assert (state.phase, state.reason) == (operating.RunPhase.RUN_PHASE_FAILED, "enough")
    # Stopping again changes nothing, not even the reason.
    await world.operator.stub.StopRun(operating.StopRunRequest(run_id=world.run, reason="again"))
    assert (await world.state()).reason == "enough"
    why = await calls.refused(world.operator.stub.ResumeRun(operating.ResumeRunRequest(run_id=world.run)))
    assert why.reason == "WRONG_STATE"
    assert "the run has failed for good: enough" in why.text


# --- Recommend ---------------------------------------------------------------------------------------------------


async def test_recommendations_are_the_best_scores_of_the_users_own_rows(world):
    await world.exchange(world.gradient(value=3.0))
    model, rows = await world.model(), await world.rows()
    for k in (1, 3, 5, 10_000):
        request = wire.RecommendRequest(run_id=world.run, slot=world.host.slots[1], k=k)
        answer = await world.at_host.Recommend(request)
        items = from_wire(answer.items, np.uint32, (min(k, 5),), field="items")
        scores = model @ rows[1]
        assert items.tolist() == np.argsort(-scores, kind="stable")[:k].tolist()
        got = from_wire(answer.scores, np.float32, (len(items),), field="scores")
        assert np.allclose(got, scores[items])
        assert answer.version == 1


async def test_before_any_owner_has_come_there_is_nothing_to_recommend(cos, operator, people, calls):
    world = World(cos, operator, people, calls)
    await operator.start(world.run)
    await world.host.register(members(people["host"]))
    request = wire.RecommendRequest(run_id=world.run, slot=world.host.slots[0], k=5)
    answer = await world.at_host.Recommend(request)
    assert list(answer.items.shape) == list(answer.scores.shape) == [0]


@pytest.mark.parametrize(
    ("slot", "k", "reason", "field"),
    [
        (0, 1, "UNKNOWN_PARTICIPANT", "slot"),
        (4, 1, "UNKNOWN_PARTICIPANT", "slot"),
        (2**32 - 1, 1, "UNKNOWN_PARTICIPANT", "slot"),
        (1, 0, "INVALID_FIELD", "k"),
        (1, 10_001, "INVALID_FIELD", "k"),
    ],
)
async def test_a_recommendation_for_no_user_of_the_caller_or_of_no_items_is_refused(
    world, unchanged, calls, slot, k, reason, field
):
    # Slot 4 is a user, and another host's.
    await world.party("other-host").register(members(world.people["other-host"]))
    async with unchanged:
        request = wire.RecommendRequest(run_id=world.run, slot=slot, k=k)
        why = await calls.refused(world.at_host.Recommend(request))
        assert (why.reason, why.field) == (reason, field)


# --- Submit ------------------------------------------------------------------------------------------------------


def delivered(catalogue=1, records=0):
    return wire.DeliveryStatus(catalogue_version=catalogue, records=records).SerializeToString()


def outcomes(answer):
    return answer.accepted, [(one.index, reason_name(one.reason)) for one in answer.refused]


@pytest.mark.parametrize(
    ("who", "kind", "payload", "options", "reason"),
    [
        ("host", "UNSPECIFIED", b"", {}, "INVALID_FIELD"),
        ("host", 99, b"", {}, "INVALID_FIELD"),
        ("host", "DELIVERED", b"\xff", {}, "INVALID_FIELD"),
        ("host", "DELIVERED", delivered(2), {}, "INVALID_FIELD"),
        ("host", "DELIVERED", delivered(), {"sha256": bytes(32)}, "HASH_MISMATCH"),
        ("host", "DELIVERED", delivered(), {"sha256": b"short"}, "HASH_MISMATCH"),
        ("host", "DELIVERED", delivered(), {"run_id": "none"}, "UNKNOWN_ROUND"),
        ("host", "DELIVERED", delivered(), {"slots": [SlotRange(first=0, count=1)]}, "UNKNOWN_PARTICIPANT"),
        (
            "host",
            "DELIVERED",
            delivered(),
            {"slots": [SlotRange(first=1, count=2**32 - 1)]},
            "UNKNOWN_PARTICIPANT",
        ),
        (
            "host",
            "DELIVERED",
            delivered(),
            {"slots": [SlotRange(first=1, count=3)] * 100_000},
            "UNKNOWN_PARTICIPANT",
        ),
        ("owner", "DELIVERED", delivered(), {}, "INVALID_FIELD"),
        (
            "owner",
            "EPOCH_DONE",
            b"\xff",
            {"slots": [SlotRange(first=0, count=1)], "round": 1},
            "INVALID_FIELD",
        ),
        ("owner", "EPOCH_DONE", b"", {"slots": [SlotRange(first=0, count=1)], "round": 2}, "UNKNOWN_ROUND"),
        (
            "owner",
            "EPOCH_DONE",
            b"",
            {"slots": [SlotRange(first=1, count=1)], "round": 1},
            "UNKNOWN_PARTICIPANT",
        ),
        ("owner", "EPOCH_DONE", b"", {"round": 1}, "INVALID_FIELD"),
        (
            "host",
            "EPOCH_DONE",
            b"",
            {"slots": [SlotRange(first=1, count=1)], "round": 1},
            "UNKNOWN_PARTICIPANT",
        ),
        ("owner", "METRICS", wire.MetricSums().SerializeToString(), {"point": 1}, "UNKNOWN_PARTICIPANT"),
        ("host", "METRICS", wire.MetricSums().SerializeToString(), {"point": 1}, "UNKNOWN_ROUND"),
    ],
)
async def test_an_item_that_does_not_fit_is_refused_and_the_next_one_counts(
    world, unchanged, who, kind, payload, options, reason
):
    bad = world.item(kind, payload, **options)
    good = world.item("DELIVERED", delivered(0))
    async with unchanged:
        answer = await world.submit(*bad, *(good if who == "host" else ()), who=who)
        assert outcomes(answer) == (int(who == "host"), [(0, reason)])
        assert answer.refused[0].message


@pytest.mark.parametrize("case", ["gap", "cut off", "after the last", "nothing"])
async def test_chunks_that_do_not_make_a_payload_change_nothing(world, unchanged, calls, case):
    payload = delivered() + b"\x1a\x01x" * 500_000  # an unknown field: more than one chunk
    requests = world.item("DELIVERED", payload)
    assert len(requests) == 2
    match case:
        case "gap":
            requests[1].chunk.offset += 1
        case "cut off":
            requests.pop()
        case "after the last":
            requests[0].chunk.last = True
            requests[0].sha256 = hashlib.sha256(requests[0].chunk.data).digest()
        case "nothing":
            requests = [wire.SubmitRequest(round=RoundRef(run_id=world.run))]
    async with unchanged:
        why = await calls.refused(lambda: world.at_host.Submit(calls.each(*requests)))
        assert (why.code, why.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TRUNCATED")


async def test_an_oversize_message_of_a_submission_is_refused_below_the_servicer(world, unchanged, calls):
    request = world.item("DELIVERED", delivered())[0]
    request.chunk.data = bytes(5 << 20)
    async with unchanged:
        code = await calls.code_of(lambda: world.at_host.Submit(calls.each(request)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


# --- Evaluation and the course of a run --------------------------------------------------------------------------


def metric_sums(version=0, names=("ndcg@10",), rows=((1.5, 3),), **fields):
    table = to_wire(np.array(rows, np.float64).reshape(-1, 2))
    return wire.MetricSums(
        **{"version": version, "names": names, "sums": table, **fields}
    ).SerializeToString()


async def finish_epoch(world, epoch):
    """Report the owner's pass, which opens an evaluation."""
    done = world.item("EPOCH_DONE", b"", slots=[SlotRange(first=world.slot, count=1)], round=epoch)
    assert outcomes(await world.submit(*done, who="owner")) == (1, [])


async def deliver(world):
    version = (await table(world.host))[0].version
    assert outcomes(await world.submit(*world.item("DELIVERED", delivered(version)))) == (1, [])


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (metric_sums(rows=[(float("nan"), 1)]), "NOT_FINITE"),
        (metric_sums(rows=[(float("inf"), 1)]), "NOT_FINITE"),
        (metric_sums(rows=[(1.0, 1), (1.0, 1)]), "WRONG_SHAPE"),
        (metric_sums(sums=floats(1, 2)), "WRONG_SHAPE"),
        (metric_sums(sums=Tensor()), "WRONG_SHAPE"),
        (metric_sums(rows=[(1.0, 4)]), "BELOW_FLOOR"),
        (metric_sums(rows=[(1.0, -1)]), "BELOW_FLOOR"),
        (metric_sums(names=["a", "a"], rows=[(1.0, 1)] * 2), "INVALID_FIELD"),
        (metric_sums(version=17), "INVALID_FIELD"),
        (b"\xff\xff", "INVALID_FIELD"),
    ],
)
async def test_a_metric_sum_that_does_not_fit_is_refused(world, payload, reason):
    await deliver(world)
    await finish_epoch(world, 1)
    answer = await world.submit(*world.item("METRICS", payload, point=1))
    assert outcomes(answer) == (0, [(0, reason)])
    # The evaluation is still open, and takes the right one.
    answer = await world.submit(*world.item("METRICS", metric_sums(), point=1))
    assert outcomes(answer) == (1, [])


async def test_a_host_below_the_floor_of_users_may_not_send_a_sum(cos, operator, people, calls):
    world = await World(cos, operator, people, calls).begin(min_users=4)
    await deliver(world)
    await finish_epoch(world, 1)
    answer = await world.submit(*world.item("METRICS", metric_sums(), point=1))
    assert outcomes(answer) == (0, [(0, "BELOW_FLOOR")])
    answer = await world.submit(*world.item("METRICS", wire.MetricSums().SerializeToString(), point=1))
    assert outcomes(answer) == (1, [])


async def test_a_metric_sum_counts_once_and_another_one_is_a_conflict(world):
    other = world.party("other-host")
    await other.register(members(world.people["other-host"]))
    await deliver(world)
    await finish_epoch(world, 1)
    first = world.item("METRICS", metric_sums(), point=1)
    for _ in range(2):
        assert outcomes(await world.submit(*first)) == (1, [])
    changed = world.item("METRICS", metric_sums(rows=[(2.5, 3)]), point=1)
    assert outcomes(await world.submit(*changed)) == (0, [(0, "CONFLICT")])
    theirs = metric_sums(rows=[(0.5, 1)])
    assert outcomes(await world.submit(*world.item("METRICS", theirs, point=1), who="other-host")) == (1, [])
    # The point is closed now; the same bytes are acknowledged as before.
    assert outcomes(await world.submit(*first)) == (1, [])
    assert outcomes(await world.submit(*changed)) == (0, [(0, "CONFLICT")])
    report = json.loads(
        (await world.operator.stub.GetReport(operating.GetReportRequest(run_id=world.run))).json
    )
    assert [(one["metrics"]["ndcg@10"], one["users"]["ndcg@10"]) for one in report["history"]] == [(0.5, 4)]


async def test_watching_a_run_shows_every_event_once_and_in_order(world):
    watched = []

    async def watch(first, into):
        request = operating.WatchRunRequest(run_id=world.run, from_event=first)
        async for event in world.operator.stub.WatchRun(request, timeout=60):
            into.append(event)

    watching = asyncio.create_task(watch(0, watched))
    await deliver(world)
    await world.exchange(world.gradient())
    await finish_epoch(world, 1)
    await world.submit(*world.item("METRICS", metric_sums(1), point=1))
    await world.exchange(world.gradient(epoch=2, rows_version=1), 2)
    await finish_epoch(world, 2)
    await world.submit(*world.item("METRICS", metric_sums(2, rows=[(2.4, 3)]), point=2))
    await asyncio.wait_for(watching, SOON_S)

    kept = [event for event in watched if event.number]
    assert [event.number for event in kept] == list(range(1, len(kept) + 1))
    assert all(event.HasField("progress") for event in watched if not event.number)
    assert [event.time_ms for event in kept] == sorted(event.time_ms for event in kept)
    parties = [(one.party.party, one.party.change) for one in kept if one.HasField("party")]
    assert parties == [("data-owner/orchestrated-owner", "joined"), ("client/orchestrated-host", "joined")]
    phases = [
        (operating.RunPhase.Name(one.phase.phase).removeprefix("RUN_PHASE_"), one.phase.epoch)
        for one in kept
        if one.HasField("phase")
    ]
    assert phases == [("INTAKE", 1), ("FLUSH", 1), ("EPOCH", 2), ("EVALUATE", 2), ("DONE", 2)]
    metrics = [one.metrics for one in kept if one.HasField("metrics")]
    assert [(one.epoch, one.version, one.users[0]) for one in metrics] == [(1, 1, 3), (2, 2, 3)]
    assert [one.means[0] for one in metrics] == pytest.approx([0.5, 0.8])
    versions = [event.state.version for event in kept]
    assert versions == sorted(versions)

    # From a number on, after the end: the same events, and no others.
    again: list = []
    await watch(4, again)
    assert again == kept[3:]
    (task,) = (await world.at_owner.Poll(wire.PollRequest(run_id=world.run))).tasks
    assert (task.kind, task.reason) == (wire.TaskKind.TASK_KIND_FINISH, "")


# --- The operator ------------------------------------------------------------------------------------------------


def start_request(world, run_id, *, expect=1, timeout=60_000, **changes):
    return operating.StartRunRequest(
        plan=world.calls.plan(run_id, **changes),
        expect_owners=expect,
        expect_users=expect,
        phase_timeout_ms=timeout,
        party_timeout_ms=timeout,
    )


async def clock_has_ticked(world):
    """Wait until the COS has looked at all its runs: at the last one too, which has no time to gather anybody."""
    run = f"short-{next(NUMBERS)}-{time.monotonic_ns()}"
    await world.operator.stub.StartRun(start_request(world, run, timeout=1))
    async with asyncio.timeout(SOON_S):
        async for event in world.operator.stub.WatchRun(operating.WatchRunRequest(run_id=run)):
            last = event
    assert last.phase.phase == operating.RunPhase.RUN_PHASE_FAILED


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"system": "other"}, "WRONG_SYSTEM", "plan"),
        ({"form": "other"}, "WRONG_SYSTEM", "plan"),
        ({"form": "shielded"}, "INVALID_FIELD", "plan.rounds.step_timeout_ms"),
        ({"form": "shielded", "secure_sum": "other"}, "WRONG_SYSTEM", "plan"),
        ({"secure_sum": "masked"}, "WRONG_SYSTEM", "plan"),
        ({"dim": 0}, "INVALID_FIELD", "plan.dim"),
        ({"dim": 1025}, "INVALID_FIELD", "plan.dim"),
        ({"dim": 1, "item_bias": True}, "INVALID_FIELD", "plan.dim"),
        ({"rate": 0.0}, "INVALID_FIELD", "plan.rate"),
        ({"rate": -1.0}, "INVALID_FIELD", "plan.rate"),
        ({"rate": float("nan")}, "INVALID_FIELD", "plan.rate"),
        ({"rate": float("inf")}, "INVALID_FIELD", "plan.rate"),
        ({"ridge": -0.1}, "INVALID_FIELD", "plan.ridge"),
        ({"ridge": float("nan")}, "INVALID_FIELD", "plan.ridge"),
        ({"theta": 0}, "INVALID_FIELD", "plan.theta"),
        ({"epochs": 0}, "INVALID_FIELD", "plan.epochs"),
        ({"run_id": ""}, "INVALID_FIELD", "plan.run_id"),
        ({"run_id": "../outside"}, "INVALID_FIELD", "plan.run_id"),
        ({"run_id": "a/b"}, "INVALID_FIELD", "plan.run_id"),
        ({"run_id": "x" * 64}, "INVALID_FIELD", "plan.run_id"),
        ({"timeout": 0}, "INVALID_FIELD", "phase_timeout_ms"),
    ],
)
async def test_a_plan_that_cannot_be_run_is_refused(world, calls, changes, reason, field):
    names = {"run_id": f"bad-{next(NUMBERS)}", **changes}
    before = await world.operator.stub.ListRuns(operating.ListRunsRequest())
    why = await calls.refused(
        world.operator.stub.StartRun(start_request(world, names.pop("run_id"), **names))
    )
    assert (why.reason, why.field) == (reason, field)
    assert why.expected
    after = await world.operator.stub.ListRuns(operating.ListRunsRequest())
    assert [run.plan.run_id for run in after.runs] == [run.plan.run_id for run in before.runs]


async def test_starting_a_run_again_changes_nothing_and_another_plan_is_a_conflict(world, calls):
    run = f"twice-{next(NUMBERS)}-{time.monotonic_ns()}"
    request = start_request(world, run)
    # At once, as when an operator tries again because it has no answer yet.
    answers = await asyncio.gather(*[world.operator.stub.StartRun(request) for _ in range(8)])
    assert {one.plan_hash for one in answers} == {plan_hash(request.plan)}
    why = await calls.refused(world.operator.stub.StartRun(start_request(world, run, rate=0.5)))
    assert (why.code, why.reason) == (grpc.StatusCode.ALREADY_EXISTS, "CONFLICT")
    runs = (await world.operator.stub.ListRuns(operating.ListRunsRequest())).runs
    assert [one.plan.run_id for one in runs].count(run) == 1
    # The COS is still there after its next look at all runs.
    await clock_has_ticked(world)
    assert world.cos.healthy()


async def test_a_phase_that_takes_too_long_ends_the_run_and_says_who_is_missing(cos, operator, people, calls):
    world = World(cos, operator, people, calls)
    await world.begin(owners=2, phase_s=1.0)
    async with asyncio.timeout(SOON_S):
        async for event in operator.stub.WatchRun(operating.WatchRunRequest(run_id=world.run)):
            last = event
    assert last.phase.phase == operating.RunPhase.RUN_PHASE_FAILED
    assert "1 of 2 data owners and 3 of 3 users" in last.state.reason


# --- A COS of the test's own -------------------------------------------------------------------------------------


@pytest.fixture
async def own_cos(start_member, third_party, certificates, people, calls):
    cos = await asyncio.to_thread(
        start_member, "cos", f"own-cos-{next(NUMBERS)}", third_party, max_payload_mb=1
    )

    async def world(run_id=None):
        await cos.release()
        return World(cos, calls.Operating(cos, certificates["operator"]), people, calls, run_id)

    return cos, world


async def test_an_item_above_the_limit_of_the_service_is_refused(own_cos, calls):
    _, new_world = own_cos
    world = await (await new_world()).begin()
    before = await world.everything()
    requests = world.item("DELIVERED", delivered() + b"\x1a\x01x" * 400_000)
    why = await calls.refused(lambda: world.at_host.Submit(calls.each(*requests)))
    assert (why.code, why.reason, why.field) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_LARGE",
        "chunk.data",
    )
    assert await world.everything() == before
    assert await world.goes_on()


async def test_what_a_caller_began_is_completed_also_when_it_goes_away(own_cos):
    cos, new_world = own_cos
    world = await new_world()
    start = start_request(world, world.run, expect=1, timeout=3_600_000)

    async def given_up(rpc, call):
        await cos.give_up_while_held("cos.db", rpc, call)

    # The same request again, as the caller makes it when it comes back.
    await given_up("StartRun", world.operator.stub.StartRun(start))
    await world.operator.stub.StartRun(start)
    await given_up("Register", world.owner.register(members(world.people["owner"], ITEMS)))
    await world.owner.register(members(world.people["owner"], ITEMS))
    await given_up("Register", world.host.register(members(world.people["host"])))
    await world.host.register(members(world.people["host"]))
    assert world.host.slots == [1, 2, 3]

    request = world.request(world.gradient())
    await given_up("Exchange", world.at_owner.Exchange(request))
    assert (await world.at_owner.Exchange(request)).version == 1
    # The owner sees that everything is delivered, although nobody reports it again.
    version = (await table(world.host))[0].version
    await given_up("Submit", world.submit(*world.item("DELIVERED", delivered(version))))
    async with asyncio.timeout(SOON_S):
        while not (await world.at_owner.Poll(wire.PollRequest(run_id=world.run))).tasks[0].flush:
            await asyncio.sleep(0.02)
    await given_up("StopRun", world.operator.stub.StopRun(operating.StopRunRequest(run_id=world.run)))
    events = []
    async with asyncio.timeout(SOON_S):
        async for event in world.operator.stub.WatchRun(operating.WatchRunRequest(run_id=world.run)):
            events += [event.number] if event.number else []
    assert events == list(range(1, len(events) + 1))
    assert (await world.state()).phase == operating.RunPhase.RUN_PHASE_FAILED
    await clock_has_ticked(world)
    assert cos.healthy()


async def test_an_update_that_finds_no_room_is_refused_and_counts_once_when_there_is(own_cos, calls):
    cos, new_world = own_cos
    world = await (await new_world()).begin()
    await deliver(world)
    first, second = (world.request(world.gradient(rows_version=n, first_block=n), n + 1) for n in range(2))
    await world.at_owner.Exchange(first)
    kept = await world.everything()
    with cos.without_room():
        why = await calls.refused(lambda: world.at_owner.Exchange(second))
        assert (why.code, why.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL")
        await asyncio.to_thread(cos.wait_for_health, False)
        # What another asks for is not put on top of what was not kept.
        why = await calls.refused(lambda: world.at_owner.Exchange(first))
        assert why.reason == "STORE_FULL"
    await asyncio.to_thread(cos.wait_for_health, True)
    assert await world.everything() == kept
    assert (await world.at_owner.Exchange(second)).version == 2
    again = await world.at_owner.Exchange(second)
    assert (again.version, again.progress.sequence) == (2, 2)
    assert await world.goes_on()


async def test_a_killed_cos_comes_back_with_everything_that_it_acknowledged(own_cos):
    cos, new_world = own_cos
    world = await (await new_world()).begin()
    await deliver(world)
    for n in range(3):
        last = world.request(world.gradient(rows_version=n, first_block=n), n + 1)
        await world.at_owner.Exchange(last)
    await finish_epoch(world, 1)
    kept = await world.everything()
    report = await world.operator.stub.GetReport(operating.GetReportRequest(run_id=world.run))

    cos.kill()
    await asyncio.to_thread(cos.start)
    slots = world.slot, world.host.slots
    world = await new_world(world.run)
    world.owner.slots, world.host.slots = [slots[0]], slots[1]
    assert await world.everything() == kept
    # A retry of the last exchange is known, although its answer may have been lost.
    again = await world.at_owner.Exchange(last)
    assert (again.version, again.progress.sequence) == (3, 3)
    # The evaluation that was open is open, of the version that was frozen.
    (task,) = [
        one
        for one in (await world.at_host.Poll(wire.PollRequest(run_id=world.run))).tasks
        if one.kind == wire.TaskKind.TASK_KIND_EVALUATE
    ]
    assert (task.version, task.round.point) == (3, 1)
    assert outcomes(await world.submit(*world.item("METRICS", metric_sums(3), point=1))) == (1, [])
    # Registering again gives the same slots.
    await world.owner.register(members(world.people["owner"], ITEMS))
    await world.host.register(members(world.people["host"]))
    assert (world.slot, world.host.slots) == slots
    assert await world.goes_on()
    later = await world.operator.stub.GetReport(operating.GetReportRequest(run_id=world.run))
    phases = [json.loads(one.json)["phases"] for one in (report, later)]
    assert phases[1][: len(phases[0])] == phases[0]
