"""Network latency between services, measured for the operator (``coterie latency``) by way of the COS."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

import grpc
import numpy as np

from coterie.config.base import Peer
from coterie.config.operate import OperatorSettings
from coterie.crypto.authority import logical_name
from coterie.errors import PeerError, PreflightError, RunError
from coterie.launch.local_run import LocalRun
from coterie.launch.operator_connection import OperatorConnection
from coterie.net.channel import connect
from coterie.net.credentials import TlsFiles
from coterie.net.latency import MeasuredService, check_order, measure
from coterie.net.meter import Meter
from coterie.net.status import from_rpc_error
from coterie.process.runtime import in_use
from coterie.wire.v1 import latency_pb2 as wire
from coterie.wire.v1.latency_pb2_grpc import LatencyStub

__all__ = [
    "SIZES",
    "Carried",
    "Latencies",
    "Pair",
    "Times",
    "Without",
    "measure_all",
    "of_local_run",
    "of_operator",
    "round_trips",
]

SIZES = (0, 1 << 10, 1 << 15, 1 << 20, 1 << 24)
"""Payload sizes that are measured, bytes: 0 B to 16 MiB."""

_LONGEST_S = 24 * 3600.0
_ECHOES = 20
"""Round trips of each pair for the live page: enough for a median, within a second for a whole federation."""


class Times(TypedDict):
    """Statistics of repeated measurements of one time: count, minimum and percentiles, milliseconds."""

    count: int
    least: float
    p50: float
    p90: float
    p99: float


class Carried(TypedDict):
    """Transfer times of one payload size in one direction, with the rate by the median time, Mbit/s."""

    size: int
    up: bool
    ms: Times
    mbit_s: float


class Pair(TypedDict):
    """Measured times from one service to another that it calls; None for a time that was not measured."""

    source: str
    target: str
    echo_ms: Times | None
    server_ms: Times | None
    network_ms: Times | None
    connect_ms: Times | None
    handshake_ms: Times | None
    first_ms: Times | None
    carried: list[Carried]
    failure: str


class Without(TypedDict):
    """A party that measured nothing, with the reason."""

    party: str
    why: str


class Latencies(TypedDict):
    """The result of one measurement: times by pair of services, and the parties without any."""

    pairs: list[Pair]
    without: list[Without]


def of_local_run(run: LocalRun) -> tuple[TlsFiles, MeasuredService]:
    """Return the operator's certificate and the COS of a run in progress on this machine.

    Raises
    ------
    RunError
        The run is not running.
    CertificateError
        The run has no operator's certificate, or an expired one.
    """
    folder = run.folder / "cos"
    if not in_use(folder / "state"):
        raise RunError(
            f"run {run.run_id} is not running: there is no network to measure",
            hint="measure while it runs, or name the configuration of an operator (--config)",
        )
    try:
        listen = str(tomllib.loads((folder / "config.toml").read_text())["listen"])
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{folder}/config.toml does not say where the COS listens: {error}") from error
    return run.operator(), _cos(Peer(address=listen, name="cos"))


async def of_operator(settings: OperatorSettings) -> tuple[TlsFiles, MeasuredService]:
    """Return an operator's certificate, enrolling when there is none, and the operator's COS.

    Raises
    ------
    CertificateError, PeerError
        The operator cannot enrol.
    PreflightError
        The state folder cannot be used.
    """
    try:
        settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise PreflightError(f"cannot use the folder {error.filename}: {error.strerror}") from error
    operator = await OperatorConnection.enrolled(settings, settings.cos)
    await operator.close()
    return TlsFiles(settings.state / "tls"), _cos(settings.cos)


def _cos(peer: Peer) -> MeasuredService:
    return MeasuredService(f"cos/{peer.name}", peer.address, logical_name("cos", peer.name))


async def round_trips(tls: TlsFiles, cos: Peer) -> tuple[list[dict[str, Any]], list[Without]]:
    """Return median round trips in milliseconds between all services that call each other, for the live page.

    Parameters
    ----------
    tls : TlsFiles
        The operator's certificate.
    cos : Peer
        The orchestration server.

    Raises
    ------
    Refusal, PeerError
        As for `measure_all`.
    """
    order = wire.MeasureOrder(echoes=_ECHOES, repeats=1)
    found = await measure_all(tls, _cos(cos), order, (), lambda line: None)
    pairs = [
        {"source": pair["source"], "target": pair["target"], "ms": pair["echo_ms"]["p50"]}
        for pair in found["pairs"]
        if pair["echo_ms"] is not None
    ]
    return pairs, found["without"]


async def measure_all(
    tls: TlsFiles,
    cos: MeasuredService,
    order: wire.MeasureOrder,
    parties: Sequence[str],
    told: Callable[[str], None],
) -> Latencies:
    """Measure times from here to the COS, then between all services that call each other.

    Parameters
    ----------
    tls : TlsFiles
        The operator's certificate.
    cos : MeasuredService
        The COS, which asks the other services to measure.
    order : MeasureOrder
        Times and transfers to measure.
    parties : sequence of str
        Parties that measure, as ``"client/host-0"``; all when empty.
    told : callable
        Receives a line of progress for each pair and each party without measurements.

    Raises
    ------
    Refusal
        The order asks for too much, or another measurement is under way.
    PeerError
        The COS cannot be reached.
    """
    check_order(order)
    found = Latencies(pairs=[], without=[])
    me = str(tls.identity())

    def take(pair: wire.PairTimes) -> None:
        found["pairs"].append(_in_numbers(pair))
        told(f"{pair.source} -> {pair.target}: {pair.failure or 'measured'}")

    if not parties or me in parties:
        own = await measure(cos, tls, order)
        own.source = me
        take(own)
    others = [party for party in parties if party != me]
    if parties and not others:
        return found
    channel = connect(
        cos.address, tls.channel_credentials(), tls_name=cos.tls_name, peer=cos.peer, meter=Meter()
    )
    try:
        stub: Any = channel.stub(LatencyStub)
        request = wire.MeasureRequest(order=order, parties=others)
        async for response in stub.Measure(request, timeout=_LONGEST_S):
            if response.HasField("pair"):
                take(response.pair)
            if response.without:
                found["without"].append(Without(party=response.party, why=response.without))
                told(f"{response.party}: {response.without}")
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            raise PeerError(f"{cos.peer} is of a version that measures nothing", hint="upgrade it") from error
        raise from_rpc_error(error, cos.peer) from error
    finally:
        await channel.close()
    return found


def _in_numbers(pair: wire.PairTimes) -> Pair:
    network = [whole - server for whole, server in zip(pair.echo_ms, pair.server_ms, strict=False)]
    return Pair(
        source=pair.source,
        target=pair.target,
        echo_ms=_times(pair.echo_ms),
        server_ms=_times(pair.server_ms),
        network_ms=_times(network),
        connect_ms=_times(pair.connect_ms),
        handshake_ms=_times(pair.handshake_ms),
        first_ms=_times(pair.first_ms),
        carried=[_carried(one.size, one.up, times) for one in pair.carried if (times := _times(one.ms))],
        failure=pair.failure,
    )


def _carried(size: int, up: bool, times: Times) -> Carried:
    return Carried(size=size, up=up, ms=times, mbit_s=round(size * 8e-3 / max(times["p50"], 1e-6), 3))


def _times(taken: Iterable[float]) -> Times | None:
    held = np.fromiter(taken, float)
    if not held.size or np.isnan(held).any():
        return None
    p50, p90, p99 = (round(float(one), 3) for one in np.percentile(held, [50, 90, 99]))
    return Times(count=held.size, least=round(float(held.min()), 3), p50=p50, p90=p90, p99=p99)
