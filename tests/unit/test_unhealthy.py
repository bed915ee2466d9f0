"""The script that names services which are not healthy, with the answers of an engine in place of one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "unhealthy.sh"

# Version 2 lists what runs, and all with `--all`; version 1.29 always lists all, and knows the option.
ENGINE = """#!/bin/sh
case "$*" in
  "compose version") exit {version_2} ;;
  "compose "*ps*--all*) echo alive; echo gone ;;
  "compose "*ps*) echo alive ;;
  inspect*alive) echo "owner: running, healthy: " ;;
  inspect*gone) echo "cos: exited with 51" ;;
  *) exit 64 ;;
esac
"""
COMPOSE_1 = """#!/bin/sh
echo alive; echo gone
"""


@pytest.mark.parametrize("version_2", [True, False], ids=["compose 2", "compose 1.29"])
def test_a_service_that_has_ended_is_named(tmp_path: Path, version_2: bool) -> None:
    for name, text in (
        ("docker", ENGINE.format(version_2=0 if version_2 else 1)),
        ("docker-compose", COMPOSE_1),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "cos: exited with 51\n"), ended.stderr
