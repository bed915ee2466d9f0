"""Hostile callers at a real orchestration server, while two hosts train there to the same model as without them.

Every hostile caller but those before the handshake has a certificate of its own and takes part in nothing.
"""

import asyncio
import contextlib
import gzip
import os
import struct
import time
import zlib
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coterie.net import server
from coterie.net.admission import Limits
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.net.vouching import CALLER_KEY, HANDED_OVER, INTAKE_KEY
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub

from .playing import World
from .raw import CONTINUATION, DATA, END_HEADERS, GOAWAY, HEADERS, PING, RST_STREAM, Raw, frame, message

SOON_S = 20.0
CLAIMED = ((INTAKE_KEY, f"{HANDED_OVER}/1.0.0"), (CALLER_KEY, "bm9uZQ"))
"""Metadata that only calls of intakes have."""
POLL, FETCH, SUBMIT, REGISTER = (
    f"/coterie.v1.Orchestrator/{name}" for name in ("Poll", "Fetch", "Submit", "Register")
)
LIMITS = {
    "connections": 60,
    "connections_per_peer": 4,
    "calls_per_peer": 24,
    "calls_per_s": 50.0,
    "burst": 400,
    "uploads_per_peer": 3,
    "resets_per_s": 20.0,
    "message_s": 1.5,
    "least_kib_s": 4.0,
    "handshake_s": 1.5,
    "keepalive_s": 3.0,
    "idle_s": 2.0,
    "age_s": 60.0,
}


@pytest.fixture(scope="module")
def people(shared_third_party):
    async def enrol():
        return {
            "left": await shared_third_party.enrol("client", "calm-left", 3),
            "right": await shared_third_party.enrol("client", "calm-right", 3),
            "owner": await shared_third_party.enrol("data-owner", "calm-owner", 1),
        }

    return asyncio.run(enrol())


@pytest.fixture(scope="module")
def besieged_cos(shared_third_party, tmp_path_factory, calls):
    """A COS with tight limits."""
    folder = tmp_path_factory.mktemp("besieged")
    service = calls.Member("cos", "besieged", shared_third_party, folder, limits=LIMITS)
    service.start()
    yield service
    service.stop()


@pytest.fixture
async def besieged(besieged_cos):
    yield besieged_cos
    await besieged_cos.release()


@pytest.fixture
def hostile(shared_third_party, tmp_path):
    """A certificate of a client that nobody knows."""
    return shared_third_party.issue(tmp_path / "hostile", "client", f"hostile-{time.monotonic_ns()}")


@pytest.fixture(scope="module")
def calm():
    """The model that the run comes to undisturbed, once it is known."""
    return {}


@pytest.fixture
def train(besieged, people, certificates, calls):
    """Return a function that trains and returns the model; an event tells that the hosts have their connections."""

    async def run(ready=None):
        operating = calls.Operating(besieged, certificates["operator"])
        world = World(besieged, operating, people, calls, per_user=True)
        await world.begin("left", "right", passes=1)
        async with asyncio.timeout(SOON_S):
            if ready is not None:
                for host in world.hosts.values():
                    await host.stub.Poll(wire.PollRequest(run_id=world.run))
                ready.set()
            await asyncio.gather(*(host.play() for host in world.hosts.values()))
            return await world.model()

    return run


@pytest.fixture
async def undisturbed(train, calm):
    """Return a context in which the hosts train, to the model that they come to without anybody else.

    The context's value is an event: the hosts have their connections.
    """
    if not calm:
        calm.update(await train())

    @contextlib.asynccontextmanager
    async def context():
        ready = asyncio.Event()
        training = asyncio.create_task(train(ready))
        try:
            yield ready
            found = await training
        finally:
            training.cancel()
        assert found.keys() == calm.keys()
        for name, values in calm.items():
            assert np.array_equal(found[name], values), name

    return context


def limited(service, limit):
    return service.metric("coterie_limited_total", limit=limit)


async def connected(service, tls):
    return await (await Raw.to(service, tls)).begin()


async def gather_ended(raw, streams):
    return await raw.ended(streams, SOON_S)


# --- before the handshake ------------------------------------------------------------------------------------------


async def closed_by_peer(reader):
    """Whether the other side closes a connection soon."""
    try:
        async with asyncio.timeout(SOON_S):
            while await reader.read(1 << 16):
                pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", os.urandom(2000), b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_handshake_that_does_not_come_to_its_end_is_cut_off(besieged, undisturbed, sent):
    host, _, port = besieged.address.rpartition(":")
    async with undisturbed():
        half_open = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        for _, writer in half_open:
            writer.write(sent)
        assert all(await asyncio.gather(*(closed_by_peer(reader) for reader, _ in half_open)))
        for _, writer in half_open:
            writer.close()


async def test_connections_above_the_number_are_closed_and_places_are_given_back(besieged, undisturbed):
    host, _, port = besieged.address.rpartition(":")
    async with undisturbed() as ready:
        await asyncio.wait_for(ready.wait(), SOON_S)
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(LIMITS["connections"] * 2)]
        assert all(await asyncio.gather(*(closed_by_peer(reader) for reader, _ in opened)))
        for _, writer in opened:
            writer.close()


# --- calls -----------------------------------------------------------------------------------------------------------


async def test_a_flood_of_calls_is_told_when_to_come_back(besieged, hostile, undisturbed):
    stub = besieged.channel(hostile).stub(OrchestratorStub)
    served, away = [], []

    async def flood():
        while len(away) < 500:
            try:
                await stub.Poll(wire.PollRequest(run_id="none"))
            except grpc.aio.AioRpcError as error:
                reason = from_rpc_error(error, "cos")
                (away if reason.name == "OVERLOADED" else served).append(reason)

    async with undisturbed():
        began = time.monotonic()
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(flood() for _ in range(12)))
        lasted = time.monotonic() - began
    assert len(served) <= LIMITS["burst"] + lasted * LIMITS["calls_per_s"]
    assert all(one.field == "limits.calls_per_s" and one.retry_after_s > 0 for one in away)
    assert limited(besieged, "calls_per_s") >= len(away)
    # Who waits as it is told is served.
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await Retry(limit_s=SOON_S)(lambda: stub.Poll(wire.PollRequest(run_id="none")))
    assert from_rpc_error(failed.value, "cos").name == "UNKNOWN_ROUND"


async def test_calls_of_what_nobody_offers_take_of_their_callers_share(besieged, hostile, undisturbed):
    def away():
        return besieged.metric("coterie_limited_total", limit="calls_per_s", caller="client")

    before, asked = away(), 0
    names = ["/coterie.v1.Orchestrator/No", b"/\xff\xfe"] * (LIMITS["calls_per_peer"] // 2)
    async with undisturbed():
        raw = await connected(besieged, hostile)
        async with asyncio.timeout(SOON_S):
            while asked < LIMITS["burst"] or away() == before:
                for _ in range(10):
                    streams = [await raw.call(name, message(b"")) for name in names]
                    assert await raw.ended(streams, SOON_S) == set(streams)
                    asked += len(names)
        await raw.close()
    # gRPC itself turns some away where many come at once.
    assert besieged.metric("coterie_rpc_calls_total", side="server", rpc="unknown") >= LIMITS["burst"]


async def test_more_calls_at_once_than_a_caller_may_have_wait_or_are_refused(besieged, hostile, undisturbed):
    """On one connection gRPC takes no more streams; over several the service counts."""
    async with undisturbed():
        raws = [await connected(besieged, hostile) for _ in range(3)]
        streams = [[await raw.call(SUBMIT) for _ in range(LIMITS["calls_per_peer"])] for raw in raws]
        ended = await asyncio.gather(
            *(gather_ended(raw, own) for raw, own in zip(raws, streams, strict=True))
        )
        assert [set(own) for own in streams] == ended
        for raw in raws:
            await raw.close()
    assert limited(besieged, "uploads_per_peer")
    assert limited(besieged, "message_s")


async def test_connections_of_one_caller_are_counted(besieged, hostile, undisturbed):
    channels = [besieged.channel(hostile).stub(health_pb2_grpc.HealthStub) for _ in range(6)]
    watches = [one.Watch(health_pb2.HealthCheckRequest(), timeout=SOON_S) for one in channels]
    found = []

    async def first(watch):
        try:
            found.append((await anext(watch)).status)
        except grpc.aio.AioRpcError as error:
            found.append(from_rpc_error(error, "cos").field)

    async with undisturbed():
        await asyncio.gather(*(first(watch) for watch in watches))
    assert sorted(map(str, found)) == ["1"] * 4 + ["limits.connections_per_peer"] * 2


@pytest.mark.parametrize("claimed", [(), CLAIMED], ids=["as a party", "as if an intake handed it on"])
async def test_who_gives_up_one_call_after_the_other_is_cut_off_until_it_has_stopped(
    besieged, hostile, undisturbed, claimed
):
    def away():
        return besieged.metric("coterie_limited_total", limit="resets_per_s", caller="client")

    async def flooded(raw, seconds):
        """Begin calls and give them up, until cut off; return whether that was so."""
        reading = asyncio.create_task(raw.until_closed(seconds + SOON_S))
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not raw.closed:
            burst = b""
            for _ in range(50):
                stream = raw.new_stream()
                burst += frame(HEADERS, stream, raw.call_headers(POLL, *claimed), END_HEADERS)
                burst += frame(RST_STREAM, stream, struct.pack(">I", 8))
            await raw.send(burst)
            await asyncio.sleep(0)
        cut = raw.closed or reading.done()
        await raw.close()
        await reading
        return cut

    before, calls = away(), besieged.metric("coterie_open_calls")
    async with undisturbed():
        assert await flooded(await connected(besieged, hostile), SOON_S)
        assert away() > before
        # Over another connection it fares no better.
        assert await flooded(await connected(besieged, hostile), SOON_S)
        assert besieged.metric("coterie_open_calls") <= calls + 8
    # Who has stopped is a caller like any other after a time.
    stub = besieged.channel(hostile).stub(OrchestratorStub)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await Retry(limit_s=SOON_S)(lambda: stub.Poll(wire.PollRequest(run_id="none")))
    assert from_rpc_error(failed.value, "cos").name == "UNKNOWN_ROUND"


# --- messages --------------------------------------------------------------------------------------------------------


async def test_an_upload_that_does_not_end_is_cut_off(besieged, hostile, undisturbed):
    async with undisturbed():
        raw = await connected(besieged, hostile)
        one = wire.SubmitRequest(kind=wire.SubmitKind.SUBMIT_KIND_VECTOR)
        one.chunk.data = b"x"
        stream = await raw.call(SUBMIT)

        async def trickle():
            sent = 0
            while not raw.closed:
                # Each message in time, and all together next to nothing.
                one.chunk.offset = sent
                await raw.send(frame(DATA, stream, message(one.SerializeToString())))
                sent += 1
                await asyncio.sleep(0.2)

        trickling = asyncio.create_task(trickle())
        assert b"the caller was too slow" in await raw.trailers(stream, SOON_S)
        trickling.cancel()
        await raw.close()


async def test_who_was_too_slow_is_told_so_and_may_not_send_a_stream_at_once(besieged, hostile, undisturbed):
    stub = besieged.channel(hostile).stub(OrchestratorStub)
    release = asyncio.Event()

    async def nothing():
        await release.wait()
        yield wire.SubmitRequest()

    async def refused():
        # The service may just be closing a connection on which nothing was said for long: the call never arrived.
        while True:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.Submit(nothing(), timeout=SOON_S)
            found = from_rpc_error(failed.value, "cos")
            if isinstance(found, Refusal):
                return found
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE

    async with undisturbed():
        for reason, field in (("TOO_SLOW", "limits.message_s"), ("OVERLOADED", "limits.message_s")):
            refusal = await refused()
            assert (refusal.name, refusal.field) == (reason, field)
            assert 0 < refusal.retry_after_s <= LIMITS["message_s"]
    release.set()


@pytest.mark.parametrize("length", [5 << 20, 0xFFFFFFFF])
async def test_a_giant_message_is_refused_before_it_is_there(besieged, hostile, undisturbed, length):
    async with undisturbed():
        raw = await connected(besieged, hostile)
        stream = await raw.call(SUBMIT, struct.pack(">BI", 0, length) + bytes(10_000), end=False)
        assert await raw.ended([stream], SOON_S) == {stream}
        await raw.close()


async def test_a_single_request_is_one_message(besieged, hostile, undisturbed):
    one = message(wire.PollRequest(run_id="none").SerializeToString())

    def refusals():
        return [
            besieged.metric("coterie_refusals_total", rpc="Poll", reason=reason)
            for reason in ("INVALID_FIELD", "UNKNOWN_ROUND")
        ]

    malformed, unknown = refusals()
    async with undisturbed():
        raw = await connected(besieged, hostile)
        streams = [await raw.call(POLL, *data) for data in ((b"",), (message(b"\xff\xff"),), (one, one))]
        assert await raw.ended(streams, SOON_S) == set(streams)
        await raw.close()
    # None, what is no message, and one that is followed by what nobody reads.
    assert refusals() == [malformed + 2, unknown + 1]


async def test_a_large_request_of_a_call_without_vectors_is_refused(besieged, hostile, undisturbed):
    stub = besieged.channel(hostile).stub(OrchestratorStub)
    async with undisturbed():
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Poll(wire.PollRequest(run_id="x" * (1 << 20)))
        assert from_rpc_error(failed.value, "cos").name == "TOO_LARGE"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        # In each case the last byte is no message: what is refused for its pieces was not parsed.
        (b"\x3a\x00" * 1_900_000 + b"\xff", "TOO_LARGE"),
        (b"\x3a\x80\x80\x01" + b"\x3a\x00" * 8_192 + b"\xff", "INVALID_FIELD"),
    ],
    ids=["pieces", "pieces in a piece"],
)
async def test_pieces_that_take_many_times_their_bytes_are_refused_before_they_are_parsed(
    besieged, hostile, undisturbed, data, reason
):
    async def sent():
        yield data

    submit = besieged.channel(hostile).stream_unary(SUBMIT, bytes, wire.SubmitResponse.FromString)
    async with undisturbed():
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await submit(sent())
    refusal = from_rpc_error(failed.value, "cos")
    assert (refusal.name, refusal.field) == (reason, "more")


PACK = {"gzip": lambda data: gzip.compress(data, mtime=0), "deflate": zlib.compress}


@pytest.mark.parametrize("encoding", list(PACK))
async def test_what_is_packed_is_refused_before_it_is_unpacked_however_small(
    besieged, hostile, undisturbed, encoding
):
    """Neither a correct packed request nor one that would unpack to much is unpacked."""

    def unpacked():
        return besieged.metric("coterie_refusals_total", rpc="Poll", reason="UNKNOWN_ROUND")

    right = PACK[encoding](wire.PollRequest(run_id="none").SerializeToString())
    bomb = PACK[encoding](bytes(56 << 20))
    # As much as fits into the window that a connection begins with.
    assert len(bomb) < 60_000
    async with undisturbed():
        before = unpacked()
        raw = await connected(besieged, hostile)
        for method, data in ((POLL, right), (SUBMIT, bomb)):
            sent = message(data, compressed=True)
            parts = [sent[n : n + 16_000] for n in range(0, len(sent), 16_000)]
            stream = await raw.call(method, *parts, further=[("grpc-encoding", encoding)])
            assert b"is disabled" in await raw.trailers(stream, SOON_S)
        assert unpacked() == before
        # The same in plain is read.
        stream = await raw.call(POLL, message(wire.PollRequest(run_id="none").SerializeToString()))
        assert await raw.ended([stream], SOON_S) == {stream}
        assert unpacked() == before + 1
        await raw.close()


@pytest.mark.parametrize(("largest_mib", "unpacks"), [(4, False), (64, True)])
async def test_without_that_grpc_unpacks_no_more_than_the_largest_message(monkeypatch, largest_mib, unpacks):
    """The second line, measured by memory: a server that takes what is packed, with our limits and with higher ones."""
    packing = ("grpc.per_message_decompression", "grpc.compression_enabled_algorithms_bitset")
    options = [one for one in server.SERVER_OPTIONS if one[0] not in packing]
    monkeypatch.setattr(server, "SERVER_OPTIONS", options)
    took = []

    async def take(data, context):
        took.append(len(data))
        return b""

    method = "/test.Packed/Take"
    guard = server.Guard(Meter(), anonymous=[method], limits=Limits(message_kib=largest_mib << 10))
    taking = server.make_server(guard)
    taking.add_registered_method_handlers("test.Packed", {"Take": grpc.unary_unary_rpc_method_handler(take)})
    port = taking.add_insecure_port("127.0.0.1:0")
    await taking.start()
    bomb = message(PACK["gzip"](bytes(56 << 20)), compressed=True)
    raw = await Raw(*await asyncio.open_connection("127.0.0.1", port), "whoever").begin()
    before = memory_mib("VmRSS")
    # From here on the kernel notes the peak anew.
    Path("/proc/self/clear_refs").write_text("5")
    parts = [bomb[n : n + 16_000] for n in range(0, len(bomb), 16_000)]
    stream = await raw.call(method, *parts, further=[("grpc-encoding", "gzip")])
    ending = await raw.trailers(stream, SOON_S)
    grown = memory_mib("VmHWM") - before
    await raw.close()
    await taking.stop(0)
    assert (took, grown > 50) == (([56 << 20], True) if unpacks else ([], False)), (ending, grown)
    assert (b"larger than max" in ending) == (not unpacks)


@pytest.mark.parametrize("stays", [True, False], ids=["seldom", "often"])
async def test_pings_of_silent_callers_are_answered_and_a_flood_of_them_ends_the_connection(stays):
    serving = server.make_server(server.Guard(Meter(), anonymous=[], limits=Limits(ping_s=0.2)))
    port = serving.add_insecure_port("127.0.0.1:0")
    await serving.start()
    raw = await Raw(*await asyncio.open_connection("127.0.0.1", port), "whoever").begin()
    seen = set()
    pings = [frame(PING, payload=number.to_bytes(8, "big")) for number in range(6)]
    # A flood goes out at once: a machine that does much else would spread single pings over time.
    for sent in pings if stays else [b"".join(pings)]:
        await raw.send(sent)
        seen |= {(one.kind, one.payload[:8]) async for one in raw.frames(0.5 if stays else 0.0)}
    seen |= {(one.kind, one.payload[:8]) async for one in raw.frames(1.0)}
    await raw.close()
    await serving.stop(0)
    assert stays == (GOAWAY not in {kind for kind, _ in seen})
    assert not stays or {(PING, number.to_bytes(8, "big")) for number in range(6)} <= seen


def memory_mib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


async def test_answers_that_nobody_takes_do_not_gather_for_ever(besieged, hostile, undisturbed):
    """A window of nothing: the service may not send a byte of an answer."""
    check, most = "/grpc.health.v1.Health/Check", LIMITS["calls_per_peer"]
    ended = set()

    async def follow(raw):
        async for stream in raw.ends(SOON_S):
            ended.add((raw, stream))

    async with undisturbed():
        before = besieged.metric("coterie_open_calls")
        raws = [await (await Raw.to(besieged, hostile)).begin(struct.pack(">HI", 4, 0)) for _ in range(3)]
        following = [asyncio.create_task(follow(raw)) for raw in raws]
        for raw in raws:
            for _ in range(most):
                await raw.call(check, message(b""))
        # What has no place is refused, which takes no window.
        async with asyncio.timeout(SOON_S):
            while len(ended) < 2 * most:
                await asyncio.sleep(0.02)
        assert not any(task.done() for task in following)
        # The hosts have a few calls of their own.
        assert besieged.metric("coterie_open_calls") <= before + most + 8
        assert limited(besieged, "calls_per_peer")
        for task, raw in zip(following, raws, strict=True):
            task.cancel()
            await raw.close()


# --- headers ---------------------------------------------------------------------------------------------------------


async def test_huge_headers_are_refused(besieged, hostile, undisturbed):
    async with undisturbed():
        raw = await connected(besieged, hostile)
        first = raw.call_headers(POLL, *((f"x-{n}", "y" * 1000) for n in range(12)))
        stream = raw.new_stream()
        await raw.send(frame(HEADERS, stream, first))
        for n in range(400):
            more = b"".join(
                b"\x00" + bytes([5]) + b"x-%03d" % (n % 1000) + bytes([100]) + b"z" * 100 for _ in range(100)
            )
            await raw.send(frame(CONTINUATION, stream, more))
            if raw.closed:
                break
        await raw.send(frame(CONTINUATION, stream, b"", END_HEADERS))
        assert await raw.ended([stream], SOON_S) == {stream}
        await raw.close()


@pytest.mark.parametrize(
    "path", [b"/\xff\xfe\x80", b"", b"/" + b"\xc3\x28" * 10, b"/coterie.v1.Orchestrator/\x00"]
)
async def test_a_path_that_is_no_text_ends_the_call_and_not_the_service(besieged, hostile, undisturbed, path):
    raw = await connected(besieged, hostile)
    async with undisturbed():
        stream = await raw.call(path, message(b""))
        assert await raw.ended([stream], SOON_S) == {stream}
    await raw.close()
    assert besieged.healthy()


# --- idle and dead connections ---------------------------------------------------------------------------------------


async def test_a_connection_without_calls_is_closed(besieged, hostile, undisturbed):
    async with undisturbed():
        raw = await connected(besieged, hostile)
        assert await raw.until_closed(SOON_S)
        await raw.close()


async def test_a_connection_that_gives_no_sign_of_life_is_closed_with_its_calls(
    besieged, hostile, undisturbed
):
    """As after a cable was pulled: it has a call, and answers no ping."""
    async with undisturbed():
        raw = await connected(besieged, hostile)
        await raw.call("/grpc.health.v1.Health/Watch", message(b""))
        assert await closed_by_peer(raw.reader)


# --- without a certificate -------------------------------------------------------------------------------------------


async def test_where_nobody_shows_a_certificate_an_address_gets_its_share_and_others_enrol(start_third_party):
    third_party = start_third_party(
        enrol_limits={
            "calls_per_peer": 8,
            "uploads_per_peer": 8,
            "calls": 40,
            "message_s": 2.0,
            "connections": 40,
        }
    )
    method, elsewhere = "/coterie.v1.Enrolment/Enrol", "127.0.0.2"
    raws = [
        await (await Raw.to(third_party, address=third_party.enrol_address, source=elsewhere)).begin()
        for _ in range(4)
    ]
    streams = [[await raw.call(method) for _ in range(8)] for raw in raws]
    # A name that is no text ends nothing here either.
    await raws[0].call(b"/\xff\xfe", message(b""))
    enrolled = await third_party.enrol("client", "honest-beside-hostile", 1)
    assert enrolled.bundles
    ended = await asyncio.gather(*(raw.ended(own, SOON_S) for raw, own in zip(raws, streams, strict=True)))
    assert ended == [set(own) for own in streams]
    for raw in raws:
        await raw.close()
    assert third_party.metric("coterie_limited_total", limit="calls_per_peer") >= 24
    await third_party.enrol("client", "honest-after-hostile", 1)
    assert "Traceback" not in third_party.log.read_text()


def test_nothing_unforeseen_stands_in_the_log(besieged_cos):
    log = besieged_cos.log.read_text()
    assert "Traceback" not in log
    assert "rpc failed" not in log
    assert besieged_cos.healthy()
