r"""Mathematics of FedMF, matrix factorisation of ratings by gradient steps (Chai et al., *Secure FedMF*, 2020).

A rating is predicted as :math:`p_u q_j`.  Users and server together minimise

.. math::

    F = \sum_{(u, j) \in R} (r_{uj} - p_u q_j)^2 + \lambda (|P|^2 + |Q|^2)

over the known ratings :math:`R`.  A user keeps its ratings and :math:`p_u`; the orchestration server has
:math:`Q`.  In a round users take a step along their gradient and contribute the changes of the rows of :math:`Q`
that they rated (`coterie.systems.fedmf.local_step`); the server adds (`apply`).

For E = 1 the data terms are those of `coterie.systems.shared.factors` with weights ``obs-only``, update ``sgd`` and no
side information; first factors, layout and checks come from there, by `FedMfSettings.factor_settings`.  FedMF adds
several local epochs, the ridge of :math:`q_j` at the users who rated the item, and gradients that are means.
``docs/systems/fedmf.md`` says where the printed algorithm is corrected.

With ``scaffold`` (Karimireddy et al., 2020) users fetch a control variate :math:`c_j` for each row.  A row's clients
are the users who rated the item, not all users: the others have no gradient of the row and do not move it.  So
:math:`c_j` is the mean of the control variates :math:`c_{uj}` of its raters, with cohorts of groups the mean over
groups of these means: under mean steps each group's round moves a row by the mean over the group's raters.

With ``biases``, which the paper has not, :math:`p_u q_j` holds the biases of user and item
(`coterie.systems.shared.biases`), and the ones among its values never move; everything else is as above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.shared import factors
from coterie.systems.shared.biases import moving, predicted, scaled
from coterie.systems.shared.factors import scores
from coterie.systems.shared.optimisers import Arrays, next_common

__all__ = [
    "apply",
    "initial",
    "initial_factors",
    "layout",
    "moving",
    "predicted",
    "scaled",
    "scores",
]


def initial(settings: FedMfSettings, n_items: int, seed: int) -> Arrays:
    """Return version 0 of the shared model: ``items``, :math:`Q`, float32 (n_items, width).

    Factors are small and random, except the first one, which begins near the root of the middle rating, as users' do.
    With biases those of items begin at 0.  With SCAFFOLD ``control``, of the same shape, is 0.
    """
    items = factors.initial(settings.factor_settings(), n_items, 0, seed)["items"]
    return {"items": items, "control": np.zeros_like(items)} if settings.scaffold else {"items": items}


def initial_factors(
    settings: FedMfSettings, keys: Sequence[int] | NDArray[np.integer]
) -> NDArray[np.float32]:
    """Return users' initial :math:`p_u`, float32 (users, width), each drawn from the user's own number.

    With biases those of users begin at 0.
    """
    return factors.initial_factors(settings.factor_settings(), keys)


def layout(settings: FedMfSettings, n_items: int, extra: Sequence[Segment] = ()) -> Layout:
    """Return the segments of a contribution: ``items`` (n_items, K), the changes of rows, then ``extra``."""
    return factors.layout(settings.factor_settings(), n_items, 0, extra)


def apply(
    model: Mapping[str, NDArray[np.float32]],
    sums: Mapping[str, NDArray[np.floating]],
    settings: FedMfSettings,
    *,
    raters: NDArray[np.floating] | None = None,
    share: NDArray[np.floating] | None = None,
) -> Arrays:
    r"""Make the next version of the model from the sums of a round.

    :math:`q_j + \sum_u \Delta_{uj}`, or with mean steps :math:`q_j + \sum_u \Delta_{uj} / n_j`.  Changes are *added*:
    the printed algorithm subtracts gradients, which under encryption would need :math:`C_Q - C_G`.

    Parameters
    ----------
    model : mapping
        Version of the model that users fetched.
    sums : mapping
        `Layout.decode` of a layout that begins with `layout`.
    settings : FedMfSettings
    raters : ndarray of float, shape (n_items,), optional
        :math:`n_j`, the number of raters of each item among the users of the sums, or its expectation; needed with
        mean steps.
    share : ndarray of float, shape (n_items,), optional
        Share of the groups that train the item whose users are in the sums; needed with SCAFFOLD.

    Returns
    -------
    dict of str to ndarray of float32
        ``items``, and with SCAFFOLD ``control``; nothing given is changed.  Rows without raters stay as they are.

    Raises
    ------
    ConfigError
        Mean steps without the numbers of raters, SCAFFOLD without the shares, or either for other items.
    """
    change = np.asarray(sums["items"], np.float64)
    if settings.steps == "mean":
        divisor = _for_each_row(change, raters, "numbers of raters", "mean steps")
        change = np.divide(change, divisor, out=np.zeros_like(change), where=divisor > 0)
    moved = {"items": (model["items"] + change).astype(np.float32)}
    if settings.scaffold:
        part = _for_each_row(change, share, "shares of groups", "scaffold")
        common, travelled = model["control"].astype(np.float64), settings.local_epochs * settings.rate
        moved["control"] = next_common(common, change, travelled, part).astype(np.float32)
    return moved


def _for_each_row(
    change: NDArray[np.float64], given: NDArray[np.floating] | None, what: str, needed: str
) -> NDArray[np.float64]:
    """Return values of rows as a column."""
    if given is None or given.shape != change.shape[:1]:
        found = "none" if given is None else f"shape {given.shape}"
        raise ConfigError(f"{what}: {found}; with {needed} expected one for each of {len(change)} items")
    return np.asarray(given, np.float64)[:, None]
