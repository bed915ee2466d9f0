"""Warnings that repeat for as long as something is away: said once, then once in a while, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["EVERY_S", "Seldom"]

EVERY_S = 600.0
"""Time between two lines about the same trouble, seconds."""


class Seldom:
    """Logs one kind of trouble at most once in a while.

    Parameters
    ----------
    log : structlog logger
    every_s : float, optional
        Time between two lines, seconds.
    clock : callable, optional
        Monotonic seconds.
    """

    def __init__(
        self, log: Any, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self._since: float | None = None
        self._said = 0.0
        self._more = 0

    def warning(self, event: str, **fields: object) -> None:
        """Log the trouble, unless it was logged a short while ago and is not over; then it is only counted.

        A line after others has how often (``again``) and for how long (``for_s``) the trouble has come.
        """
        now = self._clock()
        if self._since is None:
            self._since = self._said = now
            self._log.warning(event, **fields)
        elif now - self._said >= self._every_s:
            self._log.warning(event, **fields, again=self._more + 1, for_s=round(now - self._since))
            self._said, self._more = now, 0
        else:
            self._more += 1

    def over(self, event: str, **fields: object) -> None:
        """Log that the trouble is over, if it was logged."""
        if self._since is not None:
            self._log.info(event, **fields, after_s=round(self._clock() - self._since))
            self._since, self._more = None, 0
