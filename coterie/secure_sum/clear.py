"""The sum in clear: the orchestration server sees each member's contribution and adds them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Closed, Declined, Pieces, Step, Total, Vector, bad_message, users_of
from coterie.wire.layout import Layout
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire

__all__ = ["ClearMember", "ClearServer", "codes_of"]


def codes_of(message: bytes, size: int) -> tuple[wire.SummedVector, NDArray[np.uint32]]:
    """Return a contribution's message and its codes.

    Raises
    ------
    Refusal
        INVALID_FIELD when it is no such message, WRONG_SHAPE when the vector has not ``size`` codes.
    """
    try:
        vector = wire.SummedVector.FromString(message)
    except DecodeError:
        raise bad_message(
            Step.SUBMIT, "the payload is no SummedVector", "a serialised SummedVector"
        ) from None
    if len(vector.codes) != 4 * size:
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_SHAPE,
            f"a contribution of {len(vector.codes)} bytes",
            field="codes",
            expected=f"{4 * size} bytes: {size} codes of the plan's layout",
        )
    return vector, np.frombuffer(vector.codes, "<u4").astype(np.uint32, copy=False)


class ClearServer:
    """The server's half."""

    name = "clear"
    steps: tuple[Step, ...] = (Step.SUBMIT,)

    def plan_fields(self, members: int) -> tuple[int, int]:
        """Return no graph."""
        return 0, 0

    def expected(self, plan: SumPlan, closed: Closed, step: Step) -> tuple[int, ...]:
        """Return the whole cohort."""
        return tuple(range(len(plan.members)))

    def briefing(self, plan: SumPlan, closed: Closed, step: Step, member: int) -> bytes:
        """Return nothing: the plan says all."""
        return b""

    def pieces(self, plan: SumPlan, closed: Closed, step: Step, member: int) -> Pieces:
        """Return nothing."""
        return Pieces()

    def check(self, plan: SumPlan, closed: Closed, step: Step, member: int, message: bytes) -> None:
        """Refuse: there is no step but SUBMIT."""
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
        """Check a contribution."""
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
        """Say when fewer users submitted than the plan's floor."""
        users = users_of(plan, arrived)
        return "" if users >= plan.min_sum else f"{users} users submitted, the plan's floor is {plan.min_sum}"

    def unmask(self, plan: SumPlan, closed: Closed, running: NDArray[np.uint32]) -> Total:
        """Return the running sum."""
        return Total(running)


class ClearMember:
    """A member's half: there is no secret."""

    def answer(self, step: Step, briefing: bytes, codes: NDArray[np.uint32] | None = None) -> bytes:
        """Return the contribution."""
        if step is not Step.SUBMIT or codes is None:
            raise Declined(f"a sum in clear has no step {step.value}")
        return wire.SummedVector(codes=codes.astype("<u4", copy=False).tobytes()).SerializeToString()

    def forget(self) -> None:
        """There is nothing to forget."""
