r"""Mathematics of federated iALS, implicit alternating least squares in rounds.

iALS (Hu, Koren and Volinsky, 2008) with the weights and the ridge of Rendle et al. ("Revisiting the Performance of iALS
on Item Recommendation Benchmarks", 2022, and "iALS++", 2021) minimises, over users :math:`u` with items :math:`I_u` and
items :math:`i` with users :math:`U_i`,

.. math::

    \sum_{(u, i)} (p_u^T q_i - 1)^2 + \alpha_0 \sum_{u, i} (p_u^T q_i)^2
    + \lambda \Bigl(\sum_u (|I_u| + \alpha_0 n)^\nu |p_u|^2 + \sum_i (|U_i| + \alpha_0 m)^\nu |q_i|^2\Bigr)

for :math:`m` users and :math:`n` items: the first sum is over what users have, the second over all pairs.  With one
side fixed the other is solved for exactly,

.. math::

    q_i = \Bigl(\alpha_0 \sum_u p_u p_u^T + \sum_{u \in U_i} p_u p_u^T + \lambda (|U_i| + \alpha_0 m)^\nu I\Bigr)^{-1}
          \sum_{u \in U_i} p_u,

and :math:`p_u` likewise.  A user computes its own :math:`p_u` from the factors of items; of the users the equations of
items need three sums only, which one secure sum forms (`layout`).  So a round is one exact half-step for users and one
for items: the same as an epoch with all data in one place, up to the rounding of codes.

The products of :math:`n` users of an item have rank :math:`n` where :math:`n < d`, and show the space that the users'
factors span.  They are therefore summed for items of enough users only, or for none.  In their place stand the
products of as many users who all are the item's mean user, which the sum of factors makes:

.. math::

    \sum_{u \in U_i} p_u p_u^T \approx \frac{1}{|U_i|} r_i r_i^T, \qquad r_i = \sum_{u \in U_i} p_u.

Symmetric matrices travel as their upper triangle, row after row with the diagonal.

Numbers are equal to the bit on every machine, however users are put together: all sums are taken one term after the
other (`numpy.add.reduce` along the first axis), and equations are solved by elementary operations on arrays (`solve`),
whose results IEEE 754 fixes.  BLAS and LAPACK, whose last bits depend on the processor, are not called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError
from coterie.secure_sum.contribution import Layout, Segment

__all__ = [
    "UserEquations",
    "bounded",
    "initial_items",
    "item_factors",
    "layout",
    "products",
    "row_values",
    "solve",
    "symmetric",
]

_SMALLEST_PIVOT = 1e-12
"""Smallest pivot, beside the largest value of a diagonal, with which equations count as solvable."""


def row_values(factors: int, *, with_products: bool) -> int:
    """Return the number of values that a user contributes for an item: its factor, and a triangle with products."""
    return factors + with_products * (factors * (factors + 1) // 2)


def initial_items(n_items: int, factors: int, seed: int) -> NDArray[np.float32]:
    r"""Return the items' factors of version 0, float32 (n_items, d): normal, of norm about 0.1."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    return rng.normal(0.0, 0.1 / math.sqrt(factors), (n_items, factors)).astype(np.float32)


def layout(n_items: int, factors: int, user_bound: float, bits: int, *, with_products: bool) -> Layout:
    r"""Return the segments of a contribution to training.

    Parameters
    ----------
    n_items, factors : int
    user_bound : float
        Largest norm of :math:`p_u`.
    bits : int
        Bits of a code.
    with_products : bool
        Whether products are summed for each item.

    Returns
    -------
    Layout
        ``users`` (n_items, d), :math:`p_u` for each of the user's items; ``gram`` (d (d + 1) / 2,), the triangle of
        :math:`p_u p_u^T`; with products also ``products`` (n_items, d (d + 1) / 2), the triangle for each of the items
        of which products are summed.
    """
    pairs = factors * (factors + 1) // 2
    segments = [
        Segment("users", (n_items, factors), user_bound, bits),
        Segment("gram", (pairs,), user_bound**2, bits),
    ]
    if with_products:
        segments.append(Segment("products", (n_items, pairs), user_bound**2, bits))
    return Layout(tuple(segments))


def products(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the triangles of the products of vectors (n, d) with themselves, float64 (n, d (d + 1) / 2)."""
    wide = vectors.astype(np.float64)
    first, second = np.triu_indices(wide.shape[1])
    found: NDArray[np.float64] = wide[:, first] * wide[:, second]
    return found


def symmetric(triangles: NDArray[np.float64], factors: int) -> NDArray[np.float64]:
    """Return the matrices (..., d, d) of triangles (..., d (d + 1) / 2)."""
    first, second = np.triu_indices(factors)
    found = np.empty((*triangles.shape[:-1], factors, factors))
    found[..., first, second] = triangles
    found[..., second, first] = triangles
    return found


def solve(normal: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve positive definite equations, each by Gaussian elimination in one order, all side by side.

    Parameters
    ----------
    normal : ndarray of float64, shape (n, d, d)
        Symmetric.
    right : ndarray of float64, shape (n, d)

    Returns
    -------
    ndarray of float64, shape (n, d)
        Equal to the bit on every machine, whichever equations are solved together.

    Raises
    ------
    DataError
        Some equations are not finite, or not positive definite in floating point.
    """
    rest, found = normal.copy(), right.copy()
    d = right.shape[1]
    if not (np.isfinite(rest).all() and np.isfinite(found).all()):
        raise DataError("normal equations hold a value that is not finite")
    smallest = _SMALLEST_PIVOT * np.diagonal(rest, axis1=1, axis2=2).max(axis=1, initial=0)
    for k in range(d):
        pivot = rest[:, k, k]
        if not (pivot > smallest).all():
            raise DataError("normal equations are too ill-conditioned to be solved")
        ratio = rest[:, k + 1 :, k] / pivot[:, None]
        rest[:, k + 1 :, k + 1 :] -= ratio[:, :, None] * rest[:, k, None, k + 1 :]
        found[:, k + 1 :] -= ratio * found[:, k, None]
    for k in reversed(range(d)):
        found[:, k] /= rest[:, k, k]
        found[:, :k] -= rest[:, :k, k] * found[:, k, None]
    return found


class UserEquations:
    r"""Equations of users at one version of the items' factors.

    Parameters
    ----------
    items : ndarray of float32, shape (n_items, d)
        Factors of items; 0 for those that are closed.
    opened : ndarray of bool, shape (n_items,)
    ridge, alpha0, nu : float
        :math:`\lambda`, :math:`\alpha_0` and :math:`\nu`.
    """

    def __init__(
        self,
        items: NDArray[np.float32],
        opened: NDArray[np.bool_],
        *,
        ridge: float,
        alpha0: float,
        nu: float,
    ) -> None:
        self._items = items.astype(np.float64)
        self._products = products(items)
        self._every = alpha0 * np.add.reduce(self._products, axis=0)
        self._opened = opened
        self._ridge, self._nu = ridge, nu
        self._beside = alpha0 * np.count_nonzero(opened)

    def solved(self, histories: Sequence[NDArray[np.integer]]) -> NDArray[np.float64]:
        """Return the factors of users, float64 (users, d), by their items, ascending; 0 without an open item.

        Raises
        ------
        DataError
            As `solve`.
        """
        d = self._items.shape[1]
        triangles, right = np.empty((len(histories), len(self._every))), np.empty((len(histories), d))
        scale = np.empty(len(histories))
        for row, items in enumerate(histories):
            own = items[self._opened[items]]
            triangles[row] = self._every + np.add.reduce(self._products[own], axis=0)
            right[row] = np.add.reduce(self._items[own], axis=0)
            # Without an open item the factor is 0 with any ridge above 0.
            scale[row] = _scaled(self._ridge, len(own) + self._beside, self._nu) if len(own) else 1.0
        normal = symmetric(triangles, d)
        normal[:, range(d), range(d)] += scale[:, None]
        return solve(normal, right)


def _scaled(ridge: float, size: float, nu: float) -> float:
    """Return the ridge of a user or an item, whose last bits, in which processors' powers differ, are rounded away."""
    return float(np.float32(ridge * math.pow(size, nu)))


def bounded(users: NDArray[np.float64], bound: float) -> NDArray[np.float64]:
    """Return users' factors (n, d), those longer than ``bound`` shortened to it."""
    # One column after the other: the order in which NumPy adds up along an axis depends on how it lies in memory.
    squares = np.zeros(len(users))
    for column in users.T:
        squares += column**2
    norm = np.sqrt(squares)
    longer = norm > bound
    scale = np.divide(bound, norm, out=np.ones_like(norm), where=longer)
    found: NDArray[np.float64] = users * scale[:, None]
    return found


def item_factors(
    sums: Mapping[str, NDArray[np.float64]],
    supports: NDArray[np.floating],
    users: float,
    *,
    whole: NDArray[np.bool_],
    ridge: float,
    alpha0: float,
    nu: float,
) -> NDArray[np.float32]:
    r"""Return the factors of items that the sums of a round determine.

    Parameters
    ----------
    sums : mapping
        `Layout.decode` of `layout`.
    supports : ndarray of float, shape (n_items,)
        How many of the sum's users have each item, :math:`|U_i|`; 0 for closed items.
    users : float
        Number of users in the sum, :math:`m`.
    whole : ndarray of bool, shape (n_items,)
        Items whose products are in the sum; nothing is read of it where the layout has none.
    ridge, alpha0, nu : float

    Returns
    -------
    ndarray of float32, shape (n_items, d)
        0 where ``supports`` is.

    Raises
    ------
    DataError
        As `solve`.
    """
    n_items, d = sums["users"].shape
    own = np.flatnonzero(supports)
    found = np.zeros((n_items, d), np.float32)
    count = supports[own, None]
    triangles = products(sums["users"][own]) / count
    if "products" in sums:
        triangles = np.where(whole[own, None], sums["products"][own], triangles)
    normal = symmetric(triangles + alpha0 * sums["gram"], d)
    scale = [_scaled(ridge, support + alpha0 * users, nu) for support in supports[own].tolist()]
    normal[:, range(d), range(d)] += np.array(scale).reshape(-1, 1)
    found[own] = solve(normal, sums["users"][own])
    return found
