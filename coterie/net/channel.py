"""Client channels: mutual TLS to a logical name, a deadline on every call, every call metered.

``Channel`` offers the four factory methods that generated stubs use, so generated stubs work with it unchanged.
Its callables add the deadline, count serialised bytes, read the server's own time from the trailing metadata and
hand the bytes to the transcript.  A channel outlives its connection: after a certificate was renewed, further calls
go over a new connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar, cast

import grpc
import structlog

from coterie.crypto.clocks import NOTED_S, apart, compared
from coterie.net import tracing
from coterie.net.clocks import ahead_s, stated
from coterie.net.failover import Failover
from coterie.net.meter import Meter, RpcTotals
from coterie.net.rest import IDLE_S, Rest

__all__ = ["REOPEN_S", "SERVER_TIME_KEY", "CallTarget", "Channel", "Recorder", "connect"]

SERVER_TIME_KEY = "coterie-server-us"
"""Trailing metadata: microseconds that the server itself spent on a call."""

DEFAULT_TIMEOUT_S = 30.0

OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Despite its name: the longest time of one attempt to connect, handshakes included; a refused attempt ends at once.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Otherwise 30 s, in which a peer that was started again, with another address, is looked for at the old one.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.use_local_subchannel_pool", 1),
)

_log = structlog.get_logger("coterie.net")
REOPEN_S = 10.0
"""Time without any answer after which another connection is opened, seconds.

The pauses after which gRPC looks for a lost peer's name again grow up to two minutes; those of a new channel are short.
"""

T = TypeVar("T")
Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]


class Recorder(Protocol):
    """The transcript of a process: takes every message that it received or sent."""

    def record(self, *, rpc: str, peer: str, direction: str, payload: bytes) -> None:
        """Append one serialised message; ``direction`` is ``"received"`` or ``"sent"``."""


class CallTarget(Protocol):
    """Where calls go: a `Channel`, or in a run in one process what answers in its place."""

    @property
    def peer(self) -> str:
        """Name of the peer, for errors."""

    def stub(self, factory: Callable[[grpc.aio.Channel], T]) -> T:
        """Make a generated stub that calls there."""


class _Call:
    """Counts the calls of one RPC over a channel, and records their messages."""

    def __init__(self, channel: Channel, method: str, encode: Encode, decode: Decode) -> None:
        self._channel = channel
        self._name = method.rsplit("/", 1)[-1]
        self._totals: RpcTotals = channel.meter[method]
        self._encode = encode
        self._decode = decode

    def encode(self, message: Any) -> bytes:
        data = self._encode(message)
        self._totals.bytes_out += len(data)
        self._note(data, "sent")
        return data

    def decode(self, data: bytes) -> Any:
        self._totals.bytes_in += len(data)
        self._note(data, "received")
        return self._decode(data)

    def _note(self, data: bytes, direction: str) -> None:
        recorder = self._channel.recorder
        if recorder is not None:
            recorder.record(rpc=self._name, peer=self._channel.peer, direction=direction, payload=data)

    @asynccontextmanager
    async def timed(self, call: Any, line: _Line) -> AsyncIterator[None]:
        started = time.perf_counter()
        failed, server_ms = True, None
        try:
            yield
            failed = False
            self._channel.reached()
            told = await call.trailing_metadata() or ()
            for key, value in told:
                if key == SERVER_TIME_KEY:
                    server_ms = int(value) / 1e3
            self._channel.note_clock(ahead_s(told))
        except asyncio.CancelledError:
            if _deadline_passed(call):
                raise _ended(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            if line.left and not _asked_to_end():
                raise _ended(grpc.StatusCode.UNAVAILABLE, "the service is elsewhere now") from None
            # Cancelled by this process, as all waiting calls are when it stops.
            failed = False
            raise
        except GeneratorExit:
            failed = False
            raise
        except grpc.aio.AioRpcError as error:
            # What a peer says comes with metadata.
            if error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
                self._channel.not_reached()
            else:
                self._channel.reached()
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    self._channel.refused_for_now()
            raise
        finally:
            total_ms = (time.perf_counter() - started) * 1e3
            self._totals.finished(total_ms=total_ms, server_ms=server_ms, failed=failed)


def _deadline_passed(call: Any) -> bool:
    """Return whether gRPC itself cancelled a call, because the call's deadline passed while it was sending.

    The task then gets a CancelledError that nobody asked for, and would end without an error.
    """
    return not _asked_to_end() and call.time_remaining() == 0


def _asked_to_end() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _ended(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details=details)


Opener = Callable[[grpc.ChannelCredentials], grpc.aio.Channel]
OpenTo = Callable[[grpc.ChannelCredentials, str], grpc.aio.Channel]


class _Line:
    """One gRPC channel with the number of its open calls.

    Parameters
    ----------
    inner : grpc.aio.Channel
    idle : callable, optional
        Called with the line once it has had no call for `IDLE_S` after one.
    """

    def __init__(self, inner: grpc.aio.Channel, idle: Callable[[_Line], None] | None = None) -> None:
        self.inner = inner
        self.left = False
        """Whether the service is elsewhere now, so that calls over this line end."""
        self._calls = 0
        self._unused: asyncio.Event | None = None
        self._idle = idle
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        self._calls += 1
        self._stop_timer()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls and self._unused is not None:
                self._unused.set()
            if not self._calls and self._idle is not None:
                self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._idle, self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def close(self) -> None:
        """Close the channel; calls under way end with CANCELLED."""
        self._idle = None
        self._stop_timer()
        await self.inner.close()

    async def leave(self) -> None:
        """Close the channel now; calls under way fail as those to a service that is gone."""
        self.left = True
        await self.close()

    async def retire(self) -> None:
        """Close the channel once all its calls have ended, by themselves or by their deadlines."""
        self._unused = asyncio.Event()
        if self._calls:
            await self._unused.wait()
        await self.close()


class Channel:
    """The connection of a process to one peer; makes the stubs that call it.

    Parameters
    ----------
    inner : grpc.aio.Channel
        The gRPC channel that carries the calls.
    peer : str
        Role and name of the peer, for messages and transcripts.
    meter : Meter
        Where calls are counted.
    recorder : Recorder, optional
        Takes the messages received and sent.
    opener : callable, optional
        Makes another gRPC channel to the same peer with other credentials.
    credentials : grpc.ChannelCredentials, optional
        Those of ``inner``; with them another one is opened when no call has reached the peer for `REOPEN_S`.
    idles : bool
        Whether the connection is closed once it has had no call for `IDLE_S`; the next call opens another.  gRPC's own
        ``grpc.client_idle_timeout_ms`` closes the first connection of a channel only, and no further one
        (grpc/grpc#38454).
    clock : callable, optional
        Monotonic seconds.
    """

    def __init__(
        self,
        inner: grpc.aio.Channel,
        *,
        peer: str,
        meter: Meter,
        recorder: Recorder | None = None,
        opener: Opener | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        idles: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idles = idles
        self._line = self._new_line(inner)
        self._opener = opener
        self._credentials = credentials
        self._clock = clock
        # When the first call after the last that reached the peer, or since this connection was opened, failed.
        self._unreached_since: float | None = None
        self._retiring: dict[asyncio.Task[None], _Line] = {}
        self.peer = peer
        self.meter = meter
        self.recorder = recorder
        self._ahead = 0.0
        self._failover: Failover | None = None
        self._following: asyncio.Task[None] | None = None

    def follow(self, addresses: Sequence[str], open_to: OpenTo, rest: Rest | None = None) -> None:
        """Follow a service that may be at several addresses; the present line leads to the first of them.

        Parameters
        ----------
        addresses : sequence of str
        open_to : callable
            Makes a gRPC channel to an address with given credentials.
        rest : Rest, optional
            Nobody is looked for while the process rests.
        """
        credentials = self._credentials
        if credentials is None:
            raise AssertionError("only a channel made by `connect` can follow a service")

        def present_credentials() -> grpc.ChannelCredentials:
            return self._credentials or credentials

        def move(address: str) -> None:
            self._opener = lambda shown: open_to(shown, address)
            self._unreached_since = None
            old, self._line = self._line, self._new_line(self._opener(present_credentials()))
            self._ending(old, old.leave())

        self._failover = Failover(
            self.peer,
            addresses,
            lambda: self._line.inner,
            lambda address: open_to(present_credentials(), address),
            move,
            rest,
        )
        self._following = asyncio.create_task(self._failover.run())

    def note_clock(self, ahead: float | None) -> None:
        """Take how far the peer's clock is ahead, seconds, where an answer told; log a difference that is new."""
        if ahead is None:
            return
        compared(ahead)
        if abs(ahead) > NOTED_S and abs(ahead - self._ahead) > NOTED_S:
            _log.warning("clocks differ", peer=self.peer, ahead_s=round(ahead, 1), its_clock=apart(ahead))
        self._ahead = ahead

    def renew(self, credentials: grpc.ChannelCredentials) -> None:
        """Open a new connection with these credentials for further calls; calls under way end over the old one."""
        if self._opener is None:
            raise AssertionError("only a channel made by `connect` can be renewed")
        self._credentials, self._unreached_since = credentials, None
        old, self._line = self._line, self._new_line(self._opener(credentials))
        self._ending(old, old.retire())

    def _new_line(self, inner: grpc.aio.Channel) -> _Line:
        return _Line(inner, self._close_idle if self._idles else None)

    def _close_idle(self, line: _Line) -> None:
        """Close a connection without calls; a gRPC channel in its place connects at the next call."""
        if line is self._line and self._opener is not None and self._credentials is not None:
            self._line = self._new_line(self._opener(self._credentials))
            self._ending(line, line.close())

    def _ending(self, old: _Line, end: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(end)
        self._retiring[task] = old
        task.add_done_callback(lambda done: self._retiring.pop(done, None))

    def reached(self) -> None:
        """Note that the peer has answered a call."""
        self._unreached_since = None

    def not_reached(self) -> None:
        """Note that a call found nobody; after `REOPEN_S` of such calls further ones go over another connection."""
        if self._failover is not None:
            self._failover.hurry()
        now = self._clock()
        if self._unreached_since is None:
            self._unreached_since = now
        elif now - self._unreached_since >= REOPEN_S and self._credentials is not None:
            self.renew(self._credentials)

    def refused_for_now(self) -> None:
        """Note that the peer is not ready; where it has standbys, one of them may be."""
        if self._failover is not None:
            self._failover.hurry()

    def metered(self, meter: Meter) -> Channel:
        """Return a channel over the same connection, renewed with it, whose calls another meter counts."""
        return _Metered(self, meter)

    async def close(self) -> None:
        """Close the connection; calls under way end with CANCELLED."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        retiring = dict(self._retiring)
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        for line in (self._line, *retiring.values()):
            await line.close()

    def _bound(self, make: Callable[[grpc.aio.Channel], Any]) -> Callable[[], tuple[_Line, Any]]:
        """Return a function that gives the current connection and its callable, made once for each connection."""
        line = self._line
        callable_ = make(line.inner)

        def current() -> tuple[_Line, Any]:
            nonlocal line, callable_
            if line is not self._line:
                line = self._line
                callable_ = make(line.inner)
            return line, callable_

        return current

    def stub(self, factory: Callable[[grpc.aio.Channel], T]) -> T:
        """Make a generated stub that calls through this channel."""
        return factory(cast(grpc.aio.Channel, self))

    def unary_unary(
        self, method: str, request_serializer: Encode, response_deserializer: Decode, **_: Any
    ) -> Any:
        """Return a callable: ``await call(request, timeout=...) -> response``."""
        counted = _Call(self, method, request_serializer, response_deserializer)
        bound = self._bound(lambda inner: inner.unary_unary(method, counted.encode, counted.decode))

        async def call(request: Any, timeout: float = DEFAULT_TIMEOUT_S) -> Any:
            line, inner = bound()
            with line.call(), tracing.calling(method, self.peer) as context:
                under_way = inner(request, timeout=timeout, metadata=(stated(), *context))
                async with counted.timed(under_way, line):
                    return await under_way

        return call

    def stream_unary(
        self, method: str, request_serializer: Encode, response_deserializer: Decode, **_: Any
    ) -> Any:
        """Return a callable: ``await call(async_iterable, timeout=...) -> response``."""
        counted = _Call(self, method, request_serializer, response_deserializer)
        bound = self._bound(lambda inner: inner.stream_unary(method, counted.encode, counted.decode))

        async def call(requests: AsyncIterator[Any], timeout: float = DEFAULT_TIMEOUT_S) -> Any:
            line, inner = bound()
            with line.call(), tracing.calling(method, self.peer) as context:
                under_way = inner(requests, timeout=timeout, metadata=(stated(), *context))
                async with counted.timed(under_way, line):
                    return await under_way

        return call

    def unary_stream(
        self, method: str, request_serializer: Encode, response_deserializer: Decode, **_: Any
    ) -> Any:
        """Return a callable: ``async for response in call(request, timeout=...)``."""
        counted = _Call(self, method, request_serializer, response_deserializer)
        bound = self._bound(lambda inner: inner.unary_stream(method, counted.encode, counted.decode))

        async def call(request: Any, timeout: float = DEFAULT_TIMEOUT_S) -> AsyncIterator[Any]:
            line, inner = bound()
            with line.call(), tracing.calling(method, self.peer) as context:
                under_way = inner(request, timeout=timeout, metadata=(stated(), *context))
                async with counted.timed(under_way, line):
                    async for response in under_way:
                        yield response

        return call

    def stream_stream(
        self, method: str, request_serializer: Encode, response_deserializer: Decode, **_: Any
    ) -> Any:
        """Return a callable: ``async for response in call(async_iterable, timeout=...)``."""
        counted = _Call(self, method, request_serializer, response_deserializer)
        bound = self._bound(lambda inner: inner.stream_stream(method, counted.encode, counted.decode))

        async def call(
            requests: AsyncIterator[Any], timeout: float = DEFAULT_TIMEOUT_S
        ) -> AsyncIterator[Any]:
            line, inner = bound()
            with line.call(), tracing.calling(method, self.peer) as context:
                under_way = inner(requests, timeout=timeout, metadata=(stated(), *context))
                async with counted.timed(under_way, line):
                    async for response in under_way:
                        yield response

        return call

    def pass_on(self, method: str) -> Any:
        """Return a callable for messages that are bytes already, of a call that another process made.

        ``async for answer in call(requests, timeout=..., metadata=...)``.  The metadata is that of the other process.
        """
        counted = _Call(self, method, _as_is, _as_is)
        bound = self._bound(lambda inner: inner.stream_stream(method, counted.encode, counted.decode))

        async def call(
            requests: AsyncIterator[bytes], timeout: float, metadata: Sequence[tuple[str, str | bytes]]
        ) -> AsyncIterator[bytes]:
            line, inner = bound()
            with line.call(), tracing.calling(method, self.peer) as context:
                under_way = inner(requests, timeout=timeout, metadata=(*metadata, *context))
                async with counted.timed(under_way, line):
                    async for response in under_way:
                        yield response

        return call

    def pass_one_on(self, method: str) -> Any:
        """Return a callable as `pass_on` does, for a call with one message each way: less work than a stream.

        ``await call(request, timeout=..., metadata=...) -> answer``.
        """
        counted = _Call(self, method, _as_is, _as_is)
        bound = self._bound(lambda inner: inner.unary_unary(method, counted.encode, counted.decode))

        async def call(request: bytes, timeout: float, metadata: Sequence[tuple[str, str | bytes]]) -> bytes:
            line, inner = bound()
            with line.call(), tracing.calling(method, self.peer) as context:
                under_way = inner(request, timeout=timeout, metadata=(*metadata, *context))
                async with counted.timed(under_way, line):
                    answer: bytes = await under_way
                    return answer

        return call


def _as_is(data: bytes) -> bytes:
    return data


class _Metered(Channel):
    """A channel over another channel's connection, with a meter of its own."""

    def __init__(self, whole: Channel, meter: Meter) -> None:
        self._whole = whole
        self._ahead = 0.0
        self.peer, self.meter, self.recorder = whole.peer, meter, whole.recorder

    @property
    def _line(self) -> _Line:  # type: ignore[override]
        return self._whole._line

    def reached(self) -> None:
        self._whole.reached()

    def not_reached(self) -> None:
        self._whole.not_reached()

    def refused_for_now(self) -> None:
        self._whole.refused_for_now()


def connect(
    address: str,
    credentials: grpc.ChannelCredentials,
    *,
    tls_name: str,
    peer: str,
    meter: Meter,
    recorder: Recorder | None = None,
    standbys: Sequence[str] = (),
    rest: Rest | None = None,
) -> Channel:
    """Open a channel to an address; TLS verifies the peer's logical name.

    Parameters
    ----------
    address : str
        ``host:port``; certificates carry logical names, never addresses.
    credentials : grpc.ChannelCredentials
        Credentials of the caller.
    tls_name : str
        Logical name that the peer's certificate must carry, ``name.role.coterie.internal``.
    peer : str
        Role and name of the peer, for messages and transcripts.
    standbys : sequence of str
        Further addresses at which the peer may be.  With some, an event loop must run.
    rest : Rest, optional
        That of a device which checks in: a connection without calls is closed, and the next call opens another.
    """
    options = [*OPTIONS, ("grpc.ssl_target_name_override", tls_name)]

    def open_to(shown: grpc.ChannelCredentials, at: str) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(at, shown, options=options)

    def opener(shown: grpc.ChannelCredentials) -> grpc.aio.Channel:
        return open_to(shown, address)

    channel = Channel(
        opener(credentials),
        peer=peer,
        meter=meter,
        recorder=recorder,
        opener=opener,
        credentials=credentials,
        idles=rest is not None,
    )
    if standbys:
        channel.follow([address, *standbys], open_to, rest)
    return channel
