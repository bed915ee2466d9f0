"""The sum in clear by a robust rule: the server keeps the single contributions of a round and combines them at its end.

Only sums of training are formed so; metrics and counts of items are added.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.aggregation import Aggregation
from coterie.secure_sum.clear import ClearServer
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Closed, Step, Total, Vector
from coterie.secure_sum.robust_rules import SparseSteps, Submitted, robust_sum

__all__ = ["RobustServer", "kept_bytes"]

_TRAIN = "train"
"""Purpose of the sums that the rule forms."""

_HEAD = struct.Struct("<II")
"""A stored contribution begins with its member and its number of values."""


def kept_bytes(layout: Layout) -> int:
    """Return the most bytes that a kept contribution takes: position and step of each value that is not zero."""
    return 8 * layout.size


@dataclass(frozen=True, eq=False)
class _Kept:
    """The running state of a round: the contributions so far, in the order of their arrival."""

    layout: Layout
    arrived: tuple[tuple[int, SparseSteps], ...] = ()


class RobustServer(ClearServer):
    """The orchestration server's half of a sum in clear whose sums of training a robust rule forms.

    Parameters
    ----------
    terms : Aggregation
        A rule but ``sum``.
    """

    def __init__(self, terms: Aggregation) -> None:
        self._terms = terms

    def begin(self, plan: SumPlan, layout: Layout) -> Any:
        """Return the state of a round without contributions."""
        return _Kept(layout) if plan.purpose == _TRAIN else super().begin(plan, layout)

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
        if plan.purpose != _TRAIN:
            return found
        steps = SparseSteps.of(found.addend, plan.members[member].users, layout)
        return found._replace(addend=(member, steps))

    def added(self, running: Any, vector: Vector) -> Any:
        """Return the state with one more contribution."""
        if isinstance(running, _Kept):
            return replace(running, arrived=(*running.arrived, vector.addend))
        return super().added(running, vector)

    def to_bytes(self, running: Any) -> bytes:
        """Serialise a state: of each contribution the member, the number of values, their positions and steps."""
        if not isinstance(running, _Kept):
            return super().to_bytes(running)
        parts = []
        for member, steps in running.arrived:
            parts.append(_HEAD.pack(member, len(steps.positions)))
            parts += [steps.positions.astype("<u4").tobytes(), steps.values.astype("<i4").tobytes()]
        return b"".join(parts)

    def from_bytes(self, plan: SumPlan, layout: Layout, stored: bytes) -> Any:
        """Return the state that `to_bytes` wrote."""
        if plan.purpose != _TRAIN:
            return super().from_bytes(plan, layout, stored)
        arrived, start = [], 0
        while start < len(stored):
            member, count = _HEAD.unpack_from(stored, start)
            start += _HEAD.size
            positions = np.frombuffer(stored, "<u4", count, start).astype(np.uint32)
            values = np.frombuffer(stored, "<i4", count, start + 4 * count).astype(np.int32)
            arrived.append((member, SparseSteps(positions, values)))
            start += 8 * count
        return _Kept(layout, tuple(arrived))

    def shortfall(self, plan: SumPlan, closed: Closed, step: Step, arrived: Mapping[int, bytes]) -> str:
        """Return a reason when too few users submitted, or too few members for the rule; empty otherwise."""
        return super().shortfall(plan, closed, step, arrived) or self._few(plan, arrived)

    def lacking(self, plan: SumPlan, present: Collection[int]) -> str:
        """Return a reason when too few users are present, or too few members for the rule; empty otherwise."""
        return super().lacking(plan, present) or self._few(plan, present)

    def _few(self, plan: SumPlan, members: Collection[int]) -> str:
        return self._terms.shortfall(len(members)) if plan.purpose == _TRAIN else ""

    def unmask(self, plan: SumPlan, closed: Closed, running: Any) -> Total:
        """Return the sum by the rule, over the users of the members that it did not leave out."""
        if not isinstance(running, _Kept):
            return super().unmask(plan, closed, running)
        arrived = sorted(running.arrived, key=lambda one: one[0])
        members = [member for member, _ in arrived]
        users = np.array([plan.members[member].users for member in members], np.int64)
        found = robust_sum(Submitted(running.layout, users, [steps for _, steps in arrived]), self._terms)
        left_out = tuple(members[position] for position in found.left_out)
        counted = int(users.sum() - users[list(found.left_out)].sum())
        codes: NDArray[np.uint32] = found.steps.astype(np.uint32) + running.layout.zeros(counted)
        return Total(codes, left_out=left_out)
