r"""Mathematics of federated multi-view matrix factorisation: FedMVMF uses all of it, FCF and FedMF a part.

Ratings, user attributes and item attributes (*features*) share factors (Mai and Pang, PrivMVMF; Flanagan et al.):
:math:`R \approx P Q^T`, :math:`X \approx P U^T`, :math:`Y \approx Q V^T`.  Everything here is part of minimising

.. math::

    J = \sum_{ij} c_{ij} (r_{ij} - p_i q_j)^2
      + \lambda_1 \Bigl(\sum_{id} (x_{id} - p_i u_d)^2 + \sum_{jd} (y_{jd} - q_j v_d)^2\Bigr)
      + \lambda_2 (|P|^2 + |Q|^2 + |U|^2 + |V|^2).

A client keeps its ratings, attributes and :math:`p_i`; the orchestration server has :math:`Q` and :math:`U`; the item
server has :math:`Y` and :math:`V`.  In a round clients contribute :math:`f(i, j) = c_{ij} (r_{ij} - p_i q_j) p_i` and
:math:`f(i, d) = (x_{id} - p_i u_d) p_i` (`coterie.systems.shared.factor_steps`), the item server sends
:math:`\sum_d f(j, d)` (`coterie.systems.fedmvmf.mathematics`), and the server steps along the gradient of :math:`J`
(`apply`).  Numbers in parentheses are the paper's equations; ``docs/systems/mvmf.md`` says where they are corrected.

A *missing* attribute is NaN and has no term in :math:`J`.  With biases (`coterie.systems.shared.biases`) one value of
:math:`p_i` and of :math:`q_j` is 1 and never moves; rows of :math:`U` and :math:`V` move in every value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, DataError
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.shared.biases import begin_items, begin_users, moving
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.optimisers import Arrays, initial_state, step

__all__ = [
    "apply",
    "drawn",
    "fewest_users",
    "from_attributes",
    "gradients",
    "initial",
    "initial_factors",
    "initial_server_state",
    "known_values",
    "layout",
    "scores",
    "solved",
    "unknowns_per_equation",
]

_ITEMS, _ATTRIBUTES, _FACTORS = 0, 1, 3
"""First element of the key under which each use of a seed draws; `coterie.systems.fedmvmf.mathematics` has 2,
`coterie.systems.shared.factor_steps` 4 and 5."""

_SPREAD = 0.03
"""Standard deviation of the initial factors."""


def initial(settings: FactorSettings, n_items: int, n_attributes: int, seed: int) -> Arrays:
    """Return version 0 of the shared model.

    Parameters
    ----------
    settings : FactorSettings
    n_items, n_attributes : int
        Items, and attributes of a user (0 where none are known).
    seed : int
        At least 0.

    Returns
    -------
    dict
        ``items``: :math:`Q`, float32 (n_items, K); ``attributes``: :math:`U`, float32 (n_attributes, K).  The first
        rows are the same for any number of rows.

    Notes
    -----
    The first factor of every item begins at the root of the middle of the rating range, the others near zero.  Most of
    a rating is the mean that all ratings share; to find a direction for it takes Adam some 50 rounds.
    """
    return {
        "items": begin_items(settings, drawn(settings, n_items, seed, _ITEMS) + _common(settings)),
        "attributes": drawn(settings, n_attributes, seed, _ATTRIBUTES),
    }


def initial_factors(
    settings: FactorSettings, keys: Sequence[int] | NDArray[np.integer]
) -> NDArray[np.float32]:
    """Return users' initial :math:`p_i`, float32 (users, K); only SGD reads them.

    Parameters
    ----------
    settings : FactorSettings
    keys : sequence of int
        Each user's own number, at least 0, which nobody else knows.
    """
    found = np.empty((len(keys), settings.width), np.float32)
    for slot, key in enumerate(keys):
        found[slot] = drawn(settings, 1, int(key), _FACTORS)[0]
    return begin_users(settings, found + _common(settings))


def _common(settings: FactorSettings) -> NDArray[np.float32]:
    """Return the row that is added to all initial rows; its product with itself is the middle rating, at least 0."""
    row = np.zeros(settings.width, np.float32)
    row[0] = math.sqrt(max(settings.lowest + settings.highest, 0) / 2)
    return row


def drawn(settings: FactorSettings, rows: int, seed: int, use: int) -> NDArray[np.float32]:
    """Return small random factors, float32 (rows, K); ``use`` keeps draws by one seed apart, as `_ITEMS` does."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(use,)))
    return rng.normal(0.0, _SPREAD, (rows, settings.width)).astype(np.float32)


def layout(
    settings: FactorSettings, n_items: int, n_attributes: int, extra: Sequence[Segment] = ()
) -> Layout:
    """Return the segments of a contribution.

    Parameters
    ----------
    settings : FactorSettings
    n_items, n_attributes : int
    extra : sequence of Segment
        Further segments, such as sums of metrics.

    Returns
    -------
    Layout
        ``items`` (n_items, K), the sum of :math:`f(i, j)`, and, where users have attributes, ``attributes``
        (n_attributes, K), the sum of :math:`f(i, d)`.  Sums are not divided: the gradient is a sum, not a mean.
    """
    k, bits = settings.width, settings.bits
    segments = [Segment("items", (n_items, k), settings.item_bound, bits)]
    if n_attributes:
        segments.append(Segment("attributes", (n_attributes, k), settings.attribute_bound, bits))
    return Layout((*segments, *extra))


def from_attributes(
    values: NDArray[np.floating],
    table: NDArray[np.floating],
    settings: FactorSettings,
    *,
    row_by_row: bool = False,
    one: int | None = None,
) -> NDArray[np.float32]:
    r"""Return cold-start factors of users (15) or items (17), which are known by attributes only.

    :math:`p = x U (U^T U + (\lambda_2 / \lambda_1) I)^{-1}` over the attributes that are known; the same formula with
    the roles changed is :math:`v_d` (11).

    Parameters
    ----------
    values : ndarray, shape (n, l)
        Attributes of each user or item; NaN where missing.
    table : ndarray, shape (l, K)
        :math:`U` for users, :math:`V` for items.
    settings : FactorSettings
    row_by_row : bool
        Whether to multiply each row alone, so that its result has the same bits whatever the other rows are; slower
        where ``table`` is long.
    one : int, optional
        Value of the factors that is 1 and not solved for, as in the presence of biases.

    Returns
    -------
    ndarray of float32, shape (n, K)
        Zero, but for the 1, where no attribute is known: such a user scores all items equally, or, beside a 1, by their
        biases.

    Raises
    ------
    DataError
        Arrays that do not fit each other, or an infinite attribute.
    """
    if values.ndim != 2 or values.shape[1] != len(table):
        raise DataError(
            f"attributes of shape {values.shape} for {len(table)} rows of factors; expected one column for each row"
        )
    u, known, x = known_values(table, values)
    k = u.shape[1]
    outer = (u[:, :, None] * u[:, None, :]).reshape(len(u), k * k)
    counted = known.astype(np.float64)
    if row_by_row:
        pairs, right = (counted[:, None, :] @ outer)[:, 0], (x[:, None, :] @ u)[:, 0]
    else:
        pairs, right = counted @ outer, x @ u
    normal = settings.side * pairs.reshape(-1, k, k)
    normal += settings.ridge * np.eye(k)
    return solved(normal, settings.side * right, one)


def solved(
    normal: NDArray[np.float64], right: NDArray[np.float64], one: int | None = None
) -> NDArray[np.float32]:
    """Solve normal equations (n, K, K) for factors, float32 (n, K); the value ``one`` of each is 1 if it is given."""
    if one is None:
        return np.linalg.solve(normal, right[:, :, None])[:, :, 0].astype(np.float32)
    free = np.delete(np.arange(normal.shape[1]), one)
    found = np.ones(right.shape, np.float32)
    left = right[:, free] - normal[:, free, one]
    found[:, free] = np.linalg.solve(normal[:, free[:, None], free], left[:, :, None])[:, :, 0]
    return found


def known_values(
    table: NDArray[np.floating], values: NDArray[np.floating]
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]:
    """Return factors as float64, a mask of the known attributes, and the attributes with 0 for missing ones."""
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0).astype(np.float64)
    if not np.isfinite(filled).all():
        raise DataError("an attribute is infinite; expected a finite number, or NaN where it is missing")
    return np.asarray(table, np.float64), known, filled


def gradients(
    model: Mapping[str, NDArray[np.float32]],
    sums: Mapping[str, NDArray[np.floating]],
    pull: NDArray[np.floating] | None,
    settings: FactorSettings,
    *,
    share: float = 1.0,
) -> dict[str, NDArray[np.float64]]:
    r"""Return the derivatives of :math:`J` by :math:`Q` (7) and :math:`U` (5).

    :math:`-2 \sum_i f(i, j) - 2 \lambda_1 \sum_d f(j, d) + 2 \lambda_2 q_j` and
    :math:`-2 \lambda_1 \sum_i f(i, d) + 2 \lambda_2 u_d`; the paper's (5) lacks the :math:`\lambda_1`.

    Parameters
    ----------
    model : mapping
        The version that the parties fetched.
    sums : mapping
        ``items`` (n_items, K) and, where users have attributes, ``attributes`` (n_attributes, K).
    pull : ndarray, shape (n_items, K), or None
        Sum :math:`\sum_d f(j, d)` that an item server sent; None without an item server.
    settings : FactorSettings
    share : float
        Share of all users that the sums cover; the sums are scaled up by it.

    Returns
    -------
    dict of str to ndarray of float64
        ``items`` (n_items, K), ``attributes`` (n_attributes, K).
    """
    q, u = model["items"].astype(np.float64), model["attributes"].astype(np.float64)
    by_items = -2 / share * np.asarray(sums["items"], np.float64) + 2 * settings.ridge * q
    if pull is not None:
        by_items -= 2 * settings.side * np.asarray(pull, np.float64)
    by_items *= moving(settings)[1]
    by_attributes = 2 * settings.ridge * u
    if len(u):
        by_attributes -= 2 * settings.side / share * np.asarray(sums["attributes"], np.float64)
    return {"items": by_items, "attributes": by_attributes}


def initial_server_state(settings: FactorSettings, model: Mapping[str, NDArray[np.float32]]) -> Arrays:
    """Return the state of the server optimiser before the first round."""
    return initial_state(settings.server, model)


def apply(
    model: Mapping[str, NDArray[np.float32]],
    state: Mapping[str, NDArray[np.float32]],
    sums: Mapping[str, NDArray[np.floating]],
    settings: FactorSettings,
    *,
    users: int,
    population: int | None = None,
    pull: NDArray[np.floating] | None = None,
) -> tuple[Arrays, Arrays]:
    """Make the next version of the model from the sums of a round.

    Parameters
    ----------
    model : mapping
        The version that clients and item server fetched.
    state : mapping
        State from `initial_server_state`, or from the last round.
    sums : mapping
        `Layout.decode` of a layout that begins with `layout`.
    settings : FactorSettings
    users : int
        How many users the sums cover, at least 1.
    population : int, optional
        Number of users in the run, to which the sums are scaled up; as many as the sums cover if left out.
    pull : ndarray, shape (n_items, K), optional
        Sum that the item server sent; items have no features if left out.

    Returns
    -------
    model, state : dict of str to ndarray of float32
        New arrays.

    Raises
    ------
    ConfigError
        Numbers of users that do not fit each other.
    """
    if not 1 <= users <= (population or users):
        raise ConfigError(f"sums over {users} users of {population}; expected at least 1 and at most all")
    derivative = gradients(model, sums, pull, settings, share=users / (population or users))
    change = {name: -value for name, value in derivative.items()}
    return step(settings.server, dict(model), state, change)


def scores(
    model: Mapping[str, NDArray[np.float32]],
    factors: NDArray[np.float32],
    candidates: NDArray[np.integer] | None = None,
) -> NDArray[np.float32]:
    """Return predicted ratings (2); the higher the better.

    Parameters
    ----------
    model : mapping
    factors : ndarray of float32, shape (users, K)
        :math:`p_i`.
    candidates : ndarray of int, shape (users, n), optional
        Each user's items; all items for everybody if left out.

    Returns
    -------
    ndarray of float32, shape (users, n) or (users, n_items)
        Predictions of a user have the same bits whichever other users are given.

    Notes
    -----
    BLAS rounds a user's row depending on its place in the matrix and on the processor.  `numpy.einsum` adds up the K
    products for each user and item in an order that depends on neither.
    """
    if candidates is None:
        every: NDArray[np.float32] = np.einsum("uk,kj->uj", factors, np.ascontiguousarray(model["items"].T))
        return every
    found: NDArray[np.float32] = np.einsum("uck,uk->uc", model["items"][candidates], factors)
    return found


def fewest_users(settings: FactorSettings) -> int:
    r"""Return the number of users below which a sum has fewer than two unknowns per value, whatever they rated.

    A user has at most :math:`m + l_x` private values and a sum has :math:`(m + l_x) K`: below :math:`2 K` users
    `unknowns_per_equation` is under 2.
    """
    return 2 * settings.width


def unknowns_per_equation(
    touched: int, *, users: int, n_items: int, n_attributes: int, settings: FactorSettings
) -> float:
    r"""Return the number of private values per value of a sum, as the paper counts them below (41).

    :math:`(\sum_i |O'_i| + n\, l_x) / ((m + l_x) K)`: near or below 1 a sum may be solved for the ratings behind it.

    Parameters
    ----------
    touched : int
        :math:`\sum_i |O'_i|`: items that have a weight for a user, summed over the users of the sum.
    users, n_items, n_attributes : int
        :math:`n`, :math:`m`, :math:`l_x`.
    settings : FactorSettings
    """
    return (touched + users * n_attributes) / ((n_items + n_attributes) * settings.width)
