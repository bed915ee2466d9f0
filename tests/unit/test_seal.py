"""Seals of stores: they tell damage of the medium from what an earlier release, a crash or an operator did."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest
import structlog

from coterie.errors import StoreError
from coterie.store.engine import Writer, open_sqlite
from coterie.store.seal import check_seal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the store of a client that stopped in order."""
    made = tmp_path / "client.db"
    run(made)
    assert check_seal(made) == "yes"
    return made


def run(path: Path) -> None:
    """Open a store and stop, as a service does."""
    engine = open_sqlite(path, "client")
    Writer(engine).close()
    engine.dispose()


def seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-sum")


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file, which no time tells."""
    told = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))
    os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns))


def test_a_store_that_an_earlier_release_wrote_meanwhile_is_opened_with_a_warning(path: Path) -> None:
    # That release knows no seals, and leaves this one's.
    with contextlib.closing(sqlite3.connect(path)) as held, held:
        held.execute("INSERT INTO users VALUES (1, 'name')")
    assert check_seal(path) == "changed"
    with structlog.testing.capture_logs() as logs:
        run(path)
    assert [(one["log_level"], one["store"]) for one in logs] == [("warning", str(path))]
    assert check_seal(path) == "yes"


def test_a_store_that_an_earlier_release_left_in_a_crash_is_opened_too(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as held:
        held.execute("INSERT INTO users VALUES (1, 'name')")
        held.commit()
        # As it is while that release runs: what it wrote is in the log beside the store.
        assert check_seal(path) == "changed"
        open_sqlite(path, "client").dispose()
    assert not seal_of(path).exists()


def test_a_changed_byte_of_a_store_that_was_not_written_is_damage(path: Path) -> None:
    flip(path)
    with pytest.raises(StoreError, match="is not as the service left it when it stopped"):
        open_sqlite(path, "client")


def test_the_seal_of_a_deleted_store_says_nothing_about_the_next_one(path: Path) -> None:
    path.unlink()
    engine = open_sqlite(path, "client")
    # A crash here finds no seal.
    assert not seal_of(path).exists()
    engine.dispose()


def test_a_store_that_cannot_be_read_now_is_not_called_damaged(path: Path) -> None:
    seal_of(path).unlink()
    with contextlib.closing(sqlite3.connect(path)) as held:
        held.execute("PRAGMA locking_mode = EXCLUSIVE")
        held.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="cannot check the store") as told:
            open_sqlite(path, "client")
    assert told.value.trouble == "away"
    assert "damaged" not in told.value.message
    open_sqlite(path, "client").dispose()
