"""How long a run waits after a round that was abandoned, before it opens the next one."""

from __future__ import annotations

__all__ = ["pause_s"]

_FIRST_S = 1.0
_LONGEST_S = 30.0


def pause_s(in_a_row: int, step_s: float) -> float:
    """Return how long to wait after so many rounds abandoned one after the other, seconds.

    Where nobody is there to be waited for, rounds are abandoned as fast as they are opened: without a pause that
    grows, a service that restarts would find that the run had failed meanwhile.

    Parameters
    ----------
    in_a_row : int
        Rounds abandoned since the last one that was not; 0 for no pause.
    step_s : float
        Longest time for one step of a round, seconds; a pause is not longer.
    """
    if in_a_row < 1:
        return 0.0
    # Not 2 to the power of any number: of that many there are none, and it would not fit.
    return min(_FIRST_S * 2.0 ** min(in_a_row - 1, 10), _LONGEST_S, step_s)
