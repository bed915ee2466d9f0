"""Carry the exchanges of all owners of a process to the COS over one stream, several in a message.

While one message is on its way, the exchanges of other owners gather for the next.  The owners that it answers compute
their next gradients before that one is sent, so that all owners of a process soon share every message, and with it the
cost of a message and of a transaction.  An owner alone waits for nobody.

A stream lasts as long as there are exchanges, but at most for `_LASTS_S`.  When it breaks, each owner repeats the
exchange that it has no answer to, over the next stream; the COS knows a repeated one by its number.  A COS of a release
that has no such stream is called for each exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

import grpc
import structlog

from coterie.errors import PeerError
from coterie.parties.party import Party
from coterie.systems.drift.published_run import MOST_EXCHANGED, MOST_EXCHANGES, exchanged
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire

__all__ = ["Exchanges"]

_log = structlog.get_logger("coterie.data_owner")

_LASTS_S = 20.0
"""Longest time in which a stream takes exchanges, seconds: less than a server lets a caller be slow for."""
_LULL_S = 0.5
"""Time without an exchange after which a stream is ended, seconds."""
_ANSWERED_S = 30.0
"""Longest wait for the answers that are missing when a stream takes no more exchanges, seconds."""
_BY_CALL_S = 60.0
"""Time after which a COS that had no such stream is asked for one again, seconds: it may have been upgraded."""


class _Waiting(NamedTuple):
    """An exchange without an answer yet."""

    request: wire.ExchangeRequest
    answer: asyncio.Future[wire.ExchangeResponse]


class Exchanges:
    """Makes exchanges with the COS for the owners of a process; used by each owner's `Trainer`.

    Parameters
    ----------
    party : Party
        To the COS.
    """

    def __init__(self, party: Party) -> None:
        self._party = party
        self._waiting: deque[_Waiting] = deque()
        self._sent: deque[list[_Waiting]] = deque()
        # Set when there is something to send: an exchange waits, and no message is on its way.
        self._ready = asyncio.Event()
        self._stream: asyncio.Task[None] | None = None
        # Marks the stream that may take exchanges: gRPC lets the messages of one that broke wait on.
        self._open: object | None = None
        self._by_call_until = 0.0

    async def exchange(self, request: wire.ExchangeRequest) -> wire.ExchangeResponse:
        """Make one exchange, repeated until it is answered.

        Raises
        ------
        Refusal
            When the COS refuses it.
        PeerError
            When the COS cannot be reached for long.
        """
        return await self._party.call(lambda: self._once(request))

    async def close(self) -> None:
        """End the stream; exchanges without an answer are cancelled."""
        stream = self._stream
        if stream is not None:
            stream.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stream

    async def _once(self, request: wire.ExchangeRequest) -> wire.ExchangeResponse:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._by_call_until:
            answer: asyncio.Future[wire.ExchangeResponse] = loop.create_future()
            self._waiting.append(_Waiting(request, answer))
            self._look()
            if self._stream is None:
                self._stream = asyncio.create_task(self._carry())
            try:
                return await answer
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
            if loop.time() >= self._by_call_until:
                self._by_call_until = loop.time() + _BY_CALL_S
                _log.info("the COS takes one exchange a call; it is of an older release")
        response: wire.ExchangeResponse = await self._party.stub.Exchange(request)
        return response

    def _look(self) -> None:
        if self._waiting and not self._sent:
            self._ready.set()

    async def _carry(self) -> None:
        """Carry exchanges over streams until none waits; fail those without an answer when a stream breaks."""
        try:
            while True:
                await self._over_one_stream()
                if not self._waiting:
                    break
        except Exception as error:
            self._give_up(error)
        finally:
            self._stream = None
            self._give_up(None)

    async def _over_one_stream(self) -> None:
        self._open = mine = object()
        try:
            await self._answers(
                self._party.stub.ExchangeMany(self._messages(mine), timeout=_LASTS_S + _ANSWERED_S)
            )
        finally:
            self._open = None

    async def _answers(self, responses: AsyncIterator[wire.ExchangeManyResponse]) -> None:
        async for response in responses:
            if not self._sent or len(response.answers) != len(self._sent[0]):
                raise PeerError(f"{self._party.channel.peer} answered other exchanges than it was sent")
            together = self._sent.popleft()
            refused = {one.index: one for one in response.refused}
            for index, (one, answered) in enumerate(zip(together, response.answers, strict=True)):
                # An owner that was stopped meanwhile has cancelled its exchange.
                if one.answer.done():
                    continue
                if index in refused:
                    why = refused[index]
                    one.answer.set_exception(Refusal(why.reason, why.message, field="exchanges"))
                else:
                    one.answer.set_result(answered)
            # After the answers: tasks run in the order in which they are woken, so owners ask again before the next
            # message is made.
            self._look()
        if self._sent:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, nothing, nothing, details="the stream ended before its answers"
            )

    async def _messages(self, mine: object) -> AsyncIterator[wire.ExchangeManyRequest]:
        loop = asyncio.get_running_loop()
        until = loop.time() + _LASTS_S
        while (left := until - loop.time()) > 0:
            try:
                async with asyncio.timeout(min(left, _LULL_S)):
                    await self._ready.wait()
            except TimeoutError:
                if self._sent and self._open is mine:
                    continue
                return
            if self._open is not mine:
                # What is ready is for the next stream.
                return
            self._ready.clear()
            together = self._next()
            if together:
                self._sent.append(together)
                yield wire.ExchangeManyRequest(exchanges=[one.request for one in together])

    def _next(self) -> list[_Waiting]:
        """Return the exchanges of the next message, and take them from those that wait."""
        together: list[_Waiting] = []
        size, dim = 0, self._party.plan.dim
        while self._waiting and len(together) < MOST_EXCHANGES:
            one = self._waiting[0]
            if one.answer.done():
                self._waiting.popleft()
                continue
            size += exchanged([one.request], dim)
            if together and size > MOST_EXCHANGED:
                break
            together.append(self._waiting.popleft())
        return together

    def _give_up(self, why: Exception | None) -> None:
        """End all exchanges without an answer: by an error, which each caller may retry, or by cancelling them."""
        left = [one for together in self._sent for one in together] + list(self._waiting)
        self._sent.clear()
        self._waiting.clear()
        self._ready.clear()
        for one in left:
            if one.answer.done():
                continue
            if why is None:
                one.answer.cancel()
            else:
                one.answer.set_exception(why)
