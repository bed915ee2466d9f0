"""Attributes of users and features of items as matrices, which models use beside ratings.

Choices (a gender, an occupation, a genre) are one column each with 0 and 1.  An *unknown* value is NaN, in every column
that it would determine: a model leaves such terms out instead of taking "not known" for "no".
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import UNKNOWN_GENRE, Dataset
from coterie.errors import DataError

__all__ = [
    "AttributeTable",
    "beside",
    "in_order",
    "item_attributes",
    "one_of",
    "read_attributes",
    "restrict",
    "write_attributes",
]

_YEAR = re.compile(r"\((\d{4})\)\s*$")
"""Year of release at the end of a MovieLens title."""


@dataclass(frozen=True, eq=False)
class AttributeTable:
    """One row of numbers for each user, or for each item, of a data set.

    Parameters
    ----------
    names : tuple of str
        Names of the columns, each once; empty where nothing is known.
    values : ndarray of float32, shape (n, len(names))
        NaN where missing.

    Raises
    ------
    DataError
        Another type or shape, an infinite value, a name twice.
    """

    names: tuple[str, ...]
    values: NDArray[np.float32]

    def __post_init__(self) -> None:
        if (
            self.values.dtype != np.float32
            or self.values.ndim != 2
            or self.values.shape[1] != len(self.names)
        ):
            raise DataError(
                f"attributes are {self.values.dtype} of shape {self.values.shape}; expected float32 with a column "
                f"for each of the {len(self.names)} names"
            )
        if len(set(self.names)) != len(self.names):
            raise DataError("two attributes have the same name; expected each once")
        if np.isinf(self.values).any():
            raise DataError("an attribute is infinite; expected a finite number, or NaN where it is missing")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.values)

    @property
    def missing(self) -> float:
        """Share of the values that are missing, 0 where there are no columns."""
        return float(np.isnan(self.values).mean()) if self.values.size else 0.0


def one_of(kind: str, choices: Sequence[str], index: NDArray[np.integer]) -> AttributeTable:
    """Return a column of 0 and 1 for each choice.

    Parameters
    ----------
    kind : str
        Beginning of the columns' names, as in ``gender: F``.
    choices : sequence of str
    index : ndarray of int, shape (n,)
        Which of the choices; -1 where it is not known.

    Returns
    -------
    AttributeTable
    """
    values = np.zeros((len(index), len(choices)), np.float32)
    known = index >= 0
    values[known, index[known]] = 1
    values[~known] = np.nan
    return AttributeTable(tuple(f"{kind}: {choice}" for choice in choices), values)


def beside(*parts: AttributeTable) -> AttributeTable:
    """Return one table with the columns of several tables side by side.

    Raises
    ------
    DataError
        Different numbers of rows, or a name in two of them.
    """
    if len({len(part) for part in parts}) != 1:
        raise DataError(
            f"attributes of {', '.join(str(len(part)) for part in parts)} rows; expected the same number"
        )
    return AttributeTable(
        tuple(name for part in parts for name in part.names),
        np.concatenate([part.values for part in parts], axis=1),
    )


def item_attributes(dataset: Dataset) -> AttributeTable:
    """Return genres and year of each item, from the data set's genres and titles.

    Parameters
    ----------
    dataset : Dataset

    Returns
    -------
    AttributeTable
        A column for each genre but "unknown", and ``year``, from titles that end with one, as those of MovieLens do: in
        standard deviations from the mean of the data set's items, so that it weighs as much as a genre.  Missing are
        the genres of an item that has none, and the year of a title without one; a data set without genres, or without
        a title with a year, has no such columns.
    """
    return beside(_genres(dataset), _years(dataset))


def _genres(dataset: Dataset) -> AttributeTable:
    named = [column for column, genre in enumerate(dataset.genres) if genre != UNKNOWN_GENRE]
    if dataset.item_genres is None or not named:
        return AttributeTable((), np.empty((len(dataset.items), 0), np.float32))
    values = dataset.item_genres[:, named].astype(np.float32)
    values[~dataset.item_genres[:, named].any(axis=1)] = np.nan
    return AttributeTable(tuple(f"genre: {dataset.genres[column]}" for column in named), values)


def _years(dataset: Dataset) -> AttributeTable:
    found = [_YEAR.search(title) for title in dataset.item_titles or ()]
    if not any(found):
        return AttributeTable((), np.empty((len(dataset.items), 0), np.float32))
    years = np.array([float(each[1]) if each else np.nan for each in found])
    spread = float(np.nanstd(years))
    scaled = (years - np.nanmean(years)) / (spread if spread else 1.0)
    return AttributeTable(("year",), scaled.astype(np.float32)[:, None])


def write_attributes(path: Path, key: str, keys: Sequence[str], table: AttributeTable) -> None:
    """Write a table as CSV: a column ``key``, then one for each attribute, empty where a value is missing.

    Parameters
    ----------
    path : Path
        Replaced if it exists.
    key : str
        ``user`` or ``item``.
    keys : sequence of str
        One for each row of the table.
    table : AttributeTable
    """
    restrict(path)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([key, *table.names])
        for name, row in zip(keys, table.values.tolist(), strict=True):
            # Nine digits give every float32 back.
            writer.writerow([name, *("" if math.isnan(value) else f"{value:.9g}" for value in row)])


def restrict(path: Path) -> None:
    """Let only the owner of the process read and write a file, mode 0600; it is made when missing."""
    path.touch(mode=0o600)
    path.chmod(0o600)


def read_attributes(path: Path, key: str) -> tuple[dict[str, int], AttributeTable]:
    """Read the CSV file that `write_attributes` writes.

    Returns
    -------
    rows : dict of str to int
        Row of each key, in the order of the file.
    table : AttributeTable

    Raises
    ------
    DataError
        A file that cannot be read, another first column, a line with more or fewer fields, a key that is empty or
        there twice, a value that is no finite number; names line and column, and no value.
    """
    try:
        file = path.open(newline="", encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    rows: dict[str, int] = {}
    values: list[list[float]] = []
    with file:
        lines = csv.reader(file)
        head = next(lines, [])
        if not head or head[0] != key:
            raise DataError(f"{path}: the first column is {head[0] if head else None!r}; expected {key!r}")
        for fields in lines:
            where = f"{path}, line {lines.line_num}"
            if len(fields) != len(head):
                raise DataError(f"{where}: {len(fields)} fields; expected {len(head)}")
            if not fields[0] or fields[0] in rows:
                raise DataError(f"{where}: the {key} is empty or named twice; expected each once")
            rows[fields[0]] = len(rows)
            values.append(
                [_number(text, where, name) for name, text in zip(head[1:], fields[1:], strict=True)]
            )
    table = np.array(values, np.float32).reshape(len(rows), len(head) - 1)
    return rows, AttributeTable(tuple(head[1:]), table)


def _number(text: str, where: str, column: str) -> float:
    try:
        value = float(text) if text else math.nan
    except ValueError:
        value = math.inf
    # "nan" is refused for a missing value: it is as likely a fault of the program that wrote the file.
    if math.isinf(value) or (math.isnan(value) and text):
        raise DataError(
            f"{where}, column {column!r}: expected a finite number, or nothing where it is missing"
        )
    return value


def in_order(keys: Sequence[str], rows: Mapping[str, int], table: AttributeTable) -> AttributeTable:
    """Return the rows of ``keys`` in this order, with all values missing for a key without a row."""
    position = np.array([rows.get(key, -1) for key in keys], np.int64)
    values = np.full((len(keys), len(table.names)), np.nan, np.float32)
    values[position >= 0] = table.values[position[position >= 0]]
    return AttributeTable(table.names, values)
