"""A real third party for tests: a child process on loopback, with tokens, parties that enrol, and channels to it."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from coterie.config.base import EnrolSettings, ServiceSettings
from coterie.crypto.authority import logical_name, new_token
from coterie.crypto.identity import Bundle, Identity
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import enrol, identities
from coterie.net.meter import Meter
from coterie.store.tokens import append_token
from coterie.wire.v1.thirdparty_pb2_grpc import EnrolmentStub, KeyDirectoryStub

START_S = 30.0
"""How long a service may take to become healthy; a machine under load needs some of it."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Enrolled:
    """A party as it is after enrolment."""

    role: str
    settings: ServiceSettings
    tls: TlsFiles
    identities: tuple[Identity, ...]
    bundles: tuple[Bundle, ...]
    fingerprint: bytes

    @property
    def party(self) -> str:
        return f"{self.role}/{self.settings.name}"

    @property
    def directory_key(self) -> bytes:
        return (self.settings.state / "directory.key").read_bytes()


class ServiceProcess:
    """One service as a child process of the test."""

    def __init__(self, role: str, config: Path, metrics: str) -> None:
        self.role = role
        self.config = config
        self.metrics = metrics
        self.log = config.with_suffix(".log")
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "coterie", "serve", self.role, "--config", str(self.config)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.wait_for_health(True)

    def wait_for_health(self, expected: bool) -> None:
        deadline = time.monotonic() + START_S
        while self.healthy() != expected:
            if not self.running:
                pytest.fail(f"{self.role} ended with {self._child.returncode}:\n{self.log.read_text()}")
            if time.monotonic() > deadline:
                pytest.fail(f"{self.role} did not become {expected=}:\n{self.log.read_text()}")
            time.sleep(0.05)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.metrics}/healthz", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def signal(self, number: signal.Signals) -> int:
        """Send a signal to this child and return its exit status; -9 for a kill."""
        self._child.send_signal(number)
        return self._child.wait(timeout=20)

    def stop(self) -> int:
        return self.signal(signal.SIGTERM)

    def kill(self) -> int:
        return self.signal(signal.SIGKILL)


class ThirdParty(ServiceProcess):
    """A third party, what its operator does, and parties that talk to it."""

    name = "directory"

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        self.state = folder / "thirdparty"
        self.address = f"127.0.0.1:{free_port()}"
        self.enrol_address = f"127.0.0.1:{free_port()}"
        metrics = f"127.0.0.1:{free_port()}"
        keys = {
            "name": self.name,
            "state": str(self.state),
            "listen": self.address,
            "enrol_listen": self.enrol_address,
            "metrics": metrics,
            **settings,
        }
        config = folder / "thirdparty.toml"
        config.write_text("".join(f"{key} = {value!r}\n" for key, value in keys.items()))
        super().__init__("thirdparty", config, metrics)
        self.channels: list[Channel] = []

    @property
    def ca_file(self) -> Path:
        return self.state / "ca.pem"

    def token(self, role: str, name: str, *, participants: int = 10, hours: float = 1.0) -> Path:
        """Make a token as the operator does, and return the file that holds it."""
        secret, record = new_token(role, name, max(0, int(time.time() + hours * 3600)), participants)
        append_token(self.state / "tokens.jsonl", record)
        path = self.folder / f"{role}-{name}-{time.monotonic_ns()}.token"
        path.write_text(f"{secret}\n")
        return path

    def settings(
        self, name: str, token: Path, *, state: Path | None = None, timeout_s: float = 10.0
    ) -> ServiceSettings:
        """Return the settings of a party that enrols here, with a state folder of its own."""
        folder = state or self.folder / f"{name}-{time.monotonic_ns()}"
        folder.mkdir(exist_ok=True, mode=0o700)
        point = EnrolSettings(
            address=self.enrol_address,
            name=self.name,
            ca_file=self.ca_file,
            token_file=token,
            timeout_s=timeout_s,
        )
        return ServiceSettings(name=name, state=folder, listen="127.0.0.1:1", enrol=point)

    async def enrol_with(self, role: str, settings: ServiceSettings, participants: int = 0) -> Enrolled:
        """Enrol a party with given settings."""
        tls = TlsFiles(settings.state / "tls")
        drawn = identities(settings.state, participants) if participants else []
        bundles = await enrol(role, settings, tls, drawn)
        return Enrolled(role, settings, tls, tuple(drawn), bundles, tls.identity().fingerprint)

    async def enrol(
        self, role: str, name: str, participants: int = 0, *, allowed: int | None = None
    ) -> Enrolled:
        """Enrol a party with a new token."""
        token = self.token(role, name, participants=participants if allowed is None else allowed)
        return await self.enrol_with(role, self.settings(name, token), participants)

    def channel(self, party: Enrolled | TlsFiles) -> Channel:
        """Open a channel to the mutual TLS listener; closed when the test ends."""
        tls = party.tls if isinstance(party, Enrolled) else party
        return self._keep(self.address, tls.channel_credentials())

    def anonymous_channel(self, address: str) -> Channel:
        """Open a channel without a client certificate."""
        return self._keep(address, grpc.ssl_channel_credentials(root_certificates=self.ca_file.read_bytes()))

    def directory(self, party: Enrolled | TlsFiles) -> KeyDirectoryStub:
        return self.channel(party).stub(KeyDirectoryStub)

    def enrolment(self) -> EnrolmentStub:
        return self.anonymous_channel(self.enrol_address).stub(EnrolmentStub)

    def _keep(self, address: str, credentials: grpc.ChannelCredentials) -> Channel:
        channel = connect(
            address,
            credentials,
            tls_name=logical_name("thirdparty", self.name),
            peer=f"thirdparty/{self.name}",
            meter=Meter(),
        )
        self.channels.append(channel)
        return channel

    def handshake(self, tls: TlsFiles) -> None:
        """Make a TLS connection to the mutual TLS listener with the standard library; raises what TLS raises."""
        host, _, port = self.address.rpartition(":")
        context = ssl.create_default_context(cafile=str(self.ca_file))
        context.load_cert_chain(tls.chain, tls.key)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=logical_name("thirdparty", self.name)) as secured,
        ):
            # With TLS 1.3 the server's refusal of a client certificate arrives with the first read.
            secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            if not secured.recv(1):
                raise ConnectionResetError("closed by the server")


async def _release(service: ThirdParty) -> None:
    while service.channels:
        await service.channels.pop().close()


@pytest.fixture
async def start_third_party(tmp_path_factory):
    """Return a function that starts a third party of the test's own; all are stopped at the end."""
    started: list[ThirdParty] = []

    def start(**settings: object) -> ThirdParty:
        service = ThirdParty(tmp_path_factory.mktemp("thirdparty"), **settings)
        started.append(service)
        service.start()
        return service

    yield start
    for service in started:
        await _release(service)
        if service.running:
            service.stop()


@pytest.fixture(scope="session")
def shared_third_party(tmp_path_factory):
    service = ThirdParty(tmp_path_factory.mktemp("thirdparty"))
    service.start()
    yield service
    service.stop()


@pytest.fixture
async def third_party(shared_third_party):
    """A running third party, the same for all tests that leave it running: enrol under a name of your own."""
    yield shared_third_party
    await _release(shared_third_party)
