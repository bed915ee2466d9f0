"""What a host's parts in graph expansion and in meta-latents share: the first key, and users' seeds in experiments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.errors import CertificateError, CryptoError, PeerError
from coterie.parties.neighbourhood import seed_of_user
from coterie_client.host import Host
from coterie_client.learner import user_keys

__all__ = ["ExperimentSeeds", "hold_first"]

_log = structlog.get_logger("coterie.expansion")


async def hold_first(ensure: Callable[[], Awaitable[object]], run: str, longest_s: float, words: str) -> None:
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


class ExperimentSeeds:
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
