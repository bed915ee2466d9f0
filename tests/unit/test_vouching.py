"""What a coordinator takes from an intake about whose call it hands on, and from whom it takes nothing."""

import asyncio
import re
import time

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from coterie.config.load import load_service
from coterie.crypto.authority import Authority, PeerIdentity, make_csr, new_tls_key
from coterie.errors import ConfigError
from coterie.net.admission import Limits
from coterie.net.meter import Meter
from coterie.net.server import Guard, make_server
from coterie.net.vouching import CALLER_KEY, HANDED_OVER, INTAKE_KEY, Vouching, claim
from coterie.wire.refusal import ErrorReason, Refusal

INTAKE = PeerIdentity(role="cos", name="cos", fingerprint=b"i" * 32)


@pytest.fixture(scope="module")
def authority():
    return Authority.create("coterie", 30)


def issued(authority, role="client", name="host-0"):
    return x509.load_pem_x509_certificate(authority.issue(make_csr(new_tls_key()), role, name, 1))


def pem_of(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def vouching(authority):
    return Vouching("cos/cos", lambda: authority.certificate_pem)


def test_a_call_that_is_handed_on_is_the_callers_whose_certificate_comes_with_it(authority, vouching):
    certificate = issued(authority)
    der = vouching.caller(INTAKE, claim(pem_of(certificate)))
    identity, end = vouching.checked(der)
    assert str(identity) == "client/host-0"
    assert end == certificate.not_valid_after_utc.timestamp()


def test_a_call_without_a_claim_and_an_intakes_own_are_of_their_callers(vouching):
    assert vouching.caller(PeerIdentity(role="client", name="a", fingerprint=b""), ()) is None
    assert vouching.caller(INTAKE, claim()) is None


@pytest.mark.parametrize(("role", "name"), [("client", "cos"), ("cos", "another"), ("operator", "operator")])
def test_nobody_but_an_intake_vouches(authority, vouching, role, name):
    caller = PeerIdentity(role=role, name=name, fingerprint=b"c" * 32)
    with pytest.raises(Refusal) as refused:
        vouching.caller(caller, claim(pem_of(issued(authority))))
    assert refused.value.reason == ErrorReason.ERROR_REASON_WRONG_ROLE


def test_a_certificate_of_another_authority_and_bytes_that_are_none_are_refused(vouching):
    stranger = issued(Authority.create("coterie", 30))
    for der in (stranger.public_bytes(serialization.Encoding.DER), b"none"):
        with pytest.raises(Refusal) as refused:
            vouching.checked(der)
        assert refused.value.reason == ErrorReason.ERROR_REASON_BAD_SIGNATURE


# Version 1 knows no pieces that travel together, and parties send them as the coordinator allows.
@pytest.mark.parametrize("said", [f"{HANDED_OVER + 1}/9.9.0", "1/1.0.0", "", "x"])
def test_an_intake_of_another_version_is_named_and_its_callers_wait(vouching, said):
    with pytest.raises(Refusal, match=re.escape("the intake (release ")) as refused:
        vouching.caller(INTAKE, ((INTAKE_KEY, said), (CALLER_KEY, b"der")))
    # A party would end at a version that it could not speak, and this one is not its own.
    assert refused.value.reason == ErrorReason.ERROR_REASON_NOT_READY
    assert said.partition("/")[2] in str(refused.value)


class Calling:
    """What the guard reads of a call: the certificate of its connection and its metadata."""

    def __init__(self, certificate, metadata):
        self._certificate = pem_of(certificate)
        self._metadata = metadata

    def auth_context(self):
        return {"x509_pem_cert": [self._certificate]}

    def invocation_metadata(self):
        return self._metadata

    def peer(self):
        return "ipv4:127.0.0.1:4000"


def guarded(vouching):
    return Guard(Meter(), limits=Limits(resets_per_s=1.0), vouching=vouching)


def gives_up(guard, call):
    """Give many calls up; return whether the guard cut the connection off."""
    for _ in range(1000):
        guard.given_up(call)
    return guard.is_cut_off(call)


@pytest.mark.parametrize("key", [CALLER_KEY, INTAKE_KEY])
@pytest.mark.parametrize("intakes", [True, False], ids=["with intakes", "one process"])
def test_a_party_that_sends_an_intakes_metadata_is_refused_and_its_given_up_calls_count(
    authority, vouching, intakes, key
):
    guard = guarded(vouching if intakes else None)
    told = [one for one in claim(pem_of(issued(authority, name="another"))) if one[0] == key]
    call = Calling(issued(authority), told)
    assert str(guard.identify(call)) == "client/host-0"
    with pytest.raises(Refusal) as refused:
        guard.refuse_claims(call)
    assert refused.value.reason == ErrorReason.ERROR_REASON_WRONG_ROLE
    assert gives_up(guard, call)


def test_calls_that_an_intake_hands_on_are_counted_there_until_it_is_revoked(authority, vouching):
    guard = guarded(vouching)
    intake = issued(authority, "cos", "cos")
    call = Calling(intake, claim(pem_of(issued(authority))))
    assert str(guard.identify(call)) == "client/host-0"
    guard.refuse_claims(call)
    assert not gives_up(guard, call)
    guard.revoke([PeerIdentity.from_certificate(pem_of(intake)).fingerprint])
    assert gives_up(guard, call)


DATABASE = 'database.url="postgresql+psycopg://cos@db:5432/cos"'
PEER = ["thirdparty.address=t:1", "thirdparty.name=directory", "name=cos", "state=state", "listen=c:1"]


async def test_a_connection_of_an_intake_carries_more_calls_at_once_than_one_of_a_party(vouching):
    many, there, all_there = 200, 0, asyncio.Event()

    async def hold(request, context):
        nonlocal there
        there += 1
        if there == many:
            all_there.set()
        await all_there.wait()
        return b""

    method = "/coterie.test/Hold"
    server = make_server(Guard(Meter(), anonymous=[method], vouching=vouching))
    server.add_registered_method_handlers("coterie.test", {"Hold": grpc.unary_unary_rpc_method_handler(hold)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(60):
            call = channel.unary_unary(method)
            assert await asyncio.gather(*(call(b"") for _ in range(many))) == [b""] * many
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["part=intake", "coordinator=['c:1']"], "needs a [database]"),
        (["part=intake", DATABASE], "where an intake finds the runs"),
        (["part=coordinator", DATABASE, "coordinator=['c:1']"], "with no other part"),
        (["part=intake", "coordinator=['c:1']", "standby=true", DATABASE], "an intake has no standby"),
    ],
)
def test_parts_that_cannot_work_are_refused(sets, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_service("cos", None, sets=[*PEER, *sets], environ={})


def test_a_launchers_own_variable_is_no_misspelt_part():
    assert load_service("cos", None, sets=PEER, environ={"COTERIE_PARENT": "1"}).settings.part == "both"


def test_certificates_that_have_expired_are_forgotten_and_not_looked_for_at_each_new_one(
    authority, vouching, monkeypatch
):
    monkeypatch.setattr("coterie.net.server._SWEEP", 4)
    guard, swept = guarded(vouching), []
    forget = guard._forget_expired
    guard._forget_expired = lambda: (swept.append(len(guard._identities)), forget())

    def shown(days):
        pem = authority.issue(make_csr(new_tls_key()), "client", "host-0", days)
        return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)

    for _ in range(4):
        guard.vouched(shown(1))
    assert swept == []
    now = time.time()
    monkeypatch.setattr("coterie.net.server.time.time", lambda: now + 2 * 86_400)
    for _ in range(9):
        guard.vouched(shown(20))
    # Four had expired, and were forgotten; the next look is when as many could have again.
    assert swept == [4, 4, 8]
    assert len(guard._identities) == 9
