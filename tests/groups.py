"""Run the tests of `make test`, or the longer ones of `make test-federations`, one group after the other.

    python -m tests.groups --workers 3
    python -m tests.groups --workers 3 --federations
    python -m tests.groups --workers 3 --federations --again 10

The first are the tests of units, of simulations and of single services, and those that read the recorded runs: one
finished run of real processes for each system, secure sum and form.  The longer ones disturb federations of their own,
or need a browser or containers.  Every test is in one of the two.

Prints at the end the failures of every group, and how long each group and all of them took.  The exit status is 0 when
every group passed.  With ``--again`` a group in which few tests failed runs those once more; the group passes when they
pass, and its failures are printed all the same, as those of unsteady tests.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Group:
    """Tests that one pytest runs.

    Parameters
    ----------
    name : str
    arguments : sequence of str
        Of pytest.
    in_memory : bool
        Whether the tests' folders may lie in memory.
    """

    name: str
    arguments: Sequence[str]
    in_memory: bool = False


def quick(workers: int) -> list[Group]:
    """Return the groups of `make test`, in their order.

    Parameters
    ----------
    workers : int
        Processes that test side by side, where tests are bound by computing.
    """
    computing = ["tests/unit", "tests/simulation", "tests/integration"]
    return [
        Group("unit to integration", ["-n", str(workers), "--dist", "worksteal", *computing], in_memory=True),
        Group("recorded runs", [*_processes(workers), "-m", "recorded"], in_memory=True),
    ]


def federations(workers: int) -> list[Group]:
    """Return the groups of `make test-federations`, in their order; ``workers`` as for `quick`."""
    return [
        Group("federations", [*_processes(workers), "-m", "not recorded"], in_memory=True),
        # A browser and containers take a machine for themselves.
        Group("browser and containers", ["tests/browser", "tests/containers"]),
    ]


def _processes(workers: int) -> list[str]:
    # Whole federations of processes wait more than they work.
    return ["-n", str(workers + 1), "--dist", "loadgroup", "tests/processes"]


MEMORY, ROOM = Path("/dev/shm"), 8 << 30
"""File system in memory, and the free bytes there that tests' folders take at most."""


@contextlib.contextmanager
def folders(group: Group) -> Iterator[list[str]]:
    """Yield pytest's arguments that say where a group's folders lie.

    Services write each acknowledged message through to the disk, which is a good part of what their tests take.  A
    service that is killed leaves the same files in memory.
    """
    if not group.in_memory or not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ROOM:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="coterie-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        yield [f"--basetemp={folder}/tests"]


LINES = 60
"""Last lines that are shown of a failure."""


def failures(results: Path) -> list[str]:
    """Return what pytest wrote about each test that failed, in its order, with the test's name.

    Parameters
    ----------
    results : Path
        File of results in the form of JUnit; none when pytest ended before it wrote it.
    """
    if not results.is_file():
        return ["pytest ended before it wrote its results"]
    told = []
    for case in ET.parse(results).iter("testcase"):
        for found in (*case.iter("failure"), *case.iter("error")):
            lines = (found.text or found.get("message", "")).splitlines()
            told.append("\n".join([f"{case.get('classname')}.{case.get('name')}", *lines[-LINES:]]))
    return told


def run(group: Group, options: Sequence[str] = ()) -> tuple[int, list[str]]:
    """Run a group's tests, with more options of pytest, and return pytest's exit status and the failures."""
    with folders(group) as where, tempfile.TemporaryDirectory(prefix="coterie-") as results:
        file = Path(results) / "results.xml"
        status = _run([*where, f"--junitxml={file}", *options, *group.arguments])
        return status, failures(file) if status else []


def run_twice(group: Group, again: int) -> tuple[int, list[str], int]:
    """Run a group's tests, and once more those that failed, if they are few.

    Parameters
    ----------
    group : Group
    again : int
        Failures that are tried again at most.

    Returns
    -------
    int
        Pytest's last exit status.
    list of str
        The failures of the first run, or those of both if a test failed in both.
    int
        Tests that failed in the first run only.
    """
    status, found = run(group)
    if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(found) <= again:
        return status, found, 0
    status, left = run(group, ["--last-failed"])
    return status, [*found, *left], 0 if status else len(found)


def _run(arguments: Sequence[str]) -> int:
    # The images of Python set this variable.  Hundreds of processes would each compile all of Coterie again.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--durations=40", *arguments], env=environment
    )
    while True:
        # A terminal interrupts pytest as well, which then ends what it has started.
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


def main() -> int:
    """Run all groups and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3, help="processes that test side by side (3)")
    parser.add_argument("--federations", action="store_true", help="the tests of `make test-federations`")
    parser.add_argument(
        "--again", type=int, default=0, help="failures of a group that are tried once more at most (0)"
    )
    chosen = parser.parse_args()
    told, shown, statuses, first = [], [], [], time.monotonic()
    for group in (federations if chosen.federations else quick)(chosen.workers):
        begun = time.monotonic()
        status, found, unsteady = run_twice(group, chosen.again)
        if status == pytest.ExitCode.INTERRUPTED:
            return status
        statuses.append(status)
        shown += [f"\n--- {group.name}: {failure}" for failure in found]
        how = f"FAILED with status {status}" if status else "passed"
        if unsteady:
            how += f", {unsteady} of its tests only when tried again,"
        told.append(f"{group.name}: {how} in {time.monotonic() - begun:.0f} s")
    print(*shown, "", *told, f"all groups: {time.monotonic() - first:.0f} s", sep="\n")
    return int(any(statuses))


if __name__ == "__main__":
    raise SystemExit(main())
