"""Data owners as a service: join the run, take interactions, train when asked, leave."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import numpy as np
import structlog

from coterie.config.services import DataOwnerSettings
from coterie.crypto.authority import logical_name
from coterie.crypto.identity import Bundle
from coterie.net.credentials import TlsFiles
from coterie.net.directory import Directory
from coterie.net.enrolment import enrol, identities, saved_bundles
from coterie.net.retry import Retry
from coterie.parties.party import Member, Party
from coterie.process.runtime import Runtime
from coterie.store.engine import Writer, open_sqlite
from coterie.systems.registry import asks_owners
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.data_owner_pb2_grpc import add_DataOwnerServicer_to_server
from coterie_data_owner.intake import Intake
from coterie_data_owner.item_factors import ItemFactors, read_features
from coterie_data_owner.owner import Owner, read_items
from coterie_data_owner.prekeys import Prekeys
from coterie_data_owner.shielded import ShieldedOwners
from coterie_data_owner.trainer import RunEndedError, Trainer
from coterie_data_owner.users import Users

__all__ = ["SERVICE"]

_log = structlog.get_logger("coterie.data_owner")

_RETRY_S = 120.0


class DataOwnerProcess:
    """A running process of one or more data owners."""

    def __init__(self, settings: DataOwnerSettings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        runtime.require(["store", "directory", "run"])
        self._engine = open_sqlite(settings.state / "data_owner.db", "data_owner")
        self._writer = Writer(self._engine)
        runtime.holds("store")
        keys = identities(settings.state, len(settings.owners))
        bundles: tuple[Bundle, ...] = saved_bundles(settings.state)
        self._owners = [
            Owner(
                owner.name,
                identity,
                bundle,
                read_items(owner.items),
                Prekeys(
                    identity, settings.run, settings.state / "prekeys" / owner.name, settings.prekey_hours
                ),
            )
            for owner, identity, bundle in zip(settings.owners, keys, bundles, strict=True)
        ]
        thirdparty = runtime.connect(settings.thirdparty, "thirdparty")
        self._revocations = runtime.watch_revocations(thirdparty)
        self._party = Party(
            runtime.connect(settings.cos, "cos"),
            settings.run,
            runtime.shown,
            Retry(limit_s=_RETRY_S),
            lambda reached: runtime.holds("run", reached),
        )
        self._directory_key = directory_key = (settings.state / "directory.key").read_bytes()
        self._users = Users(self._party, Directory(thirdparty, directory_key), self._revocations.is_revoked)
        self._intake = Intake(
            settings.run,
            {owner.id: owner for owner in self._owners},
            self._users,
            self._writer,
            runtime.accounting,
        )
        self._features = [
            None if owner.features is None else read_features(owner.features, held.items)
            for owner, held in zip(settings.owners, self._owners, strict=True)
        ]
        self._shielded: ShieldedOwners | None = None
        self._item_factors: ItemFactors | None = None
        self._flush_due = False
        self._working: dict[tuple[int, wire.TaskKind.ValueType, int], asyncio.Task[None]] = {}
        self._trainers: dict[int, Trainer] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the servicer."""
        add_DataOwnerServicer_to_server(self._intake, server)

    async def run(self) -> None:
        """Join, then do what the COS asks until the run has ended."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._revocations.run())
            tasks.create_task(self._runtime.watch_store(self._writer))
            tasks.create_task(self._take_part(tasks))

    async def _take_part(self, tasks: asyncio.TaskGroup) -> None:
        await self._join()
        if self._shielded is not None:
            tasks.create_task(self._shielded.members.run())
            tasks.create_task(self._shielded.report())
        answering = None if self._item_factors is None else tasks.create_task(self._item_factors.run())
        async for open_tasks in self._party.tasks():
            if self._shielded is not None:
                await self._shielded.told(open_tasks)
            if self._item_factors is not None:
                self._item_factors.told(open_tasks)
            for task in open_tasks:
                if task.kind == wire.TaskKind.TASK_KIND_FINISH:
                    _log.info("the run has ended", reason=task.reason)
                    if self._shielded is not None:
                        await self._shielded.finish()
                    if answering is not None:
                        answering.cancel()
                    for trainer in self._trainers.values():
                        trainer.supersede()
                    return
                if task.kind in (wire.TaskKind.TASK_KIND_INTAKE, wire.TaskKind.TASK_KIND_EPOCH):
                    self._start(task, tasks)

    async def _join(self) -> None:
        address = self._settings.advertise or self._settings.listen
        tls_name = logical_name("data-owner", self._settings.name)
        members = [
            Member(
                owner.identity,
                owner.bundle,
                wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER,
                name=owner.name,
                address=address,
                tls_name=tls_name,
                items=owner.items,
            )
            for owner in self._owners
        ]
        await self._party.wait_and_register(members)
        _, payload = await self._party.fetch(wire.FetchKind.FETCH_KIND_CATALOGUE)
        index = {key: n for n, key in enumerate(wire.Catalogue.FromString(payload or b"").items)}
        await self._users.refresh()
        shielded = self._party.plan.form == "shielded"
        for owner, slot in zip(self._owners, self._party.slots, strict=True):
            owner.slot = slot
            owner.holds(np.array([index[key] for key in owner.items], np.uint32), len(index))
            owner.learn_slots(self._users.slots)
            if shielded:
                continue
            with self._engine.connect() as connection:
                owner.rebuild(connection)
            _log.info("joined", owner=owner.name, items=len(owner.items), blocks=len(owner.blocks))
        if shielded:
            self._shielded = ShieldedOwners(
                self._owners, self._party, self._writer, self._runtime, self._directory_key
            )
            await self._shielded.begin(self._engine)
            self._intake.shield(self._party.plan, self._shielded.holdings)
        if asks_owners(self._party.plan.system):
            self._item_factors = ItemFactors(
                self._owners,
                self._features,
                self._party,
                self._settings.state,
                self._runtime.accounting,
            )
        self._intake.ready.set()
        self._runtime.holds("run")

    def _start(self, task: wire.Task, tasks: asyncio.TaskGroup) -> None:
        self._flush_due = task.flush
        slots = {slot for part in task.slots for slot in range(part.first, part.first + part.count)}
        for owner in self._owners:
            if owner.slot not in slots:
                continue
            key = (owner.slot, task.kind, task.round.round)
            if key not in self._working and not self._leaves_before(owner, task.round.round):
                self._working[key] = tasks.create_task(self._train(owner, task))
            owner.wake()

    def _leaves_before(self, owner: Owner, epoch: int) -> bool:
        """Whether an owner has its last epoch under way, and this is another: the COS may ask for it at once."""
        last = self._settings.leave_after_epoch
        return last is not None and any(
            slot == owner.slot and last <= begun < epoch for slot, _, begun in self._working
        )

    async def _train(self, owner: Owner, task: wire.Task) -> None:
        trainer = Trainer(owner, self._party, self._writer, self._runtime.accounting, lambda: self._flush_due)
        earlier, self._trainers[owner.slot] = self._trainers.get(owner.slot), trainer
        if earlier is not None:
            earlier.supersede()
        # The COS takes one sequence of updates from an owner.
        try:
            async with owner.turn:
                if task.kind == wire.TaskKind.TASK_KIND_INTAKE:
                    await trainer.intake(task.round.round)
                else:
                    await trainer.epoch(task.round.round)
        except RunEndedError:
            return
        leave_after = self._settings.leave_after_epoch
        if leave_after is not None and task.round.round >= leave_after:
            await self._leave(task.round.round)

    async def _leave(self, epoch: int) -> None:
        """Leave once every owner of this process has reported the epoch."""
        done = [key for key, work in self._working.items() if key[2] == epoch and work.done()]
        if len(done) + 1 < len(self._owners):
            return
        _log.info("leaving the run", epoch=epoch)
        await self._party.leave()
        self._runtime.stopping.set()

    async def close(self) -> None:
        """Close the store."""
        with contextlib.suppress(Exception):
            await asyncio.gather(*self._working.values(), return_exceptions=True)
        self._writer.close()
        self._engine.dispose()


class _DataOwner:
    role = "data-owner"

    async def enrol(self, settings: DataOwnerSettings, tls: TlsFiles) -> None:
        await enrol(self.role, settings, tls, identities(settings.state, len(settings.owners)))

    def build(self, settings: Any, runtime: Runtime) -> DataOwnerProcess:
        return DataOwnerProcess(settings, runtime)


SERVICE = _DataOwner()
