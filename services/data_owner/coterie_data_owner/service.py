"""Run the data-owner service: join a run, take interactions, train when the COS asks, leave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import structlog

from coterie.config.services import DataOwnerSettings
from coterie.crypto import restored
from coterie.crypto.authority import logical_name
from coterie.crypto.identity import Bundle
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import enrol, identities, saved_bundles
from coterie.net.retry import Retry
from coterie.parties.party import Party, Registrant
from coterie.parties.signed_run import objections_to_signature
from coterie.process.migration import backed_up
from coterie.process.runtime import Runtime
from coterie.store.engine import Writer, open_sqlite
from coterie.systems.registry import asks_owners
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.data_owner_pb2_grpc import add_DataOwnerServicer_to_server
from coterie_data_owner.drift.owners import DriftOwners, owners_floor
from coterie_data_owner.item_factors import ItemFactors, read_features
from coterie_data_owner.owner import Owner, read_items

__all__ = ["SERVICE"]

_log = structlog.get_logger("coterie.data_owner")

_RETRY_S = 120.0


class DataOwnerProcess:
    """A running process of one or more data owners."""

    def __init__(self, settings: DataOwnerSettings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        runtime.require(["store", "directory", "run"])
        before = backed_up("data-owner", settings)
        self._engine = open_sqlite(settings.state / "data_owner.db", "data_owner", before=before)
        self._writer = Writer(self._engine)
        runtime.holds("store")
        keys = identities(settings.state, len(settings.owners))
        bundles: Sequence[Bundle] = saved_bundles(settings.state)
        self._owners = [
            Owner(owner.name, identity, bundle, read_items(owner.items))
            for owner, identity, bundle in zip(settings.owners, keys, bundles, strict=True)
        ]
        thirdparty = runtime.connect(settings.thirdparty, "thirdparty")
        self._revocations = runtime.watch_revocations(thirdparty)
        self._log = runtime.watch_log(thirdparty)
        cos = runtime.connect(settings.cos, "cos")
        self._log.gossip_with(cos)
        self._party = Party(
            cos,
            settings.run,
            runtime.shown,
            Retry(limit_s=_RETRY_S),
            lambda reached: runtime.holds("run", reached),
        )
        self._drift = DriftOwners(
            self._owners,
            settings,
            runtime,
            self._party,
            self._engine,
            self._writer,
            thirdparty,
            self._revocations.is_revoked,
            self._log,
        )
        self._features = [
            None if owner.features is None else read_features(owner.features, held.items)
            for owner, held in zip(settings.owners, self._owners, strict=True)
        ]
        self._item_factors: ItemFactors | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the intake of interactions, and the comparison of the log's heads, to the gRPC server."""
        add_DataOwnerServicer_to_server(self._drift.intake, server)
        self._runtime.offer_gossip(server, self._log)

    async def run(self) -> None:
        """Join the run, then carry out the COS's tasks until the run has ended."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._revocations.run())
            tasks.create_task(self._log.run())
            tasks.create_task(self._runtime.watch_store(self._writer))
            tasks.create_task(self._take_part(tasks))

    async def _take_part(self, tasks: asyncio.TaskGroup) -> None:
        if not await self._join():
            return
        self._drift.begin(tasks)
        answering = None if self._item_factors is None else tasks.create_task(self._item_factors.run())
        async for open_tasks in self._party.tasks():
            await self._drift.told(open_tasks)
            if self._item_factors is not None:
                self._item_factors.told(open_tasks)
            end = self._party.end_in(open_tasks)
            if end is not None:
                _log.info("the run has ended", reason=end.reason)
                await self._drift.finish()
                if answering is not None:
                    answering.cancel()
                return
            for task in open_tasks:
                self._drift.start(task, tasks)

    async def _join(self) -> bool:
        """Register and get ready; return False when the run is one that this process takes no part in."""
        address = self._settings.advertise or self._settings.listen
        tls_name = logical_name("data-owner", self._settings.name)
        members = [
            Registrant(
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
        await self._log.ready()
        await self._party.wait_and_register(members)
        objections = objections_to_signature(self._party, self._settings.operators)
        if not objections:
            plan = self._party.plan
            objections = self._settings.consent.consent().objections(plan, owners_floor(plan))
        if objections:
            _log.warning("outside these owners' consent", reasons=objections)
            await self._party.leave()
            return False
        for owner, slot in zip(self._owners, self._party.slots, strict=True):
            owner.slot = slot
        await self._drift.join()
        run = self._settings.run
        if lost := restored.lost(self._settings.state, run):
            _log.warning("goes on with a restored state", run=run, lost=lost)
        if asks_owners(self._party.plan.system):
            self._item_factors = ItemFactors(
                self._owners,
                self._features,
                self._party,
                self._settings.state,
                self._runtime.accounting,
                self._writer.files_when_possible,
            )
        self._drift.intake.ready.set()
        self._runtime.holds("run")
        return True

    async def close(self) -> None:
        """Finish training that is under way and close the store."""
        await self._drift.close()
        self._writer.close()
        self._engine.dispose()


class _DataOwner:
    role = "data-owner"

    async def enrol(self, settings: DataOwnerSettings, tls: TlsFiles) -> None:
        await enrol(self.role, settings, tls, identities(settings.state, len(settings.owners)))

    def build(self, settings: Any, runtime: Runtime) -> DataOwnerProcess:
        return DataOwnerProcess(settings, runtime)


SERVICE = _DataOwner()
