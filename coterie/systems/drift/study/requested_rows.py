"""Attack by requested rows: an owner's request names the users and items of its next update together.

An update with Theta = 2 has two blocks, so every second guess "this user, this item" is right from the first
exchange on, and each further epoch pairs the blocks anew.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coterie.systems.drift.study.exchanges import Exchange

__all__ = ["RequestedRows"]


class RequestedRows:
    """Scores of pairs of user and item, by how often requests named them together.

    Parameters
    ----------
    n_users, n_items : int
        Numbers of slots and items.

    Attributes
    ----------
    scores : ndarray of float32, shape (n_users, n_items)
        Sum over the exchanges that named user and item of one over the number of users named: the expected
        number of times that the item was there for this user.
    exchanges : int
        Number of exchanges that named a user.
    """

    def __init__(self, n_users: int, n_items: int) -> None:
        self.scores: npt.NDArray[np.float32] = np.zeros((n_users, n_items), np.float32)
        self.exchanges = 0

    def add(self, exchange: Exchange) -> None:
        """Take the next exchange."""
        if len(exchange.users):
            self.scores[np.ix_(exchange.users, exchange.items)] += np.float32(1 / len(exchange.users))
            self.exchanges += 1
