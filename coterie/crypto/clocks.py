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
from typing import NamedTuple

__all__ = [
    "BACKDATED_S",
    "BRIDGED_S",
    "CLOCK_SKEW_S",
    "NOTED_S",
    "SETTLED_S",
    "apart",
    "bridged_s",
    "compared",
    "moment",
    "now",
    "now_s",
]

CLOCK_SKEW_S = 600
"""Difference between the clocks of two machines that disturbs nothing, seconds."""

BACKDATED_S = CLOCK_SKEW_S + 60
"""Time by which a certificate begins before it is made, seconds; a call with its answer takes less than the rest."""

BRIDGED_S = 86_400
"""Largest jump backwards of this machine's clock that `now` does not follow, seconds."""

NOTED_S = 30.0
"""Difference of two clocks that is reported, seconds."""

SETTLED_S = 120.0
"""Time after which a clock counts as right that no other one was compared with, seconds."""

_FOLLOWED_S = 10.0


class _Held(NamedTuple):
    """The clock that a process holds to: the machine's as it was last set."""

    offset: float
    """Wall clock less monotonic clock, seconds."""
    since: float
    """When it was set, by the monotonic clock."""
    agreed: bool | None
    """Whether a clock of another process agreed with it; None before one was compared."""

    def right(self, counted: float) -> bool:
        return counted - self.since >= SETTLED_S if self.agreed is None else self.agreed


def _set(told: float, counted: float) -> _Held:
    return _Held(told - counted, counted, None)


_held = _set(time.time(), time.monotonic())


def now_s() -> float:
    """Return the time in Unix seconds, which does not follow a clock that was right and jumps back.

    A clock that is set back (a wrong time server, a machine taken up from a snapshot) would put certificates and key
    bundles of the last hours into the future.  The time then goes on by the monotonic clock.  A jump of more than
    `BRIDGED_S` is followed: then the clock was rather wrong before.  So is one of a few seconds, as a time server that
    corrects a clock makes.

    A machine that has just booted may have a clock that is fast, and is set right only after the process began.
    Hence a clock is held to only once it counts as right: another process's clock agreed with it (`compared`), or
    none was compared with it for `SETTLED_S`.  This begins anew when the clock jumps forward, which is followed.
    """
    global _held
    held, told, counted = _held, time.time(), time.monotonic()
    back = held.offset + counted - told
    if abs(back) <= _FOLLOWED_S:
        _held = held._replace(offset=told - counted)
    elif 0 < back <= BRIDGED_S and held.right(counted):
        return told + back
    else:
        _held = _set(told, counted)
    return told


def bridged_s() -> float:
    """Return how far `now_s` is ahead of this machine's clock, seconds; 0 unless that clock jumped back."""
    ahead = now_s() - time.time()
    return ahead if ahead > _FOLLOWED_S / 2 else 0.0


def compared(ahead_s: float) -> None:
    """Take how far another process's clock is ahead of `now_s`, seconds.

    One clock that agrees outweighs others that do not: those are wrong themselves, or their words took long.
    """
    global _held
    now_s()
    held = _held
    if abs(ahead_s) <= NOTED_S:
        if not held.agreed:
            _held = held._replace(agreed=True)
    elif held.agreed is None:
        _held = held._replace(agreed=False)


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
