"""The ``LogGossip`` servicer, by which the COS and data owners compare the log's heads that parties were shown."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import structlog

from coterie.crypto.transparency import FalseLogError
from coterie.crypto.verification import VerificationError
from coterie.errors import PeerError
from coterie.net.authorisation import callers_of
from coterie.net.log_messages import head_from_wire, head_to_wire
from coterie.net.server import current_peer
from coterie.net.transparency import HOLD_S, MOST_HEADS, LogWatch
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.log_pb2 import CompareHeadsRequest, CompareHeadsResponse
from coterie.wire.v1.log_pb2_grpc import LogGossipServicer

__all__ = ["LogGossip"]

_log = structlog.get_logger("coterie.log")


class LogGossip(LogGossipServicer):
    """Compares heads with those who call.

    Parameters
    ----------
    watch : LogWatch
        The process's own watch over the log.
    directory_key : bytes
        Raw Ed25519 public key of the directory, 32 bytes.
    role : str
        Role of the process; roles that may call it for something else may compare heads.
    stopping : asyncio.Event
        Set when the process stops, and holds no call any more.
    """

    def __init__(self, watch: LogWatch, directory_key: bytes, role: str, stopping: asyncio.Event) -> None:
        self._watch = watch
        self._directory_key = directory_key
        self._role = role
        self._callers = callers_of(role)
        self._stopping = stopping

    async def CompareHeads(  # noqa: N802 - the contract's name
        self, request: CompareHeadsRequest, context: Any
    ) -> CompareHeadsResponse:
        """Take the caller's head, and return others: at once where there are some, otherwise after a hold."""
        peer = current_peer()
        if peer.role not in self._callers:
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_ROLE,
                f"role {peer.role or 'none'} calls nothing of a {self._role}, and has no heads to compare",
                field="certificate",
            )
        head = head_from_wire(request.head) if request.HasField("head") else None
        if head is not None:
            try:
                head.verify(self._directory_key)
            except VerificationError as error:
                raise Refusal(
                    ErrorReason.ERROR_REASON_BAD_SIGNATURE,
                    error.message,
                    field="head",
                    expected="a head that the third party signed",
                ) from error
            # The answer shows the heads that contradict each other, if they do.
            with contextlib.suppress(FalseLogError):
                try:
                    await self._watch.see(head)
                except PeerError as error:
                    _log.warning(
                        "a head of the log is not compared yet", party=str(peer), error=error.message
                    )
        changed = asyncio.ensure_future(self._watch.changed())
        others = self._watch.beside(head)
        if not others and request.hold_ms:
            stopping = asyncio.ensure_future(self._stopping.wait())
            limit_s = min(request.hold_ms / 1000, HOLD_S)
            try:
                await asyncio.wait({changed, stopping}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
            others = self._watch.beside(head)
        changed.cancel()
        return CompareHeadsResponse(heads=[head_to_wire(one) for one in others[:MOST_HEADS]])
