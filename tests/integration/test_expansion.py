"""Graph expansion over real sockets with mutual TLS: client hosts, the relaying COS, the third party that matches."""

import asyncio
import contextlib
import json
import sqlite3
import time

import numpy as np
import pytest

from coterie.crypto.graph_key import GRAPH, GraphTerms
from coterie.crypto.graph_requests import Kind, SealingKey, UploadPlace, seal_request, upload_id_of
from coterie.crypto.roster import save_roster_key
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError, PeerError
from coterie.launch.service_counts import service_counts
from coterie.net.directory import Directory
from coterie.net.retry import Retry
from coterie.parties.expansion import Expansion, UserUpload
from coterie.parties.graph_keys import GraphKeys, GraphTrust
from coterie.parties.party import Registrant
from coterie.privacy.transcript import read_transcript
from coterie.privacy.visibility import matrix, observed
from coterie.store.expansion import MOST_QUESTIONS
from coterie.systems.visibility import rows_of
from coterie.telemetry.report import Report
from coterie.telemetry.report_services import services_lines
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import expansion_pb2 as wire
from coterie.wire.v1.expansion_pb2_grpc import ExpansionRelayStub, GraphExpansionStub
from coterie.wire.v1.operator_pb2 import GetReportRequest
from coterie.wire.v1.operator_pb2_grpc import OperatorStub
from coterie.wire.v1.orchestrator_pb2 import ParticipantKind
from coterie.wire.v1.thirdparty_pb2 import RevokeRequest

from .. import postgres
from ..custody import ROSTER_KEY, roster

TERMS = GraphTerms(dimension=4, most_tags=8, most_neighbours=16)
SOON_S = 60.0
PATIENT = Retry(limit_s=SOON_S)


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


class Host:
    """A client host whose users are registered at the COS."""

    def __init__(self, graph, enrolled, slots, folder):
        self.graph, self.enrolled, self.slots, self.folder = graph, enrolled, slots, folder
        folder.mkdir()
        self.open()

    @property
    def identity(self):
        return self.enrolled.identities[0]

    def open(self):
        """Begin as after a start of the host's process: everything is as its files say."""
        self.users = [UserUpload(self.folder / f"user-{slot}", slot) for slot in self.slots]
        self.cos = self.graph.cos.channel(self.enrolled)
        self.thirdparty = self.graph.third.channel(self.enrolled)
        self.calls = Expansion(self.cos, self.thirdparty, self.enrolled.directory_key, PATIENT)

    def keys(self, terms=TERMS, timeout_s=SOON_S):
        listed = self.graph.listed
        trust = GraphTrust(self.graph.run, listed, ROSTER_KEY, lambda: frozenset(self.graph.gone))
        bundles = Directory(self.thirdparty, self.enrolled.directory_key).bundles
        return GraphKeys(
            self.thirdparty, self.identity, trust, self.folder / "keys", bundles, terms, timeout_s=timeout_s
        )

    async def publish(self, holding, which, items, users=(), value=1.0):
        embedding = np.full(TERMS.dimension, value, np.float32)
        await self.calls.publish(self.users[which], holding, items, dict(users), embedding)

    async def neighbours(self, holding, which):
        found = await self.calls.neighbours(self.users[which], holding)
        return sorted((float(one.embedding[0]), one.items) for one in found)

    # --- by hand -----------------------------------------------------------------------------------------------------

    async def sealed(self, kind, epoch, secret, content, upload_id=None):
        found = await self.thirdparty.stub(GraphExpansionStub).SealingKey(wire.SealingKeyRequest())
        key = SealingKey(found.key_id, found.public, found.expiry, found.signature)
        place = UploadPlace(self.graph.run, epoch, upload_id or upload_id_of(secret))
        sealed, _ = seal_request(kind, place, key, content.SerializeToString())
        return wire.SealedRequest(
            run_id=place.run,
            epoch=epoch,
            upload_id=place.upload_id,
            key_id=found.key_id,
            sealed=sealed,
        )

    def relay(self, request):
        return self.cos.stub(ExpansionRelayStub).Relay(request, timeout=SOON_S)

    async def upload(self, which, *, epoch=1, upload_id=None, **fields):
        """Relay an upload made by hand."""
        usual = {
            "secret": bytes(32),
            "sequence": 1,
            "tags": bytes(32),
            "embedding": bytes(TERMS.sealed_bytes),
        }
        content = wire.TagUpload(**{**usual, **fields})
        request = await self.sealed(Kind.PUBLISH, epoch, content.secret or bytes(32), content, upload_id)
        return await self.relay(
            wire.RelayRequest(slot=self.slots[which], publish=wire.PublishTagsRequest(request=request))
        )


class Graph:
    """A run with hosts of users, of which the first user of each may hold graph keys."""

    host_class, purpose = Host, GRAPH

    def __init__(self, third, cos, calls, certificates, folder):
        self.third, self.cos, self.calls, self.certificates = third, cos, calls, certificates
        self.folder, self.run = folder, f"graph-{time.monotonic_ns()}"
        self.gone, self.hosts, self.listed = set(), [], None

    async def begin(self, *sizes):
        save_roster_key(self.third.state / "roster.pub", ROSTER_KEY)
        operator = self.calls.Operating(self.cos, self.certificates["operator"])
        await operator.start(self.run, owners=1, users=sum(sizes) + 1)
        for number, size in enumerate(sizes):
            enrolled = await self.third.enrol("client", f"{self.run}-{number}", size)
            party = self.calls.party_at(self.cos, enrolled, self.run)
            await party.register(
                [
                    Registrant(one, bundle, ParticipantKind.PARTICIPANT_KIND_USER)
                    for one, bundle in zip(enrolled.identities, enrolled.bundles, strict=True)
                ]
            )
            place = self.folder / f"host-{number}"
            self.hosts.append(self.host_class(self, enrolled, list(party.slots), place))
        self.hosts.sort(key=lambda one: one.identity.participant_id)
        self.listed = roster([one.identity for one in self.hosts], purpose=self.purpose)
        return self

    async def held(self):
        """Return the key of the newest epoch, which every host has made or received."""
        return (await asyncio.gather(*(host.keys().ensure() for host in self.hosts)))[0]

    async def state(self):
        stub = self.third.channel(self.certificates["operator"]).stub(GraphExpansionStub)
        return await stub.ExpansionState(wire.ExpansionStateRequest(run_id=self.run))

    async def asked(self):
        """Return what the report has of users' requests: what the COS and the third party counted."""
        operator = self.certificates["operator"]
        response = (
            await self.cos.channel(operator).stub(OperatorStub).GetReport(GetReportRequest(run_id=self.run))
        )
        known = json.loads(response.json)["third_party"]
        counts = await service_counts(self.third.channel(operator), self.run, known)
        return {service: known[service] | counts.get(service, {}) for service in known}


@pytest.fixture
async def graph(third_party, cos, calls, certificates, tmp_path):
    return await Graph(third_party, cos, calls, certificates, tmp_path).begin(4, 3)


async def reason(call):
    with pytest.raises(Refusal) as refused:
        await call
    return refused.value.name


# --- keys ------------------------------------------------------------------------------------------------------------


async def test_all_holders_have_one_key_that_the_third_party_has_not(graph):
    found = await asyncio.gather(*(host.keys().ensure() for host in graph.hosts))
    assert {one.record for one in found} == {found[0].record}
    assert len({one.secrets.tag_key for one in found}) == 1
    tag_key = found[0].secrets.tag_key
    for path in graph.third.state.rglob("*"):
        if path.is_file():
            assert tag_key not in path.read_bytes(), path
    again = await asyncio.gather(*(host.keys().ensure() for host in graph.hosts))
    assert [one.secrets.key_id for one in again] == [found[0].secrets.key_id] * 2


async def test_a_rotation_has_new_secrets_that_all_others_take_up(graph):
    first = await graph.held()
    second = await graph.hosts[1].keys().rotate()
    assert second.record.epoch == 2
    assert second.record.generator == graph.hosts[1].identity.participant_id
    assert (await graph.held()).secrets.key_id == second.secrets.key_id != first.secrets.key_id


async def test_holders_who_need_a_higher_epoch_at_once_make_one_key_of_it(graph):
    first = await graph.held()
    found = await asyncio.gather(*(host.keys().ensure(2) for host in graph.hosts))
    assert {one.record.epoch for one in found} == {2}
    assert len({one.secrets.key_id for one in found} | {first.secrets.key_id}) == 2
    # Any holder may be the one that needs it, and who asks for less gets the newest.
    third = await graph.hosts[1].keys().ensure(3)
    assert third.record.generator == graph.hosts[1].identity.participant_id
    assert (await graph.held()).secrets.key_id == third.secrets.key_id


async def test_an_operator_has_the_key_replaced_and_all_holders_take_up_the_same(graph):
    first = await graph.held()
    replace = wire.ReplaceGraphKeyRequest(run_id=graph.run)
    stub = graph.third.channel(graph.certificates["operator"]).stub(GraphExpansionStub)
    # The order is durable, and the same again changes nothing.
    assert (await stub.ReplaceGraphKey(replace)).epoch == 2
    graph.third.stop()
    graph.third.start()
    stub = graph.third.channel(graph.certificates["operator"]).stub(GraphExpansionStub)
    assert (await stub.ReplaceGraphKey(replace)).epoch == 2
    # Whichever holder asks first makes it.
    second = await graph.hosts[1].keys().ensure()
    assert (second.record.epoch, second.record.generator) == (2, graph.hosts[1].identity.participant_id)
    assert (await graph.held()).secrets.key_id == second.secrets.key_id != first.secrets.key_id
    assert (await graph.hosts[0].keys().ensure()).record.epoch == 2


async def test_who_is_no_operator_has_no_key_replaced_and_a_run_without_one_is_named(graph):
    await graph.held()
    replace = wire.ReplaceGraphKeyRequest(run_id=graph.run)
    for caller in (graph.hosts[0].enrolled, graph.certificates["cos"]):
        call = graph.third.channel(caller).stub(GraphExpansionStub).ReplaceGraphKey(replace)
        assert (await graph.calls.refused(call)).reason == "WRONG_ROLE"
    stub = graph.third.channel(graph.certificates["operator"]).stub(GraphExpansionStub)
    unknown = await graph.calls.refused(
        stub.ReplaceGraphKey(wire.ReplaceGraphKeyRequest(run_id="no-such-run"))
    )
    assert (unknown.reason, unknown.field) == ("UNKNOWN_ROUND", "run_id")
    assert (await graph.held()).record.epoch == 1


async def test_when_the_third_party_has_lost_its_graphs_holders_and_users_begin_anew(graph):
    first = await graph.held()
    for host in graph.hosts:
        for which in range(len(host.slots)):
            await host.publish(first, which, ["common"])
    with contextlib.closing(sqlite3.connect(graph.third.state / "expansion.db")) as connection, connection:
        for table in ("graphs", "graph_envelopes", "graph_uploads", "graph_tags"):
            connection.execute(f"DELETE FROM {table}")
    assert await reason(graph.hosts[0].neighbours(first, 0)) == "UNKNOWN_ROUND"
    second = await graph.held()
    assert second.record.epoch == first.record.epoch + 1
    for host in graph.hosts:
        for which in range(len(host.slots)):
            await host.publish(second, which, ["common"])
    assert len(await graph.hosts[1].neighbours(second, 0)) > 3


async def test_a_key_with_a_revoked_holder_is_replaced_without_it(graph):
    first = await graph.held()
    lost = graph.hosts[1].identity.participant_id
    operator = graph.third.issue(graph.third.folder / f"{graph.run}-op", "operator", "judge")
    await graph.third.directory(operator).Revoke(RevokeRequest(participants=[lost]))
    graph.gone.add(lost)
    second = await graph.hosts[0].keys().ensure()
    assert second.record.epoch == first.record.epoch + 1
    assert lost not in second.record.holders
    with pytest.raises(CertificateError, match="revoked"):
        await graph.hosts[1].keys().ensure()


async def test_a_participant_that_is_not_on_the_operators_roster_gets_no_key(graph):
    await graph.held()
    whole, graph.listed = graph.listed, roster([graph.hosts[0].identity], purpose=GRAPH)
    with pytest.raises(CertificateError, match="not on the roster"):
        await graph.hosts[1].keys().ensure()
    # Nor does the third party take a key whose roster is for another purpose.
    graph.listed = roster([host.identity for host in graph.hosts])
    with pytest.raises(VerificationError) as refused:
        await graph.hosts[0].keys().rotate()
    assert refused.value.reason is Reason.WRONG_PURPOSE
    graph.listed = whole


async def test_holders_with_other_terms_refuse_each_others_keys(graph):
    await graph.held()
    with pytest.raises(VerificationError, match="with the terms"):
        await graph.hosts[1].keys(TERMS._replace(most_tags=5)).ensure()


async def test_a_holder_gives_up_in_time_when_nobody_makes_a_key(graph):
    with pytest.raises(PeerError, match="no holder has published"):
        await graph.hosts[1].keys(timeout_s=0.5).ensure()


# --- uploads and neighbours ------------------------------------------------------------------------------------------


async def test_users_of_several_hosts_are_neighbours_and_nobody_is_named(graph):
    holding = await graph.held()
    left, right = graph.hosts
    count = {"common": 5, "rare": 2}
    for which in range(len(left.slots)):
        await left.publish(holding, which, ["common", f"own-{which}"], count, value=which)
    assert await left.neighbours(holding, 0) == []  # Four users have it at most: below the floor.
    for which in range(len(right.slots)):
        await right.publish(holding, which, ["common", "rare"], count, value=10 + which)
    sizes = len(left.slots) + len(right.slots)
    everybody = [float(n) for n in range(len(left.slots))] + [10.0 + n for n in range(len(right.slots))]
    seen = await left.neighbours(holding, 0)
    assert seen == [(value, ("common",)) for value in everybody if value != 0.0]
    # "rare" is of three users: it shows nobody.
    assert await right.neighbours(holding, 0) == [
        (value, ("common",)) for value in everybody if value != 10.0
    ]
    state = await graph.state()
    assert (state.epoch, state.uploads, state.served_tags) == (1, sizes, 1)
    assert state.questions == 3
    assert list(state.refusals) == []


async def test_a_user_who_rates_more_adds_to_its_upload(graph):
    holding = await graph.held()
    for host in graph.hosts:
        for which in range(len(host.slots)):
            await host.publish(holding, which, ["first", "second"])
    host = graph.hosts[0]
    host.users[0] = UserUpload(host.folder / f"user-{host.slots[0]}", host.slots[0])
    await host.publish(holding, 0, ["second", "first", "third"], value=7.0)
    assert host.users[0].sequence == 2
    assert set(host.users[0].tags) == {"first", "second", "third"}
    assert (7.0, ("first", "second")) in await graph.hosts[1].neighbours(holding, 0)
    state = await graph.state()
    assert (state.uploads, state.tags) == (len(graph.hosts[0].slots) + len(graph.hosts[1].slots), 3)


async def test_what_a_user_has_forgotten_is_seen_by_nobody_and_it_may_publish_again(graph):
    holding = await graph.held()
    for host in graph.hosts:
        for which in range(len(host.slots)):
            await host.publish(holding, which, ["common"], value=which + 1.0)
    left, right = graph.hosts
    before = len(await right.neighbours(holding, 0))
    gone = left.users[0].upload_id
    await left.calls.forget(left.users[0], holding.secrets.run)
    await left.calls.forget(left.users[0], holding.secrets.run)
    assert len(await right.neighbours(holding, 0)) == before - 1
    with pytest.raises(PeerError, match="published nothing"):
        await left.neighbours(holding, 0)
    await left.publish(holding, 0, ["common"], value=9.0)
    assert left.users[0].upload_id != gone
    assert (9.0, ("common",)) in await right.neighbours(holding, 0)


async def test_a_rotation_in_mid_run_ends_in_uploads_of_the_new_epoch(graph):
    first = await graph.held()
    for host in graph.hosts:
        for which in range(len(host.slots)):
            await host.publish(first, which, ["common"])
    second = await graph.hosts[0].keys().rotate()
    # Until it has the new key, a host goes on with the neighbours of before, and publishes no more.
    assert len(await graph.hosts[1].neighbours(first, 0)) > 3
    late = graph.hosts[1].users[0]
    tags = set(late.tags.values())
    assert await reason(graph.hosts[1].publish(first, 0, ["common", "more"])) == "STALE"
    holding = await graph.hosts[1].keys().ensure()
    assert holding.secrets.key_id == second.secrets.key_id
    for host in graph.hosts:
        for which in range(len(host.slots)):
            await host.publish(holding, which, ["common"], value=2.0)
    assert {value for value, _ in await graph.hosts[1].neighbours(holding, 0)} == {2.0}
    assert not tags & set(late.tags.values())
    assert (await graph.state()).epoch == 2
    # Both uploads go, also after a restart; what is not there any more is no reason to keep on asking.
    kept = UserUpload(graph.hosts[1].folder / f"user-{late.slot}", late.slot)
    assert kept.older is not None
    for _ in range(2):
        await graph.hosts[1].calls.forget(kept, holding.secrets.run)
    assert (kept.older, kept.secret) == (None, b"")
    kept.older, kept.secret = (1, bytes(32)), bytes(32)
    await graph.hosts[1].calls.forget(kept, holding.secrets.run)
    assert kept.secret == b""


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"embedding": bytes(TERMS.sealed_bytes - 1)}, "WRONG_SHAPE"),
        ({"embedding": b""}, "WRONG_SHAPE"),
        ({"tags": bytes(31)}, "WRONG_SHAPE"),
        ({"tags": bytes(64)}, "INVALID_FIELD"),
        ({"tags": b"".join(bytes([n]) * 32 for n in (2, 1))}, "INVALID_FIELD"),
        ({"tags": b"".join(bytes([n]) * 32 for n in range(9))}, "TOO_LARGE"),
        ({"sequence": 0}, "INVALID_FIELD"),
        ({"sequence": 2}, "SEQUENCE_MISMATCH"),
        ({"upload_id": b"u" * 32}, "NOT_AUTHENTIC"),
        ({"secret": b"short", "upload_id": b"u" * 32}, "INVALID_FIELD"),
        ({"epoch": 2}, "UNKNOWN_ROUND"),
        ({"epoch": 1 << 40}, "INVALID_FIELD"),
    ],
)
async def test_an_upload_that_is_not_as_it_must_be_changes_nothing(graph, calls, fields, expected):
    await graph.held()
    refused = await calls.refused(graph.hosts[0].upload(0, **fields))
    assert refused.reason == expected
    assert refused.expected
    assert (await graph.state()).uploads == 0


async def test_after_a_refused_upload_a_user_may_publish_another(graph, calls):
    await graph.held()
    host = graph.hosts[0]
    refused = await calls.refused(host.upload(0, secret=bytes([1]) * 32, embedding=b""))
    assert refused.reason == "WRONG_SHAPE"
    await host.upload(0, secret=bytes([2]) * 32)
    # One that was taken is kept, whatever is refused afterwards.
    more = await calls.refused(host.upload(0, secret=bytes([2]) * 32, sequence=2, embedding=b""))
    assert more.reason == "WRONG_SHAPE"
    assert (await calls.refused(host.upload(0, secret=bytes([1]) * 32))).reason == "CONFLICT"


async def test_a_request_that_does_not_open_is_refused_and_recorded(graph, calls):
    holding = await graph.held()
    host = graph.hosts[0]
    content = wire.TagUpload(secret=bytes(32), sequence=1, tags=bytes(32))
    request = await host.sealed(Kind.FORGET, 1, bytes(32), content)
    relayed = wire.RelayRequest(slot=host.slots[0], publish=wire.PublishTagsRequest(request=request))
    assert (await calls.refused(host.relay(relayed))).reason == "NOT_AUTHENTIC"
    relayed.publish.request.sealed = b"short"
    assert (await calls.refused(host.relay(relayed))).reason == "INVALID_FIELD"
    relayed.publish.request.key_id = bytes(8)
    assert (await calls.refused(host.relay(relayed))).reason == "UNKNOWN_PREKEY"
    found = {one.reason: one.count for one in (await graph.state()).refusals}
    assert found == {"NOT_AUTHENTIC": 1, "INVALID_FIELD": 1, "UNKNOWN_PREKEY": 1}
    assert holding.record.epoch == 1


async def test_an_upload_id_used_twice_with_other_bytes_is_refused(graph, calls):
    await graph.held()
    await graph.hosts[0].upload(0)
    await graph.hosts[0].upload(0)
    refused = await calls.refused(graph.hosts[0].upload(0, tags=b"x" * 32))
    assert refused.reason == "CONFLICT"
    assert ((await graph.state()).uploads, (await graph.state()).tags) == (1, 1)


async def test_forged_tags_make_nobody_a_neighbour(graph):
    holding = await graph.held()
    left, right = graph.hosts
    for host in graph.hosts:
        for which in range(len(host.slots)):
            if (host, which) != (left, 0):
                await host.publish(holding, which, ["common"], value=host.slots[which])
    before = await right.neighbours(holding, 0)
    forger, forged = left.users[0], {f"item-{n}": bytes([n]) * 32 for n in range(8)}
    forger.begin(1)
    await left.upload(0, secret=forger.secret, tags=b"".join(forged.values()))
    forger.sequence, forger.tags = 1, forged
    assert await left.neighbours(holding, 0) == []
    assert await right.neighbours(holding, 0) == before
    # The tag of somebody else that it has not published is not answered.
    forger.tags = dict(right.users[0].tags)
    assert await reason(left.neighbours(holding, 0)) == "UNKNOWN_ITEM"


async def test_one_user_cannot_pretend_to_be_five(graph, calls):
    await graph.held()
    host = graph.hosts[0]
    await host.upload(0, secret=bytes([1]) * 32)
    # Its own second upload, and one for a user of another host.
    assert (await calls.refused(host.upload(0, secret=bytes([2]) * 32))).reason == "CONFLICT"
    other = wire.RelayRequest(slot=graph.hosts[1].slots[0])
    other.publish.request.CopyFrom(
        await host.sealed(Kind.PUBLISH, 1, bytes([3]) * 32, wire.TagUpload(secret=bytes([3]) * 32))
    )
    assert (await calls.refused(host.relay(other))).reason == "UNKNOWN_PARTICIPANT"
    assert (await graph.state()).uploads == 1


async def test_who_asks_for_everybodys_neighbours_is_limited_and_recorded(graph, calls):
    holding = await graph.held()
    for host in graph.hosts:
        for which in range(len(host.slots)):
            await host.publish(holding, which, ["common"])
    host, victim = graph.hosts[0], graph.hosts[1].users[0]
    mine = host.users[0]

    async def ask(secret, tags, upload_id=None):
        content = wire.NeighbourQuery(secret=secret, tags=b"".join(tags))
        request = await host.sealed(Kind.NEIGHBOURS, 1, secret, content, upload_id)
        return await host.relay(
            wire.RelayRequest(slot=mine.slot, neighbours=wire.NeighboursRequest(request=request))
        )

    # About a tag that it has not published, and in another's name.
    foreign = [b"f" * 32]
    assert (await calls.refused(ask(mine.secret, foreign))).reason == "UNKNOWN_ITEM"
    assert (await calls.refused(ask(victim.secret, []))).reason == "UNKNOWN_PARTICIPANT"
    stolen = await calls.refused(ask(bytes(32), [], victim.upload_id))
    assert stolen.reason == "UNKNOWN_PARTICIPANT"
    for _ in range(MOST_QUESTIONS):
        await ask(mine.secret, mine.tags.values())
    assert (await calls.refused(ask(mine.secret, mine.tags.values()))).reason == "TOO_LARGE"
    found = {one.reason: one.count for one in (await graph.state()).refusals}
    assert found == {"UNKNOWN_ITEM": 1, "TOO_LARGE": 1}
    name = "coterie_refusals_total"
    assert graph.cos.metric(name, rpc="Relay", reason="UNKNOWN_PARTICIPANT") >= 2

    # The report names the hosts, and no user.
    asked = (await graph.asked())["expansion"]
    others = graph.hosts[1]
    assert asked["hosts"] == {
        str(host.enrolled.party): {"answered": {"publish": len(host.slots)}, "refused": {}}
        for host in (others,)
    } | {
        str(host.enrolled.party): {
            "answered": {"ask": MOST_QUESTIONS, "publish": len(host.slots)},
            "refused": {
                "TOO_LARGE": {"ask": 1},
                "UNKNOWN_ITEM": {"ask": 1},
                "UNKNOWN_PARTICIPANT": {"ask": 2},
            },
        }
    }
    assert asked["refused"] == found
    others_of_mine = len(host.slots) + len(others.slots) - 1
    assert asked["counters"] == {
        "epoch": 1,
        "uploads": others_of_mine + 1,
        "tags": 1,
        "served_tags": 1,
        "questions": MOST_QUESTIONS,
        "neighbours": MOST_QUESTIONS * others_of_mine,
    }
    report = Report.read({"third_party": {"expansion": asked}})
    assert services_lines(report)[1] == ("  refused over a limit", f"{host.enrolled.party}, questions: 1")


async def test_users_requests_reach_the_third_party_through_the_cos_only(graph, calls):
    await graph.held()
    stub = graph.hosts[0].thirdparty.stub(GraphExpansionStub)
    for call in (
        stub.PublishTags(wire.PublishTagsRequest()),
        stub.Neighbours(wire.NeighboursRequest()),
        stub.Forget(wire.ForgetRequest()),
    ):
        assert (await calls.refused(call)).reason == "WRONG_ROLE"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (wire.RelayRequest(), "INVALID_FIELD"),
        (wire.RelayRequest(publish=wire.PublishTagsRequest()), "UNKNOWN_ROUND"),
    ],
)
async def test_a_relay_of_nothing_or_of_no_run_is_refused(graph, calls, request_, expected):
    assert (await calls.refused(graph.hosts[0].relay(request_))).reason == expected


async def test_tags_and_neighbours_are_the_only_things_told_to_others(graph):
    holding = await graph.held()
    await graph.hosts[0].publish(holding, 0, ["x"])
    with contextlib.closing(sqlite3.connect(graph.third.state / "expansion.db")) as connection:
        columns = {
            row[0]: [column[1] for column in connection.execute(f"PRAGMA table_info({row[0]})")]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
    assert columns["graph_tags"] == ["graph", "tag", "upload"]
    assert not {"party", "participant", "slot", "item"} & {name for some in columns.values() for name in some}


# --- restarts, on both databases -------------------------------------------------------------------------------------


def flat(hosts):
    """Return the numbers of requests of hosts, as the store of the COS has them."""
    return {
        (party, kind, reason): number
        for party, one in hosts.items()
        for reason, kinds in {"": one["answered"], **one["refused"]}.items()
        for kind, number in kinds.items()
    }


def kept_counts(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT party, request, refused, count FROM relayed")
        return {tuple(row[:3]): row[3] for row in rows}


@pytest.mark.parametrize("kept_in", ["a file", "PostgreSQL"])
async def test_restarts_in_the_middle_of_uploads_lose_nothing(
    kept_in, request, start_third_party, start_member, calls, tmp_path
):
    keys = {}
    if kept_in == "PostgreSQL":
        server = request.getfixturevalue("server")
        keys["expansion_database"] = server.keys(server.database())
    third = start_third_party(**keys)
    assert (third.state / "expansion.db").exists() == (kept_in == "a file")
    cos = start_member("cos", f"relay-{time.monotonic_ns()}", third)
    certificates = {"operator": third.issue(tmp_path / "operator", "operator", "op")}
    graph = await Graph(third, cos, calls, certificates, tmp_path).begin(4, 3)
    holding = await graph.held()
    left, right = graph.hosts
    for host in graph.hosts:
        for which in range(len(host.slots) - 1):
            await host.publish(holding, which, ["common"], value=host.slots[which])
    before = await left.neighbours(holding, 0)

    # The third party is killed while users' publications are on the way; the calls go on when it is back.
    last = [asyncio.create_task(host.publish(holding, -1, ["common", "new"])) for host in graph.hosts]
    third.kill()
    await asyncio.sleep(0.2)
    assert not all(task.done() for task in last)
    third.start()
    await asyncio.gather(*last)
    assert len(await left.neighbours(holding, 0)) == len(before) + 2

    # A host ends after its publication was taken, and before it has heard so; it sends the same again.
    user = right.users[0]
    number, pending = user.sequence, []
    original = right.calls._send

    async def cut(upload, held):
        pending.append(upload.pending)
        await original(upload, held)
        upload.sequence, upload.pending = number, pending[-1]
        upload.save()
        raise ConnectionError("the process ends here")

    right.calls._send = cut
    with pytest.raises(ConnectionError):
        await right.publish(holding, 0, ["common", "new"], value=77.0)
    right.open()
    assert right.users[0].pending == pending[0]
    await right.publish(holding, 0, ["common", "new"], value=78.0)
    assert (right.users[0].sequence, right.users[0].pending) == (number + 2, b"")
    assert 78.0 in {value for value, _ in await left.neighbours(holding, 0)}

    # Restarted, the COS still knows whose upload is whose.
    seen = await left.neighbours(holding, 0)
    before = (await graph.asked())["expansion"]["hosts"]
    while await asyncio.to_thread(kept_counts, cos.state / "cos.db") != flat(before):
        await asyncio.sleep(0.1)
    cos.kill()
    cos.start()
    assert await left.neighbours(holding, 0) == seen
    after = (await graph.asked())["expansion"]["hosts"]
    before[str(left.enrolled.party)]["answered"]["ask"] += 1
    assert after == before
    assert (await calls.refused(left.upload(0, secret=b"\2" * 32))).reason == "CONFLICT"
    third.stop()
    third.start()
    assert await left.neighbours(holding, 0) == seen
    assert (await graph.held()).record == holding.record


async def test_without_the_third_party_a_host_is_told_so_and_may_try_again(
    start_third_party, start_member, calls, tmp_path
):
    third = start_third_party()
    cos = start_member("cos", f"alone-{time.monotonic_ns()}", third)
    certificates = {"operator": third.issue(tmp_path / "operator", "operator", "op")}
    graph = await Graph(third, cos, calls, certificates, tmp_path).begin(2)
    holding = await graph.held()
    host = graph.hosts[0]
    await host.publish(holding, 0, ["common"])
    third.stop()
    host.calls._retry = Retry(limit_s=0.0)
    assert await reason(host.publish(holding, 0, ["common", "more"])) == "NOT_READY"
    third.start()
    await host.publish(holding, 0, ["common", "more", "most"])
    assert set(host.users[0].tags) == {"common", "more", "most"}
    assert host.users[0].sequence == 3


# --- what each party sees --------------------------------------------------------------------------------------------

TRANSCRIPT = "transcript.bin"
CANARY = "canary-item-5f0c1d"


async def test_the_cos_sees_no_tag_and_the_third_party_neither_item_nor_user(
    start_third_party, start_member, calls, tmp_path
):
    third = start_third_party(transcript=True)
    cos = start_member("cos", f"seen-{time.monotonic_ns()}", third, transcript=True)
    certificates = {"operator": third.issue(tmp_path / "operator", "operator", "op")}
    graph = await Graph(third, cos, calls, certificates, tmp_path).begin(4, 2)
    holding = await graph.held()
    value = 1.234375
    for host in graph.hosts:
        for which in range(len(host.slots)):
            await host.publish(holding, which, [CANARY, "other"], value=value)
    assert len(await graph.hosts[0].neighbours(holding, 0)) == 5
    tags = {tag for host in graph.hosts for user in host.users for tag in user.tags.values()}
    secrets = {user.secret for host in graph.hosts for user in host.users}
    own = {user.user_secret for host in graph.hosts for user in host.users}
    embedding = np.full(TERMS.dimension, value, np.float32).tobytes()
    participants = {one.participant_id for host in graph.hosts for one in host.enrolled.identities}
    await third.release()
    await cos.release()
    cos.stop()
    third.stop()

    def held_by(service):
        return {
            path: path.read_bytes()
            for path in service.state.rglob("*")
            if path.is_file() and "tls" not in path.parts
        }

    at_cos = held_by(cos)
    for private in (CANARY.encode(), embedding, *tags, *secrets, *own):
        for path, content in at_cos.items():
            assert private not in content, path
    at_third = held_by(third)
    for private in (CANARY.encode(), embedding, holding.secrets.tag_key, *secrets, *own):
        for path, content in at_third.items():
            assert private not in content, path
    # What it is for, the third party has: the search finds what is there.
    assert all(any(tag in content for content in at_third.values()) for tag in tags)

    relayed = ("PublishTags", "Neighbours", "Forget")
    transcript = third.state / TRANSCRIPT
    entries = [one for one in read_transcript(transcript) if one.rpc.rpartition("/")[2] in relayed]
    assert {one.peer for one in entries} == {cos.party}
    for one in entries:
        assert not any(person in one.payload for person in participants)
        assert not any(tag in one.payload for tag in tags)
    rows = rows_of("drift", "published", "clear")
    at_the_cos = cos.state / TRANSCRIPT
    seen = observed({third.party: [transcript], cos.party: [at_the_cos]})
    allowed = matrix(rows)
    for party, role in ((third.party, "thirdparty"), (cos.party, "cos")):
        assert [
            kind for kind, found in seen[party].items() if found and not allowed[role][kind].allowed
        ] == []
    assert seen[third.party]["item_tag"]
    assert not seen[cos.party]["item_tag"]
    assert seen[cos.party]["sealed_expansion"]


async def test_a_lying_third_party_that_swaps_embeddings_of_other_graphs_is_left_out(graph):
    holding = await graph.held()
    for host in graph.hosts:
        for which in range(len(host.slots)):
            await host.publish(holding, which, ["common"], value=host.slots[which])
    host = graph.hosts[0]
    before = await host.neighbours(holding, 0)
    victim = graph.hosts[1].users[0].upload_id
    with contextlib.closing(sqlite3.connect(graph.third.state / "expansion.db")) as connection, connection:
        connection.execute(
            "UPDATE graph_uploads SET embedding = ? WHERE upload_id = ?", (bytes(TERMS.sealed_bytes), victim)
        )
    assert len(await host.neighbours(holding, 0)) == len(before) - 1
