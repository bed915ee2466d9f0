"""Private arrays of a host, read after the run from the files that the host wrote."""

import os
from pathlib import Path

import numpy as np
import pytest
from coterie_client.private import PrivateFiles

from coterie.errors import RunError
from coterie.store.private_rows import read_rows

PLAN = b"p" * 32


def arrays(value: float) -> dict[str, np.ndarray]:
    return {"factors": np.full((3, 2), value, np.float32), "counts": np.full(3, int(value), np.int64)}


def kept(folder: Path) -> None:
    """Write arrays as a host does that evaluated versions 2 and 4, of which 2 was the best."""
    files = PrivateFiles(folder, PLAN)
    held = files.take_up(arrays(0), expected=False)
    for version, best in ((2, 2), (4, 2)):
        for array in held.values():
            array[...] = version
        files.save(range(3))
        files.evaluated(version, best)
    files.close()


def test_rows_are_those_of_the_chosen_version_whether_the_host_restored_them_or_not(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    kept(folder)
    for name, array in read_rows(folder, PLAN, 2, arrays(0)).items():
        np.testing.assert_array_equal(array, arrays(2)[name])
    # Of a version without a copy, and of systems that are never evaluated, those of the last round count.
    np.testing.assert_array_equal(read_rows(folder, PLAN, 9, arrays(0))["factors"], arrays(4)["factors"])
    # Nothing was written.
    np.testing.assert_array_equal(np.load(folder / "factors.npy"), arrays(4)["factors"])


def test_users_who_were_in_no_round_have_their_first_rows(tmp_path: Path) -> None:
    found = read_rows(tmp_path / "private", PLAN, 1, arrays(7))
    np.testing.assert_array_equal(found["factors"], arrays(7)["factors"])
    assert not (tmp_path / "private").exists()


def test_rows_of_another_run_and_files_that_are_damaged_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    kept(folder)
    with pytest.raises(RunError, match="belongs to another run"):
        read_rows(folder, b"q" * 32, 2, arrays(0))
    with pytest.raises(RunError, match=r"has shape \(3, 2\) and type float32; expected \(4, 2\)"):
        read_rows(folder, PLAN, 2, {"factors": np.zeros((4, 2), np.float32)})
    whole = folder / "evaluated-0000000002-factors.npy"
    whole.write_bytes(whole.read_bytes()[:-3])
    with pytest.raises(RunError, match="cannot read the private state"):
        read_rows(folder, PLAN, 2, arrays(0))
    whole.unlink()
    with pytest.raises(RunError, match="cannot read the private state"):
        read_rows(folder, PLAN, 2, arrays(0))


@pytest.mark.parametrize(
    ("version", "file", "told"),
    [
        (9, "factors.npy", "the rows of 1 of 3 users do not have their checksum"),
        (2, "evaluated-0000000002-factors.npy", "the copy for version 2 does not have its checksum"),
        (2, "evaluated-0000000002-whole.npy", "the copy for version 2 does not have its checksum"),
    ],
)
def test_rows_that_do_not_have_their_checksum_are_refused(
    tmp_path: Path, version: int, file: str, told: str
) -> None:
    folder = tmp_path / "private"
    kept(folder)
    path = folder / file
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[-2] ^= 0x10
    path.write_bytes(bytes(content))
    # A medium that fails writes no time.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(RunError, match=told):
        read_rows(folder, PLAN, version, arrays(0))


def test_rows_whose_checksums_are_not_known_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    kept(folder)
    (folder / "rows.crc").write_bytes(bytes(12))
    np.testing.assert_array_equal(read_rows(folder, PLAN, 9, arrays(0))["factors"], arrays(4)["factors"])
    (folder / "rows.crc").unlink()
    np.testing.assert_array_equal(read_rows(folder, PLAN, 9, arrays(0))["factors"], arrays(4)["factors"])
    # An earlier release's mark of a copy.
    np.save(folder / "evaluated-0000000002-whole.npy", np.ones(1, np.uint8))
    np.testing.assert_array_equal(read_rows(folder, PLAN, 2, arrays(0))["factors"], arrays(2)["factors"])
