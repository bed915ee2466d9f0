"""The page on own CSV files, word for word: its file, its commands, and the lines that it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .patience import WAIT_S
from .test_tutorial import stems

PAGE = (Path(__file__).parents[2] / "docs" / "own-csv.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.long
def test_the_commands_of_the_page_print_what_it_shows(tmp_path: Path) -> None:
    (run,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "shop.toml").write_text(run)
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("COTERIE_", "COLUMNS"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert len(STEPS) == 4
    for command, shown in STEPS:
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=tmp_path,
            env=plain | {"PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * WAIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        printed = set(stems(done.stdout))
        assert [stem for stem in stems(shown) if stem not in printed] == [], f"{command}\n{done.stdout}"
