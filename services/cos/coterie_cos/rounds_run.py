"""Run a rounds-based system at the COS: gather users, open one sum after the other, apply each to the model."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import sqlalchemy as sa
import structlog

from coterie.crypto.key_record import KeyRecord
from coterie.rounds import policy, privacy, training
from coterie.rounds.conductor import Conductor, bound_members, new_training
from coterie.rounds.inputs import CATALOGUE, OPEN_ITEMS
from coterie.rounds.model_state import MetricTotals, ModelState, OpenModel, SealedVersions
from coterie.rounds.plan_hash import keys_hash
from coterie.rounds.population import least_wave
from coterie.rounds.prefix import Prefix
from coterie.rounds.server_round import RoundState
from coterie.rounds.sides import Arrays, Growing, Limited, ServerSide, ToldServerSide
from coterie.rounds.training import Purpose, Training
from coterie.secure_sum.contribution import ImpossibleSumError
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Failed, Formed, Subject
from coterie.secure_sum.registry import KEYED, keyring_of
from coterie.store import cos as store
from coterie.systems.registry import asks_owners
from coterie.systems.server_step import planned_server_side
from coterie.telemetry.audit_log import record
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_cos.census import Census
from coterie_cos.item_servers import ItemServers
from coterie_cos.key_holders import KeyHolders
from coterie_cos.round_events import consequences, run_phase
from coterie_cos.served_model import ServedModel
from coterie_cos.summing import SummingRun, Surroundings
from coterie_cos.sums import SavedRound, SumAbandoned, SumFormed
from coterie_cos.turns import Turns
from coterie_cos.waiting_users import WaitingUsers

__all__ = ["RoundsRun"]

_log = structlog.get_logger("coterie.cos")

_IN_ROUNDS = ("client", "decrypting-client")
"""Roles whose parties are members or key holders in rounds."""

_LATER_WAVES = 4


def _applied(
    kept: ModelState, state: Training, formed: Formed, users: int, arrays: Arrays
) -> tuple[MetricTotals, Arrays]:
    """Return the metrics in a sum over ``users`` users, and the arrays after it.

    Raises
    ------
    ImpossibleSumError
        When the sum is beyond its bounds.
    """
    decoded = kept.decode(state, formed, users)
    return decoded.measured, decoded.apply(arrays)


class RoundsRun(SummingRun[Training]):
    """A run of a rounds-based system, created by the COS service.

    Parameters
    ----------
    request, around
        As for `SummingRun`.
    """

    tasks_follow_presence = False

    def __init__(self, request: operator.StartRunRequest, around: Surroundings) -> None:
        plan = request.plan
        side = planned_server_side(plan, 0, 0)
        state = new_training(plan, side, most_abandoned=request.most_abandoned or training.MOST_ABANDONED)
        super().__init__(request, around, state)
        self._behind = False
        """Whether this server was found to be from a backup, since it started."""
        self._is_current = False
        """Whether members have formed a sum with this server since it started, or the run has begun since."""
        self._conductor: Conductor | None = None
        self._turns: Turns | None = None
        self._outside: WaitingUsers | None = None
        self._served: ServedModel | None = None
        # Users who have come so far, and how many make a look at all of them worth its while.
        self._came = self._enough = 0
        self._growth: list[operator.WatchRunResponse] = []
        """Events of waves, which are stored with the next state."""
        self._gather_since = time.monotonic()
        self._census = Census(self, around.commit_population, self._begin, self._gathered, around.learn_waves)
        self._population = b""
        self._later_waves: dict[tuple[wire.FetchKind.ValueType, int], bytes] = {}
        """Serialised waves and outlines, by the number of waves that a host has; few of them are kept."""
        # Round, and its serialised CohortUsers.
        self._cohort_users: tuple[int, bytes] = 0, b""
        self._showing = asyncio.Lock()
        self._item_servers = (
            ItemServers(plan.run_id, self.registry, self.present) if asks_owners(plan.system) else None
        )
        self._silent: list[str] = []
        self._items_sha256 = b""
        self._sealed = plan.secure_sum == "shared-key"
        self._key_holders = (
            KeyHolders(keyring_of(self._half), self.registry, self.present, self.revoked)
            if plan.secure_sum in KEYED
            else None
        )
        # A sum in progress before a restart, until its key is known again.
        self._deferred: SavedRound | None = None

    def _side(self, n_items: int, groups: int) -> ServerSide:
        return planned_server_side(self.plan, n_items, groups)

    # --- durable state -----------------------------------------------------------------------------------------

    def restore(self, connection: sa.Connection, state: str, snapshot: int) -> None:
        """Restore the run from the store after a restart."""
        self._census.restore(connection)
        self.state = Training.from_json(state, self._census.order())
        if self._census.fixed and not self.plan.rounds.beacon and not self.state.users_apart:
            # An earlier release wrote the users with each state.
            self.state = replace(
                self.state, users=Prefix(array("I", self.state.users)), users_apart=bool(self.state.users)
            )
        if self.state.users and not self._census.fixed:
            # The plan of an experiment names the beacon: the store has its users with the state alone.
            self._census.take(self.state.users)
        self._published = self.state
        self._census.restored()
        self.take_up(connection, 0, {})
        present = dict.fromkeys(self.registry.parties, True)
        self.take_up_parties(present)
        self.registry.catalogue_version = 1
        if self.state.phase.ended:
            self.ended.set()
        if not self.state.users:
            # It gathers, or failed while it did.
            return
        self._serve(snapshot)
        if self.state.phase.ended:
            return
        saved = self._sums.load(connection)
        if saved is None:
            self.proceed()
        elif self._key_holders is None:
            self._resume(saved)
        else:
            self._deferred = saved

    def _resume(self, saved: SavedRound) -> None:
        conductor = self._conduct()
        layout, slots = conductor.layout(self.state.purpose), self._slots(conductor, saved.plan)
        self._ask_owners()
        only = bound_members(saved.plan, self.state)
        self._sums.resume(saved, layout, slots, self._step_s, self._subject(conductor), only)
        self.follow_sums()

    # --- resuming ----------------------------------------------------------------------------------------------

    def take_up_again(self) -> list[operator.WatchRunResponse]:
        """Change the state to where the run failed; return the events to be stored with it."""
        before, self.state = self.state, training.step(self.state, training.TrainingResumed())
        resumed = operator.ResumeEvent(failure=before.reason, round=before.round)
        return [
            operator.WatchRunResponse(resumed=resumed),
            *consequences(before, self.state, self.owners_alive()),
        ]

    async def gather_again(self) -> None:
        """Begin if the run failed while it gathered, and all expected parties are present by now."""
        await self._gathered()

    # --- the key of an encrypted sum ---------------------------------------------------------------------------

    @property
    def key_epoch(self) -> int | None:
        """Epoch of the present key, 0 before there is one; None where sums are not encrypted."""
        return None if self._key_holders is None else self._key_holders.epoch

    async def new_key(self, record: KeyRecord) -> None:
        """Take a new key, under which the next sums are encrypted.

        Raises
        ------
        CryptoError
            When the record's key is malformed or cannot be a valid key.
        """
        if self._key_holders is None:
            raise AssertionError("a key for a run that does not encrypt")
        self._key_holders.take(record)
        deferred, self._deferred = self._deferred, None
        if deferred is not None and self._key_holders.knows(deferred.plan):
            self._resume(deferred)
            # Parties that have asked meanwhile were told of no sum.
            self.touch()
        elif deferred is not None:
            self.skip_sum("the key was replaced while the server was away", deferred)
        else:
            await self._gathered()

    def _conduct(self) -> Conductor:
        """Return the conductor, made once the population is fixed."""
        if self._conductor is None:
            population = self._census.population(len(self.state.users))
            side = self._side(len(self.registry.items), self.state.groups)
            self._conductor = Conductor(self.plan, population, side, self._half)
        return self._conductor

    def _serve(self, snapshot: int = 0) -> None:
        """Make the model that participants fetch: the initial one, or the one that round ``snapshot`` made."""
        conductor = self._conduct()
        kept = SealedVersions(conductor) if self._sealed else OpenModel(conductor)
        arrays = self._versions.load(snapshot) if snapshot else kept.initial()
        if snapshot and self.plan.rounds.most_users and isinstance(conductor.side, Growing):
            # Groups may have come since the version was made.
            arrays = conductor.side.grown(arrays)
        self._served = ServedModel(kept, self._versions, arrays)

    @property
    def _model(self) -> ServedModel:
        """The model that participants fetch, once the population is fixed."""
        if self._served is None:
            raise AssertionError("there is a model once the population is fixed")
        return self._served

    def _subject(self, conductor: Conductor) -> Subject | None:
        """Return the model that key holders change by the next sum; None where this server applies sums."""
        if not self._sealed:
            return None
        shares = tuple(conductor.shares(self.state).tolist())
        return Subject(self._model.present.payload, len(self.registry.items), len(self.state.users), shares)

    # --- the run -----------------------------------------------------------------------------------------------

    async def _gathered(self) -> None:
        """Fix the population once all expected parties have come, and begin once the beacon is drawn for it."""
        # Before all users are looked at, which each of them would cost that comes.
        if (
            self.state.phase is not training.TrainingPhase.GATHER
            or self._census.fixed
            or self.owners_alive() < max(self.request.expect_owners, 1)
            or self.users_present < max(self.request.expect_users, 1)
            or self._came < self._enough
            or (self._key_holders is not None and not self._key_holders.complete)
        ):
            return
        present = sorted(
            slot
            for party in self.registry.parties
            if self.present(party)
            for slot, participant in self.registry.users_of(party)
            if not self.revoked(participant)
        )
        if len(present) < max(self.request.expect_users, 1):
            # Some of those who are here are revoked: looked at again once so many have come as lack.
            self._enough = self._came + max(self.request.expect_users, 1) - len(present)
            return
        # Hosts refuse a population of more; those who came first take part.
        await self._census.begin(present[: self.plan.rounds.most_users or None])

    async def _begin(self, order: Sequence[int]) -> None:
        """Begin with a population, given by slots in order, whose beacon is drawn."""
        if self.state.phase is not training.TrainingPhase.GATHER:
            # Stopped meanwhile.
            return
        side = self._side(len(self.registry.items), 0)
        if isinstance(side, Limited) and side.too_many_items:
            await self.stop(side.too_many_items)
            return
        # Groups and cohorts depend on the population only, so a conductor with an empty side will do here.
        population = self._census.population(len(order))
        # The initial model depends on items' indices, which must not depend on the order of registration.
        renumbered = self._item_servers is not None and self.registry.number_by_owner()
        sketch = Conductor(self.plan, population, self._side(0, 0), self._half)
        started = sketch.started(Prefix(array("I", order)))
        before, self.state = self.state, training.step(self.state, started)
        # The census has kept the order, but for that of an experiment whose plan names the beacon: there slots ascend.
        self.state = replace(self.state, users_apart=not self.plan.rounds.beacon)
        self._serve()
        _log.info("population fixed", run=self.plan.run_id, users=len(order), groups=self.state.groups)
        await self._save(before, renumbered=renumbered)
        self._formed_at, self._is_current = time.monotonic(), True
        self.proceed()

    def proceed(self) -> None:
        """Open the next round; wait when too few parties are present for it, and abandon one that cannot be opened."""
        if self.waits or self._deferred is not None:
            return
        if self.key_epoch == 0:
            self.wait_for("the third party has not said yet under which key sums are encrypted")
            return
        if self._key_holders is not None and (outdated := self._key_holders.outdated):
            # Every member would sit the round out, and a few such rounds in a row would end the run.
            self.wait_for(outdated)
            return
        if not self._take_in():
            return
        before = self.state
        conductor = self._conduct()
        if self._key_holders is not None:
            self._key_holders.choose()
        self.state = training.begin_round(self.state)
        try:
            model_sha256 = self._model.present.payload_sha256
            subject = self._subject(conductor)
            opening = conductor.open(self.state, model_sha256, self._step_s, subject, self._inputs())
        except Failed as failed:
            self.skip_sum(str(failed))
            return
        absent = self.absent(opening.plan)
        if absent and (lacking := self._lacking(opening, absent)):
            if self.state.asks_newcomers:
                # Its items stay closed.  Cohorts of training wait for its users all the same, as for others.
                self.skip_sum(lacking)
                return
            # The number is not taken.
            self.state = before
            self.wait_for(lacking, absent)
            return
        self._ask_owners()
        self.open_sum(opening, self._slots(conductor, opening.plan))

    # --- users who come later ----------------------------------------------------------------------------------

    def _take_in(self) -> bool:
        """Take in users who came later, as far as they are due; return whether the next sum may be opened.

        No sum of a pass is opened before the waves that begin with it have their beacons: hosts refuse a wave that was
        left out of a pass in which they took part.
        """
        if not self.plan.rounds.most_users:
            return True
        if self._census.unsure:
            trouble = f": {self._census.trouble}" if self._census.trouble else ""
            self.wait_for("the third party has not said yet which users came later" + trouble)
            self._census.tick()
            return False
        at = policy.population_pass(self.state.purpose, self.state.pass_number)
        while (wave := self._census.after(len(self.state.users))) is not None and wave.from_pass <= at:
            if not wave.drawn:
                trouble = f": {self._census.trouble}" if self._census.trouble else ""
                self.wait_for("the third party has drawn no beacon yet for users who came later" + trouble)
                self._census.tick()
                return False
            self._grow(wave.slots)
        if self.state.purpose is Purpose.TRAIN and self.state.part == self.state.parts - 1 and wave is None:
            self._invite()
        return True

    def _grow(self, slots: Sequence[int]) -> None:
        """Take in a wave of users at some slots, in order."""
        known = self.state.users
        order = (known if isinstance(known, Prefix) else Prefix(array("I", known))).extended(slots)
        sketch = Conductor(self.plan, self._census.population(len(order)), self._side(0, 0), self._half)
        arrays, users = self._model.present.arrays, len(slots)
        self.state = training.step(self.state, sketch.grown(order))
        self._conductor, self._population, self._turns = None, b"", None
        if self._outside is not None:
            self._outside.took_in(slots)
        self._later_waves = {}
        conductor = self._conduct()
        if isinstance(conductor.side, Growing):
            arrays = conductor.side.grown(arrays)
        self._served = ServedModel(OpenModel(conductor), self._versions, arrays)
        grown = operator.GrowEvent(users=users, total=len(order), from_pass=self.state.pass_number)
        self._growth.append(operator.WatchRunResponse(grown=grown))
        _log.info(
            "population grown",
            run=self.plan.run_id,
            users=users,
            pass_number=self.state.pass_number,
            groups=self.state.groups,
        )

    def _invite(self) -> None:
        """Extend the population by the users who are here and not in it, from the next pass on, if enough are.

        Their first sums wait for them, so that parties of which nothing is known but that they were here once are not
        taken in.  After a restart a sum comes first: the pass of a server that was restored from a backup may be one
        that hosts have left behind, and they would refuse a wave from there on for good.
        """
        rounds, known = self.plan.rounds, len(self.state.users)
        from_pass, room = self.state.pass_number + 1, rounds.most_users - known
        if from_pass >= rounds.passes or self.registry.users() <= known or not self._is_current:
            return
        if self._outside is None:
            self._outside = WaitingUsers(self.registry, self.state.users)
        if self._outside.settled:
            return
        waiting = self._outside.present(self.awake, self.revoked)[: max(room, 0)]
        devices = {self.registry.registered(slot).party for slot in waiting}
        if len(waiting) >= least_wave(rounds) and len(devices) >= rounds.min_cohort:
            self._census.add(waiting, from_pass)
        else:
            self._outside.settle()

    def _count(self, party: str, *, present: bool) -> None:
        before = self._hosts.get(party, 0)
        super()._count(party, present=present)
        self._came += max(self._hosts.get(party, 0) - before, 0)
        if present and self._outside is not None:
            self._outside.came(party)

    @staticmethod
    def _lacking(opening: RoundState, absent: Collection[str]) -> str:
        """Return why a round cannot be formed while some parties are absent; empty when it may be."""
        plan = opening.plan
        present = {n for party, numbers in plan.by_device.items() if party not in absent for n in numbers}
        if missing := opening.only - present:
            return f"{len(missing)} of {len(opening.only)} members are away over whom alone the sum can be formed"
        return opening.half.lacking(plan, present)

    def _inputs(self) -> dict[str, bytes]:
        """Return the hashes of what members are told beside the model, by name."""
        # Items that come after the beginning take no part: the hash is that of the beginning.
        self._items_sha256 = self._items_sha256 or keys_hash(self.registry.items)
        found = {CATALOGUE: self._items_sha256}
        if open_items := self._model.present.open_items:
            found[OPEN_ITEMS] = hashlib.sha256(open_items).digest()
        return found

    def _ask_owners(self) -> None:
        """Ask data owners for item factors in a round of training, where the system uses them."""
        self._silent = []
        if self._item_servers is not None and self.state.purpose is Purpose.TRAIN:
            self._item_servers.ask(self.state.round, self.state.version, self._step_s)

    async def _with_items(self, conductor: Conductor) -> Arrays:
        """Return the arrays with data owners' item factors for the round; owners that did not answer are left out."""
        if self._item_servers is None or self.state.purpose is not Purpose.TRAIN:
            return self._model.present.arrays
        side, arrays = cast(ToldServerSide, conductor.side), self._model.present.arrays
        factors = side.model(arrays)["items"].shape[1]
        told, self._silent = await self._item_servers.answers(factors)
        return side.told(arrays, told)

    def _slots(self, conductor: Conductor, plan: SumPlan) -> dict[int, list[int]]:
        covered = conductor.members(conductor.cohort(self.state))
        found = {member: [self.state.users[p] for p in positions] for member, positions in covered.items()}
        if plan.noise_floor:
            ring = plan.denoisers.ring
            found |= {plan.denoiser(place): found[member] for place, member in enumerate(ring)}
        return found if self._key_holders is None else found | self._key_holders.slots(plan)

    async def apply_sum(self, summed: SumFormed) -> str:
        """Apply a sum: a new model version, metrics of an evaluation, or a group's open items."""
        conductor, before, model, users = self._conduct(), self.state, self._model, summed.users
        arrays = await self._with_items(conductor)
        if not self.in_progress(summed.sum):
            # Stopped meanwhile.
            return ""
        try:
            measured, arrays = await self._accounting.in_thread(
                "apply sums", users, _applied, model.kept, before, summed.formed, users, arrays
            )
        except ImpossibleSumError as error:
            return str(error)
        if not self.in_progress(summed.sum):
            # Stopped meanwhile.
            return ""
        submitters = summed.sum.state.plan.participants(summed.sum.state.submitters)
        event = training.RoundSummed(measured, conductor.side.figures, submitters)
        after = training.step(before, event)
        after = privacy.after_sum(conductor, before, after, summed.sum.state.submitters)
        changed, round_, prepared = before.purpose is not Purpose.EVALUATE, before.round, model.present
        if changed:
            wanted = partial(self.in_progress, summed.sum)
            _, prepared = await asyncio.gather(
                self.save_version(arrays, after.version, round_, wanted),
                self._accounting.in_thread("apply sums", 0, model.prepared, arrays),
            )
            if not self.in_progress(summed.sum):
                # Stopped meanwhile: the sum stays in the store, and is applied if the run is resumed.
                return ""
        self.state, self._is_current = after, True
        await self._save(before, self._round_event(users), over=True, snapshot=round_ if changed else 0)
        # Nobody gets a version that a crash could take back.  Nothing else runs between the write and this line.
        model.change(prepared)
        record("sum", run=self.plan.run_id, round=round_, purpose=before.purpose.value, users=users)
        if changed:
            chosen = self.state.chosen
            await self.prune_versions(round_, [] if chosen is None else [chosen.version])
        return ""

    async def count_abandoned(self, abandoned: SumAbandoned) -> None:
        """Count the round as abandoned; or follow members that are further, as after a restore from a backup."""
        if self.state.phase.ended:
            # Stopped meanwhile: a sum in the store stays there, with those whom it may bind.
            return
        before, reason = self.state, abandoned.reason
        if self._behind and before.purpose is Purpose.SUPPORTS and not before.asks_newcomers:
            reason += (
                "; this server is from a backup that lacks which items groups have, and its parties tell it again only "
                "over the same members: bring back all of them, or restore a later backup"
            )
        behind = training.ServerBehind(abandoned.ahead.joined, abandoned.ahead.places)
        followed = training.step(before, behind)
        if followed != before:
            self.state, self._behind = followed, True
            _log.warning(
                "this server is behind its parties, as after a restore: it goes on where they are",
                run=self.plan.run_id,
                round=before.round,
                goes_on_after_round=followed.round,
                passes_lost=followed.pass_number - before.pass_number,
                versions_lost_after=before.version,
            )
            # The rounds are learned first, then how far the passes were.
            what = f"rounds {before.round} to {followed.round}"
            if followed.pass_number > before.pass_number:
                what = f"passes {before.pass_number} to {followed.pass_number - 1}"
            reason = (
                f"this server is behind its parties, as after a restore: {what} and versions of the model after "
                f"{before.version} are lost"
            )
            await self._save(before, self._round_event(0, reason), over=True)
            return
        stepped = training.step(before, training.RoundAbandoned(reason, abandoned.bound))
        self.state = privacy.after_sum(self._conduct(), before, stepped, None)
        if before.asks_newcomers:
            # Also where no sum was opened, because members are away: they are to have time to come back.
            self.pause(self.state.tries)
        elif self._sums.current is not None:
            self.pause(self.state.abandoned_in_a_row)
        _log.warning("round abandoned", run=self.plan.run_id, round=before.round, reason=reason)
        await self._save(before, self._round_event(0, reason), over=True)

    async def _save(
        self,
        before: Training,
        *events: operator.WatchRunResponse,
        over: bool = False,
        snapshot: int = 0,
        renumbered: bool = False,
    ) -> None:
        """Store the state and events, in one transaction.

        Parameters
        ----------
        before : Training
            The state before, from which the events of a new phase or evaluation follow.
        over : bool
            Whether a sum ended, whose stored messages are deleted.
        snapshot : int
            Round that made a new version of the model; 0 for none.
        renumbered : bool
            Whether the indices of items changed.
        """
        after, run_id = self.state, self.plan.run_id
        text = after.to_json()
        made = [*self._growth, *events, *consequences(before, after, self.owners_alive())]
        self._growth = []
        for one in made:
            if one.HasField("metrics") and (spent := privacy.known(self._conduct(), after)) is not None:
                one.metrics.epsilon = spent["epsilon"]
        keys = list(self.registry.items)
        held = {slot: indices.tobytes() for slot, indices in self.registry.held.items()} if renumbered else {}

        def write(connection: sa.Connection) -> list[operator.WatchRunResponse]:
            if renumbered:
                store.renumber_items(connection, run_id, keys, held)
            store.save_state(connection, run_id, text)
            if over:
                self._sums.forget(connection)
            if after.phase.ended:
                self._sums.shut(connection)
            if snapshot:
                store.set_snapshot(connection, run_id, snapshot)
            return made

        await self.record(write)
        self.settle(after)

    def _round_event(self, users: int, reason: str = "") -> operator.WatchRunResponse:
        event = self._sums.event(users, self.state.version, reason)
        event.silent_owners.extend([] if reason else self._silent)
        return operator.WatchRunResponse(round=event)

    # --- what parties ask --------------------------------------------------------------------------------------

    async def on_joined(self, party: str, slots: Sequence[int], owners: Sequence[int]) -> None:
        """Begin when all expected parties have come."""
        await self._gathered()

    async def on_lost(self, party: str) -> None:
        """Stop waiting for the party's members."""
        self._sums.lost(party)
        self.look_again()

    async def on_seen(self, party: str) -> None:
        """Count a returned party as present; its members are waited for from their next message on."""
        await self._gathered()

    async def on_catalogue(self) -> None:
        """Do nothing: items that come after the beginning take no part."""

    async def stop(self, reason: str, *, may_pass: bool = False) -> None:
        """End the run before its time; ``may_pass`` says whether its cause may pass, so that it can be resumed."""
        if not self.state.phase.ended:
            stopped = training.TrainingStopped(reason, may_pass)
            before, self.state = self.state, training.step(self.state, stopped)
            self._sums.stop()
            await self._save(before)

    def tasks(self, party: str) -> list[wire.Task]:
        """Return the open tasks of a party."""
        chosen = self._published.chosen
        if self._published.phase.ended:
            final = None if self.resumable else chosen
            finish = wire.Task(
                kind=wire.TaskKind.TASK_KIND_FINISH,
                reason=self._published.reason,
                version=self._published.version if final is None else final.version,
                resumable=self.resumable,
            )
            return [finish]
        tasks = self._sums.tasks(party, self._published.version, 0 if chosen is None else chosen.version)
        training = self._sums.busy and self._published.purpose is Purpose.TRAIN
        if self._item_servers is not None and training:
            tasks += self._item_servers.tasks(self._owners(party))
        return tasks

    def payload(self, party: str, role: str, request: wire.FetchRequest) -> tuple[int, bytes]:
        """Return version and bytes of a model, plan, briefings, population, open items, catalogue or roster."""
        shared = self.shared_payload(role, request)
        if shared is not None:
            return shared
        match request.kind:
            case wire.FetchKind.FETCH_KIND_MODEL if self._served is not None:
                return self._model_of(request.version)
            case wire.FetchKind.FETCH_KIND_OPEN_ITEMS if self._served is not None:
                return self._published.version, self._served.present.open_items
            case wire.FetchKind.FETCH_KIND_POPULATION if role == "client" and self._conductor is not None:
                return 0, self._population_of(self._conductor)
            case wire.FetchKind.FETCH_KIND_OUTLINE if (
                role == "client"
                and self._conductor is not None
                and not (request.version or self._conductor.population.waves)
            ):
                return 0, self._population_of(self._conductor)
            case wire.FetchKind.FETCH_KIND_WAVES | wire.FetchKind.FETCH_KIND_OUTLINE if (
                role == "client" and self._conductor is not None
            ):
                return request.version, self._waves_after(request.kind, request.version, self._conductor)
            case wire.FetchKind.FETCH_KIND_COHORT if role == "client" and self._conductor is not None:
                return request.version, self._users_of(request.version, self._conductor)
            case wire.FetchKind.FETCH_KIND_SUM_PLAN if role in _IN_ROUNDS:
                return self._sums.plan(request.version)
            case wire.FetchKind.FETCH_KIND_BRIEFINGS if role in _IN_ROUNDS:
                return request.version, self._sums.briefings(party, request)
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            "nothing of this kind for this caller, or not yet",
            field="kind",
            expected="MODEL, OPEN_ITEMS or CATALOGUE; SUM_PLAN, BRIEFINGS, POPULATION, WAVES, OUTLINE or COHORT "
            "for client hosts; SUM_PLAN or BRIEFINGS for decrypting clients",
        )

    async def read(self, request: wire.FetchRequest) -> None:
        """Prepare what `payload` is asked for next: a version of the model, or the users of a cohort."""
        if request.kind == wire.FetchKind.FETCH_KIND_COHORT and self._conductor is not None:
            # Its hosts ask at once.
            async with self._showing:
                with contextlib.suppress(Refusal):
                    await self._show(request.version, self._conductor)
        if request.kind == wire.FetchKind.FETCH_KIND_MODEL and self._served is not None:
            await self._served.read(self._version_of(request.version), self._published.version)

    def _version_of(self, version: int) -> int:
        if version:
            return version
        state = self._published
        final = state.phase.ended and not state.may_pass
        chosen = state.chosen if final else None
        return state.version if chosen is None else chosen.version

    def _model_of(self, version: int) -> tuple[int, bytes]:
        version = self._version_of(version)
        return version, self._model.of_version(version, self._published.version)

    def _population_of(self, conductor: Conductor) -> bytes:
        # The same bytes for every host of the run, made once.
        self._population = self._population or conductor.population.to_wire().SerializeToString(
            deterministic=True
        )
        return self._population

    def _waves_after(self, kind: wire.FetchKind.ValueType, count: int, conductor: Conductor) -> bytes:
        if (kind, count) not in self._later_waves:
            population = conductor.population
            outlined = kind == wire.FetchKind.FETCH_KIND_OUTLINE
            if outlined:
                population = population.outlined(self.plan.run_id)
            whole = outlined and not count
            found = population.to_wire() if whole else population.later_waves(count)
            self._later_waves[kind, count] = found.SerializeToString(deterministic=True)
            # Most hosts lack the same ones.
            while len(self._later_waves) > _LATER_WAVES:
                del self._later_waves[next(iter(self._later_waves))]
        return self._later_waves[kind, count]

    def _cohort_of(self, round_: int, conductor: Conductor) -> list[int]:
        """Return the positions of the cohort of a round.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND when it is not in progress.
        """
        self._sums.plan(round_)
        current = self._sums.current
        if current is None or not current.in_progress_at(self.state):
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                f"round {round_} is over",
                field="version",
                expected="the round of the present task",
            )
        cohort: list[int] = conductor.cohort(self.state).tolist()
        return cohort

    async def _show(self, round_: int, conductor: Conductor) -> None:
        """Make the payload with the users of a round's cohort, in a thread: proofs of many users are much work."""
        if self._cohort_users[0] != round_:
            population, cohort = conductor.population, self._cohort_of(round_, conductor)
            shown = await asyncio.to_thread(population.shown, cohort)
            self._cohort_users = round_, shown.SerializeToString(deterministic=True)

    def _users_of(self, round_: int, conductor: Conductor) -> bytes:
        """Return the users of the cohort of the round in progress, with proofs, once `read` has made them."""
        self._cohort_of(round_, conductor)
        made, users = self._cohort_users
        if made != round_:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                f"the users of round {round_} are being put together",
                field="version",
                expected="the same fetch again",
            )
        return users

    def submitted_at_once(
        self, party: str, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes
    ) -> bool:
        """Take a member's message for a step, or a data owner's item factors."""
        if self._item_servers is not None and head.kind == wire.SubmitKind.SUBMIT_KIND_ITEM_FACTORS:
            self._item_servers.submitted(head, slots, payload)
            self.touch()
        else:
            self._sums.submitted(head, slots, payload)
        return True

    async def submitted(
        self, party: str, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes
    ) -> None:
        """Take an item as `submitted_at_once` does, which takes all of them."""
        self.submitted_at_once(party, head, slots, payload)

    def due_s(self, party: str) -> float:
        """Return the time within which a host that checks in is to be heard, so that it is there for its next sum.

        A step waits for its members for as long as it may take, so that one which comes within half of it is in time.
        Sums before those of the host take as long as the shortest of the last ones at least.
        """
        if self.state.phase.ended:
            # One that may be resumed.
            return math.inf if self.resumable else 0.0
        if self._sealed or self._sums.needs(party):
            # Hosts that share a key are asked for more than members are.
            return 0.0
        half_s = self._step_s / 2
        if self._conductor is None:
            return half_s
        if self._turns is None:
            self._turns = Turns(self._conductor, self.state.users)
        current = self._sums.current
        if current is not None and party in current.by_party:
            # Its sum may have to be formed again.
            return half_s
        begun = current is not None and current.in_progress_at(self.state)
        ahead = self._turns.sums_before(self.state, self.registry.slots_of(party), begun=begun)
        if math.isinf(ahead):
            # Users who wait for a wave are taken in only while their host is here.
            return 0.0 if self._may_grow else math.inf
        return ahead * self.pace_s + half_s

    @property
    def _may_grow(self) -> bool:
        """Whether users may yet be taken in."""
        rounds = self.plan.rounds
        return len(self.state.users) < rounds.most_users and self.state.pass_number + 1 < rounds.passes

    # --- time, watching ----------------------------------------------------------------------------------------

    async def on_time(self) -> None:
        """Close a step, or fail a gathering, that takes too long; open the next round."""
        if await self.stopped_by_fault():
            return
        if self.state.phase is training.TrainingPhase.GATHER:
            if time.monotonic() - self._gather_since > self.request.phase_timeout_ms / 1e3:
                users = self.registry.users()
                owners = self.owners_alive()
                await self.stop(
                    f"gather took too long; {owners} of {self.request.expect_owners} data owners and "
                    f"{users} of {self.request.expect_users} users came"
                    + self.says_unfit
                    + self._census.says
                    + ("" if self._key_holders is None else f"; {self._key_holders.says}"),
                    may_pass=True,
                )
            elif self._key_holders is None or self._key_holders.complete:
                self._census.tick()
        elif not await self.gave_up():
            await self.gather()
            self._sums.tick()
            self._census.tick()
            self.proceed()
            await self.say_waiting()

    async def drop(self) -> None:
        """Stop using the state in memory, and wait for no answer of the third party."""
        await self._census.drop()
        await super().drop()

    @property
    def phase(self) -> operator.RunPhase.ValueType:
        """The phase as operators see it."""
        return run_phase(self.state)

    def _waves(self) -> list[dict[str, int]]:
        """Return from which pass on users who came later took part, and how many."""
        if self._conductor is None:
            return []
        population = self._conductor.population
        starts = [*(wave.first for wave in population.waves), len(population)]
        return [
            {"from_pass": wave.from_pass, "users": after - wave.first}
            for wave, after in zip(population.waves, starts[1:], strict=True)
        ]

    @property
    def epoch(self) -> int:
        """Number of complete passes over all users."""
        return self.state.pass_number

    @property
    def passes(self) -> tuple[int, int]:
        """Number of complete passes, and of passes at most."""
        return self.state.pass_number, self.state.passes

    def facts(self) -> dict[str, Any]:
        """Return history, rounds and the chosen version, for the report."""
        chosen = self.state.chosen
        return {
            "history": self._remembered.history,
            "rounds": self._remembered.rounds,
            "abandoned": self.state.abandoned,
            "groups": self.state.groups,
            "waves": self._waves(),
            "privacy": None if self._conductor is None else privacy.known(self._conductor, self.state),
            "closed_share": None if self._served is None else self._served.closed_share(),
            "chosen": None
            if chosen is None
            else {
                "version": chosen.version,
                "epoch": chosen.pass_number,
                "metrics": dict(chosen.metrics),
                "users": dict(chosen.users),
            },
        }
