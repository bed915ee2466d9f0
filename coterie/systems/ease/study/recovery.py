"""Recovery of a user's items from a few products of its history with known columns, for the attacks on a sketch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["left_out", "prior", "recovered"]

_COOLING = (100.0, 30.0, 10.0, 3.0, 1.0)
"""Multiples of the variance of an error under which the relaxed problem is solved, one after the other."""

_STEPS = 200
_FLIPS = 500
_SIZES = 16
"""Numbers of items that are tried for a user of whom only the direction of its products is known."""


def prior(supports: NDArray[np.floating], users: int) -> NDArray[np.float64]:
    """Return the log-odds with which a user has each item, by how many of the users have it; float64 (n,)."""
    held = np.clip(np.asarray(supports, np.float64), 0.5, users)
    found: NDArray[np.float64] = np.log(held / (users - held + 1))
    return found


def recovered(
    columns: NDArray[np.floating],
    products: NDArray[np.floating],
    odds: NDArray[np.float64],
    known: NDArray[np.integer],
    spread: float,
) -> tuple[NDArray[np.bool_], float]:
    """Return the likeliest items of a user, and minus the logarithm of how likely they are.

    Shares of items in [0, 1] are found by accelerated projected gradients and rounded; then single items are flipped as
    long as that makes the whole likelier.

    Parameters
    ----------
    columns : ndarray of float, shape (n, c)
    products : ndarray of float, shape (c,)
        Products of the user's history, 1 for its items and 0 for others, with the columns.
    odds : ndarray of float64, shape (n,)
        Log-odds of having an item.
    known : ndarray of int
        Items that the attacker knows the user to have.
    spread : float
        Standard deviation of an error of a product.

    Returns
    -------
    items : ndarray of bool, shape (n,)
    cost : float
    """
    largest = float(np.linalg.norm(columns, 2)) ** 2 or 1.0
    share = np.zeros(len(columns))
    share[known] = 1
    ahead, momentum, variance = share, 1.0, spread**2
    for times in _COOLING:
        weight = variance * times
        for _ in range(_STEPS):
            gradient = columns @ (ahead @ columns - products) - weight * odds
            moved = np.clip(ahead - gradient / largest, 0, 1)
            moved[known] = 1
            faster = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            ahead = moved + (momentum - 1) / faster * (moved - share)
            share, momentum = moved, faster
    items = share > 0.5
    squared = np.square(columns).sum(axis=1)
    for _ in range(_FLIPS):
        change = 1.0 - 2.0 * items
        rest = products - items @ columns
        cost = (0.5 * squared - change * (columns @ rest)) / variance - change * odds
        cost[known] = 0
        best = int(cost.argmin())
        if cost[best] >= -1e-9:
            break
        items[best] = not items[best]
    rest = products - items @ columns
    return items, float(rest @ rest / (2 * variance) - items @ odds)


def left_out(
    probes: tuple[NDArray[np.floating], NDArray[np.floating]],
    products: tuple[NDArray[np.floating], NDArray[np.floating]],
    odds: NDArray[np.float64],
) -> NDArray[np.bool_]:
    r"""Return the items of a user who is in the first sum of a sketch and not in the second, bool (n,).

    The matrix of counts is symmetric, so :math:`Q^T (G \Omega)` and :math:`(\Omega^T (G Q))^T` are equal where both
    sums are over the same users.  Otherwise they differ by :math:`(Q^T x)(\Omega^T x)^T`: of a left-out user's history
    :math:`x` all products with all columns are known, up to a factor that is tried out.

    Parameters
    ----------
    probes : two ndarrays of float, shape (n, k)
        Signs :math:`\Omega` and the columns Q of the second sum.
    products : two ndarrays of float, shape (n, k)
        What the sums add up to.
    odds : ndarray of float64, shape (n,)
        Log-odds of having an item.
    """
    first, second = (np.asarray(one, np.float64) for one in probes)
    apart = second.T @ products[0] - (first.T @ products[1]).T
    left, lengths, right = np.linalg.svd(apart)
    columns = np.hstack([first, second])
    nothing = np.zeros(0, np.intp)
    # What the other singular values have is errors of rounding.
    error = float(np.median(lengths)) if len(lengths) > 1 else 0.0
    found: tuple[float, NDArray[np.bool_]] = (math.inf, np.zeros(len(columns), np.bool_))
    for items in np.geomspace(2, max(len(columns) / 2, 3), _SIZES):
        size = math.sqrt(first.shape[1] * items)
        for sign in (1.0, -1.0):
            told = np.concatenate([sign * size * right[0], sign * lengths[0] / size * left[:, 0]])
            chosen, _ = recovered(columns, told, odds, nothing, max(1.0, error / size))
            made = np.outer(chosen @ second, chosen @ first)
            found = min(found, (float(np.square(apart - made).sum()), chosen), key=lambda one: one[0])
    return found[1]
