"""Damage to stores in SQLite, and stores that take no writes, as tests need them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

__all__ = ["add_beside_index", "nothing_written"]


def add_beside_index(path: Path, index: str, statement: str) -> None:
    """Carry out a statement that an index does not hear of, so that the index lacks its rows."""
    with contextlib.closing(sqlite3.connect(path)) as held, held:
        held.execute("PRAGMA writable_schema = ON")
        row = held.execute("SELECT * FROM sqlite_schema WHERE name = ?", (index,)).fetchone()
        held.execute("DELETE FROM sqlite_schema WHERE name = ?", (index,))
    with contextlib.closing(sqlite3.connect(path)) as held, held:
        held.execute(statement)
    with contextlib.closing(sqlite3.connect(path)) as held, held:
        held.execute("PRAGMA writable_schema = ON")
        held.execute("INSERT INTO sqlite_schema VALUES (?, ?, ?, ?, ?)", row)


@contextlib.contextmanager
def nothing_written(path: Path) -> Iterator[None]:
    """Let no write to a store come through meanwhile, as on a disk that hangs; readers go on.

    A write that waits for longer than ten seconds fails.
    """
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as beside:
        beside.execute("BEGIN IMMEDIATE")
        yield
        beside.execute("ROLLBACK")
