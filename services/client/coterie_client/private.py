"""Store users' private arrays (such as user factors) between rounds: a file for each array, a row for each user.

Files are mapped copy-on-write: training changes memory only.  Changed rows go into the journal together with the
contribution (`rows`), then to the files (`save`).  After a crash between the two they are restored from the journal.
Another file, written after the rows, has a checksum of each user's rows; users whose rows do not have theirs begin
anew.  Checksums are unknown where rows were written after them, as an earlier release does.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.errors import StoreError
from coterie.rounds.sides import Arrays
from coterie.store.array_file import SUMS, sums_of_rows
from coterie.store.engine import file_failure
from coterie.store.private_rows import array_path, known_sums, mark_of, mark_path, users_of
from coterie_client.arrays import replace_array, replace_bytes
from coterie_client.evaluated import Evaluated

__all__ = ["PrivateFiles"]

_log = structlog.get_logger("coterie.private")

_MOST_OF_A_RUN = 1 << 14
"""Most users whose rows are written at once."""
_MOST_BYTES = 8 << 20
"""Most bytes that are copied for one write, unless a single row has more."""


class PrivateFiles:
    """Private arrays of a host's users in a folder; used by `Learner`.

    Parameters
    ----------
    folder : Path
        Made when missing, mode 0700.
    plan_hash : bytes
        Hash of the run's plan; arrays of another plan are not used.
    """

    def __init__(self, folder: Path, plan_hash: bytes) -> None:
        self._folder = folder
        self._plan_hash = plan_hash
        self._evaluated = Evaluated(folder)
        self._files: dict[str, tuple[int, int]] = {}
        self._arrays: Arrays = {}
        self._sums = -1
        # A thread may still be writing when the process stops.
        self._using = threading.Lock()

    def take_up(self, initial: Arrays, journal: Sequence[bytes] = (), *, expected: bool) -> Arrays:
        """Take initial arrays; return the stored ones, with initial rows for users that are not stored.

        Parameters
        ----------
        initial : dict of str to ndarray, shape (users, ...)
            Users' rows before their first round.
        journal : sequence of bytes
            Rows that may not have reached the files, as `rows` packed them, in order.
        expected : bool
            Whether users have been in rounds of this run, so that an empty folder means lost state.

        Raises
        ------
        StoreError
            When the folder cannot be used.
        """
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            held = self._held(initial)
            # Before anything is written here, which makes checksums or rows later.
            known = held is not None and known_sums(self._folder).any()
            if held is None:
                if expected:
                    _log.warning("the private state of this host's users is lost: they begin anew")
                held = {}
            for name, array in initial.items():
                self._arrays[name] = self._mapped(name, array, held.get(name))
            replace_bytes(mark_path(self._folder), mark_of(self._plan_hash))
            self._open_sums(initial, known=bool(known))
            for packed in journal:
                self._redo(packed)
            self._check(initial)
        except OSError as error:
            raise StoreError(f"cannot use the folder {self._folder}: {error.strerror}") from error
        return dict(self._arrays)

    def _held(self, initial: Arrays) -> Arrays | None:
        """Return the folder's arrays; None unless they belong to the plan and are complete."""
        try:
            if mark_path(self._folder).read_bytes() != mark_of(self._plan_hash):
                return None
            found = {
                name: np.load(self._path(name), mmap_mode=None if not array.size else "r", allow_pickle=False)
                for name, array in initial.items()
            }
        except (OSError, ValueError, EOFError):
            return None
        fits = all(
            found[name].dtype == array.dtype
            and found[name].shape[1:] == array.shape[1:]
            and len(found[name]) <= len(array)
            for name, array in initial.items()
        )
        return found if fits and len({len(array) for array in found.values()}) == 1 else None

    def _mapped(self, name: str, initial: NDArray[Any], held: NDArray[Any] | None) -> NDArray[Any]:
        path = self._path(name)
        if held is None or len(held) < len(initial):
            whole = np.ascontiguousarray(initial)
            if held is not None:
                whole = whole.copy()
                whole[: len(held)] = held
            replace_array(path, whole)
        if not initial.size:
            return initial
        mapped: np.memmap[Any, Any] = np.load(path, mmap_mode="c", allow_pickle=False)
        self._files[name] = (os.open(path, os.O_WRONLY), mapped.offset)
        return mapped.view(np.ndarray)

    def _path(self, name: str) -> Path:
        return array_path(self._folder, name)

    # --- checksums ---------------------------------------------------------------------------------------------------

    def _open_sums(self, initial: Arrays, *, known: bool) -> None:
        """Open the file of checksums, without any unless they are known."""
        path, users = self._folder / SUMS, max(map(len, initial.values()), default=0)
        if not known:
            replace_bytes(path, bytes(4 * users))
        self._sums = os.open(path, os.O_RDWR)
        if os.fstat(self._sums).st_size < 4 * users:
            os.ftruncate(self._sums, 4 * users)

    def _check(self, initial: Arrays) -> None:
        """Let users begin anew whose rows do not have their checksum; note the checksums that are not known."""
        users = max(map(len, self._arrays.values()), default=0)
        told = np.frombuffer(os.pread(self._sums, 4 * users, 0), "<u4")
        found = np.concatenate([sums_of_rows(self._arrays, *run) for run in _runs(range(users))] or [told])
        damaged = np.flatnonzero((told != found) & (told != 0)).tolist()
        if damaged:
            _log.error(
                "rows of the private state are damaged: their users begin anew",
                folder=str(self._folder),
                users=len(damaged),
                hint="restore this host from a backup to have them back",
            )
            for name, array in self._arrays.items():
                array[damaged] = initial[name][damaged]
        self.save(np.flatnonzero(told != found).tolist())

    def _doubt(self) -> None:
        """Forget all checksums, durably, before rows change that no journal has."""
        os.pwrite(self._sums, bytes(os.fstat(self._sums).st_size), 0)
        os.fdatasync(self._sums)

    def rows(self, users: Sequence[int]) -> bytes:
        """Pack the rows of some users: number of users, their positions, then each array's rows, by name.

        Integers are uint32, little-endian; arrays are in this machine's memory layout, since only it reads them again.
        """
        head = np.array([len(users), *users], "<u4").tobytes()
        return head + b"".join(self._arrays[name][list(users)].tobytes() for name in sorted(self._arrays))

    def _redo(self, packed: bytes) -> None:
        if not packed:
            return
        users = np.array(users_of(packed), np.intp)
        count = len(users)
        at = 4 + 4 * count
        for name in sorted(self._arrays):
            array = self._arrays[name]
            shape = (count, *array.shape[1:])
            size = int(np.prod(shape))
            array[users] = np.frombuffer(packed, array.dtype, size, at).reshape(shape)
            at += size * array.itemsize
        self.save(users.tolist())

    def evaluated(self, version: int, best: int) -> None:
        """Keep a copy of the arrays for a version under evaluation, beside the copy for the best version so far.

        Raises
        ------
        StoreError
            When it cannot be written.
        """
        if not self._arrays:
            # The system has no private arrays, so there may not even be a folder.
            return
        try:
            self._evaluated.keep(version, self._arrays, [best])
        except OSError as error:
            raise file_failure("write the private state", error) from error

    def adopt(self, version: int) -> None:
        """Restore the arrays kept for the chosen version, once the run is over."""
        if self._arrays and self._evaluated.adopt(version, self._arrays):
            with self._using:
                if self._sums >= 0:
                    self._doubt()
            self.save(range(len(next(iter(self._arrays.values())))))

    def save(self, users: Sequence[int]) -> None:
        """Write the rows of some users through to the disk.

        Raises
        ------
        StoreError
            When they cannot be written.
        """
        try:
            with self._using:
                ordered = np.unique(np.fromiter(users, np.int64))
                for name, (file, offset) in self._files.items():
                    array = self._arrays[name]
                    for some in _parts(ordered, array.strides[0]):
                        _write_rows(file, array[some], some, offset)
                    os.fdatasync(file)
                if self._sums >= 0 and len(ordered):
                    for some in _parts(ordered, sum(array.strides[0] for array in self._arrays.values())):
                        rows = {name: array[some] for name, array in self._arrays.items() if array.size}
                        _write_rows(self._sums, sums_of_rows(rows, 0, len(some)), some)
                    os.fdatasync(self._sums)
        except OSError as error:
            raise file_failure("write the private state", error) from error

    def close(self) -> None:
        """Close the files."""
        with self._using:
            for file, _ in self._files.values():
                os.close(file)
            self._files.clear()
            if self._sums >= 0:
                os.close(self._sums)
                self._sums = -1


def _write(file: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of a content: a volume that fills up may take a part of it without an error."""
    left = memoryview(content)
    while left:
        written = os.pwrite(file, left, offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left, offset = left[written:], offset + written


def _parts(users: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Return users in parts whose rows, of so many bytes each, are copied at once."""
    most = max(1, min(_MOST_OF_A_RUN, _MOST_BYTES // max(1, size)))
    return [users[start : start + most] for start in range(0, len(users), most)]


def _write_rows(file: int, rows: NDArray[Any], users: NDArray[np.int64], offset: int = 0) -> None:
    """Write the rows of some users, ascending, to their places in a file: one write for users in a row."""
    content, size = memoryview(rows.tobytes()), rows.strides[0]
    ends = [*(np.flatnonzero(np.diff(users) != 1) + 1).tolist(), len(users)]
    begin = 0
    for end in ends:
        _write(file, content[begin * size : end * size], offset + int(users[begin]) * size)
        begin = end


def _runs(users: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of neighbouring users, first and behind the last: few writes where most users take part.

    A run has at most `_MOST_OF_A_RUN` users, so that what is copied for one write stays small.
    """
    ordered = np.unique(np.fromiter(users, np.int64))
    if not len(ordered):
        return
    for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
        first, last = int(run[0]), int(run[-1]) + 1
        for start in range(first, last, _MOST_OF_A_RUN):
            yield start, min(start + _MOST_OF_A_RUN, last)
