r"""Mathematics of EASE by a sketch: a low-rank stand-in for the counts of pairs, from a few sums of small matrices.

For large catalogues :math:`G = X^T X`, how many users have each pair of the n open items, is too large to be sent.  A
sketch sums :math:`G B` instead, for a matrix :math:`B` of k columns that everybody knows: a user adds
:math:`x (x^T B)`, which is zero but in the rows of its own items.  The randomised Nystroem method (Halko, Martinsson
and Tropp, *Finding Structure with Randomness*, 2011, 5.5) makes of it

.. math::

    G \approx G B \, (B^T G B)^+ \, (G B)^T .

In the first sum :math:`B` is random signs; in each further one it is the leading singular vectors of what all sums
before it make (a power step).  The columns of all sums together make the stand-in, which is cut to rank 2 k:
:math:`U U^T`.  The diagonal of :math:`G` is known from the sum of supports and takes the place of that of
:math:`U U^T`.  With :math:`\Delta = \operatorname{diag}(G - U U^T) + \lambda` the model follows by Woodbury's identity:

.. math::

    P = (U U^T + \Delta)^{-1} = \Delta^{-1} - \Delta^{-1} U C U^T \Delta^{-1}, \qquad
    C = (I + U^T \Delta^{-1} U)^{-1}.

Weights and scores are those of EASE (`coterie.systems.ease.mathematics`).  No matrix of items by items is made.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.explicit import encode
from coterie.secure_sum.contribution import Segment
from coterie.systems.ease.mathematics import require_ridge, spread_over_items

__all__ = [
    "directions",
    "factors_of",
    "low_rank_model",
    "row_of",
    "scorer",
    "signs",
    "sketch_segment",
]

Model = Mapping[str, NDArray[np.float32]]
"""Arrays of the model that users fetch, as `low_rank_model` names them."""

_LEAST = 1e-12
"""Share of the largest eigenvalue below which another one is taken as 0."""


def signs(seed: int, n_items: int, columns: int) -> NDArray[np.float32]:
    """Return the random signs of the first sum, the same at all parties and on all machines.

    Bit ``i * columns + j`` of SHAKE-256, most significant bit of each byte first, says whether entry (i, j) is -1.

    Parameters
    ----------
    seed : int
        Seed of the run.
    n_items, columns : int

    Returns
    -------
    ndarray of float32, shape (n_items, columns)
        Entries 1 and -1.
    """
    count = n_items * columns
    drawn = hashlib.shake_256(encode("ease-signs", str(seed), n_items, columns)).digest(-(-count // 8))
    bits = np.unpackbits(np.frombuffer(drawn, np.uint8), count=count).reshape(n_items, columns)
    found: NDArray[np.float32] = 1 - 2 * bits.astype(np.float32)
    return found


def sketch_segment(n_items: int, columns: int, bits: int) -> Segment:
    """Return the segment ``sketch`` of a contribution, whose step is a power of 2.

    The bound is the number of items: a user's row is the sum of at most so many signs, or the product of its items with
    columns of norm :math:`sqrt n`.  So nothing is ever clipped, and a member that is told larger columns refuses.
    """
    levels = 2 ** (bits - 1) - 1
    # A little more than the number of items, because columns are of single precision.
    step = 2.0 ** math.ceil(math.log2(1.001 * n_items / levels))
    return Segment("sketch", (n_items, columns), levels * step, bits, clip=False)


def directions(model: Model) -> NDArray[np.float32] | None:
    """Return the columns of the next sum over the open items, (n, k), of norm sqrt(n); None before the first sum.

    Single factors are multiplied by a number for each column: all machines come to the same bits.
    """
    if "factors" not in model:
        return None
    scale = model["scale"]
    found: NDArray[np.float32] = model["factors"][:, : len(scale)] * scale
    return found


def row_of(
    items: NDArray[np.integer], columns: NDArray[np.float32], opened: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return a user's :math:`x^T B`, float64 (k,), which it adds to the row of each of its items.

    Parameters
    ----------
    items : ndarray of int, shape (t,)
        The user's open items, ascending.
    columns : ndarray of float32, shape (n, k)
        B over the open items.
    opened : ndarray of bool, shape (I,)
        Open items, of which there are n.
    """
    place = np.cumsum(opened) - 1
    found: NDArray[np.float64] = columns[place[items]].sum(axis=0, dtype=np.float64)
    return found


def factors_of(
    probes: NDArray[np.floating], products: NDArray[np.floating], rank: int, step: float = 0.0, users: int = 0
) -> NDArray[np.float64]:
    r"""Return factors U of a stand-in :math:`U U^T` for a matrix G of which products are known.

    Parameters
    ----------
    probes : ndarray of float, shape (n, c)
        Columns B of all sums.
    products : ndarray of float, shape (n, c)
        :math:`G B`, where users rounded their parts.
    rank : int
        Largest number of columns of U.
    step : float
        Step to which a user rounds each value; 0 for none.
    users : int
        Most users that have an item.

    Returns
    -------
    ndarray of float64, shape (n, r)
        Columns by falling norm, orthogonal to each other; r is the smaller of c and ``rank``.  Zeros where the rank of
        G is lower.

    Raises
    ------
    ValueError
        A product is not finite.
    """
    if not np.isfinite(products).all():
        raise ValueError("a product of the sketch is not finite")
    known = np.asarray(probes, np.float64)
    core = known.T @ products
    values, vectors = np.linalg.eigh((core + core.T) / 2)
    found = np.zeros((len(products), min(rank, len(core))))
    if not len(values) or values[-1] <= 0:
        return found
    # A value that so many users have rounded is off by at most half a step times the root of their number, in the mean
    # square; so much has a matrix of these errors, of columns of norm sqrt(n), for its norm (Bai and Yin).
    rounding = step * math.sqrt(len(values) * len(products) * users)
    kept = values > max(_LEAST * values[-1], rounding)
    half = products @ (vectors[:, kept] / np.sqrt(values[kept]))
    left, lengths, _ = np.linalg.svd(half, full_matrices=False)
    most = min(found.shape[1], len(lengths))
    found[:, :most] = left[:, :most] * lengths[:most]
    return found


def low_rank_model(
    factors: NDArray[np.float64], supports: NDArray[np.integer], ridge: float, columns: int
) -> dict[str, NDArray[np.float32]]:
    r"""Return the model of a sketch.

    Parameters
    ----------
    factors : ndarray of float64, shape (n, r)
        U, from `factors_of`.
    supports : ndarray of int, shape (n,)
        Users of each open item: the diagonal of G.
    ridge : float
        :math:`\lambda`, above 0.
    columns : int
        k, the columns of one sum.

    Returns
    -------
    dict of str to ndarray of float32
        ``factors`` U, (n, r); ``scale``, by which the first k columns of U have norm sqrt(n), (k,); ``apart``
        :math:`\Delta^{-1}`, (n,); ``core`` C, (r, r); ``own``, the diagonal of P, (n,).

    Raises
    ------
    ValueError
        A ridge that is not above 0, or too small beside the counts.
    """
    own = np.asarray(supports, np.float64)
    require_ridge(ridge, float(own.max(initial=0.0)))
    # Rounding may lift the diagonal of the stand-in above the one that is known.
    apart = 1 / (np.maximum(own - np.square(factors).sum(axis=1), 0.0) + ridge)
    whole = np.eye(factors.shape[1]) + factors.T @ (factors * apart[:, None])
    core = np.linalg.inv((whole + whole.T) / 2)
    norms = np.sqrt(np.square(factors[:, :columns]).sum(axis=0))
    scale = np.divide(math.sqrt(len(factors)), norms, out=np.zeros_like(norms), where=norms > 0)
    found = {
        "factors": factors,
        "scale": scale,
        "apart": apart,
        "core": (core + core.T) / 2,
        "own": apart - np.einsum("ik,kl,il->i", factors, core, factors, optimize=True) * apart**2,
    }
    return {name: value.astype(np.float32) for name, value in found.items()}


def scorer(model: Model) -> Callable[[NDArray[np.integer]], NDArray[np.float32]]:
    """Return a function from a user's items to its scores of all items, float32 (I,), by the model of a sketch.

    Closed items have one score, below that of every open one.  A user's scores have the same bits whichever users are
    scored beside it: no product is computed by a library that divides it among threads.
    """
    opened = model["open"] > 0
    if "factors" not in model:
        return lambda items: np.zeros(len(opened), np.float32)
    factors, apart, own = (model[name].astype(np.float64) for name in ("factors", "apart", "own"))
    core = model["core"].astype(np.float64)
    weighted, place = factors * apart[:, None], np.cumsum(opened) - 1

    def score(items: NDArray[np.integer]) -> NDArray[np.float32]:
        known = place[items[opened[items]]]
        summed = np.einsum("kl,l->k", core, weighted[known].sum(axis=0))
        total = np.einsum("ik,k->i", weighted, summed)
        # The weight of an item on itself is 0.
        total[known] -= apart[known] - own[known]
        return spread_over_items((total / own).astype(np.float32), opened)

    return score
