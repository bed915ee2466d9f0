"""Counters that watchers of a run are sent between its events."""

import asyncio
from types import SimpleNamespace

from coterie_cos import run
from coterie_cos.run import Run
from coterie_cos.told_events import ToldEvents

from coterie.wire.v1 import operator_pb2 as operator


async def test_counters_come_though_events_leave_no_silence_for_them(monkeypatch):
    monkeypatch.setattr(run, "_PROGRESS_S", 0.1)
    watched = SimpleNamespace(
        _term=SimpleNamespace(check=lambda: None),
        _happened=asyncio.Event(),
        _events=ToldEvents(),
        dropped=False,
        over=False,
        progress=operator.ProgressEvent,
        summary=operator.RunState,
    )

    async def happen():
        for number in range(1, 101):
            watched._events.append(operator.WatchRunResponse(number=number))
            watched.over = number == 100
            watched._happened.set()
            watched._happened = asyncio.Event()
            await asyncio.sleep(0.01)

    happening = asyncio.create_task(happen())
    seen = [event async for event in Run.watch(watched, 1)]
    await happening
    assert [event.number for event in seen if event.number] == list(range(1, 101))
    assert sum(event.HasField("progress") for event in seen) >= 2
