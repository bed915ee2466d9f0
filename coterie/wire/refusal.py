"""Refusals: the error with which a service declines a request, with a reason from a closed enumeration.

A refusal carries a reason of ``ErrorReason``, the field that was wrong and what was expected.  It never carries a
private value: services raise it, the network layer turns it into a gRPC status with ``google.rpc.ErrorInfo``.
"""

from __future__ import annotations

from coterie.errors import PeerError
from coterie.wire.v1.common_pb2 import ErrorReason

__all__ = ["LATER", "ErrorReason", "Refusal", "reason_name"]

LATER = frozenset(
    {
        ErrorReason.ERROR_REASON_STORE_FULL,
        ErrorReason.ERROR_REASON_NOT_READY,
        ErrorReason.ERROR_REASON_OVERLOADED,
        ErrorReason.ERROR_REASON_TOO_SLOW,
    }
)
"""Transient reasons: the same request may be accepted later."""

_PREFIX = "ERROR_REASON_"


def reason_name(reason: ErrorReason.ValueType) -> str:
    """Return the short name of a reason, ``"SEQUENCE_MISMATCH"`` for ``ERROR_REASON_SEQUENCE_MISMATCH``."""
    return ErrorReason.Name(reason).removeprefix(_PREFIX)


class Refusal(PeerError):  # noqa: N818 - the contract's word for it
    """The refusal of a request; the service raises it, and the caller gets it raised again.

    Parameters
    ----------
    reason : ErrorReason
        Why, from the closed enumeration of the contract.
    message : str
        The same in words, without private values.
    field : str
        Name of the message field, or of the thing, that was wrong.
    expected : str
        The value or form that would have been right.
    retry_after_s : float, optional
        After how long the same request may be made again, seconds.
    """

    code = "refused"

    def __init__(
        self,
        reason: ErrorReason.ValueType,
        message: str,
        *,
        field: str = "",
        expected: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=f"expected {expected}" if expected else None)
        self.reason = reason
        self.field = field
        self.expected = expected
        self.retry_after_s = retry_after_s

    @property
    def name(self) -> str:
        """Short name of the reason."""
        return reason_name(self.reason)
