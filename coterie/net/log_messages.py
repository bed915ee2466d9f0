"""Conversion of log heads and of the hashes of proofs between wire messages and their types."""

from __future__ import annotations

from coterie.crypto.transparency import SignedHead
from coterie.crypto.verification import Reason, VerificationError
from coterie.wire.v1.log_pb2 import LogHead

__all__ = ["hashes", "head_from_wire", "head_to_wire"]

_HASH = 32
_MOST = 128


def head_to_wire(head: SignedHead) -> LogHead:
    """Return the message for a head."""
    return LogHead(
        size=head.size,
        root=head.root,
        time_ms=head.time_ms,
        log_key=head.log_key,
        certification=head.certification,
        signature=head.signature,
    )


def head_from_wire(message: LogHead) -> SignedHead:
    """Return the head of a message, unverified."""
    return SignedHead(
        message.size,
        message.root,
        message.time_ms,
        message.log_key,
        message.certification,
        message.signature,
    )


def hashes(joined: bytes, most: int = _MOST) -> list[bytes]:
    """Split the hashes of a proof, 32 bytes each and at most so many.

    Raises
    ------
    VerificationError
        MALFORMED.
    """
    if len(joined) % _HASH or len(joined) > most * _HASH:
        raise VerificationError(
            Reason.MALFORMED, f"a proof of {len(joined)} bytes, expected {_HASH} for each hash"
        )
    return [joined[start : start + _HASH] for start in range(0, len(joined), _HASH)]
