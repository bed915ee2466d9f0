r"""Biases of users and items in a factorisation of ratings: columns of the factors, and the scale of ratings.

With biases ratings are put on the scale from -1 to 1, whatever their range is, and rows have two more values:
:math:`p_u = (a_u, 1, p'_u)` and :math:`q_j = (1, b_j, q'_j)`, so that :math:`p_u q_j = a_u + b_j + p'_u q'_j`.  The
ones never move.  FedMF and FedMVMF use it; without biases every function here changes nothing.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ITEM",
    "USER",
    "Biased",
    "begin_items",
    "begin_users",
    "moving",
    "predicted",
    "scaled",
    "width_of",
    "without_biases",
]

USER, ITEM = 0, 1
"""Columns of the biases of users and of items, where there are biases.  The other's value there is 1."""


class Biased(Protocol):
    """Settings of a factorisation that may learn biases."""

    @property
    def biases(self) -> bool:
        """Whether it does."""

    @property
    def lowest(self) -> float:
        """Lowest possible rating."""

    @property
    def highest(self) -> float:
        """Highest possible rating."""

    @property
    def width(self) -> int:
        """Number of values in a row of the model."""


def width_of(factors: int, biases: bool) -> int:
    """Return the number of values in a row of the model: factors, and with biases two more."""
    return factors + (2 if biases else 0)


def without_biases(settings: Biased, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows of the model without the two values of biases, (n, K)."""
    return rows[:, 2:] if settings.biases else rows


def begin_items(settings: Biased, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Set the first two values of items' initial rows (n, width): a 1, and a bias of 0."""
    if settings.biases:
        rows[:, USER], rows[:, ITEM] = 1, 0
    return rows


def begin_users(settings: Biased, factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Set the first two values of users' initial factors (n, width): a bias of 0, and a 1."""
    if settings.biases:
        factors[:, USER], factors[:, ITEM] = 0, 1
    return factors


def moving(settings: Biased) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return which values of a user's factor move, and which of an item's row: 1 or 0, float64 (width,) each."""
    user, item = np.ones(settings.width), np.ones(settings.width)
    if settings.biases:
        user[ITEM] = item[USER] = 0
    return user, item


def scaled(settings: Biased, ratings: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return ratings as the model learns them: as they are, or with biases on the scale from -1 to 1.

    Where all ratings are equal, with biases, they are learned as 0.
    """
    if not settings.biases:
        return ratings
    middle, half = _range(settings)
    return (ratings - middle) / (half or 1.0)


def predicted(settings: Biased, scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return predicted ratings from scores, products of factors: the inverse of `scaled`."""
    if not settings.biases:
        return scores
    middle, half = _range(settings)
    found: NDArray[np.float32] = np.float32(middle) + np.float32(half) * scores
    return found


def _range(settings: Biased) -> tuple[float, float]:
    return (settings.lowest + settings.highest) / 2, (settings.highest - settings.lowest) / 2
