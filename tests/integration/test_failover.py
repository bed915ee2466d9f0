"""Channels to a service that may be at several addresses go to the one that is healthy."""

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from coterie.net.channel import Channel
from coterie.net.meter import Meter
from coterie.net.retry import Retry

SOON_S = 30.0
HELD_S = 600.0


class Place(grpc.GenericRpcHandler):
    """A server at an address of its own: a call gives its number, another one is held, and it has a health."""

    def __init__(self, number):
        self.number = number
        self.server = grpc.aio.server()
        self.health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.held = asyncio.Event()

    def service(self, details):
        async def answer(_, __):
            return bytes([self.number])

        async def hold(_, __):
            self.held.set()
            await asyncio.sleep(HELD_S)

        async def refuse(_, context):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a standby", (("said", "so"),))

        calls = {"/a/answer": answer, "/a/hold": hold, "/a/refuse": refuse}
        call = calls.get(details.method)
        return call and grpc.unary_unary_rpc_method_handler(call)

    async def says(self, healthy):
        of = health_pb2.HealthCheckResponse
        await self.health.set("", of.SERVING if healthy else of.NOT_SERVING)


@pytest.fixture
async def places():
    made = [Place(number) for number in range(3)]
    for place in made:
        await place.says(False)
        await place.server.start()
    yield made
    for place in made:
        await place.server.stop(None)


@pytest.fixture
async def channel(places):
    def open_to(_, address):
        return grpc.aio.insecure_channel(address)

    channel = Channel(
        open_to(None, places[0].address), peer="cos/cos", meter=Meter(),
        opener=lambda _: open_to(None, places[0].address), credentials=grpc.ssl_channel_credentials(),
    )  # fmt: skip
    channel.follow([place.address for place in places], open_to)
    yield channel
    await channel.close()


async def until_answered_by(channel, number):
    call = channel.unary_unary("/a/answer", bytes, bytes)
    async with asyncio.timeout(SOON_S):
        while await Retry(limit_s=SOON_S)(lambda: call(b"", timeout=5.0)) != bytes([number]):
            await asyncio.sleep(0.05)


async def test_calls_go_to_the_healthy_address_and_follow_it(places, channel):
    await places[0].says(True)
    await until_answered_by(channel, 0)
    await places[0].says(False)
    await places[2].says(True)
    await until_answered_by(channel, 2)
    # The place in use stays, as long as it is healthy or nobody is.
    await places[0].says(True)
    await places[2].server.stop(None)
    await until_answered_by(channel, 0)


async def test_while_nobody_is_healthy_the_channel_stays_and_its_calls_are_answered(places, channel):
    await places[0].says(True)
    call = channel.unary_unary("/a/answer", bytes, bytes)
    assert await call(b"", timeout=SOON_S) == b"\0"
    await places[0].says(False)
    # Several looks come and go.
    for _ in range(20):
        refuse = channel.unary_unary("/a/refuse", bytes, bytes)
        with pytest.raises(grpc.aio.AioRpcError):
            await refuse(b"", timeout=SOON_S)
        await asyncio.sleep(0.1)
    assert await call(b"", timeout=SOON_S) == b"\0"


async def test_a_call_that_is_held_fails_as_to_a_service_that_is_gone_and_may_be_repeated(places, channel):
    await places[0].says(True)
    held = asyncio.ensure_future(channel.unary_unary("/a/hold", bytes, bytes)(b"", timeout=HELD_S))
    async with asyncio.timeout(SOON_S):
        await places[0].held.wait()
    await places[0].says(False)
    await places[1].says(True)
    begun = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await asyncio.wait_for(held, SOON_S)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - begun < SOON_S
    await until_answered_by(channel, 1)


async def test_a_caller_that_ends_its_own_call_is_not_told_of_another_address(places, channel):
    await places[0].says(True)
    line = channel._line
    held = asyncio.ensure_future(channel.unary_unary("/a/hold", bytes, bytes)(b"", timeout=HELD_S))
    async with asyncio.timeout(SOON_S):
        await places[0].held.wait()
    # In the same step as the service moves: the caller's end counts.
    channel._failover._move(places[1].address)
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert line.left
