"""Durable stores in SQLite: write-ahead log, ``synchronous=FULL``, one writer thread with group commit.

An acknowledgement sent after ``Writer.run`` returns is durable: the transaction that holds it has been synced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import sqlite3
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
import structlog

from coterie.errors import CoterieError, StoreError
from coterie.store.newest import create, newest, revision_of
from coterie.store.seal import MOST_BYTES, break_seal, check_pages, check_seal, seal
from coterie.store.tenure import Tenure
from coterie.store.trouble import is_damage, trouble_of

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from alembic.config import Config

__all__ = [
    "BeforeMigration",
    "Keeping",
    "Term",
    "Writer",
    "failure",
    "file_failure",
    "is_current",
    "keep_files",
    "known_revisions",
    "migrate",
    "open_sqlite",
    "trouble_of",
]

_log = structlog.get_logger("coterie.store")

T = TypeVar("T")

BeforeMigration = Callable[[str, str], None]
"""Called before tables are migrated, with the present revision and the later one; it may raise to prevent it."""
Keeping = Callable[[str, Callable[[], None]], Awaitable[None]]
"""Writes files, given the action in words and the function that writes; while there is no room, tries again."""

_FULL_PAUSE_S = 1.0

_OS_ERROR = re.compile(r"\(os error (\d+)\)")

_HINTS = {
    "full": "free space on its volume",
    "away": "it goes on by itself once the store takes writes again",
}


def open_sqlite(
    path: Path, schema: str, *, cache_kib: int = 2000, before: BeforeMigration | None = None
) -> sa.Engine:
    """Open a store, creating or migrating it to the newest revision.

    Parameters
    ----------
    path : Path
        The file; its folder must exist.
    schema : str
        Folder of the role's revisions under ``coterie/store/migrations``.
    cache_kib : int
        SQLite's page cache of one connection, KiB; the system's own cache is behind it.
    before : callable, optional
        Keeps a copy of what is there before it is migrated.

    Raises
    ------
    StoreError
        When the file cannot be opened, is damaged or no store of this role, or cannot be migrated.
    """
    engine = sa.create_engine(
        f"sqlite:///{path}",
        connect_args={"timeout": 10.0, "check_same_thread": False},
        poolclass=sa.pool.NullPool if str(path) != ":memory:" else sa.pool.StaticPool,
    )
    sa.event.listen(engine, "connect", lambda connection, _: _set_up(connection, cache_kib))
    try:
        _check(path)
        path.touch(mode=0o600)
        migrate(engine, schema, before=before)
    except (sa.exc.DatabaseError, OSError) as error:
        cause = getattr(error, "orig", error)
        raise StoreError(f"cannot open the store {path}: {cause}", trouble=trouble_of(error)) from error
    return engine


def _check(path: Path) -> None:
    """Check a store before it is opened for writing, and break its seal."""
    if str(path) == ":memory:":
        return
    if path.exists():
        sealed = check_seal(path)
        if sealed == "changed":
            _log.warning(
                "the store was written since this service stopped, by an earlier release or by hand: "
                "damage of its values before that would not show",
                store=str(path),
            )
        if sealed != "yes" and 0 < path.stat().st_size <= MOST_BYTES:
            check_pages(path)
    # A seal without its store is one of a store that was deleted: the new one has another content.
    break_seal(path)


def _set_up(connection: sqlite3.Connection, cache_kib: int) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA cache_size=-{cache_kib}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def migrate(
    engine: sa.Engine,
    schema: str,
    *,
    to: str = "head",
    before: BeforeMigration | None = None,
    by_script: bool = True,
) -> None:
    """Bring the tables of a role to a revision, all of it in one transaction; migrations only go forward.

    Parameters
    ----------
    engine : sqlalchemy.Engine
    schema : str
        Folder of the role's revisions under ``coterie/store/migrations``.
    to : str
        The revision; the newest unless another is named.
    before : callable, optional
        Called first where there are tables of an earlier revision.
    by_script : bool
        Whether a new store of SQLite may take the newest tables from a script (`coterie.store.newest`) in place of
        every migration.

    Raises
    ------
    StoreError
        When they are of a revision that this version does not know.
    """
    if by_script and to == "head" and engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            held = revision_of(connection)
            connection.rollback()
            if held == newest(schema).revision or (held is None and create(connection, schema)):
                return
    # Slow to import, and needed only where tables are migrated or a database is taken over.
    from alembic import command
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    with _revisions_of(schema) as config, engine.connect() as connection:
        held = revision_of(connection)
        connection.rollback()
        try:
            revisions = ScriptDirectory.from_config(config)
            wanted = revisions.as_revision_number(to)
            if held == wanted:
                return
            if held is not None:
                # Raises where this version does not know it.
                revisions.get_revision(held)
                if before is not None:
                    before(held, str(wanted))
            with connection.begin():
                if engine.dialect.name == "sqlite":
                    # The driver begins no transaction by itself before it changes tables.
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                config.attributes["connection"] = connection
                command.upgrade(config, to)
        except CommandError as error:
            raise StoreError(
                f"the tables of {engine.url.database} are of a revision that this version does not know: {held}",
                hint="install the version of coterie that wrote them, or a later one; or is it another role's store? "
                "To stay with this version, restore the backup that the later one made (docs/upgrade.md, Go back)",
            ) from error


def is_current(connection: sa.Connection, schema: str) -> bool:
    """Return whether the tables of a role are of the newest revision that this version knows.

    Parameters
    ----------
    connection : sqlalchemy.Connection
    schema : str
        As for `migrate`.
    """
    return revision_of(connection) == newest(schema).revision


def known_revisions(schema: str) -> set[str]:
    """Return all revisions of a role's tables that this version knows; ``schema`` as for `migrate`."""
    from alembic.script import ScriptDirectory

    with _revisions_of(schema) as config:
        return {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}


@contextlib.contextmanager
def _revisions_of(schema: str) -> Iterator[Config]:
    """Give Alembic's configuration for a role's revisions, whose files are there within the context."""
    from alembic.config import Config

    with contextlib.ExitStack() as stack:
        found = resources.files("coterie.store") / "migrations"
        if isinstance(found, Path):
            folder = found
        else:
            # Alembic loads files, and a light installation is an archive (docs/device.md).
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-migrations-")))
            _unpack(found, folder)
        config = Config()
        config.set_main_option("script_location", str(folder))
        config.set_main_option("version_locations", str(folder / schema))
        config.set_main_option("path_separator", "newline")
        yield config


def _unpack(found: Traversable, folder: Path) -> None:
    for one in found.iterdir():
        if one.is_dir():
            (folder / one.name).mkdir()
            _unpack(one, folder / one.name)
        else:
            (folder / one.name).write_bytes(one.read_bytes())


def failure(error: BaseException) -> StoreError:
    """Return a database's error as a `StoreError`, without the statement and its values, which may be private."""
    trouble = trouble_of(error)
    cause = getattr(error, "orig", error)
    text = {"full": "the store is full", "away": "the store cannot be written now"}.get(
        trouble, f"the store failed: {type(cause).__name__}"
    )
    hint = _HINTS.get(trouble)
    if is_damage(cause):
        text, hint = "the store is damaged", "stop the service and look with `coterie check STATE`"
    found = StoreError(text, hint=hint, trouble=trouble)
    found.__cause__ = error
    return found


def file_failure(what: str, error: Exception) -> StoreError:
    """Return the error of a file that could not be written as a `StoreError`; ``what`` names what was attempted."""
    told = _OS_ERROR.search(str(error))
    if told is not None and not isinstance(error, OSError):
        # The library that writes arrays wraps the system's errors in its own.
        number = int(told[1])
        error = OSError(number, os.strerror(number))
    trouble = trouble_of(error)
    reason = getattr(error, "strerror", None) or type(error).__name__
    found = StoreError(f"cannot {what}: {reason}", hint=_HINTS.get(trouble), trouble=trouble)
    found.__cause__ = error
    return found


async def keep_files(what: str, write: Callable[[], T], waits: Callable[[bool], None] = lambda _: None) -> T:
    """Write files in a thread; while there is no room, try again.

    Parameters
    ----------
    what : str
        The action, for the error: "keep contributions".
    write : callable
        May be run several times.
    waits : callable, optional
        Called with True when the files begin to wait for room, and with False when they wait no longer.

    Returns
    -------
    object
        Result of ``write``.

    Raises
    ------
    CoterieError
        When the files cannot be written for a permanent reason.
    """
    try:
        while True:
            try:
                return await asyncio.to_thread(write)
            except OSError as error:
                failed: CoterieError = file_failure(what, error)
            except CoterieError as error:
                failed = error
            # Functions that write keys and the like wrap the system's errors in their own.
            if failed.__cause__ is None or not trouble_of(failed.__cause__):
                raise failed
            waits(True)
            await asyncio.sleep(_FULL_PAUSE_S)
    finally:
        waits(False)


class Writer:
    """The single writer of a store: a thread that commits queued work in groups.

    Work handed in while a transaction is being synced is put into the next one together (group commit).  When one
    piece of a group fails, the group is rolled back and each piece runs in a transaction of its own, so that a bad
    piece harms no other.

    Parameters
    ----------
    engine : sqlalchemy.Engine
        The store.
    group : int
        Most pieces in one transaction.
    tenure : Tenure, optional
        Tenure over a database that several services use in turns: every transaction requires that it is the present
        one.  It begins at once, unless ``waits``.
    waits : bool
        Whether the service waits for its turn: the writer connects when it has something to write, and `take` begins
        the tenure.
    """

    def __init__(
        self, engine: sa.Engine, group: int = 256, *, tenure: Tenure | None = None, waits: bool = False
    ) -> None:
        self._engine = engine
        self._group = group
        self._tenure = tenure
        self._pending: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        # Open from the beginning: closing the last connection to a file removes its write-ahead log, and the next
        # connection needs room to make another, even one that only reads; a full volume has none.
        self._connection: sa.Connection | None = None if waits else engine.connect()
        if tenure is not None and self._connection is not None:
            with self._connection.begin():
                holder = tenure.begin(self._connection)
            tenure.enter(holder)
        self._thread = threading.Thread(target=self._write, name="store-writer", daemon=True)
        self._failing = False
        # Number of file writes that wait for room.
        self._waiting = 0
        # Whether the connection holds the lock of a shared database without a tenure.
        self._out_of_office = False
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the last write failed, or files wait for room."""
        return self._failing or self._waiting > 0

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a piece of work in the next transaction and return its result once that is durable.

        Raises
        ------
        StoreError
            When the store is full or broken; nothing of the piece was kept.  (A database that was lost while it
            committed may have kept all of it.)
        """
        return await self._run(work, None)

    async def _run(self, work: Callable[[sa.Connection], T], term: Term | None, *, begins: bool = False) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._pending.put(_Piece(work, loop, done, term, begins=begins))
        return await done

    async def take(self) -> None:
        """Begin another tenure, where the writer has one: writes of the tenure before it are refused from now on.

        Raises
        ------
        StoreError
            The database is away, or another service uses it.
        """
        if self._tenure is not None:
            await self._run(self._tenure.begin, None, begins=True)

    async def run_when_possible(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a piece of work that has no caller to refuse; while the store is full or away, try again."""
        while True:
            try:
                return await self.run(work)
            except StoreError as error:
                if not error.trouble:
                    raise
                await asyncio.sleep(_FULL_PAUSE_S)

    async def files_when_possible(self, what: str, write: Callable[[], T]) -> T:
        """Write files that belong to the store, in a thread; while there is no room, try again.

        Parameters
        ----------
        what : str
            The action, for the error: "keep contributions".
        write : callable
            May be run several times.

        Returns
        -------
        object
            Result of ``write``.

        Raises
        ------
        CoterieError
            When the files cannot be written for a permanent reason.
        """
        waiting = False

        def waits(now: bool) -> None:
            nonlocal waiting
            self._waiting += now - waiting
            waiting = now

        return await keep_files(what, write, waits)

    async def probe(self) -> None:
        """Commit a write without effect, so that ``failed`` tells whether the store takes writes."""
        with contextlib.suppress(StoreError):
            await self.run(_write_nothing_new)

    def close(self) -> None:
        """Finish what is pending, stop, and seal the file of the store."""
        self._pending.put(None)
        self._thread.join(timeout=10)

    def _write(self) -> None:
        # From here on only this thread uses the connection.
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
                if any(piece.begins for piece in pieces) or not self._together(connection, pieces):
                    for piece in pieces:
                        self._alone(connection, piece)
                if self._out_of_office:
                    # A lost connection that was made again has taken the lock: nobody else would ever get it.
                    connection.invalidate()
                    connection.close()
                    connection = None
            except Exception as error:
                connection = None
                for piece in pieces:
                    self._failed(piece, error)
            self._out_of_office = False
            if closing:
                break
        if connection is not None:
            connection.close()
        if self._engine.dialect.name == "sqlite" and not self._failing:
            seal(Path(str(self._engine.url.database)))

    def _together(self, connection: sa.Connection, pieces: list[_Piece]) -> bool:
        try:
            with connection.begin():
                self._check(connection)
                results = [piece.carried_out(connection) for piece in pieces]
        except Exception as error:
            if len(pieces) > 1:
                return False
            self._failed(pieces[0], error)
            return True
        self._failing = False
        for piece, result in zip(pieces, results, strict=True):
            piece.succeed(result)
        return True

    def _alone(self, connection: sa.Connection, piece: _Piece) -> None:
        try:
            with connection.begin():
                if not piece.begins:
                    self._check(connection)
                result = piece.carried_out(connection)
        except Exception as error:
            self._out_of_office |= self._tenure is not None and piece.begins
            self._failed(piece, error)
        else:
            self._failing = self._out_of_office = False
            if self._tenure is not None and piece.begins:
                # Before the next piece, which is checked against it.
                self._tenure.enter(str(result))
            piece.succeed(result)

    def _check(self, connection: sa.Connection) -> None:
        if self._tenure is None:
            return
        try:
            self._tenure.check(connection)
        except StoreError:
            self._out_of_office = True
            raise

    def _failed(self, piece: _Piece, error: Exception) -> None:
        told = failure(error) if isinstance(error, sa.exc.DBAPIError) else error
        if isinstance(told, StoreError) and (told is not error or told.trouble):
            self._failing = True
            if piece.term is not None:
                piece.term.lose(told)
        piece.fail(told)


def _write_nothing_new(connection: sa.Connection) -> None:
    if connection.dialect.name != "sqlite":
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = version_num")
        return
    # Setting the number to itself still writes its page.
    number = connection.exec_driver_sql("PRAGMA user_version").scalar()
    connection.exec_driver_sql(f"PRAGMA user_version = {number}")


def _silent() -> StoreError:
    return StoreError("the store does not answer", hint=_HINTS["away"], trouble="away")


class Term:
    """The writes of a service between two starts from its store: after the first failed write, all others are refused.

    The orchestration server changes its state in memory before the change is durable.  After a failed write its memory
    is ahead of the store, and nothing that follows from it may be kept: the refused update would be missing below the
    next one.  Such a service drops its memory, waits until the store takes writes again, and loads the durable state
    under a new term.  Work that still runs under the old term is refused.

    Parameters
    ----------
    writer : Writer
        The store's writer, which outlives its terms.
    limit_s : float, optional
        How long a write may take, seconds: a database that hangs counts as one that is away.
    largest : int
        `largest` of the term before.
    in_touch : callable, optional
        Returns whether the service was in touch with its database lately; the term ends when it was not.
    """

    def __init__(
        self,
        writer: Writer,
        limit_s: float | None = None,
        largest: int = 0,
        in_touch: Callable[[], bool] | None = None,
    ) -> None:
        self._writer = writer
        self._limit_s = limit_s
        self._in_touch = in_touch
        self.largest = largest
        """Size of the largest file written so far, bytes: the next may be as large."""
        self.lost: StoreError | None = None
        """The failure that ended the term; None while it lasts."""

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a piece of work as `Writer.run` does, unless the term is over.

        Raises
        ------
        StoreError
            When the store is full or broken, or was earlier in this term; nothing of the piece was kept.
        """
        self.check()
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._writer._run(work, self)
        except TimeoutError as error:
            # Whether the write was kept is known when the store answers again.
            self.lose(_silent())
            self.check()
            raise AssertionError("the term is over") from error

    async def probe(self) -> None:
        """Commit a write without effect, so that an idle service notices a store that is gone or hangs."""
        with contextlib.suppress(StoreError):
            await self.run(_write_nothing_new)

    def check(self) -> None:
        """Raise the failure that ended the term, if it is over.

        Raises
        ------
        StoreError
        """
        if self.lost is None and self._in_touch is not None and not self._in_touch():
            self.lose(_silent())
        if self.lost is not None:
            lost = self.lost
            raise StoreError(lost.message, hint=lost.hint, trouble=lost.trouble) from lost

    def lose(self, error: StoreError) -> None:
        """End the term; the first reason is kept."""
        self.lost = self.lost or error

    @contextlib.contextmanager
    def keeping(self, what: str, size: int = 0) -> Iterator[None]:
        """Guard the writing of files that belong to the store: a failure ends the term, as a failed write does.

        Parameters
        ----------
        what : str
            The action, for the error: "write a version of the model".
        size : int
            Bytes of the file, where they are many.

        Raises
        ------
        StoreError
            The files could not be written.
        """
        self.check()
        self.largest = max(self.largest, size)
        try:
            yield
        except Exception as error:
            lost = file_failure(what, error)
            self.lose(lost)
            raise lost from error


class _Piece:
    """A piece of work and the future that waits for it."""

    __slots__ = ("_done", "_loop", "_work", "begins", "term")

    def __init__(
        self,
        work: Callable[[sa.Connection], Any],
        loop: asyncio.AbstractEventLoop,
        done: asyncio.Future[Any],
        term: Term | None,
        *,
        begins: bool = False,
    ) -> None:
        self._work = work
        self.begins = begins
        self._loop = loop
        self._done = done
        self.term = term

    def carried_out(self, connection: sa.Connection) -> Any:
        if self.term is not None:
            self.term.check()
        return self._work(connection)

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
