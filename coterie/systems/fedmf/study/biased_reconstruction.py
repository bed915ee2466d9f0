r"""Reconstruction attack on FedMF with biases: a user's ratings, from the first contribution that it sent.

The row of an item has the user's 1 beside its factor, so the change of :math:`b_j` in one local epoch is
:math:`2 \eta (m_j - \lambda b_j)` with the error :math:`m_j = r_{uj} - (a_u + b_j + p_u q_j)`, and the change of
:math:`q_j` is :math:`p_u` times as much, but for the ridge.  Unlike the printed prediction, nothing is known only up to
a length.  Several epochs are retraced: the steps are public, so the attacker takes them itself for the ratings and the
:math:`p_u` that it guesses, and moves its guess until the changes are those that were sent.

The user's bias :math:`a_u` begins at 0 for everybody, so the *first* contribution gives ratings exactly.  In others
it is one unknown number, the same for all of the user's ratings, which must become whole stars.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coterie.systems.fedmf.mathematics import moving
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.shared.biases import ITEM
from coterie.systems.shared.study.reconstruction import Marginals, Reconstruction, Seen
from coterie.systems.shared.study.retraced import retraced

__all__ = ["reconstruct"]

Doubles = npt.NDArray[np.float64]


def reconstruct(seen: Seen, settings: FedMfSettings, marginals: Marginals, *, first: bool) -> Reconstruction:
    """Reconstruct a user's ratings from one contribution, or from a sum as if it were one user's.

    Parameters
    ----------
    seen : Seen
        Changes of rows, as they were sent, and the rows that the user had fetched.
    settings : FedMfSettings
        With biases.
    marginals : Marginals
        Public statistics of ratings on their own range.
    first : bool
        Whether it is the user's first contribution, which it formed with a bias of 0.
    """

    def begin(rows: Doubles, factor: Doubles) -> Doubles:
        return _slope(rows, np.tile(factor, (settings.local_epochs, 1)), settings)

    def take(rows: Doubles, factor: Doubles, ratings: Doubles) -> tuple[Doubles, Doubles]:
        change, trail = _taken(rows, factor, ratings, settings)
        return change, _slope(rows, trail, settings)

    return retraced(seen, settings, marginals, begin, take, first=first)


def _taken(
    rows: Doubles, factor: Doubles, ratings: Doubles, settings: FedMfSettings
) -> tuple[Doubles, Doubles]:
    """Return the changes of a user's rows by its local epochs, and its factor before each of them."""
    of_users, of_items = moving(settings)
    share = len(rows) if settings.steps == "mean" else 1
    q, p, trail = rows, factor, []
    for _ in range(settings.local_epochs):
        trail.append(p)
        missed = ratings - q @ p
        by_user = -2 * (missed @ q) / share + 2 * settings.ridge * p
        q = q - settings.rate * of_items * (-2 * missed[:, None] * p + 2 * settings.ridge * q)
        p = p - settings.private_rate * of_users * by_user
    return q - rows, np.array(trail)


def _slope(rows: Doubles, trail: Doubles, settings: FedMfSettings) -> Doubles:
    """Return by how much more the bias of each item changes where its rating is higher by 1, at given factors."""
    _, of_items = moving(settings)
    moved = np.zeros_like(rows)
    for p in trail:
        missed = 1 - moved @ p
        moved = moved - settings.rate * of_items * (-2 * missed[:, None] * p + 2 * settings.ridge * moved)
    slope: Doubles = moved[:, ITEM]
    return slope
