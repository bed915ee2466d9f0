"""The release before this one, built from the repository, so that services of both run in one federation.

It is the newest tag ``v...`` behind this commit; until there is one, the last commit of version 1 of the protocol.
A clone without that commit cannot build it: the tests are then left out, and say so.
"""

import functools
import os
import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from coterie.launch.children import Child
from coterie.process.runtime import PARENT_VARIABLE

from .patience import WAIT_S

ROOT = Path(__file__).parents[2]
LAST_OF_VERSION_1 = "6811a9080751060a353852ce67dd37518b52e2f0"  # pragma: allowlist secret


def commit_before() -> str:
    """Return the commit of the release before; skip the test where the clone does not have it."""
    tag = _git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")
    found = _git("rev-parse", "--verify", "--quiet", f"{tag or LAST_OF_VERSION_1}^{{commit}}")
    if not found:
        pytest.skip(f"this clone does not have {LAST_OF_VERSION_1}, of which the release before is built")
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def build(folder: Path) -> Path:
    """Build the release before as a wheel, unpack it, and return the folder to put on the path."""
    commit = commit_before()
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", commit],
        capture_output=True,
        check=True,
        timeout=WAIT_S,
    )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as source:
        source.extractall(folder / "source", filter="data")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*wheel, "-w", str(folder), str(folder / "source")],
        check=True,
        timeout=4 * WAIT_S,
    )
    (built,) = folder.glob("coterie-*.whl")
    with zipfile.ZipFile(built) as packed:
        packed.extractall(folder / "packages")
    return folder / "packages"


def start_from(packages: Path, child: Child, *sets: str) -> None:
    """Start a process of a federation from an unpacked release."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
    named = [f"--set={text}" for text in sets]
    config = str(child.folder / "config.toml")
    with child.log.open("ab") as stream:
        child.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coterie", "serve", child.role, *named, "--config", config],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            env={**inherited, "PYTHONPATH": str(packages), PARENT_VARIABLE: str(os.getpid())},
        )


def set_back(child: Child, packages: Path) -> None:
    """Let a process be of the unpacked release from its next start on."""
    child.start = functools.partial(start_from, packages, child)  # type: ignore[method-assign]


def upgrade(child: Child) -> None:
    """Let a process be of this release from its next start on."""
    vars(child).pop("start", None)
