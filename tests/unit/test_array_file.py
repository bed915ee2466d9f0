"""Files of arrays with a checksum: every bit that flips is noticed, or changes nothing that is read."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coterie.errors import StoreError
from coterie.store.array_file import load_arrays, save_arrays, sum_of_row, sums_of_rows
from coterie.store.versions import Versions

ARRAYS = {
    "items": np.arange(6, dtype=np.float32).reshape(3, 2),
    "steps": np.array([1, 2], np.int64),
    "none": np.zeros((0, 4), np.float32),
    "scalar": np.array(3.0),
}


def same(found, expected):
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and found[name].shape == value.shape and (found[name] == value).all()
        for name, value in expected.items()
    )


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    save_arrays(ARRAYS, tmp_path / "file", {"version": "3"})
    found, about = load_arrays(tmp_path / "file")
    assert same(found, ARRAYS)
    assert about["version"] == "3"


def test_files_of_earlier_releases_are_read(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "file", metadata={"plan": "a"})
    found, about = load_arrays(tmp_path / "file")
    assert same(found, ARRAYS)
    assert about == {"plan": "a"}


def test_no_bit_flips_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_arrays(ARRAYS, path)
    whole = path.read_bytes()
    noticed = 0
    for place in range(len(whole)):
        for bit in (0, 3, 7):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(bytes(changed))
            try:
                found, _ = load_arrays(path)
            except StoreError:
                noticed += 1
            else:
                # The name under which the checksum is kept, or a space of the header.
                assert same(found, ARRAYS)
    assert noticed > 2.5 * len(whole)


@pytest.mark.parametrize("length", [0, 7, 8, 40, -1])
def test_a_file_that_was_cut_is_damaged(tmp_path: Path, length: int) -> None:
    path = tmp_path / "file"
    save_arrays(ARRAYS, path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(StoreError, match="is damaged: it cannot be read"):
        load_arrays(path)


def test_a_damaged_version_is_named_and_not_served(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.save(ARRAYS, 1, 4)
    (path,) = tmp_path.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(StoreError, match="its content does not have its checksum"):
        versions.load(4)
    assert versions.load_version(1) is None


def test_checksums_of_many_rows_are_those_of_each() -> None:
    rng = np.random.default_rng(3)
    arrays = {
        "steps": rng.integers(0, 9, 50, np.int32),
        "embedding": rng.random((50, 3), np.float32),
        "none": np.zeros((50, 0), np.float32),
        "moments": rng.random((50, 2, 4)),
    }
    assert sums_of_rows(arrays, 7, 31).tolist() == [sum_of_row(arrays, row) for row in range(7, 31)]
    assert len(sums_of_rows(arrays, 7, 7)) == 0
    assert sums_of_rows({"none": arrays["none"]}, 0, 2).tolist() == [1, 1]
