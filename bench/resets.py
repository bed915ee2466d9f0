"""Measure one caller's polls while another floods a COS with calls that it cancels at once.

The flood comes from a process of its own.  It goes to another COS on the same machine, to a COS that cuts off a caller
that cancels too many calls, and to a COS that does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import numpy as np

from bench.rows import Ask, Row, lower
from bench.submit import Site, issued
from coterie.crypto.authority import Authority, logical_name
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.meter import Meter
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub

_SECONDS = 6.0
_LEAD_S = 1.5
_PAUSE_S = 0.005
_NEVER = 1e9
_NAME = logical_name("cos", "cos")

_HEADERS, _RST_STREAM, _SETTINGS, _PING = 1, 3, 4, 6
_END_HEADERS, _ACK, _CANCEL = 4, 1, 8
_AT_ONCE = 50


def _frame(kind: int, stream: int = 0, payload: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _call_headers() -> bytes:
    """Return the headers of a call as HPACK literals without indexing; all are shorter than 127 bytes."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": "/coterie.v1.Orchestrator/Poll",
        ":authority": _NAME,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    parts = [bytes([len(text)]) + text.encode() for pair in fields.items() for text in pair]
    return b"".join(b"\x00" + name + value for name, value in zip(parts[::2], parts[1::2], strict=True))


async def _acknowledge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Acknowledge SETTINGS and PING frames until the other side closes."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] in (_SETTINGS, _PING) and not head[4] & _ACK:
                writer.write(_frame(head[3], 0, payload if head[3] == _PING else b"", _ACK))


async def _flood(address: str, tls: TlsFiles) -> None:
    """Begin and cancel calls, over one connection after the other, until killed."""
    context = ssl.create_default_context(cafile=str(tls.authority))
    context.load_cert_chain(tls.chain, tls.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    headers, given_up = _call_headers(), struct.pack(">I", _CANCEL)
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(
                host, int(port), ssl=context, server_hostname=_NAME
            )
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS))
            reading = asyncio.create_task(_acknowledge(reader, writer))
            stream = 1
            while not reading.done():
                burst = bytearray()
                for _ in range(_AT_ONCE):
                    burst += _frame(_HEADERS, stream, headers, _END_HEADERS)
                    burst += _frame(_RST_STREAM, stream, given_up)
                    stream += 2
                writer.write(burst)
                await writer.drain()
                await asyncio.sleep(0)
            await reading
            writer.transport.abort()


@contextlib.asynccontextmanager
async def _flooded(address: str, tls: TlsFiles, lead_s: float) -> AsyncIterator[None]:
    command = [sys.executable, "-m", "bench.resets", address, str(tls.folder)]
    child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await asyncio.sleep(lead_s)
        yield
    finally:
        child.kill()
        await child.wait()


async def _polls(channel: Channel, seconds: float) -> list[float]:
    """Return the milliseconds of each poll; polls name an unknown run, so each is refused."""
    stub = channel.stub(OrchestratorStub)
    taken = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        began = time.perf_counter()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Poll(wire.PollRequest(run_id="none"))
        taken.append(1e3 * (time.perf_counter() - began))
        await asyncio.sleep(_PAUSE_S)
    return taken


async def _measured(
    folder: Path, limits: dict[str, float], *, elsewhere: bool, seconds: float, lead_s: float
) -> list[float]:
    async with Site(folder / "asked", limits=limits) as site:
        authority = Authority.load(site.authority)
        calm, hostile = (issued(folder / name, authority) for name in ("calm", "hostile"))
        channel = connect(
            site.address, calm.channel_credentials(), tls_name=_NAME, peer="cos/cos", meter=Meter()
        )
        try:
            if not elsewhere:
                async with _flooded(site.address, hostile, lead_s):
                    return await _polls(channel, seconds)
            async with Site(folder / "other") as other:
                stranger = issued(folder / "stranger", Authority.load(other.authority))
                async with _flooded(other.address, stranger, lead_s):
                    return await _polls(channel, seconds)
        finally:
            await channel.close()


def rows(ask: Ask) -> Iterator[Row]:
    """Measure polls beside a flood, in three cases."""
    seconds, lead_s = ask.size((_SECONDS, _LEAD_S), (0.2, 0.1))
    cases: dict[str, tuple[dict[str, float], bool, str]] = {
        "elsewhere": ({}, True, "another process of the machine is flooded"),
        "cut_off": ({}, False, "the COS is flooded, and cuts off who floods it"),
        "borne": ({"resets_per_s": _NEVER}, False, "the COS is flooded, and bears it"),
    }
    for name, (limits, elsewhere, note) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(
                _measured(Path(folder), limits, elsewhere=elsewhere, seconds=seconds, lead_s=lead_s)
            )
        median, most = np.percentile(found, 50), np.percentile(found, 99)
        note = f"{note}; median {median:.3g} ms, {len(found)} polls in {seconds:g} s"
        yield lower(f"resets.{name}.p99", float(most), None, "ms", note)


if __name__ == "__main__":
    asyncio.run(_flood(sys.argv[1], TlsFiles(Path(sys.argv[2]))))
