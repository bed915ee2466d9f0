r"""Gradient inversion attack: finds the items and labels of a small batch from its update.

Deep leakage from gradients (Zhu, Liu and Han, 2019) looks for inputs whose gradient is the one that was sent.  In a
recommender the rows that are not zero name the items at once; unknown are the participant's embedding :math:`p` and the
labels :math:`y`.  They are found by least squares over :math:`(p, y)`, from several starts.  Labels are logistic
functions of free numbers, as in the original.

In a bias-free product model :math:`(p, y)` and :math:`(-p, 1 - y)` have the same gradients: then, and only then, labels
are found up to that choice, and the solution with fewer positives is taken, as more items are sampled than are a
participant's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from coterie.privacy.attacks.scoring import Truth, mean_auc

__all__ = ["LARGEST", "InversionReport", "Inverted", "Judged", "SentUpdate", "invert", "judge", "report"]

LARGEST = 8
"""Size of the largest batch that is attacked, instances."""

Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

BatchGradient = Callable[[Doubles, Ids, Doubles], tuple[Doubles, Doubles]]
"""The model, which everybody knows: from embedding (d,), items (B,) and labels (B,) to the gradient of the mean loss by
the items' rows (B, d) and by the network (m,), the items taken as distinct."""

_STEP = 1e-3
"""Relative step of differences, for gradients in single precision."""

_EVALUATIONS = 60
"""Most evaluations for each start: starts that succeed need a dozen."""

_EXACT = 1e-2
"""Residual below which a solution counts as exact: right ones reach 1e-5, local minima stay above 0.05."""

_MOST_ATTACKED = 12
"""Most updates of a transcript that are attacked: each takes seconds."""

_FAR = 4.0
"""Free numbers of labels start within this, where the logistic function is neither flat nor decided."""


@dataclass(frozen=True, eq=False)
class Inverted:
    """The attacker's guess of the batch.

    Attributes
    ----------
    items : ndarray of int64, shape (B,)
    labels : ndarray of float64, shape (B,)
        Chance that the participant has the item.
    user : ndarray of float64, shape (d,)
        Its embedding.
    residual : float
        Norm of the unexplained rest, relative to the update: near 0 for a right solution.
    """

    items: Ids
    labels: Doubles
    user: Doubles
    residual: float


def invert(
    rows: npt.NDArray[np.floating],
    network: npt.NDArray[np.floating],
    gradient: BatchGradient,
    *,
    batch: int,
    bound: float,
    rng: np.random.Generator,
    starts: int = 8,
    noise: tuple[float, float] = (0.0, 0.0),
) -> Inverted:
    """Find the batch that an update came from.

    Parameters
    ----------
    rows : ndarray, shape (I, d)
        Update of the item rows, as a gradient of the mean loss: its negative, divided by the rate.
    network : ndarray, shape (m,)
        The same of the network.
    gradient : callable
        The model.
    batch : int
        Distinct instances B of the batch, by the plan; at least 1.  If fewer rows are not zero, these.
    bound : float
        Size of an embedding's values to start from, above 0.
    rng : Generator
        For the starts.
    starts : int
        How often to try; it stops at an exact solution.
    noise : (float, float)
        Standard deviation of what rounding added to a value of ``rows`` and of ``network``.

    Returns
    -------
    Inverted
        The best solution found.

    Raises
    ------
    ValueError
        When no row was changed.
    ModuleNotFoundError
        Without SciPy (``coterie[attacks]``).
    """
    from scipy.optimize import least_squares  # no service needs it

    length = np.linalg.norm(rows, axis=1)
    items = np.argsort(-length, kind="stable")[:batch]
    items = np.sort(items[length[items] > 0]).astype(np.int64)
    if not len(items):
        raise ValueError("no row of the update differs from zero: there is no batch to find")
    wanted_rows = rows[items].astype(np.float64)
    wanted_network = network.astype(np.float64)
    # Either part counts relative to its own length, or to that of the noise, in which it may have drowned; what the
    # named items leave over stays unexplained.
    blurs = [
        blur * float(np.sqrt(part.size)) for blur, part in zip(noise, (rows[items], network), strict=True)
    ]
    units = [
        max(float(np.linalg.norm(part)), blur, 1e-30)
        for part, blur in zip((rows, wanted_network), blurs, strict=True)
    ]
    left_over = float(np.linalg.norm(np.delete(rows, items, axis=0))) / units[0]
    exact = _EXACT + float(np.linalg.norm([blur / unit for blur, unit in zip(blurs, units, strict=True)]))
    width = rows.shape[1]

    def residuals(x: Doubles) -> Doubles:
        by_rows, by_network = gradient(x[:width], items, _logistic(x[width:]))
        return np.concatenate(
            [
                ((by_rows - wanted_rows) / units[0]).ravel(),
                (by_network - wanted_network) / units[1],
            ]
        )

    best = Inverted(items, np.full(len(items), 0.5), np.zeros(width), np.inf)
    for _ in range(max(starts, 1)):
        start = np.concatenate([rng.normal(0, bound, width), rng.uniform(-_FAR, _FAR, len(items))])
        solution = least_squares(residuals, start, jac="3-point", diff_step=_STEP, max_nfev=_EVALUATIONS)
        found = Inverted(
            items,
            _logistic(solution.x[width:]),
            solution.x[:width],
            float(np.hypot(np.sqrt(2 * solution.cost), left_over)),
        )
        if found.residual < best.residual:
            best = found
        if best.residual < exact:
            break
    return _fewer_positives(best, residuals)


def _logistic(x: Doubles) -> Doubles:
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))


def _fewer_positives(found: Inverted, residuals: Callable[[Doubles], Doubles]) -> Inverted:
    """Prefer the mirror image where it explains the update as well and has fewer positives."""
    if found.labels.sum() <= len(found.labels) / 2:
        return found
    mirrored = 1 - found.labels
    free = np.log(np.clip(mirrored, 1e-12, None) / np.clip(1 - mirrored, 1e-12, None))
    residual = float(np.linalg.norm(residuals(np.concatenate([-found.user, free]))))
    if residual > found.residual + 1e-3:
        return found
    return Inverted(found.items, mirrored, -found.user, residual)


@dataclass(frozen=True)
class Judged:
    """The accuracy of an inversion.

    Attributes
    ----------
    precision : float
        Share of the named items that are in the batch.
    coverage : float
        Share of the batch's items that are named.
    labels : float
        Share of the batch's items that are named with the right label.
    exact : bool
        Whether all items and labels are right.
    """

    precision: float
    coverage: float
    labels: float
    exact: bool


def judge(found: Inverted, items: npt.NDArray[np.integer], labels: npt.NDArray[np.floating]) -> Judged:
    """Compare an inversion with the batch.

    Parameters
    ----------
    found : Inverted
    items : ndarray of int, shape (B,)
        The batch's items, none twice.
    labels : ndarray, shape (B,)
        0 or 1.
    """
    named = dict(zip(found.items.tolist(), (found.labels > 0.5).tolist(), strict=True))
    truth = dict(zip(items.tolist(), (labels > 0.5).tolist(), strict=True))
    hit = [item for item in truth if item in named]
    right = sum(named[item] == truth[item] for item in hit)
    return Judged(
        precision=len(hit) / max(len(named), 1),
        coverage=len(hit) / max(len(truth), 1),
        labels=right / max(len(truth), 1),
        exact=named == truth,
    )


@dataclass(frozen=True, eq=False)
class SentUpdate:
    """An update as the COS received it: of one participant, or summed over several.

    Attributes
    ----------
    slots : ndarray of int64, shape (n,)
        Whose.
    rows : ndarray of float64, shape (I, d)
        As a gradient of the mean loss of one batch.
    network : ndarray of float64, shape (m,)
        The same of the network.
    gradient : callable
        The model from which it was made.
    bound : float
        Size of an embedding's values.
    noise : (float, float)
        Standard deviation of what rounding added to a value of ``rows`` and of ``network``.
    """

    slots: npt.NDArray[np.int64]
    rows: Doubles
    network: Doubles
    gradient: BatchGradient
    bound: float
    noise: tuple[float, float] = (0.0, 0.0)


class InversionReport(TypedDict):
    """Means over the updates attacked; None where there were none.

    ``auc`` tells how well what was found tells the items of an update's participants from all others, ``exact`` in
    which share of the updates all items of some participant were named, and no other as its own.
    """

    auc: float | None
    popularity_auc: float | None
    exact: float | None
    updates: int


def report(updates: Iterable[SentUpdate], truth: Truth, *, seed: int = 0) -> InversionReport:
    """Attack the first updates of a transcript that may be a batch of up to ``LARGEST`` instances, or a sum.

    A single participant's update shows by its rows how large the batch was; larger ones are left out.  In a sum
    the attacker hopes that one participant stands out.

    Parameters
    ----------
    updates : iterable of SentUpdate
    truth : Truth
        The users' true interactions.
    seed : int
        Seed of the starts.
    """
    rng = np.random.default_rng(seed)
    consumed, popularity = truth.consumed(), truth.popularity()
    areas, alone, exact = [], [], []
    for update in islice((one for one in updates if _attackable(one)), _MOST_ATTACKED):
        found = invert(
            update.rows,
            update.network,
            update.gradient,
            batch=LARGEST,
            bound=update.bound,
            rng=rng,
            noise=update.noise,
        )
        scores = np.zeros(truth.n_items)
        scores[found.items] = found.labels
        own = consumed[update.slots]
        areas.append(mean_auc(scores, own)[0])
        alone.append(mean_auc(popularity, own)[0])
        named = np.zeros(truth.n_items, np.bool_)
        named[found.items] = found.labels > 0.5
        exact.append(bool((own == named).all(axis=1).any()))
    return InversionReport(
        auc=_mean(areas),
        popularity_auc=_mean(alone),
        exact=float(np.mean(exact)) if exact else None,
        updates=len(exact),
    )


def _attackable(update: SentUpdate) -> bool:
    changed = int(np.count_nonzero(update.rows.any(axis=1)))
    return changed > 0 and (len(update.slots) > 1 or changed <= LARGEST)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
