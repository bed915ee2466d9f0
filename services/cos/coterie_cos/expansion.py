"""Relay users' requests of graph expansion to the third party: the COS sees whose they are, and not what is in them.

A user has one upload in an epoch.  Otherwise a host with few users would have its tags served although few users have
them, and ask for more neighbours than one user may.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from coterie.net.channel import Channel
from coterie.net.uncancelled import completed
from coterie.store import cos as store
from coterie.wire.v1 import expansion_pb2 as wire
from coterie.wire.v1.expansion_pb2_grpc import ExpansionRelayServicer, GraphExpansionStub
from coterie_cos.run import Run
from coterie_cos.sealed_relay import SealedRelay, relayed_request

if TYPE_CHECKING:
    from coterie.wire.v1.expansion_pb2_grpc import GraphExpansionAsyncStub

__all__ = ["ExpansionRelay"]


class ExpansionRelay(ExpansionRelayServicer):
    """The gRPC servicer that hands users' sealed requests of graph expansion on to the third party.

    Parameters
    ----------
    find : callable
        Returns a run by id, or raises a Refusal.
    thirdparty : Channel
        To the third party.
    read : callable
        Runs a function on a connection that reads the store.
    """

    def __init__(
        self,
        find: Callable[[str], Run],
        thirdparty: Channel,
        read: Callable[[Callable[[sa.Connection], Any]], Awaitable[Any]],
    ) -> None:
        self._stub: GraphExpansionAsyncStub = thirdparty.stub(lambda inner: GraphExpansionStub(inner))
        self._relay = SealedRelay(find, thirdparty.peer, read, store.expansion_uploads, "expansion")

    async def Relay(self, request: wire.RelayRequest, context: Any) -> wire.RelayResponse:  # noqa: N802
        """Hand a user's sealed request on, and the answer back."""
        return await completed(self._relayed(request))

    async def _relayed(self, request: wire.RelayRequest) -> wire.RelayResponse:
        which, inner = relayed_request(request, "publish, neighbours or forget")
        about = request.slot, inner
        if which == "publish":
            taken = await self._relay.publish(*about, self._stub.PublishTags, request.publish)
            return wire.RelayResponse(publish=taken)
        if which == "neighbours":
            found = await self._relay.ask(*about, self._stub.Neighbours, request.neighbours)
            return wire.RelayResponse(neighbours=found)
        forgotten = await self._relay.forget(*about, self._stub.Forget, request.forget)
        return wire.RelayResponse(forget=forgotten)
