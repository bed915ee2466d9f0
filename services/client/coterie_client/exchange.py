"""Base of a host's parts in graph expansion and in meta-latents: first key, receipts, users' seeds in experiments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.errors import CertificateError, CoterieError, CryptoError, PeerError
from coterie.parties.neighbourhood import seed_of_user
from coterie.wire.refusal import LATER, Refusal
from coterie_client.host import Host
from coterie_client.learner import user_keys

__all__ = ["HostExchange"]

_log = structlog.get_logger("coterie.expansion")


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
        Longest wait for the run's first key, seconds.
    """

    def __init__(self, host: Host, lacks: str, key: str, longest_s: float) -> None:
        self._host = host
        self._seeds = _ExperimentSeeds(host)
        self._lacks = lacks
        self._key = key
        self._longest_s = longest_s
        self._first: asyncio.Task[None] | None = None
        self._absent = False

    def _begin(self, ensure: Callable[[], Awaitable[object]]) -> None:
        """Begin to hold the run's first key, given what holds the newest; only the first time."""
        if self._first is None:
            self._first = asyncio.create_task(
                _hold_first(ensure, self._host.settings.run, self._longest_s, f"no {self._key}")
            )

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
                if isinstance(error, PeerError) and not _of_one_user(error):
                    raise
                _log.warning("an upload is not deleted", user=user + 1, reason=error.message)
                failure = failure or error
        if failure is not None:
            raise failure
        return forgotten

    async def _note(self, kind: str, user: int, size: int) -> None:
        """Note on a user's receipt what is about to be sent to the third party."""
        await self._host.note_sent("thirdparty", kind, 1, size, user + 1)


def _of_one_user(error: PeerError) -> bool:
    """Return whether an error may concern a single user; where nobody answers, others need not try."""
    return isinstance(error, Refusal) and error.reason not in LATER


async def _hold_first(
    ensure: Callable[[], Awaitable[object]], run: str, longest_s: float, words: str
) -> None:
    """Make or receive the run's first key, while the groups are asked for their items; never fails.

    Parameters
    ----------
    ensure : callable
        Holds the newest key.
    run : str
    longest_s : float
        Time after which to give up, seconds.
    words : str
        What is missing then, for the log.
    """
    ends = asyncio.get_running_loop().time() + longest_s
    while True:
        try:
            await ensure()
            return
        except (PeerError, CertificateError, CryptoError) as error:
            if asyncio.get_running_loop().time() > ends:
                _log.warning(words, run=run, reason=error.message)
                return
            await asyncio.sleep(1.0)


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
