"""Run the owners of a process in DRIFT: intake of records, training on blocks, membership in windows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import sqlalchemy as sa
import structlog

from coterie.config.services import DataOwnerSettings
from coterie.net.channel import Channel
from coterie.net.directory import Directory
from coterie.net.transparency import LogWatch
from coterie.parties.party import Party
from coterie.process.runtime import Runtime
from coterie.store.engine import Writer
from coterie.systems.description import Driver
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.registry import driver_of
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_data_owner.drift.exchanges import Exchanges
from coterie_data_owner.drift.intake import Intake
from coterie_data_owner.drift.learning_owner import LearningOwner
from coterie_data_owner.drift.prekeys import Prekeys
from coterie_data_owner.drift.shielded import ShieldedOwners
from coterie_data_owner.drift.trainer import PassNotAskedError, RunEndedError, Trainer
from coterie_data_owner.drift.users import Users
from coterie_data_owner.owner import Owner

__all__ = ["DriftOwners", "owners_floor"]

_log = structlog.get_logger("coterie.data_owner")


def owners_floor(plan: wire.RunPlan) -> int | None:
    """Return a plan's floor of users behind a row that leaves an owner; None where owners hold no rows back.

    Raises
    ------
    ConfigError
        When the settings of the plan are malformed.
    """
    if driver_of(plan.system, plan.form) is not Driver.WINDOWS:
        return None
    return DriftSettings.from_plan(plan).owners_floor


class DriftOwners:
    """The owners of this process in a DRIFT run, published or shielded; driven by the data-owner service.

    Parameters
    ----------
    owners : sequence of Owner
        The owners, before they have joined.
    settings : DataOwnerSettings
    runtime : Runtime
    party : Party
        To the COS.
    engine, writer
        The store.
    thirdparty : Channel
        Connection to the key directory, for users' keys.
    is_revoked : callable
        Tells whether a participant is revoked, by its id.
    log : LogWatch
        Watch over the third party's log, which has users' bundles.
    """

    def __init__(
        self,
        owners: Sequence[Owner],
        settings: DataOwnerSettings,
        runtime: Runtime,
        party: Party,
        engine: sa.Engine,
        writer: Writer,
        thirdparty: Channel,
        is_revoked: Callable[[bytes], bool],
        log: LogWatch,
    ) -> None:
        self._runtime = runtime
        self._party = party
        self._engine = engine
        self._writer = writer
        self._before = owners
        self._leave_after = settings.leave_after_epoch
        prekeys, hours = settings.state / "prekeys", settings.prekey_hours
        self.owners = [
            LearningOwner(owner, Prekeys(owner.identity, settings.run, prekeys / owner.name, hours))
            for owner in owners
        ]
        self._directory_key = (settings.state / "directory.key").read_bytes()
        directory = Directory(thirdparty, self._directory_key, log=log)
        self._users = Users(party, directory, is_revoked, engine, writer, settings.run)
        self.intake = Intake(
            settings.run,
            {owner.id: owner for owner in self.owners},
            self._users,
            writer,
            runtime.accounting,
        )
        self._exchanges = Exchanges(party)
        self._shielded: ShieldedOwners | None = None
        self._flush_due = False
        self._working: dict[tuple[int, wire.TaskKind.ValueType, int], asyncio.Task[None]] = {}
        self._trainers: dict[int, Trainer] = {}
        # The epoch that each owner was asked for last.
        self._newest: dict[int, int] = {}

    async def join(self) -> None:
        """Restore the owners' state from the store, once they are registered and have slots."""
        _, payload = await self._party.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE)
        index = {key: n for n, key in enumerate(wire.Catalogue.FromString(payload or b"").items)}
        await self._users.begin()
        plan = self._party.plan
        driver = driver_of(plan.system, plan.form)
        shielded = driver is Driver.WINDOWS
        for owner, before in zip(self.owners, self._before, strict=True):
            owner.slot = before.slot
            if driver is not Driver.ROUNDS:
                owner.follow(plan)
            owner.holds(np.array([index[key] for key in owner.items], np.uint32), len(index))
            owner.learn_slots(self._users.slots)
            if shielded:
                continue
            with self._engine.connect() as connection:
                owner.rebuild(connection)
            _log.info("joined", owner=owner.name, items=len(owner.items), blocks=len(owner.blocks))
        if shielded:
            self._shielded = ShieldedOwners(
                self.owners, self._party, self._writer, self._runtime, self._directory_key
            )
            await self._shielded.begin(self._engine)
            self.intake.shield(plan, self._shielded.holdings)

    def begin(self, running: asyncio.TaskGroup) -> None:
        """Start the shielded form's background tasks: membership in windows, and reports of visits."""
        if self._shielded is not None:
            running.create_task(self._shielded.driver.run())
            running.create_task(self._shielded.report())

    async def told(self, tasks: Sequence[wire.Task]) -> None:
        """Take the COS's list of open tasks."""
        if self._shielded is not None:
            await self._shielded.told(tasks)

    def start(self, task: wire.Task, running: asyncio.TaskGroup) -> None:
        """Start training when a task asks for it, once for each owner, kind of task and epoch."""
        if task.kind not in (wire.TaskKind.TASK_KIND_INTAKE, wire.TaskKind.TASK_KIND_EPOCH):
            return
        self._flush_due = task.flush
        slots = {slot for part in task.slots for slot in range(part.first, part.first + part.count)}
        for owner in self.owners:
            if owner.slot not in slots:
                continue
            key = (owner.slot, task.kind, task.round.round)
            if self._newest.get(owner.slot, 0) > task.round.round:
                # The COS was set back, as by a restore: what was trained since is asked for again.
                self._forget(owner.slot)
            if key not in self._working and not self._leaves_before(owner, task.round.round):
                self._newest[owner.slot] = task.round.round
                self._working[key] = running.create_task(self._train(owner, task))
            owner.wake()

    def _forget(self, slot: int) -> None:
        """Let all passes of an owner be asked for again."""
        self._newest.pop(slot, None)
        self._working = {key: work for key, work in self._working.items() if key[0] != slot}

    def _leaves_before(self, owner: LearningOwner, epoch: int) -> bool:
        """Return whether an epoch lies after the one in which an owner leaves: the COS may ask before it has left."""
        last = self._leave_after
        return last is not None and any(
            slot == owner.slot and last <= begun < epoch for slot, _, begun in self._working
        )

    async def _train(self, owner: LearningOwner, task: wire.Task) -> None:
        trainer = Trainer(
            owner,
            self._party,
            self._exchanges,
            self._writer,
            self._runtime.accounting,
            lambda: self._flush_due,
        )
        earlier, self._trainers[owner.slot] = self._trainers.get(owner.slot), trainer
        if earlier is not None:
            earlier.supersede()
        # The COS takes one sequence of updates from an owner, so its trainers run one at a time.
        try:
            async with owner.turn:
                if task.kind == wire.TaskKind.TASK_KIND_INTAKE:
                    await trainer.intake(task.round.round)
                else:
                    await trainer.epoch(task.round.round)
        except RunEndedError:
            # The task is given again if the run is resumed.
            self._working.pop((owner.slot, task.kind, task.round.round), None)
            return
        except PassNotAskedError:
            _log.warning("the COS asks for another pass", owner=owner.name, epoch=task.round.round)
            if self._trainers[owner.slot] is trainer:
                self._forget(owner.slot)
            return
        leave_after = self._leave_after
        if leave_after is not None and task.round.round >= leave_after:
            await self._leave(task.round.round)

    async def _leave(self, epoch: int) -> None:
        """Leave once every owner of this process has reported the epoch."""
        done = [key for key, work in self._working.items() if key[2] == epoch and work.done()]
        if len(done) + 1 < len(self.owners):
            return
        _log.info("leaving the run", epoch=epoch)
        await self._party.leave()
        self._runtime.stopping.set()

    async def finish(self) -> None:
        """Stop training and membership in windows: the run is over."""
        if self._shielded is not None:
            await self._shielded.finish()
        for trainer in self._trainers.values():
            trainer.supersede()

    async def close(self) -> None:
        """Wait for training under way; afterwards nothing writes to the store."""
        with contextlib.suppress(Exception):
            await asyncio.gather(*self._working.values(), return_exceptions=True)
        await self._exchanges.close()
