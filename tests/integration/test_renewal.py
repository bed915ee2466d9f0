"""Certificates are renewed under open connections, under the old one, and no longer once it is revoked or has ended."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

import grpc
import pytest

from coterie.crypto.authority import Authority, load_tls_key, logical_name, make_csr, new_tls_key, validity_of
from coterie.launch.children import free_port
from coterie.net.channel import connect
from coterie.net.enrolment import NewToken, enrol
from coterie.net.meter import Meter
from coterie.net.renewal import Renewal
from coterie.net.status import from_rpc_error
from coterie.wire.refusal import Refusal
from coterie.wire.v1.thirdparty_pb2 import (
    LookupRequest,
    RenewCertificateRequest,
    RenewCertificateResponse,
    RevocationsRequest,
    RevokeRequest,
)
from coterie.wire.v1.thirdparty_pb2_grpc import (
    KeyDirectoryServicer,
    KeyDirectoryStub,
    add_KeyDirectoryServicer_to_server,
)

SECONDS = 1 / (24 * 3600)
SOON_S = 20.0


def channel_of(third_party, tls, address=None):
    return connect(
        address or third_party.address,
        tls.channel_credentials(),
        tls_name=logical_name("thirdparty", third_party.name),
        peer=third_party.party,
        meter=Meter(),
    )


class Kept:
    """A party whose certificate is kept alive, and what it was told."""

    def __init__(self, third_party, tls, address=None, again=None):
        self.tls = tls
        self.told = []
        self.channel = channel_of(third_party, tls)
        self.stub = self.channel.stub(KeyDirectoryStub)
        self.fresh = asyncio.Event()

        def on_renewed():
            self.channel.renew(tls.channel_credentials())
            self.fresh.set()

        self.renewal = Renewal(
            tls, lambda: channel_of(third_party, tls, address), on_renewed, self.told.append, again
        )
        self.task = asyncio.create_task(self.renewal.run())

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.channel.close()

    async def until(self, condition):
        async with asyncio.timeout(SOON_S):
            while not condition():
                self.task.done() and self.task.result()
                await asyncio.sleep(0.02)


async def reason_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    refusal = from_rpc_error(failed.value, "peer")
    assert isinstance(refusal, Refusal), refusal
    return refusal.name


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code()


async def renewed_once_half_is_over(directory, tls):
    """Ask again and again, as nobody should, until a certificate is old enough to be renewed."""
    begin, end = validity_of(tls.chain.read_bytes())
    while time.time() < end:
        try:
            return await directory.RenewCertificate(request(tls))
        except grpc.aio.AioRpcError as error:
            if from_rpc_error(error, "peer").name != "NOT_READY" or time.time() > end - (end - begin) / 4:
                raise
        await asyncio.sleep(0.1)
    pytest.fail("a certificate ended that was asked to be renewed all the time")


def request(tls, key=None):
    return RenewCertificateRequest(certificate_request=make_csr(key or load_tls_key(tls.key)))


async def test_a_party_outlives_its_certificates_without_a_failed_call(start_third_party):
    service = start_third_party(certificate_days=8 * SECONDS)
    async with Kept(service, (await service.enrol("cos", "long-lived")).tls) as party:
        first = party.tls.identity().fingerprint
        end = validity_of(party.tls.chain.read_bytes())[1]
        while time.time() < end + 1 or party.renewal.renewed < 2:
            await party.stub.Lookup(LookupRequest())
            await asyncio.sleep(0.05)
        assert (party.renewal.failed, party.told) == (0, [])
        assert party.tls.identity().fingerprint != first
        assert party.tls.chain.stat().st_mode & 0o777 == 0o600
        # The server, too, shows another certificate now.
        service.handshake(party.tls)


async def test_a_call_that_is_held_when_the_certificate_is_renewed_ends_by_itself(start_third_party):
    service = start_third_party(certificate_days=6 * SECONDS)
    judge = await service.enrol("operator", "judge")
    async with Kept(service, (await service.enrol("cos", "waiting")).tls) as party:
        held = await party.stub.Revocations(RevocationsRequest())
        hold = RevocationsRequest(held_revision=held.revision, hold_ms=20_000)
        waiting = asyncio.create_task(party.stub.Revocations(hold))
        await party.until(party.fresh.is_set)
        assert not waiting.done()
        await service.directory(judge).Revoke(RevokeRequest(participants=[b"p" * 32]))
        assert (await waiting).participants == [b"p" * 32]


async def test_nobody_renews_early_or_for_another_key_afterwards(start_third_party, third_party):
    early = await third_party.enrol("cos", "early")
    assert await reason_of(third_party.directory(early).RenewCertificate(request(early.tls))) == "NOT_READY"
    service = start_third_party(certificate_days=20 * SECONDS)
    party = await service.enrol("client", "renewing")
    directory = service.directory(party)
    first = await renewed_once_half_is_over(directory, party.tls)
    assert await directory.RenewCertificate(request(party.tls)) == first
    assert await reason_of(directory.RenewCertificate(request(party.tls, new_tls_key()))) == "CONFLICT"
    assert await reason_of(directory.RenewCertificate(RenewCertificateRequest())) == "INVALID_FIELD"
    # Revoked is the whole line, the new certificate included, which nobody has shown yet.
    operator = service.directory(await service.enrol("operator", "judge"))
    await operator.Revoke(RevokeRequest(certificates=[party.fingerprint]))
    assert await reason_of(directory.RenewCertificate(request(party.tls))) == "REVOKED"
    party.tls.chain.write_bytes(first.certificate_chain)
    assert await reason_of(service.directory(party.tls).Lookup(LookupRequest())) == "REVOKED"


async def test_a_certificate_that_no_token_stands_for_is_not_renewed(third_party, tmp_path):
    made = datetime.now(UTC) - timedelta(hours=18)
    tls = third_party.issue(tmp_path / "tls", "cos", "self-made", now=made)
    assert await reason_of(third_party.directory(tls).RenewCertificate(request(tls))) == "WRONG_STATE"


async def test_a_third_party_that_is_away_is_tried_again_and_the_end_is_told(start_third_party):
    service = start_third_party(certificate_days=6 * SECONDS)
    party = await service.enrol("cos", "abandoned")

    async def enrol_again():
        await enrol("cos", party.settings, party.tls, ())

    again = NewToken(party.settings.enrol, enrol_again)
    async with Kept(service, party.tls, address="127.0.0.1:1", again=again) as kept:
        await kept.until(lambda: kept.renewal.failed >= 2)
        assert kept.told == []
        await kept.until(lambda: kept.told)
        assert kept.told == [False]
        assert time.time() >= kept.renewal.end
        failed = kept.renewal.failed
        await kept.until(lambda: kept.renewal.failed > failed)
        assert await code_of(kept.stub.Lookup(LookupRequest())) != grpc.StatusCode.OK
        # A new token where the old one was: the process goes on by itself.
        party.settings.enrol.token_file.write_bytes(service.token("cos", "abandoned").read_bytes())
        await kept.until(lambda: kept.told == [False, True])
        await kept.stub.Lookup(LookupRequest())


class Liar(KeyDirectoryServicer):
    """A directory that renews everything with one chain."""

    def __init__(self, tls, chain):
        self.chain = chain
        self.asked = 0
        self.address = f"127.0.0.1:{free_port()}"
        self.server = grpc.aio.server()
        add_KeyDirectoryServicer_to_server(self, self.server)
        self.server.add_secure_port(self.address, tls.server_credentials())

    async def RenewCertificate(self, request, context):  # noqa: N802 - the contract's name
        self.asked += 1
        return RenewCertificateResponse(certificate_chain=self.chain)


@pytest.mark.parametrize(
    "lie", ["another party", "another key", "another authority", "no later end", "nonsense"]
)
async def test_what_is_not_a_renewal_is_not_taken(third_party, tmp_path, lie):
    issued = datetime.now(UTC) - timedelta(hours=18)
    tls = third_party.issue(tmp_path / "party", "cos", "careful", now=issued)
    before = tls.chain.read_bytes()
    authority = (
        Authority.create("other", 9) if lie == "another authority" else Authority.load(third_party.state)
    )
    request = make_csr(new_tls_key() if lie == "another key" else load_tls_key(tls.key))
    name = "other" if lie == "another party" else "careful"
    chain = authority.issue(request, "cos", name, 1, now=issued if lie == "no later end" else None)
    liar = Liar(
        third_party.issue(tmp_path / "liar", "thirdparty", "directory"), b"-" if lie == "nonsense" else chain
    )
    await liar.server.start()
    async with Kept(third_party, tls, address=liar.address) as kept:
        await kept.until(lambda: kept.renewal.failed)
        assert (kept.renewal.renewed, tls.chain.read_bytes()) == (0, before)
    assert liar.asked
    await liar.server.stop(None)


async def test_a_server_serves_on_while_its_authorities_would_not_trust_it(third_party, tmp_path):
    tls = third_party.issue(tmp_path / "server", "thirdparty", "directory")
    caller = third_party.issue(tmp_path / "caller", "cos", "caller")
    liar = Liar(tls, b"chain")
    await liar.server.start()

    async def asked():
        channel = grpc.aio.secure_channel(
            liar.address,
            caller.channel_credentials(),
            [("grpc.ssl_target_name_override", logical_name("thirdparty", "directory"))],
        )
        async with channel:
            answer = await KeyDirectoryStub(channel).RenewCertificate(RenewCertificateRequest(), timeout=20)
            return answer.certificate_chain

    try:
        good = tls.authority.read_bytes()
        assert await asked() == b"chain"
        for bad in (Authority.create("other", 9).certificate_pem, good[: len(good) // 2], b""):
            tls.authority.write_bytes(bad)
            assert await asked() == b"chain"
        tls.authority.write_bytes(good)
        assert await asked() == b"chain"
    finally:
        await liar.server.stop(None)
