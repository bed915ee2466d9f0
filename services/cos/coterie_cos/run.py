"""One run at the COS: the state machine, carried out durably, with tasks for those who poll and events for watchers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import sqlalchemy as sa
import structlog
from google.protobuf.message import DecodeError, Message

from coterie.rounds import asynchronous as rounds
from coterie.store import cos as store
from coterie.store.engine import Writer
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import from_wire
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef
from coterie_cos.model import Model
from coterie_cos.registry import Registry, ranges

__all__ = ["HOLD_S", "Run"]

_log = structlog.get_logger("coterie.cos")

M = TypeVar("M", bound=Message)

HOLD_S = 20.0
"""Longest time that a poll is held, seconds."""

_PROGRESS_S = 0.5

_TASKS = {
    rounds.TaskKind.DELIVER: wire.TaskKind.TASK_KIND_DELIVER,
    rounds.TaskKind.INTAKE: wire.TaskKind.TASK_KIND_INTAKE,
    rounds.TaskKind.EPOCH: wire.TaskKind.TASK_KIND_EPOCH,
    rounds.TaskKind.EVALUATE: wire.TaskKind.TASK_KIND_EVALUATE,
    rounds.TaskKind.FINISH: wire.TaskKind.TASK_KIND_FINISH,
}


@dataclass
class _Presence:
    """When a party was last heard, by the monotonic clock."""

    heard: float
    lost: bool = False


class Run:
    """A run: registry, model, state, tasks, events.

    Parameters
    ----------
    request : StartRunRequest
        As the operator sent it.
    folder : Path
        State folder of the service.
    writer : Writer
        The store's writer.
    snapshot_every : int
        Updates between two snapshots of the model.
    traffic : callable
        Returns bytes received and sent by the service so far.
    """

    def __init__(
        self,
        request: operator.StartRunRequest,
        folder: Path,
        writer: Writer,
        snapshot_every: int,
        traffic: Callable[[], tuple[int, int]],
    ) -> None:
        self.request = request
        self.plan = request.plan
        self.registry = Registry(self.plan.run_id)
        self.model = Model(self.plan, folder / "models" / self.plan.run_id, writer, snapshot_every)
        self.state = rounds.RunState(
            epochs=self.plan.epochs,
            expect_owners=request.expect_owners,
            expect_users=request.expect_users,
        )
        # What tasks are made from: the last state that is durable.
        self._published = self.state
        self.ended = asyncio.Event()
        self.history: list[dict[str, object]] = []
        self._writer = writer
        self._traffic = traffic
        self._parties: dict[str, _Presence] = {}
        # Another number after each start, so that no cursor from before is taken for the present one.
        self._revision = time.time_ns() // 1_000_000
        self._changed = asyncio.Event()
        self._events: list[operator.WatchRunResponse] = []
        self._phase_since = time.monotonic()
        self._progress_at = 0.0
        self._evaluated_at = 0
        self._epoch_loss = float("nan")

    # --- durable state -----------------------------------------------------------------------------------------

    def restore(self, connection: sa.Connection, state: str, snapshot: int) -> None:
        """Take up a run after a restart: every party that was present gets its full time to be heard again."""
        self.state = self._published = rounds.RunState.from_json(state)
        self.registry.restore(connection, self.state.catalogue)
        self.model.restore(connection, snapshot, len(self.registry.by_slot), len(self.registry.items))
        rows = connection.execute(
            sa.select(store.events.c.message)
            .where(store.events.c.run_id == self.plan.run_id)
            .order_by(store.events.c.number)
        )
        self._events = [operator.WatchRunResponse.FromString(row.message) for row in rows]
        for event in self._events:
            if event.HasField("metrics"):
                self._remember(event)
        self._evaluated_at = max((p.version for p in self.state.points), default=self.model.version)
        now = time.monotonic()
        present = {owner.party: owner.present for owner in self.state.owners.values()}
        present |= {name: host.present for name, host in self.state.hosts.items()}
        self._parties = {party: _Presence(now, lost=not there) for party, there in present.items()}
        if self.state.phase.ended:
            self.ended.set()

    async def take(self, event: rounds.Event) -> None:
        """Carry out an event: the new state is durable before anybody acts on it."""
        before, self.state = self.state, rounds.step(self.state, event)
        await self._after(before)

    async def _after(self, before: rounds.RunState) -> None:
        # A complete pass opens the next epoch and an evaluation of the model as it is.
        while self.state.phase is rounds.Phase.TRAIN and rounds.pass_complete(self.state):
            self._open_point(self.state.epoch)
            self.state = rounds.next_epoch(self.state)
        after = self.state
        if after == before:
            return
        closed = [point for point in before.points if point not in after.points]
        moved = (before.phase, before.epoch, rounds.delivered(before)) != (
            after.phase,
            after.epoch,
            rounds.delivered(after),
        )
        if moved:
            self._phase_since = time.monotonic()
        phase = operator.WatchRunResponse(phase=operator.PhaseEvent(phase=self.phase, epoch=after.epoch))

        def write(connection: sa.Connection) -> list[operator.WatchRunResponse]:
            store.save_state(connection, self.plan.run_id, after.to_json())
            made = [self._metrics(connection, point) for point in closed]
            return [*made, phase] if moved else made

        await self._record(write)
        self._published = after
        if after.phase.ended:
            _log.info("run ended", run=self.plan.run_id, phase=after.phase.value, reason=after.reason)
            self.ended.set()
        self.touch()

    def touch(self) -> None:
        """Wake everybody who waits for a change."""
        self._revision += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- what parties ask --------------------------------------------------------------------------------------

    def heard(self, party: str) -> bool:
        """Note that a party is alive; return whether it counted as absent until now."""
        presence = self._parties.get(party)
        if presence is None:
            # It has left: a call of its own that was under way does not bring it back.
            return False
        presence.heard = time.monotonic()
        returned, presence.lost = presence.lost, False
        return returned

    async def joined(self, party: str, *, catalogue: bool) -> None:
        """Carry out the registration of a party's participants, which the registry has taken up."""
        known = party in self._parties
        self._parties[party] = _Presence(time.monotonic())
        self.model.grow(len(self.registry.by_slot), len(self.registry.items))
        slots = self.registry.slots_of(party)
        owners = [slot for slot in slots if self.registry.by_slot[slot].is_owner]
        for slot in owners:
            await self.take(rounds.OwnerJoined(slot, party))
        if len(owners) < len(slots):
            await self.take(rounds.UsersJoined(party, len(slots) - len(owners)))
        if catalogue:
            await self.new_catalogue()
        change = "returned" if known else "joined"
        await self._emit(operator.WatchRunResponse(party=operator.PartyEvent(party=party, change=change)))

    async def left(self, party: str, change: str = "left") -> None:
        """Carry out that a party takes no further part."""
        self._parties.pop(party, None)
        await self.take(rounds.PartyLost(party))
        if any(owner.party == party for owner in self.state.owners.values()):
            await self.new_catalogue()
        await self._emit(operator.WatchRunResponse(party=operator.PartyEvent(party=party, change=change)))

    async def returned(self, party: str) -> None:
        """Carry out that a party which counted as absent was heard again."""
        await self.take(rounds.PartySeen(party))
        if any(owner.party == party for owner in self.state.owners.values()):
            await self.new_catalogue()
        await self._emit(operator.WatchRunResponse(party=operator.PartyEvent(party=party, change="returned")))

    async def new_catalogue(self) -> None:
        """Give the catalogue a new version."""
        self.registry.catalogue_version += 1
        await self.take(rounds.Catalogued(self.registry.catalogue_version))

    def present_owners(self) -> dict[int, bool]:
        """Return for each owner's slot whether it is present."""
        return {slot: owner.present for slot, owner in self.state.owners.items()}

    async def poll(self, party: str, cursor: int, hold_s: float) -> wire.PollResponse:
        """Return the open tasks of a party; wait while nothing is newer than its cursor."""
        # A party that waits here must be heard again well before it counts as silent.
        patience = self.request.party_timeout_ms / 1e3
        deadline = time.monotonic() + min(hold_s, HOLD_S, patience / 3)
        while self._revision == cursor:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            changed = self._changed
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                break
        self.heard(party)
        return wire.PollResponse(
            revision=self._revision,
            tasks=[self._task(task, slots) for task, slots in self._tasks(party).items()],
            deadline_ms=self.request.phase_timeout_ms,
        )

    def _tasks(self, party: str) -> dict[rounds.Task, list[int]]:
        found: dict[rounds.Task, list[int]] = {}
        state = self._published
        if party in state.hosts:
            found.update((task, []) for task in rounds.host_tasks(state, party))
        for slot, owner in sorted(state.owners.items()):
            task = rounds.owner_task(state, slot) if owner.party == party else None
            if task is not None:
                found.setdefault(task, []).append(slot)
        return found

    def _task(self, task: rounds.Task, slots: Sequence[int]) -> wire.Task:
        return wire.Task(
            kind=_TASKS[task.kind],
            round=RoundRef(run_id=self.plan.run_id, round=task.epoch, point=task.point),
            version=task.version,
            flush=task.flush,
            reason=task.reason,
            slots=ranges(slots),
        )

    async def submitted(
        self,
        party: str,
        kind: wire.SubmitKind.ValueType,
        round_: RoundRef,
        slots: Sequence[int],
        payload: bytes,
    ) -> None:
        """Carry out a submitted item whose bytes are whole.

        Raises
        ------
        Refusal
            When it does not fit the run's state.
        """
        if kind == wire.SubmitKind.SUBMIT_KIND_DELIVERED:
            status = _parse(wire.DeliveryStatus, payload)
            if party not in self.state.hosts or status.catalogue_version > self.state.catalogue:
                raise Refusal(
                    ErrorReason.ERROR_REASON_INVALID_FIELD,
                    f"catalogue {status.catalogue_version} does not exist, or the caller has no users",
                    field="catalogue_version",
                    expected=f"at most {self.state.catalogue}",
                )
            await self.take(rounds.Delivered(party, status.catalogue_version))
        elif kind == wire.SubmitKind.SUBMIT_KIND_EPOCH_DONE:
            _parse(wire.EpochStatus, payload)
            if not slots:
                raise Refusal(
                    ErrorReason.ERROR_REASON_INVALID_FIELD,
                    "a pass of no data owner",
                    field="slots",
                    expected="the slots of the owners that have done it",
                )
            for slot in slots:
                self.registry.own_slot(party, slot, owner=True)
                if round_.round > self.state.epoch:
                    raise Refusal(
                        ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                        f"epoch {round_.round} has not begun",
                        field="round",
                        expected=f"at most {self.state.epoch}",
                    )
                await self.take(rounds.PassDone(slot, round_.round))
        elif kind == wire.SubmitKind.SUBMIT_KIND_METRICS:
            await self.take(rounds.Measured(party, round_.point))
        else:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "no such kind of item",
                field="kind",
                expected="DELIVERED, EPOCH_DONE or METRICS",
            )

    # --- evaluation --------------------------------------------------------------------------------------------

    def _open_point(self, epoch: int) -> None:
        loss = self.model.take_loss()
        if not math.isnan(loss):
            self._epoch_loss = loss
        frozen = self.model.freeze()
        self._evaluated_at = frozen.version
        self.state = rounds.step(self.state, rounds.PointOpened(epoch, frozen.version))

    @property
    def evaluation_due(self) -> bool:
        """Whether the plan's number of updates has passed since the last evaluation."""
        every = self.request.evaluate_every
        return (
            every > 0
            and self.state.phase is rounds.Phase.TRAIN
            and self.model.version - self._evaluated_at >= every
        )

    async def maybe_evaluate(self) -> None:
        """Open an evaluation within an epoch when one is due."""
        if self.evaluation_due:
            before = self.state
            self._open_point(self.state.epoch)
            await self._after(before)

    def point_open(self, number: int) -> bool:
        """Whether an evaluation still waits for sums."""
        return any(point.number == number for point in self.state.points)

    def check_metrics(self, party: str, number: int, payload: bytes) -> None:
        """Check a metric sum for an evaluation before it is filed.

        Raises
        ------
        Refusal
            When the caller has no users, the sums are malformed or of another version than the evaluation's, or over
            fewer users than the plan's floor.
        """
        sums = _parse(wire.MetricSums, payload)
        if party not in self.state.hosts:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT, f"{party} has no users", field="slots"
            )
        if not sums.names:
            return
        version = next((point.version for point in self.state.points if point.number == number), None)
        if version is not None and sums.version != version:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"the sums are of version {sums.version}",
                field="version",
                expected=f"{version}, which evaluation {number} asks for",
            )
        if len(set(sums.names)) < len(sums.names):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "a metric is named twice",
                field="names",
                expected="each metric once",
            )
        counted = from_wire(sums.sums, np.float64, (len(sums.names), 2), field="sums")[:, 1]
        users = self.state.hosts[party].users
        if users < self.plan.min_users or (counted < 0).any() or (counted > users).any():
            raise Refusal(
                ErrorReason.ERROR_REASON_BELOW_FLOOR,
                "a metric sum over too few users, or over more than the host has",
                field="sums",
                expected=f"sums over at least {self.plan.min_users} and at most {users} users",
            )

    def _metrics(self, connection: sa.Connection, point: rounds.Point) -> operator.WatchRunResponse:
        kind = int(wire.SubmitKind.SUBMIT_KIND_METRICS)
        payloads = store.load_submissions(connection, self.plan.run_id, kind, point_place(point.number))
        totals: dict[str, np.ndarray] = {}
        withheld = 0
        for payload in payloads.values():
            sums = wire.MetricSums.FromString(payload)
            withheld += not sums.names
            if sums.names:
                rows = from_wire(sums.sums, np.float64, (len(sums.names), 2), field="sums")
                for name, row in zip(sums.names, rows, strict=True):
                    totals[name] = totals.get(name, np.zeros(2)) + row
        totals = {name: row for name, row in totals.items() if row[1] > 0}
        event = operator.MetricsEvent(
            epoch=point.epoch,
            version=point.version,
            names=list(totals),
            means=[float(row[0] / row[1]) for row in totals.values()],
            users=[int(row[1]) for row in totals.values()],
            owners=sum(owner.present for owner in self.state.owners.values()),
            withheld=withheld,
        )
        if not math.isnan(self._epoch_loss):
            event.names.append("train_loss")
            event.means.append(self._epoch_loss)
            event.users.append(0)
        return operator.WatchRunResponse(metrics=event)

    # --- watching ----------------------------------------------------------------------------------------------

    @property
    def phase(self) -> operator.RunPhase.ValueType:
        """The phase as operators see it."""
        match self.state.phase:
            case rounds.Phase.GATHER:
                return operator.RunPhase.RUN_PHASE_GATHER
            case rounds.Phase.TRAIN:
                if self.state.epoch > 1:
                    return operator.RunPhase.RUN_PHASE_EPOCH
                done = rounds.delivered(self.state)
                return operator.RunPhase.RUN_PHASE_FLUSH if done else operator.RunPhase.RUN_PHASE_INTAKE
            case rounds.Phase.EVALUATE:
                return operator.RunPhase.RUN_PHASE_EVALUATE
            case rounds.Phase.DONE:
                return operator.RunPhase.RUN_PHASE_DONE
            case rounds.Phase.FAILED:
                return operator.RunPhase.RUN_PHASE_FAILED

    def summary(self) -> operator.RunState:
        """Return the run in numbers."""
        return operator.RunState(
            plan=self.plan,
            phase=self.phase,
            epoch=self.state.epoch,
            version=self.model.version,
            owners_alive=sum(owner.present for owner in self.state.owners.values()),
            hosts_alive=sum(host.present for host in self.state.hosts.values()),
            users=self.registry.users(),
            items=len(self.registry.items),
            reason=self.state.reason,
        )

    async def watch(self, first: int) -> AsyncIterator[operator.WatchRunResponse]:
        """Yield events from a number on, as they happen, until the run has ended."""
        number = max(first, 1)
        while True:
            changed = self._changed
            while number <= len(self._events):
                yield self._events[number - 1]
                number += 1
            # Not ``self.state``: the last events are on their way to the store when it says that the run has ended.
            if self._published.phase.ended:
                return
            try:
                async with asyncio.timeout(_PROGRESS_S):
                    await changed.wait()
            except TimeoutError:
                # Progress is worth seeing and not worth keeping: it has no number.
                yield self._stamp(operator.WatchRunResponse(progress=self._progress()))

    def _progress(self) -> operator.ProgressEvent:
        received, sent = self._traffic()
        model = self.model
        return operator.ProgressEvent(
            blocks=model.blocks,
            interactions=model.interactions,
            updates=model.version,
            loss=model.loss_sum / model.loss_blocks if model.loss_blocks else 0.0,
            bytes_in=received,
            bytes_out=sent,
            stale=model.staleness.refused,
        )

    async def _emit(self, event: operator.WatchRunResponse) -> None:
        await self._record(lambda _: [event])
        self.touch()

    async def _record(self, make: Callable[[sa.Connection], list[operator.WatchRunResponse]]) -> None:
        """Write what ``make`` writes, and the events that it returns, in one transaction."""

        def write(connection: sa.Connection) -> list[operator.WatchRunResponse]:
            made = [self._stamp(event) for event in make(connection)]
            number = store.last_event(connection, self.plan.run_id)
            for event in made:
                number += 1
                event.number = number
                store.save_event(connection, self.plan.run_id, number, event.SerializeToString())
            return made

        for event in await self._writer.run(write):
            self._events.append(event)
            if event.HasField("metrics"):
                self._remember(event)

    def _stamp(self, event: operator.WatchRunResponse) -> operator.WatchRunResponse:
        event.time_ms = time.time_ns() // 1_000_000
        event.state.CopyFrom(self.summary())
        return event

    def _remember(self, event: operator.WatchRunResponse) -> None:
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

    def report(self) -> str:
        """Return what the COS knows, as JSON (docs/report.md)."""
        received, sent = self._traffic()
        parties = [
            {"time_ms": event.time_ms, "party": event.party.party, "change": event.party.change}
            for event in self._events
            if event.HasField("party")
        ]
        phases = [
            {
                "time_ms": event.time_ms,
                "phase": operator.RunPhase.Name(event.phase.phase).removeprefix("RUN_PHASE_").lower(),
                "epoch": event.phase.epoch,
                "owners": event.state.owners_alive,
                "hosts": event.state.hosts_alive,
                "version": event.state.version,
            }
            for event in self._events
            if event.HasField("phase")
        ]
        return json.dumps(
            {
                "run_id": self.plan.run_id,
                "phase": self.state.phase.value,
                "reason": self.state.reason,
                "version": self.model.version,
                "users": self.registry.users(),
                "items": len(self.registry.items),
                "blocks": {slot: at.blocks for slot, at in self.model.progress.items()},
                "history": self.history,
                "staleness": {
                    "max_staleness": self.plan.max_staleness,
                    "refused": self.model.staleness.refused,
                    "histogram": {str(age): n for age, n in sorted(self.model.staleness.applied.items())},
                },
                "parties": parties,
                "phases": phases,
                "bytes_in": received,
                "bytes_out": sent,
            }
        )

    # --- time --------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Carry out what only the clock can tell: silent parties, and phases that take too long."""
        if self.state.phase.ended:
            return
        now = time.monotonic()
        patience = self.request.party_timeout_ms / 1e3
        for party, presence in list(self._parties.items()):
            if not presence.lost and now - presence.heard > patience:
                presence.lost = True
                _log.warning("party lost", party=party)
                await self.take(rounds.PartyLost(party))
                if any(owner.party == party for owner in self.state.owners.values()):
                    await self.new_catalogue()
                event = operator.PartyEvent(party=party, change="lost")
                await self._emit(operator.WatchRunResponse(party=event))
        if now - self._phase_since > self.request.phase_timeout_ms / 1e3:
            reason = f"{self.state.phase.value} took too long; waiting for: {rounds.waiting_for(self.state)}"
            await self.take(rounds.Stopped(reason))
        self.model.thaw({point.version for point in self.state.points})


def point_place(number: int) -> str:
    """Return where submissions for an evaluation are filed."""
    return f"point/{number}"


def _parse(kind: type[M], payload: bytes) -> M:
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            f"the payload is no {kind.DESCRIPTOR.name}",
            field="chunk.data",
            expected=f"a serialised {kind.DESCRIPTOR.name}",
        ) from error
