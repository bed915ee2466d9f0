r"""Mathematics of FedMVMF's item server (Mai and Pang, PrivMVMF; Flanagan et al.).

The cost :math:`J`, the users' part of a round and the server's step are in `coterie.systems.shared.factors`, as FCF and
FedMF use them, too.  This module adds the view of items: an item server knows their features :math:`Y`, keeps
:math:`V`, and sends the *pull*, the features' part of each item's gradient up to a factor.  Numbers in parentheses are
the paper's equations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.factors import drawn, from_attributes, known_values

__all__ = ["initial_features", "item_server_step"]

_FEATURES = 2
"""First element of the key of the draws; `coterie.systems.shared.factors` has its neighbours."""


def initial_features(settings: FactorSettings, n_features: int, seed: int) -> NDArray[np.float32]:
    """Return the initial :math:`V`, float32 (n_features, K); only SGD reads it."""
    return drawn(settings, n_features, seed, _FEATURES)


def item_server_step(
    items: NDArray[np.floating],
    features: NDArray[np.floating],
    factors: NDArray[np.floating],
    settings: FactorSettings,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    r"""Run the item server's part of a round.

    SemiALS solves for :math:`v_d` (11) and forms the pull with it.  SGD forms the pull with the :math:`v_d` given and
    moves that along its gradient, :math:`-2 \lambda_1 \sum_j (y_{jd} - q_j v_d) q_j + 2 \lambda_2 v_d` ((13) lacks the
    :math:`\lambda_1`).

    Parameters
    ----------
    items : ndarray, shape (n_items, K)
        :math:`Q` of this round.
    features : ndarray, shape (n_items, n_features)
        :math:`Y`; NaN where a feature is missing.
    factors : ndarray, shape (n_features, K)
        :math:`V` as the last round left it.
    settings : FactorSettings

    Returns
    -------
    factors : ndarray of float32, shape (n_features, K)
        :math:`V` to keep.
    pull : ndarray of float32, shape (n_items, K)
        :math:`\sum_d f(j, d)` with :math:`f(j, d) = (y_{jd} - q_j v_d) v_d`, to send to the orchestration server;
        zero for an item without features.

    Raises
    ------
    DataError
        Arrays that do not fit each other, or an infinite feature.
    """
    if features.ndim != 2 or len(features) != len(items) or features.shape[1] != len(factors):
        raise DataError(
            f"features of shape {features.shape} for {len(items)} items and {len(factors)} rows of factors; "
            "expected one row for each item and one column for each row of factors"
        )
    q, known, y = known_values(items, features)
    v: NDArray[np.float64] = np.asarray(factors, np.float64)
    if settings.update == "semi-als":
        v = from_attributes(features.T, items, settings).astype(np.float64)
    missed = np.where(known, y - q @ v.T, 0.0)
    pull = missed @ v
    if settings.update == "sgd":
        v = v - settings.feature_rate * (-2 * settings.side * (missed.T @ q) + 2 * settings.ridge * v)
    return v.astype(np.float32), pull.astype(np.float32)
