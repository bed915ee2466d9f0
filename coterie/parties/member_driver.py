"""Drive a party's members through the sums of a run, with `coterie.rounds.member_round` as their state machine.

All members that a task asks are answered together.  Their journals are durable, in one transaction, before their
messages leave in one stream; contributions are made, stored and sent in batches of limited size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
import structlog

from coterie.errors import PeerError, StoreError
from coterie.parties.party import Item, Party
from coterie.parties.sum_party import (
    AcceptedSum,
    Contributed,
    Leaving,
    SatOut,
    Seat,
    SumParty,
    SumRecords,
    Withheld,
)
from coterie.parties.sum_tasks import SumInProgress, SumTasks
from coterie.rounds.ledger import Entry
from coterie.rounds.member_round import Decline, Effect, Journal, Keep, MemberRound, Send, SitOut, Train
from coterie.rounds.standing import Standing
from coterie.secure_sum.contribution import UnboundedValueError
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined, Step
from coterie.secure_sum.registry import member_half
from coterie.secure_sum.steps import DECLINED, KIND_OF, TASK_STEP
from coterie.telemetry.audit_log import record
from coterie.wire.v1 import orchestrator_pb2 as wire

__all__ = ["MemberDriver"]

_log = structlog.get_logger("coterie.sums")

T = TypeVar("T")

_ACTIVITIES = {
    Step.ADVERTISE: "round keys",
    Step.SHARE: "shares",
    Step.CONFIRM: "signatures",
    Step.UNMASK: "shares",
}
"""CPU-account label for answering each step, where it is not the general one."""

_HIDING = {"masked": "masks", "encrypted": "encryption", "shared-key": "encryption"}
"""CPU-account label for protecting contributions before they leave, by secure sum."""

_BRIEFED = ("masked",)
"""Secure sums in which the COS briefs members for the steps after the first."""

_BATCH_BYTES = 32 << 20
"""Contributions that are stored and sent together, bytes."""

_AT_ONCE = 64
"""Most members that take note of a step without a thread."""
_FEW_PAIRS = 4
"""Most pairs of a member and a neighbour for which masked members answer a step without a thread.

A pair costs the loop some 0.4 ms in the step with most work, for an agreement and three signatures; a thread costs
about as much for each step.
"""
_FEW_SLOTS = 1024
"""Most slots that are compared in sets; more are in arrays."""

CountedActivity = Callable[[str, int], AbstractContextManager[None]]
"""Context manager that counts the process's CPU time as that of the named activity on so many members."""

Answers = Sequence[tuple[int, Sequence[Effect]]]
"""Members' answers to a step: position in the plan, and effects to carry out."""


@dataclass
class _Sum(SumInProgress, Generic[T]):
    """The sum in progress, with the state machine of each of the party's members that takes part."""

    accepted: AcceptedSum[T] | None = None
    """None when the party takes no part."""
    machines: dict[int, MemberRound] = field(default_factory=dict)
    slots: dict[int, Sequence[int]] = field(default_factory=dict)
    ahead: list[Journal] = field(default_factory=list)
    """Journals of members that take no part because they are further than the server."""
    joined: set[int] = field(default_factory=set)
    """Members whose join of the sum is in the records already."""
    named: set[tuple[int, Step]] = field(default_factory=set)
    """Messages that the records of what leaves name already."""

    def participant(self, member: int) -> bytes:
        """Return the participant id of a member."""
        return self.plan.members[member].participant

    def passive(self, slots: Collection[int]) -> list[int]:
        """Return which of these slots take no part, ascending."""
        active = (self.slots[member] for member, machine in self.machines.items() if not machine.reason)
        if len(slots) <= _FEW_SLOTS:
            return sorted(set(slots).difference(*active))
        of_active = np.fromiter(chain.from_iterable(active), np.int64)
        found: list[int] = np.setdiff1d(np.fromiter(slots, np.int64), of_active).tolist()
        return found


@dataclass
class _Batch(Generic[T]):
    """Contributions that are stored and sent together."""

    answers: list[tuple[int, list[Effect]]] = field(default_factory=list)
    beside: dict[int, T] = field(default_factory=dict)
    """State to be stored with each member's contribution."""
    size: int = 0
    """Bytes of the contributions' codes."""


class MemberDriver(SumTasks[_Sum[T]], Generic[T]):
    """The loop over the tasks of sums for a party's members.

    Parameters
    ----------
    party : Party
        The registered party.
    members : SumParty
        The party's members: which sums they accept, their contributions and their store.
    activity : callable
        Counts CPU time, and members, by activity.
    attached : sequence of FetchKind
        Kinds of payload, besides plans and briefings, that the COS attaches to tasks.
    """

    def __init__(
        self,
        party: Party,
        members: SumParty[T],
        activity: CountedActivity,
        attached: Sequence[wire.FetchKind.ValueType] = (),
    ) -> None:
        super().__init__(party)
        self._members = members
        self._activity = activity
        self._briefed = party.plan.secure_sum in _BRIEFED
        kinds = wire.FetchKind
        briefings = (kinds.FETCH_KIND_BRIEFINGS,) if self._briefed else ()
        self.attached = (kinds.FETCH_KIND_SUM_PLAN, *attached, *briefings)
        # To be stored before the next message leaves.
        self._revealed: tuple[int, Entry] | None = None
        self._records = SumRecords[T]()

    async def run(self) -> None:
        """Answer tasks until `finish`, then close the sum in progress."""
        await super().run()
        self._leave()
        async with self._members.undisturbed():
            await self._keep()

    def _answered(self) -> None:
        self._party.idle()

    # --- sums, one after the other ---------------------------------------------------------------------------------

    async def _answer(self, current: _Sum[T], task: wire.Task, step: Step, asked_at: float) -> None:
        first = [current.slots[member][0] for member in current.machines]
        own, waited_for = self._asked_of(task, first)
        members = [
            member
            for member, is_asked in zip(current.machines, own, strict=True)
            if is_asked and not current.took(member, step, asked_at)
        ]
        if current.took_declining(asked_at):
            waited_for = []
        if members:
            await self._answer_for(current, step, members, waited_for)
        if not current.took_declining(asked_at):
            await self._hand_in(current, step, (), current.passive(waited_for), last=True)

    def _asked_of(self, task: wire.Task, first: Sequence[int]) -> tuple[list[bool], list[int]]:
        """Return which of some slots a task names, and which of the party's slots it names, ascending."""
        own = self._party.slots
        if max(len(own), sum(part.count for part in task.slots)) <= _FEW_SLOTS:
            asked = {slot for part in task.slots for slot in range(part.first, part.first + part.count)}
            return [slot in asked for slot in first], sorted(asked.intersection(own))
        # In arrays: a host may have very many users.
        slots = [np.arange(part.first, part.first + part.count) for part in task.slots]
        whole = np.concatenate([np.empty(0, np.int64), *slots])
        waited_for: list[int] = np.intersect1d(whole, own).tolist()
        return np.isin(first, whole).tolist(), waited_for

    def _leave(self) -> None:
        """Close the sum in progress; its members' journals are stored with the next records."""
        current = self._sum
        super()._leave()
        if current is None:
            return
        for member, machine in current.machines.items():
            for effect in machine.close():
                if isinstance(effect, Keep):
                    self._records.journals[current.participant(member)] = effect.journal

    async def _begin(self, plan: SumPlan, version: int) -> _Sum[T]:
        current = _Sum[T](plan)
        try:
            current.accepted = await self._members.accept(plan, version)
        except Declined as declined:
            self._sits_out(plan, b"", str(declined))
        else:
            for member, seat in current.accepted.seats.items():
                self._admit(current, member, seat)
        if self._records.sat_out:
            async with self._members.undisturbed():
                await self._keep()
        return current

    def _admit(self, current: _Sum[T], member: int, seat: Seat) -> None:
        """Let a member take part, unless its journal or its party forbids it."""
        participant = current.participant(member)
        journal = self._records.journals.get(participant, seat.journal)
        machine = MemberRound(
            current.plan,
            journal,
            partial(member_half, current.plan, member, seat.signer),
            once=self._party.plan.rounds.HasField("privacy"),
        )
        objections = [machine.reason] if machine.reason else seat.objections
        if machine.ahead:
            current.ahead.append(journal)
        for reason in objections:
            self._sits_out(current.plan, participant, reason)
        if objections:
            return
        if journal.joined == current.plan.round:
            # Its contribution was sent, or about to be, before a restart.
            current.joined.add(member)
            current.named.add((member, Step.SUBMIT))
        current.machines[member], current.slots[member] = machine, seat.slots

    def _sits_out(self, plan: SumPlan, participant: bytes, reason: str) -> None:
        _log.warning(
            "sits out", round=plan.round, purpose=plan.purpose, member=participant.hex()[:16], reason=reason
        )
        self._records.sat_out.append(SatOut(participant, reason))

    # --- one step --------------------------------------------------------------------------------------------------

    async def _answer_for(
        self, current: _Sum[T], step: Step, members: Sequence[int], waited_for: Collection[int]
    ) -> None:
        """Answer a step for some members; the last messages also decline for slots that take no part."""
        answers = await self._ask(current, step, members)
        training = [member for member, effects in answers if any(isinstance(one, Train) for one in effects)]
        async with self._members.undisturbed():
            sends = await self._store(current, answers, {})
        last = not training
        await self._hand_in(current, step, sends, current.passive(waited_for) if last else (), last=last)
        if training and current.accepted is not None:
            await self._contribute(current, current.accepted, training, waited_for)

    async def _ask(self, current: _Sum[T], step: Step, members: Sequence[int]) -> Answers:
        briefings: Mapping[int, bytes] = {}
        if self._briefed and step is not Step.ADVERTISE:
            briefings = await self._party.briefings(current.plan.round, TASK_STEP[step])

        def ask() -> Answers:
            with self._activity(_ACTIVITIES.get(step, "rounds"), len(members)):
                return [
                    (member, current.machines[member].asked(step, briefings.get(member, b"")))
                    for member in members
                ]

        return ask() if _is_short(current.plan, len(members)) else await asyncio.to_thread(ask)

    async def _contribute(
        self,
        current: _Sum[T],
        accepted: AcceptedSum[T],
        members: Sequence[int],
        waited_for: Collection[int],
    ) -> None:
        """Make the contributions of some members; store and send them batch by batch."""
        left = set(members)
        made = accepted.contributions(members)
        failure: PeerError | None = None
        while left:
            async with self._members.undisturbed():
                batch = await asyncio.to_thread(self._next_batch, current, made, left)
                if not left:
                    await accepted.conclude(members)
                sends = await self._store(current, batch.answers, batch.beside)
            last = not left
            passive = current.passive(waited_for) if last else []
            sending = self._hand_in(current, Step.SUBMIT, sends, passive, last=last)
            saving = accepted.save([member for member, _ in batch.answers])
            # Later contributions may overwrite the journal, from which the state is restored otherwise.
            failed, lost = await asyncio.gather(sending, saving, return_exceptions=True)
            if lost is not None:
                raise lost
            if isinstance(failed, PeerError):
                # Go on storing the others, so that they can be sent when the COS can be reached again.
                failure = failed
            elif failed is not None:
                raise failed
        if failure is not None:
            raise failure

    def _next_batch(
        self, current: _Sum[T], made: Iterator[Contributed[T] | Withheld], left: set[int]
    ) -> _Batch[T]:
        """Return the next contributions as a batch, and remove their members from ``left``.

        Members that are left when the local step ends or fails sit out.
        """
        batch = _Batch[T]()
        while batch.size < _BATCH_BYTES:
            try:
                one = _next(current.plan, made)
            except Declined as declined:
                reason = str(declined)
                batch.answers += [
                    (member, current.machines[member].failed(reason)) for member in sorted(left)
                ]
                left.clear()
                break
            machine = current.machines[one.member]
            if isinstance(one, Withheld):
                batch.answers.append((one.member, machine.failed(one.reason)))
            else:
                with self._activity(_HIDING.get(current.plan.secure_sum, "rounds"), 1):
                    batch.answers.append((one.member, machine.trained(one.codes)))
                batch.beside[one.member] = one.beside
                batch.size += one.codes.nbytes
            left.discard(one.member)
        return batch

    # --- stored first, then sent -----------------------------------------------------------------------------------

    async def _store(
        self, current: _Sum[T], answers: Answers, beside: Mapping[int, T]
    ) -> list[tuple[int, Send]]:
        """Make the journals of answers durable, in one transaction; return what is to be sent."""
        sends: list[tuple[int, Send]] = []
        for member, effects in answers:
            participant = current.participant(member)
            for effect in effects:
                match effect:
                    case Keep(journal):
                        self._records.journals[participant] = journal
                        self._note_revealed(current, journal)
                        self._join(current, member)
                        if member in beside:
                            self._records.beside[participant] = beside[member]
                    case Send():
                        sends.append((member, effect))
                    case SitOut(reason):
                        self._sits_out(current.plan, participant, reason)
                    case Train() | Decline():
                        # `_answer_for` trains, and declines for all such members with the last messages of the step.
                        pass
        self._name(current, sends)
        if (sends and self._records.journals) or self._records.sat_out:
            # A member that is only asked to train is journalled with its contribution: before that nothing leaves.
            await self._keep()
        return sends

    def _note_revealed(self, current: _Sum[T], journal: Journal) -> None:
        """Put the sum that a member helps to reveal into the audit log, once for all members of the party."""
        last = journal.ledger.last(current.plan.purpose)
        here = (current.plan.pass_number, current.plan.part)
        if last is not None and last.place == here and (current.plan.round, last) != self._revealed:
            self._revealed = current.plan.round, last
            record("reveal", round=current.plan.round, **last.told())

    def _join(self, current: _Sum[T], member: int) -> None:
        """Name the users of a member in the records, once: with its first journal it joins the sum."""
        if member not in current.joined:
            current.joined.add(member)
            self._records.joining += current.slots[member]

    def _name(self, current: _Sum[T], sends: Sequence[tuple[int, Send]]) -> None:
        """Name messages in the records, each once."""
        for member, send in sends:
            if (member, send.step) in current.named:
                continue
            current.named.add((member, send.step))
            leaving = Leaving(current.participant(member), current.plan.purpose, send.step, len(send.message))
            self._records.leaving.append(leaving)

    async def _keep(self) -> None:
        records, self._records = self._records, SumRecords[T]()
        if records:
            await self._members.keep(records)

    async def _hand_in(
        self,
        current: _Sum[T],
        step: Step,
        sends: Sequence[tuple[int, Send]],
        passive: Sequence[int],
        *,
        last: bool,
    ) -> None:
        """Send messages in one stream, and decline for slots that take no part."""
        items = [Item(KIND_OF[send.step], current.slots[member], send.message) for member, send in sends]
        if passive:
            standing = Standing.of(current.ahead).to_bytes() if current.ahead else b""
            items.append(Item(DECLINED, passive, standing))
        answers = [(member, send.step) for member, send in sends]
        await self._submit(current, step, items, answers, last=last)


def _is_short(plan: SumPlan, members: int) -> bool:
    """Return whether so many members answer a step so quickly that a thread would cost as much."""
    if plan.secure_sum == "clear":
        # They only take note of the step.
        return members <= _AT_ONCE
    return plan.secure_sum == "masked" and members * plan.degree <= _FEW_PAIRS


def _next(plan: SumPlan, made: Iterator[Contributed[T] | Withheld]) -> Contributed[T] | Withheld:
    """Return the next contribution.

    Raises
    ------
    Declined
        When there is no other, or the local step fails; the reason shows no private value.
    StoreError
        When a file or store from which the local step reads is damaged.
    """
    try:
        return next(made)
    except StopIteration:
        raise Declined("the local step made no contribution") from None
    except UnboundedValueError as error:
        # The error's message names a segment and no value.
        _log.error("the local step failed", round=plan.round, error=str(error))
        raise Declined(f"the local step failed: {error}") from None
    except Exception as error:
        if isinstance(error, StoreError) and not error.trouble:
            # What the members train on is damaged, also for the next sum: the service ends, and says which file it is.
            raise
        # The run goes on without these members.  The error's message is not logged: it may hold private values.
        _log.error("the local step failed", round=plan.round, error=type(error).__name__)
        raise Declined(f"the local step failed: {type(error).__name__}") from None
