"""Answer questions about the transparency log: its head, proofs, entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coterie.crypto.transparency import LogKey
from coterie.net.log_messages import head_to_wire
from coterie.store.thirdparty import ThirdPartyStore
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import log_pb2 as wire
from coterie.wire.v1.log_pb2_grpc import TransparencyLogServicer
from coterie_thirdparty.certification import PER_MESSAGE, check_count
from coterie_thirdparty.storing import storing

__all__ = ["LogServicer"]

_HASH = 32
_LAST = (1 << 31) - 1


class LogServicer(TransparencyLogServicer):
    """The gRPC servicer of the transparency log, for parties that have a certificate.

    Parameters
    ----------
    key : LogKey
        Signs heads.
    store : ThirdPartyStore
        Has the entries.
    store_holds : callable
        Called with whether the store works.
    """

    def __init__(self, key: LogKey, store: ThirdPartyStore, store_holds: Callable[[bool], None]) -> None:
        self._key = key
        self._store = store
        self._store_holds = store_holds

    async def LogHead(  # noqa: N802 - the contract's name
        self, request: wire.LogHeadRequest, context: Any
    ) -> wire.LogHeadResponse:
        """Return the newest head."""
        with storing(self._store_holds):
            size, root, time_ms = await self._store.log_head()
        return wire.LogHeadResponse(head=head_to_wire(self._key.sign(size, root, time_ms)))

    async def LogInclusion(  # noqa: N802 - the contract's name
        self, request: wire.LogInclusionRequest, context: Any
    ) -> wire.LogInclusionResponse:
        """Return proofs that entries are in the tree of a size."""
        check_count(len(request.leaves), PER_MESSAGE, "leaves")
        for leaf in request.leaves:
            if len(leaf) != _HASH:
                raise _invalid("leaves", f"{len(leaf)} bytes", f"{_HASH} bytes each")
        _check_number(request.size, "size")
        if request.joint:
            with storing(self._store_holds):
                positions, path = await self._store.log_inclusions(request.leaves, request.size)
            return wire.LogInclusionResponse(positions=positions, path=b"".join(path))
        with storing(self._store_holds):
            found = await self._store.log_inclusion(request.leaves, request.size)
        return wire.LogInclusionResponse(
            proofs=[
                wire.InclusionProof()
                if one is None
                else wire.InclusionProof(found=True, index=one.position, path=b"".join(one.path))
                for one in found
            ]
        )

    async def LogConsistency(  # noqa: N802 - the contract's name
        self, request: wire.LogConsistencyRequest, context: Any
    ) -> wire.LogConsistencyResponse:
        """Return the proof that the log grew from one size to another."""
        _check_number(request.first, "first")
        _check_number(request.second, "second")
        with storing(self._store_holds):
            path = await self._store.log_consistency(request.first, request.second)
        return wire.LogConsistencyResponse(path=b"".join(path))

    async def LogEntries(  # noqa: N802 - the contract's name
        self, request: wire.LogEntriesRequest, context: Any
    ) -> wire.LogEntriesResponse:
        """Return a page of entries."""
        _check_number(request.first, "first")
        if not 1 <= request.count <= PER_MESSAGE:
            raise _invalid("count", str(request.count), f"1 to {PER_MESSAGE}")
        with storing(self._store_holds):
            found = await self._store.log_entries(request.first, request.count)
        return wire.LogEntriesResponse(
            entries=[wire.LogEntry(kind=kind, statement=statement) for kind, statement in found]
        )


def _check_number(value: int, field: str) -> None:
    if value > _LAST:
        raise _invalid(field, str(value), f"at most {_LAST}")


def _invalid(field: str, message: str, expected: str) -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, message, field=field, expected=expected)
