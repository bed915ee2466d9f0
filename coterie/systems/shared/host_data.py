"""Data of a host's users that every system in rounds is given: interactions, ratings, attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable
from coterie.errors import DataError
from coterie.evaluation.leave_one_out import RANKED, LeaveOneOut
from coterie.evaluation.rated import Rated

__all__ = ["HostData"]


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
        for name, table in (("attributes", self.attributes), ("preferences", self.preferences)):
            if table is not None and len(table) != len(self.users):
                raise DataError(f"{name} of {len(table)} users for the {len(self.users)} of this host")

    def preference(self, name: str) -> NDArray[np.float64]:
        """Return what each user has set for one preference, (users,): NaN where it has set nothing."""
        table = self.preferences
        if table is None or name not in table.names:
            return np.full(len(self.users), np.nan)
        return table.values[:, table.names.index(name)].astype(np.float64)

    def leave_one_out(self, seed: int) -> LeaveOneOut:
        """Return the hold-out of one item per user, ranked among listed items or items drawn with the run's seed.

        Raises
        ------
        ValueError
            A user has two held-out items in one part.
        """
        if (self.part == RANKED).any():
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
