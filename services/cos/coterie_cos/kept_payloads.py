"""What an intake keeps of the coordinator's payloads: those that many parties are told of, or fetch, alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import structlog

from coterie.errors import CoterieError
from coterie.wire.v1 import orchestrator_pb2 as wire

__all__ = ["KeptPayloads", "Named"]

_log = structlog.get_logger("coterie.cos")

_LAST = 2
"""Payloads of a kind that are kept of a run: the present one, and the one before for those that are late."""
_MOST_BYTES = 1 << 30
"""Most bytes that are kept; the payload that was had last stays, however large it is."""


class Named(NamedTuple):
    """A payload as the coordinator names it: by its hash, so that no other bytes can be taken for it."""

    run_id: str
    kind: wire.FetchKind.ValueType
    sha256: bytes


class KeptPayloads:
    """Payloads by their hash, each fetched once however many ask for it.

    Parameters
    ----------
    fetch : callable
        Returns the payload of a name from the coordinator, with the hash that the name has.
    """

    def __init__(self, fetch: Callable[[Named], Awaitable[bytes]]) -> None:
        self._fetch = fetch
        self._kept: dict[Named, bytes] = {}
        self._fetching: dict[Named, asyncio.Task[bytes | None]] = {}

    async def payload(self, name: Named) -> bytes | None:
        """Return a payload, kept or fetched; None when the coordinator does not give it."""
        found = self._kept.pop(name, None)
        if found is not None:
            # Used last.
            self._kept[name] = found
            return found
        fetching = self._fetching.get(name)
        if fetching is None:
            fetching = self._fetching[name] = asyncio.create_task(self._fetched(name))
            fetching.add_done_callback(lambda _: self._fetching.pop(name, None))
        # One caller that gives up must not end it for the others.
        return await asyncio.shield(fetching)

    async def _fetched(self, name: Named) -> bytes | None:
        try:
            payload = await self._fetch(name)
        except CoterieError as error:
            # Parties fetch it themselves, through the coordinator.
            _log.info("a payload is not kept", kind=wire.FetchKind.Name(name.kind), error=str(error))
            return None
        self.keep(name, payload)
        return payload

    def newest(self, run_id: str, kind: wire.FetchKind.ValueType) -> tuple[Named, bytes] | None:
        """Return the payload of a kind that was kept last for a run, and its name."""
        name = next((one for one in reversed(self._kept) if one[:2] == (run_id, kind)), None)
        if name is None:
            return None
        # Used last.
        payload = self._kept[name] = self._kept.pop(name)
        return name, payload

    def keep(self, name: Named, payload: bytes) -> None:
        """Keep a payload that has the hash of its name, in place of the last but one of its kind."""
        self._kept.pop(name, None)
        alike = [one for one in self._kept if one[:2] == name[:2]]
        for old in alike[: max(0, len(alike) + 1 - _LAST)]:
            del self._kept[old]
        self._kept[name] = payload
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _MOST_BYTES:
            del self._kept[next(iter(self._kept))]
