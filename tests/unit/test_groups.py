"""`make test` with `make test-federations` runs every test, as `make test-all` does; one group that fails fails all."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import groups

ROOT = Path(__file__).parents[2]


def chosen(group: groups.Group) -> list[tuple[str, ...]]:
    """Return the folders of a group's tests, each with the mark by which some of them are chosen, if any."""
    mark = group.arguments[group.arguments.index("-m") + 1 :][:1] if "-m" in group.arguments else []
    return [(one, *mark) for one in group.arguments if one.startswith("tests/")]


def test_every_test_is_in_one_group():
    found = [one for group in (*groups.quick(2), *groups.federations(2)) for one in chosen(group)]
    files = [one.relative_to(ROOT) for one in ROOT.glob("tests/**/test_*.py")]
    # A file that lies in none of these folders is in no group.
    folders = {"/".join(one.parts[:2]) for one in files}
    # The tests of one folder are in two groups, by a mark.
    parts = [("tests/processes", "not recorded"), ("tests/processes", "recorded")]
    assert sorted(found) == sorted([*((one,) for one in folders - {"tests/processes"}), *parts])
    together = [one for group in groups.everything(2) for one in chosen(group)]
    assert sorted(together) == sorted((one,) for one in folders)


def begin(
    folder: Path, *texts: str, options: Sequence[str] = (), beside: Sequence[int] = ()
) -> subprocess.Popen[str]:
    """Begin to run groups that hold a test each, some beside the others, in a process group of their own."""
    made = []
    for number, text in enumerate(texts):
        file = folder / f"test_{number}.py"
        file.write_text(f"def test_it():\n    {text}\n")
        cache = ["-o", f"cache_dir={folder / 'cache'}"]
        made.append((f"group {number}", [*cache, "-q", str(file)], False, number in beside))
    script = folder / "all.py"
    script.write_text(
        "from pathlib import Path\n"
        "from tests import groups\n"
        f"groups.SPENT = Path({str(folder / 'spent')!r})\n"
        f"made = {made!r}\n"
        "groups.quick = lambda workers: [groups.Group(*one) for one in made]\n"
        "raise SystemExit(groups.main())\n"
    )
    return subprocess.Popen(
        [sys.executable, str(script), *options],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *texts: str, **how: Any) -> tuple[int, str]:
    """Run groups as `begin` does; return the exit status and what was printed."""
    begun = begin(folder, *texts, **how)
    told, _ = begun.communicate()
    return begun.returncode, told


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
    # Where the time went is told by folder and by file.
    for number in range(2):
        assert re.search(rf"^ +[\d.]+ +[\d.]+ +1  \S*test_{number}\.py$", told, re.MULTILINE), told
    assert re.search(r"^ +[\d.]+ +[\d.]+ +2  ", told, re.MULTILINE)


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


def test_a_group_beside_the_others_runs_at_the_same_time_and_is_told_in_its_place(tmp_path):
    way = tmp_path / "way"
    os.mkfifo(way)
    # Each opens one end of a pipe, and waits for the other.
    first, second = (f"open({str(way)!r}, {mode!r}).close()" for mode in ("r", "w"))
    status, told = run(tmp_path, first, f"{second}; assert 1 == 2", beside=[0])
    assert status == 1
    said = re.findall(r"^group (\d): (passed|FAILED)", told, re.MULTILINE)
    assert said == [("0", "passed"), ("1", "FAILED")]
    assert told.index("=== group 0\n") < told.index("--- group 1: ") < told.index("group 0: passed")
    status, told = run(tmp_path, f"{first}; assert 3 == 4", second, beside=[0])
    assert status == 1
    assert "assert 3 == 4" in told[: told.index("--- group 0: ")]
    assert "group 0: FAILED with status 1 in " in told


def test_a_group_whose_tests_cannot_be_collected_fails_and_the_others_are_told_too(tmp_path):
    # An error of collection ends pytest with the status of an interrupt.
    status, told = run(tmp_path, ")", "assert 1 == 2", ")", beside=[2])
    assert status == 1
    said = re.findall(r"^group (\d): (passed|FAILED)", told, re.MULTILINE)
    assert said == [("0", "FAILED"), ("1", "FAILED"), ("2", "FAILED")]
    assert "SyntaxError" in told[told.index("--- group 0: ") : told.index("--- group 1: ")]
    assert "SyntaxError" in told[told.index("--- group 2: ") :]


def test_a_group_whose_pytest_dies_fails_and_is_not_tried_again(tmp_path):
    status, told = run(
        tmp_path, "import os; os.kill(os.getpid(), 9)", "pass", options=["--again", "1"], beside=[0]
    )
    assert status == 1
    assert "--- group 0: pytest ended before it wrote its results" in told
    assert "group 0: FAILED with status -9 in " in told
    assert "group 1: passed in " in told


def test_results_that_were_cut_are_told_as_none(tmp_path):
    results = tmp_path / "results.xml"
    results.write_text("<testsuites><testsuite><testcase")
    assert groups.failures(results) == groups.failures(tmp_path / "absent.xml")


def test_an_interrupt_ends_all_groups_and_none_of_those_that_follow_begins(tmp_path):
    ways = [tmp_path / f"way-{number}" for number in range(2)]
    for way in ways:
        os.mkfifo(way)
    waiting = [f"import signal; open({str(way)!r}, 'w').close(); signal.pause()" for way in ways]
    begun = begin(tmp_path, *waiting, f"open({str(tmp_path / 'third')!r}, 'w').close()", beside=[0])
    for way in ways:
        # Opens once the test does.
        way.open().close()
    os.killpg(begun.pid, signal.SIGINT)
    begun.communicate()
    assert begun.returncode == pytest.ExitCode.INTERRUPTED
    assert not (tmp_path / "third").exists()


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
