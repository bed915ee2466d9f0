"""The light installation of a device: locked as the rest is, and what it lacks is refused by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([a-z0-9.-]+)==(\S+) \\$", re.MULTILINE)

LIGHT = """
import sys
from importlib.machinery import PathFinder

class Light(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in ("coterie.launch", "rich") else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Light
from coterie.cli.main import invoke
sys.exit(invoke(sys.argv[1:]))
"""


def pins(lock: str) -> dict[str, str]:
    """Return versions by package."""
    return dict(PIN.findall((ROOT / "requirements" / f"{lock}.txt").read_text()))


def test_its_packages_have_the_versions_that_the_tests_run_with() -> None:
    device = pins("device")
    assert len(device) > 15
    assert device.items() <= pins("dev").items()
    wanted = (ROOT / "requirements" / "device.in").read_text().splitlines()
    assert {name.lower() for name in wanted if name[:1] not in ("#", "")} <= device.keys()


def light(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command where a part of Coterie, and what draws tables, cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_command_that_it_lacks_is_refused_by_name_and_text_is_printed_without_what_draws() -> None:
    done = light("run", "--demo")
    assert done.returncode == 11
    assert "this installation lacks coterie.launch" in done.stderr
    assert "pip install coterie" in done.stderr
    done = light("version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("coterie ")
