"""The first run that the README offers: what it prints, what it compares, and what its report has of both."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEWER = ("rounds.passes=4", "rounds.evaluate_every=2", "data.synthetic.users=120", "rounds.group=40")

group = pytest.mark.xdist_group("first-run")
"""Reads the fixture `first`, which runs once."""


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Standard output, by line, and the report of examples/first.toml, with fewer passes and users."""
    folder = tmp_path_factory.mktemp("first")
    sets = [word for one in (*FEWER, "rounds.cohort=40", f"output={folder}") for word in ("--set", one)]
    program = [sys.executable, "-m", "coterie", "run", str(ROOT / "examples" / "first.toml"), *sets]
    done = subprocess.run(program, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    (report,) = folder.glob("*/report.json")
    return done.stdout.splitlines(), json.loads(report.read_text()), report.parent


@group
def test_what_came_of_the_run_is_said_before_the_table(first):
    lines, report, _ = first
    (at,) = [number for number, line in enumerate(lines) if line.startswith("FedNeuMF on synthetic")]
    quality, attacks = [line for line in lines[at - 3 : at] if line]
    assert re.match(r"FedNeuMF is (ahead of|behind|equal to) .*, the best baseline, in Hit ratio@10", quality)
    masked = report["attacks"]["disaggregate"]
    assert f"AUC of {masked['auc']:.4f}, popularity alone with {masked['popularity_auc']:.4f}" in attacks
    assert attacks.endswith("with each user's contribution in clear, two passes, 1.0000.")


@group
def test_the_same_in_clear_is_attacked_beside_it(first):
    lines, report, folder = first
    beside = report["beside"]
    assert "secure_sum=clear" in beside["changes"]
    assert beside["metrics"]["hit_ratio@10"] <= 1
    clear, masked = beside["attacks"]["disaggregate"], report["attacks"]["disaggregate"]
    assert clear["popularity_auc"] == pytest.approx(masked["popularity_auc"], abs=0.02)
    assert clear["auc"] > 0.99
    assert masked["auc"] < clear["auc"] - 0.1
    assert list((folder / "beside").rglob("transcript*.bin"))
    begun = [line for line in lines if "starting the services" in line]
    assert begun[0] == "starting the services, secure sum masked"
    assert (
        "beside it, each user's contribution in clear, two passes: starting the services, secure sum clear"
        in begun
    )
    assert "pass 2/2" in "\n".join(lines)


@group
def test_the_page_has_the_summary_and_the_second_federation(first):
    _, _, folder = first
    page = (folder / "report.html").read_text()
    assert '<p class="summary">FedNeuMF is ' in page
    assert "Attacks on the second federation: each user&#39;s contribution in clear, two passes" in page


@group
def test_the_first_line_comes_before_the_run_has_an_id(first):
    lines, _, _ = first
    assert lines[0] == f"reading {ROOT / 'examples' / 'first.toml'}"
    assert lines[1].startswith("run first-")
