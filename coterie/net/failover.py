"""Where a service is when it has several addresses: at the one that says that it is healthy.

A service with standbys is one service: all have its name in their certificates, and one of them serves.  The others say
of their health that they do not.  `Failover` asks every `LOOK_S` whether the service is still healthy where it was, and
moves the channel when it is healthy elsewhere.  While it is healthy nowhere, the channel stays as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coterie.net.rest import Rest

__all__ = ["LOOK_S", "Failover"]

_log = structlog.get_logger("coterie.net")

LOOK_S = 2.0
"""Time between two looks at the service's health, seconds."""
_ANSWER_S = 2.0
"""Longest time for the answer, seconds: a service that hangs gives none."""


class Failover:
    """Moves a channel to the address at which the service is healthy.

    Parameters
    ----------
    peer : str
        Name of the service, for the log.
    addresses : sequence of str
        Where the service may be, the first one first.
    present : callable
        Returns the gRPC channel in use.
    open_to : callable
        Opens a gRPC channel to an address.
    move : callable
        Called with an address: further calls go there, and those under way are to end.
    rest : Rest, optional
        That of a device which checks in: nothing is asked while it rests.
    """

    def __init__(
        self,
        peer: str,
        addresses: Sequence[str],
        present: Callable[[], grpc.aio.Channel],
        open_to: Callable[[str], grpc.aio.Channel],
        move: Callable[[str], None],
        rest: Rest | None = None,
    ) -> None:
        self._peer = peer
        self._addresses = tuple(addresses)
        self._present = present
        self._open_to = open_to
        self._move = move
        self._rest = rest
        self._at = 0
        self._wake = asyncio.Event()

    def hurry(self) -> None:
        """Look at once: a call has found nobody, or was refused for now."""
        self._wake.set()

    async def run(self) -> None:
        """Follow the service without end."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            if self._rest is not None:
                await self._rest.over()
            await self._look()
            # At most so often, however many calls fail.
            await asyncio.sleep(LOOK_S / 4)
            self._wake.clear()

    async def _look(self) -> None:
        if await _healthy(self._present()):
            return
        for step in range(1, len(self._addresses)):
            at = (self._at + step) % len(self._addresses)
            channel = self._open_to(self._addresses[at])
            try:
                healthy = await _healthy(channel)
            finally:
                await channel.close()
            if healthy:
                _log.warning("calls another address", peer=self._peer, address=self._addresses[at])
                self._at = at
                self._move(self._addresses[at])
                return


async def _healthy(channel: grpc.aio.Channel) -> bool:
    # The stub of the health service has no types.
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
    except grpc.aio.AioRpcError:
        return False
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The channel was closed meanwhile.
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
