"""Reader of rating matrices in MATLAB files: the layout of Monti et al. (2017), which gc-mc reads, too.

A file holds the matrix ``M`` of users (rows) by items (columns), where 0 is no rating, and may hold the masks
``Otraining`` and ``Otest`` of the published split.  MATLAB 7.3 files are HDF5, earlier ones have a format of their own;
the content decides which library reads a file, not its name.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.arrays import table_of
from coterie.data.assemble import Columns, assemble
from coterie.data.dataset import Dataset
from coterie.errors import DataError

__all__ = ["published_parts", "read_mat"]

_RATINGS, _TRAIN, _TEST = "M", "Otraining", "Otest"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_HDF5_PLACES = (0, 512)
"""Offsets of the HDF5 signature: MATLAB writes 512 bytes of its own before it."""
_LARGEST = 8 * 2**30
"""Most bytes of an array that is read from HDF5, where a file of few bytes may announce any size."""


def read_mat(path: Path, rating_range: tuple[float, float] | None = None) -> Dataset:
    """Read the rating matrix of a MATLAB file.

    Parameters
    ----------
    path : Path
        File with a matrix ``M``, dense or sparse.
    rating_range : tuple of float, optional
        Lowest and highest rating that is not an error; any finite number by default.

    Returns
    -------
    Dataset
        Keys of users and items are MATLAB's numbers of rows and columns, from 1.  Without times, as the layout has
        none.  A note tells of a published split in the file.

    Raises
    ------
    DataError
        A file of neither format or a damaged one, without ``M``, with another kind of array or one of more than 8 GiB,
        without a rating, or with a rating that is out of range or not finite, whose place is named as in ``M(12, 7)``.
    """
    matrices = _matrices(path)
    row, column, rating = _entries(path, matrices, _RATINGS)
    if not len(rating):
        raise DataError(f"{path}: {_RATINGS} has no entry other than 0; expected ratings")
    table = table_of(
        path,
        {"user": row + 1, "item": column + 1, "rating": rating},
        place=lambda n: f"{_RATINGS}({row[n] + 1}, {column[n] + 1})",
    )
    notes = []
    if _TRAIN in matrices and _TEST in matrices:
        notes.append(f'{_TRAIN} and {_TEST} hold a published split: split.kind = "published" uses it')
    return assemble(path.stem, table, Columns("user", "item", "rating", None), rating_range, notes=notes)


def published_parts(path: Path, dataset: Dataset) -> NDArray[np.bool_]:
    """Return which interactions the published split of a MATLAB file tests by.

    Parameters
    ----------
    path : Path
        The file that the data set was read from.
    dataset : Dataset
        What `read_mat` returned, or a part of it.

    Returns
    -------
    ndarray of bool, shape (N,)

    Raises
    ------
    DataError
        No masks, or an interaction that is in both or in none.
    """
    matrices = _matrices(path)
    if absent := [name for name in (_TRAIN, _TEST) if name not in matrices]:
        raise DataError(f"{path} has no published split: {' and '.join(absent)} missing beside {_RATINGS}")
    own = np.array(dataset.users, np.int64)[dataset.user], np.array(dataset.items, np.int64)[dataset.item]
    marked = []
    for name in (_TRAIN, _TEST):
        row, column, _ = _entries(path, matrices, name)
        width = int(max(own[1].max(initial=0), (column + 1).max(initial=0))) + 1
        marked.append(np.isin(own[0] * width + own[1], (row + 1) * width + column + 1))
    train, test = marked
    for wrong, problem in (
        (train & test, "both in {} and in {}"),
        (~train & ~test, "neither in {} nor in {}"),
    ):
        if wrong.any():
            n = int(wrong.argmax())
            raise DataError(
                f"{path}: {_RATINGS}({own[0][n]}, {own[1][n]}) is {problem.format(_TRAIN, _TEST)}; expected every "
                "rating in one of them"
            )
    return test


def _matrices(path: Path) -> Mapping[str, Any]:
    """Return the ratings and masks that a file has, users by items, dense or as ``scipy.sparse``."""
    try:
        with path.open("rb") as file:
            head = file.read(_HDF5_PLACES[-1] + len(_HDF5))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    hdf5 = any(head[place : place + len(_HDF5)] == _HDF5 for place in _HDF5_PLACES)
    found = _read_hdf5(path) if hdf5 else _read_matlab_5(path)
    if _RATINGS not in found:
        raise DataError(
            f"{path} has no matrix {_RATINGS!r}; expected the ratings of users (rows) for items (columns)"
        )
    shape = found[_RATINGS].shape
    for name, matrix in found.items():
        if len(matrix.shape) != 2 or matrix.shape != shape:
            raise DataError(
                f"{path}: {name} is of shape {matrix.shape}; expected "
                + ("users by items" if name == _RATINGS else f"that of {_RATINGS}, {shape}")
            )
        if matrix.dtype.kind not in "buif":
            raise DataError(f"{path}: {name} is of type {matrix.dtype}; expected numbers")
    return found


def _read_hdf5(path: Path) -> dict[str, Any]:
    h5py = _library(path, "h5py")
    try:
        with h5py.File(path, "r") as file:
            return {name: _from_hdf5(path, file[name]) for name in (_RATINGS, _TRAIN, _TEST) if name in file}
    except DataError:
        raise
    # h5py raises errors of many types for content that is damaged or that it does not know.
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as HDF5: {error}; expected a MATLAB 7.3 file with a matrix {_RATINGS}"
        ) from error


def _from_hdf5(path: Path, stored: Any) -> Any:
    """Return an array of a MATLAB 7.3 file, which stores columns first and so transposed for others."""
    if hasattr(stored, "shape"):
        return _array(path, stored).T
    sparse = _library(path, "scipy.sparse")
    if not {"data", "ir", "jc"} <= set(stored) or "MATLAB_sparse" not in stored.attrs:
        raise DataError(
            f"{path}: {stored.name.strip('/')} is a structure; expected a matrix, dense or sparse"
        )
    data, rows, pointers = (_array(path, stored[part]) for part in ("data", "ir", "jc"))
    try:
        shape = operator.index(stored.attrs["MATLAB_sparse"]), len(pointers) - 1
        matrix = sparse.csc_matrix((data, rows.astype(np.int64), pointers.astype(np.int64)), shape=shape)
        matrix.check_format(full_check=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"{path}: {stored.name.strip('/')} is no sparse matrix: {error}; expected values (data), rows (ir), starts "
            "of columns (jc) and the number of rows (MATLAB_sparse)"
        ) from error
    return matrix


def _array(path: Path, stored: Any) -> NDArray[Any]:
    """Return an array of an HDF5 file that is not too large to be read."""
    name = stored.name.strip("/")
    if stored.shape is None:
        raise DataError(f"{path}: {name} is empty; expected an array")
    if (size := stored.size * stored.dtype.itemsize) > _LARGEST:
        raise DataError(
            f"{path}: {name} is of shape {stored.shape}, {size} bytes; expected at most {_LARGEST}",
            hint="a matrix with many zeros is smaller if it is stored sparse",
        )
    return np.asarray(stored)


def _read_matlab_5(path: Path) -> dict[str, Any]:
    io = _library(path, "scipy.io")
    try:
        held = io.loadmat(path, variable_names=(_RATINGS, _TRAIN, _TEST))
        for matrix in held.values():
            if hasattr(matrix, "check_format"):
                matrix.check_format(full_check=True)
    # scipy raises errors of many types for content that is no MATLAB file.
    except Exception as error:
        raise DataError(
            f"{path} is no MATLAB file: it is no HDF5, and not read as an earlier format ({error})",
            hint="layout 'mat' is for files with a matrix M of ratings",
        ) from error
    return {name: matrix for name, matrix in held.items() if not name.startswith("__")}


def _library(path: Path, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"reading {path} needs {name.partition('.')[0]}, which is not installed",
            hint="pip install 'coterie[data]'",
        ) from error


def _entries(
    path: Path, matrices: Mapping[str, Any], name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return row, column and value of the entries that are not 0, row by row; NaN is an entry."""
    matrix = matrices[name]
    if hasattr(matrix, "tocoo"):
        entries = matrix.tocoo()
        row, column, value = entries.row, entries.col, entries.data
        kept = value != 0
        row, column, value = row[kept], column[kept], value[kept]
        order = np.lexsort((column, row))
        row, column, value = row[order], column[order], value[order]
    else:
        row, column = np.nonzero(matrix)
        value = matrix[row, column]
    return row.astype(np.int64), column.astype(np.int64), value.astype(np.float64)
