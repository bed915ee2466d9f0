"""Sums in clear whose server keeps single contributions until the end of a round, because not all may count."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.secure_sum.clear import ClearServer
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Vector
from coterie.secure_sum.robust_rules import SparseSteps

__all__ = ["KeptContributions", "KeptRound"]

_HEAD = struct.Struct("<II")
"""A stored contribution begins with its member and its number of values."""


@dataclass(frozen=True, eq=False)
class KeptRound:
    """The running state of a round: the contributions so far, in the order of their arrival."""

    layout: Layout
    arrived: tuple[tuple[int, SparseSteps], ...] = ()


class KeptContributions(ClearServer, ABC):
    """Base of server's halves of sums in clear that keep the contributions of some sums, and add up those of others."""

    forms_at_once = False

    @abstractmethod
    def keeps(self, plan: SumPlan) -> bool:
        """Return whether the contributions to a sum are kept."""

    def kept(self, plan: SumPlan, member: int, vector: Vector, layout: Layout) -> Vector:
        """Return a checked contribution as it is kept."""
        steps = SparseSteps.of(vector.addend, plan.members[member].users, layout)
        return vector._replace(addend=(member, steps))

    def begin(self, plan: SumPlan, layout: Layout) -> Any:
        """Return the state of a round without contributions."""
        return KeptRound(layout) if self.keeps(plan) else super().begin(plan, layout)

    def added(self, running: Any, vector: Vector) -> Any:
        """Return the state with one more contribution."""
        if isinstance(running, KeptRound):
            return replace(running, arrived=(*running.arrived, vector.addend))
        return super().added(running, vector)

    def summed(self, plan: SumPlan, layout: Layout, addends: Iterable[Any]) -> Any:
        """Return the state with some contributions."""
        if self.keeps(plan):
            return KeptRound(layout, tuple(addends))
        return super().summed(plan, layout, addends)

    def joined(self, running: Any, other: Any) -> Any:
        """Return the state with the contributions of both."""
        if isinstance(running, KeptRound):
            return replace(running, arrived=(*running.arrived, *other.arrived))
        return super().joined(running, other)

    def to_bytes(self, running: Any) -> bytes:
        """Serialise a state: of each contribution the member, the number of values, their positions and steps."""
        if not isinstance(running, KeptRound):
            return super().to_bytes(running)
        parts = []
        for member, steps in running.arrived:
            parts.append(_HEAD.pack(member, len(steps.positions)))
            parts += [steps.positions.astype("<u4").tobytes(), steps.values.astype("<i4").tobytes()]
        return b"".join(parts)

    def from_bytes(self, plan: SumPlan, layout: Layout, stored: bytes) -> Any:
        """Return the state that `to_bytes` wrote."""
        if not self.keeps(plan):
            return super().from_bytes(plan, layout, stored)
        arrived, start = [], 0
        while start < len(stored):
            member, count = _HEAD.unpack_from(stored, start)
            start += _HEAD.size
            positions = np.frombuffer(stored, "<u4", count, start).astype(np.uint32)
            values = np.frombuffer(stored, "<i4", count, start + 4 * count).astype(np.int32)
            arrived.append((member, SparseSteps(positions, values)))
            start += 8 * count
        return KeptRound(layout, tuple(arrived))
