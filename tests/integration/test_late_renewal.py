"""A client host that was away when its certificate expired renews it by its key, and nobody else does."""

import asyncio
import hashlib
import time
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from coterie.crypto.authority import (
    Authority,
    PeerIdentity,
    load_tls_key,
    make_csr,
    new_tls_key,
    validity_of,
)
from coterie.crypto.late_renewal import sign_late_request
from coterie.errors import CertificateError
from coterie.net.enrolment import NewToken, enrol, renew_late
from coterie.net.status import from_rpc_error
from coterie.store.thirdparty import Renewed, ThirdPartyStore
from coterie.wire.v1.thirdparty_pb2 import LookupRequest, RenewExpiredRequest, RevokeRequest

from ..odd_certificates import ODD_EXTENSIONS, with_odd_extensions
from .conftest import ThirdParty
from .test_renewal import Kept, reason_of

ROLES = ("cos", "operator", "data-owner", "decrypting-client")
HOSTS = ("away", "asleep", "again", "victim", "revoked", "too-late", "restored", "older")


async def aged(service, store, party, *ended_days):
    """Let a party have renewed its certificate, long ago: the last one ended so many days ago.

    The one before is kept beside it.
    """
    after = party.fingerprint
    for days in ended_days:
        key, made = load_tls_key(party.tls.key), datetime.now(UTC) - timedelta(days=days + 1)
        authority = Authority.load(service.state)
        pem = authority.issue(make_csr(key), party.role, party.settings.name, 1, now=made)
        public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        fingerprint, chain = PeerIdentity.from_certificate(pem).fingerprint, pem + authority.certificate_pem
        hashed = hashlib.sha256(public).digest()
        await store.renew(after, Renewed(fingerprint, hashed, chain, int(made.timestamp())))
        after = fingerprint
        before_of(party).write_bytes(party.tls.chain.read_bytes())
        party.tls.chain.write_bytes(chain)


def before_of(party):
    """Return the file with the certificate before that of a party."""
    return party.tls.folder / "before.pem"


def asking(tls, *, key=None, wanted=None, at=0, name="directory", certificate=None):
    """Return a request for a late renewal, with what is wrong with it."""
    own = load_tls_key(tls.key)
    held, csr, now = certificate or tls.chain.read_bytes(), make_csr(wanted or own), int(time.time()) + at
    signature = sign_late_request(key or own, held, csr, name, now)
    return RenewExpiredRequest(certificate=held, certificate_request=csr, time=now, signature=signature)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    service = ThirdParty(tmp_path_factory.mktemp("thirdparty"))
    service.start()
    yield service
    service.stop()


@pytest.fixture(scope="module")
def away(shared):
    """Return parties by name whose certificates expired while they were away; each is for one test."""

    async def enrol_all():
        found = {name: await shared.enrol("client", name, 2) for name in HOSTS}
        found |= {role: await shared.enrol(role, f"{role}-away") for role in ROLES}
        await shared.release()
        return found

    async def age_all(found):
        store = ThirdPartyStore(shared.state / "directory.db")
        for name, party in found.items():
            await aged(shared, store, party, *{"too-late": (181,), "restored": (150, 100)}.get(name, (40,)))
        store.close()

    found = asyncio.run(enrol_all())
    shared.stop()
    asyncio.run(age_all(found))
    shared.start()
    return found


@pytest.fixture
async def short(shared, away):
    """Return the third party of all of them."""
    yield shared
    await shared.release()


async def test_a_host_whose_certificate_expired_starts_again_without_a_new_token(short, away):
    party = away["away"]
    first, spent = party.tls.chain.read_bytes(), party.settings.enrol.token_file.read_bytes()
    again = await short.enrol_with("client", party.settings, 2)
    await short.directory(again).Lookup(LookupRequest())
    assert party.tls.chain.read_bytes() != first
    assert [one.participant_id for one in again.bundles] == [one.participant_id for one in party.bundles]
    assert party.settings.enrol.token_file.read_bytes() == spent


async def test_a_running_host_that_slept_through_the_end_goes_on(short, away):
    party = away["asleep"]

    async def enrol_again():
        await enrol("client", party.settings, party.tls, party.identities)

    late = NewToken(
        party.settings.enrol, enrol_again, lambda: renew_late("client", party.settings, party.tls)
    )
    async with Kept(short, party.tls, address="127.0.0.1:1", again=late) as kept:
        await kept.until(kept.fresh.is_set)
        await kept.stub.Lookup(LookupRequest())
        await kept.until(lambda: kept.told == [False, True])


async def test_a_request_that_is_made_again_gets_the_same_certificate_and_an_old_one_nothing(short, away):
    party = away["again"]
    message = asking(party.tls)
    first = await short.enrolment().RenewExpired(message)
    assert await short.enrolment().RenewExpired(message) == first
    # The key stays the same, so that who repeats what it overheard has gained nothing.
    assert await short.enrolment().RenewExpired(asking(party.tls)) == first
    for at in (-3600, 3600):
        assert await reason_of(short.enrolment().RenewExpired(asking(party.tls, at=at))) == "INVALID_FIELD"
    changed = RenewExpiredRequest.FromString(message.SerializeToString())
    changed.time += 1
    assert await reason_of(short.enrolment().RenewExpired(changed)) == "BAD_SIGNATURE"


async def test_nobody_but_its_holder_renews_a_certificate_and_for_no_other_key(short, away):
    party = away["victim"]
    foreign = Authority.create("other", 9)
    chain = foreign.issue(make_csr(load_tls_key(party.tls.key)), "client", "victim", 1)
    for change, reason in (
        ({"key": new_tls_key()}, "BAD_SIGNATURE"),
        ({"wanted": new_tls_key()}, "BAD_SIGNATURE"),
        ({"key": new_tls_key(), "wanted": new_tls_key()}, "BAD_SIGNATURE"),
        ({"name": "other"}, "BAD_SIGNATURE"),
        ({"certificate": chain}, "INVALID_FIELD"),
    ):
        assert await reason_of(short.enrolment().RenewExpired(asking(party.tls, **change))) == reason
    assert await reason_of(short.enrolment().RenewExpired(RenewExpiredRequest())) == "INVALID_FIELD"


async def test_a_certificate_that_is_not_read_to_its_end_is_refused_by_name(short, away):
    party = away["victim"]
    for odd in map(with_odd_extensions, ODD_EXTENSIONS):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await short.enrolment().RenewExpired(asking(party.tls, certificate=odd))
        said = from_rpc_error(failed.value, "peer")
        assert "the certificate is not one of this authority" in said.message


async def test_a_certificate_that_was_revoked_is_not_renewed_nor_one_of_its_line(short, away, tmp_path):
    party = away["revoked"]
    judge = short.directory(short.issue(tmp_path / "judge", "operator", "judge"))
    answer = await short.enrolment().RenewExpired(asking(party.tls))
    # The first certificate of the line; nobody has shown the last one yet.
    await judge.Revoke(RevokeRequest(certificates=[party.fingerprint]))
    assert await reason_of(short.enrolment().RenewExpired(asking(party.tls))) == "REVOKED"
    # Its token is spent, and its first certificate would have ended, too.
    party.settings.enrol.token_file.unlink()
    with pytest.raises(CertificateError, match="was revoked") as failed:
        await short.enrol_with("client", party.settings, 2)
    assert "ask the operator for a new one" in failed.value.hint
    party.tls.chain.write_bytes(answer.certificate_chain)
    assert await reason_of(short.directory(party.tls).Lookup(LookupRequest())) == "REVOKED"


async def test_a_certificate_is_renewed_within_the_window_of_the_authority_only(short, away):
    party = away["too-late"]
    assert await reason_of(short.enrolment().RenewExpired(asking(party.tls))) == "WRONG_STATE"
    party.settings.enrol.token_file.unlink()
    with pytest.raises(CertificateError, match="and this authority renews it for 180 days"):
        await short.enrol_with("client", party.settings, 2)
    party.settings.enrol.token_file.write_bytes(
        short.token("client", "too-late", participants=2).read_bytes()
    )
    await short.enrol_with("client", party.settings, 2)


async def test_an_authority_may_renew_no_expired_certificate(start_third_party, tmp_path):
    service = start_third_party(late_renewal_days=0)
    # One that has ended, and one that has not, which its holder may renew over a connection with it.
    for hours in (25, 22):
        made = datetime.now(UTC) - timedelta(hours=hours)
        tls = service.issue(tmp_path / f"tls-{hours}", "client", f"made-{hours}-hours-ago", now=made)
        assert (validity_of(tls.chain.read_bytes())[1] > time.time()) == (hours == 22)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await service.enrolment().RenewExpired(asking(tls))
        said = from_rpc_error(failed.value, "peer")
        assert "this authority renews no expired certificate" in said.message


async def test_certificates_of_other_roles_of_no_token_or_too_young_are_not_renewed_so(
    short, away, third_party, tmp_path
):
    for party in map(away.__getitem__, ROLES):
        assert await reason_of(short.enrolment().RenewExpired(asking(party.tls))) == "WRONG_ROLE"
    young = await third_party.enrol("client", "young")
    assert await reason_of(third_party.enrolment().RenewExpired(asking(young.tls))) == "NOT_READY"
    made = datetime.now(UTC) - timedelta(days=9)
    tls = third_party.issue(tmp_path / "tls", "client", "self-made", now=made)
    assert await reason_of(third_party.enrolment().RenewExpired(asking(tls))) == "WRONG_STATE"


async def test_a_host_with_an_older_certificate_of_its_line_gets_to_one_that_holds(short, away):
    party = away["restored"]
    # It was renewed before, to one that has ended, too.
    party.tls.chain.write_bytes(before_of(party).read_bytes())
    assert await renew_late("client", party.settings, party.tls)
    assert validity_of(party.tls.chain.read_bytes())[1] > time.time()
    await short.directory(party.tls).Lookup(LookupRequest())


async def test_a_third_party_of_before_late_renewals_leaves_it_to_tokens(short, away, monkeypatch):
    party = away["older"]
    # An older one answers UNIMPLEMENTED, as any server to a method that it does not have.
    monkeypatch.setattr(
        "coterie.wire.v1.thirdparty_pb2_grpc.EnrolmentStub.__init__",
        _without_late_renewals("coterie.v1.Enrolment/RenewExpired"),
    )
    party.settings.enrol.token_file.unlink()
    with pytest.raises(CertificateError, match="cannot read the token"):
        await short.enrol_with("client", party.settings, 2)
    party.settings.enrol.token_file.write_bytes(short.token("client", "older", participants=2).read_bytes())
    await short.enrol_with("client", party.settings, 2)


def _without_late_renewals(path):
    from coterie.wire.v1 import thirdparty_pb2 as wire

    def make(self, channel):
        self.Enrol = channel.stream_unary(
            "/coterie.v1.Enrolment/Enrol",
            request_serializer=wire.EnrolRequest.SerializeToString,
            response_deserializer=wire.EnrolResponse.FromString,
        )
        self.RenewExpired = channel.unary_unary(
            f"/{path}-of-later",
            request_serializer=wire.RenewExpiredRequest.SerializeToString,
            response_deserializer=wire.RenewCertificateResponse.FromString,
        )

    return make
