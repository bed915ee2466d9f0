"""Clocks of different machines: how far they may differ, and words for moments and differences.

Signed statements carry times of the machine that made them.  A reader compares these with its own clock, and takes
a statement for `CLOCK_SKEW_S` before it begins and after it ends, so that two clocks may differ by so much.  That
gives nobody a power: a statement which is withdrawn before its end is revoked, and the keys that are destroyed at a
time (prekeys, sealing keys) are destroyed by their holder's clock alone, an hour after their end.

TLS judges certificates without this tolerance.  They are made as if they began `BACKDATED_S` earlier instead, and
are renewed long before their end.
"""

from __future__ import annotations

import time

__all__ = ["BACKDATED_S", "BRIDGED_S", "CLOCK_SKEW_S", "apart", "moment", "now", "now_s"]

CLOCK_SKEW_S = 600
"""Difference between the clocks of two machines that disturbs nothing, seconds."""

BACKDATED_S = CLOCK_SKEW_S + 60
"""Time by which a certificate begins before it is made, seconds; a call with its answer takes less than the rest."""

BRIDGED_S = 86_400
"""Largest jump backwards of this machine's clock that `now` does not follow, seconds."""

_FOLLOWED_S = 10.0
_started = time.time() - time.monotonic()


def now_s() -> float:
    """Return the time in Unix seconds, which does not follow a clock that jumps back while the process runs.

    A clock that is set back (a wrong time server, a machine taken up from a snapshot) would put certificates and key
    bundles of the last hours into the future.  The time then goes on by the monotonic clock.  A jump of more than
    `BRIDGED_S` is followed: then the clock was rather wrong before.  So is one of a few seconds, as a time server that
    corrects a clock makes.
    """
    global _started
    told, counted = time.time(), time.monotonic()
    back = _started + counted - told
    if _FOLLOWED_S < back <= BRIDGED_S:
        return told + back
    if abs(back) <= _FOLLOWED_S:
        _started = told - counted
    return told


def now() -> int:
    """Return `now_s` in whole seconds."""
    return int(now_s())


def moment(seconds: float) -> str:
    """Return a time in Unix seconds as text.

    >>> moment(1_767_225_600)
    '2026-01-01 00:00:00 UTC'
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.0f} s after 1970"


def apart(ahead_s: float, other: str = "this machine's") -> str:
    """Return how far a clock is from another one, as words that follow "the clock of ... is".

    >>> apart(-86_400)
    "86400 s behind this machine's"

    Parameters
    ----------
    ahead_s : float
        How far the clock is ahead, seconds; negative when it is behind.
    other : str
        The other clock.
    """
    return f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} {other}"
