"""The population of a run: its users in the order from which cohorts are drawn, with the beacon drawn for them.

The orchestration server fixes the population once and commits to it with the third party, which checks each user
against its own record of enrolments, and only then draws and signs the beacon.  Hosts check the signature, the order
and their own users, so that the server can neither invent users and devices nor choose cohorts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import overload

from coterie.crypto.beacon import population_hash, verify_beacon
from coterie.secure_sum.plan import Member
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import common_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["Ids", "Population", "canonical_order", "check_canonical"]

_ID_BYTES = 32


class Ids(Sequence[bytes]):
    """Ids of participants in a row, 32 bytes each, each of them made when it is asked for: a run may have a million.

    Parameters
    ----------
    packed : bytes or bytearray
        The ids without anything between them; a ``bytearray`` may grow.
    """

    __slots__ = ("_packed",)

    def __init__(self, packed: bytes | bytearray) -> None:
        self._packed = packed

    @classmethod
    def of(cls, participants: Iterable[bytes]) -> Ids:
        """Return the same ids packed, or an instance as it is."""
        return participants if isinstance(participants, Ids) else cls(b"".join(participants))

    @property
    def packed(self) -> bytes:
        """The ids without anything between them."""
        return bytes(self._packed)

    def __len__(self) -> int:
        return len(self._packed) // _ID_BYTES

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return [self[position] for position in range(*at.indices(len(self)))]
        first = range(len(self))[at] * _ID_BYTES
        return bytes(self._packed[first : first + _ID_BYTES])

    def __iter__(self) -> Iterator[bytes]:
        packed = self._packed
        for first in range(0, len(packed), _ID_BYTES):
            yield bytes(packed[first : first + _ID_BYTES])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Population:
    """The users of a run, in order.

    Parameters
    ----------
    participants : sequence of bytes
        Ids of the users' participants.
    devices : sequence of str
        Name of the connection that speaks for each user.
    beacon, signature : bytes
        Randomness that the third party drew for this population, and its signature; empty where the run's plan names
        a beacon, as in an experiment that can be repeated.
    """

    participants: Sequence[bytes]
    devices: Sequence[str]
    beacon: bytes = b""
    signature: bytes = b""
    _hashes: dict[str, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.participants)

    def hash(self, run_id: str) -> bytes:
        """Return the hash of the users and their devices, 32 bytes; the third party's signature covers it."""
        known = self._hashes.get(run_id)
        if known is None:
            known = self._hashes[run_id] = population_hash(run_id, self.participants, self.devices)
        return known

    def drawn(self, plan: RunPlan) -> bytes:
        """Return the beacon of a run's permutations: the plan's where it names one, otherwise the third party's."""
        return plan.rounds.beacon or self.beacon

    def members(self, cohort: Sequence[int], *, party_per_user: bool) -> dict[int, list[int]]:
        """Return the members of a cohort: by position in the plan of a sum, the users that each covers.

        Parameters
        ----------
        cohort : sequence of int
            Positions in the population, ascending.
        party_per_user : bool
            Whether every user is a member; otherwise each device is one, for all its users in the cohort.
        """
        if party_per_user:
            return {n: [position] for n, position in enumerate(cohort)}
        by_device: dict[str, list[int]] = {}
        for position in cohort:
            by_device.setdefault(self.devices[position], []).append(position)
        return dict(enumerate(by_device.values()))

    def member(self, positions: Sequence[int]) -> Member:
        """Return the member that stands for some users of one device, as the plan of a sum names it."""
        first = positions[0]
        return Member(self.participants[first], self.devices[first], len(positions))

    def check(self, plan: RunPlan, directory_key: bytes) -> None:
        """Check that the third party drew the beacon for these users, unless the plan of an experiment names one.

        Parameters
        ----------
        plan : RunPlan
        directory_key : bytes
            Raw Ed25519 public key of the directory, 32 bytes.

        Raises
        ------
        VerificationError
            MALFORMED or BAD_SIGNATURE.
        ValueError
            When users are not in canonical order, or one comes twice.
        """
        if plan.rounds.experiment and plan.rounds.beacon:
            if len(set(self.participants)) != len(self):
                raise ValueError("a user is in the population twice")
            return
        verify_beacon(plan.run_id, self.hash(plan.run_id), self.drawn(plan), self.signature, directory_key)
        check_canonical(self.participants)

    def to_wire(self) -> wire.Population:
        """Return the population as a message."""
        number = {device: n for n, device in enumerate(dict.fromkeys(self.devices))}
        return wire.Population(
            devices=number,
            participants=Ids.of(self.participants).packed,
            device=[number[device] for device in self.devices],
            beacon=self.beacon,
            beacon_signature=self.signature,
        )

    @classmethod
    def from_wire(cls, message: wire.Population) -> Population:
        """Return the population that a message carries; only its form is checked.

        Raises
        ------
        Refusal
            INVALID_FIELD when there is nobody, an id is cut short, a device is missing, unnamed or listed twice.
        """
        # Each access to the field copies it.
        whole, names = message.participants, list(message.devices)
        count, rest = divmod(len(whole), _ID_BYTES)
        for holds, name, expected in (
            (count > 0 and not rest, "participants", f"{_ID_BYTES} bytes for each user, at least one"),
            (len(message.device) == count, "device", "one for each user"),
            (all(n < len(names) for n in message.device), "device", "positions in devices"),
            (len(set(names)) == len(names), "devices", "each connection once"),
        ):
            if not holds:
                raise Refusal(
                    ErrorReason.ERROR_REASON_INVALID_FIELD,
                    f"the population has a bad {name}",
                    field=f"population.{name}",
                    expected=expected,
                )
        return cls(
            Ids(whole),
            [names[n] for n in message.device],
            message.beacon,
            message.beacon_signature,
        )


def canonical_order(users: Iterable[tuple[int, bytes, str]], plan: RunPlan) -> list[int]:
    """Return the slots of users in the order of a run's population.

    The order is that of the participants' ids.  In an experiment whose plan names the beacon it is that of devices and
    slots, which does not depend on keys, so that the experiment can be repeated.

    Parameters
    ----------
    users : iterable of tuple
        Slot, participant id and device of each.
    plan : RunPlan
    """
    if plan.rounds.beacon:
        return [slot for slot, _, _ in sorted(users, key=lambda one: (one[2], one[0]))]
    return [slot for slot, _, _ in sorted(users, key=lambda one: one[1])]


def check_canonical(participants: Sequence[bytes]) -> None:
    """Check that ids ascend, each once.

    Raises
    ------
    ValueError
        When one comes twice, or before a smaller one.
    """
    for before, after in pairwise(participants):
        if before == after:
            raise ValueError("a user is in the population twice")
        if before > after:
            raise ValueError("the users of the population do not stand in the order of their ids")
