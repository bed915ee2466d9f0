"""How far the clocks of callers and servers are apart, as their calls tell.

A caller states its clock in the metadata of each call, and a server its own in the trailing metadata of some
(`TELLING`).  These times explain refusals, warn, and feed a metric; and a process holds to its clock when that jumps
back only once another's agreed with it (`coterie.crypto.clocks.now_s`).  Nothing else is decided by them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from coterie.crypto.clocks import CLOCK_SKEW_S, NOTED_S, apart, bridged_s, compared, now_s
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["CLOCK_KEY", "NOTED_S", "TELLING", "Skews", "ahead_s", "bridge", "explained", "stated"]

_log = structlog.get_logger("coterie.net")

CLOCK_KEY = "coterie-clock-ms"
"""Metadata of a call, and trailing metadata of some: the sender's clock, Unix milliseconds."""

TELLING = ("/grpc.health.v1.Health/", "/coterie.v1.Orchestrator/Register", "/coterie.v1.Enrolment/Enrol")
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

    def heard(self, party: str, ahead: float) -> None:
        """Take the difference that a call of a party shows, seconds; log it where it is new."""
        compared(ahead)
        if abs(ahead) <= NOTED_S and party not in self._off and party not in self._doubted:
            return
        with self._lock:
            if abs(ahead) <= NOTED_S:
                self._doubted.pop(party, None)
                if self._off.pop(party, None) is not None:
                    _log.info("the clock of a party is right again", party=party)
                return
            if len(self._off) + len(self._doubted) >= 2 * _MOST:
                return
            if ahead < 0:
                before, self._doubted[party] = self._doubted.get(party), ahead
                if before is None:
                    return
                ahead = max(before, ahead)
            else:
                self._doubted.pop(party, None)
            known, self._off[party] = self._off.get(party), ahead
        if known is None or abs(known - ahead) > NOTED_S:
            _log.warning("the clock of a party is off", party=party, ahead_s=round(ahead, 1))

    def worst(self) -> Mapping[tuple[str, ...], float]:
        """Return the differences that are largest, by party, seconds; positive where the party is ahead."""
        with self._lock:
            found = sorted(self._off.items(), key=lambda one: -abs(one[1]))[:_SHOWN]
        return {(party,): ahead for party, ahead in found}
