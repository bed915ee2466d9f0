"""Meta-latents over real sockets with mutual TLS: client hosts, the relaying COS, the third party that combines."""

import asyncio
import contextlib
import sqlite3
import time
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from coterie.crypto.graph_requests import Kind, SealingKey, UploadPlace, seal_request, upload_id_of
from coterie.crypto.latent_codes import Moments, condition_number, encode_latent, rescaled
from coterie.crypto.latent_terms import LatentTerms, sign_latent_record
from coterie.crypto.paillier import PublicObfuscators
from coterie.crypto.verification import VerificationError
from coterie.errors import PeerError
from coterie.net.clocks import CLOCK_KEY
from coterie.net.directory import Directory
from coterie.net.retry import Retry
from coterie.parties.custody import Custody
from coterie.parties.latent_exchange import LatentExchange
from coterie.parties.latent_records import latent_record_to_wire
from coterie.parties.latents import LatentCalls, LatentUpload
from coterie.parties.public_keys import Trust
from coterie.privacy.transcript import read_transcript
from coterie.privacy.visibility import matrix, observed
from coterie.rounds.training import Purpose
from coterie.systems.visibility import rows_of
from coterie.wire.v1 import expansion_pb2
from coterie.wire.v1 import latents_pb2 as wire
from coterie.wire.v1.expansion_pb2_grpc import GraphExpansionStub
from coterie.wire.v1.latents_pb2_grpc import LatentRelayStub, MetaLatentsStub

from .. import postgres
from ..custody import ROSTER_KEY, people
from ..custody import TERMS as KEY_TERMS
from ..latents import ciphertext
from .test_expansion import PATIENT, SOON_S, Graph, reason

TERMS = LatentTerms(dimension=6, combinations=20, least=20, most=24, bound=4000)
SIZES = (14, 10)
KEY_USERS = sum(SIZES)


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


class LatentHost:
    """A client host whose users are registered at the COS, and of which the first holds the Paillier key."""

    def __init__(self, latents, enrolled, slots, folder):
        self.graph, self.enrolled, self.slots, self.folder = latents, enrolled, slots, folder
        self.source = None
        folder.mkdir()
        self.open()

    @property
    def identity(self):
        return self.enrolled.identities[0]

    def open(self, terms=TERMS):
        """Begin as after a start of the host's process: everything is as its files say."""
        self.users = [LatentUpload(self.folder / f"user-{slot}", slot) for slot in self.slots]
        self.cos = self.graph.cos.channel(self.enrolled)
        self.thirdparty = self.graph.third.channel(self.enrolled)
        self.calls = self.with_terms(terms)

    def with_terms(self, terms):
        key = self.enrolled.directory_key
        return LatentCalls(self.cos, self.thirdparty, key, self.identity, terms, PATIENT)

    def custody(self):
        trust = Trust(self.graph.run, self.graph.listed, ROSTER_KEY, KEY_TERMS)
        bundles = Directory(self.thirdparty, self.enrolled.directory_key).bundles
        folder = self.folder / "keys"
        return Custody(
            self.thirdparty, self.identity, trust, folder, bundles, patience_s=SOON_S, timeout_s=SOON_S
        )

    async def publish(self, opened, holding, which, latent):
        public = holding.secrets.public
        if self.source is None or self.source.public != public:
            self.source = PublicObfuscators(public)
        await self.calls.publish(self.users[which], opened, np.asarray(latent, float), self.source)

    # --- by hand -----------------------------------------------------------------------------------------------------

    async def upload(
        self, which, *, kind=Kind.PUBLISH_LATENT, epoch=1, secret=bytes(32), vector=b"", upload_id=None
    ):
        """Relay an upload made by hand."""
        found = await self.thirdparty.stub(GraphExpansionStub).SealingKey(expansion_pb2.SealingKeyRequest())
        key = SealingKey(found.key_id, found.public, found.expiry, found.signature)
        place = UploadPlace(self.graph.run, epoch, upload_id or upload_id_of(secret))
        content = wire.LatentUpload(secret=secret, vector=vector).SerializeToString()
        sealed, _ = seal_request(kind, place, key, content)
        request = expansion_pb2.SealedRequest(
            run_id=place.run, epoch=epoch, upload_id=place.upload_id, key_id=found.key_id, sealed=sealed
        )
        return await self.relay(
            wire.RelayLatentRequest(
                slot=self.slots[which], publish=wire.PublishEncryptedRequest(request=request)
            )
        )

    async def refusal(self, which, **how):
        return (await self.graph.calls.refused(self.upload(which, **how))).reason

    def relay(self, request):
        return self.cos.stub(LatentRelayStub).RelayLatent(request, timeout=SOON_S)


class Latents(Graph):
    """A run with hosts of key users."""

    host_class, purpose = LatentHost, "paillier"

    async def held(self):
        """Return each host's holding of the newest Paillier key."""
        return await asyncio.gather(*(host.custody().ensure() for host in self.hosts))

    async def opened(self, **how):
        """Return the holding of the first host and the set that it opened."""
        holding = (await self.held())[0]
        return holding, await self.hosts[0].calls.open(holding, **{"open_s": 600, "valid_s": 3600, **how})

    async def published(self, opened, holding, rows, skip=0):
        """Publish a vector of each user of each host."""
        rows = iter(rows)
        for host in self.hosts:
            for which in range(len(host.slots) - skip):
                await host.publish(opened, holding, which, next(rows))

    async def read(self, holding, which=0):
        calls = self.hosts[which].calls
        ready = await calls.look(holding, SOON_S, ready=True)
        assert ready.ready, ready
        return await calls.read(ready, holding)


def cloud(rows=KEY_USERS, seed=3):
    return np.random.default_rng(seed).normal(0.2, 0.5, (rows, TERMS.dimension))


@pytest.fixture
async def latents(third_party, cos, calls, certificates, tmp_path):
    return await Latents(third_party, cos, calls, certificates, tmp_path).begin(*SIZES)


async def test_holders_read_combinations_of_the_key_users_vectors_and_all_the_same(latents):
    rows = cloud()
    holding, opened = await latents.opened()
    await latents.published(opened, holding, rows)
    found = await latents.read(holding)
    assert found.shape == (TERMS.combinations, TERMS.dimension)
    other = (await latents.held())[1]
    assert np.array_equal(await latents.read(other, 1), found)
    # They are convex combinations of at most m of the vectors: weights from a least squares of the whole cloud are not
    # unique here, but no value leaves the cloud, and the cloud has shrunk.
    assert (found.max(axis=0) <= rows.max(axis=0)).all()
    assert (found.min(axis=0) >= rows.min(axis=0)).all()
    assert found.std(axis=0).mean() / rows.std(axis=0).mean() < 0.7
    assert np.linalg.matrix_rank(found) == TERMS.dimension
    moments = Moments.of_sums(rows.sum(axis=0), (rows**2).sum(axis=0), len(rows))
    assert condition_number(rescaled(found, moments)) < 10


async def test_combinations_are_drawn_once(latents):
    holding, opened = await latents.opened()
    await latents.published(opened, holding, cloud())
    first = await latents.read(holding)
    latents.third.stop()
    latents.third.start()
    assert np.array_equal(await latents.read(holding), first)


async def test_a_set_is_opened_once_and_other_holders_take_it_up(latents):
    _, opened = await latents.opened()
    other = (await latents.held())[1]
    theirs = await latents.hosts[1].calls.open(other, open_s=5, valid_s=10)
    assert theirs.record == opened.record
    with pytest.raises(VerificationError, match="with the terms"):
        await latents.hosts[1].with_terms(TERMS._replace(members=3)).look(other)


async def test_before_there_is_a_set_there_is_nothing_to_look_at(latents):
    holding = (await latents.held())[0]
    assert await latents.hosts[0].calls.look(holding) is None
    assert await latents.hosts[0].refusal(0) == "UNKNOWN_ROUND"


async def test_with_too_few_key_users_in_time_there_are_no_combinations(latents):
    holding, opened = await latents.opened(open_s=6)
    await latents.published(opened, holding, cloud(), skip=9)
    found = await latents.hosts[0].calls.look(holding, SOON_S, ready=True)
    assert (found.ready, found.void, found.key_users) == (False, True, 6)
    assert await reason(latents.hosts[0].calls.read(found, holding)) == "WRONG_STATE"


async def test_enough_key_users_at_its_time_are_combined(latents):
    holding, opened = await latents.opened(open_s=12)
    await latents.published(opened, holding, cloud(), skip=2)
    calls = latents.hosts[0].calls
    calls._retry = Retry(limit_s=0.0)
    assert await reason(calls.read(opened, holding)) == "NOT_READY"
    calls._retry = PATIENT
    assert (await latents.read(holding)).shape == (TERMS.combinations, TERMS.dimension)
    assert await reason(latents.hosts[0].publish(opened, holding, -1, cloud(1)[0])) == "STALE"


async def test_after_a_key_user_was_forgotten_a_new_epoch_has_another_set(latents):
    rows = cloud()
    holding, opened = await latents.opened()
    await latents.published(opened, holding, rows)
    first = await latents.read(holding)
    left = latents.hosts[0]
    await left.calls.forget(left.users[0], latents.run)
    await left.calls.forget(left.users[0], latents.run)
    assert not left.users[0].published
    found = await left.calls.look(holding)
    assert found.void
    assert await reason(left.calls.read(opened, holding)) == "WRONG_STATE"
    with contextlib.closing(sqlite3.connect(latents.third.state / "expansion.db")) as connection:
        of_run = "FROM latent_sets JOIN {} USING (number) WHERE run_id = ?"
        kept = connection.execute(f"SELECT count(*) {of_run.format('latent_combinations')}", (latents.run,))
        assert kept.fetchone() == (0,)
        vectors = connection.execute(f"SELECT vector {of_run.format('latent_uploads')}", (latents.run,))
        assert {row[0] for row in vectors} == {b""}

    second, _ = await asyncio.gather(*(host.custody().rotate() for host in latents.hosts))
    again = await left.calls.open(second, open_s=600, valid_s=3600)
    assert again.record.epoch == 2
    # All others publish anew; the set does not wait for the one who was forgotten.
    for host in latents.hosts:
        for which in range(1 if host is left else 0, len(host.slots)):
            await host.publish(again, second, which, rows[which])
    fresh = await latents.read(second)
    assert not np.allclose(fresh, first)


class Learning:
    """A host's side whose users have fixed vectors, due in each sum; combinations are needed from pass 2 on."""

    def __init__(self, rows):
        self.rows, self.latents = rows, None

    def latent_terms(self, model):
        return TERMS

    def key_users(self, plan, users):
        return users

    def latent(self, model, user):
        return self.rows[user]

    def lacks_latents(self, plan):
        return self.latents is None and plan.pass_number >= 2

    def take_latents(self, latents):
        self.latents = latents


def sum_of(run, pass_number):
    return SimpleNamespace(
        run_id=run, round=pass_number, pass_number=pass_number, purpose=Purpose.TRAIN.value
    )


async def noted(kind, user, size):
    """Receipts are not looked at here."""


def exchange_of(host):
    """Return the part of a host in the exchange, as its service has it, from what the host keeps."""
    return LatentExchange(
        host.custody(),
        host.with_terms,
        lambda user: host.users[user],
        lambda holding: PublicObfuscators(holding.secrets.public),
        noted,
    )


async def test_what_is_combined_after_a_key_user_was_forgotten_is_without_it_and_all_hosts_go_on(latents):
    rows = np.clip(cloud(), -0.2, 0.2)
    rows[0] = 3.9  # Whatever this key user is in has a tenth of it at least.
    first_size = len(latents.hosts[0].slots)
    sides = [Learning(rows[:first_size]), Learning(rows[first_size:])]
    exchanges = [exchange_of(host) for host in latents.hosts]

    async def a_sum(pass_number):
        plan = sum_of(latents.run, pass_number)
        await asyncio.gather(
            *(
                one.before(side, plan, {}, range(len(side.rows)))
                for one, side in zip(exchanges, sides, strict=True)
            )
        )
        assert [one.failure for one in exchanges] == ["", ""]

    await a_sum(1)
    await a_sum(2)
    first = sides[0].latents
    assert np.array_equal(sides[1].latents, first)
    assert first.max() > 0.3
    await a_sum(3)
    assert sides[0].latents is first

    left = latents.hosts[0]
    await left.calls.forget(left.users[0], latents.run)
    stored = latents.third.state / "expansion.db"
    with contextlib.closing(sqlite3.connect(stored)) as connection:
        of_run = "FROM latent_sets JOIN {} USING (number) WHERE run_id = ?"
        kept = connection.execute(f"SELECT count(*) {of_run.format('latent_combinations')}", (latents.run,))
        assert kept.fetchone() == (0,)
    # The other host begins anew, and one that has read combinations before does not keep it from those of the new set.
    exchanges[1], sides[1] = exchange_of(latents.hosts[1]), Learning(rows[first_size:])
    await a_sum(4)
    await a_sum(5)
    second = sides[1].latents
    assert second.shape == first.shape
    assert np.abs(second).max() <= 0.2 + 1e-3
    assert np.array_equal(sides[0].latents, second)
    found = await left.calls.look((await latents.held())[0])
    assert (found.record.epoch, found.key_users) == (2, KEY_USERS - 1)
    assert left.users[0].forgotten


# --- what is refused -------------------------------------------------------------------------------------------------


async def test_a_user_has_one_vector_in_an_epoch(latents):
    holding, opened = await latents.opened()
    host = latents.hosts[0]
    await host.publish(opened, holding, 0, cloud()[0])
    await host.publish(opened, holding, 0, cloud()[1])  # It has one, and nothing is sent.
    assert await host.refusal(0, secret=b"\1" * 32) == "CONFLICT"
    assert (await host.calls.look(holding)).key_users == 1


async def test_what_is_no_vector_under_the_key_is_refused(latents):
    holding, _ = await latents.opened()
    host, public = latents.hosts[0], holding.secrets.public
    good = ciphertext(cloud()[0])
    cases = [b"", good, good[:-1], good[: len(good) // 2]]
    of_this_key = bytearray(good)
    of_this_key[12:44] = public.key_id
    of_this_key[44 : 44 + public.modulus_bytes] = bytes(public.modulus_bytes)
    cases.append(bytes(of_this_key))
    for which, vector in enumerate(cases):
        refused = await host.refusal(which, vector=vector, secret=bytes([which]) * 32)
        assert refused in ("INVALID_FIELD", "BAD_SIGNATURE"), (which, refused)
    # A refused upload leaves the user free to publish.
    assert (await host.calls.look(holding)).key_users == 0


async def test_requests_of_another_kind_or_upload_are_refused(latents):
    await latents.opened()
    host = latents.hosts[0]
    assert await host.refusal(0, kind=Kind.PUBLISH) == "NOT_AUTHENTIC"
    assert await host.refusal(0, upload_id=b"u" * 32) == "NOT_AUTHENTIC"
    assert await host.refusal(0, epoch=2) == "UNKNOWN_ROUND"


async def test_vectors_reach_the_third_party_through_the_cos_only(latents, calls):
    await latents.opened()
    stub = latents.hosts[0].thirdparty.stub(MetaLatentsStub)
    for call in (
        stub.PublishEncrypted(wire.PublishEncryptedRequest()),
        stub.ForgetEncrypted(wire.ForgetEncryptedRequest()),
    ):
        assert (await calls.refused(call)).reason == "WRONG_ROLE"


async def test_only_holders_of_the_key_read_combinations_and_for_themselves(latents, calls):
    holding, opened = await latents.opened()
    await latents.published(opened, holding, cloud())
    await latents.read(holding)
    host = latents.hosts[0]
    stub = host.thirdparty.stub(MetaLatentsStub)

    async def asked(participant, first=0, epoch=1):
        request = wire.PseudoMetaLatentsRequest(
            run_id=latents.run, epoch=epoch, participant=participant, first=first
        )
        return (await calls.refused(stub.PseudoMetaLatents(request))).reason

    own = host.identity.participant_id
    assert await asked(host.enrolled.identities[1].participant_id) == "UNKNOWN_PARTICIPANT"
    assert await asked(latents.hosts[1].identity.participant_id) == "UNKNOWN_PARTICIPANT"
    assert await asked(own, first=TERMS.combinations) == "INVALID_FIELD"
    assert await asked(own, epoch=7) == "UNKNOWN_ROUND"
    assert await asked(b"short") == "INVALID_FIELD"


async def test_a_set_is_opened_by_a_holder_of_the_key_and_by_the_key_of_its_epoch(latents, calls):
    holding = (await latents.held())[0]
    host = latents.hosts[0]
    stub, now = host.thirdparty.stub(MetaLatentsStub), int(time.time())

    async def opening(identity, terms=TERMS, **changes):
        record = sign_latent_record(identity, holding.record, terms, now + 60, now + 600)
        message = latent_record_to_wire(record)
        for name, value in changes.items():
            setattr(message, name, value)
        return (await calls.refused(stub.OpenLatents(wire.OpenLatentsRequest(record=message)))).reason

    assert await opening(host.enrolled.identities[1]) == "UNKNOWN_PARTICIPANT"
    assert await opening(people(1, "stranger")[0]) == "UNKNOWN_PARTICIPANT"
    assert await opening(latents.hosts[1].identity) == "UNKNOWN_PARTICIPANT"
    assert await opening(host.identity, epoch=2) == "UNKNOWN_ROUND"
    assert await opening(host.identity, members=4) == "BAD_SIGNATURE"
    assert await opening(host.identity, members=2) == "INVALID_FIELD"


async def test_a_caller_that_states_another_time_opens_no_set_that_is_over(latents):
    holding = (await latents.held())[0]
    host, days = latents.hosts[0], 3 * 86_400
    then = int(time.time()) - days
    record = sign_latent_record(host.identity, holding.record, TERMS, then + 60, then + 600)
    call = host.thirdparty._line.inner.unary_unary("/coterie.v1.MetaLatents/OpenLatents")
    request = wire.OpenLatentsRequest(record=latent_record_to_wire(record)).SerializeToString()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(request, timeout=20, metadata=((CLOCK_KEY, str(then * 1000)),))
    assert "the latent record" in refused.value.details()


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (wire.RelayLatentRequest(), "INVALID_FIELD"),
        (wire.RelayLatentRequest(publish=wire.PublishEncryptedRequest()), "UNKNOWN_ROUND"),
    ],
)
async def test_a_relay_of_nothing_or_of_no_run_is_refused(latents, calls, request_, expected):
    assert (await calls.refused(latents.hosts[0].relay(request_))).reason == expected


async def test_a_third_party_that_hands_out_something_else_is_not_believed(latents):
    holding, opened = await latents.opened()
    await latents.published(opened, holding, cloud())
    await latents.read(holding)
    vector = ciphertext(cloud()[0], terms=TERMS)
    with contextlib.closing(sqlite3.connect(latents.third.state / "expansion.db")) as connection, connection:
        (number,) = connection.execute(
            "SELECT number FROM latent_sets WHERE run_id = ?", (latents.run,)
        ).fetchone()
        connection.execute(
            "UPDATE latent_combinations SET vector = ? WHERE number = ? AND position = 3", (vector, number)
        )
    with pytest.raises(PeerError, match="an encrypted vector under key"):
        await latents.read(holding)


# --- restarts, on both databases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept_in", ["a file", "PostgreSQL"])
async def test_restarts_in_the_middle_lose_nothing(
    kept_in, request, start_third_party, start_member, calls, tmp_path
):
    keys = {}
    if kept_in == "PostgreSQL":
        server = request.getfixturevalue("server")
        keys["expansion_database"] = server.keys(server.database())
    third = start_third_party(**keys)
    cos = start_member("cos", f"latents-{time.monotonic_ns()}", third)
    certificates = {"operator": third.issue(tmp_path / "operator", "operator", "op")}
    latents = await Latents(third, cos, calls, certificates, tmp_path).begin(*SIZES)
    rows = cloud()
    holding, opened = await latents.opened()
    await latents.published(opened, holding, rows, skip=1)

    # The third party is killed while the last vectors are on the way; the calls go on when it is back.
    last = [asyncio.create_task(host.publish(opened, holding, -1, rows[-1])) for host in latents.hosts]
    third.kill()
    await asyncio.sleep(0.2)
    third.start()
    await asyncio.gather(*last)

    # A host that has not heard that its vector was taken sends the same bytes again.
    user = latents.hosts[1].users[0]
    vector = wire.LatentUpload(secret=user.secret, vector=b"other").SerializeToString()
    first = await latents.read(holding)
    user.pending = vector
    user._save()
    latents.hosts[1].open()
    assert await reason(latents.hosts[1].publish(opened, holding, 0, rows[0])) in (
        "INVALID_FIELD",
        "CONFLICT",
    )

    # Restarted, the COS still knows whose vector is whose, and the third party has what it had.
    cos.kill()
    cos.start()
    assert await latents.hosts[0].refusal(0, secret=b"\2" * 32) == "CONFLICT"
    third.stop()
    third.start()
    assert np.array_equal(await latents.read(holding), first)


async def test_without_the_third_party_a_host_is_told_so_and_sends_the_same_vector_later(
    start_third_party, start_member, calls, tmp_path
):
    third = start_third_party()
    cos = start_member("cos", f"alone-{time.monotonic_ns()}", third)
    certificates = {"operator": third.issue(tmp_path / "operator", "operator", "op")}
    latents = await Latents(third, cos, calls, certificates, tmp_path).begin(2)
    holding, opened = await latents.opened()
    host = latents.hosts[0]
    await host.publish(opened, holding, 0, cloud()[0])
    third.stop()
    host.calls._retry = Retry(limit_s=0.0)
    assert await reason(host.publish(opened, holding, 1, cloud()[1])) == "NOT_READY"
    pending = host.users[1].pending
    assert pending
    third.start()
    host.open()
    assert host.users[1].pending == pending
    await host.publish(opened, holding, 1, cloud()[2])
    assert host.users[1].published
    assert (await host.calls.look(holding)).key_users == 2


# --- what each party sees --------------------------------------------------------------------------------------------

TRANSCRIPT = "transcript.bin"


async def test_the_third_party_holds_ciphertexts_and_public_keys_only_and_the_cos_not_even_these(
    start_third_party, start_member, calls, tmp_path
):
    third = start_third_party(transcript=True)
    cos = start_member("cos", f"seen-{time.monotonic_ns()}", third, transcript=True)
    certificates = {"operator": third.issue(tmp_path / "operator", "operator", "op")}
    latents = await Latents(third, cos, calls, certificates, tmp_path).begin(*SIZES)
    rows = cloud()
    holding, opened = await latents.opened()
    await latents.published(opened, holding, rows[:-1], skip=1)
    before = {path: path.read_bytes() for path in third.state.glob("expansion.db*")}
    for host in latents.hosts:
        await host.publish(opened, holding, -1, rows[-1])
    found = await latents.read(holding)
    secret = holding.secrets.secret
    await third.release()
    await cos.release()
    cos.stop()
    third.stop()

    def held_by(service):
        return {
            path: path.read_bytes()
            for path in service.state.rglob("*")
            if path.is_file() and "tls" not in path.parts
        } | {service.log: service.log.read_bytes()}

    plain = [row.astype(kind).tobytes() for row in (*rows, *found) for kind in ("<f4", "<f8")]
    plain += [encode_latent(row, TERMS).tobytes() for row in rows]
    plain += [int(part).to_bytes(secret.public.bits // 16) for part in (one.prime for one in secret.factors)]
    plain += [user.secret for host in latents.hosts for user in host.users]
    participants = {one.participant_id for host in latents.hosts for one in host.enrolled.identities}
    at_third, at_cos = held_by(third), held_by(cos)
    for content in plain:
        for path, held in (*at_third.items(), *at_cos.items(), *before.items()):
            assert content not in held, path
    # What it is for, the third party has: ciphertexts, whose header names the public key, until they are combined.
    assert any(holding.record.key.key_id in held for held in before.values())

    requests = ("PublishEncrypted", "ForgetEncrypted")
    transcript = third.state / TRANSCRIPT
    entries = [one for one in read_transcript(transcript) if one.rpc.rpartition("/")[2] in requests]
    assert {one.peer for one in entries} == {cos.party}
    assert len(entries) >= 2 * sum(SIZES)
    for one in entries:
        assert not any(person in one.payload for person in participants)
    # The COS has relayed no ciphertext that it could keep for a holder of the key.
    relayed = [
        one for one in read_transcript(cos.state / TRANSCRIPT) if one.rpc.rpartition("/")[2] == "RelayLatent"
    ]
    assert relayed
    assert not any(holding.record.key.key_id in one.payload for one in relayed)

    seen = observed({third.party: [transcript], cos.party: [cos.state / TRANSCRIPT]})
    allowed = matrix(rows_of("drift", "published", "clear"))
    for party, role in ((third.party, "thirdparty"), (cos.party, "cos")):
        assert [
            kind for kind, there in seen[party].items() if there and not allowed[role][kind].allowed
        ] == []
    assert seen[third.party]["latent_ciphertext"]
    assert not seen[cos.party]["latent_ciphertext"]
    assert seen[cos.party]["sealed_expansion"]
