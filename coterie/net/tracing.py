"""Spans of calls and rounds, exported by OpenTelemetry; off unless a service's settings turn them on.

A call carries its context in the metadata ``traceparent`` (W3C Trace Context), so that the span of the service that
answers lies below that of the caller.  All that is done in one round of a run lies in one trace, whose id every party
computes from the run and the round: nothing has to be told.

Spans name calls, parties, runs, rounds and steps; neither users nor items, and nothing of what messages hold.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from coterie.errors import PreflightError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, SpanContext

__all__ = [
    "CLOSING_S",
    "TRACEPARENT",
    "Tracing",
    "calling",
    "in_round",
    "round_over",
    "serving",
    "start",
    "stop",
]

TRACEPARENT = "traceparent"
"""Metadata of a call: version, trace id, id of the caller's span and flags, in hexadecimal."""

CLOSING_S = 2.0
"""Longest time that a process which stops waits for the collector, seconds."""

_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LEFT_OUT = ("/Poll", "/grpc.health.v1.Health/", "/grpc.reflection.")
"""Calls that are held until something happens, or that only look whether a service is there."""

_tracing: Tracing | None = None
_within: ContextVar[SpanContext | None] = ContextVar("coterie-span", default=None)


class Tracing:
    """Makes the spans of one process.

    Parameters
    ----------
    service : str
        Role and name of the process.
    exporter : SpanExporter, optional
        Takes finished spans; OTLP over gRPC when left out, to where the variables ``OTEL_EXPORTER_OTLP_*`` say.

    Raises
    ------
    PreflightError
        OpenTelemetry is not installed.
    """

    def __init__(self, service: str, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        except ModuleNotFoundError as error:
            raise PreflightError(
                "traces are on, and OpenTelemetry is not installed",
                hint="pip install 'coterie[traces]', or leave `traces` out",
            ) from error
        self._trace = trace
        self._ids = _ids()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("coterie")

    def close(self) -> None:
        """Export what is left, for `CLOSING_S` at most, and end.

        A collector may take a connection and not answer; the exporter alone would wait for it for half a minute.
        """
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSING_S)

    def begin(
        self, name: str, kind: str, above: SpanContext | None, attributes: dict[str, str | int]
    ) -> Span:
        """Begin a span.

        Parameters
        ----------
        name : str
        kind : str
            ``"CLIENT"``, ``"SERVER"`` or ``"INTERNAL"``.
        above : SpanContext or None
            Where it lies below; at the root of a trace of its own when None.
        attributes : dict
        """
        context = self._trace.set_span_in_context(
            self._trace.INVALID_SPAN if above is None else self._trace.NonRecordingSpan(above)
        )
        return self._tracer.start_span(
            name, context, kind=getattr(self._trace.SpanKind, kind), attributes=attributes
        )

    def failed(self, span: Span, words: str) -> None:
        """Mark a span as failed."""
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, words))

    def received(self, held: str) -> SpanContext | None:
        """Return the context that a call carries; None when it is no valid one."""
        found = _FORM.fullmatch(held)
        if found is None:
            return None
        context = self._context(int(found[1], 16), int(found[2], 16), int(found[3], 16) & 1)
        return context if context.is_valid else None

    def of_round(self, run: str, number: int) -> SpanContext:
        """Return the context at the root of a round's trace."""
        digest = hashlib.sha256(f"coterie round {run} {number}".encode()).digest()
        return self._context(int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big"), 1)

    def root(self, run: str, number: int, seconds: Iterable[tuple[str, float]], reason: str) -> None:
        """Export the span of a whole round that has just ended, with one below it for each phase.

        Parameters
        ----------
        run : str
        number : int
        seconds : iterable of (str, float)
            Phases and how long they took, in order.
        reason : str
            Why the round was abandoned; empty where it was applied.
        """
        phases = [(name, int(1e9 * each)) for name, each in seconds]
        end, place = time.time_ns(), self.of_round(run, number)
        at = end - sum(length for _, length in phases)
        attributes = _of_round(run, number)
        with self._ids.next(place.trace_id, place.span_id):
            whole = self._tracer.start_span(
                "round",
                self._trace.set_span_in_context(self._trace.INVALID_SPAN),
                attributes=attributes,
                start_time=at,
            )
        below = self._trace.set_span_in_context(self._trace.NonRecordingSpan(place))
        for name, length in phases:
            self._tracer.start_span(name, below, attributes=attributes, start_time=at).end(at + length)
            at += length
        if reason:
            self.failed(whole, reason)
        whole.end(end)

    def _context(self, trace_id: int, span_id: int, sampled: int) -> SpanContext:
        flags = self._trace.TraceFlags(sampled)
        return self._trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)


def _ids() -> Any:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """Random ids, except for the next span where both are given."""

        def __init__(self) -> None:
            self._given: tuple[int, int] | None = None

        @contextmanager
        def next(self, trace_id: int, span_id: int) -> Iterator[None]:
            self._given = trace_id, span_id
            try:
                yield
            finally:
                self._given = None

        def generate_trace_id(self) -> int:
            return super().generate_trace_id() if self._given is None else self._given[0]

        def generate_span_id(self) -> int:
            return super().generate_span_id() if self._given is None else self._given[1]

    return Ids()


def start(service: str, exporter: SpanExporter | None = None) -> None:
    """Turn spans on in this process; raises as `Tracing`."""
    global _tracing
    _tracing = Tracing(service, exporter)


def stop() -> None:
    """Export what is left, for `CLOSING_S` at most, and turn spans off."""
    global _tracing
    if _tracing is not None:
        _tracing.close()
        _tracing = None


def _of_round(run: str, number: int) -> dict[str, str | int]:
    return {"coterie.run": run, "coterie.round": number}


def _named(method: str) -> tuple[str, dict[str, str | int]]:
    service, _, name = method.lstrip("/").partition("/")
    return f"{service}/{name}", {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}


@contextmanager
def calling(method: str, peer: str) -> Iterator[Sequence[tuple[str, str]]]:
    """Make the span of a call to another service; yield the metadata that carries it, none without spans.

    Parameters
    ----------
    method : str
        Full name of the RPC.
    peer : str
        Role and name of the service that is called.
    """
    tracing = _tracing
    if tracing is None or any(part in method for part in _LEFT_OUT):
        yield ()
        return
    name, attributes = _named(method)
    span = tracing.begin(name, "CLIENT", _within.get(), {**attributes, "server.address": peer})
    made = span.get_span_context()
    try:
        yield ((TRACEPARENT, f"00-{made.trace_id:032x}-{made.span_id:016x}-{int(made.trace_flags):02x}"),)
    except BaseException as error:
        _failed(tracing, span, error)
        raise
    finally:
        span.end()


@contextmanager
def serving(method: str, caller: str, metadata: Iterable[tuple[str, Any]] | None) -> Iterator[None]:
    """Make the span of a call that this process answers; calls that it makes meanwhile lie below it.

    Parameters
    ----------
    method : str
        Full name of the RPC.
    caller : str
        Role and name of the authenticated caller.
    metadata : iterable of (str, str or bytes), optional
        What the call carries.
    """
    tracing = _tracing
    if tracing is None or any(part in method for part in _LEFT_OUT):
        yield
        return
    above = next(
        (
            tracing.received(value)
            for key, value in metadata or ()
            if key == TRACEPARENT and isinstance(value, str)
        ),
        None,
    )
    name, attributes = _named(method)
    with _below(tracing, name, "SERVER", above, {**attributes, "client.address": caller}):
        yield


@contextmanager
def in_round(name: str, run: str, number: int) -> Iterator[None]:
    """Make the span of a party's work in a round of a run; calls that it makes meanwhile lie below it.

    Parameters
    ----------
    name : str
        What is done: ``"answer submit"``.
    run : str
    number : int
        Of the round.
    """
    tracing = _tracing
    if tracing is None:
        yield
        return
    with _below(tracing, name, "INTERNAL", tracing.of_round(run, number), _of_round(run, number)):
        yield


@contextmanager
def _below(
    tracing: Tracing,
    name: str,
    kind: str,
    above: SpanContext | None,
    attributes: dict[str, str | int],
) -> Iterator[None]:
    """Make a span as `Tracing.begin`, below which calls lie that are made meanwhile."""
    span = tracing.begin(name, kind, above, attributes)
    token = _within.set(span.get_span_context())
    try:
        yield
    except BaseException as error:
        _failed(tracing, span, error)
        raise
    finally:
        _within.reset(token)
        span.end()


def round_over(run: str, number: int, seconds: Iterable[tuple[str, float]], reason: str) -> None:
    """Make the span of a whole round that has just ended; as `Tracing.root`."""
    if _tracing is not None:
        _tracing.root(run, number, seconds, reason)


def _failed(tracing: Tracing, span: Span, error: BaseException) -> None:
    """Mark a span by the kind of its error, whose text may hold more than a span should. Being stopped is none."""
    if not isinstance(error, asyncio.CancelledError | GeneratorExit):
        tracing.failed(span, type(error).__name__)
