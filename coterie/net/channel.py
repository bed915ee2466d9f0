"""Client channels: mutual TLS to a logical name, a deadline on every call, every call metered.

``Channel`` offers the four factory methods that generated stubs use, so a stub made from it behaves as always;
the callables it hands out add the deadline, count bytes where they are serialised, read the server's own time from
the trailing metadata and hand bytes to the transcript.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar, cast

import grpc

from coterie.net.meter import Meter, RpcTotals

__all__ = ["SERVER_TIME_KEY", "Channel", "Recorder", "connect"]

SERVER_TIME_KEY = "coterie-server-us"
"""Trailing metadata: microseconds that the server itself spent on a call."""

DEFAULT_TIMEOUT_S = 30.0

OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Despite its name the time that one attempt may take, handshakes included; a refused one ends at once.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.use_local_subchannel_pool", 1),
)

T = TypeVar("T")
Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]


class Recorder(Protocol):
    """Takes down what a process received and sent, when asked to."""

    def record(self, *, rpc: str, peer: str, direction: str, payload: bytes) -> None:
        """Append one message: direction is ``"received"`` or ``"sent"``."""


class _Call:
    """Counts one call of one RPC."""

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
    async def timed(self, call: Any) -> AsyncIterator[None]:
        started = time.perf_counter()
        failed, server_ms = True, None
        try:
            yield
            failed = False
            for key, value in await call.trailing_metadata() or ():
                if key == SERVER_TIME_KEY:
                    server_ms = int(value) / 1e3
        except (asyncio.CancelledError, GeneratorExit):
            # Ended by ourselves, as every waiting call is when a process stops.
            failed = False
            raise
        finally:
            total_ms = (time.perf_counter() - started) * 1e3
            self._totals.finished(total_ms=total_ms, server_ms=server_ms, failed=failed)


class Channel:
    """A connection to one peer.

    Parameters
    ----------
    inner : grpc.aio.Channel
        The channel that does the work.
    peer : str
        Role and name of the peer, for messages and transcripts.
    meter : Meter
        Where calls are counted.
    recorder : Recorder, optional
        Takes down what is received and sent.
    """

    def __init__(
        self, inner: grpc.aio.Channel, *, peer: str, meter: Meter, recorder: Recorder | None = None
    ) -> None:
        self._inner = inner
        self.peer = peer
        self.meter = meter
        self.recorder = recorder

    def metered(self, meter: Meter) -> Channel:
        """Return the same connection with calls counted elsewhere."""
        return Channel(self._inner, peer=self.peer, meter=meter, recorder=self.recorder)

    async def close(self) -> None:
        """Close the connection; calls under way end with CANCELLED."""
        await self._inner.close()

    def stub(self, factory: Callable[[grpc.aio.Channel], T]) -> T:
        """Make a generated stub that calls through this channel."""
        return factory(cast(grpc.aio.Channel, self))

    def unary_unary(
        self, method: str, request_serializer: Encode, response_deserializer: Decode, **_: Any
    ) -> Any:
        """Return a callable: ``await call(request, timeout=...) -> response``."""
        counted = _Call(self, method, request_serializer, response_deserializer)
        inner = self._inner.unary_unary(method, counted.encode, counted.decode)

        async def call(request: Any, timeout: float = DEFAULT_TIMEOUT_S) -> Any:
            under_way = inner(request, timeout=timeout)
            async with counted.timed(under_way):
                return await under_way

        return call

    def stream_unary(
        self, method: str, request_serializer: Encode, response_deserializer: Decode, **_: Any
    ) -> Any:
        """Return a callable: ``await call(async_iterable, timeout=...) -> response``."""
        counted = _Call(self, method, request_serializer, response_deserializer)
        inner = self._inner.stream_unary(method, counted.encode, counted.decode)

        async def call(requests: AsyncIterator[Any], timeout: float = DEFAULT_TIMEOUT_S) -> Any:
            under_way = inner(requests, timeout=timeout)
            async with counted.timed(under_way):
                return await under_way

        return call

    def unary_stream(
        self, method: str, request_serializer: Encode, response_deserializer: Decode, **_: Any
    ) -> Any:
        """Return a callable: ``async for response in call(request, timeout=...)``."""
        counted = _Call(self, method, request_serializer, response_deserializer)
        inner = self._inner.unary_stream(method, counted.encode, counted.decode)

        async def call(request: Any, timeout: float = DEFAULT_TIMEOUT_S) -> AsyncIterator[Any]:
            under_way = inner(request, timeout=timeout)
            async with counted.timed(under_way):
                async for response in under_way:
                    yield response

        return call

    def stream_stream(
        self, method: str, request_serializer: Encode, response_deserializer: Decode, **_: Any
    ) -> Any:
        """Return a callable: ``async for response in call(async_iterable, timeout=...)``."""
        counted = _Call(self, method, request_serializer, response_deserializer)
        inner = self._inner.stream_stream(method, counted.encode, counted.decode)

        async def call(
            requests: AsyncIterator[Any], timeout: float = DEFAULT_TIMEOUT_S
        ) -> AsyncIterator[Any]:
            under_way = inner(requests, timeout=timeout)
            async with counted.timed(under_way):
                async for response in under_way:
                    yield response

        return call


def connect(
    address: str,
    credentials: grpc.ChannelCredentials,
    *,
    tls_name: str,
    peer: str,
    meter: Meter,
    recorder: Recorder | None = None,
) -> Channel:
    """Open a channel to an address and verify the logical name there.

    Parameters
    ----------
    address : str
        ``host:port``; no address is ever in a certificate.
    credentials : grpc.ChannelCredentials
        The caller's.
    tls_name : str
        Logical name that the peer's certificate must carry, ``name.role.coterie.internal``.
    peer : str
        Role and name of the peer, for messages and transcripts.
    """
    options = [*OPTIONS, ("grpc.ssl_target_name_override", tls_name)]
    inner = grpc.aio.secure_channel(address, credentials, options=options)
    return Channel(inner, peer=peer, meter=meter, recorder=recorder)
