"""Look up users for an owner's intake: slots from the COS's roster, keys from the directory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

import numpy as np
import sqlalchemy as sa
import structlog

from coterie.crypto.identity import Bundle
from coterie.net.directory import Directory
from coterie.parties.party import Party
from coterie.store import data_owner as store
from coterie.store.engine import Writer
from coterie.wire.tensor import from_wire
from coterie.wire.v1.common_pb2 import Tensor
from coterie.wire.v1.orchestrator_pb2 import FetchKind

__all__ = ["Users"]

_log = structlog.get_logger("coterie.data_owner")

Keep = Callable[[Callable[[sa.Connection], None]], Awaitable[None]]
"""Runs a piece of work in the store's next transaction."""

_ROLE = "client"
"""Role of the parties whose participants are users."""


class Users:
    """Users' slots, which are stored, and a cache of their key bundles; missing ones are fetched in bulk.

    Parameters
    ----------
    party : Party
        Connection to the COS, for the roster.
    directory : Directory
        The key directory.
    is_revoked : callable
        Tells whether a participant is revoked, by its id.
    engine, writer
        The store, which keeps slots.
    run_id : str
    """

    def __init__(
        self,
        party: Party,
        directory: Directory,
        is_revoked: Callable[[bytes], bool],
        engine: sa.Engine,
        writer: Writer,
        run_id: str,
    ) -> None:
        self._party = party
        self._engine = engine
        self._writer = writer
        self._run_id = run_id
        self._refreshing = asyncio.Lock()
        self._directory = directory
        self.is_revoked = is_revoked
        self.slots: dict[bytes, int] = {}
        self._bundles: dict[bytes, Bundle] = {}
        self._told = False

    async def bundles(self, users: Iterable[bytes]) -> Mapping[bytes, Bundle]:
        """Return bundles by user, for users who are registered, enrolled by a client host and not revoked.

        Raises
        ------
        StoreError
            When there are new users and the store does not keep their slots.
        """
        wanted = set(users)
        if not wanted <= self.slots.keys():
            await self.refresh()
        registered = {user for user in wanted if user in self.slots and not self.is_revoked(user)}
        missing = registered - self._bundles.keys()
        if missing:
            found = await self._directory.bundles(sorted(missing))
            self._bundles |= {user: bundle for user, bundle in found.items() if bundle.role == _ROLE}
        return {user: self._bundles[user] for user in registered & self._bundles.keys()}

    async def begin(self) -> None:
        """Restore slots from the store, then refresh; while the store is full, wait."""
        with self._engine.connect() as connection:
            self.slots.update(store.load_slots(connection, self._run_id))
        await self._refresh(self._writer.run_when_possible)

    async def refresh(self) -> None:
        """Fetch the roster and add its users' slots; a user keeps the slot that it had first, and has it alone.

        Users are counted by slots before a row of theirs may leave this owner: a user with several would count as many.
        Slots are stored before they are used, so that a restarted owner keeps to them.

        Raises
        ------
        StoreError
            When slots of new users are not kept.
        """
        await self._refresh(self._writer.run)

    async def _refresh(self, keep: Keep) -> None:
        async with self._refreshing:
            fresh = await self._fresh()
            if fresh:
                await keep(lambda connection: store.add_slots(connection, self._run_id, fresh))
                self.slots.update(fresh)

    async def _fresh(self) -> dict[bytes, int]:
        """Return the slots of users in the roster who have none yet."""
        _, payload = await self._party.fetch(FetchKind.FETCH_KIND_ROSTER)
        roster = from_wire(Tensor.FromString(payload or b""), np.uint8, (None, 32), field="roster")
        taken, refused = set(self.slots.values()), 0
        fresh: dict[bytes, int] = {}
        for slot, row in enumerate(roster):
            user = row.tobytes()
            if not row.any() or self.slots.get(user) == slot:
                continue
            if user in self.slots or user in fresh or slot in taken:
                refused += 1
                continue
            fresh[user] = slot
            taken.add(slot)
        if refused and not self._told:
            _log.warning("the roster gives users several slots, or others' slots", entries=refused)
        self._told = bool(refused)
        return fresh
