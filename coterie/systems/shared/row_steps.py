"""What local steps on rows of items have in common: a check of what users kept, and the steps of sampled rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.systems.shared.biases import Biased, moving, scaled
from coterie.systems.shared.factor_steps import UserData

__all__ = ["RowSteps", "check_kept", "sampled_rows"]


class RowSteps(Biased, Protocol):
    """Settings of steps on rows of items."""

    @property
    def rate(self) -> float:
        """Step size of rows."""

    @property
    def ridge(self) -> float:
        """Weight of the L2 penalty."""


def check_kept(name: str, kept: NDArray[np.float32], users: int, width: int) -> None:
    """Check that each user has kept one row.

    Raises
    ------
    ValueError
        The rows, named ``name``, have another shape than (users, width).
    """
    if kept.shape != (users, width):
        raise ValueError(
            f"{name} have shape {kept.shape}; expected what each of {users} users kept, ({users}, {width})"
        )


def sampled_rows(
    items: NDArray[np.float64],
    user: UserData,
    settings: RowSteps,
    path: Sequence[NDArray[np.float64]],
    opened: NDArray[np.bool_],
    *,
    predicts: bool = False,
    proximal: float = 0.0,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    r"""Return a user's open sampled items, ascending, and the changes of their rows, which step beside its own row.

    Parameters
    ----------
    items : ndarray of float64, shape (n_items, width)
        Rows as fetched.
    user : UserData
        A user with ratings: sampled items count as rated with their mean.
    settings : RowSteps
    path : sequence of ndarray of float64, shape (width,) each
        What the user's rows of items are multiplied by, before each epoch that it takes.
    opened : ndarray of bool, shape (n_items,)
        Open items.
    predicts : bool
        Whether sampled items count as rated with what the fetched rows predict, instead.
    proximal : float
        Weight :math:`\mu` of the change so far in the gradient.
    """
    sampled = np.sort(user.sampled)
    sampled = sampled[opened[sampled]]
    before = items[sampled]
    change = np.zeros_like(before)
    moves = moving(settings)[1]
    wanted = scaled(settings, user.ratings).astype(np.float64).mean()
    with np.errstate(over="ignore", invalid="ignore"):
        for epoch, own in enumerate(path):
            q = before + change
            found = np.einsum("sk,k->s", q, own)
            if predicts and not epoch:
                wanted = found
            by_row = -2 * (wanted - found)[:, None] * own + 2 * settings.ridge * q
            if proximal:
                by_row += proximal * change
            change = change - settings.rate * (moves * by_row)
    return sampled.astype(np.int32), change.astype(np.float32)
