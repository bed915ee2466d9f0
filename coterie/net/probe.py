"""The ``Probe`` servicer, which every service offers for network measurements: echoes, and filler both ways."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from coterie.net.authorisation import callers_of
from coterie.net.server import current_peer
from coterie.wire.chunks import CHUNK_BYTES
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import latency_pb2 as wire
from coterie.wire.v1.latency_pb2_grpc import ProbeServicer

__all__ = ["MAX_BYTES", "Probe", "filler"]

MAX_BYTES = 16 << 20
"""Most bytes of filler in one call, each way."""

_MAX_CALLS = 4
"""Most callers at once: callers that share the bandwidth would distort each other's measurements."""

_PIECE = bytes(CHUNK_BYTES)


def filler(size: int) -> Iterator[bytes]:
    """Yield ``size`` zero bytes in pieces of at most 1 MiB; at least one piece."""
    yield _PIECE[:size]
    for offset in range(CHUNK_BYTES, size, CHUNK_BYTES):
        yield _PIECE[: size - offset]


class Probe(ProbeServicer):
    """Answers network measurements of other processes.

    Parameters
    ----------
    role : str
        Role of the service that offers it; roles that may call that service may call this one.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._callers = callers_of(role)
        self._under_way: set[bytes] = set()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        peer = current_peer()
        if peer.role not in self._callers:
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_ROLE,
                f"role {peer.role or 'none'} calls nothing of a {self._role}, and has nothing to measure",
                field="certificate",
            )
        if peer.fingerprint in self._under_way or len(self._under_way) >= _MAX_CALLS:
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_STATE,
                "filler is being carried already",
                field="filler",
                expected=f"one call at a time, and at most {_MAX_CALLS} callers",
            )
        self._under_way.add(peer.fingerprint)
        try:
            yield
        finally:
            self._under_way.discard(peer.fingerprint)

    async def Echo(self, request: wire.EchoRequest, context: Any) -> wire.EchoResponse:  # noqa: N802
        """Return an empty response at once."""
        with self._alone():
            return wire.EchoResponse()

    async def Carry(  # noqa: N802
        self, request_iterator: AsyncIterator[wire.CarryRequest], context: Any
    ) -> AsyncIterator[wire.CarryResponse]:
        """Receive filler, then send as many bytes of filler as the first request asked for."""
        with self._alone():
            arrived, wanted = 0, None
            async for request in request_iterator:
                wanted = request.wanted if wanted is None else wanted
                arrived += len(request.filler)
                if len(request.filler) > CHUNK_BYTES or max(arrived, wanted) > MAX_BYTES:
                    raise Refusal(
                        ErrorReason.ERROR_REASON_TOO_LARGE,
                        "more filler than is carried",
                        field="filler",
                        expected=f"at most {MAX_BYTES} bytes each way, in pieces of {CHUNK_BYTES} at most",
                    )
            held: bytes | None = None
            for piece in filler(wanted or 0):
                if held is not None:
                    yield wire.CarryResponse(filler=held)
                held = piece
            yield wire.CarryResponse(filler=held or b"", arrived=arrived)
