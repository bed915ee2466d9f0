"""How far the clocks of callers and servers are apart, as their calls tell.

A caller states its clock in the metadata of each call, and a server its own in the trailing metadata of some
(`TELLING`).  These times explain refusals, warn, and feed a metric; and a process holds to its clock when that jumps
back only once another's agreed with it (`coterie.crypto.clocks.now_s`).  Nothing else is decided by them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from coterie.crypto.clocks import CLOCK_SKEW_S, NOTED_S, apart, bridged_s, compared, now_s
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["CLOCK_KEY", "NOTED_S", "QUIET_S", "TELLING", "Skews", "ahead_s", "bridge", "explained", "stated"]

_log = structlog.get_logger("coterie.net")

CLOCK_KEY = "coterie-clock-ms"
"""Metadata of a call, and trailing metadata of some: the sender's clock, Unix milliseconds."""

QUIET_S = 60.0
"""Shortest time between two words in the log about the clock of one party, seconds."""

TELLING = ("/grpc.health.v1.Health/", "/coterie.v1.Orchestrator/Register", "/coterie.v1.Enrolment/")
"""Beginnings of the methods whose answers tell the server's clock."""

_SHOWN = 10
_bridged = False
_MOST = 10_000
_DIGITS = 16

_BY_TIME = frozenset(
    {
        ErrorReason.ERROR_REASON_BAD_SIGNATURE,
        ErrorReason.ERROR_REASON_UNKNOWN_PREKEY,
        ErrorReason.ERROR_REASON_INVALID_FIELD,
    }
)
"""Reasons of refusals that a wrong clock brings about."""


def stated() -> tuple[str, str]:
    """Return the metadata that states the time which this process goes by."""
    bridge()
    return CLOCK_KEY, str(int(now_s() * 1e3))


def bridge() -> float:
    """Return how far this process's time is ahead of its machine's clock, as `bridged_s`; log it where it is new."""
    global _bridged
    ahead = bridged_s()
    if ahead > NOTED_S:
        if not _bridged:
            _bridged = True
            _log.warning(
                "the clock of this machine jumped back, and is not followed",
                ahead_s=round(ahead, 1),
                hint="if the clock is right now, restart this service",
            )
    elif _bridged:
        _bridged = False
        _log.info("the clock of this machine is followed again")
    return ahead


def ahead_s(metadata: Iterable[Any] | None) -> float | None:
    """Return how far the sender of metadata is ahead of this process, seconds; None when it states no time.

    The time on the way counts as behind.
    """
    for key, value in metadata or ():
        if key == CLOCK_KEY:
            text = value if isinstance(value, str) else ""
            number = text.isascii() and text.isdigit() and len(text) <= _DIGITS
            return int(text) / 1e3 - now_s() if number else None
    return None


def explained(refusal: Refusal, party: str, ahead: float | None) -> Refusal:
    """Return a refusal that names its caller's clock, where that is too far off and may be the cause."""
    if ahead is None or abs(ahead) <= CLOCK_SKEW_S or refusal.reason not in _BY_TIME:
        return refusal
    return Refusal(
        refusal.reason,
        f"{refusal.message}; the clock of {party} is {apart(ahead, 'that of this service')}, {CLOCK_SKEW_S} s are "
        "tolerated: set one of the two",
        field=refusal.field,
        expected=refusal.expected,
        retry_after_s=refusal.retry_after_s,
    )


class Skews:
    """The callers of a service whose clocks are off by more than `NOTED_S`.

    A caller counts as behind only after two calls in a row: the first may have waited on its way.  Threads may share
    the object.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doubted: dict[str, float] = {}
        self._off: dict[str, float] = {}
        self._said: dict[str, tuple[float, float]] = {}
        """What the log says of a party, seconds, and since when by the monotonic clock."""

    def heard(self, party: str, ahead: float) -> None:
        """Take the difference that a call of a party shows, seconds; log it where it is new.

        A party is logged once in `QUIET_S` at most, however it changes its clock.
        """
        compared(ahead)
        right = abs(ahead) <= NOTED_S
        if right and not (party in self._off or party in self._doubted or party in self._said):
            return
        with self._lock:
            if right:
                self._doubted.pop(party, None)
                self._off.pop(party, None)
            elif len(self._off) + len(self._doubted) < 2 * _MOST:
                self._differs(party, ahead)
            off, now = self._off.get(party, 0.0), time.monotonic()
            said, since = self._said.get(party, (0.0, -math.inf))
            if now - since < QUIET_S:
                return
            if abs(off - said) <= NOTED_S:
                if not off:
                    self._said.pop(party, None)
                return
            self._said[party] = off, now
        if off:
            _log.warning("the clock of a party is off", party=party, ahead_s=round(off, 1))
        else:
            _log.info("the clock of a party is right again", party=party)

    def _differs(self, party: str, ahead: float) -> None:
        if ahead < 0:
            before, self._doubted[party] = self._doubted.get(party), ahead
            if before is None:
                return
            ahead = max(before, ahead)
        else:
            self._doubted.pop(party, None)
        self._off[party] = ahead

    def worst(self) -> Mapping[tuple[str, ...], float]:
        """Return the differences that are largest, by party, seconds; positive where the party is ahead."""
        with self._lock:
            found = sorted(self._off.items(), key=lambda one: -abs(one[1]))[:_SHOWN]
        return {(party,): ahead for party, ahead in found}
