"""Attacks from the network on real services, and beside each that it would work, or that the honest form does."""

import asyncio
import contextlib
import ssl

import grpc
import pytest

from coterie.crypto.authority import Authority, logical_name
from coterie.net.authorisation import ALLOWED
from coterie.net.channel import connect
from coterie.net.meter import Meter
from coterie.net.server import Guard, make_server
from coterie.net.status import from_rpc_error
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub
from coterie.wire.v1.thirdparty_pb2 import LookupRequest, RevokeRequest
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

from .raw import Raw, message

SOON_S = 20.0
SECRET = "what-nobody-else-may-read"  # pragma: allowlist secret
ROLES = ("cos", "data-owner", "client", "decrypting-client", "thirdparty", "operator")
SERVING = ("cos", "data-owner", "client", "thirdparty")
ECHO = "/test.Attack/Echo"


@pytest.fixture(scope="module")
def people(shared_third_party):
    async def enrol():
        return {
            "left": await shared_third_party.enrol("client", "attacked-left", 3),
            "right": await shared_third_party.enrol("client", "attacked-right", 3),
            "owner": await shared_third_party.enrol("data-owner", "attacked-owner", 1),
        }

    return asyncio.run(enrol())


@pytest.fixture(scope="module")
def everybody(shared_third_party, tmp_path_factory):
    """TLS files of every role."""
    folder = tmp_path_factory.mktemp("everybody")
    return {role: shared_third_party.issue(folder / role, role, "somebody") for role in ROLES}


class Between:
    """Somebody on the way between a caller and a service, who hands on what arrives and keeps a copy.

    With files of TLS it ends the connections itself, and makes others to the service; else it sees what anybody sees on
    the network.
    """

    def __init__(self, target, tls=None, target_name="", onward=None):
        self._target, self._tls, self._name, self._onward = target, tls, target_name, onward or tls
        self.seen = bytearray()
        self.flows = []
        """What each connection sent to the service, byte for byte."""
        self._tasks = set()

    async def __aenter__(self):
        context = None
        if self._tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._tls.chain, self._tls.key)
            context.set_alpn_protocols(["h2"])
        self._server = await asyncio.start_server(self._met, "127.0.0.1", 0, ssl=context)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _met(self, reader, writer):
        host, _, port = self._target.rpartition(":")
        onward = None
        if self._tls is not None:
            onward = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            onward.check_hostname, onward.verify_mode = False, ssl.CERT_NONE
            onward.load_cert_chain(self._onward.chain, self._onward.key)
            onward.set_alpn_protocols(["h2"])
        name = self._name if onward else None
        flow = bytearray()
        self.flows.append(flow)
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(host, int(port), ssl=onward, server_hostname=name)
            for source, sink, keeps in ((reader, back, True), (there, writer, False)):
                task = asyncio.create_task(self._carry(source, sink, flow if keeps else None))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _carry(self, source, sink, flow):
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if flow is not None:
                    flow += data
                    self.seen += data
                sink.write(data)
                await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def calling(address, tls, name, *, authority=None):
    """Open a channel to an address; ``authority`` is believed in place of the caller's own."""
    credentials = grpc.ssl_channel_credentials(
        root_certificates=(authority or tls.authority).read_bytes(),
        private_key=tls.key.read_bytes(),
        certificate_chain=tls.chain.read_bytes(),
    )
    channel = connect(address, credentials, tls_name=name, peer="whoever", meter=Meter())
    try:
        yield channel
    finally:
        await channel.close()


async def looked_up(address, tls, name, **how):
    """Return how a call with something secret in it ends."""
    async with calling(address, tls, name, **how) as channel:
        try:
            await channel.stub(OrchestratorStub).Poll(wire.PollRequest(run_id=SECRET), timeout=SOON_S)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error, "cos")
            return failure.name if isinstance(failure, Refusal) else error.code().name
    return "OK"


# --- in the middle --------------------------------------------------------------------------------


async def test_who_only_hands_on_reads_nothing(cos, everybody):
    async with Between(cos.address) as wire_tap:
        answer = await looked_up(wire_tap.address, everybody["client"], logical_name("cos", cos.name))
    assert answer == "UNKNOWN_ROUND"
    assert len(wire_tap.seen) > 500
    assert SECRET.encode() not in wire_tap.seen


async def test_a_relay_with_an_authority_of_its_own_reads_nothing(cos, everybody, third_party, tmp_path):
    forged = Authority.create("forged", 1)
    name = logical_name("cos", cos.name)
    tls = third_party.issue(tmp_path / "relay", "cos", cos.name, authority=forged)
    ca = tmp_path / "forged.pem"
    ca.write_bytes(forged.certificate_pem)
    async with Between(cos.address, tls, name, everybody["client"]) as relay:
        assert await looked_up(relay.address, everybody["client"], name) == "UNAVAILABLE"
        assert not relay.seen
        # Who believed that authority would be read.
        await looked_up(relay.address, everybody["client"], name, authority=ca)
        assert SECRET.encode() in relay.seen


@pytest.mark.parametrize("role", [role for role in ROLES if role != "cos"])
async def test_a_relay_with_a_certificate_of_another_role_reads_nothing(cos, everybody, role):
    async with Between(cos.address, everybody[role], logical_name("cos", cos.name)) as relay:
        assert (
            await looked_up(relay.address, everybody["client"], logical_name("cos", cos.name))
            == "UNAVAILABLE"
        )
        assert not relay.seen
        # Who took that name for the COS would be read.
        other = logical_name(role, "somebody")
        await looked_up(relay.address, everybody["client"], other)
        assert SECRET.encode() in relay.seen


# --- in somebody's place --------------------------------------------------------------------------------


async def test_no_role_passes_for_another_as_a_server(everybody):
    """Every certificate in place of every other: only its own name is taken."""

    async def echo(request, context):
        return request

    taken = set()
    for shown in ROLES:
        server = make_server(Guard(Meter(), anonymous=[ECHO]))
        handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
        server.add_registered_method_handlers("test.Attack", handlers)
        port = server.add_secure_port("127.0.0.1:0", everybody[shown].server_credentials())
        await server.start()
        for wanted in ROLES:
            for name in ("somebody", "other"):
                tls_name = logical_name(wanted, name)
                async with calling(f"127.0.0.1:{port}", everybody["client"], tls_name) as channel:
                    call = channel.unary_unary(ECHO, bytes, bytes)
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        if await call(b"x", timeout=SOON_S) == b"x":
                            taken.add((shown, wanted, name))
        await server.stop(0)
    assert taken == {(role, role, "somebody") for role in ROLES}


async def test_no_role_passes_for_another_as_a_caller(cos, third_party, everybody, calls):
    """Every role calls what is another's, and what is its own."""
    services = {"Orchestrator": cos, "Operator": cos, "KeyDirectory": third_party}
    pairs = set()
    for method, allowed in ALLOWED.items():
        service = services.get(method.split("/")[1].rpartition(".")[2])
        if service is None:
            continue
        for role in ROLES:
            answer = await calls.with_nothing(service.channel(everybody[role]), method)
            assert (answer == "WRONG_ROLE") == (role not in allowed), (method, role)
            if answer == "WRONG_ROLE":
                pairs |= {(role, victim) for victim in allowed}
    callable_roles = {role for allowed in ALLOWED.values() for role in allowed}
    # In place of everybody who may call something that not all may.
    wanted = {
        (a, b) for a in ROLES for b in callable_roles & {"client", "data-owner", "operator", "cos"} if a != b
    }
    assert wanted <= pairs


async def test_nobody_speaks_for_the_participants_of_another(world, calls):
    """Messages of a party, recorded and sent again over another party's connection."""
    run = await world(per_user=True).begin("left", "right")
    left, right = run.hosts["left"], run.hosts["right"]
    task = await left.task(wire.TaskKind.TASK_KIND_ROUND)
    assert await left.answer(task) == []
    plan = await left.plan(task.round.round)
    recorded = [
        (wire.SubmitKind.SUBMIT_KIND_VECTOR, number, left.slots_of(plan, member), sent)
        for (number, _, member), sent in left.sent.items()
    ]
    assert len(recorded) == 3
    assert await right.submit(recorded) == ["UNKNOWN_PARTICIPANT"] * 3
    # Whoever sent them may send them again, and they count once.
    assert await left.submit(recorded) == []
    await asyncio.gather(*(host.play() for host in run.hosts.values()))
    assert [one["summed"] for one in (await run.report())["rounds"]] == [6, 6, 6, 6]


# --- recorded and sent again --------------------------------------------------------------------------------


async def test_a_recorded_connection_sent_again_does_nothing(third_party, everybody):
    def served():
        return third_party.metric("coterie_rpc_calls_total", side="server", rpc="Lookup")

    name = logical_name("thirdparty", third_party.name)
    async with Between(third_party.address) as wire_tap:
        before = served()
        async with calling(wire_tap.address, everybody["client"], name) as channel:
            await channel.stub(KeyDirectoryStub).Lookup(LookupRequest(), timeout=SOON_S)
        assert served() == before + 1
        (recorded,) = wire_tap.flows
        host, _, port = third_party.address.rpartition(":")
        for pieces in (
            [bytes(recorded)],
            [bytes(recorded[n : n + 500]) for n in range(0, len(recorded), 500)],
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                async with asyncio.timeout(SOON_S):
                    while await reader.read(1 << 16):
                        pass
            writer.close()
        assert served() == before + 1
        # The same call, made anew, is served.
        async with calling(wire_tap.address, everybody["client"], name) as channel:
            await channel.stub(KeyDirectoryStub).Lookup(LookupRequest(), timeout=SOON_S)
        assert served() == before + 2


async def test_a_request_sent_again_over_a_connection_of_ones_own_is_a_request_of_ones_own(world, people):
    """The bytes of a poll of somebody who is registered, from somebody who is not."""
    run = await world(per_user=True).begin("left")
    request = message(wire.PollRequest(run_id=run.run).SerializeToString())
    answers = {}
    for who in ("left", "right"):
        raw = await (await Raw.to(run.cos, people[who].tls)).begin()
        stream = await raw.call("/coterie.v1.Orchestrator/Poll", request)
        answers[who] = 0
        async for one in raw.frames(SOON_S):
            if one.stream == stream:
                answers[who] += len(one.payload) if one.kind == 0 else 0
                if one.flags & 1:
                    break
        await raw.close()
    # Tasks for the one, for the other a refusal, which has no body.
    assert answers["left"] > 10
    assert answers["right"] == 0


# --- revoked in the middle --------------------------------------------------------------------------------


async def test_open_streams_of_a_revoked_party_end_and_those_of_others_go_on(
    cos, operator, third_party, certificates, calls, people
):
    victim = await third_party.enrol("client", "revoked-in-mid-stream", 1)
    ended = {}
    release = asyncio.Event()

    async def endless():
        yield wire.SubmitRequest(kind=wire.SubmitKind.SUBMIT_KIND_VECTOR)
        await release.wait()

    async def kept(who, enrolled):
        stub = cos.channel(enrolled).stub(OrchestratorStub)

        async def one(what, call):
            try:
                await call
                ended[who, what] = "OK"
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error, "cos")
                ended[who, what] = failure.name if isinstance(failure, Refusal) else error.code().name

        await asyncio.gather(
            one("upload", stub.Submit(endless(), timeout=60)),
            one("registration", stub.Register(endless_registration(), timeout=60)),
        )

    async def endless_registration():
        await release.wait()
        yield wire.RegisterRequest()

    open_calls = cos.metric("coterie_open_calls")
    streams = [
        asyncio.create_task(kept("victim", victim)),
        asyncio.create_task(kept("other", people["left"])),
    ]
    async with asyncio.timeout(SOON_S):
        while cos.metric("coterie_open_calls") < open_calls + 4:
            await asyncio.sleep(0.05)
    await third_party.directory(certificates["operator"]).Revoke(
        RevokeRequest(certificates=[victim.fingerprint])
    )
    async with asyncio.timeout(SOON_S):
        await streams[0]
    assert ended == {("victim", "upload"): "REVOKED", ("victim", "registration"): "REVOKED"}
    assert await looked_up(cos.address, victim.tls, logical_name("cos", cos.name)) == "REVOKED"
    assert await looked_up(cos.address, people["left"].tls, logical_name("cos", cos.name)) == "UNKNOWN_ROUND"
    release.set()
    async with asyncio.timeout(SOON_S):
        await streams[1]
    # They came to their end, at which the messages were found wrong.
    assert "REVOKED" not in (ended["other", "upload"], ended["other", "registration"])
