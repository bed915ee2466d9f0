"""Service processes as children of the launcher: started, watched, stopped by their own id."""

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
from coterie.launch.fork_server import Started, nursery
from coterie.process.runtime import GRACE_S, PARENT_VARIABLE

__all__ = ["Child", "free_port", "start", "toml"]


_LOWEST_PORT = 10_240
_KEPT_PORTS = 256
_given: dict[int, socket.socket] = {}


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody has at this moment, and keep it from other launchers.

    Services bind it only when they have started.  So it is taken from below the ports that the system itself gives to
    connections, one of which might have it by then, and on Linux a socket of this process keeps it: who asks for any
    free port does not get it, while a service, which binds with ``SO_REUSEADDR`` as servers do, has it beside a socket
    that does not listen.  The last 256 are kept.

    Raises
    ------
    OSError
        There is none, or none may be had at this address.
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
            # Only now: bound with it, it would share the port with others who keep it in this way.
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
    """Write a flat or nested dictionary as TOML: strings, numbers, truth values, lists of tables, tables."""
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


def start(arguments: Sequence[str], log: Path) -> Started:
    """Start ``coterie`` with some arguments as a process that ends with this one.

    It is forked by this process's nursery; where there is none, it is a command of its own.

    Parameters
    ----------
    arguments : sequence of str
    log : Path
        File to which its standard streams are appended.
    """
    shared = nursery()
    if shared is not None:
        # As a command of its own it says itself what is wrong.
        with contextlib.suppress(OSError):
            return shared.start(arguments, _environment(shared.pid), log)
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "coterie", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            # Signals for the launcher's terminal are the launcher's; it stops its children itself.
            start_new_session=True,
            env=_environment(os.getpid()),
        )


@dataclass
class Child:
    """One service process.

    Parameters
    ----------
    role : str
        Its role.
    name : str
        Its name.
    folder : Path
        Where its configuration, log and state are.
    """

    role: str
    name: str
    folder: Path
    process: Started | None = field(default=None, repr=False)

    @property
    def party(self) -> str:
        """Role and name."""
        return f"{self.role}/{self.name}"

    @property
    def state(self) -> Path:
        """State folder of the service."""
        return self.folder / "state"

    @property
    def log(self) -> Path:
        """What the process wrote."""
        return self.folder / "log.jsonl"

    def configure(self, values: dict[str, Any]) -> None:
        """Write the configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {"name": self.name, "state": self.state, **values}
        (self.folder / "config.toml").write_text(toml(settings))

    def start(self, *sets: str) -> None:
        """Start the process; again after it has ended.

        Parameters
        ----------
        *sets : str
            ``key=value``, stronger than the configuration.
        """
        named = [f"--set={text}" for text in sets]
        config = str(self.folder / "config.toml")
        self.process = start(["serve", self.role, *named, "--config", config], self.log)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """End the process as a crash would: no warning, nothing finished."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def stop(self) -> None:
        """Ask the process to stop, and insist when it does not within its grace."""
        if self.process is None:
            return
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self.process.wait, GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self.kill()

    def last_words(self) -> str:
        """Return what the log says last about an error, to say why a process ended."""
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
            When it has ended; with the last line of its log.
        """
        if self.process is not None and not self.alive:
            raise RunError(
                f"{self.party} ended with status {self.process.returncode}: {self.last_words()}",
                hint=f"its whole log: {self.log}",
            )

    def account(self) -> dict[str, Any] | None:
        """Return the account that the process left when it stopped; None when it was killed."""
        try:
            account: dict[str, Any] = json.loads((self.state / "account.json").read_text())
        except (OSError, ValueError):
            return None
        return account
