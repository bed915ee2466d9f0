"""Checks of fields of requests to the third party, and refusals for failed verifications."""

from __future__ import annotations

from coterie.crypto.authority import validate_name
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["check_run", "refusal_of"]

_REASONS = {
    Reason.MALFORMED: ErrorReason.ERROR_REASON_INVALID_FIELD,
    Reason.NOT_AUTHENTIC: ErrorReason.ERROR_REASON_NOT_AUTHENTIC,
    Reason.REVOKED: ErrorReason.ERROR_REASON_REVOKED,
    Reason.NOT_LISTED: ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
    Reason.TOO_FEW: ErrorReason.ERROR_REASON_BELOW_FLOOR,
}
"""Refusal reason for a record, roster or sealed request that does not verify; BAD_SIGNATURE for any other failure."""


def check_run(run_id: str, field: str) -> None:
    """Check that a text can be the id of a run.

    Raises
    ------
    Refusal
        INVALID_FIELD.
    """
    try:
        validate_name(run_id)
    except CertificateError as error:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            "that is no name of a run",
            field=field,
            expected="a DNS label: 1 to 63 of a-z, 0-9 and inner '-'",
        ) from error


def refusal_of(error: VerificationError, field: str, expected: str) -> Refusal:
    """Return the refusal of a request with something that does not verify."""
    reason = _REASONS.get(error.reason, ErrorReason.ERROR_REASON_BAD_SIGNATURE)
    return Refusal(reason, error.message, field=field, expected=expected)
