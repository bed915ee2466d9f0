"""Scores that need no model: the trivial rows that stand in every table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["popularity", "positive_share", "random_scores"]


def random_scores(users: int, items: int, seed: int) -> NDArray[np.float32]:
    """Score every item of every user by chance.

    Parameters
    ----------
    users, items, seed : int

    Returns
    -------
    ndarray of float32, shape (users, items)
        Uniform in [0, 1).
    """
    return np.random.default_rng(seed).random((users, items), dtype=np.float32)


def popularity(item: NDArray[np.int32], positive: NDArray[np.bool_], items: int) -> NDArray[np.float32]:
    """Score an item by its number of positive training interactions.

    Parameters
    ----------
    item : ndarray of int32, shape (N,)
        Items of the *training* interactions.
    positive : ndarray of bool, shape (N,)
    items : int
        Number of items, ``I``.

    Returns
    -------
    ndarray of float32, shape (items,)
        The same for every user: ``numpy.broadcast_to`` gives it the shape that `ranking` takes.
    """
    return np.bincount(item[positive], minlength=items).astype(np.float32)


def positive_share(
    item: NDArray[np.int32], positive: NDArray[np.bool_], items: int, strength: float = 5.0
) -> NDArray[np.float32]:
    """Score an item by the share of its training interactions that are positive, drawn towards the mean.

    Parameters
    ----------
    item : ndarray of int32, shape (N,)
    positive : ndarray of bool, shape (N,)
    items : int
    strength : float
        Number of interactions at the overall share that every item is given beforehand, above 0: an item with
        a single positive does not lead, one without interactions has the overall share.

    Returns
    -------
    ndarray of float32, shape (items,)

    Raises
    ------
    ValueError
        ``strength`` is not above 0.
    """
    if not strength > 0:
        raise ValueError(f"strength is {strength}; expected a number above 0")
    overall = float(positive.mean()) if len(positive) else 0.0
    seen = np.bincount(item, minlength=items)
    liked = np.bincount(item[positive], minlength=items)
    return ((liked + strength * overall) / (seen + strength)).astype(np.float32)
