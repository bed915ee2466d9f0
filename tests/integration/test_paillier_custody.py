"""Custody of Paillier keys against a real third party: child process, sockets, mutual TLS."""

import asyncio
import contextlib
import sqlite3
from dataclasses import dataclass, field

import grpc
import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.custody import HeldKey, countersign_record, seal_for, sign_record
from coterie.crypto.key_record import KeyTerms
from coterie.crypto.roster import save_roster_key
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError, PeerError
from coterie.net.directory import Directory
from coterie.net.status import from_rpc_error
from coterie.parties.custody import Custody
from coterie.parties.key_records import record_from_wire, record_to_wire, roster_to_wire
from coterie.parties.paillier_directory import PaillierDirectory
from coterie.parties.public_keys import PublicKeys, Trust
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import thirdparty_pb2 as wire
from coterie.wire.v1.thirdparty_pb2 import RevokeRequest

from ..custody import ROSTER_KEY, TERMS, roster

LONG_S = 60.0
"""Bound for what takes a second on a machine that does nothing else."""


class Crash(Exception):  # noqa: N818 - no fault of the code
    """The process of a holder ends here."""


@dataclass
class Holder:
    """One client host with one participant on the roster."""

    enrolled: object
    service: object
    trust: Trust
    folder: object
    gone: set = field(default_factory=set)

    @property
    def identity(self):
        return self.enrolled.identities[0]

    @property
    def participant(self):
        return self.identity.participant_id

    @property
    def party(self):
        return self.enrolled.party

    def start(self, *, patience_s=LONG_S, timeout_s=LONG_S):
        """Return the custody of this holder's process, as after a start of it."""
        channel = self.service.channel(self.enrolled)
        bundles = Directory(channel, self.enrolled.directory_key).bundles
        return Custody(
            channel,
            self.identity,
            self.trust,
            self.folder,
            bundles,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )

    def files(self):
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def directory(third_party):
    """The shared third party, which knows the operator's key for rosters."""
    save_roster_key(third_party.state / "roster.pub", ROSTER_KEY)
    return third_party


@pytest.fixture
def holders(directory, tmp_path, request):
    """Return a function that enrols holders of a run, ascending by id."""

    async def make(count=3):
        run = f"r{abs(hash(request.node.name)) % 10**12}"
        enrolled = [await directory.enrol("client", f"{run}-{one}", 1) for one in range(count)]
        enrolled.sort(key=lambda one: one.identities[0].participant_id)
        listed = roster([one.identities[0] for one in enrolled])
        gone = set()
        trust = Trust(run, listed, ROSTER_KEY, TERMS, lambda: frozenset(gone))
        return [
            Holder(one, directory, trust, tmp_path / f"holder-{at}", gone) for at, one in enumerate(enrolled)
        ]

    return make


async def together(*custodies):
    async with asyncio.timeout(LONG_S):
        return await asyncio.gather(*(one.ensure() for one in custodies))


async def contributor(directory, trust, seen=None, name="contributor"):
    party = await directory.enrol("client", f"{trust.run}-{name}", 1)
    return PublicKeys(directory.channel(party), trust, seen)


async def revoke(directory, holders, *gone):
    """Revoke participants at the third party; the others hear of it."""
    operator = directory.issue(directory.folder / f"{holders[0].trust.run}-op", "operator", "judge")
    ids = [one.participant for one in gone]
    await directory.directory(operator).Revoke(RevokeRequest(participants=ids))
    holders[0].gone.update(ids)


async def reason_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    refusal = from_rpc_error(failed.value, "peer")
    assert isinstance(refusal, Refusal), refusal
    return refusal.name


async def refused(call):
    with pytest.raises(VerificationError) as failed:
        await call
    return failed.value.reason


def change(directory, statement, *values):
    """Change the third party's store behind its back, as whoever controls it can."""
    with contextlib.closing(sqlite3.connect(directory.state / "directory.db")) as connection, connection:
        return connection.execute(statement, values).rowcount


def rows(directory, statement, *values):
    with contextlib.closing(sqlite3.connect(directory.state / "directory.db")) as connection:
        return connection.execute(statement, values).fetchall()


# --- one key -----------------------------------------------------------------------------------------------------


async def test_three_holders_agree_on_one_key_that_a_contributor_takes(directory, holders):
    three = await holders()
    custodies = [one.start() for one in three]
    found = await together(*custodies)
    records = {holding.record.key_id for holding in found}
    assert len(records) == 1
    record = found[0].record
    assert (record.epoch, record.generator) == (1, three[0].participant)
    assert record.holders == tuple(one.participant for one in three)
    assert len({holding.secrets.secret.to_bytes() for holding in found}) == 1

    keys = await contributor(directory, three[0].trust)
    assert (await keys.newest()).key_id == record.key_id
    public = keys.public()
    # What it encrypts, each of them decrypts; what it agrees with the set key, they agree with it.
    p, q = (factor.prime for factor in found[1].secrets.secret.factors)
    assert p * q == public.n
    person = three[0].identity
    agreed = person.agree(record.key.set_public)
    assert {holding.secrets.agree(person.agreement_public) for holding in found} == {agreed}
    assert three[0].files() == {f"{record.run}.1.key", f"{record.run}.1.published"}
    assert three[1].files() == {f"{record.run}.1.key"}
    for one in three:
        assert (one.folder / f"{record.run}.1.key").stat().st_mode & 0o777 == 0o600
        assert one.folder.stat().st_mode & 0o777 == 0o700


async def test_asking_again_changes_nothing_also_after_a_restart_of_the_third_party(
    start_third_party, tmp_path
):
    service = start_third_party()
    save_roster_key(service.state / "roster.pub", ROSTER_KEY)
    enrolled = sorted(
        [await service.enrol("client", f"host-{one}", 1) for one in range(2)],
        key=lambda one: one.identities[0].participant_id,
    )
    trust = Trust("a-run", roster([one.identities[0] for one in enrolled]), ROSTER_KEY, TERMS)
    two = [Holder(one, service, trust, tmp_path / f"h{at}") for at, one in enumerate(enrolled)]
    custodies = [one.start() for one in two]
    found = await together(*custodies)
    files = [one.files() for one in two]
    service.stop()
    service.start()
    assert await together(*custodies) == found
    again = await together(*(one.start() for one in two))
    assert [one.record for one in again] == [one.record for one in found]
    assert [one.files() for one in two] == files


async def test_a_run_with_one_holder_has_a_key_at_once(directory, holders):
    (alone,) = await holders(1)
    holding = await alone.start().ensure()
    assert holding.record.countersignatures == ()
    keys = await contributor(directory, alone.trust)
    assert (await keys.newest()).key_id == holding.record.key_id


# --- restarts ----------------------------------------------------------------------------------------------------


def crashing(monkeypatch, owner, name, *, after):
    """Let the process end at a call, before or after it has had its effect; once."""
    original = getattr(owner, name)
    passed = []

    def crash():
        passed.append(name)
        monkeypatch.setattr(owner, name, original)
        raise Crash

    if asyncio.iscoroutinefunction(original):

        async def async_replacement(self, *arguments, **named):
            if after:
                await original(self, *arguments, **named)
            crash()

        monkeypatch.setattr(owner, name, async_replacement)
    else:

        def replacement(self, *arguments, **named):
            if after:
                original(self, *arguments, **named)
            crash()

        monkeypatch.setattr(owner, name, replacement)
    return passed


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("who", "owner", "name"),
    [
        (0, HeldKey, "save"),
        (0, PaillierDirectory, "publish"),
        (1, HeldKey, "save"),
        (1, PaillierDirectory, "countersign"),
    ],
)
async def test_a_holder_that_ends_at_any_step_goes_on_with_what_is_on_disk(
    directory, holders, monkeypatch, who, owner, name, after
):
    three = await holders()
    if who:
        first = asyncio.create_task(three[0].start().ensure())
        async with asyncio.timeout(LONG_S):
            while not (three[0].folder / f"{three[0].trust.run}.1.published").exists():
                await asyncio.sleep(0.02)
    passed = crashing(monkeypatch, owner, name, after=after)
    with pytest.raises(Crash):
        await three[who].start().ensure()
    assert passed
    left = {path.name: path.read_bytes() for path in three[who].folder.iterdir() if path.suffix == ".key"}
    others = [one.start() for at, one in enumerate(three) if at and at != who]
    again = [three[who].start(), *others]
    found = await together(*again) + ([await first] if who else [])
    assert len({holding.record.key_id for holding in found}) == 1
    run = three[0].trust.run
    assert rows(directory, "SELECT epoch FROM paillier_keys WHERE run_id = ?", run) == [(1,)]
    # What it had on disk is what it holds.
    for file, content in left.items():
        assert (three[who].folder / file).read_bytes() == content


# --- who makes the key -------------------------------------------------------------------------------------------


async def test_when_the_first_holder_does_not_publish_in_time_the_second_one_does(directory, holders):
    three = await holders()
    found = await together(three[1].start(patience_s=0.5), three[2].start(), Later(three[0]))
    assert {holding.record.generator for holding in found} == {three[1].participant}
    assert len({holding.record.key_id for holding in found}) == 1


@dataclass
class Later:
    """The custody of a holder that begins when somebody has published."""

    holder: Holder

    async def ensure(self):
        one = self.holder
        looking = PaillierDirectory(one.service.channel(one.enrolled))
        while (await looking.envelope(one.trust.run, one.participant, hold_s=5.0)).record is None:
            pass
        return await one.start().ensure()


async def test_a_first_holder_that_comes_too_late_gives_its_own_key_up(directory, holders, monkeypatch):
    three = await holders()
    crashing(monkeypatch, PaillierDirectory, "publish", after=False)
    with pytest.raises(Crash):
        await three[0].start().ensure()
    own = HeldKey.load(three[0].folder / f"{three[0].trust.run}.1.key", TERMS)
    found = await together(three[1].start(patience_s=0.1), three[2].start(), Later(three[0]))
    assert {holding.record.generator for holding in found} == {three[1].participant}
    held = HeldKey.load(three[0].folder / f"{three[0].trust.run}.1.key", TERMS)
    assert held.key_id == found[0].record.key_id != own.key_id
    assert three[0].files() == {f"{three[0].trust.run}.1.key"}


async def test_of_two_that_publish_at_once_one_has_the_epoch_and_both_hold_its_key(directory, holders):
    three = await holders()
    found = await together(*(one.start(patience_s=0.0) for one in three))
    assert len({holding.record.key_id for holding in found}) == 1
    run = three[0].trust.run
    assert rows(directory, "SELECT epoch FROM paillier_keys WHERE run_id = ?", run) == [(1,)]
    assert all(f"{run}.1.publication" not in one.files() for one in three)


async def test_a_key_that_is_not_complete_in_time_names_who_has_not_countersigned(directory, holders):
    three = await holders()
    with pytest.raises(PeerError) as late:
        await asyncio.gather(*(one.start(timeout_s=1.0).ensure() for one in three[:2]))
    assert three[2].participant.hex()[:16] in late.value.hint
    with pytest.raises(PeerError, match=r"no complete Paillier key after 0\.2 s"):
        await (await contributor(directory, three[0].trust)).newest(timeout_s=0.2)


async def test_whoever_is_not_on_the_roster_or_revoked_holds_nothing(directory, holders):
    three = await holders()
    stranger = await directory.enrol("client", f"{three[0].trust.run}-stranger", 1)
    outside = Holder(stranger, directory, three[0].trust, three[0].folder.parent / "outside")
    with pytest.raises(CertificateError, match="not on the roster"):
        await outside.start().ensure()
    three[0].gone.add(three[1].participant)
    with pytest.raises(CertificateError, match="was revoked"):
        await three[1].start().ensure()


# --- rotation ----------------------------------------------------------------------------------------------------


async def test_rotation_makes_the_next_epoch_and_contributors_hear_of_it(directory, holders):
    three = await holders()
    custodies = [one.start() for one in three]
    first = await together(*custodies)
    keys = await contributor(directory, three[0].trust)
    await keys.newest()
    waiting = asyncio.create_task(keys.newer(20.0))
    async with asyncio.timeout(LONG_S):
        second = await asyncio.gather(*(one.rotate() for one in custodies))
        heard = await waiting
    assert {holding.record.epoch for holding in second} == {2}
    assert len({holding.record.key_id for holding in second}) == 1
    assert heard.key_id == second[0].record.key_id == keys.public().key_id
    # The old secret opens what is still under way, until they are told.
    old = first[0].record.key_id
    assert custodies[1].secrets(old).key_id == old
    assert custodies[1].destroy_below(2) == [1]
    with pytest.raises(VerificationError, match="not held"):
        custodies[1].secrets(old)
    assert three[1].files() == {f"{three[1].trust.run}.2.key"}
    assert (await three[1].start().ensure()).record.epoch == 2
    # The directory has forgotten what was sealed of the first epoch.
    run = three[0].trust.run
    assert rows(directory, "SELECT DISTINCT epoch FROM paillier_envelopes WHERE run_id = ?", run) == [(2,)]


async def test_holders_that_follow_join_a_rotation_and_replace_the_key_of_a_revoked_one(directory, holders):
    three = await holders()
    heard = [asyncio.Queue() for _ in three]
    custodies = [one.start() for one in three]
    following = [
        asyncio.create_task(custody.follow(queue.put_nowait))
        for custody, queue in zip(custodies, heard, strict=True)
    ]

    async def all_hear(*queues):
        async with asyncio.timeout(LONG_S):
            return [(await queue.get()).record for queue in queues]

    assert {record.epoch for record in await all_hear(*heard)} == {1}
    async with asyncio.timeout(LONG_S):
        rotated = await custodies[0].rotate()
    assert {record.key_id for record in await all_hear(*heard)} == {rotated.record.key_id}
    assert rotated.record.epoch == 2
    await revoke(directory, three, three[0])
    replaced = await all_hear(*heard[1:])
    assert {record.epoch for record in replaced} == {3}
    assert replaced[0].holders == tuple(one.participant for one in three[1:])
    assert all(queue.empty() for queue in heard)
    for task in following:
        task.cancel()
    ended = await asyncio.gather(*following, return_exceptions=True)
    assert [type(one) for one in ended] == [asyncio.CancelledError] * 3


@pytest.mark.parametrize("who", [0, 2])
async def test_when_a_holder_is_revoked_the_others_rotate_without_it(directory, holders, who):
    three = await holders()
    custodies = [one.start() for one in three]
    await together(*custodies)
    keys = await contributor(directory, three[0].trust)
    old = await keys.newest()
    await revoke(directory, three, three[who])
    with pytest.raises(VerificationError) as error:
        keys.public()
    assert error.value.reason is Reason.REVOKED
    waiting = asyncio.create_task(keys.newest())
    rest = [custody for at, custody in enumerate(custodies) if at != who]
    found = await together(*rest)
    holders_now = tuple(one.participant for at, one in enumerate(three) if at != who)
    assert {holding.record.epoch for holding in found} == {2}
    assert found[0].record.holders == holders_now
    assert found[0].record.generator == holders_now[0]
    assert (await waiting).key_id == found[0].record.key_id != old.key_id
    # The revoked one gets nothing any more, whatever its process believes.
    stub = directory.directory(three[who].enrolled)
    request = wire.PaillierEnvelopeRequest(run_id=old.run, participant=three[who].participant)
    assert await reason_of(stub.PaillierEnvelope(request)) == "REVOKED"
    with pytest.raises(CertificateError, match="was revoked"):
        await custodies[who].ensure()


async def test_a_key_published_before_its_generator_is_revoked_is_passed_over(directory, holders):
    three = await holders()
    with pytest.raises(PeerError):
        await three[0].start(timeout_s=0.5).ensure()
    await revoke(directory, three, three[0])
    found = await together(*(one.start() for one in three[1:]))
    assert {holding.record.epoch for holding in found} == {2}
    assert {holding.record.generator for holding in found} == {three[1].participant}


# --- a third party that lies -------------------------------------------------------------------------------------


async def test_what_was_sealed_for_another_holder_is_neither_handed_out_nor_opens(directory, holders):
    three = await holders()
    with pytest.raises(PeerError):
        await three[0].start(timeout_s=0.5).ensure()
    run = three[0].trust.run
    request = wire.PaillierEnvelopeRequest(run_id=run, participant=three[1].participant)
    stub = directory.directory(three[2].enrolled)
    assert await reason_of(stub.PaillierEnvelope(request)) == "UNKNOWN_PARTICIPANT"
    stolen = rows(directory, "SELECT sealed FROM paillier_envelopes WHERE holder = ?", three[1].participant)[
        0
    ][0]
    statement = "UPDATE paillier_envelopes SET sealed = ? WHERE holder = ?"
    assert change(directory, statement, stolen, three[2].participant) == 1
    assert await refused(three[2].start().ensure()) is Reason.NOT_AUTHENTIC
    assert three[2].files() == set()


async def test_a_forged_countersignature_is_refused_by_everybody(directory, holders):
    three = await holders()
    custodies = [one.start() for one in three]
    await together(*custodies)
    statement = "UPDATE paillier_countersignatures SET signature = ? WHERE holder = ?"
    assert change(directory, statement, bytes(64), three[2].participant) == 1
    keys = await contributor(directory, three[0].trust)
    assert await refused(keys.newest()) is Reason.BAD_COUNTERSIGNATURE
    with pytest.raises(PeerError, match="no Paillier key was fetched"):
        keys.public()
    assert await refused(custodies[0].ensure()) is Reason.BAD_COUNTERSIGNATURE


async def test_one_countersignature_too_few_is_refused(directory, holders):
    three = await holders()
    await together(*(one.start() for one in three))
    assert change(directory, "DELETE FROM paillier_countersignatures WHERE holder = ?", three[2].participant)
    change(directory, "UPDATE paillier_keys SET needed = 0 WHERE run_id = ?", three[0].trust.run)
    keys = await contributor(directory, three[0].trust)
    assert await refused(keys.newest(timeout_s=0.5)) is Reason.NOT_COUNTERSIGNED
    assert await refused(three[0].start(timeout_s=0.5).ensure()) is Reason.NOT_COUNTERSIGNED


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (lambda key: {"modulus": b"\x01" + key.modulus}, Reason.MALFORMED),
        (lambda key: {"modulus": key.modulus[:-2]}, Reason.MALFORMED),
        (lambda key: {"bits": 2048}, Reason.MALFORMED),
        (lambda key: {"modulus": key.modulus[:-1] + bytes([key.modulus[-1] ^ 2])}, Reason.BAD_SIGNATURE),
        (lambda key: {"set_public": bytes(32)}, Reason.BAD_SIGNATURE),
    ],
)
async def test_a_modulus_of_another_length_or_value_is_refused(directory, holders, how, reason):
    three = await holders()
    await together(*(one.start() for one in three))
    run = three[0].trust.run
    content = rows(directory, "SELECT record FROM paillier_keys WHERE run_id = ?", run)[0][0]
    message = wire.PaillierRecord.FromString(content)
    for name, value in how(message.key).items():
        setattr(message.key, name, value)
    change(
        directory,
        "UPDATE paillier_keys SET record = ? WHERE run_id = ?",
        message.SerializeToString(deterministic=True),
        run,
    )
    keys = await contributor(directory, three[0].trust)
    assert await refused(keys.newest()) is reason
    assert await refused(three[1].start().ensure()) is reason


async def test_a_key_that_the_run_does_not_ask_for_is_taken_by_nobody(directory, holders):
    three = await holders()
    await together(*(one.start() for one in three))
    wants = Trust(three[0].trust.run, three[0].trust.roster, ROSTER_KEY, KeyTerms(bits=2048))
    keys = await contributor(directory, wants)
    assert await refused(keys.newest()) is Reason.MALFORMED


async def test_a_lower_epoch_than_was_seen_is_refused_also_after_a_restart(directory, holders, tmp_path):
    three = await holders()
    custodies = [one.start() for one in three]
    await together(*custodies)
    seen = tmp_path / "seen.json"
    keys = await contributor(directory, three[0].trust, seen)
    await keys.newest()
    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*(one.rotate() for one in custodies))
    assert (await keys.newest()).epoch == 2
    run = three[0].trust.run
    for table in ("keys", "envelopes", "countersignatures"):
        change(directory, f"DELETE FROM paillier_{table} WHERE run_id = ? AND epoch = 2", run)
    assert await refused(keys.newest()) is Reason.OLD_EPOCH
    assert keys.public().key_id == custodies[0].current.record.key_id
    restarted = await contributor(directory, three[0].trust, seen, "restarted")
    assert await refused(restarted.newest()) is Reason.OLD_EPOCH
    # Holders are not led back either; the one that made the newer key publishes it again.
    for one in three[1:]:
        assert await refused(one.start().ensure()) is Reason.OLD_EPOCH
        assert await refused(one.start().rotate()) is Reason.OLD_EPOCH
    with pytest.raises(PeerError, match="epoch 2 is not complete"):
        await three[0].start(timeout_s=0.5).ensure()
    again = await together(*(one.start() for one in three))
    assert [one.record for one in again] == [one.current.record for one in custodies]
    assert (await restarted.newest()).epoch == 2
    with pytest.raises(CertificateError, match="run"):
        PublicKeys(directory.channel(three[0].enrolled), Trust("other", three[0].trust.roster, b""), seen)


async def test_when_the_third_party_forgets_a_key_its_generator_publishes_it_again(directory, holders):
    three = await holders()
    found = await together(*(one.start() for one in three))
    run = three[0].trust.run
    for table in ("keys", "envelopes", "countersignatures"):
        change(directory, f"DELETE FROM paillier_{table} WHERE run_id = ?", run)
    assert await refused(three[1].start().ensure()) is Reason.OLD_EPOCH
    again = await together(three[0].start(), *(Later(one) for one in three[1:]))
    assert [one.record for one in again] == [one.record for one in found]


# --- what the directory refuses ----------------------------------------------------------------------------------


def request_of(three, *, epoch=1, listed=None, generator=0, holders=None, run=None):
    """Return a publication as a holder makes it."""
    people = [one.identity for one in three]
    held = HeldKey.generate(run or three[0].trust.run, epoch, TERMS)
    ids = holders or tuple(one.participant_id for one in people)
    record = sign_record(people[generator], held, ids)
    envelopes = [
        wire.SealedPaillierKey(holder=one.participant, sealed=seal_for(one.enrolled.bundles[0], held, record))
        for one in three
        if one.participant in ids and one.participant != record.generator
    ]
    return wire.PublishPaillierKeyRequest(
        record=record_to_wire(record),
        envelopes=envelopes,
        roster=roster_to_wire(listed or three[0].trust.roster),
    ), held


async def test_the_directory_refuses_what_it_can_see_to_be_wrong(directory, holders):
    three = await holders()
    stub = directory.directory(three[0].enrolled)
    people = [one.identity for one in three]
    good, held = request_of(three)

    def changed(**fields):
        message = wire.PublishPaillierKeyRequest()
        message.CopyFrom(good)
        for name, value in fields.items():
            target, names = message, name.split("__")
            for part in names[:-1]:
                target = getattr(target, part)
            setattr(target, names[-1], value)
        return message

    async def reason(message, at=stub):
        return await reason_of(at.PublishPaillierKey(message))

    assert await reason(good, directory.directory(three[1].enrolled)) == "UNKNOWN_PARTICIPANT"
    assert await reason(wire.PublishPaillierKeyRequest()) == "INVALID_FIELD"
    assert await reason(changed(record__signature=bytes(64))) == "BAD_SIGNATURE"
    assert await reason(changed(record__epoch=2)) == "BAD_SIGNATURE"
    assert await reason(changed(record__key__run_id="No Run")) == "INVALID_FIELD"
    assert await reason(changed(record__key__modulus=bytes(128))) == "INVALID_FIELD"
    assert await reason(request_of(three, epoch=2)[0]) == "SEQUENCE_MISMATCH"
    for wrong in (
        roster(people, key=Ed25519PrivateKey.generate()),
        roster(people, expires_in=-601, issued_ago=1200),
        roster(people, run="other"),
        roster(people, purpose="other"),
    ):
        assert await reason(request_of(three, listed=wrong)[0]) == "BAD_SIGNATURE"
    assert await reason(request_of(three, listed=roster(people[:2]))[0]) == "UNKNOWN_PARTICIPANT"
    pair = tuple(one.participant_id for one in people[:2])
    assert await reason(request_of(three, holders=pair)[0]) == "BELOW_FLOOR"
    unsorted = changed()
    unsorted.roster.members[:] = reversed(unsorted.roster.members)
    assert await reason(unsorted) == "INVALID_FIELD"

    swapped = changed()
    swapped.envelopes.reverse()
    fewer = changed()
    del fewer.envelopes[1]
    for message in (swapped, fewer):
        assert await reason(message) == "INVALID_FIELD"
    large = changed()
    large.envelopes[0].sealed = bytes((1 << 13) + 1)
    assert await reason(large) == "TOO_LARGE"
    signed = changed()
    one = countersign_record(people[1], held, record_from_wire(good.record))
    signed.record.countersignatures.add(signing_public=one.signing_public, signature=one.signature)
    assert await reason(signed) == "INVALID_FIELD"
    assert rows(directory, "SELECT * FROM paillier_keys WHERE run_id = ?", three[0].trust.run) == []

    # The same again is acknowledged, and nothing else takes the epoch.
    await stub.PublishPaillierKey(good)
    await stub.PublishPaillierKey(good)
    assert await reason(request_of(three)[0]) == "CONFLICT"
    second = directory.directory(three[1].enrolled)
    assert await reason(request_of(three, generator=1)[0], second) == "CONFLICT"

    at = second
    countersigning = wire.CountersignPaillierKeyRequest(run_id=three[0].trust.run, epoch=1)
    countersigning.countersignature.signing_public = one.signing_public
    assert await reason_of(at.CountersignPaillierKey(countersigning)) == "BAD_SIGNATURE"
    countersigning.countersignature.signature = one.signature
    other = directory.directory(three[2].enrolled)
    assert await reason_of(other.CountersignPaillierKey(countersigning)) == "UNKNOWN_PARTICIPANT"
    assert not (await at.CountersignPaillierKey(countersigning)).complete
    assert not (await at.CountersignPaillierKey(countersigning)).complete
    countersigning.epoch = 2
    assert await reason_of(at.CountersignPaillierKey(countersigning)) == "UNKNOWN_ROUND"
    countersigning.epoch = 0
    assert await reason_of(at.CountersignPaillierKey(countersigning)) == "INVALID_FIELD"
    request = wire.PaillierEnvelopeRequest(run_id=three[0].trust.run, participant=b"short")
    assert await reason_of(at.PaillierEnvelope(request)) == "INVALID_FIELD"


async def test_without_the_operators_key_the_directory_takes_no_key(start_third_party, tmp_path):
    service = start_third_party()
    anna = await service.enrol("client", "anna", 1)
    trust = Trust("a-run", roster([anna.identities[0]]), ROSTER_KEY, TERMS)
    holder = Holder(anna, service, trust, tmp_path / "holder")
    request, _ = request_of([holder])
    assert await reason_of(service.directory(anna).PublishPaillierKey(request)) == "NOT_READY"
    # It may come while the third party runs.
    save_roster_key(service.state / "roster.pub", ROSTER_KEY)
    await service.directory(anna).PublishPaillierKey(request)


async def test_a_call_that_waits_for_a_key_is_answered_when_its_time_is_up(directory, holders):
    (alone,) = await holders(1)
    stub = directory.directory(alone.enrolled)
    asked = {"run_id": alone.trust.run, "hold_ms": 200}
    assert not (await stub.PaillierPublicKey(wire.PaillierPublicKeyRequest(**asked))).HasField("record")
    envelope = wire.PaillierEnvelopeRequest(participant=alone.participant, **asked)
    assert not (await stub.PaillierEnvelope(envelope)).HasField("record")


# --- secrets -----------------------------------------------------------------------------------------------------


async def test_no_secret_is_in_a_log_or_anywhere_at_the_third_party(start_third_party, tmp_path):
    service = start_third_party(transcript=True)
    save_roster_key(service.state / "roster.pub", ROSTER_KEY)
    enrolled = sorted(
        [await service.enrol("client", f"host-{one}", 1) for one in range(3)],
        key=lambda one: one.identities[0].participant_id,
    )
    trust = Trust("a-run", roster([one.identities[0] for one in enrolled]), ROSTER_KEY, TERMS)
    three = [Holder(one, service, trust, tmp_path / f"h{at}") for at, one in enumerate(enrolled)]
    with structlog.testing.capture_logs() as logs:
        custodies = [one.start() for one in three]
        found = await together(*custodies)
        custodies[0].destroy_below(2)
    secrets = found[0].secrets
    p, q = (int(factor.prime) for factor in secrets.secret.factors)
    content = secrets._sealable()
    planted = [p.to_bytes(64), q.to_bytes(64), content[:32], secrets.secret.to_bytes()[-10:]]
    texts = [*(one.hex().encode() for one in planted), str(p).encode(), str(q).encode()]
    service.stop()
    files = [path for path in service.folder.rglob("*") if path.is_file()]
    held = {path: path.read_bytes() for path in files}
    # What is public is found, so the search sees what there is.
    modulus = found[0].record.key.modulus
    assert any(modulus in data for path, data in held.items() if "directory.db" in path.name)
    assert any(path.suffix == ".log" and b"paillier key" in data for path, data in held.items())
    assert any("transcript" in str(path) and modulus in data for path, data in held.items())
    for path, data in [*held.items(), ("logs of the holders", repr(logs).encode())]:
        assert not [one for one in (*planted, *texts) if one in data], path
    assert {one["event"] for one in logs} >= {"paillier key made", "paillier key countersigned"}
