"""The bound on each wait of one call, with a timer that is set once and again only when it rings too early.

A stream waits for its caller once a message: a timer and two context managers for each cost as much as to add the
message's contribution to a sum.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Self

__all__ = ["Waits"]


class Waits:
    """Bounds each wait of a call; enter it around a wait, and close it when the call is over.

    Parameters
    ----------
    limit_s : float
        Longest wait, seconds.

    Raises
    ------
    TimeoutError
        From the ``with`` block of a wait that took longer.
    """

    __slots__ = (
        "_begun",
        "_cancelling",
        "_late",
        "_limit_s",
        "_loop",
        "_since",
        "_task",
        "_timer",
        "waited_s",
    )

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._since: float | None = None
        self._late = False
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._begun = 0.0
        self.waited_s = 0.0
        """Seconds in all waits that are over."""

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a wait is bounded within a task")
        self._task, self._cancelling = task, task.cancelling()
        self._since = self._loop.time()
        # The loop's clock stands still within one of its turns.
        self._begun = time.perf_counter()
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._rings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        task = self._task
        if task is None:
            raise AssertionError("a wait ends that did not begin")
        self.waited_s += time.perf_counter() - self._begun
        self._since = self._task = None
        if self._late:
            self._late = False
            # Another cancellation beside that of the timer goes on.
            if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def _rings(self) -> None:
        self._timer = None
        if self._since is None or self._task is None:
            return
        left = self._since + self._limit_s - self._loop.time()
        if left > 0:
            # The wait for which the timer was set is over; a later one goes on.
            self._timer = self._loop.call_later(left, self._rings)
        else:
            self._late = True
            self._task.cancel()

    def close(self) -> None:
        """Stop the timer, so that nothing keeps the call alive."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
