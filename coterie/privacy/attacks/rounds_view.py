"""A curious COS's view of a system that runs in rounds: sums, and the participants that they cover.

A round in which users are parties in clear gives one view for each user, a round with hosts in clear one for each
host, a masked or encrypted round one for all who submitted.  The attacks ask no further.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.errors import DataError
from coterie.secure_sum.contribution import Layout

__all__ = ["RoundView", "known_slots", "view_of_sum"]


@dataclass(frozen=True, eq=False)
class RoundView:
    """One sum that the COS received.

    Attributes
    ----------
    version : int
        Version of the model that the participants trained from.
    slots : ndarray of int64, shape (n,)
        Participants whose contributions the sum covers, none twice.
    rows : ndarray of float32, shape (I, d), optional
        Sum of their changes of the item rows; zero where nobody touched a row.
    touched : ndarray of float32, shape (I,), optional
        How many of them touched each row, or, before the first round, have the item at all.
    noise : float
        Standard deviation of what rounding added to one value of ``rows`` for each participant that touched it.

    Raises
    ------
    DataError
        No participants, one twice, or arrays that do not fit each other.
    """

    version: int
    slots: npt.NDArray[np.int64]
    rows: npt.NDArray[np.float32] | None = None
    touched: npt.NDArray[np.float32] | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.slots) or len(np.unique(self.slots)) != len(self.slots):
            raise DataError(f"a sum over {len(self.slots)} slots; expected at least one, and none twice")
        if self.rows is not None and self.rows.ndim != 2:
            raise DataError(f"rows of shape {self.rows.shape}; expected (items, width)")
        if self.rows is not None and self.touched is not None and len(self.rows) != len(self.touched):
            raise DataError(f"{len(self.rows)} rows but touch counts of {len(self.touched)} items")


def view_of_sum(
    layout: Layout,
    total: npt.NDArray[np.uint32],
    slots: Sequence[int] | npt.NDArray[np.integer],
    version: int,
    *,
    rows: str = "items",
    columns: slice = slice(None),
    touched: str = "touched",
) -> RoundView:
    """Read a view from the vector of codes that the COS received, or that a masked sum revealed to it.

    Parameters
    ----------
    layout : Layout
        Layout of the plan.
    total : ndarray of uint32, shape (layout.size,)
        Sum of the contributions' codes.
    slots : sequence of int
        Slots of the users who contributed.
    version : int
        Version of the model that was fetched.
    rows, touched : str
        Names of the segments; one that the layout does not have is not in the view.
    columns : slice
        Which columns of the rows: the part of a product model, say.

    Raises
    ------
    ImpossibleSumError
        When the bounds rule the sum out.
    DataError
        As `RoundView`.
    """
    sums = layout.decode(total, len(slots))
    seen = sums.get(rows)
    counts = sums.get(touched)
    return RoundView(
        version=version,
        slots=np.asarray(slots, np.int64),
        rows=None if seen is None else seen[:, columns].astype(np.float32),
        touched=None if counts is None else counts.astype(np.float32),
        # Rounding up or down at random has a variance of at most a quarter of a step squared.
        noise=0.0 if seen is None else layout[rows].step / 2,
    )


def known_slots(views: Iterable[RoundView], n_users: int) -> list[RoundView]:
    """Return the views whose slots all exist; the COS refused messages with others."""
    return [view for view in views if 0 <= int(view.slots.min()) <= int(view.slots.max()) < n_users]
