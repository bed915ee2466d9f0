"""A run of a rounds-based system at the COS: its machines, carried out durably."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
import structlog
from numpy.typing import NDArray

from coterie.rounds import cos as machine
from coterie.rounds import training
from coterie.rounds.conductor import Conductor, Population, model_to_bytes, new_training
from coterie.rounds.cos import Phase, RoundState
from coterie.rounds.system import Arrays, ServerSide
from coterie.rounds.systems import server_half, server_side
from coterie.rounds.training import Purpose, Training
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Failed, Step, Total
from coterie.store import cos as store
from coterie.store.engine import Writer
from coterie.telemetry.accounting import Accounting
from coterie.wire.layout import ImpossibleSumError
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import to_wire
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import RoundRef
from coterie_cos.registry import ranges
from coterie_cos.run import Run
from coterie_cos.versions import Versions

__all__ = ["RoundsRun"]

_log = structlog.get_logger("coterie.cos")

_STEPS = {
    Step.ADVERTISE: wire.RoundStep.ROUND_STEP_ADVERTISE,
    Step.SHARE: wire.RoundStep.ROUND_STEP_SHARE,
    Step.SUBMIT: wire.RoundStep.ROUND_STEP_SUBMIT,
    Step.CONFIRM: wire.RoundStep.ROUND_STEP_CONFIRM,
    Step.UNMASK: wire.RoundStep.ROUND_STEP_UNMASK,
}

_KINDS = {
    wire.SubmitKind.SUBMIT_KIND_ADVERT: Step.ADVERTISE,
    wire.SubmitKind.SUBMIT_KIND_SHARES: Step.SHARE,
    wire.SubmitKind.SUBMIT_KIND_VECTOR: Step.SUBMIT,
    wire.SubmitKind.SUBMIT_KIND_CONFIRMATION: Step.CONFIRM,
    wire.SubmitKind.SUBMIT_KIND_UNMASKING: Step.UNMASK,
}

_PURPOSES = {
    Purpose.SUPPORTS: operator.RunPhase.RUN_PHASE_SUPPORTS,
    Purpose.EVALUATE: operator.RunPhase.RUN_PHASE_ROUNDS,
    Purpose.TRAIN: operator.RunPhase.RUN_PHASE_ROUNDS,
}


@dataclass
class _Round:
    """The round in progress, and what is told about it when it is over."""

    state: RoundState
    slots: dict[int, list[int]]
    """Slots that each member covers, ascending by position in the canonical order."""
    member_of: dict[int, int]
    """Member of each slot."""
    by_party: dict[str, list[int]]
    durable: Step | None = None
    """The step that is durably open: nobody is asked for one that is not."""
    refused: int = 0
    bytes_in: int = 0
    wrong: tuple[int, ...] = ()
    marks: list[tuple[str, float]] = field(default_factory=list)

    def mark(self) -> None:
        """Note when a phase begins."""
        name = self.phase
        if not self.marks or self.marks[-1][0] != name:
            self.marks.append((name, time.monotonic()))

    @property
    def phase(self) -> str:
        """Name of the phase: a step, ``unmask`` or ``apply``."""
        state = self.state
        return state.step.value if state.phase is Phase.COLLECT else f"{state.phase.value} sum"

    def seconds(self) -> dict[str, float]:
        """Return how long each phase took."""
        ends = [at for _, at in self.marks[1:]] + [time.monotonic()]
        return {name: end - at for (name, at), end in zip(self.marks, ends, strict=True)}


class RoundsRun(Run):
    """A run in rounds.

    Parameters
    ----------
    request, writer, traffic
        As for `Run`.
    folder : Path
        State folder of the service.
    accounting : Accounting
        Where CPU time is counted.
    """

    def __init__(
        self,
        request: operator.StartRunRequest,
        folder: Path,
        writer: Writer,
        traffic: Callable[[], tuple[int, int]],
        accounting: Accounting,
    ) -> None:
        super().__init__(request, writer, traffic)
        self._accounting = accounting
        self._versions = Versions(folder / "models" / self.plan.run_id)
        self._half = server_half(self.plan.secure_sum)
        self.state = new_training(self.plan, supports=self._side(0, 0).asks_supports)
        # What tasks are made from: the last state that is durable.
        self._published = self.state
        self._conductor: Conductor | None = None
        self._arrays: Arrays = {}
        self._model = b""
        self._opened = b""
        self._round: _Round | None = None
        self._gather_since = time.monotonic()
        self._patience_s = self.plan.rounds.step_timeout_ms / 1e3
        self._work: asyncio.Queue[tuple[_Round | None, RoundState | None, Sequence[_Task]]] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        self.history: list[dict[str, object]] = []
        self._rounds: list[dict[str, object]] = []

    def _side(self, n_items: int, groups: int) -> ServerSide:
        return server_side(self.plan.system, self.plan.settings, n_items, self.plan.seed, groups)

    # --- durable state -----------------------------------------------------------------------------------------

    def state_json(self) -> str:
        """Return the state for the store."""
        return self.state.to_json()

    def restore(self, connection: sa.Connection, state: str, snapshot: int) -> None:
        """Take up a run after a restart."""
        self.state = self._published = Training.from_json(state)
        self.take_up(connection, 0, {})
        present = {one.party: True for one in self.registry.by_slot}
        self.take_up_parties(present)
        self.registry.catalogue_version = 1
        if self.state.phase is training.Phase.GATHER:
            return
        conductor = self._conduct()
        self._arrays = self._versions.load(snapshot) if snapshot else conductor.side.initial()
        self._refresh()
        if self.state.phase.ended:
            self.ended.set()
            return
        saved = store.load_sum(connection, self.plan.run_id)
        if saved is None:
            self._next()
        elif Phase(saved[0].phase).ended:
            self._do([_Skip(saved[0].reason)])
        else:
            self._resume(conductor, *saved)

    def _resume(
        self, conductor: Conductor, saved: store.SavedSum, closed: dict[str, dict[int, bytes]]
    ) -> None:
        plan = SumPlan.from_wire(rounds_pb2.SumPlan.FromString(saved.plan))
        running = np.frombuffer(saved.running, "<u4").astype(np.uint32) if saved.running is not None else None
        state = RoundState(
            plan,
            conductor.side.layout(self.state.purpose),
            self._half,
            self._patience_s,
            Step(saved.step),
            Phase(saved.phase),
            closed={Step(step): messages for step, messages in closed.items()},
            running=running,
        )
        state, effects = machine.advance(state, machine.Resumed(time.monotonic()))
        self._round = self._new_round(conductor, state)
        self._round.durable = state.step
        self._do(effects)

    def _conduct(self) -> Conductor:
        """Return the conductor; the population is fixed."""
        if self._conductor is None:
            by_slot = self.registry.by_slot
            population = Population(
                [by_slot[slot].participant for slot in self.state.users],
                [by_slot[slot].party for slot in self.state.users],
            )
            side = self._side(len(self.registry.items), self.state.groups)
            self._conductor = Conductor(self.plan, population, side, self._half)
        return self._conductor

    def _refresh(self) -> None:
        """Make again what participants fetch."""
        side = self._conduct().side
        self._model = model_to_bytes(side.model(self._arrays))
        opened = side.opened(self._arrays)
        packed = None if opened is None else np.packbits(opened, axis=1, bitorder="little")
        self._opened = b"" if packed is None else to_wire(packed).SerializeToString()

    # --- the run -----------------------------------------------------------------------------------------------

    async def _gathered(self) -> None:
        """Begin, once everybody expected has come."""
        users = [slot for slot, one in enumerate(self.registry.by_slot) if not one.is_owner]
        present = [slot for slot in users if self.present(self.registry.by_slot[slot].party)]
        if (
            self.state.phase is not training.Phase.GATHER
            or self.owners_alive() < max(self.request.expect_owners, 1)
            or len(present) < max(self.request.expect_users, 1)
        ):
            return
        order = sorted(present, key=lambda slot: (self.registry.by_slot[slot].party, slot))
        # Groups and cohorts are functions of the population, not of the side that is made for them.
        population = Population(
            [self.registry.by_slot[slot].participant for slot in order],
            [self.registry.by_slot[slot].party for slot in order],
        )
        sketch = Conductor(self.plan, population, self._side(0, 0), self._half)
        self.state = training.step(self.state, sketch.started(order))
        conductor = self._conduct()
        self._arrays = conductor.side.initial()
        self._refresh()
        _log.info("population fixed", run=self.plan.run_id, users=len(order), groups=self.state.groups)
        await self._save_state()
        self._next()

    def _next(self) -> None:
        """Open the next round; rounds that cannot be opened are abandoned one after the other."""
        if self.state.phase.ended:
            return
        conductor = self._conduct()
        self.state = training.begin_round(self.state)
        try:
            opening = conductor.open(self.state, hashlib.sha256(self._model).digest(), self._patience_s)
        except Failed as failed:
            self._do([_Skip(str(failed))])
            return
        self._round = self._new_round(conductor, opening)
        now = time.monotonic()
        lost = frozenset(
            member
            for party, members in self._round.by_party.items()
            if not self.present(party)
            for member in members
        )
        state, effects = machine.advance(opening, machine.Opened(now))
        if lost:
            state, more = machine.advance(state, machine.Lost(lost, now))
            effects += more
        self._round.state = state
        self._do(effects)

    def _new_round(self, conductor: Conductor, state: RoundState) -> _Round:
        covered = conductor.members(conductor.cohort(self.state))
        slots = {member: [self.state.users[p] for p in positions] for member, positions in covered.items()}
        by_party: dict[str, list[int]] = {}
        for member, one in enumerate(state.plan.members):
            by_party.setdefault(one.device, []).append(member)
        member_of = {slot: member for member, own in slots.items() for slot in own}
        return _Round(state, slots, member_of, by_party)

    # --- effects -----------------------------------------------------------------------------------------------

    def _do(self, effects: Sequence[_Task]) -> None:
        """Have effects carried out, in order and after those before."""
        if effects:
            self._work.put_nowait((self._round, self._round.state if self._round else None, effects))
            if self._worker is None:
                self._worker = asyncio.create_task(self._carry_out())

    async def _carry_out(self) -> None:
        while True:
            current, state, effects = await self._work.get()
            try:
                closed = [effect.closed for effect in effects if isinstance(effect, machine.Save)]
                if closed and current is not None and state is not None:
                    # Steps that closed together are written together: no crash comes between them.
                    await self._save_round(current, state, closed)
                for effect in effects:
                    if self.state.phase.ended or current is not self._round:
                        break
                    await self._effect(effect)
            except Exception as error:
                _log.exception("a round failed", run=self.plan.run_id)
                self.failure = error

    async def _effect(self, effect: _Task) -> None:
        match effect:
            case _Skip(reason):
                await self._abandoned(reason)
                self._next()
            case machine.Unmask():
                await self._unmask(self._current)
            case machine.Apply(total, users):
                await self._apply(self._current, total, users)
            case machine.End():
                if self._current.state.phase is Phase.ABANDONED:
                    await self._abandoned(self._current.state.reason)
                self._round = None
                self._next()

    @property
    def _current(self) -> _Round:
        if self._round is None:
            raise AssertionError("no round is in progress")
        return self._round

    def _advance(self, current: _Round, event: machine.Event) -> None:
        """Take an event into a round; one that is not in progress any more has no more effects."""
        current.state, effects = machine.advance(current.state, event)
        if current is self._round:
            self._do(effects)

    async def _save_round(self, current: _Round, state: RoundState, closed: Sequence[Step | None]) -> None:
        current.mark()
        run_id = self.plan.run_id
        running = state.running if Step.SUBMIT in closed else None
        saved = store.SavedSum(
            state.plan.round,
            state.plan.to_wire().SerializeToString(),
            state.step.value,
            state.phase.value,
            state.reason,
            None if running is None else running.astype("<u4", copy=False).tobytes(),
        )
        messages = {step.value: state.closed[step] for step in closed if step is not None}
        # The number of a round is taken for good when the round is opened.
        text = self.state.to_json() if None in closed else None

        def write(connection: sa.Connection) -> None:
            if text is not None:
                store.save_state(connection, run_id, text)
            store.save_sum(connection, run_id, saved, messages)

        await self._writer.run(write)
        self._published = self.state
        current.durable = state.step
        self.touch()

    async def _unmask(self, current: _Round) -> None:
        current.mark()
        state = current.state
        if state.running is None:
            raise AssertionError("a sum is unmasked without a running sum")
        try:
            total = await asyncio.to_thread(self._unmasked, state, state.running)
        except Failed as failed:
            current.wrong = failed.wrong
            self._advance(current, machine.UnmaskFailed(str(failed)))
            return
        current.wrong = total.wrong
        if total.wrong:
            _log.warning("wrong shares", run=self.plan.run_id, round=state.plan.round, members=total.wrong)
        self._advance(current, machine.Unmasked(total.codes))

    def _unmasked(self, state: RoundState, running: NDArray[np.uint32]) -> Total:
        with self._accounting.activity("unmask"):
            return self._half.unmask(state.plan, state.closed, running)

    async def _apply(self, current: _Round, total: NDArray[np.uint32], users: int) -> None:
        conductor, before = self._conduct(), self.state
        current.mark()
        try:
            arrays, measured = await asyncio.to_thread(self._applied, conductor, total, users)
        except ImpossibleSumError as error:
            self._advance(current, machine.Applied(str(error)))
            return
        if current is not self._round:
            # Stopped meanwhile.
            return
        self.state = training.step(before, training.Summed(measured))
        changed = before.purpose is not Purpose.EVALUATE
        round_ = before.round
        if changed:
            await asyncio.to_thread(self._versions.save, arrays, self.state.version, round_)
        self._arrays = arrays
        if changed:
            self._refresh()
        events = [self._round_event(users, self.state.version, ""), *self._consequences(before)]
        text, run_id = self.state.to_json(), self.plan.run_id

        def write(connection: sa.Connection) -> list[operator.WatchRunResponse]:
            store.save_state(connection, run_id, text)
            store.forget_sums(connection, run_id)
            if changed:
                store.set_snapshot(connection, run_id, round_)
            return events

        await self.record(write)
        self._finish_if_over()
        if changed:
            chosen = self.state.chosen
            self._versions.prune(round_, [] if chosen is None else [chosen.version])
        self._advance(current, machine.Applied())

    def _applied(self, conductor: Conductor, total: NDArray[np.uint32], users: int) -> Any:
        with self._accounting.activity("apply sums", users):
            return conductor.apply(self.state, self._arrays, total, users)

    async def _abandoned(self, reason: str) -> None:
        before = self.state
        self.state = training.step(before, training.Abandoned(reason))
        _log.warning("round abandoned", run=self.plan.run_id, round=before.round, reason=reason)
        events = [self._round_event(0, self.state.version, reason), *self._consequences(before)]
        text, run_id = self.state.to_json(), self.plan.run_id

        def write(connection: sa.Connection) -> list[operator.WatchRunResponse]:
            store.save_state(connection, run_id, text)
            store.forget_sums(connection, run_id)
            return events

        await self.record(write)
        self._finish_if_over()

    async def _save_state(self) -> None:
        text, run_id = self.state.to_json(), self.plan.run_id
        phase = operator.WatchRunResponse(phase=operator.PhaseEvent(phase=self.phase, epoch=self.epoch))

        def write(connection: sa.Connection) -> list[operator.WatchRunResponse]:
            store.save_state(connection, run_id, text)
            return [phase]

        await self.record(write)
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        self._published = self.state
        if self.state.phase.ended and not self.ended.is_set():
            _log.info(
                "run ended", run=self.plan.run_id, phase=self.state.phase.value, reason=self.state.reason
            )
            self.ended.set()
        self.touch()

    def _round_event(self, users: int, version: int, reason: str) -> operator.WatchRunResponse:
        current = self._round
        event = operator.RoundEvent(
            round=self.state.round,
            purpose="",
            pass_number=self.state.pass_number,
            version=version,
            reason=reason,
        )
        if current is not None:
            plan, seconds = current.state.plan, current.seconds()
            answered = current.state.arrived or current.state.closed.get(current.state.step, {})
            event = operator.RoundEvent(
                round=plan.round,
                purpose=plan.purpose,
                pass_number=plan.pass_number,
                users=plan.users,
                members=len(plan.members),
                summed=users,
                dropped=len(plan.members) - len(answered),
                refused=current.refused,
                reason=reason,
                phases=list(seconds),
                seconds=list(seconds.values()),
                bytes_in=current.bytes_in,
                version=version,
                liars=len(current.wrong),
            )
        return operator.WatchRunResponse(round=event)

    def _consequences(self, before: Training) -> list[operator.WatchRunResponse]:
        """Return the events of what a round's end changed: an evaluation that is complete, another phase."""
        events = []
        if len(self.state.evaluations) > len(before.evaluations):
            made = self.state.evaluations[-1]
            metrics = operator.MetricsEvent(
                epoch=made.pass_number,
                version=made.version,
                names=list(made.metrics),
                means=list(made.metrics.values()),
                users=[made.users[name] for name in made.metrics],
                owners=self.owners_alive(),
            )
            events.append(operator.WatchRunResponse(metrics=metrics))
        if _run_phase(self.state) != _run_phase(before):
            phase = operator.PhaseEvent(phase=self.phase, epoch=self.epoch)
            events.append(operator.WatchRunResponse(phase=phase))
        return events

    # --- what parties ask --------------------------------------------------------------------------------------

    async def on_joined(self, party: str, slots: Sequence[int], owners: Sequence[int]) -> None:
        """Begin when it was the last one expected."""
        await self._gathered()

    async def on_lost(self, party: str) -> None:
        """Wait for its members no longer."""
        current = self._round
        if current is not None and party in current.by_party:
            self._advance(current, machine.Lost(frozenset(current.by_party[party]), time.monotonic()))

    async def on_seen(self, party: str) -> None:
        """Count it in again; its members are waited for from their next message on."""
        await self._gathered()

    async def on_catalogue(self) -> None:
        """Items that come after the beginning take no part."""

    async def stop(self, reason: str) -> None:
        """End the run before its time."""
        if not self.state.phase.ended:
            self.state = training.step(self.state, training.Stopped(reason))
            self._round = None
            await self._save_state()

    def tasks(self, party: str) -> list[wire.Task]:
        """Return what a party is asked to do now."""
        if self._published.phase.ended:
            chosen = self._published.chosen
            version = self._published.version if chosen is None else chosen.version
            return [
                wire.Task(kind=wire.TaskKind.TASK_KIND_FINISH, reason=self._published.reason, version=version)
            ]
        current = self._round
        if current is None or party not in current.by_party:
            return []
        state = current.state
        if state.step is not current.durable:
            return []
        asked = set(state.asked)
        slots = [
            slot for member in current.by_party[party] if member in asked for slot in current.slots[member]
        ]
        if not slots:
            return []
        return [
            wire.Task(
                kind=wire.TaskKind.TASK_KIND_ROUND,
                round=RoundRef(run_id=self.plan.run_id, round=state.plan.round),
                version=self._published.version,
                slots=ranges(sorted(slots)),
                step=_STEPS[state.step],
            )
        ]

    def payload(self, party: str, role: str, request: wire.FetchRequest) -> tuple[int, bytes]:
        """Return model, plan, briefings, places, open items, catalogue or roster."""
        shared = self.shared_payload(role, request)
        if shared is not None:
            return shared
        match request.kind:
            case wire.FetchKind.FETCH_KIND_MODEL if self._model:
                return self._model_of(request.version)
            case wire.FetchKind.FETCH_KIND_OPEN_ITEMS if self._model:
                return self.state.version, self._opened
            case wire.FetchKind.FETCH_KIND_PLACES if role == "client" and self._conductor is not None:
                return 0, self._places(party).SerializeToString(deterministic=True)
            case wire.FetchKind.FETCH_KIND_SUM_PLAN if role == "client":
                plan = self._open_round(request.version).state.plan
                return plan.round, plan.to_wire().SerializeToString(deterministic=True)
            case wire.FetchKind.FETCH_KIND_BRIEFINGS if role == "client":
                return request.version, self._briefings(party, request)
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            "nothing of this kind for this caller, or not yet",
            field="kind",
            expected="MODEL, OPEN_ITEMS or CATALOGUE; SUM_PLAN, BRIEFINGS or PLACES for client hosts",
        )

    def _model_of(self, version: int) -> tuple[int, bytes]:
        chosen = self.state.chosen
        if version == 0 and self.state.phase.ended and chosen is not None:
            version = chosen.version
        if version in (0, self.state.version):
            return self.state.version, self._model
        arrays = self._versions.load_version(version)
        if arrays is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                f"version {version} is not kept",
                field="version",
                expected="0 for the newest, or the version of an open round",
            )
        return version, model_to_bytes(self._conduct().side.model(arrays))

    def _places(self, party: str) -> wire.Places:
        conductor = self._conduct()
        rows = [
            (slot, position, int(conductor.group_of[position]))
            for position, slot in enumerate(self.state.users)
            if self.registry.by_slot[slot].party == party
        ]
        table = np.array(rows, np.uint32).reshape(-1, 3)
        return wire.Places(users=len(self.state.users), places=to_wire(table))

    def _open_round(self, number: int) -> _Round:
        current = self._round
        if current is None or current.durable is None or current.state.plan.round != number:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                f"round {number} is not in progress",
                field="round",
                expected="the round of the present task",
            )
        return current

    def _briefings(self, party: str, request: wire.FetchRequest) -> bytes:
        current = self._open_round(request.version)
        state = current.state
        if _STEPS[state.step] != request.step or state.step is not current.durable:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                "the step is not open",
                field="step",
                expected=wire.RoundStep.Name(_STEPS[state.step]),
            )
        asked = set(state.asked)
        briefings = [
            wire.Briefing(member=member, payload=state.briefing(member))
            for member in current.by_party.get(party, [])
            if member in asked
        ]
        return wire.Briefings(briefings=briefings).SerializeToString(deterministic=True)

    async def submitted(
        self, party: str, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes
    ) -> None:
        """Take a member's message for a step."""
        step = _KINDS.get(head.kind)
        if step is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "no such kind of item in a run with rounds",
                field="kind",
                expected="ADVERT, SHARES, VECTOR, CONFIRMATION or UNMASKING",
            )
        current = self._open_round(head.round.round)
        try:
            member = current.member_of.get(slots[0]) if slots else None
            if member is None or sorted(current.slots[member]) != sorted(slots):
                raise Refusal(
                    ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                    "these slots are not those of one member of the round",
                    field="slots",
                    expected="all the slots that one member covers",
                )
            self._advance(current, machine.Arrived(member, step, payload, time.monotonic()))
        except Refusal:
            current.refused += 1
            raise
        current.bytes_in += len(payload)

    # --- time, watching ----------------------------------------------------------------------------------------

    async def on_time(self) -> None:
        """Let a step that takes too long close, and a gathering fail."""
        now = time.monotonic()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            await self.stop(f"a fault of the orchestration server: {type(failure).__name__}")
        elif self.state.phase is training.Phase.GATHER:
            if now - self._gather_since > self.request.phase_timeout_ms / 1e3:
                users = sum(not one.is_owner for one in self.registry.by_slot)
                owners = self.owners_alive()
                await self.stop(
                    f"gather took too long; {owners} of {self.request.expect_owners} data owners and "
                    f"{users} of {self.request.expect_users} users came"
                )
        elif self._round is not None and self._round.durable is not None:
            self._advance(self._round, machine.Tick(now))

    @property
    def over(self) -> bool:
        """Whether the run has ended, durably."""
        return self._published.phase.ended

    @property
    def phase(self) -> operator.RunPhase.ValueType:
        """The phase as operators see it."""
        return _run_phase(self.state)

    @property
    def epoch(self) -> int:
        """Complete passes over all users."""
        return self.state.pass_number

    @property
    def version(self) -> int:
        """Model version."""
        return self.state.version

    @property
    def reason(self) -> str:
        """Why the run failed; empty otherwise."""
        return self.state.reason

    def progress(self) -> operator.ProgressEvent:
        """Return counters for watchers."""
        received, sent = self._traffic()
        event = operator.ProgressEvent(updates=self.state.version, bytes_in=received, bytes_out=sent)
        current = self._round
        if current is not None:
            state = current.state
            expected = len(state.expected)
            event.round.CopyFrom(
                operator.RoundProgress(
                    round=state.plan.round,
                    purpose=state.plan.purpose,
                    phase=current.phase,
                    members=len(state.plan.members),
                    answered=len(state.arrived),
                    dropped=len(state.plan.members) - expected + len(state.lost & state.expected),
                    passes=self.state.pass_number,
                    of_passes=self.state.passes,
                )
            )
        return event

    def remember(self, event: operator.WatchRunResponse) -> None:
        """Take note of evaluations and rounds."""
        if event.HasField("metrics"):
            metrics = event.metrics
            self.history.append(
                {
                    "epoch": metrics.epoch,
                    "version": metrics.version,
                    "time_ms": event.time_ms,
                    "owners": metrics.owners,
                    "withheld": metrics.withheld,
                    "metrics": dict(zip(metrics.names, metrics.means, strict=True)),
                    "users": dict(zip(metrics.names, metrics.users, strict=True)),
                }
            )
        elif event.HasField("round"):
            one = event.round
            self._rounds.append(
                {
                    "round": one.round,
                    "time_ms": event.time_ms,
                    "purpose": one.purpose,
                    "pass": one.pass_number,
                    "users": one.users,
                    "members": one.members,
                    "summed": one.summed,
                    "dropped": one.dropped,
                    "refused": one.refused,
                    "liars": one.liars,
                    "reason": one.reason,
                    "seconds": dict(zip(one.phases, one.seconds, strict=True)),
                    "bytes_in": one.bytes_in,
                    "version": one.version,
                }
            )

    def facts(self) -> dict[str, Any]:
        """Return history, rounds and the version that was chosen."""
        chosen = self.state.chosen
        return {
            "history": self.history,
            "rounds": self._rounds,
            "abandoned": self.state.abandoned,
            "groups": self.state.groups,
            "chosen": None
            if chosen is None
            else {
                "version": chosen.version,
                "epoch": chosen.pass_number,
                "metrics": dict(chosen.metrics),
                "users": dict(chosen.users),
            },
        }


@dataclass(frozen=True)
class _Skip:
    """A round that could not be opened."""

    reason: str


_Task = machine.Effect | _Skip


def _run_phase(state: Training) -> operator.RunPhase.ValueType:
    match state.phase:
        case training.Phase.GATHER:
            return operator.RunPhase.RUN_PHASE_GATHER
        case training.Phase.ROUNDS:
            return _PURPOSES[state.purpose]
        case training.Phase.DONE:
            return operator.RunPhase.RUN_PHASE_DONE
        case training.Phase.FAILED:
            return operator.RunPhase.RUN_PHASE_FAILED
