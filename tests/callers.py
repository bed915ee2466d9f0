"""Callers of a service, on loopback and in containers: empty calls, attacks, open streams."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coterie.crypto.authority import (
    Authority,
    load_tls_key,
    logical_name,
    make_csr,
    new_tls_key,
    save_tls_key,
)
from coterie.net.authorisation import ALLOWED, OFFERED, callers_of
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.meter import Meter
from coterie.net.retry import status_lost
from coterie.net.status import from_rpc_error
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import (
    client_pb2,
    data_owner_pb2,
    expansion_pb2,
    latency_pb2,
    latents_pb2,
    log_pb2,
    operator_pb2,
    thirdparty_pb2,
)
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub

SOON_S = 60.0
ROLES = ("cos", "data-owner", "client", "decrypting-client", "thirdparty", "operator")
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in (
        client_pb2,
        data_owner_pb2,
        expansion_pb2,
        latency_pb2,
        latents_pb2,
        log_pb2,
        operator_pb2,
        wire,
        thirdparty_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Every RPC of the contract by its full name."""


def metric_sum(page: str, name: str, labels: dict[str, str]) -> float:
    """Return the sum of a metric over all lines of a page that carry these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(one in line for one in wanted)
    )


def issue(folder, role, name, authority, believed, *, now=None):
    """Write the TLS folder of a party with a certificate of an authority for one day; it believes another's."""
    tls = TlsFiles(folder)
    folder.mkdir(parents=True)
    save_tls_key(tls.key, new_tls_key())
    certificate = authority.issue(make_csr(load_tls_key(tls.key)), role, name, 1, now=now)
    tls.chain.write_bytes(certificate + authority.certificate_pem)
    tls.authority.write_bytes(believed)
    return tls


def forged(folder, role, name, believed):
    """Write the same with a certificate of an authority that nobody knows."""
    return issue(folder, role, name, Authority.create("forged", 1), believed)


# --- calls ---------------------------------------------------------------------------------------------------------


async def each(*messages: Any) -> AsyncIterator[Any]:
    """Yield messages as a request stream."""
    for message in messages:
        yield message


async def answers(call: Awaitable[Any] | AsyncIterator[Any]) -> list[Any]:
    """Return everything that a call answers."""
    return [one async for one in call] if isinstance(call, AsyncIterator) else [await call]


async def call_with_nothing(channel: Channel, name: str, timeout: float = SOON_S) -> str:
    """Call an RPC with an empty request; return the reason of the refusal, or OK.

    Some calls wait for what may come, which is no refusal: give those less time.
    """
    method = METHODS[name]
    request = message_factory.GetMessageClass(method.input_type)()
    response = message_factory.GetMessageClass(method.output_type)
    streams = ("stream" if method.client_streaming else "unary") + (
        "_stream" if method.server_streaming else "_unary"
    )
    call = getattr(channel, streams)(name, type(request).SerializeToString, response.FromString)
    while True:
        try:
            await answers(call(each(request) if method.client_streaming else request, timeout=timeout))
        except grpc.aio.AioRpcError as failure:
            if status_lost(failure):
                continue
            if timeout < SOON_S and failure.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return "OK"
            return outcome(failure)
        return "OK"


def outcome(failure: grpc.aio.AioRpcError) -> str:
    """Return the reason of a refusal."""
    refusal = from_rpc_error(failure, "peer")
    assert isinstance(refusal, Refusal), refusal
    assert (failure.code() == grpc.StatusCode.PERMISSION_DENIED) == (refusal.name == "WRONG_ROLE")
    return refusal.name


def ending(error: grpc.aio.AioRpcError) -> str:
    """Return how a call ended: the reason of the refusal, or gRPC's code."""
    failure = from_rpc_error(error, "peer")
    return failure.name if isinstance(failure, Refusal) else error.code().name


@contextlib.asynccontextmanager
async def calling(address, tls, name, *, authority=None):
    """Open a channel to an address; ``authority`` is believed in place of the caller's own."""
    credentials = grpc.ssl_channel_credentials(
        root_certificates=(authority or tls.authority).read_bytes(),
        private_key=tls.key.read_bytes(),
        certificate_chain=tls.chain.read_bytes(),
    )
    channel = connect(address, credentials, tls_name=name, peer="whoever", meter=Meter())
    try:
        yield channel
    finally:
        await channel.close()


async def polled(address, tls, name, run, **how):
    """Return how a poll ends that names a run."""
    async with calling(address, tls, name, **how) as channel:
        try:
            await channel.stub(OrchestratorStub).Poll(wire.PollRequest(run_id=run), timeout=SOON_S)
        except grpc.aio.AioRpcError as error:
            return ending(error)
    return "OK"


# --- attacks ---------------------------------------------------------------------------------------------------------


async def in_place_of_callers(role, channel_of):
    """Call everything that a service offers as every role; return who was refused in whose place.

    Parameters
    ----------
    role : str
        The service's.
    channel_of : callable
        Gives a channel to it for a caller's role.
    """
    pairs = set()
    offered = tuple(f"/coterie.v1.{service}/" for service in OFFERED[role])
    for method, allowed in ALLOWED.items():
        if not method.startswith(offered):
            continue
        if method.startswith("/coterie.v1.LogGossip/"):
            # Heads are compared with those who have something else to call here.
            allowed = allowed & callers_of(role)
        for caller in ROLES:
            patience = 1.0 if caller in allowed else SOON_S
            answer = await call_with_nothing(channel_of(caller), method, patience)
            assert (answer == "WRONG_ROLE") == (caller not in allowed), (method, caller, answer)
            if answer == "WRONG_ROLE":
                pairs |= {(caller, victim) for victim in allowed}
    return pairs


async def in_place_of_services(addresses, caller, names):
    """Call everybody at addresses where somebody else may be; return where somebody was taken for whom.

    Parameters
    ----------
    addresses : dict
        By the role of the certificate that is shown there; a COS must be behind each.
    caller : TlsFiles
    names : sequence of str
        Names that the caller asks for, in each role.
    """
    taken = set()
    for there, address in addresses.items():
        for role in ROLES:
            for name in names:
                ends = await polled(address, caller, logical_name(role, name), "none")
                if ends != "UNAVAILABLE":
                    assert ends == "UNKNOWN_ROUND", (there, role, name, ends)
                    taken.add((there, role, name))
    return taken


class OpenStreams:
    """Streams that a party has open to a COS, and how they end."""

    def __init__(self, channel):
        self._uploads = channel.stub(OrchestratorStub)
        self._health = channel.stub(health_pb2_grpc.HealthStub)
        self._release, self._answered = asyncio.Event(), asyncio.Event()
        self.ended = {}

    async def __aenter__(self):
        kept = {
            "upload": lambda: self._uploads.Submit(self._sent(first=wire.SubmitRequest()), timeout=60),
            "registration": lambda: self._uploads.Register(
                self._sent(last=wire.RegisterRequest()), timeout=60
            ),
            "answers": self._answers,
        }
        self._tasks = {what: asyncio.create_task(self._keep(what, call)) for what, call in kept.items()}
        # The last of them over the same connection: when it is answered, all are there.
        async with asyncio.timeout(SOON_S):
            await self._answered.wait()
        return self

    async def __aexit__(self, *_):
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _keep(self, what, call):
        try:
            await call()
            self.ended[what] = "OK"
        except grpc.aio.AioRpcError as error:
            self.ended[what] = ending(error)

    async def _sent(self, first=None, last=None):
        if first is not None:
            yield first
        await self._release.wait()
        if last is not None:
            yield last

    async def _answers(self):
        async for _ in self._health.Watch(health_pb2.HealthCheckRequest(), timeout=60):
            self._answered.set()

    async def until_ended(self, *which):
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(self._tasks[what] for what in which or self._tasks))

    async def end(self):
        """End what is sent, from this side."""
        self._release.set()
        await self.until_ended("upload", "registration")


async def revoked_in_mid_stream(victim: Channel, other: Channel, revoke: Callable[[], Awaitable[Any]]):
    """Revoke one of two callers who have streams open; return how those of each ended."""
    async with OpenStreams(victim) as cut, OpenStreams(other) as kept:
        assert cut.ended == {}
        await revoke()
        await cut.until_ended()
        assert kept.ended == {}
        await kept.end()
        return cut.ended, kept.ended
