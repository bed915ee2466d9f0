"""Files in which a client host keeps its users' private arrays, and how they are read after the run.

There is an NPY file for each array, a row for each user in the order of the store, a mark that names the plan, and
copies for the evaluated versions that are kept.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError
from coterie.rounds.sides import Arrays
from coterie.store.array_file import SUMS, sum_of_row

__all__ = [
    "array_path",
    "evaluated_path",
    "known_sums",
    "mark_of",
    "mark_path",
    "read_rows",
    "sum_of_copy",
    "users_of",
    "whole_path",
]

_EVALUATED = "evaluated-"


def array_path(folder: Path, name: str) -> Path:
    """Return the file of an array."""
    return folder / f"{name}.npy"


def evaluated_path(folder: Path, version: int, name: str) -> Path:
    """Return the file of an array as it was at an evaluated version."""
    return folder / f"{_EVALUATED}{version:010d}-{name}.npy"


def whole_path(folder: Path, version: int) -> Path:
    """Return the file that is written last for a version, and says that its files are complete."""
    return evaluated_path(folder, version, "whole")


def sum_of_copy(arrays: Arrays) -> int:
    """Return the CRC-32 of the arrays of an evaluated version, in the order of their names; its last file has it."""
    found = 0
    for name in sorted(arrays):
        found = zlib.crc32(np.ascontiguousarray(arrays[name]).tobytes(), found)
    return found


def users_of(packed: bytes) -> list[int]:
    """Return the positions of the users whose rows are packed, as a journal has them: their number goes before."""
    count = int.from_bytes(packed[:4], "little")
    return [int(user) for user in np.frombuffer(packed, "<u4", count, 4)]


def mark_path(folder: Path) -> Path:
    """Return the file that says to which plan the arrays belong."""
    return folder / "belongs-to.json"


def mark_of(plan_hash: bytes) -> bytes:
    """Return the content of the mark."""
    return json.dumps({"plan": plan_hash.hex()}).encode()


def known_sums(folder: Path) -> NDArray[np.uint32]:
    """Return the CRC-32 of each user's rows, 0 where it is unknown; empty where there are none.

    Checksums are written after the rows.  They say nothing about an array that was written after them: an earlier
    release, which knows no checksums, has trained meanwhile, or a crash came between the two.

    Raises
    ------
    OSError
        A file cannot be read.
    """
    try:
        content = (folder / SUMS).read_bytes()
        written = (folder / SUMS).stat().st_mtime_ns
    except FileNotFoundError:
        return np.zeros(0, np.uint32)
    sums = np.frombuffer(content[: len(content) // 4 * 4], "<u4")
    arrays = (path for path in folder.glob("*.npy") if not path.name.startswith(_EVALUATED))
    if any(path.stat().st_mtime_ns > written for path in arrays):
        return np.zeros_like(sums)
    return sums


def read_rows(
    folder: Path, plan_hash: bytes, version: int, initial: dict[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the private arrays of a version, as the host has them after the run; nothing is written.

    Parameters
    ----------
    folder : Path
    plan_hash : bytes
    version : int
        The chosen version; where no copy of it was kept, the arrays of the last round count.
    initial : dict of str to ndarray, shape (users, ...)
        Users' rows before their first round, in the order of the store; returned where the host stored none.

    Raises
    ------
    RunError
        The files belong to another run, or are missing, damaged, or of other users.
    """
    try:
        found = mark_path(folder).read_bytes()
    except FileNotFoundError:
        # The host's users were in no round.
        return initial
    except OSError as error:
        raise RunError(f"cannot read the private state in {folder}: {error.strerror}") from error
    if found != mark_of(plan_hash):
        raise RunError(f"the private state in {folder} belongs to another run")
    kept = whole_path(folder, version).exists()
    rows = {}
    for name, array in initial.items():
        path = evaluated_path(folder, version, name) if kept else array_path(folder, name)
        try:
            rows[name] = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise RunError(
                f"cannot read the private state {path}: {error}", hint="the folder of the run is not whole"
            ) from error
        if (rows[name].shape, rows[name].dtype) != (array.shape, array.dtype):
            raise RunError(
                f"{path} has shape {rows[name].shape} and type {rows[name].dtype}; expected {array.shape} and "
                f"{array.dtype}"
            )
    if damaged := _damaged_copy(folder, version, rows) if kept else _damaged_rows(folder, rows):
        raise RunError(
            f"the private state in {folder} is damaged: {damaged}",
            hint="put the folder `private` back from a backup, or restore this host from one",
        )
    return rows


def _damaged_copy(folder: Path, version: int, rows: Arrays) -> str:
    path = whole_path(folder, version)
    try:
        told = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        return f"{path.name} cannot be read: {error}"
    # Earlier releases wrote a mark of one byte and no checksum.
    wrong = told.dtype == np.uint32 and told.tolist() != [sum_of_copy(rows)]
    return f"the copy for version {version} does not have its checksum" if wrong else ""


def _damaged_rows(folder: Path, rows: Arrays) -> str:
    try:
        told = known_sums(folder)
    except OSError as error:
        return f"{SUMS} cannot be read: {error.strerror}"
    users = min([len(told), *map(len, rows.values())]) if rows else 0
    damaged = sum(bool(told[user]) and told[user] != sum_of_row(rows, user) for user in range(users))
    return f"the rows of {damaged} of {users} users do not have their checksum" if damaged else ""
