"""The tutorial, word for word: its file, its commands, and the lines that it shows, on fewer users."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .patience import WAIT_S

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SMALL = {
    "DATA__SYNTHETIC__USERS": "30",
    "DATA__SYNTHETIC__ITEMS": "40",
    "DATA__SYNTHETIC__INTERACTIONS": "500",
    "ROUNDS__PASSES": "2",
    "ROUNDS__EVALUATE_EVERY": "1",
}
"""Settings that make the two runs small ones; the commands stay as they are."""


def steps() -> list[tuple[str, str]]:
    """Return the commands of the page after the installation, each with the output shown for it."""
    following = zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True)
    found = [
        (block, output if kind == "text" else "") for (of, block), (kind, output) in following if of == "sh"
    ]
    assert found[0][0] == "make setup\n"
    return found[1:]


def stems(output: str) -> list[str]:
    """Return what stands in each line before its first digit, with words, and without the folder of the clone.

    The star of the best is left out: a terminal, which the page shows, has bold type for it.
    """
    lines = re.sub(r"/\S*/(?=runs/)| \* ", " ", output).splitlines()
    found = [" ".join(re.split(r"\d", line)[0].split()) for line in lines]
    return [stem for stem in found if re.search(r"[a-zA-Z]", stem)]


def test_every_command_of_the_tutorial_is_followed_by_its_output() -> None:
    assert [kind for kind, _ in BLOCKS].count("toml") == 1
    assert all(output for _, output in steps())
    assert stems("pass 5/10  rmse 1.0\n ─────\n   1  i58\n...\nreport: /a/runs/b-1\n") == [
        "pass",
        "report: runs/b-",
    ]


@pytest.mark.long
def test_the_commands_of_the_tutorial_print_what_it_shows(tmp_path: Path) -> None:
    ((_, run),) = [block for block in BLOCKS if block[0] == "toml"]
    (tmp_path / "first.toml").write_text(run)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("COTERIE_", "COLUMNS"))}
    environment = plain | {f"COTERIE_{key}": value for key, value in SMALL.items()}
    for command, shown in steps():
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * WAIT_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        printed = set(stems(done.stdout))
        assert [stem for stem in stems(shown) if stem not in printed] == [], f"{command}\n{done.stdout}"
