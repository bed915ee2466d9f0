"""State that owners keep of rounds in which they sent item factors, and their file of features."""

from pathlib import Path

import numpy as np
import pytest
from coterie_data_owner.item_factors import _Kept, read_features

from coterie.errors import DataError


def arrays(value: float) -> dict[str, np.ndarray]:
    return {"factors": np.full((2, 3), value, np.float32)}


def value_of(found: dict[str, np.ndarray] | None) -> float | None:
    return None if found is None else float(found["factors"][0, 0])


def test_a_version_that_is_asked_about_again_begins_with_what_was_there_before_it(tmp_path: Path) -> None:
    kept = _Kept(tmp_path / "kept.safetensors", "run")
    assert kept.before(0) is None
    kept.save(0, arrays(1.0), arrays(2.0))
    kept.save(1, arrays(2.0), arrays(3.0))
    again = _Kept(tmp_path / "kept.safetensors", "run")
    assert value_of(again.before(1)) == 2.0
    assert value_of(again.before(2)) == 3.0


def test_what_was_kept_of_another_run_and_damaged_files_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "kept.safetensors"
    _Kept(path, "run").save(0, arrays(1.0), arrays(2.0))
    assert _Kept(path, "other").before(1) is None
    path.write_bytes(path.read_bytes()[:20])
    assert _Kept(path, "run").before(1) is None


def test_features_are_in_the_order_of_the_items_and_what_the_file_does_not_name_is_missing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "features.csv"
    path.write_text("item,comedy,year\nb,1,\nc,0,-1.5\nx,1,1\n")
    found = read_features(path, ["a", "c", "b"])
    assert found.names == ("comedy", "year")
    np.testing.assert_array_equal(found.values, [[np.nan, np.nan], [0, -1.5], [1, np.nan]])


def test_a_file_of_other_items_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "features.csv"
    path.write_text("item,comedy\nx,1\n")
    with pytest.raises(DataError, match="names none of the owner's 2 items"):
        read_features(path, ["a", "b"])
