from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from safetensors import SafetensorError

from coterie.errors import StoreError
from coterie.store import engine as module
from coterie.store.engine import Term, Writer, open_sqlite, trouble_of

LONG_S = 60.0
"""For what happens at once."""

RUNS = "SELECT user FROM users ORDER BY user"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    made = open_sqlite(tmp_path / "client.db", "client")
    yield made
    made.dispose()


@pytest.fixture
def writer(engine: sa.Engine) -> Iterator[Writer]:
    made = Writer(engine)
    yield made
    made.close()


def adding(*users: int, name: str = "") -> object:
    def work(connection: sa.Connection) -> int:
        for user in users:
            connection.exec_driver_sql("INSERT INTO users VALUES (?, ?)", (user, name or f"name-{user}"))
        return sum(users)

    return work


def stored(engine: sa.Engine) -> list[int]:
    with engine.connect() as connection:
        return [row[0] for row in connection.exec_driver_sql(RUNS)]


def limit_to(engine: sa.Engine, pages: int) -> None:
    """Let every new connection refuse to let the file grow: SQLite then says that the disk is full."""

    def full(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages}")

    sa.event.listen(engine, "connect", full)


async def test_what_was_written_is_there_for_everybody_when_the_call_returns(
    engine: sa.Engine, writer: Writer
) -> None:
    assert await writer.run(adding(1, 2)) == 3
    assert stored(engine) == [1, 2]


async def test_every_connection_writes_ahead_and_waits_for_the_disk(
    engine: sa.Engine, writer: Writer
) -> None:
    def pragmas(connection: sa.Connection) -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys")
        return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

    assert await writer.run(pragmas) == ["wal", 2, 1]
    with engine.connect() as connection:
        assert pragmas(connection) == ["wal", 2, 1]


async def test_a_connection_remembers_as_many_pages_as_it_is_told(tmp_path: Path) -> None:
    small = open_sqlite(tmp_path / "small.db", "client", cache_kib=64)
    usual = open_sqlite(tmp_path / "usual.db", "client")
    with small.connect() as one, usual.connect() as other:
        assert one.exec_driver_sql("PRAGMA cache_size").scalar() == -64
        assert other.exec_driver_sql("PRAGMA cache_size").scalar() == -2000


async def test_work_handed_in_meanwhile_is_written_in_its_order_and_together(
    engine: sa.Engine, writer: Writer
) -> None:
    commits: list[int] = []
    sa.event.listen(engine, "commit", lambda _: commits.append(1))
    results = await asyncio.gather(*[writer.run(adding(n)) for n in range(1, 101)])
    assert results == list(range(1, 101))
    assert stored(engine) == results
    assert len(commits) < 100


async def test_one_bad_piece_of_a_group_harms_no_other(engine: sa.Engine, writer: Writer) -> None:
    await writer.run(adding(5))
    pieces = [writer.run(adding(n)) for n in range(1, 9)]  # the fifth is there already
    async with asyncio.timeout(30):
        results = await asyncio.gather(*pieces, return_exceptions=True)
    assert stored(engine) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [n for n, result in enumerate(results, 1) if isinstance(result, Exception)] == [5]
    assert isinstance(results[4], StoreError)


async def test_a_piece_that_fails_in_the_middle_is_not_kept_in_part(
    engine: sa.Engine, writer: Writer
) -> None:
    await writer.run(adding(2))
    with pytest.raises(StoreError, match="IntegrityError"):
        await writer.run(adding(1, 2, 3))
    assert stored(engine) == [2]
    assert writer.failed
    await writer.run(adding(7))
    assert not writer.failed


async def test_an_error_of_the_work_itself_is_its_callers_and_not_the_stores(
    engine: sa.Engine, writer: Writer
) -> None:
    def wrong(connection: sa.Connection) -> None:
        adding(1)(connection)  # type: ignore[operator]
        raise ValueError("not a matter of the store")

    with pytest.raises(ValueError, match="not a matter"):
        await writer.run(wrong)
    assert stored(engine) == []
    assert not writer.failed


async def test_the_text_of_a_failure_holds_nothing_of_what_was_written(writer: Writer) -> None:
    await writer.run(adding(1))
    with pytest.raises(StoreError) as failed:
        await writer.run(adding(1, name="a private name"))
    assert "private" not in str(failed.value)


async def test_a_full_store_says_so_keeps_nothing_and_takes_the_same_later(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    limit_to(engine, pages + 1)
    writer = Writer(engine)
    large = "x" * 20_000
    with pytest.raises(StoreError, match="the store is full") as failed:
        await writer.run(adding(1, name=large))
    assert failed.value.hint == "free space on its volume"
    assert failed.value.__cause__ is not None
    assert (failed.value.trouble, trouble_of(failed.value.__cause__)) == ("full", "full")
    assert (stored(engine), writer.failed) == ([], True)

    monkeypatch.setattr(module, "_FULL_PAUSE_S", 0.01)
    tries: list[sa.Connection] = []

    def again(connection: sa.Connection) -> object:
        tries.append(connection)
        return adding(1, name=large)(connection)

    waiting = asyncio.create_task(writer.run_when_possible(again))
    async with asyncio.timeout(LONG_S):
        while len(tries) < 3:
            await asyncio.sleep(0.01)
    assert not waiting.done()
    # Space is freed: the writer's own connection learns of it.
    await writer.run(lambda connection: connection.exec_driver_sql("PRAGMA max_page_count=100000"))
    await asyncio.wait_for(waiting, LONG_S)
    assert (stored(engine), writer.failed) == ([1], False)
    writer.close()


async def test_what_cannot_be_refused_still_fails_when_the_store_is_broken(writer: Writer) -> None:
    await writer.run(adding(1))
    with pytest.raises(StoreError, match="IntegrityError"):
        await writer.run_when_possible(adding(1))


async def test_closing_writes_what_is_pending(engine: sa.Engine, writer: Writer) -> None:
    pending = [asyncio.create_task(writer.run(adding(n))) for n in range(1, 50)]
    await asyncio.sleep(0)
    await asyncio.to_thread(writer.close)
    await asyncio.gather(*pending)
    assert stored(engine) == list(range(1, 50))


async def test_a_caller_that_no_longer_waits_does_not_stop_the_writer(
    engine: sa.Engine, writer: Writer
) -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    given_up = asyncio.create_task(writer.run(adding(1)))
    await asyncio.sleep(0)
    given_up.cancel()
    await writer.run(adding(2))
    assert stored(engine) == [1, 2]
    assert reported == []


def test_a_file_that_is_no_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    path.write_text("certainly no database " * 100)
    with pytest.raises(StoreError, match=r"client\.db"):
        open_sqlite(path, "client")
    with pytest.raises(StoreError, match="absent"):
        open_sqlite(tmp_path / "absent" / "client.db", "client")


def test_a_store_is_for_its_owner_only(engine: sa.Engine, tmp_path: Path) -> None:
    assert (tmp_path / "client.db").stat().st_mode & 0o777 == 0o600


async def test_after_a_write_that_failed_nothing_of_its_term_is_kept(
    engine: sa.Engine, writer: Writer
) -> None:
    term = Term(writer)
    await term.run(adding(1))
    pieces = [term.run(adding(n)) for n in (2, 1, 3)]  # the second is there already
    results = await asyncio.gather(*pieces, return_exceptions=True)
    assert [type(result) for result in results] == [int, StoreError, StoreError]
    with pytest.raises(StoreError, match="IntegrityError"):
        await term.run(adding(4))
    assert stored(engine) == [1, 2]
    # Others, and the next term, write.
    assert await writer.run(adding(5)) == 5
    assert await Term(writer).run(adding(6)) == 6


async def test_files_that_find_no_room_end_the_term_too(engine: sa.Engine, writer: Writer) -> None:
    term = Term(writer)
    with (
        pytest.raises(StoreError, match="cannot write a version: No space left") as failed,
        term.keeping("write a version"),
    ):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert failed.value.trouble == "full"
    with pytest.raises(StoreError) as later:
        await term.run(adding(1))
    assert later.value.trouble == "full"
    assert stored(engine) == []


async def test_files_wait_for_room_and_health_can_tell(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FULL_PAUSE_S", 0.01)
    errors = [OSError(errno.ENOSPC, "No space left on device")] * 3
    seen = []

    def write() -> None:
        seen.append(writer.failed)
        if errors:
            raise errors.pop()

    await asyncio.wait_for(writer.files_when_possible("write", write), LONG_S)
    assert seen == [False, True, True, True]
    assert not writer.failed
    with pytest.raises(StoreError, match="cannot write: Permission denied"):
        await writer.files_when_possible("write", denied)


def denied() -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_what_may_pass_is_told_from_what_will_not(engine: sa.Engine) -> None:
    assert trouble_of(OSError(errno.EDQUOT, "")) == "full"
    assert trouble_of(OSError(errno.EROFS, "")) == "away"
    assert trouble_of(OSError(errno.EACCES, "")) == ""
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only = on")
        with pytest.raises(sa.exc.OperationalError) as failed:
            connection.exec_driver_sql("INSERT INTO users VALUES (1, 'x')")
    assert trouble_of(failed.value) == "away"
