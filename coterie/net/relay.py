"""Hands the calls of a service's callers on to the process that answers them, message by message and unread.

The guard before it has authenticated, admitted and authorised each call, as for a service that answers itself.  The
messages go on as bytes.  A refusal comes back as it was made; where nobody answers, the caller is told to come again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf import descriptor_pool

from coterie.net.channel import Channel
from coterie.net.clocks import CLOCK_KEY
from coterie.net.server import certificate_of
from coterie.net.status import abort, from_rpc_error
from coterie.net.vouching import claim
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["Relay"]

_LONGEST_S = 24 * 3600.0
"""Deadline of a call whose caller set none, seconds: a watcher of a run may watch for long."""

_MOST_CLAIMS = 20_000


class Relay:
    """Servicers of whole gRPC services, all of whose calls are handed on.

    Parameters
    ----------
    channels : sequence of Channel
        Connections to the process that answers, used in turn: one connection has too small a window for thousands of
        callers.
    refused : callable
        Told of each refusal that comes back, with the name of the RPC.
    """

    def __init__(self, channels: Sequence[Channel], refused: Callable[[str, Refusal], None]) -> None:
        self._channels = channels
        self._refused = refused
        self._next = 0
        self._calls: list[dict[str, Any]] = [{} for _ in channels]
        self._ones: list[dict[str, Any]] = [{} for _ in channels]
        self._claims: dict[bytes, tuple[tuple[str, str | bytes], ...]] = {}

    def add_to(
        self, server: grpc.aio.Server, services: Iterable[str], own: Mapping[str, Any] | None = None
    ) -> None:
        """Add services to a server.

        Parameters
        ----------
        server : grpc.aio.Server
        services : iterable of str
            Full names; their descriptors must have been imported.
        own : mapping, optional
            Handlers of calls that are not handed on, by full method name.
        """
        for service in services:
            handlers = {}
            for method in descriptor_pool.Default().FindServiceByName(service).methods:
                name = f"/{service}/{method.name}"
                handlers[method.name] = (own or {}).get(name) or self._handler(name, method)
            server.add_registered_method_handlers(service, handlers)

    def _handler(self, name: str, method: Any) -> grpc.RpcMethodHandler[Any, Any]:
        async def stream_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async with contextlib.aclosing(self.call(name, requests, context)) as answers:
                async for answer in answers:
                    yield answer

        async def unary_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            async with contextlib.aclosing(self.call(name, _alone(request), context)) as answers:
                async for answer in answers:
                    yield answer

        async def stream_unary(requests: AsyncIterator[bytes], context: Any) -> bytes:
            return await self.answer(name, requests, context)

        async def unary_unary(request: bytes, context: Any) -> bytes:
            return await self.answer_one(name, request, context)

        if method.client_streaming and method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(stream_stream)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(unary_stream)
        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(stream_unary)
        return grpc.unary_unary_rpc_method_handler(unary_unary)

    async def answer(self, name: str, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """Hand a call on that has one answer; return it."""
        answers = [answer async for answer in self.call(name, requests, context)]
        if len(answers) != 1:
            await context.abort(grpc.StatusCode.INTERNAL, "the coordinator gave no single answer")
        return answers[0]

    async def answer_one(self, name: str, request: bytes, context: Any) -> bytes:
        """Hand a call on that has one message, and one answer; return it."""
        channel, timeout, metadata = self._onward(context)
        passed = self._passed(self._ones[channel], name, self._channels[channel].pass_one_on)
        try:
            answer: bytes = await passed(request, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            await self._aborted(name, error, context)
        return answer

    def _onward(self, context: Any) -> tuple[int, float, tuple[tuple[str, str | bytes], ...]]:
        """Return which connection a call takes, its time limit and its metadata."""
        at = self._next = (self._next + 1) % len(self._channels)
        left = context.time_remaining()
        clock = [(key, value) for key, value in context.invocation_metadata() or () if key == CLOCK_KEY]
        return at, _LONGEST_S if left is None else left, (*self._claim(certificate_of(context)), *clock)

    @staticmethod
    def _passed(known: dict[str, Any], name: str, make: Callable[[str], Any]) -> Any:
        found = known.get(name)
        if found is None:
            found = known[name] = make(name)
        return found

    async def call(
        self, name: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncGenerator[bytes, None]:
        """Hand a call on; yield what comes back, and abort the caller's call as it is aborted there."""
        channel, timeout, metadata = self._onward(context)
        passed = self._passed(self._calls[channel], name, self._channels[channel].pass_on)
        try:
            async with contextlib.aclosing(passed(requests, timeout=timeout, metadata=metadata)) as answers:
                async for answer in answers:
                    yield answer
        except grpc.aio.AioRpcError as error:
            await self._aborted(name, error, context)

    def _claim(self, pem: bytes) -> tuple[tuple[str, str | bytes], ...]:
        found = self._claims.get(pem)
        if found is None:
            if len(self._claims) >= _MOST_CLAIMS:
                self._claims.clear()
            found = self._claims[pem] = claim(pem)
        return found

    async def _aborted(self, name: str, error: grpc.aio.AioRpcError, context: Any) -> NoReturn:
        told = from_rpc_error(error, "the coordinator")
        if not isinstance(told, Refusal):
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                await context.abort(error.code(), error.details() or "")
                raise AssertionError("abort returned")
            told = Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "the coordinator of this server does not answer now",
                field="coordinator",
                expected="the same call again in a moment",
            )
        self._refused(name.rsplit("/", 1)[-1], told)
        # Aborted here: the words about the caller's clock were added there already.
        await abort(context, told)


async def _alone(request: bytes) -> AsyncIterator[bytes]:
    yield request
