"""Damage to stores in SQLite, as tests need it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

__all__ = ["add_beside_index"]


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
