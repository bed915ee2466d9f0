"""Tell at the server a contribution that is sent again from another one of the same member.

The server keeps no single contribution, but a note of each; a note begins with a mark of the message.  A member that
lost the answer sends the same bytes again, which are acknowledged; other bytes are refused.
"""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["MARK_BYTES", "is_repeat", "mark_of"]

MARK_BYTES = 32
"""Bytes of a note that are its mark; what later steps need follows."""

_HASHED = AESGCM(hashlib.sha256(b"coterie mark of a contribution").digest())
_NONCE = bytes(12)
_REST = bytes(16)
"""End of a mark.  Earlier releases wrote a SHA-256 in its place, in which these bytes are no zeros."""


def mark_of(message: bytes) -> bytes:
    """Return the mark of a contribution as it was received, 32 bytes.

    It is a polynomial hash of 128 bits, GHASH, for which processors have instructions: SHA-256 takes 14 times as long.
    As a hash under a fixed key it is no protection from whoever looks for two messages with one mark, and needs to be
    none.  A mark is compared with those of the same member's own messages alone, which nobody else can send; it leaves
    no process of the server, and nothing is signed over it.  A member that sends two messages with one mark has the
    first one counted and the second one acknowledged: as if it had sent the first one twice.
    """
    # The tag of nothing, with the message as associated data.
    return _HASHED.encrypt(_NONCE, b"", message) + _REST


def is_repeat(note: bytes, message: bytes) -> bool:
    """Return whether a message is the one that a note was made of.

    Parameters
    ----------
    note : bytes
        Its mark, or a whole note; also of an earlier release, as a store or a database may have it.
    message : bytes
    """
    mark = note[:MARK_BYTES]
    if mark.endswith(_REST):
        return mark == mark_of(message)
    return mark == hashlib.sha256(message).digest()
