"""Running a coroutine to its end although the RPC or the task that started it was cancelled.

gRPC cancels a servicer when its caller breaks the connection, lets the deadline pass or dies.  A cancellation between
a durable write and the matching change in memory would leave the two different until a restart, so servicers run
both together in a task of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["completed", "to_the_end"]

T = TypeVar("T")

_under_way: set[asyncio.Task[Any]] = set()
"""Strong references to the running tasks: the event loop holds them only weakly, and their callers may be gone."""


async def completed(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result; cancelling the caller does not cancel the coroutine."""
    task = asyncio.create_task(work)
    _under_way.add(task)
    task.add_done_callback(_finished)
    return await asyncio.shield(task)


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end and wait for it; a cancellation of the caller takes effect afterwards.

    For putting things in order, such as stopping processes, which a cancellation in the middle would leave running.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        _finished(task)
        raise cancelled
    await task


def _finished(task: asyncio.Task[Any]) -> None:
    _under_way.discard(task)
    if not task.cancelled():
        # Retrieve the exception: asyncio would otherwise log it as never retrieved when no caller waits any more.
        task.exception()
