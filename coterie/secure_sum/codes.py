"""The part that the clear and the masked sum share: contributions are codes, added modulo 2^32 as they arrive."""

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
    """Parse a contribution; return its message and its codes, uint32 (size,).

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
    """Base class of the server's halves of the clear and the masked sum, in which only members take part."""

    def begin(self, plan: SumPlan, layout: Layout) -> NDArray[np.uint32]:
        """Return an empty running sum: zeros, uint32 (layout size,)."""
        return np.zeros(layout.size, np.uint32)

    def added(self, running: NDArray[np.uint32], vector: Vector) -> NDArray[np.uint32]:
        """Return a new array with a contribution added modulo 2^32."""
        codes: NDArray[np.uint32] = vector.addend
        return running + codes

    def to_bytes(self, running: NDArray[np.uint32]) -> bytes:
        """Serialise a running sum: its codes as they travel, little-endian."""
        return running.astype("<u4", copy=False).tobytes()

    def from_bytes(self, plan: SumPlan, layout: Layout, stored: bytes) -> NDArray[np.uint32]:
        """Return the running sum that `to_bytes` wrote."""
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
        """Return no stand-ins: no other member has what an absent one would send."""
        return ()

    def enough(self, plan: SumPlan, closed: Closed, step: Step, arrived: Collection[int]) -> bool:
        """Return False: every member that was asked is waited for."""
        return False

    def answers_as(self, plan: SumPlan, member: int, step: Step, message: bytes) -> int:
        """Return the member itself: a member answers only for itself."""
        return member
