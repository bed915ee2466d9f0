"""Calls to the third party's key directory about Paillier keys; the answers are not verified here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import grpc

from coterie.crypto.key_record import Countersignature, KeyRecord
from coterie.net.channel import Channel
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.parties.key_records import record_from_wire
from coterie.wire.v1 import thirdparty_pb2 as wire
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

if TYPE_CHECKING:
    from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryAsyncStub

__all__ = ["HOLD_S", "Enveloped", "PaillierDirectory"]

T = TypeVar("T")

HOLD_S = 20.0
"""Longest time for which the directory holds a call, seconds."""
_CALL_S = 10.0


class Enveloped(NamedTuple):
    """The newest published key of a run, with the secrets sealed for one of its holders."""

    record: KeyRecord | None
    """Record of the key; None when none is published."""
    sealed: bytes
    """Secrets sealed for the holder; empty for the generator, and for participants that are no holders."""


class PaillierDirectory:
    """Client of the key directory's calls about Paillier keys.

    Parameters
    ----------
    channel : Channel
        To the third party.
    retry : Retry, optional
        Retries of the calls, all of which may be repeated.

    Notes
    -----
    Every method raises `Refusal` when the directory refuses, and `PeerError` when it cannot be reached.
    """

    def __init__(self, channel: Channel, retry: Retry | None = None) -> None:
        self._peer = channel.peer
        self._stub: KeyDirectoryAsyncStub = channel.stub(lambda inner: KeyDirectoryStub(inner))
        self._retry = retry or Retry()

    async def publish(self, request: wire.PublishPaillierKeyRequest) -> None:
        """Publish a key, with its secrets sealed for each other holder."""

        async def attempt() -> wire.PublishPaillierKeyResponse:
            response: wire.PublishPaillierKeyResponse = await self._stub.PublishPaillierKey(request)
            return response

        await self._call(attempt)

    async def countersign(self, run: str, epoch: int, one: Countersignature) -> bool:
        """Send a holder's countersignature; return whether the key is complete, as the directory says."""
        request = wire.CountersignPaillierKeyRequest(
            run_id=run,
            epoch=epoch,
            countersignature=wire.PaillierCountersignature(
                signing_public=one.signing_public, signature=one.signature
            ),
        )

        async def attempt() -> wire.CountersignPaillierKeyResponse:
            response: wire.CountersignPaillierKeyResponse = await self._stub.CountersignPaillierKey(request)
            return response

        return (await self._call(attempt)).complete

    async def public_key(
        self, run: str, *, epoch: int = 0, held_epoch: int = 0, hold_s: float = 0.0
    ) -> KeyRecord | None:
        """Return the newest complete key of a run, or the key of an epoch; None when there is none.

        Parameters
        ----------
        run : str
        epoch : int, optional
            Epoch of the key, complete or not; 0 for the newest complete key.
        held_epoch : int, optional
            Epoch of the newest key that the caller knows.
        hold_s : float, optional
            Longest time to wait for a newer key, seconds, at most `HOLD_S`.
        """
        request = wire.PaillierPublicKeyRequest(
            run_id=run, epoch=epoch, held_epoch=held_epoch, hold_ms=_milliseconds(hold_s)
        )

        async def attempt() -> wire.PaillierPublicKeyResponse:
            response: wire.PaillierPublicKeyResponse = await self._stub.PaillierPublicKey(
                request, timeout=max(hold_s, 0.0) + _CALL_S
            )
            return response

        response = await self._call(attempt)
        return record_from_wire(response.record) if response.HasField("record") else None

    async def envelope(
        self, run: str, participant: bytes, *, held_epoch: int = 0, hold_s: float = 0.0
    ) -> Enveloped:
        """Return the newest published key of a run, and its secrets as sealed for one of the caller's participants.

        Parameters
        ----------
        run : str
        participant : bytes
            Id, 32 bytes.
        held_epoch, hold_s
            As in `public_key`.
        """
        request = wire.PaillierEnvelopeRequest(
            run_id=run, participant=participant, held_epoch=held_epoch, hold_ms=_milliseconds(hold_s)
        )

        async def attempt() -> wire.PaillierEnvelopeResponse:
            response: wire.PaillierEnvelopeResponse = await self._stub.PaillierEnvelope(
                request, timeout=max(hold_s, 0.0) + _CALL_S
            )
            return response

        response = await self._call(attempt)
        record = record_from_wire(response.record) if response.HasField("record") else None
        return Enveloped(record, response.sealed)

    async def _call(self, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._retry(attempt)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error


def _milliseconds(seconds: float) -> int:
    return int(1000 * min(max(seconds, 0.0), HOLD_S))
