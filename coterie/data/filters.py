"""Filters of a data set: fewest interactions of a user and of an item, counted once, and the k-core."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset
from coterie.errors import DataError

__all__ = ["NO_FILTER", "Filter", "filtered"]


@dataclass(frozen=True)
class Filter:
    """Which users and items of a data set are kept.

    Parameters
    ----------
    min_user, min_item : int
        Fewest interactions of a user and of an item, both counted once, in the data set as it was read: a user who is
        kept may have fewer afterwards.  1 keeps all.
    k_core : int
        Fewest interactions of every user and every item among those that are kept, counted again until nothing more
        drops out.  1 keeps all.

    Raises
    ------
    DataError
        A number below 1.
    """

    min_user: int = 1
    min_item: int = 1
    k_core: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise DataError(f"{name} is {value}; expected at least 1")


NO_FILTER = Filter()


def filtered(dataset: Dataset, keep: Filter) -> Dataset:
    """Return the part of a data set that a filter keeps, with a note on what it left out.

    The k-core is the largest part in which everyone has ``k`` interactions, so no order of dropping changes it.

    Parameters
    ----------
    dataset : Dataset
    keep : Filter

    Returns
    -------
    Dataset
        Rows, users and items in their order.  The same object where the filter keeps all by definition.

    Raises
    ------
    DataError
        Nothing is left.
    """
    if keep == NO_FILTER:
        return dataset
    rule = ", ".join(f"{name} {least}" for name, least in vars(keep).items() if least > 1)
    users, items = len(dataset.users), len(dataset.items)
    once = _enough(dataset.user, users, keep.min_user) & _enough(dataset.item, items, keep.min_item)
    rows = _core(dataset, np.flatnonzero(once), keep.k_core)
    if not len(rows):
        most = [np.bincount(index).max(initial=0) for index in (dataset.user, dataset.item)]
        raise DataError(
            f"{rule}: nothing is left of the {len(dataset)} interactions of {users} users with {items} items of "
            f"{dataset.name}",
            hint=f"lower numbers; no user has more than {most[0]} interactions, and no item more than {most[1]}",
        )
    part = _part(dataset, rows)
    note = (
        f"{rule}: {len(dataset) - len(part)} interactions, {users - len(part.users)} users and "
        f"{items - len(part.items)} items left out"
    )
    return replace(part, notes=(*dataset.notes, note))


def _enough(index: NDArray[np.int32], n: int, least: int) -> NDArray[np.bool_]:
    """Return the rows whose user, or item, has enough of them, bool (N,)."""
    return np.asarray(np.bincount(index, minlength=n)[index] >= least)


def _core(dataset: Dataset, rows: NDArray[np.intp], k: int) -> NDArray[np.intp]:
    """Return those of the rows in which every user and every item has ``k`` of them."""
    while True:
        enough = _enough(dataset.user[rows], len(dataset.users), k)
        enough &= _enough(dataset.item[rows], len(dataset.items), k)
        if enough.all():
            return rows
        rows = rows[enough]


def _part(dataset: Dataset, rows: NDArray[np.intp]) -> Dataset:
    """Return the data set of some rows, with the users and items that have any."""
    users, user = np.unique(dataset.user[rows], return_inverse=True)
    items, item = np.unique(dataset.item[rows], return_inverse=True)
    titles, genres, names = dataset.item_titles, dataset.item_genres, dataset.genres
    if genres is not None:
        genres = genres[items]
        used = np.flatnonzero(genres.any(axis=0))
        genres, names = genres[:, used], tuple(names[n] for n in used.tolist())
    return replace(
        dataset,
        users=tuple(dataset.users[n] for n in users.tolist()),
        items=tuple(dataset.items[n] for n in items.tolist()),
        user=user.astype(np.int32),
        item=item.astype(np.int32),
        rating=dataset.rating[rows],
        time=None if dataset.time is None else dataset.time[rows],
        genres=names,
        item_genres=genres,
        item_titles=None if titles is None else tuple(titles[n] for n in items.tolist()),
    )
