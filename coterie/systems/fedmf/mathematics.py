r"""FedMF: federated matrix factorisation of explicit ratings by gradient steps (Chai et al., *Secure FedMF*, 2020).

A rating is predicted as :math:`p_u q_j`.  Users and server are part of minimising

.. math::

    F = \sum_{(u, j) \in R} (r_{uj} - p_u q_j)^2 + \lambda (|P|^2 + |Q|^2)

over the ratings :math:`R` that there are.  A user keeps its ratings and :math:`p_u`; the orchestration server has
:math:`Q`.  In a round users take a step along their gradient and contribute what it does to the rows of :math:`Q`
that they rated (`coterie.systems.fedmf.local_step`); the server adds (`apply`).

With E = 1 and no side information the data terms are those of FedMVMF with weights ``obs-only`` and update ``sgd``
(`coterie.systems.shared.factors`), from which first factors, layout and checks come.  What is of its own: several local
epochs, the ridge of :math:`q_j` at the users who rated the item, and gradients that are means.
``docs/systems/fedmf.md`` says where the printed algorithm is corrected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.shared import factors as mvmf
from coterie.systems.shared.factors import MvmfSettings, scores
from coterie.systems.shared.optimisers import Arrays

__all__ = [
    "STEPS",
    "FedMfSettings",
    "apply",
    "initial",
    "initial_factors",
    "layout",
    "printed",
    "scores",
    "shared",
]

STEPS = ("mean", "sum")


@dataclass(frozen=True)
class FedMfSettings:
    r"""What every party of a run must agree on.

    Parameters
    ----------
    factors : int
        Length of :math:`p_u` and :math:`q_j`, at least 1.
    local_epochs : int
        E: gradient steps of a user in a round, at least 1.
    steps : {"mean", "sum"}
        Whether a factor moves by the mean of its gradients over ratings, or by their sum as printed: of a user over
        its own ratings, of an item over its raters in the cohort.  A mean lets one step size fit those with few and
        those with many ratings.
    rate, private_rate : float
        :math:`\eta` of :math:`q_j` and of :math:`p_u`, above 0; the printed algorithm has one for both.
    ridge : float
        :math:`\lambda`, at least 0.
    lowest, highest : float
        Range of ratings; ``lowest`` is above 0.
    bits : int
        Bits of a code of a real value, 8 to 31.
    change_bound : float
        Largest value of a user's change of a row that is sent; beyond it is clipped.

    Raises
    ------
    ConfigError
        A value out of its range.
    """

    factors: int = 10
    local_epochs: int = 1
    steps: str = "mean"
    rate: float = 0.05
    private_rate: float = 0.05
    ridge: float = 0.02
    lowest: float = 0.5
    highest: float = 5.0
    bits: int = 16
    change_bound: float = 4.0

    def __post_init__(self) -> None:
        if self.steps not in STEPS:
            raise ConfigError(f"steps is {self.steps!r}; expected one of {', '.join(STEPS)}")
        # Not 1.0 either: a plan is compared as text.
        if type(self.local_epochs) is not int or self.local_epochs < 1:
            raise ConfigError(f"local_epochs is {self.local_epochs!r}; expected a whole number, at least 1")
        # Written so that NaN fails, too.
        for name in ("rate", "private_rate", "change_bound"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a finite number above 0")
        if not 0 <= self.ridge < math.inf:
            raise ConfigError(f"ridge is {self.ridge}; expected a finite number of at least 0")
        shared(self)  # factors, range and bits


def printed(settings: FedMfSettings | None = None) -> FedMfSettings:
    """Return settings with the printed steps, which add up, and rates that suit them."""
    return replace(settings or FedMfSettings(), steps="sum", rate=1e-4, private_rate=1e-4, change_bound=0.02)


def shared(settings: FedMfSettings) -> MvmfSettings:
    """Return FedMVMF's settings with the same first factors, layout and checks of ratings.

    Raises
    ------
    ConfigError
        A value out of its range.
    """
    return MvmfSettings(
        factors=settings.factors,
        weights="obs-only",
        side=0.0,
        update="sgd",
        lowest=settings.lowest,
        highest=settings.highest,
        bits=settings.bits,
        item_bound=settings.change_bound,
    )


def initial(settings: FedMfSettings, n_items: int, seed: int) -> Arrays:
    """Return version 0 of the shared model: ``items``, :math:`Q`, float32 (n_items, K).

    Small and random, but for the first factor, which begins at the root of the middle rating, as that of users does.
    """
    return {"items": mvmf.initial(shared(settings), n_items, 0, seed)["items"]}


def initial_factors(
    settings: FedMfSettings, keys: Sequence[int] | NDArray[np.integer]
) -> NDArray[np.float32]:
    """Return :math:`p_u` of users before their first round, float32 (users, K), each drawn from the user's number."""
    return mvmf.initial_factors(shared(settings), keys)


def layout(settings: FedMfSettings, n_items: int, extra: Sequence[Segment] = ()) -> Layout:
    """Return the segments of a contribution: ``items`` (n_items, K), what users did to rows, then ``extra``."""
    return mvmf.layout(shared(settings), n_items, 0, extra)


def apply(
    model: Mapping[str, NDArray[np.float32]],
    sums: Mapping[str, NDArray[np.floating]],
    settings: FedMfSettings,
    *,
    raters: NDArray[np.floating] | None = None,
) -> Arrays:
    r"""Make the next version of the model.

    :math:`q_j + \sum_u \Delta_{uj}`, or with mean steps :math:`q_j + \sum_u \Delta_{uj} / n_j`.  Changes are *added*:
    the printed algorithm subtracts gradients, and of an encrypted sum :math:`C_Q - C_G` would have to be formed.

    Parameters
    ----------
    model : mapping
        The version that users fetched.
    sums : mapping
        `Layout.decode` of a layout that begins with `layout`.
    settings : FedMfSettings
    raters : ndarray of float, shape (n_items,), optional
        :math:`n_j`, how many of the users whom the sums cover have rated each item; with mean steps.  Where
        it is not counted in each round, as many as are expected.

    Returns
    -------
    dict of str to ndarray of float32
        ``items``; nothing given is changed.  Rows without raters stay as they are.

    Raises
    ------
    ConfigError
        Mean steps without the numbers of raters, or numbers for other items.
    """
    change = np.asarray(sums["items"], np.float64)
    if settings.steps == "mean":
        if raters is None or raters.shape != change.shape[:1]:
            found = "none" if raters is None else f"shape {raters.shape}"
            raise ConfigError(
                f"numbers of raters: {found}; with mean steps expected one for each of {len(change)} items"
            )
        divisor = np.asarray(raters, np.float64)[:, None]
        change = np.divide(change, divisor, out=np.zeros_like(change), where=divisor > 0)
    return {"items": (model["items"] + change).astype(np.float32)}
