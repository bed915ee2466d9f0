"""A file with a record of bytes for each user of a client host, which is read some users at a time.

A host of very many users keeps there what it made of their histories, in the place of memory.  The file is written
once, mode 0600, and made again from the store where it is missing, damaged or of something else.  It has nothing that
the store has not, and no user of whom the store has nothing: a host that needs no such file removes one (`no_records`).

Layout, little-endian: the mark; 32 bytes that say what the records were made of; the number of users, uint64; the
CRC-32 of all before and of the table, uint32, and 4 bytes of zero; the table, the length of each record, uint32; the
records, each after its CRC-32, uint32.
"""

from __future__ import annotations

import os
import struct
import weakref
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.keyfile import private_file_in_place_of
from coterie.errors import StoreError
from coterie.store.engine import file_failure

__all__ = ["RECORDS", "REMAKE", "RecordFile", "no_records"]

RECORDS = "users.records"
"""Name of the file in the state folder of a client host."""

_MARK = b"users' records1\n"
_HEAD = struct.Struct("<16s32sQ")
_SUM = struct.Struct("<II")
_BEFORE = 4
"""Bytes of a record's checksum, before the record."""
_TOGETHER = 1 << 20
"""Bytes that are written at once."""
_CHECKED = 4096
"""Users whose records are checked at once."""
REMAKE = "remove this file: the host makes it again from its store when it starts"
"""What to do about a damaged file."""


class RecordFile:
    """Records of users in a file, 8 bytes of each in memory.

    Parameters
    ----------
    path : Path

    Raises
    ------
    StoreError
        The file cannot be read, is of another kind, or its table is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}", hint=REMAKE) from error
        self._close = weakref.finalize(self, os.close, self._file)
        size = os.fstat(self._file).st_size
        whole = _HEAD.size + _SUM.size
        head = self._beginning(whole, 0)
        if len(head) < whole or not head.startswith(_MARK):
            raise StoreError(f"{path} is no file of users' records", hint=REMAKE)
        _, self.label, users = _HEAD.unpack_from(head)
        told, _ = _SUM.unpack_from(head, _HEAD.size)
        table = self._beginning(4 * users, whole) if 4 * users <= size else b""
        if len(table) != 4 * users or zlib.crc32(table, zlib.crc32(head[: _HEAD.size])) != told:
            raise self._damaged("its table does not have its checksum")
        self._first = np.zeros(users + 1, np.int64)
        np.cumsum(np.frombuffer(table, "<u4").astype(np.int64) + _BEFORE, out=self._first[1:])
        self._first += whole + 4 * users
        if self._first[-1] != size:
            raise self._damaged(f"it has {size} bytes, its table says {self._first[-1]}")

    @classmethod
    def made(cls, path: Path, label: bytes, users: int, records: Iterable[bytes]) -> RecordFile:
        """Write a file, durably and all or nothing, in the place of an older one; return it.

        Parameters
        ----------
        path : Path
        label : bytes
            32 bytes that say what the records were made of.
        users : int
        records : iterable of bytes
            The record of each user, in order.

        Raises
        ------
        StoreError
            It cannot be written; the older one stays.
        ValueError
            There are more or fewer records than users.
        """
        lengths = np.zeros(users, "<u4")
        count = 0
        try:
            with private_file_in_place_of(path) as file:
                file.seek(_HEAD.size + _SUM.size + 4 * users)
                waiting = bytearray()
                for record in records:
                    if count == users:
                        raise ValueError(f"more records than the {users} users")
                    lengths[count] = len(record)
                    count += 1
                    waiting += zlib.crc32(record).to_bytes(_BEFORE, "little")
                    waiting += record
                    if len(waiting) >= _TOGETHER:
                        file.write(waiting)
                        waiting.clear()
                if count != users:
                    raise ValueError(f"{count} records for {users} users")
                file.write(waiting)
                head, table = _HEAD.pack(_MARK, label, users), lengths.tobytes()
                file.seek(0)
                file.write(head + _SUM.pack(zlib.crc32(table, zlib.crc32(head)), 0) + table)
        except OSError as error:
            raise file_failure(f"write {path}", error) from error
        return cls(path)

    def __len__(self) -> int:
        return len(self._first) - 1

    def read(
        self, users: NDArray[np.integer]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Return bytes, and where in them the record of each of some users begins and ends.

        Parameters
        ----------
        users : ndarray of int, shape (n,)
            Positions; neighbours are read together.

        Returns
        -------
        content : ndarray of uint8
        first, last : ndarray of int64, shape (n,)

        Raises
        ------
        StoreError
            The file cannot be read, or a record does not have its checksum.
        """
        begin, end = self._first[users], self._first[np.asarray(users) + 1]
        last = np.cumsum(end - begin)
        first = last - (end - begin) + _BEFORE
        content: NDArray[np.uint8] = np.empty(int(last[-1]) if len(last) else 0, np.uint8)
        view = memoryview(content)  # type: ignore[arg-type]
        at = 0
        for one in np.flatnonzero(np.append(end[:-1] != begin[1:], [True] * bool(len(end)))).tolist():
            stop = int(last[one])
            self._fill(view[at:stop], int(end[one]) - (stop - at))
            at = stop
        for start, stop in zip(first.tolist(), last.tolist(), strict=True):
            if zlib.crc32(view[start:stop]) != int.from_bytes(view[start - _BEFORE : start], "little"):
                raise self._damaged("the record of a user does not have its checksum")
        return content, first, last

    def check(self) -> int:
        """Return how many records do not have their checksum."""
        damaged = 0
        for first in range(0, len(self), _CHECKED):
            users = np.arange(first, min(first + _CHECKED, len(self)))
            if not self._can_read(users):
                damaged += sum(not self._can_read(users[[one]]) for one in range(len(users)))
        return damaged

    def _can_read(self, users: NDArray[np.integer]) -> bool:
        try:
            self.read(users)
        except StoreError:
            return False
        return True

    def close(self) -> None:
        """Close the file; nothing can be read any more."""
        self._close()

    def _beginning(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self._file, size, offset)
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}", hint=REMAKE) from error

    def _fill(self, part: memoryview, offset: int) -> None:
        while part:
            try:
                got = os.preadv(self._file, [part], offset)
            except OSError as error:
                raise StoreError(f"cannot read {self._path}: {error.strerror}", hint=REMAKE) from error
            if not got:
                raise self._damaged("it is shorter than its table says")
            part, offset = part[got:], offset + got

    def _damaged(self, why: str) -> StoreError:
        return StoreError(f"{self._path} is damaged: {why}", hint=REMAKE)


def no_records(state: Path) -> None:
    """Remove a host's file of its users' records, if there is one, and what a killed process left of one.

    Who has opened it reads on.

    Raises
    ------
    StoreError
        It cannot be removed.
    """
    path = state / RECORDS
    try:
        for one in (path, *state.glob(f".{RECORDS}.*")):
            one.unlink(missing_ok=True)
    except OSError as error:
        raise file_failure(f"remove {path}", error) from error
