"""Messages of a round that are on their way, outside of the process's memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

from coterie.errors import StoreError

__all__ = ["Spool", "Spooled"]

_MEMORY = 1 << 18
"""Bytes of messages that stay in memory: small rounds make no file."""

_SMALL = 1 << 10
"""Shorter messages stay in memory: what is noted about one in the file takes a tenth of this."""


class Spool:
    """Takes messages of one sum: the first and the small ones into memory, the others into a file without a name.

    It keeps nothing durably: the file is gone with the process, and what has to outlive it is in the store.  It is in
    the folder of the store, for its owner only, and holds nothing that the store does not get too, in the same form
    (shares on their way are sealed for their receivers).  Where there is no room for a file, messages stay in memory.

    One thread adds, any may read.  The file is closed when nobody refers to the spool or to messages in it any more.

    Parameters
    ----------
    folder : Path
        Where the file is made.
    memory : int
        Bytes that stay in memory.
    """

    __slots__ = ("__weakref__", "_end", "_file", "_folder", "_left")

    def __init__(self, folder: Path, memory: int = _MEMORY) -> None:
        self._folder = folder
        self._left = memory
        self._file = -1
        self._end = 0

    def keep(self, held: Mapping[int, bytes], member: int, message: bytes) -> Mapping[int, bytes]:
        """Return messages with one more; those given stay as they are."""
        places = held.places if isinstance(held, Spooled) and held.spool is self else held
        return Spooled(self, {**places, member: self._put(message)})

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of the file.

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
        # Mode 0600, and without a name as soon as it is there.
        file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - open as long as the spool is
        self._file = file.fileno()
        weakref.finalize(self, file.close)


class Spooled(Mapping[int, bytes]):
    """Messages by member, some of them in a file.

    Parameters
    ----------
    spool : Spool
        Whose file.
    places : mapping
        Messages that are in memory, and where the others are: start and length.
    """

    __slots__ = ("places", "spool")

    def __init__(self, spool: Spool, places: Mapping[int, bytes | tuple[int, int]]) -> None:
        self.spool = spool
        self.places = places

    def __getitem__(self, member: int) -> bytes:
        place = self.places[member]
        return place if isinstance(place, bytes) else self.spool.read(*place)

    def part(self, member: int, start: int, end: int) -> bytes:
        """Return bytes of a message, and read no others.

        Raises
        ------
        StoreError
            When they cannot be read.
        """
        place = self.places[member]
        if isinstance(place, bytes):
            return place[start:end]
        at, length = place
        end = min(end, length)
        return self.spool.read(at + start, end - start) if start < end else b""

    def __contains__(self, member: object) -> bool:
        # A mapping's own way would read the message.
        return member in self.places

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        # One after the other: a mapping's own way would read them all at once.
        return self.keys() == other.keys() and all(
            message == other[member] for member, message in self.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)
