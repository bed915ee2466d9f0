"""Store versions of a model, for runs that form sums: all arrays of a version in one file, or in rows of the database.

Files are in the state folder of one service.  Rows are for services that share a database: whichever is in office
finds them, and they are written under its tenure as everything else is.  A row may name an object in place of having
the arrays itself (`coterie.store.version_objects`).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import structlog

from coterie.errors import StoreError
from coterie.rounds.sides import Arrays
from coterie.store.array_file import arrays_from_bytes, arrays_to_bytes, load_arrays, save_arrays
from coterie.store.cos import model_objects as objects_table
from coterie.store.cos import model_versions as table
from coterie.store.cos import runs
from coterie.store.objects import Stored
from coterie.store.version_objects import VersionObjects

__all__ = ["VersionRows", "Versions"]

_log = structlog.get_logger("coterie.store")

_NAME = re.compile(r"version-(\d{10})-(\d{10})\.safetensors")
_KEPT = 3
_MILESTONE = 50
_PART = 4 << 20
"""Bytes of a version in one row."""

Reading = Callable[[Callable[[sa.Connection], Any]], Any]
"""Runs a piece of work that reads the database, and returns its result."""


class VersionRows:
    """The model versions of one run in rows of the database.

    Parameters
    ----------
    run_id : str
    read : callable
        Reads the database.
    kept : bool
        Whether new versions are kept here, in place of files.
    objects : VersionObjects, optional
        The store of objects, where new versions go.
    """

    def __init__(
        self, run_id: str, read: Reading, *, kept: bool, objects: VersionObjects | None = None
    ) -> None:
        self._run_id = run_id
        self._read = read
        self.kept = kept
        self.objects = objects
        # The version that was loaded last, by its number: many parties fetch the same one.  None is one that is not
        # kept, or damaged.
        self._loaded: tuple[int, Arrays | None] | None = None
        self._loading = asyncio.Lock()

    def write_object(self, connection: sa.Connection, stored: Stored, version: int, round_: int) -> list[str]:
        """Name the object of a version in place of an earlier version of the same round, which no snapshot names.

        Returns the names of objects that no row names any more.
        """
        gone = self._make_way(connection, version, [round_])
        row = {"run_id": self._run_id, "round": round_, "version": version}
        connection.execute(objects_table.insert(), {**row, **stored._asdict()})
        return gone

    def _make_way(self, connection: sa.Connection, version: int | None, rounds: list[int]) -> list[str]:
        """Delete all rows of rounds, and forget a version; return the names of the objects that rows named."""
        if self._loaded is not None and self._loaded[0] == version:
            self._loaded = None
        mine = (objects_table.c.run_id == self._run_id) & objects_table.c.round.in_(rounds)
        gone = list(connection.execute(sa.select(objects_table.c.name).where(mine)).scalars())
        if gone:
            connection.execute(objects_table.delete().where(mine))
        connection.execute(table.delete().where((table.c.run_id == self._run_id) & table.c.round.in_(rounds)))
        return gone

    def write(self, connection: sa.Connection, arrays: Arrays, version: int, round_: int) -> None:
        """Write a version in place of an earlier one of the same round, which no snapshot names."""
        self._make_way(connection, version, [round_])
        content = arrays_to_bytes(arrays)
        for part, start in enumerate(range(0, len(content), _PART)):
            row = {"run_id": self._run_id, "round": round_, "part": part, "version": version}
            connection.execute(table.insert(), {**row, "content": content[start : start + _PART]})

    def prune(self, connection: sa.Connection, present: int, keep: Iterable[int]) -> list[str]:
        """Delete rows as `Versions.prune` deletes files; return the names of objects that no row names any more."""
        held = self._held(connection)
        kept = set(keep) | {version for version, _ in held[-_KEPT:]}
        gone = [
            made for version, made in held if version not in kept and version % _MILESTONE and made != present
        ]
        return self._make_way(connection, None, gone) if gone else []

    def keep_only(self, connection: sa.Connection, kept: Callable[[list[int]], Container[int]]) -> list[str]:
        """Delete the rows of all rounds but some; return the names of objects that no row names any more.

        Parameters
        ----------
        connection : sqlalchemy.Connection
        kept : callable
            Returns which rounds stay, given all of them in the order of their versions.
        """
        held = [made for _, made in self._held(connection)]
        stay = kept(held)
        gone = [made for made in held if made not in stay]
        return self._make_way(connection, None, gone) if gone else []

    def load(self, round_: int) -> Arrays | None:
        """Return the arrays that a round made; None when they are not kept here.

        Raises
        ------
        StoreError
            They are damaged, or the database is away; or they are in a store of objects and were not fetched.
        """
        found = self._content(round_)
        if isinstance(found, Stored):
            found = self._objects_of(found).fetched(found)
        return None if found is None else arrays_from_bytes(found, self._name(round_))[0]

    def _content(self, round_: int) -> bytes | Stored | None:
        """Return the content of the version that a round made, or the object that has it; None when it is not kept."""

        def content(connection: sa.Connection) -> bytes | Stored | None:
            mine = (objects_table.c.run_id == self._run_id) & (objects_table.c.round == round_)
            for row in connection.execute(sa.select(objects_table).where(mine)):
                return Stored(row.name, row.size, bytes(row.sha256))
            mine = (table.c.run_id == self._run_id) & (table.c.round == round_)
            rows = connection.execute(sa.select(table.c.content).where(mine).order_by(table.c.part))
            return b"".join(bytes(row.content) for row in rows) or None

        found: bytes | Stored | None = self._read(content)
        return found

    def _name(self, round_: int) -> str:
        return f"the version of the model that round {round_} of {self._run_id} made"

    def _objects_of(self, stored: Stored) -> VersionObjects:
        if self.objects is None:
            raise StoreError(
                f"a version of the model of {self._run_id} is in a store of objects, as {stored.name}, and this COS "
                "has no [objects]",
                hint="name the store in the configuration as before",
            )
        return self.objects

    async def read_version(self, version: int) -> None:
        """Read a version into memory, so that `load_version` returns it at once.

        Raises
        ------
        StoreError
            The database or the store of objects is away.
        """
        async with self._loading:
            if self.has_read(version):
                return
            held = await asyncio.to_thread(self._read, self._held)
            made = [round_ for one, round_ in held if one == version]
            arrays = None
            try:
                if made and (found := await asyncio.to_thread(self._content, made[-1])) is not None:
                    if isinstance(found, Stored):
                        found = await self._objects_of(found).get(found)
                    name = self._name(made[-1])
                    arrays = (await asyncio.to_thread(arrays_from_bytes, found, name))[0]
            except StoreError as error:
                if error.trouble:
                    raise
                _log.warning("a version of a model is not served", version=version, because=str(error))
            self._loaded = version, arrays

    def has_read(self, version: int) -> bool:
        """Return whether a version is in memory, or is known not to be kept."""
        return self._loaded is not None and self._loaded[0] == version

    def load_version(self, version: int) -> Arrays | None:
        """Return a version as its last round left it; None when it is not kept here.

        Raises
        ------
        StoreError
            It is damaged, or the database is away.
        """
        loaded = self._loaded
        if loaded is not None and loaded[0] == version:
            return loaded[1]
        made = [round_ for held, round_ in self._read(self._held) if held == version]
        arrays = self.load(made[-1]) if made else None
        if arrays is not None:
            self._loaded = version, arrays
        return arrays

    def _held(self, connection: sa.Connection) -> list[tuple[int, int]]:
        rows = connection.execute(
            sa.select(table.c.version, table.c.round).where(
                (table.c.run_id == self._run_id) & (table.c.part == 0)
            )
        )
        named = connection.execute(
            sa.select(objects_table.c.version, objects_table.c.round).where(
                objects_table.c.run_id == self._run_id
            )
        )
        return sorted((row.version, row.round) for found in (rows, named) for row in found)

    def take_files(self, connection: sa.Connection, files: Iterable[tuple[Path, int, int]]) -> None:
        """Write the versions of files that are not here, as of a service that had no standby before.

        Nothing is written where the run is not in the store, or its present version is here already: files are then
        left from before, or of another run of the same id.  A damaged file is left out, as one that crashed left.
        """
        snapshot = connection.execute(
            sa.select(runs.c.snapshot).where(runs.c.run_id == self._run_id)
        ).scalar()
        held = {made for _, made in self._held(connection)}
        if not snapshot or snapshot in held:
            return
        for path, version, made in files:
            if made > snapshot or made in held:
                continue
            try:
                arrays = load_arrays(path)[0]
            except StoreError as error:
                _log.warning(
                    "a version of a model is not taken over", run=self._run_id, because=error.message
                )
            else:
                self.write(connection, arrays, version, made)


class Versions:
    """The model versions of one run, each in a file named by its version and the round that made it.

    Parameters
    ----------
    folder : Path
    rows : VersionRows, optional
        Versions of the same run in the database, which are looked for where there is no file.
    """

    def __init__(self, folder: Path, rows: VersionRows | None = None) -> None:
        self._folder = folder
        self.rows = rows
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, arrays: Arrays, version: int, round_: int) -> None:
        """Write a version, durably, in place of another one of the same round, which no snapshot names."""
        # Write beside and rename, so that a reader finds the whole file or none.  Rename before the sync, which takes
        # one commit of the file system and not two: after a crash in between the file may be damaged, but then no
        # snapshot names it yet.
        path = self._path(version, round_)
        beside = path.with_name(f".{path.name}.part")
        try:
            save_arrays(arrays, beside)
            beside.replace(path)
        except BaseException:
            # On a full disk, a partial file would take the space that is left.
            beside.unlink(missing_ok=True)
            raise
        with path.open("rb") as written:
            os.fsync(written.fileno())
        # One of a log that was set back since, by which the number of the round is free again.
        for other, _, made in self.files():
            if made == round_ and other != path:
                other.unlink(missing_ok=True)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def load(self, round_: int) -> Arrays:
        """Return the arrays that a round made.

        Raises
        ------
        StoreError
            When they are not kept, or the file is damaged.
        """
        # Where new versions are kept in the database, a file of the same round may be older.
        if self.rows is not None and self.rows.kept and (arrays := self.rows.load(round_)) is not None:
            return arrays
        for path, _, made in self.files():
            if made == round_:
                return load_arrays(path)[0]
        if self.rows is not None and not self.rows.kept and (arrays := self.rows.load(round_)) is not None:
            return arrays
        raise StoreError(
            f"the store names the version of the model that round {round_} made, which is not in {self._folder}",
            hint="the store is older than the versions, as after a restore of one without the other; put the state "
            "folder and the database back to one time, with `coterie restore`, or the database to the latest one",
        )

    async def read_version(self, version: int) -> None:
        """Read a version into memory where that takes long, so that `load_version` returns it at once.

        Raises
        ------
        StoreError
            The database or the store of objects is away.
        """
        if self.rows is not None and self.rows.kept:
            await self.rows.read_version(version)

    def at_hand(self, version: int) -> bool:
        """Return whether `load_version` returns a version without a wait."""
        return self.rows is None or not self.rows.kept or self.rows.has_read(version)

    def load_version(self, version: int) -> Arrays | None:
        """Return a version as its last round left it; None when it is not kept, or damaged.

        Raises
        ------
        StoreError
            The database is away: whether it is kept is not known.
        """
        found = [path for path, held, _ in self.files() if held == version]
        try:
            if self.rows is not None and (self.rows.kept or not found):
                arrays = self.rows.load_version(version)
                if arrays is not None:
                    return arrays
            return load_arrays(found[-1])[0] if found else None
        except (StoreError, OSError) as error:
            if isinstance(error, StoreError) and error.trouble:
                raise
            # A crash left a damaged file of a version that no snapshot names, or the file was damaged later.
            _log.warning("a version of a model is not served", version=version, because=str(error))
            return None

    def prune(self, present: int, keep: Iterable[int]) -> None:
        """Delete all versions but the last three, every fiftieth, those in ``keep``, and that of round ``present``."""
        kept = set(keep) | {version for _, version, _ in self.files()[-_KEPT:]}
        for path, version, made in self.files():
            if version not in kept and version % _MILESTONE and made != present:
                path.unlink(missing_ok=True)

    def _path(self, version: int, round_: int) -> Path:
        return self._folder / f"version-{version:010d}-{round_:010d}.safetensors"

    def files(self) -> list[tuple[Path, int, int]]:
        """Return the file, the version and the round of each version that is in a file, in their order."""
        found = []
        for path in sorted(self._folder.iterdir()):
            name = _NAME.fullmatch(path.name)
            if name:
                found.append((path, int(name[1]), int(name[2])))
        return found
