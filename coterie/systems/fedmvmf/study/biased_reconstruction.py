r"""Reconstruction attack on FedMVMF with biases: a user's ratings and attributes, from one contribution.

A factor has a 1, :math:`p_i = (a_i, 1, p'_i)`, so the contribution :math:`f(i, j) = e_{ij} p_i` has the error of each
rating as it is, and with it :math:`p'_i`.  The rows of attributes, :math:`f(i, d) = e_{id} p_i`, have :math:`a_i` as
well.  Without attributes :math:`a_i` follows from the user's own solution, whose derivative by it is zero:
:math:`\lambda_2 a_i = \sum_j e_{ij}`.  Where that fits no stars, because ratings of closed items are in the solution
and not in what was sent, it is the one unknown number that makes all ratings whole stars.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coterie.systems.shared.biases import ITEM, USER, predicted
from coterie.systems.shared.factor_settings import FactorSettings
from coterie.systems.shared.study.reconstruction import Marginals, Reconstruction, Seen
from coterie.systems.shared.study.stars import nothing, off_stars, offset, read_off

__all__ = ["reconstruct"]

Doubles = npt.NDArray[np.float64]

_CLOSE = 0.1
"""Mean distance from stars, as a share of that between two of them, up to which a bias is believed."""


def reconstruct(seen: Seen, settings: FactorSettings, marginals: Marginals, *, first: bool) -> Reconstruction:
    """Reconstruct a user's ratings and attributes from one contribution, or from a sum as if it were one user's.

    Parameters
    ----------
    seen : Seen
    settings : FactorSettings
        With biases.
    marginals : Marginals
        Public statistics of ratings on their own range.
    first : bool
        Whether it is the user's first contribution, which under SGD it formed with a bias of 0.
    """
    at = np.flatnonzero(seen.touched)
    if not len(at):
        return nothing(seen.items.shape[0], seen.items.shape[1], len(seen.attributes))
    sent, rows = seen.items[at], seen.item_factors[at].astype(np.float64)
    errors, missing = sent[:, ITEM], seen.attributes[:, ITEM]
    factor = np.zeros(rows.shape[1])
    factor[ITEM] = 1
    square = max(float(errors @ errors + missing @ missing), 1e-12)
    factor[2:] = (errors @ sent[:, 2:] + missing @ seen.attributes[:, 2:]) / square
    factor[USER] = _bias(seen, errors, settings, first=first)
    values = _values(errors + rows @ factor, settings)
    if off_stars(values, marginals) > _CLOSE:
        shift = offset(values, at, marginals)
        values = values + shift
        factor[USER] += 2 * shift / max(settings.highest - settings.lowest, 1e-12)
    found = read_off(values, at, factor, marginals, len(seen.attributes))
    told = seen.attributes.any(axis=1)
    has = missing + seen.attribute_factors.astype(np.float64) @ factor
    found.attributes[told] = has[told] > 0.5
    return found


def _bias(seen: Seen, errors: Doubles, settings: FactorSettings, *, first: bool) -> float:
    """Return the user's bias, as far as attributes or the user's own solution tell it."""
    if settings.update == "sgd" and first:
        return 0.0
    missing = seen.attributes[:, ITEM]
    if missing.any():
        return float(missing @ seen.attributes[:, USER] / (missing @ missing))
    return float(errors.sum()) / settings.ridge


def _values(errors: Doubles, settings: FactorSettings) -> Doubles:
    return predicted(settings, errors.astype(np.float32)).astype(np.float64)
