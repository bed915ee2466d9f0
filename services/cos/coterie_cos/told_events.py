"""Events of a run at the COS: the last ones in memory, earlier ones in the store, and what the report says of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa

from coterie.store import cos as store
from coterie.wire.v1 import operator_pb2 as operator

__all__ = ["ToldEvents", "stored", "stored_page"]

_NOTHING: Mapping[str, int] = MappingProxyType({})

_IN_MEMORY = 1_000
"""Events that are held in memory, for watchers that follow the run."""

_PAGE = 500
"""Events that are read from the store at once."""

_LISTED = 10_000
"""Parties that came or went, and waits, that the report lists: the last ones.  It counts those before."""


_STORED = 10_000
"""Events of parties that came or went which the store keeps: the last ones.  It counts those before."""
_BATCH = 1_000
"""Such events beyond that, after which the earliest ones are dropped."""
_AT_ONCE = 5_000
"""Most events that are dropped in one transaction: a store of an earlier release may have very many."""

_PASSING = frozenset({"joined", "left", "lost", "returned"})
"""Changes of which there may be as many as devices come and go; all others are kept."""


class ToldEvents:
    """The events of a run, of which a bounded number is in memory however many parties come and go.

    Iterating yields the events in memory.

    Parameters
    ----------
    dropped : mapping of str to int
        How many events of parties the store has no more, by change.
    dropped_until : int
        Number of the last one; 0 for none.
    """

    def __init__(self, dropped: Mapping[str, int] = _NOTHING, dropped_until: int = 0) -> None:
        self.dropped_until = dropped_until
        """Number of the last event that the store has no more; 0 for none."""
        self._passing: deque[tuple[int, str]] = deque()
        self._events: deque[operator.WatchRunResponse] = deque(maxlen=_IN_MEMORY)
        self._parties: deque[dict[str, Any]] = deque(maxlen=_LISTED)
        self._waits: deque[dict[str, Any]] = deque(maxlen=_LISTED)
        self._phases: list[dict[str, Any]] = []
        self._resumes: list[dict[str, Any]] = []
        self._changes = Counter(dropped)
        self.last = 0
        """Number of the last event; 0 before the first."""

    def __iter__(self) -> Iterator[operator.WatchRunResponse]:
        return iter(self._events)

    def append(self, event: operator.WatchRunResponse) -> None:
        """Take an event that is in the store; its number follows that of the one before."""
        self._events.append(event)
        self.last = event.number
        if event.HasField("party"):
            party = event.party
            self._changes[party.change] += 1
            if party.change in _PASSING:
                self._passing.append((event.number, party.change))
            self._parties.append({"time_ms": event.time_ms, "party": party.party, "change": party.change})
        elif event.HasField("wait"):
            self._waits.append({"time_ms": event.time_ms, "reason": event.wait.reason})
        elif event.HasField("resumed"):
            resumed = event.resumed
            self._resumes.append(
                {"time_ms": event.time_ms, "round": resumed.round, "failure": resumed.failure}
            )
        elif event.HasField("phase"):
            phase, state = event.phase, event.state
            self._phases.append(
                {
                    "time_ms": event.time_ms,
                    "phase": operator.RunPhase.Name(phase.phase).removeprefix("RUN_PHASE_").lower(),
                    "epoch": phase.epoch,
                    "owners": state.owners_alive,
                    "hosts": state.hosts_alive,
                    "version": state.version,
                }
            )

    def take_surplus(self) -> list[tuple[int, str]]:
        """Return number and change of the events that the store is to drop with the next write, each once."""
        surplus = len(self._passing) - _STORED
        if surplus < _BATCH:
            return []
        taken = [self._passing.popleft() for _ in range(min(surplus, _AT_ONCE))]
        self.dropped_until = taken[-1][0]
        return taken

    def in_memory(self, number: int) -> operator.WatchRunResponse | None:
        """Return an event by its number; None for one that is in the store only."""
        place = number - self.last + len(self._events) - 1
        return self._events[place] if place >= 0 else None

    def facts(self) -> dict[str, Any]:
        """Return the entries of the report that are made from events."""
        return {
            "parties": list(self._parties),
            "party_changes": dict(sorted(self._changes.items())),
            "phases": list(self._phases),
            "waits": list(self._waits),
            "resumes": list(self._resumes),
        }


def stored(connection: sa.Connection, run_id: str) -> Iterator[operator.WatchRunResponse]:
    """Yield all events of a run from the store, a page at a time."""
    first = 1
    while events := stored_page(connection, run_id, first):
        yield from events
        first = events[-1].number + 1


def stored_page(connection: sa.Connection, run_id: str, first: int) -> list[operator.WatchRunResponse]:
    """Return the events from a number on, as many as are read at once."""
    return [
        operator.WatchRunResponse.FromString(message)
        for message in store.read_events(connection, run_id, first, _PAGE)
    ]
