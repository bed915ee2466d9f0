"""The watch by which a service follows the key directory's revocations, and fails closed while they are stale."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import grpc
import structlog

from coterie.net.channel import Channel
from coterie.net.rest import Rest
from coterie.net.status import from_rpc_error
from coterie.telemetry.seldom import Seldom
from coterie.wire.v1.common_pb2 import Protocol as Spoken
from coterie.wire.v1.thirdparty_pb2 import RevocationsRequest, RevocationsResponse
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub
from coterie.wire.versions import UnsupportedVersionError, agree, own

if TYPE_CHECKING:
    from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryAsyncStub

__all__ = ["HOLD_S", "STALE_S", "RevocationWatch"]

_log = structlog.get_logger("coterie.revocation")

HOLD_S = 20.0
"""Longest time for which the directory may hold a long-polled call while nothing changes, seconds."""

STALE_S = 600.0
"""Age of the last answer from which on the revocation list is stale and every caller is refused, seconds."""

_CALL_S = HOLD_S + 10.0
_LONGEST_PAUSE_S = 10.0


class _Gate(Protocol):
    """The two methods of `coterie.net.server.Guard` that the watch calls."""

    def revoke(self, fingerprints: frozenset[bytes]) -> None:
        """Refuse these certificates."""

    def fail_closed(self, closed: bool) -> None:
        """Refuse every caller while ``closed`` is true."""


class RevocationWatch:
    """Long-polls the key directory for revocations and tells a service's guard whom to refuse.

    The guard refuses every caller from the start until the first answer, and again whenever no answer came for
    `STALE_S`: a service that restarts while the directory is away does not know whom it may trust.  A revocation
    is for good: a later answer that leaves it out changes nothing.

    Parameters
    ----------
    channel : Channel
        To the key directory.
    guard : Guard
        Learns the revoked certificates.
    on_change : callable, optional
        Called with whether the list is fresh, at the start and at each change; the service's health depends on it.
    on_revoked : callable, optional
        Told the ids of all revoked participants whenever there are new ones.
    clock : callable
        Monotonic seconds.
    sleep : callable
        Waits the given seconds.
    rest : Rest, optional
        That of a device which checks in: no call is held, and none is made while the device rests.  The list is asked
        for after each rest before anything else.
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
        rest: Rest | None = None,
    ) -> None:
        self._directory: KeyDirectoryAsyncStub = channel.stub(lambda inner: KeyDirectoryStub(inner))
        self._peer = channel.peer
        self._guard = guard
        self._on_change = on_change
        self._on_revoked = on_revoked
        self._clock = clock
        self._sleep = sleep
        self._answered: float | None = None
        self._said: Spoken | None = None
        self._silence = Seldom(_log, clock=clock)
        self._reported: bool | None = None
        self._told: bool | None = None
        self._looks: asyncio.TimerHandle | None = None
        self._rest = rest
        if rest is not None:
            rest.first(self._after_rest)
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
        """Return whether a participant (id, 32 bytes) is revoked."""
        return participant in self.participants

    def require_version(self, lowest: int) -> None:
        """Require that the third party speaks a version of the protocol, by its last answer; nothing before the first.

        Raises
        ------
        UnsupportedVersionError
            It speaks none so high.
        """
        if self._said is not None:
            agree(self._peer, self._said, lowest=lowest)

    async def run(self) -> None:
        """Follow the directory's revocations until cancelled.

        Raises
        ------
        UnsupportedVersionError
            The third party and this process have no version of the protocol in common.
        """
        pause = 0.1
        while True:
            try:
                response = await self._ask()
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error, self._peer)
                if isinstance(failure, UnsupportedVersionError):
                    raise failure from error
                self._silence.warning(
                    "no revocation list",
                    peer=self._peer,
                    error=str(failure),
                    fresh=self.fresh,
                    hint=f"look after {self._peer}; after {STALE_S:g} s without its list nobody is trusted",
                )
                self._report()
                # The pause never sleeps past the moment at which the list becomes too old.
                await self._sleep(min(random.uniform(pause / 2, pause), self._left()))  # noqa: S311 - jitter
                self._report()
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                pause = 0.1
                agree(self._peer, response.protocol)
                self._silence.over("a revocation list again", peer=self._peer)
                self._take(response)
                if self._rest is not None:
                    await self._rest.awake_for(HOLD_S)

    async def _after_rest(self) -> None:
        try:
            response = await self._ask()
        except grpc.aio.AioRpcError:
            # `run` asks again, and says why there is no list.
            self._report(asked=True)
        else:
            agree(self._peer, response.protocol)
            self._take(response)

    async def _ask(self) -> RevocationsResponse:
        hold_s = HOLD_S if self._rest is None else 0.0
        request = RevocationsRequest(held_revision=self.revision, hold_ms=int(hold_s * 1000), protocol=own())
        response: RevocationsResponse = await self._directory.Revocations(
            request, timeout=min(_CALL_S, self._left())
        )
        return response

    def _left(self) -> float:
        """Return the seconds until the list becomes stale; the usual call timeout when it is stale already."""
        if self._answered is None or not self.fresh:
            return _CALL_S
        return max(0.1, self._answered + STALE_S - self._clock())

    def _take(self, response: RevocationsResponse) -> None:
        self._answered, self._said = self._clock(), response.protocol
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
        if self._rest is not None:
            # Nobody looks at the list's age while the device rests.
            if self._looks is not None:
                self._looks.cancel()
            self._looks = asyncio.get_running_loop().call_later(STALE_S, self._report)

    def _report(self, *, asked: bool = False) -> None:
        fresh = self.fresh
        if fresh != self._reported:
            self._reported = fresh
            self._guard.fail_closed(not fresh)
        # A device that rests is as healthy as before it: it has not asked.
        rests = self._rest is not None and not self._rest.awake and not asked
        if self._on_change is not None and fresh != self._told and not (rests and not fresh):
            self._told = fresh
            self._on_change(fresh)
