"""Indices of a store: which of them have entries whose row is gone or changed."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.store.engine import open_sqlite
from coterie.store.indices import entries_without_row
from tests.stores import add_beside_index


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "store.db"
    with contextlib.closing(sqlite3.connect(made)) as held, held:
        held.execute(
            "CREATE TABLE revoked (id INTEGER PRIMARY KEY, print TEXT UNIQUE COLLATE NOCASE, why TEXT)"
        )
        held.execute("CREATE TABLE pairs (a TEXT, b REAL, PRIMARY KEY (a)) WITHOUT ROWID")
        held.execute("CREATE INDEX by_b ON pairs (b)")
        held.executemany(
            "INSERT INTO revoked (print, why) VALUES (?, 'r')",
            [(f"fp-{number:06d}",) for number in range(500)],
        )
        held.executemany("INSERT INTO pairs VALUES (?, ?)", [(f"key-{one}", one / 2) for one in range(500)])
    return made


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path)) as held:
        yield held


def test_whole_indices_have_their_rows(path: Path, tmp_path: Path) -> None:
    with reading(path) as held:
        assert entries_without_row(held) == []
    open_sqlite(tmp_path / "client.db", "client").dispose()
    with reading(tmp_path / "client.db") as held:
        assert held.execute("SELECT count(*) FROM sqlite_schema WHERE type = 'index'").fetchone()[0] > 0
        assert entries_without_row(held) == []


@pytest.mark.parametrize("new", [b"fp-000a77r", b"FP-000277r"])
def test_a_changed_value_of_a_table_leaves_an_entry_without_its_row(path: Path, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(b"fp-000277r") == 1
    path.write_bytes(content.replace(b"fp-000277r", new))
    with reading(path) as held:
        assert entries_without_row(held) == ["sqlite_autoindex_revoked_1"]


def test_an_index_of_a_table_without_row_ids_is_compared_too(path: Path) -> None:
    content = path.read_bytes()
    before, between, after = content.split(b"key-333")
    for first, second in ((b"key-3z3", b"key-333"), (b"key-333", b"key-3z3")):
        path.write_bytes(before + first + between + second + after)
        with reading(path) as held:
            assert entries_without_row(held) == ["by_b"]


def test_an_index_that_lacks_a_row_has_no_entry_without_one(path: Path) -> None:
    add_beside_index(path, "by_b", "INSERT INTO pairs VALUES ('key-new', 7)")
    with reading(path) as held:
        assert held.execute("PRAGMA integrity_check").fetchall() != [("ok",)]
        assert entries_without_row(held) == []


def test_entries_of_some_rows_only_or_of_expressions_are_not_compared(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as held, held:
        held.execute("CREATE INDEX some ON revoked (why) WHERE id > 7")
        held.execute("CREATE INDEX longer ON revoked (length(why))")
    with reading(path) as held:
        assert sorted(entries_without_row(held)) == ["longer", "some"]
