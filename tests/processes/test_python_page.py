"""The page on Python, word for word: its blocks in one program, and what it shows that they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .patience import WAIT_S

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
MARK = "-- end of a block --"


def stems(output: str) -> list[str]:
    """Return the words of each line, without digits, and without what follows the first one in names of runs."""
    plain = (re.sub(r"\b(run \w+)-\S+", r"\1", line) for line in output.splitlines())
    return [found for line in plain if (found := " ".join(re.findall(r"[A-Za-z]{2,}", line)))]


def fractions(output: str) -> list[float]:
    """Return the numbers with decimals of what was printed: figures, not keys of items."""
    return [float(one) for one in re.findall(r"-?\d+\.\d+", output)]


def test_every_block_of_code_is_followed_by_its_output() -> None:
    assert [kind for kind, _ in BLOCKS] == ["python", "text"] * (len(BLOCKS) // 2)
    assert stems("│ u1   ┆ 1    ┆ i48  │\nFrom run ease-2026-ab of EASE.\n") == ["From run ease of EASE"]


@pytest.mark.long
def test_the_blocks_of_the_page_print_what_it_shows(tmp_path: Path) -> None:
    code = [block for kind, block in BLOCKS if kind == "python"]
    (tmp_path / "page.py").write_text(f"print({MARK!r})\n".join([*code, ""]))
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{MARK}\n")[:-1]
    shown = [block for kind, block in BLOCKS if kind == "text"]
    assert [stems(one) for one in printed] == [stems(one) for one in shown]
    for made, told in zip(printed, shown, strict=True):
        # NCF trains in float32, whose last bits differ between processors, and with them a few users' hits.
        assert fractions(made) == pytest.approx(fractions(told), abs=0.03), made
    assert {one.name for one in tmp_path.iterdir()} == {"page.py", "runs", "model"}
