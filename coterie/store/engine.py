"""SQLite files that mean it: write-ahead log, ``synchronous=FULL``, one writer with group commit.

An acknowledgement sent after ``Writer.run`` returns is durable: the transaction that holds it has been synced.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from coterie.errors import StoreError

__all__ = ["Writer", "is_full", "open_sqlite"]

T = TypeVar("T")

_FULL_PAUSE_S = 1.0


def open_sqlite(path: Path, schema: str, *, cache_kib: int = 2000) -> sa.Engine:
    """Open a store, creating or migrating it to the newest revision.

    Parameters
    ----------
    path : Path
        The file; its folder must exist.
    schema : str
        Folder of the role's revisions under ``coterie/store/migrations``.
    cache_kib : int
        Most memory of a connection for pages of the file; the system's own cache is behind it.

    Raises
    ------
    StoreError
        When the file cannot be opened, is no store of this role, or cannot be migrated.
    """
    engine = sa.create_engine(
        f"sqlite:///{path}",
        connect_args={"timeout": 10.0, "check_same_thread": False},
        poolclass=sa.pool.NullPool if str(path) != ":memory:" else sa.pool.StaticPool,
    )
    sa.event.listen(engine, "connect", lambda connection, _: _set_up(connection, cache_kib))
    try:
        path.touch(mode=0o600)
        _migrate(engine, schema)
    except (sa.exc.DatabaseError, OSError) as error:
        cause = getattr(error, "orig", error)
        raise StoreError(f"cannot open the store {path}: {cause}") from error
    return engine


def _set_up(connection: sqlite3.Connection, cache_kib: int) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA cache_size=-{cache_kib}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _migrate(engine: sa.Engine, schema: str) -> None:
    # Alembic is slow to import and needed once in the life of a process.
    from alembic import command
    from alembic.config import Config

    folder = resources.files("coterie.store") / "migrations"
    config = Config()
    config.set_main_option("script_location", str(folder))
    config.set_main_option("version_locations", str(folder / schema))
    config.set_main_option("path_separator", "newline")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no room left: the request may be repeated later, nothing was kept."""
    cause = getattr(error, "orig", error)
    return isinstance(cause, sqlite3.OperationalError) and (
        "disk is full" in str(cause) or "disk I/O error" in str(cause)
    )


class Writer:
    """The only thread that writes to a store.

    Work handed in while a transaction is being synced is put into the next one together (group commit).  When one
    piece of a group fails, the group is rolled back and each piece runs in a transaction of its own, so that a bad
    piece harms no other.

    Parameters
    ----------
    engine : sqlalchemy.Engine
        The store.
    group : int
        Most pieces in one transaction.
    """

    def __init__(self, engine: sa.Engine, group: int = 256) -> None:
        self._engine = engine
        self._group = group
        self._pending: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        # Open from the beginning: the last connection to a file takes its write-ahead log away, and the next one needs
        # room to make another, which a full volume does not have even for somebody who only wants to read.
        self._connection: sa.Connection | None = engine.connect()
        self._thread = threading.Thread(target=self._write, name="store-writer", daemon=True)
        self._thread.start()
        self.failed = False

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a piece of work in the next transaction and return its result once that is durable.

        Raises
        ------
        StoreError
            When the store is full or broken; nothing of the piece was kept.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._pending.put(_Piece(work, loop, done))
        return await done

    async def run_when_possible(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a piece of work that cannot be refused to anybody: while the store is full, try again."""
        while True:
            try:
                return await self.run(work)
            except StoreError as error:
                if error.__cause__ is None or not is_full(error.__cause__):
                    raise
                await asyncio.sleep(_FULL_PAUSE_S)

    async def probe(self) -> None:
        """Write nothing new, to find out whether the store takes writes; ``failed`` says so afterwards."""
        with contextlib.suppress(StoreError):
            await self.run(_write_nothing_new)

    def close(self) -> None:
        """Finish what is pending and stop."""
        self._pending.put(None)
        self._thread.join(timeout=10)

    def _write(self) -> None:
        # From here on the connection is the thread's own.
        connection, self._connection = self._connection, None
        while True:
            first = self._pending.get()
            if first is None:
                break
            pieces = [first]
            closing = False
            while len(pieces) < self._group and not self._pending.empty():
                piece = self._pending.get()
                if piece is None:
                    closing = True
                    break
                pieces.append(piece)
            try:
                if connection is None:
                    connection = self._engine.connect()
                if not self._together(connection, pieces):
                    for piece in pieces:
                        self._alone(connection, piece)
            except Exception as error:
                connection = None
                for piece in pieces:
                    self._failed(piece, error)
            if closing:
                break
        if connection is not None:
            connection.close()

    def _together(self, connection: sa.Connection, pieces: list[_Piece]) -> bool:
        try:
            with connection.begin():
                results = [piece.work(connection) for piece in pieces]
        except Exception as error:
            if len(pieces) > 1:
                return False
            self._failed(pieces[0], error)
            return True
        self.failed = False
        for piece, result in zip(pieces, results, strict=True):
            piece.succeed(result)
        return True

    def _alone(self, connection: sa.Connection, piece: _Piece) -> None:
        try:
            with connection.begin():
                result = piece.work(connection)
        except Exception as error:
            self._failed(piece, error)
        else:
            self.failed = False
            piece.succeed(result)

    def _failed(self, piece: _Piece, error: Exception) -> None:
        if isinstance(error, sa.exc.DBAPIError):
            self.failed = True
            full = is_full(error)
            text = "the store is full" if full else f"the store failed: {type(error.orig).__name__}"
            wrapped = StoreError(text, hint="free space on its volume" if full else None)
            wrapped.__cause__ = error
            piece.fail(wrapped)
        else:
            piece.fail(error)


def _write_nothing_new(connection: sa.Connection) -> None:
    # Writes the page that holds the number, whatever the number was.
    number = connection.exec_driver_sql("PRAGMA user_version").scalar()
    connection.exec_driver_sql(f"PRAGMA user_version = {number}")


class _Piece:
    """A piece of work and the future that waits for it."""

    __slots__ = ("_done", "_loop", "work")

    def __init__(
        self, work: Callable[[sa.Connection], Any], loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any]
    ) -> None:
        self.work = work
        self._loop = loop
        self._done = done

    def succeed(self, result: Any) -> None:
        self._settle(lambda: self._done.set_result(result))

    def fail(self, error: BaseException) -> None:
        self._settle(lambda: self._done.set_exception(error))

    def _settle(self, action: Callable[[], None]) -> None:
        def settle() -> None:
            if not self._done.done():
                action()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)
