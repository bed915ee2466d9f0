"""Run the tests of `make test`, the longer ones of `make test-federations`, or all of them, in groups.

    python -m tests.groups --workers 3
    python -m tests.groups --workers 3 --federations
    python -m tests.groups --workers 3 --all --again 10
    OPENBLAS_CORETYPE=Haswell python -m tests.groups --workers 3 --products

The first are the tests of units, of simulations and of single services, and those that read the recorded runs: one
finished run of real processes for each system, secure sum and form.  The longer ones disturb federations of their own,
or need a browser or containers.  Every test is in one of the two.  With ``--products`` those run for which the kernel
of BLAS can matter (`tests.kernels`).

Groups run one after the other.  The group of the browser and the containers waits more than it works: it runs beside
the others, and its output is printed when all groups have ended.

Prints at the end where the time went (`tests.spent`), the failures of every group, and how long each group and all of
them took.  The exit status is 0 when every group passed.  With ``--again`` a group in which few tests failed runs those
once more; the group passes when they pass, and its failures are printed all the same, as those of unsteady tests.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests import kernels, spent

SPENT = Path("build/spent")
"""Folder of what each test of a group took."""


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
    beside : bool
        Whether it runs beside the groups that do not.
    """

    name: str
    arguments: Sequence[str]
    in_memory: bool = False
    beside: bool = False


def quick(workers: int) -> list[Group]:
    """Return the groups of `make test`, in their order.

    Parameters
    ----------
    workers : int
        Processes that test side by side, where tests are bound by computing.
    """
    return [
        _computing(workers),
        Group("recorded runs", [*_processes(workers), "-m", "recorded"], in_memory=True),
    ]


def federations(workers: int) -> list[Group]:
    """Return the groups of `make test-federations`, in their order; ``workers`` as for `quick`."""
    return [
        Group("federations", [*_processes(workers), "-m", "not recorded"], in_memory=True),
        _browser_and_containers(),
    ]


def everything(workers: int) -> list[Group]:
    """Return groups that have all tests, in their order; ``workers`` as for `quick`."""
    return [
        _computing(workers),
        Group("recorded runs and federations", _processes(workers), in_memory=True),
        _browser_and_containers(),
    ]


def products(workers: int) -> list[Group]:
    """Return the group of `make test-kernels`; ``workers`` as for `quick`."""
    return [Group("products of matrices", [*_stealing(workers), *kernels.chosen()], in_memory=True)]


def _computing(workers: int) -> Group:
    folders = ["tests/unit", "tests/simulation", "tests/integration"]
    return Group("unit to integration", [*_stealing(workers), *folders], in_memory=True)


def _stealing(workers: int) -> list[str]:
    return ["-n", str(workers), "--dist", "worksteal"]


def _processes(workers: int) -> list[str]:
    # Whole federations of processes wait more than they work.
    return ["-n", str(workers + 1), "--dist", "loadgroup", "tests/processes"]


def _browser_and_containers() -> Group:
    # One test at a time: an engine has one network and one place for images.  Most of the time is spent waiting for the
    # engine and for containers.  The first test of containers builds all images, while other groups use the processors.
    patience = ["-o", "faulthandler_timeout=2400"]
    return Group("browser and containers", [*patience, "tests/browser", "tests/containers"], beside=True)


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
        File of results in the form of JUnit; absent or cut when pytest ended before it had written it.
    """
    try:
        cases = ET.parse(results).iter("testcase")
    except (FileNotFoundError, ET.ParseError):
        return ["pytest ended before it wrote its results"]
    told = []
    for case in cases:
        for found in (*case.iter("failure"), *case.iter("error")):
            lines = (found.text or found.get("message", "")).splitlines()
            told.append("\n".join([f"{case.get('classname')}.{case.get('name')}", *lines[-LINES:]]))
    return told


def run(group: Group, options: Sequence[str] = (), told: IO[bytes] | None = None) -> tuple[int, list[str]]:
    """Run a group's tests, with more options of pytest, and return pytest's exit status and the failures.

    What pytest says goes to the file ``told``, if there is one.
    """
    with folders(group) as where, tempfile.TemporaryDirectory(prefix="coterie-") as results:
        file = Path(results) / "results.xml"
        # Two groups at once must not write what failed into one file.
        name = group.name.replace(" ", "-")
        kept = ["-o", f"cache_dir=.pytest_cache/{name}", "-p", "tests.spent", f"--spent={SPENT / name}"]
        status = _run([*kept, *where, f"--junitxml={file}", *options, *group.arguments], told)
        return status, failures(file) if status else []


@dataclass(frozen=True)
class Ended:
    """What came of a group.

    Parameters
    ----------
    group : Group
    status : int
        Pytest's last exit status.
    failures : list of str
        The failures of the first run, or those of both if a test failed in both.
    unsteady : int
        Tests that failed in the first run only.
    seconds : float
        How long it took.
    """

    group: Group
    status: int
    failures: list[str]
    unsteady: int
    seconds: float

    def __str__(self) -> str:
        """Return the line that tells it."""
        how = f"FAILED with status {self.status}" if self.status else "passed"
        if self.unsteady:
            how += f", {self.unsteady} of its tests only when tried again,"
        return f"{self.group.name}: {how} in {self.seconds:.0f} s"


def run_twice(group: Group, again: int, told: IO[bytes] | None = None) -> Ended:
    """Run a group's tests, and once more those that failed, if they are at most ``again``; ``told`` as for `run`."""
    begun, unsteady = time.monotonic(), 0
    status, found = run(group, (), told)
    if status == pytest.ExitCode.TESTS_FAILED and 0 < len(found) <= again:
        status, left = run(group, ["--last-failed"], told)
        unsteady = 0 if status else len(found)
        found += left
    return Ended(group, status, found, unsteady, time.monotonic() - begun)


def run_all(groups: Sequence[Group], again: int) -> list[Ended]:
    """Run groups, those that run beside the others at the same time, and return what came of each, in their order."""
    ended: dict[str, Ended] = {}
    with contextlib.ExitStack() as files, ThreadPoolExecutor() as threads:
        told = {one.name: files.enter_context(tempfile.TemporaryFile()) for one in groups if one.beside}
        running = {
            one.name: threads.submit(run_twice, one, again, told[one.name]) for one in groups if one.beside
        }
        for group in groups:
            if not group.beside:
                ended[group.name] = run_twice(group, again)
        for name, one in running.items():
            ended[name] = one.result()
            told[name].seek(0)
            print(f"\n=== {name}\n{told[name].read().decode(errors='replace')}", flush=True)
    return [ended[group.name] for group in groups]


def _run(arguments: Sequence[str], told: IO[bytes] | None = None) -> int:
    # The images of Python set this variable.  Hundreds of processes would each compile all of Coterie again.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--durations=40", *arguments],
        env=environment,
        stdout=told,
        stderr=None if told is None else subprocess.STDOUT,
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        # A terminal interrupts pytest as well, which then ends what it has started.
        process.wait()
        raise


def main() -> int:
    """Run all groups and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3, help="processes that test side by side (3)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--federations", action="store_true", help="the tests of `make test-federations`")
    which.add_argument("--all", action="store_true", help="all tests")
    which.add_argument("--products", action="store_true", help="the tests of `make test-kernels`")
    parser.add_argument(
        "--again", type=int, default=0, help="failures of a group that are tried once more at most (0)"
    )
    chosen = parser.parse_args()
    first = time.monotonic()
    asked = {everything: chosen.all, federations: chosen.federations, products: chosen.products}
    groups = next((groups for groups, wanted in asked.items() if wanted), quick)
    shutil.rmtree(SPENT, ignore_errors=True)
    try:
        ended = run_all(groups(chosen.workers), chosen.again)
    except KeyboardInterrupt:
        return pytest.ExitCode.INTERRUPTED
    shown = [f"\n--- {one.group.name}: {failure}" for one in ended for failure in one.failures]
    print(
        "",
        f"Where the time went (python -m tests.spent {SPENT} prints more):",
        spent.table([SPENT], 25),
        sep="\n",
    )
    print(*shown, "", *ended, f"all groups: {time.monotonic() - first:.0f} s", sep="\n")
    return int(any(one.status for one in ended))


if __name__ == "__main__":
    raise SystemExit(main())
