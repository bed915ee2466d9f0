"""Seal users' requests to the third party, for its expansion services; whoever uses it has the COS relay them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc

from coterie.crypto import clocks
from coterie.crypto.graph_requests import AnswerKey, Kind, SealingKey, UploadPlace, seal_request
from coterie.errors import CryptoError, PeerError
from coterie.net.channel import CallTarget
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import expansion_pb2 as wire
from coterie.wire.v1.expansion_pb2_grpc import GraphExpansionStub

if TYPE_CHECKING:
    from coterie.wire.v1.expansion_pb2_grpc import GraphExpansionAsyncStub

__all__ = ["RequestSealer", "is_gone"]

T = TypeVar("T")

_CALL_S = 10.0
_MARGIN_S = 60
"""A sealing key is fetched again so long before its expiry, seconds."""


def is_gone(refusal: Refusal) -> bool:
    """Return whether the third party does not have an upload, or its graph or set: nothing is left to delete.

    The COS has the same reasons for a run, a slot or an upload that it does not know, perhaps after a restore from a
    backup; it names other fields, and says nothing about what the third party holds.
    """
    unknown = (ErrorReason.ERROR_REASON_UNKNOWN_ROUND, ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT)
    return refusal.reason in unknown and refusal.field in ("epoch", "upload_id")


class RequestSealer:
    """Seals requests to the third party's key, which it fetches and verifies.

    Parameters
    ----------
    thirdparty : CallTarget
        To the third party, for its sealing key only.
    directory_key : bytes
        The directory's raw Ed25519 public key, 32 bytes, as enrolment left it in the state folder.
    retry : Retry
        Retries of the call for the key.
    clock : callable, optional
        Gives Unix seconds.
    """

    def __init__(
        self,
        thirdparty: CallTarget,
        directory_key: bytes,
        retry: Retry,
        clock: Callable[[], float] = clocks.now_s,
    ) -> None:
        self._stub: GraphExpansionAsyncStub = thirdparty.stub(lambda inner: GraphExpansionStub(inner))
        self._peer = thirdparty.peer
        self._directory_key = directory_key
        self._retry = retry
        self._clock = clock
        self._key: SealingKey | None = None

    async def ask(
        self,
        kind: Kind,
        place: UploadPlace,
        content: bytes,
        relay: Callable[[wire.SealedRequest], Awaitable[T]],
    ) -> tuple[T, AnswerKey]:
        """Seal a content, have it relayed, and return the answer with its key; once more where the key is too old.

        Raises
        ------
        PeerError
            When the third party cannot be reached, or its key does not verify; `Refusal` when it refuses.
        """
        for again in (True, False):
            key = await self._sealing_key()
            sealed, answer = seal_request(kind, place, key, content)
            request = wire.SealedRequest(
                run_id=place.run,
                epoch=place.epoch,
                upload_id=place.upload_id,
                key_id=key.key_id,
                sealed=sealed,
            )
            try:
                return await relay(request), answer
            except Refusal as refusal:
                if not again or refusal.reason != ErrorReason.ERROR_REASON_UNKNOWN_PREKEY:
                    raise
                self._key = None
        raise AssertionError("the second attempt returns or raises")

    async def reach(self) -> None:
        """Return once the third party has given its key anew; raises as `ask`."""
        self._key = None
        await self._sealing_key()

    async def _sealing_key(self) -> SealingKey:
        """Return the third party's key, verified; fetch it where there is none that is valid for long enough."""
        now = int(self._clock())
        if self._key is not None and now < self._key.expiry - _MARGIN_S:
            return self._key

        async def attempt() -> wire.SealingKeyResponse:
            response: wire.SealingKeyResponse = await self._stub.SealingKey(
                wire.SealingKeyRequest(), timeout=_CALL_S
            )
            return response

        try:
            found = await self._retry(attempt)
            key = SealingKey(found.key_id, found.public, found.expiry, found.signature)
            key.verify(self._directory_key, now)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error
        except CryptoError as error:
            raise PeerError(f"{self._peer}: {error.message}") from error
        self._key = key
        return key
