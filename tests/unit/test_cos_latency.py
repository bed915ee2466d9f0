"""Parties that attend at the COS to measure, seen from the servicer alone: a party that has gone delays nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from coterie_cos import latency
from coterie_cos.latency import Latency

from coterie.crypto.authority import PeerIdentity
from coterie.net import server
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import latency_pb2 as wire

ORDER = wire.MeasureOrder(echoes=1, repeats=1)


async def _own(order: wire.MeasureOrder) -> AsyncIterator[tuple[wire.PairTimes | None, str]]:
    yield wire.PairTimes(target="thirdparty/directory"), ""


def made(**how: float) -> Latency:
    return Latency("cos/cos", _own, asyncio.Event(), **how)


async def attend(servicer: Latency, name: str, **request: object) -> wire.AttendResponse:
    server._peer.set(PeerIdentity(role="client", name=name, fingerprint=b""))
    return await servicer.Attend(wire.AttendRequest(**request), None)


async def measured(servicer: Latency, *parties: str) -> list[tuple[str, str, str]]:
    request = wire.MeasureRequest(order=ORDER, parties=parties)
    return [
        (one.party, one.pair.target, one.without)
        async for one in servicer.Measure(request, None)
        if one.HasField("pair") or one.without
    ]


async def test_who_attends_gets_the_order_and_what_it_brings_is_named_after_its_certificate() -> None:
    servicer = made()

    async def host() -> None:
        order = (await attend(servicer, "a")).order
        pair = wire.PairTimes(source="cos/cos", target="cos/cos")
        await attend(servicer, "a", number=order.number, pair=pair, more=True)
        await attend(servicer, "a", number=order.number, pair=wire.PairTimes(target="thirdparty/directory"))

    working = asyncio.create_task(host())
    await asyncio.sleep(0)
    request = wire.MeasureRequest(order=ORDER)
    found = [one async for one in servicer.Measure(request, None)]
    assert [(one.party, one.pair.source, one.pair.target) for one in found] == [
        ("cos/cos", "cos/cos", "thirdparty/directory"),
        ("client/a", "client/a", "cos/cos"),
        ("client/a", "client/a", "thirdparty/directory"),
    ]
    working.cancel()


async def test_who_went_away_while_it_was_held_is_not_asked() -> None:
    servicer = made()
    held = asyncio.create_task(attend(servicer, "a"))
    await asyncio.sleep(0)
    held.cancel()
    await asyncio.wait([held])
    assert await measured(servicer) == [("cos/cos", "thirdparty/directory", "")]
    with pytest.raises(Refusal, match="do not attend"):
        await measured(servicer, "client/a")


async def test_who_does_not_fetch_its_order_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "_FETCH_S", 0.02)
    monkeypatch.setattr(latency, "_SIGN_S", 0.01)
    servicer = made(hold_s=0.0)
    await attend(servicer, "a")
    assert await measured(servicer, "client/a") == [("client/a", "", "it does not attend any more")]


async def test_who_falls_silent_is_given_up_and_what_it_brings_later_is_no_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latency, "_SIGN_S", 0.01)
    servicer = made(silence_s=0.05)
    held = asyncio.create_task(attend(servicer, "a"))
    await asyncio.sleep(0)
    assert await measured(servicer, "client/a") == [("client/a", "", "nothing was heard of it for 0.05 s")]
    number = (await held).order.number
    await attend(servicer, "a", number=number, pair=wire.PairTimes(target="cos/cos"), more=True)
    held = asyncio.create_task(attend(servicer, "a"))
    await asyncio.sleep(0)
    assert await measured(servicer, "client/a") == [("client/a", "", "nothing was heard of it for 0.05 s")]


async def test_two_measurements_at_once_are_refused() -> None:
    servicer = made()
    first = servicer.Measure(wire.MeasureRequest(order=ORDER), None)
    await anext(first)
    with pytest.raises(Refusal, match="under way"):
        await measured(servicer)
    await first.aclose()
    assert len(await measured(servicer)) == 1


async def test_nobody_is_held_when_the_process_stops() -> None:
    stopping = asyncio.Event()
    servicer = Latency("cos/cos", _own, stopping)
    held = asyncio.create_task(attend(servicer, "a"))
    await asyncio.sleep(0)
    stopping.set()
    answer = await asyncio.wait_for(held, 5)
    assert not answer.HasField("order")
