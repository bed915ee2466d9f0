"""Where the time of the tests goes: the processor's time and the clock's that each test file takes.

    python -m tests.spent [--lines 40] FOLDER...

`make test`, `make test-federations`, `make test-all` and `make test-kernels` keep in ``build/spent/GROUP`` what each
test took, in the place of what the last of them kept, and print the table of all their groups at the end.  Any other
pytest keeps it with ``-p tests.spent --spent FOLDER``.

The processor's time counts the processes that a test starts, services and browsers, while they descend from pytest.
Containers are not counted.  The time of a shared fixture counts for the test that asked for it first.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")


# --- the plugin of pytest ----------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the folder of what tests took."""
    parser.addoption("--spent", metavar="FOLDER", help="keep what each test takes of time in a folder")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keep what a test takes, with its fixtures."""
    folder = item.config.getoption("--spent")
    if not folder:
        return (yield)
    begun, before = time.monotonic(), processor_s()
    try:
        return (yield)
    finally:
        # Never below zero: the time of a process whose parent ends first is lost.
        took = [item.nodeid, time.monotonic() - begun, max(0.0, processor_s() - before)]
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(f"{json.dumps(took)}\n")


def processor_s() -> float:
    """Return the processor's time of this process and of all that it has started, which run or were waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_of_tree, _children(os.getpid())))


def _of_tree(pid: int) -> float:
    """Return the time of a process and of those below it; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # Its own, and of children that it has waited for: user and system.
    return sum(map(int, fields[11:15])) / _TICKS + sum(map(_of_tree, _children(pid)))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    except OSError:
        # A thread or the process has ended, or this kernel does not tell.
        pass
    return found


# --- the table ---------------------------------------------------------------------------------------------------


@dataclass
class Took:
    """What tests took.

    Parameters
    ----------
    tests : int
    processor_s, clock_s : float
        Time of processors and of the clock, seconds.
    """

    tests: int = 0
    processor_s: float = 0.0
    clock_s: float = 0.0

    def add(self, clock_s: float, processor_s: float) -> None:
        """Count another test."""
        self.tests += 1
        self.clock_s += clock_s
        self.processor_s += processor_s

    def row(self, name: str) -> str:
        """Return a line of the table."""
        return f"{self.processor_s:9.1f} {self.clock_s:9.1f} {self.tests:6d}  {name}"


def read(folders: Iterable[Path]) -> tuple[dict[str, Took], dict[str, Took]]:
    """Return what the tests of each folder of tests and of each file took."""
    by_folder: dict[str, Took] = {}
    by_file: dict[str, Took] = {}
    for kept in sorted(path for folder in folders for path in folder.glob("**/*.jsonl")):
        for line in kept.read_text().splitlines():
            name, clock_s, processor_s = json.loads(line)
            file = name.partition("::")[0]
            for found, key in ((by_folder, file.rpartition("/")[0]), (by_file, file)):
                found.setdefault(key, Took()).add(clock_s, processor_s)
    return by_folder, by_file


def table(folders: Iterable[Path], lines: int) -> str:
    """Return the table: each folder of tests, then the files that took the most of processors."""
    by_folder, by_file = read(folders)

    def rows(found: dict[str, Took], count: int) -> list[str]:
        most = sorted(found.items(), key=lambda one: -one[1].processor_s)[:count]
        return [took.row(name) for name, took in most]

    head = f"{'CPU s':>9} {'clock s':>9} {'tests':>6}"
    return "\n".join([head, *rows(by_folder, len(by_folder)), "", *rows(by_file, lines)])


def main() -> None:
    """Print the table of the folders of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=40, help="files that are shown (40)")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    chosen = parser.parse_args()
    print(table(chosen.folders, chosen.lines))


if __name__ == "__main__":
    main()
