"""A process that has imported what services need, and forks each of them from itself.

Most of what it costs to start a service is its imports.  Whoever starts many on one machine pays them once.  It forks
before it has a thread or a connection, and each service then runs the same command as it would alone, with its own
environment, its own session and its own log.  (The fork server of ``multiprocessing`` imports the launcher's main
module again in every child, and its children may have no worker processes.)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Forked", "Nursery", "Started", "nursery"]

_PACKET = 1 << 17
"""Longest message between launcher and nursery, bytes."""

_LOOK_S = 0.5

_SET_NAME = 15  # PR_SET_NAME of prctl(2)


class Started(Protocol):
    """A process that was started: what the launcher uses of `subprocess.Popen`."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Exit status once that is known; the negative number of the signal that ended it."""
        ...

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it has ended; raises `subprocess.TimeoutExpired`."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        ...

    def kill(self) -> None:
        """End it without a warning."""
        ...


class Forked:
    """A process that a nursery has forked; `Started`."""

    def __init__(self, nursery: Nursery, pid: int, handle: int) -> None:
        self._nursery = nursery
        # It stays this process's, whoever gets its number later.
        self._handle = handle
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.status_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it has ended.

        Raises
        ------
        subprocess.TimeoutExpired
            When it still runs after so many seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        while (status := self.poll()) is None:
            left = float("inf") if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            # Not for longer at once: the nursery itself may have ended.
            if ended.poll(1e3 * min(left, _LOOK_S)):
                # It tells the status a moment later.
                time.sleep(0.001)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, sig)

    def kill(self) -> None:
        """End it without a warning."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._handle)


class Nursery:
    """The launcher's side.

    Parameters
    ----------
    environment : mapping
        Of the nursery: what is read when modules are imported is the same for all its services.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **environment},
            )

    @property
    def pid(self) -> int:
        """Process id: the parent of what it forks."""
        return self._process.pid

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Fork a process that runs ``coterie`` with some arguments and appends what it says to a log.

        Raises
        ------
        OSError
            When the nursery is gone, or cannot fork.
        """
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
            "log": str(log.absolute()),
        }
        with self._lock:
            self._channel.send(json.dumps(request).encode())
            while True:
                packet, handles, _, _ = socket.recv_fds(self._channel, _PACKET, 1)
                if not packet:
                    raise BrokenPipeError("the nursery of service processes has ended")
                message = json.loads(packet)
                if "error" in message:
                    raise OSError(message["error"], os.strerror(message["error"]))
                if handles:
                    # The number may have been another's, for whose end nobody asked.
                    self._ended.pop(message["pid"], None)
                    return Forked(self, message["pid"], handles[0])
                self._ended[message["pid"]] = message["status"]

    def status_of(self, pid: int) -> int | None:
        """Return the exit status of a process; None while it runs.  It is told once."""
        with self._lock:
            while pid not in self._ended:
                try:
                    packet = self._channel.recv(_PACKET, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return None
                except ConnectionError:
                    packet = b""
                if not packet:
                    # Its processes end as those do whose launcher is gone; how, nobody knows any more.
                    return -signal.SIGHUP
                message = json.loads(packet)
                self._ended[message["pid"]] = message["status"]
            return self._ended.pop(pid)

    def close(self) -> None:
        """End the nursery, also in the middle of its imports; what it forked notices, and ends."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


@functools.cache
def nursery() -> Nursery | None:
    """Return this process's nursery, started with the first call; None where the system has no handles of processes."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return None
    one = Nursery({key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")})
    atexit.register(one.close)
    return one


# --- in the nursery ----------------------------------------------------------------------------------------------


def _import_services() -> None:
    """Import what services need; one that cannot be imported says so itself when it is started."""
    for name in ("coterie.cli.main", "coterie.config.load", "coterie.process.runtime", "alembic.command"):
        importlib.import_module(name)
    for service in entry_points(group="coterie.services"):
        with contextlib.suppress(ImportError, AttributeError):
            service.load()
    gc.collect()
    # What is there now stays; it is not copied because its neighbours are collected.
    gc.freeze()


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork what the launcher asks for; return the request in the child, None in the nursery when it is over."""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        running: dict[int, int] = {}
        while True:
            for key, _ in selector.select():
                if key.fd in running:
                    _tell_end(channel, running.pop(key.fd), key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    continue
                packet = channel.recv(_PACKET)
                if not packet:
                    return None
                try:
                    pid = os.fork()
                except OSError as error:
                    channel.send(json.dumps({"error": error.errno}).encode())
                    continue
                if not pid:
                    for handle in running:
                        os.close(handle)
                    request: dict[str, Any] = json.loads(packet)
                    return request
                handle = os.pidfd_open(pid)
                running[handle] = pid
                selector.register(handle, selectors.EVENT_READ)
                socket.send_fds(channel, [json.dumps({"pid": pid}).encode()], [handle])


def _tell_end(channel: socket.socket, pid: int, handle: int) -> None:
    end = os.waitid(os.P_PIDFD, handle, os.WEXITED)
    if end is None:
        raise AssertionError("a process has ended, and there is nothing to be told of it")
    status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    channel.send(json.dumps({"pid": pid, "status": status}).encode())


def _become(request: Mapping[str, Any], set_by_imports: Mapping[str, str]) -> None:
    """Make a process of its own of this one: session, folder, environment, standard streams, name."""
    os.setsid()
    os.chdir(request["folder"])
    streams = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666),
    )
    for stream, places in zip(streams, ((0,), (1, 2)), strict=True):
        for place in places:
            os.dup2(stream, place)
        os.close(stream)
    os.environ.clear()
    os.environ.update({**set_by_imports, **request["environment"]})
    sys.argv = ["coterie", *request["arguments"]]
    # For those who look at the list of processes: the command line there is the nursery's.
    ctypes.CDLL(None).prctl(
        _SET_NAME, " ".join(sys.argv[:3]).replace("coterie serve", "coterie").encode()[:15]
    )


def _main() -> None:
    before = dict(os.environ)
    _import_services()
    set_by_imports = {key: value for key, value in os.environ.items() if key not in before}
    request: dict[str, Any] | None = None
    with socket.socket(fileno=int(sys.argv[1])) as channel, contextlib.suppress(BrokenPipeError):
        request = _serve(channel)
    if request is not None:
        _become(request, set_by_imports)
        runpy.run_module("coterie", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
