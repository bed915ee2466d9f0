"""Keep what a host's users have set for themselves, and give it to the host's side of the run's system."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from coterie.data.attributes import AttributeTable, read_attributes
from coterie.errors import DataError
from coterie.net.uncancelled import completed
from coterie.parties.stored_host import preference_table
from coterie.store import client as store
from coterie.store.engine import Writer
from coterie.systems.registry import preferences_of
from coterie.systems.shared.preferences import objection

__all__ = ["Preferences", "read_preferences"]


def read_preferences(path: Path, users: Sequence[str]) -> dict[int, dict[str, float]]:
    """Read the users' preferences from CSV with a column ``user`` and one for each preference, empty where none is set.

    Returns
    -------
    dict
        Values by name, by user, counted from 1 in the order of ``users``.

    Raises
    ------
    DataError
        The file is malformed, or names a user that this host does not have.
    """
    rows, table = read_attributes(path, "user")
    numbers = {name: number for number, name in enumerate(users, start=1)}
    if any(name not in numbers for name in rows):
        raise DataError(f"{path} names a user that this host has no history of", hint="users of `histories`")
    return {
        numbers[name]: {
            # The shortest decimal fraction that gives the number back, as the file has it.
            one: float(str(value))
            for one, value in zip(table.names, table.values[row], strict=True)
            if not math.isnan(value)
        }
        for name, row in rows.items()
    }


class Preferences:
    """Preferences of a host's users, in memory and in its store.

    Parameters
    ----------
    engine : sqlalchemy.Engine
        The store.
    writer : Writer
        Its writer.
    """

    def __init__(self, engine: sa.Engine, writer: Writer) -> None:
        self._engine = engine
        self._writer = writer
        self._changing = asyncio.Lock()
        self.changes = 0
        """Number of changes since the process started: sides that were made before the last one are out of date."""
        self._values: dict[int, dict[str, float]] = {}
        self.load()

    def load(self) -> None:
        """Read the store again."""
        with self._engine.connect() as connection:
            self._values = store.load_preferences(connection)
        self.changes += 1

    def of(self, user: int) -> Mapping[str, float]:
        """Return what a user, counted from 1, has set: values by name."""
        return dict(self._values.get(user, {}))

    async def change(self, user: int, changes: Mapping[str, float | None]) -> None:
        """Set or, with None, take out preferences of a user, all or none; they are durable on return.

        A cancelled caller does not stop the write.
        """
        await completed(self._change(user, changes))

    async def _change(self, user: int, changes: Mapping[str, float | None]) -> None:
        async with self._changing:
            await self._writer.run(partial(store.set_preferences, user=user, changes=changes))
            kept = {**self._values.get(user, {}), **changes}
            self._values[user] = {name: value for name, value in kept.items() if value is not None}
            self.changes += 1

    def objection(self, system: str) -> str:
        """Return why a system cannot do what some user has set; empty where it can."""
        known = preferences_of(system)
        return next(filter(None, (objection(system, known, own) for own in self._values.values())), "")

    def table(self, system: str, users: int) -> AttributeTable | None:
        """Return what users have set for a system, a row for each; None where the system has no preferences."""
        return preference_table(system, users, self._values)
