"""Fix the population of a run and the waves that extend it, and have the third party draw a beacon for each."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa
import structlog
from numpy.typing import NDArray

from coterie.crypto.beacon import Beacon
from coterie.errors import PeerError
from coterie.rounds.population import Population, Wave, canonical_order
from coterie.rounds.training import Training, TrainingPhase
from coterie.store import cos as store
from coterie.telemetry.seldom import Seldom
from coterie.wire.refusal import ErrorReason, Refusal
from coterie_cos.participants import EXPECTED
from coterie_cos.summing import SummingRun

__all__ = ["Census", "Newcomers"]

_log = structlog.get_logger("coterie.cos")

_AGAIN_S = 2.0
"""Pause before the third party is asked again, seconds."""

_LASTING = frozenset(
    {
        ErrorReason.ERROR_REASON_CONFLICT,
        ErrorReason.ERROR_REASON_INVALID_FIELD,
        ErrorReason.ERROR_REASON_TOO_LARGE,
        ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
    }
)
"""Refusals of the third party after which asking again is of no use."""


@dataclass
class Newcomers:
    """A wave of users who came after the run had begun.

    Parameters
    ----------
    from_pass : int
        First pass in which they take part.
    slots : array of uint32
        Their slots, in the order of the population.
    beacon : Beacon
        Empty before it is drawn.
    """

    from_pass: int
    slots: array[int]
    beacon: Beacon

    @property
    def drawn(self) -> bool:
        """Whether the third party has taken the wave."""
        return bool(self.beacon.value)


class Census:
    """The population of a run, from the gathering of its users to the last wave; used by `RoundsRun`.

    The order is durable before the third party is asked, which takes no other one for the run afterwards.  The same
    holds for each wave.

    Parameters
    ----------
    run : SummingRun
    commit : callable
        Fixes a population with the third party; returns the beacon.
    begin : callable
        Begins the run with the users' slots, in order.
    gather : callable
        Looks again who is there, after a user was revoked whom the population had.
    learn : callable, optional
        Returns a population with the waves that the third party has signed beyond those it has.
    """

    def __init__(
        self,
        run: SummingRun[Training],
        commit: Callable[[str, Population], Awaitable[Beacon]],
        begin: Callable[[Sequence[int]], Awaitable[None]],
        gather: Callable[[], Awaitable[None]],
        learn: Callable[[str, Population], Awaitable[Population]] | None = None,
    ) -> None:
        self._run = run
        self._commit, self._begin, self._gather, self._learn = commit, begin, gather, learn
        # Four bytes for each of the users, who may be very many.
        self._slots = array("I")
        self._beacon = Beacon(b"", b"")
        self._waves: list[Newcomers] = []
        # The users so far with their ids and parties, to which each wave only adds its own.
        self._people: Population | None = None
        self._asking: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._silence = Seldom(_log)
        self.trouble = ""
        """Why the third party has not answered yet; empty while nothing failed."""
        self.unsure = False
        """Whether there may be waves of which this server does not know, as it was restored from a backup."""

    def restore(self, connection: sa.Connection) -> None:
        """Restore the population from the store after a restart, before the state of the run."""
        row = connection.execute(
            sa.select(store.populations).where(store.populations.c.run_id == self._run.plan.run_id)
        ).one_or_none()
        if row is not None:
            self._slots = _packed(np.frombuffer(row.slots, "<u4"))
            self._beacon = Beacon(row.beacon, row.signature)
        rows = connection.execute(
            sa.select(store.waves)
            .where(store.waves.c.run_id == self._run.plan.run_id)
            .order_by(store.waves.c.number)
        )
        self._waves = [
            Newcomers(
                one.from_pass, _packed(np.frombuffer(one.slots, "<u4")), Beacon(one.beacon, one.signature)
            )
            for one in rows
        ]

    def take(self, slots: Sequence[int]) -> None:
        """Take the users of the beginning, in order, where the store has no population of its own for them."""
        self._slots, self._people = _packed(slots), None

    def restored(self) -> None:
        """Ask the third party for waves that this server may lack, as the state of the run is restored, too."""
        self.unsure = bool(
            self._learn is not None and self._run.plan.rounds.most_users and self._run.state.users
        )

    @property
    def says(self) -> str:
        """Why there is no beacon yet, to be appended to a reason; empty while nothing failed."""
        return f"; the third party drew no beacon: {self.trouble}" if self.trouble else ""

    @property
    def fixed(self) -> bool:
        """Whether the users of the beginning are fixed, with a beacon or without."""
        return bool(self._slots)

    def population(self, users: int) -> Population:
        """Return the population of its first so many users, with beacons: those of the beginning, and of whole waves.

        Only waves of which nothing was asked before cost anything here.
        """
        registry, found = self._run.registry, self._people
        if found is None:
            found = Population(*registry.people(self._slots), *self._beacon)
        for one in self._waves[len(found.waves) :]:
            wave = Wave(len(found), one.from_pass, *one.beacon)
            found = found.followed_by(*registry.people(one.slots), [wave])
        self._people = found
        return found.first_waves(self._waves_within(users))

    def order(self) -> list[int]:
        """Return the slots of all users, in order."""
        return [*self._slots, *(slot for one in self._waves for slot in one.slots)]

    def after(self, users: int) -> Newcomers | None:
        """Return the wave that follows the first so many users of the population; None where no wave does."""
        within = self._waves_within(users)
        return self._waves[within] if within < len(self._waves) else None

    def _waves_within(self, users: int) -> int:
        """Return how many waves are whole within the first so many users of the population."""
        # From the last one on: all but it have been taken in, as a rule.
        within, last = len(self._waves), self._size
        while within and last > users:
            within -= 1
            last -= len(self._waves[within].slots)
        return within

    @property
    def _size(self) -> int:
        """Number of all users."""
        return len(self._slots) + sum(len(one.slots) for one in self._waves)

    def add(self, slots: Iterable[int], from_pass: int) -> None:
        """Extend the population by users at some slots, and ask the third party for the beacon.

        Nothing is done while another wave has no beacon yet.
        """
        if self._waves and not self._waves[-1].drawn:
            return
        chosen = list(slots)
        users = zip(chosen, *self._run.registry.people(chosen), strict=True)
        order = _packed(canonical_order(users, self._run.plan))
        self._waves.append(Newcomers(from_pass, order, Beacon(b"", b"")))
        # Not before a pause, where the last wave was refused: the third party may refuse one after the other.
        self.tick()

    async def begin(self, present: Iterable[int]) -> None:
        """Fix the population as the users at some slots, and ask the third party for the beacon.

        Where the run's plan names a beacon, the run begins at once.
        """
        slots = list(present)
        users = zip(slots, *self._run.registry.people(slots), strict=True)
        self._slots, self._people = _packed(canonical_order(users, self._run.plan)), None
        if self._run.plan.rounds.beacon:
            await self._begin(self._slots)
            return
        await self._keep()
        self.tick()

    def tick(self) -> None:
        """Ask the third party what is not known here, if nobody asks: for waves after a restart, and for beacons."""
        idle = self._asking is None or self._asking.done()
        undrawn = not self._waves[-1].drawn if self._waves else self.fixed and not self._rounds_begun
        wanting = self.unsure or undrawn
        if wanting and idle and time.monotonic() >= self._not_before:
            self._asking = asyncio.create_task(self._ask())

    async def drop(self) -> None:
        """Wait for no answer any more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> None:
        self._not_before = time.monotonic() + _AGAIN_S
        try:
            await self._ask_once()
        except PeerError as error:
            # It may be away; the run gathers until its time is up.
            self.trouble = error.message
            self._silence.warning("no beacon", run=self._run.plan.run_id, error=error.message)
        except Exception as error:
            if self._run.term.lost is not None:
                # The store failed: the run is restored from it later.
                return
            _log.exception("a population could not be fixed", run=self._run.plan.run_id)
            self._run.failed(error)

    @property
    def _rounds_begun(self) -> bool:
        return self._run.state.phase is not TrainingPhase.GATHER

    async def _ask_once(self) -> None:
        if self.unsure:
            await self._learn_waves()
            return
        if self._waves:
            await self._ask_for_wave()
            return
        try:
            self._beacon = await self._commit(self._run.plan.run_id, self.population(len(self._slots)))
        except Refusal as refusal:
            if refusal.reason == ErrorReason.ERROR_REASON_REVOKED:
                # Revoked after the population was fixed here: the third party has not taken it.
                self._slots, self._people = array("I"), None
                await self._gather()
            elif refusal.reason in _LASTING:
                await self._run.stop(f"the third party refuses the population: {refusal.message}")
            else:
                raise
        else:
            self._not_before = 0.0
            self._signed(self._beacon)
            await self._keep()
            await self._begin(self._slots)

    async def _learn_waves(self) -> None:
        """Take in the waves that the third party has signed and this server lacks, as after a restore from a backup.

        Before the first sum after a restart: hosts refuse a wave that was left out of a pass in which they took part.
        """
        if self._learn is None:
            raise AssertionError("nobody to learn waves from")
        run_id = self._run.plan.run_id
        drawn = [one for one in self._waves if one.drawn]
        own = self.population(len(self._slots) + sum(len(one.slots) for one in drawn))
        try:
            found = await self._learn(run_id, own)
        except Refusal as refusal:
            if refusal.reason != ErrorReason.ERROR_REASON_WRONG_STATE:
                raise
            await self._run.stop(
                f"the third party has users who came later, and cannot say who: {refusal.message}"
            )
            return
        self.trouble, self._not_before = "", 0.0
        if len(found.waves) > len(own.waves):
            await self._take_over(found, drawn)
        self.unsure = False
        self._run.proceed()

    async def _take_over(self, found: Population, drawn: list[Newcomers]) -> None:
        """Keep waves that follow those which have beacons here; one that has none here was asked for before."""
        run_id, registry, before = self._run.plan.run_id, self._run.registry, self._run.registry.size
        ends = [*(wave.first for wave in found.waves[1:]), len(found)]
        learned = []
        for wave, end in list(zip(found.waves, ends, strict=True))[len(drawn) :]:
            users = found.participants[wave.first : end], found.devices[wave.first : end]
            beacon = Beacon(wave.beacon, wave.signature)
            learned.append(Newcomers(wave.from_pass, _packed(registry.expect(*users)), beacon))
        expected = [registry.registered(slot) for slot in range(before, registry.size)]
        rows = [
            (slot, one.participant, one.party, EXPECTED) for slot, one in enumerate(expected, start=before)
        ]

        def write(connection: sa.Connection) -> None:
            store.save_participants(connection, run_id, rows)
            for number, one in enumerate(learned, start=len(drawn) + 1):
                slots = np.array(one.slots, "<u4").tobytes()
                store.save_wave(connection, run_id, number, one.from_pass, slots, one.beacon)

        await self._run.term.run(write)
        self._waves, self._people = [*drawn, *learned], None
        _log.warning(
            "users who came later were learned from the third party, as this server lacked them",
            run=run_id,
            users=len(found) - found.waves[len(drawn)].first,
            waves=len(learned),
            not_registered=len(rows),
        )

    async def _ask_for_wave(self) -> None:
        wave = self._waves[-1]
        await self._keep_wave(wave)
        try:
            beacon = await self._commit(self._run.plan.run_id, self.population(self._size))
        except Refusal as refusal:
            if refusal.reason == ErrorReason.ERROR_REASON_CONFLICT:
                # The third party knows another wave, as when this server was restored from a backup.  Hosts that took
                # part with it would refuse every sum.
                await self._run.stop(f"the third party refuses users who came later: {refusal.message}")
                return
            if refusal.reason != ErrorReason.ERROR_REASON_REVOKED and refusal.reason not in _LASTING:
                raise
            # It has not taken them.
            reason = refusal.message
            if refusal.reason == ErrorReason.ERROR_REASON_INVALID_FIELD:
                reason += "; a third party of release 0.1 refuses every wave so: upgrade it"
            _log.warning("users who came later wait", run=self._run.plan.run_id, reason=reason)
            run_id, number = self._run.plan.run_id, len(self._waves)
            await self._run.term.run(lambda connection: store.delete_wave(connection, run_id, number))
            self._waves.pop()
            self._people = self.population(self._size)
        else:
            # First durable, then used: once a host has it, no other one may be shown.
            await self._keep_wave(Newcomers(wave.from_pass, wave.slots, beacon))
            wave.beacon = beacon
            self._signed(beacon)
            self.trouble, self._not_before = "", 0.0
            _log.info(
                "population extended",
                run=self._run.plan.run_id,
                users=len(wave.slots),
                from_pass=wave.from_pass,
            )
        self._run.proceed()

    def _signed(self, beacon: Beacon) -> None:
        """Take note of the beacon of the last users."""
        if self._people is not None:
            self._people = self._people.signed(*beacon)

    async def _keep_wave(self, wave: Newcomers) -> None:
        run_id, number = self._run.plan.run_id, len(self._waves)
        slots = np.array(wave.slots, "<u4").tobytes()
        await self._run.term.run(
            lambda connection: store.save_wave(connection, run_id, number, wave.from_pass, slots, wave.beacon)
        )

    async def _keep(self) -> None:
        run_id, slots, beacon = self._run.plan.run_id, np.array(self._slots, "<u4").tobytes(), self._beacon
        await self._run.term.run(lambda connection: store.save_population(connection, run_id, slots, beacon))


def _packed(slots: Sequence[int] | NDArray[np.uint32]) -> array[int]:
    return array("I", np.asarray(slots, np.uint32).tobytes())
