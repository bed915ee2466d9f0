"""The plan of one sum, and its hash, on which all members of the cohort agree before they send anything."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from coterie.crypto.explicit import encode
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.denoisers import Denoisers
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire

__all__ = ["VERSION", "Member", "SumInput", "SumPlan", "layout_hash"]

VERSION = 2
"""Version of the sums' protocol; every plan names it."""

_ID_BYTES = _HASH_BYTES = 32


def layout_hash(layout: Layout) -> bytes:
    """Return the SHA-256 of a layout: label ``layout``, then for each segment its fields in order.

    Per segment: name, number of axes, each axis, bound (IEEE 754 double, big-endian), bits, divisor's name, 1 where
    values are clipped.
    """
    fields: list[bytes | str | int] = []
    for segment in layout.segments:
        fields += [segment.name, len(segment.shape), *segment.shape, struct.pack(">d", segment.bound)]
        fields += [segment.bits, segment.over, int(segment.clip)]
    return hashlib.sha256(encode("layout", len(layout.segments), *fields)).digest()


@dataclass(frozen=True)
class Member:
    """A member of a sum, or a key holder, as a plan names it.

    Parameters
    ----------
    participant : bytes
        Id of the participant that signs for it.
    device : str
        Name of the connection that speaks for it.
    users : int
        Number of users that its contribution covers.
    """

    participant: bytes
    device: str
    users: int = 1


class SumInput(NamedTuple):
    """What the server tells members beside plan and model, and their contributions depend on, by name and hash.

    Parameters
    ----------
    name : str
        One of `coterie.rounds.inputs`.
    sha256 : bytes
        Hash of the input, 32 bytes; each member computes it from what it uses.
    """

    name: str
    sha256: bytes


@dataclass(frozen=True)
class SumPlan:
    """The plan of one sum: purpose, members, floors and keys; ``docs/spec`` explains the fields of ``rounds.proto``.

    Its hash covers everything on which a member's contribution depends, so that members that were told different
    things have no sum in common.
    """

    run_id: str
    round: int
    purpose: str
    secure_sum: str
    model_sha256: bytes
    layout_sha256: bytes
    members: tuple[Member, ...]
    degree: int = 0
    threshold: int = 0
    min_sum: int = 1
    pass_number: int = 0
    part: int = 0
    key_id: bytes = b""
    code_bits: int = 0
    holders: tuple[Member, ...] = ()
    sparse_floor: int = 0
    run_plan_sha256: bytes = bytes(_HASH_BYTES)
    model_version: int = 0
    inputs: tuple[SumInput, ...] = ()
    population_sha256: bytes = b""
    beacon: bytes = b""
    noise_floor: int = 0

    @cached_property
    def denoisers(self) -> Denoisers:
        """The denoisers of the members; they are the same in every sum of a run over the same members.

        They follow from the run's plan and its beacon, in which a server has no choice once the beacon is drawn.
        """
        return Denoisers(
            hashlib.sha256(encode("denoisers", self.run_plan_sha256, self.beacon)).digest(),
            tuple(member.device for member in self.members),
            tuple(member.participant for member in self.members),
            tuple(member.users for member in self.members),
            self.noise_floor,
        )

    @cached_property
    def graph_seed(self) -> bytes:
        """SHA-256 that orders members on the ring of a masking graph, 32 bytes.

        It follows from the run's beacon and from the cohort's name, in which a server has no choice once the beacon is
        drawn.  Sums without a population have no beacon: there it is the plan's hash, in which a server has some.
        """
        if not self.beacon:
            return self.hash
        fields = self.beacon, self.run_id, self.purpose, self.pass_number, self.part
        return hashlib.sha256(encode("graph-seed", *fields)).digest()

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the plan's explicit encoding, 32 bytes; signatures of the sum cover it."""
        inputs = [field for one in self.inputs for field in one]
        members: list[bytes | str | int] = []
        for member in self.members:
            members += [member.participant, member.device, member.users]
        if self.holders:
            members += [self.key_id, self.code_bits, len(self.holders)]
            for holder in self.holders:
                members += [holder.participant, holder.device]
            members.append(self.sparse_floor)
        if self.noise_floor:
            members += ["noise-floor", self.noise_floor]
        return hashlib.sha256(
            encode(
                "sum-plan",
                VERSION,
                self.run_id,
                self.round,
                self.purpose,
                self.secure_sum,
                self.run_plan_sha256,
                self.model_version,
                self.model_sha256,
                self.layout_sha256,
                len(self.inputs),
                *inputs,
                self.degree,
                self.threshold,
                self.min_sum,
                self.population_sha256,
                self.beacon,
                self.pass_number,
                self.part,
                len(self.members),
                *members,
            )
        ).digest()

    @cached_property
    def users(self) -> int:
        """Number of users of the whole cohort."""
        return sum(member.users for member in self.members)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Names of the connections that speak for members, each once, in order of appearance."""
        return tuple(dict.fromkeys(member.device for member in self.members))

    def participants(self, positions: Iterable[int]) -> tuple[str, ...]:
        """Return the participants of the members at some positions, as hexadecimal text."""
        return tuple(self.members[position].participant.hex() for position in positions)

    def positions(self, wanted: Callable[[bytes], bool]) -> frozenset[int]:
        """Return the positions of the members whose participants are wanted."""
        return frozenset(n for n, one in enumerate(self.members) if wanted(one.participant))

    def respondent(self, holder: int, task: int) -> int:
        """Return the number under which a key holder is asked for a task; these numbers follow the members' positions.

        Tasks count from 0; there are as many of them as key holders.
        """
        return len(self.members) + task * len(self.holders) + holder

    def denoiser(self, place: int) -> int:
        """Return the number under which the denoiser at a place of the ring is asked; these follow the members'."""
        return len(self.members) + place

    def asked_of(self, respondent: int) -> tuple[int, int]:
        """Return the key holder and the task of a number from `respondent`."""
        task, holder = divmod(respondent - len(self.members), len(self.holders))
        return holder, task

    def device_of(self, respondent: int) -> str:
        """Return the name of the connection that speaks for a member, key holder or denoiser, given by its number."""
        if respondent < len(self.members):
            return self.members[respondent].device
        if self.noise_floor:
            return self.members[self.denoisers.ring[respondent - len(self.members)]].device
        return self.holders[self.asked_of(respondent)[0]].device

    def numbers_of(self, respondent: int) -> tuple[int, ...]:
        """Return all numbers under which the same party is asked: several for a key holder, one for all others."""
        if respondent < len(self.members) or self.noise_floor:
            return (respondent,)
        holder, _ = self.asked_of(respondent)
        return tuple(self.respondent(holder, task) for task in range(len(self.holders)))

    @cached_property
    def by_device(self) -> dict[str, list[int]]:
        """Numbers of the members, key holders and denoisers for which each connection speaks, ascending."""
        found: dict[str, list[int]] = {}
        others = len(self.denoisers.ring) if self.noise_floor else len(self.holders) ** 2
        everybody = len(self.members) + others
        for respondent in range(everybody):
            found.setdefault(self.device_of(respondent), []).append(respondent)
        return found

    def to_wire(self) -> wire.SumPlan:
        """Return the plan as a message."""
        position = {device: n for n, device in enumerate(self.devices)}
        return wire.SumPlan(
            version=VERSION,
            run_id=self.run_id,
            round=self.round,
            purpose=self.purpose,
            secure_sum=self.secure_sum,
            model_sha256=self.model_sha256,
            layout_sha256=self.layout_sha256,
            devices=self.devices,
            members=[
                wire.RoundMember(
                    participant=member.participant, device=position[member.device], users=member.users
                )
                for member in self.members
            ],
            degree=self.degree,
            threshold=self.threshold,
            min_sum=self.min_sum,
            pass_number=self.pass_number,
            part=self.part,
            key_id=self.key_id,
            code_bits=self.code_bits,
            holders=[
                wire.KeyHolder(participant=holder.participant, device=holder.device)
                for holder in self.holders
            ],
            sparse_floor=self.sparse_floor,
            run_plan_sha256=self.run_plan_sha256,
            model_version=self.model_version,
            inputs=[wire.SumInput(name=one.name, sha256=one.sha256) for one in self.inputs],
            population_sha256=self.population_sha256,
            beacon=self.beacon,
            noise_floor=self.noise_floor,
        )

    @classmethod
    def from_wire(cls, message: wire.SumPlan) -> SumPlan:
        """Return the plan that a message carries.

        Raises
        ------
        Refusal
            INVALID_FIELD when a field is missing or out of range, a member appears twice, or the protocol's version
            is another one.
        """

        def require(condition: bool, field: str, expected: str) -> None:
            if not condition:
                raise Refusal(
                    ErrorReason.ERROR_REASON_INVALID_FIELD,
                    f"the plan of round {message.round} has a bad {field}",
                    field=field,
                    expected=expected,
                )

        require(message.version == VERSION, "version", f"version {VERSION} of the protocol")
        require(message.round > 0, "round", "a number from 1")
        require(len(message.run_plan_sha256) == _HASH_BYTES, "run_plan_sha256", "32 bytes")
        require(len(message.model_sha256) == _HASH_BYTES, "model_sha256", "32 bytes")
        require(len(message.layout_sha256) == _HASH_BYTES, "layout_sha256", "32 bytes")
        require(len(message.population_sha256) in (0, _HASH_BYTES), "population_sha256", "32 bytes, or none")
        expected = len(message.population_sha256)
        require(len(message.beacon) == expected, "beacon", "32 bytes with a population, else none")
        require(all(len(one.sha256) == _HASH_BYTES for one in message.inputs), "inputs.sha256", "32 bytes")
        names = [one.name for one in message.inputs]
        require(names == sorted(set(names)), "inputs.name", "names in ascending order, each once")
        require(len(message.members) > 0, "members", "at least one member")
        require(len(set(message.devices)) == len(message.devices), "devices", "each connection once")
        for member in message.members:
            require(len(member.participant) == _ID_BYTES, "members.participant", "32 bytes")
            require(member.device < len(message.devices), "members.device", "a position in devices")
            require(member.users > 0, "members.users", "at least 1")
        found = {member.participant for member in message.members}
        require(len(found) == len(message.members), "members", "each participant once")
        require(message.degree < len(message.members), "degree", "fewer than the members")
        require(message.threshold <= message.degree, "threshold", "at most the degree")
        if message.holders:
            require(len(message.key_id) == _HASH_BYTES, "key_id", "32 bytes")
            require(0 < message.code_bits < 32, "code_bits", "1 to 31")
            holders = {holder.participant for holder in message.holders}
            require(len(holders) == len(message.holders), "holders", "each key holder once")
            require(all(len(one) == _ID_BYTES for one in holders), "holders.participant", "32 bytes")
        require(bool(message.holders) or not message.sparse_floor, "sparse_floor", "0 of a sum without a key")
        require(not (message.holders and message.noise_floor), "noise_floor", "0 of a sum under a key")
        return cls(
            run_id=message.run_id,
            round=message.round,
            purpose=message.purpose,
            secure_sum=message.secure_sum,
            model_sha256=message.model_sha256,
            layout_sha256=message.layout_sha256,
            members=tuple(
                Member(member.participant, message.devices[member.device], member.users)
                for member in message.members
            ),
            degree=message.degree,
            threshold=message.threshold,
            min_sum=message.min_sum,
            pass_number=message.pass_number,
            part=message.part,
            key_id=message.key_id,
            code_bits=message.code_bits,
            holders=tuple(Member(holder.participant, holder.device) for holder in message.holders),
            sparse_floor=message.sparse_floor,
            run_plan_sha256=message.run_plan_sha256,
            model_version=message.model_version,
            inputs=tuple(SumInput(one.name, one.sha256) for one in message.inputs),
            population_sha256=message.population_sha256,
            beacon=message.beacon,
            noise_floor=message.noise_floor,
        )
