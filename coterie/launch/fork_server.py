"""A fork server, which imports the services' modules once and forks each service process.

Imports are most of the cost of starting a service; a launcher that starts many on one machine pays them once.  The
server forks while it has no thread and no connection.  Each forked service runs the same command as it would alone,
with its own environment, session and log.  (The fork server of ``multiprocessing`` imports the launcher's main module
again in every child, and its children may have no worker processes.)
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
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn, Protocol

__all__ = ["ChildProcess", "ForkServer", "Forked", "fork_server"]

_PACKET = 1 << 17
"""Longest message between launcher and fork server, bytes."""

_LOOK_S = 0.5

_SET_NAME = 15  # PR_SET_NAME of prctl(2)

_IMPORTED = (
    "coterie.cli.main",
    "coterie.config.load",
    "coterie.process.runtime",
    "alembic.command",
    "alembic.config",
    "cryptography.hazmat.backends.openssl.backend",
    "importlib.resources.readers",
    "numpy.ma",
    "pydantic.type_adapter",
    "sqlalchemy.dialects.sqlite",
)
"""Modules that every service imports while it starts; the fork server imports them ahead."""


class ChildProcess(Protocol):
    """A child process, with the part of `subprocess.Popen`'s interface that the launcher uses."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Exit status, or the negative number of the signal that ended the process; None while unknown."""
        ...

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status; raise `subprocess.TimeoutExpired` after the time, seconds."""
        ...

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        ...

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        ...


class Forked:
    """A process that the fork server has forked; implements `ChildProcess`."""

    def __init__(self, server: ForkServer, pid: int, handle: int) -> None:
        self._server = server
        # A pidfd stands for this process even after its number is given to another.
        self._handle = handle
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        if self.returncode is None:
            status = self._server.status_of(self.pid)
            # Told once: another thread may have been told a moment ago, and then this one is told of nothing.
            if status is not None:
                self.returncode = status
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process's end and return its exit status.

        Raises
        ------
        subprocess.TimeoutExpired
            The process still runs after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        while (status := self.poll()) is None:
            left = float("inf") if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            # Look again at intervals: the fork server itself may have ended.
            if ended.poll(1e3 * min(left, _LOOK_S)):
                # The fork server reports the status a moment after the process has ended.
                time.sleep(0.001)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, sig)

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._handle)


class ForkServer:
    """The launcher's side of the fork server: starts it, and asks it to fork services.

    Parameters
    ----------
    environment : mapping
        Environment of the fork server's process.  Variables that modules read on import hold for all its services.
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
        """Process id of the fork server, the parent of the services."""
        return self._process.pid

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Fork a process that runs ``coterie`` with the arguments and appends its output to a log.

        Raises
        ------
        OSError
            The fork server has ended, or cannot fork.
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
                    raise BrokenPipeError("the fork server of service processes has ended")
                message = json.loads(packet)
                if "error" in message:
                    raise OSError(message["error"], os.strerror(message["error"]))
                if handles:
                    # The process id may have been another's, whose exit status nobody collected.
                    self._ended.pop(message["pid"], None)
                    return Forked(self, message["pid"], handles[0])
                self._ended[message["pid"]] = message["status"]

    def status_of(self, pid: int) -> int | None:
        """Return the exit status of a process, once; None while it runs."""
        with self._lock:
            while pid not in self._ended:
                try:
                    packet = self._channel.recv(_PACKET, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return None
                except ConnectionError:
                    packet = b""
                if not packet:
                    # Services whose parent has ended stop by themselves; their exit status is lost.
                    return -signal.SIGHUP
                message = json.loads(packet)
                self._ended[message["pid"]] = message["status"]
            return self._ended.pop(pid)

    def close(self) -> None:
        """Kill the fork server, even in the middle of its imports; the services it forked notice and end."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer | None:
    """Return this process's fork server, started by the first call; None on systems without process handles (pidfd)."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return None
    one = ForkServer({key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")})
    atexit.register(one.close)
    return one


# --- in the fork server ----------------------------------------------------------------------------------------------


def _import_services() -> None:
    """Import the services' modules; a service that fails to import reports that when it is started."""
    # Next to nothing of what is imported is garbage, and looking for it a tenth of the work.
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    for service in entry_points(group="coterie.services"):
        with contextlib.suppress(ImportError, AttributeError):
            service.load()
    # Forked services parse their command line with it.
    importlib.import_module("coterie.cli.main").tree()
    gc.collect()
    # Objects that exist now are never collected, so a child's collector does not write to (and copy) their pages.
    gc.freeze()
    gc.enable()


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork a process per request; return the request in the child, and None in the fork server at the end."""
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
    """Turn a forked process into a service's: own session, folder, environment, standard streams and name."""
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
    # A name for the list of processes, which shows the fork server's command line.
    ctypes.CDLL(None).prctl(
        _SET_NAME, " ".join(sys.argv[:3]).replace("coterie serve", "coterie").encode()[:15]
    )


def _run_to_its_end() -> NoReturn:
    """Run the command, and end the process as the interpreter would but for freeing every object.

    A forked process shares the pages of its objects with the fork server, and would copy them all to free what is on
    them: a tenth of a second of a processor, a good part of what a service takes that lives for seconds.
    """
    status: object = 0
    try:
        runpy.run_module("coterie", run_name="__main__", alter_sys=True)
    except SystemExit as exit_:
        status = exit_.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    # As the interpreter does: threads first, which may use what is closed at exit.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status or 0)


def _main() -> None:
    before = dict(os.environ)
    _import_services()
    set_by_imports = {key: value for key, value in os.environ.items() if key not in before}
    request: dict[str, Any] | None = None
    with socket.socket(fileno=int(sys.argv[1])) as channel, contextlib.suppress(BrokenPipeError):
        request = _serve(channel)
    if request is not None:
        _become(request, set_by_imports)
        _run_to_its_end()


if __name__ == "__main__":
    _main()
