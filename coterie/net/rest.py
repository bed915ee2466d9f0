"""The rest of a device between two check-ins, in which the process holds no connection and calls nobody by itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

__all__ = ["IDLE_S", "Rest"]

IDLE_S = 1.0
"""Time without a call after which a connection of a process that checks in is closed, seconds."""

_SLICE_S = 10.0
"""Longest wait between two looks at the clocks, seconds: a machine that was suspended wakes late by no more."""


class Rest:
    """Whether the process rests; its background work waits meanwhile.

    Parameters
    ----------
    clock, wall : callable
        Monotonic and Unix seconds.  The monotonic clock may stand still while a machine is suspended.
    sleep : callable
        Waits the given seconds.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock, self._wall, self._sleep = clock, wall, sleep
        self._awake, self._asleep = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._first: list[Callable[[], Awaitable[None]]] = []

    @property
    def awake(self) -> bool:
        """Whether the process does not rest now."""
        return self._awake.is_set()

    def first(self, work: Callable[[], Awaitable[None]]) -> None:
        """Have work done at the end of each rest, before anything else; its failures are its own to tell."""
        self._first.append(work)

    def heard(self, *, asked: bool) -> None:
        """Take note of an answer of the COS; ``asked`` says whether it asks for a step of a sum."""

    async def rest(self, seconds: float) -> None:
        """Rest, then do what comes first; return once the process may go on."""
        self._awake.clear()
        self._asleep.set()
        try:
            ends, wall_ends = self._clock() + seconds, self._wall() + seconds
            while (left := min(ends - self._clock(), wall_ends - self._wall())) > 0:
                await self._sleep(min(left, _SLICE_S))
            # All else waits until it is done: a call that finds a revocation list of before the rest, say.
            for work in self._first:
                await work()
        finally:
            self._asleep.clear()
            self._awake.set()

    async def over(self) -> None:
        """Wait until the process does not rest."""
        await self._awake.wait()

    async def awake_for(self, seconds: float) -> None:
        """Wait until the process has been awake for so long without a rest, seconds."""
        while True:
            await self._awake.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._asleep.wait()
                continue
            return
