"""Channels over networks that are slow, refuse at first or come back; streams whose deadline is soon."""

import asyncio
import contextlib
import struct
import time

import grpc
import pytest

from coterie.crypto.authority import logical_name
from coterie.net.channel import REOPEN_S, Channel, connect
from coterie.net.meter import Meter
from coterie.net.rest import IDLE_S, Rest
from coterie.net.retry import Retry
from coterie.wire.v1.thirdparty_pb2 import LookupRequest, RevocationsRequest
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub
from coterie.wire.versions import own

SOON_S = 60.0
GRPCS_PAUSE_S = 30.0
"""Time between two look-ups of a name, where a channel does not say another."""


class Link:
    """A network between a caller and a service: every byte arrives later by a delay, in either direction."""

    def __init__(self, address: str, delay_s: float) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._delay_s = delay_s
        self._server: asyncio.Server | None = None
        self._flows: set[asyncio.Task[None]] = set()
        self.address = ""
        self.joined = 0

    async def up(self, host: str = "127.0.0.1") -> None:
        port = int(self.address.rpartition(":")[2] or 0)
        self._server = await asyncio.start_server(self._joined, host, port)
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def down(self) -> None:
        """Refuse connections, and cut those that are open."""
        self._server.close()
        for flow in self._flows:
            flow.cancel()
        await asyncio.gather(*self._flows, return_exceptions=True)
        await self._server.wait_closed()

    async def unused(self) -> None:
        """Wait until no connection is open over the link."""
        async with asyncio.timeout(SOON_S):
            while self._flows:
                await asyncio.wait(self._flows)

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.joined += 1
        there, back = await asyncio.open_connection(self._host, int(self._port))
        for source, sink in ((reader, back), (there, writer)):
            flow = asyncio.create_task(self._flow(source, sink))
            self._flows.add(flow)
            flow.add_done_callback(self._flows.discard)

    async def _flow(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        arriving: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def receive() -> None:
            while data := await source.read(1 << 16):
                arriving.put_nowait((time.monotonic() + self._delay_s, data))
            arriving.put_nowait((0.0, b""))

        receiving = asyncio.create_task(receive())
        try:
            while True:
                due, data = await arriving.get()
                if not data:
                    break
                await asyncio.sleep(due - time.monotonic())
                sink.write(data)
                await sink.drain()
        finally:
            receiving.cancel()
            with contextlib.suppress(Exception):
                sink.close()


class Names(asyncio.DatagramProtocol):
    """A name server that knows one host, at one address or at none, as that of a network of containers does."""

    def __init__(self) -> None:
        self.host = ""
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, caller: tuple[str, int]) -> None:
        number = int.from_bytes(data[:2], "big")
        question = data[12 : data.index(b"\0", 12) + 5]
        answer = b""
        if self.host and question[-4:-2] == b"\0\x01":
            # The name of the question, an address, nothing to be kept.
            answer = struct.pack(">HHHIH", 0xC00C, 1, 1, 0, 4) + bytes(map(int, self.host.split(".")))
        code = 0x8400 if self.host else 0x8403
        head = struct.pack(">HHHHHH", number, code, 1, int(bool(answer)), 0, 0)
        self._transport.sendto(head + question + answer, caller)


@contextlib.asynccontextmanager
async def named():
    """Yield a name server and its address."""
    transport, names = await asyncio.get_running_loop().create_datagram_endpoint(
        Names, local_addr=("127.0.0.1", 0)
    )
    try:
        yield names, "{}:{}".format(*transport.get_extra_info("sockname"))
    finally:
        transport.close()


@contextlib.asynccontextmanager
async def directory_over(link: Link, third_party, tls, address: str = "", rest: Rest | None = None):
    channel = connect(
        address or link.address,
        tls.channel_credentials(),
        tls_name=logical_name("thirdparty", third_party.name),
        peer=third_party.party,
        meter=Meter(),
        rest=rest,
    )
    try:
        yield channel.stub(KeyDirectoryStub)
    finally:
        await channel.close()
        await link.down()


async def test_a_slow_network_takes_time_and_no_second_attempt(third_party, certificates):
    """A handshake needs several round trips, more than the pause after which a refused connection is tried again."""
    link = Link(third_party.address, delay_s=0.15)
    await link.up()
    async with directory_over(link, third_party, certificates["cos"]) as directory:
        await directory.Lookup(LookupRequest(), timeout=SOON_S)


async def test_a_device_that_checks_in_closes_its_connection_after_each_check_in(third_party, certificates):
    """gRPC's own option closes the first connection of a channel, and none after it."""
    link = Link(third_party.address, delay_s=0.0)
    await link.up()
    async with directory_over(link, third_party, certificates["cos"], rest=Rest()) as directory:
        for _ in range(3):
            before = link.joined
            await directory.Lookup(LookupRequest(), timeout=SOON_S)
            assert link.joined == before + 1
            await link.unused()


async def test_a_connection_with_a_call_under_way_is_not_idle(third_party, certificates):
    link = Link(third_party.address, delay_s=0.0)
    await link.up()
    async with directory_over(link, third_party, certificates["cos"], rest=Rest()) as directory:
        present = (await directory.Revocations(RevocationsRequest(protocol=own()), timeout=SOON_S)).revision
        held = RevocationsRequest(held_revision=present, hold_ms=int(2.5 * IDLE_S * 1000), protocol=own())
        holding = asyncio.create_task(directory.Revocations(held, timeout=SOON_S))
        await directory.Lookup(LookupRequest(), timeout=SOON_S)
        begun = time.monotonic()
        await holding
        assert time.monotonic() - begun > IDLE_S
        assert link.joined == 1
        await link.unused()


async def test_a_peer_that_comes_back_is_found_soon(third_party, certificates):
    link = Link(third_party.address, delay_s=0.0)
    await link.up()
    async with directory_over(link, third_party, certificates["cos"]) as directory:
        await directory.Lookup(LookupRequest(), timeout=SOON_S)
        await link.down()
        refused = []

        async def ask():
            try:
                return await directory.Lookup(LookupRequest(), timeout=SOON_S)
            except grpc.aio.AioRpcError as error:
                refused.append(error.code())
                if len(refused) == 3:
                    await link.up()
                raise

        await asyncio.wait_for(Retry(limit_s=SOON_S)(ask), SOON_S)
        assert set(refused) == {grpc.StatusCode.UNAVAILABLE}


async def test_a_peer_that_comes_back_at_another_address_twice_is_found_before_one_pause_of_grpc(
    third_party, certificates
):
    """A service that is started again, and once more before it is up, may have a new address each time."""
    link = Link(third_party.address, delay_s=0.0)
    await link.up("127.0.0.2")
    port = link.address.rpartition(":")[2]
    async with named() as (names, server):
        names.host = "127.0.0.2"
        address = f"dns://{server}/directory.test:{port}"
        async with directory_over(link, third_party, certificates["cos"], address) as directory:

            async def ask():
                return await directory.Lookup(LookupRequest(), timeout=SOON_S)

            await ask()
            begun = time.monotonic()
            for host in ("127.0.0.3", "127.0.0.4"):
                names.host = ""
                await link.down()
                with pytest.raises(grpc.aio.AioRpcError):
                    await directory.Lookup(LookupRequest(), timeout=1.0)
                names.host = host
                await link.up(host)
                await asyncio.wait_for(Retry(limit_s=SOON_S)(ask), 2 * SOON_S)
            assert time.monotonic() - begun < GRPCS_PAUSE_S


async def test_a_peer_that_is_away_for_long_is_looked_for_over_new_connections_until_it_answers():
    clock, opened = [0.0], []
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"

    def opener(credentials):
        opened.append(credentials)
        return grpc.aio.insecure_channel(address)

    async def refuse(_, context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "not now", (("said", "so"),))

    class Refusing(grpc.GenericRpcHandler):
        def service(self, _):
            return grpc.unary_unary_rpc_method_handler(refuse)

    server.add_generic_rpc_handlers((Refusing(),))
    credentials = grpc.ssl_channel_credentials()
    channel = Channel(
        grpc.aio.insecure_channel("127.0.0.1:1"), peer="peer", meter=Meter(), opener=opener,
        credentials=credentials, clock=lambda: clock[0],
    )  # fmt: skip

    async def call():
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary("/a/b", bytes, bytes)(b"", timeout=SOON_S)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        return failed.value.details()

    try:
        for after_s in (0.0, REOPEN_S / 2):
            clock[0] += after_s
            await call()
        assert opened == []
        clock[0] += REOPEN_S / 2
        await call()
        assert opened == [credentials]
        await server.start()
        # A peer that refuses is there.
        for _ in range(5):
            assert await call() == "not now"
            clock[0] += REOPEN_S
        assert opened == [credentials]
    finally:
        await channel.close()
        await server.stop(None)


async def test_a_stream_that_comes_too_late_is_told_so_and_not_cancelled():
    """gRPC cancels a call that it still sends to when the deadline passes; its caller would end without a word."""

    async def count(requests, _):
        return b"%d" % len([one async for one in requests])

    class Counting(grpc.GenericRpcHandler):
        def service(self, _):
            return grpc.stream_unary_rpc_method_handler(count)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Counting(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    async def nothing():
        await asyncio.sleep(0)
        for part in ():
            yield part

    async def outcome(channel, timeout):
        try:
            return await channel.stream_unary("/a/b", bytes, bytes)(nothing(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            return error.code()
        except asyncio.CancelledError:
            return "cancelled"

    found = set()
    for n in range(100):
        channel = Channel(grpc.aio.insecure_channel(address), peer="peer", meter=Meter())
        # From none at all to what is enough on a quiet machine.
        found.update(await asyncio.gather(*(outcome(channel, n * 1e-4) for _ in range(10))))
        await channel.close()
    assert grpc.StatusCode.DEADLINE_EXCEEDED in found
    assert found <= {grpc.StatusCode.DEADLINE_EXCEEDED, b"0"}
    await server.stop(None)
