"""Data of a host's users that every system in rounds is given: interactions, ratings, attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable
from coterie.errors import DataError
from coterie.evaluation.leave_one_out import RANKED, HeldOutItems, LeaveOneOut
from coterie.evaluation.rated import Rated
from coterie.evaluation.recorded import RecordedHoldout, UserRecords, records_of

__all__ = ["BlocksOfUsers", "HostData", "InteractionRows", "KeepRecords", "LargeHostData"]

KeepRecords = Callable[[int, Iterable[bytes]], UserRecords]
"""Keeps the records of so many users outside of memory; those of before, if they are of the same."""


class InteractionRows(Protocol):
    """Interactions as arrays of shape (N,), as `HostData` has them."""

    @property
    def user(self) -> NDArray[np.integer]:
        """Position of each user, (N,)."""
        ...

    @property
    def item(self) -> NDArray[np.integer]:
        """Item of each row, (N,)."""
        ...

    @property
    def part(self) -> NDArray[np.integer]:
        """Part of each row, (N,)."""
        ...

    @property
    def rating(self) -> NDArray[np.floating]:
        """Rating of each row, (N,): NaN where there is none."""
        ...


class BlocksOfUsers(Protocol):
    """Interactions of very many users, some users after others."""

    def __iter__(self) -> Iterator[tuple[range, InteractionRows]]:
        """Yield positions of users, ascending, and their interactions; users are counted from the first of them."""
        ...

    def whole(self) -> InteractionRows:
        """Return the interactions of all users together."""
        ...

    def ranked(self) -> bool:
        """Return whether a row is of part ``RANKED``."""
        ...


@dataclass(frozen=True, eq=False)
class HostData:
    """Interactions of a host's users, by position at this host and item of the catalogue.

    Parameters
    ----------
    users, items : sequence of str
        Names of the users; keys of the catalogue's items.
    user, item, part : ndarray of int, shape (N,)
        Interactions; of part ``RANKED`` are rows that are none: items among which held-out ones are ranked.
    rating : ndarray of float, shape (N,)
        NaN where an interaction has none.
    attributes : AttributeTable, optional
        A row for each user; left out where nothing is known of users.
    preferences : AttributeTable, optional
        What users have set for themselves: a row for each user, NaN where the run's plan decides.

    Raises
    ------
    DataError
        Arrays that do not fit each other.
    """

    users: Sequence[str]
    items: Sequence[str]
    user: NDArray[np.integer]
    item: NDArray[np.integer]
    part: NDArray[np.integer]
    rating: NDArray[np.floating]
    attributes: AttributeTable | None = None
    preferences: AttributeTable | None = None

    def __post_init__(self) -> None:
        shapes = [each.shape for each in (self.user, self.item, self.part, self.rating)]
        if len(set(shapes)) > 1 or self.user.ndim != 1:
            raise DataError(f"user, item, part and rating have shapes {shapes}; expected one shape (N,)")
        self._check_tables()

    def _check_tables(self) -> None:
        for name, table in (("attributes", self.attributes), ("preferences", self.preferences)):
            if table is not None and len(table) != len(self.users):
                raise DataError(f"{name} of {len(table)} users for the {len(self.users)} of this host")

    def whole(self) -> HostData:
        """Return the same data with all interactions in memory."""
        return self

    def preference(self, name: str) -> NDArray[np.float64]:
        """Return what each user has set for one preference, (users,): NaN where it has set nothing."""
        table = self.preferences
        if table is None or name not in table.names:
            return np.full(len(self.users), np.nan)
        return table.values[:, table.names.index(name)].astype(np.float64)

    def leave_one_out(self, seed: int) -> HeldOutItems:
        """Return the hold-out of one item per user, ranked among listed items or items drawn with the run's seed.

        Raises
        ------
        ValueError
            A user has two held-out items in one part.
        """
        return self._in_memory(seed, ranked=bool((self.part == RANKED).any()))

    def _in_memory(self, seed: int, *, ranked: bool) -> LeaveOneOut:
        if ranked:
            return LeaveOneOut.ranked(len(self.users), len(self.items), self.user, self.item, self.part)
        return LeaveOneOut.sampled(self.users, self.items, self.user, self.item, self.part, seed=seed)

    def rated(self, among: NDArray[np.bool_] | None = None) -> Rated:
        """Return the hold-out of explicit ratings; interactions without a rating are left out."""
        own = np.flatnonzero((self.part != RANKED) & np.isfinite(self.rating))
        return Rated(
            len(self.users),
            len(self.items),
            self.user[own],
            self.item[own],
            self.rating[own],
            self.part[own],
            among=among,
        )


class LargeHostData(HostData):
    """Data of the users of a host that are too many to have all of it in memory.

    A system that asks for the hold-out of one item per user gets one whose users are in records; interactions as a
    whole are in memory once they are asked for.

    Parameters
    ----------
    users, items : sequence of str
        As for `HostData`.
    blocks : BlocksOfUsers
        The interactions.
    keep : callable
        Keeps the users' records.
    attributes, preferences : AttributeTable, optional
        As for `HostData`.
    """

    _blocks: BlocksOfUsers
    _keep: KeepRecords

    def __init__(
        self,
        users: Sequence[str],
        items: Sequence[str],
        blocks: BlocksOfUsers,
        keep: KeepRecords,
        attributes: AttributeTable | None = None,
        preferences: AttributeTable | None = None,
    ) -> None:
        # Not set one by one: the class is frozen.
        self.__dict__.update(
            users=users,
            items=items,
            attributes=attributes,
            preferences=preferences,
            _blocks=blocks,
            _keep=keep,
        )
        self._check_tables()

    @cached_property
    def _whole(self) -> InteractionRows:
        return self._blocks.whole()

    @property
    def user(self) -> NDArray[np.integer]:
        """Position of the user of each interaction, (N,)."""
        return self._whole.user

    @property
    def item(self) -> NDArray[np.integer]:
        """Item of each interaction, (N,)."""
        return self._whole.item

    @property
    def part(self) -> NDArray[np.integer]:
        """Part of each interaction, (N,)."""
        return self._whole.part

    @property
    def rating(self) -> NDArray[np.floating]:
        """Rating of each interaction, (N,)."""
        return self._whole.rating

    def whole(self) -> HostData:
        """Return the same data with all interactions in memory."""
        return HostData(self.users, self.items, *_columns(self._whole), self.attributes, self.preferences)

    def leave_one_out(self, seed: int) -> HeldOutItems:
        """Return the hold-out of one item per user, as `HostData.leave_one_out` does, in records."""

        def records() -> Iterator[bytes]:
            ranked = self._blocks.ranked()
            for users, rows in self._blocks:
                some = HostData(self.users[users.start : users.stop], self.items, *_columns(rows))
                yield from records_of(some._in_memory(seed, ranked=ranked))

        return RecordedHoldout(len(self.items), self._keep(len(self.users), records()))


def _columns(
    rows: InteractionRows,
) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer], NDArray[np.floating]]:
    return rows.user, rows.item, rows.part, rows.rating
