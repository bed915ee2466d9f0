r"""Accounting of noise in sums: zero-concentrated differential privacy, and the epsilon that it amounts to."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["concentrated", "epsilon_of"]


def concentrated(squared_sensitivity: float, variance: float, users: int, values: int) -> float:
    r"""Return :math:`\rho` of zero-concentrated differential privacy of a sum with distributed noise.

    A sum of n discrete Gaussians of variance :math:`\sigma^2` is not quite a discrete Gaussian of
    :math:`n \sigma^2`; the difference is :math:`\tau` (Kairouz, Liu and Steinke, 2021, theorem 1):

    .. math::

        \epsilon = \min\left(\sqrt{\frac{\Delta_2^2}{n \sigma^2} + \frac{\tau d}{2}},
          \frac{\Delta_2}{\sqrt n \sigma} + \tau \sqrt d\right), \quad
        \tau = 10 \sum_{k=1}^{n-1} e^{-2 \pi^2 \sigma^2 k / (k + 1)}, \quad \rho = \epsilon^2 / 2.

    Parameters
    ----------
    squared_sensitivity : float
        :math:`\Delta_2^2`.
    variance : float
        :math:`\sigma^2` of one user's noise, above 0.
    users : int
        n, users whose noise is in the sum and who keep it to themselves.
    values : int
        d, length of the sum.
    """
    k = np.arange(1, users)
    tau = 10 * float(np.exp(-2 * math.pi**2 * variance * k / (k + 1)).sum())
    gauss = squared_sensitivity / (users * variance)
    return min(gauss + tau * values / 2, (math.sqrt(gauss) + tau * math.sqrt(values)) ** 2) / 2


def epsilon_of(rho: float, delta: float) -> float:
    r"""Return :math:`\epsilon` at a :math:`\delta` of a mechanism with :math:`\rho`-zCDP.

    The least over :math:`\alpha > 1` of

    .. math::

        \alpha \rho + \frac{\ln(1 / (\alpha \delta))}{\alpha - 1} + \ln(1 - 1 / \alpha)

    (Canonne, Kamath and Steinke, 2020, corollary 13, solved for :math:`\epsilon`), by a grid: every point of it is an
    upper bound.

    Raises
    ------
    ValueError
        A rho that is not above 0, or a delta that is not between 0 and 1.
    """
    if not rho > 0 or not 0 < delta < 1:
        raise ValueError(f"rho {rho}, delta {delta}; expected rho above 0 and delta between 0 and 1")
    more = np.logspace(-6, 9, 60_001)
    alpha = 1 + more
    bounds = alpha * rho - np.log(alpha * delta) / more + np.log(more / alpha)
    return max(float(bounds.min()), 0.0)
