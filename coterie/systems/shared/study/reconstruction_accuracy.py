"""The accuracy of reconstructed ratings and attributes, beside that of the best guess without any transcript.

Mai and Pang's accuracy (43) is the share of a user's values that are right after clipping and rounding, averaged over
users.  Where weights are on all items they count all of them, and a user has rated one in twenty: to say "nothing
rated" of everybody is right for nineteen.  Attributes are one of several, too, so "no" is right for most.  So every
figure here has the best guess by the public marginals beside it, and ratings are also counted over rated items alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from coterie.errors import DataError
from coterie.privacy.attacks.scoring import mean_auc
from coterie.systems.shared.study.reconstruction import Marginals, Reconstruction

__all__ = ["Held", "ReconstructionReport", "best_guess", "report"]

_NEAR = 0.25
"""Ratings are whole or half stars: closer than this they are the same."""


@dataclass(frozen=True, eq=False)
class Held:
    """A user's true ratings and attributes.

    Attributes
    ----------
    ratings : ndarray, shape (m,)
        0 where it rated nothing.
    attributes : ndarray, shape (l,)
        NaN where missing.
    """

    ratings: npt.NDArray[np.floating]
    attributes: npt.NDArray[np.floating]


class ReconstructionReport(TypedDict):
    """Accuracies as means over the users to whom a figure applies; None where there are none.

    ``rated``: ratings of items that the user rated (43).  ``ratings``: of all items, 0 where not rated (43).
    ``attributes``: attributes that are known of the user (43).  ``whole``: users of whom everything is right.
    ``existence_auc``: how well rated items are told from the others.  ``..._guess``: the same of the best guess by
    the public marginals; for ``existence_auc`` that is popularity.
    """

    users: int
    rated: float | None
    rated_guess: float | None
    ratings: float | None
    ratings_guess: float | None
    attributes: float | None
    attributes_guess: float | None
    whole: float | None
    existence_auc: float | None
    popularity_auc: float | None


def best_guess(marginals: Marginals, *, only_rated: bool) -> tuple[npt.NDArray[np.float64], ...]:
    """Return the likeliest ratings (m,) and attributes (l,) of an unseen user, by the public statistics.

    Parameters
    ----------
    marginals : Marginals
    only_rated : bool
        Whether to guess the stars of an item that is known to be rated, or whether it is rated at all.
    """
    stars = marginals.stars[marginals.shares.argmax(axis=1)]
    if not only_rated:
        likeliest = marginals.rated * marginals.shares.max(axis=1)
        stars = np.where(likeliest > 1 - marginals.rated, stars, 0.0)
    return stars, (marginals.attributes > 0.5).astype(np.float64)


def report(
    found: Sequence[Reconstruction], held: Sequence[Held], marginals: Marginals
) -> ReconstructionReport:
    """Compare reconstructions with the users' true values.

    Parameters
    ----------
    found, held : sequence
        Guessed and true values of the same users, in the same order.
    marginals : Marginals
        Public statistics, for the guesses.

    Raises
    ------
    DataError
        When they are not as many.
    """
    if len(found) != len(held):
        raise DataError(f"{len(found)} reconstructions of {len(held)} users; expected one of each")
    stars, has = best_guess(marginals, only_rated=True)
    likeliest, _ = best_guess(marginals, only_rated=False)
    columns: dict[str, list[float | None]] = defaultdict(list)
    for one, true in zip(found, held, strict=True):
        taken = np.asarray(true.ratings) > 0
        known = ~np.isnan(true.attributes)
        right = _right(one.ratings, true.ratings)
        # Attributes of which nothing was seen are guessed.
        told = np.where(np.isnan(one.attributes), has, one.attributes)
        columns["rated"].append(_share(right[taken]))
        columns["rated_guess"].append(_share(_right(stars, true.ratings)[taken]))
        columns["ratings"].append(_share(right))
        columns["ratings_guess"].append(_share(_right(likeliest, true.ratings)))
        columns["attributes"].append(_share((told == true.attributes)[known]))
        columns["attributes_guess"].append(_share((has == true.attributes)[known]))
        columns["whole"].append(float(right.all() and (told == true.attributes)[known].all()))
        columns["existence_auc"].append(mean_auc(one.rated, taken[None])[0])
        columns["popularity_auc"].append(mean_auc(marginals.rated, taken[None])[0])
    return ReconstructionReport(
        users=len(held),
        rated=_mean(columns["rated"]),
        rated_guess=_mean(columns["rated_guess"]),
        ratings=_mean(columns["ratings"]),
        ratings_guess=_mean(columns["ratings_guess"]),
        attributes=_mean(columns["attributes"]),
        attributes_guess=_mean(columns["attributes_guess"]),
        whole=_mean(columns["whole"]),
        existence_auc=_mean(columns["existence_auc"]),
        popularity_auc=_mean(columns["popularity_auc"]),
    )


def _right(guess: npt.NDArray[np.floating], truth: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    return np.asarray(np.abs(guess - truth) < _NEAR)


def _share(right: npt.NDArray[np.bool_]) -> float | None:
    return float(right.mean()) if len(right) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
