"""A real PostgreSQL server for tests, of Debian's package or whatever is on the PATH, run by a user without rights."""

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

USER, PASSWORD = "coterie", "kept in a file"  # pragma: allowlist secret
_NUMBERS = itertools.count()
_SOON_S = 30.0


def _programs():
    """Return the folder of the server's programs; skips where there is none."""
    found = shutil.which("initdb")
    folders = [*Path("/usr/lib/postgresql").glob("*/bin"), *([Path(found).resolve().parent] if found else [])]
    needed = ("initdb", "postgres", "pg_isready", "psql")
    folders = [folder for folder in folders if all((folder / name).exists() for name in needed)]
    if not folders:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    return folders[-1]


class Server:
    """One server with a folder of its own; `coterie` may make databases and comes with a password."""

    def __init__(self):
        self._programs = _programs()
        self.folder = Path(tempfile.mkdtemp(prefix="coterie-postgres-"))
        self._data = self.folder / "data"
        self._account = None
        if os.geteuid() == 0:
            # The server refuses to run as root.
            self._account = next((name for name in ("postgres", "nobody") if _known(name)), None)
            shutil.chown(self.folder, self._account)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.password_file = self.folder / "password"
        self.password_file.write_text(f"{PASSWORD}\n")
        self.password_file.chmod(0o644)
        self._process = None
        self._run(
            "initdb", "--no-sync", "--encoding", "UTF8", "--locale", "C", "--username", USER,
            "--pwfile", str(self.password_file), "--auth", "scram-sha-256", "--pgdata", str(self._data),
        )  # fmt: skip

    def _as_account(self, *command):
        return (
            ["setpriv", "--reuid", self._account, "--clear-groups", *command] if self._account else [*command]
        )

    def _run(self, program, *arguments):
        command = self._as_account(str(self._programs / program), *arguments)
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.folder, env=self._environment()
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _environment(self):
        return {"PATH": os.environ["PATH"], "LC_ALL": "C", "PGPASSWORD": PASSWORD}

    def start(self):
        settings = {
            "port": self.port,
            "unix_socket_directories": self.folder,
            "listen_addresses": "127.0.0.1",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = self._as_account(str(self._programs / "postgres"), "-D", str(self._data), *options)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + _SOON_S
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def _answers(self):
        command = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, check=False).returncode == 0

    def stop(self):
        """End the server at once, and its connections with it; what was committed stays."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(_SOON_S)

    def processes(self):
        """Return the ids of the server's processes."""
        first = self._process.pid
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        return [first, *map(int, children)]

    @contextlib.contextmanager
    def hung(self):
        """Let the server answer nothing meanwhile, and keep its connections."""
        stopped = self.processes()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

    def sql(self, statement, database="postgres"):
        return self._run(
            "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", database, "-Atqc", statement
        )

    def database(self, encoding="UTF8"):
        """Make a database and return its name."""
        name = f"cos{next(_NUMBERS)}"
        self.sql(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0")
        return name

    def keys(self, database, **changes):
        """Return the settings of a database, as in a service's configuration."""
        return {
            "url": f"postgresql+psycopg://{USER}@127.0.0.1:{self.port}/{database}",
            "password_file": self.password_file,
            "tls": "disable",
            **changes,
        }

    def close(self):
        if self._process is not None and self._process.poll() is None:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _known(account):
    try:
        pwd.getpwnam(account)
    except KeyError:
        return False
    return True


@contextlib.contextmanager
def running():
    """Start a server, and end it."""
    server = Server()
    try:
        server.start()
        yield server
    finally:
        server.close()
