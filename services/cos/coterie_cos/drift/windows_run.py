"""Run DRIFT's shielded form at the COS: keep the item rows Psi, and apply sums of owners' gradients over windows."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import sqlalchemy as sa
import structlog
from numpy.typing import NDArray

from coterie.rounds import policy
from coterie.rounds.conductor import model_to_bytes
from coterie.rounds.inputs import CATALOGUE, named_inputs
from coterie.rounds.plan_hash import keys_hash, plan_hash
from coterie.rounds.server_round import RoundState
from coterie.rounds.training import MOST_ABANDONED
from coterie.secure_sum.contribution import ImpossibleSumError, Layout
from coterie.secure_sum.plan import Member, SumInput, SumPlan, layout_hash
from coterie.secure_sum.protocol import Applied, Failed
from coterie.store import cos as store
from coterie.systems.drift import shielded_run as shielded
from coterie.systems.drift.mathematics import initial_item_rows
from coterie.systems.drift.published_run import (
    CatalogueChanged,
    OwnerJoined,
    PartyLost,
    PartySeen,
    Stopped,
    UsersJoined,
)
from coterie.systems.drift.settings import MIN_MASKED, DriftSettings
from coterie.systems.drift.shielded_run import Shielded, ShieldedPhase, ShieldedPurpose
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef
from coterie_cos.drift.patience import Patience
from coterie_cos.drift.resuming import since_failure, taken_up
from coterie_cos.participants import ranges
from coterie_cos.run import parse
from coterie_cos.summing import SummingRun, Surroundings
from coterie_cos.sums import SumAbandoned, SumFormed

__all__ = ["ShieldedRun"]

_log = structlog.get_logger("coterie.cos")

_PHASES = {
    ShieldedPhase.GATHER: operator.RunPhase.RUN_PHASE_GATHER,
    ShieldedPhase.VISIT: operator.RunPhase.RUN_PHASE_VISIT,
    ShieldedPhase.CLOSE: operator.RunPhase.RUN_PHASE_VISIT,
    ShieldedPhase.EVALUATE: operator.RunPhase.RUN_PHASE_EVALUATE,
    ShieldedPhase.DONE: operator.RunPhase.RUN_PHASE_DONE,
    ShieldedPhase.FAILED: operator.RunPhase.RUN_PHASE_FAILED,
}


class ShieldedRun(SummingRun[Shielded]):
    """A run of DRIFT's shielded form, in which users visit owners with their own rows.

    Parameters
    ----------
    request, around
        As for `SummingRun`.
    """

    def __init__(self, request: operator.StartRunRequest, around: Surroundings) -> None:
        plan = request.plan
        self._settings = DriftSettings.from_plan(plan)
        state = Shielded(
            epochs=plan.epochs,
            expect_owners=request.expect_owners,
            expect_users=request.expect_users,
            window=self._settings.window,
            most_abandoned=request.most_abandoned or MOST_ABANDONED,
        )
        super().__init__(request, around, state)
        self._items: NDArray[np.float32] = np.zeros((0, plan.dim), np.float32)
        self._model = b""
        self._purpose = ShieldedPurpose.WINDOW
        self._window_at = time.monotonic()
        self._patience = Patience(self._window_at)

    # --- durable state -----------------------------------------------------------------------------------------

    def restore(self, connection: sa.Connection, state: str, snapshot: int) -> None:
        """Restore the run from the store after a restart."""
        self.state = self._published = Shielded.from_json(state)
        present = {owner.party: owner.present for owner in self.state.owners.values()}
        present |= {name: host.present for name, host in self.state.hosts.items()}
        self.take_up(connection, self.state.catalogue, present)
        if snapshot:
            self._items = self._versions.load(snapshot)["items"]
        self._grow()
        if self.state.phase.ended:
            self.ended.set()
            return
        saved = self._sums.load(connection)
        if saved is not None:
            plan = saved.plan
            self._purpose = ShieldedPurpose(plan.purpose)
            layout = self._layout()
            if layout_hash(layout) == plan.layout_sha256:
                self._sums.resume(saved, layout, self._slots(plan), self._patience_s())
                self.follow_sums()
            else:
                self.skip_sum("items came while the window was open")

    # --- resuming ----------------------------------------------------------------------------------------------

    def take_up_again(self) -> list[operator.WatchRunResponse]:
        """Change the state to where the run failed; return the events to be stored with it."""
        before = self.state
        for event in since_failure(self):
            self.state = shielded.step(self.state, event)
        return taken_up(self, before.reason, before.round)

    async def gather_again(self) -> None:
        """Open the next sum, if one is due by now."""
        self.proceed()

    # --- the model ---------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Add rows for new items, drawn by the plan's seed; existing rows stay."""
        n_items = len(self.registry.items)
        if n_items > len(self._items) or not self._model:
            rows = initial_item_rows(n_items, self._settings, self.plan.seed)
            rows[: len(self._items)] = self._items
            self._change(rows)

    def _change(self, items: NDArray[np.float32]) -> None:
        self._items = items
        # The version is part of the bytes, so that each version has a hash of its own: members answer for each model a
        # few times only.
        version = np.array([self.state.version], np.float32)
        self._model = model_to_bytes({"items": items, "version": version})

    async def take(self, event: shielded.Event) -> None:
        """Apply an event to the state; the new state is durable before tasks are made from it."""
        before, self.state = self.state, shielded.step(self.state, event)
        if self.state != before:
            await self._save(before, [])

    async def _save(
        self,
        before: Shielded,
        events: Sequence[operator.WatchRunResponse],
        *,
        snapshot: int = 0,
        over: bool = False,
    ) -> None:
        """Store the state, in one transaction with the end of a sum (``over``) and the snapshot that it made."""
        after, run_id = self.state, self.plan.run_id
        made = list(events)
        if (_PHASES[before.phase], before.epoch) != (_PHASES[after.phase], after.epoch):
            self._patience.went_on()
            phase = operator.PhaseEvent(phase=_PHASES[after.phase], epoch=after.epoch)
            made.append(operator.WatchRunResponse(phase=phase))

        def write(connection: sa.Connection) -> list[operator.WatchRunResponse]:
            store.save_state(connection, run_id, after.to_json())
            if over:
                self._sums.forget(connection)
            if after.phase.ended:
                self._sums.shut(connection)
            if snapshot:
                store.set_snapshot(connection, run_id, snapshot)
            return made

        await self.record(write)
        self.settle(after)
        self.touch()

    # --- sums --------------------------------------------------------------------------------------------------

    def proceed(self) -> None:
        """Open the next sum, a window or an evaluation, when one is due; wait when too few parties are present."""
        if self.waits:
            return
        lacking, missing = shielded.lacking(self.state)
        if lacking:
            self.wait_for(lacking, missing)
            return
        self.go_on()
        now = time.monotonic()
        in_time = now - self._window_at > self._settings.window_s
        purpose = shielded.next_sum(self.state, in_time=in_time)
        if purpose is None:
            return
        self._purpose = purpose
        absent = self._absent()
        if absent and (lacking := self._too_few(self._members())):
            # The number is not taken.
            self.wait_for(lacking, absent)
            return
        if purpose is ShieldedPurpose.WINDOW:
            self._window_at = now
        self.state = shielded.step(self.state, shielded.NumberTaken())
        try:
            opening = self._opening()
        except Failed as failed:
            self.skip_sum(str(failed))
            return
        self.open_sum(opening, self._slots(opening.plan))

    def _patience_s(self) -> float:
        if self._purpose is ShieldedPurpose.WINDOW:
            return self._settings.join_s
        return self._step_s

    def _layout(self) -> Layout:
        if self._purpose is ShieldedPurpose.WINDOW:
            return self._settings.window_layout(len(self._items))
        return shielded.evaluation_layout()

    def _opening(self) -> RoundState:
        """Build the next sum, before its first step.

        Raises
        ------
        Failed
            When there are too few members or users for it, or too many users for its layout.
        """
        window, members = self._purpose is ShieldedPurpose.WINDOW, self._members()
        if few := self._too_few(members):
            raise Failed(few)
        users = sum(one.users for one in members)
        floor = self._least if window else policy.min_sum(users, self.plan.rounds.min_sum)
        layout = self._layout()
        try:
            layout.require_capacity(users)
        except ValueError as error:
            raise Failed(str(error)) from error
        fields = self._half.plan_fields(len(members), layout)
        plan = SumPlan(
            run_id=self.plan.run_id,
            round=self.state.round,
            purpose=self._purpose.value,
            secure_sum=self.plan.secure_sum,
            run_plan_sha256=plan_hash(self.plan),
            model_version=self.state.version,
            inputs=() if window else self._inputs(),
            model_sha256=hashlib.sha256(self._model).digest(),
            layout_sha256=layout_hash(layout),
            members=tuple(members),
            min_sum=floor,
            pass_number=self.state.epoch,
            # Each window is a place of its own; an epoch has one evaluation.
            part=self.state.round if window else 0,
            **fields._asdict(),
        )
        return RoundState.begin(plan, layout, self._half, self._patience_s())

    def _inputs(self) -> tuple[SumInput, ...]:
        """Return the inputs of an evaluation: the items that the model has rows for."""
        return named_inputs((CATALOGUE,), {CATALOGUE: keys_hash(self.registry.items[: len(self._items)])})

    @property
    def _least(self) -> int:
        """Fewest members of a sum."""
        return MIN_MASKED if self.plan.secure_sum == "masked" else 1

    def _members(self) -> list[Member]:
        """Return the members of the next sum, all of whom are present."""
        return self._owners_present() if self._purpose is ShieldedPurpose.WINDOW else self._hosts_present()

    def _too_few(self, members: Sequence[Member]) -> str:
        """Return why these are too few members for the next sum; empty when they are enough."""
        window = self._purpose is ShieldedPurpose.WINDOW
        if len(members) < self._least:
            what = "data owners" if window else "client hosts"
            return f"{len(members)} {what} could join; a {self.plan.secure_sum} sum needs {self._least}"
        if window:
            return ""
        rounds = self.plan.rounds
        counted, of = (
            (sum(one.users for one in members), "users") if rounds.experiment else (len(members), "devices")
        )
        if counted < rounds.min_cohort:
            return f"a cohort of {counted} {of}; the plan's floor is {rounds.min_cohort}"
        return ""

    def _absent(self) -> list[str]:
        """Return the absent parties that could be members of the next sum, were they present."""
        if self._purpose is ShieldedPurpose.WINDOW:
            return sorted({owner.party for owner in self.state.owners.values() if not owner.present})
        return sorted(name for name, host in self.state.hosts.items() if not host.present)

    def _owners_present(self) -> list[Member]:
        by_slot = self.registry.by_slot
        return [
            Member(by_slot[slot].participant, owner.party)
            for slot, owner in sorted(self.state.owners.items())
            if owner.present and not self.revoked(by_slot[slot].participant)
        ]

    def _hosts_present(self) -> list[Member]:
        """Return the hosts that may contribute their users' metrics: for a clear sum, only those with enough users."""
        by_slot = self.registry.by_slot
        least = self.plan.min_users if self.plan.secure_sum == "clear" else 1
        found = [
            Member(by_slot[self._users_of(name)[0]].participant, name, host.users)
            for name, host in sorted(self.state.hosts.items())
            if host.present and host.users >= least
        ]
        return [member for member in found if not self.revoked(member.participant)]

    def _users_of(self, party: str) -> list[int]:
        by_slot = self.registry.by_slot
        return [slot for slot in self.registry.slots_of(party) if by_slot[slot].is_user]

    def _slots(self, plan: SumPlan) -> dict[int, list[int]]:
        """Return the slots that each member covers."""
        if self._purpose is ShieldedPurpose.EVALUATE:
            return {n: self._users_of(one.device) for n, one in enumerate(plan.members)}
        slot_of = {one.participant: slot for slot, one in enumerate(self.registry.by_slot)}
        return {n: [slot_of[one.participant]] for n, one in enumerate(plan.members)}

    async def apply_sum(self, summed: SumFormed) -> str:
        """Apply a sum: a gradient step of Psi, or metrics of an evaluation."""
        current, users = summed.sum, summed.users
        if isinstance(summed.formed, Applied):
            raise AssertionError("a window that others applied")
        try:
            with self._accounting.activity("apply sums", users):
                sums = current.state.layout.decode(summed.formed, users)
        except ImpossibleSumError as error:
            return str(error)
        before = self.state
        if self._purpose is ShieldedPurpose.EVALUATE:
            metrics = self._metrics(sums)
            self.state = shielded.step(self.state, shielded.EvaluationFormed())
            await self._save(before, [self._round_event(users), metrics], over=True)
            return ""
        slots = [current.slots[member][0] for member in current.state.submitters]
        gradient = sums["gradient"].astype(np.float32)
        items = self._items.copy()
        items[: len(gradient)] -= np.float32(self.plan.rate) * gradient
        round_, version = self.state.round, self.state.version + 1
        await self.save_version({"items": items}, version, round_, partial(self.in_progress, current))
        if not self.in_progress(current):
            # Stopped meanwhile.
            return ""
        before, self.state = self.state, shielded.step(self.state, shielded.Windowed(slots))
        # An owner may have joined meanwhile, and its items' rows been added.
        items = np.concatenate([items, self._items[len(items) :]])
        self._change(items)
        await self._save(before, [self._round_event(users)], snapshot=round_, over=True)
        await self.prune_versions(round_, [])
        return ""

    def _metrics(self, sums: dict[str, NDArray[np.float64]]) -> operator.WatchRunResponse:
        measured = shielded.measured_in(sums)
        present = self._hosts_present()
        return operator.WatchRunResponse(
            metrics=operator.MetricsEvent(
                epoch=self.state.epoch,
                version=self.state.version,
                names=list(measured),
                means=[mean for mean, _ in measured.values()],
                users=[users for _, users in measured.values()],
                owners=self.owners_alive(),
                withheld=sum(host.present for host in self.state.hosts.values()) - len(present),
            )
        )

    async def count_abandoned(self, abandoned: SumAbandoned) -> None:
        """Count the sum as abandoned and go on; owners keep rows that were not about to be revealed."""
        before, reason = self.state, abandoned.reason
        self.state = shielded.step(before, shielded.ShieldedAbandoned(self._purpose, reason))
        self.pause(self.state.abandoned_in_a_row)
        _log.warning(
            "sum abandoned",
            run=self.plan.run_id,
            round=before.round,
            purpose=self._purpose.value,
            reason=reason,
        )
        await self._save(before, [self._round_event(0, reason)], over=True)

    def _round_event(self, users: int, reason: str = "") -> operator.WatchRunResponse:
        event = self._sums.event(users, self.state.version, reason)
        if not event.round:
            # The sum could not be opened, so there is no plan.
            event.round, event.purpose = self.state.round, self._purpose.value
        return operator.WatchRunResponse(round=event)

    # --- what parties ask --------------------------------------------------------------------------------------

    async def on_joined(self, party: str, slots: Sequence[int], owners: Sequence[int]) -> None:
        """Add rows for the party's items, and count the party as present."""
        self._grow()
        for slot in owners:
            await self.take(OwnerJoined(slot, party))
        if len(owners) < len(slots):
            await self.take(UsersJoined(party, len(slots) - len(owners)))

    async def on_lost(self, party: str) -> None:
        """Stop waiting for the party."""
        self._sums.lost(party)
        self.look_again()
        await self.take(PartyLost(party))

    async def on_seen(self, party: str) -> None:
        """Count a returned party as present."""
        await self.take(PartySeen(party))

    async def on_catalogue(self) -> None:
        """Ask hosts to visit the owners of the catalogue's new version."""
        await self.take(CatalogueChanged(self.registry.catalogue_version))

    async def stop(self, reason: str, *, may_pass: bool = False) -> None:
        """End the run before its time; ``may_pass`` says whether its cause may pass, so that it can be resumed."""
        self._sums.stop()
        await self.take(Stopped(reason, may_pass))

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
        state = self._published
        if state.phase.ended:
            finish = wire.Task(
                kind=wire.TaskKind.TASK_KIND_FINISH,
                reason=state.reason,
                version=state.version,
                resumable=self.resumable,
            )
            return [finish]
        if state.phase is ShieldedPhase.GATHER:
            return []
        found = self._sums.tasks(party, state.version)
        epoch = RoundRef(run_id=self.plan.run_id, round=state.epoch)
        host = state.hosts.get(party)
        if (
            host is not None
            and state.phase is ShieldedPhase.VISIT
            and (host.epoch < state.epoch or host.delivered < state.catalogue)
        ):
            visit = wire.TaskKind.TASK_KIND_VISIT
            found.append(wire.Task(kind=visit, round=epoch, version=state.catalogue))
        found += [
            wire.Task(
                kind=wire.TaskKind.TASK_KIND_RECEIVE,
                round=epoch,
                version=state.version,
                slots=ranges([slot]),
                closed=state.closed,
                summed=owner.summed,
            )
            for slot, owner in sorted(state.owners.items())
            if owner.party == party
        ]
        return found

    def payload(self, party: str, role: str, request: wire.FetchRequest) -> tuple[int, bytes]:
        """Return version and bytes of Psi, the open sum's plan or briefings, the catalogue or the roster."""
        shared = self.shared_payload(role, request)
        if shared is not None:
            return shared
        match request.kind:
            case wire.FetchKind.FETCH_KIND_MODEL if self._model and request.version in (
                0,
                self.state.version,
            ):
                return self.state.version, self._model
            case wire.FetchKind.FETCH_KIND_SUM_PLAN:
                return self._sums.plan(request.version)
            case wire.FetchKind.FETCH_KIND_BRIEFINGS:
                return request.version, self._sums.briefings(party, request)
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            "nothing of this kind for this caller, or not any more",
            field="kind",
            expected="the present MODEL, SUM_PLAN, BRIEFINGS or CATALOGUE; ROSTER for data owners",
        )

    async def submitted(
        self, party: str, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes
    ) -> None:
        """Take a submitted item whose bytes are complete."""
        if head.kind == wire.SubmitKind.SUBMIT_KIND_DELIVERED:
            status = parse(wire.DeliveryStatus, payload)
            epoch = head.round.round
            if (
                party not in self.state.hosts
                or status.catalogue_version > self.state.catalogue
                or not 1 <= epoch <= self.state.epoch
            ):
                raise Refusal(
                    ErrorReason.ERROR_REASON_INVALID_FIELD,
                    f"catalogue {status.catalogue_version} or epoch {epoch} does not exist, or the caller has no users",
                    field="catalogue_version",
                    expected=f"at most {self.state.catalogue}, and epoch {self.state.epoch}",
                )
            await self.take(shielded.VisitsDelivered(party, epoch, status.catalogue_version))
            self.proceed()
        elif head.kind == wire.SubmitKind.SUBMIT_KIND_VISITS:
            visits = parse(wire.VisitStatus, payload)
            if len(slots) != 1 or slots[0] not in self.state.owners:
                raise Refusal(
                    ErrorReason.ERROR_REASON_INVALID_FIELD,
                    "visits of no data owner, or of several",
                    field="slots",
                    expected="the slot of the owner that took them",
                )
            # Not stored: an owner reports its total number of visits again.
            event = shielded.VisitsReported(slots[0], visits.visits, visits.held)
            self.state = shielded.step(self.state, event)
            self.proceed()
        else:
            self._sums.submitted(head, slots, payload)

    # --- time, watching ----------------------------------------------------------------------------------------

    def sum_formed(self) -> None:
        """Take note that a sum was formed: the run waits anew from here on."""
        super().sum_formed()
        self._patience.waited = 0.0

    def without_sum_s(self) -> float:
        """Return for how long the run has waited since the last sum: windows need not be formed while it does not."""
        return self._patience.waited

    async def on_time(self) -> None:
        """Close a step or end a phase that takes too long; open a sum that is due."""
        if await self.stopped_by_fault():
            return
        self._sums.tick()
        patience = self._patience
        patience.tick(time.monotonic(), waiting=bool(self.waiting))
        if self.waiting:
            if await self.gave_up():
                return
        elif patience.lasted > self.request.phase_timeout_ms / 1e3:
            waited = shielded.waiting_for(self.state)
            await self.stop(
                f"{self.state.phase.value} took too long; waiting for: {waited}{self.says_unfit}",
                may_pass=True,
            )
            return
        self.proceed()
        await self.say_waiting()

    @property
    def phase(self) -> operator.RunPhase.ValueType:
        """The phase as operators see it."""
        return _PHASES[self.state.phase]

    @property
    def epoch(self) -> int:
        """Epoch in progress."""
        return self.state.epoch

    @property
    def passes(self) -> tuple[int, int]:
        """Epoch in progress, and number of epochs."""
        return self.state.epoch, self.state.epochs

    def facts(self) -> dict[str, Any]:
        """Return history, sums, number of visits and number of rows that are held back at owners, for the report."""
        return {
            "history": self._remembered.history,
            "rounds": self._remembered.rounds,
            "abandoned": self.state.abandoned,
            "groups": 0,
            "chosen": None,
            "visits": self.state.visits,
            "held_rows": sum(owner.held for owner in self.state.owners.values()),
        }
