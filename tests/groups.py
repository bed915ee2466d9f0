"""Run every test: one group after the other, and beside them the group that waits more than it computes.

    python -m tests.groups --workers 3

Prints each group's whole output, then how long it took.  The exit status is 0 when every group passed.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any


@dataclass
class Group:
    """Tests that one pytest runs.

    Parameters
    ----------
    name : str
    arguments : sequence of str
        Of pytest.
    """

    name: str
    arguments: Sequence[str]
    begun: float = 0.0
    ended: float = 0.0
    status: int | None = None


def groups(workers: int) -> tuple[list[Group], Group]:
    """Return the groups that run one after the other, and the one that runs beside them.

    Parameters
    ----------
    workers : int
        Processes that test side by side, where tests are bound by computing.
    """
    computing = ["tests/unit", "tests/simulation", "tests/integration"]
    return (
        [
            Group("unit to integration", ["-n", str(workers), "--dist", "worksteal", *computing]),
            # Whole federations of processes wait more than they work.
            Group("processes", ["-n", str(workers + 1), "--dist", "loadgroup", "tests/processes"]),
        ],
        # Containers wait for their engine and for each other.
        Group("browser and containers", ["tests/browser", "tests/containers"]),
    )


def begin(group: Group, output: IO[Any] | None) -> subprocess.Popen[bytes]:
    """Start a group's pytest."""
    group.begun = time.monotonic()
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "--durations=40", *group.arguments],
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        # Interrupted once, by `main`, and not by the terminal as well.
        start_new_session=True,
    )


def end(group: Group, process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a group's pytest."""
    group.status = process.wait()
    group.ended = time.monotonic()


def main() -> int:
    """Run all groups and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=3, help="processes that test side by side (3)")
    in_turn, beside = groups(parser.parse_args().workers)
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as kept:
        try:
            other = begin(beside, kept)
            running.append(other)
            for group in in_turn:
                print(f"\n--- {group.name}", flush=True)
                running.append(begin(group, None))
                end(group, running[-1])
                if beside.status is None and other.poll() is not None:
                    end(beside, other)
            if beside.status is None:
                end(beside, other)
        except KeyboardInterrupt:
            # Each ends what it started.
            for process in running:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    process.wait()
            return 130
        print(f"\n--- {beside.name}", flush=True)
        kept.seek(0)
        sys.stdout.write(kept.read().decode(errors="replace"))
    for group in (*in_turn, beside):
        how = "passed" if group.status == 0 else f"FAILED with status {group.status}"
        print(f"{group.name}: {how} in {group.ended - group.begun:.0f} s")
    return int(any(group.status != 0 for group in (*in_turn, beside)))


if __name__ == "__main__":
    raise SystemExit(main())
