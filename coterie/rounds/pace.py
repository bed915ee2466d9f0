"""The pause that the server makes between an abandoned round and the next one."""

from __future__ import annotations

__all__ = ["pause_s"]

_FIRST_S = 1.0
_LONGEST_S = 30.0


def pause_s(in_a_row: int, step_s: float) -> float:
    """Return the pause after a number of rounds abandoned in a row, seconds.

    When no members are connected, rounds are abandoned as fast as they are opened.  The growing pause gives a
    restarting service time to come back before the run has failed.

    Parameters
    ----------
    in_a_row : int
        Rounds abandoned since the last one that was not; 0 for no pause.
    step_s : float
        Longest time for one step of a round, seconds; the pause is at most this long.
    """
    if in_a_row < 1:
        return 0.0
    # The exponent is capped: the power of a very large count would overflow.
    return min(_FIRST_S * 2.0 ** min(in_a_row - 1, 10), _LONGEST_S, step_s)
