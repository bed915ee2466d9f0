"""A data owner in DRIFT: the records that users have sent it, and the blocks formed of them."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from coterie.crypto.sealed import decode_records
from coterie.errors import StoreError
from coterie.store import data_owner as store
from coterie.store.engine import Writer
from coterie.systems.drift.blocks import Block, BlockBuilder
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.unseen import UnseenItems
from coterie.wire.v1.orchestrator_pb2 import RunPlan
from coterie_data_owner.drift.prekeys import Prekeys
from coterie_data_owner.owner import Owner

__all__ = ["LearningOwner"]

_FULL_PAUSE_S = 1.0


class LearningOwner(Owner):
    """A data owner that takes users' records and forms blocks; used by the intake and the trainer.

    Parameters
    ----------
    owner : Owner
        The owner's identity, shared by all systems.
    prekeys : Prekeys
        Prekeys to which clients seal records.
    """

    def __init__(self, owner: Owner, prekeys: Prekeys) -> None:
        super().__init__(owner.name, owner.identity, owner.bundle, owner.items)
        self.prekeys = prekeys
        self.blocks: list[Block] = []
        self.durable: dict[bytes, int] = {}
        self.intake = asyncio.Lock()
        self.changed = asyncio.Event()
        self.turn = asyncio.Lock()
        self.flushed = False
        self.sequence = 0
        """Number of its last exchange with gradients that the COS acknowledged, as far as this process knows."""
        self._builder = BlockBuilder()
        self._plan = RunPlan()
        self._settings = DriftSettings()
        self._unseen = UnseenItems(self._settings, 0, 0)
        self._held: npt.NDArray[np.bool_] = np.zeros(0, bool)
        self._items: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        self._slots: dict[bytes, int] = {}

    @property
    def dropped(self) -> int:
        """Blocks dropped because no negative came first."""
        return self._builder.dropped

    def follow(self, plan: RunPlan) -> None:
        """Form blocks as the plan of a run of DRIFT asks; called once the owner has its slot in the run."""
        self._plan, self._settings = plan, DriftSettings.from_plan(plan)
        self._begin()

    def _begin(self) -> None:
        self._builder = BlockBuilder(keep_all=self._settings.pairs_unseen)
        self._unseen = UnseenItems(self._settings, self._plan.seed, self.slot)

    def draw(self, block: Block, epoch: int) -> Block:
        """Return a block with unseen items of this owner for a pass, where the plan asks for them."""
        return self._unseen.draw(block, self._items, epoch)

    def holds(self, indices: npt.NDArray[np.uint32], n_items: int) -> None:
        """Set which items of the catalogue, uint32 indices, are this owner's."""
        self._held = np.zeros(n_items, bool)
        self._held[indices] = True
        self._items = np.flatnonzero(self._held)

    @property
    def held_items(self) -> npt.NDArray[np.intp]:
        """Indices of this owner's items in the catalogue, ascending."""
        return self._items

    def knows_items(self, items: npt.NDArray[np.uint32]) -> bool:
        """Return whether all these items are this owner's."""
        return bool((items < len(self._held)).all() and self._held[items].all())

    def knows_user(self, user: bytes) -> bool:
        """Return whether the user's slot is known."""
        return user in self._slots

    def slot_of(self, user: bytes) -> int | None:
        """Return the slot of a user; None when it is not known."""
        return self._slots.get(user)

    def learn_slots(self, slots: dict[bytes, int]) -> None:
        """Set users' slots, by participant id, from the roster."""
        self._slots = slots

    def rebuild(self, connection: sa.Connection) -> None:
        """Build the blocks from the store, exactly as they were before a restart.

        Raises
        ------
        StoreError
            When the store holds records of a user that the run does not know.
        """
        self._begin()
        self.blocks, self.durable = [], {}
        flushes = store.load_flushes(connection, self.id)
        self.flushed = False
        for number, batch in store.load_batches(connection, self.id):
            while flushes and flushes[0] < number:
                flushes.pop(0)
                self.blocks += self._builder.flush()
            if not self.knows_user(batch.user):
                raise StoreError(
                    f"the store of owner {self.name} holds records of a user who is not in this run",
                    hint="give each run a state folder of its own",
                )
            self.add(batch)
        for _ in flushes:
            self.blocks += self._builder.flush()
            self.flushed = True

    def add(self, batch: store.Batch) -> None:
        """Add a stored batch: its records extend and complete blocks."""
        items, positive = decode_records(batch.records, batch.length)
        slot = self._slots[batch.user]
        self._unseen.see(slot, items.tolist())
        self.blocks += self._builder.extend(slot, items, positive)
        self.durable[batch.user] = batch.first + batch.length - 1
        # Records after a flush may leave blocks open again.
        self.flushed = False

    async def flush(self, writer: Writer) -> int:
        """Close trailing blocks, durably, and return how many there were."""
        while True:
            try:
                async with self.intake:
                    await writer.run(lambda connection: store.add_flush(connection, self.id))
                    found = self._builder.flush()
                    self.blocks += found
                    self.flushed = True
                break
            except StoreError as error:
                if not error.trouble:
                    raise
                # Sleep outside the lock, so that users who deliver meanwhile are refused at once and not kept waiting.
                await asyncio.sleep(_FULL_PAUSE_S)
        self.wake()
        return len(found)

    def wake(self) -> None:
        """Tell the trainer that there may be work."""
        self.changed.set()
