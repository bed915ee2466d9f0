"""Arrays in one safetensors file, with a checksum of their content in its header."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save, save_file

from coterie.errors import StoreError
from coterie.rounds.sides import Arrays

__all__ = [
    "SUMS",
    "arrays_from_bytes",
    "arrays_to_bytes",
    "load_arrays",
    "save_arrays",
    "sum_of_row",
    "sums_of_rows",
]

SUMS = "rows.crc"
"""File, beside users' private arrays, with the CRC-32 of each user's rows, uint32, little-endian; 0 where unknown."""

_SUM = "crc32"


def save_arrays(arrays: Arrays, path: Path, about: Mapping[str, str] | None = None) -> None:
    """Write arrays, with texts about them and their checksum; the file is not synced."""
    save_file(arrays, path, metadata={**(about or {}), _SUM: _sum_of(arrays)})


def load_arrays(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Return the arrays of a file and the texts about them.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    StoreError
        It cannot be read, or its content does not have its checksum; files of earlier releases have none.
    """
    return arrays_from_bytes(path.read_bytes(), str(path))


def arrays_to_bytes(arrays: Arrays) -> bytes:
    """Return arrays with their checksum as the content of a file of `save_arrays`."""
    content: bytes = save(arrays, metadata={_SUM: _sum_of(arrays)})
    return content


def arrays_from_bytes(content: bytes, name: str) -> tuple[Arrays, dict[str, str]]:
    """Return the arrays of a file's content and the texts about them; ``name`` is for errors.

    Raises
    ------
    StoreError
        The content cannot be read, or does not have its checksum; files of earlier releases have none.
    """
    try:
        arrays = load(content)
        size = int.from_bytes(content[:8], "little")
        about = dict(json.loads(content[8 : 8 + size]).get("__metadata__", {}))
    except (SafetensorError, ValueError, TypeError) as error:
        raise _damaged(name, "it cannot be read") from error
    if about.get(_SUM, "") not in ("", _sum_of(arrays)):
        raise _damaged(name, "its content does not have its checksum")
    return arrays, about


def sum_of_row(arrays: Arrays, row: int) -> int:
    """Return the CRC-32 of one row of all arrays, in the order of their names; never 0, which stands for unknown."""
    found = 0
    for name in sorted(arrays):
        found = zlib.crc32(arrays[name][row].tobytes(), found)
    return found or 1


def sums_of_rows(arrays: Arrays, first: int, last: int) -> NDArray[np.uint32]:
    """Return `sum_of_row` of the rows from one on, up to another; uint32, little-endian."""
    if first == last:
        return np.zeros(0, "<u4")
    rows = [arrays[name][first:last] for name in sorted(arrays) if arrays[name].size]
    flat = [np.ascontiguousarray(array).reshape(last - first, -1).view(np.uint8) for array in rows]
    whole = np.concatenate(flat, axis=1) if flat else np.empty((last - first, 0), np.uint8)
    width, content = whole.shape[1], memoryview(whole.tobytes())
    found = (zlib.crc32(content[at * width : (at + 1) * width]) or 1 for at in range(last - first))
    return np.fromiter(found, "<u4", last - first)


def _sum_of(arrays: Arrays) -> str:
    found = 0
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), found)
        found = zlib.crc32(array.reshape(-1).view(np.uint8).data, found)
    return f"{found:08x}"


def _damaged(name: str, why: str) -> StoreError:
    return StoreError(
        f"{name} is damaged: {why}",
        hint="put this file back from a backup, or restore the state folder from one (`coterie restore`)",
    )
