"""Admission control of a service: limits per caller and in all, and the retry delay of a refused call.

A caller is known by its certificate, or by its address while it has none.  Limits on one caller's open calls and
calls per second leave room for the other callers; limits on all calls together keep the service itself alive.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["Admission", "AdmittedCall", "Limits"]

_SWEEP = 1024
"""Fewest new callers between two sweeps, which forget callers without state."""

_STREAMS = 64
"""Most concurrent calls of one connection; gRPC clients queue further calls.  After a connection was cut off, so many
calls may still arrive."""

_SOON_S = 0.1
_FULL_S = 1.0
"""Retry delay where another call has to end first, seconds."""


@dataclass(frozen=True)
class Limits:
    """The limits of a service; the reference of the configuration's ``[limits]`` explains each."""

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
    ping_s: float = 5.0
    idle_s: float = 600.0
    age_s: float = 14400.0

    def options(self) -> tuple[tuple[str, int], ...]:
        """Return the limits that gRPC itself enforces, as options of a server."""
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
            # Callers ask for signs of life also while they have no call, or one that waits for minutes.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", _ms(self.ping_s)),
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
    """Time until which uploads are refused, since the caller was too slow; monotonic seconds."""
    resets: float = 0.0
    """Recently cancelled calls; the count falls by `resets_per_s` each second."""
    reset_at: float = 0.0
    cut_off: bool = False
    """Whether the caller is cut off; ends when ``resets`` has fallen to 0."""

    def forget(self, now: float, per_s: float) -> None:
        self.resets = max(0.0, self.resets - (now - self.reset_at) * per_s)
        self.reset_at = now
        self.cut_off &= self.resets > 0


@dataclass(frozen=True)
class AdmittedCall:
    """An admitted call, which `Admission.leave` gives back."""

    caller: Hashable
    connection: str
    upload: bool
    role: str


class Admission:
    """Counts a service's open calls, and refuses calls over its limits.

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
        """Number of refused calls, by the name of the limit and the caller's role."""
        self._clock = clock
        self._callers: dict[Hashable, _Caller] = {}
        self._until_sweep = _SWEEP

    @property
    def callers(self) -> int:
        """Number of callers that have state here."""
        return len(self._callers)

    def enter(
        self,
        caller: Hashable,
        connection: str,
        *,
        upload: bool = False,
        essential: bool = False,
        role: str = "",
    ) -> AdmittedCall:
        """Admit a call before any of it is read; give its place back with `leave`.

        Parameters
        ----------
        caller : hashable
            Certificate fingerprint or address of the caller.
        connection : str
            Address and port of the caller's connection.
        upload : bool
            Whether the caller sends a stream.
        essential : bool
            Whether to admit the call although the limit on all calls is reached: a health check.
        role : str
            Role of the caller, for the counts; empty without a certificate.

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
        # Calls that are refused below use up a token, too: this slows callers that retry at once.
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
        return AdmittedCall(caller, connection, upload, role)

    def leave(self, place: AdmittedCall) -> None:
        """Give an admitted call's place back."""
        held = self._callers[place.caller]
        self.calls -= 1
        held.calls -= 1
        held.uploads -= place.upload
        held.connections[place.connection] -= 1
        if not held.connections[place.connection]:
            del held.connections[place.connection]

    def gave_up(self, caller: Hashable, role: str = "") -> bool:
        """Count a call that its caller cancelled; return whether to cut off the caller's connection.

        A caller may cancel all the calls that it may have open, twice over: a connection that was lost, and the next.
        More is a flood (HTTP/2 rapid reset), which costs the caller next to nothing and the service work for each call.
        """
        now = self._clock()
        held = self._callers.get(caller)
        if held is None:
            held = self._callers[caller] = _Caller(self.limits.burst, now)
        limits = self.limits
        held.forget(now, limits.resets_per_s)
        # The count is bounded, so that a caller who stops cancelling is soon treated like others.
        most = max(limits.resets_per_s, 2 * limits.calls_per_peer)
        held.resets = min(held.resets + 1, most)
        if held.resets < most and not held.cut_off:
            return False
        held.cut_off = True
        self.turned_away["resets_per_s", role] += 1
        return True

    def too_slow(self, place: AdmittedCall, what: str) -> Refusal:
        """Return the refusal of a call whose caller was too slow, and refuse its uploads for `message_s`."""
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
        """Forget callers without open calls and with a full token bucket: they are like new callers."""
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
