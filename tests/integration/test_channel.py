"""Channels over networks that are slow, refuse at first or come back; streams whose deadline is soon."""

import asyncio
import contextlib
import time

import grpc

from coterie.crypto.authority import logical_name
from coterie.net.channel import Channel, connect
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.wire.v1.thirdparty_pb2 import LookupRequest
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

SOON_S = 60.0


class Link:
    """A network between a caller and a service: every byte arrives later by a delay, in either direction."""

    def __init__(self, address: str, delay_s: float) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._delay_s = delay_s
        self._server: asyncio.Server | None = None
        self._flows: set[asyncio.Task[None]] = set()
        self.address = ""

    async def up(self) -> None:
        port = int(self.address.rpartition(":")[2] or 0)
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def down(self) -> None:
        """Refuse connections, and cut those that are open."""
        self._server.close()
        for flow in self._flows:
            flow.cancel()
        await asyncio.gather(*self._flows, return_exceptions=True)
        await self._server.wait_closed()

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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


@contextlib.asynccontextmanager
async def directory_over(link: Link, third_party, tls):
    channel = connect(
        link.address,
        tls.channel_credentials(),
        tls_name=logical_name("thirdparty", third_party.name),
        peer=third_party.party,
        meter=Meter(),
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
