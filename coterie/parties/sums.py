"""A party's members in the sums of a run: answers their tasks through `coterie.rounds.member_round`.

Each participant of the party has a `Seat`, which checks the plans of sums, makes the contributions and stores the
journal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.verified import Verified
from coterie.parties.party import Item, Party
from coterie.parties.sum_tasks import SumTasks
from coterie.rounds.member_round import Decline, Effect, Journal, Keep, MemberRound, Send, SitOut, Train
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined, Step
from coterie.secure_sum.registry import Signer, member_half
from coterie.secure_sum.steps import DECLINED, KIND_OF, TASK_STEP
from coterie.wire.v1 import orchestrator_pb2 as wire

__all__ = ["Seat", "SumMembers", "Trained"]

_log = structlog.get_logger("coterie.sums")

Trained = Callable[[NDArray[np.uint32]], Journal | None]
"""Takes a contribution's codes; returns the journal to store before it is sent, or None when it is not sent."""


class Seat(Protocol):
    """The interface of a participant of this party as a member of sums."""

    identity: Identity
    bundle: Bundle
    slots: Sequence[int]
    """Slots of the users that the member covers."""

    def journal(self) -> Journal:
        """Return the journal as it stands on disk."""
        ...

    async def accept(self, plan: SumPlan, member: int) -> None:
        """Check the plan of a sum in which this participant is member ``member``.

        Raises
        ------
        Declined
            When the participant did not agree to such a sum.
        """
        ...

    async def contribute(self, plan: SumPlan, trained: Trained) -> None:
        """Make the contribution, pass its codes to ``trained``, and store durably the journal that it returns.

        Raises
        ------
        Declined
            When no contribution can be made.
        """
        ...

    async def keep(self, journal: Journal) -> None:
        """Store a journal durably."""
        ...

    async def left(self, plan: SumPlan, step: Step, size: int) -> None:
        """Record that ``size`` bytes are sent for a step."""
        ...

    async def sat_out(self, plan: SumPlan, reason: str) -> None:
        """Record that the member takes no further part, and why."""
        ...


@dataclass
class _Open:
    """The sum in progress: its plan, and this party's members in it, by position."""

    plan: SumPlan
    rounds: dict[int, MemberRound] = field(default_factory=dict)
    seats: dict[int, Seat] = field(default_factory=dict)
    taken: dict[tuple[int, Step], float] = field(default_factory=dict)
    """Time at which the COS took each message, ``time.monotonic`` seconds."""
    declined_at: float = -1.0
    """Time at which the COS last took a message that slots decline, ``time.monotonic`` seconds."""


class SumMembers(SumTasks):
    """The members of a party in the sums of a run: carries out the effects of each member's machine.

    Parameters
    ----------
    party : Party
        The registered party.
    device : str
        Name of the connection, as plans name it.
    seats : sequence of Seat
    directory_key : bytes
        The directory's public key.
    """

    def __init__(self, party: Party, device: str, seats: Sequence[Seat], directory_key: bytes) -> None:
        super().__init__(party)
        self._device = device
        self._seats = seats
        self._directory_key = directory_key
        self._verified = Verified()
        self._open: _Open | None = None
        self._number = 0

    async def run(self) -> None:
        """Answer tasks until `finish`, then close the sum in progress."""
        await super().run()
        await self._leave()

    async def _asked(self, task: wire.Task, step: Step, asked_at: float) -> None:
        number = task.round.round
        if number < self._number:
            return
        if number > self._number:
            await self._leave()
            self._open = await self._begin(number)
            self._number = number
        current = self._open
        if current is None:
            return
        slots = {slot for part in task.slots for slot in range(part.first, part.first + part.count)}
        asked = [
            member
            for member, seat in current.seats.items()
            if seat.slots[0] in slots and current.taken.get((member, step), -1.0) < asked_at
        ]
        if asked:
            await self._answer(current, step, asked)
        active = {
            slot
            for member, seat in current.seats.items()
            if not current.rounds[member].reason
            for slot in seat.slots
        }
        passive = slots.intersection(self._party.slots) - active
        if passive and current.declined_at < asked_at:
            # Decline for these slots, so that the round does not wait for them.
            await self._submit(current.plan.round, step, [Item(DECLINED, sorted(passive), b"")])
            current.declined_at = time.monotonic()

    async def _leave(self) -> None:
        current, self._open = self._open, None
        if current is None:
            return
        for member, one in current.rounds.items():
            for effect in one.close():
                if isinstance(effect, Keep):
                    await current.seats[member].keep(effect.journal)

    async def _begin(self, number: int) -> _Open:
        plan = await self._sum_plan(number)
        current = _Open(plan)
        by_participant = {seat.identity.participant_id: seat for seat in self._seats}
        for member, one in enumerate(plan.members):
            seat = by_participant.get(one.participant)
            if seat is None:
                continue
            try:
                if one.device != self._device or plan.run_id != self._party.plan.run_id:
                    raise Declined("the plan names another run, or another connection for this member")
                if plan.secure_sum != self._party.plan.secure_sum:
                    raise Declined(
                        f"a sum {plan.secure_sum!r}; the run's plan says {self._party.plan.secure_sum!r}"
                    )
                await seat.accept(plan, member)
            except Declined as declined:
                await self._sat_out(seat, plan, str(declined))
                continue
            signer = Signer(seat.identity, seat.bundle, self._directory_key, int(time.time()), self._verified)
            member_round = MemberRound(plan, seat.journal(), partial(member_half, plan, member, signer))
            if member_round.reason:
                await self._sat_out(seat, plan, member_round.reason)
                continue
            current.rounds[member], current.seats[member] = member_round, seat
        return current

    async def _answer(self, current: _Open, step: Step, members: Sequence[int]) -> None:
        briefings = await self._briefings(step)
        items: list[tuple[int, Item]] = []
        for member in members:
            one = current.rounds[member]
            effects = await asyncio.to_thread(one.asked, step, briefings.get(member, b""))
            for effect in await self._carry_out(current, member, effects):
                items.append(
                    (member, Item(KIND_OF[effect.step], current.seats[member].slots, effect.message))
                )
                await current.seats[member].left(current.plan, effect.step, len(effect.message))
        if not items:
            return
        await self._submit(current.plan.round, step, [item for _, item in items])
        now = time.monotonic()
        for member, _ in items:
            current.taken[member, step] = now

    async def _carry_out(self, current: _Open, member: int, effects: Sequence[Effect]) -> list[Send]:
        """Carry out a member's effects in order; return what is to be sent."""
        one, seat = current.rounds[member], current.seats[member]
        sends: list[Send] = []
        for effect in effects:
            match effect:
                case Keep(journal):
                    await seat.keep(journal)
                case Train():
                    sends += await self._train(current, member)
                case Send():
                    sends.append(effect)
                case SitOut(reason):
                    await self._sat_out(seat, current.plan, reason)
                case Decline():
                    # `_asked` declines for all such members after the step.
                    pass
        return [] if one.reason else sends

    async def _train(self, current: _Open, member: int) -> list[Send]:
        one, seat = current.rounds[member], current.seats[member]
        made: list[Effect] = []

        def trained(codes: NDArray[np.uint32]) -> Journal | None:
            made.extend(one.trained(codes))
            return next((effect.journal for effect in made if isinstance(effect, Keep)), None)

        try:
            await seat.contribute(current.plan, trained)
        except Declined as declined:
            made = one.failed(str(declined))
        for effect in made:
            if isinstance(effect, SitOut):
                await self._sat_out(seat, current.plan, effect.reason)
        return [effect for effect in made if isinstance(effect, Send)]

    async def _sat_out(self, seat: Seat, plan: SumPlan, reason: str) -> None:
        _log.warning("sits out", round=plan.round, purpose=plan.purpose, reason=reason)
        await seat.sat_out(plan, reason)

    async def _briefings(self, step: Step) -> dict[int, bytes]:
        if self._party.plan.secure_sum == "clear" or step is Step.ADVERTISE:
            return {}
        return await self._party.briefings(self._number, TASK_STEP[step])
