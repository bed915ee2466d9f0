"""Every suite of the benchmarks runs, at its smallest size; how fast is asked of none."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import SUITES, main

ROOT = Path(__file__).parents[2]
# A suite without its library measures less, or cannot: `masked` without .venv-peers has rows without a ratio.
NEEDS = {"local_step": "torch", "graph_step": "torch", "paillier": "phe", "live_page": "playwright"}


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_runs_at_its_smallest_size(suite, tmp_path, monkeypatch, capsys):
    if suite in NEEDS and importlib.util.find_spec(NEEDS[suite]) is None:
        pytest.skip(f"{suite} compares with {NEEDS[suite]}, which is not installed")
    if suite == "live_page" and not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("no Chromium on the path")
    if suite == "wan" and (why := no_slow_network()):
        pytest.skip(why)
    # Data are synthetic, whatever this machine has; sizes are ours.
    for name in [one for one in os.environ if one.startswith("COTERIE_")]:
        monkeypatch.delenv(name)
    written = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--only", suite, "--smallest", "--json", str(written)])
    assert main() == 0
    rows = json.loads(written.read_text())["rows"]
    assert len({row["name"] for row in rows}) == len(rows) > 0
    assert all(row["name"].split(".")[0] and row["unit"] for row in rows)
    assert all(isinstance(row["ours"], float) and math.isfinite(row["ours"]) for row in rows), rows


def no_slow_network():
    """Return why there is no network namespace here whose loopback is slow; empty where there is one."""
    command = [
        "unshare",
        "--net",
        sys.executable,
        str(ROOT / "deploy" / "wan.py"),
        "--loopback",
        "--delay",
        "1",
    ]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as emulator:
            if emulator.stdout.readline().startswith("emulating"):
                emulator.terminate()
                return ""
            return f"no slow network of our own: {emulator.communicate()[1].strip()}"
    except FileNotFoundError:
        return "no slow network of our own: there is no command `unshare`"
