"""Attributes of users and features of items as matrices: what a model knows beside ratings.

Choices (a gender, an occupation, a genre) are one column each with 0 and 1.  What is *not known* is NaN, in every
column that it would decide: a model leaves such terms out instead of taking "not known" for "no".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import UNKNOWN_GENRE, Dataset
from coterie.errors import DataError

__all__ = ["AttributeTable", "beside", "item_attributes", "one_of"]

_YEAR = re.compile(r"\((\d{4})\)\s*$")
"""MovieLens titles end with the year of release."""


@dataclass(frozen=True, eq=False)
class AttributeTable:
    """One row of numbers for each user, or for each item, of a data set.

    Parameters
    ----------
    names : tuple of str
        Of the columns, each once; none at all where nothing is known.
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
        Begins the columns' names: ``gender: F``.
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
    """Return the columns of several, one after the other.

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
    """Return genres and year of each item, from what the data set says of items.

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
