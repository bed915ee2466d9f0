"""How long a run may last in a phase, and how long it may wait for parties that are away."""

from __future__ import annotations

__all__ = ["Patience"]


class Patience:
    """Times since a run went on last: with the parties that it needs, and without them.

    Neither begins anew when parties come and go: a run whose only owner returns for seconds again and again ends, too.

    Parameters
    ----------
    now : float
        Monotonic time, seconds.
    """

    def __init__(self, now: float) -> None:
        self.lasted = 0.0
        """Time with the parties that are needed, seconds."""
        self.waited = 0.0
        """Time without some of them, seconds."""
        self._at = now

    def tick(self, now: float, *, waiting: bool) -> None:
        """Count the time since the last call."""
        since, self._at = now - self._at, now
        if waiting:
            self.waited += since
        else:
            self.lasted += since

    def went_on(self) -> None:
        """Begin anew: the run is a step further."""
        self.lasted = self.waited = 0.0
