r"""Clustering attack: groups the rows of one revealed sum by direction, and so by participant.

In a product model the change of item :math:`i` by participant :math:`u` is a number times one vector that is the same
for all of its items: :math:`-(\sigma(z) - y)\, h \odot p_u` in GMF.  A row that only one participant touched is
therefore parallel to that participant's other rows, and its sign tells an item that the participant has
(:math:`y = 1`) from one that it sampled (:math:`y = 0`).  The attacker needs a single sum, and neither counts nor
earlier rounds.  Rows of two participants whose directions are known are then taken apart, too.

Where participants take several local steps the vector turns between them, and the attack as written here grows weaker:
that is a limit of the attack and no protection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from coterie.privacy.attacks.rounds_view import RoundView, known_slots
from coterie.privacy.attacks.scoring import Truth, mean_auc

__all__ = ["ClusterReport", "Clusters", "cluster", "report"]

Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_SIGMAS = 6.0
"""Rows shorter than this many standard deviations of their rounding noise have no direction."""

_FEWEST = 3
"""Fewest rows of a cluster; two may be parallel by chance, when the same two participants touched both."""

_MOST_PAIRED = 150
"""Most directions for which all pairs are tried on rows that no single direction explains."""

_BLOCK = 1024


@dataclass(frozen=True, eq=False)
class Clusters:
    """The result of the attack: the rows of one sum by the participant who changed them.

    Attributes
    ----------
    directions : ndarray of float64, shape (K, d)
        Unit vectors, one for each participant found, pointing where its own items move.
    amounts : ndarray of float64, shape (I, K)
        How far each row was moved along each: above 0 for an item that the participant has, below for a sampled one.
        A row that the directions do not explain is all zero.
    touched : ndarray of bool, shape (I,)
        Rows that somebody changed.
    """

    directions: Doubles
    amounts: Doubles
    touched: npt.NDArray[np.bool_]

    @property
    def explained(self) -> npt.NDArray[np.bool_]:
        """Rows that were traced to participants, bool (I,)."""
        return np.asarray(self.amounts.any(axis=1))

    def scores(self, popularity: Doubles) -> Doubles:
        """Return scores for whether some participant of the round has each item, float64 (I,).

        Certain where a row is explained; otherwise in between, ordered by popularity.
        """
        fallback = popularity / max(float(popularity.max(initial=0)), 1.0)
        sure = np.where(self.amounts.max(axis=1, initial=0) > 0, 2.0, -1.0)
        return np.where(self.explained, sure, fallback)


class ClusterReport(TypedDict):
    """AUC of consumed against sampled items among each sum's touched rows: means over sums; None where there were none.

    ``explained_auc`` is over the rows that were traced to participants, a share ``explained`` of all touched;
    ``auc`` is over all of them, by popularity where they were not traced.
    """

    auc: float | None
    explained_auc: float | None
    explained: float | None
    popularity_auc: float | None
    directions: float | None
    rounds: int


def report(views: Iterable[RoundView], truth: Truth) -> ClusterReport:
    """Attack each sum on its own, and judge the result.

    Parameters
    ----------
    views : iterable of RoundView
        Views with rows of a product model (GMF, or that part of NeuMF).
    truth : Truth
        The users' true interactions.
    """
    consumed, popularity = truth.consumed(), truth.popularity()
    rounds = [view for view in known_slots(views, truth.n_users) if view.rows is not None]
    everywhere, traced, alone, shares, found = [], [], [], [], []
    for view in rounds:
        clusters = cluster(view)
        own = np.asarray(consumed[view.slots].any(axis=0))
        scores = clusters.scores(popularity)
        everywhere.append(_auc(scores, own, clusters.touched))
        traced.append(_auc(scores, own, clusters.explained))
        alone.append(_auc(popularity, own, clusters.touched))
        shares.append(float(clusters.explained.sum() / max(int(clusters.touched.sum()), 1)))
        found.append(float(len(clusters.directions)))
    return ClusterReport(
        auc=_mean(everywhere),
        explained_auc=_mean(traced),
        explained=_mean(shares),
        popularity_auc=_mean(alone),
        directions=_mean(found),
        rounds=len(rounds),
    )


def _auc(scores: Doubles, own: npt.NDArray[np.bool_], among: npt.NDArray[np.bool_]) -> float | None:
    return mean_auc(scores[None, among], own[None, among])[0]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def cluster(view: RoundView, *, tolerance: float = 1e-3) -> Clusters:
    """Trace the rows of one sum to participants.

    Parameters
    ----------
    view : RoundView
        Its rows, from an update in which each participant took one step, or small ones.
    tolerance : float
        Sine of the angle up to which two rows count as parallel, besides what the rounding noise allows.

    Returns
    -------
    Clusters
        Takes of the order of ``I^2 d`` operations for I touched rows.

    Raises
    ------
    ValueError
        When the view has no rows.
    """
    if view.rows is None:
        raise ValueError("clustering needs the rows of a sum; this view has none")
    rows = view.rows.astype(np.float64)
    n_items, width = rows.shape
    length = np.linalg.norm(rows, axis=1)
    touched = length > 0
    blur = view.noise * np.sqrt(width)
    clear = np.flatnonzero(length > max(_SIGMAS * blur, 0.0))
    unit = rows[clear] / length[clear, None]
    # Squared sine that noise alone reaches, for each row.
    slack = (tolerance / 2) ** 2 + 4 * np.square(blur / length[clear])
    label = _parallel(unit, slack)

    members = [np.flatnonzero(label == each) for each in np.unique(label)]
    members = [each for each in members if len(each) >= _FEWEST]
    directions = np.array([_axis(rows[clear[each]]) for each in members]).reshape(-1, width)
    amounts = np.zeros((n_items, len(directions)))
    for k, each in enumerate(members):
        amounts[clear[each], k] = rows[clear[each]] @ directions[k]
    left = np.setdiff1d(np.arange(len(clear)), np.concatenate([[], *members]).astype(np.int64))
    _take_apart(rows, clear[left], slack[left], directions, amounts)

    # More items are sampled than are a participant's own, so the rarer sign is that of its own.
    forwards = np.where(np.sum(amounts > 0, axis=0) > np.sum(amounts < 0, axis=0), -1.0, 1.0)
    return Clusters(directions * forwards[:, None], amounts * forwards, touched)


def _parallel(unit: Doubles, slack: Doubles) -> Ids:
    """Return for each unit vector the smallest index of a vector parallel to it, directly or through others."""
    n = len(unit)
    place = np.arange(n)
    # Labels are a forest: each points to a parallel vector with a smaller index, and a root to itself.
    label = place.copy()
    apart = [np.empty((0, 2), np.int64)]
    for first in range(0, n, _BLOCK):
        block = slice(first, first + _BLOCK)
        sine = 1 - np.square(unit[block] @ unit.T)
        near = (sine <= slack[block, None] + slack + 1e-12) & (place[block, None] < place)
        np.minimum(label, np.where(near.any(axis=0), first + near.argmax(axis=0), n), out=label)
        label = _roots(label)
        # Most pairs have one root by now; a list of all of them would be most of the work.
        differ = np.flatnonzero(near & (label[block, None] != label))
        apart.append(np.stack([first + differ // n, differ % n], axis=1))
    pairs = np.concatenate(apart)
    while True:
        ends = label[pairs]
        pairs, ends = pairs[ends[:, 0] != ends[:, 1]], ends[ends[:, 0] != ends[:, 1]]
        if not len(pairs):
            return label
        np.minimum.at(label, ends.max(axis=1), ends.min(axis=1))
        label = _roots(label)


def _roots(label: Ids) -> Ids:
    """Return the root of each place in a forest in which ``label`` has the parents."""
    while True:
        parents = label[label]
        if np.array_equal(parents, label):
            return label
        label = parents


def _axis(rows: Doubles) -> Doubles:
    axis: Doubles = np.linalg.svd(rows, full_matrices=False)[2][0]
    return axis


def _take_apart(rows: Doubles, left: Ids, slack: Doubles, directions: Doubles, amounts: Doubles) -> None:
    """Write to ``amounts`` how far one or two known directions explain each row; each row by its best pair."""
    if not len(left) or len(directions) < 2 or len(directions) > _MOST_PAIRED:
        return
    size = np.sum(np.square(rows[left]), axis=1)
    best = np.full(len(left), np.inf)
    pair = np.zeros((len(left), 2), np.int64)
    along = rows[left] @ directions.T
    overlap = directions @ directions.T
    for a, b in combinations(range(len(directions)), 2):
        cosine = overlap[a, b]
        apart = 1 - cosine**2
        if apart < 1e-6:
            continue
        x, y = along[:, a], along[:, b]
        residual = size - (x**2 + y**2 - 2 * cosine * x * y) / apart
        better = residual < best
        best[better] = residual[better]
        pair[better] = a, b
    # Among so many pairs one fits a row by chance as often as the tolerance is wide; d - 2 coordinates must vanish.
    fits = best <= slack * size
    for item, (a, b) in zip(left[fits], pair[fits], strict=True):
        solution = np.linalg.lstsq(directions[[a, b]].T, rows[item], rcond=None)[0]
        amounts[item, [a, b]] = solution
