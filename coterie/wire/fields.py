"""The beginning of a field of a message, for those who write a long one around its content instead of copying it."""

from __future__ import annotations

__all__ = ["opening"]

_BYTES = 2


def opening(field: int, length: int) -> bytes:
    """Return what stands before a field's content: its number, that its length follows, and the length.

    Parameters
    ----------
    field : int
        Number of the field, 1 to 15.
    length : int
        Length of its content, bytes.
    """
    found = bytearray((field << 3 | _BYTES,))
    while length > 127:
        found.append(length & 127 | 128)
        length >>= 7
    found.append(length)
    return bytes(found)
