"""Spans of a run over real processes, at a collector that speaks OTLP over a real socket."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from coterie.net import tracing

ENDS = """
import time
from coterie.net import tracing
tracing.start("cos/cos")
for number in range(4000):
    with tracing.in_round("work", "run", number):
        pass
began = time.monotonic()
tracing.stop()
print(time.monotonic() - began, time.time())
"""
ROUNDS = {
    "system": "fedncf",
    "fedncf": {"model": "gmf", "dim": 4},
    "rounds": {"cohorts": "all", "passes": 3, "evaluate_every": 3},
    "federation": {"hosts": 3},
}
CLIENT, SERVER = Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_SERVER


class Collector(otlp_grpc.TraceServiceServicer):
    """Keeps all spans by service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        self.raw: list[bytes] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the contract's name
        self.raw.append(request.SerializeToString())
        for one in request.resource_spans:
            (name,) = (
                each.value.string_value for each in one.resource.attributes if each.key == "service.name"
            )
            self.spans += [(name, span) for scope in one.scope_spans for span in scope.spans]
        return otlp.ExportTraceServiceResponse()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    server, collects = grpc.server(futures.ThreadPoolExecutor(4)), Collector()
    otlp_grpc.add_TraceServiceServicer_to_server(collects, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield collects
    server.stop(0)


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """Return a file of ratings by users, of items, whose names occur nowhere else."""
    rng = np.random.default_rng(0)
    rows = [
        f"reader-{user:04d}-of-the-library,volume-{item:04d}-on-the-shelf,{rng.integers(1, 6)},{1_600_000_000 + user}"
        for user in range(60)
        for item in rng.choice(120, 50, replace=False)
    ]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(["user,item,rating,timestamp", *rows]) + "\n")
    return path


async def test_a_round_is_one_trace_of_all_parties_and_calls_lie_below_their_callers(
    small, federation, collector, named
):
    keys = {role: {"traces": True} for role in ("cos", "client", "thirdparty", "data-owner")}
    settings = small(**ROUNDS, secure_sum="masked")
    settings = settings.model_copy(update={"data": settings.data.model_validate({"path": named})})
    async with federation(settings, keys=keys) as running:
        await running.start()
        report = await running.finish()
        users = running.feed.dataset.users
        items = running.feed.dataset.items
    await asyncio.sleep(0)
    assert report["phase"] == "done"
    names = {name for name, _ in collector.spans}
    assert names == {
        *running.parties("client"),
        "cos/cos",
        "thirdparty/directory",
        *running.parties("data-owner"),
    }
    by_id = {span.span_id: (name, span) for name, span in collector.spans}
    assert len(by_id) == len(collector.spans)
    # Each answered call lies below the span of whoever made it, in the same trace.
    served = [(name, span) for name, span in collector.spans if span.kind == SERVER and span.parent_span_id]
    assert {(name, span.name) for name, span in served} >= {
        ("cos/cos", "coterie.v1.Orchestrator/Register"),
        ("cos/cos", "coterie.v1.Orchestrator/Submit"),
    }
    for name, span in served:
        caller, above = by_id[span.parent_span_id]
        assert (above.kind, above.name, above.trace_id) == (CLIENT, span.name, span.trace_id)
        assert caller != name
        assert above.start_time_unix_nano <= span.start_time_unix_nano
    # All of a round is one trace: the round and its phases at the COS, what hosts answered, the calls for it.
    rounds = [span for name, span in collector.spans if span.name == "round"]
    assert len(rounds) == len(report["rounds"])
    assert len({span.trace_id for span in rounds}) == len(rounds)
    for whole in rounds:
        assert not whole.parent_span_id
        parts = [(name, span) for name, span in collector.spans if span.trace_id == whole.trace_id]
        said = {(name, span.name) for name, span in parts}
        assert {
            ("cos/cos", "unmask"),
            ("cos/cos", "apply sum"),
            ("cos/cos", "coterie.v1.Orchestrator/Submit"),
        } <= said
        for host in running.parties("client"):
            assert {(host, "answer advertise"), (host, "answer submit")} <= said
        phases = [span for _, span in parts if span.parent_span_id == whole.span_id and span.kind != SERVER]
        assert min(one.start_time_unix_nano for one in phases) >= whole.start_time_unix_nano - 60_000_000_000
        length = whole.end_time_unix_nano - whole.start_time_unix_nano
        own = sum(
            one.end_time_unix_nano - one.start_time_unix_nano
            for name, one in parts
            if name == "cos/cos" and one.parent_span_id == whole.span_id
        )
        assert abs(length - own) < 2_000
    # What is held until something happens would only hide the rest.
    assert not any("Poll" in span.name or "Health" in span.name for _, span in collector.spans)
    told = b"".join(collector.raw)
    assert b"coterie.v1.Orchestrator/Submit" in told
    told_names = [*users, *items]
    assert len(told_names) == 180
    assert all(one.endswith(("-of-the-library", "-on-the-shelf")) for one in told_names)
    assert not [one for one in told_names if one.encode() in told]


def test_a_collector_that_takes_connections_and_does_not_answer_holds_a_process_for_two_seconds(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        stopped = subprocess.run(
            [sys.executable, "-c", ENDS], capture_output=True, text=True, check=True, timeout=60
        )
        over = time.time()
    spent, stopped_at = map(float, stopped.stdout.split())
    assert spent < tracing.CLOSING_S + 2
    assert over - stopped_at < 5, "the process hangs at its end"


async def test_a_service_whose_collector_does_not_answer_stops_in_time_with_its_account_written_before(
    small, federation, monkeypatch
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with federation(small(**ROUNDS), keys={"cos": {"traces": True}}) as running:
            await running.start()
            await running.finish()
            assert running.ended_well()
            written = (running.children["cos/cos"].state / "account.json").stat().st_mtime
            stopped = datetime.fromisoformat(running.log("cos/cos")[-1]["timestamp"]).timestamp()
    assert stopped - written > tracing.CLOSING_S / 2


async def test_a_call_that_is_refused_is_a_failed_span_and_a_context_that_is_none_begins_a_trace(
    small, federation, collector
):
    keys = {"cos": {"traces": True}}
    async with federation(small(**ROUNDS), keys=keys) as running:
        await running.start()
        channel = running.channel("cos/cos")
        for context in ("00-" + "0" * 32 + "-" + "1" * 16 + "-01", "01-zz", "00-" + "A" * 5000, ""):
            stub = channel._line.inner.unary_unary("/coterie.v1.Orchestrator/Fetch")
            with pytest.raises(grpc.aio.AioRpcError):
                await stub(b"", timeout=20, metadata=(("traceparent", context),))
        await channel.close()
        await running.finish()
    fetched = [span for _, span in collector.spans if span.name.endswith("/Fetch") and span.status.code]
    assert len(fetched) >= 4
    assert {span.status.code for span in fetched} == {Status.STATUS_CODE_ERROR}
    assert {span.status.message for span in fetched} == {"Refusal"}
    assert not any(span.parent_span_id for span in fetched)
