"""The sum in progress at the COS: the tasks, plan and briefings that parties get, and the report to watchers."""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from coterie.rounds.server_round import RoundState, SumPhase
from coterie.rounds.standing import Standing, agreed
from coterie.rounds.training import Training
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Step
from coterie.secure_sum.steps import TASK_STEP
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef, SlotRange
from coterie_cos.participants import ranges

__all__ = ["OpenSum"]

_FORMING = {
    "denoised": "take noise out",
    "masked": "unmask sum",
    "encrypted": "verify decryption",
    "shared-key": "compare models",
}
"""The phase in which a sum is formed, by secure sum."""

_BRIEFINGS_BYTES = 1 << 18
"""Most bytes of briefings in one answer; a party fetches the rest in another call.  Bounded because briefings are
copied several times on their way to the network."""
_OWN_BYTES = 1 << 17
"""Most bytes of members' own parts in one answer.  Lower, because parts that members share are best sent once for many
members."""


@dataclass
class OpenSum:
    """The sum in progress, with counters for the event that reports it.

    ``slots`` are the slots that each member covers, in the order of the plan.
    """

    state: RoundState
    slots: Mapping[int, Sequence[int]]
    durable: Step | None = None
    """The last step whose opening is durable: members are asked for no other step."""
    refused: int = 0
    bytes_in: int = 0
    wrong: tuple[int, ...] = ()
    dropped_places: int = 0
    left_out: tuple[int, ...] = ()
    """Members whose contributions a robust rule left out, or that were withdrawn."""
    withdrawn: tuple[str, ...] = ()
    """Why members of a denoised sum were withdrawn."""
    standings: dict[str, Standing] = field(default_factory=dict)
    """Where parties stand that declined because they are further than this server."""
    marks: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Find a member by its lowest slot: a host may cover very many slots.
        plan = self.state.plan
        members = len(plan.members)
        self.member_of = {min(own): member for member, own in self.slots.items() if member < members}
        # A key holder is asked under several numbers; its slot leads to the number of its own part.
        for holder in range(len(plan.holders)):
            number = plan.respondent(holder, holder)
            if number in self.slots:
                self.member_of[self.slots[number][0]] = number
        self.by_party = plan.by_device
        self._named: dict[str, tuple[list[int], list[SlotRange]]] = {}
        self._told: tuple[SumPlan, bytes] | None = None

    def mark(self) -> None:
        """Note the time at which a phase begins."""
        name = self.phase
        if not self.marks or self.marks[-1][0] != name:
            self.marks.append((name, time.monotonic()))

    @property
    def silent(self) -> list[str]:
        """Parties with members that have neither answered the open step, or the last one, nor declined."""
        state = self.state
        due = state.expected.difference(state.answered, state.declined)
        return [party for party, numbers in self.by_party.items() if not due.isdisjoint(numbers)]

    @property
    def phase(self) -> str:
        """Name of the phase: a step, how the sum is formed, or that it is applied."""
        state = self.state
        if state.phase is SumPhase.COLLECT:
            return state.step.value
        if state.phase is SumPhase.UNMASK:
            return _FORMING.get(state.plan.secure_sum, "form sum")
        return f"{state.phase.value} sum"

    def seconds(self) -> dict[str, float]:
        """Return how long each phase took."""
        ends = [at for _, at in self.marks[1:]] + [time.monotonic()]
        return {name: end - at for (name, at), end in zip(self.marks, ends, strict=True)}

    # --- what parties ask --------------------------------------------------------------------------------------

    def tasks(self, party: str, version: int, best: int) -> list[wire.Task]:
        """Return the open step's tasks for a party; ``version`` is the model's, ``best`` the best version so far."""
        state = self.state
        if party not in self.by_party or state.step is not self.durable:
            return []
        named = self._ranges_of(party, [member for member in self.by_party[party] if state.asks(member)])
        if not named:
            return []
        return [
            wire.Task(
                kind=wire.TaskKind.TASK_KIND_ROUND,
                round=RoundRef(run_id=state.plan.run_id, round=state.plan.round),
                version=version,
                slots=named,
                step=TASK_STEP[state.step],
                best=best,
            )
        ]

    def in_progress_at(self, place: Training) -> bool:
        """Return whether this is the sum of a state, and not over yet."""
        plan = self.state.plan
        return not self.state.phase.ended and (plan.purpose, plan.pass_number, plan.part) == (
            place.purpose.value,
            place.pass_number,
            place.part,
        )

    def needs(self, party: str) -> bool:
        """Return whether a party is asked for something now, or may be asked in a later step."""
        state = self.state
        members = [one for one in self.by_party.get(party, ()) if one not in state.declined]
        if not members or state.phase is not SumPhase.COLLECT:
            return False
        later = state.step is not state.half.steps[-1]
        return any(one in state.expected and (later or one not in state.arrived) for one in members)

    def _ranges_of(self, party: str, members: list[int]) -> list[SlotRange]:
        """Return the slots of some members of a party as ranges, remembered until the party is asked for others.

        A host polls several times in each step, and one member may have hundreds of thousands of slots.
        """
        known = self._named.get(party)
        if known is None or known[0] != members:
            slots = {slot for member in members for slot in self.slots.get(member, ())}
            known = self._named[party] = members, ranges(sorted(slots))
        return known[1]

    def briefings(self, party: str, request: wire.FetchRequest) -> bytes:
        """Return the briefings of a party's members for the open step, from one member on, up to a number of bytes.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when the step is not open.
        """
        state = self.state
        if TASK_STEP[state.step] != request.step or state.step is not self.durable:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                "the step is not open",
                field="step",
                expected=wire.RoundStep.Name(TASK_STEP[state.step]),
            )
        told: list[tuple[int, bytes, array[int]]] = []
        parts: list[bytes] = []
        named: dict[int, int] = {}
        size = own = following = 0
        for member in self.by_party.get(party, []):
            if member < request.first or not state.asks(member):
                continue
            if own >= _OWN_BYTES or own + size >= _BRIEFINGS_BYTES:
                following = member
                break
            pieces = state.pieces(member)
            own += len(pieces.own)
            for piece in pieces.shared:
                # Shared pieces are the same object for all members, alive as long as the step is open.
                if id(piece) not in named:
                    named[id(piece)] = len(named)
                    parts.append(piece)
                    size += len(piece)
            told.append((member, pieces.own, array("I", (named[id(piece)] for piece in pieces.shared))))
        if all(of == told[0][2] for _, _, of in told):
            told = [(member, payload, array("I")) for member, payload, _ in told]
            rest = wire.Briefings(common=b"".join(parts), next=following)
        else:
            rest = wire.Briefings(parts=parts, next=following)
        # Join serialised parts of the message: a whole one would be in memory three times while it is written.
        written = [
            wire.Briefings(
                briefings=[wire.Briefing(member=member, payload=payload, of=of)]
            ).SerializeToString(deterministic=True)
            for member, payload, of in told
        ]
        return b"".join([*written, rest.SerializeToString(deterministic=True)])

    def plan(self) -> bytes:
        """Return the serialised plan, made once: every device of a large sum fetches it."""
        plan = self.state.plan
        if self._told is None or self._told[0] is not plan:
            self._told = plan, plan.to_wire().SerializeToString(deterministic=True)
        return self._told[1]

    def member_with(self, slots: Sequence[int]) -> int:
        """Return the member that covers exactly these slots.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT when there is none.
        """
        member = self.member_of.get(min(slots)) if slots else None
        if member is None or sorted(self.slots[member]) != sorted(slots):
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                "these slots are not those of one member of the round",
                field="slots",
                expected="all the slots that one member covers",
            )
        return member

    def members_within(self, slots: set[int]) -> frozenset[int]:
        """Return the members whose slots are all among these.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT when there is none.
        """
        plan = self.state.plan
        members = frozenset(
            member
            for member, own in self.slots.items()
            # A denoiser has the slot of a member, and says by a message of its own that it refuses.
            if (member < len(plan.members) or plan.holders)
            and not slots.isdisjoint(own)
            and slots.issuperset(own)
        )
        if not members:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                "these slots cover no member of the round",
                field="slots",
                expected="all the slots that one member covers, or several do",
            )
        return members

    def declined(self, members: Collection[int], payload: bytes) -> None:
        """Note where the party of declining members says that it stands, if it does.

        Raises
        ------
        Refusal
            When the payload is no such message.
        """
        if payload:
            standing = Standing.from_bytes(payload)
            self.standings.update({self.state.plan.device_of(member): standing for member in members})

    @property
    def ahead(self) -> Standing:
        """Where most parties of the members stand at least, or most key holders, as far as they are further."""
        plan = self.state.plan
        found = Standing()
        for devices in (set(plan.devices), {one.device for one in plan.holders}):
            said = [standing for device, standing in self.standings.items() if device in devices]
            if said:
                found = found.furthest(agreed(said, len(devices)))
        return found

    # --- watching ----------------------------------------------------------------------------------------------

    def event(self, users: int, version: int, reason: str) -> operator.RoundEvent:
        """Build the event that reports the sum once it is over; ``users`` are those in it."""
        plan, seconds = self.state.plan, self.seconds()
        others = plan.holders or plan.secure_sum == "denoised"
        return operator.RoundEvent(
            round=plan.round,
            purpose=plan.purpose,
            pass_number=plan.pass_number,
            users=plan.users,
            members=len(plan.members),
            summed=users,
            dropped=len(plan.members) - len(self.state.submitters if others else self.state.answered),
            refused=self.refused,
            reason=reason,
            phases=list(seconds),
            seconds=list(seconds.values()),
            bytes_in=self.bytes_in,
            version=version,
            liars=len(self.wrong),
            dropped_places=self.dropped_places,
            left_out=len(self.left_out),
            withdrawn=self.withdrawn,
        )

    def progress(self) -> operator.RoundProgress:
        """Return how far the sum is."""
        state, plan = self.state, self.state.plan
        # After the first step of an encrypted sum, key holders are asked, each under several numbers; after that of a
        # denoised sum, denoisers.
        holding = bool(plan.holders) and state.step is not Step.SUBMIT
        denoising = plan.noise_floor > 0 and state.step is not Step.SUBMIT
        asked = len(plan.holders) if holding else len(plan.denoisers.ring if denoising else plan.members)
        heard, awaited = (
            {plan.asked_of(number)[0] for number in numbers} if holding else set(numbers)
            for numbers in (state.arrived, state.expected.difference(state.lost, state.declined))
        )
        return operator.RoundProgress(
            round=plan.round,
            purpose=plan.purpose,
            phase=self.phase,
            members=asked,
            answered=len(heard),
            dropped=asked - len(heard | awaited),
        )
