"""``coterie latency``: let the services of a federation measure the network between each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.options import JsonOption
from coterie.cli.output import Output, columns

if TYPE_CHECKING:
    from rich.table import Table

    from coterie.launch.latency import Latencies, Times

__all__ = ["latency"]

_RUNS = Path("runs")


def latency(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Configuration of an operator, written by `coterie bootstrap`; `order`, `signs` and `output` may be "
            "missing.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="FOLDER", help="Folder of a local run in progress. Absent: the newest in ./runs."
        ),
    ] = None,
    party: Annotated[
        list[str] | None,
        typer.Option(
            "--party", metavar="ROLE/NAME", help="Service that measures, as client/host-0. Absent: all."
        ),
    ] = None,
    echoes: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Number of round trips to measure.")
    ] = 100,
    connections: Annotated[
        int, typer.Option(min=0, max=20, metavar="N", help="Number of connections to make.")
    ] = 5,
    largest: Annotated[
        int, typer.Option(min=0, max=16384, metavar="KIB", help="Largest payload to send, KiB.")
    ] = 16384,
    repeats: Annotated[
        int, typer.Option(min=1, max=20, metavar="N", help="Number of times to send each payload.")
    ] = 3,
    heat_map: Annotated[
        Path | None,
        typer.Option("--heat-map", metavar="FILE", help="File for an SVG heat map of the round trips."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure the network between all services that call each other.

    Services measure in turn, each to the services that it calls: round trips of an RPC and the server's part of them,
    TCP connects, TLS handshakes, first answers of new connections, and transfers of 0 B to 16 MiB. This command calls
    the orchestration server only. A run may be in progress; its traffic then affects the figures.
    """
    output = Output("latency", as_json=json)
    import asyncio

    from coterie.config.load import load
    from coterie.config.operate import OperatorSettings
    from coterie.errors import ConfigError, PreflightError
    from coterie.launch.latency import SIZES, measure_all, of_local_run, of_operator
    from coterie.launch.local_run import LocalRun, newest
    from coterie.telemetry.heat_map import heat_map as drawn
    from coterie.telemetry.logs import configure
    from coterie.wire.v1.latency_pb2 import MeasureOrder

    if config is not None and run is not None:
        raise ConfigError("both --config and --run", hint="one says where the federation is")
    configure("error", service="operator")
    sizes = [size for size in SIZES if size <= largest << 10]
    order = MeasureOrder(echoes=echoes, connections=connections, sizes=sizes, repeats=repeats)

    async def work() -> Latencies:
        if config is not None:
            settings = load(OperatorSettings, config, relative_to=config.parent).settings
            tls, cos = await of_operator(settings)
        else:
            tls, cos = of_local_run(newest(_RUNS) if run is None else LocalRun.at(run))
        return await measure_all(tls, cos, order, party or (), output.say)

    found = asyncio.run(work())
    output.say("", _round_trips(found), "", _carried(found))
    for one in found["without"]:
        output.say(f"{one['party']} measured nothing: {one['why']}")
    for pair in found["pairs"]:
        if pair["failure"]:
            output.say(f"{pair['source']} -> {pair['target']} ended early: {pair['failure']}")
    if heat_map is not None:
        trips = {(p["source"], p["target"]): p["echo_ms"]["p50"] for p in found["pairs"] if p["echo_ms"]}
        rows, across = (sorted({pair[n] for pair in trips}) for n in (0, 1))
        try:
            heat_map.write_text(drawn("Median round trip of an RPC", rows, across, trips, "ms"))
        except OSError as error:
            raise PreflightError(f"cannot write {heat_map}: {error.strerror}") from error
        output.say(f"heat map: {heat_map}")
    output.finish({**found})


def _round_trips(found: Latencies) -> Table:
    table = columns("from", "to")
    heads = ("p50 ms", "p90", "p99", "server p50", "network p50", "connect", "TLS", "first answer")
    for name in heads:
        table.add_column(name, justify="right")
    for pair in found["pairs"]:
        echo = pair["echo_ms"]
        cells = [_p50(echo), *(f"{echo[q]:.2f}" if echo else "-" for q in ("p90", "p99"))]
        rest = (
            pair["server_ms"],
            pair["network_ms"],
            pair["connect_ms"],
            pair["handshake_ms"],
            pair["first_ms"],
        )
        table.add_row(pair["source"], pair["target"], *cells, *map(_p50, rest))
    return table


def _p50(times: Times | None) -> str:
    return "-" if times is None else f"{times['p50']:.2f}"


def _carried(found: Latencies) -> Table:
    ways = [(one["size"], one["up"]) for pair in found["pairs"] for one in pair["carried"]]
    table = columns("from", "to")
    for size, up in dict.fromkeys(ways):
        table.add_column(f"{_size(size)} {'up' if up else 'down'}", justify="right")
    for pair in found["pairs"]:
        held = {(one["size"], one["up"]): one for one in pair["carried"]}
        cells = []
        for way in dict.fromkeys(ways):
            one = held.get(way)
            text = "-" if one is None else f"{one['ms']['p50']:.1f} ms"
            cells.append(
                f"{text}\n{one['mbit_s']:.0f} Mbit/s" if one is not None and way[0] >= 1 << 15 else text
            )
        table.add_row(pair["source"], pair["target"], *cells)
    return table


def _size(size: int) -> str:
    for unit, step in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= step:
            return f"{size // step} {unit}"
    return f"{size} B"
