"""Contexts of spans: what a call carries, what all parties of a round compute, and a service without OpenTelemetry."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from coterie.errors import PreflightError
from coterie.net import tracing

METHOD = "/coterie.v1.Orchestrator/Submit"


class Kept(SpanExporter):
    """Keeps spans."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


@pytest.fixture
def kept() -> Iterator[Kept]:
    exporter = Kept()
    tracing.start("cos/cos", exporter)
    yield exporter
    tracing.stop()


def by_name(kept: Kept) -> dict[str, Any]:
    tracing.stop()
    return {span.name: span for span in kept.spans}


def test_without_traces_calls_carry_nothing() -> None:
    with tracing.calling(METHOD, "cos/cos") as carried, tracing.serving(METHOD, "client/a", carried):
        assert not carried
    with tracing.in_round("answer submit", "run", 1):
        pass
    tracing.round_over("run", 1, [("submit", 1.0)], "")


def test_a_call_within_a_round_lies_in_the_rounds_trace_and_the_answer_below_the_call(kept: Kept) -> None:
    with tracing.in_round("answer submit", "run", 7), tracing.calling(METHOD, "cos/cos") as carried:
        pass
    with tracing.serving(METHOD, "client/a", carried), tracing.calling("/a.B/C", "thirdparty/t"):
        pass
    tracing.round_over("run", 7, [("submit", 2.0), ("unmask", 1.0)], "too few")
    spans = by_name(kept)
    answer, whole, submit, other = (spans[one] for one in ("answer submit", "round", "submit", "a.B/C"))
    assert len({span.context.trace_id for span in spans.values()}) == 1
    assert answer.parent.span_id == submit.parent.span_id == whole.context.span_id
    assert whole.parent is None
    assert whole.end_time - whole.start_time == 3_000_000_000
    assert whole.status.description == "too few"
    served = next(span for span in kept.spans if span.kind.name == "SERVER")
    assert other.parent.span_id == served.context.span_id
    called = next(span for span in kept.spans if span.name == served.name and span.kind.name == "CLIENT")
    assert served.parent.span_id == called.context.span_id
    assert called.parent.span_id == answer.context.span_id


def test_rounds_and_runs_have_traces_of_their_own(kept: Kept) -> None:
    for run, number in (("a", 1), ("a", 2), ("b", 1)):
        with tracing.in_round(f"{run}{number}", run, number):
            pass
    assert len({span.context.trace_id for span in by_name(kept).values()}) == 3


@given(
    st.one_of(
        st.text(max_size=80),
        st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", fullmatch=True),
        st.binary(max_size=60),
        st.just(f"00-{'0' * 32}-{'1' * 16}-01"),
    )
)
def test_what_a_caller_sends_as_context_is_a_valid_one_or_is_passed_over(held: str | bytes) -> None:
    exporter = Kept()
    tracing.start("cos/cos", exporter)
    with tracing.serving(METHOD, "client/a", [("other", "x"), (tracing.TRACEPARENT, held)]):
        pass
    tracing.stop()
    if not exporter.spans:
        # Whoever calls does not sample this trace, and so its calls are in nobody's.
        assert isinstance(held, str)
        assert not int(held[-2:], 16) & 1
        return
    (span,) = exporter.spans
    if span.parent is None:
        return
    assert isinstance(held, str)
    _, trace, above, _ = held.split("-")
    assert (span.context.trace_id, span.parent.span_id) == (int(trace, 16), int(above, 16))
    assert int(trace, 16)
    assert int(above, 16)
    assert held.startswith("00-")


def test_a_service_without_the_packages_says_which_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(PreflightError, match="OpenTelemetry is not installed") as refused:
        tracing.start("cos/cos")
    assert "coterie[traces]" in str(refused.value.hint)
    with tracing.calling(METHOD, "cos/cos") as carried:
        assert not carried
