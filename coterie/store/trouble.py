"""Tell failures of a store that may pass, such as a full volume, from damage and other permanent ones."""

from __future__ import annotations

import errno
import sqlite3

import sqlalchemy as sa

__all__ = ["is_damage", "trouble_of"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_AWAY = {errno.EROFS, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE}
# Primary result codes of <sqlite3.h>; the last byte of an extended code is its primary code.
_SQLITE_FULL = {10, 13}
"""IOERR, which a limit on the size of files gives, too, and FULL."""
_SQLITE_AWAY = {5, 6, 8, 14}
"""BUSY, LOCKED, READONLY, CANTOPEN."""
_SQLITE_DAMAGED = {11, 26}
"""CORRUPT, NOTADB."""
_PG_FULL = "53100"
_PG_AWAY = ("08", "25006", "28", "40", "53", "55P03", "57", "58")
"""Prefixes of SQLSTATE: connection, read-only, authorisation, rollback, resources, lock, operator, system error."""


def trouble_of(error: BaseException) -> str:
    """Return the kind of a transient failure, as `StoreError.trouble` has it; empty for an error that is permanent."""
    cause = getattr(error, "orig", error)
    if isinstance(cause, OSError):
        return "full" if cause.errno in _FULL else "away" if cause.errno in _AWAY else ""
    if hasattr(cause, "sqlstate"):
        return _trouble_of_postgres(error, cause.sqlstate)
    if isinstance(cause, sqlite3.Error):
        number = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        return "full" if number in _SQLITE_FULL else "away" if number in _SQLITE_AWAY else ""
    return ""


def _trouble_of_postgres(error: BaseException, state: str | None) -> str:
    if state == _PG_FULL:
        return "full"
    if state is None:
        # The error is the driver's, not the server's: there is no connection, or it was lost.
        lost = isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError)
        return "away" if lost else ""
    return "away" if state.startswith(_PG_AWAY) else ""


def is_damage(error: BaseException) -> bool:
    """Return whether an error of SQLite says that the file is damaged, or none of its."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _SQLITE_DAMAGED
