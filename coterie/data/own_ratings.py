"""A person's own ratings or interactions from a file, for recommendations without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.readers import USUAL_COLUMNS
from coterie.data.tables import Dialect, FileTable, polars, read_text
from coterie.errors import DataError, nearest

__all__ = ["SHOWN", "OwnRatings", "own_ratings", "read_own_ratings"]

SHOWN = 5
"""Most unknown items that are named."""


@dataclass(frozen=True, eq=False)
class OwnRatings:
    """What a person has rated or taken up, by item of a catalogue.

    Attributes
    ----------
    item : ndarray of int64, shape (n,)
        Positions in the catalogue, ascending, each once.
    rating : ndarray of float64, shape (n,)
        NaN where an item has no rating.
    unknown : tuple of str
        Items of the file that the catalogue has not, in the order of keys; they do not count.
    repeated : int
        Rows that a later row of the same item takes the place of.
    """

    item: NDArray[np.int64]
    rating: NDArray[np.float64]
    unknown: tuple[str, ...]
    repeated: int


def read_own_ratings(
    path: Path, items: Sequence[str], *, rating_range: tuple[float, float] | None = None
) -> OwnRatings:
    """Read a person's own items, with or without ratings, from a CSV file, or a TSV file by its suffix.

    Parameters
    ----------
    path : Path
        A header, with a column of items and possibly one of ratings, under their usual names; other columns are not
        read, except that one of users may name only one.  A row without a rating is an item without one.
    items : sequence of str
        Keys of the catalogue.
    rating_range : tuple of float, optional
        Lowest and highest rating, for systems that learn from ratings; at least one row then needs one.

    Raises
    ------
    DataError
        The file, line and column, what stands there and what was expected; or no item of the catalogue.
    """
    if not path.is_file():
        raise DataError(
            f"{path} {'is no file' if path.exists() else 'does not exist'}; expected a CSV file of own items",
            hint="its header is item,rating, or item alone; items are named as in the data set",
        )
    dialect = Dialect("\t") if path.suffix.lower() == ".tsv" else Dialect(",", quoted=True)
    return _of_table(read_text(path, dialect), items, rating_range)


def own_ratings(
    given: Mapping[str, float] | Sequence[str],
    items: Sequence[str],
    *,
    rating_range: tuple[float, float] | None = None,
) -> OwnRatings:
    """Return a person's own items from memory, as `read_own_ratings` does from a file.

    Parameters
    ----------
    given : mapping of str to float, or sequence of str
        Ratings by item, or items.
    items, rating_range
        As for `read_own_ratings`.

    Raises
    ------
    DataError
        The row and what was expected; or no item of the catalogue.
    """
    name = Path("own ratings")
    if isinstance(given, str) or not len(given):
        raise DataError(
            f"{name}: {given!r}; expected items with their ratings, or a list of items",
            hint=f"items are named as in the data set, such as {', '.join(map(repr, items[:3]))}",
        )
    columns: dict[str, list[Any]] = {"item": [str(key) for key in given]}
    if isinstance(given, Mapping):
        columns["rating"] = list(given.values())
    return _of_table(
        FileTable(name, polars().DataFrame(columns, strict=False), None, False), items, rating_range
    )


def _of_table(table: FileTable, items: Sequence[str], rating_range: tuple[float, float] | None) -> OwnRatings:
    path = table.path
    _refuse_others(table)
    keys, index = table.keys(_column(table, "item") or "item")
    rating = _ratings(table, rating_range)
    place = {key: at for at, key in enumerate(items)}
    position = np.array([place.get(key, -1) for key in keys], np.int64)[index]
    known = np.flatnonzero(position >= 0)
    unknown = tuple(key for key in keys if key not in place)
    if not len(known):
        raise DataError(_none_known(path, unknown), hint=_near(unknown, items))
    # The last row of an item counts: from behind, the first one of each is that.
    own, last = np.unique(position[known][::-1], return_index=True)
    found = OwnRatings(own, rating[known][::-1][last], unknown, len(known) - len(own))
    if rating_range is not None and np.isnan(found.rating).all():
        raise DataError(
            f"{path} has no rating of an item that is known; this system learns from ratings",
            hint=f"a column `rating`, with numbers from {rating_range[0]:g} to {rating_range[1]:g}",
        )
    return found


def _column(table: FileTable, role: str) -> str | None:
    return next(filter(table.has, USUAL_COLUMNS[role]), None)


def _refuse_others(table: FileTable) -> None:
    """Refuse a file of several users, whose items would count as those of one."""
    column = _column(table, "user")
    if column is None:
        return
    if len(users := set(table.texts(column))) > 1:
        raise DataError(
            f"{table.path}, column {column!r}: {len(users)} users; expected the items of one person",
            hint="leave the column out, or the rows of the others",
        )


def _ratings(table: FileTable, rating_range: tuple[float, float] | None) -> NDArray[np.float64]:
    column = _column(table, "rating")
    if column is None:
        return np.full(len(table), np.nan)
    low, high = (None, None) if rating_range is None else rating_range
    return table.numbers(column, low, high, blank=True)


def _none_known(path: Path, unknown: Sequence[str]) -> str:
    named = ", ".join(map(repr, unknown[:SHOWN]))
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    return f"no item of {path} is known to the run: {named}{more}"


def _near(unknown: Sequence[str], items: Sequence[str]) -> str:
    near: Mapping[str, str | None] = {key: nearest(key, items) for key in unknown[:1]}
    for key, guess in near.items():
        if guess:
            return f"items are named as in the data set; did you mean {guess!r} for {key!r}?"
    shown = ", ".join(map(repr, items[:3]))
    return f"items are named as in the data set, such as {shown}"
