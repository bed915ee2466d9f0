"""Look up users for an owner's intake: slots from the COS's roster, keys from the directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from coterie.crypto.identity import Bundle
from coterie.net.directory import Directory
from coterie.parties.party import Party
from coterie.wire.tensor import from_wire
from coterie.wire.v1.common_pb2 import Tensor
from coterie.wire.v1.orchestrator_pb2 import FetchKind

__all__ = ["Users"]


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

    async def bundles(self, users: Iterable[bytes]) -> Mapping[bytes, Bundle]:
        """Return bundles by user, for users who are registered, enrolled and not revoked."""
        wanted = set(users)
        if not wanted <= self.slots.keys():
            await self.refresh()
        registered = {user for user in wanted if user in self.slots and not self.is_revoked(user)}
        missing = registered - self._bundles.keys()
        if missing:
            self._bundles.update(await self._directory.bundles(sorted(missing)))
        return {user: self._bundles[user] for user in registered & self._bundles.keys()}

    async def refresh(self) -> None:
        """Fetch the roster and add its users' slots."""
        _, payload = await self._party.fetch(FetchKind.FETCH_KIND_ROSTER)
        roster = from_wire(Tensor.FromString(payload or b""), np.uint8, (None, 32), field="roster")
        self.slots.update((row.tobytes(), slot) for slot, row in enumerate(roster) if row.any())
