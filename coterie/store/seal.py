"""Notice damage of a store: the hash of its file while no process has it open, and a check of its pages otherwise.

A service that stops writes the SHA-256 of its store's file beside it, the *seal*, with the file's size and time of
change, and the next start compares: a byte that changed meanwhile on its medium is noticed.  A seal says nothing about
a file that was written after it, as an earlier release does, which knows no seals.  Then, and after a crash, when there
is no seal, SQLite's own check finds pages that do not fit together, but no changed value.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from pathlib import Path
from typing import Literal

from coterie.errors import StoreError
from coterie.store.trouble import is_damage, trouble_of

__all__ = ["ENDING", "MOST_BYTES", "Sealed", "break_seal", "check_pages", "check_seal", "seal"]

ENDING = "-sum"
"""Ending of the name of a seal, after the store's."""

MOST_BYTES = 2 << 30
"""Size above which a store is neither sealed nor checked at a start, bytes: that would take long."""

Sealed = Literal["yes", "no", "changed"]
"""Whether a store is as its seal says: it is, has none, or was written after it."""

_RESTORE = "restore the state folder from a backup (`coterie restore`)"


def seal(path: Path) -> bool:
    """Write the seal of a closed store, durably; return False, without one, where it is open, absent or too large."""
    try:
        if _written_ahead(path) or path.stat().st_size > MOST_BYTES:
            return False
        text = f"{_digest(path)}  {path.name}\n{_size_and_time(path)}\n"
        made, beside = _beside(path, ENDING), _beside(path, f"{ENDING}.part")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(made)
        _flush(path.parent)
    except OSError:
        return False
    return True


def check_seal(path: Path) -> Sealed:
    """Check that a store which was not written since its service stopped is as it was left; return what is known.

    Raises
    ------
    StoreError
        It is not, or its seal cannot be read.
    """
    try:
        told = _beside(path, ENDING).read_text().split()
    except FileNotFoundError:
        return "no"
    except (OSError, UnicodeDecodeError):
        told = []
    if len(told) == 4 and (_written_ahead(path) or " ".join(told[2:]) != _size_and_time(path)):
        return "changed"
    if len(told) != 4 or told[0] != _digest(path):
        raise StoreError(
            f"the store {path} is damaged: its file is not as the service left it when it stopped",
            hint=f"{_RESTORE}; if you changed it yourself, `coterie check --accept {path.parent}`",
        )
    return "yes"


def break_seal(path: Path) -> None:
    """Remove the seal of a store that is about to be written, durably; without a seal nothing is done."""
    made = _beside(path, ENDING)
    if made.exists():
        made.unlink()
        # After a power failure an old seal beside new pages would look like damage.
        _flush(path.parent)


def check_pages(path: Path, *, fully: bool = False) -> None:
    """Check that the pages of a store fit together: its tables can be read.

    Parameters
    ----------
    path : Path
    fully : bool
        Whether indices are compared with their tables, too, which takes longer.

    Raises
    ------
    StoreError
        They do not, or cannot be read now: then its ``trouble`` says why.
    """
    check = "integrity_check(3)" if fully else "quick_check(1)"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as held:
            said = [str(row[0]) for row in held.execute(f"PRAGMA {check}")]
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN:
            return  # `open_sqlite` says why
        if not is_damage(error):
            raise StoreError(
                f"cannot check the store {path}: {error}",
                hint="it is not known to be damaged: see to its volume, and that no other process has it open",
                trouble=trouble_of(error),
            ) from error
        said = [str(error)]
    if said != ["ok"]:
        raise StoreError(f"the store {path} is damaged: {'; '.join(said)[:500]}", hint=_RESTORE)


def _written_ahead(path: Path) -> bool:
    """Return whether the write-ahead log of a store has anything."""
    try:
        return _beside(path, "-wal").stat().st_size > 0
    except FileNotFoundError:
        return False


def _size_and_time(path: Path) -> str:
    told = path.stat()
    return f"{told.st_size} {told.st_mtime_ns}"


def _digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
