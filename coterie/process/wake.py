"""One wake of a device that has no process between two check-ins: where others rest, the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from coterie.errors import CoterieError, PeerError, RunError
from coterie.net.rest import Rest

__all__ = ["InVainError", "Wake"]

_SETTLE_S = 60.0
"""Longest time for what is done last before the process ends, seconds."""
_APART_S = 86_400.0
"""Time after which a device looks again at a run that is outside its consent, seconds."""


class InVainError(RunError):
    """A wake of a device after which nothing was done: the next one tries again."""

    exit_code = 61
    code = "in-vain"


class Wake(Rest):
    """One wake of a device: it ends when the COS says when to come back, when the run is over, or after a time.

    A device that was asked to be in a sum stays until the COS lets it go, for as long as the COS answers.

    Parameters
    ----------
    limit_s : float
        Longest time awake without being asked for anything, or without an answer in a sum, seconds.
    seen : str
        Hashes of the files that the person changes, as they were before this wake: `NextWake.seen`.
    clock : callable
        Monotonic seconds.
    """

    def __init__(
        self, limit_s: float, *, seen: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock=clock)
        self.limit_s = limit_s
        self.seen = seen
        self.come_back_s: float | None = None
        """Time after which the device is to wake again, seconds; None while nobody has said."""
        self.ended = ""
        """Why the run needs the device no more; empty while it goes on."""
        self.failure: CoterieError | None = None
        """Why nothing came of the wake."""
        self._since = clock()
        self._reached = self._asked = False
        self._over = asyncio.Event()
        self._last: list[Callable[[], Awaitable[None]]] = []

    def heard(self, *, asked: bool) -> None:
        """Take note of an answer of the COS; ``asked`` says whether it asks for a step of a sum."""
        self._reached = True
        self._asked = self._asked or asked
        if self._asked:
            self._since = self._clock()

    async def rest(self, seconds: float) -> None:
        """End the wake, as the COS says when to come back; never returns."""
        self.come_back_s = seconds
        self._over.set()
        await asyncio.Event().wait()

    def run_over(self, reason: str) -> None:
        """End the wake for good: the run is over."""
        self.ended = reason
        self._over.set()

    def stay_out(self, reasons: list[str]) -> None:
        """End the wake of a device that takes no part, and have it look again in a day."""
        self.come_back_s = _APART_S
        self.failure = InVainError(
            f"takes no part in the run: {'; '.join(reasons)}",
            hint="look at [consent] of the configuration; a change of it has the next wake try again",
        )
        self._over.set()

    def before_end(self, work: Callable[[], Awaitable[None]]) -> None:
        """Have work done before the process ends, such as the end of what is being written."""
        self._last.append(work)

    async def over(self) -> None:
        """Wait until the process does not rest: it never does."""

    async def until_over(self) -> None:
        """Wait until the wake is over, then do what comes last.

        Raises
        ------
        InVainError
            The device was asked for nothing in its time.
        PeerError
            The COS could not be reached, or what comes last is not done in its time.
        CoterieError
            What comes last has failed.
        """
        while not self._over.is_set():
            left = self._since + self.limit_s - self._clock()
            if left <= 0:
                raise self._in_vain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._over.wait()
        try:
            async with asyncio.timeout(_SETTLE_S):
                for work in self._last:
                    await work()
        except TimeoutError:
            raise PeerError(
                f"what was asked of this device was not finished within {_SETTLE_S:g} s",
                hint="the next wake tries again",
            ) from None

    def _in_vain(self) -> CoterieError:
        if not self._reached or self._asked:
            return PeerError(
                f"the server was away for {self.limit_s:g} s",
                hint="the next wake tries again; --wait waits longer",
            )
        return InVainError(
            f"the server asked for nothing within {self.limit_s:g} s, and did not say when to come back",
            hint="users of an open population wait for the end of a pass; --wait waits longer. Else the run keeps its "
            "devices connected: does its operator allow check-ins (federation.check_in_s)?",
        )
