"""Interfaces of a secure sum: the orchestration server's half, a member's half, and the values that they exchange.

The server's half is a set of pure functions of the plan and of the messages of closed steps, so that the state of a
round is data that can be stored and resumed.  The server's half keeps nothing between calls: costly values that follow
from closed steps are remembered with the steps (`ClosedSteps`).  A member's half keeps the secrets of one round in
memory, and nowhere else.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
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
    "Confirmed",
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
    """The steps of a secure sum; each kind of sum has some of them, in this order."""

    ADVERTISE = "advertise"
    SHARE = "share"
    SUBMIT = "submit"
    CONFIRM = "confirm"
    UNMASK = "unmask"
    DECRYPT = "decrypt"


Running = Any
"""Running sum of the contributions so far.  Only the half that made it reads it; it is immutable, adding makes a new
one."""

Closed = Mapping[Step, Mapping[int, bytes]]
"""Messages of closed steps, by step and member; for SUBMIT only each member's note (``Vector.note``)."""

_Made = TypeVar("_Made")


class ClosedSteps(Mapping[Step, Mapping[int, bytes]]):
    """Messages of closed steps, with a cache of values computed from them, for the server's half.

    Closed steps never change, so a half may compute a value from them once (`once`) and keep nothing itself.

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
        """Return a copy with one more step; the copy keeps the cached values."""
        found = ClosedSteps({**self._messages, step: messages})
        found._made = dict(self._made)
        return found

    def without(self, step: Step) -> ClosedSteps:
        """Return a copy without a step, and without cached values."""
        return ClosedSteps({each: messages for each, messages in self._messages.items() if each is not step})

    def once(self, what: Hashable, make: Callable[[], _Made]) -> _Made:
        """Return the cached value of this name; call ``make`` for it the first time."""
        if what not in self._made:
            self._made[what] = make()
        found: _Made = self._made[what]
        return found

    def forget(self, what: Hashable) -> None:
        """Drop the cached value of this name."""
        self._made.pop(what, None)


def once(closed: Closed, what: Hashable, make: Callable[[], _Made]) -> _Made:
    """Return what ``make`` computes from closed steps; cached if ``closed`` is a `ClosedSteps`."""
    return closed.once(what, make) if isinstance(closed, ClosedSteps) else make()


class Subject(NamedTuple):
    """The model that a round's sum changes, with what key holders need to apply the sum to it.

    Parameters
    ----------
    model : bytes
        The version that the plan names, a serialised ``SealedModel``.
    items, population : int
        Numbers of items of the catalogue and of users of the run.
    shares : tuple of float
        Share of each group's users that is in the cohort.
    """

    model: bytes
    items: int
    population: int
    shares: tuple[float, ...]


@runtime_checkable
class InParts(Protocol):
    """Messages that can be read in parts, so that they need not lie in memory."""

    def part(self, member: int, start: int, end: int) -> bytes:
        """Return bytes ``start`` to ``end`` of a member's message."""
        ...


def parts_of(messages: Mapping[int, bytes]) -> Callable[[int, int, int], bytes]:
    """Return a function that reads parts of messages, in memory or not, with the arguments of ``InParts.part``."""
    if isinstance(messages, InParts):
        return messages.part
    return lambda member, start, end: messages[member][start:end]


class Declined(Exception):  # noqa: N818 - a member's decision, not a fault
    """A member takes no further part in a round; the message says why, and names no private value."""


class Failed(Exception):  # noqa: N818 - the outcome of a round
    """A sum cannot be formed: the round is abandoned, and the model stays as it is.

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
    """A checked contribution, ready for the server to add.

    Parameters
    ----------
    addend : object
        The value that the half adds: codes, uint32 (layout size,), or ciphertexts of them.
    note : bytes
        SHA-256 of the message, followed by what later steps need; the server keeps it instead of the message.
    """

    addend: Any
    note: bytes


class Applied(NamedTuple):
    """The model and metrics that key holders computed from a sum that the server does not see.

    Parameters
    ----------
    model : bytes
        The next version of the model, a serialised ``SealedModel``.
    measured : mapping of str to (float, float)
        Sum and number of users by metric.
    """

    model: bytes
    measured: Mapping[str, tuple[float, float]]


Formed = NDArray[np.uint32] | Applied
"""Result of a sum: its codes modulo 2^32, shape (layout size,), or the model that key holders made of it."""


class Total(NamedTuple):
    """The result of a sum, with the members that answered wrongly.

    Parameters
    ----------
    codes : ndarray of uint32, shape (layout size,)
        Sum of the submitters' codes modulo 2^32; empty if key holders applied the sum.
    wrong : tuple of int
        Members whose answers were found wrong, ascending; the sum is right in spite of them.
    applied : Applied, optional
        Model and metrics, if key holders applied the sum.
    dropped_places : int
        Number of places of a sparse sum that too few members or users sent.
    left_out : tuple of int
        Members whose contributions a robust rule left out of the sum, or that were withdrawn, ascending.
    withdrawn : tuple of str
        Why members of a denoised sum were withdrawn, a sentence for each cause.
    """

    codes: NDArray[np.uint32]
    wrong: tuple[int, ...] = ()
    applied: Applied | None = None
    dropped_places: int = 0
    left_out: tuple[int, ...] = ()
    withdrawn: tuple[str, ...] = ()

    @property
    def formed(self) -> Formed:
        """The codes of the sum, or what key holders made of it."""
        return self.codes if self.applied is None else self.applied


class PlanFields(NamedTuple):
    """The fields of a plan that the server's half of a secure sum fills in.

    Parameters
    ----------
    degree, threshold : int
        Degree and threshold of the masked sum's graph.
    key_id : bytes
        Id of the key under which contributions are encrypted, 32 bytes.
    code_bits : int
        Bits of a code in a plaintext.
    holders : tuple of Member
        Key holders that decrypt.
    """

    degree: int = 0
    threshold: int = 0
    key_id: bytes = b""
    code_bits: int = 0
    holders: tuple[Member, ...] = ()


class Pieces(NamedTuple):
    """A member's briefing for a step, in pieces to be joined, so that members can share some of them.

    Parameters
    ----------
    shared : sequence of bytes
        Pieces that several members need; the same objects for all of them.
    own : bytes
        Last piece, which only this member needs.
    """

    shared: Sequence[bytes] = ()
    own: bytes = b""

    @property
    def whole(self) -> bytes:
        """The whole briefing, its pieces joined."""
        return b"".join(self.shared) + self.own


class Confirmed(NamedTuple):
    """A key holder's signature under a list of submitters.

    Parameters
    ----------
    message : bytes
        A serialised ``Confirmation``, for CONFIRM.
    agreed : bytes
        Hash of the list, 32 bytes.
    submitters : tuple of int
        Positions of the members on the list, ascending.
    places : bytes
        In a sparse sum, who sent which ciphertexts.
    """

    message: bytes
    agreed: bytes
    submitters: tuple[int, ...]
    places: bytes = b""


class ServerHalf(Protocol):
    """The orchestration server's half of a secure sum."""

    name: str
    steps: tuple[Step, ...]
    binding: Step | None
    """Step by whose answer members or key holders bind the place of the sum to its submitters
    (``coterie.rounds.ledger``); None where they do not."""
    forms_at_once: bool
    """Whether `unmask` has nothing to compute, so that it needs no thread."""
    compares_notes: bool
    """Whether `vector` looks at the notes of other members, so that contributions are checked one after the other."""

    def terms(self, plan: SumPlan) -> bytes:
        """Return what the half of another process needs to take contributions, besides plan, layout and closed steps.

        ``coterie.secure_sum.registry.taking_half`` makes that half.
        """
        ...

    def plan_fields(self, members: int, layout: Layout) -> PlanFields:
        """Return the half's fields for the plan of a sum over ``members`` members.

        Raises
        ------
        Failed
            When the sum cannot protect so few members, or no key holder could decrypt it.
        """
        ...

    def begin(self, plan: SumPlan, layout: Layout) -> Running:
        """Return an empty running sum."""
        ...

    def added(self, running: Running, vector: Vector) -> Running:
        """Return a running sum with one more contribution; the given sum stays unchanged."""
        ...

    def summed(self, plan: SumPlan, layout: Layout, addends: Iterable[Any]) -> Running:
        """Return the running sum of some contributions (``Vector.addend``)."""
        ...

    def joined(self, running: Running, other: Running) -> Running:
        """Return the sum of two running sums over different members; both stay unchanged."""
        ...

    def to_bytes(self, running: Running) -> bytes:
        """Serialise a running sum for the store."""
        ...

    def from_bytes(self, plan: SumPlan, layout: Layout, stored: bytes) -> Running:
        """Return the running sum that ``to_bytes`` wrote."""
        ...

    def expected(self, plan: SumPlan, closed: Closed, step: Step) -> tuple[int, ...]:
        """Return the members that a step asks, ascending.

        Numbers after the plan's last member stand for its key holders, one for each task of each holder
        (`SumPlan.respondent`).
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
        """Return the further members that a step asks in place of members that are gone.

        Parameters
        ----------
        plan, closed, step
        arrived, asked, gone : collection of int
            Members whose messages are there, members asked so far, and those of them that will not answer.
        """
        ...

    def enough(self, plan: SumPlan, closed: Closed, step: Step, arrived: Collection[int]) -> bool:
        """Return whether a step needs no more messages than these, although other members were asked too."""
        ...

    def answers_as(self, plan: SumPlan, member: int, step: Step, message: bytes) -> int:
        """Return the number under which a member answers: a key holder's message names one of its tasks.

        Raises
        ------
        Refusal
            When the message names no such task.
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
        """Return a member's briefing for a step, in pieces: a message of ``rounds.proto``, or nothing.

        ``running`` is the sum once SUBMIT is closed, ``subject`` the model that it changes if key holders apply it.
        """
        ...

    def check(self, plan: SumPlan, closed: Closed, step: Step, member: int, message: bytes) -> None:
        """Check a message of any step but SUBMIT.

        Raises
        ------
        Refusal
            When the message does not fit; nothing changes.
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
        """Check a message of SUBMIT, given the notes of the contributions before it; return its contribution.

        ``sha256`` is the message's hash, if it has been checked already.

        Raises
        ------
        Refusal
            When the message does not fit; nothing changes.
        """
        ...

    def shortfall(self, plan: SumPlan, closed: Closed, step: Step, arrived: Mapping[int, bytes]) -> str:
        """Return the reason why a step cannot be closed with these messages; empty when it can.

        ``closed`` may have the messages of this step already.
        """
        ...

    def lacking(self, plan: SumPlan, present: Collection[int]) -> str:
        """Return why a sum cannot be formed with only these members and key holders present; empty when it may be.

        ``present`` has members by position, and key holders by any of their numbers (`SumPlan.numbers_of`).
        """
        ...

    def unmask(self, plan: SumPlan, closed: Closed, running: Running) -> Total:
        """Return the sum of the submitters' codes, after the last step; ``running`` is not changed.

        Raises
        ------
        Failed
            When too few answers are right; has the members whose answers were wrong.  `stand_ins` may give others to
            ask.
        """
        ...


class MemberHalf(Protocol):
    """A member's half of a secure sum, for one round; holds the secrets of that round."""

    @property
    def submitters(self) -> Collection[int]:
        """Positions of the members on the list that this member confirmed; empty before, and where nobody confirms."""
        ...

    def answer(self, step: Step, briefing: bytes, codes: NDArray[np.uint32] | None = None) -> bytes:
        """Return the member's message for a step; SUBMIT takes the codes of the contribution.

        Raises
        ------
        Declined
            When the member refuses to go on; it takes no further part in the round.
        """
        ...

    def forget(self) -> None:
        """Wipe the secrets: the round is over, or the member has left it."""
        ...


def users_of(plan: SumPlan, members: Iterable[int]) -> int:
    """Return the number of users that the given members cover."""
    return sum(plan.members[member].users for member in members)


def bad_message(step: Step, what: str, expected: str) -> Refusal:
    """Build the refusal of a message that does not fit its step."""
    return Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, what, field=step.value, expected=expected)
