"""What every run at the COS has: who takes part, who is alive, events for watchers, tasks for those who poll.

How a run proceeds is the affair of `AsynchronousRun` and `RoundsRun`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
import structlog
from google.protobuf.message import DecodeError, Message

from coterie.store import cos as store
from coterie.store.engine import Term
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import to_wire
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_cos.registry import Registry

__all__ = ["HOLD_S", "Run", "parse"]

_log = structlog.get_logger("coterie.cos")

M = TypeVar("M", bound=Message)

HOLD_S = 20.0
"""Longest time that a poll is held, seconds."""

_PROGRESS_S = 0.5

_MOST_FAULTS = 10
"""Calls of one kind by one party, or ticks, that may fail one after the other by faults of this service."""


@dataclass
class _Presence:
    """When a party was last heard, by the monotonic clock."""

    heard: float
    lost: bool = False


class Run(abc.ABC):
    """A run: registry, presence, events.

    Parameters
    ----------
    request : StartRunRequest
        As the operator sent it.
    term : Term
        Writes of the present term.
    traffic : callable
        Returns bytes received and sent by the service so far.
    """

    def __init__(
        self, request: operator.StartRunRequest, term: Term, traffic: Callable[[], tuple[int, int]]
    ) -> None:
        self.request = request
        self.plan = request.plan
        self.registry = Registry(self.plan.run_id)
        self.ended = asyncio.Event()
        self.dropped = False
        """Whether the run was taken up anew elsewhere, from what is durable."""
        self.term = self._term = term
        self._traffic = traffic
        self._parties: dict[str, _Presence] = {}
        # Another number after each start, so that no cursor from before is taken for the present one.
        self._revision = time.time_ns() // 1_000_000
        self._changed = asyncio.Event()
        self._happened = asyncio.Event()
        # What each party was told last: the revision, and its tasks then.
        self._told: dict[str, tuple[int, list[wire.Task]]] = {}
        self._events: list[operator.WatchRunResponse] = []
        self.rounds: Counter[tuple[str, str]] = Counter()
        """How many rounds there were, by purpose and outcome."""
        # Calls in a row that failed by a fault of this service, by kind and party; and the reason to end the run.
        self._faults: dict[tuple[str, str], int] = {}
        self._fault = ""

    # --- what kinds of run differ in ---------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def over(self) -> bool:
        """Whether the run has ended, durably."""

    @property
    @abc.abstractmethod
    def phase(self) -> operator.RunPhase.ValueType:
        """The phase as operators see it."""

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """Epoch or pass in progress."""

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """Model version."""

    @property
    @abc.abstractmethod
    def reason(self) -> str:
        """Why the run failed; empty otherwise."""

    @abc.abstractmethod
    def state_json(self) -> str:
        """Return the state for the store."""

    @abc.abstractmethod
    def restore(self, connection: sa.Connection, state: str, snapshot: int) -> None:
        """Take up a run after a restart."""

    @abc.abstractmethod
    def tasks(self, party: str) -> list[wire.Task]:
        """Return what a party is asked to do now."""

    @abc.abstractmethod
    def payload(self, party: str, role: str, request: wire.FetchRequest) -> tuple[int, bytes]:
        """Return version and bytes of what a party fetches.

        Raises
        ------
        Refusal
            When there is nothing of the kind for this caller.
        """

    @abc.abstractmethod
    async def submitted(
        self, party: str, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes
    ) -> None:
        """Carry out a submitted item whose bytes are whole.

        Raises
        ------
        Refusal
            When it does not fit the run's state.
        """

    @abc.abstractmethod
    async def stop(self, reason: str) -> None:
        """End the run before its time."""

    @abc.abstractmethod
    async def on_joined(self, party: str, slots: Sequence[int], owners: Sequence[int]) -> None:
        """Carry out that a party registered; ``owners`` are those of its slots that are data owners."""

    @abc.abstractmethod
    async def on_lost(self, party: str) -> None:
        """Carry out that a party left or was silent for too long."""

    @abc.abstractmethod
    async def on_seen(self, party: str) -> None:
        """Carry out that a party which counted as absent was heard again."""

    @abc.abstractmethod
    async def on_catalogue(self) -> None:
        """Carry out that the catalogue has a new version, ``registry.catalogue_version``."""

    @abc.abstractmethod
    async def on_time(self) -> None:
        """Carry out what only the clock can tell."""

    @abc.abstractmethod
    def remember(self, event: operator.WatchRunResponse) -> None:
        """Take note of an event for the report; also of those from before a restart."""

    @abc.abstractmethod
    def progress(self) -> operator.ProgressEvent:
        """Return counters for watchers."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what the report says beside what every run's does."""

    # --- durable state -----------------------------------------------------------------------------------------

    def take_up(self, connection: sa.Connection, catalogue: int, present: dict[str, bool]) -> None:
        """Take up registry, events and parties; those present get their full time to be heard again."""
        self.registry.restore(connection, catalogue)
        rows = connection.execute(
            sa.select(store.events.c.message)
            .where(store.events.c.run_id == self.plan.run_id)
            .order_by(store.events.c.number)
        )
        self._events = [operator.WatchRunResponse.FromString(row.message) for row in rows]
        for event in self._events:
            self._noted(event)
        self.take_up_parties(present)

    def take_up_parties(self, present: Mapping[str, bool]) -> None:
        """Give every party that was present its full time to be heard again."""
        now = time.monotonic()
        self._parties = {party: _Presence(now, lost=not there) for party, there in present.items()}

    async def drop(self) -> None:
        """Let go of what is in memory, which is ahead of the store: nothing more is told, and nothing more kept."""
        self.dropped = True
        self.touch()

    def touch(self) -> None:
        """Wake everybody who waits for a change."""
        self._revision += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        happened, self._happened = self._happened, asyncio.Event()
        happened.set()

    # --- what parties ask --------------------------------------------------------------------------------------

    def heard(self, party: str) -> bool:
        """Note that a party is alive; return whether it counted as absent until now."""
        presence = self._parties.get(party)
        if presence is None:
            # It has left: a call of its own that was under way does not bring it back.
            return False
        presence.heard = time.monotonic()
        returned, presence.lost = presence.lost, False
        return returned

    def present(self, party: str) -> bool:
        """Whether a party takes part and was heard lately."""
        presence = self._parties.get(party)
        return presence is not None and not presence.lost

    async def joined(self, party: str, *, catalogue: bool, more: bool) -> None:
        """Carry out the registration of a party's participants, which the registry has taken up.

        Parameters
        ----------
        party : str
        catalogue : bool
            Whether the catalogue may have changed.
        more : bool
            Whether some of the participants had not been registered before.
        """
        known = party in self._parties
        self._parties[party] = _Presence(time.monotonic())
        slots = self.registry.slots_of(party)
        await self.on_joined(party, slots, self._owners(party))
        if catalogue:
            await self.new_catalogue()
        if known and more:
            # It never was away: it speaks for others, too.
            return
        change = "returned" if known else "joined"
        await self.emit(operator.WatchRunResponse(party=operator.PartyEvent(party=party, change=change)))

    async def left(self, party: str, change: str = "left") -> None:
        """Carry out that a party takes no further part."""
        self._parties.pop(party, None)
        self._told.pop(party, None)
        await self._gone(party, change)

    async def returned(self, party: str) -> None:
        """Carry out that a party which counted as absent was heard again."""
        await self.on_seen(party)
        if self._owners(party):
            await self.new_catalogue()
        await self.emit(operator.WatchRunResponse(party=operator.PartyEvent(party=party, change="returned")))

    async def _gone(self, party: str, change: str) -> None:
        await self.on_lost(party)
        if self._owners(party):
            await self.new_catalogue()
        await self.emit(operator.WatchRunResponse(party=operator.PartyEvent(party=party, change=change)))

    def _owners(self, party: str) -> list[int]:
        return [slot for slot in self.registry.owners if self.registry.by_slot[slot].party == party]

    async def new_catalogue(self) -> None:
        """Give the catalogue a new version."""
        self.registry.catalogue_version += 1
        await self.on_catalogue()

    def present_owners(self) -> dict[int, bool]:
        """Return for each owner's slot whether it is present."""
        return {slot: self.present(self.registry.by_slot[slot].party) for slot in self.registry.owners}

    def owners_alive(self) -> int:
        """Return how many data owners are present."""
        return sum(self.present_owners().values())

    def hosts_alive(self) -> int:
        """Return how many client hosts are present."""
        return sum(
            not presence.lost
            and any(self.registry.by_slot[slot].is_user for slot in self.registry.slots_of(party)[:1])
            for party, presence in self._parties.items()
        )

    @contextlib.contextmanager
    def charged(self, rpc: str, party: str) -> Iterator[None]:
        """Count what fails in here and is no refusal: what always fails would keep its party busy for ever.

        The run is ended with the next `tick` when too many of one kind, by one party, failed one after the other.
        """
        try:
            yield
        except Refusal:
            raise
        except Exception as error:
            if self._term.lost is not None:
                # A matter of the store: the run is taken up again from what is durable.
                raise
            failed = self._faults[rpc, party] = self._faults.get((rpc, party), 0) + 1
            if failed >= _MOST_FAULTS:
                name = type(error).__name__
                self._fault = (
                    f"a fault of the orchestration server: {rpc} failed {failed} times in a row, {name}"
                )
            raise
        self._faults.pop((rpc, party), None)

    async def poll(self, party: str, cursor: int, hold_s: float) -> wire.PollResponse:
        """Return the open tasks of a party; wait while they are those that it was told with its cursor."""
        # A party that waits here must be heard again well before it counts as silent.
        patience = self.request.party_timeout_ms / 1e3
        deadline = time.monotonic() + min(hold_s, HOLD_S, patience / 3)
        told = self._told.get(party, (0, []))
        while self._revision == cursor or told == (cursor, self.tasks(party)):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            changed = self._changed
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                break
            self._term.check()
        self._term.check()
        self.heard(party)
        self._told[party] = revision, tasks = self._revision, self.tasks(party)
        return wire.PollResponse(revision=revision, tasks=tasks, deadline_ms=self.request.phase_timeout_ms)

    def answered(self, party: str, cursor: int) -> None:
        """Note that a party has answered what it was told with its cursor: it waits for something to do."""
        if not self.tasks(party):
            self._told[party] = (cursor, [])

    def shared_payload(self, role: str, request: wire.FetchRequest) -> tuple[int, bytes] | None:
        """Return what may be fetched from every kind of run; None for anything else."""
        if request.kind == wire.FetchKind.FETCH_KIND_CATALOGUE:
            catalogue = self.registry.catalogue(self.present_owners())
            return catalogue.version, catalogue.SerializeToString(deterministic=True)
        if request.kind == wire.FetchKind.FETCH_KIND_ROSTER and role == "data-owner":
            roster = self.registry.roster()
            return len(roster), to_wire(roster).SerializeToString()
        return None

    # --- watching ----------------------------------------------------------------------------------------------

    def summary(self) -> operator.RunState:
        """Return the run in numbers."""
        return operator.RunState(
            plan=self.plan,
            phase=self.phase,
            epoch=self.epoch,
            version=self.version,
            owners_alive=self.owners_alive(),
            hosts_alive=self.hosts_alive(),
            users=self.registry.users(),
            items=len(self.registry.items),
            reason=self.reason,
        )

    async def watch(self, first: int) -> AsyncGenerator[operator.WatchRunResponse, None]:
        """Yield events from a number on, as they happen, until the run has ended."""
        number = max(first, 1)
        while True:
            self._term.check()
            happened = self._happened
            while number <= len(self._events):
                yield self._events[number - 1]
                number += 1
            # Only once that is durable: before, the last events are still on their way to the store.
            if self.over:
                return
            try:
                async with asyncio.timeout(_PROGRESS_S):
                    await happened.wait()
            except TimeoutError:
                # Progress is worth seeing and not worth keeping: it has no number.
                yield _stamped(operator.WatchRunResponse(progress=self.progress()), self.summary())

    async def emit(self, event: operator.WatchRunResponse) -> None:
        """Write an event and wake watchers."""
        await self.record(lambda _: [event])
        self.touch()

    async def record(self, make: Callable[[sa.Connection], list[operator.WatchRunResponse]]) -> None:
        """Write what ``make`` writes, and the events that it returns, in one transaction."""
        # Taken here: the writer's thread sees nothing that this one may change meanwhile.
        state = self.summary()

        def write(connection: sa.Connection) -> list[operator.WatchRunResponse]:
            made = [_stamped(event, state) for event in make(connection)]
            number = store.last_event(connection, self.plan.run_id)
            for event in made:
                number += 1
                event.number = number
                store.save_event(connection, self.plan.run_id, number, event.SerializeToString())
            return made

        for event in await self._term.run(write):
            self._events.append(event)
            self._noted(event)
        self._wake_watchers()

    def _noted(self, event: operator.WatchRunResponse) -> None:
        if event.HasField("round"):
            self.rounds[event.round.purpose, "abandoned" if event.round.reason else "applied"] += 1
        self.remember(event)

    def report(self) -> str:
        """Return what the COS knows, as JSON (docs/report.md)."""
        received, sent = self._traffic()
        parties = [
            {"time_ms": event.time_ms, "party": event.party.party, "change": event.party.change}
            for event in self._events
            if event.HasField("party")
        ]
        phases = [
            {
                "time_ms": event.time_ms,
                "phase": operator.RunPhase.Name(event.phase.phase).removeprefix("RUN_PHASE_").lower(),
                "epoch": event.phase.epoch,
                "owners": event.state.owners_alive,
                "hosts": event.state.hosts_alive,
                "version": event.state.version,
            }
            for event in self._events
            if event.HasField("phase")
        ]
        return json.dumps(
            {
                "run_id": self.plan.run_id,
                "phase": operator.RunPhase.Name(self.phase).removeprefix("RUN_PHASE_").lower(),
                "reason": self.reason,
                "version": self.version,
                "users": self.registry.users(),
                "items": len(self.registry.items),
                "parties": parties,
                "phases": phases,
                "bytes_in": received,
                "bytes_out": sent,
                **self.facts(),
            }
        )

    # --- time --------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Carry out what only the clock can tell: silent parties, and phases that take too long.

        Never raises: what fails here again and again ends this run, and no other.
        """
        try:
            with self.charged("the clock", ""):
                await self._on_tick()
        except Exception:
            if self._term.lost is not None:
                return
            _log.exception("the clock of a run failed", run=self.plan.run_id)

    async def _on_tick(self) -> None:
        if self.over:
            return
        if self._fault:
            _log.error("the run ends", run=self.plan.run_id, reason=self._fault)
            await self.stop(self._fault)
            return
        now = time.monotonic()
        patience = self.request.party_timeout_ms / 1e3
        for party, presence in list(self._parties.items()):
            if not presence.lost and now - presence.heard > patience:
                presence.lost = True
                _log.warning("party lost", party=party)
                await self._gone(party, "lost")
        await self.on_time()


def _stamped(event: operator.WatchRunResponse, state: operator.RunState) -> operator.WatchRunResponse:
    event.time_ms = time.time_ns() // 1_000_000
    event.state.CopyFrom(state)
    return event


def parse(kind: type[M], payload: bytes) -> M:
    """Return the message that a submitted payload must be.

    Raises
    ------
    Refusal
        INVALID_FIELD when it is none.
    """
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            f"the payload is no {kind.DESCRIPTOR.name}",
            field="chunk.data",
            expected=f"a serialised {kind.DESCRIPTOR.name}",
        ) from error
