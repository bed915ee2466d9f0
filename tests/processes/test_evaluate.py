"""A paper's table, made by the command as its user calls it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
            "--quick",
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
