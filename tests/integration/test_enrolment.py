"""Enrolment, key directory and revocation against a real third party: child process, sockets, mutual TLS."""

import asyncio
import contextlib
import ssl
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from coterie.cli.certs import app
from coterie.crypto.authority import Authority, load_tls_key, make_csr, new_tls_key, save_tls_key
from coterie.crypto.identity import Identity
from coterie.errors import CertificateError, PeerError
from coterie.net import enrolment
from coterie.net.credentials import TlsFiles
from coterie.net.directory import Directory
from coterie.net.enrolment import saved_bundles
from coterie.net.meter import Meter
from coterie.net.revocation import RevocationWatch
from coterie.net.server import Guard
from coterie.net.status import from_rpc_error
from coterie.secure_sum.bundles import bundle_to_wire
from coterie.wire.refusal import Refusal
from coterie.wire.v1.thirdparty_pb2 import (
    EnrolRequest,
    LookupRequest,
    PublishBundlesRequest,
    RevocationsRequest,
    RevokeRequest,
)
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

SOON_S = 60.0
"""Bound for what happens at once; far above it, far below the 20 s for which a call is held."""
SHORT_S = 6.0
"""A lifetime that is waited out: what has to come before its end comes in time on a machine that halts now and then."""


async def reason_of(call):
    """Await a call that must be refused; return the reason."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    refusal = from_rpc_error(failed.value, "peer")
    assert isinstance(refusal, Refusal), refusal
    return refusal.name


async def code_of(call):
    """Await a call that must fail below our own refusals; return the gRPC code."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code()


def valid_now():
    now = int(time.time())
    return now - 60, now + 3600


def request_with(token, name, bundles, role="client"):
    async def requests():
        yield EnrolRequest(
            token=token.read_text().strip(),
            role=role,
            name=name,
            certificate_request=make_csr(new_tls_key()),
            bundles=bundles,
        )

    return requests()


def tls_files(folder, authority, role, name, *, now=None, days=1, trusted=None):
    """Write the TLS folder of a party with a certificate that an authority issues here and now."""
    tls = TlsFiles(folder)
    folder.mkdir()
    save_tls_key(tls.key, new_tls_key())
    certificate = authority.issue(make_csr(load_tls_key(tls.key)), role, name, days, now=now)
    tls.chain.write_bytes(certificate + authority.certificate_pem)
    tls.authority.write_bytes(trusted or authority.certificate_pem)
    return tls


# --- Enrolling ---------------------------------------------------------------------------------------------------


async def clock_past(moment):
    """Wait until the clock shows a later second than a moment, of which certificates and tokens know the second."""
    while (left := moment + 1.0 - time.time()) > 0:
        await asyncio.sleep(left)


async def test_a_party_that_enrols_holds_a_certificate_and_countersigned_bundles(third_party):
    anna = await third_party.enrol("client", "anna", 3)
    assert str(anna.tls.identity()) == "client/anna"
    assert [bundle.participant_id for bundle in anna.bundles] == [
        one.participant_id for one in anna.identities
    ]
    for bundle in anna.bundles:
        bundle.verify(anna.directory_key, int(time.time()))
        assert bundle.party == "client/anna"
    assert saved_bundles(anna.settings.state) == anna.bundles
    assert anna.tls.key.stat().st_mode & 0o777 == 0o600
    found = await third_party.directory(anna).Lookup(
        LookupRequest(participants=[one.participant_id for one in anna.identities])
    )
    assert [entry.bundle for entry in found.entries] == [bundle_to_wire(bundle) for bundle in anna.bundles]


async def test_an_enrolled_party_starts_again_without_the_third_party(start_third_party):
    service = start_third_party()
    anna = await service.enrol("client", "anna", 2)
    service.stop()
    again = await service.enrol_with("client", anna.settings, 2)
    assert (again.bundles, again.fingerprint) == (anna.bundles, anna.fingerprint)


async def test_a_lost_answer_loses_nothing(third_party):
    anna = await third_party.enrol("client", "lost-answer", 2)
    anna.tls.chain.unlink()
    again = await third_party.enrol_with("client", anna.settings, 2)
    assert (again.bundles, again.fingerprint) == (anna.bundles, anna.fingerprint)


async def test_a_token_used_with_another_key_is_refused(third_party):
    token = third_party.token("client", "twice")
    await third_party.enrol_with("client", third_party.settings("twice", token))
    thief = third_party.settings("twice", token)
    with pytest.raises(CertificateError, match="used before, with another key") as refused:
        await third_party.enrol_with("client", thief)
    assert "coterie certs token --role client --name twice" in refused.value.hint
    assert not (thief.state / "tls" / "chain.pem").exists()


@pytest.mark.parametrize(("role", "name"), [("cos", "carla"), ("client", "cosima")])
async def test_a_token_for_another_role_or_name_is_refused(third_party, role, name):
    token = third_party.token("client", "carla")
    with pytest.raises(CertificateError, match="another role or name"):
        await third_party.enrol_with(role, third_party.settings(name, token))


async def test_an_expired_token_is_refused_unless_it_was_redeemed_in_time_with_this_key(third_party):
    token = third_party.token("client", "late", hours=-1)
    with pytest.raises(CertificateError, match="expired"):
        await third_party.enrol_with("client", third_party.settings("late", token))

    short = third_party.token("client", "short", hours=SHORT_S / 3600)
    ends = time.time() + SHORT_S
    settings = third_party.settings("short", short)
    first = await third_party.enrol_with("client", settings)
    await clock_past(ends)
    first.tls.chain.unlink()
    assert (await third_party.enrol_with("client", settings)).fingerprint == first.fingerprint


async def test_a_token_that_nobody_made_is_refused(third_party, tmp_path):
    token = tmp_path / "token"
    token.write_text("a" * 52)
    with pytest.raises(CertificateError, match="no such token"):
        await third_party.enrol_with("client", third_party.settings("nobody", token))
    token.write_text("not a token")
    with pytest.raises(CertificateError, match="32 bytes in base32"):
        await third_party.enrol_with("client", third_party.settings("nobody", token))


async def test_a_missing_token_file_is_named_with_what_to_do(third_party, tmp_path):
    settings = third_party.settings("tokenless", tmp_path / "absent.token")
    with pytest.raises(CertificateError, match=r"absent\.token") as missing:
        await third_party.enrol_with("client", settings)
    assert "coterie certs token" in missing.value.hint


async def test_a_state_folder_serves_one_party_only(third_party):
    anna = await third_party.enrol("client", "first-tenant")
    other = third_party.settings("second-tenant", third_party.token("client", "second-tenant"))
    with pytest.raises(CertificateError, match="client/first-tenant's"):
        await third_party.enrol_with("client", other.model_copy(update={"state": anna.settings.state}))


async def test_an_expired_certificate_says_what_to_do_and_a_new_token_cures_it(third_party):
    anna = await third_party.enrol("client", "expiring", 1)
    authority = Authority.load(third_party.state)
    past = datetime.now(UTC) - timedelta(days=3)
    csr = make_csr(load_tls_key(anna.tls.key))
    anna.tls.chain.write_bytes(authority.issue(csr, "client", "expiring", 1, now=past))
    with pytest.raises(CertificateError, match="expired at") as expired:
        await third_party.enrol_with("client", anna.settings.model_copy(update={"enrol": None}), 1)
    assert "[enrol]" in expired.value.hint
    renewed = third_party.settings(
        "expiring", third_party.token("client", "expiring"), state=anna.settings.state
    )
    again = await third_party.enrol_with("client", renewed, 1)
    assert again.bundles == anna.bundles
    assert again.fingerprint != anna.fingerprint


async def test_a_third_party_under_another_authority_or_name_is_not_trusted(third_party, tmp_path):
    impostor = Authority.create("impostor", 1)
    (tmp_path / "ca.pem").write_bytes(impostor.certificate_pem)
    settings = third_party.settings("wary", third_party.token("client", "wary"), timeout_s=0.5)
    for change in ({"ca_file": tmp_path / "ca.pem"}, {"name": "other"}):
        wrong = settings.model_copy(update={"enrol": settings.enrol.model_copy(update=change)})
        with pytest.raises(PeerError, match="no enrolment at"):
            await third_party.enrol_with("client", wrong)
    await third_party.enrol_with("client", settings)  # the token never left


async def test_thousands_of_participants_enrol_in_one_go_and_are_looked_up_in_bulk(third_party):
    host = await third_party.enrol("client", "host", 2_500)
    reader = await third_party.enrol("cos", "reader")
    channel = third_party.channel(reader)
    directory = Directory(channel, reader.directory_key)
    unknown = Identity.generate().participant_id
    found = await directory.bundles([one.participant_id for one in host.identities] + [unknown])
    assert tuple(found.values()) == host.bundles
    await directory.bundles(found)  # remembered: no further call
    assert channel.meter.summary()["Lookup"]["calls"] == 3


# --- Bundles -----------------------------------------------------------------------------------------------------


async def test_a_bundle_with_a_bad_signature_is_refused_and_the_token_stays_unused(third_party):
    token = third_party.token("client", "forger")
    good, bad = (bundle_to_wire(Identity.generate().bundle(1, valid_now())) for _ in range(2))
    bad.version = 2
    call = third_party.enrolment().Enrol(request_with(token, "forger", [good, bad]))
    assert await reason_of(call) == "BAD_SIGNATURE"
    await third_party.enrol_with("client", third_party.settings("forger", token))


async def test_a_party_that_says_it_is_another_one_is_countersigned_as_itself(third_party):
    anna = await third_party.enrol("client", "plain", 1)
    posing = replace(anna.identities[0].bundle(2, valid_now()), party="data-owner/comedy")
    directory = Directory(third_party.channel(anna), anna.directory_key)
    # The countersignature is over the party of the certificate, so the claimed one does not verify.
    with pytest.raises(PeerError, match="countersignatures do not verify"):
        await directory.publish([posing], "data-owner/comedy")
    (held,) = (await directory.bundles([posing.participant_id])).values()
    assert (held.version, held.party) == (2, "client/plain")


async def test_an_expired_bundle_is_refused(third_party):
    token = third_party.token("client", "stale")
    bundle = bundle_to_wire(Identity.generate().bundle(1, (1, 2)))
    call = third_party.enrolment().Enrol(request_with(token, "stale", [bundle]))
    assert await reason_of(call) == "BAD_SIGNATURE"


async def test_a_bundle_is_replaced_by_a_higher_version_only(third_party):
    anna = await third_party.enrol("client", "versions", 1)
    directory = Directory(third_party.channel(anna), anna.directory_key)
    identity = anna.identities[0]
    newer = await directory.publish([identity.bundle(3, valid_now())], "client/versions")
    assert newer[0].version == 3
    for version in (2, 3):
        lower = bundle_to_wire(identity.bundle(version, (1, 2_000_000_000)))
        call = third_party.directory(anna).PublishBundles(PublishBundlesRequest(bundles=[lower]))
        assert await reason_of(call) == "OLD_VERSION"
    assert (await directory.bundles([identity.participant_id]))[identity.participant_id] == newer[0]


async def test_later_participants_are_published_up_to_what_the_token_allows(third_party):
    anna = await third_party.enrol("client", "growing", 1, allowed=2)
    directory = Directory(third_party.channel(anna), anna.directory_key)
    later = [Identity.generate().bundle(1, valid_now()) for _ in range(2)]
    await directory.publish(later[:1], "client/growing")
    with pytest.raises(Refusal) as refused:
        await directory.publish(later[1:], "client/growing")
    assert refused.value.name == "TOO_LARGE"
    token = third_party.token("client", "too-many", participants=1)
    call = third_party.enrolment().Enrol(request_with(token, "too-many", map(bundle_to_wire, later)))
    assert await reason_of(call) == "TOO_LARGE"


async def test_nobody_publishes_a_participant_of_another_party(third_party):
    anna = await third_party.enrol("client", "owner-of-keys", 1)
    berta = await third_party.enrol("client", "taker-of-keys", 0, allowed=5)
    stolen = bundle_to_wire(anna.identities[0].bundle(2, valid_now()))
    call = third_party.directory(berta).PublishBundles(PublishBundlesRequest(bundles=[stolen]))
    assert await reason_of(call) == "UNKNOWN_PARTICIPANT"


# --- Who may call ------------------------------------------------------------------------------------------------


async def test_nobody_calls_the_directory_without_a_certificate(third_party):
    channel = third_party.anonymous_channel(third_party.address)
    call = channel.stub(KeyDirectoryStub).Lookup(LookupRequest(), timeout=5)
    assert await code_of(call) == grpc.StatusCode.UNAVAILABLE
    # And the listener for enrolment offers nothing else.
    enrolment = third_party.anonymous_channel(third_party.enrol_address)
    call = enrolment.stub(KeyDirectoryStub).Lookup(LookupRequest(), timeout=5)
    assert await code_of(call) == grpc.StatusCode.UNIMPLEMENTED


async def test_a_certificate_of_another_role_is_refused(third_party):
    client = third_party.directory(await third_party.enrol("client", "no-operator"))
    operator = third_party.directory(await third_party.enrol("operator", "no-client"))
    assert await reason_of(client.Revoke(RevokeRequest(participants=[b"p" * 32]))) == "WRONG_ROLE"
    assert await reason_of(operator.Lookup(LookupRequest())) == "WRONG_ROLE"


async def test_a_certificate_of_another_authority_cannot_connect(third_party, tmp_path):
    trusted = third_party.ca_file.read_bytes()
    tls = tls_files(tmp_path / "tls", Authority.create("other", 1), "operator", "eve", trusted=trusted)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        third_party.handshake(tls)
    call = third_party.directory(tls).Revoke(RevokeRequest(participants=[b"p" * 32]), timeout=5)
    assert await code_of(call) == grpc.StatusCode.UNAVAILABLE


async def test_an_expired_certificate_cannot_connect(third_party, tmp_path):
    authority = Authority.load(third_party.state)
    past = datetime.now(UTC) - timedelta(days=3)
    tls = tls_files(tmp_path / "expired", authority, "cos", "old", now=past)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        third_party.handshake(tls)
    assert await code_of(third_party.directory(tls).Lookup(LookupRequest(), timeout=5)) == (
        grpc.StatusCode.UNAVAILABLE
    )
    third_party.handshake(tls_files(tmp_path / "valid", authority, "cos", "new"))


async def test_a_certificate_that_expires_on_an_open_connection_is_refused(third_party, tmp_path):
    authority = Authority.load(third_party.state)
    almost_a_day_ago = datetime.now(UTC) - timedelta(days=1) + timedelta(seconds=SHORT_S)
    directory = third_party.directory(
        tls_files(tmp_path / "tls", authority, "cos", "ending", now=almost_a_day_ago)
    )
    await directory.Lookup(LookupRequest())
    await clock_past(time.time() + SHORT_S)
    assert await reason_of(directory.Lookup(LookupRequest())) == "BAD_SIGNATURE"


# --- Revocation --------------------------------------------------------------------------------------------------


async def test_revocation_ends_open_calls_refuses_the_next_and_wakes_everybody_who_waits(third_party):
    victim = await third_party.enrol("client", "victim", 1)
    witness = third_party.directory(await third_party.enrol("cos", "witness"))
    operator = third_party.directory(await third_party.enrol("operator", "judge"))
    directory = third_party.directory(victim)
    held = await witness.Revocations(RevocationsRequest())
    hold = RevocationsRequest(held_revision=held.revision, hold_ms=20_000)
    async with third_party.asked("Revocations", hold, hold):
        open_call = asyncio.create_task(reason_of(directory.Revocations(hold)))
        waiting = asyncio.create_task(witness.Revocations(hold))
    assert not open_call.done()
    assert not waiting.done()

    participant = victim.identities[0].participant_id
    revoked = await operator.Revoke(
        RevokeRequest(participants=[participant], certificates=[victim.fingerprint])
    )
    assert await asyncio.wait_for(open_call, SOON_S) == "REVOKED"
    answer = await asyncio.wait_for(waiting, SOON_S)
    assert answer.revision >= revoked.revision > held.revision
    assert participant in answer.participants
    assert victim.fingerprint in answer.certificates
    assert await reason_of(directory.Lookup(LookupRequest())) == "REVOKED"
    entry = (await witness.Lookup(LookupRequest(participants=[participant]))).entries[0]
    assert entry.revoked


async def test_a_watch_hears_of_a_revocation_and_the_directory_client_forgets_the_bundle(third_party):
    victim = await third_party.enrol("client", "forgotten", 2)
    cos = await third_party.enrol("cos", "watcher")
    operator = third_party.directory(await third_party.enrol("operator", "watched"))
    channel = third_party.channel(cos)
    directory = Directory(channel, cos.directory_key)
    gone, stays = (one.participant_id for one in victim.identities)
    assert set(await directory.bundles([gone, stays])) == {gone, stays}

    guard = Guard(Meter())
    heard = asyncio.Event()
    fresh = []

    def on_revoked(participants):
        directory.exclude(participants)
        if gone in participants:
            heard.set()

    watch = RevocationWatch(channel, guard, fresh.append, on_revoked=on_revoked)
    running = asyncio.create_task(watch.run())
    await operator.Revoke(RevokeRequest(participants=[gone], certificates=[victim.fingerprint]))
    await asyncio.wait_for(heard.wait(), SOON_S)
    running.cancel()
    assert fresh == [False, True]
    assert guard.is_revoked(victim.tls.identity())
    assert watch.is_revoked(gone)
    calls = channel.meter.summary()["Lookup"]["calls"]
    assert set(await directory.bundles([gone, stays])) == {stays}
    assert channel.meter.summary()["Lookup"]["calls"] == calls


async def test_a_waiting_call_is_answered_when_its_time_is_up(third_party):
    directory = third_party.directory(await third_party.enrol("cos", "patient"))
    held = await directory.Revocations(RevocationsRequest())
    again = await directory.Revocations(RevocationsRequest(held_revision=held.revision, hold_ms=200))
    assert again == held


async def test_an_operator_enrols_and_revokes_on_the_command_line(third_party, tmp_path):
    victim = await third_party.enrol("client", "sentenced", 1)

    def coterie_certs(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output

    token = tmp_path / "operator.token"
    coterie_certs(
        "token", "--state", third_party.state, "--role", "operator", "--name", "olga", "--out", token
    )
    where = ["--address", third_party.enrol_address, "--ca", third_party.ca_file, "--token", token]
    operator = tmp_path / "operator"
    party = ["--state", operator, "--role", "operator", "--name", "olga"]
    await asyncio.to_thread(coterie_certs, "enrol", *party, *where)
    revoke = ["revoke", "--tls", operator / "tls", "--address", third_party.address]
    await asyncio.to_thread(coterie_certs, *revoke, "--certificate", victim.tls.chain)
    assert await reason_of(third_party.directory(victim).Lookup(LookupRequest())) == "REVOKED"


# --- Bad input ---------------------------------------------------------------------------------------------------


async def test_a_message_above_four_mebibytes_is_refused_and_the_service_goes_on(third_party):
    directory = third_party.directory(await third_party.enrol("cos", "talkative"))
    call = directory.Lookup(LookupRequest(participants=[b"x" * (5 << 20)]))
    assert await code_of(call) == grpc.StatusCode.RESOURCE_EXHAUSTED
    token = third_party.token("client", "talkative")
    whole = EnrolRequest(token=token.read_text(), role="client", name="x" * (5 << 20))

    async def requests():
        yield whole

    assert await code_of(third_party.enrolment().Enrol(requests())) == grpc.StatusCode.RESOURCE_EXHAUSTED
    await directory.Lookup(LookupRequest())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (LookupRequest(participants=[b"short"]), "INVALID_FIELD"),
        (LookupRequest(participants=[bytes([n % 256]) * 32 for n in range(1001)]), "TOO_LARGE"),
    ],
)
async def test_a_malformed_lookup_is_refused(third_party, request_, reason):
    directory = third_party.directory(await third_party.enrol("cos", "malformed"))
    assert await reason_of(directory.Lookup(request_)) == reason


async def test_a_malformed_enrolment_is_refused(third_party):
    async def nothing():
        return
        yield

    enrolment = third_party.enrolment()
    assert await reason_of(enrolment.Enrol(nothing())) == "INVALID_FIELD"
    token = third_party.token("client", "csr").read_text()

    async def no_certificate_request():
        yield EnrolRequest(token=token, role="client", name="csr", certificate_request=b"garbage")

    assert await reason_of(enrolment.Enrol(no_certificate_request())) == "INVALID_FIELD"
    bundle = bundle_to_wire(replace(Identity.generate().bundle(1, valid_now()), signature=b""))
    anna = await third_party.enrol("client", "csr", 0, allowed=1)
    call = third_party.directory(anna).PublishBundles(PublishBundlesRequest(bundles=[bundle]))
    assert await reason_of(call) == "BAD_SIGNATURE"


# --- The process -------------------------------------------------------------------------------------------------


async def test_a_killed_third_party_comes_back_with_everything(start_third_party):
    service = start_third_party()
    anna = await service.enrol("client", "anna", 2)
    cos = await service.enrol("cos", "cos")
    operator = service.directory(await service.enrol("operator", "olga"))
    victim = await service.enrol("client", "victim")
    used = service.token("client", "used")
    await service.enrol_with("client", service.settings("used", used))
    revision = (await operator.Revoke(RevokeRequest(certificates=[victim.fingerprint]))).revision
    authority = service.ca_file.read_bytes()

    assert service.kill() == -9
    service.start()

    assert service.ca_file.read_bytes() == authority
    reader = service.channel(cos)
    found = await Directory(reader, cos.directory_key).bundles([b.participant_id for b in anna.bundles])
    assert tuple(found.values()) == anna.bundles
    revoked = await service.directory(cos).Revocations(RevocationsRequest())
    assert (revoked.revision, list(revoked.certificates)) == (revision, [victim.fingerprint])
    assert await reason_of(service.directory(victim).Lookup(LookupRequest())) == "REVOKED"
    with pytest.raises(CertificateError, match="used before"):
        await service.enrol_with("client", service.settings("used", used))
    await service.enrol("client", "later")


async def test_health_tells_the_truth_when_the_store_is_lost_and_found(start_third_party, tmp_path):
    service = start_third_party()
    cos = await service.enrol("cos", "prober")
    health = service.channel(cos).stub(health_pb2_grpc.HealthStub)
    status = health_pb2.HealthCheckResponse
    watched: asyncio.Queue = asyncio.Queue()

    async def watch():
        async for answer in health.Watch(health_pb2.HealthCheckRequest(), timeout=60):
            watched.put_nowait(answer.status)

    watching = asyncio.create_task(watch())
    # /healthz is asked directly; the gRPC service is told a tenth of a second later.
    while await next_of(watched) != status.SERVING:
        pass
    named = health_pb2.HealthCheckRequest(service="coterie.thirdparty")
    assert (await health.Check(named)).status == status.SERVING

    database = service.state / "directory.db"
    files = sorted(service.state.glob("directory.db*"))
    for file in files:
        file.rename(tmp_path / file.name)
    database.mkdir()
    await asyncio.to_thread(service.wait_for_health, False)
    assert await reason_of(service.directory(cos).Lookup(LookupRequest())) == "NOT_READY"
    assert await next_of(watched) == status.NOT_SERVING
    assert (await health.Check(named)).status == status.NOT_SERVING

    database.rmdir()
    for file in files:
        (tmp_path / file.name).rename(file)
    await asyncio.to_thread(service.wait_for_health, True)
    assert await next_of(watched) == status.SERVING
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def next_of(queue):
    return await asyncio.wait_for(queue.get(), SOON_S)


async def test_sigterm_answers_who_waits_and_ends_with_success(start_third_party):
    service = start_third_party()
    directory = service.directory(await service.enrol("cos", "waiting"))
    held = await directory.Revocations(RevocationsRequest())
    hold = RevocationsRequest(held_revision=held.revision, hold_ms=20_000)
    async with service.asked("Revocations", hold):
        waiting = asyncio.create_task(directory.Revocations(hold))
    assert await asyncio.to_thread(service.stop) == 0
    assert await waiting == held
    assert (service.state / "account.json").is_file()


async def test_a_directory_without_its_authority_does_not_start_with_a_new_one(start_third_party):
    service = start_third_party()
    service.stop()
    service.ca_file.unlink()
    with pytest.raises(pytest.fail.Exception, match="holds a directory but no authority"):
        service.start()
    assert service._child.wait() == CertificateError.exit_code


async def test_a_third_party_without_room_is_waited_for(start_third_party):
    service = start_third_party()
    settings = service.settings(
        "patient", service.token("client", "patient", participants=1), timeout_s=SOON_S
    )
    with service.without_room():
        joining = asyncio.create_task(service.enrol_with("client", settings, 1))
        async with asyncio.timeout(SOON_S):
            while not service.metric("coterie_refusals_total", rpc="Enrol"):
                await asyncio.sleep(0.05)
        assert not joining.done()
    assert str((await joining).tls.identity()) == "client/patient"


async def test_many_users_enrol_in_several_calls_with_one_token(third_party, monkeypatch):
    def calls():
        return third_party.metric("coterie_rpc_calls_total", side="server", rpc="Enrol")

    monkeypatch.setattr(enrolment, "_PER_CALL", 3)
    before = calls()
    enrolled = await third_party.enrol("client", "in-parts", 8)
    assert calls() == before + 3
    ids = [one.participant_id for one in enrolled.identities]
    assert [bundle.participant_id for bundle in enrolled.bundles] == ids
    for bundle in enrolled.bundles:
        bundle.verify(enrolled.directory_key, int(time.time()))
