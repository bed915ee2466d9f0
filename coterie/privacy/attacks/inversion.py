r"""Gradient inversion: from the update of a small batch back to the items and labels of the batch.

Deep leakage from gradients (Zhu, Liu and Han, 2019) looks for inputs whose gradient is the one that was sent.  In a
recommender the rows that are not zero name the items at once; unknown are the participant's embedding :math:`p` and the
labels :math:`y`.  They are found by least squares over :math:`(p, y)`, from several starts.  Labels are logistic
functions of free numbers, as in the original.

In a bias-free product model :math:`(p, y)` and :math:`(-p, 1 - y)` have the same gradients: then, and only then, labels
are found up to that choice, and the solution with fewer positives is taken, as more items are sampled than are a
participant's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

__all__ = ["Inverted", "Judged", "invert", "judge"]

Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

BatchGradient = Callable[[Doubles, Ids, Doubles], tuple[Doubles, Doubles]]
"""The model, which everybody knows: from embedding (d,), items (B,) and labels (B,) to the gradient of the mean loss by
the items' rows (B, d) and by the network (m,), the items taken as distinct."""

_STEP = 1e-3
"""Relative step of differences, for gradients in single precision."""

_EVALUATIONS = 60
"""Steps of each start: those that lead anywhere need a dozen."""

_EXACT = 1e-2
"""Residual below which a solution is the one: right ones reach 1e-5, local minima stay above 0.05."""

_FAR = 4.0
"""Free numbers of labels start within this, where the logistic function is neither flat nor decided."""


@dataclass(frozen=True, eq=False)
class Inverted:
    """What the attacker takes the batch to be.

    Attributes
    ----------
    items : ndarray of int64, shape (B,)
    labels : ndarray of float64, shape (B,)
        Chance that the participant has the item.
    user : ndarray of float64, shape (d,)
        Its embedding.
    residual : float
        Length of what the solution leaves unexplained, relative to the update: near 0 says that it is right.
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

    Returns
    -------
    Inverted
        The best solution found.

    Raises
    ------
    ValueError
        When no row was changed.
    """
    length = np.linalg.norm(rows, axis=1)
    items = np.argsort(-length, kind="stable")[:batch]
    items = np.sort(items[length[items] > 0]).astype(np.int64)
    if not len(items):
        raise ValueError("no row of the update differs from zero: there is no batch to find")
    wanted_rows = rows[items].astype(np.float64)
    wanted_network = network.astype(np.float64)
    # Either part counts relative to its own length; what the named items leave over stays unexplained.
    units = [max(float(np.linalg.norm(part)), 1e-30) for part in (rows, wanted_network)]
    left_over = float(np.linalg.norm(np.delete(rows, items, axis=0))) / units[0]
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
        if best.residual < _EXACT:
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
    """How right an inversion was.

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
