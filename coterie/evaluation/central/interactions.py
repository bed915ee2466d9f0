"""Training interactions of central models, by user and by item."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError

__all__ = ["Interactions", "Lists"]


@dataclass(frozen=True, eq=False)
class Lists:
    """Ascending lists of numbers, one for each of ``n`` rows, in one array.

    Parameters
    ----------
    bounds : ndarray of int, shape (n + 1,)
        Row ``r`` has the entries ``bounds[r]`` to ``bounds[r + 1]``.
    entries : ndarray of int, shape (N,)
    """

    bounds: NDArray[np.intp]
    entries: NDArray[np.intp]

    def __getitem__(self, row: int) -> NDArray[np.intp]:
        """Return the list of a row."""
        return self.entries[self.bounds[row] : self.bounds[row + 1]]

    def places(self, rows: NDArray[np.integer]) -> NDArray[np.intp]:
        """Return the positions in ``entries`` of the lists of some rows, one after the other."""
        starts, counts = self.bounds[rows], self.bounds[np.asarray(rows) + 1] - self.bounds[rows]
        return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))

    @property
    def lengths(self) -> NDArray[np.intp]:
        """Number of entries of each row, (n,)."""
        return np.diff(self.bounds)


@dataclass(frozen=True, eq=False)
class Interactions:
    """Training interactions of ``n_users`` users with ``n_items`` items.

    Parameters
    ----------
    n_users, n_items : int
        At least 1.
    user, item : ndarray of int, shape (N,)
        Positions of user and item; no pair twice.
    rating : ndarray of float, shape (N,), optional
        Finite; absent for implicit feedback.

    Raises
    ------
    DataError
        Arrays that do not fit each other, a position out of range, a pair that occurs twice, a rating that is not
        finite, no user or no item.
    """

    n_users: int
    n_items: int
    user: NDArray[np.integer]
    item: NDArray[np.integer]
    rating: NDArray[np.floating] | None = None

    def __post_init__(self) -> None:
        if self.n_users < 1 or self.n_items < 1:
            raise DataError(f"{self.n_users} users and {self.n_items} items; expected at least one of each")
        given = (self.user, self.item) if self.rating is None else (self.user, self.item, self.rating)
        if self.user.ndim != 1 or len({one.shape for one in given}) > 1:
            raise DataError(
                f"user, item and rating have the shapes {[one.shape for one in given]}; expected one shape (N,)"
            )
        for name, index, size in (("user", self.user, self.n_users), ("item", self.item, self.n_items)):
            if len(index) and not 0 <= index.min() <= index.max() < size:
                raise DataError(f"{name} holds {index.min()} to {index.max()}; expected 0 to {size - 1}")
        pairs = self.user.astype(np.int64) * self.n_items + self.item
        twice = len(pairs) - len(np.unique(pairs))
        if twice:
            raise DataError(f"{twice} interactions repeat a user and an item; expected each pair once")
        if self.rating is not None and not np.isfinite(self.rating).all():
            raise DataError("a rating is not a finite number")

    def __len__(self) -> int:
        """Return the number of interactions."""
        return len(self.user)

    @cached_property
    def items_of(self) -> Lists:
        """Items of each user, ascending."""
        return _listed(self.user, self.item, self.n_users)

    @cached_property
    def users_of(self) -> Lists:
        """Users of each item, ascending."""
        return _listed(self.item, self.user, self.n_items)

    def rated(self) -> NDArray[np.float64]:
        """Return the ratings, float64 (N,).

        Raises
        ------
        DataError
            There are none.
        """
        if self.rating is None or not len(self.rating):
            raise DataError("these interactions have no ratings; expected at least one to learn from")
        return self.rating.astype(np.float64)


def _listed(row: NDArray[np.integer], entry: NDArray[np.integer], n: int) -> Lists:
    order = np.lexsort((entry, row))
    bounds = np.zeros(n + 1, np.intp)
    np.cumsum(np.bincount(row, minlength=n), out=bounds[1:])
    return Lists(bounds, entry[order].astype(np.intp))
