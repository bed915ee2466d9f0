"""Run a process's owners in DRIFT's shielded form: fetch models, join windows, report numbers of visits."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import numpy as np
import sqlalchemy as sa
import structlog

from coterie.crypto import restored
from coterie.errors import PeerError
from coterie.parties.member_driver import MemberDriver
from coterie.parties.party import Party
from coterie.process.runtime import Runtime
from coterie.rounds.conductor import model_from_bytes
from coterie.store.engine import Writer
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef
from coterie_data_owner.drift.holdings import Holdings, ItemRows
from coterie_data_owner.drift.learning_owner import LearningOwner
from coterie_data_owner.drift.windows import WindowMembers

__all__ = ["ShieldedOwners"]

_log = structlog.get_logger("coterie.holdings")


class ShieldedOwners:
    """Holdings of all owners of this process, and their membership in windows; used by `DriftOwners`.

    Parameters
    ----------
    owners : sequence of LearningOwner
        Registered.
    party : Party
        To the COS.
    writer : Writer
        The store's writer.
    runtime : Runtime
    directory_key : bytes
        The directory's public key.
    """

    def __init__(
        self,
        owners: Sequence[LearningOwner],
        party: Party,
        writer: Writer,
        runtime: Runtime,
        directory_key: bytes,
    ) -> None:
        self._party = party
        self._plan = party.plan
        self.holdings = {
            owner.id: Holdings(owner, party.plan, writer, runtime.accounting, self._refresh)
            for owner in owners
        }
        if reasons := restored.objections(runtime.state, party.plan.run_id, party.plan.secure_sum):
            _log.warning(
                "restored from a backup: no part in windows of this run",
                run=party.plan.run_id,
                reasons=reasons,
            )
            for one in self.holdings.values():
                one.sits_out = True
        self._by_slot = {owner.slot: self.holdings[owner.id] for owner in owners}
        members = WindowMembers(
            list(self.holdings.values()), party.plan, runtime, directory_key, writer, self._say_again
        )
        # What the COS was told of each owner last: visits and held rows, by slot.
        self._said: dict[int, tuple[int, int]] = {}
        self.driver = MemberDriver(party, members, runtime.accounting.activity)
        self._model = ItemRows(-1, b"", np.zeros((0, party.plan.dim), np.float32))
        self._over = False

    async def begin(self, engine: sa.Engine) -> None:
        """Fetch the newest model and restore the holdings from the store."""
        await self._fetch()
        for one in self.holdings.values():
            with engine.connect() as connection:
                one.rebuild(connection)
            await one.told(self._model, 0, 0)
            _log.info("takes visits", visits=one.visits, held=one.held)

    async def told(self, tasks: Sequence[wire.Task]) -> None:
        """Take the COS's open tasks: first the outcome of windows, then requests."""
        for task in tasks:
            if task.kind != wire.TaskKind.TASK_KIND_RECEIVE:
                continue
            if task.version > self._model.version:
                await self._fetch()
            for part in task.slots:
                for slot in range(part.first, part.first + part.count):
                    if slot in self._by_slot:
                        await self._by_slot[slot].told(self._model, task.closed, task.summed)
        self.driver.hear(tasks)

    async def _refresh(self) -> None:
        """Fetch the newest model and hand it to all owners."""
        await self._fetch()
        for one in self.holdings.values():
            await one.told(self._model, 0, 0)

    async def _fetch(self) -> None:
        """Fetch the rows of all items, so that the COS does not learn which are needed."""
        version, payload = await self._party.fetch(
            wire.FetchKind.FETCH_KIND_MODEL, held_sha256=self._model.sha256
        )
        if payload is None:
            return
        items = model_from_bytes(payload).get("items")
        if items is None or items.ndim != 2 or items.shape[1] != self._plan.dim:
            raise PeerError(
                "the COS sent a model that has no rows of items", hint="is it of another release?"
            )
        self._model = ItemRows(version, hashlib.sha256(payload).digest(), items)

    async def report(self) -> None:
        """Report numbers of visits and of held rows to the COS when they change; never who visited."""
        waiting = {slot: asyncio.create_task(one.changed.wait()) for slot, one in self._by_slot.items()}
        while not self._over:
            await asyncio.wait(waiting.values(), timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for slot, one in self._by_slot.items():
                if not waiting[slot].done():
                    continue
                one.changed.clear()
                waiting[slot] = asyncio.create_task(one.changed.wait())
                if self._said.get(slot) != (one.visits, one.held) and not await self._say(slot, one):
                    one.changed.set()
                    await asyncio.sleep(1.0)
        for task in waiting.values():
            task.cancel()

    async def _say(self, slot: int, one: Holdings) -> bool:
        """Report an owner's numbers; return whether the COS took them."""
        now = one.visits, one.held
        status = wire.VisitStatus(visits=now[0], held=now[1])
        try:
            await self._party.submit(
                wire.SubmitKind.SUBMIT_KIND_VISITS, RoundRef(run_id=self._plan.run_id), status, slots=[slot]
            )
        except PeerError as error:
            _log.info("visits are not reported yet", error=error.message)
            return False
        self._said[slot] = now
        return True

    async def _say_again(self) -> None:
        """Report all numbers with each window: a COS that ended since the last report has forgotten it."""
        for slot, one in self._by_slot.items():
            if not await self._say(slot, one):
                one.changed.set()

    async def finish(self) -> None:
        """Stop membership in windows and reports: the run is over."""
        self._over = True
        self.driver.finish()
        for one in self.holdings.values():
            one.stop()
