"""Define the base of every run at the COS: participants, presence, events for watchers, tasks for polling parties.

Subclasses decide how a run proceeds: `AsynchronousRun`, `RoundsRun` and `ShieldedRun`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import heapq
import json
import math
import random
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
import structlog
from google.protobuf.message import DecodeError, Message

from coterie.errors import StoreError
from coterie.rounds.plan_versions import plan_version
from coterie.store import cos as store
from coterie.store.engine import Term
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import to_wire
from coterie.wire.v1 import operator_pb2 as operator
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_cos.participants import Registry
from coterie_cos.told_events import ToldEvents, stored, stored_page

__all__ = ["GIVE_UP_S", "HOLD_S", "Run", "being_resumed", "missing_words", "parse"]

_log = structlog.get_logger("coterie.cos")

M = TypeVar("M", bound=Message)

HOLD_S = 20.0
"""Longest time for which a poll is held, seconds."""

GIVE_UP_S = 86_400.0
"""Time for which a run waits for parties before it has failed, where its request says nothing else, seconds."""

_NAMED = 5
"""Absent parties that are named."""

_PROGRESS_S = 0.5

_RECOUNT_S = 1.0
"""Time between two writes of the numbers of requests to the third party, seconds."""

_LEAST_REST_S = 1.0
"""Shortest time after which a host is asked to come back: one that is to come sooner holds its poll, seconds."""

_MOST_UNFIT = 20
"""Most parties that the operator is told cannot join."""
_MOST_FAULTS = 10
"""Calls of one kind by one party, or ticks, that may fail in a row by faults of this service before the run ends."""


@dataclass
class _Presence:
    """When a party was last heard, and whether it counts as lost.

    Parameters
    ----------
    heard : float
        Monotonic seconds.
    lost : bool
    until : float
        Until when a party counts as present that was told when to come back, monotonic seconds; 0 for all others.
    assumed : bool
        Whether the party counts as present by the store alone: it was not heard since a restart.
    """

    heard: float
    lost: bool = False
    until: float = 0.0
    assumed: bool = False


class EndingPhase(Protocol):
    """A phase of a run's state machine."""

    @property
    def value(self) -> str:
        """Its name."""

    @property
    def ended(self) -> bool:
        """Whether it is one in which the run has ended."""


class DurableState(Protocol):
    """What the states of all kinds of run have."""

    @property
    def phase(self) -> EndingPhase:
        """Where the run stands."""

    @property
    def reason(self) -> str:
        """Why the run failed; empty otherwise."""

    @property
    def may_pass(self) -> bool:
        """Whether the run has failed for a cause that may pass."""

    @property
    def resumes(self) -> int:
        """Number of times that the run was resumed."""

    def to_json(self) -> str:
        """Return the state for the store."""


class Run(abc.ABC):
    """A run at the COS, as the orchestrator and operator servicers see it.

    Parameters
    ----------
    request : StartRunRequest
        As the operator sent it.
    term : Term
        Writes of the present term.
    traffic : callable
        Returns bytes received and sent by the service so far.
    """

    state: DurableState
    """The present state, of the machine that the kind of run has."""
    _published: DurableState
    """The last durable state, from which tasks are made."""

    def __init__(
        self, request: operator.StartRunRequest, term: Term, traffic: Callable[[], tuple[int, int]]
    ) -> None:
        self.request = request
        self.plan = request.plan
        self.lowest_protocol = plan_version(request.plan)
        """Version of the protocol that the plan asks of parties."""
        self.registry = Registry(self.plan.run_id)
        self.ended = asyncio.Event()
        self.dropped = False
        """Whether another object, restored from the store, replaces this one."""
        self.away: frozenset[str] = frozenset()
        """Parties that are known to be away when this object is restored."""
        # Writes under way, and whether they are the last: another object is about to be restored.
        self._writes, self._last_writes, self._unwritten = 0, False, asyncio.Event()
        self._unwritten.set()
        self._replaced = False
        self.term = self._term = term
        self._traffic = traffic
        self._parties: dict[str, _Presence] = {}
        # Parties that are present, the one that was heard longest ago first.
        self._heard: OrderedDict[str, _Presence] = OrderedDict()
        # Parties that were told when to come back, by the time at which to look whether they did: no later than they
        # count as present.  The time of each party by its name; a later one that an earlier one replaced is skipped.
        self._away: list[tuple[float, str]] = []
        self._looks_at: dict[str, float] = {}
        # Client hosts that are present, with the number of their users.  Counted as they come and go: a scan at each
        # event would cost as much as there are parties.
        self._hosts: dict[str, int] = {}
        self._users_present = 0
        # Why parties could not join, by party.
        self._unfit: dict[str, str] = {}
        # Registrations of each party since it last polled.
        self._registrations: Counter[str] = Counter()
        # Start from the time, so that no cursor from before a restart is taken for a present one.
        self._revision = time.time_ns() // 1_000_000
        self._changed = asyncio.Event()
        # Client hosts that wait in a poll, which are woken one by one, and those that were woken last.
        self._polling: dict[str, asyncio.Event] = {}
        self._woken: frozenset[str] = frozenset()
        self._happened = asyncio.Event()
        # Last answer to each party's poll: the revision, and its tasks then.
        self._told: dict[str, tuple[int, list[wire.Task]]] = {}
        self._events = ToldEvents()
        # What the run waits for, as watchers were told last.
        self._told_waiting = ""
        self.rounds: Counter[tuple[str, str]] = Counter()
        """Number of rounds that ended, by purpose and outcome."""
        self._relayed: Counter[store.Relayed] = Counter()
        # Kinds whose number in the store is older than the one in memory.
        self._recount: set[store.Relayed] = set()
        self._recounted = time.monotonic()
        # Calls in a row that failed by a fault of this service, by kind and party; and the reason to end the run, if
        # any.
        self._faults: dict[tuple[str, str], int] = {}
        self._fault = ""

    # --- what kinds of run differ in ---------------------------------------------------------------------------

    tasks_follow_presence = True
    """Whether tasks of parties may change when another party comes or goes, by nothing else."""

    @property
    def over(self) -> bool:
        """Whether the run has ended, durably."""
        return self._published.phase.ended

    async def end_kept(self) -> None:
        """Return once the end of the run is durable, if it has ended, or was not kept within `HOLD_S`."""
        if self.state.phase.ended and not self.over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOLD_S):
                    await self.ended.wait()

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
    def durable_version(self) -> int:
        """Latest model version that no crash can take back, as operators see it."""

    @property
    def reason(self) -> str:
        """Why the run failed; empty otherwise."""
        return self.state.reason

    @property
    def waiting(self) -> str:
        """What the run waits for, in words, because too few parties are present; empty while it goes on."""
        return ""

    @property
    def resumes(self) -> int:
        """Number of times that the run was resumed."""
        return self.state.resumes

    @property
    def resumable(self) -> bool:
        """Whether the run has failed, durably, for a cause that may pass, so that the operator may resume it."""
        return self._published.may_pass

    @abc.abstractmethod
    def take_up_again(self) -> list[operator.WatchRunResponse]:
        """Change the state of a run that may be resumed to where it failed; return the events to be stored with it."""

    @abc.abstractmethod
    async def gather_again(self) -> None:
        """Go on after the run was resumed, as far as what parties did since it failed allows."""

    def state_json(self) -> str:
        """Return the state for the store."""
        return self.state.to_json()

    @abc.abstractmethod
    def restore(self, connection: sa.Connection, state: str, snapshot: int) -> None:
        """Restore the run from the store after a restart."""

    @abc.abstractmethod
    def tasks(self, party: str) -> list[wire.Task]:
        """Return the open tasks of a party."""

    async def read(self, request: wire.FetchRequest) -> None:
        """Read what a party fetches into memory, where that takes long, before `payload` is asked for it.

        Raises
        ------
        StoreError
            It cannot be read now.
        """
        return

    @abc.abstractmethod
    def payload(self, party: str, role: str, request: wire.FetchRequest) -> tuple[int, bytes]:
        """Return version and bytes of the payload that a party fetches.

        Raises
        ------
        Refusal
            When there is no such payload for this caller.
        """

    def submitted_at_once(
        self, party: str, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes
    ) -> bool:
        """Take a submitted item, if that needs no wait, as `submitted` does; return whether it was taken.

        A contribution in a round is one; a task of its own for each would take as long as to add it.
        """
        return False

    @abc.abstractmethod
    async def submitted(
        self, party: str, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes
    ) -> None:
        """Take a submitted item whose bytes are complete.

        Raises
        ------
        Refusal
            When the item does not fit the run's state.
        """

    @abc.abstractmethod
    async def stop(self, reason: str, *, may_pass: bool = False) -> None:
        """End the run before its time; ``may_pass`` says whether its cause may pass, so that it can be resumed."""

    @abc.abstractmethod
    async def on_joined(self, party: str, slots: Sequence[int], owners: Sequence[int]) -> None:
        """React to a party's registration; ``owners`` are those of its slots that are data owners."""

    @abc.abstractmethod
    async def on_lost(self, party: str) -> None:
        """React to a party that left or was silent for too long."""

    @abc.abstractmethod
    async def on_seen(self, party: str) -> None:
        """React to an absent party that was heard again."""

    @abc.abstractmethod
    async def on_catalogue(self) -> None:
        """React to a new version of the catalogue, ``registry.catalogue_version``."""

    @abc.abstractmethod
    async def on_time(self) -> None:
        """React to time: called at each tick while the run goes on."""

    @abc.abstractmethod
    def remember(self, event: operator.WatchRunResponse) -> None:
        """Keep an event for the report; called also for events from before a restart."""

    @abc.abstractmethod
    def progress(self) -> operator.ProgressEvent:
        """Return counters for watchers."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the entries of the report that only this kind of run has."""

    # --- durable state -----------------------------------------------------------------------------------------

    def take_up(self, connection: sa.Connection, catalogue: int, present: dict[str, bool]) -> None:
        """Restore registry, events and parties; present parties get their full time to be heard again."""
        self.registry.restore(connection, catalogue)
        self._events = ToldEvents(*store.load_dropped(connection, self.plan.run_id))
        for event in stored(connection, self.plan.run_id):
            self._events.append(event)
            self._noted(event)
        self._relayed = Counter(store.load_relayed(connection, self.plan.run_id))
        self.take_up_parties(present)

    def take_up_parties(self, present: Mapping[str, bool]) -> None:
        """Set the parties; present ones get their full time to be heard again."""
        now = time.monotonic()
        self._parties = {
            party: _Presence(now, lost=not there or party in self.away, assumed=True)
            for party, there in present.items()
        }
        self._heard = OrderedDict((party, one) for party, one in self._parties.items() if not one.lost)
        self._away, self._looks_at = [], {}
        if self.request.check_in_ms:
            # Which hosts were told to come back is not known any more, nor when.
            for party in [one for one in self._heard if self.registry.users_at(one)]:
                self._expect(party, self._heard[party], self.request.check_in_ms / 1e3)
        self._hosts, self._users_present = {}, 0
        for party, one in self._parties.items():
            self._count(party, present=not one.lost)

    def silent(self) -> frozenset[str]:
        """Return the registered parties that were not heard lately, whether the run goes on or not."""
        now = time.monotonic()
        patience = now - self.request.party_timeout_ms / 1e3
        heard = {
            party
            for party, one in self._parties.items()
            if not one.lost and (one.heard >= patience or one.until >= now)
        }
        return frozenset(self.registry.parties) - heard

    async def drop(self) -> None:
        """Stop using this object, as its memory is ahead of the store: it answers and writes nothing more."""
        self.dropped = True
        self.touch()

    async def resume(self) -> None:
        """Store that the run goes on where it failed; this object is then of no use but to be replaced.

        The state in the store is then as after a restart of the server in the midst of the run: a sum that was in
        progress when the run failed is resumed.
        """
        await self.hand_over()
        failure, run_id = self.reason, self.plan.run_id
        made = self.take_up_again()
        state = self.state_json()

        def write(connection: sa.Connection) -> list[operator.WatchRunResponse]:
            store.save_state(connection, run_id, state)
            return made

        await self._record(write)
        _log.info("run resumed", run=run_id, failure=failure)

    async def hand_over(self) -> None:
        """Drop this object, and return once nothing of it will be written any more."""
        await self.drop()
        self._last_writes = True
        await self._unwritten.wait()

    def replaced(self) -> None:
        """Send polling parties on to the object that has replaced this one."""
        self._replaced = True
        self.touch()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Count a write as under way within this context.

        Raises
        ------
        Refusal
            NOT_READY when another object is about to be restored, which would lack the write.
        """
        if self._last_writes:
            raise being_resumed()
        self._writes += 1
        self._unwritten.clear()
        try:
            yield
        finally:
            self._writes -= 1
            if not self._writes:
                self._unwritten.set()

    @property
    def revision(self) -> int:
        """Number that rises whenever tasks may have changed."""
        return self._revision

    def touch(self, hosts: Iterable[str] | None = None) -> None:
        """Wake polling parties and watchers.

        Parameters
        ----------
        hosts : iterable of str, optional
            The client hosts whose tasks have changed; those of the call before are woken, too, as they may have lost
            theirs.  Default: all.  Parties that are no client hosts, which are few, are always woken.
        """
        self._revision += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if hosts is None:
            waiting, self._polling = self._polling, {}
            for event in waiting.values():
                event.set()
        else:
            now = frozenset(hosts)
            for host in now | self._woken:
                if (held := self._polling.pop(host, None)) is not None:
                    held.set()
            self._woken = now
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        happened, self._happened = self._happened, asyncio.Event()
        happened.set()

    # --- what parties ask --------------------------------------------------------------------------------------

    def heard(self, party: str, *, back: bool = False) -> bool:
        """Note that a party is alive; return whether it counted as absent until now.

        A call of a party that rests between two check-ins does not end its rest, but for a poll (``back``).
        """
        presence = self._parties.get(party)
        if presence is None:
            # The party has left: a call of its own that is still under way does not bring it back.
            return False
        presence.heard = time.monotonic()
        rested = presence.until > 0.0
        if back or presence.until <= presence.heard + self.request.party_timeout_ms / 1e3:
            presence.until = 0.0
            self._heard[party] = presence
            self._heard.move_to_end(party)
        returned, presence.lost = presence.lost, False
        if returned or presence.assumed or (rested and not presence.until):
            presence.assumed = False
            self._count(party, present=True)
        return returned

    def _expect(self, party: str, presence: _Presence, seconds: float) -> None:
        """Let a party count as present for so many seconds until it comes back, and as long as silent ones then."""
        presence.until = time.monotonic() + seconds + self.request.party_timeout_ms / 1e3
        self._heard.pop(party, None)
        self._look_at(party, presence.until)

    def _look_at(self, party: str, at: float) -> None:
        """Have `_overdue` look at a party at a time, unless it does so before: a party may check in without pause."""
        if at < self._looks_at.get(party, math.inf):
            self._looks_at[party] = at
            heapq.heappush(self._away, (at, party))

    def _overdue(self) -> str | None:
        """Return a party that was silent for too long, or did not come back; None when there is none (any more)."""
        now = time.monotonic()
        while self._away and self._away[0][0] <= now:
            at, party = heapq.heappop(self._away)
            if self._looks_at.get(party) != at:
                continue
            del self._looks_at[party]
            known = self._parties.get(party)
            if known is None or known.lost or not known.until:
                continue
            if known.until <= now:
                return party
            self._look_at(party, known.until)
        if self._heard:
            party, presence = next(iter(self._heard.items()))
            if now - presence.heard > self.request.party_timeout_ms / 1e3:
                return party
        return None

    def due_s(self, party: str) -> float:
        """Return the time in which a host that checks in must be heard, seconds; 0 where it is to wait here."""
        return 0.0

    def present(self, party: str) -> bool:
        """Return whether a party takes part and was heard lately."""
        presence = self._parties.get(party)
        return presence is not None and not presence.lost

    def awake(self, party: str) -> bool:
        """Return whether a party is present, was heard since this server started, and does not rest now."""
        presence = self._parties.get(party)
        return presence is not None and not (presence.lost or presence.assumed or presence.until)

    async def joined(self, party: str, *, catalogue: bool, more: bool) -> None:
        """React to a party's registration, once its participants are in the registry.

        Parameters
        ----------
        party : str
        catalogue : bool
            Whether the catalogue may have changed.
        more : bool
            Whether some of the participants had not been registered before.
        """
        self._unfit.pop(party, None)
        known = party in self._parties
        # A device that wakes for its check-in registers each time.
        expected = known and self._parties[party].until > 0 and not self._parties[party].lost
        self._parties[party] = self._heard[party] = _Presence(time.monotonic())
        self._heard.move_to_end(party)
        self._count(party, present=True)
        slots = self.registry.slots_of(party)
        await self.on_joined(party, slots, self._owners(party))
        if catalogue:
            await self.new_catalogue()
        if known and (more or expected):
            # The party was never away, and only adds participants, or comes back when it was told to.
            return
        await self._tell_of(party, "returned" if known else "joined")

    def unfit(self, party: str, why: str) -> None:
        """Note that a party cannot join because of its version, for the operator; forgotten once it joins."""
        if party in self._unfit or len(self._unfit) < _MOST_UNFIT:
            self._unfit[party] = why
            self.touch()

    def registered(self, party: str) -> int:
        """Count a registration of a party; return how many there were since its last poll."""
        self._registrations[party] += 1
        return self._registrations[party]

    @property
    def says_unfit(self) -> str:
        """Which parties cannot join, and why, to be added to what the run waits for; empty where there are none."""
        return "".join(f"; {why}" for _, why in sorted(self._unfit.items()))

    async def left(self, party: str, change: str = "left") -> None:
        """Remove a party that takes no further part."""
        self._parties.pop(party, None)
        self._heard.pop(party, None)
        # It holds a poll, perhaps, and is told at once that it has left.
        if (held := self._polling.pop(party, None)) is not None:
            held.set()
        self._registrations.pop(party, None)
        self._told.pop(party, None)
        self._count(party, present=False)
        await self._gone(party, change)

    async def returned(self, party: str) -> None:
        """React to an absent party that was heard again."""
        await self.on_seen(party)
        if self._owners(party):
            await self.new_catalogue()
        await self._tell_of(party, "returned")

    async def _gone(self, party: str, change: str) -> None:
        await self.on_lost(party)
        if self._owners(party):
            await self.new_catalogue()
        await self._tell_of(party, change)

    async def _tell_of(self, party: str, change: str) -> None:
        """Store that a party came or went; wake polling parties where their tasks hang on who is present."""
        event = operator.WatchRunResponse(party=operator.PartyEvent(party=party, change=change))
        if self.tasks_follow_presence:
            await self.emit(event)
        else:
            await self.record(lambda _: [event])

    def _count(self, party: str, *, present: bool) -> None:
        """Count a client host as present, with the users that it has now, or as absent."""
        users = self.registry.users_at(party) if present else 0
        self._users_present += users - self._hosts.pop(party, 0)
        if users:
            self._hosts[party] = users

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
        return len(self._hosts)

    @property
    def users_present(self) -> int:
        """Number of users whose host is present."""
        return self._users_present

    @contextlib.contextmanager
    def charged(self, rpc: str, party: str) -> Iterator[None]:
        """Count failures other than refusals within this context, by call and party.

        The next `tick` ends the run when too many calls of one kind, by one party, failed in a row: otherwise the party
        would repeat such a call for ever.
        """
        try:
            yield
        except Refusal:
            raise
        except Exception as error:
            if self._term.lost is not None:
                # The store failed: the run is restored from it later.
                raise
            failed = self._faults[rpc, party] = self._faults.get((rpc, party), 0) + 1
            if failed >= _MOST_FAULTS:
                name = type(error).__name__
                self._fault = (
                    f"a fault of the orchestration server: {rpc} failed {failed} times in a row, {name}"
                )
            raise
        self._faults.pop((rpc, party), None)

    async def poll(
        self, party: str, cursor: int, hold_s: float, *, checks_in: bool = False
    ) -> wire.PollResponse:
        """Return the open tasks of a party; wait while they are the same as those sent with its cursor.

        A host that checks in waits only while a sum in progress needs it, and else is told when to come back: at a
        moment drawn from the second half of the time that it has, so that hosts do not come together.
        """
        self._registrations.pop(party, None)
        self._unfit.pop(party, None)
        self.heard(party, back=True)
        # A party that waits here must be heard again well before it counts as silent.
        patience = self.request.party_timeout_ms / 1e3
        deadline = time.monotonic() + min(hold_s, HOLD_S, patience / 3)
        told = self._told.get(party, (0, []))
        while not self._replaced and (self._revision == cursor or told == (cursor, self.tasks(party))):
            left = deadline - time.monotonic()
            if left <= 0 or (checks_in and self._leaves(party)):
                break
            changed = self._change_for(party)
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                break
            self._term.check()
        self._term.check()
        self.heard(party)
        self._told[party] = revision, tasks = self._revision, self.tasks(party)
        response = wire.PollResponse(
            revision=revision, tasks=tasks, deadline_ms=self.request.phase_timeout_ms
        )
        presence = self._parties.get(party)
        if checks_in and presence is not None and (due_s := self._leaves(party)):
            come_back_s = max(due_s * random.uniform(0.5, 1.0), _LEAST_REST_S)  # noqa: S311 - spreads hosts
            response.come_back_ms = int(come_back_s * 1000)
            self._expect(party, presence, come_back_s)
        return response

    def _leaves(self, party: str) -> float:
        """Return `due_s`, bounded by the run's settings; 0 for parties that hold their polls."""
        longest_s = self.request.check_in_ms / 1e3
        # Key holders and data owners, which are few, hold their polls.
        due_s = min(self.due_s(party), longest_s) if longest_s and party in self._hosts else 0.0
        return due_s if due_s >= _LEAST_REST_S else 0.0

    def _change_for(self, party: str) -> asyncio.Event:
        """Return the event that is set once the tasks of a party may have changed."""
        if party not in self._hosts:
            return self._changed
        return self._polling.setdefault(party, asyncio.Event())

    async def gather(self) -> None:
        """Take what intakes have acknowledged, where contributions come through them."""
        return

    def answered(self, party: str, cursor: int) -> None:
        """Note that a party has done the tasks sent with its cursor, so that its next poll waits for new ones."""
        if not self.tasks(party):
            self._told[party] = (cursor, [])

    def shared_payload(self, role: str, request: wire.FetchRequest) -> tuple[int, bytes] | None:
        """Return a payload that every kind of run has, catalogue or roster; None for any other kind."""
        if request.kind == wire.FetchKind.FETCH_KIND_CATALOGUE:
            catalogue = self.registry.catalogue(self.present_owners())
            return catalogue.version, catalogue.SerializeToString(deterministic=True)
        if request.kind == wire.FetchKind.FETCH_KIND_ROSTER and role == "data-owner":
            roster = self.registry.roster()
            return len(roster), to_wire(roster).SerializeToString()
        return None

    # --- watching ----------------------------------------------------------------------------------------------

    @property
    def _gathers(self) -> bool:
        return self.phase == operator.RunPhase.RUN_PHASE_GATHER

    def summary(self) -> operator.RunState:
        """Return the run's state, as operators see it."""
        return operator.RunState(
            plan=self.plan,
            phase=self.phase,
            epoch=self.epoch,
            version=self.durable_version,
            owners_alive=self.owners_alive(),
            hosts_alive=self.hosts_alive(),
            users=self.registry.users(),
            items=len(self.registry.items),
            reason=self.reason,
            waiting=self.waiting or (self.says_unfit[2:] if self._gathers else ""),
            # As the phase and the reason beside it, which may be durable in a moment only.
            resumable=self.state.may_pass,
            resumes=self.resumes,
        )

    async def watch(self, first: int) -> AsyncGenerator[operator.WatchRunResponse, None]:
        """Yield events from number ``first`` on, as they happen, and counters now and then, until the run has ended.

        Early events of parties that came or went are left out where the store only counts them.
        """
        number = max(first, 1)
        counted = time.monotonic()
        while True:
            self._term.check()
            happened = self._happened
            while number <= self._events.last:
                event = self._events.in_memory(number)
                for one in [event] if event is not None else await self._earlier(number):
                    yield one
                    number = one.number + 1
            if self.dropped:
                raise being_resumed()
            # `over` is durable: before that, the last events may still be on their way to the store.
            if self.over:
                return
            # By the clock, and not by silence: where sums end several times a second, there is none.
            left = counted + _PROGRESS_S - time.monotonic()
            if left > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await happened.wait()
            else:
                counted = time.monotonic()
                # Progress events are not stored, and have no number.
                yield _stamped(operator.WatchRunResponse(progress=self.progress()), self.summary())

    async def _earlier(self, number: int) -> list[operator.WatchRunResponse]:
        """Return events from a number on that are in the store only."""
        run_id = self.plan.run_id
        found: list[operator.WatchRunResponse] = await self._term.run(
            lambda connection: stored_page(connection, run_id, number)
        )
        if not found or found[0].number > max(number, self._events.dropped_until + 1):
            # A watcher that waited for it would wait for ever.
            raise StoreError(f"the store has no event {number} of the run {run_id}, of {self._events.last}")
        return found

    async def say_waiting(self) -> None:
        """Tell watchers, once, that the run began to wait or goes on."""
        reason = self.waiting
        if reason == self._told_waiting:
            return
        self._told_waiting = reason
        if reason:
            _log.warning("the run waits", run=self.plan.run_id, reason=reason)
        else:
            _log.info("the run goes on", run=self.plan.run_id)
        await self.emit(operator.WatchRunResponse(wait=operator.WaitEvent(reason=reason)))

    async def emit(self, event: operator.WatchRunResponse) -> None:
        """Store an event, and wake polling parties and watchers."""
        await self.record(lambda _: [event])
        self.touch()

    async def record(self, make: Callable[[sa.Connection], list[operator.WatchRunResponse]]) -> None:
        """Run ``make``, which may write, and store the events that it returns, in the same transaction."""
        with self.writing():
            await self._record(make)

    async def _record(self, make: Callable[[sa.Connection], list[operator.WatchRunResponse]]) -> None:
        # Read the state here: the writer's thread must not see what this thread may change meanwhile.
        state = self.summary()
        surplus = self._events.take_surplus()

        def write(connection: sa.Connection) -> list[operator.WatchRunResponse]:
            store.drop_changes(connection, self.plan.run_id, surplus)
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

    def count_relayed(self, request: store.Relayed) -> None:
        """Count a request of a user to a service of the third party; the number is durable about a second later."""
        self._relayed[request] += 1
        self._recount.add(request)

    async def _save_relayed(self) -> None:
        if not self._recount or time.monotonic() - self._recounted < _RECOUNT_S:
            return
        counts = {one: self._relayed[one] for one in self._recount}
        self._recount.clear()
        self._recounted = time.monotonic()
        run_id = self.plan.run_id
        with self.writing():
            await self._term.run(lambda connection: store.save_relayed(connection, run_id, counts))

    def _noted(self, event: operator.WatchRunResponse) -> None:
        if event.HasField("round"):
            self.rounds[event.round.purpose, "abandoned" if event.round.reason else "applied"] += 1
        self.remember(event)

    def report(self) -> str:
        """Return the run's report as JSON (docs/report.md)."""
        received, sent = self._traffic()
        return json.dumps(
            {
                "run_id": self.plan.run_id,
                "phase": operator.RunPhase.Name(self.phase).removeprefix("RUN_PHASE_").lower(),
                "reason": self.reason,
                "resumable": self.state.may_pass,
                "version": self.durable_version,
                "users": self.registry.users(),
                "items": len(self.registry.items),
                **self._events.facts(),
                "bytes_in": received,
                "bytes_out": sent,
                "third_party": self._asked(),
                **self.facts(),
            }
        )

    def _asked(self) -> dict[str, Any]:
        """Return what hosts' users asked services of the third party: by service and host, answered and refused."""
        found: dict[str, Any] = {}
        for one, number in sorted(self._relayed.items()):
            host = found.setdefault(one.service, {"hosts": {}})["hosts"].setdefault(
                one.party, {"answered": {}, "refused": {}}
            )
            kind = host["refused"].setdefault(one.refused, {}) if one.refused else host["answered"]
            kind[one.request] = number
        return found

    # --- time --------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Drive the run's clock: mark silent parties as lost, and call `on_time`.

        Never raises: repeated failures end this run, and no other.
        """
        try:
            with self.charged("the clock", ""):
                await self._on_tick()
        except Exception:
            if self._term.lost is not None:
                return
            _log.exception("the clock of a run failed", run=self.plan.run_id)

    async def _on_tick(self) -> None:
        if self.dropped:
            return
        await self._save_relayed()
        if self.over:
            return
        if self._fault:
            _log.error("the run ends", run=self.plan.run_id, reason=self._fault)
            await self.stop(self._fault, may_pass=True)
            return
        while (party := self._overdue()) is not None:
            self._heard.pop(party, None)
            presence = self._parties[party]
            presence.lost, presence.until = True, 0.0
            self._count(party, present=False)
            _log.warning("party lost", party=party)
            await self._gone(party, "lost")
        await self.on_time()


def missing_words(reason: str, missing: Collection[str]) -> str:
    """Return why a run waits, with the names of the first few absent parties, one of which must come."""
    named = sorted(missing)
    more = "" if len(named) <= _NAMED else f" and {len(named) - _NAMED} others"
    return f"{reason}; missing: {', '.join(named[:_NAMED])}{more}" if named else reason


def being_resumed() -> Refusal:
    """Return the refusal of calls about a run while it is restored from the store."""
    return Refusal(
        ErrorReason.ERROR_REASON_NOT_READY,
        "the run is being resumed",
        field="run_id",
        expected="the call again",
    )


def _stamped(event: operator.WatchRunResponse, state: operator.RunState) -> operator.WatchRunResponse:
    event.time_ms = time.time_ns() // 1_000_000
    event.state.CopyFrom(state)
    return event


def parse(kind: type[M], payload: bytes) -> M:
    """Parse a submitted payload as a message of a kind.

    Raises
    ------
    Refusal
        INVALID_FIELD when the payload is no such message.
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
