from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from coterie.config.base import ServiceSettings
from coterie.crypto.authority import Authority, make_csr, new_tls_key, save_tls_key
from coterie.net.credentials import TlsFiles
from coterie.net.meter import Meter
from coterie.net.server import Guard
from coterie.process.runtime import Runtime
from coterie.telemetry.accounting import Accounting

_ALLOW = """
import resource
from coterie.process.runtime import allow_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_files({connections})
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "allowed"),
    [(256, 4000, 2000, 2512), (256, 1000, 2000, 1000), (3000, 4000, 2000, 3000)],
    ids=["more", "what-there-is", "enough"],
)
def test_a_service_may_have_as_many_files_as_connections_as_far_as_the_system_lets_it(
    soft: int, hard: int, connections: int, allowed: int
) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"fewer than {hard} open files are allowed here")
    program = _ALLOW.format(soft=soft, hard=hard, connections=connections)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{allowed} {hard}"
    assert ("fewer open files" in done.stdout) == (allowed < connections + 512)


def runtime_in(folder: Path) -> Runtime:
    """Return the parts of a service with a certificate of its own, to be made within a loop."""
    authority, tls, key = Authority.create("authority", 9), TlsFiles(folder / "tls"), new_tls_key()
    tls.folder.mkdir(parents=True)
    save_tls_key(tls.key, key)
    tls.chain.write_bytes(authority.issue(make_csr(key), "client", "host", 1) + authority.certificate_pem)
    tls.authority.write_bytes(authority.certificate_pem)
    settings = ServiceSettings(name="host", state=folder, listen="127.0.0.1:1")
    return Runtime("client", settings, tls, Guard(Meter()), Meter(), Accounting(), None)


def test_health_follows_conditions_and_the_end_of_the_service_in_the_next_turn_of_the_loop(
    tmp_path: Path,
) -> None:
    status = health_pb2.HealthCheckResponse

    async def follow() -> list[int]:
        runtime = runtime_in(tmp_path)
        said: list[int] = []

        async def now() -> None:
            for _ in range(10):
                await asyncio.sleep(0)
            health: Any = runtime._health
            answer = await health.Check(health_pb2.HealthCheckRequest(), None)
            said.append(answer.status)

        runtime.require(["store", "run"])
        publishing = asyncio.create_task(runtime.publish_health())
        for condition, value in (("store", True), ("run", True), ("store", False), ("store", True)):
            runtime.holds(condition, value)
            await now()
        runtime.stopping.set()
        await now()
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        return said

    serving, not_serving = status.SERVING, status.NOT_SERVING
    assert asyncio.run(follow()) == [not_serving, serving, not_serving, serving, not_serving]
