"""Recommendations to a person who never took part: `coterie recommend --new-user` on finished runs of real services."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import socket
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.cli.main import invoke
from coterie.errors import RunError
from coterie.evaluation.holdout import TRAIN
from coterie.launch.local_run import LocalRun
from coterie.launch.released_model import released
from coterie.wire.v1.operator_pb2 import StartRunRequest

from .test_recommend import answer, coterie, refusal

pytestmark = pytest.mark.xdist_group("new-user")

SETTINGS = """
seeds = [0]
reference = false
secure_sum = "masked"

[data.synthetic]
users = 60
items = 40
interactions = 1200
genres = 3

[federation]
hosts = 2

[fedmf]
factors = 4
"""
SYSTEMS = {
    "ease": "[rounds]\npasses = 1",
    "fedmf": "[rounds]\npasses = 60\nevaluate_every = 15\npatience = 100",
    "fedidcf": "[rounds]\npasses = 12\nevaluate_every = 12\n[fedidcf]\nfactors = 4\n"
    "[encryption]\nbits = 1024\ncomparison = true",
}
CANARY = "canary-f3b1c07d"
"""Name of an item that no run knows."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a finished run by system."""
    folder = tmp_path_factory.mktemp("new-user")
    found = {}
    for system, more in SYSTEMS.items():
        (folder / f"{system}.toml").write_text(
            f'name = "{system}"\nsystem = "{system}"\n{SETTINGS}\n{more}\n'
        )
        done = coterie("run", f"{system}.toml", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        (found[system],) = (folder / "runs").glob(f"{system}-*")
    return found


@pytest.fixture
def ease(finished: dict[str, Path]) -> Path:
    return finished["ease"]


@pytest.fixture
def copied(ease: Path, tmp_path: Path) -> Path:
    """Return a copy of the run of EASE, to be spoiled."""
    return Path(shutil.copytree(ease, tmp_path / ease.name))


def history(run: Path, user: str) -> list[tuple[str, str]]:
    """Return the items of a user's training part with their ratings, as the user's host has them."""
    with (run / LocalRun.at(run).host_of(user) / "histories.csv").open(newline="") as file:
        return [
            (row["item"], row.get("rating", ""))
            for row in csv.DictReader(file)
            if row["user"] == user and row["part"] == str(TRAIN)
        ]


def own_file(folder: Path, rows: list[tuple[str, str]], name: str = "own.csv") -> Path:
    path = folder / name
    path.write_text("item,rating\n" + "".join(f"{item},{rating}\n" for item, rating in rows))
    return path


def asked(run: Path, file: Path, *more: str) -> tuple[str, ...]:
    return "recommend", "--new-user", str(file), "--run", str(run), *more


def state_of(run: Path) -> dict[str, str]:
    """Return the hash of every file of a run; SQLite's shared memory, which holds no data, is left out."""
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }


def test_a_person_with_the_items_of_a_trained_user_gets_what_its_host_recommends(
    ease: Path, tmp_path: Path
) -> None:
    user = next(iter(LocalRun.at(ease).users()))
    file = own_file(tmp_path, history(ease, user))
    found = answer(*asked(ease, file, "--k", "7"), cwd=tmp_path)
    trained = answer("recommend", "--user", user, "--run", str(ease), "--k", "7", cwd=tmp_path)
    assert found["items"] == trained["items"]
    assert len(found["items"]) == 7
    assert (found["run"], found["version"], found["system"]) == (ease.name, trained["version"], "EASE")
    known = len(history(ease, user))
    assert found["read"] == {"known": known, "rated": 0, "repeated": 0, "unknown": 0, "unknown_items": []}


@pytest.mark.parametrize("system", ["fedmf", "fedidcf"])
def test_ratings_count_where_a_system_predicts_them(
    finished: dict[str, Path], tmp_path: Path, system: str
) -> None:
    run = finished[system]
    user = next(iter(LocalRun.at(run).users()))
    rows = history(run, user)
    found = answer(*asked(run, own_file(tmp_path, rows)), cwd=tmp_path)
    assert found["read"]["rated"] == len(rows)
    scores = {one["item"]: one["score"] for one in found["items"]}
    assert not scores.keys() & {item for item, _ in rows}
    generous = own_file(tmp_path, [(item, "5") for item, _ in rows], "generous.csv")
    strict = own_file(tmp_path, [(item, "0.5") for item, _ in rows], "strict.csv")
    best = [answer(*asked(run, one), cwd=tmp_path)["items"][0]["score"] for one in (generous, strict)]
    assert best[0] > 3.5 > 2.5 > best[1]


def test_the_model_is_the_chosen_version_which_hosts_have_fetched(
    finished: dict[str, Path], tmp_path: Path
) -> None:
    run = finished["fedmf"]
    final = released(LocalRun.at(run))
    # By validation items the version before the last one counts.
    assert final.version == json.loads((run / "report.json").read_text())["chosen"]["version"] == 45
    user = next(iter(LocalRun.at(run).users()))
    told = answer("recommend", "--user", user, "--run", str(run), "--k", "40", cwd=tmp_path)["items"]
    # On the scale from -1 to 1 a score is the row of the item times the user's factor, whose second value is 1.
    rows = final.model["items"][[final.items.index(one["item"]) for one in told]].astype(np.float64)
    scores = (np.array([one["score"] for one in told]) - 2.75) / 2.25 - rows[:, 1]
    free = np.delete(rows, 1, axis=1)
    assert len(told) > 2 * free.shape[1]
    factor = np.linalg.lstsq(free, scores)[0]
    np.testing.assert_allclose(free @ factor, scores, atol=1e-5)


def test_nothing_of_the_file_is_in_any_file_or_message_afterwards(
    ease: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state_of(ease)
    rows = [*history(ease, next(iter(LocalRun.at(ease).users()))), (CANARY, "3.0625")]
    home, temporary, work = (tmp_path / name for name in ("home", "temporary", "work"))
    for folder in (home, temporary, work):
        folder.mkdir()
    file = own_file(tmp_path, rows)
    for name, folder in (("HOME", home), ("TMPDIR", temporary), ("XDG_CACHE_HOME", home)):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.chdir(work)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket or a process for a new user")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    assert invoke(list(asked(ease, file, "--json"))) == 0
    printed = json.loads(capsys.readouterr().out)["result"]
    # The person is told which items do not count.
    assert printed["read"]["unknown_items"] == [CANARY]
    assert len(printed["items"]) == 10
    assert state_of(ease) == before
    assert not [path for folder in (home, temporary, work) for path in folder.rglob("*")]
    held = [path for path in ease.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert held == []


def test_the_check_for_the_canary_would_find_one(ease: Path, copied: Path) -> None:
    (copied / "cos" / "log.jsonl").open("a").write(f'{{"item": "{CANARY}"}}\n')
    assert state_of(copied) != state_of(ease)
    assert [path for path in copied.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


def test_the_table_says_what_was_read_and_what_does_not_count(ease: Path, tmp_path: Path) -> None:
    rows = [("i3", ""), ("i4", ""), ("i3", ""), *((f"\x1b[31m{n}", "") for n in range(7))]
    done = coterie(*asked(ease, own_file(tmp_path, rows), "--k", "2"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"new user of run {ease.name}, by EASE, version 1 of the model and 2 items of")
    assert lines[1] == "1 earlier row of items named again later: not counted"
    assert lines[2].startswith("7 items not known to the run, not counted: ")
    assert lines[2].count("x1b[31m") == 5
    assert "\x1b" not in done.stdout
    assert lines[3].split() == ["rank", "item", "title", "score"]
    assert len(lines) == 6


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_file_without_a_known_item_is_refused(
    system: str, finished: dict[str, Path], tmp_path: Path
) -> None:
    error = refusal(*asked(finished[system], own_file(tmp_path, [("i999", "3")])), cwd=tmp_path)
    assert (error["code"], error["exit_code"]) == ("data", 20)
    assert "'i999'" in error["message"]
    assert "did you mean 'i9' for 'i999'?" in error["hint"]


def test_a_rating_out_of_the_range_of_the_run_is_refused_with_its_line(
    finished: dict[str, Path], tmp_path: Path
) -> None:
    error = refusal(*asked(finished["fedmf"], own_file(tmp_path, [("i3", "3"), ("i4", "7")])), cwd=tmp_path)
    assert "line 3, column 'rating': '7'; expected a number from 0.5 to 5" in error["message"]


def test_both_kinds_of_users_and_none_are_refused(ease: Path, tmp_path: Path) -> None:
    both = refusal(*asked(ease, own_file(tmp_path, [("i3", "")]), "--user", "u1"), cwd=tmp_path)
    assert both["message"] == "--user and --new-user; expected one of --user, --new-user, --all-users"
    none = refusal("recommend", "--run", str(ease), cwd=tmp_path)
    assert none["message"] == "no user; expected one of --user, --new-user, --all-users"
    assert both["exit_code"] == none["exit_code"] == 10


def test_all_users_get_what_each_gets_alone_and_nothing_is_started(ease: Path, tmp_path: Path) -> None:
    def started() -> list[int]:
        hosts = sorted(ease.glob("host-*"))
        return [(one / "log.jsonl").read_text().count('"listening"') for one in (ease / "cos", *hosts)]

    before = started()
    asked = ("recommend", "--all-users", "--run", str(ease), "--k", "4")
    told = answer(*asked, "--out", "all.csv", cwd=tmp_path)
    assert started() == before
    path = tmp_path / "all.csv"
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    users = LocalRun.at(ease).users()
    assert (told["users"], told["without"], told["rows"]) == (60, 0, len(rows))
    assert {row["user"] for row in rows} == users.keys()
    for user in {host: user for user, host in users.items()}.values():
        alone = answer("recommend", "--user", user, "--run", str(ease), "--k", "4", cwd=tmp_path)
        mine = [row for row in rows if row["user"] == user]
        assert [row["item"] for row in mine] == [one["item"] for one in alone["items"]]
        assert [row["rank"] for row in mine] == ["1", "2", "3", "4"]
        assert [np.float32(row["score"]) for row in mine] == [
            np.float32(one["score"]) for one in alone["items"]
        ]
    content = path.read_bytes()
    assert "all.csv exists already" in refusal(*asked, "--out", "all.csv", cwd=tmp_path)["message"]
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--all-users",), "--all-users without --out"),
        (("--user", "u1", "--out", "all.csv"), "--out with --user"),
        (("--all-users", "--user", "u1", "--out", "all.csv"), "--user and --all-users; expected one of"),
    ],
)
def test_a_file_for_all_users_goes_with_all_users_alone(
    words: tuple[str, ...], told: str, ease: Path, tmp_path: Path
) -> None:
    error = refusal("recommend", *words, "--run", str(ease), cwd=tmp_path)
    assert (error["exit_code"], told in error["message"]) == (10, True)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_made_is_refused_and_one_of_a_failed_run_is_not_left(
    copied: Path, tmp_path: Path
) -> None:
    asked = ("recommend", "--all-users", "--run", str(copied), "--out")
    assert "cannot write none/all.csv" in refusal(*asked, "none/all.csv", cwd=tmp_path)["message"]
    changed(copied, "state", json.dumps({**json.loads(stored(copied, "state")), "phase": "failed"}))
    assert refusal(*asked, "all.csv", cwd=tmp_path)["code"] == "run"
    assert not list(tmp_path.glob("*all.csv*"))


def changed(run: Path, column: str, value: Any) -> None:
    """Put another value into the store of a run's orchestration server."""
    with sqlite3.connect(run / "cos" / "state" / "cos.db") as store:
        store.execute(f"UPDATE runs SET {column} = ?", (value,))
    store.close()


def stored(run: Path, column: str) -> Any:
    with sqlite3.connect(run / "cos" / "state" / "cos.db") as store:
        (found,) = store.execute(f"SELECT {column} FROM runs").fetchone()
    store.close()
    return found


@pytest.mark.parametrize(
    ("phase", "told"), [("failed", "it failed"), ("rounds", "has not finished, and is in phase rounds")]
)
def test_a_run_that_failed_or_goes_on_has_no_model_to_give(
    phase: str, told: str, copied: Path, tmp_path: Path
) -> None:
    changed(copied, "state", json.dumps({**json.loads(stored(copied, "state")), "phase": phase}))
    error = refusal(*asked(copied, own_file(tmp_path, [("i3", "")])), cwd=tmp_path)
    assert error["code"] == "run"
    assert told in error["message"]


def test_the_model_of_participants_who_share_the_key_is_not_given(copied: Path, tmp_path: Path) -> None:
    request = StartRunRequest.FromString(stored(copied, "request"))
    request.plan.secure_sum = "shared-key"
    changed(copied, "request", request.SerializeToString())
    error = refusal(*asked(copied, own_file(tmp_path, [("i3", "")])), cwd=tmp_path)
    assert "is sealed for its participants" in error["message"]


@pytest.mark.parametrize("damage", ["missing", "cut", "no folder"])
def test_a_run_whose_model_is_not_whole_is_refused(damage: str, copied: Path) -> None:
    models = copied / "cos" / "state" / "models"
    files = list(models.rglob("*.safetensors"))
    assert files
    for file in files:
        if damage == "cut":
            file.write_bytes(file.read_bytes()[:40])
        else:
            file.unlink()
    if damage == "no folder":
        shutil.rmtree(models)
    with pytest.raises(RunError, match="is not there" if damage == "no folder" else "missing or damaged"):
        released(LocalRun.at(copied))
    assert models.exists() == (damage != "no folder")
