"""gRPC servers whose guard authenticates, admits, authorises, meters and records each call around its servicer."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
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
from coterie.net import tracing
from coterie.net.admission import Admission, AdmittedCall, Limits
from coterie.net.authorisation import LARGEST, may_call
from coterie.net.channel import SERVER_TIME_KEY, Recorder
from coterie.net.clocks import CLOCK_KEY, TELLING, Skews, ahead_s, explained, stated
from coterie.net.close_connection import cut_off
from coterie.net.meter import Meter, RpcTotals
from coterie.net.status import abort, not_kept
from coterie.net.vouching import CALLER_KEY, INTAKE_FIELD, Vouching, is_claimed
from coterie.net.waits import Waits
from coterie.wire.pieces import check_pieces
from coterie.wire.refusal import ErrorReason, Refusal, reason_name

__all__ = [
    "CLOCK_KEY",
    "Guard",
    "certificate_of",
    "current_peer",
    "current_skew_s",
    "make_server",
    "name_caller",
]

_log = structlog.get_logger("coterie.net")
_peer: ContextVar[PeerIdentity] = ContextVar("coterie_peer")
_skew: ContextVar[float | None] = ContextVar("coterie_skew", default=None)
_named: ContextVar[str] = ContextVar("coterie_named", default="the caller")

SERVER_OPTIONS = (
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
    # Bytes that a sender may have in flight before the servicer reads.  gRPC's bandwidth probe would raise this to
    # several megabytes for each stream of a fast connection, which would wait in memory.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 18),
    # Our clients never compress.  Compressed messages are refused, since a small one may unpack to a huge one.
    ("grpc.per_message_decompression", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
)


_LINE_S = 10.0
"""Shortest time between two log lines about the same limit, seconds."""

_CUT = 1024
"""Most cut-off connections that are remembered."""

_SWEEP = 1024
"""Fewest certificates that are remembered before those that have expired are forgotten."""

_HEALTH = "/grpc.health.v1.Health/"
"""Prefix of the health RPCs, which are answered also while the revocation list is stale: NOT_SERVING."""


_BEFORE_PARSING: Mapping[str, Callable[[bytes], None]] = {"/coterie.v1.Orchestrator/Submit": check_pieces}
"""What looks at the bytes of an RPC's messages that would take many times their size when parsed."""

_UNKNOWN = "unknown"
"""Name under which calls of unknown RPCs are counted: text from a caller gets into no metric and no log."""


def current_peer() -> PeerIdentity:
    """Return the caller of the call that is being served."""
    return _peer.get()


def current_skew_s() -> float:
    """Return how far the clock of the caller of the call being served is ahead, seconds; 0 when it states none."""
    return _skew.get() or 0.0


def name_caller(party: str) -> None:
    """Say who makes the call that is being served, where no certificate does, for the words of a refusal."""
    _named.set(party)


def certificate_of(context: Any) -> bytes:
    """Return the certificate (PEM) of a call's caller; empty when it has none."""
    pem: bytes = context.auth_context().get("x509_pem_cert", [b""])[0]
    return pem


def _revoked() -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_REVOKED, "this certificate was revoked", field="certificate")


def _line(fingerprint: bytes, context: Any) -> tuple[bytes | str, str]:
    """Return the caller of a call (certificate fingerprint, else address) and its connection."""
    connection: str = context.peer()
    return fingerprint or connection.rpartition(":")[0], connection


class _Writable:
    """A servicer's context whose ``write`` is replaced, for servicers that write their responses themselves."""

    def __init__(self, context: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        self._context = context
        self.write = send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _Served:
    """One call while the guard serves it: admits it, counts its bytes and times the servicer.

    Every request is registered with gRPC as a stream, also a single message: gRPC reads a stream only on demand, and
    the guard reads nothing before the caller is authenticated and admitted.
    """

    def __init__(self, guard: Guard, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> None:
        self._guard = guard
        self._method = method
        self._name = method.rsplit("/", 1)[-1]
        self._totals: RpcTotals = guard.meter[method]
        self._handler: Any = handler
        # One for each direction: a servicer may read while it writes.
        self._arrivals = Waits(guard.limits.message_s)
        self._taken = Waits(guard.limits.message_s)
        self._received = 0
        self._caller = ""
        self._place: AdmittedCall

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
        check = _BEFORE_PARSING.get(self._method)
        try:
            if check is not None:
                check(data)
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
        # A call with many items may refuse some of them and accept the others.
        parts = Counter(reason_name(one.reason) for one in getattr(message, "refused", ()))
        if parts:
            self._guard.refused_parts(self._name, parts, self._caller)
        return data

    def _note(self, data: bytes, direction: str) -> None:
        if self._guard.recorder is not None:
            self._guard.recorder.record(rpc=self._name, peer=self._caller, direction=direction, payload=data)

    @contextlib.asynccontextmanager
    async def _unless_gone(self, context: Any) -> AsyncIterator[None]:
        """Cancel a call without an error when its caller cancelled it, while it was served or written to."""
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
        ahead = ahead_s(context.invocation_metadata())
        try:
            peer = self._guard.identify(context)
            self._caller = str(peer)
            if ahead is not None and peer.role:
                self._guard.skews.heard(self._caller, ahead)
            with tracing.serving(self._method, self._caller, context.invocation_metadata()):
                self._place = self._guard.enter(
                    peer, context, upload=self._handler.request_streaming, method=self._method
                )
                self._guard.refuse_claims(context)
                self._guard.authorise(peer, self._method)
                _peer.set(peer)
                _skew.set(ahead)
                with self._guard.open_call(peer):
                    yield
            failed = False
            spent = int((time.perf_counter() - started - self._waited_s) * 1e6)
            told = [(SERVER_TIME_KEY, str(spent))]
            if self._method.startswith(TELLING):
                told.append(stated())
            context.set_trailing_metadata(tuple(told))
        except Refusal as refusal:
            self._guard.refused(self._name, refusal, peer)
            party = str(peer) if peer is not None and peer.role else _named.get()
            await abort(context, explained(refusal, party, ahead))
        except CoterieError as error:
            if isinstance(error, StoreError) and error.trouble:
                unkept = not_kept(error)
                self._guard.refused(self._name, unkept, peer)
                await abort(context, unkept)
            # Messages of our own errors name no private value; the caller is told only the error's code.
            _log.error("rpc failed", rpc=self._name, error=error.code, message=error.message)
            await context.abort(grpc.StatusCode.INTERNAL, f"{error.code}: see the log of the service")
        except grpc.aio.AbortError:
            raise
        except cygrpc.ExecuteBatchError:
            # The caller is gone.
            failed = False
            raise
        except asyncio.CancelledError:
            if peer is None or not self._guard.is_revoked(peer):
                # The caller cancelled; its own meter counts whether the call failed.
                failed = False
                raise
            # The revocation ended the call; the caller is told so.
            self._guard.refused(self._name, _revoked(), peer)
            await abort(context, _revoked())
        except Exception as error:
            # Log only the type: the text of an unforeseen error may hold private values.
            _log.error("rpc failed", rpc=self._name, error=type(error).__name__, exc_info=self._guard.debug)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error: see the log of the service")
        finally:
            total_ms = (time.perf_counter() - started) * 1e3
            self._arrivals.close()
            self._taken.close()
            own_ms = total_ms - self._waited_s * 1e3
            self._totals.finished(total_ms=total_ms, server_ms=own_ms, failed=failed)

    @property
    def _waited_s(self) -> float:
        """Seconds in which the call waited for its caller."""
        return self._arrivals.waited_s + self._taken.waited_s

    async def _read(self, context: Any) -> Any:
        """Return the caller's next message, or EOF; the wait for it is not counted as the servicer's time."""
        try:
            with self._arrivals:
                return await context.read()
        except TimeoutError as error:
            raise self._slow("nothing arrived") from error

    def _slow(self, what: str) -> Refusal:
        return self._guard.admission.too_slow(self._place, what)

    async def _arriving(self, context: Any) -> AsyncIterator[Any]:
        """Yield the request stream's messages; raise when the caller is too slow."""
        limits, before = self._guard.limits, self._arrivals.waited_s
        while True:
            data = await self._read(context)
            if data is grpc.aio.EOF:
                return
            waited = self._arrivals.waited_s - before
            yield self._decode(data)
            if waited > limits.message_s and self._received < waited * limits.least_kib_s * 1024:
                raise self._slow("little arrived")

    async def _single(self, context: Any) -> Any:
        """Return the request of a call with a single message; anything after it is not read."""
        data = await self._read(context)
        if data is grpc.aio.EOF:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD, "no message", field="message", expected="one message"
            )
        return self._decode(data)

    def wrapped(self) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler with authentication, admission, authorisation and metering around it."""
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
                try:
                    with self._taken:
                        await context.write(data)
                except TimeoutError as error:
                    raise self._slow("nothing was taken") from error

            async with self._unless_gone(context), self._admitted(context):
                if handler.request_streaming:
                    responses = handler.stream_stream(self._arriving(context), context)
                else:
                    request = await self._single(context)
                    responses = handler.unary_stream(request, _Writable(context, send))
                if inspect.iscoroutine(responses):
                    # The servicer writes to the context itself, as the health service's Watch does.
                    await responses
                    return
                # Close the servicer's generator at once when the caller goes away, not when it is garbage-collected.
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        await send(response)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.stream_unary_rpc_method_handler(unary)


class _Stranger(_Served):
    """A call of an RPC that the server does not have: it counts towards its caller's limits and is refused unread."""

    def __init__(self, guard: Guard) -> None:
        super().__init__(guard, _UNKNOWN, grpc.unary_unary_rpc_method_handler(cast(Any, None)))

    def wrapped(self) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that ends the call with UNIMPLEMENTED."""

        async def refuse(_: Any, context: Any) -> None:
            async with self._unless_gone(context), self._admitted(context):
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such call here")

        return grpc.stream_unary_rpc_method_handler(refuse)


class Guard(grpc.aio.ServerInterceptor):
    """The interceptor that authenticates, limits, authorises and meters every call to a process.

    Parameters
    ----------
    meter : Meter
        Where served calls are counted.
    recorder : Recorder, optional
        Takes the messages received and sent.
    anonymous : iterable of str
        Full method names that may be called without a certificate (enrolment only).
    debug : bool
        Whether to log tracebacks of unforeseen errors, which may show private values.
    limits : Limits, optional
        Limits on calls, connections and messages.
    vouching : Vouching, optional
        Takes the word of intakes for the callers whose calls they hand on.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        recorder: Recorder | None = None,
        anonymous: Iterable[str] = (),
        debug: bool = False,
        limits: Limits | None = None,
        vouching: Vouching | None = None,
    ) -> None:
        self.meter = meter
        self.recorder = recorder
        self.debug = debug
        self.refusals: dict[tuple[str, str], int] = {}
        self.limits = limits or Limits()
        self.admission = Admission(self.limits)
        self.skews = Skews()
        self._logged: dict[str, float] = {}
        self._anonymous = frozenset(anonymous)
        self._identities: dict[bytes, tuple[PeerIdentity, float]] = {}
        self._sweep_at = _SWEEP
        self._revoked: frozenset[bytes] = frozenset()
        self._usable = True
        self._cut: dict[str, None] = {}
        self._open: dict[bytes, set[asyncio.Task[Any]]] = {}
        self._vouching = vouching

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of one call with the guard around it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return _Stranger(self).wrapped()
        return _Served(self, str(handler_call_details.method), handler).wrapped()

    @property
    def vouched_for(self) -> bool:
        """Whether calls come through intakes, which vouch for their callers."""
        return self._vouching is not None

    def identify(self, context: Any) -> PeerIdentity:
        """Return the caller's identity, read from its certificate; an empty identity without one.

        The caller of a call that an intake hands on is the one whose certificate comes with the call.

        Raises
        ------
        Refusal
            BAD_SIGNATURE when the certificate carries no role of ours, or has expired since the connection was
            made: TLS checks it only at the handshake.  As `Vouching.caller`, and REVOKED, for an intake.  A claim of
            another caller is refused once that caller is admitted, by `refuse_claims`.
        """
        pem = certificate_of(context)
        if not pem:
            return PeerIdentity(role="", name="", fingerprint=b"")
        identity = self._known(pem, self._from_pem)
        if self._vouching is not None and self._vouching.is_intake(identity):
            caller = self._vouching.caller(identity, context.invocation_metadata())
            if caller is not None:
                if self.is_revoked(identity):
                    raise _revoked()
                return self._known(caller, self._vouching.checked)
        return identity

    def _known(self, shown: bytes, read: Callable[[bytes], tuple[PeerIdentity, float]]) -> PeerIdentity:
        """Return the identity in a certificate, read the first time that it is shown."""
        known = self._identities.get(shown)
        if known is None:
            found = read(shown)
            if len(self._identities) >= self._sweep_at:
                self._forget_expired()
            known = self._identities[shown] = found
        identity, end = known
        if time.time() >= end:
            raise Refusal(
                ErrorReason.ERROR_REASON_BAD_SIGNATURE, "the certificate has expired", field="certificate"
            )
        return identity

    @staticmethod
    def _from_pem(pem: bytes) -> tuple[PeerIdentity, float]:
        try:
            identity = PeerIdentity.from_certificate(pem)
        except CertificateError as error:
            raise Refusal(
                ErrorReason.ERROR_REASON_BAD_SIGNATURE, error.message, field="certificate"
            ) from error
        return identity, x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()

    def enter(self, peer: PeerIdentity, context: Any, *, upload: bool, method: str) -> AdmittedCall:
        """Admit a call; its place is held until its response was sent.

        Raises
        ------
        Refusal
            OVERLOADED when a limit is reached.
        """
        caller, connection = _line(peer.fingerprint, context)
        try:
            place = self.admission.enter(
                caller, connection, upload=upload, essential=method.startswith(_HEALTH), role=peer.role
            )
        except Refusal as refusal:
            if refusal.field == "limits.resets_per_s" and not self._handed_on(context):
                self._cut_off(connection, peer)
            raise
        task = asyncio.current_task()
        if task is not None:
            # Not already when the servicer returns: a caller may be slow to take the response.
            task.add_done_callback(lambda _: self.admission.leave(place))
        return place

    def given_up(self, context: Any) -> None:
        """Count a call that its caller cancelled, and cut off a caller that floods the service with cancelled calls."""
        if self._handed_on(context):
            # The intake counts its caller's, and the connection is of all callers.
            return
        pem = certificate_of(context)
        known = self._identities.get(pem)
        peer = known[0] if known else PeerIdentity(role="", name="", fingerprint=b"")
        caller, connection = _line(peer.fingerprint, context)
        if self.admission.gave_up(caller, peer.role):
            self._cut_off(connection, peer)

    def refuse_claims(self, context: Any) -> None:
        """Refuse the metadata of an intake from anybody who is none.

        Raises
        ------
        Refusal
            WRONG_ROLE.
        """
        if is_claimed(context.invocation_metadata()) and not self._from_intake(context):
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_ROLE,
                "a call is handed on by a caller that is no intake of this service",
                field="certificate",
                expected="a call without the metadata of intakes",
            )

    def require_intake(self, context: Any) -> PeerIdentity:
        """Return the caller of the call that is being served, which must be an intake of this service, for itself.

        Raises
        ------
        Refusal
            WRONG_ROLE.
        """
        peer = current_peer()
        claimed = is_claimed(context.invocation_metadata())
        if not claimed or self._vouching is None or not self._vouching.is_intake(peer):
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_ROLE,
                f"{peer} is no intake of this service",
                field="certificate",
                expected="a certificate of this service, and the metadata of its intakes",
            )
        return peer

    def vouched(self, certificate: bytes) -> PeerIdentity:
        """Return the identity in the certificate (DER) of a caller whom an intake speaks for.

        Raises
        ------
        Refusal
            BAD_SIGNATURE, as from `identify`.
        """
        if self._vouching is None:
            raise AssertionError("a service without intakes takes nobody's word")
        return self._known(certificate, self._vouching.checked)

    @contextlib.contextmanager
    def speaking_for(self, peer: PeerIdentity, method: str) -> Iterator[None]:
        """Serve a caller whom an intake speaks for within this context, which a revocation of the caller cancels.

        Raises
        ------
        Refusal
            As from `authorise`.
        """
        self.authorise(peer, method)
        token = _peer.set(peer)
        try:
            with self.open_call(peer):
                yield
        except asyncio.CancelledError:
            if self.is_revoked(peer):
                raise _revoked() from None
            raise
        finally:
            _peer.reset(token)

    def _from_intake(self, context: Any) -> bool:
        """Return whether the connection of a call is an intake's, by its certificate and nothing that it says."""
        known = self._identities.get(certificate_of(context))
        if known is None or self._vouching is None or self.is_revoked(known[0]):
            return False
        return self._vouching.is_intake(known[0])

    def _handed_on(self, context: Any) -> bool:
        """Return whether an intake hands a call on."""
        return self._from_intake(context) and any(
            key == CALLER_KEY for key, _ in context.invocation_metadata() or ()
        )

    def is_cut_off(self, context: Any) -> bool:
        """Return whether the connection of a call was cut off, so that no response can reach the caller."""
        return bool(self._cut) and context.peer() in self._cut

    def _cut_off(self, connection: str, peer: PeerIdentity) -> None:
        """Close a connection, and do nothing for its further calls, which may arrive before it is closed."""
        if connection in self._cut:
            return
        self._cut[connection] = None
        if len(self._cut) > _CUT:
            del self._cut[next(iter(self._cut))]
        if self._worth_a_line("cut off"):
            _log.warning("cut off", limit="resets_per_s", peer=str(peer))
        cut_off(connection)

    def _forget_expired(self) -> None:
        # Parties renew their certificates; entries of expired ones are dropped.
        now = time.time()
        self._identities = {pem: known for pem, known in self._identities.items() if now < known[1]}
        # Not at each new certificate: very many callers come at once, as after a take-over.
        self._sweep_at = max(_SWEEP, 2 * len(self._identities))

    def authorise(self, peer: PeerIdentity, method: str) -> None:
        """Check that a caller's role may call an RPC and that its certificate is not revoked.

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
        """Return whether the caller's certificate was revoked."""
        return peer.fingerprint in self._revoked

    def revoke(self, fingerprints: Iterable[bytes]) -> None:
        """Refuse these certificates from now on and cancel their open calls."""
        self._revoked = frozenset(fingerprints)
        for fingerprint in self._revoked:
            for task in self._open.get(fingerprint, ()):
                task.cancel()

    def fail_closed(self, closed: bool) -> None:
        """Refuse every caller while ``closed`` is true: the revocation list is stale."""
        self._usable = not closed

    def refused(self, rpc: str, refusal: Refusal, peer: PeerIdentity | None) -> None:
        """Count and log a refusal: as a warning, but for `NOT_READY`, which any caller of a starting service gets."""
        key = (rpc, refusal.name)
        self.refusals[key] = self.refusals.get(key, 0) + 1
        if refusal.reason == ErrorReason.ERROR_REASON_OVERLOADED and not self._worth_a_line(refusal.field):
            return
        if refusal.field == INTAKE_FIELD:
            # The intake asks each second, and the operator needs to know both releases.
            if self._worth_a_line(refusal.field):
                _log.warning("an intake is of another version", error=refusal.message)
            return
        log = _log.info if refusal.reason == ErrorReason.ERROR_REASON_NOT_READY else _log.warning
        log("refused", rpc=rpc, reason=refusal.name, field=refusal.field, peer=str(peer) if peer else "")

    def _worth_a_line(self, limit: str) -> bool:
        """Return whether to log a refusal over a limit: at most one line per limit in `_LINE_S`."""
        now = time.monotonic()
        if now - self._logged.get(limit, -_LINE_S) < _LINE_S:
            return False
        self._logged[limit] = now
        return True

    def refused_parts(self, rpc: str, parts: Mapping[str, int], peer: str) -> None:
        """Count and log the refused items of a call that accepted others; ``parts`` counts them by short reason."""
        for reason, count in parts.items():
            self.refusals[rpc, reason] = self.refusals.get((rpc, reason), 0) + count
            _log.warning("refused in part", rpc=rpc, reason=reason, parts=count, peer=peer)

    @contextlib.contextmanager
    def open_call(self, peer: PeerIdentity) -> Any:
        """Register the call's task while it runs, so that a revocation can cancel it."""
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
    """gRPC's server, made to survive calls whose method name is not UTF-8, which would end the original.

    Calls of registered methods come with a known name.  All other calls are taken here without decoding their names,
    and go to the guard with an empty name.
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
    """A gRPC server that uses `_Listener` where this release of gRPC allows it."""

    def __init__(self, guard: Guard, options: Sequence[tuple[str, int]]) -> None:
        super().__init__(None, (), [guard], options, None, None)
        # Private names of gRPC, which a release may change: then the original server is used.
        if hasattr(cygrpc.AioServer, "_make_request_call_future") and all(
            hasattr(cygrpc, name) for name in _LISTENER_NEEDS
        ):
            self._server = _Listener(self._loop, None, (), (guard,), tuple(options), None)
            self._server.guard = guard
        else:
            _log.warning("this gRPC cannot be kept from ending at a call whose name is no text")


def make_server(guard: Guard) -> grpc.aio.Server:
    """Return a server behind a guard, with the guard's limits; servicers must be registered by their methods."""
    options = dict((*SERVER_OPTIONS, *guard.limits.options()))
    if guard.vouched_for:
        # One connection of an intake carries the calls of very many callers.  Given once: gRPC keeps the first value.
        options["grpc.max_concurrent_streams"] = guard.limits.calls
    server: Any = _Server(guard, tuple(options.items()))
    return cast(grpc.aio.Server, server)
