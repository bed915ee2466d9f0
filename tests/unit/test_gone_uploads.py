"""When an upload counts as deleted: only the third party knows what it holds."""

import pytest

from coterie.parties.sealed_requests import is_gone
from coterie.wire.refusal import ErrorReason, Refusal

ROUND, PARTICIPANT = ErrorReason.ERROR_REASON_UNKNOWN_ROUND, ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT


@pytest.mark.parametrize(
    ("reason", "field", "gone"),
    [
        # Of the third party: no such graph or set, no such upload.
        (ROUND, "epoch", True),
        (PARTICIPANT, "upload_id", True),
        # Of a COS that was restored from a backup or begun anew: no such run, slot or upload there.
        (ROUND, "run_id", False),
        (PARTICIPANT, "slot", False),
        (PARTICIPANT, "request.upload_id", False),
        (ErrorReason.ERROR_REASON_NOT_READY, "epoch", False),
        (ErrorReason.ERROR_REASON_CONFLICT, "upload_id", False),
    ],
)
def test_an_upload_is_gone_only_where_the_third_party_says_so(reason, field, gone):
    assert is_gone(Refusal(reason, "said", field=field)) is gone
