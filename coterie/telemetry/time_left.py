"""The time that the passes of a run still take, by those that it has made."""

from __future__ import annotations

from collections.abc import Callable

from coterie.telemetry.quantities import duration

__all__ = ["TimeLeft", "whole_seconds"]


def whole_seconds(seconds: float) -> str:
    """Return a duration in whole seconds, or minutes and seconds."""
    return f"{seconds:.0f} s" if seconds < 60 else duration(seconds)


class TimeLeft:
    """Time of training that is left, by the passes since the first evaluation.

    Parameters
    ----------
    passes : int
        Passes at most.
    clock : callable
        Returns seconds.
    """

    def __init__(self, passes: int, clock: Callable[[], float]) -> None:
        self._passes, self._clock = passes, clock
        self._first: tuple[float, int] | None = None

    def evaluated(self, done: int) -> None:
        """Record an evaluation after some passes."""
        self._first = self._first or (self._clock(), done)

    def words(self, current: int) -> str:
        """Return about how long training still takes; empty as long as that is unknown.

        Parameters
        ----------
        current : int
            Number of the pass in progress, from 1.
        """
        done = current - 1
        if self._first is None or done <= self._first[1]:
            return ""
        at, first = self._first
        seconds = (self._clock() - at) / (done - first) * (self._passes - done)
        return f"at most {whole_seconds(seconds)} left" if seconds >= 1 else ""
