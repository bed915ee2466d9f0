"""Sums whose contributions travel as codes, and are added modulo 2^32 as they come."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Closed, Step, Vector, bad_message
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire

__all__ = ["CodesSum", "codes_of"]


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


class CodesSum:
    """What the server's halves of such sums have in common; nobody but members takes part in them."""

    def begin(self, plan: SumPlan, layout: Layout) -> NDArray[np.uint32]:
        """Return zeros."""
        return np.zeros(layout.size, np.uint32)

    def added(self, running: NDArray[np.uint32], vector: Vector) -> NDArray[np.uint32]:
        """Return a new array with a contribution added modulo 2^32."""
        codes: NDArray[np.uint32] = vector.addend
        return running + codes

    def to_bytes(self, running: NDArray[np.uint32]) -> bytes:
        """Return codes as they travel, little-endian."""
        return running.astype("<u4", copy=False).tobytes()

    def from_bytes(self, plan: SumPlan, layout: Layout, stored: bytes) -> NDArray[np.uint32]:
        """Return the codes."""
        return np.frombuffer(stored, "<u4").astype(np.uint32)

    def stand_ins(
        self,
        plan: SumPlan,
        closed: Closed,
        step: Step,
        arrived: Collection[int],
        asked: Collection[int],
        gone: Collection[int],
    ) -> tuple[int, ...]:
        """Return nobody: what a member has, no other one has."""
        return ()

    def enough(self, plan: SumPlan, closed: Closed, step: Step, arrived: Collection[int]) -> bool:
        """Return False: whoever was asked is waited for."""
        return False

    def answers_as(self, plan: SumPlan, member: int, step: Step, message: bytes) -> int:
        """Return the member."""
        return member
