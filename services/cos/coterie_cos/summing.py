"""Define the base of runs that form sums: one sum at a time, model versions on disk, tasks from durable state."""

from __future__ import annotations

import abc
import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import structlog

from coterie.crypto.beacon import Beacon
from coterie.errors import StoreError
from coterie.rounds.conductor import aggregation_of
from coterie.rounds.pace import pause_s
from coterie.rounds.population import Population
from coterie.rounds.server_round import RoundState
from coterie.rounds.sides import Arrays
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.registry import server_half
from coterie.store.engine import Term
from coterie.store.objects import Stored
from coterie.store.version_objects import VersionObjects
from coterie.store.versions import VersionRows, Versions
from coterie.telemetry.accounting import Accounting
from coterie.telemetry.audit_log import record
from coterie.wire.v1 import operator_pb2 as operator
from coterie_cos.open_sum import OpenSum
from coterie_cos.remembered import Remembered
from coterie_cos.run import GIVE_UP_S, DurableState, Run, missing_words
from coterie_cos.sums import (
    KeyHoldersLied,
    MembersAsked,
    SavedRound,
    SumAbandoned,
    SumDone,
    SumFormed,
    SumOpened,
    SumOutcome,
    Sums,
)

__all__ = ["SummingRun", "Surroundings"]

_log = structlog.get_logger("coterie.cos")


class _State(DurableState, Protocol):
    @property
    def version(self) -> int: ...


S = TypeVar("S", bound=_State)

R = TypeVar("R")

_MOST_TOOK = 8
"""Sums whose durations are remembered."""
_OBJECT_PAUSES_S = 0.5, 30.0
"""First and longest pause before a version is written to a store of objects again, seconds."""
_LOOK_S = 0.5
"""Time between two looks at whether a version that is being written is still wanted, seconds."""


@dataclass(frozen=True)
class Surroundings:
    """Resources that the COS gives to each run that forms sums.

    Parameters
    ----------
    folder : Path
        State folder of the service.
    term, traffic
        As for `Run`.
    accounting : Accounting
        Counts CPU time by activity.
    directory_key : bytes
        The directory's public key.
    revoked : callable
        Tells whether a participant is revoked.
    commit_population : callable
        Fixes the population of a run with the third party; returns the beacon that it drew.
    learn_waves : callable, optional
        Returns a population of a run with the waves that the third party has signed beyond those it has.
    version_rows : callable, optional
        Returns the rows of the database with the model versions of a run.
    intakes : bool
        Whether parties come through intakes, which take contributions.
    """

    folder: Path
    term: Term
    traffic: Callable[[], tuple[int, int]]
    accounting: Accounting
    directory_key: bytes
    revoked: Callable[[bytes], bool]
    commit_population: Callable[[str, Population], Awaitable[Beacon]]
    version_rows: Callable[[str], VersionRows] | None = None
    intakes: bool = False
    learn_waves: Callable[[str, Population], Awaitable[Population]] | None = None


class SummingRun(Run, Generic[S]):
    """A run that forms sums; base of `RoundsRun` and DRIFT's `ShieldedRun`.

    It owns its `Sums`.  One worker, begun with the first sum, acts on what becomes of them, in order (`_act_on`).

    Parameters
    ----------
    request
        As for `Run`.
    around : Surroundings
    state : S
        The initial state.
    """

    state: S
    _published: S

    def __init__(self, request: operator.StartRunRequest, around: Surroundings, state: S) -> None:
        super().__init__(request, around.term, around.traffic)
        self._accounting = around.accounting
        rows = None if around.version_rows is None else around.version_rows(self.plan.run_id)
        self._versions = Versions(around.folder / "models" / self.plan.run_id, rows)
        aggregation = aggregation_of(self.plan.rounds)
        self._half = server_half(self.plan.secure_sum, around.directory_key, aggregation)
        self.revoked = around.revoked
        self._sums = Sums(
            self.plan.run_id,
            self._half,
            around.folder,
            around.term,
            around.accounting,
            around.revoked,
            intakes=around.intakes,
        )
        self._worker: asyncio.Task[None] | None = None
        # The fault by which the worker ended.
        self._failure: Exception | None = None
        self._remembered = Remembered()
        self.state = self._published = state
        self._step_s = self.plan.rounds.step_timeout_ms / 1e3
        self._not_before = 0.0
        # What the run waits for, and the absent parties, one of which must come.
        self._waiting = ""
        self._missing: frozenset[str] = frozenset()
        # What the version of the model waits for that the last sum made.
        self._storing = ""
        # Why the last sum was abandoned, and the parties that had not answered; empty once a sum is formed.
        self._abandoned = ""
        self._formed_at = self._opened_at = time.monotonic()
        # How long the last sums took, seconds.
        self._took: deque[float] = deque(maxlen=_MOST_TOOK)

    # --- what kinds of run differ in ---------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def passes(self) -> tuple[int, int]:
        """Number of passes over all users that are complete, or in progress; and of passes at most."""

    @abc.abstractmethod
    def proceed(self) -> None:
        """Open the next sum, unless it has to wait or the run is over; called again at each tick."""

    @abc.abstractmethod
    async def apply_sum(self, summed: SumFormed) -> str:
        """Apply a sum and delete its stored messages, in one transaction; return why it was impossible, if so.

        When the run is stopped meanwhile, nothing is applied.
        """

    @abc.abstractmethod
    async def count_abandoned(self, abandoned: SumAbandoned) -> None:
        """Count the sum as abandoned and delete its stored messages, in one transaction."""

    async def gather(self) -> None:
        """Take the contributions that intakes have acknowledged."""
        await self._sums.gather()

    # --- sums --------------------------------------------------------------------------------------------------

    def open_sum(self, opening: RoundState, slots: Mapping[int, Sequence[int]]) -> None:
        """Open a sum; ``slots`` are those that each member covers.  Members of absent parties are not waited for."""
        self.go_on()
        self._opened_at = time.monotonic()
        self._sums.open(opening, slots, self.absent(opening.plan))
        plan = opening.plan
        record("round", run=plan.run_id, round=plan.round, purpose=plan.purpose, users=plan.users)
        self.follow_sums()

    def absent(self, plan: SumPlan) -> list[str]:
        """Return the parties of a sum that are absent."""
        return [party for party in plan.by_device if not self.present(party)]

    def wait_for(self, reason: str, missing: Collection[str] = ()) -> None:
        """Open no sum until one of some absent parties is there; ``reason`` says what the sum needs."""
        self._waiting = missing_words(reason, missing)
        self._missing = frozenset(missing)

    def look_again(self) -> None:
        """Look anew what the next sum lacks: another party is away, and the run is to name it, too."""
        self._missing = frozenset()

    def go_on(self) -> None:
        """Wait for nobody any more."""
        self._waiting, self._missing = "", frozenset()

    @property
    def waiting(self) -> str:
        """What the run waits for before it opens the next sum; empty while it does not wait."""
        return self._storing or self._waiting

    def skip_sum(self, reason: str, saved: SavedRound | None = None) -> None:
        """Abandon a sum that cannot be opened, or one that was saved and cannot be resumed."""
        self._sums.skip(reason, saved)
        self.follow_sums()

    def follow_sums(self) -> None:
        """Begin to act on the outcomes of sums, if the run does not yet."""
        if self._worker is None:
            self._worker = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            while (outcome := await self._sums.outcome()) is not None:
                await self._act_on(outcome)
                # Hold no reference to a sum while there is nothing to do.
                del outcome
        except Exception as error:
            if self._term.lost is not None:
                _log.warning("a round waits for the store", run=self.plan.run_id, error=type(error).__name__)
                return
            _log.exception("a round failed", run=self.plan.run_id)
            self._failure = error

    async def _act_on(self, outcome: SumOutcome) -> None:
        match outcome:
            case SumOpened():
                opened = self.state
                await self._sums.save_opening(outcome, opened.to_json())
                self.settle(opened)
                self._wake_members()
            case MembersAsked():
                self._wake_members()
            case KeyHoldersLied(parties):
                for party in parties:
                    lied = operator.PartyEvent(party=party, change="lied")
                    await self.emit(operator.WatchRunResponse(party=lied))
            case SumFormed(current):
                reason = await self.apply_sum(outcome)
                if not reason:
                    self.sum_formed()
                await self._sums.applied(current, reason)
            case SumAbandoned(reason):
                over = self._sums.current
                self._abandoned = missing_words(reason, () if over is None else over.silent)
                await self.count_abandoned(outcome)
                self._sums.close()
                self.proceed()
            case SumDone():
                self._sums.close()
                self.proceed()

    def _wake_members(self) -> None:
        """Wake the parties of the sum in progress: all others' tasks are as they were."""
        current = self._sums.current
        self.touch(None if current is None else current.state.plan.by_device)

    def in_progress(self, current: OpenSum) -> bool:
        """Return whether a sum is still in progress, not stopped meanwhile."""
        return current is self._sums.current

    def failed(self, error: Exception) -> None:
        """Take note of a fault in a task of this run; the run ends at the next tick."""
        self._failure = error

    async def stopped_by_fault(self) -> bool:
        """End the run when a sum failed by a fault of this service; return whether it did."""
        if self._failure is None:
            return False
        await self.stop(f"a fault of the orchestration server: {type(self._failure).__name__}", may_pass=True)
        return True

    async def drop(self) -> None:
        """Stop using the state in memory: drop the sum in progress, and return once its writes have ended."""
        await super().drop()
        self._sums.end()
        if self._worker is not None:
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._sums.written()

    # --- durable state -----------------------------------------------------------------------------------------

    def settle(self, durable: S) -> None:
        """Make tasks from a durable state from now on, and tell all parties when the run has ended."""
        self._published = durable
        if durable.phase.ended and not self.ended.is_set():
            _log.info("run ended", run=self.plan.run_id, phase=durable.phase.value, reason=durable.reason)
            self.ended.set()
            # Wake pollers: between two sums nothing else would.
            self.touch()

    def pause(self, in_a_row: int) -> None:
        """Open no sum for a while, longer the more sums in a row were abandoned."""
        self._not_before = time.monotonic() + pause_s(in_a_row, self._step_s)

    @property
    def waits(self) -> bool:
        """Whether no sum may be opened now: the run is over, a sum is in progress, or the run pauses or waits."""
        if self.state.phase.ended or self._sums.busy or time.monotonic() < self._not_before:
            return True
        return bool(self._missing) and not any(self.present(party) for party in self._missing)

    def sum_formed(self) -> None:
        """Take note that a sum was formed and applied."""
        self._abandoned = ""
        self._formed_at = time.monotonic()
        self._took.append(self._formed_at - self._opened_at)

    @property
    def pace_s(self) -> float:
        """The shortest time that one of the last sums took, seconds; 0 before the first."""
        return min(self._took, default=0.0)

    def without_sum_s(self) -> float:
        """Return for how long no sum was formed, as it counts for giving the run up, seconds."""
        return time.monotonic() - self._formed_at

    async def gave_up(self) -> bool:
        """End the run when no sum was formed for too long, and say why none was; return whether it did."""
        if self._storing:
            # A sum was formed; what came of it is still to be stored.
            return False
        limit = self.request.give_up_ms / 1e3 or GIVE_UP_S
        if self.without_sum_s() < limit:
            return False
        why = self._why_no_sum()
        await self.stop(f"no sum was formed for {limit:g} s{why and f'; {why}'}", may_pass=True)
        return True

    def _why_no_sum(self) -> str:
        """Return what the run waits for, why the last sum was abandoned, or who has not answered the open step."""
        if self._waiting:
            return self._waiting
        if self._abandoned:
            return f"the last sum was abandoned: {self._abandoned}"
        current = self._sums.current
        if current is None or not (silent := current.silent):
            return ""
        return missing_words(f"round {current.state.plan.round} waits in its step {current.phase}", silent)

    async def save_version(
        self, arrays: Arrays, version: int, round_: int, wanted: Callable[[], bool]
    ) -> None:
        """Write a version of the model, durably.

        A store of objects that does not take it is asked again until it does, or the version is not ``wanted`` any
        more; the run waits meanwhile.

        Raises
        ------
        StoreError
            When the version cannot be written.
        """
        rows = self._versions.rows
        if rows is None or not rows.kept:
            await asyncio.to_thread(self._save_version, arrays, version, round_)
        elif rows.objects is None:
            await self._term.run(lambda connection: rows.write(connection, arrays, version, round_))
        else:
            objects = rows.objects
            stored = await self._stored(objects, arrays, version, round_, wanted)
            if stored is not None:
                gone = await self._term.run(
                    lambda connection: rows.write_object(connection, stored, version, round_)
                )
                objects.remove(gone)

    async def _stored(
        self,
        objects: VersionObjects,
        arrays: Arrays,
        version: int,
        round_: int,
        wanted: Callable[[], bool],
    ) -> Stored | None:
        """Return the object to which a version was written; None where it is not wanted any more."""
        pause, longest = _OBJECT_PAUSES_S
        try:
            while True:
                try:
                    writing = objects.put(self.plan.run_id, arrays, version, round_)
                    return await self._while_wanted(writing, wanted)
                except StoreError as error:
                    # A term that is over, too: raises it.
                    self._term.check()
                    self._storing = (
                        f"the store of objects to take version {version} of the model: {error.message}"
                    )
                    _log.warning(
                        "a version of the model is not stored yet",
                        run=self.plan.run_id,
                        because=error.message,
                    )
                if await self._while_wanted(asyncio.sleep(pause, True), wanted) is None:
                    return None
                pause = min(2 * pause, longest)
        finally:
            self._storing = ""

    async def _while_wanted(self, work: Awaitable[R], wanted: Callable[[], bool]) -> R | None:
        """Return the result of work; None, without a wait for its end, once that is not wanted any more.

        Raises
        ------
        StoreError
            The term is over.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_S))[0]:
                self._term.check()
                if not wanted():
                    return None
            return task.result()
        finally:
            task.cancel()

    def _save_version(self, arrays: Arrays, version: int, round_: int) -> None:
        size = sum(array.nbytes for array in arrays.values())
        with self._term.keeping("write a version of the model", size):
            self._versions.save(arrays, version, round_)

    async def prune_versions(self, present: int, keep: Collection[int]) -> None:
        """Delete versions of the model that are not needed any more, as `Versions.prune`."""
        rows = self._versions.rows
        if rows is not None and rows.kept:
            gone = await self._term.run(lambda connection: rows.prune(connection, present, keep))
            if rows.objects is not None:
                rows.objects.remove(gone)
        self._versions.prune(present, keep)

    # --- watching ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Model version."""
        return self.state.version

    @property
    def durable_version(self) -> int:
        """Version of the state that was written last."""
        return self._published.version

    def progress(self) -> operator.ProgressEvent:
        """Return counters for watchers."""
        received, sent = self._traffic()
        event = operator.ProgressEvent(updates=self.state.version, bytes_in=received, bytes_out=sent)
        round_ = self._sums.progress()
        if round_ is not None:
            round_.passes, round_.of_passes = self.passes
            event.round.CopyFrom(round_)
        return event

    def remember(self, event: operator.WatchRunResponse) -> None:
        """Keep evaluations and sums for the report."""
        self._remembered.take(event)
