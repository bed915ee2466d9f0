"""Pass an operator's order to measure the network to parties, which poll for it and bring their results."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from coterie.net.latency import HOLD_S, check_order
from coterie.net.server import current_peer
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import latency_pb2 as wire
from coterie.wire.v1.latency_pb2_grpc import LatencyServicer

__all__ = ["Latency"]

_GONE_S = HOLD_S + 15.0
"""Silence after which a party counts as not attending, seconds."""

_SILENCE_S = 180.0
"""How long a party may take to measure to one service, seconds: on a slow link 16 MiB take long."""

_FETCH_S = 10.0
"""How long an order waits to be fetched, seconds: an attending party polls again at once."""

_SIGN_S = 5.0
"""How often the operator gets an empty message while a party measures, seconds: an idle call may be cut."""

_LONGEST_MS = 3.6e6
_MAX_NAME = 200

PairResults = AsyncIterator[tuple[wire.PairTimes | None, str]]


@dataclass
class _Seat:
    """A party that polls for orders to measure."""

    heard: float
    order: wire.MeasureOrder | None = None
    called: asyncio.Event = field(default_factory=asyncio.Event)
    brought: asyncio.Queue[wire.AttendRequest] = field(default_factory=asyncio.Queue)
    expected: int = 0


class Latency(LatencyServicer):
    """The gRPC servicer that operators and attending parties call.

    Parameters
    ----------
    party : str
        Role and name of the COS.
    own : callable
        Measures the network from the COS itself to each service that it calls.
    stopping : asyncio.Event
        Set when the process stops, which ends all waiting polls.
    hold_s, silence_s : float
        How long an attending party's poll is held, and how long a party may be silent while it measures, seconds.
    """

    def __init__(
        self,
        party: str,
        own: Callable[[wire.MeasureOrder], PairResults],
        stopping: asyncio.Event,
        *,
        hold_s: float = HOLD_S,
        silence_s: float = _SILENCE_S,
    ) -> None:
        self._party = party
        self._own = own
        self._stopping = stopping
        self._hold_s = hold_s
        self._silence_s = silence_s
        self._seats: dict[str, _Seat] = {}
        self._turn = asyncio.Lock()
        self._orders = 0

    async def Attend(self, request: wire.AttendRequest, context: Any) -> wire.AttendResponse:  # noqa: N802
        """Take a party's results; answer once there is an order for it, or the hold is over."""
        party, now = str(current_peer()), time.monotonic()
        _check(request)
        seat = self._seats.get(party)
        if seat is None:
            for name in [name for name, one in self._seats.items() if now - one.heard > 10 * _GONE_S]:
                del self._seats[name]
            seat = self._seats[party] = _Seat(now)
        seat.heard = now
        if request.number and request.number == seat.expected:
            request.pair.source = party
            seat.brought.put_nowait(request)
        if request.more:
            return wire.AttendResponse()
        waits = [asyncio.ensure_future(one.wait()) for one in (seat.called, self._stopping)]
        try:
            await asyncio.wait(waits, timeout=self._hold_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # The caller has gone; if it comes back, it asks again.
            seat.heard = float("-inf")
            raise
        finally:
            for one in waits:
                one.cancel()
        seat.heard = time.monotonic()
        order, seat.order = seat.order, None
        seat.called.clear()
        return wire.AttendResponse(order=order)

    async def Measure(  # noqa: N802
        self, request: wire.MeasureRequest, context: Any
    ) -> AsyncGenerator[wire.MeasureResponse, None]:
        """Let parties measure one after the other, and stream their results."""
        check_order(request.order)
        wanted = set(request.parties)
        attending = {
            name for name, seat in self._seats.items() if time.monotonic() - seat.heard < _GONE_S
        } | {self._party}
        if unknown := wanted - attending:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                f"{len(unknown)} of the parties do not attend",
                field="parties",
                expected="some of " + ", ".join(sorted(attending)[:20]),
            )
        if self._turn.locked():
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_STATE,
                "a measurement is under way, and two would measure each other",
                field="order",
                expected="one at a time",
            )
        async with self._turn:
            for party in sorted(wanted or attending, key=lambda name: (name != self._party, name)):
                order = wire.MeasureOrder()
                order.CopyFrom(request.order)
                results = self._own(order) if party == self._party else self._of(party, order)
                async for pair, without in results:
                    if pair is not None:
                        pair.source = party
                    yield wire.MeasureResponse(pair=pair, party=party, without=without)

    async def _of(self, party: str, order: wire.MeasureOrder) -> PairResults:
        """Give an order to one attending party, and yield its results."""
        seat = self._seats[party]
        self._orders += 1
        order.number = seat.expected = self._orders
        seat.brought = asyncio.Queue()
        seat.order = order
        seat.called.set()
        given = heard = time.monotonic()
        try:
            while True:
                try:
                    async with asyncio.timeout(_SIGN_S):
                        brought = await seat.brought.get()
                except TimeoutError:
                    now = time.monotonic()
                    if seat.order is not None and now - given >= _FETCH_S:
                        yield None, "it does not attend any more"
                        return
                    if now - heard >= self._silence_s:
                        yield None, f"nothing was heard of it for {self._silence_s:g} s"
                        return
                    yield None, ""
                    continue
                heard = time.monotonic()
                measured = brought.HasField("pair") and brought.pair.target
                yield brought.pair if measured else None, brought.declined
                if not brought.more:
                    return
        finally:
            seat.expected, seat.order = 0, None
            seat.called.clear()


def _check(request: wire.AttendRequest) -> None:
    """Check a party's results, which are shown to the operator.

    Raises
    ------
    Refusal
        INVALID_FIELD, TOO_LARGE or NOT_FINITE.
    """
    pair = request.pair
    series = [pair.echo_ms, pair.server_ms, pair.connect_ms, pair.handshake_ms, pair.first_ms]
    series += [one.ms for one in pair.carried]
    texts = (pair.source, pair.target, pair.failure, request.declined)
    if max(map(len, series)) > 1000 or len(pair.carried) > 32 or max(map(len, texts)) > _MAX_NAME:
        raise Refusal(
            ErrorReason.ERROR_REASON_TOO_LARGE,
            "more than a measurement has",
            field="pair",
            expected=f"at most 1000 times in each of at most 32 series, words of at most {_MAX_NAME} characters",
        )
    if not all(math.isfinite(ms) and 0 <= ms <= _LONGEST_MS for one in series for ms in one):
        raise Refusal(
            ErrorReason.ERROR_REASON_NOT_FINITE,
            "a time that is none",
            field="pair",
            expected="milliseconds from 0 to an hour",
        )
    if not all(text.isprintable() for text in texts):
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            "words that cannot be printed",
            field="pair",
            expected="text",
        )
