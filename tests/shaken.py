"""Run pytest while every process of the tests stands still now and then, as on a machine that is suspended or busy.

    python -m tests.shaken --still 1.5 --every 7 tests/processes -n 4

A test that fails here and passes otherwise relies on how long something takes.  Linux only.
"""

import argparse
import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_MARK = "COTERIE_SHAKEN"


def marked(mark: str) -> Iterator[int]:
    """Yield the processes in whose environment the mark was set, hence pytest and all that it started."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def still(process: int) -> bool:
    """Return whether a process is stopped by a signal already."""
    # The state follows the name, which stands in parentheses and may hold any character.
    return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop(mark: str) -> list[int]:
    """Stop all marked processes but those that a test holds still itself; return which."""
    stopped = []
    for process in marked(mark):
        with contextlib.suppress(OSError):
            if not still(process):
                os.kill(process, signal.SIGSTOP)
                stopped.append(process)
    return stopped


def main() -> int:
    """Run pytest and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--still", type=float, default=1.5, help="how long all stand still, seconds on average"
    )
    parser.add_argument("--every", type=float, default=7.0, help="between two such times, seconds on average")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    options, pytest = parser.parse_known_args()
    lengths = random.Random(options.seed)
    mark = secrets.token_hex(8)
    # A session of its own: what ends this program from a terminal ends pytest by a signal that is passed on.
    tests = subprocess.Popen(
        [sys.executable, "-m", "pytest", *pytest], env={**os.environ, _MARK: mark}, start_new_session=True
    )
    times = 0
    try:
        while tests.poll() is None:
            time.sleep(lengths.uniform(0.5, 1.5) * options.every)
            stopped = stop(mark)
            times += 1
            try:
                time.sleep(lengths.uniform(0.5, 1.5) * options.still)
            finally:
                for process in stopped:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGCONT)
    except KeyboardInterrupt:
        tests.send_signal(signal.SIGINT)
        tests.wait()
    print(f"all processes stood still {times} times, {options.still} s on average", flush=True)
    return tests.returncode


if __name__ == "__main__":
    raise SystemExit(main())
