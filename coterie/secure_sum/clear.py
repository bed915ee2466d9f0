"""The sum in clear: the orchestration server sees each member's contribution and adds them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.codes import CodesSum, codes_of
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import (
    Closed,
    Declined,
    Pieces,
    PlanFields,
    Running,
    Step,
    Subject,
    Total,
    Vector,
    bad_message,
    users_of,
)
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire

__all__ = ["ClearMember", "ClearServer"]


class ClearServer(CodesSum):
    """The orchestration server's half of a sum in clear."""

    name = "clear"
    steps: tuple[Step, ...] = (Step.SUBMIT,)
    binding: Step | None = None
    forms_at_once = True

    def plan_fields(self, members: int, layout: Layout) -> PlanFields:
        """Return empty fields: a sum in clear has no graph and no key."""
        return PlanFields()

    def expected(self, plan: SumPlan, closed: Closed, step: Step) -> tuple[int, ...]:
        """Return all members of the cohort: each is asked to submit."""
        return tuple(range(len(plan.members)))

    def pieces(
        self,
        plan: SumPlan,
        closed: Closed,
        step: Step,
        member: int,
        running: Running | None = None,
        subject: Subject | None = None,
    ) -> Pieces:
        """Return an empty briefing: members need no more than the plan."""
        return Pieces()

    def check(self, plan: SumPlan, closed: Closed, step: Step, member: int, message: bytes) -> None:
        """Refuse any message: a sum in clear has no step but SUBMIT."""
        raise bad_message(step, "a sum in clear has no such step", "SUBMIT")

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
        """Check a contribution: its length, and its codes against the bounds of the layout."""
        _, codes = codes_of(message, layout.size)
        if not layout.possible(codes, plan.members[member].users):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "a contribution beyond the bounds of its layout",
                field="codes",
                expected="codes from 1 to 2^b - 1 for each user",
            )
        return Vector(codes, sha256 or hashlib.sha256(message).digest())

    def shortfall(self, plan: SumPlan, closed: Closed, step: Step, arrived: Mapping[int, bytes]) -> str:
        """Return a reason when fewer users submitted than the plan's floor; empty otherwise."""
        users = users_of(plan, arrived)
        return "" if users >= plan.min_sum else f"{users} users submitted, the plan's floor is {plan.min_sum}"

    def lacking(self, plan: SumPlan, present: Collection[int]) -> str:
        """Return a reason when those present cover fewer users than the plan's floor; empty otherwise."""
        users = users_of(plan, present)
        return (
            "" if users >= plan.min_sum else f"{users} users are present, the plan's floor is {plan.min_sum}"
        )

    def unmask(self, plan: SumPlan, closed: Closed, running: NDArray[np.uint32]) -> Total:
        """Return the running sum, which is the total already."""
        return Total(running)


class ClearMember:
    """A member's half of a sum in clear; it holds no secret."""

    @property
    def submitters(self) -> Collection[int]:
        """No members: nobody confirms who submitted."""
        return ()

    def answer(self, step: Step, briefing: bytes, codes: NDArray[np.uint32] | None = None) -> bytes:
        """Return the contribution as the message of SUBMIT; raise Declined for any other step."""
        if step is not Step.SUBMIT or codes is None:
            raise Declined(f"a sum in clear has no step {step.value}")
        return wire.SummedVector(codes=codes.astype("<u4", copy=False).tobytes()).SerializeToString()

    def forget(self) -> None:
        """Do nothing: a sum in clear has no secrets to wipe."""
