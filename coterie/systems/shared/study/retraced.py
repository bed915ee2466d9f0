"""Ratings read off changes of rows with biases, by taking a user's public steps again for better and better guesses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from coterie.systems.shared.biases import ITEM, Biased, predicted
from coterie.systems.shared.study.reconstruction import Marginals, Reconstruction, Seen
from coterie.systems.shared.study.stars import nothing, offset, read_off

__all__ = ["retraced"]

Doubles = npt.NDArray[np.float64]

_RETRACED = 40
"""Times that the steps are taken for a better guess."""

_WIDEST = 3.0
"""Largest rating that is guessed on the way, on the scale from -1 to 1."""


def retraced(
    seen: Seen,
    settings: Biased,
    marginals: Marginals,
    begin: Callable[[Doubles, Doubles], Doubles | float],
    take: Callable[[Doubles, Doubles, Doubles], tuple[Doubles, Doubles | float]],
    *,
    first: bool,
) -> Reconstruction:
    """Reconstruct a user's ratings from one contribution, or from a sum as if it were one user's.

    Parameters
    ----------
    seen : Seen
        Changes of rows, as they were sent, and the rows that the user had fetched.
    settings : Biased
        With biases.
    marginals : Marginals
        Public statistics of ratings on their own range.
    begin : callable
        Takes the rows of touched items, (t, width), and a user's factor; returns by how much more the bias of each
        item changes where its rating is higher by 1.
    take : callable
        Takes rows, a factor and ratings on the scale from -1 to 1; returns the changes of the rows by a user's steps,
        and what ``begin`` returns, for these steps.
    first : bool
        Whether it is the user's first contribution, which it formed with a bias of 0.
    """
    at = np.flatnonzero(seen.touched)
    if not len(at):
        return nothing(seen.items.shape[0], seen.items.shape[1], len(seen.attributes))
    sent, rows = seen.items[at], seen.item_factors[at].astype(np.float64)
    factor = np.zeros(rows.shape[1])
    factor[ITEM] = 1
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        ratings = rows[:, ITEM] + sent[:, ITEM] / begin(rows, factor)
        for _ in range(_RETRACED):
            change, slope = take(rows, factor, ratings)
            missed = sent - change
            along = change[:, ITEM]
            factor[2:] += along @ missed[:, 2:] / max(float(along @ along), 1e-12)
            ratings = np.clip(np.nan_to_num(ratings + missed[:, ITEM] / slope), -_WIDEST, _WIDEST)
            factor = np.clip(np.nan_to_num(factor), -_WIDEST, _WIDEST)
    values = predicted(settings, ratings.astype(np.float32)).astype(np.float64)
    if not first:
        values = values + offset(values, at, marginals)
    return read_off(values, at, factor, marginals, len(seen.attributes))
