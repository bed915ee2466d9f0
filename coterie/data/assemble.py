"""Assembly of a data set from a source's columns: repeated pairs, titles and genres, items without a genre."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import UNKNOWN_GENRE, Dataset
from coterie.data.tables import FileTable

__all__ = ["Catalogue", "Columns", "assemble"]

_LARGEST = float(np.finfo(np.float32).max)
"""Largest rating that a data set can hold."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns that hold an interaction.

    Parameters
    ----------
    user, item : str
    rating : str or None
        None: every interaction counts as 1.
    time : str or None
    """

    user: str
    item: str
    rating: str | None
    time: str | None


@dataclass(frozen=True)
class Catalogue:
    """Titles and genres of items in a source, by external key.

    Parameters
    ----------
    titles : mapping of str to str
    genres : mapping of str to tuple of str, or None
        None where the source has no genres at all.
    order : tuple of str
        Order of the genres; those it does not name follow by name.
    """

    titles: Mapping[str, str] | None = None
    genres: Mapping[str, tuple[str, ...]] | None = None
    order: tuple[str, ...] = field(default=())


def assemble(
    name: str,
    table: FileTable,
    columns: Columns,
    rating_range: tuple[float, float] | None,
    catalogue: Catalogue | None = None,
    *,
    notes: Sequence[str] = (),
) -> Dataset:
    """Build a data set of the items and users that have interactions.

    For rows with the same user and item, the last by time is kept, or the last in the file.

    Parameters
    ----------
    name : str
    table : FileTable
    columns : Columns
    rating_range : tuple of float or None
        Lowest and highest rating that is not an error.
    catalogue : Catalogue, optional
    notes : sequence of str
        Notes of the reader, to which those of the assembly are added.

    Returns
    -------
    Dataset

    Raises
    ------
    DataError
        A column is missing or a value out of range.
    """
    remarks = list(notes)
    users, user = table.keys(columns.user)
    items, item = table.keys(columns.item)
    if columns.rating is None:
        rating = np.ones(len(table), dtype=np.float32)
        remarks.append("no ratings: every interaction counts as 1")
    else:
        # Without a range any rating that single precision holds.
        low, high = rating_range if rating_range is not None else (-_LARGEST, _LARGEST)
        rating = table.numbers(columns.rating, low, high).astype(np.float32)
    time = None if columns.time is None else table.seconds(columns.time)

    kept = _last_of_each_pair(user.astype(np.int64) * len(items) + item, time)
    if (dropped := len(user) - len(kept)) > 0:
        remarks.append(f"{dropped} rows repeated a user and item: the last of each was kept")
    catalogue = catalogue or Catalogue()
    genres, item_genres = _genre_table(items, catalogue)
    titles = catalogue.titles
    return Dataset(
        name=name,
        users=users,
        items=items,
        user=user[kept],
        item=item[kept],
        rating=rating[kept],
        time=None if time is None else time[kept],
        genres=genres,
        item_genres=item_genres,
        item_titles=None if titles is None else tuple(titles.get(key, key) for key in items),
        notes=tuple(remarks),
    )


def _last_of_each_pair(pair: NDArray[np.int64], time: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the last row of each (user, item) pair, in file order."""
    # The sort is stable, so at equal times the later row in the file stays last.
    order = np.argsort(pair, kind="stable") if time is None else np.lexsort((time, pair))
    ordered = pair[order]
    last = np.append(ordered[1:] != ordered[:-1], True)
    return np.sort(order[last])


def _genre_table(
    items: tuple[str, ...], catalogue: Catalogue
) -> tuple[tuple[str, ...], NDArray[np.bool_] | None]:
    if catalogue.genres is None:
        return (), None
    of_item = [catalogue.genres.get(key) or (UNKNOWN_GENRE,) for key in items]
    found = {genre for genres in of_item for genre in genres}
    listed = [genre for genre in catalogue.order if genre in found]
    names = (*listed, *sorted(found.difference(listed)))
    column = {genre: index for index, genre in enumerate(names)}
    member = np.zeros((len(items), len(names)), dtype=np.bool_)
    for row, genres in enumerate(of_item):
        member[row, [column[genre] for genre in genres]] = True
    return names, member
