r"""Profile attack: extracts single users' ratings from a FedMVMF sum over few users.

Mai and Pang's condition (41) demands more private values than a sum has numbers.  The condition is needed: a sum over
twenty users hides little where each has a weight on few items.  A row that only one user touched is :math:`e_{ij} p_i`,
parallel to that user's other rows (`coterie.privacy.attacks.cluster`), and the length of :math:`p_i` follows from its
stars as in `coterie.systems.shared.study.reconstruction`.  Each direction becomes a *profile*: items and ratings of one
user, without its name and attributes.

Weights on all items do not prevent the attack.  The part of the sum that unrated items add is linear in the item's
factors, :math:`-\alpha (\sum_i p_i p_i^T) q_j`, the same map for all items; it is fitted to the items that nobody
rated, and taken away.  The rest is :math:`(r_{ij} - (1 - \alpha) p_i q_j)\, p_i` of the users who rated the item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from coterie.privacy.attacks.cluster import cluster
from coterie.privacy.attacks.rounds_view import RoundView
from coterie.systems.shared.study.reconstruction import Marginals, Reconstruction, Rules, Seen, reconstruct

__all__ = ["ProfilesReport", "profiles", "report"]

Doubles = npt.NDArray[np.float64]

_FEWEST = 5
"""Fewest rows of a profile: one unknown length explains a few stars by chance."""

_PASSES = 60
"""Most passes of the fit to unrated items."""


class ProfilesReport(TypedDict):
    """The accuracy of the profiles of one sum.

    ``profiles``: number of profiles.  ``right``: share of the named ratings that a user of the sum did give; each
    profile is compared with the user whom it fits best.  ``found``: share of all ratings in the sum that are named
    rightly.  ``exposed``: share of the users of whom at least half of the ratings are named rightly.
    """

    users: int
    profiles: int
    right: float | None
    found: float | None
    exposed: float | None


@dataclass(frozen=True)
class _ByStars:
    """Rules that let only the stars determine the length, since a profile lacks some of its user's rows."""

    weights: str
    uncertainty: float
    samples: float
    resample: bool
    side: float
    ridge: float
    private_rate: float
    update: str = "sgd"


def profiles(
    seen: Seen,
    rules: Rules,
    marginals: Marginals,
    *,
    users: int,
    one_user: Callable[[Seen], Reconstruction] | None = None,
) -> list[Reconstruction]:
    """Extract the profiles of single users from a sum, as far as its rows allow.

    Parameters
    ----------
    seen : Seen
        The sum.
    rules : Rules
    marginals : Marginals
    users : int
        Number of users in the sum.
    one_user : callable, optional
        Reconstructs the ratings of a single user's rows; `reconstruct` by whole stars if left out.

    Returns
    -------
    list of Reconstruction
        Without attributes.
    """
    rows, factors, weights = seen.items, np.asarray(seen.item_factors, np.float64), rules.weights
    noise = seen.noise[0]
    if weights == "incl-unc":
        rows = _without_unrated(rows, factors, noise)
        factors, weights = factors * (1 - rules.uncertainty), "obs-only"
    elif users > 1:
        # A row that one user touched has the rounding of that one.
        noise /= np.sqrt(users)
    grid = _ByStars(
        weights,
        rules.uncertainty,
        rules.samples,
        rules.resample,
        rules.side,
        rules.ridge,
        rules.private_rate,
    )
    nobody = np.zeros((0, rows.shape[1]))
    told = replace(marginals, attributes=np.zeros(0))
    clusters = cluster(RoundView(0, np.arange(users), rows.astype(np.float32), noise=noise))
    found = []
    for k, direction in enumerate(clusters.directions):
        own = np.abs(clusters.amounts[:, k]) > 6 * noise
        if np.count_nonzero(own) < _FEWEST:
            continue
        part = np.where(own, clusters.amounts[:, k], 0.0)[:, None] * direction
        one = Seen(part, nobody, factors, nobody, noise=(noise, 0.0), bounds=seen.bounds)
        found.append(reconstruct(one, grid, told) if one_user is None else one_user(one))
    return found


def _without_unrated(rows: Doubles, factors: Doubles, noise: float) -> Doubles:
    """Subtract the unrated items' part, one linear map of all items' factors; rows without a remainder become zero."""
    kept = np.ones(len(rows), np.bool_)
    left = rows
    for _ in range(_PASSES):
        linear = np.linalg.lstsq(factors[kept], rows[kept], rcond=None)[0]
        left = rows - factors @ linear
        size = np.linalg.norm(left, axis=1)
        # Half of the rows, the closest, carry the fit until it is as close as rounding lets it be.
        limit = max(float(np.median(size)), 5 * noise * np.sqrt(rows.shape[1]))
        if np.array_equal(kept, size <= limit):
            break
        kept = size <= limit
    return np.where((np.linalg.norm(left, axis=1) > 6 * noise * np.sqrt(rows.shape[1]))[:, None], left, 0.0)


def report(found: Sequence[Reconstruction], ratings: npt.NDArray[np.floating]) -> ProfilesReport:
    """Compare profiles with the users of the sum.

    Parameters
    ----------
    found : sequence of Reconstruction
    ratings : ndarray, shape (n, m)
        Ratings of each user of the sum; 0 where it rated nothing.
    """
    held = np.asarray(ratings, np.float64)
    named, right = 0, 0
    known = np.zeros(held.shape, np.bool_)
    for one in found:
        claimed = one.ratings > 0
        hits = (np.abs(held - one.ratings) < 0.25) & claimed
        best = int(hits.sum(axis=1).argmax())
        named += int(claimed.sum())
        right += int(hits[best].sum())
        known[best] |= hits[best]
    wanted = (held > 0).sum(axis=1)
    some = wanted > 0
    return ProfilesReport(
        users=len(held),
        profiles=len(found),
        right=right / named if named else None,
        found=float(known.sum() / wanted.sum()) if some.any() else None,
        exposed=float(np.mean(known.sum(axis=1)[some] >= wanted[some] / 2)) if some.any() else None,
    )
