"""Form the sums of a run at the COS, one at a time: the server's round state machine, with its effects made durable."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import sqlalchemy as sa
import structlog

from coterie.rounds import server_round as machine
from coterie.rounds.server_round import Phase, RoundState
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import ClosedSteps, Failed, Formed, Running, ServerHalf, Step, Subject, Total
from coterie.secure_sum.steps import DECLINED, STEP_OF_KIND, TASK_STEP
from coterie.store import cos as store
from coterie.store.engine import Term
from coterie.store.spool import Spool
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import RoundRef
from coterie_cos.registry import ranges

__all__ = ["OpenSum", "SumOwner", "Sums"]

_log = structlog.get_logger("coterie.cos")

_ADDING = dict.fromkeys(("encrypted", "shared-key"), "sums of ciphertexts")
"""CPU-account label for adding a contribution, for costly sums."""

_OPENING = dict.fromkeys(("encrypted", "shared-key"), "decryption proofs")
"""CPU-account label for opening a sum, by secure sum; "unmask" for all others."""

_FORMING = {"masked": "unmask sum", "encrypted": "verify decryption", "shared-key": "compare models"}
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
    marks: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Find a member by its lowest slot: a host may cover very many slots.
        plan = self.state.plan
        self.member_of = {min(own): member for member, own in self.slots.items()}
        # A key holder is asked under several numbers; its slot leads to the number of its own part.
        for holder in range(len(plan.holders)):
            number = plan.respondent(holder, holder)
            if number in self.slots:
                self.member_of[self.slots[number][0]] = number
        self.by_party = plan.by_device

    def mark(self) -> None:
        """Note the time at which a phase begins."""
        name = self.phase
        if not self.marks or self.marks[-1][0] != name:
            self.marks.append((name, time.monotonic()))

    @property
    def phase(self) -> str:
        """Name of the phase: a step, how the sum is formed, or that it is applied."""
        state = self.state
        if state.phase is Phase.COLLECT:
            return state.step.value
        if state.phase is Phase.UNMASK:
            return _FORMING.get(state.plan.secure_sum, "form sum")
        return f"{state.phase.value} sum"

    def seconds(self) -> dict[str, float]:
        """Return how long each phase took."""
        ends = [at for _, at in self.marks[1:]] + [time.monotonic()]
        return {name: end - at for (name, at), end in zip(self.marks, ends, strict=True)}


class SavedRound(NamedTuple):
    """A sum in progress as loaded from the store after a restart."""

    row: store.SavedSum
    closed: Mapping[str, Mapping[int, bytes]]
    keep: machine.Keep

    @property
    def plan(self) -> SumPlan:
        """The sum's plan."""
        return SumPlan.from_wire(rounds_pb2.SumPlan.FromString(self.row.plan))


class SumOwner(Protocol):
    """The interface of a run for which `Sums` forms sums."""

    def state_json(self) -> str:
        """Return the run's state, which includes the number of the open round."""
        ...

    def saved(self) -> None:
        """Take note that the state and the open step are durable."""
        ...

    async def summed(self, current: OpenSum, formed: Formed, users: int) -> str:
        """Apply a sum and delete its stored messages, in one transaction; return why it was impossible, if so."""
        ...

    async def abandoned(self, reason: str) -> None:
        """Count the sum as abandoned and delete its stored messages, in one transaction."""
        ...

    async def lied(self, parties: Sequence[str]) -> None:
        """Take note of parties whose key holders gave wrong answers about the sum."""
        ...

    def proceed(self) -> None:
        """Open the next sum, unless it has to wait or the run is over; called again at each tick."""
        ...


class Sums:
    """The sums of a run, one after the other; used by `SummingRun`.

    Parameters
    ----------
    run_id : str
    half : ServerHalf
        The server's half of the secure sum.
    owner : SumOwner
        The run, which applies the sums.
    folder : Path
        State folder of the service, where many messages of a step are kept in a file.
    term : Term
        Writes of the present term.
    accounting : Accounting
        Counts CPU time by activity.
    touch : callable
        Wakes parties that poll.
    revoked : callable
        Tells whether a participant is revoked.
    """

    def __init__(
        self,
        run_id: str,
        half: ServerHalf,
        owner: SumOwner,
        folder: Path,
        term: Term,
        accounting: Accounting,
        touch: Callable[[], None],
        revoked: Callable[[bytes], bool],
    ) -> None:
        self._run_id = run_id
        self._revoked = revoked
        self._half = half
        self._owner = owner
        self._folder = folder
        self._term = term
        self._accounting = accounting
        self._touch = touch
        self.current: OpenSum | None = None
        self.failure: BaseException | None = None
        self._skipping = False
        self._work: asyncio.Queue[tuple[OpenSum | None, RoundState | None, Sequence[_Task]] | None] = (
            asyncio.Queue()
        )
        self._worker: asyncio.Task[None] | None = None
        # The write that closes the last step, under way while the sum is computed.
        self._saving: asyncio.Task[None] | None = None

    # --- the life of a sum -------------------------------------------------------------------------------------

    def open(
        self, opening: RoundState, slots: Mapping[int, Sequence[int]], present: Callable[[str], bool]
    ) -> None:
        """Open a sum; members of absent parties are not waited for, and revoked members take no part."""
        opening = replace(opening, keep=Spool(self._folder).keep)
        current = self.current = OpenSum(opening, slots)
        now = time.monotonic()
        lost = frozenset(
            member for party, members in current.by_party.items() if not present(party) for member in members
        )
        current.state, effects = machine.advance(opening, machine.Opened(now))
        for event in (machine.Lost(lost, now), machine.Revoked(self._revoked_in(opening.plan), now)):
            if event.members:
                current.state, more = machine.advance(current.state, event)
                effects += more
        self._do(effects)

    def _revoked_in(self, plan: SumPlan) -> frozenset[int]:
        return frozenset(n for n, one in enumerate(plan.members) if self._revoked(one.participant))

    def skip(self, reason: str) -> None:
        """Abandon a sum that could not be opened."""
        self._skipping = True
        self._do([_Skip(reason)])

    @property
    def busy(self) -> bool:
        """Whether a sum is in progress, or its end is being carried out."""
        return self.current is not None or self._skipping

    def saved(self, connection: sa.Connection) -> SavedRound | None:
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
    ) -> None:
        """Resume a loaded sum after a restart."""
        row = saved.row
        if Phase(row.phase).ended:
            self.skip(row.reason)
            return
        plan = saved.plan
        running = None if row.running is None else self._half.from_bytes(plan, layout, row.running)
        state = RoundState(
            plan,
            layout,
            self._half,
            patience_s,
            Step(row.step),
            Phase(row.phase),
            closed=ClosedSteps({Step(step): messages for step, messages in saved.closed.items()}),
            running=running,
            subject=subject,
            keep=saved.keep,
        )
        state, effects = machine.advance(state, machine.Resumed(time.monotonic()))
        self.current = OpenSum(state, slots, durable=state.step)
        self._do(effects)

    def stop(self) -> None:
        """Drop the sum in progress: the run is over."""
        self.current = None

    async def drop(self) -> None:
        """Drop the sum in progress, and return once all its effects and writes have ended."""
        self.stop()
        self._work.put_nowait(None)
        if self._worker is not None:
            await asyncio.gather(self._worker, return_exceptions=True)
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)

    def lost(self, party: str) -> None:
        """Stop waiting for a party's members."""
        current = self.current
        if current is not None and party in current.by_party:
            self._advance(current, machine.Lost(frozenset(current.by_party[party]), time.monotonic()))

    def tick(self) -> None:
        """Remove members revoked meanwhile, and close a step that takes too long."""
        current, now = self.current, time.monotonic()
        if current is None or current.durable is None:
            return
        if current.state.step is current.state.half.steps[0]:
            self._advance(current, machine.Revoked(self._revoked_in(current.state.plan), now))
        self._advance(current, machine.Tick(now))

    def _do(self, effects: Sequence[_Task]) -> None:
        """Queue effects, to be carried out in order by one worker."""
        if effects:
            self._work.put_nowait((self.current, self.current.state if self.current else None, effects))
            if self._worker is None:
                self._worker = asyncio.create_task(self._carry_out())

    async def _carry_out(self) -> None:
        # Hold no reference to a sum while there is nothing to do.
        while (work := await self._work.get()) is not None:
            await self._all(*work)
            del work

    async def _all(self, current: OpenSum | None, state: RoundState | None, effects: Sequence[_Task]) -> None:
        try:
            closed = [effect.closed for effect in effects if isinstance(effect, machine.Save)]
            if closed and current is not None and current is self.current and state is not None:
                # Write steps that closed together in one transaction, so that no crash comes between them.
                saving = asyncio.create_task(self._save(current, state, closed))
                if state.phase is Phase.UNMASK:
                    # Compute the sum during this write: the end of the last step is announced only once the sum is
                    # applied, and the store makes that write after this one.
                    self._saving = saving
                else:
                    await saving
            for effect in effects:
                if current is not self.current:
                    break
                await self._effect(current, effect)
        except Exception as error:
            if self._term.lost is not None:
                _log.warning("a round waits for the store", run=self._run_id, error=type(error).__name__)
                return
            _log.exception("a round failed", run=self._run_id)
            self.failure = error

    async def _effect(self, current: OpenSum | None, effect: _Task) -> None:
        if isinstance(effect, _Skip):
            await self._owner.abandoned(effect.reason)
            self._skipping = False
            self._owner.proceed()
            return
        if current is None:
            raise AssertionError(f"{effect} belongs to a sum")
        match effect:
            case machine.Ask():
                self._touch()
            case machine.Unmask():
                await self._unmask(current)
            case machine.Apply(formed, users):
                current.mark()
                reason = await self._owner.summed(current, formed, users)
                saving, self._saving = self._saving, None
                if saving is not None:
                    await saving
                self._advance(current, machine.Applied(reason))
            case machine.End():
                if current.state.phase is Phase.ABANDONED:
                    await self._owner.abandoned(current.state.reason)
                if current is self.current:
                    self.current = None
                    self._owner.proceed()

    def _advance(self, current: OpenSum, event: machine.Event) -> None:
        """Advance a sum by an event; effects of a sum that is no longer in progress are dropped."""
        current.state, effects = machine.advance(current.state, event)
        if current is self.current:
            self._do(effects)

    async def _save(self, current: OpenSum, state: RoundState, closed: Sequence[Step | None]) -> None:
        current.mark()
        run_id = self._run_id
        running = state.running if Step.SUBMIT in closed else None
        saved = store.SavedSum(
            state.plan.round,
            state.plan.to_wire().SerializeToString(),
            state.step.value,
            state.phase.value,
            state.reason,
            None if running is None else self._half.to_bytes(running),
        )
        messages = {step.value: state.closed[step] for step in closed if step is not None}
        # Opening a round also stores the run's state, which takes the round's number for good.
        text = self._owner.state_json() if None in closed else None

        def write(connection: sa.Connection) -> None:
            if text is not None:
                store.save_state(connection, run_id, text)
            store.save_sum(connection, run_id, saved, messages)

        await self._term.run(write)
        if text is not None:
            self._owner.saved()
        current.durable = state.step
        if state.phase is Phase.COLLECT:
            self._touch()

    async def _unmask(self, current: OpenSum) -> None:
        current.mark()
        state = current.state
        if state.running is None:
            raise AssertionError("a sum is unmasked without a running sum")
        try:
            total = await asyncio.to_thread(self._unmasked, state, state.running)
        except Failed as failed:
            current.wrong += failed.wrong
            await self._say_wrong(current, failed.wrong)
            self._advance(current, machine.UnmaskFailed(str(failed), time.monotonic(), failed.wrong))
            return
        current.wrong += total.wrong
        current.dropped_places = total.dropped_places
        await self._say_wrong(current, total.wrong)
        self._advance(current, machine.Unmasked(total.formed))

    async def _say_wrong(self, current: OpenSum, wrong: tuple[int, ...]) -> None:
        if not wrong:
            return
        plan = current.state.plan
        _log.warning("wrong answers", run=self._run_id, round=plan.round, members=wrong)
        parties = {plan.device_of(number) for number in wrong if number >= len(plan.members)}
        if parties:
            await self._owner.lied(sorted(parties))

    def _unmasked(self, state: RoundState, running: Running) -> Total:
        with self._accounting.activity(_OPENING.get(state.plan.secure_sum, "unmask")):
            return self._half.unmask(state.plan, state.closed, running)

    # --- what members ask --------------------------------------------------------------------------------------

    def tasks(self, party: str, version: int, best: int = 0) -> list[wire.Task]:
        """Return the open step's tasks for a party; ``version`` is the model's, ``best`` the best version so far."""
        current = self.current
        if current is None or party not in current.by_party:
            return []
        state = current.state
        if state.step is not current.durable:
            return []
        asked = set(state.asked)
        slots = [
            slot
            for member in current.by_party[party]
            if member in asked
            for slot in current.slots.get(member, ())
        ]
        if not slots:
            return []
        return [
            wire.Task(
                kind=wire.TaskKind.TASK_KIND_ROUND,
                round=RoundRef(run_id=self._run_id, round=state.plan.round),
                version=version,
                slots=ranges(sorted(set(slots))),
                step=TASK_STEP[state.step],
                best=best,
            )
        ]

    def plan(self, number: int) -> tuple[int, bytes]:
        """Return the plan of the round in progress, for members.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when another round is in progress, or none.
        """
        plan = self._open(number).state.plan
        return plan.round, plan.to_wire().SerializeToString(deterministic=True)

    def briefings(self, party: str, request: wire.FetchRequest) -> bytes:
        """Return the briefings of a party's members for the open step, from one member on, up to a number of bytes.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when the round or the step is not open.
        """
        current = self._open(request.version)
        state = current.state
        if TASK_STEP[state.step] != request.step or state.step is not current.durable:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                "the step is not open",
                field="step",
                expected=wire.RoundStep.Name(TASK_STEP[state.step]),
            )
        asked = set(state.asked)
        told: list[tuple[int, bytes, array[int]]] = []
        parts: list[bytes] = []
        named: dict[int, int] = {}
        size = own = following = 0
        for member in current.by_party.get(party, []):
            if member not in asked or member < request.first:
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

    def submitted(self, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes) -> None:
        """Take a member's message for a step.

        Raises
        ------
        Refusal
            When the message does not fit the step; the state does not change.
        """
        if head.kind == DECLINED:
            self._declined(head.round.round, set(slots), payload)
            return
        step = STEP_OF_KIND.get(head.kind)
        if step is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "no such kind of item in a run with rounds",
                field="kind",
                expected="ADVERT, SHARES, VECTOR, CONFIRMATION, UNMASKING, DECRYPTION or DECLINED",
            )
        current = self._open(head.round.round)
        try:
            member = current.member_of.get(min(slots)) if slots else None
            if member is None or sorted(current.slots[member]) != sorted(slots):
                raise Refusal(
                    ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                    "these slots are not those of one member of the round",
                    field="slots",
                    expected="all the slots that one member covers",
                )
            number = self._half.answers_as(current.state.plan, member, step, payload)
            arrived = machine.Arrived(number, step, payload, time.monotonic(), head.sha256)
            adding = _ADDING.get(current.state.plan.secure_sum, "") if step is Step.SUBMIT else ""
            with self._accounting.activity(adding) if adding else contextlib.nullcontext():
                self._advance(current, arrived)
        except Refusal:
            current.refused += 1
            raise
        current.bytes_in += len(payload)

    def _declined(self, number: int, slots: set[int], payload: bytes) -> None:
        """Stop waiting for the members whose slots are all among these."""
        current = self._open(number)
        if payload:
            current.refused += 1
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "a member that declines says nothing else",
                field="chunk.data",
                expected="an empty payload",
            )
        members = frozenset(
            member
            for member, own in current.slots.items()
            if not slots.isdisjoint(own) and slots.issuperset(own)
        )
        if not members:
            current.refused += 1
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                "these slots cover no member of the round",
                field="slots",
                expected="all the slots that one member covers, or several do",
            )
        self._advance(current, machine.Declined(members, time.monotonic()))

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
        current = self.current
        if current is None:
            return operator.RoundEvent(version=version, reason=reason)
        plan, seconds = current.state.plan, current.seconds()
        return operator.RoundEvent(
            round=plan.round,
            purpose=plan.purpose,
            pass_number=plan.pass_number,
            users=plan.users,
            members=len(plan.members),
            summed=users,
            dropped=len(plan.members)
            - len(current.state.submitters if plan.holders else current.state.arrived),
            refused=current.refused,
            reason=reason,
            phases=list(seconds),
            seconds=list(seconds.values()),
            bytes_in=current.bytes_in,
            version=version,
            liars=len(current.wrong),
            dropped_places=current.dropped_places,
        )

    def progress(self) -> operator.RoundProgress | None:
        """Return how far the sum in progress is; None when there is none."""
        current = self.current
        if current is None:
            return None
        state, plan = current.state, current.state.plan
        # After the first step of an encrypted sum, key holders are asked, each under several numbers.
        holding = bool(plan.holders) and state.step is not Step.SUBMIT
        asked = len(plan.holders) if holding else len(plan.members)
        heard, awaited = (
            {plan.asked_of(number)[0] for number in numbers} if holding else set(numbers)
            for numbers in (state.arrived, state.expected.difference(state.lost, state.declined))
        )
        return operator.RoundProgress(
            round=plan.round,
            purpose=plan.purpose,
            phase=current.phase,
            members=asked,
            answered=len(heard),
            dropped=asked - len(heard | awaited),
        )


@dataclass(frozen=True)
class _Skip:
    """A sum that could not be opened."""

    reason: str


_Task = machine.Effect | _Skip
