"""Pauses between messages that each carry what has come meanwhile: short for few, longer while very many come."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PAUSE", "Pause"]


class Pause(NamedTuple):
    """The time from one message to the next, which grows with what the message carries.

    A message costs both sides more than one thing in it.  A few parties whose steps follow on each other wait the least
    time only; where very many come, fewer messages are sent.

    Parameters
    ----------
    least_s : float
        Shortest time, seconds.
    each_s : float
        Time for each thing in the message, seconds.
    most_s : float
        Longest time, seconds.
    """

    least_s: float
    each_s: float
    most_s: float

    def after(self, count: int) -> float:
        """Return the seconds to the next message after one that carries ``count`` things."""
        return min(self.most_s, self.least_s + self.each_s * count)


PAUSE = Pause(least_s=0.02, each_s=0.001, most_s=0.05)
"""Time between two messages of an intake and its coordinator about polls."""
