"""Somebody watches a run and goes away without a word: neither side says anything about it, or counts it as failed."""

import asyncio
import contextlib
import json
import logging
import time

import grpc
import pytest

from coterie.wire.v1 import operator_pb2 as operating

from .hosting import SOON_S, World


async def closed(stream):
    async with contextlib.aclosing(stream) as events:
        async for _ in events:
            break


async def too_late(stream):
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in stream:
            pass


async def cancelled(stream):
    watching = asyncio.create_task(too_late(stream))
    await asyncio.sleep(0)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


async def forgotten(stream):
    async for _ in stream:
        break


async def test_a_watch_that_is_abandoned_leaves_no_line_in_any_log(
    calls, third_party, start_member, certificates, tmp_path, caplog
):
    cos = await asyncio.to_thread(start_member, "cos", f"watched-{time.monotonic_ns()}", third_party)
    world = World(calls, third_party, start_member, certificates, tmp_path, cos)
    await world.begin()
    before = len(cos.log.read_text().splitlines())
    caplog.set_level(logging.INFO)
    caplog.clear()
    async with asyncio.timeout(SOON_S):
        for leave in (closed, too_late, cancelled, forgotten) * 3:
            stub = calls.Operating(cos, certificates["operator"]).stub
            await leave(stub.WatchRun(operating.WatchRunRequest(run_id=world.run), timeout=0.7))
        # Some are cancelled before they leave.
        while cos.metric("coterie_rpc_calls_total", side="server", rpc="WatchRun") < 9:
            await asyncio.sleep(0.05)
    assert cos.metric("coterie_rpc_errors_total", side="server", rpc="WatchRun") == 0
    await cos.release()
    await asyncio.to_thread(cos.stop)
    lines = [json.loads(line) for line in cos.log.read_text().splitlines()[before:]]
    assert [line["event"] for line in lines] == ["stopping", "stopped"]
    assert caplog.text == ""
