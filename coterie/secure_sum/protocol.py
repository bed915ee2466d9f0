"""The interface of a secure sum: what each step asks of a member, and what the orchestration server makes of it.

The server's half is a set of pure functions of the plan and of the messages of steps that are closed, so that the
state of a round is data that can be stored and taken up again.  It keeps nothing between calls: what is costly and
follows from closed steps is remembered with them (`ClosedSteps`).  A member's half keeps the secrets of one round in
memory, and nowhere else.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import Member, SumPlan
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = [
    "Applied",
    "Closed",
    "ClosedSteps",
    "Declined",
    "Failed",
    "Formed",
    "InParts",
    "MemberHalf",
    "Pieces",
    "PlanFields",
    "Running",
    "ServerHalf",
    "Step",
    "Subject",
    "Total",
    "Vector",
    "bad_message",
    "once",
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
    DECRYPT = "decrypt"


Running = Any
"""What a server's half has added up so far.  Only the half that made it looks inside; it never changes: adding makes
another one."""

Closed = Mapping[Step, Mapping[int, bytes]]
"""Messages of the steps that are closed, by member; of SUBMIT only each member's note (``Vector.note``)."""

_Made = TypeVar("_Made")


class ClosedSteps(Mapping[Step, Mapping[int, bytes]]):
    """Messages of closed steps, with a memory of what was computed from them.

    Closed steps never change, so a half may compute something from them once (`once`) and keep nothing itself.

    Parameters
    ----------
    messages : mapping of Step to mapping of int to bytes
        By step and member.
    """

    def __init__(self, messages: Closed | None = None) -> None:
        self._messages: dict[Step, Mapping[int, bytes]] = dict(messages or {})
        self._made: dict[Hashable, Any] = {}

    def __getitem__(self, step: Step) -> Mapping[int, bytes]:
        return self._messages[step]

    def __iter__(self) -> Iterator[Step]:
        return iter(self._messages)

    def __len__(self) -> int:
        return len(self._messages)

    def with_step(self, step: Step, messages: Mapping[int, bytes]) -> ClosedSteps:
        """Return a copy with one more step; it remembers what was computed from those before."""
        found = ClosedSteps({**self._messages, step: messages})
        found._made = dict(self._made)
        return found

    def without(self, step: Step) -> ClosedSteps:
        """Return a copy without a step, which remembers nothing."""
        return ClosedSteps({each: messages for each, messages in self._messages.items() if each is not step})

    def once(self, what: Hashable, make: Callable[[], _Made]) -> _Made:
        """Return what ``make`` returned when it was first asked for under this name."""
        if what not in self._made:
            self._made[what] = make()
        found: _Made = self._made[what]
        return found

    def forget(self, what: Hashable) -> None:
        """Remember something no longer."""
        self._made.pop(what, None)


def once(closed: Closed, what: Hashable, make: Callable[[], _Made]) -> _Made:
    """Return what ``make`` computes from closed steps: once, where they remember it."""
    return closed.once(what, make) if isinstance(closed, ClosedSteps) else make()


class Subject(NamedTuple):
    """What the sum of a round changes, of a sum that its key holders apply.

    Parameters
    ----------
    model : bytes
        The version that the plan names, a ``SealedModel``.
    items, population : int
        Items of the catalogue, users of the run.
    shares : tuple of float
        Which share of each group's users is in the cohort.
    """

    model: bytes
    items: int
    population: int
    shares: tuple[float, ...]


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
    addend : object
        What the half adds: codes, uint32 (layout size,), or ciphertexts of them.
    note : bytes
        What is kept about it: SHA-256 of the message, and what later steps need.
    """

    addend: Any
    note: bytes


class Applied(NamedTuple):
    """What key holders made of a sum that the server does not see.

    Parameters
    ----------
    model : bytes
        The next version of the model, sealed: a ``SealedModel``.
    measured : mapping of str to (float, float)
        Sum and number of users by metric.
    """

    model: bytes
    measured: Mapping[str, tuple[float, float]]


Formed = NDArray[np.uint32] | Applied
"""A sum of codes modulo 2^32, shape (layout size,), or what others made of it."""


class Total(NamedTuple):
    """What comes out of a sum.

    Parameters
    ----------
    codes : ndarray of uint32, shape (layout size,)
        Sum of the submitters' codes modulo 2^32; empty where others made something of it.
    wrong : tuple of int
        Members whose answers were found wrong on the way, ascending; the sum is right in spite of them.
    applied : Applied, optional
        What others made of it.
    dropped_places : int
        Places of a sparse sum that too few users sent.
    """

    codes: NDArray[np.uint32]
    wrong: tuple[int, ...] = ()
    applied: Applied | None = None
    dropped_places: int = 0

    @property
    def formed(self) -> Formed:
        """The sum, or what was made of it."""
        return self.codes if self.applied is None else self.applied


class PlanFields(NamedTuple):
    """What a half writes into a plan.

    Parameters
    ----------
    degree, threshold : int
        Of the masked sum's graph.
    key_id : bytes
        The key under which contributions are encrypted, 32 bytes.
    code_bits : int
        Bits of a code in a plaintext.
    holders : tuple of Member
        Who decrypts.
    """

    degree: int = 0
    threshold: int = 0
    key_id: bytes = b""
    code_bits: int = 0
    holders: tuple[Member, ...] = ()


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

    def plan_fields(self, members: int, layout: Layout) -> PlanFields:
        """Return what the half writes into the plan of a sum over so many members.

        Raises
        ------
        Failed
            When the sum cannot protect so few, or there is nobody who could decrypt it.
        """
        ...

    def begin(self, plan: SumPlan, layout: Layout) -> Running:
        """Return a sum of nothing."""
        ...

    def added(self, running: Running, vector: Vector) -> Running:
        """Return a sum with one more contribution; the one given stays as it is."""
        ...

    def to_bytes(self, running: Running) -> bytes:
        """Return a sum as it is stored."""
        ...

    def from_bytes(self, plan: SumPlan, layout: Layout, stored: bytes) -> Running:
        """Return the sum that ``to_bytes`` wrote."""
        ...

    def expected(self, plan: SumPlan, closed: Closed, step: Step) -> tuple[int, ...]:
        """Return the members that a step asks, ascending.

        Those behind the last member of the plan are its key holders, one number for each thing that each could be
        asked (`SumPlan.respondent`).
        """
        ...

    def stand_ins(
        self,
        plan: SumPlan,
        closed: Closed,
        step: Step,
        arrived: Collection[int],
        asked: Collection[int],
        gone: Collection[int],
    ) -> tuple[int, ...]:
        """Return whom else a step asks in the place of those that are gone.

        Parameters
        ----------
        plan, closed, step
        arrived, asked, gone : collection of int
            Whose messages are there, who was asked so far, and from whom of these nothing is to be expected.
        """
        ...

    def enough(self, plan: SumPlan, closed: Closed, step: Step, arrived: Collection[int]) -> bool:
        """Whether a step needs no more than these messages, although others were asked, too."""
        ...

    def answers_as(self, plan: SumPlan, member: int, step: Step, message: bytes) -> int:
        """Return as whom a member answers: a key holder's message says which of its tasks it is about.

        Raises
        ------
        Refusal
            When it does not say so.
        """
        ...

    def pieces(
        self,
        plan: SumPlan,
        closed: Closed,
        step: Step,
        member: int,
        running: Running | None = None,
        subject: Subject | None = None,
    ) -> Pieces:
        """Return what a member needs for a step, in pieces: a message of ``rounds.proto``, or nothing.

        ``running`` is the sum once SUBMIT is closed, ``subject`` what it changes where key holders apply it.
        """
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
        """Say why a step cannot be closed with these messages; empty when it can.

        ``closed`` may have the messages of this step already.
        """
        ...

    def unmask(self, plan: SumPlan, closed: Closed, running: Running) -> Total:
        """Return the sum of the submitters' codes, after the last step; ``running`` is not changed.

        Raises
        ------
        Failed
            When too few answers are right; names the members whose answers were wrong.  `stand_ins` may have others.
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
