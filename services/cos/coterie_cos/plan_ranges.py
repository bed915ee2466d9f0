"""Check those parts of an operator's request to start a run that every system shares."""

from __future__ import annotations

from collections.abc import Mapping

from coterie.crypto.authority import validate_name
from coterie.errors import CertificateError
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.operator_pb2 import StartRunRequest

__all__ = ["check_ranges"]

_MOST_CHECK_IN_MS = 86_400_000
"""Longest time after which a host may be asked to come back, milliseconds: devices rest for no longer."""


def check_ranges(request: StartRunRequest, ranges: Mapping[str, tuple[bool, str]]) -> None:
    """Check a run's id, the fields of its system, and its timeouts.

    Parameters
    ----------
    request : StartRunRequest
    ranges : mapping of str to (bool, str)
        By field of the system: whether its value fits, and the expected range, in words.

    Raises
    ------
    Refusal
        INVALID_FIELD names the first field that is out of its range.
    """
    both = {
        # The id is also the name of a folder.
        "plan.run_id": (_is_label(request.plan.run_id), "a DNS label: 1 to 63 of a-z, 0-9 and inner '-'"),
        **ranges,
        "phase_timeout_ms": (request.phase_timeout_ms > 0, "at least 1"),
        "party_timeout_ms": (request.party_timeout_ms > 0, "at least 1"),
        "check_in_ms": (
            request.check_in_ms == 0 or 1000 <= request.check_in_ms <= _MOST_CHECK_IN_MS,
            f"0, or 1000 to {_MOST_CHECK_IN_MS}",
        ),
    }
    for field, (fits, expected) in both.items():
        if not fits:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"{field} is out of range",
                field=field,
                expected=expected,
            )


def _is_label(name: str) -> bool:
    try:
        validate_name(name)
    except CertificateError:
        return False
    return True
