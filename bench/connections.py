"""Measure one COS under many clients, each with a certificate and a connection, registered and waiting for a task.

The variable ``COTERIE_BENCH_CONNECTIONS`` sets their number, 2,000 when it is absent.  All clients are in this process,
which shares the machine with the COS.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.rows import Ask, Row, lower
from bench.submit import Site
from coterie.config.run import RunSettings
from coterie.crypto.authority import logical_name
from coterie.errors import PeerError
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.parties.party import Party, Registrant
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub

_CLIENTS = int(os.environ.get("COTERIE_BENCH_CONNECTIONS", "2000"))
_RUN = "connections"
_AT_ONCE = 32
_POLLS = 5
_HOLD_MS = 20_000
_CALL_S = 60.0
_SETTLE_S = 3.0
"""Wait before the memory is read, seconds, so that every poll is held."""


@dataclass
class _Measured:
    """Outcomes of the clients' registrations, and costs at the COS."""

    outcomes: Counter[str] = field(default_factory=Counter)
    connect_s: float = 0.0
    poll_ms: list[float] = field(default_factory=list)
    server_ms: list[float] = field(default_factory=list)
    before: float = 0.0
    held: float = 0.0


def resident(pid: int) -> float:
    """Return the bytes of memory that a process takes now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024.0 * int(line.split()[1])
    raise RuntimeError("the system says nothing of VmRSS")


class _Client:
    """One enrolled client with a user of its own."""

    def __init__(self, site: Site, tls: TlsFiles, member: Registrant) -> None:
        self._member = member
        self.meter = Meter()
        self.channel: Channel = connect(
            site.address,
            tls.channel_credentials(),
            tls_name=logical_name("cos", "cos"),
            peer="cos/cos",
            meter=self.meter,
        )
        fingerprint = tls.identity().fingerprint
        self.party = Party(self.channel, _RUN, lambda: fingerprint, Retry(limit_s=0.0))
        self._stub: Any = self.channel.stub(OrchestratorStub)

    async def register(self) -> str:
        """Register the user; return "OK", or the kind of failure."""
        try:
            await asyncio.wait_for(self.party.register([self._member]), _CALL_S)
        except TimeoutError:
            return "no answer"
        except Refusal as refusal:
            return refusal.name
        except PeerError:
            return "closed"
        return "OK"

    async def poll(self, cursor: int, hold_ms: int) -> int:
        """Poll once; return the revision."""
        request = wire.PollRequest(run_id=_RUN, cursor=cursor, hold_ms=hold_ms)
        response: wire.PollResponse = await self._stub.Poll(request, timeout=_CALL_S)
        return int(response.revision)


async def _measured(clients: int, settle_s: float, **cos: Any) -> _Measured:
    found = _Measured()
    turns = asyncio.Semaphore(_AT_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        async with Site(Path(folder), _RUN, **cos) as site:
            await site.begin(RunSettings.model_validate({"system": "drift"}), users=clients + 1)

            async def enrolled(number: int) -> _Client:
                async with turns:
                    _, (member,), tls = await site.party("client", f"client-{number}", 1)
                return _Client(site, tls, member)

            made = await asyncio.gather(*map(enrolled, range(clients)))
            if site.cos.process is None:
                raise RuntimeError("the COS is missing")
            found.before = resident(site.cos.process.pid)

            async def join(client: _Client) -> bool:
                async with turns:
                    outcome = await client.register()
                found.outcomes[outcome] += 1
                return outcome == "OK"

            began = time.perf_counter()
            joined = await asyncio.gather(*map(join, made))
            found.connect_s = time.perf_counter() - began
            there = [client for client, inside in zip(made, joined, strict=True) if inside]

            async def ask(client: _Client) -> int:
                async with turns:
                    started = time.perf_counter()
                    revision = await client.poll(0, 0)
                    found.poll_ms.append(1e3 * (time.perf_counter() - started))
                return revision

            revisions = await asyncio.gather(*map(ask, there))
            # All clients wait for a task at the same time, while some poll again.
            waiting = [
                asyncio.create_task(client.poll(revision, _HOLD_MS))
                for client, revision in zip(there, revisions, strict=True)
            ]
            await asyncio.sleep(settle_s)
            found.held = resident(site.cos.process.pid)
            for client in there:
                client.meter["Poll"].server_ms.clear()
            found.poll_ms.clear()
            for _ in range(_POLLS):
                await asyncio.gather(*map(ask, there[:: max(1, len(there) // 400)]))
            found.outcomes["waiting"] = sum(not one.done() for one in waiting)
            for client in there:
                found.server_ms += client.meter["Poll"].server_ms
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for client in made:
                await client.channel.close()
    return found


def _outcomes(found: _Measured) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.outcomes.items()))


def rows(ask: Ask) -> Iterator[Row]:
    """Measure a COS that takes all clients, and one that takes half of them."""
    clients, settle_s = ask.size((_CLIENTS, _SETTLE_S), (4, 0.1))
    found = asyncio.run(_measured(clients, settle_s))
    each = f"{clients} clients"
    note = f"{each}: {_outcomes(found)}"
    yield lower(
        "connections.join",
        found.connect_s,
        None,
        "s",
        f"{note}; handshakes and registrations, {_AT_ONCE} at once",
    )
    for q in (50, 99):
        wall, own = (float(np.nanpercentile(times, q)) for times in (found.poll_ms, found.server_ms))
        yield lower(
            f"connections.poll.p{q}",
            own,
            None,
            "ms",
            f"in the COS, while all others wait; {wall:.3g} ms at the client, {_AT_ONCE} at once",
        )
    per = (found.held - found.before) / max(1, found.outcomes["OK"])
    yield lower(
        "connections.memory",
        per / 1024,
        None,
        "KiB",
        f"of the COS for each client that is registered and waits; {found.held / 2**20:.0f} MiB in all",
    )
    half = asyncio.run(_measured(clients, settle_s, limits={"connections": clients // 2}))
    yield lower(
        "connections.refused",
        float(clients - half.outcomes["OK"]),
        None,
        "clients",
        f"of {each}, where the COS takes {clients // 2} connections: {_outcomes(half)}",
    )
