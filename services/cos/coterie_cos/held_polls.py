"""The coordinator's side of held polls: an intake holds those of its callers, and asks about all of them in one call.

Each poll is answered as one that a party makes itself: by the certificate of that party, which the intake shows once,
and by the run.  An intake whose session has ended holds its polls in another one.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import structlog

from coterie.crypto.authority import PeerIdentity
from coterie.net.server import Guard
from coterie.net.status import details_of, refusal_of
from coterie.wire.chunks import CHUNK_BYTES, split
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import intakes_pb2 as wire
from coterie.wire.v1.intakes_pb2_grpc import IntakesServicer
from coterie.wire.v1.orchestrator_pb2 import FetchResponse
from coterie_cos.orchestrator import Orchestrator

__all__ = ["MOST_CALLERS", "HeldPolls"]

_log = structlog.get_logger("coterie.cos")

MOST_CALLERS = 1 << 16
"""Most callers of a session."""

_POLL = "/coterie.v1.Orchestrator/Poll"
"""A held poll is allowed to whom this call is."""

_APART_S = 0.02
"""Shortest time between two messages with answers, seconds."""
_TOGETHER = 1000
"""Most answers in a message."""
_MOST_BYTES = 1 << 30
"""Most bytes of answers that wait for an intake to read them."""


class _Session:
    """The polls that one intake holds, from the beginning of its call to the end.

    Parameters
    ----------
    peer : PeerIdentity
        The intake.
    stopping : asyncio.Event
        Set when this process stops.
    most : int
        Most answers that wait to be read.  An intake that reads has no more polls than that.
    """

    def __init__(self, peer: PeerIdentity, stopping: asyncio.Event, most: int) -> None:
        self.name = secrets.token_bytes(16)
        self.peer = peer
        self.callers: dict[int, bytes] = {}
        self.polls: dict[int, asyncio.Task[None]] = {}
        self._answers: deque[tuple[wire.HeldAnswer, int]] = deque()
        self._bytes = 0
        self._most = most
        # Of the intake's call, which may wait for the intake to read.
        self._following = asyncio.current_task()
        self._news = asyncio.Event()
        self._stopping = stopping
        self._sent_at = -_APART_S

    def answered(self, answer: wire.HeldAnswer) -> None:
        """Send an answer with those that come together with it; end the session of an intake that does not read."""
        size = answer.ByteSize()
        self._answers.append((answer, size))
        self._bytes += size
        self._news.set()
        if (len(self._answers) > self._most or self._bytes > _MOST_BYTES) and self._following is not None:
            _log.warning(
                "an intake does not read the answers to its polls: its session ends",
                intake=str(self.peer),
                answers=len(self._answers),
                bytes=self._bytes,
            )
            self._following.cancel()
            self._following = None

    async def together(self) -> wire.FollowResponse | None:
        """Return the answers that there are, once there is one; None when this process stops."""
        waits = [asyncio.ensure_future(one.wait()) for one in (self._news, self._stopping)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        # The first is sent at once; of very many that come one by one, some together.
        await asyncio.sleep(max(0.0, self._sent_at + _APART_S - time.monotonic()))
        self._sent_at = time.monotonic()
        if not self._answers:
            return None
        message, size = wire.FollowResponse(), 0
        while self._answers and len(message.answers) < _TOGETHER:
            answer, of_one = self._answers[0]
            size += of_one
            if message.answers and size > CHUNK_BYTES:
                break
            message.answers.append(answer)
            self._answers.popleft()
            self._bytes -= of_one
        if not self._answers:
            self._news.clear()
        return message

    def close(self) -> None:
        """Hold no poll any more."""
        for task in self.polls.values():
            task.cancel()


class HeldPolls(IntakesServicer):
    """The gRPC servicer that intakes call about the polls that they hold.

    Parameters
    ----------
    orchestrator : Orchestrator
        Answers each poll.
    guard : Guard
        Knows intakes, and judges callers by their certificates.
    stopping : asyncio.Event
        Set when this process stops.
    """

    def __init__(self, orchestrator: Orchestrator, guard: Guard, stopping: asyncio.Event) -> None:
        self._orchestrator = orchestrator
        self._guard = guard
        self._stopping = stopping
        self._sessions: dict[bytes, _Session] = {}
        self._hearing: set[asyncio.Task[None]] = set()

    async def Follow(  # noqa: N802 - the contract's name
        self, request: wire.FollowRequest, context: Any
    ) -> AsyncIterator[wire.FollowResponse]:
        """Send the answers to an intake's polls until the call ends."""
        session = _Session(self._guard.require_intake(context), self._stopping, self._guard.limits.calls)
        self._sessions[session.name] = session
        try:
            yield wire.FollowResponse(session=session.name)
            while (answers := await session.together()) is not None:
                yield answers
        finally:
            del self._sessions[session.name]
            session.close()

    async def Hold(self, request: wire.HoldRequest, context: Any) -> wire.HoldResponse:  # noqa: N802
        """Take polls that an intake holds from now on, and forget those whose callers are gone."""
        session = self._session(request.session, self._guard.require_intake(context))
        for number in request.ended:
            if (task := session.polls.pop(number, None)) is not None:
                task.cancel()
        callers = len(session.callers.keys() | {caller.number for caller in request.callers})
        polls = len(session.polls) + len(request.polls)
        if callers > MOST_CALLERS or polls > self._guard.limits.calls:
            raise Refusal(
                ErrorReason.ERROR_REASON_OVERLOADED,
                f"{callers} callers and {polls} polls of one intake",
                field="limits.calls",
                expected=f"at most {MOST_CALLERS} and {self._guard.limits.calls}",
                retry_after_s=1.0,
            )
        for caller in request.callers:
            session.callers[caller.number] = caller.certificate
        for poll in request.polls:
            if poll.number not in session.polls:
                session.polls[poll.number] = asyncio.create_task(self._hold(session, poll))
        if request.heard:
            hearing = asyncio.create_task(self._hear(session, list(request.heard)))
            self._hearing.add(hearing)
            hearing.add_done_callback(self._hearing.discard)
        return wire.HoldResponse()

    def _session(self, name: bytes, peer: PeerIdentity) -> _Session:
        session = self._sessions.get(name)
        if session is None or session.peer != peer:
            raise Refusal(
                ErrorReason.ERROR_REASON_STALE,
                "there is no such session of this intake",
                field="session",
                expected="the session of a `Follow` that has not ended",
            )
        return session

    def _caller(self, session: _Session, number: int) -> PeerIdentity:
        certificate = session.callers.get(number)
        if certificate is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"no certificate of caller {number} came",
                field="caller",
                expected="a caller that the session named",
            )
        return self._guard.vouched(certificate)

    async def _hold(self, session: _Session, poll: wire.HeldPoll) -> None:
        answer = wire.HeldAnswer(number=poll.number)
        try:
            peer = self._caller(session, poll.caller)
            with self._guard.speaking_for(peer, _POLL):
                held = await self._orchestrator.held(poll.poll, submitted=poll.submitted)
            answer.answer.CopyFrom(held)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal is None:
                _log.error("rpc failed", rpc="Poll", error=type(error).__name__, exc_info=self._guard.debug)
                answer.failed = True
            else:
                answer.refused = details_of(refusal)
        session.polls.pop(poll.number, None)
        session.answered(answer)

    async def _hear(self, session: _Session, heard: Sequence[wire.HeardCaller]) -> None:
        for one in heard:
            try:
                with self._guard.speaking_for(self._caller(session, one.caller), _POLL):
                    await self._orchestrator.heard(one.run_id)
            except Exception as error:
                # Its next call is refused by name.
                if refusal_of(error) is None:
                    _log.error(
                        "a party was not heard", error=type(error).__name__, exc_info=self._guard.debug
                    )

    async def Shared(  # noqa: N802
        self, request: wire.SharedRequest, context: Any
    ) -> AsyncIterator[FetchResponse]:
        """Stream a payload that answers name by its hash."""
        self._guard.require_intake(context)
        payload = self._orchestrator.shared(request.run_id, request.kind, request.sha256)
        head = FetchResponse(sha256=request.sha256, total_bytes=len(payload))
        for chunk in split(payload):
            head.chunk.CopyFrom(chunk)
            yield head
            head = FetchResponse()
