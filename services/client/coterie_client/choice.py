"""What the person of a device has chosen, as the parts of a host look at it, and deleting what was published then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import structlog

from coterie.errors import CoterieError, DataError
from coterie.rounds.stance import Stance, read_stance
from coterie.telemetry.audit_log import record
from coterie.telemetry.seldom import Seldom

__all__ = ["Choice", "Forgetting"]

_log = structlog.get_logger("coterie.members")

_LOOK_S = 2.0
"""Time between two looks at what the person has chosen, seconds."""

_AGAIN_S = 5.0
_LONGEST_S = 300.0
"""First and longest pause after what was published could not be deleted, seconds."""


class Choice:
    """What a person has chosen while the service runs, beside the consent.

    Parameters
    ----------
    state : Path
        State folder of the host.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._silence = Seldom(_log)
        self._told = Stance()

    def now(self) -> tuple[Stance, list[str]]:
        """Return what the person has chosen, and why nobody knows it; the second is mostly empty."""
        try:
            found = read_stance(self._state)
        except DataError as error:
            # Whoever may have paused or left takes no part meanwhile.
            self._silence.warning("takes part in nothing", reason=error.message)
            return Stance(), [error.message]
        self._silence.over("knows again what the person has chosen")
        if found != self._told:
            self._told = found
            record("choice", paused=found.paused, left=found.left, forget=found.forget)
        return found, []

    def objections(self, most_today: int = 0) -> list[str]:
        """Return why the device takes no part now; empty where it may.

        Parameters
        ----------
        most_today : int, optional
            Sums that its user has been in today.
        """
        stance, lost = self.now()
        return lost or stance.objections(most_today)

    async def looks(self) -> AsyncIterator[Stance]:
        """Yield what the person has chosen, at once and every few seconds; not while nobody knows it."""
        while True:
            stance, lost = await asyncio.to_thread(self.now)
            if not lost:
                yield stance
            await asyncio.sleep(_LOOK_S)

    async def going_on(self, call: Callable[[], None]) -> None:
        """Call whenever the person goes on after a pause.  Never returns."""
        paused = False
        async for stance in self.looks():
            if paused and not stance.paused:
                call()
            paused = stance.paused


class Forgetting:
    """Has what a device published deleted once its person wishes it: in the run, at a start and after the run.

    Parameters
    ----------
    choice : Choice
    forget : callable
        Has it deleted, and returns how many uploads there were; costs no call where nothing is left.
    """

    def __init__(self, choice: Choice, forget: Callable[[], Awaitable[int]]) -> None:
        self._choice = choice
        self._forget = forget
        self._looked = asyncio.Event()
        self._failed: CoterieError | None = None

    async def looked(self) -> None:
        """Wait until the wish was looked for, and fulfilled or tried once.

        Raises
        ------
        CoterieError
            It could not be fulfilled yet.
        """
        await self._looked.wait()
        if self._failed is not None:
            raise self._failed

    async def run(self) -> None:
        """Look for the wish, and fulfil it; tried again, less and less often, until it is done.  Never returns."""
        pause, at = _AGAIN_S, 0.0
        async for stance in self._choice.looks():
            now = asyncio.get_running_loop().time()
            if not stance.forget or now < at:
                if not stance.forget:
                    self._failed = None
                self._looked.set()
                continue
            try:
                if deleted := await self._forget():
                    _log.info("what was published is deleted", uploads=deleted)
                pause, at, self._failed = _AGAIN_S, 0.0, None
            except CoterieError as error:
                _log.warning("what was published is not deleted yet", reason=error.message, again_s=pause)
                at, pause, self._failed = now + pause, min(2 * pause, _LONGEST_S), error
            self._looked.set()
