r"""Factors of users who never took part in training, from their ratings and a finished model of FedMF.

With the rows :math:`q_j` fixed, a user's part of the cost (`coterie.systems.fedmf.mathematics`) has one minimum,

.. math::

    p_u = \Bigl(\sum_j q_j q_j^T + \lambda w_u I\Bigr)^{-1} \sum_j r_{uj} q_j,

for :math:`w_u` 1 where steps are sums, and the number of the user's ratings under mean steps, by which the gradients
of the data terms are divided.  With biases :math:`p_u` holds a 1 that is not solved for.

A user who trains steps towards this minimum while the rows move, and does not reach it: over-fitting is slower.  For a
new user, who solves at once, :math:`w_u` is larger by `PRIOR` with biases, with which a factor of 0 is the average
user.  Without biases 0 is nobody, and nothing is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.systems.fedmf.mathematics import scaled
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.shared.biases import ITEM
from coterie.systems.shared.factor_steps import UserData, check_user
from coterie.systems.shared.factors import solved

__all__ = ["PRIOR", "folded_factors"]

PRIOR = 80.0
"""Ratings by which the ridge of a new user counts more, with biases; of 0, 10, 20, 40, 80 and 160 the best for trained
users of MovieLens 100K on validation items, also where they bring 5 or 10 ratings (``docs/new-users.md``)."""


def folded_factors(
    model: Mapping[str, NDArray[np.float32]], users: Sequence[UserData], settings: FedMfSettings
) -> NDArray[np.float32]:
    """Return users' factors by a finished model, float32 (users, width).

    Parameters
    ----------
    model : mapping
    users : sequence of UserData
        With at least one rating each; sampled items do not count.
    settings : FedMfSettings

    Raises
    ------
    DataError
        A user's data does not fit the model.
    """
    items, width = model["items"].astype(np.float64), settings.width
    normal, right = np.empty((len(users), width, width)), np.empty((len(users), width))
    for row, user in enumerate(users):
        check_user(user, row, settings.sampling(), len(items), 0)
        q = items[user.items]
        weight = (len(q) if settings.steps == "mean" else 1) + settings.biases * PRIOR
        normal[row] = np.einsum("jk,jl->kl", q, q) + settings.ridge * weight * np.eye(width)
        right[row] = np.einsum("j,jk->k", scaled(settings, user.ratings).astype(np.float64), q)
    return solved(normal, right, ITEM if settings.biases else None)
