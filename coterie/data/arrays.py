"""Reader of NumPy files: one row for each interaction, with user, item and, where there are any, rating and time.

Nothing is unpickled: a file of Python objects could run any code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from coterie.data.tables import FileTable, polars
from coterie.errors import DataError

__all__ = ["read_numpy", "table_of"]

_IN_ORDER = ("user", "item", "rating", "time")
"""Columns of an array without names, of which the last two may be absent."""
_FEWEST = 2


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
        A file that is not NumPy's or holds Python objects, another shape, other types than numbers and text, columns of
        different lengths, or no rows.
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
        Another type, or no rows.
    """
    pl = polars()
    for name, column in columns.items():
        if column.dtype.kind not in "iufU" or (column.dtype.itemsize > 8 and column.dtype.kind == "f"):
            raise DataError(f"{path}: {name} is of type {column.dtype}; expected numbers or text")
    if not len(next(iter(columns.values()))):
        raise DataError(f"{path} has no rows; expected interactions")
    # Half precision and the other byte order are unknown to polars.
    frame = pl.DataFrame({name: _plain(column) for name, column in columns.items()})
    return FileTable(path, frame, dialect=None, header=False, place=place)


def _plain(column: NDArray[Any]) -> Any:
    if column.dtype.kind == "U":
        return column.tolist()
    return column.astype(np.float64 if column.dtype.kind == "f" else column.dtype.newbyteorder("="))


def _held(path: Path) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """Return the array of a ``.npy`` file, or the arrays of a ``.npz`` file by name."""
    try:
        # Never allow pickle: to load an object is to run the code that the file names.
        held = np.load(path, allow_pickle=False)
        if isinstance(held, np.ndarray):
            return held
        with held:
            return {name: held[name] for name in held.files}
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, BadZipFile, KeyError) as error:
        if "allow_pickle" in str(error) or "Object arrays" in str(error):
            raise DataError(
                f"{path} holds Python objects or is no NumPy file; expected arrays of numbers or text, which "
                "load without running code"
            ) from error
        raise DataError(f"{path} cannot be read as a NumPy file: {error}") from error


def _table(path: Path, name: str, array: NDArray[Any]) -> FileTable:
    fields: Sequence[str] | None = array.dtype.names
    if fields and array.ndim == 1:
        return table_of(path, {field: array[field] for field in fields})
    if fields is not None or array.ndim != _FEWEST or not _FEWEST <= array.shape[1] <= len(_IN_ORDER):
        raise DataError(
            f"{path}: {name} is of shape {array.shape}; expected (N, 2) to (N, {len(_IN_ORDER)}), with columns "
            f"{', '.join(_IN_ORDER)}"
        )
    return table_of(path, {column: array[:, n] for n, column in enumerate(_IN_ORDER[: array.shape[1]])})
