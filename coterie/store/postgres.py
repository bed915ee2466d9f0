"""Stores in PostgreSQL, for roles that allow it: the same tables and migrations as in a file.

Only one service at a time uses a database: every connection that writes holds an advisory lock, which keeps a second
service out, also while the first has lost its connection and does not know it yet.  `coterie.store.tenure` has what
decides between services that take it in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coterie.errors import ConfigError, StoreError
from coterie.store.engine import BeforeMigration, migrate, trouble_of
from coterie.store.newest import revision_of
from coterie.store.tenure import LOCK
from coterie.store.time_limit import bounded

__all__ = [
    "LEAST_VERSION",
    "DatabaseAddress",
    "bounded",
    "engines_of",
    "open_postgres",
    "prepare",
    "read_revision",
]

LEAST_VERSION = 13
"""Oldest major version of the server."""

_DRIVER = "postgresql+psycopg"
_LOCK_S = 5
_CONNECT_S = 10


@dataclass(frozen=True)
class DatabaseAddress:
    """Address of a database, with the credentials and limits of its connections.

    Parameters
    ----------
    url : str
        ``postgresql+psycopg://user@host:port/database``, without a password; or several hosts,
        ``postgresql+psycopg://user@/database?host=one:port&host=other:port&target_session_attrs=read-write``.
    password_file : Path, optional
        Its first line is the password.  Without a file the environment has it (``PGPASSWORD``, ``PGPASSFILE``).
    tls : str
        PostgreSQL's ``sslmode``; a Unix socket has no TLS.
    ca_file, certificate, key : Path, optional
        Authorities that may sign the server's certificate, in place of the system's; the client's own certificate, and
        its key.
    timeout_s : float
        Longest time that a statement may take, seconds.
    """

    url: str
    password_file: Path | None = None
    tls: str = "verify-full"
    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    timeout_s: float = 10.0

    @property
    def name(self) -> str:
        """Name of the database and its host, for messages; without secrets."""
        url = self._parsed()
        return f"database {url.database!r} at {' or '.join(_hosts(url)) or 'the local socket'}"

    def _parsed(self) -> sa.URL:
        # Errors never repeat the URL: it may hold a password.
        try:
            url = sa.make_url(self.url)
        except sa.exc.ArgumentError:
            raise ConfigError(
                "database.url is no URL", hint=f"{_DRIVER}://USER@HOST:PORT/DATABASE is expected"
            ) from None
        if url.drivername not in (_DRIVER, "postgresql"):
            raise ConfigError(
                f"database.url is one of {url.drivername!r}",
                hint=f"{_DRIVER}://USER@HOST:PORT/DATABASE is expected",
            )
        if url.password is not None or "password" in url.query:
            raise ConfigError(
                "database.url holds a password, which then stands in configurations and process lists",
                hint="leave it out, and name a file of mode 0600 as database.password_file",
            )
        if not url.database or not url.username:
            raise ConfigError(
                "database.url names no user or no database",
                hint=f"{_DRIVER}://USER@HOST:PORT/DATABASE is expected",
            )
        return url.set(drivername=_DRIVER)

    def engine(self) -> sa.Engine:
        """Return an engine whose connections have the time limits of this place.

        Raises
        ------
        ConfigError
            The URL or a file cannot be used, or the driver is not installed.
        """
        url = self._parsed()
        try:
            return sa.create_engine(
                url,
                connect_args=self._arguments(url),
                poolclass=sa.pool.NullPool,
                # Values are private, and errors would carry them.
                hide_parameters=True,
            )
        except ImportError as error:
            raise ConfigError(
                "a store in PostgreSQL needs the package psycopg", hint="install coterie[postgres]"
            ) from error

    def _arguments(self, url: sa.URL) -> Mapping[str, Any]:
        limit = int(self.timeout_s * 1000)
        options = {
            # Overrides the server's default: an acknowledged write is durable.
            "synchronous_commit": "on",
            # Overrides the role's and the database's: a sum is closed to intakes by a lock, and what they wrote before
            # must be seen by the next statement.
            "default_transaction_isolation": r"read\ committed",
            "statement_timeout": limit,
            "lock_timeout": limit,
            "idle_in_transaction_session_timeout": 6 * limit,
            # A server that notices late that a client is gone keeps the lock, and the next service out, until then.
            "tcp_keepalives_idle": 10,
            "tcp_keepalives_interval": 5,
            "tcp_keepalives_count": 3,
        }
        arguments: dict[str, Any] = {
            "application_name": "coterie-cos",
            "connect_timeout": _CONNECT_S,
            "options": " ".join(f"-c {name}={value}" for name, value in options.items()),
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 2 * limit,
            "client_encoding": "utf8",
        }
        hosts = _hosts(url)
        local = bool(hosts) and all(host.startswith("/") for host in hosts)
        if not local:
            arguments["sslmode"] = self.tls
            if self.tls.startswith("verify"):
                arguments["sslrootcert"] = "system" if self.ca_file is None else str(self.ca_file)
            if self.certificate is not None and self.key is not None:
                arguments |= {"sslcert": str(self.certificate), "sslkey": str(self.key)}
        if self.password_file is not None:
            arguments["password"] = _password(self.password_file)
        return arguments


def _hosts(url: sa.URL) -> tuple[str, ...]:
    """Return the hosts of a URL, of which libpq tries one after the other; none where it takes its own socket."""
    named = url.query.get("host", url.host or ())
    return (named,) if isinstance(named, str) else tuple(named)


def _password(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"cannot read the password in {path}: {reason}") from None
    if not lines or not lines[0]:
        raise ConfigError(f"{path} is empty", hint="its first line is to be the password of the database")
    return lines[0]


def open_postgres(
    place: DatabaseAddress, schema: str, *, before: BeforeMigration | None = None
) -> tuple[sa.Engine, sa.Engine]:
    """Open a store in PostgreSQL, creating or migrating it to the newest revision.

    Parameters
    ----------
    place : DatabaseAddress
    schema : str
        Folder of the role's revisions under ``coterie/store/migrations``.
    before : callable, optional
        Keeps a copy of what is there before it is migrated.

    Returns
    -------
    reading, writing : sqlalchemy.Engine
        Each connection of ``writing`` holds the lock, so there can be only one at a time.

    Raises
    ------
    ConfigError
        When the place cannot be used as it is given.
    StoreError
        When the server does not answer, refuses, or is too old; the database is not there, is used by another service,
        or holds something else.
    """
    reading, writing = engines_of(place)
    prepare(place, reading, writing, schema, before=before)
    return reading, writing


def engines_of(place: DatabaseAddress) -> tuple[sa.Engine, sa.Engine]:
    """Return the engines of a store, as `open_postgres`, without connecting to the database.

    Raises
    ------
    ConfigError
        When the place cannot be used as it is given.
    """
    reading, writing = place.engine(), place.engine()
    sa.event.listen(writing, "connect", lambda connection, _: _alone(connection, place))
    return reading, writing


def prepare(
    place: DatabaseAddress,
    reading: sa.Engine,
    writing: sa.Engine,
    schema: str,
    *,
    before: BeforeMigration | None = None,
) -> None:
    """Create or migrate the store behind the engines of `engines_of`; parameters and errors are of `open_postgres`."""
    try:
        with reading.connect() as connection:
            _check(connection, place)
        # Under the lock: two services must not migrate at once.
        migrate(writing, schema, before=before)
    except sa.exc.DBAPIError as error:
        raise StoreError(
            f"cannot open {place.name}: {_said(error)}", hint=_hint(error), trouble=trouble_of(error)
        ) from error


def read_revision(place: DatabaseAddress) -> str | None:
    """Return the revision of a database's tables without changing anything; None when it has no tables.

    Raises
    ------
    ConfigError, StoreError
        As `open_postgres`.
    """
    engine = place.engine()
    try:
        with engine.connect() as connection:
            _check(connection, place)
            return revision_of(connection)
    except sa.exc.DBAPIError as error:
        raise StoreError(
            f"cannot open {place.name}: {_said(error)}", hint=_hint(error), trouble=trouble_of(error)
        ) from error
    finally:
        engine.dispose()


def _check(connection: sa.Connection, place: DatabaseAddress) -> None:
    version = connection.dialect.server_version_info or (0,)
    if int(version[0]) < LEAST_VERSION:
        raise StoreError(
            f"{place.name} is of PostgreSQL {'.'.join(map(str, version))}",
            hint=f"version {LEAST_VERSION} or later is expected",
        )
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
    if encoding != "UTF8":
        raise StoreError(
            f"{place.name} is encoded in {encoding}", hint="make it again: createdb --encoding UTF8"
        )


def _alone(connection: Any, place: DatabaseAddress) -> None:
    """Take the database's lock for a new connection; close the connection when somebody else keeps it.

    A busy server ends the session of a connection only a while after it was closed, and with it the lock: this
    service's own last connection may still hold it.
    """
    from psycopg.errors import LockNotAvailable

    try:
        with connection.cursor() as cursor:
            # Well below the limit of a statement, whose end would look like a server that hangs.
            wait_ms = int(min(_LOCK_S, place.timeout_s / 2) * 1000)
            cursor.execute(f"SET LOCAL lock_timeout = {wait_ms}")
            cursor.execute("SELECT pg_advisory_lock(%s)", (LOCK,))
        # The lock is the session's and stays; the time limit was the transaction's.
        connection.rollback()
    except LockNotAvailable:
        connection.close()
        raise StoreError(
            f"another service uses {place.name}",
            hint="stop it first, or name another database; a server needs a while to notice that a client is gone",
            trouble="away",
        ) from None
    except Exception:
        connection.close()
        raise


def _said(error: sa.exc.DBAPIError) -> str:
    """Return the first line of the server's or driver's message about a connection; it holds no written values."""
    lines = str(error.orig).strip().splitlines()
    return lines[0].removeprefix("connection failed: ") if lines else type(error.orig).__name__


_SAID = {
    "password authentication failed": "is the password in database.password_file, or PGPASSWORD, the user's?",
    "no password supplied": "name a file with the password as database.password_file, or set PGPASSWORD",
    "root certificate file": "database.ca_file names a file that is not there, or no certificates",
    "does not match host name": "let database.url name the server by a name that is in the server's certificate",
    "does not exist": "create it first: CREATE ROLE ... LOGIN, and createdb --owner ... --encoding UTF8",
    "permission denied": "the user must own the database, or be allowed to create tables in it",
    "certificate verify failed": "database.ca_file names who may sign the server's certificate",
    "server does not support SSL": "switch TLS on there, or let database.tls say otherwise",
    "pg_hba.conf": "the server's pg_hba.conf does not let this user in from here",
    "Connection refused": "does the server run there, and listen on that address?",
    "No such file or directory": "does the server run, and is its socket in that folder?",
}
"""Hints by a part of the server's or driver's message."""


def _hint(error: sa.exc.DBAPIError) -> str | None:
    said = str(error.orig)
    return next((hint for words, hint in _SAID.items() if words in said), None)
