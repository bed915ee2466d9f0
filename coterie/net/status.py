"""Conversion of refusals to gRPC statuses and back: a gRPC code for any client, ``ErrorInfo`` for ours."""

from __future__ import annotations

import time
from typing import NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from coterie.crypto.clocks import moment
from coterie.errors import CoterieError, PeerError, StoreError
from coterie.wire.refusal import LATER, ErrorReason, Refusal, reason_name
from coterie.wire.versions import UnsupportedVersionError

__all__ = [
    "abort",
    "details_of",
    "from_rpc_error",
    "is_away",
    "not_kept",
    "refusal_in",
    "refusal_of",
    "status_code",
    "untimely",
    "waits_for_store",
]

_STORE = "store"
_NOT_KEPT = {
    "full": ErrorReason.ERROR_REASON_STORE_FULL,
    "away": ErrorReason.ERROR_REASON_NOT_READY,
    "": ErrorReason.ERROR_REASON_NOT_READY,
}

_UNTIMELY = ("certificate is not yet valid", "certificate has expired")
"""Words of TLS about a certificate that does not hold at the present time."""

DOMAIN = "coterie"
_DETAILS_KEY = "grpc-status-details-bin"

_CODES: dict[ErrorReason.ValueType, grpc.StatusCode] = {
    ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT: grpc.StatusCode.NOT_FOUND,
    ErrorReason.ERROR_REASON_UNKNOWN_ITEM: grpc.StatusCode.NOT_FOUND,
    ErrorReason.ERROR_REASON_UNKNOWN_ROUND: grpc.StatusCode.NOT_FOUND,
    ErrorReason.ERROR_REASON_WRONG_ROLE: grpc.StatusCode.PERMISSION_DENIED,
    ErrorReason.ERROR_REASON_REVOKED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorReason.ERROR_REASON_BAD_TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    ErrorReason.ERROR_REASON_BAD_SIGNATURE: grpc.StatusCode.UNAUTHENTICATED,
    ErrorReason.ERROR_REASON_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.ERROR_REASON_STORE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.ERROR_REASON_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.ERROR_REASON_TOO_SLOW: grpc.StatusCode.ABORTED,
    ErrorReason.ERROR_REASON_NOT_READY: grpc.StatusCode.UNAVAILABLE,
    ErrorReason.ERROR_REASON_CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    ErrorReason.ERROR_REASON_STALE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.ERROR_REASON_WRONG_SYSTEM: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.ERROR_REASON_WRONG_STATE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.ERROR_REASON_BELOW_FLOOR: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.ERROR_REASON_UNKNOWN_PREKEY: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.ERROR_REASON_UNSUPPORTED_VERSION: grpc.StatusCode.FAILED_PRECONDITION,
}


def status_code(reason: ErrorReason.ValueType) -> grpc.StatusCode:
    """Return the gRPC status code of a reason; INVALID_ARGUMENT where the request itself is wrong."""
    return _CODES.get(reason, grpc.StatusCode.INVALID_ARGUMENT)


def details_of(refusal: Refusal) -> bytes:
    """Return a refusal as a serialised status, for the trailing metadata ``grpc-status-details-bin``."""
    number: int = status_code(refusal.reason).value[0]
    status = status_pb2.Status(code=number, message=refusal.message)
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(
            reason=refusal.name,
            domain=DOMAIN,
            metadata={"field": refusal.field, "expected": refusal.expected},
        )
    )
    if refusal.retry_after_s is not None:
        again = error_details_pb2.RetryInfo()
        again.retry_delay.FromNanoseconds(int(refusal.retry_after_s * 1e9))
        status.details.add().Pack(again)
    details: bytes = status.SerializeToString()
    return details


def not_kept(error: StoreError) -> Refusal:
    """Return the refusal for a failed store write: nothing was kept, and the caller may repeat the request later."""
    return Refusal(
        _NOT_KEPT[error.trouble],
        error.message,
        field=_STORE,
        expected="the same request again, once the store takes writes",
    )


def refusal_of(error: Exception) -> Refusal | None:
    """Return the refusal that a caller gets for an error of a servicer; None for a fault of the service."""
    if isinstance(error, StoreError) and error.trouble:
        return not_kept(error)
    return error if isinstance(error, Refusal) else None


def waits_for_store(error: BaseException) -> bool:
    """Return whether a peer refused because its store takes no writes now; the same request may succeed later."""
    refusal = from_rpc_error(error, "") if isinstance(error, grpc.aio.AioRpcError) else error
    return isinstance(refusal, Refusal) and refusal.field == _STORE and refusal.reason in _NOT_KEPT.values()


def is_away(error: BaseException) -> bool:
    """Return whether a call failed because a peer did not answer it, or is not ready to; later it may."""
    if isinstance(error, Refusal):
        return error.reason in LATER
    return type(error) is PeerError and isinstance(error.__cause__, grpc.aio.AioRpcError)


async def abort(context: grpc.aio.ServicerContext, refusal: Refusal) -> NoReturn:  # type: ignore[type-arg]
    """Abort a call with a refusal; never return."""
    await context.abort(status_code(refusal.reason), refusal.message, ((_DETAILS_KEY, details_of(refusal)),))
    raise AssertionError("abort returned")


def untimely(error: grpc.aio.AioRpcError) -> bool:
    """Return whether TLS refused the peer's certificate, or its authority's, because of the time."""
    details = error.details() or ""
    return any(words in details for words in _UNTIMELY)


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> CoterieError:
    """Return the refusal that a failed call carries, or a PeerError with its code and details.

    Parameters
    ----------
    error : AioRpcError
        As raised by the call.
    peer : str
        Role and name of the peer, for the message.
    """
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            refusal = refusal_in(value)
            if refusal is not None:
                return refusal
    details = error.details() or ""
    hint = None
    if untimely(error):
        hint = (
            f"TLS judges certificates by this machine's clock, which says {moment(time.time())}: if that is right, "
            f"look at the clock and the certificate of {peer or 'the peer'}"
        )
    return PeerError(f"{peer}: {error.code().name}: {details}", hint=hint)


def refusal_in(details: bytes) -> Refusal | None:
    """Return the refusal that `details_of` serialised; None when there is none of ours or it does not parse."""
    try:
        status = status_pb2.Status.FromString(details)
        after_s = None
        for detail in status.details:
            again = error_details_pb2.RetryInfo()
            if detail.Unpack(again):
                after_s = max(0.0, again.retry_delay.seconds + again.retry_delay.nanos / 1e9)
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                reason, field = _reason(info.reason), info.metadata.get("field", "")
                expected = info.metadata.get("expected", "")
                if reason == ErrorReason.ERROR_REASON_UNSUPPORTED_VERSION:
                    return UnsupportedVersionError(status.message, field=field, expected=expected)
                return Refusal(reason, status.message, field=field, expected=expected, retry_after_s=after_s)
    except DecodeError:
        return None
    return None


def _reason(name: str) -> ErrorReason.ValueType:
    for reason in ErrorReason.values():
        if reason_name(reason) == name:
            return reason
    return ErrorReason.ERROR_REASON_UNSPECIFIED
