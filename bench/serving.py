"""Measure ``coterie serve-model`` with 100,000 items, over gRPC and HTTP, beside a bare gRPC echo on the same machine.

The server is a process of its own; callers are in this one, which shares the machine with it.  Factors are random.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.rows import Ask, Row, higher, lower
from coterie.config.run import RunSettings
from coterie.launch.model_folder import ExportedModel
from coterie.studies.run_plan import run_plan
from coterie.wire.serving import serving_pb2 as wire
from coterie.wire.serving.serving_pb2_grpc import ModelServerStub

_ITEMS = 100_000
_CALLERS = 8
_ECHO = "/bench.Echo/Echo"
_HISTORY = 50

Call = Callable[[int], Awaitable[object]]
"""Function that makes one call, given its number."""


@dataclass(frozen=True)
class _Times:
    """Calls a second, and the 50th and 99th percentile of one call in milliseconds."""

    rate: float
    p50: float
    p99: float


def _model(items: int, folder: Path) -> ExportedModel:
    """Write a model of a factor system with random factors."""
    run = RunSettings.model_validate({"system": "fedmf"})
    plan = run_plan(run, run_id="bench", seed=0)
    rng = np.random.default_rng(0)
    keys = tuple(f"item-{number}" for number in range(items))
    width = ExportedModel("fedmf", plan.settings, 0, 1, keys[:2], {}, {}).vector_length
    arrays = {
        "items": rng.normal(0, 0.1, (items, width)).astype(np.float32),
        "popularity": np.zeros(items, np.float32),
    }
    about = {
        "label": "random factors",
        "run": "bench",
        "dataset": "random",
        "users": 0,
        "split": "none",
        "split_sha256": "",
        "secure_sum": "clear",
        "metrics": {},
    }
    model = ExportedModel("fedmf", plan.settings, 0, 1, keys, arrays, about)
    model.save(folder)
    return model


async def _measured(call: Call, calls: int) -> _Times:
    """Make calls from several callers at once; return the rate and the times of single calls."""
    for number in range(_CALLERS):
        await call(number)
    times: list[float] = []
    left = iter(range(calls))

    async def caller() -> None:
        for number in left:
            begun = time.perf_counter()
            await call(number)
            times.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(_CALLERS)))
    spent = time.perf_counter() - begun
    p50, p99 = np.percentile(np.array(times) * 1e3, [50, 99]).tolist()
    return _Times(calls / spent, p50, p99)


def echo_server() -> None:
    """Serve an echo of bytes over gRPC, and print its port: the process that the model's server is compared with."""

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def serve() -> None:
        server = grpc.aio.server()
        method: Any = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bench.Echo", {"Echo": method}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()

    asyncio.run(serve())


def _start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start a process, and return it with its first line."""
    process = subprocess.Popen([sys.executable, "-P", *arguments], stdout=subprocess.PIPE, text=True)
    if process.stdout is None:
        raise AssertionError("its output is a pipe")
    return process, process.stdout.readline()


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _all(model: ExportedModel, at: dict[str, Any], echo: str, calls: int) -> dict[str, _Times]:
    import httpx

    rng = np.random.default_rng(1)
    vectors = rng.normal(0, 0.1, (64, model.arrays["items"].shape[1])).astype(np.float32)
    histories = [
        rng.choice(len(model.items), min(_HISTORY, len(model.items) - 1), replace=False) for _ in range(64)
    ]
    by_vector = [wire.ModelRecommendRequest(users=[wire.ModelUser(vector=one)], k=10) for one in vectors]
    by_history = [
        wire.ModelRecommendRequest(
            users=[
                wire.ModelUser(
                    history=[wire.RatedItem(item=model.items[item], rating=4.0) for item in one.tolist()]
                )
            ],
            k=10,
        )
        for one in histories
    ]
    batches = [wire.ModelRecommendRequest(users=[wire.ModelUser(vector=one) for one in vectors[:32]], k=10)]
    payload = by_vector[0].SerializeToString()
    found: dict[str, _Times] = {}
    async with grpc.aio.insecure_channel(at["grpc"]) as channel, grpc.aio.insecure_channel(echo) as other:
        stub: Any = ModelServerStub(channel)
        bare: Any = other.unary_unary(_ECHO)
        found["echo"] = await _measured(lambda number: bare(payload), calls * 4)
        found["vector"] = await _measured(lambda number: stub.Recommend(by_vector[number % 64]), calls)
        found["history"] = await _measured(lambda number: stub.Recommend(by_history[number % 64]), calls)
        found["batch"] = await _measured(lambda number: stub.Recommend(batches[0]), max(4, calls // 16))
    async with httpx.AsyncClient(base_url=f"http://{at['http']}", timeout=60) as client:
        bodies = [{"vector": one.astype(float).tolist(), "k": 10} for one in vectors]
        found["http"] = await _measured(
            lambda number: client.post("/recommend", json=bodies[number % 64]), calls
        )
    return found


def rows(ask: Ask) -> Iterator[Row]:
    """Measure calls a second and the 99th percentile, of vectors, histories and batches."""
    items, calls = ask.size(_ITEMS, 500), ask.size(2000, 16)
    with tempfile.TemporaryDirectory() as folder:
        model = _model(items, Path(folder) / "model")
        code = "import sys; sys.path.insert(0, sys.argv[1]); from bench.serving import echo_server; echo_server()"
        echo, port = _start("-c", code, str(Path.cwd()))
        ours, line = _start(
            *("-m", "coterie", "serve-model", str(Path(folder) / "model")),
            *("--http=127.0.0.1:0", "--grpc=127.0.0.1:0", "--json"),
        )
        try:
            at = json.loads(line)["result"]
            found = asyncio.run(_all(model, at, f"127.0.0.1:{int(port)}", calls))
        finally:
            _stop(ours)
            _stop(echo)
    bare = found["echo"]
    what = {
        "vector": "one vector of a call, gRPC",
        "history": f"one history of {_HISTORY} ratings of a call, gRPC",
        "batch": "32 vectors of a call, gRPC",
        "http": "one vector of a call, HTTP with JSON",
    }
    for name, note in what.items():
        one = found[name]
        note = f"{note}; {items:,} items, 10 wanted, {_CALLERS} callers; theirs: a bare echo"
        yield higher(f"serving.{name}.rate", one.rate, bare.rate, "calls/s", note)
        yield lower(
            f"serving.{name}.p99",
            one.p99,
            bare.p99,
            "ms",
            f"median {one.p50:.2f} ms; of the echo {bare.p50:.2f}",
        )
