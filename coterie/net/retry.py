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
"""A peer cannot make a caller wait longer than this between two attempts, seconds."""

_CUT_OFF = "Internal error from Core"
"""What gRPC makes of a peer that ends a call before everything was sent: the status it gave is lost."""


def status_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether the peer ended the call with a status that did not reach us; asked again, it gives it again."""
    return error.code() == grpc.StatusCode.INTERNAL and error.details() == _CUT_OFF


def _told(error: grpc.aio.AioRpcError) -> float | None:
    """Return after how long the peer says to come back, seconds; None when it says nothing."""
    failure = from_rpc_error(error, "")
    if not isinstance(failure, Refusal) or failure.retry_after_s is None:
        return None
    return min(failure.retry_after_s, _LONGEST_TOLD_S)


@dataclass(frozen=True)
class Retry:
    """How long to go on, and how fast.

    Parameters
    ----------
    limit_s : float
        No new attempt starts later than this after the first, seconds.
    first_s, longest_s : float
        Bounds of the pause; it doubles from the first to the longest, and a uniform part of it is waited.  Where the
        peer says when to come back, as one does that has too much to do, so long is waited, and up to the pause more.
    also : callable
        Whether a call may succeed later that failed otherwise than by the network.
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
        """Run an idempotent call until it succeeds, is refused, or time is up.

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
