"""The population of a run: its users in the order from which cohorts are drawn, with the beacon drawn for them.

The orchestration server fixes the population once and commits to it with the third party, which checks each user
against its own record of enrolments, and only then draws and signs the beacon.  Hosts check the signature, the order
and their own users, so that the server can neither invent users and devices nor choose cohorts.

Where the run's plan allows it, users who come later extend the population by *waves*.  Each wave is committed to,
signed and checked as the population is, over the hash of what was before it, and has a beacon of its own.  The
signatures of waves cover the roots of trees over the users.  So a host that comes later takes an *outline*, the
population without its users, and checks those whom it meets in a cohort by their places in these trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, overload

import numpy as np

from coterie.crypto.beacon import (
    SignedPart,
    beginning_hash,
    population_hash,
    user_leaves,
    verify_beacon,
    wave_hash,
)
from coterie.crypto.merkle import Tree, check_inclusions
from coterie.crypto.verification import Reason, VerificationError
from coterie.rounds.open_population import objection_to_growth
from coterie.rounds.prefix import Prefix
from coterie.secure_sum.plan import Member
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import common_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan, RunPlan

__all__ = [
    "ID_BYTES",
    "Ids",
    "Outline",
    "Population",
    "Wave",
    "canonical_order",
    "check_canonical",
    "least_wave",
    "waves_to_wire",
]

ID_BYTES = 32
"""Bytes of a participant's id."""

_HASH_BYTES = 32


class Ids(Sequence[bytes]):
    """Ids of participants in a row, 32 bytes each, each of them made when it is asked for: a run may have a million.

    Parameters
    ----------
    packed : bytes or bytearray
        The ids without anything between them; a ``bytearray`` may grow.
    count : int, optional
        How many of them there are, however many follow.  Default: all.
    """

    __slots__ = ("_count", "_packed")

    def __init__(self, packed: bytes | bytearray, count: int | None = None) -> None:
        self._packed = packed
        self._count = count

    @classmethod
    def of(cls, participants: Iterable[bytes]) -> Ids:
        """Return the same ids packed, or an instance as it is."""
        return participants if isinstance(participants, Ids) else cls(b"".join(participants))

    @property
    def packed(self) -> bytes:
        """The ids without anything between them."""
        return bytes(self._packed) if self._count is None else bytes(self._packed[: self._count * ID_BYTES])

    def first(self, count: int) -> Ids:
        """Return the first so many ids, without a copy."""
        return Ids(self._packed, min(count, len(self)))

    def extended(self, more: bytes) -> Ids:
        """Return these ids with more, packed, at their end.

        Those before are copied once: then both share them, and a further one costs what it adds.
        """
        packed, size = self._packed, len(self) * ID_BYTES
        if self._count is None or not isinstance(packed, bytearray) or len(packed) != size:
            packed = bytearray(memoryview(packed)[:size])
        packed += more
        return Ids(packed, len(packed) // ID_BYTES)

    def __len__(self) -> int:
        return len(self._packed) // ID_BYTES if self._count is None else self._count

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return [self[position] for position in range(*at.indices(len(self)))]
        first = range(len(self))[at] * ID_BYTES
        return bytes(self._packed[first : first + ID_BYTES])

    def __iter__(self) -> Iterator[bytes]:
        packed = self._packed
        for first in range(0, len(self) * ID_BYTES, ID_BYTES):
            yield bytes(packed[first : first + ID_BYTES])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class Wave(NamedTuple):
    """Users who came after a run had begun.

    Parameters
    ----------
    first : int
        Position of its first user in the population.
    from_pass : int
        First pass in which its users take part.
    beacon, signature : bytes
        As of `Population`, drawn for the population up to and with this wave; empty before.
    """

    first: int
    from_pass: int
    beacon: bytes = b""
    signature: bytes = b""


class Outline(NamedTuple):
    """What waves' signatures cover, in the place of the users.

    Parameters
    ----------
    sha256 : bytes
        Hash of the users before the first wave, 32 bytes.
    parts : tuple of SignedPart
        The beginning and each wave.
    """

    sha256: bytes
    parts: tuple[SignedPart, ...]


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
        Randomness that the third party drew for the users before the first wave, and its signature; empty where the
        run's plan names a beacon, as in an experiment that can be repeated.
    waves : tuple of Wave
        Users who came later, the last ones last; empty in a run whose population is closed.
    outline : Outline, optional
        Of a population with waves whose users are not known here; ``participants`` and ``devices`` are empty then.
    """

    participants: Sequence[bytes]
    devices: Sequence[str]
    beacon: bytes = b""
    signature: bytes = b""
    waves: tuple[Wave, ...] = ()
    outline: Outline | None = None
    _hashes: dict[str, tuple[bytes, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _parts: dict[int, SignedPart] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Populations that follow from each other share it.
    _trees: dict[SignedPart, Tree] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        if self.outline is None:
            return len(self.participants)
        return (
            self.waves[-1].first + self.outline.parts[-1].users if self.waves else self.outline.parts[0].users
        )

    def hash(self, run_id: str) -> bytes:
        """Return the hash of the users and their devices, 32 bytes; the third party's signature covers it."""
        return self.hashes(run_id)[-1]

    def hashes(self, run_id: str) -> tuple[bytes, ...]:
        """Return the hash of the users before the first wave, and those up to and with each wave."""
        known = self._hashes.get(run_id, ())
        if len(known) <= len(self.waves):
            known = self._hashes[run_id] = (*known, *self._hashed(run_id, known))
        return known

    def _hashed(self, run_id: str, known: Sequence[bytes]) -> Iterator[bytes]:
        """Yield the hashes that follow those which are known."""
        if known:
            found = known[-1]
        else:
            found = self.outline.sha256 if self.outline else population_hash(run_id, *self._users(0))
            yield found
        first = max(len(known) - 1, 0)
        for number, wave in enumerate(self.waves[first:], start=first + 1):
            before = self._followed(run_id, number, found)
            found = wave_hash(run_id, number, wave.from_pass, before, self.part(number))
            yield found

    def _followed(self, run_id: str, number: int, sha256: bytes) -> bytes:
        return beginning_hash(run_id, sha256, self.part(0)) if number == 1 else sha256

    def before_wave(self, run_id: str, number: int) -> bytes:
        """Return the hash over which that of a wave is, 32 bytes; it covers the trees over all users before."""
        return self._followed(run_id, number, self.hashes(run_id)[number - 1])

    def part(self, number: int) -> SignedPart:
        """Return what a wave's signature covers of its users; number 0 are the users of the beginning."""
        if self.outline is not None:
            return self.outline.parts[number]
        if number not in self._parts:
            self._parts[number] = SignedPart.of(*self._users(number))
        return self._parts[number]

    def _tree(self, number: int) -> Tree:
        """Return the tree over the users of a part; it is kept, 64 bytes a user."""
        part = self.part(number)
        if part not in self._trees:
            self._trees[part] = Tree.of(user_leaves(*self._users(number)))
        return self._trees[part]

    def _hand_down(self, found: Population, parts: int) -> Population:
        """Return a population that begins with so many parts of this one, with what was computed for them."""
        # Copies: another thread may compute further ones meanwhile.
        found._hashes.update({run: known[:parts] for run, known in self._hashes.copy().items()})
        found._parts.update({number: one for number, one in self._parts.copy().items() if number < parts})
        object.__setattr__(found, "_trees", self._trees)
        return found

    def outlined(self, run_id: str) -> Population:
        """Return this population, which has waves, without its users."""
        numbers = range(len(self.waves) + 1)
        outline = Outline(self.hashes(run_id)[0], tuple(self.part(number) for number in numbers))
        found = Population((), (), self.beacon, self.signature, self.waves, outline)
        return self._hand_down(found, len(numbers))

    def _users(self, number: int) -> tuple[Sequence[bytes], Sequence[str]]:
        """Return participants and devices of a wave; number 0 are the users of the beginning."""
        if not self.waves:
            # Without a copy: there may be a million.
            return self.participants, self.devices
        first, last = self._spans[number]
        return self.participants[first:last], self.devices[first:last]

    def _within(self, positions: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield the parts that have some of these positions, which ascend, with the places of these users there."""
        at = np.asarray(positions, np.int64)
        for number, (first, last) in enumerate(self._spans):
            low, high = np.searchsorted(at, (first, last))
            if low < high:
                yield number, (at[low:high] - first).tolist()

    def shown(self, positions: Sequence[int]) -> wire.CohortUsers:
        """Return the users at some positions, with the proofs of their places, as a message.

        Parameters
        ----------
        positions : sequence of int
            Strictly ascending, at least one.
        """
        names, device = _numbered([self.devices[position] for position in positions])
        return wire.CohortUsers(
            devices=names,
            participants=b"".join([self.participants[position] for position in positions]),
            device=device,
            proofs=[
                b"".join(self._tree(number).inclusions(places, self.part(number).users))
                for number, places in self._within(positions)
            ],
        )

    def check_shown(
        self, positions: Sequence[int], message: wire.CohortUsers
    ) -> tuple[Sequence[bytes], list[str]]:
        """Check that users stand at some positions, and return their ids and the device of each.

        Parameters
        ----------
        positions : sequence of int
            As for `shown`.
        message : CohortUsers

        Raises
        ------
        Refusal
            INVALID_FIELD as for `from_wire`.
        VerificationError
            NOT_LOGGED when a proof does not show it.
        """
        packed, names = _people(message, [0], "cohort_users")
        participants = Ids(packed)
        found = list(self._within(positions))
        if len(participants) != len(positions) or len(message.proofs) != len(found):
            raise VerificationError(
                Reason.NOT_LOGGED,
                f"{len(participants)} users with {len(message.proofs)} proofs; expected {len(positions)} with "
                f"{len(found)}",
            )
        leaves = list(user_leaves(participants, names))
        for (number, places), proof in zip(found, message.proofs, strict=True):
            own, leaves = leaves[: len(places)], leaves[len(places) :]
            part = self.part(number)
            hashes = [proof[at : at + _HASH_BYTES] for at in range(0, len(proof), _HASH_BYTES)]
            check_inclusions(own, places, part.users, hashes, part.root)
        return participants, names

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """First position of the users of the beginning and of each wave, and the position after their last."""
        return list(pairwise([0, *(wave.first for wave in self.waves), len(self)]))

    def first_of(self, part: int) -> int:
        """Return the position of the first user of a part: the beginning, 0, or a wave; where a wave would begin."""
        return self._spans[part][0] if part <= len(self.waves) else len(self)

    @property
    def last_beacon(self) -> bytes:
        """The beacon that was drawn last."""
        return self.waves[-1].beacon if self.waves else self.beacon

    @property
    def beacons(self) -> list[tuple[bytes, bytes]]:
        """The beacons of the beginning and of each wave, with their signatures."""
        return [(self.beacon, self.signature), *((wave.beacon, wave.signature) for wave in self.waves)]

    def drawn(self, plan: RunPlan) -> bytes:
        """Return the beacon of a run's permutations: the plan's where it names one, otherwise the third party's."""
        return plan.rounds.beacon or self.last_beacon

    def first_waves(self, count: int) -> Population:
        """Return the population as it was when it had so many waves."""
        if count == len(self.waves):
            return self
        users = self.waves[count].first
        devices, outline = self.devices, self.outline
        found = replace(
            self,
            participants=Ids.of(self.participants).first(users),
            devices=devices.first(users) if isinstance(devices, Prefix) else devices[:users],
            waves=self.waves[:count],
            outline=None if outline is None else outline._replace(parts=outline.parts[: count + 1]),
        )
        return self._hand_down(found, count + 1)

    def followed_by(
        self, participants: Sequence[bytes], devices: Sequence[str], waves: Iterable[Wave]
    ) -> Population:
        """Return this population with further users, in one or more waves; its users and hashes are not copied.

        Parameters
        ----------
        participants, devices
            Of the further users, in order.
        waves : iterable of Wave
            ``first`` counts all users.
        """
        known = self.devices
        found = replace(
            self,
            participants=Ids.of(self.participants).extended(Ids.of(participants).packed),
            devices=(known if isinstance(known, Prefix) else Prefix(list(known))).extended(devices),
            waves=(*self.waves, *waves),
        )
        return self._hand_down(found, len(self.waves) + 1)

    def signed(self, beacon: bytes, signature: bytes) -> Population:
        """Return this population with the beacon that was drawn for its last users."""
        if not self.waves:
            found = replace(self, beacon=beacon, signature=signature)
        else:
            last = self.waves[-1]._replace(beacon=beacon, signature=signature)
            found = replace(self, waves=(*self.waves[:-1], last))
        # Beacons are no part of the hashes.
        return self._hand_down(found, len(self.waves) + 1)

    def later_waves(self, count: int) -> wire.Waves:
        """Return the waves after the first so many, as a message for somebody who has the users before them."""
        waves = self.waves[count:]
        first = waves[0].first if waves else len(self)
        moved = [wave._replace(first=wave.first - first) for wave in waves]
        if self.outline is not None:
            parts = map(_part_to_wire, self.outline.parts[count + 1 :])
            return wire.Waves(waves=map(_wave_to_wire, moved), parts=parts)
        return waves_to_wire(self.participants[first:], self.devices[first:], moved)

    def extended(self, *messages: wire.Waves) -> Population:
        """Return this population with the waves that messages have, one after the other; only their form is checked.

        The hashes that this population has computed are not computed again.

        Raises
        ------
        Refusal
            INVALID_FIELD as for `from_wire`.
        """
        found = self
        for message in messages:
            if not message.waves and not message.participants:
                continue
            if found.outline is not None:
                found = found._outline_extended(found.outline, message)
                continue
            packed, names = _people(message, [wave.first for wave in message.waves], "waves")
            waves = [_wave(one, len(found)) for one in message.waves]
            found = found.followed_by(Ids(packed), names, waves)
        return found

    def _outline_extended(self, outline: Outline, message: wire.Waves) -> Population:
        parts = _outline_parts(message, [wave.first for wave in message.waves], "waves")
        found = replace(
            self,
            waves=(*self.waves, *(_wave(one, len(self)) for one in message.waves)),
            outline=outline._replace(parts=(*outline.parts, *parts)),
        )
        return self._hand_down(found, len(self.waves) + 1)

    def waves_by(self, pass_number: int) -> int:
        """Return how many waves take part in a pass."""
        return sum(wave.from_pass <= pass_number for wave in self.waves)

    def check_waves(self, plan: RunPlan, checked: int = 0) -> None:
        """Check that waves are as the plan of a run allows them, and that a plan which allows any may do so.

        Parameters
        ----------
        plan : RunPlan
        checked : int
            As for `check`.

        Raises
        ------
        ValueError
            When the plan allows none, or is one whose users are fixed when the run begins; with too many users; when a
            wave is too small, comes when the run is over or not after the wave before.
        """
        rounds = plan.rounds
        if self.waves and not rounds.most_users:
            raise ValueError("users were added to the population, which the run's plan does not allow")
        if rounds.most_users and (objection := objection_to_growth(rounds, plan.secure_sum)):
            raise ValueError(objection)
        if rounds.most_users and len(self) > rounds.most_users:
            raise ValueError(f"a population of {len(self)} users; the run's plan allows {rounds.most_users}")
        before, least = 0, least_wave(rounds)
        for number, ((first, last), wave) in enumerate(
            zip(self._spans[1:], self.waves, strict=True), start=1
        ):
            if not before < wave.from_pass < rounds.passes:
                raise ValueError(
                    f"wave {number} of the population begins with pass {wave.from_pass}; expected a pass after "
                    f"{before} and before {rounds.passes}"
                )
            before = wave.from_pass
            if number < checked:
                continue
            devices = self.part(number).devices
            if last - first < least or devices < rounds.min_cohort:
                raise ValueError(
                    f"wave {number} of the population has {last - first} users on {devices} devices; at least {least} "
                    f"on {rounds.min_cohort} may come together"
                )

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

    def check(self, plan: RunPlan, directory_key: bytes, checked: int = 0) -> None:
        """Check that the third party drew the beacons for these users, unless the plan of an experiment names one.

        Parameters
        ----------
        plan : RunPlan
        directory_key : bytes
            Raw Ed25519 public key of the directory, 32 bytes.
        checked : int
            How many parts of the population, its beginning and its waves, were checked before; they are not checked
            again.

        Raises
        ------
        VerificationError
            MALFORMED or BAD_SIGNATURE.
        ValueError
            When users are not in canonical order, or one comes twice; when waves are not as the plan allows them.
        """
        self.check_waves(plan, checked)
        if plan.rounds.experiment and plan.rounds.beacon:
            if len(set(self.participants)) != len(self):
                raise ValueError("a user is in the population twice")
            return
        drawn = [(plan.rounds.beacon or self.beacon, self.signature), *self.beacons[1:]]
        signed = zip(self.hashes(plan.run_id)[checked:], drawn[checked:], strict=True)
        for sha256, (beacon, signature) in signed:
            verify_beacon(plan.run_id, sha256, beacon, signature, directory_key)
        if plan.rounds.most_users:
            # The first wave is over it, and costs nothing but its own users then.
            self.part(0)
        self.check_order(checked)

    def check_order(self, checked: int = 0) -> None:
        """Check that ids ascend at the beginning and in each wave, and that nobody is in the population twice.

        Nothing of it can be seen in an outline: the third party, and those who have the users, check it.

        Parameters
        ----------
        checked : int
            As for `check`.

        Raises
        ------
        ValueError
            When one comes twice, or before a smaller one.
        """
        if self.outline is not None:
            return
        for number in range(checked, len(self.waves) + 1):
            check_canonical(self._users(number)[0])
        if self.waves and self._comes_twice(self.first_of(checked)):
            raise ValueError("a user is in the population twice")

    def _comes_twice(self, first: int) -> bool:
        """Return whether one of the users from a position on is in the population twice."""
        # All of them without a copy: there may be a million.
        later = self.participants[first:] if first else self.participants
        if len(set(later)) != len(later):
            return True
        if not first or not later:
            return False
        # The first bytes of ids, which are hashes, tell nearly all of them apart.
        beginnings = np.frombuffer(Ids.of(self.participants).packed, np.uint64)[:: ID_BYTES // 8]
        fresh = np.sort(beginnings[first:])
        at = np.searchsorted(fresh, beginnings[:first])
        alike = np.flatnonzero(fresh[np.minimum(at, len(fresh) - 1)] == beginnings[:first])
        return not {self.participants[position] for position in alike.tolist()}.isdisjoint(later)

    def to_wire(self) -> wire.Population:
        """Return the population as a message."""
        names, device = _numbered(self.devices)
        outline = self.outline or Outline(b"", ())
        return wire.Population(
            devices=names,
            participants=Ids.of(self.participants).packed,
            device=device,
            beacon=self.beacon,
            beacon_signature=self.signature,
            waves=map(_wave_to_wire, self.waves),
            beginning_sha256=outline.sha256,
            parts=map(_part_to_wire, outline.parts),
        )

    @classmethod
    def from_wire(cls, message: wire.Population) -> Population:
        """Return the population that a message carries; only its form is checked.

        Raises
        ------
        Refusal
            INVALID_FIELD when there is nobody, an id is cut short, a device is missing, unnamed or listed twice, a wave
            is empty; when an outline has other parts than waves.
        """
        starts = [0, *(wave.first for wave in message.waves)]
        signed = message.beacon, message.beacon_signature, tuple(map(_wave, message.waves))
        if message.parts:
            if not message.waves:
                # The signature of the first wave is the first one that covers the parts.
                raise _bad("population", "waves", "one at least in an outline")
            outline = Outline(message.beginning_sha256, _outline_parts(message, starts, "population"))
            return cls((), (), *signed, outline)
        participants, devices = _people(message, starts, "population")
        return cls(Ids(participants), devices, *signed)


def waves_to_wire(participants: Sequence[bytes], devices: Sequence[str], waves: Iterable[Wave]) -> wire.Waves:
    """Return waves as a message of their own.

    Parameters
    ----------
    participants, devices
        Of the waves' users, as of `Population`.
    waves : iterable of Wave
        ``first`` counts these users, from 0.
    """
    names, device = _numbered(devices)
    packed = Ids.of(participants).packed
    return wire.Waves(devices=names, participants=packed, device=device, waves=map(_wave_to_wire, waves))


def _numbered(devices: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the names of devices, each once, and the position of each user's there."""
    number = {device: n for n, device in enumerate(dict.fromkeys(devices))}
    return list(number), [number[device] for device in devices]


def _wave_to_wire(wave: Wave) -> wire.Wave:
    return wire.Wave(
        first=wave.first, from_pass=wave.from_pass, beacon=wave.beacon, beacon_signature=wave.signature
    )


def _wave(message: wire.Wave, users: int = 0) -> Wave:
    """Return a wave whose first user is counted from the user at a position."""
    return Wave(users + message.first, message.from_pass, message.beacon, message.beacon_signature)


def _part_to_wire(part: SignedPart) -> wire.PopulationPart:
    return wire.PopulationPart(users=part.users, devices=part.devices, root=part.root)


def _outline_parts(
    message: wire.Population | wire.Waves, starts: Sequence[int], where: str
) -> tuple[SignedPart, ...]:
    """Check the form of an outline, and return its parts; parameters are those of `_people`."""
    parts = tuple(SignedPart(one.users, one.devices, one.root) for one in message.parts)
    ends = list(accumulate((part.users for part in parts), initial=0))
    hashes = [part.root for part in parts]
    if isinstance(message, wire.Population):
        hashes.append(message.beginning_sha256)
    for holds, name, expected in (
        (
            not (message.participants or message.device or message.devices),
            "participants",
            "none beside parts",
        ),
        (all(len(one) == _HASH_BYTES for one in hashes), "parts", "hashes of 32 bytes"),
        (all(part.users for part in parts), "parts", "one user each at least"),
        (ends[:-1] == [*starts], "parts", "one for each wave, which ends where the next begins"),
    ):
        if not holds:
            raise _bad(where, name, expected)
    return parts


def _bad(where: str, name: str, expected: str) -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_INVALID_FIELD,
        f"the population has a bad {name}",
        field=f"{where}.{name}",
        expected=expected,
    )


def _people(
    message: wire.Population | wire.Waves | wire.CohortUsers, starts: Sequence[int], where: str
) -> tuple[bytes, list[str]]:
    """Check the form of a message with users; return their ids, packed, and the device of each.

    Parameters
    ----------
    message
    starts : sequence of int
        Positions there of the first user of each part, of which the first has to be 0.
    where : str
        Name of the field for refusals.
    """
    # Each access to the field copies it.
    whole, names = message.participants, list(message.devices)
    count, rest = divmod(len(whole), ID_BYTES)
    in_order = [*starts, count]
    for holds, name, expected in (
        (count > 0 and not rest, "participants", f"{ID_BYTES} bytes for each user, at least one"),
        (len(message.device) == count, "device", "one for each user"),
        (all(n < len(names) for n in message.device), "device", "positions in devices"),
        (len(set(names)) == len(names), "devices", "each connection once"),
        (
            in_order[0] == 0 and len(in_order) > 1 and all(one < other for one, other in pairwise(in_order)),
            "waves",
            "one user each at least, in order",
        ),
    ):
        if not holds:
            raise _bad(where, name, expected)
    return whole, [names[n] for n in message.device]


def least_wave(rounds: RoundsPlan) -> int:
    """Return the fewest users who may come together after a run has begun: a group, and a sum of its own."""
    return max(rounds.group, rounds.min_sum, 1)


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
