r"""FCF: federated collaborative filtering of implicit feedback (Ammad-ud-din et al., 2019).

With :math:`y_{uj}` 1 for an item that a user has taken up and 0 for others, and the confidence
:math:`1 + a y_{uj}`, it minimises

.. math::

    J = \sum_{uj} (1 + a y_{uj}) (y_{uj} - p_u q_j)^2 + \lambda (|P|^2 + |Q|^2)

over *all* items: :math:`p_u` is solved for, the orchestration server steps along the gradient by :math:`Q`.  Divided
by :math:`1 + a` that is :math:`J` of `coterie.systems.shared.factors` where every rating is 1, an unrated item has the
weight :math:`\alpha = 1 / (1 + a)`, the ridge is :math:`\lambda / (1 + a)`, and nobody knows attributes.  So there is
no mathematics of its own here; the sum over open items without a 1 is formed once for all users (the Gram matrix).
`coterie.systems.fcf.settings.FcfSettings.factor_settings` has those settings.
"""

from __future__ import annotations

__all__ = ["TAKEN_UP"]

TAKEN_UP = 1.0
"""The rating that stands for an item that a user has taken up."""
