"""Base of a host's parts in graph expansion and in meta-latents: first key, receipts, users' seeds in experiments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.errors import CertificateError, CoterieError, CryptoError, PeerError
from coterie.net.status import is_away
from coterie.parties.neighbourhood import seed_of_user
from coterie.parties.stored_host import user_keys
from coterie_client.host import Host

__all__ = ["HostExchange"]

_log = structlog.get_logger("coterie.expansion")

_PAUSE_S = 1.0
"""Pause before a third party that is away is called again, seconds."""


class HostExchange:
    """Base of a host's part in an expansion service of the third party, whose users share a key that the host holds.

    Parameters
    ----------
    host : Host
        Registered.
    lacks : str
        What users go without where the host takes no part, for the log: ``"neighbours"``.
    key : str
        Name of the key, for the log.
    longest_s : float
        Longest wait for the run's first key, seconds, while the third party answers.
    """

    def __init__(self, host: Host, lacks: str, key: str, longest_s: float) -> None:
        self._host = host
        self._seeds = _ExperimentSeeds(host)
        self._lacks = lacks
        self._key = key
        self._longest_s = longest_s
        self._first: asyncio.Task[None] | None = None
        self._unreached = asyncio.Event()
        self._reaching: asyncio.Task[None] | None = None
        self._absent = False

    def _begin(self, ensure: Callable[[], Awaitable[object]]) -> None:
        """Begin to hold the run's first key, given what holds the newest; only the first time."""
        if self._first is None:
            self._first = asyncio.create_task(self._hold_first(ensure))

    async def _hold_first(self, ensure: Callable[[], Awaitable[object]]) -> None:
        """Make or receive the run's first key, while the groups are asked for their items; never fails."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._longest_s
        while True:
            try:
                await ensure()
                return
            except (PeerError, CertificateError, CryptoError) as error:
                if loop.time() > ends:
                    _log.warning(f"no {self._key}", run=self._host.settings.run, reason=error.message)
                    return
                if is_away(error):
                    self._unreached.set()
                else:
                    self._unreached.clear()
                await asyncio.sleep(1.0)

    async def _first_tried(self) -> bool:
        """Wait for the run's first key; return False while the third party, without which there is none, is away."""
        if self._first is None:
            return False
        unreached = asyncio.create_task(self._unreached.wait())
        await asyncio.wait({self._first, unreached}, return_when=asyncio.FIRST_COMPLETED)
        unreached.cancel()
        return self._first.done()

    @property
    def _away(self) -> bool:
        """Whether the third party did not answer last; meanwhile no sum waits for it."""
        return self._reaching is not None and not self._reaching.done()

    def _try_to_reach(self, call: Callable[[], Awaitable[object]]) -> None:
        """Call beside the rounds until the third party answers, whatever it says."""
        self._reaching = asyncio.create_task(self._until_reached(call))

    async def _until_reached(self, call: Callable[[], Awaitable[object]]) -> None:
        while True:
            await asyncio.sleep(_PAUSE_S)
            try:
                await call()
            except (PeerError, CryptoError) as error:
                if is_away(error):
                    continue
            return

    def _go_without(self, reason: str) -> None:
        """Log once why the host takes no part."""
        if not self._absent:
            _log.warning(f"no {self._lacks}", run=self._host.settings.run, reason=reason)
        self._absent = True

    async def _forget_each(self, forget: Callable[[int], Awaitable[bool]]) -> int:
        """Have what each user published deleted; return for how many users there was something.

        A user whose upload cannot be deleted keeps no other from it: its error is raised once all were tried.

        Parameters
        ----------
        forget : callable
            Takes a user's position; returns whether there was something.

        Raises
        ------
        CoterieError
            The first user's whose upload is not deleted; at once where COS or third party do not answer.
        """
        forgotten, failure = 0, None
        for user in range(len(self._host.identities)):
            try:
                forgotten += await forget(user)
            except CoterieError as error:
                if is_away(error):
                    # Where nobody answers, others need not try.
                    raise
                _log.warning("an upload is not deleted", user=user + 1, reason=error.message)
                failure = failure or error
        if failure is not None:
            raise failure
        return forgotten

    async def _note(self, kind: str, user: int, size: int) -> None:
        """Note on a user's receipt what is about to be sent to the third party."""
        await self._host.note_sent("thirdparty", kind, 1, size, user + 1)


class _ExperimentSeeds:
    """Seeds of users' secrets at the third party, in experiments with seeded users.

    Parameters
    ----------
    host : Host
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._numbers: NDArray[np.uint64] | None = None

    def of(self, user: int) -> bytes:
        """Return the seed of a user by its position, 32 bytes; empty outside of such experiments."""
        settings = self._host.settings
        if settings.seed is None:
            return b""
        if self._numbers is None:
            self._numbers = user_keys(settings.state, self._host.histories.names, settings.seed)
        return seed_of_user(int(self._numbers[user]))
