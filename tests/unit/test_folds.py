"""The folds that are published with MovieLens 100K: which ratings test, and files that do not fit."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.config.run import RunSettings
from coterie.data.folds import FOLDS, fold_parts, has_folds
from coterie.data.readers import read
from coterie.errors import DataError
from coterie.studies.run_data import load, make_feed

USERS, ITEMS = 10, 12
LINES = [
    f"{user + 1}\t{item + 1}\t{1 + (user * item) % 5}\t{user * ITEMS + item}"
    for user in range(USERS)
    for item in range(ITEMS)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder like that of MovieLens 100K, whose fold n tests every fifth line from line n on."""
    (tmp_path / "u.data").write_text("\n".join(LINES) + "\n")
    for fold in range(1, FOLDS + 1):
        test = LINES[fold - 1 :: FOLDS]
        (tmp_path / f"u{fold}.test").write_text("\n".join(test) + "\n")
        (tmp_path / f"u{fold}.base").write_text("\n".join(line for line in LINES if line not in test) + "\n")
    return tmp_path


def run_of(folder: Path, **split: Any) -> RunSettings:
    return RunSettings.model_validate(
        {
            "system": "fedmf",
            "data": {"path": folder, "layout": "ml-100k"},
            "split": {"kind": "published", **split},
            "rounds": {"cohorts": "all", "min_cohort": 2, "min_sum": 2},
        }
    )


def held_out(run: RunSettings, seed: int) -> set[tuple[str, str]]:
    feed = make_feed(run, load(run), seed)
    data = feed.dataset
    return {
        (data.users[user], data.items[item])
        for user, item in zip(data.user[feed.split.test], data.item[feed.split.test], strict=True)
    }


def test_each_seed_tests_by_a_fold_of_its_own_and_all_of_them_by_every_rating_once(folder: Path) -> None:
    assert has_folds(folder)
    run = run_of(folder)
    each = [held_out(run, seed) for seed in range(FOLDS)]
    assert sum(map(len, each)) == len(LINES) == len(set.union(*each))
    assert held_out(run, FOLDS) == each[0]
    for fold in range(FOLDS):
        expected = {tuple(line.split("\t")[:2]) for line in LINES[fold::FOLDS]}
        assert each[fold] == expected
        assert held_out(run_of(folder, fold=fold + 1), 3) == expected


def test_a_tenth_of_what_does_not_test_validates(folder: Path) -> None:
    run = run_of(folder)
    feed = make_feed(run, load(run), 1)
    assert 0 < feed.split.validation.sum() <= len(LINES) * 0.8 * 0.1 + USERS
    assert not (feed.split.validation & feed.split.test).any()


def test_ratings_in_both_files_or_in_none_are_refused_by_name(folder: Path) -> None:
    dataset = read(folder)
    with (folder / "u2.base").open("a") as file:
        file.write(LINES[1] + "\n")
    with pytest.raises(DataError, match=r"item 2 by user 1 is both in u2\.base and in u2\.test"):
        fold_parts(folder, 2, dataset)
    (folder / "u3.test").write_text(LINES[2] + "\n")
    with pytest.raises(DataError, match=r"is neither in u3\.base nor in u3\.test"):
        fold_parts(folder, 3, dataset)
    (folder / "u4.base").unlink()
    with pytest.raises(DataError, match=r"u4\.base"):
        fold_parts(folder, 4, dataset)


def test_a_part_of_the_data_is_divided_like_the_whole(folder: Path) -> None:
    whole = read(folder)
    kept = np.arange(len(whole)) % 7 > 0
    part = dataclasses.replace(
        whole, user=whole.user[kept], item=whole.item[kept], rating=whole.rating[kept], time=None
    )
    assert np.array_equal(fold_parts(folder, 1, part), fold_parts(folder, 1, whole)[kept])


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"kind": "random", "fold": 1}, "fold 1 with kind 'random'; expected kind 'published', or no fold"),
        ({"fold": 0}, "greater than or equal to 1"),
        ({"fold": 6}, "less than or equal to 5"),
    ],
)
def test_folds_that_do_not_exist_are_refused(folder: Path, split: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        run_of(folder, **split)


def test_a_folder_without_folds_has_no_published_split(folder: Path) -> None:
    for file in folder.glob("u?.*"):
        file.unlink()
    run = run_of(folder)
    assert not has_folds(folder)
    with pytest.raises(DataError, match="has no published hold-out"):
        make_feed(run, load(run), 0)
