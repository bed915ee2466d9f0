"""A process's account of its CPU time by activity, and of its peak memory."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, TypedDict, TypeVar

__all__ = ["SECURITY", "Accounting", "CpuSeconds"]

P = ParamSpec("P")
T = TypeVar("T")

SECURITY: Mapping[str, str] = {
    "seal": "sealing and opening",
    "open": "sealing and opening",
    "key agreement": "key agreement",
    "signatures": "signatures",
    "round keys": "masked sums",
    "shares": "masked sums",
    "masks": "masked sums",
    "unmask": "masked sums",
    "encryption": "encrypted sums",
    "decryption": "encrypted sums",
    "decryption proofs": "encrypted sums",
    "sums of ciphertexts": "encrypted sums",
}
"""Protections by activity, for the activities that only serve to protect data.

TLS is not among them: it runs inside gRPC, and its time cannot be told apart.
"""


class CpuSeconds(TypedDict):
    """CPU seconds of one process."""

    total: float
    start: float
    security: float
    activities: dict[str, float]


class Accounting:
    """Account of one process's CPU seconds by activity.

    An activity's time is the calling thread's CPU time, so waiting costs nothing; activities must not nest.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._start = 0.0

    def started(self) -> None:
        """Mark the end of the process's start (imports, stores, certificates)."""
        self._start = time.process_time()

    @contextmanager
    def process_activity(self, name: str) -> Iterator[None]:
        """Count the whole process's CPU time during a block, for blocks that use several threads and run alone."""
        before = time.process_time()
        try:
            yield
        finally:
            self._seconds[name] += time.process_time() - before
            self._counts[name] += 1

    @contextmanager
    def activity(self, name: str, count: int = 1) -> Iterator[None]:
        """Count a block's CPU time as an activity's.

        Parameters
        ----------
        name : str
            The activity; one of ``SECURITY`` if it protects data.
        count : int
            Number of things that the block handles (records, pairs).
        """
        before = time.thread_time()
        try:
            yield
        finally:
            self._seconds[name] += time.thread_time() - before
            self._counts[name] += count

    async def in_thread(
        self, name: str, count: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``work`` in a thread, and count that thread's CPU time as an activity's.

        Parameters
        ----------
        name, count
            As for `activity`.
        work : callable
            Called with the other arguments.

        Returns
        -------
        object
            Result of ``work``.
        """

        def counted() -> T:
            with self.activity(name, count):
                return work(*args, **kwargs)

        return await asyncio.to_thread(counted)

    def cpu_seconds(self) -> CpuSeconds:
        """Return the CPU seconds so far: total, start, security and by activity."""
        activities = {name: round(value, 6) for name, value in sorted(self._seconds.items())}
        return CpuSeconds(
            total=round(time.process_time(), 6),
            start=round(self._start, 6),
            security=round(sum(self._seconds[name] for name in SECURITY.keys() & self._seconds.keys()), 6),
            activities=activities,
        )

    def counts(self) -> dict[str, int]:
        """Return the number of things handled, by activity."""
        return dict(sorted(self._counts.items()))

    @staticmethod
    def peak_rss_mb() -> float:
        """Return the largest resident set of this process so far, MiB."""
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
