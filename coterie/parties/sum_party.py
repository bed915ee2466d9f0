"""Interface of a party whose participants are members of sums; `coterie.parties.member_driver` drives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.inputs import check_run
from coterie.rounds.member_round import Journal
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined, Step
from coterie.secure_sum.registry import Signer
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = [
    "AcceptedSum",
    "Contributed",
    "Leaving",
    "SatOut",
    "Seat",
    "SumParty",
    "SumRecords",
    "Withheld",
    "check_place",
]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Seat:
    """A participant's place as a member of one sum.

    Parameters
    ----------
    slots : sequence of int
        Slots of the users that the member covers.
    journal : Journal
        As it stands on disk.
    signer : Signer
        Keys with which the member signs, encrypts, and checks other members.
    objections : sequence of str
        Reasons for which the member takes no part; none when it does.
    """

    slots: Sequence[int]
    journal: Journal
    signer: Signer
    objections: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Contributed(Generic[T]):
    """A member's contribution.

    Parameters
    ----------
    member : int
        Position in the sum's plan.
    codes : ndarray of uint32
    beside : T
        State that the party stores in one transaction with the journal of this contribution.
    """

    member: int
    codes: NDArray[np.uint32]
    beside: T


@dataclass(frozen=True)
class Withheld:
    """A member that makes no contribution, and why; the reason shows no private value."""

    member: int
    reason: str


@dataclass(frozen=True)
class Leaving:
    """A message that leaves as soon as the records that name it are durable; named once, however often it is sent.

    Parameters
    ----------
    participant : bytes
        Id of the member that sends it.
    purpose : str
        Purpose of the sum.
    step : Step
    size : int
        Bytes.
    """

    participant: bytes
    purpose: str
    step: Step
    size: int


@dataclass(frozen=True)
class SatOut:
    """A refusal to take part in a sum, and why; ``participant`` is empty when it is that of all the party's members."""

    participant: bytes
    reason: str


@dataclass
class SumRecords(Generic[T]):
    """Records that a party stores in one transaction.

    Parameters
    ----------
    journals : dict of bytes to Journal
        By participant.
    beside : dict of bytes to T
        State to be stored with new contributions, by participant: `Contributed.beside`.
    joining : list of int
        Slots of users whose member joins its sum with these records; named once in a sum.
    leaving : list of Leaving
    sat_out : list of SatOut
    """

    journals: dict[bytes, Journal] = field(default_factory=dict)
    beside: dict[bytes, T] = field(default_factory=dict)
    joining: list[int] = field(default_factory=list)
    leaving: list[Leaving] = field(default_factory=list)
    sat_out: list[SatOut] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there is anything to store."""
        return bool(self.journals or self.leaving or self.sat_out)


class AcceptedSum(Protocol[T]):
    """A sum in which members of a party take part."""

    @property
    def seats(self) -> Mapping[int, Seat]:
        """The party's members, by position in the plan."""
        ...

    def contributions(self, members: Sequence[int]) -> Iterator[Contributed[T] | Withheld]:
        """Run the local step: yield each member's contribution, in any order; iterated in threads, one at a time.

        When it raises, members that are left take no further part.  Error messages of `UnboundedValueError` are shown
        to users, and of other errors only the type.
        """
        ...

    async def conclude(self, members: Sequence[int]) -> None:
        """Complete the local step of these members: all contributions are made, and the last ones have not left yet."""
        ...

    async def save(self, members: Sequence[int]) -> None:
        """Save what the contributions of these members have changed, while they are sent."""
        ...


class SumParty(Protocol[T]):
    """A party whose participants are members of sums."""

    async def accept(self, plan: SumPlan, version: int) -> AcceptedSum[T]:
        """Check the plan of a sum over a version of the model; return the sum as the party takes part in it.

        Raises
        ------
        Declined
            When no member takes part.
        PeerError, StaleError
            When it cannot be told now.
        """
        ...

    def undisturbed(self) -> AbstractAsyncContextManager[object]:
        """Return a context in which nothing else changes what contributions are made of.

        Contributions are made and their journals stored within the same context.
        """
        ...

    async def keep(self, records: SumRecords[T]) -> None:
        """Store records durably, in one transaction; called within `undisturbed`."""
        ...


def check_place(plan: SumPlan, member: int, run: RunPlan, device: str) -> None:
    """Check that a sum is of a run, and that its plan names a connection for a member.

    Raises
    ------
    Declined
        When the plan is of another run, of a run with another plan, or names another connection.
    """
    if plan.members[member].device != device:
        raise Declined("the plan names another connection for this member")
    check_run(plan, run)
