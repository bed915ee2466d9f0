"""The secure sums as schedules use them, and the people of a simulated cohort."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from coterie.crypto.identity import Identity
from coterie.secure_sum.clear import ClearMember, ClearServer
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import MemberHalf, ServerHalf
from coterie.wire.layout import Layout, Segment

__all__ = ["LAYOUT", "halves", "identity"]

LAYOUT = Layout(
    (
        Segment("rows", (2, 2), 1.0, 12, over="touch"),
        Segment.whole("touch", (2,), 1),
        Segment("dense", (3,), 0.5, 16, over="instances"),
        Segment.whole("instances", (), 100),
    )
)
"""A small contribution with a segment of each kind."""


@cache
def identity(number: int) -> Identity:
    """Return the keys of a simulated participant; the same for as long as the process lives."""
    return Identity.generate()


def halves(secure_sum: str) -> tuple[ServerHalf, Callable[[SumPlan, int], MemberHalf]]:
    """Return a secure sum's half for the server, and what makes it for a member of a plan.

    Raises
    ------
    ValueError
        When there is no such sum.
    """
    if secure_sum == "clear":
        return ClearServer(), lambda plan, member: ClearMember()
    raise ValueError(f"no secure sum {secure_sum!r}; there are clear and masked")
