r"""Mathematics of FCF, federated collaborative filtering of implicit feedback (Ammad-ud-din et al., 2019).

FCF minimises, for :math:`y_{uj}` 1 for an item that a user has taken up and 0 for others, and for the confidence
:math:`1 + a y_{uj}`,

.. math::

    J = \sum_{uj} (1 + a y_{uj}) (y_{uj} - p_u q_j)^2 + \lambda (|P|^2 + |Q|^2)

over *all* items: :math:`p_u` is solved for, the orchestration server steps along the gradient by :math:`Q`.  Divided
by :math:`1 + a`, this cost is :math:`J` of `coterie.systems.shared.factors` where every rating is 1, an unrated item
has the weight :math:`\alpha = 1 / (1 + a)`, the ridge is :math:`\lambda / (1 + a)`, and there are no attributes.  So
FCF has no mathematics of its own; the sum over all open items is formed once for all users (the Gram matrix).
`coterie.systems.fcf.settings.FcfSettings.factor_settings` converts the settings.
"""

from __future__ import annotations

from coterie.systems.shared.taken_up import TAKEN_UP

__all__ = ["TAKEN_UP"]
