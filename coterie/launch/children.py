"""Service processes as children of the launcher, which starts, watches and stops them by process id."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.errors import RunError
from coterie.launch.fork_server import ChildProcess, fork_server
from coterie.process.runtime import GRACE_S, PARENT_VARIABLE

__all__ = ["Child", "free_port", "new_interpreter", "start", "toml"]


_CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS"})
"""Signals that a process's own code causes."""
_LOWEST_PORT = 10_240
_KEPT_PORTS = 256
_given: dict[int, socket.socket] = {}


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free now, and reserve it for the service that will bind it.

    A service binds its port only after it has started.  The port therefore lies below the system's ephemeral ports,
    which an outgoing connection might take meanwhile.  On Linux a bound socket of this process also reserves the port:
    a process that asks for any free port does not get it, while a service, which binds with ``SO_REUSEADDR`` as
    servers do, can share it with a socket that does not listen.  The last 256 ports stay reserved.

    Raises
    ------
    OSError
        There is no free port, or the address cannot be bound.
    """
    ephemeral = _first_ephemeral_port()
    for _ in range(1000):
        port = _LOWEST_PORT + secrets.randbelow(ephemeral - _LOWEST_PORT) if ephemeral > _LOWEST_PORT else 0
        kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            kept.bind((host, port))
        except OSError as error:
            kept.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        found = int(kept.getsockname()[1])
        if sys.platform == "linux":
            # Set only after binding: a socket bound with it would share the port with other launchers' reservations.
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            kept.close()
        if found in _given:
            continue
        _given[found] = kept
        if len(_given) > _KEPT_PORTS:
            _given.pop(next(iter(_given))).close()
        return found
    raise OSError(errno.EADDRINUSE, f"no free port on {host}")


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def toml(values: dict[str, Any]) -> str:
    """Return a dictionary as TOML: strings, paths, numbers, truth values, lists and tables; None is left out."""
    plain, tables = [], []
    for key, value in values.items():
        if isinstance(value, dict):
            tables.append(f"\n[{key}]\n{toml(value)}")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            tables += [f"\n[[{key}]]\n{toml(entry)}" for entry in value]
        elif value is not None:
            # A JSON string, number or truth value is TOML as well.
            plain.append(f"{key} = {json.dumps(str(value) if isinstance(value, Path) else value)}\n")
    return "".join(plain) + "".join(tables)


def _environment(parent: int) -> dict[str, str]:
    # A variable that configures the run would override the same key in every service.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
    return {**inherited, PARENT_VARIABLE: str(parent)}


def start(arguments: Sequence[str], log: Path) -> ChildProcess:
    """Start a ``coterie`` command as a child process that ends with this one.

    The child is forked by this process's fork server; on systems without one it is started as a new interpreter.

    Parameters
    ----------
    arguments : sequence of str
    log : Path
        File to which the child's standard output and error are appended.
    """
    shared = fork_server()
    if shared is not None:
        # When the fork server fails, a new interpreter below logs what is wrong.
        with contextlib.suppress(OSError):
            return shared.start(arguments, _environment(shared.pid), log)
    return new_interpreter(arguments, log)


def new_interpreter(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a ``coterie`` command as `start` does, as a new interpreter."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "coterie", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            # A signal from the terminal reaches the launcher alone, which stops its children itself.
            start_new_session=True,
            env=_environment(os.getpid()),
        )


@dataclass
class Child:
    """One service process of a launcher.

    Parameters
    ----------
    role, name : str
        Role and name of the service.
    folder : Path
        Folder of the service's configuration, log and state.
    """

    role: str
    name: str
    folder: Path
    process: ChildProcess | None = field(default=None, repr=False)

    @property
    def party(self) -> str:
        """Role and name, as ``client/host-0``."""
        return f"{self.role}/{self.name}"

    @property
    def state(self) -> Path:
        """State folder of the service."""
        return self.folder / "state"

    @property
    def log(self) -> Path:
        """Log file: the process's standard output and error."""
        return self.folder / "log.jsonl"

    def configure(self, values: dict[str, Any]) -> None:
        """Write the service's ``config.toml``, with name and state folder added."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {"name": self.name, "state": self.state, **values}
        (self.folder / "config.toml").write_text(toml(settings))

    def start(self, *sets: str) -> None:
        """Start the process, for the first time or after it has ended.

        Parameters
        ----------
        *sets : str
            ``key=value`` settings that override the configuration.
        """
        named = [f"--set={text}" for text in sets]
        config = str(self.folder / "config.toml")
        self.process = start(["serve", self.role, *named, "--config", config], self.log)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Kill the process (SIGKILL), as a crash would, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def stop(self) -> None:
        """Send SIGTERM, and kill the process when it has not ended within `GRACE_S` + 5 seconds."""
        if self.process is None:
            return
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self.process.wait, GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self.kill()

    @property
    def crashed(self) -> bool:
        """Whether the process ended by a signal that its own code causes, such as ``SIGSEGV``."""
        return self.killed_by in _CRASHES

    @property
    def lost(self) -> str:
        """Why nothing is known of the process any more; empty on this machine, which always knows."""
        return ""

    @property
    def killed_by(self) -> str:
        """Name of the signal that ended the process, such as ``SIGKILL``; empty if no signal did, or it runs."""
        status = None if self.process is None else self.process.poll()
        if status is None or status >= 0:
            return ""
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"

    def last_words(self) -> str:
        """Return the log's last error line, else its last line, for messages that say why a process ended."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return "it left no log"
        errors = [line for line in lines if line.startswith("error: ")]
        return errors[-1] if errors else lines[-1] if lines else "its log is empty"

    def require_alive(self) -> None:
        """Check that the process runs.

        Raises
        ------
        RunError
            The process has ended; the message holds the signal that ended it, or else the last error of its log.
        """
        name = self.killed_by
        if name in _CRASHES:
            raise RunError(
                f"{self.party} crashed, by {name}: an error in compiled code, of a library or of ours",
                hint=f"its whole log: {self.log}",
            )
        if name:
            memory = "; the system does that when memory runs out" if name == "SIGKILL" else ""
            raise RunError(
                f"{self.party} was ended from outside, by {name}{memory}", hint=f"its whole log: {self.log}"
            )
        if self.process is not None and not self.alive:
            raise RunError(
                f"{self.party} ended with status {self.process.returncode}: {self.last_words()}",
                hint=f"its whole log: {self.log}",
            )

    def account(self) -> dict[str, Any] | None:
        """Return the account (CPU time, calls, memory) that a stopped process left; None when it was killed."""
        try:
            account: dict[str, Any] = json.loads((self.state / "account.json").read_text())
        except (OSError, ValueError):
            return None
        return account
