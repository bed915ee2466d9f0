"""Versions of models in a store of objects, which rows of the database name.

An object is written and read back before the row that names it is committed, and removed after the row is: what a row
names is there.  What no row names is left from a write that did not come to its end, and removed once it is old.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import NamedTuple

import sqlalchemy as sa
import structlog

from coterie.errors import StoreError
from coterie.rounds.sides import Arrays
from coterie.store.array_file import arrays_to_bytes
from coterie.store.cos import model_objects as table
from coterie.store.cos import object_folder, runs
from coterie.store.objects import ObjectStore, Stored, age_s, object_name

__all__ = [
    "ORPHANS_AFTER_S",
    "NamedVersion",
    "VersionObjects",
    "named_objects",
    "needed_objects",
    "own_folder",
]

_log = structlog.get_logger("coterie.store")

ORPHANS_AFTER_S = 86_400.0
"""Age of an object that no row names after which it is removed, seconds: a write takes much less."""
_AT_ONCE = 4
"""Objects that are read at the same time."""


class NamedVersion(NamedTuple):
    """A version of a model in the store of objects, as its row has it."""

    run_id: str
    round: int
    version: int
    stored: Stored


class VersionObjects:
    """The store of objects of one COS, for all its runs.

    Parameters
    ----------
    store : ObjectStore
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.folder = ""
        """The database's folder in the store; empty before the COS is in office."""
        self._fetched: dict[str, bytes] = {}
        # When this process wrote objects, by a clock that nobody sets: their names have the time of the day.
        self._written: dict[str, float] = {}
        self._removing: set[asyncio.Task[None]] = set()

    async def put(self, run_id: str, arrays: Arrays, version: int, round_: int) -> Stored:
        """Write a version under a name of its own, and read it back.

        Raises
        ------
        StoreError
            As `ObjectStore.put`.
        """
        if not self.folder:
            raise StoreError("this COS is not in office", trouble="away")
        content = await asyncio.to_thread(arrays_to_bytes, arrays)
        name = object_name(f"{self.folder}/{run_id}", f"version-{version:010d}-{round_:010d}")
        self._written[name] = time.monotonic()
        try:
            return await self.store.put(name, content)
        except BaseException:
            # It may be there, as where the store does not give it back: a write that is tried for days would fill it.
            self._begin(self._removed([name], "an object that nothing names may stay"))
            raise

    async def get(self, stored: Stored) -> bytes:
        """Return the content of a version, verified, fetched unless it was before.

        Raises
        ------
        StoreError
            As `ObjectStore.get`.
        """
        held = self._fetched.get(stored.name)
        return await self.store.get(stored) if held is None else held

    async def fetch(self, needed: Iterable[NamedVersion]) -> None:
        """Fetch versions, so that they can be read without a wait until `drop`.

        Raises
        ------
        StoreError
            As `ObjectStore.get`; the message names the run.
        """
        turn = asyncio.Semaphore(_AT_ONCE)

        async def one(named: NamedVersion) -> None:
            async with turn:
                try:
                    self._fetched[named.stored.name] = await self.get(named.stored)
                except StoreError as error:
                    raise StoreError(
                        f"the model of run {named.run_id} cannot be read: {error.message}",
                        hint=error.hint,
                        trouble=error.trouble,
                    ) from error

        tasks = [asyncio.ensure_future(one(named)) for named in needed]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def fetched(self, stored: Stored) -> bytes:
        """Return a version that was fetched.

        Raises
        ------
        StoreError
            It was not, and may be later.
        """
        held = self._fetched.get(stored.name)
        if held is None:
            raise StoreError(f"{self.store.named(stored.name)} is not fetched yet", trouble="away")
        return held

    def drop(self) -> None:
        """Forget what was fetched."""
        self._fetched.clear()

    def remove(self, names: Collection[str]) -> None:
        """Remove objects that no row names any more, in the background; what stays is removed once it is old."""
        if names:
            self._begin(self._removed(names, "an object of an old version stays"))

    def clean(self, read: Callable[[Callable[[sa.Connection], set[str]]], Awaitable[set[str]]]) -> None:
        """Remove objects of this database that no row names and that are old, in the background.

        Parameters
        ----------
        read : callable
            Runs a piece of work that reads the database, and returns its result.
        """

        async def clean() -> None:
            try:
                orphans = await self.orphans(lambda: read(named_objects))
            except StoreError as error:
                _log.info("the store of objects is not searched for what is left", because=error.message)
                return
            if orphans:
                _log.info("objects that nothing names are removed", objects=len(orphans))
                await self._removed(orphans, "an object that nothing names stays")

        self._begin(clean())

    async def orphans(self, read: Callable[[], Awaitable[set[str]]], folder: str = "") -> list[str]:
        """Return the names of objects in the database's folder that no row names and that are old.

        Parameters
        ----------
        read : callable
            Returns the names that rows have; it is called after the store was listed.
        folder : str
            The database's folder, where this is not a COS in office.
        """
        held = await self.store.names(folder or self.folder)
        since = time.monotonic() - ORPHANS_AFTER_S
        self._written = {name: at for name, at in self._written.items() if at > since}
        old = [
            name
            for name in held
            if (age := age_s(name)) is not None and age > ORPHANS_AFTER_S and name not in self._written
        ]
        if not old:
            return []
        named = await read()
        return [name for name in old if name not in named]

    async def _removed(self, names: Collection[str], what: str) -> None:
        for name in names:
            try:
                await self.store.remove(name)
            except StoreError as error:
                _log.info(what, object=name, because=error.message)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)


def named_objects(connection: sa.Connection) -> set[str]:
    """Return the names of all objects that rows have."""
    return set(connection.execute(sa.select(table.c.name)).scalars())


def needed_objects(connection: sa.Connection, run_id: str | None = None) -> list[NamedVersion]:
    """Return the present versions of all runs, or of one, that are in the store of objects."""
    found = (
        sa.select(table)
        .join(runs, (runs.c.run_id == table.c.run_id) & (runs.c.snapshot == table.c.round))
        .order_by(table.c.run_id)
    )
    if run_id is not None:
        found = found.where(table.c.run_id == run_id)
    return [_named(row) for row in connection.execute(found)]


def all_objects(connection: sa.Connection) -> list[NamedVersion]:
    """Return all versions in the store of objects."""
    found = sa.select(table).order_by(table.c.run_id, table.c.version, table.c.round)
    return [_named(row) for row in connection.execute(found)]


def _named(row: sa.Row[tuple[object, ...]]) -> NamedVersion:
    return NamedVersion(row.run_id, row.round, row.version, Stored(row.name, row.size, bytes(row.sha256)))


def own_folder(connection: sa.Connection) -> str:
    """Return the folder of this database in a store of objects, named when it is asked for first."""
    held = connection.execute(sa.select(object_folder.c.name)).scalar()
    if held is None:
        held = secrets.token_hex(8)
        connection.execute(object_folder.insert(), {"one": 1, "name": held})
    return str(held)
