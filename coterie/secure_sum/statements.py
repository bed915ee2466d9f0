"""Statements that members and key holders sign in a sum, and the packed lists in messages, for both halves.

Statements are explicit bytes (``coterie.crypto.explicit``), by purpose::

    advert      (plan hash, channel key, mask key)
    submit      (plan hash, SHA-256 of the codes as they travel)
    confirm     (plan hash, list hash)
    submitters  (positions of the list's members, 4 bytes each, big-endian, ascending)
                and, in a sparse sum, who sent which ciphertexts (``coterie.secure_sum.sparse``)

where the list hash is the SHA-256 of the last statement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise

from coterie.crypto.explicit import encode

__all__ = [
    "ADVERT",
    "CONFIRM",
    "SUBMIT",
    "ascending",
    "codes_hash",
    "list_hash",
    "pack_positions",
    "unpack_positions",
]

ADVERT = "advert"
SUBMIT = "submit"
CONFIRM = "confirm"

_POSITION_BYTES = 4


def codes_hash(codes: bytes | memoryview) -> bytes:
    """Return the SHA-256 of a contribution's codes as they travel, little-endian."""
    return hashlib.sha256(codes).digest()


def list_hash(members: Sequence[int], places: bytes = b"") -> bytes:
    """Return the hash of an ascending submitter list; in sparse sums ``places`` says who sent which ciphertexts."""
    fields = [pack_positions(members), *([places] if places else [])]
    return hashlib.sha256(encode("submitters", *fields)).digest()


def pack_positions(members: Iterable[int]) -> bytes:
    """Pack positions as 4 bytes each, big-endian."""
    return b"".join(member.to_bytes(_POSITION_BYTES) for member in members)


def unpack_positions(packed: bytes) -> tuple[int, ...]:
    """Return the positions that ``pack_positions`` packed."""
    starts = range(0, len(packed), _POSITION_BYTES)
    return tuple(int.from_bytes(packed[start : start + _POSITION_BYTES]) for start in starts)


def ascending(members: Sequence[int], below: int) -> bool:
    """Return whether positions ascend strictly and are all below a number."""
    if not members:
        return True
    return members[-1] < below and all(one < after for one, after in pairwise(members))
