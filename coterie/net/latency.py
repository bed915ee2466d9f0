"""Measurements of the network to other services (round trips, handshakes, throughput), when the COS asks for them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from coterie.errors import CoterieError, PeerError
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.meter import Meter
from coterie.net.probe import MAX_BYTES, filler
from coterie.net.status import from_rpc_error
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import latency_pb2 as wire
from coterie.wire.v1.latency_pb2_grpc import LatencyStub, ProbeStub

__all__ = ["HOLD_S", "MeasuredService", "attend", "check_order", "measure", "measure_each", "volume"]

_log = structlog.get_logger("coterie.latency")

HOLD_S = 20.0
"""Longest time for which the COS holds a long-polled ``Attend`` call while there is nothing to measure, seconds."""

_CALL_S = 30.0
_LONGEST_CALL_S = 120.0
_SIZE_S = 10.0
"""Time after which a payload size is not repeated, seconds: on a slow link one transfer is enough."""
_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class MeasuredService:
    """A service that a process measures the network to.

    Attributes
    ----------
    peer : str
        Role and name, ``"cos/cos"``.
    address : str
        ``host:port``.
    tls_name : str
        Logical name that its certificate must carry.
    """

    peer: str
    address: str
    tls_name: str


def check_order(order: wire.MeasureOrder) -> None:
    """Check that every field of a measurement order is within its range.

    Raises
    ------
    Refusal
        INVALID_FIELD names the first field that is out of its range.
    """
    ranges = {
        "echoes": (1 <= order.echoes <= 1000, "1 to 1000"),
        "connections": (order.connections <= 20, "0 to 20"),
        "sizes": (
            len(order.sizes) <= 16 and all(size <= MAX_BYTES for size in order.sizes),
            f"at most 16 sizes of at most {MAX_BYTES} bytes",
        ),
        "repeats": (1 <= order.repeats <= 20, "1 to 20"),
    }
    for field, (fits, expected) in ranges.items():
        if not fits:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"order.{field} is out of range",
                field=f"order.{field}",
                expected=expected,
            )


def volume(order: wire.MeasureOrder) -> int:
    """Return the most bytes of filler that an order transfers to and from one service, both ways together."""
    return 2 * order.repeats * sum(order.sizes)


async def measure(service: MeasuredService, tls: TlsFiles, order: wire.MeasureOrder) -> wire.PairTimes:
    """Measure the network to a service over fresh connections; a failure ends it early and is in the result.

    Parameters
    ----------
    service : MeasuredService
        The service.
    tls : TlsFiles
        The caller's certificate.
    order : MeasureOrder
        How often to measure, and with which payload sizes.
    """
    times = wire.PairTimes(target=service.peer)
    try:
        await _connections(service, tls, order.connections, times)
        for _ in range(max(1, order.connections)):
            async with _channel(service, tls) as channel:
                started = time.perf_counter()
                await _echo(channel)
                times.first_ms.append((time.perf_counter() - started) * 1e3)
        async with _channel(service, tls) as channel:
            await _echo(channel)
            channel.meter = Meter()
            for _ in range(order.echoes):
                await _echo(channel)
            totals = channel.meter["Echo"]
            times.echo_ms.extend(totals.total_ms)
            # NaN where a server does not tell its time.
            times.server_ms.extend(ms for ms in totals.server_ms if not math.isnan(ms))
            for size in order.sizes:
                for up in (True, False):
                    times.carried.append(await _carried(channel, size, order.repeats, up=up))
    except grpc.aio.AioRpcError as error:
        times.failure = from_rpc_error(error, service.peer).message
    except CoterieError as error:
        times.failure = error.message
    except (OSError, TimeoutError) as error:
        times.failure = f"no connection: {type(error).__name__}"
    return times


async def _connections(service: MeasuredService, tls: TlsFiles, count: int, times: wire.PairTimes) -> None:
    """Time ``count`` TCP connects and TLS handshakes with asyncio, since gRPC does not tell how long its own take."""
    if not count:
        return
    context = ssl.create_default_context(cafile=str(tls.authority))
    context.load_cert_chain(tls.chain, tls.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = service.address.rpartition(":")
    loop = asyncio.get_running_loop()
    # Resolved once, outside of the times: name resolution is not measured.
    family, _, _, _, address = (await loop.getaddrinfo(host.strip("[]"), int(port), type=1))[0]
    resolved = str(address[0])
    for _ in range(count):
        async with asyncio.timeout(_CALL_S):
            started = time.perf_counter()
            _, writer = await asyncio.open_connection(resolved, int(port), family=family)
            connected = time.perf_counter()
            try:
                await writer.start_tls(context, server_hostname=service.tls_name)
                shaken = time.perf_counter()
            finally:
                writer.transport.abort()
        times.connect_ms.append((connected - started) * 1e3)
        times.handshake_ms.append((shaken - connected) * 1e3)


@contextlib.asynccontextmanager
async def _channel(service: MeasuredService, tls: TlsFiles) -> AsyncIterator[Channel]:
    channel = connect(
        service.address,
        tls.channel_credentials(),
        tls_name=service.tls_name,
        peer=service.peer,
        meter=Meter(),
    )
    try:
        yield channel
    finally:
        await channel.close()


async def _echo(channel: Channel) -> None:
    stub: Any = channel.stub(ProbeStub)
    await stub.Echo(wire.EchoRequest(), timeout=_CALL_S)


async def _carried(channel: Channel, size: int, repeats: int, *, up: bool) -> wire.CarriedTimes:
    stub: Any = channel.stub(ProbeStub)
    times = wire.CarriedTimes(size=size, up=up)
    begun = time.perf_counter()
    while len(times.ms) < repeats and (not times.ms or time.perf_counter() - begun < _SIZE_S):
        started = time.perf_counter()
        back = arrived = 0
        async for response in stub.Carry(_pieces(size, up=up), timeout=_LONGEST_CALL_S):
            back += len(response.filler)
            arrived = response.arrived
        times.ms.append((time.perf_counter() - started) * 1e3)
        if (arrived, back) != ((size, 0) if up else (0, size)):
            raise PeerError(f"{channel.peer} carried {arrived} bytes up and {back} down instead of {size}")
    return times


async def _pieces(size: int, *, up: bool) -> AsyncIterator[wire.CarryRequest]:
    if not up:
        yield wire.CarryRequest(wanted=size)
        return
    for piece in filler(size):
        yield wire.CarryRequest(filler=piece)


async def measure_each(
    services: Mapping[str, MeasuredService], tls: TlsFiles, order: wire.MeasureOrder, limit: int
) -> AsyncIterator[tuple[wire.PairTimes | None, str]]:
    """Measure to each service in turn, and yield its times and ""; or None and why nothing is measured.

    Parameters
    ----------
    services : mapping
        The services that the process calls, by role and name.
    tls : TlsFiles
        Its certificate.
    order : MeasureOrder
        Times and transfers to measure.
    limit : int
        Most bytes that may be transferred for the order.
    """
    called = list(services.values())
    wanted = volume(order) * len(called)
    try:
        check_order(order)
    except Refusal as refusal:
        yield None, refusal.message
        return
    if wanted > limit:
        yield None, f"{wanted >> 20} MiB would be carried, and `latency_mb` allows {limit >> 20}"
        return
    if not called:
        yield None, "it calls no service"
    for service in called:
        yield await measure(service, tls, order), ""


async def attend(
    cos: Channel, services: Callable[[], Mapping[str, MeasuredService]], tls: TlsFiles, limit: int
) -> None:
    """Carry out the orchestration server's measurement orders until cancelled; each party runs it in the background.

    Parameters
    ----------
    cos : Channel
        To the orchestration server.
    services : callable
        Returns the services that the process calls, by role and name.
    tls : TlsFiles
        The caller's certificate.
    limit : int
        Most bytes that may be transferred for one order.
    """
    # Long-polled calls are counted apart: they are no part of the run's traffic.
    stub: Any = cos.metered(Meter()).stub(LatencyStub)
    pause = _PAUSE_S
    request = wire.AttendRequest()
    while True:
        try:
            response = await stub.Attend(request, timeout=HOLD_S + _CALL_S)
            pause, request = _PAUSE_S, wire.AttendRequest()
            if not response.HasField("order"):
                continue
            number = response.order.number
            _log.info("measuring", order=number)
            # Each result is sent when the next one is there; the last goes with the call that waits for the next order.
            async for pair, declined in measure_each(services(), tls, response.order, limit):
                if request.number:
                    request.more = True
                    await stub.Attend(request, timeout=_CALL_S)
                request = wire.AttendRequest(number=number, pair=pair, declined=declined)
        except grpc.aio.AioRpcError as error:
            # A server of an older version does not know this RPC; a server that is away does not answer.
            old = error.code() == grpc.StatusCode.UNIMPLEMENTED
            pause = _LONGEST_PAUSE_S if old else min(2 * pause, _LONGEST_PAUSE_S)
            request = wire.AttendRequest()
            await asyncio.sleep(pause)
