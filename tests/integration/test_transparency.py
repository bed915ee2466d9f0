"""The third party's log against real services: an honest one is never accused, and one that lies is caught.

A third party that shows two logs is two processes with the same keys: the state folder is copied, and both go on.
"""

import asyncio
import contextlib
import json
import shutil
import sqlite3
import sys
import time

import grpc
import pytest

from coterie.crypto.authority import Authority, load_tls_key, make_csr
from coterie.crypto.beacon import beacon_statement, draw_beacon
from coterie.crypto.identity import Identity, countersign
from coterie.crypto.merkle import Tree
from coterie.crypto.transparency import (
    BEACON,
    BUNDLE,
    CERTIFICATE,
    REVOCATION,
    Evidence,
    FalseLogError,
    LogBreach,
    bundle_statement,
    certificate_statement,
    entry_leaf,
    revocation_statement,
)
from coterie.errors import PeerError
from coterie.net.directory import Directory
from coterie.net.log_messages import head_from_wire, head_to_wire
from coterie.net.status import from_rpc_error
from coterie.net.transparency import LogWatch, read_evidence, read_head
from coterie.rounds.population import Population
from coterie.secure_sum.bundles import bundle_to_wire
from coterie.store.authority import load_secrets
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import log_pb2 as wire
from coterie.wire.v1.log_pb2_grpc import LogGossipStub, TransparencyLogStub
from coterie.wire.v1.operator_pb2 import RunPhase
from coterie.wire.v1.thirdparty_pb2 import RevokeRequest

from .conftest import Operating, ThirdParty, toml

SOON_S = 60.0


class Forked(ThirdParty):
    """A second process of a third party that shows another log: it has the state of the first, and goes on alone."""

    def __init__(self, honest: ThirdParty, folder) -> None:
        super().__init__(folder)
        shutil.copytree(honest.state, self.state, ignore=shutil.ignore_patterns("directory.db*", "lock"))
        copy_store(honest.state / "directory.db", self.state / "directory.db")


def copy_store(source, target):
    with (
        contextlib.closing(sqlite3.connect(source)) as live,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        live.backup(copy)
    target.chmod(0o600)


@pytest.fixture
async def forked(tmp_path_factory):
    """Return a function that starts a second process of a third party."""
    started = []

    def start(honest):
        service = Forked(honest, tmp_path_factory.mktemp("forked"))
        started.append(service)
        service.start()
        return service

    yield start
    for service in started:
        await service.release()
        service.stop()


def watch_of(party, service):
    """Return a party's watch over the log of a third party's process."""
    return LogWatch(
        service.channel(party), party.directory_key, party.settings.state, party.tls.chain.read_bytes
    )


def log_of(party, service):
    return service.channel(party).stub(TransparencyLogStub)


async def reason_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    refusal = from_rpc_error(failed.value, "peer")
    assert isinstance(refusal, Refusal), refusal
    return refusal.name, refusal.field


async def all_entries(log):
    found = []
    while page := (await log.LogEntries(wire.LogEntriesRequest(first=len(found), count=3))).entries:
        found += [(entry.kind, entry.statement) for entry in page]
    return found


async def drawn(service, cos, host):
    """Let a COS commit to the users of a host as the population of a run; return it with its beacon."""
    users = sorted(bundle.participant_id for bundle in host.bundles)
    population = Population(users, [host.party] * len(users))
    directory = Directory(service.channel(cos), host.directory_key)
    return population, await directory.commit_population("a-run", population)


# --- an honest third party -----------------------------------------------------------------------------------------


async def test_everything_that_is_signed_is_in_the_log_and_the_head_is_over_it(start_third_party):
    service = start_third_party()
    anna = await service.enrol("client", "anna", 2)
    cos = await service.enrol("cos", "cos")
    operator = await service.enrol("operator", "operator")
    population, beacon = await drawn(service, cos, anna)
    gone = anna.identities[1].participant_id
    revision = (await service.directory(operator).Revoke(RevokeRequest(participants=[gone]))).revision
    log = log_of(anna, service)
    entries = await all_entries(log)
    expected = [
        *((CERTIFICATE, certificate_statement(one.tls.chain.read_bytes())) for one in (anna, cos, operator)),
        (CERTIFICATE, certificate_statement((service.state / "tls" / "chain.pem").read_bytes())),
        *((BUNDLE, bundle_statement(bundle)) for bundle in anna.bundles),
        (BEACON, beacon_statement("a-run", population.hash("a-run"), beacon.value)),
        (REVOCATION, revocation_statement("participant", gone, revision)),
    ]
    assert sorted(entries) == sorted(expected)
    head = head_from_wire((await log.LogHead(wire.LogHeadRequest())).head)
    head.verify(anna.directory_key)
    tree = Tree()
    for kind, statement in entries:
        tree.append(entry_leaf(kind, statement))
    assert (head.size, head.root) == (len(entries), tree.root())


async def test_what_is_signed_twice_is_logged_once(start_third_party):
    service = start_third_party()
    anna = await service.enrol("client", "anna", 1)
    cos = await service.enrol("cos", "cos")
    before = await all_entries(log_of(anna, service))
    await service.enrol_with("client", anna.settings, 1)
    await Directory(service.channel(anna), anna.directory_key).publish(anna.bundles, anna.bundles[0].party)
    for _ in range(2):
        await drawn(service, cos, anna)
    service.stop()
    service.start()
    await service.release()
    after = await all_entries(log_of(anna, service))
    assert [kind for kind, _ in after[len(before) :]] == [BEACON]
    assert after[: len(before)] == before


@pytest.mark.parametrize(
    ("call", "request_", "field"),
    [
        ("LogInclusion", wire.LogInclusionRequest(leaves=[bytes(31)], size=1), "leaves"),
        ("LogInclusion", wire.LogInclusionRequest(leaves=[bytes(32)], size=10**6), "size"),
        ("LogInclusion", wire.LogInclusionRequest(leaves=[bytes(32)], size=1 << 63), "size"),
        ("LogConsistency", wire.LogConsistencyRequest(first=1, second=10**6), "second"),
        ("LogConsistency", wire.LogConsistencyRequest(first=2, second=1), "first"),
        ("LogConsistency", wire.LogConsistencyRequest(first=1, second=1 << 63), "second"),
        ("LogEntries", wire.LogEntriesRequest(first=0, count=0), "count"),
        ("LogEntries", wire.LogEntriesRequest(first=0, count=1001), "count"),
        ("LogEntries", wire.LogEntriesRequest(first=1 << 63, count=1), "first"),
    ],
)
async def test_questions_out_of_bounds_are_refused(third_party, certificates, call, request_, field):
    log = log_of(certificates["client"], third_party)
    assert await reason_of(getattr(log, call)(request_)) == ("INVALID_FIELD", field)


async def test_too_many_leaves_at_once_are_refused(third_party, certificates):
    request = wire.LogInclusionRequest(leaves=[bytes(32)] * 1001, size=1)
    log = log_of(certificates["client"], third_party)
    assert await reason_of(log.LogInclusion(request)) == ("TOO_LARGE", "leaves")


async def test_an_honest_third_party_is_not_accused_while_its_log_grows_and_it_restarts(start_third_party):
    service = start_third_party()
    parties = [await service.enrol("client", f"party-{n}", 2) for n in range(3)]
    watches = [watch_of(party, service) for party in parties]
    sizes = []

    async def look(watch):
        for _ in range(10):
            head = await watch.refresh()
            for other in watches:
                if other.head is not None:
                    await watch.see(other.head)
            sizes.append(head.size)

    for turn in range(2):
        growing = [service.enrol("client", f"more-{turn}-{n}", 3) for n in range(5)]
        await asyncio.gather(*growing, *map(look, watches))
        await service.release()
        service.stop()
        service.start()
        watches = [watch_of(party, service) for party in parties]
    for party, watch in zip(parties, watches, strict=True):
        await watch.ready()
        await watch.require(BUNDLE, map(bundle_statement, party.bundles))
        assert (await watch.refresh()).size == max(sizes) == 1 + 3 * 3 + 10 * 4
        assert watch.found is None
        assert read_evidence(party.settings.state) is None


async def test_a_party_that_starts_again_needs_no_third_party_for_what_it_was_shown(start_third_party):
    service = start_third_party()
    anna = await service.enrol("client", "anna", 1)
    await watch_of(anna, service).ready()
    await service.release()
    service.stop()
    async with asyncio.timeout(SOON_S):
        await watch_of(anna, service).ready()
    service.start()


# --- one that signs what it does not log --------------------------------------------------------------------------


def unlogged_bundle(service, name="sybil"):
    """Let a third party countersign a bundle and publish it without logging it; return the participant's id."""
    now = int(time.time())
    identity = Identity.generate()
    unsigned = identity.bundle(1, (now - 60, now + 3600))
    bundle = countersign(unsigned, load_secrets(service.state).signing_key, f"client/{name}")
    row = (
        identity.participant_id,
        f"client/{name}",
        bytes(32),
        1,
        bundle_to_wire(bundle).SerializeToString(),
    )
    with contextlib.closing(sqlite3.connect(service.state / "directory.db")) as connection:
        connection.execute(
            "INSERT INTO bundles (participant, party, token_hash, version, message) VALUES (?, ?, ?, ?, ?)",
            row,
        )
        connection.commit()
    return identity.participant_id


async def test_a_bundle_that_is_not_logged_is_not_relied_on(start_third_party):
    service = start_third_party()
    anna = await service.enrol("client", "anna", 1)
    sybil = unlogged_bundle(service)
    real = anna.identities[0].participant_id
    # Without the log nobody notices: the bundle carries the directory's countersignature.
    unchecked = Directory(service.channel(anna), anna.directory_key)
    assert set(await unchecked.bundles([sybil, real])) == {sybil, real}
    watch = watch_of(anna, service)
    directory = Directory(service.channel(anna), anna.directory_key, log=watch)
    assert set(await directory.bundles([real])) == {real}
    with pytest.raises(FalseLogError) as caught:
        await directory.bundles([sybil])
    assert "thirdparty/directory" in caught.value.message
    evidence = read_evidence(anna.settings.state)
    assert (evidence.finding, evidence.kind) == (LogBreach.NOT_LOGGED, BUNDLE)
    evidence.heads[0].verify(anna.directory_key)
    # Nothing else of this third party is relied on any more, now or after a restart.
    for again in (watch, watch_of(anna, service)):
        with pytest.raises(FalseLogError):
            await again.refresh()


async def test_a_beacon_and_a_certificate_that_are_not_logged_are_not_relied_on(start_third_party):
    service = start_third_party()
    for kind in (BEACON, CERTIFICATE):
        anna = await service.enrol("client", f"anna-{kind}")
        if kind == BEACON:
            drawn_for = draw_beacon("a-run", bytes(32), load_secrets(service.state).signing_key)
            statement = beacon_statement("a-run", bytes(32), drawn_for.value)
        else:
            request = make_csr(load_tls_key(anna.tls.key))
            statement = certificate_statement(
                Authority.load(service.state).issue(request, "client", "anna", 1)
            )
        with pytest.raises(FalseLogError):
            await watch_of(anna, service).require(kind, [statement])
        assert read_evidence(anna.settings.state).kind == kind


async def test_noted_bundles_are_shown_to_be_logged_before_anything_leaves(start_third_party):
    service = start_third_party()
    anna = await service.enrol("client", "anna", 2)
    watch = watch_of(anna, service)
    for bundle in anna.bundles:
        watch.note(bundle)
    await watch.settled()
    sybil = unlogged_bundle(service)
    found = await Directory(service.channel(anna), anna.directory_key).bundles([sybil])
    watch.note(found[sybil])
    with pytest.raises(FalseLogError):
        await watch.settled()


async def test_bundles_are_checked_later_while_the_third_party_is_away_for_a_short_time(start_third_party):
    service = start_third_party()
    anna = await service.enrol("client", "anna", 1)
    sybil = unlogged_bundle(service)
    found = await Directory(service.channel(anna), anna.directory_key).bundles([sybil])
    channel = service.channel(anna)
    now = [1000.0]
    watch = LogWatch(channel, anna.directory_key, anna.settings.state, clock=lambda: now[0])
    await watch.refresh()
    service.stop()
    watch.note(found[sybil])
    await watch.settled()
    now[0] += 601.0
    waiting = asyncio.create_task(watch.settled())
    service.start()
    with pytest.raises(FalseLogError):
        async with asyncio.timeout(2 * SOON_S):
            await waiting


async def test_a_third_party_cannot_put_off_the_comparison_of_two_heads_for_long(start_third_party, forked):
    honest = start_third_party()
    anna = await honest.enrol("client", "anna", 1)
    berta = await honest.enrol("client", "berta", 1)
    other = forked(honest)
    await honest.enrol("client", "carla", 1)
    await other.enrol("client", "sybil")
    now = [1000.0]
    watch = LogWatch(other.channel(berta), berta.directory_key, berta.settings.state, clock=lambda: now[0])
    await watch.refresh()
    # The larger head is the later one: only a proof could show that they are of two logs.
    shown = await watch_of(anna, honest).refresh()
    other.stop()
    with pytest.raises(PeerError):
        await watch.see(shown)
    # It may be away for a while; afterwards nothing leaves before it has shown that the heads are of one log.
    await watch.settled()
    now[0] += 601.0
    waiting = asyncio.create_task(watch.settled())
    other.start()
    with pytest.raises(FalseLogError):
        async with asyncio.timeout(2 * SOON_S):
            await waiting


# --- two logs ------------------------------------------------------------------------------------------------------


async def test_a_log_that_is_restored_from_a_backup_is_caught_and_named_so(start_third_party, tmp_path):
    service = start_third_party()
    anna = await service.enrol("client", "anna", 1)
    copy_store(service.state / "directory.db", tmp_path / "backup.db")
    await service.enrol("client", "berta", 1)
    head = await watch_of(anna, service).refresh()
    await service.release()
    service.stop()
    for file in service.state.glob("directory.db*"):
        file.unlink()
    shutil.copy(tmp_path / "backup.db", service.state / "directory.db")
    service.start()
    with pytest.raises(FalseLogError) as caught:
        await watch_of(anna, service).refresh()
    assert "set back" in caught.value.message
    assert "thirdparty/directory" in caught.value.message
    evidence = read_evidence(anna.settings.state)
    assert evidence.finding == LogBreach.WENT_BACK
    assert [one.size for one in evidence.heads] == [head.size, head.size - 2]
    assert evidence.convicts(anna.directory_key)


async def test_a_log_that_grew_again_after_a_restoration_is_caught(start_third_party, tmp_path):
    service = start_third_party()
    anna = await service.enrol("client", "anna", 1)
    copy_store(service.state / "directory.db", tmp_path / "backup.db")
    await service.enrol("client", "berta")
    await watch_of(anna, service).refresh()
    await service.release()
    service.stop()
    for file in service.state.glob("directory.db*"):
        file.unlink()
    shutil.copy(tmp_path / "backup.db", service.state / "directory.db")
    service.start()
    for name, finding in (("carla", LogBreach.TWO_LOGS), ("dora", LogBreach.NOT_CONSISTENT)):
        await service.enrol("client", name)
        state = anna.settings.state
        with pytest.raises(FalseLogError) as caught:
            await watch_of(anna, service).refresh()
        assert caught.value.evidence.finding == finding
        (state / "log" / "evidence.json").unlink()


async def test_heads_that_nobody_signed_change_nothing(start_third_party, start_member, calls):
    service = start_third_party()
    cos = start_member("cos", "cos", service)
    anna = await service.enrol("client", "anna")
    head = await watch_of(anna, service).refresh()
    forged = head_to_wire(head)
    forged.size += 1
    stub = cos.channel(anna).stub(LogGossipStub)
    refused = await calls.refused(stub.CompareHeads(wire.CompareHeadsRequest(head=forged)))
    assert (refused.reason, refused.field) == ("BAD_SIGNATURE", "head")
    answer = await stub.CompareHeads(wire.CompareHeadsRequest(head=head_to_wire(head), hold_ms=0))
    assert list(answer.heads) == []
    assert (await stub.CompareHeads(wire.CompareHeadsRequest())).heads[0].root == head.root
    assert read_evidence(cos.state) is None


async def until(what, message):
    """Wait until something holds."""
    async with asyncio.timeout(SOON_S):
        while not what():
            await asyncio.sleep(0.05)
    assert what(), message


async def test_two_logs_for_two_hosts_are_found_by_both_and_by_the_cos(
    start_third_party, forked, start_member, certificates_of, tmp_path
):
    honest = start_third_party()
    cos = start_member("cos", "cos", honest)
    operating = Operating(cos, certificates_of(honest, "operator"))
    await operating.start("a-run", owners=1, users=1)
    anna = await honest.enrol("client", "anna", 1)
    berta = await honest.enrol("client", "berta", 1)
    other = forked(honest)
    # Only the log that Berta is shown has a Sybil; hers and Anna's are of one size.
    sybil = await other.enrol("client", "sybil")
    await honest.enrol("client", "carla")
    # Each log alone is in order: neither host notices anything by itself, and the Sybil is certified in Berta's.
    apart = [watch_of(anna, honest), watch_of(berta, other)]
    for watch in apart:
        await watch.ready()
        await watch.refresh()
        assert watch.found is None
    await apart[1].require(CERTIFICATE, [certificate_statement(sybil.tls.chain.read_bytes())])
    assert apart[0].head.size == apart[1].head.size
    assert apart[0].head.root != apart[1].head.root
    watches = {"anna": watch_of(anna, honest), "berta": watch_of(berta, other)}
    for watch, party in ((watches["anna"], anna), (watches["berta"], berta)):
        watch.gossip_with(cos.channel(party))
    ends = await asyncio.wait_for(
        asyncio.gather(*(watch.run() for watch in watches.values()), return_exceptions=True), SOON_S
    )
    assert [type(end) for end in ends] == [FalseLogError, FalseLogError]
    for state in (anna.settings.state, berta.settings.state, cos.state):
        await until(lambda state=state: read_evidence(state) is not None, state)
        evidence = read_evidence(state)
        assert evidence.finding == LogBreach.TWO_LOGS
        assert evidence.thirdparty == "thirdparty/directory"
        assert evidence.convicts(anna.directory_key)
    async with asyncio.timeout(SOON_S):
        while (state := await operating.state("a-run")).phase != RunPhase.RUN_PHASE_FAILED:
            await asyncio.sleep(0.05)
    assert "thirdparty/directory" in state.reason
    assert "two logs" in state.reason
    with pytest.raises(grpc.aio.AioRpcError, match="two logs"):
        await operating.start("b-run", owners=1, users=1)
    assert not cos.healthy()
    assert "the third party is caught" in cos.log.read_text()


# --- coterie audit log ---------------------------------------------------------------------------------------------


def operator_of(service, cos, folder):
    """Write the configuration of an operator that enrols at a third party; return its file."""
    keys = {
        "state": folder / "operator",
        "order": folder / "order.json",
        "signs": folder / "run.key",
        "output": folder / "report",
        "enrol": service.enrol_section(service.token("operator", "operator")),
        "cos": {"address": cos.address, "name": cos.name},
        "thirdparty": {"address": service.address, "name": service.name},
    }
    path = folder / "operator.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in keys.items()))
    return path


async def audited(*arguments):
    """Run ``coterie audit log``; return its exit status and the object that it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "coterie", "audit", "log", "--json", *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    printed, _ = await process.communicate()
    return process.returncode, json.loads(printed)


async def test_an_audit_replays_the_log_and_compares_what_parties_keep(
    start_third_party, start_member, tmp_path
):
    service = start_third_party()
    cos = start_member("cos", "cos", service)
    anna = await service.enrol("client", "anna", 3)
    await watch_of(anna, service).ready()
    config = operator_of(service, cos, tmp_path)
    status, printed = await audited("--config", config, "--state", anna.settings.state, "--state", cos.state)
    assert status == 0, printed
    found = printed["result"]
    assert found["kinds"] == {"bundle": 3, "certificate": 4}
    assert found["size"] == 7
    # Anna's, the COS's file, and what the COS says itself.
    assert found["compared"] == 3
    assert found["several_keys"] == {}
    # A party that lost its key and enrolled again shows up with two.
    await service.enrol("client", "anna")
    _, printed = await audited("--config", config)
    assert printed["result"]["several_keys"] == {"client/anna": 2}


async def test_an_audit_finds_a_kept_head_of_another_log_and_verifies_evidence(
    start_third_party, forked, start_member, tmp_path
):
    honest = start_third_party()
    cos = start_member("cos", "cos", honest)
    anna = await honest.enrol("client", "anna", 1)
    berta = await honest.enrol("client", "berta", 1)
    other = forked(honest)
    await other.enrol("client", "sybil")
    await honest.enrol("client", "carla")
    config = operator_of(honest, cos, tmp_path)
    await watch_of(berta, other).refresh()
    status, printed = await audited("--config", config, "--state", berta.settings.state)
    assert status == 31
    assert "of another log than thirdparty/directory" in printed["error"]["message"]
    # The auditor's own certificate is in the honest log by now.
    await other.enrol("client", "another")
    shown = await watch_of(berta, other).refresh()
    watch = watch_of(anna, honest)
    await watch.refresh()
    with pytest.raises(FalseLogError):
        await watch.see(shown)
    # Two signed heads of one size need no log; nor does an auditor who has nothing but the folder.
    for arguments in (("--config", config), ()):
        status, printed = await audited(*arguments, "--state", anna.settings.state)
        assert status == 31, printed
        assert "proven by its signatures" in printed["error"]["message"]
    # Forged evidence accuses nobody.
    file = anna.settings.state / "log" / "evidence.json"
    content = json.loads(file.read_text())
    content["heads"][0]["root"] = content["heads"][1]["root"][::-1]
    file.write_text(json.dumps(content))
    status, printed = await audited("--state", anna.settings.state)
    assert status == 31
    assert "does not verify" in printed["error"]["message"]
    file.unlink()
    assert (await audited("--config", config, "--state", anna.settings.state))[0] == 0


async def test_an_audit_knows_evidence_that_the_log_explains(start_third_party, start_member, tmp_path):
    service = start_third_party()
    cos = start_member("cos", "cos", service)
    anna = await service.enrol("client", "anna", 1)
    first = await watch_of(anna, service).refresh()
    await service.enrol("client", "berta")
    second = await watch_of(anna, service).refresh()
    # Whoever accuses an honest third party shows its own heads, and says that it proved nothing.
    evidence = Evidence.of("thirdparty/directory", LogBreach.NOT_CONSISTENT, first, second)
    (anna.settings.state / "log" / "evidence.json").write_bytes(evidence.to_json())
    config = operator_of(service, cos, tmp_path)
    assert (await audited("--config", config, "--state", anna.settings.state))[0] == 0


@pytest.fixture
def certificates_of(tmp_path_factory):
    """Return a function that issues a certificate for a role at a third party of the test's own."""

    def make(service, role):
        return service.issue(tmp_path_factory.mktemp("issued") / role, role, f"some-{role}")

    return make


async def test_a_real_host_that_is_shown_another_log_than_the_cos_ends_with_the_reason(
    start_third_party, forked, start_member, certificates_of, tmp_path
):
    honest = start_third_party()
    cos = start_member("cos", "cos", honest)
    operating = Operating(cos, certificates_of(honest, "operator"))
    await operating.start("a-run", owners=1, users=1)
    other = forked(honest)
    histories = tmp_path / "histories.csv"
    histories.touch(mode=0o600)
    histories.write_text("user,item,positive,time,part\nanna,drama-1,1,1000,0\n")
    host = start_member(
        "client",
        "host",
        other,
        healthy=False,
        participants=1,
        histories=histories,
        cos={"address": cos.address, "name": cos.name},
        run="a-run",
    )
    await honest.enrol("client", "carla")
    await honest.enrol("client", "dora")
    assert await asyncio.to_thread(host.wait_for_end) == 31
    assert "thirdparty/directory" in host.log.read_text()
    evidence = read_evidence(host.state)
    assert evidence.finding in (LogBreach.TWO_LOGS, LogBreach.NOT_CONSISTENT)
    head, _ = read_head(host.state)
    head.verify((host.state / "directory.key").read_bytes())
    # Started again it does not forget.
    host.start(healthy=False)
    assert await asyncio.to_thread(host.wait_for_end) == 31
    async with asyncio.timeout(SOON_S):
        while (state := await operating.state("a-run")).phase != RunPhase.RUN_PHASE_FAILED:
            await asyncio.sleep(0.05)
    assert "thirdparty/directory" in state.reason


async def test_heads_are_compared_at_a_data_owner_too_where_a_server_keeps_them_back(
    start_third_party, forked, start_member, certificates_of, tmp_path
):
    honest = start_third_party()
    cos = start_member("cos", "cos", honest)
    await Operating(cos, certificates_of(honest, "operator")).start("a-run", owners=2, users=1)
    items = tmp_path / "items.csv"
    items.write_text("item\ndrama-1\n")
    owner = start_member(
        "data-owner",
        "drama",
        honest,
        participants=1,
        owners=[{"name": "drama", "items": items}],
        cos={"address": cos.address, "name": cos.name},
        run="a-run",
    )
    berta = await honest.enrol("client", "berta", 1)
    other = forked(honest)
    await other.enrol("client", "sybil")
    await honest.enrol("client", "carla")
    watch = watch_of(berta, other)
    await watch.refresh()
    watch.gossip_with(owner.channel(berta))
    with pytest.raises(FalseLogError, match="thirdparty/directory"):
        await asyncio.wait_for(watch.run(), SOON_S)
    assert await asyncio.to_thread(owner.wait_for_end) == 31
    for state in (berta.settings.state, owner.state):
        assert read_evidence(state).convicts(berta.directory_key)


@pytest.mark.parametrize("role", ["data-owner", "cos", "decrypting-client"])
async def test_a_data_owner_compares_heads_with_those_that_call_it_for_something_else(
    start_third_party, start_member, certificates_of, tmp_path, calls, role
):
    service = start_third_party()
    cos = start_member("cos", "cos", service)
    items = tmp_path / "items.csv"
    items.write_text("item\ndrama-1\n")
    owner = start_member(
        "data-owner",
        "drama",
        service,
        healthy=False,
        participants=1,
        owners=[{"name": "drama", "items": items}],
        cos={"address": cos.address, "name": cos.name},
        run="a-run",
    )
    await until(owner.answers, "the data owner listens")
    stub = owner.channel(certificates_of(service, role)).stub(LogGossipStub)
    async with asyncio.timeout(SOON_S):
        # Before it has the list of who is revoked, it trusts nobody.
        while (
            reason := (await calls.refused(stub.CompareHeads(wire.CompareHeadsRequest()))).reason
        ) == "NOT_READY":
            await asyncio.sleep(0.1)
    assert reason == "WRONG_ROLE"
