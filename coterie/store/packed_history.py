"""Interactions of a host's users in columns of numbers: some 20 bytes each, where objects take ten times as much."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from coterie.store.client import Interaction

__all__ = ["HistoryColumns", "PackedHistory"]

_T = TypeVar("_T", bound=np.generic)

_USERS_AT_ONCE = 4096
"""Most users whose rows `HistoryColumns.blocks` yields together."""


class HistoryColumns(NamedTuple):
    """Rows of a history as arrays of shape (N,)."""

    user: NDArray[np.uint32]
    """Users as the store numbers them, from 1."""
    item: NDArray[np.int32]
    """Places of the items, -1 for those that have none."""
    positive: NDArray[np.bool_]
    part: NDArray[np.int8]
    rating: NDArray[np.float64] | None
    """NaN where an interaction has none; None where none has one."""

    def blocks(self) -> Iterator[NDArray[np.intp]]:
        """Yield the rows of some users after those of others: ascending, and all rows of a user together."""
        user = self.user
        in_order = bool((user[1:] >= user[:-1]).all())
        order = None if in_order else np.argsort(user, kind="stable")
        by_user = user if order is None else user[order]
        first = 0
        while first < len(user):
            last = int(np.searchsorted(by_user, np.uint32(by_user[first] + _USERS_AT_ONCE)))
            yield np.arange(first, last) if order is None else np.sort(order[first:last])
            first = last


class PackedHistory(Sequence[Interaction]):
    """Interactions in the order of a store's history; each is made when it is asked for.

    Parameters
    ----------
    interactions : iterable of Interaction
        As `append` takes them.
    """

    def __init__(self, interactions: Iterable[Interaction] = ()) -> None:
        self._codes: dict[str, int] = {}
        self._keys: list[str] = []
        self._user, self._item, self._time = array("I"), array("I"), array("q")
        self._positive, self._part = array("b"), array("b")
        # Empty until an interaction has a rating.
        self._rating = array("d")
        self.extend(interactions)

    def append(self, one: Interaction) -> None:
        """Append an interaction: its user has 32 bits, its time 64, and its part is below 128.

        Raises
        ------
        OverflowError
            A number does not fit; nothing was appended.
        """
        user, item, positive, time, part, rating = one
        count = len(self._part)
        try:
            self._user.append(user)
            self._time.append(time)
            self._part.append(part)
        except OverflowError:
            for column in (self._user, self._time, self._part):
                del column[count:]
            raise
        code = self._codes.get(item)
        if code is None:
            code = self._codes[item] = len(self._keys)
            self._keys.append(item)
        self._item.append(code)
        if rating is not None and not self._rating:
            self._rating.frombytes(np.full(count, math.nan).tobytes())
        if rating is not None or self._rating:
            self._rating.append(math.nan if rating is None else rating)
        self._positive.append(positive)

    def extend(self, interactions: Iterable[Interaction]) -> None:
        """Append interactions, each as `append` does."""
        for one in interactions:
            self.append(one)

    def columns(self, place_of: Callable[[str], int]) -> HistoryColumns:
        """Return a copy of the rows as they are now, which another thread may ask for while rows are appended.

        Parameters
        ----------
        place_of : callable
            Gives the place of an item by its key, -1 for one that has none.
        """
        count = len(self)
        keys = self._keys[:]
        places = np.fromiter(map(place_of, keys), np.int32, len(keys))
        return HistoryColumns(
            _copied(self._user, np.uint32, count),
            places[_copied(self._item, np.uint32, count)],
            _copied(self._positive, np.bool_, count),
            _copied(self._part, np.int8, count),
            _copied(self._rating, np.float64, count) if self._rating else None,
        )

    def rows_of(self, user: int) -> NDArray[np.intp]:
        """Return the rows of a user, ascending."""
        return np.flatnonzero(_copied(self._user, np.uint32, len(self)) == user)

    def __len__(self) -> int:
        # The column to which a row is appended last.
        return len(self._positive)

    @overload
    def __getitem__(self, at: int) -> Interaction: ...
    @overload
    def __getitem__(self, at: slice) -> list[Interaction]: ...
    def __getitem__(self, at: int | slice) -> Interaction | list[Interaction]:
        if isinstance(at, slice):
            return [self._made(row) for row in range(*at.indices(len(self)))]
        return self._made(range(len(self))[at])

    def __iter__(self) -> Iterator[Interaction]:
        return map(self._made, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _made(self, row: int) -> Interaction:
        rating = self._rating[row] if self._rating else math.nan
        return Interaction(
            self._user[row],
            self._keys[self._item[row]],
            bool(self._positive[row]),
            self._time[row],
            self._part[row],
            None if math.isnan(rating) else rating,
        )


def _copied(column: array[Any], kind: type[_T], count: int) -> NDArray[_T]:
    # An array cannot grow while something looks into it: `tobytes` has copied before another thread runs.
    return np.frombuffer(column.tobytes(), kind, count)
