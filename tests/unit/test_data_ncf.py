"""The published hold-out of NCF, on files of the same layout and, where it is, on the real one."""

import os
from pathlib import Path

import numpy as np
import pytest

from coterie.data import TEST, Dataset, describe, leave_marked_out, read
from coterie.data.ncf import NO_ITEM, read_ncf_holdout
from coterie.errors import DataError

FILES = {
    "item_index_to_movieid.tsv": "0\t30\n1\t10\n2\t20\n3\t40\n",
    # User 1 holds out movie 30, user 2 movie 20, which is also among its own negatives.
    "ml-1m.test.rating": "0\t0\t5\t978824351\n1\t2\t3\t978300174\n",
    "ml-1m.test.negative": "(0,0)\t2\t3\n(1,2)\t2\t1\n",
}
RATINGS = "1::30::5\n1::10::4\n2::20::3\n2::40::2\n3::30::4\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ratings_no_timestamp.dat").write_text(RATINGS)
    (tmp_path / "ncf-split").mkdir()
    for name, content in FILES.items():
        (tmp_path / "ncf-split" / name).write_text(content)
    return tmp_path


def keys(data: Dataset, row: np.ndarray) -> list[str]:
    return [data.items[item] for item in row if item != NO_ITEM]


def test_test_items_and_negatives_are_found_by_their_keys(folder: Path) -> None:
    data = read(folder)
    held = read_ncf_holdout(folder / "ncf-split", data)
    pairs = [(data.users[u], data.items[i]) for u, i in zip(data.user, data.item, strict=True)]
    assert {pair for pair, yes in zip(pairs, held.test, strict=True) if yes} == {("1", "30"), ("2", "20")}
    assert keys(data, held.negatives[0]) == ["20", "40"]
    assert held.negatives[2].tolist() == [NO_ITEM, NO_ITEM]  # user 3 is in no file


def test_a_test_item_among_its_own_negatives_is_removed_unless_it_is_to_be_kept(folder: Path) -> None:
    data = read(folder)
    held = read_ncf_holdout(folder / "ncf-split", data)
    assert [data.users[user] for user in np.flatnonzero(held.own)] == ["2"]
    assert keys(data, held.negatives[1]) == ["10"]
    assert held.negatives[1, -1] == NO_ITEM
    kept = read_ncf_holdout(folder / "ncf-split", data, keep_own=True)
    assert keys(data, kept.negatives[1]) == ["20", "10"]


def test_the_data_set_tells_of_the_hold_out_beside_it(folder: Path) -> None:
    notes = " ".join(describe(read(folder))["notes"])
    assert "hold-out of NCF's authors" in notes
    assert "reconstruction" in notes


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("item_index_to_movieid.tsv", "0\t30\n2\t10\n", "the item numbers are not 0 to 1"),
        ("ml-1m.test.rating", "0\t0\t5\t1\n7\t2\t3\t1\n", "line 2: .* has no user 8"),
        ("ml-1m.test.rating", "0\t0\t5\t1\n0\t1\t3\t1\n", "names a user twice"),
        ("ml-1m.test.rating", "0\t0\t5\t1\n1\t9\t3\t1\n", "line 2: item 9"),
        (
            "ml-1m.test.rating",
            "0\t3\t5\t1\n1\t2\t3\t1\n",
            "line 1: .* no interaction of user '1' with item '40'",
        ),
        ("ml-1m.test.rating", "0\t0.5\t5\t1\n", "line 1: 0.5; expected a whole number"),
        ("ml-1m.test.negative", "(0,0)\t2\t3\n", "has 1 lines and ml-1m.test.rating 2"),
        ("ml-1m.test.negative", "(0,0)\t2\t3\n(1,1)\t2\t1\n", r"line 2: '\(1,1\)'; expected '\(1,2\)'"),
        ("ml-1m.test.negative", "(0,0)\t1\t3\n(1,2)\t2\t1\n", "line 1: item '10' is a negative of user '1'"),
        ("ml-1m.test.negative", "(0,0)\t2\t3\n(1,2)\t2\n", "line 2, column 'negative 2': nothing"),
        ("ml-1m.test.negative", "(0,0)\n", "line 1: no negative"),
    ],
)
def test_files_that_do_not_fit_are_refused_with_their_line(
    folder: Path, name: str, content: str, message: str
) -> None:
    (folder / "ncf-split" / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_ncf_holdout(folder / "ncf-split", read(folder))


@pytest.mark.parametrize("name", list(FILES))
def test_a_file_that_is_absent_is_named(folder: Path, name: str) -> None:
    (folder / "ncf-split" / name).unlink()
    with pytest.raises(DataError, match=f"cannot read .*{name}"):
        read_ncf_holdout(folder / "ncf-split", read(folder))


@pytest.mark.realdata
def test_of_movielens_1m_156_users_have_98_negatives_and_all_others_99() -> None:
    root = os.environ.get("COTERIE_DATA")
    if not root or not (Path(root) / "ml-1m" / "ncf-split").exists():
        pytest.skip("COTERIE_DATA names no folder with ml-1m/ncf-split")
    data = read(Path(root) / "ml-1m")
    held = read_ncf_holdout(Path(root) / "ml-1m" / "ncf-split", data)
    assert held.test.sum() == 6040
    assert held.own.sum() == 156
    assert np.bincount((held.negatives != NO_ITEM).sum(axis=1))[98:].tolist() == [156, 5884]
    split = leave_marked_out(data, held.test)
    assert np.bincount(split.part).tolist() == [1_000_209 - 2 * 6040, 6040, 6040]
    assert (split.part == TEST)[held.test].all()
