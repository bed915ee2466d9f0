"""Servers: a call is authenticated, admitted, authorised, metered and, when asked, recorded before a servicer runs."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import grpc
import structlog
from cryptography import x509
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server

from coterie.crypto.authority import PeerIdentity
from coterie.errors import CertificateError, CoterieError, StoreError
from coterie.net.admission import Admission, Limits, Place
from coterie.net.authorisation import LARGEST, may_call
from coterie.net.channel import SERVER_TIME_KEY, Recorder
from coterie.net.close_connection import cut_off
from coterie.net.meter import Meter, RpcTotals
from coterie.net.status import abort, not_kept
from coterie.wire.refusal import ErrorReason, Refusal, reason_name

__all__ = ["CLOCK_KEY", "Guard", "certificate_of", "current_peer", "make_server"]

_log = structlog.get_logger("coterie.net")
_peer: ContextVar[PeerIdentity] = ContextVar("coterie_peer")

SERVER_OPTIONS = (
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
    # What a sender may send before this side takes it.  gRPC would find out by itself what the connection could carry,
    # which on a fast one is several megabytes for each stream: they wait in memory.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 18),
    # Nobody of ours compresses: a small message that becomes a huge one is taken for no message at all.
    ("grpc.per_message_decompression", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
)


_LINE_S = 10.0
"""Least time between two lines of the log about the same limit, seconds."""

_CUT = 1024
"""How many connections are remembered that were cut off."""

_HEALTH = "/grpc.health.v1.Health/"
"""Health is answered also while the revocation list is too old: it then says NOT_SERVING."""


_UNKNOWN = "unknown"
"""What a call is counted as whose name is none of ours: names of strangers are in no metric and in no log."""


CLOCK_KEY = "coterie-clock-ms"
"""Trailing metadata of a call for health: what the clock here says, Unix milliseconds."""


def current_peer() -> PeerIdentity:
    """Who makes the call that is being served."""
    return _peer.get()


def certificate_of(context: Any) -> bytes:
    """Return the certificate (PEM) that the caller of a call shows; empty without one."""
    pem: bytes = context.auth_context().get("x509_pem_cert", [b""])[0]
    return pem


def _revoked() -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_REVOKED, "this certificate was revoked", field="certificate")


def _line(fingerprint: bytes, context: Any) -> tuple[bytes | str, str]:
    """Return whose call it is, by certificate or else by address, and over which connection."""
    connection: str = context.peer()
    return fingerprint or connection.rpartition(":")[0], connection


class _Writable:
    """The context of a servicer that writes its answers itself."""

    def __init__(self, context: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        self._context = context
        self.write = send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _Served:
    """One call while it is served: admits it, counts its bytes and the time that the servicer itself takes.

    To gRPC every request is a stream, also a single one: nothing of a stream is read before it is asked for, and
    nothing is asked for before the caller is known and has its place.
    """

    def __init__(self, guard: Guard, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> None:
        self._guard = guard
        self._method = method
        self._name = method.rsplit("/", 1)[-1]
        self._totals: RpcTotals = guard.meter[method]
        self._handler: Any = handler
        self._waited = 0.0
        self._received = 0
        self._caller = ""
        self._place: Place

    def _decode(self, data: bytes) -> Any:
        largest = LARGEST.get(self._method)
        if largest is not None and len(data) > largest:
            raise Refusal(
                ErrorReason.ERROR_REASON_TOO_LARGE,
                f"a message of {len(data)} bytes",
                field="message",
                expected=f"at most {largest} bytes",
            )
        self._totals.bytes_in += len(data)
        self._received += len(data)
        self._note(data, "received")
        decoder = self._handler.request_deserializer
        try:
            return decoder(data) if decoder is not None else data
        except DecodeError as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "the bytes are no message of this call",
                field="message",
                expected="the message that the contract names",
            ) from error

    def _encode(self, message: Any) -> bytes:
        encoder = self._handler.response_serializer
        data: bytes = encoder(message) if encoder is not None else message
        self._totals.bytes_out += len(data)
        self._note(data, "sent")
        # A call that takes many items may refuse some and take the others.
        parts = Counter(reason_name(one.reason) for one in getattr(message, "refused", ()))
        if parts:
            self._guard.refused_parts(self._name, parts, self._caller)
        return data

    def _note(self, data: bytes, direction: str) -> None:
        if self._guard.recorder is not None:
            self._guard.recorder.record(rpc=self._name, peer=self._caller, direction=direction, payload=data)

    @contextlib.asynccontextmanager
    async def _unless_gone(self, context: Any) -> AsyncIterator[None]:
        """Let a call end quietly that its caller has given up, while it was served or something was written."""
        if self._guard.is_cut_off(context):
            raise asyncio.CancelledError
        try:
            yield
        except cygrpc.ExecuteBatchError as error:
            self._guard.given_up(context)
            raise asyncio.CancelledError from error
        except asyncio.CancelledError:
            self._guard.given_up(context)
            raise

    @contextlib.asynccontextmanager
    async def _admitted(self, context: Any) -> AsyncIterator[None]:
        started = time.perf_counter()
        failed = True
        peer: PeerIdentity | None = None
        try:
            peer = self._guard.identify(context)
            self._caller = str(peer)
            self._place = self._guard.enter(
                peer, context, upload=self._handler.request_streaming, method=self._method
            )
            self._guard.authorise(peer, self._method)
            _peer.set(peer)
            with self._guard.open_call(peer):
                yield
            failed = False
            spent = int((time.perf_counter() - started - self._waited) * 1e6)
            told = [(SERVER_TIME_KEY, str(spent))]
            if self._method.startswith(_HEALTH):
                told.append((CLOCK_KEY, str(int(time.time() * 1e3))))
            context.set_trailing_metadata(tuple(told))
        except Refusal as refusal:
            self._guard.refused(self._name, refusal, peer)
            await abort(context, refusal)
        except CoterieError as error:
            if isinstance(error, StoreError) and error.trouble:
                unkept = not_kept(error)
                self._guard.refused(self._name, unkept, peer)
                await abort(context, unkept)
            # Messages of our own errors name no private value; the caller learns no more than that it failed.
            _log.error("rpc failed", rpc=self._name, error=error.code, message=error.message)
            await context.abort(grpc.StatusCode.INTERNAL, f"{error.code}: see the log of the service")
        except grpc.aio.AbortError:
            raise
        except cygrpc.ExecuteBatchError:
            # There is nobody any more to write to.
            failed = False
            raise
        except asyncio.CancelledError:
            if peer is None or not self._guard.is_revoked(peer):
                # The caller went away; whether something failed, its side knows and counts.
                failed = False
                raise
            # Ended by the revocation and not by the caller, who is told so.
            self._guard.refused(self._name, _revoked(), peer)
            await abort(context, _revoked())
        except Exception as error:
            # Only the type: the text of an unforeseen error may carry what was being handled.
            _log.error("rpc failed", rpc=self._name, error=type(error).__name__, exc_info=self._guard.debug)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error: see the log of the service")
        finally:
            total_ms = (time.perf_counter() - started) * 1e3
            own_ms = total_ms - self._waited * 1e3
            self._totals.finished(total_ms=total_ms, server_ms=own_ms, failed=failed)

    @contextlib.asynccontextmanager
    async def _in_time(self, what: str) -> AsyncIterator[None]:
        """Give the caller its time to send or take a message; that is not the servicer's."""
        asked = time.perf_counter()
        try:
            async with asyncio.timeout(self._guard.limits.message_s):
                yield
        except TimeoutError as error:
            raise self._slow(what) from error
        finally:
            self._waited += time.perf_counter() - asked

    def _slow(self, what: str) -> Refusal:
        return self._guard.admission.too_slow(self._place, what)

    async def _arriving(self, context: Any) -> AsyncIterator[Any]:
        """Hand on what arrives."""
        limits, before = self._guard.limits, self._waited
        while True:
            async with self._in_time("nothing arrived"):
                data = await context.read()
            if data is grpc.aio.EOF:
                return
            waited = self._waited - before
            yield self._decode(data)
            if waited > limits.message_s and self._received < waited * limits.least_kib_s * 1024:
                raise self._slow("little arrived")

    async def _single(self, context: Any) -> Any:
        """Return a request that is a single message; what follows it is not read."""
        async with self._in_time("nothing arrived"):
            data = await context.read()
        if data is grpc.aio.EOF:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD, "no message", field="message", expected="one message"
            )
        return self._decode(data)

    def wrapped(self) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler with everything around it."""
        handler = self._handler

        async def unary(_: Any, context: Any) -> bytes:
            async with self._unless_gone(context), self._admitted(context):
                if handler.request_streaming:
                    return self._encode(await handler.stream_unary(self._arriving(context), context))
                return self._encode(await handler.unary_unary(await self._single(context), context))
            raise AssertionError("a call that is not admitted is aborted")

        async def stream(_: Any, context: Any) -> None:
            async def send(response: Any) -> None:
                data = self._encode(response)
                async with self._in_time("nothing was taken"):
                    await context.write(data)

            async with self._unless_gone(context), self._admitted(context):
                if handler.request_streaming:
                    responses = handler.stream_stream(self._arriving(context), context)
                else:
                    request = await self._single(context)
                    responses = handler.unary_stream(request, _Writable(context, send))
                if inspect.iscoroutine(responses):
                    # A servicer that writes to the context itself, as the health service's Watch does.
                    await responses
                    return
                # Closed with this one, and not some time later: a caller may go away in the middle.
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        await send(response)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.stream_unary_rpc_method_handler(unary)


class _Stranger(_Served):
    """A call of what nobody offers: it takes of its caller's share like any other, and nothing of it is read."""

    def __init__(self, guard: Guard) -> None:
        super().__init__(guard, _UNKNOWN, grpc.unary_unary_rpc_method_handler(cast(Any, None)))

    def wrapped(self) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler that refuses it."""

        async def refuse(_: Any, context: Any) -> None:
            async with self._unless_gone(context), self._admitted(context):
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such call here")

        return grpc.stream_unary_rpc_method_handler(refuse)


class Guard(grpc.aio.ServerInterceptor):
    """Stands before every servicer of a process.

    Parameters
    ----------
    meter : Meter
        Where served calls are counted.
    recorder : Recorder, optional
        Takes down what is received and sent.
    anonymous : iterable of str
        Full method names that may be called without a certificate (enrolment only).
    debug : bool
        Whether tracebacks of unforeseen errors are logged; they may show what was being handled.
    limits : Limits, optional
        How much is taken at once.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        recorder: Recorder | None = None,
        anonymous: Iterable[str] = (),
        debug: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.meter = meter
        self.recorder = recorder
        self.debug = debug
        self.refusals: dict[tuple[str, str], int] = {}
        self.limits = limits or Limits()
        self.admission = Admission(self.limits)
        self._logged: dict[str, float] = {}
        self._anonymous = frozenset(anonymous)
        self._identities: dict[bytes, tuple[PeerIdentity, float]] = {}
        self._revoked: frozenset[bytes] = frozenset()
        self._usable = True
        self._cut: dict[str, None] = {}
        self._open: dict[bytes, set[asyncio.Task[Any]]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Put the guard around the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return _Stranger(self).wrapped()
        return _Served(self, str(handler_call_details.method), handler).wrapped()

    def identify(self, context: Any) -> PeerIdentity:
        """Return the caller by its certificate.

        Raises
        ------
        Refusal
            BAD_SIGNATURE when the certificate carries no role of ours, or has expired since the connection was
            made: TLS looks at it only once.
        """
        pem = certificate_of(context)
        if not pem:
            return PeerIdentity(role="", name="", fingerprint=b"")
        known = self._identities.get(pem)
        if known is None:
            try:
                identity = PeerIdentity.from_certificate(pem)
            except CertificateError as error:
                raise Refusal(
                    ErrorReason.ERROR_REASON_BAD_SIGNATURE, error.message, field="certificate"
                ) from error
            end = x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
            self._forget_expired()
            known = self._identities[pem] = (identity, end)
        identity, end = known
        if time.time() >= end:
            raise Refusal(
                ErrorReason.ERROR_REASON_BAD_SIGNATURE, "the certificate has expired", field="certificate"
            )
        return identity

    def enter(self, peer: PeerIdentity, context: Any, *, upload: bool, method: str) -> Place:
        """Give a call its place until its answer was sent.

        Raises
        ------
        Refusal
            OVERLOADED when there is none.
        """
        caller, connection = _line(peer.fingerprint, context)
        try:
            place = self.admission.enter(
                caller, connection, upload=upload, essential=method.startswith(_HEALTH), role=peer.role
            )
        except Refusal as refusal:
            if refusal.field == "limits.resets_per_s":
                self._cut_off(connection, peer)
            raise
        task = asyncio.current_task()
        if task is not None:
            # Not when the servicer has done its part: a caller may be slow to take the answer.
            task.add_done_callback(lambda _: self.admission.leave(place))
        return place

    def given_up(self, context: Any) -> None:
        """Count a call that its caller has given up, and cut the caller off where it does little else."""
        pem = certificate_of(context)
        known = self._identities.get(pem)
        peer = known[0] if known else PeerIdentity(role="", name="", fingerprint=b"")
        caller, connection = _line(peer.fingerprint, context)
        if self.admission.gave_up(caller, peer.role):
            self._cut_off(connection, peer)

    def is_cut_off(self, context: Any) -> bool:
        """Whether the connection of a call was cut off: nobody is there any more to be answered."""
        return bool(self._cut) and context.peer() in self._cut

    def _cut_off(self, connection: str, peer: PeerIdentity) -> None:
        """Close a connection, once: more of its calls may have come before it was closed."""
        if connection in self._cut:
            return
        self._cut[connection] = None
        if len(self._cut) > _CUT:
            del self._cut[next(iter(self._cut))]
        if self._worth_a_line("cut off"):
            _log.warning("cut off", limit="resets_per_s", peer=str(peer))
        cut_off(connection)

    def _forget_expired(self) -> None:
        # Parties renew theirs: what is not shown any more is not kept either.
        now = time.time()
        self._identities = {pem: known for pem, known in self._identities.items() if now < known[1]}

    def authorise(self, peer: PeerIdentity, method: str) -> None:
        """Check role and revocation.

        Raises
        ------
        Refusal
            WRONG_ROLE, REVOKED, or NOT_READY while the revocation list is too old to trust.
        """
        if method in self._anonymous:
            return
        if method != _UNKNOWN and not may_call(peer.role, method):
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_ROLE,
                f"role {peer.role or 'none'} may not call {method}",
                field="certificate",
            )
        if self.is_revoked(peer):
            raise _revoked()
        if not self._usable and not method.startswith(_HEALTH):
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "the revocation list could not be refreshed for too long",
                field="revocations",
            )

    def is_revoked(self, peer: PeerIdentity) -> bool:
        """Whether the caller's certificate was revoked."""
        return peer.fingerprint in self._revoked

    def revoke(self, fingerprints: Iterable[bytes]) -> None:
        """Refuse these certificates from now on and cancel their open calls."""
        self._revoked = frozenset(fingerprints)
        for fingerprint in self._revoked:
            for task in self._open.get(fingerprint, ()):
                task.cancel()

    def fail_closed(self, closed: bool) -> None:
        """Refuse everybody while the revocation list is too old, or open again."""
        self._usable = not closed

    def refused(self, rpc: str, refusal: Refusal, peer: PeerIdentity | None) -> None:
        """Count and log a refusal."""
        key = (rpc, refusal.name)
        self.refusals[key] = self.refusals.get(key, 0) + 1
        if refusal.reason == ErrorReason.ERROR_REASON_OVERLOADED and not self._worth_a_line(refusal.field):
            return
        _log.warning(
            "refused", rpc=rpc, reason=refusal.name, field=refusal.field, peer=str(peer) if peer else ""
        )

    def _worth_a_line(self, limit: str) -> bool:
        """Whether to log that a limit turned a call away: a flood of calls is no flood of lines."""
        now = time.monotonic()
        if now - self._logged.get(limit, -_LINE_S) < _LINE_S:
            return False
        self._logged[limit] = now
        return True

    def refused_parts(self, rpc: str, parts: Mapping[str, int], peer: str) -> None:
        """Count and log what was refused of a call that went on; how many parts by the reason's short name."""
        for reason, count in parts.items():
            self.refusals[rpc, reason] = self.refusals.get((rpc, reason), 0) + count
            _log.warning("refused in part", rpc=rpc, reason=reason, parts=count, peer=peer)

    @contextlib.contextmanager
    def open_call(self, peer: PeerIdentity) -> Any:
        """Keep the call's task while it runs, so that a revocation can end it."""
        task = asyncio.current_task()
        if task is None or not peer.fingerprint:
            yield
            return
        tasks = self._open.setdefault(peer.fingerprint, set())
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)
            if not tasks:
                self._open.pop(peer.fingerprint, None)


_LISTENER_NEEDS = ("_MethodResolver", "_RequestCallError", "_handle_rpc", "_schedule_rpc_coro")


class _Listener(cygrpc.AioServer):  # type: ignore[misc]
    """gRPC's server, which a call with a name that is no text would end: it takes the name of a stranger for UTF-8.

    Calls of what is registered come with a known name.  All others are taken here, where nobody asks for it, and go to
    the guard without a name.
    """

    guard: Guard

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        if method is not None:
            known: asyncio.Future[Any] = super()._make_request_call_future(method)
            return known
        return asyncio.ensure_future(self._take_strangers())

    async def _take_strangers(self) -> None:
        loop, nothing = asyncio.get_running_loop(), cygrpc._MethodResolver([], {})
        answering: set[asyncio.Task[None]] = set()
        while True:
            try:
                state = await self._request_call()
            except cygrpc._RequestCallError:
                if not self.is_running():
                    raise
                continue
            answer = cygrpc._handle_rpc("", nothing, (self.guard,), state, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, state, loop, "unknown"))
            answering.add(task)
            task.add_done_callback(answering.discard)


class _Server(aio_server.Server):
    """A server of gRPC with that listener."""

    def __init__(self, guard: Guard, options: Sequence[tuple[str, int]]) -> None:
        super().__init__(None, (), [guard], options, None, None)
        # Names of gRPC's own, which a release may change: then it is the server as it was.
        if hasattr(cygrpc.AioServer, "_make_request_call_future") and all(
            hasattr(cygrpc, name) for name in _LISTENER_NEEDS
        ):
            self._server = _Listener(self._loop, None, (), (guard,), tuple(options), None)
            self._server.guard = guard
        else:
            _log.warning("this gRPC cannot be kept from ending at a call whose name is no text")


def make_server(guard: Guard) -> grpc.aio.Server:
    """Return a server behind a guard, with the limits of the guard; servicers must be registered by their methods."""
    server: Any = _Server(guard, [*SERVER_OPTIONS, *guard.limits.options()])
    return cast(grpc.aio.Server, server)
