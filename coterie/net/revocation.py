"""Keeps a service's knowledge of what was revoked fresh, and the service shut while it is not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import grpc
import structlog

from coterie.net.channel import Channel
from coterie.net.status import from_rpc_error
from coterie.wire.v1.thirdparty_pb2 import RevocationsRequest, RevocationsResponse
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

if TYPE_CHECKING:
    from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryAsyncStub

__all__ = ["HOLD_S", "STALE_S", "RevocationWatch"]

_log = structlog.get_logger("coterie.revocation")

HOLD_S = 20.0
"""How long the directory may hold a call while nothing changes, seconds."""

STALE_S = 600.0
"""Without an answer for so long nobody is trusted any more, seconds."""

_CALL_S = HOLD_S + 10.0
_LONGEST_PAUSE_S = 10.0


class _Gate(Protocol):
    """The part of a guard that the watch moves."""

    def revoke(self, fingerprints: frozenset[bytes]) -> None:
        """Refuse these certificates."""

    def fail_closed(self, closed: bool) -> None:
        """Refuse everybody, or no longer."""


class RevocationWatch:
    """Long-polls the directory's revocations and moves a guard accordingly.

    The guard is shut from the start until the first answer, and again whenever no answer came for `STALE_S`:
    a service that restarts while the directory is away does not know whom it may trust.  Nothing revoked ever
    comes back, whatever a later answer says.

    Parameters
    ----------
    channel : Channel
        To the key directory.
    guard : Guard
        Learns the revoked certificates.
    on_change : callable, optional
        Told whether the list is fresh, at the start and whenever that changes: a condition of health.
    on_revoked : callable, optional
        Told the ids of all revoked participants whenever there are new ones.
    clock : callable
        Monotonic seconds.
    sleep : callable
        Waits the given seconds.
    """

    def __init__(
        self,
        channel: Channel,
        guard: _Gate,
        on_change: Callable[[bool], None] | None = None,
        *,
        on_revoked: Callable[[frozenset[bytes]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._directory: KeyDirectoryAsyncStub = channel.stub(lambda inner: KeyDirectoryStub(inner))
        self._peer = channel.peer
        self._guard = guard
        self._on_change = on_change
        self._on_revoked = on_revoked
        self._clock = clock
        self._sleep = sleep
        self._answered: float | None = None
        self._reported: bool | None = None
        self.revision = 0
        self.participants: frozenset[bytes] = frozenset()
        self.certificates: frozenset[bytes] = frozenset()
        self._report()

    @property
    def fresh(self) -> bool:
        """Whether the list is recent enough to trust."""
        return self._answered is not None and self._clock() - self._answered < STALE_S

    @property
    def age_s(self) -> float | None:
        """Seconds since the last answer; None before the first."""
        return None if self._answered is None else self._clock() - self._answered

    def is_revoked(self, participant: bytes) -> bool:
        """Whether a participant (id, 32 bytes) is revoked."""
        return participant in self.participants

    async def run(self) -> None:
        """Watch until cancelled."""
        pause = 0.1
        while True:
            try:
                response = await self._ask()
            except grpc.aio.AioRpcError as error:
                _log.warning(
                    "no revocation list", error=str(from_rpc_error(error, self._peer)), fresh=self.fresh
                )
                self._report()
                # The pause never sleeps past the moment at which the list becomes too old.
                await self._sleep(min(random.uniform(pause / 2, pause), self._left()))  # noqa: S311 - jitter
                self._report()
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                pause = 0.1
                self._take(response)

    async def _ask(self) -> RevocationsResponse:
        request = RevocationsRequest(held_revision=self.revision, hold_ms=int(HOLD_S * 1000))
        response: RevocationsResponse = await self._directory.Revocations(
            request, timeout=min(_CALL_S, self._left())
        )
        return response

    def _left(self) -> float:
        """Seconds until the list becomes too old; a usual time once it is."""
        if self._answered is None or not self.fresh:
            return _CALL_S
        return max(0.1, self._answered + STALE_S - self._clock())

    def _take(self, response: RevocationsResponse) -> None:
        self._answered = self._clock()
        self.revision = response.revision
        certificates = self.certificates.union(response.certificates)
        if certificates != self.certificates:
            self.certificates = certificates
            self._guard.revoke(certificates)
        participants = self.participants.union(response.participants)
        if participants != self.participants:
            self.participants = participants
            if self._on_revoked is not None:
                self._on_revoked(participants)
        self._report()

    def _report(self) -> None:
        if self.fresh == self._reported:
            return
        self._reported = self.fresh
        self._guard.fail_closed(not self._reported)
        if self._on_change is not None:
            self._on_change(self._reported)
