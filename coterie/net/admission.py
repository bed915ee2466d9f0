"""What a service takes on at once: limits by caller and in all, and when to come back for who is turned away.

A caller is known by its certificate, and where it has none yet by its address.  What one caller may have open and ask
for in a second is bounded, so that the others find room; what all may have is bounded, so that the service does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["Admission", "Limits", "Place"]

_SWEEP = 1024
"""Calls between two looks for callers of whom nothing needs to be remembered."""

_STREAMS = 64
"""Calls at once over one connection; callers of gRPC wait with further ones.  So many may still have to be looked at
after a connection was cut off."""

_SOON_S = 0.1
_FULL_S = 1.0
"""After how long to come back where something has to end first, seconds."""


@dataclass(frozen=True)
class Limits:
    """How much a service takes; the configuration's ``[limits]`` says what each is for."""

    connections: int = 8192
    connections_per_peer: int = 64
    calls: int = 16384
    calls_per_peer: int = 256
    calls_per_s: float = 2000.0
    burst: int = 4000
    uploads_per_peer: int = 16
    resets_per_s: float = 50.0
    message_kib: int = 4096
    headers_kib: int = 16
    message_s: float = 60.0
    least_kib_s: float = 4.0
    handshake_s: float = 20.0
    keepalive_s: float = 60.0
    idle_s: float = 600.0
    age_s: float = 14400.0

    def options(self) -> tuple[tuple[str, int], ...]:
        """Return what gRPC itself keeps of them, as options of a server."""
        return (
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.max_concurrent_streams", min(self.calls_per_peer, _STREAMS)),
            ("grpc.max_receive_message_length", self.message_kib << 10),
            ("grpc.max_metadata_size", self.headers_kib << 10),
            ("grpc.absolute_max_metadata_size", self.headers_kib << 10),
            ("grpc.server_handshake_timeout_ms", _ms(self.handshake_s)),
            ("grpc.keepalive_time_ms", _ms(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(self.keepalive_s / 2)),
            ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_s / 2)),
            ("grpc.max_connection_idle_ms", _ms(self.idle_s)),
            ("grpc.max_connection_age_ms", _ms(self.age_s)),
            ("grpc.max_connection_age_grace_ms", _ms(self.message_s)),
        )


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))


@dataclass
class _Caller:
    tokens: float
    at: float
    calls: int = 0
    uploads: int = 0
    connections: Counter[str] = field(default_factory=Counter)
    shut_until: float = 0.0
    """Too slow before: no upload until then."""
    resets: float = 0.0
    """Calls given up of late: as many as `resets_per_s` are forgotten in a second."""
    reset_at: float = 0.0
    cut_off: bool = False
    """Until that is forgotten."""

    def forget(self, now: float, per_s: float) -> None:
        self.resets = max(0.0, self.resets - (now - self.reset_at) * per_s)
        self.reset_at = now
        self.cut_off &= self.resets > 0


@dataclass(frozen=True)
class Place:
    """One call that was admitted."""

    caller: Hashable
    connection: str
    upload: bool
    role: str


class Admission:
    """Counts calls, and turns away those that are too many.

    Parameters
    ----------
    limits : Limits
    clock : callable
        Monotonic seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.calls = 0
        self.turned_away: Counter[tuple[str, str]] = Counter()
        """Calls turned away, by the name of the limit and the caller's role."""
        self._clock = clock
        self._callers: dict[Hashable, _Caller] = {}
        self._until_sweep = _SWEEP

    @property
    def callers(self) -> int:
        """How many callers something is remembered of."""
        return len(self._callers)

    def enter(
        self,
        caller: Hashable,
        connection: str,
        *,
        upload: bool = False,
        essential: bool = False,
        role: str = "",
    ) -> Place:
        """Admit a call, before anything of it is read; give its place back with `leave`.

        Parameters
        ----------
        caller : hashable
            Who calls.
        connection : str
            Over which connection.
        upload : bool
            Whether the caller sends a stream.
        essential : bool
            Whether the call is taken also when all others together are too many: a health check.
        role : str
            The caller's, to count by; empty without a certificate.

        Raises
        ------
        Refusal
            OVERLOADED, with the time after which to come back.
        """
        now = self._clock()
        held = self._callers.get(caller)
        if held is None:
            self._sweep(now)
            held = self._callers[caller] = _Caller(self.limits.burst, now)
        limits = self.limits
        held.tokens = min(limits.burst, held.tokens + (now - held.at) * limits.calls_per_s)
        held.at = now
        if held.tokens < 1:
            self._refuse(role, "calls_per_s", limits.calls_per_s, (1 - held.tokens) / limits.calls_per_s)
        # Also what is refused below counts: whoever asks again at once is held off by this.
        held.tokens -= 1
        if held.cut_off:
            held.forget(now, limits.resets_per_s)
            if held.cut_off:
                self._refuse(role, "resets_per_s", limits.resets_per_s, held.resets / limits.resets_per_s)
        if self.calls >= limits.calls and not essential:
            self._refuse(role, "calls", limits.calls, _FULL_S)
        if held.calls >= limits.calls_per_peer:
            self._refuse(role, "calls_per_peer", limits.calls_per_peer, _FULL_S)
        if connection not in held.connections and len(held.connections) >= limits.connections_per_peer:
            self._refuse(role, "connections_per_peer", limits.connections_per_peer, _FULL_S)
        if upload and held.uploads >= limits.uploads_per_peer:
            self._refuse(role, "uploads_per_peer", limits.uploads_per_peer, _FULL_S)
        if upload and now < held.shut_until:
            self._refuse(role, "message_s", limits.message_s, held.shut_until - now)
        self.calls += 1
        held.calls += 1
        held.uploads += upload
        held.connections[connection] += 1
        return Place(caller, connection, upload, role)

    def leave(self, place: Place) -> None:
        """Give a place back."""
        held = self._callers[place.caller]
        self.calls -= 1
        held.calls -= 1
        held.uploads -= place.upload
        held.connections[place.connection] -= 1
        if not held.connections[place.connection]:
            del held.connections[place.connection]

    def gave_up(self, caller: Hashable, role: str = "") -> bool:
        """Note that a caller gave up a call that was under way; return whether its connection is to be cut off.

        Everything that it may have open it may give up at once, twice over: a connection that was lost, and the next.
        Beyond that it is a flood that costs the caller next to nothing, and this side the work of each call.
        """
        now = self._clock()
        held = self._callers.get(caller)
        if held is None:
            held = self._callers[caller] = _Caller(self.limits.burst, now)
        limits = self.limits
        held.forget(now, limits.resets_per_s)
        # No more than so many are remembered: who stops is soon a caller like others.
        most = max(limits.resets_per_s, 2 * limits.calls_per_peer)
        held.resets = min(held.resets + 1, most)
        if held.resets < most and not held.cut_off:
            return False
        held.cut_off = True
        self.turned_away["resets_per_s", role] += 1
        return True

    def too_slow(self, place: Place, what: str) -> Refusal:
        """Return the refusal of a call whose caller was too slow; it sends no stream for as long again."""
        self.turned_away["message_s", place.role] += 1
        self._callers[place.caller].shut_until = self._clock() + self.limits.message_s
        return Refusal(
            ErrorReason.ERROR_REASON_TOO_SLOW,
            f"the caller was too slow: {what}",
            field="limits.message_s",
            expected=f"a message within {self.limits.message_s:g} s, then at least {self.limits.least_kib_s:g} KiB/s",
            retry_after_s=self.limits.message_s,
        )

    def _refuse(self, role: str, limit: str, value: float, after_s: float) -> None:
        self.turned_away[limit, role] += 1
        raise Refusal(
            ErrorReason.ERROR_REASON_OVERLOADED,
            "more than this service takes at once",
            field=f"limits.{limit}",
            expected=f"at most {value:g}",
            retry_after_s=max(after_s, _SOON_S),
        )

    def _sweep(self, now: float) -> None:
        """Forget callers who have nothing open and a full bucket: for them nothing would be different."""
        self._until_sweep -= 1
        if self._until_sweep > 0:
            return
        limits = self.limits
        for held in self._callers.values():
            held.forget(now, limits.resets_per_s)
        self._callers = {
            caller: held
            for caller, held in self._callers.items()
            if held.calls
            or held.resets
            or now < held.shut_until
            or held.tokens + (now - held.at) * limits.calls_per_s < limits.burst
        }
        self._until_sweep = max(_SWEEP, len(self._callers) // 2)
