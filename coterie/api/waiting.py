"""Asynchronous work behind synchronous calls: also where an event loop runs already, as in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

__all__ = ["awaited"]

T = TypeVar("T")

_LOOK_S = 0.1
_LINGER_S = 5.0
"""Longest wait for a computation after an interrupt, once everything else has been put in order."""


def awaited(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a thread with an event loop of its own, and wait for its result.

    An interrupt of the calling thread (``KeyboardInterrupt``) cancels the coroutine, waits until it has put its things
    in order, such as services that it started or a training in a thread, and is raised again.  Other computations in
    threads are waited for a few seconds at most.

    Parameters
    ----------
    work : callable
        Makes the coroutine.
    """
    _quiet()
    stop = threading.Event()
    outcome: list[T] = []
    failure: list[BaseException] = []
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []
    ended = threading.Event()

    async def run() -> T:
        task = asyncio.ensure_future(work())
        running.append((asyncio.get_running_loop(), task))
        if stop.is_set():
            task.cancel()
        try:
            return await task
        finally:
            ended.set()

    finished = threading.Event()

    def body() -> None:
        try:
            outcome.append(asyncio.run(run()))
        except BaseException as error:
            failure.append(error)
        finally:
            finished.set()

    threading.Thread(target=body, name="coterie", daemon=True).start()
    interrupt = _waited(finished, stop, ended, running)
    if interrupt is not None:
        raise interrupt
    if failure:
        raise failure[0]
    return outcome[0]


def _waited(
    finished: threading.Event,
    stop: threading.Event,
    ended: threading.Event,
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]],
) -> KeyboardInterrupt | None:
    """Wait for the thread's end; on an interrupt cancel its task once, and return the interrupt."""
    found: KeyboardInterrupt | None = None
    give_up = math.inf
    while True:
        try:
            # Not by `Thread.join`: interrupted, it may take a thread that runs for one that has ended.
            while not finished.is_set() and time.monotonic() < give_up:
                if stop.is_set() and ended.is_set():
                    give_up = min(give_up, time.monotonic() + _LINGER_S)
                _look(finished)
            return found
        except KeyboardInterrupt as error:
            # Further ones change nothing: processes are being stopped already.
            found = found or error
            if not stop.is_set():
                stop.set()
                for loop, task in running:
                    with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
                        loop.call_soon_threadsafe(task.cancel)


def _look(finished: threading.Event) -> None:
    """Wait a moment for the thread's end."""
    finished.wait(_LOOK_S)


def _quiet() -> None:
    """Let the launcher log errors only, on standard error, unless the program has set structlog up itself."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )
