"""Run a bare ``grpc.aio`` server with mutual TLS, which counts a stream of messages, as baseline of `bench.submit`.

Nothing stands between gRPC and the loop that counts: no guard, no meter, no hash, no store.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from coterie.net.credentials import TlsFiles
from coterie.wire.v1 import orchestrator_pb2 as wire

METHOD = "/bench.Stream/Take"


async def _take(requests: AsyncIterator[wire.SubmitRequest], context: Any) -> wire.SubmitResponse:
    taken = 0
    async for _ in requests:
        taken += 1
    return wire.SubmitResponse(accepted=taken)


async def serve(address: str, tls: Path) -> None:
    """Serve until the process is killed."""
    handler = grpc.stream_unary_rpc_method_handler(
        _take, wire.SubmitRequest.FromString, wire.SubmitResponse.SerializeToString
    )
    service, _, method = METHOD.lstrip("/").partition("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_secure_port(address, TlsFiles(tls).server_credentials())
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    """Serve on uvloop, as services do, where it is installed."""
    work = serve(sys.argv[1], Path(sys.argv[2]))
    with contextlib.suppress(ImportError):
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work)
    return asyncio.run(work)


if __name__ == "__main__":
    main()
