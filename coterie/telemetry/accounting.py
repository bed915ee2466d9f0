"""Where a process spends its CPU time, by activity; and how much memory it took at its peak."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypedDict

__all__ = ["SECURITY", "Accounting", "CpuSeconds"]

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
"""Activities that exist only to protect data, and what each is counted under.

TLS runs inside gRPC and cannot be told apart from it.
"""


class CpuSeconds(TypedDict):
    """CPU seconds of one process."""

    total: float
    start: float
    security: float
    activities: dict[str, float]


class Accounting:
    """CPU seconds of one process, by activity.

    Time is the calling thread's CPU time, so waiting costs nothing; activities must not nest.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._start = 0.0

    def started(self) -> None:
        """Mark the end of process start: imports, stores, certificates."""
        self._start = time.process_time()

    @contextmanager
    def process_activity(self, name: str) -> Iterator[None]:
        """Count the CPU time of the whole process during a block that has threads of its own, and nothing beside it."""
        before = time.process_time()
        try:
            yield
        finally:
            self._seconds[name] += time.process_time() - before
            self._counts[name] += 1

    @contextmanager
    def activity(self, name: str, count: int = 1) -> Iterator[None]:
        """Count the block's CPU time under a name.

        Parameters
        ----------
        name : str
            The activity; one of ``SECURITY`` where it protects data.
        count : int
            How many things the block handles (records, pairs).
        """
        before = time.thread_time()
        try:
            yield
        finally:
            self._seconds[name] += time.thread_time() - before
            self._counts[name] += count

    def cpu_seconds(self) -> CpuSeconds:
        """Return the account so far."""
        activities = {name: round(value, 6) for name, value in sorted(self._seconds.items())}
        return CpuSeconds(
            total=round(time.process_time(), 6),
            start=round(self._start, 6),
            security=round(sum(self._seconds[name] for name in SECURITY.keys() & self._seconds.keys()), 6),
            activities=activities,
        )

    def counts(self) -> dict[str, int]:
        """Return how many things each activity handled."""
        return dict(sorted(self._counts.items()))

    @staticmethod
    def peak_rss_mb() -> float:
        """Return the largest resident set of this process so far, MiB."""
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
