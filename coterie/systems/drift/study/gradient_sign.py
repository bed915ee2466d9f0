"""Attack by gradient direction and sign: item gradients combine the rows of the users who have the item.

For a positive item ``dl/dpsi_i = -g v_u``, for a negative one ``+g v_u``, with ``g > 0`` (DRIFT, section 4.2
with its sign corrected); the ridge adds a multiple of ``psi_i``.  The COS holds all these rows, so least
squares gives the coefficient of each user named in the update: those that are not zero have the item, and
the sign is the flag.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coterie.systems.drift.study.exchanges import SeenGradient

__all__ = ["GradientSign", "solve"]

_ATTRIBUTED = 0.99
"""Least evidence for a pair to count as found; noise reaches it once in thousands of times."""

_ROUNDING = 2.0**-22
"""Relative rounding error of a float32 gradient: residuals below it say nothing."""


def solve(
    gradient: SeenGradient, *, ridge: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """Solve for each user's coefficient in each item's gradient, with the evidence for it.

    Parameters
    ----------
    gradient : SeenGradient
        m users, n items, d dimensions.
    ridge : bool
        Whether the loss has a ridge: how often it was counted for an item is unknown, so the item's own row
        is one more column.

    Returns
    -------
    coefficients : ndarray of float64, shape (m, n)
        Least-squares solution of ``item_gradient_i = sum_u c_ui v_u (+ r_i psi_i)``.
    evidence : ndarray of float64, shape (m, n)
        Squared partial correlation of the gradient with the user's row given the others', in [0, 1]: near 1
        where the row is needed to explain the gradient, near 0 where it is not or where nothing explains it.

    None when the update has too many users for the number of dimensions.
    """
    V = gradient.user_rows.astype(np.float64)
    P = gradient.item_rows.astype(np.float64)
    G = gradient.item_gradient.astype(np.float64)
    left, sizes, basis = np.linalg.svd(V, full_matrices=False)
    rank = int(np.sum(sizes > sizes[0] * 1e-7)) if len(sizes) else 0
    freedom = V.shape[1] - rank - ridge
    if rank == 0 or freedom <= 0:
        return None
    basis = basis[:rank]
    inverse = basis.T / sizes[:rank] @ left[:, :rank].T  # (d, m), the pseudo-inverse of V

    # First the part of the gradient outside the span of the users' rows: there psi_i carries the ridge
    # (Frisch-Waugh).
    G_outside = G - G @ basis.T @ basis
    variance = np.sum(inverse**2, axis=0)[:, None]
    if ridge:
        P_outside = P - P @ basis.T @ basis
        size = np.sum(P_outside**2, axis=1)
        usable = size > 1e-12 * np.sum(P**2, axis=1)
        size = np.where(usable, size, 1.0)
        r = np.where(usable, np.sum(G_outside * P_outside, axis=1) / size, 0.0)
        G_outside -= r[:, None] * P_outside
        G = G - r[:, None] * P
        variance = variance + (P @ inverse).T ** 2 * np.where(usable, 1 / size, 0.0)
    coefficients = (G @ inverse).T

    residual = np.maximum(np.sum(G_outside**2, axis=1), _ROUNDING**2 * np.sum(G**2, axis=1))
    # t^2 / (t^2 + freedom) with the usual t of a regression coefficient; a zero gradient is evidence of
    # nothing.
    explained = coefficients**2 / variance
    total = explained + residual
    evidence = np.divide(explained, total, out=np.zeros_like(explained), where=total > 0)
    return coefficients, evidence


class GradientSign:
    """Accumulator of evidence for pairs of user and item, and of votes for their sign, over a run's gradients.

    Parameters
    ----------
    n_users, n_items : int
        Numbers of slots and items.
    ridge : bool
        Whether the plan has a ridge.

    Attributes
    ----------
    scores : ndarray of float32, shape (n_users, n_items)
        Sum of the evidence that the user has the item.
    votes : ndarray of float32, shape (n_users, n_items)
        Sum of the evidence for a positive flag, less that for a negative one.
    gradients : int
        Number of gradients solved.
    unsolved : int
        Number of gradients without rows in the transcript, or with too many users for the dimensions.
    """

    def __init__(self, n_users: int, n_items: int, *, ridge: bool) -> None:
        self.scores: npt.NDArray[np.float32] = np.zeros((n_users, n_items), np.float32)
        self.votes: npt.NDArray[np.float32] = np.zeros((n_users, n_items), np.float32)
        self._best: npt.NDArray[np.float32] = np.zeros((n_users, n_items), np.float32)
        self._ridge = ridge
        self.gradients = 0
        self.unsolved = 0

    def add(self, gradient: SeenGradient | None) -> None:
        """Take the next gradient; None for a gradient whose rows are not known."""
        solution = solve(gradient, ridge=self._ridge) if gradient is not None else None
        if gradient is None or solution is None:
            self.unsolved += 1
            return
        coefficients, evidence = solution
        pairs = np.ix_(gradient.users, gradient.items)
        self.scores[pairs] += evidence.astype(np.float32)
        self.votes[pairs] -= (np.sign(coefficients) * evidence).astype(np.float32)
        self._best[pairs] = np.maximum(self._best[pairs], evidence)
        self.gradients += 1

    def attributed(self) -> npt.NDArray[np.bool_]:
        """Return the pairs that the attacker is sure of, bool (n_users, n_items)."""
        return self._best >= _ATTRIBUTED
