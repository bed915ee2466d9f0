"""The rest between two check-ins of a device whose process stays, kept so that a restart does not cut it short."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from coterie.errors import StoreError
from coterie.net.rest import Rest
from coterie.process.next_wake import (
    NEXT_WAKE,
    NextWake,
    content_hash,
    read_next_wake,
    write_next_wake,
)
from coterie.rounds.stance import STANCE

__all__ = ["LONGEST_RESUMED_S", "KeptRest"]

_log = structlog.get_logger("coterie.process")

LONGEST_RESUMED_S = 300.0
"""Longest time that a process which was started again rests, seconds: its person waits for recommendations."""


class KeptRest(Rest):
    """The rest of a process that keeps in its state folder when it is to come back.

    Parameters
    ----------
    state : Path
        State folder of the client service.
    run : str
        The run that the device takes part in.
    configured : str
        Text of its settings: a process with other settings does not go on with the rest.
    clock, wall, sleep
        As for `Rest`.
    """

    def __init__(
        self,
        state: Path,
        run: str,
        configured: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(clock=clock, wall=wall, sleep=sleep)
        self._state, self._run = state, run
        self._configured = hashlib.sha256(configured.encode()).hexdigest()

    async def rest(self, seconds: float) -> None:
        """Rest as `Rest`, and keep until when."""
        # Background work waits from now on, while the file is written, too.
        self._awake.clear()
        self._asleep.set()
        now = self._wall()
        try:
            kept = NextWake(self._run, now + seconds, now, seen=self._seen)
            await asyncio.to_thread(write_next_wake, self._state, kept)
        except StoreError as error:
            # A poll too many after a restart costs little.
            _log.warning("the time of the next check-in is not kept", error=error.message)
        await super().rest(seconds)
        # One that stays is over, and says nothing any more.
        with contextlib.suppress(OSError):
            (self._state / NEXT_WAKE).unlink(missing_ok=True)

    async def go_on(self) -> None:
        """Rest after a restart, if the process before it was told to come back later.

        Very many devices may be started at once, as after an outage or an upgrade.  They come within
        `LONGEST_RESUMED_S`, in the order in which they were told to.
        """
        kept, now = read_next_wake(self._state), self._wall()
        if kept is None or kept.over or kept.seen != self._seen or not kept.waits(self._run, now):
            return
        left = (kept.at - now) * min(1.0, LONGEST_RESUMED_S / (kept.at - kept.written))
        _log.info("rests as before this start", run=self._run, seconds=round(left))
        await super().rest(left)

    @property
    def _seen(self) -> str:
        """Hashes of what the person changes: the settings, and how they take part."""
        return f"{self._configured} {content_hash(self._state / STANCE)}"
