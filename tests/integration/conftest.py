"""Real services for tests: child processes on loopback with mutual TLS, parties that enrol, and channels to them."""

import asyncio
import contextlib
import json
import random
import resource
import signal
import socket
import sqlite3
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest

from coterie.config.base import EnrolSettings, ServiceSettings
from coterie.crypto.authority import (
    Authority,
    logical_name,
    new_token,
)
from coterie.crypto.identity import Bundle, Identity
from coterie.launch.children import free_port, start
from coterie.launch.fork_server import ChildProcess
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import enrol, identities, saved_bundles
from coterie.net.meter import Meter
from coterie.net.retry import Retry, status_lost
from coterie.net.status import from_rpc_error
from coterie.parties.party import Party
from coterie.store.tokens import append_token
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import (
    operator_pb2,
)
from coterie.wire.v1.operator_pb2_grpc import OperatorStub
from coterie.wire.v1.orchestrator_pb2 import RunPlan
from coterie.wire.v1.thirdparty_pb2_grpc import EnrolmentStub, KeyDirectoryStub

from ..callers import METHODS, answers, call_with_nothing, each, issue, metric_sum
from ..operators import KEYS, signed
from .playing import World

START_S = 60.0
"""How long a service may take to become healthy; a machine under load needs some of it."""

HOST = "127.0.0.1"


def toml(value: object) -> str:
    """Return a value as TOML, tables inline."""
    match value:
        case bool() | int() | float():
            return json.dumps(value)
        case Mapping():
            return "{" + ", ".join(f"{key} = {toml(held)}" for key, held in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(toml, value)) + "]"
        case _:
            return json.dumps(str(value))


@dataclass(frozen=True)
class Enrolled:
    """A party as it is after enrolment."""

    role: str
    settings: ServiceSettings
    tls: TlsFiles
    identities: tuple[Identity, ...]
    bundles: tuple[Bundle, ...]
    fingerprint: bytes

    @classmethod
    def of(cls, service: "ServiceProcess") -> "Enrolled":
        """Return the party that a service is, to speak in its place."""
        settings = ServiceSettings(name=service.name, state=service.state, listen=f"{HOST}:1")
        tls = TlsFiles(service.state / "tls")
        bundles = saved_bundles(service.state)
        drawn = identities(service.state, len(bundles))
        return cls(service.role, settings, tls, tuple(drawn), bundles, tls.identity().fingerprint)

    @property
    def party(self) -> str:
        return f"{self.role}/{self.settings.name}"

    @property
    def directory_key(self) -> bytes:
        return (self.settings.state / "directory.key").read_bytes()


class ServiceProcess:
    """One service as a child process of the test, and the channels that the test opens to it."""

    def __init__(self, role: str, name: str, folder: Path, keys: Mapping[str, object]) -> None:
        self.role, self.name, self.folder = role, name, folder
        self.state = folder / name
        self.address = f"{HOST}:{free_port()}"
        self.metrics = f"{HOST}:{free_port()}"
        self.config = folder / f"{name}.toml"
        self.log = self.config.with_suffix(".log")
        self.channels: list[Channel] = []
        self._child: ChildProcess | None = None
        places = {"name": name, "state": self.state, "listen": self.address, "metrics": self.metrics}
        self.configure({**places, **keys})

    def configure(self, keys: Mapping[str, object]) -> None:
        self.keys = dict(keys)
        self.config.write_text("".join(f"{key} = {toml(value)}\n" for key, value in keys.items()))

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def party(self) -> str:
        return f"{self.role}/{self.name}"

    def start(self, *, healthy: bool = True) -> None:
        self._child = start(["serve", self.role, "--config", str(self.config)], self.log)
        if healthy:
            self.wait_for_health(True)

    def wait_for_health(self, expected: bool) -> None:
        deadline = time.monotonic() + START_S
        while self.healthy() != expected:
            if not self.running:
                pytest.fail(f"{self.role} ended with {self._child.returncode}:\n{self.log.read_text()}")
            if time.monotonic() > deadline:
                pytest.fail(f"{self.role} did not become {expected=}:\n{self.log.read_text()}")
            time.sleep(0.05)

    def wait_for_end(self) -> int:
        """Return the exit status of a service that ends by itself."""
        return self._child.wait(timeout=START_S)

    def healthy(self) -> bool:
        return self._page() == 200

    def answers(self) -> bool:
        """Whether the process tells its health, healthy or not."""
        return self._page() in (200, 503)

    def listens(self) -> bool:
        """Whether the process takes connections for calls, healthy or not."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=2).close()
        except OSError:
            return False
        return True

    def _page(self) -> int:
        try:
            with urllib.request.urlopen(f"http://{self.metrics}/healthz", timeout=2) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all its lines that carry these labels."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=5) as page:
            return metric_sum(page.read().decode(), name, labels)

    def peak_mib(self) -> float:
        """Return the most memory that the process has had, MiB."""
        return self._memory("VmHWM")

    def resident_mib(self) -> float:
        """Return the memory that the process has now, MiB."""
        return self._memory("VmRSS")

    def _memory(self, key: str) -> float:
        lines = Path(f"/proc/{self._child.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self._child.pid}/fd").iterdir()))

    @contextlib.contextmanager
    def store_held(self, database: str) -> Iterator[None]:
        """Let nobody write to a store of the service meanwhile: a write that has begun waits for the end."""
        with contextlib.closing(sqlite3.connect(self.state / database, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def without_room(self) -> Iterator[None]:
        """Let no file of the service grow meanwhile, its log neither."""
        pid = self._child.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    def _waits_for_a_store(self) -> bool:
        """Whether a thread sleeps on a timer: nothing in a service does but SQLite between two tries to lock a store.

        True where the kernel does not tell what threads wait for.
        """
        told = {file.read_text() for file in Path(f"/proc/{self._child.pid}/task").glob("*/wchan")}
        return told <= {"0"} or any("nanosleep" in one for one in told)

    async def give_up_while_held(self, database: str, rpc: str, call: Awaitable[Any]) -> None:
        """Make a call, let the service come to its write, and cancel the call before the write can be made."""
        received = self.metric("coterie_rpc_bytes_total", side="server", rpc=rpc, direction="in")
        finished = self.metric("coterie_rpc_calls_total", side="server", rpc=rpc)
        with self.store_held(database):
            task = asyncio.ensure_future(call)
            async with asyncio.timeout(START_S):
                while (
                    self.metric("coterie_rpc_bytes_total", side="server", rpc=rpc, direction="in") == received
                ):
                    await asyncio.sleep(0.01)
                while not self._waits_for_a_store():
                    await asyncio.sleep(0.01)
                assert not task.done()
                task.cancel()
                while self.metric("coterie_rpc_calls_total", side="server", rpc=rpc) == finished:
                    await asyncio.sleep(0.01)
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await task

    @contextlib.asynccontextmanager
    async def asked(self, rpc: str, *requests: Any) -> AsyncIterator[None]:
        """Wait at the end until requests of an RPC that were made meanwhile have reached the service."""

        def received() -> float:
            return self.metric("coterie_rpc_bytes_total", side="server", rpc=rpc, direction="in")

        expected = await asyncio.to_thread(received) + sum(one.ByteSize() for one in requests)
        yield
        async with asyncio.timeout(START_S):
            while await asyncio.to_thread(received) < expected:
                await asyncio.sleep(0.02)

    def signal(self, number: signal.Signals) -> int:
        """Send a signal to this child and return its exit status; -9 for a kill."""
        self._child.send_signal(number)
        return self._child.wait(timeout=20)

    def pause(self) -> None:
        """Let this child hang until `awake`."""
        self._child.send_signal(signal.SIGSTOP)

    def awake(self) -> None:
        self._child.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        return self.signal(signal.SIGTERM)

    def kill(self) -> int:
        return self.signal(signal.SIGKILL)

    # --- what a test does as somebody who calls ----------------------------------------------------------------

    def channel(self, party: Enrolled | TlsFiles) -> Channel:
        """Open a channel to the mutual TLS listener; closed when the test ends."""
        tls = party.tls if isinstance(party, Enrolled) else party
        return self._keep(self.address, tls.channel_credentials())

    def _keep(self, address: str, credentials: grpc.ChannelCredentials) -> Channel:
        channel = connect(
            address,
            credentials,
            tls_name=logical_name(self.role, self.name),
            peer=self.party,
            meter=Meter(),
        )
        self.channels.append(channel)
        return channel

    async def release(self) -> None:
        """Close the channels that were opened to this service."""
        while self.channels:
            await self.channels.pop().close()

    def handshake(self, tls: TlsFiles) -> None:
        """Make a TLS connection to the mutual TLS listener with the standard library; raises what TLS raises."""
        host, _, port = self.address.rpartition(":")
        context = ssl.create_default_context(cafile=str(tls.authority))
        context.load_cert_chain(tls.chain, tls.key)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=logical_name(self.role, self.name)) as secured,
        ):
            # With TLS 1.3 the server's refusal of a client certificate arrives with the first read.
            secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            if not secured.recv(1):
                raise ConnectionResetError("closed by the server")


class ThirdParty(ServiceProcess):
    """A third party, what its operator does, and parties that talk to it."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.enrol_address = f"{HOST}:{free_port()}"
        super().__init__("thirdparty", "directory", folder, {"enrol_listen": self.enrol_address, **settings})

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

    def enrol_section(self, token: Path, timeout_s: float = 10.0) -> dict[str, object]:
        """Return how a party enrols here, as in its configuration."""
        return {
            "address": self.enrol_address,
            "name": self.name,
            "ca_file": self.ca_file,
            "token_file": token,
            "timeout_s": timeout_s,
        }

    def settings(
        self, name: str, token: Path, *, state: Path | None = None, timeout_s: float = 10.0
    ) -> ServiceSettings:
        """Return the settings of a party that enrols here, with a state folder of its own."""
        folder = state or self.folder / f"{name}-{time.monotonic_ns()}"
        folder.mkdir(exist_ok=True, mode=0o700)
        point = EnrolSettings.model_validate(self.enrol_section(token, timeout_s))
        return ServiceSettings(name=name, state=folder, listen=f"{HOST}:1", enrol=point)

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

    def issue(
        self,
        folder: Path,
        role: str,
        name: str,
        *,
        now: datetime | None = None,
        authority: Authority | None = None,
    ) -> TlsFiles:
        """Write the TLS folder of a party with a certificate for one day from ``now``, without enrolment."""
        by = authority or Authority.load(self.state)
        return issue(folder, role, name, by, self.ca_file.read_bytes(), now=now)

    def anonymous_channel(self, address: str) -> Channel:
        """Open a channel without a client certificate."""
        return self._keep(address, grpc.ssl_channel_credentials(root_certificates=self.ca_file.read_bytes()))

    def directory(self, party: Enrolled | TlsFiles) -> KeyDirectoryStub:
        return self.channel(party).stub(KeyDirectoryStub)

    def enrolment(self) -> EnrolmentStub:
        return self.anonymous_channel(self.enrol_address).stub(EnrolmentStub)


class Member(ServiceProcess):
    """A COS, data owner or client host that enrols at a third party."""

    def __init__(
        self,
        role: str,
        name: str,
        third_party: ThirdParty,
        folder: Path,
        *,
        participants: int = 0,
        **keys: object,
    ) -> None:
        self.third_party = third_party
        token = third_party.token(role, name, participants=participants)
        directory = {"address": third_party.address, "name": third_party.name}
        enrolling = third_party.enrol_section(token, START_S)
        trusts = {} if role == "cos" else {"operator_keys": KEYS}
        super().__init__(role, name, folder, {"thirdparty": directory, "enrol": enrolling, **trusts, **keys})


def plan(run_id: str, **changes: Any) -> RunPlan:
    """Return the plan of a small run."""
    usual = {
        "system": "drift",
        "form": "published",
        "secure_sum": "clear",
        "dim": 4,
        "rate": 0.25,
        "ridge": 0.0,
        "theta": 2,
        "seed": 7,
        "max_staleness": 3,
        "epochs": 2,
        "min_users": 1,
    }
    return RunPlan(run_id=run_id, **{**usual, **changes})


class Operating:
    """An operator at a COS: its calls."""

    def __init__(self, cos: Member, tls: TlsFiles) -> None:
        self.cos = cos
        self.stub: Any = cos.channel(tls).stub(OperatorStub)

    async def start(
        self,
        run_id: str,
        *,
        owners: int = 1,
        users: int = 1,
        phase_s: float = 3600.0,
        party_s: float = 3600.0,
        limits: Mapping[str, int] = MappingProxyType({}),
        **changes: Any,
    ) -> None:
        """Start a run that waits for parties; by itself it neither ends nor loses anybody for an hour."""
        await self.stub.StartRun(
            signed(
                operator_pb2.StartRunRequest(
                    plan=plan(run_id, **changes),
                    expect_owners=owners,
                    expect_users=users,
                    phase_timeout_ms=int(phase_s * 1000),
                    party_timeout_ms=int(party_s * 1000),
                    most_abandoned=5,
                    **limits,
                )
            )
        )

    async def state(self, run_id: str) -> operator_pb2.RunState:
        return (await self.stub.GetRun(operator_pb2.GetRunRequest(run_id=run_id))).run


def party_at(cos: Member, enrolled: Enrolled, run_id: str) -> Party:
    """Return a party's side of the COS that does not try again."""
    return Party(cos.channel(enrolled), run_id, lambda: enrolled.fingerprint, Retry(limit_s=0.0))


# --- Refusals ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """How a call was refused: everything that the caller gets to see."""

    code: grpc.StatusCode
    reason: str
    field: str
    expected: str
    text: str

    def says_nothing_of(self, *private: object) -> bool:
        """Whether no private value stands in the answer, neither as it is nor in hexadecimal."""
        forms = []
        for one in private:
            forms += [one.hex(), one.decode("latin-1")] if isinstance(one, bytes) else [str(one)]
        return not any(form in self.text for form in forms)


MakesCall = Callable[[], Awaitable[Any] | AsyncIterator[Any]]


async def failure_of(call: Awaitable[Any] | AsyncIterator[Any] | MakesCall) -> grpc.aio.AioRpcError:
    """Await a call that must fail.

    A stream that may be refused while it is being sent is given as a function that makes the call: it is made again
    where gRPC has lost the status.  On a machine under load calls in close succession lose it one after the other,
    so that there is a pause between them.
    """
    for _ in range(40):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await answers(call() if callable(call) else call)
        if not (callable(call) and status_lost(failed.value)):
            break
        await asyncio.sleep(random.uniform(0, 0.3))
    return failed.value


async def refused(call: Awaitable[Any] | AsyncIterator[Any] | MakesCall) -> Refused:
    """Await a call that must be refused; a stream as for `failure_of`."""
    error = await failure_of(call)
    refusal = from_rpc_error(error, "peer")
    assert isinstance(refusal, Refusal), refusal
    metadata = [
        v.decode("latin-1") if isinstance(v, bytes) else v for _, v in error.trailing_metadata() or ()
    ]
    text = " ".join([error.details() or "", *metadata, str(refusal)])
    return Refused(error.code(), refusal.name, refusal.field, refusal.expected, text)


async def code_of(call: Awaitable[Any] | AsyncIterator[Any] | MakesCall) -> grpc.StatusCode:
    """Await a call that must fail below our own refusals; return the gRPC code.  A stream as for `failure_of`."""
    error = await failure_of(call)
    assert not isinstance(from_rpc_error(error, "peer"), Refusal)
    return error.code()


# --- Fixtures ----------------------------------------------------------------------------------------------------


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
        await service.release()
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
    await shared_third_party.release()


@pytest.fixture(scope="session")
def shared_cos(shared_third_party, tmp_path_factory):
    service = Member("cos", "shared-cos", shared_third_party, tmp_path_factory.mktemp("cos"))
    service.start()
    yield service
    service.stop()


@pytest.fixture
async def cos(shared_cos):
    """A running COS, the same for all tests that leave it running: start a run of your own."""
    yield shared_cos
    await shared_cos.release()


@pytest.fixture(scope="session")
def certificates(shared_third_party, tmp_path_factory):
    """TLS files by role, for callers that nobody has to know by name."""
    folder = tmp_path_factory.mktemp("certificates")
    roles = ("cos", "data-owner", "client", "thirdparty", "operator")
    return {role: shared_third_party.issue(folder / role, role, f"some-{role}") for role in roles}


@pytest.fixture
def operator(cos, certificates):
    """An operator at the shared COS."""
    return Operating(cos, certificates["operator"])


@pytest.fixture
async def start_member(tmp_path_factory):
    """Return a function that starts a COS, data owner or client host of the test's own; all are stopped."""
    started: list[Member] = []

    def start(role: str, name: str, third_party: ThirdParty, *, healthy: bool = True, **keys: Any) -> Member:
        service = Member(role, name, third_party, tmp_path_factory.mktemp(name), **keys)
        started.append(service)
        service.start(healthy=healthy)
        return service

    yield start
    for service in reversed(started):
        await service.release()
        if service.running:
            await asyncio.to_thread(service.stop)


@pytest.fixture(scope="session")
def calls():
    """Names that every module needs to make calls and to look at their failure."""
    return type(
        "Calls",
        (),
        {
            "Enrolled": Enrolled,
            "METHODS": METHODS,
            "Member": Member,
            "Operating": Operating,
            "answers": staticmethod(answers),
            "code_of": staticmethod(code_of),
            "each": staticmethod(each),
            "party_at": staticmethod(party_at),
            "plan": staticmethod(plan),
            "refused": staticmethod(refused),
            "with_nothing": staticmethod(call_with_nothing),
        },
    )


@pytest.fixture
def world(cos, operator, people, calls):
    """Return a function that makes a run played by hand; a module's own ``people`` take part in it."""

    def make(**how):
        return World(cos, operator, people, calls, **how)

    return make
