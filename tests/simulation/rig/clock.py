"""Keep the virtual time of a schedule, and run its events in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["Clock"]


class Clock:
    """A queue of events in the order of their times; events of the same time in the order in which they were set.

    ``now`` is the virtual time, seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.passed = 0
        self._set = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay: float, event: Callable[[], None]) -> None:
        """Schedule an event ``delay`` seconds from now."""
        self._set += 1
        heapq.heappush(self._events, (self.now + delay, self._set, event))

    def step(self) -> bool:
        """Run the next event; return False when there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        self.passed += 1
        event()
        return True
