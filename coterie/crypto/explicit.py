"""Explicit bytes: the canonical encoding over which Coterie signs, hashes and derives keys.

Serialised protobuf is not canonical, so nothing is ever signed over it.  Instead::

    coterie/v1/<purpose>  then for each field  length (4 bytes, big-endian)  content

An integer's content is 8 bytes, big-endian, unsigned; a string's is its UTF-8.  The purpose separates the
domains: a signature made for one purpose says nothing for another.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from functools import lru_cache

from coterie.errors import CryptoError

__all__ = ["MAX_FIELD", "encode", "further"]

MAX_FIELD = (1 << 24) - 1
"""Longest field, bytes; of longer content encode a hash."""

_PURPOSE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_INTEGER = struct.Struct(">Q")
_LENGTH = struct.Struct(">I")
_SHORT = tuple(map(_LENGTH.pack, range(256)))
"""Lengths of short fields as they are written."""


def encode(purpose: str, *fields: bytes | str | int) -> bytes:
    """Return the canonical encoding of ``fields`` under ``purpose``.

    Two calls give the same bytes only for the same purpose and the same contents in the same order.  (A
    purpose holds no zero byte and every length begins with one, because no field reaches 2^24 bytes; so the
    end of the label is unambiguous.)  Contents carry no type: ``b"ab"`` and ``"ab"`` are the same content, as
    are an integer and its 8 bytes.  Each purpose therefore fixes the number and the types of its fields.

    Parameters
    ----------
    purpose : str
        Lower-case words, digits and single hyphens.
    *fields : bytes, str or int
        Contents; an integer lies in [0, 2^64).

    Raises
    ------
    CryptoError
        The purpose is not of this form, a field is too long or of another type, an integer is out of range.
    """
    return b"".join(_encoded([_label(purpose)], purpose, fields))


def further(purpose: str, *fields: bytes | str | int) -> bytes:
    """Return the bytes of more fields of a purpose, as they stand in the encoding after those before them.

    ``encode(purpose, *some) + further(purpose, *more)`` is ``encode(purpose, *some, *more)``: very many fields can be
    hashed without all of them being in memory.

    Raises
    ------
    CryptoError
        As for `encode`.
    """
    return b"".join(_encoded([], purpose, fields))


def _encoded(parts: list[bytes], purpose: str, fields: Sequence[bytes | str | int]) -> list[bytes]:
    """Return the given parts with those of the fields after them."""
    for position, field in enumerate(fields):
        # Most fields are bytes, and a round encodes tens of thousands of them.
        content = field if type(field) is bytes else _content(purpose, position, field)
        length = len(content)
        if length > MAX_FIELD:
            raise CryptoError(
                f"field {position} of {purpose!r} has {length} bytes, "
                f"expected at most {MAX_FIELD}; encode its hash"
            )
        parts += (_SHORT[length] if length < len(_SHORT) else _LENGTH.pack(length), content)
    return parts


@lru_cache(maxsize=256)
def _label(purpose: str) -> bytes:
    if _PURPOSE.fullmatch(purpose) is None:
        raise CryptoError(f"purpose {purpose!r} is not made of lower-case words, digits and single hyphens")
    return b"coterie/v1/" + purpose.encode("ascii")


def _content(purpose: str, position: int, field: bytes | str | int) -> bytes:
    # Messages name the position, not the value: fields may be secret.
    where = f"field {position} of {purpose!r}"
    if isinstance(field, bool) or not isinstance(field, bytes | str | int):
        raise CryptoError(f"{where} is a {type(field).__name__}, expected bytes, str or int")
    if isinstance(field, int):
        if not 0 <= field < 1 << 64:
            raise CryptoError(f"{where} is an integer out of range, expected 0 to 2^64 - 1")
        return _INTEGER.pack(field)
    if isinstance(field, str):
        try:
            field = field.encode("utf-8")
        except UnicodeEncodeError:
            raise CryptoError(f"{where} is a string with no UTF-8 form") from None
    return field
