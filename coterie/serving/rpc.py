"""The server of an exported model over gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from coterie.errors import ConfigError, CoterieError, PreflightError
from coterie.serving.answers import ModelAnswers, ServedUser
from coterie.wire.serving import serving_pb2 as wire
from coterie.wire.serving import serving_pb2_grpc as stubs

__all__ = ["ModelRpc", "start_rpc"]

_K = 10
_AT_ONCE = 64
"""Calls that wait or are answered at the same time; further ones are refused with RESOURCE_EXHAUSTED."""


class ModelRpc(stubs.ModelServerServicer):
    """Service ``ModelServer`` over a model.

    Parameters
    ----------
    answers : ModelAnswers
    """

    def __init__(self, answers: ModelAnswers) -> None:
        self._answers = answers

    async def Describe(  # noqa: N802 - the contract's name
        self, request: wire.DescribeModelRequest, context: Any
    ) -> wire.DescribeModelResponse:
        """Return what the model takes, and the limits of a request."""
        answers, model = self._answers, self._answers.model
        limits = answers.limits
        found = wire.DescribeModelResponse(
            label=str(model.about.get("label", "")),
            system=model.system,
            run=str(model.about.get("run", "")),
            version=model.version,
            items=len(model.items),
            vector_length=answers.vector_length,
            takes_histories=model.takes_histories,
            most_users=limits.users,
            most_items=limits.items,
            most_history=limits.history,
        )
        if answers.ratings is not None:
            found.ratings.lowest, found.ratings.highest = answers.ratings
        return found

    async def Recommend(  # noqa: N802
        self, request: wire.ModelRecommendRequest, context: Any
    ) -> wire.ModelRecommendResponse:
        """Return the best items for each user of the request."""
        users = [_user(one) for one in request.users]
        try:
            found = await asyncio.to_thread(self._answers.recommend, users, request.k or _K)
        except CoterieError as error:
            kind = grpc.StatusCode
            code = kind.FAILED_PRECONDITION if isinstance(error, ConfigError) else kind.INVALID_ARGUMENT
            await context.abort(code, str(error))
            raise AssertionError("abort raises") from error
        return wire.ModelRecommendResponse(
            answers=[
                wire.ModelAnswer(items=one.items, scores=one.scores, unknown=one.unknown) for one in found
            ]
        )


def _user(one: wire.ModelUser) -> ServedUser:
    history = [(each.item, each.rating if each.HasField("rating") else None) for each in one.history]
    return ServedUser(one.vector or None, history or None, one.exclude)


async def start_rpc(
    answers: ModelAnswers, address: str, credentials: grpc.ServerCredentials | None = None
) -> tuple[grpc.aio.Server, int]:
    """Start the server with its health service, and return it with its port.

    Parameters
    ----------
    answers : ModelAnswers
    address : str
        ``host:port``; port 0 is any.
    credentials : grpc.ServerCredentials, optional
        Plain connections without them.

    Raises
    ------
    PreflightError
        The address cannot be bound.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", answers.limits.request_bytes),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=_AT_ONCE,
    )
    stubs.add_ModelServerServicer_to_server(ModelRpc(answers), server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        port = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise PreflightError(
            f"cannot listen on {address} for gRPC: {error}", hint="--grpc names another address"
        ) from error
    serving = health_pb2.HealthCheckResponse.SERVING
    for name in ("", "coterie.serving.v1.ModelServer"):
        await health.set(name, serving)
    await server.start()
    return server, port
