"""Look up users for an owner's intake: slots from the COS's roster, keys from the directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import structlog

from coterie.crypto.identity import Bundle
from coterie.net.directory import Directory
from coterie.parties.party import Party
from coterie.wire.tensor import from_wire
from coterie.wire.v1.common_pb2 import Tensor
from coterie.wire.v1.orchestrator_pb2 import FetchKind

__all__ = ["Users"]

_log = structlog.get_logger("coterie.data_owner")

_ROLE = "client"
"""Role of the parties whose participants are users."""


class Users:
    """A cache of users' slots and key bundles; missing ones are fetched in bulk.

    Parameters
    ----------
    party : Party
        Connection to the COS, for the roster.
    directory : Directory
        The key directory.
    is_revoked : callable
        Tells whether a participant is revoked, by its id.
    """

    def __init__(self, party: Party, directory: Directory, is_revoked: Callable[[bytes], bool]) -> None:
        self._party = party
        self._directory = directory
        self.is_revoked = is_revoked
        self.slots: dict[bytes, int] = {}
        self._bundles: dict[bytes, Bundle] = {}
        self._told = False

    async def bundles(self, users: Iterable[bytes]) -> Mapping[bytes, Bundle]:
        """Return bundles by user, for users who are registered, enrolled by a client host and not revoked."""
        wanted = set(users)
        if not wanted <= self.slots.keys():
            await self.refresh()
        registered = {user for user in wanted if user in self.slots and not self.is_revoked(user)}
        missing = registered - self._bundles.keys()
        if missing:
            found = await self._directory.bundles(sorted(missing))
            self._bundles |= {user: bundle for user, bundle in found.items() if bundle.role == _ROLE}
        return {user: self._bundles[user] for user in registered & self._bundles.keys()}

    async def refresh(self) -> None:
        """Fetch the roster and add its users' slots; a user keeps the slot that it had first, and has it alone.

        Users are counted by slots before a row of theirs may leave this owner: a user with several would count as many.
        """
        _, payload = await self._party.fetch(FetchKind.FETCH_KIND_ROSTER)
        roster = from_wire(Tensor.FromString(payload or b""), np.uint8, (None, 32), field="roster")
        taken, refused = set(self.slots.values()), 0
        for slot, row in enumerate(roster):
            user = row.tobytes()
            if not row.any() or self.slots.get(user) == slot:
                continue
            if user in self.slots or slot in taken:
                refused += 1
                continue
            self.slots[user] = slot
            taken.add(slot)
        if refused and not self._told:
            _log.warning("the roster gives users several slots, or others' slots", entries=refused)
        self._told = bool(refused)
