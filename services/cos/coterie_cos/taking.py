"""How an intake takes contributions: it checks them, adds those that arrive together, and writes senders and sum.

The answer to a sender waits until that is durable.  Everything else of a submission goes to the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
import structlog

from coterie.crypto.authority import PeerIdentity, validate_name
from coterie.errors import CertificateError, ConfigError, CryptoError
from coterie.net.relay import Relay
from coterie.net.server import current_peer
from coterie.secure_sum.registry import taking_half
from coterie.store import contributions
from coterie.store.contributions import Acknowledged, AnotherSentError
from coterie.store.engine import failure
from coterie.store.time_limit import bounded
from coterie.telemetry.accounting import Accounting
from coterie.telemetry.seldom import Seldom
from coterie.wire.chunks import Assembler, split
from coterie.wire.pieces import pieces_of_stream
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import SlotRange
from coterie_cos.holding import PollHolder
from coterie_cos.opened import SENDERS_ONLY, OpenedSum

__all__ = ["SUBMIT_METHOD", "Taking"]

_log = structlog.get_logger("coterie.cos")

SUBMIT_METHOD = "/coterie.v1.Orchestrator/Submit"
"""The call that an intake answers itself, as far as it can."""

_BATCH = 256
"""Most contributions that are written together."""

_BATCH_BYTES = 32 << 20
"""Most bytes of contributions that are written together: some sums keep each of them, and ciphertexts take long to
multiply."""

_APART_S = 0.04
"""Shortest time between two transactions of a sum, seconds: one costs the intake, the database and the coordinator more
than a contribution in it.  Not waited for once a batch is full."""

_SUMS = 8
"""Most sums that an intake remembers."""

_MISSED_S = 0.5
"""Time for which a sum that is not open, and a run that is not there, are not looked up again, seconds."""

_MISSES = 1024
"""Most sums that are remembered as not open."""

_UNTAKEN = 256
_UNTAKEN_BYTES = 16 << 20
"""Most items and bytes of one stream that wait to be durable; the stream is read on when the oldest is."""

_ONWARD = 4
"""Messages that wait to be sent to the coordinator before the sender has to wait."""

T = TypeVar("T")

Place = tuple[str, int]
"""Run and round."""


@dataclass
class _Waiting:
    """A checked contribution whose sender waits for it to be durable."""

    opened: OpenedSum
    """The sum as it was when the contribution was checked."""
    taken: Acknowledged
    payload: bytes
    sha256: bytes
    done: asyncio.Future[bool]
    """Whether it was taken; False when the sum is not open any more."""


@dataclass
class _Item:
    """An item of a stream whose contribution waits to be durable."""

    index: int
    head: wire.SubmitRequest
    """The item's first message, without its chunk."""
    waiting: _Waiting


class Taking:
    """Takes the contributions of one intake.

    Parameters
    ----------
    engine : sqlalchemy.Engine
        The coordinator's database; its connections need not hold the lock.
    relay : Relay
        Hands on what the intake does not take.
    accounting : Accounting
        Counts CPU time by activity.
    holding : PollHolder, optional
        Holds the polls that end submissions; the coordinator holds them where it is absent.
    revoked : callable
        Tells whether a participant is revoked.
    limit_s : float
        Longest time of a transaction, seconds.
    max_uploads, max_payload : int
        Most uploads at once; most bytes of one item.
    """

    def __init__(
        self,
        engine: sa.Engine,
        relay: Relay,
        accounting: Accounting,
        holding: PollHolder | None = None,
        *,
        revoked: Callable[[bytes], bool],
        limit_s: float,
        max_uploads: int,
        max_payload: int,
    ) -> None:
        self._engine = engine
        self._relay = relay
        self._accounting = accounting
        self._holding = holding
        self._revoked = revoked
        self._limit_s = limit_s
        self._uploads = asyncio.Semaphore(max_uploads)
        self._max_payload = max_payload
        self._sums: dict[Place, OpenedSum] = {}
        self._reading: dict[Place, asyncio.Task[OpenedSum | None]] = {}
        self._missed: dict[Place, float] = {}
        self._runs: frozenset[str] = frozenset()
        self._runs_at = -_MISSED_S
        self._waiting: dict[Place, list[_Waiting]] = {}
        self._unsettled: dict[tuple[Place, int], _Waiting] = {}
        self._writing: dict[Place, asyncio.Task[None]] = {}
        # Sums that this process cannot take, as one without gmpy2.
        self._unfit = Seldom(_log)
        # By place, set once a batch is full.
        self._full: dict[Place, asyncio.Event] = {}
        # One thread at a time writes, over a connection that stays.
        self._connection: sa.Connection | None = None
        self._lock = threading.Lock()

    async def submit(self, requests: AsyncIterator[wire.SubmitRequest], context: Any) -> wire.SubmitResponse:
        """Answer `Orchestrator.Submit`: each item is accepted or refused independently of the others."""
        response = wire.SubmitResponse()
        onward = _Onward(self._relay, context)
        peer = current_peer()
        poll: wire.PollRequest | None = None
        # The poll, where the coordinator is to hold it.
        handed: wire.PollRequest | None = None
        taken = _Untaken()
        index = 0
        head: wire.SubmitRequest | None = None
        opened: OpenedSum | None = None
        assembler: Assembler | None = None
        try:
            async with self._uploads:
                async for request in pieces_of_stream(requests):
                    if index == 0 and head is None and request.HasField("poll"):
                        poll = wire.PollRequest.FromString(request.poll.SerializeToString())
                        handed = poll if self._holding is None else None
                        request.ClearField("poll")
                        if not request.HasField("chunk"):
                            # A message of its own, without an item.
                            continue
                    if head is None:
                        head, opened = request, None
                        if request.kind == wire.SubmitKind.SUBMIT_KIND_VECTOR:
                            place = request.round.run_id, request.round.round
                            opened = await self.opened_to(place, str(peer), request.slots)
                        assembler = None if opened is None else Assembler(self._max_payload)
                        if assembler is None:
                            onward.begins(index, handed)
                    if assembler is None:
                        await onward.send(request)
                        complete = request.chunk.last
                    else:
                        assembler.add(request.chunk)
                        request.ClearField("chunk")
                        complete = assembler.complete
                    if complete:
                        if assembler is not None and opened is not None:
                            payload = assembler.payload(head.sha256, optional=True)
                            try:
                                taken.add(_Item(index, head, self.take(peer, opened, head, payload)))
                            except Refusal as refusal:
                                _refuse(response, index, refusal)
                        index, head, assembler = index + 1, None, None
                        while taken.full:
                            await self._settled(taken.oldest(), response, onward, handed)
                if head is not None and assembler is not None:
                    # Raises, because the last item is incomplete.
                    assembler.payload(head.sha256)
            while taken:
                await self._settled(taken.oldest(), response, onward, handed)
            if poll is None and response.accepted and self._holding is not None and opened is not None:
                self._holding.heard(opened.plan.run_id, context)
            if handed is not None or onward.begun:
                answer = await onward.end(handed)
                response.accepted += answer.accepted
                for refused in answer.refused:
                    refused.index = onward.indices[refused.index]
                    response.refused.append(refused)
                if answer.HasField("next"):
                    response.next.CopyFrom(answer.next)
            if poll is not None and self._holding is not None:
                response.next.CopyFrom(await self._holding.polled(poll, context, submitted=True))
        finally:
            await onward.close()
        return response

    async def _settled(
        self, item: _Item, response: wire.SubmitResponse, onward: _Onward, poll: wire.PollRequest | None
    ) -> None:
        """Wait until a contribution is durable; hand it on when it came after its sum was closed."""
        done = item.waiting.done
        # Not awaited itself: the end of one stream would cancel it for others that wait for it.
        await asyncio.wait((done,))
        try:
            counts = done.result()
        except Refusal as refusal:
            _refuse(response, item.index, refusal)
            return
        if counts:
            response.accepted += 1
            return
        # The coordinator knows whether it has it already.
        onward.begins(item.index, poll)
        for chunk in split(item.waiting.payload):
            message = wire.SubmitRequest(chunk=chunk)
            if not chunk.offset:
                message.CopyFrom(item.head)
                message.chunk.CopyFrom(chunk)
            await onward.send(message)

    async def opened_to(self, place: Place, party: str, slots: Sequence[SlotRange]) -> OpenedSum | None:
        """Return a sum as `opened` does, with the members that are asked now.

        A coordinator that has taken over may ask members whom the one before had not asked: a sum that does not ask
        the sender is read again, unless it was read a moment ago.
        """
        found = await self.opened(place)
        if found is None or found.asks(party, slots) or time.monotonic() < found.read_at + _MISSED_S:
            return found
        return await self._read_once(place)

    async def opened(self, place: Place) -> OpenedSum | None:
        """Return a sum that is open to intakes; None when it is not, or is the coordinator's to add."""
        found = self._sums.pop(place, None)
        if found is not None:
            # Used last.
            self._sums[place] = found
            return found
        return None if self._surely_missing(place) else await self._read_once(place)

    async def _read_once(self, place: Place) -> OpenedSum | None:
        reading = self._reading.get(place)
        if reading is None:
            reading = self._reading[place] = asyncio.create_task(self._read(place))
            reading.add_done_callback(lambda _: self._reading.pop(place, None))
        return await asyncio.shield(reading)

    def _surely_missing(self, place: Place) -> bool:
        """Return whether a sum is not open, without a look at the database: any caller can invent one."""
        run_id = place[0]
        try:
            # The coordinator takes no plan of another form, and refuses the item by name.
            validate_name(run_id)
        except CertificateError:
            return True
        now = time.monotonic()
        if run_id not in self._runs and now < self._runs_at + _MISSED_S:
            return True
        return now < self._missed.get(place, now)

    async def _read(self, place: Place) -> OpenedSum | None:
        def read() -> tuple[OpenedSum | None, frozenset[str] | None]:
            with self._lock, self._connected() as connection, connection.begin():
                opened = contributions.read_open(connection, *place, SENDERS_ONLY)
                runs = contributions.read_runs(connection) if opened is None else None
            if opened is None:
                return None, runs
            return OpenedSum(opened, taking_half), None

        try:
            found, runs = await self._in_thread(read)
        except (ConfigError, CryptoError) as error:
            self._unfit.warning(
                "a sum cannot be taken here", run=place[0], error=error.message, hint=error.hint
            )
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "this server cannot take contributions to this sum; its log says why",
                field="round",
                expected="the same again later, or through another server",
            ) from error
        self._sums.pop(place, None)
        if found is not None:
            if len(self._sums) >= _SUMS:
                self._sums.pop(next(iter(self._sums)))
            self._sums[place] = found
            return found
        now = time.monotonic()
        if runs is not None:
            self._runs, self._runs_at = runs, now
        self._missed.pop(place, None)
        if len(self._missed) >= _MISSES:
            self._missed.pop(next(iter(self._missed)))
        self._missed[place] = now + _MISSED_S
        return None

    def take(
        self, peer: PeerIdentity, opened: OpenedSum, head: wire.SubmitRequest, payload: bytes
    ) -> _Waiting:
        """Check a contribution and put it to those that are written next; return it, or the same that waits already.

        Parameters
        ----------
        peer : PeerIdentity
            The sender.
        opened : OpenedSum
            The sum, as `opened` returned it; it may have been closed since.
        head : SubmitRequest
        payload : bytes
            Its SHA-256 is the one that ``head`` declares, if any.

        Raises
        ------
        Refusal
            It does not fit.
        """
        place = head.round.run_id, head.round.round
        with self._accounting.activity("take contributions"):
            sha256 = head.sha256 or hashlib.sha256(payload).digest()
            member = opened.member(str(peer), head.slots)
            key = place, member
            same = self._unsettled.get(key)
            if same is not None and same.sha256 == sha256:
                return same
            if opened.excludes(member, self._revoked):
                raise _no_part(member, place)
            taken = opened.checked(member, payload, sha256)
        waiting = _Waiting(opened, taken, payload, sha256, asyncio.get_running_loop().create_future())
        if same is None:
            self._unsettled[key] = waiting
            waiting.done.add_done_callback(lambda _: self._unsettled.pop(key, None))
        waits = self._waiting.setdefault(place, [])
        waits.append(waiting)
        if place not in self._writing:
            self._full[place] = asyncio.Event()
            self._writing[place] = asyncio.create_task(self._write(place))
        if len(waits) >= _BATCH:
            self._full[place].set()
        return waiting

    async def _write(self, place: Place) -> None:
        """Write the first contribution at once, and those together that arrive within a short time after it."""
        full = self._full[place]
        try:
            while waiting := self._waiting.pop(place, None):
                full.clear()
                next_at = time.monotonic() + _APART_S
                await self._write_some(place, waiting)
                if len(self._waiting.get(place, ())) < _BATCH:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(full.wait(), max(0.0, next_at - time.monotonic()))
        finally:
            # Not when the task is done: what is put to it until then would wait for ever.
            del self._writing[place], self._full[place]

    async def _write_some(self, place: Place, waiting: list[_Waiting]) -> None:
        # Each member once: a contribution that was sent twice is compared with the first of them.
        now: dict[int, _Waiting] = {}
        later: list[_Waiting] = []
        left, plan_hash = _BATCH_BYTES, waiting[0].opened.plan.hash
        for one in waiting:
            if (
                one.taken.member in now
                or len(now) >= _BATCH
                or (now and len(one.payload) > left)
                or one.opened.plan.hash != plan_hash
            ):
                later.append(one)
            else:
                now[one.taken.member] = one
                left -= len(one.payload)
        if later:
            self._waiting[place] = later
        try:
            found = await self._in_thread(lambda: self._written(place, now))
        except Exception as error:
            problems: dict[int, Exception | None] = dict.fromkeys(now, error)
        else:
            if found is None:
                self._sums.pop(place, None)
                # Those that came meanwhile, too: the sum was closed for them as well.
                for one in (*now.values(), *self._waiting.pop(place, ())):
                    _settle(one.done, False)
                return
            problems = found
        for member, one in now.items():
            _settle(one.done, True, problems[member])

    def _written(self, place: Place, now: Mapping[int, _Waiting]) -> dict[int, Exception | None] | None:
        # Any of them: they have the same plan.
        opened = next(iter(now.values())).opened

        def agreed(one: Acknowledged, notes: Mapping[int, bytes]) -> Exception | None:
            waiting = now[one.member]
            try:
                waiting.opened.checked(one.member, waiting.payload, waiting.sha256, notes)
            except Refusal as refusal:
                return refusal
            return None

        taken = [one.taken for one in now.values()]
        # Before the transaction, which keeps the sum from being closed: ciphertexts take long to multiply.
        ready = opened.summed(taken)
        with self._lock, self._connected() as connection, connection.begin():
            found = contributions.take(
                connection,
                *place,
                taken,
                agreed if opened.half.compares_notes else None,
                lambda fresh: ready if len(fresh) == len(taken) else opened.summed(fresh),
                opened.plan.hash,
            )
        if found is None:
            return None
        return {
            member: _conflict(member, place) if isinstance(problem, AnotherSentError) else problem
            for member, problem in found.items()
        }

    def _connected(self) -> _Connected:
        return _Connected(self)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except sa.exc.DBAPIError as error:
            raise failure(error) from error

    def close(self) -> None:
        """Close the connection to the database."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None
        self._engine.dispose()


class _Connected:
    """The intake's connection, made anew after a failure; everything within the context has a time limit."""

    def __init__(self, taking: Taking) -> None:
        self._taking = taking

    def __enter__(self) -> sa.Connection:
        taking = self._taking
        if taking._connection is None:
            taking._connection = taking._engine.connect()
        self._bounded = bounded(taking._connection, taking._limit_s)
        self._bounded.__enter__()
        return taking._connection

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._bounded.__exit__(None, None, None)
        taking = self._taking
        if error is not None and taking._connection is not None:
            connection, taking._connection = taking._connection, None
            connection.invalidate()
            connection.close()


class _Untaken:
    """Items of one stream that wait to be durable, oldest first."""

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def full(self) -> bool:
        """Whether the oldest must be settled before the stream is read on."""
        return len(self._items) >= _UNTAKEN or self._bytes >= _UNTAKEN_BYTES

    def add(self, item: _Item) -> None:
        self._items.append(item)
        self._bytes += len(item.waiting.payload)

    def oldest(self) -> _Item:
        """Remove and return the oldest item."""
        item = self._items.popleft()
        self._bytes -= len(item.waiting.payload)
        return item


class _Onward:
    """A submission to the coordinator of what an intake does not take; begun by the first such item."""

    def __init__(self, relay: Relay, context: Any) -> None:
        self._relay = relay
        self._context = context
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(_ONWARD)
        self._call: asyncio.Task[bytes] | None = None
        self.indices: list[int] = []
        """Position in the sender's stream of each item that was handed on."""

    @property
    def begun(self) -> bool:
        return self._call is not None

    def begins(self, index: int, poll: wire.PollRequest | None) -> None:
        """Note that an item is handed on."""
        self.indices.append(index)
        self._begin(poll)

    def _begin(self, poll: wire.PollRequest | None) -> None:
        if self._call is not None:
            return
        if poll is not None:
            # A message of its own, without an item.
            self._queue.put_nowait(wire.SubmitRequest(poll=poll).SerializeToString())
        self._call = asyncio.create_task(self._relay.answer(SUBMIT_METHOD, self._messages(), self._context))

    async def _messages(self) -> AsyncIterator[bytes]:
        while (message := await self._queue.get()) is not None:
            yield message

    async def send(self, request: wire.SubmitRequest) -> None:
        """Send a message of an item; wait while earlier ones are under way."""
        await self._put(request.SerializeToString())

    async def _put(self, message: bytes | None) -> None:
        call = self._call
        if call is None:
            raise AssertionError("an item is handed on before the call begins")
        putting = asyncio.ensure_future(self._queue.put(message))
        await asyncio.wait((putting, call), return_when=asyncio.FIRST_COMPLETED)
        if not putting.done():
            # The call has ended early, by an error.
            putting.cancel()
            call.result()

    async def end(self, poll: wire.PollRequest | None) -> wire.SubmitResponse:
        """Return the coordinator's answer, which with a poll comes when there is something to do."""
        if self._call is None and poll is not None:
            # Nothing but the poll.
            alone = wire.SubmitRequest(poll=poll).SerializeToString()
            return wire.SubmitResponse.FromString(
                await self._relay.answer_one(SUBMIT_METHOD, alone, self._context)
            )
        self._begin(poll)
        await self._put(None)
        if self._call is None:
            raise AssertionError("a call that began has a task")
        return wire.SubmitResponse.FromString(await self._call)

    async def close(self) -> None:
        """End the call, if it is under way still."""
        if self._call is not None and not self._call.done():
            self._call.cancel()
            await asyncio.gather(self._call, return_exceptions=True)


def _settle(done: asyncio.Future[bool], counts: bool, problem: Exception | None = None) -> None:
    if done.done():
        return
    if problem is None:
        done.set_result(counts)
    else:
        done.set_exception(problem)
        # Read here: the stream that waited for it may have ended.
        done.exception()


def _refuse(response: wire.SubmitResponse, index: int, refusal: Refusal) -> None:
    response.refused.append(wire.RefusedItem(index=index, reason=refusal.reason, message=refusal.message))


def _no_part(member: int, place: Place) -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
        f"member {member} takes no part in step submit of round {place[1]}",
        field="slots",
        expected="a member that is not revoked",
    )


def _conflict(member: int, place: Place) -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_CONFLICT,
        f"member {member} sent another message for step submit of round {place[1]}",
        field="chunk.data",
        expected="the same bytes again, or nothing",
    )
