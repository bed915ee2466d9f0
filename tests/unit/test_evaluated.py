from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from coterie_client.evaluated import Evaluated
from coterie_client.private import PrivateFiles


def arrays(value: float) -> dict[str, np.ndarray]:
    return {
        "embedding": np.full((3, 2), value, np.float32),
        "steps": np.full(3, int(value), np.int32),
        "control": np.zeros((3, 0), np.float32),
    }


@pytest.fixture
def files(tmp_path: Path) -> PrivateFiles:
    return PrivateFiles(tmp_path / "private", b"plan")


def test_users_go_back_to_what_they_had_at_the_version_that_was_chosen(files: PrivateFiles) -> None:
    held = files.take_up(arrays(1), expected=False)
    files.evaluated(4, best=0)
    held["embedding"][:] = 9
    held["steps"][:] = 9
    files.evaluated(8, best=4)
    files.adopt(4)
    assert (held["embedding"] == 1).all()
    assert (held["steps"] == 1).all()


def test_what_was_adopted_is_on_disk(files: PrivateFiles, tmp_path: Path) -> None:
    held = files.take_up(arrays(1), expected=False)
    files.evaluated(4, best=0)
    held["embedding"][:] = 9
    files.adopt(4)
    files.close()
    again = PrivateFiles(tmp_path / "private", b"plan").take_up(arrays(5), expected=True)
    assert (again["embedding"] == 1).all()


def test_only_the_version_evaluated_and_the_best_one_are_kept(tmp_path: Path) -> None:
    kept = Evaluated(tmp_path)
    for version, best in ((0, 0), (3, 0), (6, 3), (9, 3)):
        kept.keep(version, arrays(version), [best])
    found = arrays(-1)
    assert kept.adopt(3, found)
    assert (found["embedding"] == 3).all()
    assert kept.adopt(9, found)
    assert not kept.adopt(6, found)
    assert not kept.adopt(0, found)


def test_a_version_is_written_once_whatever_is_asked_for_again(tmp_path: Path) -> None:
    kept = Evaluated(tmp_path)
    kept.keep(2, arrays(2), [])
    kept.keep(2, arrays(7), [])
    found = arrays(0)
    kept.adopt(2, found)
    assert (found["embedding"] == 2).all()


def test_a_version_of_which_a_crash_left_a_part_is_not_adopted(tmp_path: Path) -> None:
    kept = Evaluated(tmp_path)
    kept.keep(2, arrays(2), [])
    (tmp_path / "evaluated-0000000002-whole.npy").unlink()
    found = arrays(0)
    assert not kept.adopt(2, found)
    assert (found["embedding"] == 0).all()


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    Evaluated(tmp_path).keep(2, arrays(2), [])
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_damaged_copy_of_the_chosen_version_is_not_served(files: PrivateFiles, tmp_path: Path) -> None:
    held = files.take_up(arrays(1), expected=False)
    files.evaluated(4, best=0)
    held["embedding"][:] = 9
    copy = tmp_path / "private" / "evaluated-0000000004-embedding.npy"
    content = bytearray(copy.read_bytes())
    content[-2] ^= 0x10
    copy.write_bytes(bytes(content))
    files.adopt(4)
    assert (held["embedding"] == 9).all()
