"""Asking a user's host after and during a run: `coterie recommend` and `coterie receipt` on real services."""

import asyncio
import contextlib
import csv
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.evaluation.holdout import TRAIN
from coterie.launch import local_run
from coterie.launch.children import Child, free_port
from coterie.launch.local_run import LocalRun

pytestmark = pytest.mark.xdist_group("recommend")

LIMIT_S = 120.0
"""How long a command may take; a machine under load needs some of it."""

SETTINGS = """
name = "small"
seeds = [0]
reference = false

[data.synthetic]
users = 24
items = 60
interactions = 600
genres = 3

[drift]
dim = 8
epochs = 1

[federation]
owners = 2
owner_processes = 1
hosts = 2
min_users = 5
"""


def coterie(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "coterie", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def answer(*words: str, cwd: Path) -> dict[str, Any]:
    """Run a command that succeeds; return its result."""
    done = coterie(*words, "--json", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)["result"]
    return result


def refusal(*words: str, cwd: Path) -> dict[str, Any]:
    """Run a command that fails; return its error."""
    done = coterie(*words, "--json", cwd=cwd)
    error: dict[str, Any] = json.loads(done.stdout)["error"]
    assert done.returncode == error["exit_code"]
    return error


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: the folder in which `runs` is."""
    folder = tmp_path_factory.mktemp("recommend")
    (folder / "small.toml").write_text(SETTINGS)
    done = coterie("run", "small.toml", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def run(finished: Path) -> LocalRun:
    return local_run.newest(finished / "runs")


def history(run: LocalRun, user: str) -> set[str]:
    """Return the items that a user has seen in training."""
    with (run.folder / run.host_of(user) / "histories.csv").open(newline="") as file:
        return {
            row["item"] for row in csv.DictReader(file) if row["user"] == user and row["part"] == str(TRAIN)
        }


def one_user_of_each_host(run: LocalRun) -> dict[str, str]:
    return {host: user for user, host in run.users().items()}


@pytest.fixture(scope="module")
def answered(finished: Path) -> dict[str, Any]:
    """Recommendations to a user of each host, by user."""
    users = one_user_of_each_host(local_run.newest(finished / "runs")).values()
    return {user: answer("recommend", "--user", user, "--k", "5", cwd=finished) for user in users}


def test_a_finished_run_recommends_to_a_user_of_either_host(answered: dict[str, Any], run: LocalRun) -> None:
    assert {found["host"] for found in answered.values()} == set(run.users().values())
    assert len(answered) == 2
    for user, found in answered.items():
        assert (found["run"], found["host"], found["user"]) == (run.run_id, run.host_of(user), user)
        items = [one["item"] for one in found["items"]]
        assert len(set(items)) == 5
        assert [one["rank"] for one in found["items"]] == [1, 2, 3, 4, 5]
        scores = [one["score"] for one in found["items"]]
        assert scores == sorted(scores, reverse=True)
        assert not set(items) & history(run, user)
        report = json.loads((run.folder / "report.json").read_text())
        assert found["version"] == report["updates"]


def test_asking_stops_what_it_started_and_leaves_the_run_as_it_was(
    finished: Path, answered: dict[str, Any], run: LocalRun
) -> None:
    before = (run.folder / "report.json").read_bytes()
    user, first = next(iter(answered.items()))
    again = answer("recommend", "--user", user, "--k", "5", "--run", str(run.folder), cwd=finished)
    assert again == first
    assert (run.folder / "report.json").read_bytes() == before
    # Whoever still served from a state folder would keep the next one out.
    for name in ("thirdparty", "cos", first["host"]):
        last = (run.folder / name / "log.jsonl").read_text().strip().splitlines()[-1]
        assert json.loads(last)["event"] == "stopped"


def test_the_table_names_rank_item_title_and_score(finished: Path, run: LocalRun) -> None:
    done = coterie("recommend", "--user", next(iter(run.users())), "--k", "3", cwd=finished)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    titled = "title" in lines[1]
    assert lines[1].split() == ["rank", "item", *(["title"] if titled else []), "score"]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "3"]
    assert titled == bool(run.titles())


def test_a_receipt_counts_every_record_that_left_for_an_owner(finished: Path, run: LocalRun) -> None:
    user = next(iter(run.users()))
    lines = answer("receipt", "--user", user, cwd=finished)["disclosures"]
    kinds = {line["kind"] for line in lines}
    assert {"interaction", "registration", "metric sum"} <= kinds
    sent = [line for line in lines if line["kind"] == "interaction"]
    assert all(line["protection"] == "sealed to the owner" for line in sent)
    assert all(line["recipient"].startswith("data-owner/") for line in sent)
    # An item that two owners hold goes to both.
    assert len(history(run, user)) <= sum(line["count"] for line in sent) <= 2 * len(history(run, user))


def test_services_that_run_are_asked_and_not_started_again(run: LocalRun) -> None:
    user, host = next(iter(run.users().items()))

    async def check() -> None:
        assert len((await local_run.recommend(run, user, 4)).suggestions) == 4

    while_running(run, host, check)


def test_a_receipt_has_all_that_left_for_a_user_and_nothing_of_others(run: LocalRun) -> None:
    users = run.users()
    user, host = next(iter(users.items()))
    neighbour = next(name for name in users if name != user and users[name] == host)

    async def requests(name: str) -> int:
        lines = (await local_run.receipt(run, name)).disclosures
        assert all(line.bytes for line in lines if line.count), lines
        assert "record count" in {line.kind for line in lines}
        return sum(line.count for line in lines if line.kind == "recommendation request")

    async def check() -> None:
        before, others = await requests(user), await requests(neighbour)
        await local_run.recommend(run, user, 4)
        assert (await requests(user), await requests(neighbour)) == (before + 1, others)

    while_running(run, host, check)


def while_running(run: LocalRun, host: str, check: Callable[[], Awaitable[None]]) -> None:
    """Check something while third party, COS and a host of a finished run serve; nobody else may start them."""
    children = [
        Child("thirdparty", "directory", run.folder / "thirdparty"),
        Child("cos", "cos", run.folder / "cos"),
        Child("client", host, run.folder / host),
    ]
    give_free_ports(children)
    before = starts(children)

    async def ask() -> None:
        try:
            for child in children:
                child.start()
            # Not before: of a run that has ended and whose services are not there yet, asking starts its own.
            deadline = time.monotonic() + LIMIT_S
            while any(now == then for now, then in zip(starts(children), before, strict=True)):
                for child in children:
                    child.require_alive()
                assert time.monotonic() < deadline, "the services do not listen"
                await asyncio.sleep(0.1)
            await check()
        finally:
            for child in reversed(children):
                await child.stop()

    asyncio.run(ask())
    assert starts(children) == [number + 1 for number in before]


def starts(children: list[Child]) -> list[int]:
    """Return how often each service has begun to listen."""
    return [child.log.read_text().count('"listening"') for child in children]


def give_free_ports(children: list[Child]) -> None:
    """Let services listen on other ports: those of a run that has ended may be somebody else's by now."""
    configs = [child.folder / "config.toml" for child in children]
    held = [tomllib.loads(config.read_text()) for config in configs]
    old = [values[key] for values in held for key in ("listen", "enrol_listen") if key in values]
    new = {address: f"127.0.0.1:{free_port()}" for address in old}
    for config in configs:
        text = config.read_text()
        for address, other in new.items():
            text = text.replace(f'"{address}"', f'"{other}"')
        config.write_text(text)


def test_an_unknown_user_is_named_with_the_nearest_one(finished: Path, run: LocalRun) -> None:
    user = next(iter(run.users()))
    error = refusal("recommend", "--user", f"{user}x", cwd=finished)
    assert error["code"] == "data"
    assert f"'{user}x'" in error["message"]
    assert "did you mean" in error["hint"]


def test_all_users_are_asked_for_at_once_also_where_the_server_scores(
    finished: Path, answered: dict[str, Any], run: LocalRun, tmp_path: Path
) -> None:
    out = tmp_path / "all.csv"
    told = answer("recommend", "--all-users", "--out", str(out), "--k", "5", cwd=finished)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert told["users"] == len(run.users())
    for user, found in answered.items():
        mine = [row["item"] for row in rows if row["user"] == user]
        assert mine == [one["item"] for one in found["items"]]


def test_a_system_without_fold_in_refuses_new_users_and_names_others(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("item\ni1\n")
    error = refusal("recommend", "--new-user", str(tmp_path / "own.csv"), cwd=finished)
    assert (error["code"], error["exit_code"]) == ("config", 10)
    assert "DRIFT has no recommendations for users who never took part in training" in error["message"]
    assert "ease" in error["hint"]


def test_a_run_that_stopped_before_its_end_is_passed_over(run: LocalRun, tmp_path: Path) -> None:
    for age, name in enumerate(("stopped", "begun", "finished")):
        folder = shutil.copytree(run.folder, tmp_path / name)
        os.utime(folder / "thirdparty" / "config.toml", (2e9 - age, 2e9 - age))
    (tmp_path / "begun" / "cos" / "config.toml").unlink()
    with contextlib.closing(sqlite3.connect(tmp_path / "stopped" / "cos" / "state" / "cos.db")) as store:
        ((state,),) = store.execute("SELECT state FROM runs").fetchall()
        store.execute("UPDATE runs SET state = ?", [json.dumps({**json.loads(state), "phase": "intake"})])
        store.commit()
    assert local_run.newest(tmp_path).run_id == "stopped"
    found, passed_over = local_run.newest_answering(tmp_path)
    assert (found.run_id, passed_over) == ("finished", ["stopped"])
    shutil.rmtree(tmp_path / "finished")
    assert local_run.newest_answering(tmp_path)[0].run_id == "stopped"


def test_a_folder_without_runs_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    assert "no run in runs" in refusal("recommend", "--user", "u1", cwd=tmp_path)["message"]
    error = refusal("receipt", "--user", "u1", "--run", str(tmp_path), cwd=tmp_path)
    assert error["code"] == "run"
    assert "holds no run" in error["message"]
