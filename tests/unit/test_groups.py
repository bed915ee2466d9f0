"""`make test` and `make test-federations` run every test between them, and fail when one of their groups fails."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import groups

ROOT = Path(__file__).parents[2]


def chosen(group: groups.Group) -> list[tuple[str, ...]]:
    """Return the folders of a group's tests, each with the mark by which some of them are chosen, if any."""
    mark = group.arguments[group.arguments.index("-m") + 1 :][:1] if "-m" in group.arguments else []
    return [(one, *mark) for one in group.arguments if one.startswith("tests/")]


def test_every_test_is_in_one_group():
    found = [one for group in (*groups.quick(2), *groups.federations(2)) for one in chosen(group)]
    folders = {str(one.parent.relative_to(ROOT)) for one in ROOT.glob("tests/*/test_*.py")}
    # The tests of one folder are in two groups, by a mark.
    parts = [("tests/processes", "not recorded"), ("tests/processes", "recorded")]
    assert sorted(found) == sorted([*((one,) for one in folders - {"tests/processes"}), *parts])


def run(folder: Path, *texts: str, options: Sequence[str] = ()) -> tuple[int, str]:
    """Run groups that hold a test each and return the exit status and what was printed."""
    made = []
    for number, text in enumerate(texts):
        file = folder / f"test_{number}.py"
        file.write_text(f"def test_it():\n    {text}\n")
        cache = ["-o", f"cache_dir={folder / 'cache'}"]
        made.append(groups.Group(f"group {number}", [*cache, "-q", str(file)]))
    script = folder / "all.py"
    script.write_text(
        "from tests import groups\n"
        f"made = {[(one.name, one.arguments) for one in made]!r}\n"
        "groups.quick = lambda workers: [groups.Group(*one) for one in made]\n"
        "raise SystemExit(groups.main())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), *options],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("texts", [("assert 1 == 2", "assert True"), ("assert True", "assert 1 == 2")])
def test_a_group_that_fails_is_told_and_fails_the_whole(tmp_path, texts):
    status, told = run(tmp_path, *texts)
    assert status == 1
    assert "assert 1 == 2" in told
    said = re.findall(r"^group (\d): (passed|FAILED)", told, re.MULTILINE)
    assert said == [(str(n), "passed" if text == "assert True" else "FAILED") for n, text in enumerate(texts)]


def test_all_groups_that_pass_pass_and_each_is_told_its_time_as_is_the_whole(tmp_path):
    status, told = run(tmp_path, "assert True", "assert True")
    assert status == 0, told
    said = re.findall(r"^(group \d: passed in|all groups:) \d+ s$", told, re.MULTILINE)
    assert said == ["group 0: passed in", "group 1: passed in", "all groups:"]


def test_what_failed_is_tried_again_where_that_was_asked_for_and_told_all_the_same(tmp_path):
    mark = tmp_path / "tried"
    unsteady = (
        f"from pathlib import Path; it = Path({str(mark)!r}); there = it.exists(); it.touch(); assert there"
    )
    status, told = run(tmp_path, "assert True", unsteady)
    assert status == 1
    mark.unlink()
    status, told = run(tmp_path, "assert True", unsteady, options=["--again", "1"])
    assert status == 0, told
    assert "--- group 1: " in told
    assert "group 1: passed, 1 of its tests only when tried again, in " in told


@pytest.mark.parametrize("again", ["0", "1"])
def test_what_fails_again_fails_the_whole(tmp_path, again):
    status, told = run(tmp_path, "assert 1 == 2", options=["--again", again])
    assert status == 1
    assert "group 0: FAILED with status 1 in " in told


@pytest.mark.parametrize(("room", "there"), [(0, 1), (1 << 60, 0)])
def test_folders_lie_in_memory_where_that_is_wanted_and_has_room_and_are_gone_afterwards(
    tmp_path, monkeypatch, room, there
):
    monkeypatch.setattr(groups, "MEMORY", tmp_path)
    monkeypatch.setattr(groups, "ROOM", room)
    with groups.folders(groups.Group("one", [], in_memory=True)) as where:
        assert len(where) == len(list(tmp_path.iterdir())) == there
        assert all(one.startswith(f"--basetemp={tmp_path}/") for one in where)
    assert list(tmp_path.iterdir()) == []
    with groups.folders(groups.Group("another", [])) as where:
        assert where == []
