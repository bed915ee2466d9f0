"""The runtime of a service process: enrols, serves, reports true health, stops gracefully, writes an account."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from coterie.config.base import CosPeer, Peer, ServiceSettings
from coterie.crypto.authority import logical_name
from coterie.crypto.identity import Bundle
from coterie.errors import CoterieError, PeerError, PreflightError, RunError, StoreError
from coterie.net import tracing
from coterie.net.admission import Limits
from coterie.net.authorisation import ALLOWED, OFFERED
from coterie.net.channel import Channel, connect
from coterie.net.clocks import NOTED_S, bridge
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import DIRECTORY_KEY, NewToken, renew_late
from coterie.net.gossip import LogGossip
from coterie.net.latency import MeasuredService as Measured
from coterie.net.latency import attend
from coterie.net.meter import Meter
from coterie.net.probe import Probe
from coterie.net.renewal import Renewal
from coterie.net.rest import Rest
from coterie.net.revocation import RevocationWatch
from coterie.net.server import Guard, make_server
from coterie.net.status import not_kept
from coterie.net.transparency import LogWatch
from coterie.net.vouching import Vouching
from coterie.privacy.transcript import TranscriptWriter
from coterie.process.kept_rest import KeptRest
from coterie.process.next_wake import NextWake, write_next_wake
from coterie.process.private_files import check_private
from coterie.process.wake import Wake
from coterie.store.engine import Writer
from coterie.store.room import MARGIN, has_room
from coterie.telemetry import audit_log
from coterie.telemetry.accounting import Accounting
from coterie.telemetry.gauges import PrometheusMetric, of_the_disk, of_the_memory
from coterie.telemetry.logs import configure
from coterie.wire.v1.latency_pb2_grpc import add_ProbeServicer_to_server
from coterie.wire.v1.log_pb2_grpc import add_LogGossipServicer_to_server

if TYPE_CHECKING:
    from coterie.telemetry.exporter import Exporter

__all__ = [
    "GRACE_S",
    "PARENT_VARIABLE",
    "Runtime",
    "Service",
    "ServiceProcess",
    "allow_files",
    "alone_in",
    "health_names",
    "in_use",
    "serve",
]

_log = structlog.get_logger("coterie.process")

GRACE_S = 10.0
"""Longest time to finish or hand back what is in flight after SIGTERM, seconds."""


_STORE_S = 0.5

_ROOM_S = 1.0
"""Time between two checks for room to start, seconds."""

_OTHER_FILES = 512
"""Open files beside the connections served: stores, logs, connections to other services."""

PARENT_VARIABLE = "COTERIE_PARENT"
"""Environment variable with the process id of a launcher; services stop when the launcher is gone."""


@dataclass
class Runtime:
    """The common parts of a service process of any role: settings, channels, health and accounts."""

    role: str
    settings: ServiceSettings
    tls: TlsFiles
    guard: Guard
    outgoing: Meter
    accounting: Accounting
    transcript: TranscriptWriter | None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    failed: BaseException | None = None
    measures: list[PrometheusMetric] = field(default_factory=list)
    """Measures that the metrics show in addition to those of every process."""
    beside: list[str] = field(default_factory=list)
    """Names of further services that have the health of this process."""
    _conditions: dict[str, bool] = field(default_factory=dict)
    _health: Any = field(default_factory=lambda: health_aio.HealthServicer())
    _channels: list[Channel] = field(default_factory=list)
    calls: dict[str, Measured] = field(default_factory=dict)
    """The services that this process has a channel to, by role and name."""
    wake: Wake | None = None
    """The only wake of a process of a device that has none in between; None where the process stays."""
    rest: Rest | None = None
    """The rest between two check-ins of a device that holds no connection meanwhile; None where polls are held."""
    _shown: bytes = b""
    _watch: LogWatch | None = None
    _turned: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when health may be another than the one published."""

    def __post_init__(self) -> None:
        """Record the fingerprint of the certificate that channels will show."""
        self._shown = self.tls.identity().fingerprint

    def shown(self) -> bytes:
        """Return the SHA-256 of the certificate that channels show."""
        return self._shown

    def renewed(self) -> None:
        """Let every channel show the certificate that is in the folder now; the server reloads it by itself."""
        self._shown = self.tls.identity().fingerprint
        credentials = self.tls.channel_credentials()
        for channel in self._channels:
            channel.renew(credentials)

    @property
    def state(self) -> Path:
        """State folder of the process."""
        return self.settings.state

    @property
    def party(self) -> str:
        """Role and name, as in transcripts and reports."""
        return f"{self.role}/{self.settings.name}"

    def connect(self, peer: Peer, role: str) -> Channel:
        """Open a channel to another service, whose certificate must have this role and the peer's name."""
        standbys = peer.standbys if isinstance(peer, CosPeer) else ()
        tls_name = logical_name(role, peer.name)
        return self.connect_to(peer.address, tls_name=tls_name, peer=f"{role}/{peer.name}", standbys=standbys)

    def connect_to(self, address: str, *, tls_name: str, peer: str, standbys: Sequence[str] = ()) -> Channel:
        """Open a channel to an address, or one of several, whose certificate must carry ``tls_name``."""
        channel = self._open(address, tls_name, peer, standbys)
        self._channels.append(channel)
        self.calls[peer] = Measured(peer, address, tls_name)
        return channel

    def _open(self, address: str, tls_name: str, peer: str, standbys: Sequence[str] = ()) -> Channel:
        return connect(
            address,
            self.tls.channel_credentials(),
            tls_name=tls_name,
            peer=peer,
            meter=self.outgoing,
            recorder=self.transcript.side("client") if self.transcript else None,
            standbys=standbys,
            rest=self.rest,
        )

    def renewal(self, thirdparty: Peer, enrol: Callable[[], Awaitable[None]]) -> Renewal:
        """Return the renewal of this process's certificate; it enrols again if the certificate has expired."""
        name = logical_name("thirdparty", thirdparty.name)
        return Renewal(
            self.tls,
            lambda: self._open(thirdparty.address, name, f"thirdparty/{thirdparty.name}"),
            self.renewed,
            lambda holds: self.holds("certificate", holds),
            NewToken(self.settings.enrol, enrol, lambda: renew_late(self.role, self.settings, self.tls)),
        )

    async def attend(self) -> None:
        """Measure latency to the services that this process calls, whenever the operator asks through the COS.

        A device that checks in measures none: the call by which it would hear of it is held.
        """
        if self.rest is not None:
            return
        for channel in self._channels:
            if channel.peer.startswith("cos/"):
                await attend(channel, lambda: self.calls, self.tls, self.latency_bytes)

    @property
    def latency_bytes(self) -> int:
        """Most bytes that one measurement may have carried."""
        return self.settings.latency_mb << 20

    def watch_revocations(
        self, thirdparty: Channel, on_revoked: Callable[[frozenset[bytes]], None] | None = None
    ) -> RevocationWatch:
        """Return a watch that keeps the list of revocations current; add its health condition and a measure of its age.

        Parameters
        ----------
        thirdparty : Channel
        on_revoked : callable, optional
            Called with the ids of all revoked participants whenever there are new ones.
        """
        watch = RevocationWatch(
            thirdparty,
            self.guard,
            lambda current: self.holds("directory", current),
            on_revoked=on_revoked,
            rest=self.rest,
        )
        self.measures.append(
            PrometheusMetric(
                "coterie_revocation_list_age_seconds",
                "Time since the third party last said what is revoked.",
                lambda: watch.age_s,
            )
        )
        return watch

    def watch_log(self, thirdparty: Channel) -> LogWatch:
        """Start to watch the third party's log, which must have the certificate of this process.

        Raises
        ------
        StoreError
            A file of the watch is damaged.
        """
        key = (self.state / DIRECTORY_KEY).read_bytes()
        self._watch = watch = LogWatch(thirdparty, key, self.state, self.tls.chain.read_bytes, rest=self.rest)
        self.measures.append(
            PrometheusMetric(
                "coterie_log_entries",
                "Entries of the third party's log, by the newest head that this process was shown.",
                lambda: None if watch.head is None else watch.head.size,
            )
        )
        return watch

    def note(self, bundle: Bundle) -> None:
        """Take note of a verified bundle that the process relies on: `settled` has its place in the log checked."""
        if self._watch is not None:
            self._watch.note(bundle)

    async def settled(self) -> None:
        """Wait until all bundles noted so far are shown to be in the third party's log, as `LogWatch.settled`.

        Raises
        ------
        FalseLogError
            One of them is not, or the log is another than before.
        """
        if self._watch is not None:
            await self._watch.settled()

    async def require_logged(self, kind: str, statements: Sequence[bytes]) -> None:
        """Require signed statements in the third party's log, as `LogWatch.require_patiently`.

        Raises
        ------
        FalseLogError
            One of them is not in the log, or the log is another than before.
        """
        if self._watch is not None:
            await self._watch.require_patiently(kind, statements)

    def compare_heads_with(self, channel: Channel) -> None:
        """Compare heads of the log with a party over a channel from now on."""
        if self._watch is not None:
            self._watch.gossip_with(channel)

    def offer_gossip(self, server: grpc.aio.Server, log: LogWatch) -> None:
        """Add the comparison of the log's heads to the gRPC server."""
        key = (self.state / DIRECTORY_KEY).read_bytes()
        add_LogGossipServicer_to_server(LogGossip(log, key, self.role, self.stopping), server)

    def require(self, conditions: Iterable[str]) -> None:
        """Add conditions that must hold before the service is healthy."""
        self._conditions.update(dict.fromkeys(conditions, False))
        self._turned.set()

    def holds(self, condition: str, value: bool = True) -> None:
        """Set whether a condition holds now; health follows at once."""
        if self._conditions.get(condition) != value:
            self._conditions[condition] = value
            self._turned.set()
            _log.info("condition", condition=condition, holds=value)

    def conditions(self) -> dict[str, bool]:
        """Return the conditions of health by name, each with whether it holds."""
        return dict(self._conditions)

    async def watch_store(self, writer: Writer) -> None:
        """Keep the condition ``store`` current: whether the store takes writes, which a full volume prevents."""
        while True:
            if writer.failed:
                self.holds("store", False)
                await writer.probe()
            self.holds("store", not writer.failed)
            await asyncio.sleep(_STORE_S)

    @property
    def serving(self) -> bool:
        """Whether the service is healthy: every condition holds and it is not stopping."""
        return not self.stopping.is_set() and all(self._conditions.values())

    async def publish_health(self) -> None:
        """Keep the gRPC health service current with the conditions."""
        held: bool | None = None
        # Woken, and not by the clock: ten looks a second cost a process that waits more than all else that it does.
        stopping = asyncio.create_task(self.stopping.wait())
        stopping.add_done_callback(lambda _: self._turned.set())
        try:
            while True:
                self._turned.clear()
                if self.serving != held:
                    held = self.serving
                    status = health_pb2.HealthCheckResponse
                    value = status.SERVING if held else status.NOT_SERVING
                    for name in (*health_names(self.role), *self.beside):
                        await self._health.set(name, value)
                await self._turned.wait()
        finally:
            stopping.cancel()

    def add_health(self, server: grpc.aio.Server) -> None:
        """Add this process's health to a gRPC server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    def fail(self, error: BaseException) -> None:
        """Stop the process with an error; the first error counts."""
        self.failed = self.failed or error
        self.stopping.set()

    def account(self) -> dict[str, Any]:
        """Return CPU, memory and traffic of this process, JSON-ready."""
        return {
            "party": self.party,
            "cpu_seconds": self.accounting.cpu_seconds(),
            "counts": self.accounting.counts(),
            "peak_rss_mb": Accounting.peak_rss_mb(),
            "served": self.guard.meter.account(),
            "called": self.outgoing.account(),
            "refusals": {f"{rpc}:{reason}": count for (rpc, reason), count in self.guard.refusals.items()},
        }


def health_names(role: str) -> list[str]:
    """Return the names under which a process of a role has a health: its own, none, and those of its services."""
    return ["", f"coterie.{role}", *(f"coterie.v1.{service}" for service in OFFERED[role])]


class ServiceProcess(Protocol):
    """The interface of a built service, which the process serves, runs and closes."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service's servicers to the gRPC server."""

    async def run(self) -> None:
        """Do the service's own work until the process stops; may return early when there is none."""

    async def close(self) -> None:
        """Finish what is in flight and close the stores."""


class Service(Protocol):
    """The interface of a role's service, which the entry points ``coterie.services`` name."""

    role: str

    async def enrol(self, settings: Any, tls: TlsFiles) -> None:
        """Obtain a certificate for the process, if it has none."""

    def build(self, settings: Any, runtime: Runtime) -> ServiceProcess:
        """Open the stores and build the service."""


def serve(service: Service, settings: ServiceSettings, wake: Wake | None = None) -> None:
    """Run a service until SIGTERM or SIGINT, or for one wake of a device.

    Parameters
    ----------
    service : Service
    settings : ServiceSettings
    wake : Wake, optional
        Ends the process when nothing more is asked of the device now; when to wake next is kept in its state folder.

    Raises
    ------
    CoterieError
        When the service cannot start, or had to stop by itself.
    """
    configure(settings.log_level, service=f"{service.role}/{settings.name}")
    # Every file that the process makes is its own, stores and models included.
    before = os.umask(0o077)
    try:
        with contextlib.suppress(ImportError):
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(service, settings, wake))
        return asyncio.run(_serve(service, settings, wake))
    finally:
        os.umask(before)


async def _serve(service: Service, settings: ServiceSettings, wake: Wake | None) -> None:
    try:
        settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise PreflightError(f"cannot use the state folder {settings.state}: {error.strerror}") from error
    with alone_in(settings.state):
        check_private(settings.state, settings.private_files())
        audit_log.start(settings.state, f"{service.role}/{settings.name}", settings.audit_mb << 20)
        try:
            await _serve_from(service, settings, wake)
        finally:
            audit_log.stop()


@contextlib.contextmanager
def alone_in(state: Path) -> Iterator[None]:
    """Lock a state folder against other processes; the lock ends with this process, however it ends."""
    try:
        descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise PreflightError(f"cannot use the state folder {state}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PreflightError(
                f"another process uses the state folder {state}", hint="stop it first, or name another folder"
            ) from error
        yield
    finally:
        os.close(descriptor)


def in_use(state: Path) -> bool:
    """Return whether a service of this machine uses a state folder now, even if it is too busy to answer calls."""
    try:
        descriptor = os.open(state / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


async def _serve_from(service: Service, settings: ServiceSettings, wake: Wake | None) -> None:
    allow_files(settings.limits.connections)
    tls = TlsFiles(settings.state / "tls")
    if wake is not None and not _has_room(settings):
        raise StoreError(
            f"no room to start: {MARGIN} bytes are needed beside {settings.state}",
            hint="free space on its volume; the next wake tries again",
            trouble="full",
        )
    if not await _room_to_start(service.role, settings, tls):
        return
    await _enrol(service, settings, tls, wake)
    transcript = (
        TranscriptWriter(settings.state / "transcript.bin", f"{service.role}/{settings.name}")
        if settings.transcript
        else None
    )
    guard = _guard(settings, transcript, _vouching(service.role, settings, tls))
    if settings.traces:
        tracing.start(f"{service.role}/{settings.name}")
    runtime = Runtime(
        role=service.role,
        settings=settings,
        tls=tls,
        guard=guard,
        outgoing=Meter(),
        accounting=Accounting(),
        transcript=transcript,
        wake=wake,
        rest=wake or _kept_rest(settings),
    )
    runtime.measures += [
        *of_the_disk(settings.state),
        *of_the_memory(),
        _clock_skew(guard, f"{service.role}/{settings.name}"),
    ]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, runtime.stopping.set)

    process = service.build(settings, runtime)
    server = make_server(guard)
    process.add_to(server)
    add_ProbeServicer_to_server(Probe(service.role), server)
    runtime.add_health(server)
    if settings.reflection:
        _add_reflection(server, service.role)
    _listen(server, settings, tls)
    renewal = _renewal(service, settings, runtime)
    exporter = _exported(
        settings,
        runtime.accounting,
        {"server": guard.meter, "client": runtime.outgoing},
        lambda: dict(guard.refusals),
        lambda: runtime.serving,
        guard.admission,
        runtime.conditions,
        renewal,
        runtime.measures,
    )
    # Set health before the server starts: the health service reports SERVING until it is set.
    health = asyncio.create_task(runtime.publish_health())
    await asyncio.sleep(0)
    await server.start()
    runtime.accounting.started()
    _log.info("listening", address=settings.listen)

    orphaned = asyncio.create_task(_stop_when_orphaned(runtime))
    renewing = asyncio.create_task(_work(renewal, runtime)) if renewal is not None else None
    work = asyncio.create_task(_work(process, runtime))
    attending = asyncio.create_task(runtime.attend())
    ending = asyncio.create_task(_end_with(wake, renewal, runtime)) if wake is not None else None
    await runtime.stopping.wait()
    _log.info("stopping")
    for task in (ending, attending, work, renewing):
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    await server.stop(GRACE_S / 2)
    await process.close()
    for channel in runtime._channels:
        await channel.close()
    health.cancel()
    orphaned.cancel()
    if exporter is not None:
        exporter.stop()
    if transcript is not None:
        transcript.close()
    try:
        (settings.state / "account.json").write_text(json.dumps(runtime.account(), indent=1))
    except OSError as error:
        # A missing account is no failure of the process: the volume may be full.
        _log.warning("no account written", error=error.strerror)
    # Last, because it may wait for the collector.
    await asyncio.to_thread(tracing.stop)
    _log.info("stopped")
    if runtime.failed is not None:
        raise runtime.failed


def _kept_rest(settings: ServiceSettings) -> KeptRest | None:
    """Return the rest of a device that checks in; None for every other process."""
    if not getattr(settings, "check_in", False):
        return None
    return KeptRest(settings.state, getattr(settings, "run", ""), settings.model_dump_json())


def _exported(settings: ServiceSettings, *arguments: Any, **named: Any) -> Exporter | None:
    """Serve metrics where the settings name an address; arguments as of `Exporter`."""
    if settings.metrics is None:
        return None
    from coterie.telemetry.exporter import Exporter  # a server of its own, which many devices do without

    exporter = Exporter(*arguments, **named)
    exporter.start(settings.metrics)
    return exporter


async def _end_with(wake: Wake, renewal: Renewal | None, runtime: Runtime) -> None:
    """Stop the process at the end of a device's wake, and keep when it wakes next."""
    if renewal is not None:
        wake.before_end(renewal.looked)
    try:
        await wake.until_over()
        now = time.time()
        at = now + (wake.come_back_s or 0.0)
        if renewal is not None:
            # A certificate that ends before the device is asked for is renewed before.
            at = min(at, max(renewal.due, now))
        write_next_wake(
            runtime.state,
            NextWake(getattr(runtime.settings, "run", ""), at, time.time(), wake.ended, wake.seen),
        )
        if wake.failure is not None:
            raise wake.failure
    except CoterieError as error:
        runtime.fail(error)
    else:
        _log.info("the wake is over", ended=wake.ended, next_in_s=round(at - now))
        runtime.stopping.set()


def _clock_skew(guard: Guard, own: str) -> PrometheusMetric:
    def differences() -> Mapping[tuple[str, ...], float]:
        bridged = bridge()
        return {**guard.skews.worst(), **({(own,): -bridged} if bridged > NOTED_S else {})}

    return PrometheusMetric(
        "coterie_clock_skew_seconds",
        "How far the clock of a caller is ahead of this service's time; the ten largest differences of more than 30 s. "
        "Under the service's own name: the clock of its machine, which jumped back and is not followed.",
        differences,
        labels=("party",),
    )


def _guard(
    settings: ServiceSettings,
    transcript: TranscriptWriter | None = None,
    vouching: Vouching | None = None,
) -> Guard:
    return Guard(
        Meter(),
        recorder=transcript.side("server") if transcript else None,
        debug=settings.log_level == "debug",
        limits=Limits(**settings.limits.model_dump()),
        vouching=vouching,
    )


def _vouching(role: str, settings: ServiceSettings, tls: TlsFiles) -> Vouching | None:
    """Return what takes the word of a service's intakes; None for a service that has none."""
    if getattr(settings, "part", "") != "coordinator":
        return None
    return Vouching(f"{role}/{settings.name}", tls.authority.read_bytes)


def _listen(server: grpc.aio.Server, settings: ServiceSettings, tls: TlsFiles) -> None:
    try:
        server.add_secure_port(settings.listen, tls.server_credentials())
    except RuntimeError as error:
        raise PreflightError(
            f"cannot listen on {settings.listen}",
            hint="is the port taken, or the address not this machine's?",
        ) from error


def _has_room(settings: ServiceSettings) -> bool:
    try:
        return has_room(settings.state)
    except OSError as error:
        raise PreflightError(f"cannot use the state folder {settings.state}: {error.strerror}") from error


async def _room_to_start(role: str, settings: ServiceSettings, tls: TlsFiles) -> bool:
    """Wait until the state folder's volume has room for a start; return False when the process must stop instead.

    If the service ended instead, its supervisor would start it again and again to no effect.
    """
    if _has_room(settings):
        return True
    _log.error(
        "no room to start",
        folder=str(settings.state),
        needed_bytes=MARGIN,
        hint="free space on its volume: the service waits for it, and starts by itself then",
    )
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    orphaned = asyncio.create_task(_orphaned())
    try:
        async with _refusing(role, settings, tls):
            while not _has_room(settings):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), _ROOM_S)
                if stopping.is_set() or orphaned.done():
                    _log.info("stopped")
                    return False
    finally:
        orphaned.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    _log.info("there is room to start")
    return True


@contextlib.asynccontextmanager
async def _refusing(role: str, settings: ServiceSettings, tls: TlsFiles) -> AsyncIterator[None]:
    """Refuse all calls of the service, and report it alive but not healthy, while the context is open."""
    guard = _guard(settings)
    measures = [*of_the_disk(settings.state), *of_the_memory()]
    exporter = _exported(
        settings,
        Accounting(),
        {"server": guard.meter},
        lambda: dict(guard.refusals),
        lambda: False,
        guard.admission,
        lambda: {"store": False},
        measures=measures,
    )
    server: grpc.aio.Server | None = None
    try:
        # Without a certificate the server cannot answer anybody.
        if tls.complete():
            server = make_server(guard)
            for name in OFFERED[role]:
                _add_refusals(server, f"coterie.v1.{name}")
            health = health_aio.HealthServicer()
            for name in health_names(role):
                await health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
            health_pb2_grpc.add_HealthServicer_to_server(health, server)
            _listen(server, settings, tls)
            await server.start()
        yield
    finally:
        if server is not None:
            await server.stop(None)
        if exporter is not None:
            exporter.stop()


def _add_refusals(server: grpc.aio.Server, service: str) -> None:
    refusal = not_kept(StoreError("the service waits for room to start", trouble="full"))

    async def refuse(_: Any, __: Any) -> Any:
        raise refusal

    prefix = f"/{service}/"
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        name.removeprefix(prefix): grpc.stream_unary_rpc_method_handler(refuse)
        for name in ALLOWED
        if name.startswith(prefix)
    }
    server.add_registered_method_handlers(service, handlers)


def _renewal(service: Service, settings: ServiceSettings, runtime: Runtime) -> Renewal | None:
    """Return the renewal of a party's certificate; None for the third party, which signs its own."""
    thirdparty = getattr(settings, "thirdparty", None)
    if not isinstance(thirdparty, Peer):
        return None
    return runtime.renewal(thirdparty, lambda: service.enrol(settings, runtime.tls))


def allow_files(connections: int) -> None:
    """Raise this process's limit of open files for ``connections`` connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        _log.warning(
            "fewer open files are allowed than limits.connections needs", allowed=allowed, needed=needed
        )


async def _enrol(
    service: Service, settings: ServiceSettings, tls: TlsFiles, wake: Wake | None = None
) -> None:
    enrolling = asyncio.ensure_future(service.enrol(settings, tls))
    orphaned = asyncio.create_task(_orphaned())
    limit_s = None if wake is None else wake.limit_s
    await asyncio.wait((enrolling, orphaned), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    late = not enrolling.done() and not orphaned.done()
    orphaned.cancel()
    if not enrolling.done():
        enrolling.cancel()
        if late:
            raise PeerError(
                f"the third party did not enrol this device within {limit_s:g} s",
                hint="the next wake tries again",
            )
        raise RunError("the launcher went away before this process had enrolled")
    await enrolling


async def _orphaned() -> None:
    """Wait until the launcher that started this process is gone; without a launcher, wait without end."""
    parent = os.environ.get(PARENT_VARIABLE)
    while parent is None or os.getppid() == int(parent):  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(1.0)


async def _stop_when_orphaned(runtime: Runtime) -> None:
    await _orphaned()
    _log.warning("the launcher is gone")
    runtime.stopping.set()


async def _work(process: ServiceProcess | Renewal, runtime: Runtime) -> None:
    try:
        await process.run()
    except asyncio.CancelledError:
        raise
    except Exception as error:
        cause: BaseException = error
        # A task group wraps what its tasks raise.
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, CoterieError):
            _log.error("cannot go on", error=cause.code, message=str(cause))
            runtime.fail(cause)
        else:
            _log.error("cannot go on", error=type(cause).__name__, exc_info=cause)
            runtime.fail(CoterieError(f"the service failed: {type(cause).__name__}", hint="see its log"))


def _add_reflection(server: grpc.aio.Server, role: str) -> None:
    """Add gRPC reflection, by which operators list the services that this process offers."""
    from grpc_reflection.v1alpha import reflection

    names = [f"coterie.v1.{service}" for service in (*OFFERED[role], "Probe")]
    names += [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
