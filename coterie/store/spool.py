"""A temporary file for the messages of a round, so that the server need not hold them in memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

from coterie.errors import StoreError

__all__ = ["Spool", "Spooled"]

_MEMORY = 1 << 18
"""Bytes of messages that stay in memory, so that small rounds make no file."""

_SMALL = 1 << 10
"""Messages shorter than this stay in memory, bytes; the note about a message in the file takes a tenth of it."""


class Spool:
    """Keeps the messages of one sum: the first and the small ones in memory, the others in an unnamed file.

    Nothing here is durable: the file is gone with the process, and messages that must outlive it are in the store.
    The file is in the store's folder, readable by its owner only, and holds nothing that the store does not get too,
    in the same form (shares are sealed for their receivers).  Where there is no room for a file, messages stay in
    memory.

    One thread adds, any may read.  The file is closed when nothing refers to the spool or to messages in it any more.

    Parameters
    ----------
    folder : Path
        Folder of the file.
    memory : int
        Bytes of messages that stay in memory.
    """

    __slots__ = ("__weakref__", "_end", "_file", "_folder", "_left")

    def __init__(self, folder: Path, memory: int = _MEMORY) -> None:
        self._folder = folder
        self._left = memory
        self._file = -1
        self._end = 0

    def keep(self, held: Mapping[int, bytes], member: int, message: bytes) -> Mapping[int, bytes]:
        """Return the messages with one member's message added; those given stay as they are.

        Takes the same time for any number of messages, unless they are not the newest or have one of the member.
        """
        place = self._put(message)
        if not isinstance(held, Spooled) or held.spool is not self:
            return Spooled.of(self, {**held, member: place})
        return held.with_one(member, place) or Spooled.of(self, {**held.places(), member: place})

    def read(self, start: int, length: int) -> bytes:
        """Return ``length`` bytes of the file from ``start`` on.

        Raises
        ------
        StoreError
            When they cannot be read.
        """
        try:
            found = os.pread(self._file, length, start)
        except OSError as error:
            raise StoreError(f"cannot read messages of a round back: {error.strerror}") from error
        if len(found) != length:
            raise StoreError(f"of {length} bytes of a round's messages, {len(found)} could be read back")
        return found

    def _put(self, message: bytes) -> bytes | tuple[int, int]:
        length = len(message)
        if length < _SMALL:
            return message
        if length <= self._left:
            self._left -= length
            return message
        try:
            if self._file < 0:
                self._open()
            written = os.pwrite(self._file, message, self._end)
        except OSError:
            return message
        if written != length:
            return message
        start, self._end = self._end, self._end + length
        return start, length

    def _open(self) -> None:
        # The file has mode 0600, and no name from the start.
        file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - open as long as the spool is
        self._file = file.fileno()
        weakref.finalize(self, file.close)


Place = bytes | tuple[int, int]
"""A message that is in memory, or its start and length in the file."""


class Spooled(Mapping[int, bytes]):
    """Messages by member, some of them in a file.

    All those that follow from each other share one dictionary and one list, to which only the newest adds: each sees
    as many of the first messages as it has.  So a message is added without a copy, and others may read meanwhile.

    Parameters
    ----------
    spool : Spool
        Spool that has the file.
    found : dict
        By member: its position in ``order``, and its message's place.
    order : list of int
        Members in the order in which their messages came.
    count : int
        How many of them are here.
    """

    __slots__ = ("_count", "_found", "_order", "spool")

    def __init__(
        self, spool: Spool, found: dict[int, tuple[int, Place]], order: list[int], count: int
    ) -> None:
        self.spool = spool
        self._found = found
        self._order = order
        self._count = count

    @classmethod
    def of(cls, spool: Spool, places: Mapping[int, Place]) -> Spooled:
        """Return messages at these places."""
        order = list(places)
        found = {member: (position, places[member]) for position, member in enumerate(order)}
        return cls(spool, found, order, len(order))

    def with_one(self, member: int, place: Place) -> Spooled | None:
        """Return these with one more; None unless they are the newest and have none of the member."""
        if self._count != len(self._order) or member in self._found:
            return None
        # The list last: it says which is the newest.
        self._found[member] = (self._count, place)
        self._order.append(member)
        return Spooled(self.spool, self._found, self._order, self._count + 1)

    def places(self) -> dict[int, Place]:
        """Return the places of all messages, by member."""
        return {member: self._found[member][1] for member in self}

    def _place(self, member: int) -> Place:
        position, place = self._found[member]
        if position >= self._count:
            raise KeyError(member)
        return place

    def __getitem__(self, member: int) -> bytes:
        place = self._place(member)
        return place if isinstance(place, bytes) else self.spool.read(*place)

    def part(self, member: int, start: int, end: int) -> bytes:
        """Return a message's bytes from ``start`` to ``end``, without reading the rest.

        Raises
        ------
        StoreError
            When they cannot be read.
        """
        place = self._place(member)
        if isinstance(place, bytes):
            return place[start:end]
        at, length = place
        end = min(end, length)
        return self.spool.read(at + start, end - start) if start < end else b""

    def __contains__(self, member: object) -> bool:
        # Mapping's default would read the message.
        position, _ = self._found.get(member, (self._count, b""))  # type: ignore[call-overload]
        return bool(position < self._count)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        # One after the other: Mapping's default would read them all at once.
        return self.keys() == other.keys() and all(
            message == other[member] for member, message in self.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        return iter(self._order[: self._count])

    def __len__(self) -> int:
        return self._count
