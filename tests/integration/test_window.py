"""Limits on the bytes that a sender has in flight to a service that does not read them."""

import asyncio

import grpc

from coterie.net.meter import Meter
from coterie.net.server import Guard, make_server

METHOD = "/test.Window/Fill"
BLOCK = bytes(1 << 16)
TAKEN = 256
AHEAD = 1 << 20
SOON_S = 20.0


async def test_a_sender_waits_when_little_is_not_taken_also_on_a_fast_connection():
    busy, free = asyncio.Event(), asyncio.Event()
    taken = sent = 0

    async def fill(requests, context):
        nonlocal taken
        async for _ in requests:
            taken += 1
            if taken == TAKEN:
                # Until here it was quick.
                busy.set()
                await free.wait()
        return b""

    async def send():
        nonlocal sent
        for _ in range(2 * TAKEN):
            await call.write(BLOCK)
            sent += 1
        await call.done_writing()
        await call

    async def at_rest():
        same = 0
        while same < 10:
            before = sent
            await asyncio.sleep(0.02)
            same = same + 1 if sent == before else 0

    server = make_server(Guard(Meter(), anonymous=[METHOD]))
    service, name = METHOD[1:].split("/")
    handlers = {name: grpc.stream_unary_rpc_method_handler(fill)}
    server.add_registered_method_handlers(service, handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(SOON_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_unary(METHOD)()
        sending = asyncio.create_task(send())
        await busy.wait()
        await at_rest()
        assert (sent - TAKEN) * len(BLOCK) <= AHEAD
        free.set()
        await sending
    assert taken == 2 * TAKEN
    await server.stop(0)
