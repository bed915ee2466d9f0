"""Client host on another machine: its files arrive as bytes, its service runs as a child process, its files go back.

The launcher's side, `coterie.launch.ray_cluster`, makes one `NodeHost` an actor of Ray for each client host.  Nothing
here imports Ray.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path, PurePosixPath

from coterie.launch.children import free_port, new_interpreter
from coterie.process.runtime import GRACE_S, in_use
from coterie.wire.versions import release

__all__ = ["AUTHORITY", "CONFIG", "ENDING_S", "Files", "NodeHost", "packed", "unpack"]

Files = dict[str, tuple[int, bytes]]
"""Mode and content of each file of a folder, by its path within, with slashes."""

AUTHORITY = "ca.pem"
"""Name of the file with the authority's certificate among a host's files."""

CONFIG = "config.toml"

ENDING_S = GRACE_S + 5
"""Longest time for a service to end after SIGTERM, seconds; then it is killed."""

_FREE_S = 120.0
"""Longest wait until the lock on a state is given up, seconds: NFS keeps the locks of a lost machine for 90."""

_LOG = "log.jsonl"
_STATE = "state"


def packed(folder: Path) -> Files:
    """Return the files of a folder and of all folders in it."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mode & 0o777, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def unpack(files: Files, folder: Path) -> None:
    """Write files into a folder, over those that are there; folders get mode 0700.

    Raises
    ------
    ValueError
        A path leads out of the folder.
    """
    for name, (mode, content) in files.items():
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts:
            raise ValueError(f"{name!r} leads out of the folder")
        path = folder / parts
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(content)
        path.chmod(mode)


class NodeHost:
    """A client host's process on the machine on which this object lives.

    Parameters
    ----------
    name : str
        Name of the host.
    files : dict
        Its configuration, users' data, token and state, and the authority's certificate as `AUTHORITY`.
    kept : str
        Folder, shared by the nodes, in which the host keeps its files; it goes on from files that are there already.
        Empty: a temporary folder of this machine, removed at the end.
    """

    def __init__(self, name: str, files: Files, kept: str) -> None:
        self._kept = kept
        if kept:
            self._folder = Path(kept)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            self._folder = Path(tempfile.mkdtemp(prefix=f"coterie-{name}-"))
        # The configuration is written last: files with it are whole.
        if not (self._folder / CONFIG).is_file():
            unpack({key: one for key, one in files.items() if key != CONFIG}, self._folder)
            unpack({CONFIG: files[CONFIG]}, self._folder)
        self._log = self._folder / _LOG
        self._read = self._log.stat().st_size if self._log.is_file() else 0
        self._process: subprocess.Popen[bytes] | None = None
        self._free_by: float | None = None

    def release(self) -> str:
        """Return the release of Coterie that is installed here."""
        return release()

    def start(self) -> None:
        """Start the service, for the first time or after it has ended; as soon as no other process uses its state."""
        self._process = None
        self._free_by = time.monotonic() + _FREE_S
        self._start_if_free()

    def _start_if_free(self) -> None:
        state = self._folder / _STATE
        # In a shared folder a process of a node that is gone may still run.  The service itself refuses a state that
        # is in use, and says so.
        if self._free_by is None or (in_use(state) and time.monotonic() < self._free_by):
            return
        self._free_by = None
        sets = {
            "state": state,
            "listen": f"127.0.0.1:{free_port()}",
            "enrol.ca_file": self._folder / AUTHORITY,
            "enrol.token_file": self._folder / "token",
        }
        named = [f"--set={key}={str(value)!r}" for key, value in sets.items()]
        arguments = ["serve", "client", *named, "--config", str(self._folder / CONFIG)]
        self._process = new_interpreter(arguments, self._log)

    def look(self) -> tuple[int | None, bytes]:
        """Return the exit status, None while the process runs, and what it has logged since the last look."""
        self._start_if_free()
        status = None if self._process is None else self._process.poll()
        return status, self._new_lines()

    def signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> tuple[int | None, bytes, Files]:
        """End the process and return its status, what it logged since the last look, and its state; leave no file.

        Files that a process of a node that is gone still uses stay.
        """
        self._free_by = None
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        status, log = self.look()
        state = self._folder / _STATE
        files = packed(state) if state.is_dir() else {}
        if in_use(state):
            return status, log, files
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            # The last host of a run takes the run's folder along; a temporary one lies among others.
            if self._kept:
                self._folder.parent.rmdir()
        return status, log, files

    def _new_lines(self) -> bytes:
        try:
            with self._log.open("rb") as stream:
                stream.seek(self._read)
                found = stream.read()
        except FileNotFoundError:
            return b""
        self._read += len(found)
        return found
