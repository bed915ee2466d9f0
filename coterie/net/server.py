"""Servers: a call is authenticated, authorised, metered and, when asked, recorded before a servicer runs."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import grpc
import structlog
from cryptography import x509

from coterie.crypto.authority import PeerIdentity
from coterie.errors import CertificateError, CoterieError, StoreError
from coterie.net.authorisation import may_call
from coterie.net.channel import SERVER_TIME_KEY, Recorder
from coterie.net.meter import Meter, RpcTotals
from coterie.net.status import abort, not_kept
from coterie.wire.refusal import ErrorReason, Refusal, reason_name

__all__ = ["Guard", "current_peer", "make_server"]

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
)


_HEALTH = "/grpc.health.v1.Health/"
"""Health is answered also while the revocation list is too old: it then says NOT_SERVING."""


def current_peer() -> PeerIdentity:
    """Who makes the call that is being served."""
    return _peer.get()


def _revoked() -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_REVOKED, "this certificate was revoked", field="certificate")


class _Served:
    """One call while it is served: counts its bytes and the time that the servicer itself takes."""

    def __init__(self, guard: Guard, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> None:
        self._guard = guard
        self._method = method
        self._name = method.rsplit("/", 1)[-1]
        self._totals: RpcTotals = guard.meter[method]
        self._handler = handler
        self._waited = 0.0
        self._caller: str | None = None
        self._unattributed: list[bytes] = []

    def decode(self, data: bytes) -> Any:
        self._totals.bytes_in += len(data)
        self._note(data, "received")
        decoder = self._handler.request_deserializer
        return decoder(data) if decoder is not None else data

    def encode(self, message: Any) -> bytes:
        encoder = self._handler.response_serializer
        data: bytes = encoder(message) if encoder is not None else message
        self._totals.bytes_out += len(data)
        self._note(data, "sent")
        # A call that takes many items may refuse some and take the others.
        parts = Counter(reason_name(one.reason) for one in getattr(message, "refused", ()))
        if parts:
            self._guard.refused_parts(self._name, parts, self._caller or "")
        return data

    def _note(self, data: bytes, direction: str) -> None:
        recorder = self._guard.recorder
        if recorder is None:
            return
        if self._caller is None:
            # gRPC decodes a single request before it calls the handler, where the caller becomes known.
            self._unattributed.append(data)
        else:
            recorder.record(rpc=self._name, peer=self._caller, direction=direction, payload=data)

    def _attribute(self, peer: PeerIdentity) -> None:
        self._caller = str(peer)
        waiting, self._unattributed = self._unattributed, []
        for data in waiting:
            self._note(data, "received")

    @contextlib.asynccontextmanager
    async def admitted(self, context: Any) -> AsyncIterator[None]:
        started = time.perf_counter()
        failed = True
        peer: PeerIdentity | None = None
        try:
            peer = self._guard.identify(context)
            self._attribute(peer)
            self._guard.authorise(peer, self._method)
            _peer.set(peer)
            with self._guard.open_call(peer):
                yield
            failed = False
            spent = int((time.perf_counter() - started - self._waited) * 1e6)
            context.set_trailing_metadata(((SERVER_TIME_KEY, str(spent)),))
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

    async def arriving(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Hand on a request stream; time spent waiting for the sender is not the servicer's."""
        iterator = requests.__aiter__()
        while True:
            asked = time.perf_counter()
            try:
                request = await iterator.__anext__()
            except StopAsyncIteration:
                return
            finally:
                self._waited += time.perf_counter() - asked
            yield request

    def wrapped(self) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler with everything around it."""
        handler: Any = self._handler
        if handler.request_streaming and handler.response_streaming:

            async def stream_stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
                async with self.admitted(context):
                    # Closed with this one, and not some time later: a caller may go away in the middle.
                    responses = handler.stream_stream(self.arriving(requests), context)
                    async with contextlib.aclosing(responses):
                        async for response in responses:
                            yield response

            return grpc.stream_stream_rpc_method_handler(stream_stream, self.decode, self.encode)
        if handler.request_streaming:

            async def stream_unary(requests: AsyncIterator[Any], context: Any) -> Any:
                async with self.admitted(context):
                    return await handler.stream_unary(self.arriving(requests), context)

            return grpc.stream_unary_rpc_method_handler(stream_unary, self.decode, self.encode)
        if handler.response_streaming:

            async def unary_stream(request: Any, context: Any) -> AsyncIterator[Any]:
                async with self.admitted(context):
                    responses = handler.unary_stream(request, context)
                    if inspect.iscoroutine(responses):
                        # A servicer that writes to the context itself, as the health service's Watch does.
                        await responses
                        return
                    async with contextlib.aclosing(responses):
                        async for response in responses:
                            yield response

            return grpc.unary_stream_rpc_method_handler(unary_stream, self.decode, self.encode)

        async def unary_unary(request: Any, context: Any) -> Any:
            async with self.admitted(context):
                return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(unary_unary, self.decode, self.encode)


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
    """

    def __init__(
        self,
        meter: Meter,
        *,
        recorder: Recorder | None = None,
        anonymous: Iterable[str] = (),
        debug: bool = False,
    ) -> None:
        self.meter = meter
        self.recorder = recorder
        self.debug = debug
        self.refusals: dict[tuple[str, str], int] = {}
        self._anonymous = frozenset(anonymous)
        self._identities: dict[bytes, tuple[PeerIdentity, float]] = {}
        self._revoked: frozenset[bytes] = frozenset()
        self._usable = True
        self._open: dict[bytes, set[asyncio.Task[Any]]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Put the guard around the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return _Served(self, str(handler_call_details.method), handler).wrapped()

    def identify(self, context: Any) -> PeerIdentity:
        """Return the caller by its certificate.

        Raises
        ------
        Refusal
            BAD_SIGNATURE when the certificate carries no role of ours, or has expired since the connection was
            made: TLS looks at it only once.
        """
        pem = context.auth_context().get("x509_pem_cert", [b""])[0]
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
            known = self._identities[pem] = (identity, end)
        identity, end = known
        if time.time() >= end:
            raise Refusal(
                ErrorReason.ERROR_REASON_BAD_SIGNATURE, "the certificate has expired", field="certificate"
            )
        return identity

    def authorise(self, peer: PeerIdentity, method: str) -> None:
        """Check role and revocation.

        Raises
        ------
        Refusal
            WRONG_ROLE, REVOKED, or NOT_READY while the revocation list is too old to trust.
        """
        if method in self._anonymous:
            return
        if not may_call(peer.role, method):
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
        _log.warning(
            "refused", rpc=rpc, reason=refusal.name, field=refusal.field, peer=str(peer) if peer else ""
        )

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


def make_server(guard: Guard) -> grpc.aio.Server:
    """Return a server behind a guard; gRPC's own message limit of 4 MiB stays."""
    return grpc.aio.server(interceptors=[guard], options=list(SERVER_OPTIONS))
