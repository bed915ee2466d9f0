from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import PeerError
from coterie.net.retry import Retry
from coterie.net.status import abort, from_rpc_error, status_code
from coterie.wire.refusal import ErrorReason, Refusal

REASONS = [reason for reason in ErrorReason.values() if reason != ErrorReason.ERROR_REASON_UNSPECIFIED]
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
KEY = "grpc-status-details-bin"


class CallEndedError(Exception):
    """Raised by the context of a call that is ended."""


class Context:
    """The part of a servicer's context that ends a call; keeps what the caller would get."""

    def __init__(self) -> None:
        self.error: grpc.aio.AioRpcError | None = None

    async def abort(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
        self.error = rpc_error(code, details, *metadata)
        raise CallEndedError


def rpc_error(
    code: grpc.StatusCode, details: str = "", *metadata: tuple[str, str | bytes]
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


def sent(refusal: Refusal) -> grpc.aio.AioRpcError:
    """Return what the caller of a refused call gets."""
    context = Context()
    with pytest.raises(CallEndedError):
        asyncio.run(abort(context, refusal))  # type: ignore[arg-type]
    assert context.error is not None
    return context.error


@given(st.sampled_from(REASONS), TEXT, TEXT, TEXT)
def test_a_refusal_arrives_as_it_was_sent(
    reason: ErrorReason.ValueType, message: str, field: str, expected: str
) -> None:
    error = sent(Refusal(reason, message, field=field, expected=expected))
    received = from_rpc_error(error, "cos/cos")
    assert isinstance(received, Refusal)
    assert (received.reason, received.message, received.field, received.expected) == (
        reason,
        message,
        field,
        expected,
    )
    assert error.code() == status_code(reason)
    assert error.details() == message


@pytest.mark.parametrize("reason", REASONS)
def test_no_refusal_looks_like_success_or_like_a_fault_of_the_server(reason: ErrorReason.ValueType) -> None:
    assert status_code(reason) not in (
        grpc.StatusCode.OK,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


@pytest.mark.parametrize("reason", REASONS)
def test_only_a_service_that_is_not_ready_is_asked_again_at_once(reason: ErrorReason.ValueType) -> None:
    attempts = 0

    async def refused() -> None:
        nonlocal attempts
        attempts += 1
        raise rpc_error(status_code(reason), "no")

    async def nothing(_: float) -> None:
        return

    times = iter(range(100))
    retry = Retry(limit_s=3.0, sleep=nothing, clock=lambda: float(next(times)))
    with pytest.raises(grpc.aio.AioRpcError):
        asyncio.run(retry(refused))
    assert (attempts > 1) == (reason == ErrorReason.ERROR_REASON_NOT_READY)


@given(st.sampled_from(list(grpc.StatusCode)), TEXT)
def test_a_failure_that_is_no_refusal_says_whom_it_was_and_what_happened(
    code: grpc.StatusCode, details: str
) -> None:
    found = from_rpc_error(rpc_error(code, details, ("other", "value")), "cos/cos")
    assert type(found) is PeerError
    assert found.message == f"cos/cos: {code.name}: {details}"


def details_of(reason: str, domain: str) -> bytes:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain))
    return status_pb2.Status(code=3, message="text", details=[detail]).SerializeToString()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\xff\xff",
        b"not a status",
        "text where bytes belong",
        status_pb2.Status(code=3, message="no details").SerializeToString(),
        details_of("STALE", "somebody.else"),
        status_pb2.Status(
            details=[any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")]
        ).SerializeToString(),
    ],
)
def test_details_that_are_not_ours_are_no_refusal(value: str | bytes) -> None:
    found = from_rpc_error(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "odd", (KEY, value)), "cos/cos")
    assert type(found) is PeerError
    assert "INVALID_ARGUMENT" in found.message


def test_a_reason_of_a_later_release_is_a_refusal_all_the_same() -> None:
    error = rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "text", (KEY, details_of("NEWER", "coterie")))
    found = from_rpc_error(error, "cos/cos")
    assert isinstance(found, Refusal)
    assert (found.reason, found.message) == (ErrorReason.ERROR_REASON_UNSPECIFIED, "text")
