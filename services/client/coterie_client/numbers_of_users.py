"""Numbers of a host's users by participant id, in 20 bytes for each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

__all__ = ["NumberOf"]

_HALF = 8
"""Bytes of each half of what is compared of an id: it is a hash, of which 16 bytes tell users apart."""


class NumberOf:
    """The number of each user, from 1, by participant id.

    Parameters
    ----------
    participants : iterable of bytes
        Ids in the order of their numbers.
    """

    def __init__(self, participants: Iterable[bytes]) -> None:
        packed = b"".join(one[: 2 * _HALF] for one in participants)
        held = np.frombuffer(packed, ">u8").reshape(-1, 2).astype(np.uint64)
        self._order = np.lexsort((held[:, 1], held[:, 0])).astype(np.int32)
        self._high, self._low = held[self._order, 0], held[self._order, 1]

    def get(self, participant: bytes) -> int | None:
        """Return the number of a user, None for an id that no user has."""
        high, low = (np.uint64(int.from_bytes(participant[at : at + _HALF], "big")) for at in (0, _HALF))
        first, last = np.searchsorted(self._high, high, "left"), np.searchsorted(self._high, high, "right")
        found = np.flatnonzero(self._low[first:last] == low)
        return int(self._order[first + found[0]]) + 1 if len(found) else None
