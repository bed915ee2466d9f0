"""Compare ``Submit`` of many items in one stream with a bare ``grpc.aio`` stream of the same items, a message for each.

The COS and the bare server are processes of their own; both have the certificate of the COS.  This process is the
client host of both: it plays rounds with users as members of clear sums, whose contributions have the size of
FedNeuMF's on MovieLens 100K.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.peers.stream import METHOD
from bench.rounds import cpu_of
from bench.rows import Ask, Row, cpu_seconds, higher
from coterie.config.base import EnrolSettings, Peer, ServiceSettings
from coterie.config.run import RunSettings
from coterie.crypto.authority import (
    Authority,
    load_tls_key,
    logical_name,
    make_csr,
    new_tls_key,
    save_tls_key,
)
from coterie.launch.authority import TOKENS, make_authority, make_token
from coterie.launch.children import Child, free_port
from coterie.launch.operator_connection import OperatorConnection
from coterie.launch.parties import DIRECTORY, JOIN_S, start_request
from coterie.net.channel import connect
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import enrol, identities
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.parties.party import Item, Party, Registrant, slot_ranges
from coterie.process.memory import return_freed_memory
from coterie.rounds.training import Purpose
from coterie.secure_sum.clear import ClearMember
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Step
from coterie.secure_sum.repeats import mark_of
from coterie.studies.run_plan import run_plan
from coterie.systems.registry import server_side
from coterie.wire.chunks import split
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import RoundRef

_ROOT = Path(__file__).resolve().parent.parent
_HOST = "127.0.0.1"
_RUN = "bench"
_USERS = 64
_ITEMS = 1682
_ROUNDS = 9
_WARM = 2


def issued(folder: Path, authority: Authority) -> TlsFiles:
    """Write key and certificate of a client named like its folder."""
    tls = TlsFiles(folder)
    folder.mkdir(parents=True)
    save_tls_key(tls.key, new_tls_key())
    chain = authority.issue(make_csr(load_tls_key(tls.key)), "client", folder.name, 1)
    tls.chain.write_bytes(chain + authority.certificate_pem)
    tls.authority.write_bytes(authority.certificate_pem)
    return tls


class Site:
    """Third party and COS as processes, and the parties that this process plays; used by several suites.

    Parameters
    ----------
    folder : Path
    run_id : str
    **cos
        Further entries of the COS's configuration.
    """

    def __init__(self, folder: Path, run_id: str = _RUN, **cos: Any) -> None:
        self._folder = folder
        self._run = run_id
        self._settings_of_cos = cos
        self._at = {name: f"{_HOST}:{free_port()}" for name in ("thirdparty", "enrol", "cos", "bare")}
        self._authority = Child("thirdparty", DIRECTORY, folder / "thirdparty")
        self.cos = Child("cos", "cos", folder / "cos")
        self._operator: OperatorConnection | None = None
        self._channels: list[Any] = []
        self.bare: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        make_authority(self._authority.state)
        self._authority.configure(
            {
                "listen": self._at["thirdparty"],
                "enrol_listen": self._at["enrol"],
                "tokens": self._authority.state / TOKENS,
            }
        )
        self.configure_cos(self.cos, self._at["cos"], **self._settings_of_cos)
        for child in (self._authority, self.cos):
            child.start()
        self._operator = await OperatorConnection.enrolled(
            self._settings("operator", "operator", 0), Peer(address=self._at["cos"], name="cos")
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()
        if self._operator is not None:
            await self._operator.close()
        if self.bare is not None:
            self.bare.kill()
            self.bare.wait()
        for child in (self.cos, self._authority):
            await child.stop()

    @property
    def address(self) -> str:
        """Address at which the COS listens."""
        return self._at["cos"]

    @property
    def thirdparty(self) -> Child:
        """The process of the third party."""
        return self._authority

    @property
    def thirdparty_address(self) -> str:
        """Address at which the third party listens for certified parties."""
        return self._at["thirdparty"]

    @property
    def authority(self) -> Path:
        """State folder of the third party."""
        return self._authority.state

    def configure_cos(self, child: Child, address: str, **settings: Any) -> None:
        """Configure a process of the COS, with a token of its own where it has no certificate yet."""
        child.configure(
            {
                "listen": address,
                "thirdparty": {"address": self._at["thirdparty"], "name": DIRECTORY},
                "enrol": self.enrolment("cos", "cos", 0, child.folder),
                **settings,
            }
        )

    def enrolment(
        self, role: str, name: str, participants: int, folder: Path | None = None
    ) -> dict[str, Any]:
        """Make a token for a party in its folder; return how it enrols."""
        token = (folder or self._folder / name) / "token"
        make_token(self._authority.state, role, name, participants, token)
        return {
            "address": self._at["enrol"],
            "name": DIRECTORY,
            "ca_file": self._authority.state / "ca.pem",
            "token_file": token,
            "timeout_s": JOIN_S,
        }

    def _settings(self, role: str, name: str, participants: int) -> ServiceSettings:
        how = EnrolSettings.model_validate(self.enrolment(role, name, participants))
        return ServiceSettings(name=name, state=self._folder / name, listen=f"{_HOST}:0", enrol=how)

    @property
    def operator(self) -> OperatorConnection:
        """The operator, once the site is open."""
        if self._operator is None:
            raise RuntimeError("the site is not open")
        return self._operator

    async def begin(self, settings: RunSettings, users: int = _USERS) -> None:
        """Start the run at the COS."""
        plan = run_plan(settings, run_id=self._run, seed=0)
        key = Ed25519PrivateKey.generate()
        await self.operator.start(start_request(settings, plan, key, owners=1, users=users))

    async def party(
        self, role: str, name: str, participants: int
    ) -> tuple[Party, list[Registrant], TlsFiles]:
        """Enrol a party; return it with its members and TLS files."""
        settings = self._settings(role, name, participants)
        tls = TlsFiles(settings.state / "tls")
        people = identities(settings.state, participants)
        bundles = await enrol(role, settings, tls, people)
        channel = connect(
            self._at["cos"],
            tls.channel_credentials(),
            tls_name=logical_name("cos", "cos"),
            peer="cos/cos",
            meter=Meter(),
        )
        self._channels.append(channel)
        kind = wire.ParticipantKind.Value(
            "PARTICIPANT_KIND_USER" if role == "client" else "PARTICIPANT_KIND_DATA_OWNER"
        )
        members = [Registrant(person, bundle, kind) for person, bundle in zip(people, bundles, strict=True)]
        return (
            Party(channel, self._run, lambda: tls.identity().fingerprint, Retry(limit_s=30.0)),
            members,
            tls,
        )

    def stream(self, tls: TlsFiles) -> Callable[[Sequence[wire.SubmitRequest]], Awaitable[Any]]:
        """Start the bare server, with the certificate of the COS, and return a call to it."""
        command = [sys.executable, "-m", "bench.peers.stream", self._at["bare"], str(self.cos.state / "tls")]
        self.bare = subprocess.Popen(command, cwd=_ROOT)
        channel = grpc.aio.secure_channel(
            self._at["bare"],
            tls.channel_credentials(),
            options=[("grpc.ssl_target_name_override", logical_name("cos", "cos"))],
        )
        self._channels.append(channel)
        call: Any = channel.stream_unary(
            METHOD, wire.SubmitRequest.SerializeToString, wire.SubmitResponse.FromString
        )

        async def send(messages: Sequence[wire.SubmitRequest]) -> Any:
            async def requests() -> AsyncIterator[wire.SubmitRequest]:
                for message in messages:
                    yield message

            return await call(requests(), wait_for_ready=True)

        return send


def _messages(round_: RoundRef, items: Sequence[Item]) -> list[wire.SubmitRequest]:
    found = []
    for item in items:
        for chunk in split(item.payload):
            request = wire.SubmitRequest(
                round=round_, kind=item.kind, slots=slot_ranges(item.slots), sha256=bytes(32)
            )
            request.chunk.CopyFrom(chunk)
            found.append(request)
    return found


def made_item(slot: int, purpose: Purpose, settings: RunSettings, n_items: int) -> Item:
    """Return a contribution of a clear sum in which nothing is touched, in the layout of its purpose."""
    plan = run_plan(settings, run_id=_RUN, seed=0)
    made = Contribution(server_side(plan.system, plan.settings, n_items, plan.seed, 1).layout(purpose))
    made.count()
    payload = ClearMember().answer(Step.SUBMIT, b"", made.codes())
    return Item(wire.SubmitKind.SUBMIT_KIND_VECTOR, [slot], payload)


async def _measured(ask: Ask) -> list[tuple[float, float, float, float, int]]:
    """Return, for each round of training, wall and CPU seconds of ours and of the bare stream, and the bytes."""
    n_users, n_items, warm, rounds = ask.size((_USERS, _ITEMS, _WARM, _ROUNDS), (2, 30, 0, 1))
    settings = RunSettings.model_validate(
        {
            "system": "fedncf",
            "secure_sum": "clear",
            "reference": False,
            "fedncf": {"model": "neumf", "touch": "exact"},
            "rounds": {
                "cohorts": "all",
                "passes": 1000,
                "evaluate_every": 1000,
                "party_per_user": True,
                "min_cohort": min(n_users, 20),
                "min_sum": min(n_users, 20),
            },
            "federation": {"hosts": 1},
        }
    )
    found = []
    with tempfile.TemporaryDirectory() as folder:
        async with Site(Path(folder)) as site:
            owner, owners, _ = await site.party("data-owner", "catalogue", 1)
            host, users, tls = await site.party("client", "host", n_users)
            await site.begin(settings, users=n_users)
            # Only now: the bare server reads the certificate of the COS, which serves by now.
            bare = site.stream(tls)
            of = owners[0]
            keys = [f"item-{n}" for n in range(n_items)]
            await owner.register(
                [Registrant(of.identity, of.bundle, of.kind, "all", f"{_HOST}:1", "none", keys)]
            )
            await host.register(users)
            async for tasks in host.tasks():
                for task in tasks:
                    _, payload = await host.fetch(
                        wire.FetchKind.FETCH_KIND_SUM_PLAN, version=task.round.round
                    )
                    plan = SumPlan.from_wire(rounds_pb2.SumPlan.FromString(payload or b""))
                    slots = [n for part in task.slots for n in range(part.first, part.first + part.count)]
                    one = made_item(slots[0], Purpose(plan.purpose), settings, n_items)
                    items = [Item(one.kind, [slot], one.payload) for slot in slots]
                    same = _messages(task.round, items)
                    took = []
                    for process, send in (
                        (site.bare, lambda: bare(same)),  # noqa: B023 - called before the next round
                        (site.cos.process, lambda: host.submit_many(task.round, items)),  # noqa: B023
                    ):
                        if process is None:
                            raise RuntimeError("a server is missing")
                        cpu, wall = cpu_of(process.pid) + time.process_time(), time.perf_counter()
                        await send()
                        took += [
                            time.perf_counter() - wall,
                            cpu_of(process.pid) + time.process_time() - cpu,
                        ]
                    if plan.purpose == Purpose.TRAIN.value:
                        bytes_ = sum(len(item.payload) for item in items)
                        found.append((took[2], took[3], took[0], took[1], bytes_))
                        if len(found) == warm + rounds:
                            return found[warm:]
    raise RuntimeError("the run ended too early")


def _mark_seconds(bytes_: float, users: int) -> float:
    """Return the CPU seconds of the server's marks of all bytes, split into an item for each user."""
    item = bytes(int(bytes_ / users))
    return users * statistics.median(cpu_seconds(lambda: mark_of(item)) for _ in range(50))


def rows(ask: Ask) -> Iterator[Row]:
    """Measure both streams, in turn."""
    # As a host does when it starts; this process is the client of both.
    return_freed_memory()
    found = asyncio.run(_measured(ask))
    ours, cpu, theirs, their_cpu, bytes_ = (statistics.median(column) for column in zip(*found, strict=True))
    users = ask.size(_USERS, 2)
    marks = _mark_seconds(bytes_, users)
    yield higher(
        "submit.stream",
        bytes_ / ours / 1e6,
        bytes_ / theirs / 1e6,
        "MB/s",
        f"{users} items of {bytes_ / users / 1e3:.0f} kB in one stream, {len(found)} rounds; "
        "a bare grpc.aio stream of the same items, a message for each; target >= 0.6",
    )
    yield higher(
        "submit.stream.cpu",
        bytes_ / cpu / 1e6,
        bytes_ / their_cpu / 1e6,
        "MB/CPU s",
        f"the same by CPU time of client and server together; of ours {marks / cpu:.0%} is the mark by which the "
        "server tells an item that comes again; target >= 0.75",
    )
