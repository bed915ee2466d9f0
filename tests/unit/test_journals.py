"""Journals of a host's members: contributions survive a restart, one transaction per batch, runs kept apart."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from coterie_client.journals import Journals
from coterie_client.private import PrivateFiles

from coterie.errors import StoreError
from coterie.launch.state_check import check_state
from coterie.rounds.ledger import Entry, Ledger
from coterie.rounds.member_round import Journal
from coterie.store import client as store
from coterie.store.engine import Writer, open_sqlite

ONE, TWO, THREE = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32


class Stand:
    """A store and the journals in it; leave it and take it up again as a restart does."""

    def __init__(self, folder: Path, run: str = "run") -> None:
        self.folder = folder
        self.engine = open_sqlite(folder / "client.db", "client")
        self.writer = Writer(self.engine)
        self.journals = Journals(self.engine, self.writer, folder / "contributions.bin", run)

    def again(self, run: str = "run") -> Stand:
        self.close()
        return Stand(self.folder, run)

    def close(self) -> None:
        self.writer.close()
        self.journals.close()
        self.engine.dispose()


@pytest.fixture
def stand(tmp_path: Path):
    made = Stand(tmp_path)
    yield made
    made.close()


LEDGER = Ledger((Entry("supports", 0, 3, b"s" * 32), Entry("train", 12, 0, b"t" * 32)))


def journal(joined: int, contribution: bytes = b"", **changes: object) -> Journal:
    return Journal(joined, contribution, **changes)  # type: ignore[arg-type]


async def test_what_was_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    kept = {
        ONE: journal(7, b"x" * 100_000),
        TWO: journal(7, b"y" * 5, ledger=LEDGER),
        THREE: journal(6),
    }
    await stand.journals.keep(kept)
    stand = stand.again()
    assert {participant: stand.journals.of(participant) for participant in kept} == kept
    assert stand.journals.joined == 7
    stand.close()


async def test_a_participant_that_never_joined_has_an_empty_journal(stand: Stand) -> None:
    assert stand.journals.of(ONE) == Journal()
    assert stand.journals.joined == 0


async def test_contributions_of_one_round_that_come_in_pieces_do_not_write_over_one_another(
    tmp_path: Path,
) -> None:
    stand = Stand(tmp_path)
    await stand.journals.keep({ONE: journal(3, b"first"), TWO: journal(3)})
    await stand.journals.keep({TWO: journal(3, b"second"), THREE: journal(3, b"third")})
    stand = stand.again()
    found = [stand.journals.of(one).contribution for one in (ONE, TWO, THREE)]
    assert found == [b"first", b"second", b"third"]
    stand.close()


async def test_the_next_round_takes_the_room_of_the_last_one(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    for number in range(1, 6):
        await stand.journals.keep({one: journal(number, bytes([number]) * 1000) for one in (ONE, TWO)})
        await stand.journals.keep({one: journal(number) for one in (ONE, TWO)})
    assert (tmp_path / "contributions.bin").stat().st_size == 2000
    stand.close()


async def test_closing_a_round_and_answering_the_next_in_one_batch_keeps_the_new_contribution(
    tmp_path: Path,
) -> None:
    stand = Stand(tmp_path)
    await stand.journals.keep({ONE: journal(1, b"old"), TWO: journal(1, b"other")})
    await stand.journals.keep({ONE: journal(2, b"new"), TWO: journal(1)})
    stand = stand.again()
    assert stand.journals.of(ONE) == journal(2, b"new")
    assert stand.journals.of(TWO) == journal(1)
    stand.close()


async def test_a_reveal_after_the_contribution_changes_only_what_it_says(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    await stand.journals.keep({ONE: journal(4, b"sent")})
    revealed = journal(4, b"sent", ledger=LEDGER)
    await stand.journals.keep({ONE: revealed})
    stand = stand.again()
    assert stand.journals.of(ONE) == revealed
    stand.close()


async def test_a_damaged_contribution_counts_as_lost(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    await stand.journals.keep({ONE: journal(4, b"contribution"), TWO: journal(4, b"another one")})
    with (tmp_path / "contributions.bin").open("r+b") as file:
        file.write(b"C")
    stand = stand.again()
    assert stand.journals.of(ONE) == journal(4)
    assert stand.journals.of(TWO).contribution == b"another one"
    stand.close()


async def test_private_state_stands_with_the_contribution_that_it_belongs_to(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    await stand.journals.keep({TWO: journal(1, b"two"), THREE: journal(1)}, {TWO: b"rows of two"})
    await stand.journals.keep({ONE: journal(1, b"one")}, {ONE: b"rows of one"})
    await stand.journals.keep({TWO: journal(1, b"two", ledger=LEDGER)})
    stand = stand.again()
    assert stand.journals.private == [b"rows of two", b"rows of one"]
    assert stand.journals.of(TWO).contribution == b"two"
    await stand.journals.keep({ONE: journal(1), TWO: journal(1)})
    stand = stand.again()
    assert stand.journals.private == []
    stand.close()


async def test_nothing_counts_as_kept_before_the_file_is_synced(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    seen: list[bytes] = []

    def sync(file: int) -> None:
        seen.append(os.pread(file, 100, 0))
        begun.set()
        assert may_end.wait(10)

    monkeypatch.setattr(os, "fdatasync", sync)
    keeping = asyncio.create_task(
        stand.journals.keep({ONE: journal(1, b"contribution")}, {ONE: b" and rows"})
    )
    assert await asyncio.to_thread(begun.wait, 10)
    # The row is committed behind this, as the writer takes one thing after the other.
    await stand.writer.run(lambda _: None)
    assert not keeping.done()
    assert stand.journals.of(ONE) == Journal()
    may_end.set()
    await keeping
    assert seen == [b"contribution and rows"]
    assert stand.journals.of(ONE) == journal(1, b"contribution")


async def test_a_file_that_takes_no_more_keeps_nothing_until_there_is_room(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, room, write = asyncio.Event(), False, os.pwrite
    loop = asyncio.get_running_loop()

    def pwrite(file: int, data: bytes, offset: int) -> int:
        if room:
            return write(file, data, offset)
        loop.call_soon_threadsafe(tried.set)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    keeping = asyncio.create_task(stand.journals.keep({ONE: journal(1, b"contribution")}))
    await asyncio.wait_for(tried.wait(), 30)
    assert stand.journals.of(ONE) == Journal()
    room = True
    await asyncio.wait_for(keeping, 30)
    assert stand.journals.of(ONE) == journal(1, b"contribution")


async def test_runs_are_kept_apart(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    await stand.journals.keep({ONE: journal(9, b"of the run")})
    stand = stand.again("another")
    assert stand.journals.of(ONE) == Journal()
    stand = stand.again()
    assert stand.journals.of(ONE).joined == 9
    stand.close()


async def test_receipts_and_counts_are_written_with_the_journals_or_not_at_all(stand: Stand) -> None:
    sent = [store.Sent(1, "cos", "model update (clear)", 1, 10, 1000)]
    refused = [store.Refused(0, "cos", "why", 1000), store.Refused(0, "cos", "why", 2000)]
    await stand.journals.keep({ONE: journal(1)}, {}, sent, refused, [4, 5], 20_000)
    await stand.journals.keep({}, {}, (), (), [5], 20_000)
    # A kind is missing: the transaction fails as a whole.
    broken = [store.Sent(1, "cos", None, 1, 10, 1000)]  # type: ignore[arg-type]
    with pytest.raises(StoreError):
        await stand.journals.keep({ONE: journal(2)}, {}, broken, (), [5], 20_000)
    assert stand.journals.of(ONE) == journal(1)
    with stand.engine.connect() as connection:
        assert store.load_taken_part(connection, 20_000) == {4: 1, 5: 2}
        assert store.load_taken_part(connection, 20_001) == {}
        (row,) = store.load_declined(connection)
        assert (row.reason, row.times, row.first_ms, row.last_ms) == ("why", 2, 1000, 2000)
        assert len(store.load_sent(connection)) == 1


async def test_a_new_day_begins_to_count_anew(stand: Stand) -> None:
    for day, expected in ((10, 1), (10, 2), (11, 1)):
        await stand.journals.keep({}, {}, (), (), [1], day)
        with stand.engine.connect() as connection:
            assert store.load_taken_part(connection, day) == {1: expected}


def test_a_file_that_cannot_be_opened_is_said_so(tmp_path: Path) -> None:
    engine = open_sqlite(tmp_path / "client.db", "client")
    (tmp_path / "contributions.bin").mkdir()
    with pytest.raises(StoreError, match="cannot open"):
        Journals(engine, None, tmp_path / "contributions.bin", "run")  # type: ignore[arg-type]
    engine.dispose()


async def test_rows_that_the_journal_has_are_not_called_damaged(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    initial = {"factors": np.zeros((4, 3), np.float32)}
    files = PrivateFiles(tmp_path / "private", b"p" * 32)
    files.take_up(initial, expected=False)["factors"][1] = 5.0
    await stand.journals.keep({ONE: journal(7, b"x" * 10)}, {ONE: files.rows([1])})
    files.close()
    stand.close()
    # A crash, after which the rows are on the medium, and neither their checksums nor their time.
    for user in (1, 2):
        path = tmp_path / "private" / "factors.npy"
        times = path.stat()
        held = np.load(path, mmap_mode="r+")
        held[user] = 5.0
        held.flush()
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        told = next(one for one in check_state(tmp_path) if one.check == "private arrays")
        if user == 1:
            assert told.status == "ok"
    assert told.status == "fail"
    assert "the rows of 1 of 4 users" in told.problem
    stand = Stand(tmp_path)
    again = PrivateFiles(tmp_path / "private", b"p" * 32).take_up(
        initial, stand.journals.private, expected=True
    )
    stand.close()
    assert again["factors"][:, 0].tolist() == [0.0, 5.0, 0.0, 0.0]
