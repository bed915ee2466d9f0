"""Form the sums of a run at the COS, one at a time: the server's round state machine, with its effects made durable.

A run owns its `Sums`, and calls go one way, from the run to `Sums`::

    the run opens a sum         Sums.open       +
    a party sends a message     Sums.submitted  |  advance the round state machine, in memory,
    a party is lost             Sums.lost       |  and queue its effects
    the clock ticks             Sums.tick       +

    the run's worker            Sums.outcome    carries out queued effects in their order, and returns
                                                with the first outcome that is the run's to act on

An outcome is data.  The worker acts on it, says so where `Sums` has to know, and only then asks for the next one:

    ==================  ==========================================================  ====================
    outcome             what the run does                                           and then calls
    ==================  ==========================================================  ====================
    `SumOpened`         passes its state, to be stored with the plan                `Sums.save_opening`
    `MembersAsked`      wakes polling parties: the step they are asked for is saved
    `KeyHoldersLied`    tells watchers
    `SumFormed`         applies the sum: model, state and end of the sum at once    `Sums.applied`
    `SumAbandoned`      counts it: state and end of the sum at once                 `Sums.close`
    `SumDone`           opens the next sum                                          `Sums.close`
    ==================  ==========================================================  ====================

State is durable before anything that follows from it is done.  Steps that close together are written in one
transaction; the opening of a sum is written in one transaction with the run's state.  The write of the last step goes
on while the sum is computed; the store makes it before the write of the applied sum.  A sum of one step is not written
when that closes: nothing follows from it before the applied sum is durable, and after a crash in between its members,
which keep their contributions until the next sum, are asked for the same bytes again.  Once a sum is stopped, its
remaining effects are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa
import structlog

from coterie.net import tracing
from coterie.rounds import server_round as machine
from coterie.rounds.server_round import RoundState, SumPhase
from coterie.rounds.standing import Standing
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import ClosedSteps, Failed, Formed, Running, ServerHalf, Step, Subject
from coterie.secure_sum.steps import DECLINED, STEP_OF_KIND
from coterie.store import contributions
from coterie.store import cos as store
from coterie.store.engine import Term
from coterie.store.spool import Spool
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie_cos.open_sum import OpenSum
from coterie_cos.opened import spans, to_json

__all__ = [
    "KeyHoldersLied",
    "MembersAsked",
    "SavedRound",
    "SumAbandoned",
    "SumDone",
    "SumFormed",
    "SumOpened",
    "SumOutcome",
    "Sums",
]

_log = structlog.get_logger("coterie.cos")

_ADDING = dict.fromkeys(("encrypted", "shared-key"), "sums of ciphertexts")
"""CPU-account label for adding a contribution, for costly sums."""

_APART_S = 0.04
"""Shortest time between two looks at what intakes have acknowledged, seconds."""

_OPENING = dict.fromkeys(("encrypted", "shared-key"), "decryption proofs")
"""CPU-account label for opening a sum, by secure sum; "unmask" for all others."""


@dataclass(frozen=True)
class SumOpened:
    """Outcome: a sum begins; its plan is stored in one transaction with the run's state, by `Sums.save_opening`."""

    sum: OpenSum
    steps: _ClosedTogether


@dataclass(frozen=True)
class MembersAsked:
    """Outcome: members are asked for an answer to a durable step."""


@dataclass(frozen=True)
class KeyHoldersLied:
    """Outcome: the key holders of these parties gave wrong answers about the sum."""

    parties: tuple[str, ...]


@dataclass(frozen=True)
class SumFormed:
    """Outcome: the sum over so many users is known; the run applies it, and answers by `Sums.applied`."""

    sum: OpenSum
    formed: Formed
    users: int


@dataclass(frozen=True)
class SumAbandoned:
    """Outcome: the sum was abandoned, or could not be opened; the run counts it, and calls `Sums.close`.

    ``bound`` are the participants, as hex, to whom members or key holders may be bound at the sum's place; ``ahead`` is
    where most parties stand that are further than this server.
    """

    reason: str
    bound: tuple[str, ...] = ()
    ahead: Standing = field(default_factory=Standing)


@dataclass(frozen=True)
class SumDone:
    """Outcome: the applied sum is over; the run calls `Sums.close`."""


SumOutcome = SumOpened | MembersAsked | KeyHoldersLied | SumFormed | SumAbandoned | SumDone


@dataclass(frozen=True)
class _ClosedTogether:
    """Effect: write steps that closed together in one transaction, so that no crash comes between them."""

    state: RoundState
    closed: tuple[Step, ...]


_Effect = _ClosedTogether | machine.Ask | machine.Seal | machine.Unmask | machine.Apply | machine.End


class SavedRound(NamedTuple):
    """A sum in progress as loaded from the store after a restart."""

    row: store.SavedSum
    closed: Mapping[str, Mapping[int, bytes]]
    keep: machine.KeepMessages

    @property
    def plan(self) -> SumPlan:
        """The sum's plan."""
        return SumPlan.from_wire(rounds_pb2.SumPlan.FromString(self.row.plan))

    def bound(self, half: ServerHalf) -> tuple[str, ...]:
        """Return the participants, as hex, to whom members or key holders may be bound by this sum."""
        closed = {Step(step): messages for step, messages in self.closed.items()}
        return self.plan.participants(machine.bound_to(half, Step(self.row.step), closed))


class Sums:
    """The sums of a run, one after the other; owned by a `SummingRun`.

    Parameters
    ----------
    run_id : str
    half : ServerHalf
        The server's half of the secure sum.
    folder : Path
        State folder of the service, where many messages of a step are kept in a file.
    term : Term
        Writes of the present term.
    accounting : Accounting
        Counts CPU time by activity.
    revoked : callable
        Tells whether a participant is revoked.
    intakes : bool
        Whether contributions are taken and added by intakes.
    """

    def __init__(
        self,
        run_id: str,
        half: ServerHalf,
        folder: Path,
        term: Term,
        accounting: Accounting,
        revoked: Callable[[bytes], bool],
        *,
        intakes: bool = False,
    ) -> None:
        self._run_id = run_id
        self._parted = intakes
        self._parts: set[str] = set()
        self._gathering = asyncio.Lock()
        self._to_gather: asyncio.Task[None] | None = None
        self._gathered_at = -_APART_S
        self._half = half
        self._folder = folder
        self._term = term
        self._accounting = accounting
        self._revoked = revoked
        self.current: OpenSum | None = None
        self._skipping = False
        # Effects to carry out, each with its sum; a sum that could not be opened; None at the end.
        self._queue: asyncio.Queue[tuple[OpenSum, _Effect] | SumAbandoned | None] = asyncio.Queue()
        # The write that closes the last step, under way while the sum is computed.
        self._saving: asyncio.Task[None] | None = None

    # --- the life of a sum -------------------------------------------------------------------------------------

    def open(
        self, opening: RoundState, slots: Mapping[int, Sequence[int]], absent: Collection[str] = ()
    ) -> None:
        """Open a sum; members of absent parties are not waited for, and revoked members take no part."""
        opening = replace(opening, keep=Spool(self._folder).keep, parted=self._parted)
        self._parts = set()
        current = self.current = OpenSum(opening, slots)
        now = time.monotonic()
        lost = frozenset(member for party in absent for member in current.by_party.get(party, ()))
        current.state, effects = machine.advance(opening, machine.RoundOpened(now))
        for event in (
            machine.MembersLost(lost, now),
            machine.MembersRevoked(self._revoked_in(opening.plan), now),
        ):
            if event.members:
                current.state, more = machine.advance(current.state, event)
                effects += more
        self._do(current, effects)

    def skip(self, reason: str, saved: SavedRound | None = None) -> None:
        """Abandon a sum that could not be opened, or one that was saved and cannot be resumed."""
        self._skipping = True
        bound = () if saved is None else saved.bound(self._half)
        self._queue.put_nowait(SumAbandoned(reason, bound))

    @property
    def busy(self) -> bool:
        """Whether a sum is in progress, or its end is being carried out."""
        return self.current is not None or self._skipping

    def load(self, connection: sa.Connection) -> SavedRound | None:
        """Load the sum that was in progress before a restart; None between rounds."""
        keep = Spool(self._folder).keep
        found = store.load_sum(connection, self._run_id, keep)
        return None if found is None else SavedRound(*found, keep)

    def resume(
        self,
        saved: SavedRound,
        layout: Layout,
        slots: Mapping[int, Sequence[int]],
        patience_s: float,
        subject: Subject | None = None,
        only: frozenset[int] = frozenset(),
    ) -> None:
        """Resume a loaded sum after a restart; ``only`` is as for `RoundState`."""
        row = saved.row
        if SumPhase(row.phase).ended:
            self.skip(row.reason, saved)
            return
        plan = saved.plan
        running = None if row.running is None else self._half.from_bytes(plan, layout, row.running)
        state = RoundState(
            plan,
            layout,
            self._half,
            patience_s,
            Step(row.step),
            SumPhase(row.phase),
            closed=ClosedSteps({Step(step): messages for step, messages in saved.closed.items()}),
            running=running,
            subject=subject,
            only=only,
            keep=saved.keep,
            parted=self._parted,
        )
        self._parts = set()
        state, effects = machine.advance(state, machine.Resumed(time.monotonic()))
        self.current = OpenSum(state, slots, durable=state.step)
        if self._taken_by_intakes(state):
            # The sum may have been closed to intakes.
            effects = [machine.Save(), *effects]
        self._do(self.current, effects)

    def lost(self, party: str) -> None:
        """Stop waiting for a party's members."""
        current = self.current
        if current is not None and party in current.by_party:
            self._advance(current, machine.MembersLost(frozenset(current.by_party[party]), time.monotonic()))

    def tick(self) -> None:
        """Remove members revoked meanwhile, and close a step that takes too long."""
        current, now = self.current, time.monotonic()
        if current is None or current.durable is None:
            return
        if current.state.step is current.state.half.steps[0]:
            self._advance(current, machine.MembersRevoked(self._revoked_in(current.state.plan), now))
        self._advance(current, machine.Tick(now))

    # --- contributions that intakes took -----------------------------------------------------------------------

    @staticmethod
    def _taken_by_intakes(state: RoundState) -> bool:
        return state.parted and state.phase is SumPhase.COLLECT and state.step is Step.SUBMIT

    async def gather(self) -> None:
        """Take what intakes have acknowledged until now; calls that wait for the store share one look at it."""
        current = self.current
        if current is None or not self._taken_by_intakes(current.state):
            return
        if self._to_gather is None:
            self._to_gather = asyncio.create_task(self._gather_in_turn())
        await asyncio.shield(self._to_gather)

    async def _gather_in_turn(self) -> None:
        # Before the lock: a sum that closes does not wait for it.
        await asyncio.sleep(max(0.0, self._gathered_at + _APART_S - time.monotonic()))
        async with self._gathering:
            self._to_gather = None
            self._gathered_at = time.monotonic()
            await self._gather()

    async def _gather(self, *, last: bool = False) -> None:
        current = self.current
        if current is None or current.durable is not Step.SUBMIT or not self._taken_by_intakes(current.state):
            return
        place, known = (self._run_id, current.state.plan.round), frozenset(self._parts)

        def read(connection: sa.Connection) -> list[contributions.PartialSum]:
            if last:
                contributions.close_sum(connection, *place)
            return contributions.read_parts(connection, *place, known)

        parts = await self._term.run(read)
        arrived = await self._read(current.state, parts)
        state = current.state
        if current is not self.current or not self._taken_by_intakes(state):
            return
        self._parts.update(part.name for part in parts)
        current.bytes_in += sum(part.size for part in parts)
        if parts or last:
            with self._adding(state.plan):
                self._advance(current, machine.PartsArrived(arrived, time.monotonic(), last))

    async def _read(
        self, state: RoundState, parts: Sequence[contributions.PartialSum]
    ) -> tuple[tuple[Mapping[int, bytes], Running], ...]:
        """Return the notes and the running sum of each part; of costly sums joined to one, in a thread.

        A coordinator that has taken over reads all parts of a sum together.
        """

        def read() -> list[tuple[Mapping[int, bytes], Running]]:
            half, plan, layout = self._half, state.plan, state.layout
            return [(part.notes, half.from_bytes(plan, layout, part.running)) for part in parts]

        def joined() -> tuple[Mapping[int, bytes], Running]:
            notes, running = dict[int, bytes](), self._half.begin(state.plan, state.layout)
            for own, one in read():
                notes.update(own)
                running = self._half.joined(running, one)
            return notes, running

        label = _ADDING.get(state.plan.secure_sum, "")
        if not parts or not label:
            return tuple(read())
        return (await self._accounting.in_thread(label, len(parts), joined),)

    def _adding(self, plan: SumPlan) -> AbstractContextManager[None]:
        """Count CPU time as that of adding contributions, for sums in which it is costly."""
        label = _ADDING.get(plan.secure_sum, "")
        return self._accounting.activity(label) if label else contextlib.nullcontext()

    def stop(self) -> None:
        """Drop the sum in progress: the run is over."""
        self.current = None

    def end(self) -> None:
        """Drop the sum in progress; `outcome` returns None once the effect under way has ended."""
        self.stop()
        self._queue.put_nowait(None)

    async def written(self) -> None:
        """Return once no write is under way any more, kept or failed."""
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)

    def _revoked_in(self, plan: SumPlan) -> frozenset[int]:
        return plan.positions(self._revoked)

    def _advance(self, current: OpenSum, event: machine.Event) -> None:
        """Advance a sum by an event; effects of a sum that is no longer in progress are dropped."""
        current.state, effects = machine.advance(current.state, event)
        if current is self.current:
            self._do(current, effects)

    def _do(self, current: OpenSum, effects: Sequence[machine.Effect]) -> None:
        """Queue effects; steps that closed together are written before any other effect of theirs."""
        saves = [effect.closed for effect in effects if isinstance(effect, machine.Save)]
        if saves:
            closed = tuple(step for step in saves if step is not None)
            self._queue.put_nowait((current, _ClosedTogether(current.state, closed)))
        for effect in effects:
            if not isinstance(effect, machine.Save):
                self._queue.put_nowait((current, effect))

    # --- what the run's worker calls ---------------------------------------------------------------------------

    async def outcome(self) -> SumOutcome | None:
        """Carry out effects in order, up to the next outcome that the run acts on; return None after `end`.

        Raises
        ------
        StoreError
            When the store fails; the term is over.
        """
        while True:
            queued = await self._queue.get()
            if queued is None or isinstance(queued, SumAbandoned):
                return queued
            found = await self._carry_out(*queued)
            if found is not None:
                return found
            # Hold no reference to a sum while there is nothing to do.
            del queued

    async def save_opening(self, opened: SumOpened, run_state: str) -> None:
        """Store the opening of a sum and the run's state, which takes the round's number for good."""
        await self._save(opened.sum, opened.steps, run_state)

    def forget(self, connection: sa.Connection) -> None:
        """Delete all that is stored of the run's sums, in the transaction that counts the end of one."""
        store.forget_sums(connection, self._run_id)
        if self._parted:
            contributions.forget(connection, self._run_id)

    def shut(self, connection: sa.Connection) -> None:
        """Let intakes acknowledge nothing more, in the transaction that ends the run.

        What they acknowledged stays in the store with the sum, for a run that is resumed.
        """
        if self._parted:
            contributions.close_all(connection, self._run_id)

    async def applied(self, current: OpenSum, reason: str) -> None:
        """Go on after a sum was applied; ``reason`` says why it was impossible, if so."""
        await self._saved()
        self._advance(current, machine.SumApplied(reason))

    def close(self) -> None:
        """Forget the sum that is over; another one may be opened."""
        self.current, self._skipping = None, False

    async def _carry_out(self, current: OpenSum, effect: _Effect) -> SumOutcome | None:
        if current is not self.current:
            # Stopped meanwhile.
            return None
        match effect:
            case _ClosedTogether() if current.durable is None:
                return SumOpened(current, effect)
            case _ClosedTogether(state) if state.phase is SumPhase.UNMASK and self._asked_again(state):
                return None
            case _ClosedTogether(state) if state.phase is SumPhase.UNMASK:
                # Compute the sum during this write: the end of the last step is announced only once the sum is
                # applied, and the store makes that write after this one.
                await self._saved()
                self._saving = asyncio.create_task(self._save(current, effect))
                return None
            case _ClosedTogether(state):
                await self._save(current, effect)
                return MembersAsked() if state.phase is SumPhase.COLLECT else None
            case machine.Ask():
                return MembersAsked()
            case machine.Seal():
                async with self._gathering:
                    await self._gather(last=True)
                return None
            case machine.Unmask():
                return await self._form(current)
            case machine.Apply(formed, users):
                current.mark()
                return SumFormed(current, formed, users)
            case machine.End() if current.state.phase is SumPhase.ABANDONED:
                state = current.state
                return SumAbandoned(state.reason, state.plan.participants(state.bound), current.ahead)
            case machine.End():
                return SumDone()

    @staticmethod
    def _asked_again(state: RoundState) -> bool:
        """Return whether all messages of a sum can be asked for again after a crash: those of its only step.

        Intakes forget the contributions that they took when the step closes, which is therefore written.
        """
        return len(state.half.steps) == 1 and not state.parted

    async def _save(self, current: OpenSum, steps: _ClosedTogether, run_state: str | None = None) -> None:
        current.mark()
        state, run_id = steps.state, self._run_id
        running = state.running if Step.SUBMIT in steps.closed else None
        saved = store.SavedSum(
            state.plan.round,
            state.plan.to_wire().SerializeToString(),
            state.step.value,
            state.phase.value,
            state.reason,
            None if running is None else self._half.to_bytes(running),
        )
        messages = {step.value: state.closed[step] for step in steps.closed}

        added = state.parted and Step.SUBMIT in steps.closed
        opening = None
        if self._taken_by_intakes(state):
            slots = {one: spans(current.slots[one]) for one in state.expected}
            opening = to_json(state.layout), slots, self._half.terms(state.plan), state.plan.hash

        # It holds no sum: the writer may hold it for long.
        def write(connection: sa.Connection) -> None:
            if run_state is not None:
                store.save_state(connection, run_id, run_state)
            store.save_sum(connection, run_id, saved, messages)
            if opening is not None:
                contributions.open_sum(connection, run_id, saved.round, *opening)
            elif added:
                contributions.forget(connection, run_id)

        await self._term.run(write)
        current.durable = state.step

    async def _saved(self) -> None:
        """Return once the write of the last step is durable."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def _form(self, current: OpenSum) -> SumOutcome | None:
        """Compute the sum; the machine's next effects are queued before the outcome is returned."""
        current.mark()
        state, now = current.state, time.monotonic
        if state.running is None:
            raise AssertionError("a sum is unmasked without a running sum")
        label = _OPENING.get(state.plan.secure_sum, "unmask")
        event: machine.Unmasked | machine.UnmaskFailed
        try:
            if self._half.forms_at_once:
                total = self._half.unmask(state.plan, state.closed, state.running)
            else:
                total = await self._accounting.in_thread(
                    label, 1, self._half.unmask, state.plan, state.closed, state.running
                )
        except Failed as failed:
            wrong, event = failed.wrong, machine.UnmaskFailed(str(failed), now(), failed.wrong)
        else:
            wrong, event = total.wrong, machine.Unmasked(total.formed, total.left_out)
            current.dropped_places = total.dropped_places
            current.left_out, current.withdrawn = total.left_out, total.withdrawn
        current.wrong += wrong
        self._advance(current, event)
        if not wrong:
            return None
        plan = state.plan
        _log.warning("wrong answers", run=self._run_id, round=plan.round, members=wrong)
        parties = {plan.device_of(number) for number in wrong if number >= len(plan.members)}
        return KeyHoldersLied(tuple(sorted(parties))) if parties else None

    # --- what parties ask --------------------------------------------------------------------------------------

    def tasks(self, party: str, version: int, best: int = 0) -> list[wire.Task]:
        """Return the open step's tasks for a party; ``version`` is the model's, ``best`` the best version so far."""
        return [] if self.current is None else self.current.tasks(party, version, best)

    def needs(self, party: str) -> bool:
        """Return whether the sum in progress asks a party for something, or may ask it in a later step."""
        return self.current is not None and self.current.needs(party)

    def plan(self, number: int) -> tuple[int, bytes]:
        """Return the plan of the round in progress, for members.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when another round is in progress, or none.
        """
        return number, self._open(number).plan()

    def briefings(self, party: str, request: wire.FetchRequest) -> bytes:
        """Return the briefings of a party's members for the open step, from one member on, up to a number of bytes.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when the round or the step is not open.
        """
        return self._open(request.version).briefings(party, request)

    def submitted(self, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes) -> None:
        """Take a member's message for a step, or that it declines.

        Raises
        ------
        Refusal
            When the message does not fit the step; the state does not change.
        """
        step = STEP_OF_KIND.get(head.kind)
        if step is None and head.kind != DECLINED:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "no such kind of item in a run with rounds",
                field="kind",
                expected="ADVERT, SHARES, VECTOR, CONFIRMATION, UNMASKING, DECRYPTION or DECLINED",
            )
        current = self._open(head.round.round)
        try:
            if step is None:
                self._declined(current, set(slots), payload)
            else:
                self._answered(current, step, head, slots, payload)
        except Refusal:
            current.refused += 1
            raise
        current.bytes_in += len(payload)

    def _answered(
        self, current: OpenSum, step: Step, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes
    ) -> None:
        plan = current.state.plan
        number = self._half.answers_as(plan, current.member_with(slots), step, payload)
        arrived = machine.Arrived(number, step, payload, time.monotonic(), head.sha256)
        with self._adding(plan) if step is Step.SUBMIT else contextlib.nullcontext():
            self._advance(current, arrived)

    def _declined(self, current: OpenSum, slots: set[int], payload: bytes) -> None:
        """Stop waiting for the members whose slots are all among these."""
        members = current.members_within(slots)
        current.declined(members, payload)
        self._advance(current, machine.MembersDeclined(members, time.monotonic()))

    def _open(self, number: int) -> OpenSum:
        current = self.current
        if current is None or current.durable is None or current.state.plan.round != number:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                f"round {number} is not in progress",
                field="round",
                expected="the round of the present task",
            )
        return current

    # --- watching ----------------------------------------------------------------------------------------------

    def event(self, users: int, version: int, reason: str) -> operator.RoundEvent:
        """Build the event that reports the sum in progress, once it is over."""
        if self.current is None:
            return operator.RoundEvent(version=version, reason=reason)
        event = self.current.event(users, version, reason)
        tracing.round_over(
            self._run_id, event.round, zip(event.phases, event.seconds, strict=True), event.reason
        )
        return event

    def progress(self) -> operator.RoundProgress | None:
        """Return how far the sum in progress is; None when there is none."""
        return None if self.current is None else self.current.progress()
