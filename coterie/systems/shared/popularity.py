r"""Popularity of items as a part of their scores: coarse levels, which users are told, and their weight.

A system that ranks items knows little of an item that few users have, and nothing of one that is closed.  Popularity
says something of both.  The server knows it from SUPPORTS, the sum by which it opens items.  With a weight :math:`w`
above 0 the model that users fetch has a level for each item, and the score of an item is

.. math::

    \hat y_{ui} + w\, l_i, \qquad l_i = \lfloor 4 \log_2 n_i + 1/2 \rfloor / 4

for :math:`n_i` users of an open item.  All closed items have one level, that of half the floor, whoever has them: the
levels say no more of a closed item than that it is closed.  Levels are multiples of a quarter and weights single
precision, so that scores are equal to the bit on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

__all__ = ["LEVELS", "PopularityWeight", "levels", "with_popularity"]

LEVELS = "levels"
"""Name of the levels in a model that users fetch; absent where the weight is 0."""

_PARTS = 4
"""Levels to each doubling of the number of users."""

PopularityWeight = Annotated[
    float,
    Field(
        ge=0,
        le=100,
        description="Weight of popularity in an item's score, for each doubling of its number of users. Above 0 users "
        "are told a level of each open item, a quarter of a doubling wide, and closed items have one level below "
        "those. For sparse data; chosen on validation items. 0: no popularity, and no levels.",
    ),
]


def levels(users: NDArray[np.number], opened: NDArray[np.bool_], floor: float) -> NDArray[np.float32]:
    """Return the level of each item, float32 (I,).

    Parameters
    ----------
    users : ndarray, shape (I,)
        Users of each item; those of closed items are not read.
    opened : ndarray of bool, shape (I,)
        Items that some group may train.
    floor : float
        Fewest users of an open item, at least 1; closed items have the level of half of it.
    """
    counted = np.where(opened, np.maximum(users, 1), floor / 2)
    found: NDArray[np.float32] = (np.rint(_PARTS * np.log2(counted)) / _PARTS).astype(np.float32)
    return found


def with_popularity(
    scores: NDArray[np.floating],
    model: Mapping[str, NDArray[np.float32]],
    weight: float,
    items: NDArray[np.integer] | None = None,
) -> NDArray[np.float32]:
    """Return scores with the weighted levels of a model added; as they are where the weight is 0.

    Parameters
    ----------
    scores : ndarray of float, shape (..., I), or that of ``items``
        They are not changed.
    model : mapping
        As users fetch it, with `LEVELS` unless the weight is 0.
    weight : float
    items : ndarray of int, optional
        Items that the scores are of; all if left out.
    """
    plain = scores.astype(np.float32, copy=False)
    if not weight:
        return plain
    added = np.float32(weight) * model[LEVELS]
    found: NDArray[np.float32] = plain + (added if items is None else added[items])
    return found
