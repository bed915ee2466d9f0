"""Counters of the third party's services, which the operator asks for at the end of a run, for its report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc

from coterie.errors import PeerError
from coterie.net.channel import Channel
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.wire.v1 import expansion_pb2, latents_pb2
from coterie.wire.v1.expansion_pb2_grpc import GraphExpansionStub
from coterie.wire.v1.latents_pb2_grpc import MetaLatentsStub

__all__ = ["service_counts"]

_CALL_S = 5.0

T = TypeVar("T")


async def service_counts(channel: Channel, run_id: str, services: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the counters of some of the third party's services, by service.

    Parameters
    ----------
    channel : Channel
        To the third party, with an operator's certificate.
    run_id : str
    services : iterable of str
        Names as in the COS's facts: ``"expansion"``, ``"latents"``; others are left out.

    Returns
    -------
    dict of str to dict
        ``counters`` by name and ``refused`` requests by reason; a service that does not answer is left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for service in services:
        ask = _QUESTIONS.get(service)
        if ask is None:
            continue
        try:
            found[service] = await ask(channel, run_id)
        except PeerError:
            # A run that has trained gets its report, whether the third party is still there or not.
            continue
    return found


async def _of_graph(channel: Channel, run_id: str) -> dict[str, Any]:
    # Generated stubs are typed for gRPC's own channel; ours takes and returns the same messages.
    stub: Any = channel.stub(GraphExpansionStub)
    request = expansion_pb2.ExpansionStateRequest(run_id=run_id)
    state = await _answer(channel, lambda: stub.ExpansionState(request, timeout=_CALL_S))
    names = ("epoch", "uploads", "tags", "served_tags", "questions", "neighbours")
    return {
        "counters": {name: getattr(state, name) for name in names},
        "refused": {one.reason: one.count for one in state.refusals},
    }


async def _of_latents(channel: Channel, run_id: str) -> dict[str, Any]:
    stub: Any = channel.stub(MetaLatentsStub)
    request = latents_pb2.LatentSetRequest(run_id=run_id)
    kept = await _answer(channel, lambda: stub.LatentSet(request, timeout=_CALL_S))
    ready = kept.state == latents_pb2.LatentState.LATENT_STATE_READY
    combined = kept.record.combinations if ready else 0
    counters = {"epoch": kept.record.epoch, "key_users": kept.key_users, "combinations": combined}
    return {"counters": counters, "refused": {}}


_QUESTIONS = {"expansion": _of_graph, "latents": _of_latents}


async def _answer(channel: Channel, attempt: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await Retry(limit_s=_CALL_S)(attempt)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, channel.peer) from error
