"""``coterie run`` as a child of a test, with everything that it starts; processes are known by their id alone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from .patience import PAUSE_S, WAIT_S, until_next

CONFIG = """
name = "command"
[data.synthetic]
users = 60
items = 120
interactions = 3000
[drift]
dim = 8
epochs = 4
[federation]
owners = 2
hosts = 2
min_users = 20
"""


def descendants(pid: int) -> list[int]:
    """Return the children of a process and theirs."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: Iterable[int], within_s: float) -> bool:
    """Whether processes end within some time."""
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > deadline:
            return False
        pids = left
        time.sleep(PAUSE_S)
    return True


class Command:
    """``coterie run`` in a session of its own.

    Parameters
    ----------
    folder : Path
        Where it runs: ``runs`` will be in it.
    *arguments : str
        After the file.
    config : str
        What the file holds.
    python : path-like
        Of the environment in which Coterie is installed.
    """

    def __init__(
        self, folder: Path, *arguments: str, config: str = CONFIG, python: Path | str = sys.executable
    ) -> None:
        self.folder = folder
        (folder / "run.toml").write_text(config)
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [python, "-P", "-m", "coterie", "run", "run.toml", *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                # A shell lets what it starts in the background ignore Ctrl-C, and the tests may run there.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                # Variables that configure a run are none of this one's.
                env={key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")},
            )
        self.pid = self.process.pid
        self.children: set[int] = set()

    @property
    def out(self) -> str:
        """Text that the command has written to standard output."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """Text that the command has written to standard error."""
        return self._err.read_text()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait while it runs, and take down all processes below on the way."""
        deadline = time.monotonic() + WAIT_S
        looked_at = time.monotonic()
        while not condition():
            self.children.update(descendants(self.pid))
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"no {what}; {self.process.returncode=}\n{self.out}\n{self.err}")
            time.sleep(until_next(looked_at))
            looked_at = time.monotonic()
        self.children.update(descendants(self.pid))

    def until_it_says(self, text: str) -> None:
        """Wait for a line of progress."""
        self.until(lambda: text in self.out + self.err, f"line {text!r}")

    def child(self, folder: str) -> int | None:
        """Return the id of the service whose folder has this name, None before it is started."""
        for pid in descendants(self.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/fd/1").readlink().match(f"{folder}/log.jsonl"):
                    return pid
        return None

    def wait(self) -> int:
        """Wait for its end and return the exit status."""
        deadline = time.monotonic() + 2 * WAIT_S
        while self.process.poll() is None:
            looked_at = time.monotonic()
            self.children.update(descendants(self.pid))
            if looked_at > deadline:
                pytest.fail(f"it does not end:\n{self.out}\n{self.err}")
            time.sleep(until_next(looked_at))
        return self.process.returncode

    @property
    def run(self) -> Path:
        """The folder of the run."""
        (folder,) = (self.folder / "runs").iterdir()
        return folder

    def report(self) -> dict[str, Any]:
        """Return ``report.json``."""
        return json.loads((self.run / "report.json").read_text())

    def envelope(self) -> dict[str, Any]:
        """Return the one line on standard output of a command with ``--json``."""
        (line,) = self.out.splitlines()
        return json.loads(line)

    def close(self) -> None:
        """End what is left, by id."""
        for pid in (*self.children, *descendants(self.pid), self.pid):
            if is_running(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
