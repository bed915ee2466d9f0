"""``coterie data split`` and ``describe``: the file and digest of a split, and options that a run has, too."""

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import invoke
from coterie.config.run import RunSettings
from coterie.data import read, read_split
from coterie.data.split import PARTS
from coterie.errors import DataError
from coterie.studies.run_data import divided, load, make_feed
from coterie.systems.run_settings import DataSettings, SplitSettings


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    """Write ratings from 0 to 100 of 8 users, without times, of whom the last has one."""
    rows = [
        f"u{user},i{item},{(37 * user + 11 * item) % 101}\n"
        for user in range(7)
        for item in range(user % 3, 6)
    ]
    path = tmp_path / "ratings.csv"
    path.write_text("".join(["user,item,rating\n", *rows, "u7,i0,100\n"]))
    return path


def result(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert invoke([*map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["result"]
    return found


def error(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert invoke([*map(str, arguments)]) == 20
    return " ".join(capsys.readouterr().err.split())


def test_the_split_that_is_written_is_the_one_of_a_run_with_the_seed(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "split.csv"
    options = ("--kind", "leave-random-out", "--seed", "5", "--k-core", "2")
    made = result(capsys, "data", "split", ratings, *options, "--out", out)

    given = {"system": "fcf", "data": {"path": ratings, "k_core": 2}}
    settings = RunSettings.model_validate({**given, "split": {"kind": "leave-random-out"}})
    feed = make_feed(settings, load(settings), 5)
    assert made["split_sha256"] == feed.split.sha256(feed.dataset)
    assert made["parts"] == {name: int(getattr(feed.split, name).sum()) for name in PARTS}

    of_file = {"kind": "file", "path": out, "sha256": made["split_sha256"]}
    by_file = RunSettings.model_validate({**given, "split": of_file})
    again = make_feed(by_file, load(by_file), 0)
    assert again.split.part.tolist() == feed.split.part.tolist()


def test_shares_are_those_of_the_command_line(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "split.csv"
    shares = ("--train", "0.5", "--validation", "0")
    result(capsys, "data", "split", ratings, "--kind", "random", *shares, "--out", out)
    split = read_split(out, read(ratings))
    assert not split.validation.any()
    assert split.test.sum() > len(split.part) / 3


def test_a_split_file_is_replaced_only_if_asked(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("data", "split", ratings, "--kind", "random", "--out", tmp_path / "split.csv")
    first = result(capsys, *arguments)
    assert "already there" in error(capsys, *arguments, "--seed", "1")
    assert result(capsys, *arguments, "--seed", "1", "--overwrite")["split_sha256"] != first["split_sha256"]


@pytest.mark.parametrize("given", ["ratings.csv", "folder/../ratings.csv", "link.csv"])
def test_a_split_never_replaces_the_data_set(
    ratings: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (ratings.parent / "folder").mkdir()
    (ratings.parent / "link.csv").symlink_to(ratings)
    before = ratings.read_bytes()
    arguments = ("data", "split", ratings, "--kind", "random", "--overwrite", "--out", ratings.parent / given)
    assert "expected a file outside of it" in error(capsys, *arguments)
    assert ratings.read_bytes() == before


@pytest.mark.parametrize("given", ["movies.csv", "split.csv", "deeper/split.csv"])
def test_a_split_is_not_written_into_the_folder_of_the_data_set(
    tmp_path: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    result(capsys, "data", "generate", folder, "--users", "20", "--items", "30", "--interactions", "200")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    arguments = ("data", "split", folder, "--overwrite", "--out", folder / given)
    assert f"is in the data set {folder}" in error(capsys, *arguments)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_a_split_of_whole_items_says_that_no_run_reads_it(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "split.csv"
    arguments = ("data", "split", ratings, "--kind", "cold-items", "--train", "0.5", "--out", out)
    (note,) = result(capsys, *arguments)["notes"]
    assert "no run of Coterie reads this file" in note
    given = {"system": "fedmvmf", "data": {"path": ratings}, "split": {"kind": "file", "path": out}}
    settings = RunSettings.model_validate(given)
    with pytest.raises(DataError, match="holds out whole items"):
        make_feed(settings, load(settings), 0)


@pytest.mark.parametrize("kind", ["temporal", "random", "leave-last-out", "leave-random-out", "cold-users"])
def test_an_option_is_refused_exactly_where_the_split_ignores_it(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "ratings.csv"
    rows = [f"u{user},i{item},{item // 6}\n" for user in range(9) for item in range(12)]
    data.write_text("".join(["user,item,time\n", *rows]))
    plain = result(capsys, "data", "split", data, "--kind", kind, "--out", tmp_path / "plain.csv")
    for option, value in (("--train", "0.4"), ("--ties", "file")):
        out = tmp_path / f"{option}.csv"
        arguments = ("data", "split", data, "--kind", kind, "--out", out, option, value)
        dataset = read(data)
        changed = divided(
            DataSettings(path=data),
            SplitSettings.model_validate({"kind": kind, option.strip("-"): value}),
            dataset,
            0,
        )
        if changed.sha256(dataset) == plain["split_sha256"]:
            assert f"{option} with kind '{kind}', which ignores it; expected kind" in error(
                capsys, *arguments
            )
            assert not out.exists()
        else:
            assert result(capsys, *arguments)["split_sha256"] == changed.sha256(dataset)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no timestamps, so it cannot be split by time"),
        (("--kind", "file"), "is read from a file; expected another kind"),
        (("--kind", "half"), "kind: Input should be 'temporal', 'random'"),
        (("--kind", "random", "--train", "2"), "train: Input should be less than 1"),
        (("--kind", "random", "--rating-range", "0", "99"), "expected a number from 0 to 99"),
        (("--kind", "random", "--rating-range", "9", "0"), "expected two finite numbers"),
        (("--kind", "random", "--min-item", "50"), "min_item 50: nothing is left"),
        (("--kind", "random", "--out", "/dev/null/split.csv"), "cannot write /dev/null/split.csv"),
        (("--kind", "random", "--overwrite", "--out", "/dev/null"), "/dev/null is no regular file"),
    ],
)
def test_a_split_that_cannot_be_made_is_refused(
    ratings: Path,
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ratings.parent)
    assert message in error(capsys, "data", "split", ratings, *arguments)
    assert not Path("split.csv").exists()


def test_a_description_says_what_filters_leave_out(ratings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--rating-range", "0", "100", "--min-user", "2")
    found = result(capsys, "data", "describe", ratings, *options)
    assert found["users"] == 7
    assert found["notes"] == ["min_user 2: 1 interactions, 1 users and 0 items left out"]
