"""A real PostgreSQL server for tests, of Debian's package or whatever is on the PATH, run by a user without rights."""

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coterie.launch.children import free_port

USER, PASSWORD = "coterie", "kept in a file"  # pragma: allowlist secret
_NUMBERS = itertools.count()
_SOON_S = 60.0


def _programs():
    """Return the folder of the server's programs; skips where there is none."""
    found = shutil.which("initdb")
    folders = [*Path("/usr/lib/postgresql").glob("*/bin"), *([Path(found).resolve().parent] if found else [])]
    needed = ("initdb", "postgres", "pg_isready", "psql")
    folders = [folder for folder in folders if all((folder / name).exists() for name in needed)]
    if not folders:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    return folders[-1]


HOST = "db.coterie.test"
"""Name of a server with TLS in its certificate; nobody resolves it."""


def authority(folder, name):
    """Make an authority in a folder; return its certificate's file, and what signs for a name."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)

    def certificate(subject, public, *extensions):
        builder = x509.CertificateBuilder(
            issuer,
            subject,
            public,
            x509.random_serial_number(),
            now - timedelta(days=1),
            now + timedelta(days=1),
        )
        for one in extensions:
            builder = builder.add_extension(one, critical=isinstance(one, x509.BasicConstraints))
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    path = folder / f"{name}.pem"
    path.write_bytes(certificate(issuer, key.public_key(), x509.BasicConstraints(ca=True, path_length=0)))

    def sign(host):
        own = ec.generate_private_key(ec.SECP256R1())
        called = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server")])
        names = x509.SubjectAlternativeName([x509.DNSName(host)])
        pem = own.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return certificate(called, own.public_key(), names), pem

    return path, sign


class Server:
    """One server with a folder of its own; `coterie` may make databases and comes with a password.

    With ``tls`` it has a certificate for `HOST` of an authority of its own, and lets nobody in without TLS.  With a
    ``source``, a server that runs, it is a streaming replica of that one until `promote`.
    """

    def __init__(self, *, tls=False, source=None):
        self._programs = _programs()
        self.folder = Path(tempfile.mkdtemp(prefix="coterie-postgres-"))
        self._data = self.folder / "data"
        self.account = None
        if os.geteuid() == 0:
            # The server refuses to run as root.
            self.account = next((name for name in ("postgres", "nobody") if _known(name)), None)
            shutil.chown(self.folder, self.account)
        self.port = free_port()
        self.password_file = self.folder / "password"
        self.password_file.write_text(f"{PASSWORD}\n")
        self.password_file.chmod(0o644)
        self._process = None
        self.ca_file = None
        if source is not None:
            self._run(
                "pg_basebackup", "-h", "127.0.0.1", "-p", str(source.port), "-U", USER, "-D", str(self._data),
                "--write-recovery-conf", "--checkpoint", "fast", "--no-sync",
            )  # fmt: skip
            return
        self._run(
            "initdb", "--no-sync", "--encoding", "UTF8", "--locale", "C", "--username", USER,
            "--pwfile", str(self.password_file), "--auth", "scram-sha-256", "--pgdata", str(self._data),
        )  # fmt: skip
        if tls:
            self._secure()

    def _secure(self):
        self.ca_file, sign = authority(self.folder, "authority")
        for name, content in zip(("server.crt", "server.key"), sign(HOST), strict=True):
            path = self._data / name
            path.write_bytes(content)
            path.chmod(0o600)
            shutil.chown(path, self.account or os.geteuid())
        rules = self._data / "pg_hba.conf"
        rules.write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")

    def _as_account(self, *command):
        return (
            ["setpriv", "--reuid", self.account, "--clear-groups", *command] if self.account else [*command]
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
            "ssl": "off" if self.ca_file is None else "on",
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

    def kill(self):
        """End the server and its processes as a machine that fails would."""
        _send(self.processes(), signal.SIGKILL)
        self._process.wait(_SOON_S)

    def copy(self, folder):
        """Copy the data of a server that was stopped."""
        shutil.copytree(self._data, folder)

    def put_back(self, folder):
        """Put a stopped server back to a copy of its data."""
        shutil.rmtree(self._data)
        shutil.copytree(folder, self._data)
        if self.account is not None:
            for path in (self._data, *self._data.rglob("*")):
                shutil.chown(path, self.account)

    # --- replicas ----------------------------------------------------------------------------------------------

    def waits_for_replica(self):
        """Confirm no transaction any more before a replica has it: a synchronous one."""
        self._until("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'", "1")
        self._set("synchronous_standby_names", "*")
        self._until("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'", "1")

    def falls_behind(self):
        """Receive nothing any more of the server that this one is a replica of."""
        self._set("primary_conninfo", "")
        self._until("SELECT count(*) FROM pg_stat_wal_receiver", "0")

    def promote(self):
        """Make a replica a server that takes writes."""
        self.sql("SELECT pg_promote()")
        self._until("SELECT pg_is_in_recovery()", "f")

    def _set(self, name, value):
        self.sql(f"ALTER SYSTEM SET {name} = '{value}'")
        self.sql("SELECT pg_reload_conf()")

    def _until(self, query, wanted):
        deadline = time.monotonic() + _SOON_S
        while (found := self.sql(query).strip()) != wanted:
            assert time.monotonic() < deadline, f"{query}: {found}"
            time.sleep(0.05)

    def processes(self):
        """Return the ids of the server's processes."""
        first = self._process.pid
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        return [first, *map(int, children)]

    @contextlib.contextmanager
    def hung(self):
        """Let the server answer nothing meanwhile, and keep its connections."""
        stopped = self.processes()
        _send(stopped, signal.SIGSTOP)
        try:
            yield
        finally:
            _send(stopped, signal.SIGCONT)

    def sql(self, statement, database="postgres"):
        return self._run(
            "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", database, "-Atqc", statement
        )

    def database(self, encoding="UTF8", space=None):
        """Make a database, whose tables are in a folder of their own where one is given; return its name."""
        name = f"cos{next(_NUMBERS)}"
        within = ""
        if space is not None:
            self.sql(f"CREATE TABLESPACE {name} LOCATION '{space}'")
            within = f" TABLESPACE {name}"
        self.sql(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0{within}")
        return name

    def restored(self, database, dump):
        """Put a database back to what `dump` wrote, while services use it: beside it first, then in its place."""
        beside, aside = f"{database}_beside", f"{database}_aside"
        self.sql(f"CREATE DATABASE {beside} ENCODING 'UTF8' TEMPLATE template0")
        self._run(
            "pg_restore", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", beside, "--exit-on-error",
            str(dump),
        )  # fmt: skip
        self.sql(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        self.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")
        self.sql(f"ALTER DATABASE {database} RENAME TO {aside}")
        self.sql(f"ALTER DATABASE {beside} RENAME TO {database}")
        self.sql(f"DROP DATABASE {aside}")

    def dump(self, database):
        """Dump a database as it is now; return the file."""
        path = self.folder / f"{database}.dump"
        self._run(
            "pg_dump", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-Fc", "-f", str(path), database
        )
        return path

    def keys(self, database, **changes):
        """Return the settings of a database, as in a service's configuration."""
        return {
            "url": self.url("127.0.0.1" if self.ca_file is None else HOST, database),
            "password_file": self.password_file,
            **({"tls": "disable"} if self.ca_file is None else {"ca_file": self.ca_file}),
            **changes,
        }

    def url(self, host, database):
        """Return the URL of a database at a host of this name, which is this machine whatever it is called."""
        return f"postgresql+psycopg://{USER}@{host}:{self.port}/{database}?hostaddr=127.0.0.1"

    def close(self):
        if self._process is not None and self._process.poll() is None:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _send(pids, number):
    for pid in pids:
        # One of them may just have ended: the others get it all the same.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _known(account):
    try:
        pwd.getpwnam(account)
    except KeyError:
        return False
    return True


def keys_of_both(first, second, database, **changes):
    """Return the settings of a database that is on whichever of two servers takes writes."""
    hosts = "&".join(f"host=127.0.0.1:{server.port}" for server in (first, second))
    url = f"postgresql+psycopg://{USER}@/{database}?{hosts}&target_session_attrs=read-write"
    return first.keys(database, url=url, **changes)


@contextlib.contextmanager
def running(**how):
    """Start a server, and end it."""
    server = Server(**how)
    try:
        server.start()
        yield server
    finally:
        server.close()
