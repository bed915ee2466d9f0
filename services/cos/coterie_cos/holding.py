"""How an intake holds polls: it asks the coordinator about all of them in one call, and answers each caller itself.

An answer is always the coordinator's, and the party's own.  Only the bytes that many parties are told alike, plan,
model and open items, are put in here: by the hash that the coordinator names in the answer, so that they are no others.
An answer of a session that has ended is not given any more: its poll is asked about again, in the next session.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import grpc
import structlog

from coterie.crypto.authority import validate_name
from coterie.errors import CertificateError, CoterieError, PeerError
from coterie.net.channel import Channel
from coterie.net.relay import Relay
from coterie.net.server import certificate_of, current_peer
from coterie.net.status import from_rpc_error, refusal_in
from coterie.net.vouching import claim
from coterie.wire.chunks import CHUNK_BYTES, Assembler, split
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import intakes_pb2
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_cos.held_polls import MOST_CALLERS
from coterie_cos.kept_payloads import KeptPayloads, Named
from coterie_cos.pause import PAUSE

__all__ = ["PollHolder"]

_log = structlog.get_logger("coterie.cos")

_POLL = "/coterie.v1.Orchestrator/Poll"
_FETCH = "/coterie.v1.Orchestrator/Fetch"
_FOLLOW = "/coterie.v1.Intakes/Follow"
_HOLD = "/coterie.v1.Intakes/Hold"
_SHARED = "/coterie.v1.Intakes/Shared"

_SESSION_S = 24 * 3600.0
"""Longest session, seconds."""
_ANSWER_S = 10.0
"""Longest time of a call about polls, seconds."""
_FETCH_S = 120.0
_MOST_BYTES = 1 << 30
"""Largest payload, as parties take it, bytes."""
_AWAY_S = 5.0
"""Time for which polls wait for a coordinator that is away, seconds: a standby serves within that."""
_LATE_S = 5.0
"""Time beyond its hold after which a poll counts as not answered, seconds."""
_PAUSE_S = 0.2
_HEARD_S = 1.0
"""Time between two reports of parties that are alive, seconds."""
_HOLD_MS = 20_000
_BATCH = 500
"""Most polls in a message."""

_ALIKE = (
    wire.FetchKind.FETCH_KIND_SUM_PLAN,
    wire.FetchKind.FETCH_KIND_OPEN_ITEMS,
    wire.FetchKind.FETCH_KIND_MODEL,
)
"""Payloads of a round that are the same for many parties."""
_FETCHED = (wire.FetchKind.FETCH_KIND_SUM_PLAN, wire.FetchKind.FETCH_KIND_MODEL)
"""Those that a party asks for by the number of the round or version."""

_PASSED = (
    wire.FetchKind.FETCH_KIND_POPULATION,
    wire.FetchKind.FETCH_KIND_CATALOGUE,
    wire.FetchKind.FETCH_KIND_ROSTER,
)
"""Payloads that parties fetch alike, and that no answer names: the coordinator says at each fetch which are the present
ones."""
_VERSIONS = 4
"""Most versions that a fetch follows while others bring them."""

_ALIKE_MOST = 64
"""Most sets of payloads of which parties were told alike that a session keeps."""
_MADE_MOST = 8
"""Most forms that are kept of what several answers name alike: callers want, and hold, much the same."""
_MOST_CERTIFICATES = 20_000
"""Most callers whose certificates are kept."""

_Told = dict[tuple[int, int], tuple[bytes, int]]
"""Hash and version of the payloads that a party was told of, by kind and version asked for."""


@dataclass(eq=False)
class _Session:
    """A call in which the coordinator answers."""

    name: bytes
    callers: dict[bytes, int] = field(default_factory=dict)
    """Number of each caller that the coordinator knows, by certificate."""
    told: dict[tuple[str, str], _Told] = field(default_factory=dict)
    """What parties were told of last, by run and party."""
    alike: dict[tuple[Any, ...], _Told] = field(default_factory=dict)
    """The same for all who were told the same, which are very many."""
    answered: dict[tuple[str, str], float] = field(default_factory=dict)
    """When the coordinator last answered a party, by run and party, ``time.monotonic`` seconds: it counts as heard
    then."""
    over: bool = False

    def note(self, run_id: str, party: str, told: _Told) -> None:
        """Note what a party was told of."""
        if len(self.alike) > _ALIKE_MOST:
            self.alike.clear()
        self.told[run_id, party] = self.alike.setdefault(tuple(told.items()), told)


@dataclass(eq=False)
class _Alike:
    """What several answers name alike, and the bytes of it that were made for some of them."""

    attached: Sequence[wire.Attachment]
    told: _Told
    made: dict[tuple[Any, ...], bytes] = field(default_factory=dict)
    """Part of an answer, serialised, by what a caller wants and holds."""


_NOTHING = _Alike((), {})


class _Answer(NamedTuple):
    """An answer of the coordinator."""

    session: _Session
    held: intakes_pb2.HeldAnswer
    alike: _Alike


@dataclass(eq=False)
class _Poll:
    """A poll that is held."""

    request: wire.PollRequest
    certificate: bytes
    submitted: bool
    until: float
    """When its hold is over, ``time.monotonic`` seconds."""
    done: asyncio.Future[_Answer]


class PollHolder:
    """Holds the polls of one intake's callers.

    Parameters
    ----------
    line : Channel
        A connection to the coordinator.
    relay : Relay
        Hands on the calls that are not answered here.
    """

    def __init__(self, line: Channel, relay: Relay) -> None:
        self._follow = line.pass_on(_FOLLOW)
        self._hold = line.pass_one_on(_HOLD)
        self._fetch_shared = line.pass_on(_SHARED)
        self._relay = relay
        self._kept = KeptPayloads(self._shared)
        # One caller at a time brings a payload of a run and a kind; forgotten once nobody waits.
        self._bringing: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()
        self._session: _Session | None = None
        # Whether there has been no coordinator for too long to wait for one.
        self._gave_up = True
        self._numbers = itertools.count(1)
        self._polls: dict[int, _Poll] = {}
        # Of the present session: polls that are to be asked about, and those that the coordinator is to forget.
        self._asking: dict[int, _Poll] = {}
        self._ended: list[int] = []
        self._heard: dict[tuple[bytes, str], None] = {}
        # Certificates (DER) by fingerprint: to make one of a call's context costs as much as the rest of a poll.
        self._certificates: dict[bytes, bytes] = {}
        self._wake = asyncio.Event()
        self._giving_up: asyncio.TimerHandle | None = None

    # --- callers -----------------------------------------------------------------------------------------------

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the handlers of the calls that are answered here, by full method name."""
        return {
            _POLL: grpc.unary_unary_rpc_method_handler(
                self.polled,
                request_deserializer=wire.PollRequest.FromString,
                response_serializer=wire.PollResponse.SerializeToString,
            ),
            _FETCH: grpc.unary_stream_rpc_method_handler(
                self._fetched, request_deserializer=wire.FetchRequest.FromString
            ),
        }

    async def polled(
        self, request: wire.PollRequest, context: Any, *, submitted: bool = False
    ) -> wire.PollResponse:
        """Answer a poll once there is something else to do than before, or the hold is over.

        Parameters
        ----------
        request : PollRequest
        context : ServicerContext
            Of the call, which shows the caller's certificate.
        submitted : bool
            Whether the poll ends a submission, whose items are durable.

        Raises
        ------
        Refusal
            As the coordinator refuses; NOT_READY while there is none.
        """
        _check_name(request.run_id)
        asked = wire.PollRequest()
        asked.CopyFrom(request)
        # Polls of many callers go on in one message, which the coordinator refuses as a whole where it is too long.
        asked.DiscardUnknownFields()
        # Which bytes the caller has already is seen here.
        asked.ClearField("held_sha256")
        asked.ClearField("round")
        briefed = wire.FetchKind.FETCH_KIND_BRIEFINGS in request.attach
        del asked.attach[:]
        asked.attach.extend((*_ALIKE, *([wire.FetchKind.FETCH_KIND_BRIEFINGS] if briefed else [])))
        until = time.monotonic() + min(request.hold_ms, _HOLD_MS) / 1e3
        certificate = self._certificate(context)
        while True:
            poll = _Poll(asked, certificate, submitted, until, asyncio.get_running_loop().create_future())
            answer = await self._answered(poll)
            session, response = answer.session, await self._whole(answer, request)
            # Not of one that was refused: any caller can invent runs.
            session.answered[request.run_id, str(current_peer())] = time.monotonic()
            if not session.over:
                return response

    async def _answered(self, poll: _Poll) -> _Answer:
        number = next(self._numbers)
        self._polls[number] = self._asking[number] = poll
        self._wake.set()
        try:
            if self._gave_up:
                raise _away()
            async with asyncio.timeout(poll.until + _LATE_S - time.monotonic()):
                return await poll.done
        except TimeoutError:
            raise _away() from None
        finally:
            del self._polls[number]
            # Cancelled: the caller is gone, or was refused.
            unanswered = poll.done.cancelled() or not poll.done.done()
            if self._asking.pop(number, None) is None and unanswered:
                self._ended.append(number)
                self._wake.set()

    async def _whole(self, answer: _Answer, request: wire.PollRequest) -> wire.PollResponse:
        """Return the answer with the bytes attached that the caller asked for and that fit, as a coordinator does."""
        session, held, alike = answer
        if held.refused:
            raise refusal_in(held.refused) or PeerError("the coordinator refused a poll without a reason")
        if held.failed:
            raise PeerError("the coordinator failed at a poll, which its log names")
        response = held.answer
        if alike is not _NOTHING:
            # Apart from the message of very many answers, whose memory is freed as a whole.
            response = wire.PollResponse()
            response.CopyFrom(held.answer)
            wanted: frozenset[int] = frozenset(request.attach)
            if any(
                task.kind == wire.TaskKind.TASK_KIND_ROUND and task.round.round == request.round
                for task in response.tasks
            ):
                wanted = frozenset()
            if wanted:
                response.MergeFromString(await self._made(alike, request, wanted))
            session.note(request.run_id, str(current_peer()), alike.told)
        return response

    async def _made(self, alike: _Alike, request: wire.PollRequest, wanted: frozenset[int]) -> bytes:
        """Return a part of an answer, serialised: those payloads that the caller wants, and that fit."""
        key = request.run_id, wanted, frozenset(request.held_sha256)
        found = alike.made.get(key)
        if found is not None:
            return found
        part, left, complete = wire.PollResponse(), CHUNK_BYTES, True
        for one in alike.attached:
            kind, length, sha256 = one.request.kind, one.response.total_bytes, one.response.sha256
            if kind not in wanted:
                continue
            if sha256 in request.held_sha256:
                whole = part.attached.add(request=one.request, response=one.response)
                whole.response.unchanged = True
                whole.response.ClearField("total_bytes")
                continue
            if length > left:
                continue
            payload = await self._kept.payload(Named(request.run_id, kind, sha256))
            if payload is None:
                complete = False
                continue
            left -= length
            whole = part.attached.add(request=one.request, response=one.response)
            whole.response.chunk.data, whole.response.chunk.last = payload, True
            if kind == wire.FetchKind.FETCH_KIND_SUM_PLAN:
                # No caller has use for it.
                whole.response.ClearField("sha256")
        found = part.SerializeToString()
        if complete:
            if len(alike.made) >= _MADE_MOST:
                alike.made.clear()
            alike.made[key] = found
        return found

    async def _fetched(self, request: wire.FetchRequest, context: Any) -> AsyncIterator[bytes]:
        """Stream a payload that is kept here, and that the caller was told of or all fetch; hand other fetches on."""
        if request.kind in _PASSED and not (request.version or request.first):
            brought = await self._brought(request, context)
            if brought is not None:
                for answer in _answers(*brought, request.held_sha256):
                    yield answer
                return
        session = self._session
        told = None
        if session is not None and request.kind in _FETCHED and request.version:
            party = session.told.get((request.run_id, str(current_peer())), {})
            told = party.get((request.kind, request.version))
        payload = (
            None if told is None else await self._kept.payload(Named(request.run_id, request.kind, told[0]))
        )
        if told is None or payload is None or session is None or session.over:
            async for answer in self._relay.call(_FETCH, _alone(request.SerializeToString()), context):
                yield answer
            return
        self.heard(request.run_id, context)
        sha256, version = told
        head = wire.FetchResponse(sha256=sha256, version=version, total_bytes=len(payload))
        for answer in _answers(head, payload, request.held_sha256):
            yield answer

    async def _brought(
        self, request: wire.FetchRequest, context: Any
    ) -> tuple[wire.FetchResponse, bytes] | None:
        """Return the head and the bytes of a payload, which the coordinator gives to this caller now.

        The coordinator judges each fetch.  It sends the whole only when that is not kept here, and then to one caller,
        for whom others wait; of a change each caller that asks meanwhile is sent the first piece.  None when it is
        another version each time.
        """
        key = request.run_id, request.kind
        for _ in range(_VERSIONS):
            known = self._kept.newest(*key)
            if known is not None:
                head = await self._asked(request, context, known[0].sha256)
                if head is not None:
                    return head, known[1]
            turn = self._bringing.setdefault(key, asyncio.Lock())
            async with turn:
                newest = self._kept.newest(*key)
                if (newest and newest[0]) == (known and known[0]):
                    return await self._whole_of(request, context)
        return None

    async def _asked(
        self, request: wire.FetchRequest, context: Any, sha256: bytes
    ) -> wire.FetchResponse | None:
        """Return what the coordinator says of a payload that has this hash; None when it has another one now."""
        asked = wire.FetchRequest(run_id=request.run_id, kind=request.kind, held_sha256=sha256)
        answers = self._relay.call(_FETCH, _alone(asked.SerializeToString()), context)
        async with contextlib.aclosing(answers):
            async for data in answers:
                head = wire.FetchResponse.FromString(data)
                return head if head.unchanged and head.sha256 == sha256 else None
        return None

    async def _whole_of(
        self, request: wire.FetchRequest, context: Any
    ) -> tuple[wire.FetchResponse, bytes] | None:
        """Fetch a payload whole, and keep it; None when the coordinator sends nothing."""
        asked = wire.FetchRequest(run_id=request.run_id, kind=request.kind)
        assembler, head = Assembler(_MOST_BYTES), None
        answers = self._relay.call(_FETCH, _alone(asked.SerializeToString()), context)
        async with contextlib.aclosing(answers):
            async for data in answers:
                answer = wire.FetchResponse.FromString(data)
                head = head or answer
                assembler.add(answer.chunk)
        if head is None:
            return None
        payload = assembler.payload(head.sha256)
        self._kept.keep(Named(request.run_id, request.kind, head.sha256), payload)
        return head, payload

    def heard(self, run_id: str, context: Any) -> None:
        """Have the coordinator know that a caller is alive, within about a second; it knows of one it just answered."""
        session = self._session
        if session is not None:
            answered = session.answered.get((run_id, str(current_peer())))
            if answered is not None and time.monotonic() < answered + _HEARD_S:
                return
        self._heard[self._certificate(context), run_id] = None

    def _certificate(self, context: Any) -> bytes:
        """Return the certificate (DER) of a call's caller."""
        fingerprint = current_peer().fingerprint
        found = self._certificates.get(fingerprint)
        if found is None:
            if len(self._certificates) >= _MOST_CERTIFICATES:
                self._certificates.clear()
            found = ssl.PEM_cert_to_DER_cert(certificate_of(context).decode())
            self._certificates[fingerprint] = found
        return found

    # --- the coordinator ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ask the coordinator about polls, in one session after the other, without end."""
        while True:
            try:
                await self._one_session()
            except (grpc.aio.AioRpcError, CoterieError) as error:
                if not isinstance(error, CoterieError):
                    error = from_rpc_error(error, "the coordinator")
                _log.info("polls wait for the coordinator", error=str(error))
            finally:
                self._lost()
            await asyncio.sleep(_PAUSE_S)

    def _lost(self) -> None:
        if self._session is not None:
            self._session.over = True
            self._session = None
            self._giving_up = asyncio.get_running_loop().call_later(_AWAY_S, self._give_up)

    def _give_up(self) -> None:
        """Refuse what has waited for a coordinator since the last one was lost: another intake may have one."""
        if self._session is None:
            self._gave_up = True
            for poll in self._polls.values():
                if not poll.done.done():
                    poll.done.set_exception(_away())

    async def _one_session(self) -> None:
        answers = self._follow(
            _alone(intakes_pb2.FollowRequest().SerializeToString()), timeout=_SESSION_S, metadata=claim()
        )
        asking: asyncio.Task[None] | None = None
        reading = asyncio.ensure_future(anext(answers, None))
        try:
            while True:
                await asyncio.wait(
                    [one for one in (reading, asking) if one], return_when=asyncio.FIRST_COMPLETED
                )
                if asking is not None and asking.done():
                    asking.result()
                if not reading.done():
                    continue
                data = reading.result()
                if data is None:
                    return
                message = intakes_pb2.FollowResponse.FromString(data)
                if message.session:
                    session = self._session = _Session(message.session)
                    self._gave_up = False
                    if self._giving_up is not None:
                        self._giving_up.cancel()
                    # Those of the session before, too.
                    self._asking, self._ended = dict(self._polls), []
                    asking = asyncio.create_task(self._ask(session))
                alike = [_NOTHING, *map(_alike, message.alike)]
                for answer in message.answers:
                    poll = self._polls.get(answer.number)
                    if poll is not None and not poll.done.done():
                        poll.done.set_result(_Answer(session, answer, alike[answer.alike]))
                reading = asyncio.ensure_future(anext(answers, None))
        finally:
            for one in (reading, asking):
                if one is not None:
                    one.cancel()
            await asyncio.gather(*(one for one in (reading, asking) if one), return_exceptions=True)
            await answers.aclose()

    async def _ask(self, session: _Session) -> None:
        """Tell the coordinator which polls are held, as many at once as there are; later ones are told next."""
        reported, not_before = time.monotonic(), 0.0
        while True:
            if not (self._asking or self._ended):
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _HEARD_S)
            # The first is told at once; of very many that come one by one, some together.
            await asyncio.sleep(max(0.0, not_before - time.monotonic()))
            now = time.monotonic()
            not_before = now + PAUSE.after(len(self._asking))
            request = intakes_pb2.HoldRequest(session=session.name, ended=self._ended)
            self._ended = []
            for number in list(itertools.islice(self._asking, _BATCH)):
                poll = self._asking.pop(number)
                poll.request.hold_ms = max(0, int((poll.until - now) * 1e3))
                caller = self._number(session, poll.certificate, request)
                request.polls.add(number=number, caller=caller, poll=poll.request, submitted=poll.submitted)
            if now - reported >= _HEARD_S:
                reported = now
                for certificate, run_id in list(itertools.islice(self._heard, _BATCH)):
                    del self._heard[certificate, run_id]
                    caller = self._number(session, certificate, request)
                    request.heard.add(caller=caller, run_id=run_id)
            if request.polls or request.ended or request.heard:
                await self._hold(request.SerializeToString(), timeout=_ANSWER_S, metadata=claim())

    @staticmethod
    def _number(session: _Session, certificate: bytes, request: intakes_pb2.HoldRequest) -> int:
        """Return a caller's number in the session; name it to the coordinator, the first time."""
        number = session.callers.get(certificate)
        if number is None:
            if len(session.callers) >= MOST_CALLERS:
                raise PeerError("more callers than a session takes: another one begins")
            number = session.callers[certificate] = len(session.callers) + 1
            request.callers.add(number=number, certificate=certificate)
        return number

    async def _shared(self, name: Named) -> bytes:
        request = intakes_pb2.SharedRequest(run_id=name.run_id, kind=name.kind, sha256=name.sha256)
        assembler = Assembler(_MOST_BYTES)
        answers = self._fetch_shared(_alone(request.SerializeToString()), timeout=_FETCH_S, metadata=claim())
        try:
            async for data in answers:
                assembler.add(wire.FetchResponse.FromString(data).chunk)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "the coordinator") from error
        return assembler.payload(name.sha256)


def _check_name(run_id: str) -> None:
    """Refuse a run that has no name of a run, as the coordinator does: any caller can invent one, however long."""
    try:
        validate_name(run_id)
    except CertificateError as error:
        raise Refusal(
            ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
            "no such run",
            field="run_id",
            expected="a run that the operator has started",
        ) from error


def _away() -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_NOT_READY,
        "the coordinator of this server does not answer now",
        field="coordinator",
        expected="the same call again in a moment",
    )


def _answers(told: wire.FetchResponse, payload: bytes, held_sha256: bytes) -> Iterator[bytes]:
    """Yield the messages that answer a fetch, given the hash and version of a payload."""
    head = wire.FetchResponse(sha256=told.sha256, version=told.version, total_bytes=len(payload))
    if told.sha256 == held_sha256:
        head.unchanged = True
        yield head.SerializeToString()
        return
    for chunk in split(payload):
        head.chunk.CopyFrom(chunk)
        yield head.SerializeToString()
        head = wire.FetchResponse()


def _alike(named: wire.PollResponse) -> _Alike:
    attached = list(named.attached)
    told: _Told = {
        (one.request.kind, one.request.version): (one.response.sha256, one.response.version)
        for one in attached
    }
    return _Alike(attached, told)


async def _alone(request: bytes) -> AsyncIterator[bytes]:
    yield request
