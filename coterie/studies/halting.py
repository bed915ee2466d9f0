"""Work that ends when what waits for it is cancelled: computations in a thread, and two things at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["Look", "at_once", "in_thread"]

T = TypeVar("T")
U = TypeVar("U")

Look = Callable[[], None]
"""Callback of a computation: raises once nobody waits for it any more."""


class _Halted(BaseException):
    """Nobody waits for this computation any more."""


async def in_thread(work: Callable[[Look], T]) -> T:
    """Run a computation in a thread; when this coroutine is cancelled, it ends at its next look, and is waited for.

    What the caller gives back afterwards, such as the lock of a folder, is then really free: `asyncio.to_thread` leaves
    the thread running.

    Parameters
    ----------
    work : callable
        Receives a function to call now and then.

    Raises
    ------
    asyncio.CancelledError
        Once the thread has ended.
    """
    halted = threading.Event()

    def look() -> None:
        if halted.is_set():
            raise _Halted

    computing = asyncio.ensure_future(asyncio.to_thread(work, look))
    try:
        return await asyncio.shield(computing)
    except asyncio.CancelledError:
        halted.set()
        while not computing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({computing})
        # Its outcome is nobody's any more, but must have been looked at.
        computing.cancelled() or computing.exception()
        raise


async def at_once(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Do two things at once, and return both results; where one fails, the other is cancelled and waited for.

    The error of the one that failed is raised, not a group of errors as by `asyncio.TaskGroup`.
    """
    try:
        async with asyncio.TaskGroup() as both:
            first, second = both.create_task(one), both.create_task(other)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return first.result(), second.result()
