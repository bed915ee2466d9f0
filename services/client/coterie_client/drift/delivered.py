"""Report to the COS that a host's users have delivered their records or made their visits."""

from __future__ import annotations

import structlog

from coterie.parties.party import Party
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef

__all__ = ["report_delivered"]

_log = structlog.get_logger("coterie.client")


async def report_delivered(party: Party, round_: RoundRef, status: wire.DeliveryStatus) -> None:
    """Report a delivery or an epoch's visits; a COS that was set back meanwhile refuses it, and asks again.

    Raises
    ------
    Refusal
        When the COS refuses the report for another reason than that it does not know the catalogue or the epoch.
    """
    try:
        await party.submit(wire.SubmitKind.SUBMIT_KIND_DELIVERED, round_, status)
    except Refusal as refusal:
        if refusal.reason != ErrorReason.ERROR_REASON_INVALID_FIELD:
            raise
        # As after a restore from a backup: its next tasks say where it is.
        _log.warning("a report is ahead of the COS", epoch=round_.round, because=refusal.message)
