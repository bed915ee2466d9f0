"""The part that the clear and the masked sum share: contributions are codes, added modulo 2^32 as they arrive."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Closed, Step, Vector, bad_message
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire

__all__ = ["CodesSum", "codes_of"]

_CODES_TAG = bytes([wire.SummedVector.CODES_FIELD_NUMBER << 3 | 2])
"""First byte of a contribution: the number of the field of codes, and that its length follows."""


def codes_of(message: bytes, size: int) -> tuple[wire.SummedVector, NDArray[np.uint32]]:
    """Parse a contribution; return its message without the codes, and its codes, uint32 (size,).

    The codes are a view of the bytes, not a copy, where these are as other parts of this project write them.

    Raises
    ------
    Refusal
        INVALID_FIELD when it is no such message, WRONG_SHAPE when the vector has not ``size`` codes.
    """
    try:
        rest, codes = _parts(message)
    except DecodeError:
        raise bad_message(
            Step.SUBMIT, "the payload is no SummedVector", "a serialised SummedVector"
        ) from None
    if len(codes) != 4 * size:
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_SHAPE,
            f"a contribution of {len(codes)} bytes",
            field="codes",
            expected=f"{4 * size} bytes: {size} codes of the plan's layout",
        )
    # Copies codes that do not begin at a multiple of four bytes.
    return rest, np.require(np.frombuffer(codes, "<u4"), np.uint32, "A")


def _parts(message: bytes) -> tuple[wire.SummedVector, bytes | memoryview]:
    """Split a contribution into its message without the codes, and its codes.

    Raises
    ------
    DecodeError
        When the bytes are no such message.
    """
    # A serialiser writes the codes first: their tag, their length in groups of seven bits, and the codes.
    length, start = 0, 1
    if message[:1] == _CODES_TAG:
        for shift in range(0, 35, 7):
            byte = message[start] if start < len(message) else 0
            length, start = length | (byte & 0x7F) << shift, start + 1
            if byte < 0x80:
                break
        end = start + length
        if length and end <= len(message):
            rest = wire.SummedVector.FromString(message[end:])
            # A second field of codes, even an empty one, replaces the first, and is missing when the rest is written.
            if not rest.codes and rest.SerializeToString(deterministic=True) == message[end:]:
                return rest, memoryview(message)[start:end]
    whole = wire.SummedVector.FromString(message)
    codes = whole.codes
    whole.ClearField("codes")
    return whole, codes


class CodesSum:
    """Base class of the server's halves of the clear and the masked sum, in which only members take part."""

    forms_at_once = False
    compares_notes = False

    def terms(self, plan: SumPlan) -> bytes:
        """Return nothing: codes are added without a key."""
        return b""

    def begin(self, plan: SumPlan, layout: Layout) -> NDArray[np.uint32]:
        """Return an empty running sum: zeros, uint32 (layout size,)."""
        return np.zeros(layout.size, np.uint32)

    def added(self, running: NDArray[np.uint32], vector: Vector) -> NDArray[np.uint32]:
        """Return a new array with a contribution added modulo 2^32."""
        codes: NDArray[np.uint32] = vector.addend
        return running + codes

    def summed(
        self, plan: SumPlan, layout: Layout, addends: Iterable[NDArray[np.uint32]]
    ) -> NDArray[np.uint32]:
        """Return the sum of some contributions modulo 2^32."""
        running = self.begin(plan, layout)
        for codes in addends:
            # In place: an array of its own.
            running += codes
        return running

    def joined(self, running: NDArray[np.uint32], other: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return a new array, the sum of both modulo 2^32."""
        return running + other

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
