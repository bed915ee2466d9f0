"""``--data`` of the commands: a path, or the name of a data set below the usual folders."""

from pathlib import Path

import pytest

from coterie.cli.options import with_data


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, with a data set `ml-tiny` in another one that the environment names."""
    (tmp_path / "sets" / "ml-tiny").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "sets"))
    return tmp_path


def test_without_it_nothing_is_set() -> None:
    assert with_data(None, None) == []
    assert with_data(["seeds=[1]"], None) == ["seeds=[1]"]


def test_a_name_is_found_in_the_folder_that_the_environment_names(elsewhere: Path) -> None:
    assert with_data(["seeds=[1]"], Path("ml-tiny")) == [
        "seeds=[1]",
        f"data.path='{elsewhere}/sets/ml-tiny'",
    ]


def test_the_folder_data_comes_first_and_a_path_that_is_there_before_it() -> None:
    Path("data/ml-tiny").mkdir(parents=True)
    assert with_data(None, Path("ml-tiny")) == ["data.path='data/ml-tiny'"]
    Path("ml-tiny").mkdir()
    assert with_data(None, Path("ml-tiny")) == ["data.path='ml-tiny'"]


@pytest.mark.parametrize("path", ["ml-other", "/nowhere/ml-tiny"])
def test_what_is_nowhere_stays_as_it_was_given_for_the_error_to_name(path: str) -> None:
    assert with_data(None, Path(path)) == [f"data.path='{path}'"]
