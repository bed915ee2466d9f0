"""Run an intake of the COS: it holds callers' connections and polls, takes contributions, and hands other calls on.

Intakes keep nothing of a run but what is in the coordinator's database.  Any of them may end at any moment: its callers
come back through another one.
"""

from __future__ import annotations

import asyncio

import grpc
import structlog
from grpc_health.v1 import health_pb2

from coterie.config.services import CosSettings
from coterie.crypto.authority import logical_name
from coterie.net.authorisation import OFFERED
from coterie.net.channel import Channel
from coterie.net.relay import Relay
from coterie.net.server import current_peer
from coterie.net.status import from_rpc_error
from coterie.net.vouching import claim
from coterie.process.runtime import Runtime
from coterie.store.postgres import DatabaseAddress
from coterie.telemetry.seldom import Seldom
from coterie.wire.refusal import Refusal

# Imported for their descriptors: the calls of these services are handed on.
from coterie.wire.v1 import (  # noqa: F401
    expansion_pb2,
    latency_pb2,
    latents_pb2,
    log_pb2,
    operator_pb2,
    orchestrator_pb2,
)
from coterie_cos.holding import PollHolder
from coterie_cos.taking import SUBMIT_METHOD, Taking

__all__ = ["IntakeProcess"]

_log = structlog.get_logger("coterie.cos")

_LINES = 4
"""Connections to the coordinator."""

_LOOK_S = 1.0
"""Time between two looks at the coordinator's health, seconds."""

_ANSWER_S = 3.0

COORDINATOR = "coordinator"
"""Condition of health: the coordinator answers this intake, and serves."""


class IntakeProcess:
    """A running intake."""

    def __init__(self, settings: CosSettings, runtime: Runtime) -> None:
        self._runtime = runtime
        runtime.require([COORDINATOR, "directory"])
        first, *others = settings.coordinator
        self._lines: list[Channel] = [
            runtime.connect_to(
                first,
                tls_name=logical_name("cos", settings.name),
                peer=f"coordinator/{settings.name}",
                standbys=others,
            )
            for _ in range(_LINES)
        ]
        self._relay = Relay(self._lines, self._refused)
        if settings.database is None:
            raise AssertionError("an intake has a database")
        database = DatabaseAddress(**settings.database.model_dump())
        self._holding = PollHolder(self._lines[0], self._relay)
        thirdparty = runtime.connect(settings.thirdparty, "thirdparty")
        self._revocations = runtime.watch_revocations(thirdparty)
        self._taking = Taking(
            database.engine(),
            self._relay,
            runtime.accounting,
            self._holding,
            revoked=self._revocations.is_revoked,
            limit_s=3 * settings.database.timeout_s,
            max_uploads=settings.max_uploads,
            max_payload=settings.max_payload_mb << 20,
        )

    def _refused(self, rpc: str, refusal: Refusal) -> None:
        self._runtime.guard.refused(rpc, refusal, current_peer())

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the services of the COS to the gRPC server."""
        submit = grpc.stream_unary_rpc_method_handler(
            self._taking.submit,
            request_deserializer=orchestrator_pb2.SubmitRequest.FromString,
            response_serializer=orchestrator_pb2.SubmitResponse.SerializeToString,
        )
        own = {SUBMIT_METHOD: submit, **self._holding.handlers()}
        self._relay.add_to(server, [f"coterie.v1.{name}" for name in OFFERED["cos"]], own)

    async def run(self) -> None:
        """Watch the revocation list and the coordinator's health."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._revocations.run())
            tasks.create_task(self._watch_coordinator())
            tasks.create_task(self._holding.run())

    async def _watch_coordinator(self) -> None:
        silence = Seldom(_log)
        while True:
            why = await self._looked()
            self._runtime.holds(COORDINATOR, not why)
            if why:
                silence.warning("the coordinator does not take calls of this intake", error=why)
            else:
                silence.over("the coordinator takes calls again")
            await asyncio.sleep(_LOOK_S)

    async def _looked(self) -> str:
        """Return why the coordinator does not serve this intake; empty when it does."""
        ask = self._lines[0].pass_one_on("/grpc.health.v1.Health/Check")
        question = health_pb2.HealthCheckRequest().SerializeToString()
        try:
            answer = await ask(question, timeout=_ANSWER_S, metadata=claim())
        except grpc.aio.AioRpcError as error:
            return str(from_rpc_error(error, "the coordinator"))
        status = health_pb2.HealthCheckResponse.FromString(answer).status
        return "" if status == health_pb2.HealthCheckResponse.SERVING else "it is not healthy"

    async def close(self) -> None:
        """Close the connection to the database."""
        await asyncio.to_thread(self._taking.close)
