"""Run DRIFT's published form at the COS: owners' gradients are applied as they come, without rounds."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
import structlog

from coterie.store import cos as store
from coterie.store.engine import Term
from coterie.store.versions import VersionRows
from coterie.systems.drift import published_run as rounds
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import from_wire, to_wire
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef
from coterie_cos.drift.model import Frozen, PublishedModel
from coterie_cos.drift.patience import Patience
from coterie_cos.drift.resuming import since_failure, taken_up
from coterie_cos.participants import ranges
from coterie_cos.remembered import Remembered
from coterie_cos.run import GIVE_UP_S, Run, missing_words, parse

__all__ = ["AsynchronousRun"]

_log = structlog.get_logger("coterie.cos")

_TASKS = {
    rounds.TaskKind.DELIVER: wire.TaskKind.TASK_KIND_DELIVER,
    rounds.TaskKind.INTAKE: wire.TaskKind.TASK_KIND_INTAKE,
    rounds.TaskKind.EPOCH: wire.TaskKind.TASK_KIND_EPOCH,
    rounds.TaskKind.EVALUATE: wire.TaskKind.TASK_KIND_EVALUATE,
    rounds.TaskKind.FINISH: wire.TaskKind.TASK_KIND_FINISH,
}


class AsynchronousRun(Run):
    """A run of DRIFT's published form: a state machine of phases and epochs, with its states made durable.

    Parameters
    ----------
    request, term, traffic
        As for `Run`.
    folder : Path
        State folder of the service.
    snapshot_every : int
        Updates between two snapshots of the model.
    """

    state: rounds.RunState
    _published: rounds.RunState

    def __init__(
        self,
        request: operator.StartRunRequest,
        folder: Path,
        term: Term,
        snapshot_every: int,
        traffic: Callable[[], tuple[int, int]],
        rows: VersionRows | None = None,
    ) -> None:
        super().__init__(request, term, traffic)
        models = folder / "models" / self.plan.run_id
        self.model = PublishedModel(self.plan, models, term, snapshot_every, rows)
        self.state = rounds.RunState(
            epochs=self.plan.epochs,
            expect_owners=request.expect_owners,
            expect_users=request.expect_users,
        )
        self._published = self.state
        self._remembered = Remembered()
        self._patience = Patience(time.monotonic())
        self._evaluated_at = 0
        self._epoch_loss = float("nan")

    # --- durable state -----------------------------------------------------------------------------------------

    async def drop(self) -> None:
        """Stop using the state in memory; return once no snapshot is being written."""
        await super().drop()
        await self.model.drop()

    def restore(self, connection: sa.Connection, state: str, snapshot: int) -> None:
        """Restore the run from the store after a restart."""
        self.state = self._published = rounds.RunState.from_json(state)
        present = {owner.party: owner.present for owner in self.state.owners.values()}
        present |= {name: host.present for name, host in self.state.hosts.items()}
        self.take_up(connection, self.state.catalogue, present)
        self.model.restore(connection, snapshot, len(self.registry.by_slot), len(self.registry.items))
        self._evaluated_at = max((p.version for p in self.state.points), default=self.model.version)
        if self.state.phase.ended:
            self.ended.set()

    # --- resuming ----------------------------------------------------------------------------------------------

    def take_up_again(self) -> list[operator.WatchRunResponse]:
        """Change the state to where the run failed; return the events to be stored with it."""
        before = self.state
        for event in since_failure(self):
            self.state = rounds.step(self.state, event)
        return taken_up(self, before.reason, before.epoch)

    async def gather_again(self) -> None:
        """End the epoch or an evaluation if parties reported what was missing while the run had failed."""
        before, self.state = self.state, rounds.advanced(self.state)
        await self._after(before)

    async def take(self, event: rounds.Event) -> None:
        """Apply an event to the state; the new state is durable before tasks are made from it."""
        before, self.state = self.state, rounds.step(self.state, event)
        await self._after(before)

    async def _after(self, before: rounds.RunState) -> None:
        # A complete pass starts the next epoch, and an evaluation of the present model.
        while self.state.phase is rounds.PublishedPhase.TRAIN and rounds.pass_complete(self.state):
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
        ) and not (before.phase.ended and after.phase.ended)
        if moved:
            self._patience.went_on()
        phase = operator.WatchRunResponse(phase=operator.PhaseEvent(phase=self.phase, epoch=after.epoch))
        frozen, evaluated = self.model.frozen_since(), {point.version for point in after.points}

        def write(connection: sa.Connection) -> list[operator.WatchRunResponse]:
            self.model.keep_frozen(connection, frozen, evaluated)
            store.save_state(connection, self.plan.run_id, after.to_json())
            made = [self._metrics(connection, point) for point in closed]
            return [*made, phase] if moved else made

        await self.record(write)
        self._published = after
        if after.phase.ended and not self.ended.is_set():
            _log.info("run ended", run=self.plan.run_id, phase=after.phase.value, reason=after.reason)
            self.ended.set()
        self.touch()

    # --- what parties ask --------------------------------------------------------------------------------------

    async def on_joined(self, party: str, slots: Sequence[int], owners: Sequence[int]) -> None:
        """Add rows for the party's users and items to the model, and count the party as present."""
        self.model.grow(len(self.registry.by_slot), len(self.registry.items))
        for slot in owners:
            await self.take(rounds.OwnerJoined(slot, party))
        if len(owners) < len(slots):
            await self.take(rounds.UsersJoined(party, len(slots) - len(owners)))

    async def on_lost(self, party: str) -> None:
        """Stop waiting for the party."""
        await self.take(rounds.PartyLost(party))

    async def on_seen(self, party: str) -> None:
        """Count a returned party as present."""
        await self.take(rounds.PartySeen(party))

    async def on_catalogue(self) -> None:
        """Ask hosts to deliver to the catalogue's new version."""
        await self.take(rounds.CatalogueChanged(self.registry.catalogue_version))

    async def stop(self, reason: str, *, may_pass: bool = False) -> None:
        """End the run before its time; ``may_pass`` says whether its cause may pass, so that it can be resumed."""
        await self.take(rounds.Stopped(reason, may_pass))

    def present_owners(self) -> dict[int, bool]:
        """Return for each owner's slot whether it is present."""
        return {slot: owner.present for slot, owner in self.state.owners.items()}

    def owners_alive(self) -> int:
        """Return how many data owners are present."""
        return sum(owner.present for owner in self.state.owners.values())

    def hosts_alive(self) -> int:
        """Return how many client hosts are present."""
        return sum(host.present for host in self.state.hosts.values())

    def tasks(self, party: str) -> list[wire.Task]:
        """Return the open tasks of a party."""
        return [self._task(task, slots) for task, slots in self._tasks(party).items()]

    def payload(self, party: str, role: str, request: wire.FetchRequest) -> tuple[int, bytes]:
        """Return version and bytes of item factors, the caller's own user factors, the catalogue or the roster."""
        shared = self.shared_payload(role, request)
        if shared is not None:
            return shared
        if request.kind == wire.FetchKind.FETCH_KIND_MODEL:
            held = self._version(request.version)
            return held.version, to_wire(held.items).SerializeToString()
        if request.kind == wire.FetchKind.FETCH_KIND_USER_ROWS:
            held = self._version(request.version)
            slots = [slot for slot in self.registry.slots_of(party) if slot < len(held.users)]
            return held.version, to_wire(held.users[slots]).SerializeToString()
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            "nothing of this kind for this caller",
            field="kind",
            expected="MODEL, USER_ROWS or CATALOGUE; ROSTER for data owners",
        )

    async def read(self, request: wire.FetchRequest) -> None:
        """Read an evaluated version into memory before `payload` is asked for it."""
        kinds = wire.FetchKind.FETCH_KIND_MODEL, wire.FetchKind.FETCH_KIND_USER_ROWS
        if request.kind in kinds and request.version not in (0, self.model.version):
            await self.model.read_frozen(request.version)

    def _version(self, version: int) -> PublishedModel | Frozen:
        return self.model if version in (0, self.model.version) else self.model.frozen(version)

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
            resumable=task.kind is rounds.TaskKind.FINISH and self.resumable,
        )

    async def submitted(
        self, party: str, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes
    ) -> None:
        """Take a submitted item whose bytes are complete."""
        kind, round_ = head.kind, head.round
        if kind == wire.SubmitKind.SUBMIT_KIND_DELIVERED:
            status = parse(wire.DeliveryStatus, payload)
            if party not in self.state.hosts or status.catalogue_version > self.state.catalogue:
                raise Refusal(
                    ErrorReason.ERROR_REASON_INVALID_FIELD,
                    f"catalogue {status.catalogue_version} does not exist, or the caller has no users",
                    field="catalogue_version",
                    expected=f"at most {self.state.catalogue}",
                )
            await self.take(rounds.RecordsDelivered(party, status.catalogue_version))
        elif kind == wire.SubmitKind.SUBMIT_KIND_EPOCH_DONE:
            parse(wire.EpochStatus, payload)
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
            await self._file_metrics(party, head, payload)
            await self.take(rounds.Measured(party, round_.point))
        else:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "no such kind of item",
                field="kind",
                expected="DELIVERED, EPOCH_DONE or METRICS",
            )

    async def _file_metrics(self, party: str, head: wire.SubmitRequest, payload: bytes) -> None:
        # Store before counting: the evaluation closes once every host is counted, and needs all sums then.
        self.check_metrics(party, head.round.point, payload)
        run_id, place, kind = self.plan.run_id, point_place(head.round.point), int(head.kind)
        is_open = self.point_open(head.round.point)
        # Since version 2 items come without a hash.  The store has it beside the payload, which is short.
        sha256 = head.sha256 or hashlib.sha256(payload).digest()

        def write(connection: sa.Connection) -> bytes | None:
            return store.save_submission(
                connection, run_id, party, kind, place, sha256, payload, only_if_filed=not is_open
            )

        filed = await self._term.run(write)
        if filed is None:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                f"evaluation {head.round.point} is not open",
                field="round.point",
                expected="an open evaluation",
            )
        if filed != sha256:
            raise Refusal(
                ErrorReason.ERROR_REASON_CONFLICT,
                "another sum was submitted for this evaluation before",
                field="chunk.data",
                expected="the same bytes again",
            )

    async def missed(self, owner: int, sequence: int) -> None:
        """Take note that an owner's exchanges up to a number were acknowledged; say which of them this server lacks."""
        first = self.model.progress.get(owner, store.Progress()).sequence + 1
        if sequence < first or (owner, first, sequence) in self.state.lost:
            return
        _log.warning(
            "this server is behind a data owner, as after a restore: its exchanges are lost",
            run=self.plan.run_id,
            party=self.registry.by_slot[owner].party,
            first=first,
            last=sequence,
        )
        await self.take(rounds.ExchangesLost(owner, first, sequence))

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
            and self.state.phase is rounds.PublishedPhase.TRAIN
            and self.model.version - self._evaluated_at >= every
        )

    async def maybe_evaluate(self) -> None:
        """Open an evaluation within an epoch when one is due."""
        if self.evaluation_due:
            before = self.state
            self._open_point(self.state.epoch)
            await self._after(before)

    def point_open(self, number: int) -> bool:
        """Return whether an evaluation still waits for sums."""
        return any(point.number == number for point in self.state.points)

    def check_metrics(self, party: str, number: int, payload: bytes) -> None:
        """Check a host's metric sum for an evaluation before it is stored.

        Raises
        ------
        Refusal
            When the caller has no users, the sums are malformed or of another version than the evaluation's, or over
            fewer users than the plan's floor.
        """
        sums = parse(wire.MetricSums, payload)
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
    def waiting(self) -> str:
        """What the run waits for, because nobody is there for what comes next; empty while it goes on."""
        return missing_words(*rounds.lacking(self.state))

    @property
    def epoch(self) -> int:
        """Epoch in progress."""
        return self.state.epoch

    @property
    def version(self) -> int:
        """Model version."""
        return self.model.version

    @property
    def durable_version(self) -> int:
        """Version up to which all updates are in the log."""
        return self.model.durable_version

    @property
    def phase(self) -> operator.RunPhase.ValueType:
        """The phase as operators see it."""
        match self.state.phase:
            case rounds.PublishedPhase.GATHER:
                return operator.RunPhase.RUN_PHASE_GATHER
            case rounds.PublishedPhase.TRAIN:
                if self.state.epoch > 1:
                    return operator.RunPhase.RUN_PHASE_EPOCH
                done = rounds.delivered(self.state)
                return operator.RunPhase.RUN_PHASE_FLUSH if done else operator.RunPhase.RUN_PHASE_INTAKE
            case rounds.PublishedPhase.EVALUATE:
                return operator.RunPhase.RUN_PHASE_EVALUATE
            case rounds.PublishedPhase.DONE:
                return operator.RunPhase.RUN_PHASE_DONE
            case rounds.PublishedPhase.FAILED:
                return operator.RunPhase.RUN_PHASE_FAILED

    def progress(self) -> operator.ProgressEvent:
        """Return counters for watchers."""
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

    def remember(self, event: operator.WatchRunResponse) -> None:
        """Keep evaluations for the report."""
        self._remembered.take(event)

    def facts(self) -> dict[str, Any]:
        """Return history, progress and staleness, for the report."""
        return {
            "blocks": {slot: at.blocks for slot, at in self.model.progress.items()},
            "history": self._remembered.history,
            "lost_exchanges": [
                {"owner": slot, "first": first, "last": last} for slot, first, last in self.state.lost
            ],
            "staleness": {
                "max_staleness": self.plan.max_staleness,
                "refused": self.model.staleness.refused,
                "histogram": {str(age): n for age, n in sorted(self.model.staleness.applied.items())},
            },
        }

    # --- time --------------------------------------------------------------------------------------------------

    async def on_time(self) -> None:
        """End a phase that takes too long or a wait without end; drop versions whose evaluation is closed."""
        patience, limit = self._patience, self.request.give_up_ms / 1e3 or GIVE_UP_S
        patience.tick(time.monotonic(), waiting=bool(self.waiting))
        if self.waiting and patience.waited > limit:
            await self.stop(f"the run waited for {limit:g} s; {self.waiting}", may_pass=True)
        elif not self.waiting and patience.lasted > self.request.phase_timeout_ms / 1e3:
            waited = rounds.waiting_for(self.state)
            await self.stop(
                f"{self.state.phase.value} took too long; waiting for: {waited}{self.says_unfit}",
                may_pass=True,
            )
        if not self.over:
            await self.say_waiting()
        self.model.thaw({point.version for point in self.state.points})


def point_place(number: int) -> str:
    """Return the key under which submissions for an evaluation are stored."""
    return f"point/{number}"
