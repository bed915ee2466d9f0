"""Ratings of an attack that are known but for one offset, read off by the whole stars that they must be.

Attacks on systems that learn biases use it: a contribution tells each error, and the user's bias is the only number
that stands between errors and ratings.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coterie.systems.shared.study.reconstruction import Marginals, Reconstruction

__all__ = ["nothing", "off_stars", "offset", "read_off"]

Doubles = npt.NDArray[np.float64]

_SHIFTS = 401
"""Offsets that are tried."""

_BLUR = 0.04
"""Standard deviation of a rating around its star, in units of the smallest distance between stars."""

_OUTLIER = 1e-3
"""Density of a rating that fits no star."""


def nothing(n_items: int, width: int, n_attributes: int) -> Reconstruction:
    """Return the guess about a user of whom nothing was seen."""
    return Reconstruction(
        np.zeros(width),
        np.zeros(n_items),
        np.full(n_items, -np.inf),
        np.full(n_attributes, np.nan),
        -np.inf,
    )


def offset(values: Doubles, at: npt.NDArray[np.intp], marginals: Marginals) -> float:
    """Return the likeliest number to add to all values, so that they are stars that the items get.

    Parameters
    ----------
    values : ndarray of float64, shape (t,)
        Ratings but for the offset.
    at : ndarray of int, shape (t,)
        Their items.
    marginals : Marginals
        Possible stars, and how often each item is given them.
    """
    stars = marginals.stars
    reach = float(stars[-1] - stars[0])
    shifts = np.linspace(-reach, reach, _SHIFTS)
    blur = _BLUR * (float(np.diff(stars).min()) if len(stars) > 1 else 1.0)
    blur = max(blur, float(shifts[1] - shifts[0]))
    heights = np.empty(len(shifts))
    for place, shift in enumerate(shifts):
        missed = (values[:, None] + shift - stars) / blur
        fitting = (marginals.shares[at] * np.exp(-0.5 * np.square(missed))).sum(axis=1)
        heights[place] = np.log(fitting + _OUTLIER).sum()
    return float(shifts[heights.argmax()])


def off_stars(values: Doubles, marginals: Marginals) -> float:
    """Return the mean distance of values from the nearest star, as a share of the smallest distance of two stars."""
    stars = marginals.stars
    between = float(np.diff(stars).min()) if len(stars) > 1 else 1.0
    return float(np.abs(values[:, None] - stars).min(axis=1).mean()) / between


def read_off(
    values: Doubles, at: npt.NDArray[np.intp], factor: Doubles, marginals: Marginals, n_attributes: int
) -> Reconstruction:
    """Return the nearest star of each value; items at other places are held not to be rated."""
    stars = marginals.stars
    found = nothing(len(marginals.rated), len(factor), n_attributes)
    ratings, rated = found.ratings.copy(), found.rated.copy()
    ratings[at] = stars[np.abs(values[:, None] - stars).argmin(axis=1)]
    rated[at] = np.inf
    missed = np.abs(values - ratings[at])
    return Reconstruction(factor, ratings, rated, found.attributes, -float(missed.mean()))
