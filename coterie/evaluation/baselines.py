"""Baselines of the tables: trivial scores that are the same for every user or random, and ALS by a library."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.errors import PreflightError
from coterie.evaluation.leave_one_out import ScoreAll, ScoreCandidates

__all__ = [
    "als",
    "damped_mean",
    "damped_offset",
    "from_factors",
    "from_table",
    "popularity",
    "positive_share",
    "random_scores",
]


def random_scores(users: int, items: int, seed: int) -> NDArray[np.float32]:
    """Score every item of every user at random.

    Parameters
    ----------
    users, items, seed : int

    Returns
    -------
    ndarray of float32, shape (users, items)
        Uniform in [0, 1).
    """
    return np.random.default_rng(seed).random((users, items), dtype=np.float32)


def popularity(item: NDArray[np.int32], positive: NDArray[np.bool_], items: int) -> NDArray[np.float32]:
    """Score an item by its number of positive training interactions.

    Parameters
    ----------
    item : ndarray of int32, shape (N,)
        Items of the *training* interactions.
    positive : ndarray of bool, shape (N,)
    items : int
        Number of items, ``I``.

    Returns
    -------
    ndarray of float32, shape (items,)
        The same for every user: ``numpy.broadcast_to`` gives it the shape that `ranking` takes.
    """
    return np.bincount(item[positive], minlength=items).astype(np.float32)


def positive_share(
    item: NDArray[np.int32], positive: NDArray[np.bool_], items: int, strength: float = 5.0
) -> NDArray[np.float32]:
    """Score an item by the share of its training interactions that are positive, shrunk towards the overall share.

    Parameters
    ----------
    item : ndarray of int32, shape (N,)
    positive : ndarray of bool, shape (N,)
    items : int
    strength : float
        Number of interactions at the overall share that every item is given beforehand, above 0: an item with
        a single positive does not lead, one without interactions has the overall share.

    Returns
    -------
    ndarray of float32, shape (items,)

    Raises
    ------
    ValueError
        ``strength`` is not above 0.
    """
    if not strength > 0:
        raise ValueError(f"strength is {strength}; expected a number above 0")
    overall = float(positive.mean()) if len(positive) else 0.0
    seen = np.bincount(item, minlength=items)
    liked = np.bincount(item[positive], minlength=items)
    return ((liked + strength * overall) / (seen + strength)).astype(np.float32)


def damped_mean(
    item: NDArray[np.int32], rating: NDArray[np.floating], items: int, strength: float = 5.0
) -> NDArray[np.float32]:
    """Score an item by the mean of its training ratings, shrunk towards the overall mean.

    Parameters
    ----------
    item : ndarray of int32, shape (N,)
        Items of the *training* interactions.
    rating : ndarray of float, shape (N,)
    items : int
    strength : float
        Number of ratings at the overall mean that every item is given beforehand, above 0.

    Returns
    -------
    ndarray of float32, shape (items,)
        The same for every user; an item without ratings has the overall mean.

    Raises
    ------
    ValueError
        ``strength`` is not above 0.
    """
    if not strength > 0:
        raise ValueError(f"strength is {strength}; expected a number above 0")
    overall = float(rating.mean()) if len(rating) else 0.0
    count = np.bincount(item, minlength=items)
    total = np.bincount(item, weights=rating, minlength=items)
    return ((total + strength * overall) / (count + strength)).astype(np.float32)


def damped_offset(
    user: NDArray[np.int32],
    item: NDArray[np.int32],
    rating: NDArray[np.floating],
    item_mean: NDArray[np.floating],
    users: int,
    strength: float = 5.0,
) -> NDArray[np.float32]:
    """Return each user's mean difference from the items' mean ratings, shrunk towards 0.

    Parameters
    ----------
    user, item : ndarray of int32, shape (N,)
        Users and items of the *training* interactions.
    rating : ndarray of float, shape (N,)
    item_mean : ndarray of float, shape (items,)
        Result of `damped_mean`.
    users : int
    strength : float
        Number of ratings at the items' means that every user is given beforehand, above 0.

    Returns
    -------
    ndarray of float32, shape (users,)
        0 for a user without ratings.

    Raises
    ------
    ValueError
        ``strength`` is not above 0.
    """
    if not strength > 0:
        raise ValueError(f"strength is {strength}; expected a number above 0")
    more = np.bincount(user, weights=rating - item_mean[item], minlength=users)
    return (more / (np.bincount(user, minlength=users) + strength)).astype(np.float32)


def als(
    user: NDArray[np.integer],
    item: NDArray[np.integer],
    n_users: int,
    n_items: int,
    *,
    factors: int = 64,
    regularization: float = 0.01,
    alpha: float = 1.0,
    iterations: int = 15,
    seed: int = 0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Factorise implicit feedback by alternating least squares (Hu, Koren and Volinsky, 2008), with ``implicit``.

    A reference on centralised data, by a method other than the papers'.  It computes in float64: the kernels of linear
    algebra, which differ between processors, would change the ranking of factors in float32.

    Parameters
    ----------
    user, item : ndarray of int, shape (N,)
        Training interactions.
    n_users, n_items : int
    factors, regularization, alpha, iterations, seed
        As in ``implicit.als.AlternatingLeastSquares``; ``alpha`` is the confidence of an interaction.

    Returns
    -------
    user_factors : ndarray of float64, shape (n_users, factors)
    item_factors : ndarray of float64, shape (n_items, factors)

    Raises
    ------
    PreflightError
        The package ``implicit`` is not installed.
    """
    try:
        from implicit.als import AlternatingLeastSquares
        from scipy.sparse import csr_matrix
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise PreflightError(
            f"the row ALS needs the package implicit, but {error.name} is not installed",
            hint="pip install 'coterie[baselines]', or leave the row out",
        ) from error
    seen = csr_matrix((np.ones(len(user), np.float32), (user, item)), shape=(n_users, n_items))
    # One thread: the order of additions, and with it the result, does not depend on the machine's cores.
    with threadpool_limits(1):
        model = AlternatingLeastSquares(
            factors=factors,
            regularization=regularization,
            alpha=alpha,
            iterations=iterations,
            dtype=np.float64,
            random_state=seed,
            num_threads=1,
            use_gpu=False,
        )
        model.fit(seen, show_progress=False)
    return np.asarray(model.user_factors, np.float64), np.asarray(model.item_factors, np.float64)


def from_table(table: NDArray[np.floating]) -> tuple[ScoreCandidates, ScoreAll]:
    """Return the two scoring functions that `LeaveOneOut.measure` takes, from a table of scores.

    Parameters
    ----------
    table : ndarray of float, shape (U, I)
    """
    return (lambda users, items: table[users[:, None], items]), table.__getitem__


def from_factors(
    user_factors: NDArray[np.floating], item_factors: NDArray[np.floating]
) -> tuple[ScoreCandidates, ScoreAll]:
    """Return the two scoring functions that `LeaveOneOut.measure` takes, from inner products of factors.

    Parameters
    ----------
    user_factors : ndarray of float, shape (U, d)
    item_factors : ndarray of float, shape (I, d)
    """
    return (
        lambda users, items: np.einsum("nd,ncd->nc", user_factors[users], item_factors[items]),
        lambda users: user_factors[users] @ item_factors.T,
    )
