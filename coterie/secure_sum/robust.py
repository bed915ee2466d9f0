"""The sum in clear by a robust rule: the server keeps the single contributions of a round and combines them at its end.

Only sums of training are formed so; metrics and counts of items are added.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.aggregation import Aggregation
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.kept import KeptContributions, KeptRound
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Closed, Step, Total, Vector
from coterie.secure_sum.robust_rules import Submitted, robust_sum

__all__ = ["RobustServer", "kept_bytes"]

_TRAIN = "train"
"""Purpose of the sums that the rule forms."""


def kept_bytes(layout: Layout) -> int:
    """Return the most bytes that a kept contribution takes: position and step of each value that is not zero."""
    return 8 * layout.size


class RobustServer(KeptContributions):
    """The orchestration server's half of a sum in clear whose sums of training a robust rule forms.

    Parameters
    ----------
    terms : Aggregation
        A rule but ``sum``.
    """

    def __init__(self, terms: Aggregation) -> None:
        self._terms = terms

    @classmethod
    def of_terms(cls, terms: bytes) -> RobustServer:
        """Return a half that takes contributions for the rule of which another half told by `terms`."""
        return cls(Aggregation(**json.loads(terms)))

    def terms(self, plan: SumPlan) -> bytes:
        """Return the rule, as JSON."""
        return json.dumps(asdict(self._terms)).encode()

    def keeps(self, plan: SumPlan) -> bool:
        """Return whether a sum is of training: only those are formed by the rule."""
        return plan.purpose == _TRAIN

    def vector(
        self,
        plan: SumPlan,
        closed: Closed,
        notes: Mapping[int, bytes],
        member: int,
        message: bytes,
        layout: Layout,
        sha256: bytes = b"",
    ) -> Vector:
        """Check a contribution as in any sum in clear."""
        found = super().vector(plan, closed, notes, member, message, layout, sha256)
        return self.kept(plan, member, found, layout) if self.keeps(plan) else found

    def shortfall(self, plan: SumPlan, closed: Closed, step: Step, arrived: Mapping[int, bytes]) -> str:
        """Return a reason when too few users submitted, or too few members for the rule; empty otherwise."""
        return super().shortfall(plan, closed, step, arrived) or self._few(plan, arrived)

    def lacking(self, plan: SumPlan, present: Collection[int]) -> str:
        """Return a reason when too few users are present, or too few members for the rule; empty otherwise."""
        return super().lacking(plan, present) or self._few(plan, present)

    def _few(self, plan: SumPlan, members: Collection[int]) -> str:
        return self._terms.shortfall(len(members)) if self.keeps(plan) else ""

    def unmask(self, plan: SumPlan, closed: Closed, running: Any) -> Total:
        """Return the sum by the rule, over the users of the members that it did not leave out."""
        if not isinstance(running, KeptRound):
            return super().unmask(plan, closed, running)
        arrived = sorted(running.arrived, key=lambda one: one[0])
        members = [member for member, _ in arrived]
        users = np.array([plan.members[member].users for member in members], np.int64)
        found = robust_sum(Submitted(running.layout, users, [steps for _, steps in arrived]), self._terms)
        left_out = tuple(members[position] for position in found.left_out)
        counted = int(users.sum() - users[list(found.left_out)].sum())
        codes: NDArray[np.uint32] = found.steps.astype(np.uint32) + running.layout.zeros(counted)
        return Total(codes, left_out=left_out)
