from __future__ import annotations

import pytest

from coterie.errors import CoterieError, PeerError
from coterie.wire.refusal import ErrorReason, Refusal, reason_name


@pytest.mark.parametrize("reason", ErrorReason.values())
def test_every_reason_has_a_short_name_of_its_own(reason: ErrorReason.ValueType) -> None:
    name = reason_name(reason)
    assert not name.startswith("ERROR_REASON")
    assert ErrorReason.Value(f"ERROR_REASON_{name}") == reason
    assert Refusal(reason, "text").name == name


def test_a_refusal_says_what_was_wrong_and_what_would_be_right() -> None:
    refusal = Refusal(
        ErrorReason.ERROR_REASON_STALE, "rows 9 versions old", field="gradient", expected="at most 3"
    )
    assert str(refusal) == "rows 9 versions old (expected at most 3)"
    assert (refusal.field, refusal.expected, refusal.message) == (
        "gradient",
        "at most 3",
        "rows 9 versions old",
    )


def test_without_an_expectation_nothing_is_made_up() -> None:
    refusal = Refusal(ErrorReason.ERROR_REASON_REVOKED, "this certificate was revoked")
    assert str(refusal) == "this certificate was revoked"
    assert (refusal.field, refusal.expected, refusal.hint) == ("", "", None)


def test_whoever_handles_a_failing_peer_handles_a_refusal() -> None:
    refusal = Refusal(ErrorReason.ERROR_REASON_TOO_LARGE, "too large")
    assert isinstance(refusal, PeerError | CoterieError)
    assert refusal.exit_code == PeerError.exit_code
    assert (refusal.code, PeerError.code) == ("refused", "peer")


def test_a_number_that_is_no_reason_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="99"):
        reason_name(99)  # type: ignore[arg-type]
