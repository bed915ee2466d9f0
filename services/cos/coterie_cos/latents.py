"""Relay users' encrypted latent vectors to the third party: the COS sees whose they are, and not what is in them.

A user has one vector in an epoch.  Otherwise a host could pretend to be most of the key users of a set, and know all
that is in it but the vector of one user.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from coterie.net.channel import Channel
from coterie.net.uncancelled import completed
from coterie.store import cos as store
from coterie.wire.v1 import latents_pb2 as wire
from coterie.wire.v1.latents_pb2_grpc import LatentRelayServicer, MetaLatentsStub
from coterie_cos.run import Run
from coterie_cos.sealed_relay import SealedRelay, relayed_request

if TYPE_CHECKING:
    from coterie.wire.v1.latents_pb2_grpc import MetaLatentsAsyncStub

__all__ = ["LatentRelay"]


class LatentRelay(LatentRelayServicer):
    """The gRPC servicer that hands users' sealed requests of meta-latents on to the third party.

    Parameters
    ----------
    find, thirdparty, read
        As for `ExpansionRelay`.
    """

    def __init__(
        self,
        find: Callable[[str], Run],
        thirdparty: Channel,
        read: Callable[[Callable[[sa.Connection], Any]], Awaitable[Any]],
    ) -> None:
        self._stub: MetaLatentsAsyncStub = thirdparty.stub(lambda inner: MetaLatentsStub(inner))
        self._relay = SealedRelay(find, thirdparty.peer, read, store.latent_uploads, "latents")

    async def RelayLatent(  # noqa: N802 - the contract's name
        self, request: wire.RelayLatentRequest, context: Any
    ) -> wire.RelayLatentResponse:
        """Hand a user's sealed request on, and the answer back."""
        return await completed(self._relayed(request))

    async def _relayed(self, request: wire.RelayLatentRequest) -> wire.RelayLatentResponse:
        which, inner = relayed_request(request, "publish or forget")
        about = request.slot, inner
        if which == "publish":
            taken = await self._relay.publish(*about, self._stub.PublishEncrypted, request.publish)
            return wire.RelayLatentResponse(publish=taken)
        forgotten = await self._relay.forget(*about, self._stub.ForgetEncrypted, request.forget)
        return wire.RelayLatentResponse(forget=forgotten)
