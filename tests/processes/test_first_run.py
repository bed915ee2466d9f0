"""The first run that the README offers: what it prints, what it compares, and what its report has of both."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

group = pytest.mark.xdist_group("first-run")
"""Reads the fixture `first`, which runs once."""


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Standard output, by line, the report and the folder of a run of examples/first.toml."""
    folder = tmp_path_factory.mktemp("first")
    example = str(ROOT / "examples" / "first.toml")
    program = [sys.executable, "-m", "coterie", "run", example, "--set", f"output={folder}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    (report,) = folder.glob("*/report.json")
    return done.stdout.splitlines(), json.loads(report.read_text()), report.parent


@group
def test_what_came_of_the_run_is_said_before_the_table(first):
    lines, report, _ = first
    (at,) = [number for number, line in enumerate(lines) if line.startswith("FedNeuMF on synthetic")]
    quality, attacks, beside = [line for line in lines[at - 4 : at] if line]
    assert re.match(r"FedNeuMF is (ahead of|behind|equal to) .*, the best baseline, in Hit ratio@10", quality)
    masked = report["attacks"]["disaggregate"]
    assert f"AUC of {masked['auc']:.4f}, popularity alone with {masked['popularity_auc']:.4f}" in attacks
    assert beside == "Beside it, each user's contribution in clear, two passes: an AUC of 1.0000."


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
def test_the_second_federation_starts_while_the_first_is_attacked(first):
    _, _, folder = first
    begun = (folder / "beside" / "cos" / "config.toml").stat().st_mtime_ns
    # The course is kept once the attacks on it are known.
    assert begun < (folder / "course.json").stat().st_mtime_ns


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


NUMBER = re.compile(r"(?<![\d.])\d+\.\d{4}")


ORDER = re.compile(r"is (ahead of|equal to|behind) ")


def scored(lines):
    """The rows of the table of results, and the lines on attacks, as a name with its numbers of four decimals.

    Which of two rows that differ by one user is ahead is left out.
    """
    named = (
        (
            ORDER.sub("beside ", NUMBER.split(line)[0].strip(" *")),
            [float(one) for one in NUMBER.findall(line)],
        )
        for line in lines
    )
    return [(name, numbers) for name, numbers in named if numbers]


@group
def test_the_readme_has_the_figures_that_the_command_prints(first):
    lines, _, _ = first
    (block,) = re.findall(r"```\n(FedNeuMF is .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    readme, printed = scored(block.splitlines()), scored(lines)
    assert len(readme) > 10
    for name, numbers in readme:
        # Another processor adds in another order: models that learn come to somewhat other numbers there.
        assert any(
            name == other and values == pytest.approx(numbers, abs=0.06) for other, values in printed
        ), name
