r"""Mathematics of EASE, an item-item model in closed form (Steck, Embarrassingly Shallow Autoencoders, 2019).

EASE learns weights :math:`B` with :math:`B_{jj} = 0` that make each user's items from the user's other items,

.. math::

    \min_B \; |X - X B|^2 + \lambda |B|^2 \quad \text{with } \operatorname{diag} B = 0,

for the matrix :math:`X` of which user has which item.  The solution (8) needs no more of the users than
:math:`G = X^T X`, how many of them have each pair of items:

.. math::

    P = (G + \lambda I)^{-1}, \qquad B_{ij} = -P_{ij} / P_{jj} \quad (i \ne j).

:math:`G` is a sum of one matrix :math:`x x^T` for each user, so one secure sum trains the model.  Both matrices are
symmetric: an upper triangle, row after row and with the diagonal, stands for them in sums and in the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.contribution import Layout, Segment

__all__ = [
    "PairCodes",
    "diagonal_of",
    "furthest",
    "layout_of_supports",
    "nearest_noise_free",
    "packing",
    "pair_places",
    "pairs_of",
    "precision",
    "require_ridge",
    "rows_of",
    "scores",
    "spread_over_items",
    "symmetric",
    "triangle",
]

_DEVIATIONS = 12
"""Standard deviations beyond which noise is taken never to lie: the probability is below 1e-32 for each count."""

_CODES = 2**32 - 1


def pairs_of(n_items: int) -> int:
    """Return the number of pairs of items, an item with itself included."""
    return n_items * (n_items + 1) // 2


def pair_places(items: NDArray[np.integer], n_items: int) -> NDArray[np.int64]:
    """Return the places in a triangle of all pairs of some items.

    Parameters
    ----------
    items : ndarray of int, shape (k,)
        Different items, ascending.
    n_items : int

    Returns
    -------
    ndarray of int64, shape (k (k + 1) / 2,)
    """
    first, second = np.triu_indices(len(items))
    i, j = items[first].astype(np.int64), items[second].astype(np.int64)
    places: NDArray[np.int64] = i * n_items - i * (i - 1) // 2 + (j - i)
    return places


def symmetric(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the symmetric matrix, (n, n), of which a triangle of shape (n (n + 1) / 2,) was given."""
    n = _side(values)
    found = np.zeros((n, n), values.dtype)
    upper = np.triu_indices(n)
    found[upper] = values
    found.T[upper] = values
    return found


def rows_of(values: NDArray[np.floating], rows: NDArray[np.integer]) -> NDArray[np.floating]:
    """Return some rows, (k, n), of the symmetric matrix of which a triangle of shape (n (n + 1) / 2,) was given."""
    n = _side(values)
    other = np.arange(n)
    first = np.minimum(rows[:, None], other).astype(np.int64)
    found: NDArray[np.floating] = values[
        first * n - first * (first - 1) // 2 + np.maximum(rows[:, None], other) - first
    ]
    return found


def diagonal_of(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the diagonal, (n,), of the symmetric matrix of which a triangle of shape (n (n + 1) / 2,) was given."""
    n = _side(values)
    at = np.arange(n)
    return values[at * n - at * (at - 1) // 2]


def _side(values: NDArray[np.floating]) -> int:
    """Return n for a triangle of n (n + 1) / 2 values."""
    return (math.isqrt(8 * len(values) + 1) - 1) // 2


def triangle(matrix: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the upper triangle of a symmetric matrix, row after row with the diagonal."""
    return matrix[np.triu_indices(len(matrix))]


@dataclass(frozen=True)
class PairCodes:
    """Several counts of pairs in one code, as the digits of a number.

    Counts of a sum are small and a code has 32 bits.  The places of a triangle are cut into ``digits`` parts of equal
    length; the count at place p of part d weighs ``radix^d`` in code p.

    Attributes
    ----------
    digits : int
    radix : int
        More than the largest difference of two values of a digit in a sum.
    low : int
        No digit of a sum is below minus this; 0 without noise.
    largest : int
        Bound of the absolute value of one user's code.
    """

    digits: int
    radix: int
    low: int
    largest: int

    def length(self, pairs: int) -> int:
        """Return the number of codes for a number of pairs."""
        return -(-pairs // self.digits)

    def segment(self, pairs: int) -> Segment:
        """Return the segment ``pairs`` of a contribution."""
        return Segment.whole("pairs", (self.length(pairs),), self.largest)

    def codes(self, places: NDArray[np.integer], pairs: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the codes, ascending, and their values that count 1 at some places of a triangle."""
        part, code = np.divmod(places, self.length(pairs))
        found, at = np.unique(code, return_inverse=True)
        values = np.bincount(at, np.power(float(self.radix), part), len(found))
        return found, values.astype(np.float64)

    def packed(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the codes, int64 (length,), of counts in all places of a triangle."""
        parts = np.zeros((self.digits, self.length(len(counts))), np.int64)
        parts.ravel()[: len(counts)] = counts
        return self._weights @ parts

    def counts(self, codes: NDArray[np.floating], pairs: int) -> NDArray[np.float64]:
        """Return the counts, float64 (pairs,), of summed codes."""
        rest = np.rint(codes).astype(np.int64) + self.low * int(self._weights.sum())
        found = np.empty((self.digits, len(codes)))
        for part in range(self.digits - 1):
            rest, digit = np.divmod(rest, self.radix)
            found[part] = digit - self.low
        found[-1] = rest - self.low
        return found.ravel()[:pairs]

    @property
    def _weights(self) -> NDArray[np.int64]:
        return np.array([self.radix**part for part in range(self.digits)], np.int64)


@cache
def packing(digits: int, variance: int) -> PairCodes:
    """Return how pairs are packed, with room for as many users as possible.

    Parameters
    ----------
    digits : int
        Pairs in one code.
    variance : int
        Variance of the noise that one user adds to a count; 0 for none.

    Raises
    ------
    ValueError
        So many counts do not fit a code.
    """
    each = 1 + furthest(variance)
    for bits in range(2, 32):
        users = _CODES // (2**bits - 1)
        low = furthest(users * variance)
        radix = users + 2 * low + 1
        largest = 2 ** (bits - 1) - 1
        if each * sum(radix**part for part in range(digits)) <= largest:
            return PairCodes(digits, radix, low, largest)
    raise ValueError(f"{digits} counts with noise of variance {variance} do not fit a code of 31 bits")


def furthest(variance: int) -> int:
    """Return the absolute value beyond which noise of a variance is taken never to lie."""
    return math.ceil(_DEVIATIONS * math.sqrt(variance))


def layout_of_supports(n_items: int, parts: int, variance: int) -> Layout:
    """Return the layout of users' items: counts in steps of 1 / ``parts``, with room for noise of so many steps."""
    bits = Segment.whole("supports", (n_items,), parts + furthest(variance)).bits
    levels = 2 ** (bits - 1) - 1
    return Layout((Segment("supports", (n_items,), levels / parts, bits, clip=False),))


def nearest_noise_free(gram: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    r"""Return a positive semidefinite matrix near a Gram matrix to whose counts noise was added.

    Eigenvalues of symmetric noise with standard deviation :math:`s` lie within :math:`2 s \sqrt n` of 0 (Wigner).
    Smaller ones of the sum tell nothing and become 0; this needs no data but the sum, and so costs no privacy.

    Parameters
    ----------
    gram : ndarray of float64, shape (n, n)
        Symmetric.
    spread : float
        Standard deviation :math:`s` of the noise; 0 takes away negative eigenvalues only.
    """
    values, vectors = np.linalg.eigh(gram)
    edge = 2 * spread * math.sqrt(len(gram))
    kept = values > max(edge, 0.0)
    found: NDArray[np.float64] = (vectors[:, kept] * values[kept]) @ vectors[:, kept].T
    return found


def _positive_definite(matrix: NDArray[np.float64], more: float) -> bool:
    """Return whether all eigenvalues are above ``-more``, by Cholesky's method: eigenvalues take ten times as long."""
    raised = matrix.copy()
    raised[np.diag_indices_from(raised)] += more
    try:
        np.linalg.cholesky(raised)
    except np.linalg.LinAlgError:
        return False
    return True


def require_ridge(ridge: float, largest: float = 0.0) -> None:
    """Require a ridge beside which equations of counts can be solved.

    Parameters
    ----------
    ridge : float
    largest : float
        Largest absolute value of a count.

    Raises
    ------
    ValueError
        The ridge is not above 0, or too small beside the counts.
    """
    if not (math.isfinite(ridge) and ridge > 0):
        raise ValueError(
            f"a ridge of {ridge}; expected a number above 0, without which items cannot be told apart"
        )
    if ridge < 1e-10 * largest:
        raise ValueError(
            f"a ridge of {ridge:g} beside counts of {largest:g}: the equations are too ill-conditioned to be solved; "
            f"expected at least {1e-10 * largest:g}"
        )


def precision(
    counts: NDArray[np.floating], ridge: float, *, min_pairs: int = 1, spread: float = 0.0
) -> NDArray[np.float32]:
    r"""Return :math:`P = (G + \lambda I)^{-1}` as a triangle.

    Parameters
    ----------
    counts : ndarray of float, shape (n (n + 1) / 2,)
        :math:`G`, with noise or without.
    ridge : float
        :math:`\lambda`, above 0.
    min_pairs : int
        Pairs of different items with a smaller count are taken as 0.
    spread : float
        Standard deviation of the noise on a count.

    Returns
    -------
    ndarray of float32, shape (n (n + 1) / 2,)

    Raises
    ------
    ValueError
        A ridge that is not above 0, or counts that are not finite or so large beside it that the inverse is not.
    """
    require_ridge(ridge)
    gram: NDArray[np.float64] = symmetric(np.asarray(counts, np.float64)).astype(np.float64, copy=False)
    if not np.isfinite(gram).all():
        raise ValueError("a count of pairs is not finite")
    if not len(gram):
        return np.zeros(0, np.float32)
    own = np.diag(gram).copy()
    gram[gram < min_pairs] = 0
    np.fill_diagonal(gram, own)
    # Neither noisy counts nor those without the small ones are counts of a matrix X: eigenvalues may be below 0.
    if spread > 0 or (min_pairs > 1 and not _positive_definite(gram, ridge / 2)):
        gram = nearest_noise_free(gram, spread)
    require_ridge(ridge, float(np.abs(gram).max()))
    gram[np.diag_indices_from(gram)] += ridge
    inverse = np.linalg.inv(gram)
    return triangle((inverse + inverse.T) / 2).astype(np.float32)


def scores(
    rows: Callable[[NDArray[np.intp]], NDArray[np.float32]],
    diagonal: NDArray[np.float32],
    opened: NDArray[np.bool_],
    items: NDArray[np.integer],
) -> NDArray[np.float32]:
    r"""Return a user's scores :math:`x B` of all items.

    Parameters
    ----------
    rows : callable
        Returns some rows of :math:`P` over the n open items, float32 (k, n), as a copy.
    diagonal : ndarray of float32, shape (n,)
        The diagonal of :math:`P`; empty without a model.
    opened : ndarray of bool, shape (I,)
        Open items, of which there are n.
    items : ndarray of int, shape (k,)
        The user's items, open or not; each once.

    Returns
    -------
    ndarray of float32, shape (I,)
        Closed items have one score, below that of every open one.  A user's scores have the same bits whichever users
        are scored beside it: rows are added one after the other.
    """
    if not len(diagonal):
        return np.zeros(len(opened), np.float32)
    place = np.cumsum(opened) - 1
    own = place[items[opened[items]]]
    total = rows(own).sum(axis=0)
    total[own] -= diagonal[own]
    return spread_over_items(-total / diagonal, opened)


def spread_over_items(known: NDArray[np.float32], opened: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return scores of all items, float32 (I,), from those of the n open ones: closed items are below all of them."""
    found = np.zeros(len(opened), np.float32)
    if len(known):
        found[:] = known.min() - 1
        found[opened] = known
    return found
