"""The interface of a secure sum: what each step asks of a member, and what the orchestration server makes of it.

The server's half is a set of pure functions of the plan and of the messages of steps that are closed, so that the
state of a round is data that can be stored and taken up again.  A member's half keeps the secrets of one round in
memory, and nowhere else.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.plan import SumPlan
from coterie.wire.layout import Layout
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = [
    "Closed",
    "Declined",
    "Failed",
    "InParts",
    "MemberHalf",
    "Pieces",
    "ServerHalf",
    "Step",
    "Total",
    "Vector",
    "bad_message",
    "parts_of",
    "users_of",
]


class Step(enum.Enum):
    """The steps of a sum; each sum has some of them, in this order."""

    ADVERTISE = "advertise"
    SHARE = "share"
    SUBMIT = "submit"
    CONFIRM = "confirm"
    UNMASK = "unmask"


Closed = Mapping[Step, Mapping[int, bytes]]
"""Messages of the steps that are closed, by member; of SUBMIT only each member's note (``Vector.note``)."""


@runtime_checkable
class InParts(Protocol):
    """Messages of which parts can be read without the rest: they may be elsewhere than in memory."""

    def part(self, member: int, start: int, end: int) -> bytes:
        """Return bytes ``start`` to ``end`` of a member's message."""
        ...


def parts_of(messages: Mapping[int, bytes]) -> Callable[[int, int, int], bytes]:
    """Return what reads parts of messages, wherever they are; it is called as ``InParts.part`` is."""
    if isinstance(messages, InParts):
        return messages.part
    return lambda member, start, end: messages[member][start:end]


class Declined(Exception):  # noqa: N818 - a member's decision, not a fault
    """A member takes no further part in a round, and says why; the words name no private value."""


class Failed(Exception):  # noqa: N818 - the outcome of a round
    """A sum that cannot be formed: the round is abandoned, and the model stays as it is.

    Parameters
    ----------
    reason : str
        Why, in words that name no private value.
    wrong : tuple of int
        Members whose answers were found wrong, ascending.
    """

    def __init__(self, reason: str, wrong: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.wrong = wrong


class Vector(NamedTuple):
    """A checked contribution.

    Parameters
    ----------
    codes : ndarray of uint32, shape (layout size,)
        To be added modulo 2^32.
    note : bytes
        What is kept about it: SHA-256 of the message, and what later steps need.
    """

    codes: NDArray[np.uint32]
    note: bytes


class Total(NamedTuple):
    """What comes out of a sum.

    Parameters
    ----------
    codes : ndarray of uint32, shape (layout size,)
        Sum of the submitters' codes modulo 2^32.
    wrong : tuple of int
        Members whose answers were found wrong on the way, ascending; the sum is right in spite of them.
    """

    codes: NDArray[np.uint32]
    wrong: tuple[int, ...] = ()


class Pieces(NamedTuple):
    """A briefing in pieces, which follow each other.

    Parameters
    ----------
    shared : sequence of bytes
        What several members need; for all of them the same objects.
    own : bytes
        What only this member needs.
    """

    shared: Sequence[bytes] = ()
    own: bytes = b""

    @property
    def whole(self) -> bytes:
        """The briefing."""
        return b"".join(self.shared) + self.own


class ServerHalf(Protocol):
    """The orchestration server's half."""

    name: str
    steps: tuple[Step, ...]

    def plan_fields(self, members: int) -> tuple[int, int]:
        """Return degree and threshold for so many members.

        Raises
        ------
        Failed
            When the sum cannot protect so few.
        """
        ...

    def expected(self, plan: SumPlan, closed: Closed, step: Step) -> tuple[int, ...]:
        """Return the members that a step asks, ascending."""
        ...

    def briefing(self, plan: SumPlan, closed: Closed, step: Step, member: int) -> bytes:
        """Return what a member needs for a step: a message of ``rounds.proto``, or nothing."""
        ...

    def pieces(self, plan: SumPlan, closed: Closed, step: Step, member: int) -> Pieces:
        """Return the same in pieces."""
        ...

    def check(self, plan: SumPlan, closed: Closed, step: Step, member: int, message: bytes) -> None:
        """Check a message of any step but SUBMIT.

        Raises
        ------
        Refusal
            When it does not fit; changes nothing.
        """
        ...

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
        """Check a message of SUBMIT, given the notes of those who were before it.

        ``sha256`` is that of the message, where it has been checked already.

        Raises
        ------
        Refusal
            When it does not fit; changes nothing.
        """
        ...

    def shortfall(self, plan: SumPlan, closed: Closed, step: Step, arrived: Mapping[int, bytes]) -> str:
        """Say why a step cannot be closed with these messages; empty when it can."""
        ...

    def unmask(self, plan: SumPlan, closed: Closed, running: NDArray[np.uint32]) -> Total:
        """Return the sum of the submitters' codes, after the last step; ``running`` is not changed.

        Raises
        ------
        Failed
            When too few answers are right; names the members whose answers were wrong.
        """
        ...


class MemberHalf(Protocol):
    """One member's half of one round; holds the secrets of that round."""

    def answer(self, step: Step, briefing: bytes, codes: NDArray[np.uint32] | None = None) -> bytes:
        """Return the message for a step; SUBMIT takes the codes of the contribution.

        Raises
        ------
        Declined
            When the member refuses to go on; it takes no further part in the round.
        """
        ...

    def forget(self) -> None:
        """Wipe the secrets: the round is over, or the member has left it."""
        ...


def users_of(plan: SumPlan, members: Mapping[int, bytes]) -> int:
    """Return how many users the given members cover."""
    return sum(plan.members[member].users for member in members)


def bad_message(step: Step, what: str, expected: str) -> Refusal:
    """Return the refusal of a message that does not fit its step."""
    return Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, what, field=step.value, expected=expected)
