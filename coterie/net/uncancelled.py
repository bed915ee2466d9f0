"""Work that is completed although the one who asked for it has gone away.

gRPC cancels a servicer when its caller breaks the connection, lets the deadline pass or dies.  A cancellation between
a durable write and what memory has to learn of it would leave the two different until a restart, so what belongs
together runs as a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["completed"]

T = TypeVar("T")

_under_way: set[asyncio.Task[Any]] = set()
"""Tasks that nobody may wait for any more; the event loop itself holds them only weakly."""


async def completed(work: Coroutine[Any, Any, T]) -> T:
    """Run work to its end and return its result; a cancellation ends the waiting and not the work."""
    task = asyncio.create_task(work)
    _under_way.add(task)
    task.add_done_callback(_finished)
    return await asyncio.shield(task)


def _finished(task: asyncio.Task[Any]) -> None:
    _under_way.discard(task)
    if not task.cancelled():
        # Looked at, so that a failure that nobody waits for is not reported as forgotten.
        task.exception()
