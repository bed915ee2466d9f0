"""Retries with exponential back-off and full jitter, bounded in time, for calls that may be repeated."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from coterie.net.status import from_rpc_error
from coterie.wire.refusal import Refusal

__all__ = ["Retry", "status_lost"]

T = TypeVar("T")

_TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Codes after which the same call may succeed: the peer restarts, the network broke."""

_LONGEST_TOLD_S = 60.0
"""Longest retry delay that a caller accepts from a peer, seconds."""

_CUT_OFF = "Internal error from Core"
"""gRPC's details when a peer ends a call before everything was sent: the peer's own status is lost."""


def status_lost(error: grpc.aio.AioRpcError) -> bool:
    """Return whether gRPC lost the status with which the peer ended the call; a repeated call gets it again."""
    return error.code() == grpc.StatusCode.INTERNAL and error.details() == _CUT_OFF


def _told(error: grpc.aio.AioRpcError) -> float | None:
    """Return the retry delay that the peer asked for, seconds; None when it asked for none."""
    failure = from_rpc_error(error, "")
    if not isinstance(failure, Refusal) or failure.retry_after_s is None:
        return None
    return min(failure.retry_after_s, _LONGEST_TOLD_S)


@dataclass(frozen=True)
class Retry:
    """A retry policy: how long to go on, and the pauses between attempts.

    Parameters
    ----------
    limit_s : float
        No new attempt starts later than this after the first, seconds.
    first_s, longest_s : float
        Bounds of the pause, which doubles from the first to the longest; a uniformly drawn part of it is waited.
        Where the peer gives a retry delay, as an overloaded service does, the delay is waited before that part.
    also : callable
        Returns whether to repeat a call that failed for another reason than the network.
    sleep : callable
        Waits the given seconds; tests inject their own.
    """

    limit_s: float = 60.0
    first_s: float = 0.05
    longest_s: float = 2.0
    also: Callable[[grpc.aio.AioRpcError], bool] = field(default=lambda _: False, repr=False)
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    async def __call__(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent call until it succeeds, is refused for good, or time is up.

        Raises
        ------
        grpc.aio.AioRpcError
            The last failure.
        """
        started = self.clock()
        pause = self.first_s
        while True:
            try:
                return await attempt()
            except grpc.aio.AioRpcError as error:
                told = _told(error)
                may_pass = (
                    told is not None or error.code() in _TRANSIENT or status_lost(error) or self.also(error)
                )
                if not may_pass or self.clock() - started + (told or 0.0) >= self.limit_s:
                    raise
            await self.sleep((told or 0.0) + random.uniform(0, pause))  # noqa: S311 - jitter, not a secret
            pause = min(2 * pause, self.longest_s)
