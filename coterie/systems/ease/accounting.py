r"""Sensitivity of the two sums of EASE, from which `coterie.secure_sum.noise_accounting` computes their epsilon.

Two data sets are neighbours if one user's whole history is replaced by another.  A user contributes at most m items:

- to the sum of supports c for each; a replacement changes at most 2 m values by c: :math:`\Delta_2^2 = 2 m c^2`;
- to the sum of pairs 1 for each pair of them and for each of them alone, m (m + 1) / 2 values; a replacement changes
  at most twice as many by 1: :math:`\Delta_2^2 = m (m + 1)`.

With :math:`c = \lceil \sqrt{(m + 1) / 2} \rceil` and the same noise both cost about the same.
"""

from __future__ import annotations

import math

__all__ = ["support_parts"]


def support_parts(most_items: int) -> int:
    """Return c, how much an item of a user counts in the sum of supports with noise."""
    return math.isqrt((most_items + 1 + 1) // 2 - 1) + 1
