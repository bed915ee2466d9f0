"""A paper's table, made by the command as its user calls it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .command import descendants, gone
from .patience import WAIT_S

SETTINGS = """
name = "tiny"

[data.synthetic]
users = 40
items = 40
interactions = 750
genres = 2

[drift]
dim = 4
theta = 16
epochs = 2

[federation]
owners = 2
owner_processes = 1
hosts = 1
attacks = true
transcripts = true
"""


@pytest.mark.long
def test_the_table_holds_a_federation_and_its_reference_for_every_rate(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(SETTINGS)
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "coterie",
            "evaluate",
            "tiny.toml",
            "--table",
            "drift",
            "--seeds",
            "0",
            "--json",
        ],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["result"]
    table = json.loads((tmp_path / result["path"]).read_text())
    assert result["table"] == table
    tried = table["tried"]
    assert {(one["row"], one["options"]["drift.rate"], one["seed"]) for one in tried} == {
        (row, rate, 0) for row in ("drift", "saros") for rate in (0.1, 0.2, 0.5)
    }
    assert [one["row"] for one in table["rows"]] == [
        "drift",
        "saros",
        "popularity",
        "positive_share",
        "random",
    ]
    # The same blocks, and another step size: nothing is equal by accident.
    losses = {one["metrics"]["test_loss"] for one in tried}
    assert len(losses) == len(tried)
    for title in ("After epoch 1 on synthetic", "At the rate and epoch chosen by validation_ndcg@10"):
        assert title in done.stderr
    runs = list((tmp_path / "runs").glob("tiny-*"))
    assert len(runs) == 3
    assert not list((tmp_path / "runs").glob("*/*/state/transcript*.bin"))


@pytest.mark.full("takes a minute")
def test_the_rows_of_a_table_of_rounds_can_be_summed_under_masks(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "coterie", "evaluate", "--table", "fedncf", "--quick"),
            *("--rows", "popularity,fed-gmf", "--set", "secure_sum=masked", "--set", "rounds.passes=1"),
            "--json",
        ],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["result"]["table"]
    assert made["settings"]["secure_sum"] == "masked"
    assert {one["row"]: one["facts"].get("secure_sum") for one in made["rows"]} == {
        "popularity": None,
        "fed-gmf": "masked",
    }


@pytest.mark.full("takes a minute")
def test_processes_that_make_tables_end_with_an_evaluation_that_is_killed(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-P", "-m", "coterie", "evaluate", "--table", "fedncf,compare", "--jobs", "2"),
        *("--systems", "fcf,ials", "--out", str(tmp_path)),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
    running = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 200
        # Both have begun to write.
        while (
            len({path.parent for path in tmp_path.glob("*/*.json")}) < 1 or len(descendants(running.pid)) < 2
        ):
            assert running.poll() is None, "the tables were made before both were seen"
            assert time.monotonic() < until
            time.sleep(0.05)
        children = descendants(running.pid)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert gone(children, WAIT_S)


def test_tables_that_were_killed_go_on_where_they_were(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-P", "-m", "coterie", "evaluate", "--table", "privmvmf-readings,compare"),
        *("--systems", "fcf,ease", "--quick", "--json", "--out", str(tmp_path)),
        *("--set", "data.synthetic.users=60", "--set", "data.synthetic.items=80"),
        *("--set", "data.synthetic.interactions=1500", "--jobs", "1"),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
    folder = tmp_path / "quick"
    running = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # In the midst of the second table: trials are kept, and a row, but not all of them.
        until = time.monotonic() + 200
        while not list(folder.glob("compare-ranking-synthetic/*.json")):
            assert running.poll() is None, "the tables were made before a row of the second one was seen"
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*/*.json")}
    trials = json.loads((folder / "compare-ranking-synthetic-trials.json").read_text())["rows"]
    assert not (folder / "compare-ranking-synthetic.json").exists()
    done = subprocess.run(
        [*command, "--resume"], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["result"]
    assert [one["table"] for one in result["tables"]] == [
        "privmvmf-readings-synthetic",
        "compare-ranking-synthetic",
    ]
    # What was done is neither trained nor written again.
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    again = json.loads((folder / "compare-ranking-synthetic-trials.json").read_text())["rows"]
    assert {row: again[row][: len(these)] for row, these in trials.items()} == trials
    assert done.stderr.count("taken over") == len(kept)
    compared = json.loads((folder / "compare-ranking-synthetic.json").read_text())
    assert {"fed-fcf", "fed-ease", "popularity"} <= {one["row"] for one in compared["rows"]}
    assert compared["verdict"]["text"] in done.stderr.replace("\n", " ")
