"""A leave-one-out hold-out whose users are records outside of memory, read some users at a time.

A record has the integers of one user, in the narrowest type that holds them: the number of its training items, the
number of its negatives, the test item, the validation item, the negatives, the training items ascending, and the items
of the other parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.leave_one_out import (
    NO_ITEM,
    HeldOutItems,
    HeldOutRows,
    LeaveOneOut,
    UserItems,
    narrowest,
)

__all__ = ["RecordedHoldout", "UserRecords", "records_of"]

_HEAD = 4
"""Integers before the negatives."""
_USERS_AT_ONCE = 4096
"""Most users whose records are read at once to learn what all of them have."""


class UserRecords(Protocol):
    """Records of users outside of memory, by position."""

    def __len__(self) -> int: ...

    def read(
        self, users: NDArray[np.integer]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Return bytes, and where in them the record of each of some users begins and ends."""
        ...


def records_of(holdout: LeaveOneOut) -> Iterator[bytes]:
    """Yield the record of each user of a hold-out in memory, in their order."""
    kind = narrowest(holdout.n_items)
    everyone = np.arange(holdout.n_users)
    training, rows = holdout.training(), holdout.rows(everyone)
    for user in everyone.tolist():
        own, every = training[user], rows.interactions[user]
        negatives = rows.negatives[user]
        others = np.setdiff1d(every, own)
        head = [len(own), len(negatives), rows.test[user], rows.validation[user]]
        yield np.concatenate([head, negatives, own, others]).astype(kind).tobytes()


class RecordedHoldout(HeldOutItems):
    """A hold-out of one item per user whose users are in records.

    It keeps a byte for each user in memory, and what the records themselves keep.

    Parameters
    ----------
    n_items : int
    records : UserRecords
        As `records_of` makes them for so many items.
    k : int
        Number of ranks that count.
    """

    def __init__(self, n_items: int, records: UserRecords, k: int = 10) -> None:
        self.n_items, self.k = n_items, k
        self._records, self._kind = records, narrowest(n_items)
        self._held_out = np.zeros(len(records), np.bool_)
        self._width = 0
        for first in range(0, len(records), _USERS_AT_ONCE):
            users = np.arange(first, min(first + _USERS_AT_ONCE, len(records)))
            values, at, _ = self._read(users)
            self._width = max(self._width, int(values[at + 1].max(initial=0)))
            self._held_out[users] = (values[at + 2] != NO_ITEM) | (values[at + 3] != NO_ITEM)

    @property
    def n_users(self) -> int:
        """Number of users, ``U``."""
        return len(self._records)

    def rows(self, users: NDArray[np.intp]) -> HeldOutRows:
        """Return the hold-out of some users, by position."""
        values, first, last = self._read(users)
        listed = values[first + 1].astype(np.int64)
        columns = np.arange(self._width)
        present = columns < listed[:, None]
        negatives = np.full(present.shape, NO_ITEM, self._kind)
        negatives[present] = values[((first + _HEAD)[:, None] + columns)[present]]
        items = UserItems(values.astype(np.int32), first + _HEAD + listed, last)
        return HeldOutRows(
            values[first + 2].astype(np.int32), values[first + 3].astype(np.int32), negatives, items
        )

    def has_held_out(self, users: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return which of some users have a held-out item, by position."""
        found: NDArray[np.bool_] = self._held_out[users]
        return found

    def training(self) -> RecordedItems:
        """Return the training items of each user, ascending."""
        return RecordedItems(self)

    def trained(self, users: NDArray[np.intp]) -> UserItems:
        """Return the training items of some users, by position."""
        values, first, _ = self._read(users)
        begin = first + _HEAD + values[first + 1]
        return UserItems(values.astype(np.int32), begin, begin + values[first])

    def _read(
        self, users: NDArray[np.intp]
    ) -> tuple[NDArray[np.signedinteger], NDArray[np.int64], NDArray[np.int64]]:
        """Return integers, and where in them the record of each of some users begins and ends."""
        content, first, last = self._records.read(users)
        size = np.dtype(self._kind).itemsize
        return content.view(self._kind), first // size, last // size


class RecordedItems:
    """Training items of the users of a `RecordedHoldout`, read when they are asked for.

    Parameters
    ----------
    holdout : RecordedHoldout
    """

    def __init__(self, holdout: RecordedHoldout) -> None:
        self._holdout = holdout

    def take(self, users: NDArray[np.intp]) -> UserItems:
        """Return the items of some users, by position."""
        return self._holdout.trained(users)

    def __len__(self) -> int:
        return self._holdout.n_users

    def __getitem__(self, at: int, /) -> NDArray[np.int32]:
        return self.take(np.array([at], np.intp))[0]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        for first in range(0, len(self), _USERS_AT_ONCE):
            yield from self.take(np.arange(first, min(first + _USERS_AT_ONCE, len(self))))
