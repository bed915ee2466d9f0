"""Reader of NumPy files: one row for each interaction, with user, item and, where there are any, rating and time.

Nothing is unpickled: a file of Python objects could run any code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from coterie.data.tables import FileTable, polars
from coterie.errors import DataError

__all__ = ["read_numpy", "table_of"]

_IN_ORDER = ("user", "item", "rating", "time")
"""Columns of an array without names, of which the last two may be absent."""
_FEWEST_COLUMNS = 2
_TABLE_DIMENSIONS = 2
_ZIP = b"PK"
"""First bytes of a ``.npz`` file, which is a zip archive."""


def read_numpy(path: Path) -> FileTable:
    """Read a ``.npy`` or ``.npz`` file as a table.

    Parameters
    ----------
    path : Path
        One of: an array of shape (N, 2), (N, 3) or (N, 4), whose columns are user, item, rating, time; a structured
        array of shape (N,), whose fields name the columns; in ``.npz`` also one array of shape (N,) for each column, by
        name, or a single array of the first two kinds.

    Returns
    -------
    FileTable
        Errors in it name rows, from 1.

    Raises
    ------
    DataError
        A file that is not NumPy's, is damaged, announces more than it holds, or holds Python objects; another shape,
        other types than numbers and text, columns of different lengths, or no rows.
    """
    held = _held(path)
    if isinstance(held, np.ndarray):
        return _table(path, "the array", held)
    if len(held) == 1:
        ((name, array),) = held.items()
        return _table(path, name, array)
    lengths = {name: array.shape for name, array in held.items()}
    if not held or any(len(shape) != 1 for shape in lengths.values()) or len(set(lengths.values())) != 1:
        shown = ", ".join(f"{name} {shape}" for name, shape in lengths.items()) or "no array"
        raise DataError(
            f"{path} holds {shown}; expected one array of rows, or arrays of one length (N,), a column each"
        )
    return table_of(path, held)


def table_of(
    path: Path, columns: Mapping[str, NDArray[Any]], *, place: Callable[[int], str] | None = None
) -> FileTable:
    """Return a table of columns that did not come from lines of text.

    Parameters
    ----------
    path : Path
        File, named in errors.
    columns : mapping of str to ndarray, shape (N,)
        Numbers or text.
    place : callable, optional
        Names a row in errors, by its position.

    Returns
    -------
    FileTable

    Raises
    ------
    DataError
        Another type or shape, text that is no Unicode, or no rows.
    """
    pl = polars()
    for name, column in columns.items():
        if column.dtype.kind not in "iufU" or (column.dtype.itemsize > 8 and column.dtype.kind == "f"):
            raise DataError(f"{path}: {name} is of type {column.dtype}; expected numbers or text")
        if column.ndim != 1:
            raise DataError(f"{path}: {name} is of shape {column.shape}; expected one value in each row")
    if not len(next(iter(columns.values()))):
        raise DataError(f"{path} has no rows; expected interactions")
    # Half precision and the other byte order are unknown to polars.
    try:
        frame = pl.DataFrame({name: _plain(column) for name, column in columns.items()})
    except UnicodeError as error:
        raise DataError(f"{path} holds text that is no Unicode: {error}; expected numbers or text") from error
    return FileTable(path, frame, dialect=None, header=False, place=place)


def _plain(column: NDArray[Any]) -> Any:
    if column.dtype.kind == "U":
        return column.tolist()
    return column.astype(np.float64 if column.dtype.kind == "f" else column.dtype.newbyteorder("="))


def _held(path: Path) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """Return the array of a ``.npy`` file, or the arrays of a ``.npz`` file by name."""
    try:
        with path.open("rb") as file:
            zipped = file.read(len(_ZIP)) == _ZIP
            file.seek(0)
            if not zipped:
                return _array(path, "the array", file, path.stat().st_size)
            with ZipFile(file) as archive:
                return dict(_member(path, archive, name) for name in archive.namelist())
    except DataError:
        raise
    # NumPy and the decompressors raise errors of many types for content that is damaged.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(
            f"{path} cannot be read as a NumPy file: {reason or error}; expected an array as .npy, or arrays as .npz"
        ) from error


def _member(path: Path, archive: ZipFile, name: str) -> tuple[str, NDArray[Any]]:
    """Return the name of an array in a ``.npz`` file, without ``.npy``, and the array."""
    with archive.open(name) as file:
        if file.read(len(npy.MAGIC_PREFIX)) != npy.MAGIC_PREFIX:
            raise DataError(f"{path}: {name} is no array; expected arrays (.npy) and nothing else in .npz")
        file.seek(0)
        return name.removesuffix(".npy"), _array(path, name, file, archive.getinfo(name).file_size)


def _array(path: Path, name: str, file: IO[bytes], size: int) -> NDArray[Any]:
    """Return the array in the ``.npy`` format that an open file of ``size`` bytes holds."""
    # Version 3 differs from 2 only in the encoding of the fields' names.
    header = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = header(file)
    # Never load objects: to load one is to run the code that the file names.
    if dtype.hasobject:
        raise DataError(
            f"{path}: {name} holds Python objects; expected numbers or text, which load without running code"
        )
    if (claimed := math.prod(shape) * max(1, dtype.itemsize)) > size:
        raise DataError(
            f"{path}: {name} is of shape {shape} and type {dtype} by its header, {claimed} bytes, but holds {size}; "
            "expected the whole array"
        )
    file.seek(0)
    array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
    return array


def _table(path: Path, name: str, array: NDArray[Any]) -> FileTable:
    fields: Sequence[str] | None = array.dtype.names
    if fields and array.ndim == 1:
        return table_of(path, {field: array[field] for field in fields})
    if (
        fields is not None
        or array.ndim != _TABLE_DIMENSIONS
        or not (_FEWEST_COLUMNS <= array.shape[1] <= len(_IN_ORDER))
    ):
        raise DataError(
            f"{path}: {name} is of shape {array.shape}; expected (N, 2) to (N, {len(_IN_ORDER)}), with columns "
            f"{', '.join(_IN_ORDER)}"
        )
    return table_of(path, {column: array[:, n] for n, column in enumerate(_IN_ORDER[: array.shape[1]])})
