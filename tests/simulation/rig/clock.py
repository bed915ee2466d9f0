"""Virtual time: what is to happen, and when."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["Clock"]


class Clock:
    """Events in the order of their times; those of the same time in the order in which they were set.

    ``now`` is the virtual time, seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.passed = 0
        self._set = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay: float, event: Callable[[], None]) -> None:
        """Set an event, ``delay`` seconds from now."""
        self._set += 1
        heapq.heappush(self._events, (self.now + delay, self._set, event))

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        self.passed += 1
        event()
        return True
