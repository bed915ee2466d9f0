r"""FCF: federated collaborative filtering of implicit feedback (Ammad-ud-din et al., 2019), an instance of FedMVMF.

With :math:`y_{uj}` 1 for an item that a user has taken up and 0 for others, and the confidence
:math:`1 + a y_{uj}`, it minimises

.. math::

    J = \sum_{uj} (1 + a y_{uj}) (y_{uj} - p_u q_j)^2 + \lambda (|P|^2 + |Q|^2)

over *all* items: :math:`p_u` is solved for, the orchestration server steps along the gradient by :math:`Q`.  Divided
by :math:`1 + a` that is :math:`J` of `coterie.systems.shared.factors` where every rating is 1, an unrated item has the
weight :math:`\alpha = 1 / (1 + a)`, the ridge is :math:`\lambda / (1 + a)`, and nobody knows attributes.  So there is
no mathematics of its own here; the sum over open items without a 1 is formed once for all users (the Gram matrix).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coterie.errors import ConfigError
from coterie.systems.shared.factors import MvmfSettings
from coterie.systems.shared.optimisers import ServerOptimiser

__all__ = ["TAKEN_UP", "FcfSettings"]

TAKEN_UP = 1.0
"""The rating that stands for an item that a user has taken up."""


@dataclass(frozen=True)
class FcfSettings:
    r"""What every party of a run must agree on.

    Parameters
    ----------
    factors : int
        Length of :math:`p_u` and :math:`q_j`, at least 1.
    confidence : float
        :math:`a`, above 0.
    ridge : float
        :math:`\lambda`, above 0.
    server : ServerOptimiser
        What moves :math:`Q`: Adam as in the paper, or plain steps.  It is given the gradient of :math:`J / (1 + a)`.
    bits : int
        Bits of a code of a real value, 8 to 31.
    item_bound : float
        Largest value of a user's gradient of a row that is sent; beyond it is clipped.

    Raises
    ------
    ConfigError
        A value out of its range.
    """

    factors: int = 20
    confidence: float = 4.0
    ridge: float = 5.0
    server: ServerOptimiser = field(
        default_factory=lambda: ServerOptimiser("fedadam", rate=0.05, beta1=0.5, beta2=0.99, tau=1e-8)
    )
    bits: int = 16
    item_bound: float = 4.0

    def __post_init__(self) -> None:
        # Written so that NaN fails, too.
        for name in ("confidence", "ridge"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a finite number above 0")
        self.mvmf()  # the others

    def mvmf(self) -> MvmfSettings:
        """Return the settings of FedMVMF that are the same, with every rating `TAKEN_UP`.

        Raises
        ------
        ConfigError
            A value out of its range.
        """
        return MvmfSettings(
            factors=self.factors,
            weights="incl-unc",
            uncertainty=1 / (1 + self.confidence),
            side=0.0,
            ridge=self.ridge / (1 + self.confidence),
            server=self.server,
            lowest=TAKEN_UP,
            highest=TAKEN_UP,
            bits=self.bits,
            item_bound=self.item_bound,
        )
