"""The denoised sum: contributions in clear, out of which denoisers take the noise that members added on purpose.

A member's codes are a signal and noise, such as changes of rows of items that it has not rated (FedRec).  It submits
both added up, in clear, and seals the noise for two denoisers on connections of others
(`coterie.secure_sum.denoisers`).
The steps after SUBMIT ask denoisers, not members:

=======  ===========================  ===================================================
step     a denoiser is shown          and answers
=======  ===========================  ===================================================
CONFIRM  sealed noise of submitters   whose noise does not open
UNMASK   a list of its submitters     the sum of their noise, for each of its two groups
=======  ===========================  ===================================================

The server subtracts the sums.  What cannot be denoised is *withdrawn*, contribution and count: members whose noise does
not open at both denoisers, and whole groups whose denoisers are silent, refuse or give different sums, or that have too
few users left.  So a sum is never silently wrong: it takes both denoisers of a group, who say the same wrong number.

A denoiser refuses to add up the noise of fewer users than the plan's floor, or of anybody whom it does not serve in
this plan, and adds up one list at most at each place of a run: its state machine (``coterie.rounds.denoiser_round``)
has the list on disk before the sum leaves.  Sums without noise, such as evaluations, are sums in clear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.sealed_noise import SEALING_BYTES, open_noise, seal_noise
from coterie.crypto.verification import VerificationError
from coterie.secure_sum.codes import codes_of
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.denoisers import COPIES
from coterie.secure_sum.kept import KeptContributions, KeptRound
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import (
    Closed,
    Declined,
    Failed,
    Pieces,
    Running,
    Step,
    Subject,
    Total,
    Vector,
    bad_message,
    once,
    users_of,
)
from coterie.secure_sum.robust_rules import SparseSteps
from coterie.secure_sum.statements import ascending
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import rounds_pb2 as wire

__all__ = ["DenoisedMember", "DenoisedServer", "Denoiser", "pack_noise", "unpack_noise"]

_MessageT = TypeVar("_MessageT", bound=Message)

_HASH_BYTES = 32
_COUNT_BYTES = 4
_STEP_BYTES = 4

_ASKS_ALL = "supports"
"""Purpose of sums that cover two thirds of a cohort or are formed again: what they miss, no later sum makes up for."""


# --- noise as it travels ---------------------------------------------------------------------------------------------


def pack_noise(noise: NDArray[np.int32], room: int) -> bytes:
    """Return noise as it is sealed: a bit for each place of the layout, then the steps that are not 0, then padding.

    Parameters
    ----------
    noise : ndarray of int32, shape (layout size,)
        Steps of the quantiser.
    room : int
        Number of steps for which there is room: that of the contribution, which the server sees, so that the length
        tells nothing more.

    Raises
    ------
    ValueError
        The noise has more steps than there is room for.
    """
    there = np.flatnonzero(noise)
    if len(there) > room:
        raise ValueError(f"noise in {len(there)} places of a contribution that has something in {room}")
    bits = np.zeros(noise.size, np.bool_)
    bits[there] = True
    steps = np.zeros(room, "<i4")
    steps[: len(there)] = noise[there]
    return np.packbits(bits, bitorder="little").tobytes() + steps.tobytes()


def unpack_noise(packed: bytes, layout: Layout, users: int) -> SparseSteps:
    """Return the noise that `pack_noise` packed.

    Raises
    ------
    ValueError
        The bytes are none, or a step is beyond what the layout allows for so many users.
    """
    head = -(-layout.size // 8)
    if len(packed) < head or (len(packed) - head) % _STEP_BYTES:
        raise ValueError(f"noise of {len(packed)} bytes")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8, head), bitorder="little")
    positions = np.flatnonzero(bits)
    steps = np.frombuffer(packed, "<i4", offset=head).astype(np.int32)
    if bits[layout.size :].any() or len(positions) > len(steps) or steps[len(positions) :].any():
        raise ValueError("noise whose places and steps do not belong together")
    values = steps[: len(positions)]
    if (np.abs(values.astype(np.int64)) > users * layout.levels[positions]).any():
        raise ValueError("noise beyond the bounds of its layout")
    return SparseSteps(positions.astype(np.uint32), values)


# --- the server's half -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Served:
    """The members whose noise is added up, once denoisers have said what opens.

    Parameters
    ----------
    members : tuple of tuple of int
        Members of each group, ascending; none where the group is withdrawn.
    withdrawn : tuple of str
        Why members were withdrawn, a sentence for each cause.
    """

    members: tuple[tuple[int, ...], ...]
    withdrawn: tuple[str, ...]


class DenoisedServer(KeptContributions):
    """The orchestration server's half of a denoised sum."""

    name = "denoised"
    steps: tuple[Step, ...] = (Step.SUBMIT, Step.CONFIRM, Step.UNMASK)
    binding: Step | None = Step.UNMASK

    # --- the sum -------------------------------------------------------------------------------------------------

    def keeps(self, plan: SumPlan) -> bool:
        """Return whether there is noise in a sum: some contributions may be withdrawn at its end."""
        return plan.noise_floor > 0

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
        """Check a contribution as in any sum in clear, and its sealed noise by number and length.

        The note is the message's hash, and the sealed noise one after the other.
        """
        found = super().vector(plan, closed, notes, member, message, layout, sha256)
        sealed = codes_of(message, layout.size)[0].noise
        if not plan.noise_floor:
            if sealed:
                raise bad_message(Step.SUBMIT, "sealed noise in a sum without noise", "none")
            return found
        kept = self.kept(plan, member, found, layout)
        room = len(kept.addend[1].positions)
        size = _packed_bytes(layout.size, room) + SEALING_BYTES
        if [len(one) for one in sealed] != [size] * COPIES:
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_SHAPE,
                f"sealed noise of {[len(one) for one in sealed]} bytes",
                field="noise",
                expected=f"noise for {COPIES} denoisers, {size} bytes each",
            )
        return kept._replace(note=found.note + b"".join(sealed))

    # --- whom a step asks ----------------------------------------------------------------------------------------

    def expected(self, plan: SumPlan, closed: Closed, step: Step) -> tuple[int, ...]:
        """Return all members for SUBMIT; afterwards the denoisers that have somebody to serve."""
        if step is Step.SUBMIT:
            return super().expected(plan, closed, step)
        if not plan.noise_floor:
            return ()
        return tuple(
            plan.denoiser(place)
            for place in range(len(plan.denoisers.ring))
            if self._asked_about(plan, closed, step, place)
        )

    def _asked_about(self, plan: SumPlan, closed: Closed, step: Step, place: int) -> list[int]:
        """Return the members that a denoiser's briefing names, ascending."""
        serves = plan.denoisers.served_by(place)
        if step is Step.CONFIRM:
            groups = plan.denoisers.groups
            return sorted(member for member in closed[Step.SUBMIT] if groups[member] in serves)
        served = self._served(plan, closed)
        return sorted(member for group in serves for member in served.members[group])

    def answers_as(self, plan: SumPlan, member: int, step: Step, message: bytes) -> int:
        """Return the number of the denoiser on a member's connection, for the steps that ask denoisers."""
        if step is Step.SUBMIT or not plan.noise_floor or member >= len(plan.members):
            return member
        place = plan.denoisers.place_of(plan.members[member].device)
        return member if place is None else plan.denoiser(place)

    def pieces(
        self,
        plan: SumPlan,
        closed: Closed,
        step: Step,
        member: int,
        running: Running | None = None,
        subject: Subject | None = None,
    ) -> Pieces:
        """Return a denoiser's briefing: sealed noise for CONFIRM, a list of members for UNMASK; empty for members."""
        if step is Step.SUBMIT:
            return Pieces()
        place = member - len(plan.members)
        about = self._asked_about(plan, closed, step, place)
        if step is Step.UNMASK:
            return Pieces(own=wire.NoiseTask(members=about).SerializeToString())
        inbox = wire.NoiseInbox()
        for one in about:
            sealed = closed[Step.SUBMIT][one][_HASH_BYTES:]
            copy = plan.denoisers.of_group(plan.denoisers.groups[one]).index(place)
            size = len(sealed) // COPIES
            inbox.sealed.add(member=one, sealed=sealed[copy * size : (copy + 1) * size])
        return Pieces(own=inbox.SerializeToString())

    # --- answers -------------------------------------------------------------------------------------------------

    def check(self, plan: SumPlan, closed: Closed, step: Step, member: int, message: bytes) -> None:
        """Check a denoiser's message: that it parses, and names those only of whom it was told."""
        about = self._asked_about(plan, closed, step, member - len(plan.members))
        if step is Step.CONFIRM:
            opened = _read(wire.OpenedNoise, step, message)
            if not ascending(opened.failed, len(plan.members)) or not set(opened.failed) <= set(about):
                raise bad_message(
                    step, "members whose noise was not shown", "some of the briefing, ascending"
                )
            return
        sums = _read(wire.NoiseSums, step, message)
        groups = sorted({plan.denoisers.groups[one] for one in about})
        if not sums.refused and [one.group for one in sums.sums] != groups:
            raise bad_message(
                step, f"sums of groups {[one.group for one in sums.sums]}", f"sums of groups {groups}"
            )

    def shortfall(self, plan: SumPlan, closed: Closed, step: Step, arrived: Mapping[int, bytes]) -> str:
        """Return a reason when too few users submitted; denoisers that are silent have their groups withdrawn."""
        return super().shortfall(plan, closed, step, arrived) if step is Step.SUBMIT else ""

    def lacking(self, plan: SumPlan, present: Collection[int]) -> str:
        """Return a reason when those present cover too few users whose two denoisers are present; empty otherwise."""
        members = [member for member in present if member < len(plan.members)]
        reason = super().lacking(plan, members)
        if reason or not plan.noise_floor:
            return reason
        there = set(present)
        served = [
            member
            for member in members
            if all(
                plan.denoiser(place) in there
                for place in plan.denoisers.of_group(plan.denoisers.groups[member])
            )
        ]
        users, floor = users_of(plan, served), _floor(plan)
        return (
            ""
            if users >= floor
            else f"{users} users are present whose denoisers are, too; the floor is {floor}"
        )

    def _served(self, plan: SumPlan, closed: Closed) -> _Served:
        """Return the members whose noise is added up; computed once for a sum."""
        return once(closed, "served", lambda: _serve(plan, closed))

    def unmask(self, plan: SumPlan, closed: Closed, running: Any) -> Total:
        """Return the sum without noise, over the members that were not withdrawn.

        Raises
        ------
        Failed
            When too few users are left.
        """
        if not isinstance(running, KeptRound):
            return super().unmask(plan, closed, running)
        served = self._served(plan, closed)
        withdrawn = list(served.withdrawn)
        kept: set[int] = set()
        total = np.zeros(running.layout.size, np.int64)
        for group, members in enumerate(served.members):
            if not members:
                continue
            noise, reason = _noise_of(plan, closed, group, running.layout.size)
            if noise is None:
                withdrawn.append(f"{_counted(plan, members)}: {reason}")
                continue
            total -= noise
            kept.update(members)
        users, floor = users_of(plan, kept), _floor(plan)
        if users < floor:
            raise Failed(
                f"{users} users are left, the floor is {floor}; withdrawn: {'; '.join(withdrawn) or 'nobody'}"
            )
        for member, steps in running.arrived:
            if member in kept:
                total[steps.positions] += steps.values
        left_out = tuple(sorted(set(closed[Step.SUBMIT]) - kept))
        codes: NDArray[np.uint32] = total.astype(np.uint32) + running.layout.zeros(users)
        return Total(codes, left_out=left_out, withdrawn=tuple(withdrawn))


def _floor(plan: SumPlan) -> int:
    """Return the fewest users of a sum once members were withdrawn.

    Two thirds of a cohort, the floor of submitters, are a guard against a server that leaves members out to compare
    sums.  The server of a denoised sum sees contributions anyway, so training goes on with fewer.
    """
    return plan.min_sum if plan.purpose == _ASKS_ALL else plan.noise_floor


def _counted(plan: SumPlan, members: Collection[int]) -> str:
    users = users_of(plan, members)
    return f"{users} users" if users != 1 else "1 user"


def _serve(plan: SumPlan, closed: Closed) -> _Served:
    denoisers, answers = plan.denoisers, closed[Step.CONFIRM]
    opened: dict[int, wire.OpenedNoise] = {
        number: wire.OpenedNoise.FromString(message) for number, message in answers.items()
    }
    found, withdrawn = [], []
    for group in range(len(denoisers.ring)):
        members = [member for member in sorted(closed[Step.SUBMIT]) if denoisers.groups[member] == group]
        said = {place: opened.get(plan.denoiser(place)) for place in denoisers.of_group(group)}
        bad = [
            _silent(plan, place) if one is None else _refusing(plan, place, one.refused)
            for place, one in said.items()
            if one is None or one.refused
        ]
        if members and bad:
            withdrawn.append(f"{_counted(plan, members)}: {'; '.join(bad)}")
            members = []
        failed = {member for one in said.values() if one is not None for member in one.failed}
        if lost := [member for member in members if member in failed]:
            withdrawn.append(f"{_counted(plan, lost)}: their sealed noise does not open")
            members = [member for member in members if member not in failed]
        if members and (users := users_of(plan, members)) < plan.noise_floor:
            withdrawn.append(
                f"{_counted(plan, members)}: their group has {users} users, the floor is {plan.noise_floor}"
            )
            members = []
        found.append(tuple(members))
    return _Served(tuple(found), tuple(withdrawn))


def _silent(plan: SumPlan, place: int) -> str:
    return f"denoiser {plan.device_of(plan.denoiser(place))} said nothing"


def _refusing(plan: SumPlan, place: int, reason: str) -> str:
    return f"denoiser {plan.device_of(plan.denoiser(place))} refuses: {reason}"


def _noise_of(plan: SumPlan, closed: Closed, group: int, size: int) -> tuple[NDArray[np.int32] | None, str]:
    """Return the sum of a group's noise, int32 (size,); or None, and why it is not known."""
    found = []
    names = []
    for place in plan.denoisers.of_group(group):
        number = plan.denoiser(place)
        name = plan.device_of(number)
        message = closed[Step.UNMASK].get(number)
        if message is None:
            return None, _silent(plan, place)
        sums = wire.NoiseSums.FromString(message)
        if sums.refused:
            return None, _refusing(plan, place, sums.refused)
        steps = next(one.steps for one in sums.sums if one.group == group)
        if len(steps) != _STEP_BYTES * size:
            return None, f"denoiser {name} gave a sum of {len(steps)} bytes, expected {_STEP_BYTES * size}"
        found.append(steps)
        names.append(name)
    if found[0] != found[1]:
        return None, f"denoisers {names[0]} and {names[1]} gave different sums"
    return np.frombuffer(found[0], "<i4").astype(np.int32), ""


# --- a member's half -------------------------------------------------------------------------------------------------


class DenoisedMember:
    """A member's half of a denoised sum: seals its noise for its denoisers.

    Parameters
    ----------
    plan : SumPlan
        As this member was shown it.
    index : int
        Position of this member in the plan.
    identity : Identity
        Keys of this member.
    layout : Layout
        Layout of the contribution.
    bundles : mapping of bytes to Bundle
        Verified keys of the plan's denoisers that are enrolled and not revoked, by participant.
    """

    def __init__(
        self,
        plan: SumPlan,
        index: int,
        identity: Identity,
        layout: Layout,
        bundles: Mapping[bytes, Bundle],
    ) -> None:
        self._plan = plan
        self._index = index
        self._identity = identity
        self._layout = layout
        self._bundles = bundles

    @property
    def submitters(self) -> Collection[int]:
        """No members: denoisers answer for lists of submitters."""
        return ()

    def answer(self, step: Step, briefing: bytes, codes: NDArray[np.uint32] | None = None) -> bytes:
        """Return the contribution as the message of SUBMIT.

        Parameters
        ----------
        step : Step
        briefing : bytes
        codes : ndarray of uint32, shape (layout size,), or (2, layout size) in a sum with noise
            The contribution; in a sum with noise the second row is the noise in it, steps modulo 2^32.

        Raises
        ------
        Declined
            For any other step, or when a denoiser's keys are missing or not those of its connection.
        """
        if step is not Step.SUBMIT or codes is None:
            raise Declined(f"a member of a denoised sum has no step {step.value}")
        plan, size = self._plan, self._layout.size
        expected = (2, size) if plan.noise_floor else (size,)
        if codes.shape != expected:
            raise Declined(f"a contribution of shape {codes.shape}, expected {expected}")
        if not plan.noise_floor:
            return wire.SummedVector(codes=codes.astype("<u4", copy=False).tobytes()).SerializeToString()
        if reason := plan.denoisers.shortfall:
            raise Declined(reason)
        whole, noise = codes[0], codes[1].view(np.int32)
        users = plan.members[self._index].users
        try:
            packed = pack_noise(noise, int(np.count_nonzero(whole - self._layout.zeros(users))))
        except ValueError as error:
            raise Declined(str(error)) from None
        sealed = []
        for denoiser in plan.denoisers.of_member(self._index):
            bundle = self._bundle_of(denoiser)
            try:
                sealed.append(seal_noise(self._identity, bundle, plan.hash, packed))
            except VerificationError as error:
                raise Declined(error.message) from None
        return wire.SummedVector(
            codes=whole.astype("<u4", copy=False).tobytes(), noise=sealed
        ).SerializeToString()

    def _bundle_of(self, denoiser: int) -> Bundle:
        member = self._plan.members[denoiser]
        found = self._bundles.get(member.participant)
        if found is None:
            raise Declined(f"the keys of denoiser {member.device!r} are not in the directory, or revoked")
        try:
            found.require_party(member.device)
        except VerificationError as error:
            raise Declined(f"denoiser {member.device!r}: {error.message}") from None
        return found

    def forget(self) -> None:
        """Do nothing: keys are derived for each message, and kept nowhere."""


# --- a denoiser's half -----------------------------------------------------------------------------------------------


class Denoiser:
    """A denoiser's half of one sum: opens the noise of those that it serves, and adds it up.

    Parameters
    ----------
    plan : SumPlan
        As this denoiser was shown it.
    device : str
        Name of its connection.
    identity : Identity
        Keys of the plan's first member on this connection, for which noise is sealed.
    layout : Layout
        Layout of a contribution, as this denoiser computes it.
    bundles : mapping of bytes to Bundle
        Verified keys of members that are enrolled and not revoked, by participant.

    Raises
    ------
    Declined
        When the plan has no noise, or this connection does not denoise in it.
    """

    def __init__(
        self,
        plan: SumPlan,
        device: str,
        identity: Identity,
        layout: Layout,
        bundles: Mapping[bytes, Bundle],
    ) -> None:
        place = plan.denoisers.place_of(device) if plan.noise_floor else None
        if place is None:
            raise Declined("the plan does not name this connection as a denoiser")
        if plan.members[plan.denoisers.ring[place]].participant != identity.participant_id:
            raise Declined("the plan's noise is sealed for another participant's keys")
        self._plan = plan
        self._identity = identity
        self._layout = layout
        self._bundles = bundles
        self._serves = plan.denoisers.served_by(place)
        self._opened: dict[int, SparseSteps] = {}

    def confirm(self, briefing: bytes) -> bytes:
        """Open the noise of submitters; return whose noise does not open, for CONFIRM.

        Raises
        ------
        Declined
            When the briefing is no ``NoiseInbox``, or names anybody whom this denoiser does not serve, or one twice.
        """
        inbox = _briefing(wire.NoiseInbox, briefing)
        self._require_served([one.member for one in inbox.sealed])
        self._opened, failed = {}, []
        for one in inbox.sealed:
            noise = self._open(one.member, one.sealed)
            if noise is None:
                failed.append(one.member)
            else:
                self._opened[one.member] = noise
        return wire.OpenedNoise(failed=failed).SerializeToString()

    def _open(self, member: int, sealed: bytes) -> SparseSteps | None:
        named = self._plan.members[member]
        bundle = self._bundles.get(named.participant)
        if bundle is None or bundle.party != named.device:
            return None
        try:
            packed = open_noise(self._identity, bundle, self._plan.hash, sealed)
            return unpack_noise(packed, self._layout, named.users)
        except (VerificationError, ValueError):
            return None

    def listed(self, briefing: bytes) -> tuple[int, ...]:
        """Return the members whose noise is asked for in UNMASK, after checking that it may be added up.

        Raises
        ------
        Declined
            When the briefing is no ``NoiseTask``, when it names anybody whom this denoiser does not serve or whose
            noise it has not opened, or one twice, or when a group has fewer users than the plan's floor.
        """
        members = tuple(_briefing(wire.NoiseTask, briefing).members)
        self._require_served(members)
        unopened = [member for member in members if member not in self._opened]
        if unopened:
            raise Declined(f"is asked for the noise of {len(unopened)} members that it has not opened")
        for group, own in self._by_group(members).items():
            users = users_of(self._plan, own)
            if users < self._plan.noise_floor:
                raise Declined(
                    f"is asked for the noise of {users} users of group {group}; the floor is {self._plan.noise_floor}"
                )
        return members

    def reveal(self, members: Collection[int]) -> bytes:
        """Return the sum of the noise of members from `listed`, for UNMASK."""
        message = wire.NoiseSums()
        for group, own in sorted(self._by_group(members).items()):
            total = np.zeros(self._layout.size, np.int64)
            for member in own:
                steps = self._opened[member]
                total[steps.positions] += steps.values
            message.sums.add(group=group, steps=total.astype("<i4").tobytes())
        return message.SerializeToString()

    def _by_group(self, members: Collection[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for member in members:
            found.setdefault(self._plan.denoisers.groups[member], []).append(member)
        return found

    def _require_served(self, members: Collection[int]) -> None:
        positions = list(members)
        if not positions or not ascending(positions, len(self._plan.members)):
            raise Declined("the list of members does not ascend within the cohort")
        strangers = [one for one in positions if self._plan.denoisers.groups[one] not in self._serves]
        if strangers:
            raise Declined(f"is asked for the noise of {len(strangers)} members that it does not serve")


def _packed_bytes(size: int, room: int) -> int:
    return -(-size // 8) + _STEP_BYTES * room


def _read(kind: type[_MessageT], step: Step, message: bytes) -> _MessageT:
    name = kind.DESCRIPTOR.name
    try:
        return kind.FromString(message)
    except DecodeError:
        raise bad_message(step, f"the payload is no {name}", f"a serialised {name}") from None


def _briefing(kind: type[_MessageT], briefing: bytes) -> _MessageT:
    try:
        return kind.FromString(briefing)
    except DecodeError:
        raise Declined(f"was told what is no {kind.DESCRIPTOR.name}") from None
