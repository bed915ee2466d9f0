"""Private state of a host's users: it survives a restart, belongs to one plan, and its loss is said."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import structlog
from coterie_client import private
from coterie_client.private import PrivateFiles

from coterie.errors import StoreError
from coterie.parties.stored_host import user_keys
from coterie.rounds.sides import Arrays
from coterie.store.private_rows import known_sums

PLAN = b"p" * 32


def initial(users: int, fill: float = 0.0) -> Arrays:
    return {
        "embedding": np.full((users, 3), fill, np.float32) + np.arange(users, dtype=np.float32)[:, None],
        "steps": np.zeros(users, np.int32),
        "control": np.zeros((users, 0), np.float32),
    }


def test_only_rows_that_were_saved_survive(tmp_path: Path) -> None:
    files = PrivateFiles(tmp_path / "private", PLAN)
    arrays = files.take_up(initial(4), expected=False)
    arrays["embedding"][[1, 2]] = 7.0
    arrays["steps"][[1, 2]] = 5
    files.save([1])
    files.close()
    again = PrivateFiles(tmp_path / "private", PLAN).take_up(initial(4), expected=True)
    assert again["embedding"][:, 0].tolist() == [0.0, 7.0, 2.0, 3.0]
    assert again["steps"].tolist() == [0, 5, 0, 0]
    assert again["control"].shape == (4, 0)


def test_rows_that_only_came_as_far_as_the_journal_are_taken_up_in_order_and_saved(tmp_path: Path) -> None:
    files = PrivateFiles(tmp_path / "private", PLAN)
    arrays = files.take_up(initial(4), expected=False)
    journal = []
    for users, value in (([1, 3], 7.0), ([3], 8.0), ([], 9.0)):
        arrays["embedding"][users] = value
        arrays["steps"][users] = int(value)
        journal.append(files.rows(users))
    files.close()
    for given in ([*journal, b""], []):
        again = PrivateFiles(tmp_path / "private", PLAN).take_up(initial(4), given, expected=True)
        assert again["embedding"].tolist() == [[0.0] * 3, [7.0] * 3, [2.0] * 3, [8.0] * 3]
        assert again["steps"].tolist() == [0, 7, 0, 8]


def test_others_cannot_read_it(tmp_path: Path) -> None:
    PrivateFiles(tmp_path / "private", PLAN).take_up(initial(2), expected=False)
    assert (tmp_path / "private").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "private").iterdir())


def test_users_that_are_new_are_added_behind_those_there(tmp_path: Path) -> None:
    files = PrivateFiles(tmp_path / "private", PLAN)
    arrays = files.take_up(initial(2), expected=False)
    arrays["embedding"][0] = 9.0
    files.save([0])
    files.close()
    grown = PrivateFiles(tmp_path / "private", PLAN).take_up(initial(4, 0.5), expected=True)
    assert grown["embedding"][:, 0].tolist() == [9.0, 1.0, 2.5, 3.5]


@pytest.mark.parametrize("harm", ["gone", "one file", "torn", "another shape", "another plan", "no mark"])
def test_what_is_lost_begins_anew_and_is_said(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "private"
    files = PrivateFiles(folder, PLAN)
    arrays = files.take_up(initial(3), expected=False)
    arrays["embedding"][:] = 9.0
    files.save([0, 1, 2])
    files.close()
    plan, users = PLAN, initial(3)
    match harm:
        case "gone":
            for path in folder.iterdir():
                path.unlink()
        case "one file":
            (folder / "steps.npy").unlink()
        case "torn":
            (folder / "embedding.npy").write_bytes((folder / "embedding.npy").read_bytes()[:-5])
        case "another shape":
            users["embedding"] = np.zeros((3, 8), np.float32)
        case "another plan":
            plan = b"q" * 32
        case "no mark":
            (folder / "belongs-to.json").unlink()
    with structlog.testing.capture_logs() as logs:
        found = PrivateFiles(folder, plan).take_up(users, expected=True)
    np.testing.assert_array_equal(found["embedding"], users["embedding"])
    assert any("lost" in entry["event"] for entry in logs)


def test_nothing_is_said_where_nobody_was_in_a_round_yet(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        PrivateFiles(tmp_path / "private", PLAN).take_up(initial(1), expected=False)
    assert logs == []


def test_nothing_is_written_once_it_is_closed(tmp_path: Path) -> None:
    files = PrivateFiles(tmp_path / "private", PLAN)
    arrays = files.take_up(initial(1), expected=False)
    files.close()
    arrays["embedding"][:] = 5.0
    files.save([0])
    again = PrivateFiles(tmp_path / "private", PLAN).take_up(initial(1), expected=True)
    assert again["embedding"][0, 0] == 0.0


def test_a_folder_that_cannot_be_used_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("a file")
    with pytest.raises(StoreError, match="cannot use the folder"):
        PrivateFiles(tmp_path / "private", PLAN).take_up(initial(1), expected=False)


def test_a_seed_gives_the_same_keys_everywhere_and_without_one_they_are_this_hosts_own(
    tmp_path: Path,
) -> None:
    names = ["ann", "bob", "cem"]
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert user_keys(one, names, 5).tolist() == user_keys(two, names, 5).tolist()
    assert list(one.iterdir()) == []
    own = user_keys(one, names, None)
    assert own.dtype == np.uint64
    assert user_keys(one, [*names, "dia"], None)[:3].tolist() == own.tolist()
    assert set(own.tolist()).isdisjoint(user_keys(two, names, None).tolist())
    (secret,) = one.iterdir()
    assert secret.stat().st_mode & 0o777 == 0o600
    assert len(secret.read_bytes()) == 32


def test_users_of_whom_nothing_is_kept_go_through_rounds_and_leave_no_file(tmp_path: Path) -> None:
    files = PrivateFiles(tmp_path / "private", PLAN)
    files.rows([0, 1])
    files.save([0, 1])
    files.evaluated(3, 2)
    files.adopt(3)
    files.close()
    assert list(tmp_path.iterdir()) == []


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    told = path.stat()
    path.write_bytes(bytes(content))
    # A medium that fails writes no time.
    os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns))


def test_users_whose_rows_are_damaged_begin_anew_and_the_others_go_on(tmp_path: Path) -> None:
    files = PrivateFiles(tmp_path / "private", PLAN)
    arrays = files.take_up(initial(4), expected=False)
    arrays["embedding"][:] = 7.0
    arrays["steps"][:] = 5
    files.save(range(4))
    files.close()
    # The last user's last number.
    flip(tmp_path / "private" / "embedding.npy", -2)
    with structlog.testing.capture_logs() as logs:
        files = PrivateFiles(tmp_path / "private", PLAN)
        again = files.take_up(initial(4), expected=True)
        files.close()
    assert again["embedding"].tolist() == [[7.0] * 3] * 3 + [[3.0] * 3]
    assert again["steps"].tolist() == [5, 5, 5, 0]
    (told,) = [one for one in logs if one["log_level"] == "error"]
    assert (told["users"], told["folder"]) == (1, str(tmp_path / "private"))
    with structlog.testing.capture_logs() as logs:
        PrivateFiles(tmp_path / "private", PLAN).take_up(initial(4), expected=True)
    assert logs == []


def test_rows_in_the_journal_are_taken_from_there_even_if_their_checksum_was_not_written(
    tmp_path: Path,
) -> None:
    files = PrivateFiles(tmp_path / "private", PLAN)
    arrays = files.take_up(initial(4), expected=False)
    arrays["embedding"][1] = 7.0
    journal = [files.rows([1])]
    files.save([1])
    files.close()
    flip(tmp_path / "private" / "rows.crc", 4)
    again = PrivateFiles(tmp_path / "private", PLAN).take_up(initial(4), journal, expected=True)
    assert again["embedding"][:, 0].tolist() == [0.0, 7.0, 2.0, 3.0]


def test_arrays_of_an_earlier_release_get_checksums(tmp_path: Path) -> None:
    files = PrivateFiles(tmp_path / "private", PLAN)
    files.take_up(initial(4), expected=False)["embedding"][1] = 7.0
    files.save([1])
    files.close()
    (tmp_path / "private" / "rows.crc").unlink()
    PrivateFiles(tmp_path / "private", PLAN).take_up(initial(4), expected=True)
    flip(tmp_path / "private" / "embedding.npy", -2)
    again = PrivateFiles(tmp_path / "private", PLAN).take_up(initial(4), expected=True)
    assert again["embedding"][:, 0].tolist() == [0.0, 7.0, 2.0, 3.0]


def test_rows_that_an_earlier_release_trained_meanwhile_are_kept(tmp_path: Path) -> None:
    files = PrivateFiles(tmp_path / "private", PLAN)
    files.take_up(initial(4), expected=False)["embedding"][:] = 7.0
    journal = [files.rows([1])]
    files.save(range(4))
    files.close()
    # It writes rows and no checksums.
    array = tmp_path / "private" / "embedding.npy"
    held = np.load(array, mmap_mode="r+")
    held[:] = 9.0
    held.flush()
    later = (tmp_path / "private" / "rows.crc").stat().st_mtime_ns + 1
    os.utime(array, ns=(later, later))
    with structlog.testing.capture_logs() as logs:
        files = PrivateFiles(tmp_path / "private", PLAN)
        again = files.take_up(initial(5), journal, expected=True)
        files.close()
    assert logs == []
    assert again["embedding"][:, 0].tolist() == [9.0, 7.0, 9.0, 9.0, 4.0]
    # From here on their checksums are known.
    flip(array, -2)
    again = PrivateFiles(tmp_path / "private", PLAN).take_up(initial(5, 1.0), expected=True)
    assert again["embedding"][:, 0].tolist() == [9.0, 7.0, 9.0, 9.0, 5.0]


def test_users_who_come_later_have_checksums_too(tmp_path: Path) -> None:
    files = PrivateFiles(tmp_path / "private", PLAN)
    files.take_up(initial(2), expected=False)["embedding"][1] = 7.0
    files.save([1])
    files.close()
    files = PrivateFiles(tmp_path / "private", PLAN)
    files.take_up(initial(4), expected=True)["embedding"][3] = 8.0
    files.save([3])
    files.close()
    again = PrivateFiles(tmp_path / "private", PLAN).take_up(initial(4), expected=True)
    assert again["embedding"][:, 0].tolist() == [0.0, 7.0, 2.0, 8.0]


@pytest.mark.parametrize(("users", "most"), [(range(5000), 3), ([7, 3, 4, 5, 3], 6), ([], 0)])
def test_rows_of_neighbours_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: Sequence[int], most: int
) -> None:
    folder, written = tmp_path / "private", []
    files = PrivateFiles(folder, PLAN)
    arrays = files.take_up(initial(5000), expected=False)
    own = sorted(set(users))
    arrays["embedding"][own] = -1.0
    whole = os.pwrite

    def write(file: int, content: bytes, offset: int) -> int:
        written.append(len(content))
        return whole(file, content, offset)

    monkeypatch.setattr(os, "pwrite", write)
    files.save(users)
    # A write for each run, in each of the two arrays and in the file of checksums.
    assert len(written) <= most
    monkeypatch.undo()
    files.close()
    again = PrivateFiles(folder, PLAN).take_up(initial(5000), expected=True)
    assert np.flatnonzero(again["embedding"][:, 0] == -1.0).tolist() == own
    assert again["steps"].tolist() == [0] * 5000
    assert known_sums(folder).all()


def test_a_long_run_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_MOST_OF_A_RUN", 3)
    files = PrivateFiles(tmp_path / "private", PLAN)
    arrays = files.take_up(initial(10), expected=False)
    arrays["steps"][:] = np.arange(10)
    files.save(range(1, 9))
    files.close()
    again = PrivateFiles(tmp_path / "private", PLAN).take_up(initial(10), expected=True)
    assert again["steps"].tolist() == [0, *range(1, 9), 0]


def test_what_a_volume_takes_in_part_is_written_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PrivateFiles(tmp_path / "private", PLAN)
    files.take_up(initial(10), expected=False)["embedding"][:] = 7.0
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: whole(file, content[:5], offset))
    monkeypatch.setattr(private, "_MOST_BYTES", 30)
    files.save(range(10))
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: 0)
    with pytest.raises(StoreError, match="No space left"):
        files.save([3])
    monkeypatch.undo()
    files.close()
    again = PrivateFiles(tmp_path / "private", PLAN).take_up(initial(10), expected=True)
    assert again["embedding"].tolist() == [[7.0] * 3] * 10
    assert known_sums(tmp_path / "private").all()
