"""Simulate an orchestration server and its hosts in virtual time, over links that lose, delay and repeat messages.

Both run the state machines of ``coterie.rounds`` as services do: they act on a state only once it is saved, and a
process that dies restarts with the content of its disk.  Two calls stand for the contract's: ``poll``, which the server
holds until there is something to do, and ``submit``, which a host repeats until it is answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.rounds import member_round as party
from coterie.rounds import server_round as cos
from coterie.rounds.holder_round import HolderRound
from coterie.rounds.member_round import MemberRound
from coterie.rounds.pace import pause_s
from coterie.rounds.server_round import RoundState, SumPhase
from coterie.secure_sum.contribution import ImpossibleSumError, Layout
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import Failed, MemberHalf, ServerHalf, Step
from coterie.wire.refusal import Refusal
from tests.simulation.rig.clock import Clock
from tests.simulation.rig.durable import HostDisk, ServerDisk
from tests.simulation.rig.faults import Faults
from tests.simulation.rig.intruder import Submission, false, forged, intrusion
from tests.simulation.rig.sums import SUBJECT, codes_in, key_holder
from tests.simulation.rig.watch import Violation, Watch

__all__ = ["Machines", "World"]

_LATENCY_S = 0.05
_POLL_S = 4.0
"""How long a host waits for the answer to a poll, seconds."""
_SUBMIT_S = 2.0
"""How long a host waits for the answer to a submission, seconds."""
_TRAIN_S = 1.0
_WORK_S = 0.1
"""Time for unmasking, and for changing the model, seconds."""
PATIENCE_S = 10.0
"""Longest time for one step, seconds."""


class _Crash(Exception):  # noqa: N818 - ends what a process was doing
    def __init__(self, down_s: float) -> None:
        super().__init__()
        self.down_s = down_s


@dataclass(frozen=True)
class Machines:
    """The state machines that a world runs; tests put faulty ones here to see that they are found."""

    advance: Callable[[RoundState, cos.Event], tuple[RoundState, list[cos.Effect]]] = cos.advance
    member: Callable[[SumPlan, party.Journal, Callable[[], MemberHalf]], MemberRound] = MemberRound
    disk: Callable[[], ServerDisk] = ServerDisk


@dataclass(frozen=True)
class _Answer:
    """The answer to a poll: an open step, and the briefings of the host's members for it."""

    plan: SumPlan
    step: Step
    briefings: tuple[tuple[int, bytes], ...]
    cursor: tuple[object, ...]


class World:
    """A simulated server and its hosts, which run one schedule.

    Parameters
    ----------
    members : sequence of Member
        Members of every round, in order; their devices are the hosts.
    layout : Layout
    server_half : callable
        Makes the server's half, again each time that the server starts.
    member_half : callable
        Makes the half of a member of a plan; key holders' halves come from ``tests.simulation.rig.sums``.
    faults : Faults
    rng : numpy Generator
        Generator of the contributions' vectors.
    rounds : int
        Number of rounds, applied or abandoned.
    min_sum, sparse_floor : int
        Floors of each sum.
    machines : Machines
    repeats : bool
        Whether an abandoned sum is repeated.
    """

    def __init__(
        self,
        members: Sequence[Member],
        layout: Layout,
        server_half: Callable[[], ServerHalf],
        member_half: Callable[[SumPlan, int], MemberHalf],
        faults: Faults,
        rng: np.random.Generator,
        rounds: int,
        min_sum: int,
        sparse_floor: int = 0,
        machines: Machines | None = None,
        *,
        repeats: bool = False,
    ) -> None:
        self.repeats = repeats
        self.members, self.layout, self.server_half = tuple(members), layout, server_half()
        self.new_server_half = server_half
        self.member_half, self.faults, self.rng = member_half, faults, rng
        self.rounds, self.machines = rounds, machines or Machines()
        self.min_sum, self.sparse_floor = min_sum, sparse_floor
        self.clock, self.watch = Clock(), Watch(layout)
        self.crashes = 0
        self.finished = False
        self.server = _Server(self)
        self.holders = self.server_half.plan_fields(len(self.members), layout).holders
        devices = dict.fromkeys(one.device for one in (*self.members, *self.holders))
        self.hosts = {name: _Host(self, name) for name in devices}

    def run(self) -> None:
        """Run until every round has ended.

        Raises
        ------
        Violation
            When an invariant is violated, or the rounds do not end in time.
        """
        self.server.start()
        for host in self.hosts.values():
            host.poll()
        while not self.finished:
            if not self.clock.step():
                raise Violation("nothing is going to happen any more, and the run has not ended")
            # Each step of each round takes at most its patience, and each crash at most that again and the down time.
            # Each key holder may delay a part of a sum by the time of a step.
            waits = len(self.server_half.steps) + len(self.holders)
            steps = self.rounds * (waits * PATIENCE_S + (4 + len(self.holders)) * _WORK_S)
            # There is a pause after the last round, too, when it was abandoned.
            pauses = sum(pause_s(row, PATIENCE_S) for row in range(1, self.rounds + 1))
            limit = steps + pauses + self.crashes * (2 * PATIENCE_S + 4 * _WORK_S)
            if self.clock.now > limit:
                raise Violation(f"the run has not ended after {limit:g} s: {self.server.describe()}")

    def link(self, origin: str, target: str, deliver: Callable[[], None]) -> None:
        """Send a message over a link, which may lose, delay or repeat it."""
        fault = self.faults.at(f"message {origin}>{target}")
        if fault is not None and fault.what == "drop":
            return
        late = fault.amount if fault is not None and fault.what == "delay" else 0.0
        self.clock.after(_LATENCY_S + late, deliver)
        if fault is not None and fault.what == "twice":
            self.clock.after(_LATENCY_S + fault.amount, deliver)

    def crash_point(self, place: str) -> None:
        """Crash the process here if a fault says so."""
        fault = self.faults.at(place)
        if fault is not None:
            self.crashes += 1
            raise _Crash(fault.amount)

    def codes(self, member: int) -> NDArray[np.uint32]:
        """Return a new contribution of a member, within the bounds of the layout."""
        total = np.zeros(self.layout.size, np.uint32)
        for segment in self.layout.segments:
            place = self.layout.places[segment.name]
            users = self.members[member].users
            drawn = self.rng.integers(1, 2**segment.bits, (users, segment.size), dtype=np.uint64)
            total[place] = drawn.sum(axis=0).astype(np.uint32)
        if self.sparse_floor:
            # A sparse contribution has values in one stretch only.
            first, end = sorted(self.rng.integers(0, self.layout.size, 2))
            zeros = self.layout.zeros(self.members[member].users)
            total[:first], total[end:] = zeros[:first], zeros[end:]
        return total


class _Server:
    """The simulated orchestration server."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._disk = world.machines.disk()
        self._boot = 0
        self._state: RoundState | None = None
        self._parked: dict[str, tuple[object, ...]] = {}
        self._ticks_at = -1.0
        self._old: Submission | None = None
        self._abandoned_in_a_row = 0

    def describe(self) -> str:
        """Describe the state of the round, for violations."""
        state = self._state
        return (
            "the server is down"
            if state is None
            else f"round {state.plan.round}, {state.step}, {state.phase}"
        )

    def start(self) -> None:
        """Start the process, for the first time or again."""
        self._boot += 1
        world = self._world
        world.server_half = world.new_server_half()
        self._guarded(lambda: self._take_up(self._disk.load(world.layout, world.server_half, PATIENCE_S)))

    def polled(self, host: str, cursor: tuple[object, ...]) -> None:
        """Take a poll, and answer it once there is something new to do."""
        if self._state is None:
            return
        self._parked[host] = cursor
        self._guarded(lambda: self._presence(host))
        self._wake(host)

    def submitted(self, host: str, submission: Submission) -> None:
        """Take a submission, and answer it."""

        def take() -> None:
            state = self._state
            if state is None:
                return
            answer = "taken"
            if submission.round == state.plan.round:
                event = cos.Arrived(
                    submission.member, submission.step, submission.message, self._world.clock.now
                )
                try:
                    self._do(event)
                except Refusal as refusal:
                    answer = refusal.name
            else:
                answer = "UNKNOWN_ROUND"
            self._world.link("cos", host, lambda: self._world.hosts[host].acknowledged(submission, answer))
            self._intrude(submission)

        self._guarded(take)

    def declined(self, host: str, number: int, member: int) -> None:
        """Take a member's message that it declines a round, and answer it."""

        def take() -> None:
            if self._state is None:
                return
            if number == self._state.plan.round:
                numbers = frozenset(self._state.plan.numbers_of(member))
                self._do(cos.MembersDeclined(numbers, self._world.clock.now))
            self._world.link("cos", host, lambda: self._world.hosts[host].excused(number, member))

        self._guarded(take)

    # --- what happens inside ---------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _Crash as crash:
            self._boot += 1
            self._state = None
            self._parked.clear()
            self._ticks_at = -1.0
            self._world.clock.after(crash.down_s, self.start)

    def _later(self, delay: float, work: Callable[[], None]) -> None:
        boot = self._boot
        self._world.clock.after(delay, lambda: self._guarded(work) if boot == self._boot else None)

    def _take_up(self, state: RoundState | None) -> None:
        if state is None or state.phase.ended:
            self._next()
            return
        self._do(cos.Resumed(self._world.clock.now), state)

    def _next(self) -> None:
        world = self._world
        if self._disk.round >= world.rounds:
            world.finished = True
            return
        number = self._disk.round + 1
        if not (world.repeats and self._disk.abandoned):
            self._disk.place, self._disk.bound = self._disk.place + 1, frozenset()
        world.watch.begins(number)
        fields = world.server_half.plan_fields(len(world.members), world.layout)
        plan = SumPlan(
            run_id="simulated",
            round=number,
            purpose="train",
            secure_sum=world.server_half.name,
            model_sha256=hashlib.sha256(b"model %d" % self._disk.version).digest(),
            layout_sha256=hashlib.sha256(b"layout").digest(),
            members=world.members,
            min_sum=world.min_sum,
            sparse_floor=world.sparse_floor,
            pass_number=self._disk.place,
            **fields._asdict(),
        )
        begun = RoundState.begin(plan, world.layout, world.server_half, PATIENCE_S, SUBJECT, self._disk.bound)
        self._do(cos.RoundOpened(world.clock.now), begun)

    def _do(self, event: cos.Event, state: RoundState | None = None) -> None:
        world = self._world
        before = state if state is not None else self._state
        if before is None:
            raise AssertionError("an event without a round")
        after, effects = world.machines.advance(before, event)
        world.watch.stepped(after)
        for effect in effects:
            world.crash_point("cos")
            self._carry_out(after, effect)
        if effects:
            world.crash_point("cos")
        # Only from here on is the new state visible.
        self._state = after
        if after.phase is SumPhase.COLLECT and after.deadline > self._ticks_at:
            self._ticks_at = after.deadline
            self._later(after.deadline - world.clock.now, lambda: self._tick(after.deadline))
        for host in tuple(self._parked):
            self._wake(host)

    def _tick(self, deadline: float) -> None:
        if self._state is not None and not self._state.phase.ended:
            # Rounding of times must not leave the deadline in the future.
            self._do(cos.Tick(max(self._world.clock.now, deadline)))

    def _carry_out(self, state: RoundState, effect: cos.Effect) -> None:
        world = self._world
        match effect:
            case cos.Save(closed):
                self._disk.save(state, closed)
                world.watch.saved(state)
            case cos.Ask():
                # Waiting hosts are answered after each event.
                pass
            case cos.Unmask():
                self._later(_WORK_S, self._unmask)
            case cos.Apply(total, users):
                codes = codes_in(total, world.layout.size)
                self._later(_WORK_S, lambda: self._apply(codes, users))
            case cos.End():
                row = self._abandoned_in_a_row + 1 if state.phase is SumPhase.ABANDONED else 0
                self._abandoned_in_a_row = row
                self._later(_WORK_S + pause_s(row, PATIENCE_S), self._next)

    def _unmask(self) -> None:
        state = self._state
        if state is None or state.running is None:
            raise Violation("a sum is unmasked without a running sum")
        try:
            total = self._world.server_half.unmask(state.plan, state.closed, state.running)
        except Failed as failed:
            self._do(cos.UnmaskFailed(str(failed), self._world.clock.now, failed.wrong))
        else:
            self._do(cos.Unmasked(total.formed))

    def _apply(self, total: NDArray[np.uint32], users: int) -> None:
        world, state = self._world, self._state
        if state is None:
            raise Violation("a sum is applied without a round")
        try:
            world.layout.decode(total, users)
        except ImpossibleSumError as impossible:
            self._do(cos.SumApplied(str(impossible)))
            return
        world.crash_point("cos")
        self._disk.apply(state)
        world.watch.applies(state, total, self._disk.version)
        self._do(cos.SumApplied())

    def _presence(self, host: str) -> None:
        if self._state is not None and self._world.faults.at(f"presence {host}") is not None:
            members = frozenset(self._state.plan.by_device[host])
            self._do(cos.MembersLost(members, self._world.clock.now))

    def _wake(self, host: str) -> None:
        state = self._state
        if state is None or state.phase is not SumPhase.COLLECT or host not in self._parked:
            return
        asked = [member for member in state.asked if state.plan.device_of(member) == host]
        cursor = (self._boot, state.plan.round, state.step, tuple(asked))
        if not asked or cursor == self._parked[host]:
            return
        del self._parked[host]
        briefings = tuple((member, self._shown(host, state, member)) for member in asked)
        answer = _Answer(state.plan, state.step, briefings, cursor)
        self._world.link("cos", host, lambda: self._world.hosts[host].polled(answer))

    def _shown(self, host: str, state: RoundState, member: int) -> bytes:
        """Return a member's briefing, or a forged one if a fault says so."""
        briefing = state.briefing(member)
        fault = self._world.faults.at(f"deceit {host}")
        return briefing if fault is None else forged(state.step, briefing, fault, len(self._world.members))

    def _intrude(self, last: Submission) -> None:
        """Submit a forged message if a fault says so, and check that it is refused."""
        world, state = self._world, self._state
        fault = world.faults.at("intruder")
        if fault is None or state is None:
            return
        event = intrusion(fault, state, last, self._old, world.layout, world.clock.now)
        self._old = last
        if event is not None:
            advance = world.machines.advance
            world.watch.refused(lambda: advance(state, event), state, fault.what)


class _Host:
    """A simulated client host, or device of a key holder."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self._disk = HostDisk()
        self._boot = 0
        self._down = False
        self._polls = 0
        self._plan: SumPlan | None = None
        self._rounds: dict[int, MemberRound | HolderRound] = {}
        self._outbox: dict[tuple[int, Step], Submission] = {}
        self._declining: set[tuple[int, int]] = set()
        self._cursor: tuple[object, ...] = ()
        self._said: dict[tuple[int, int], bytes] = {}

    def poll(self) -> None:
        """Poll the server; poll again when no answer comes."""
        self._polls += 1
        number, world = self._polls, self._world
        cursor = self._cursor
        world.link(self._name, "cos", lambda: world.server.polled(self._name, cursor))
        self._later(_POLL_S, lambda: self.poll() if number == self._polls else None)

    def polled(self, answer: _Answer) -> None:
        """Take the answer to a poll, which may be an old one, even one to a process that has died since."""
        if not self._down:
            self._guarded(lambda: self._polled(answer))

    def acknowledged(self, submission: Submission, answer: str) -> None:
        """Forget a submission that the server has answered, taken or refused."""
        if self._outbox.get((submission.member, submission.step)) == submission:
            del self._outbox[submission.member, submission.step]

    def excused(self, number: int, member: int) -> None:
        """Stop repeating that a member declined: the server has answered."""
        self._declining.discard((number, member))

    # --- what happens inside ---------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _Crash as crash:
            self._boot += 1
            self._down = True
            self._plan, self._cursor = None, ()
            self._rounds.clear()
            self._outbox.clear()
            self._declining.clear()
            self._world.clock.after(crash.down_s, self._start)

    def _start(self) -> None:
        self._down = False
        self.poll()

    def _later(self, delay: float, work: Callable[[], None]) -> None:
        boot = self._boot
        self._world.clock.after(delay, lambda: self._guarded(work) if boot == self._boot else None)

    def _polled(self, answer: _Answer) -> None:
        if self._plan is None or answer.plan.round > self._plan.round:
            for member, one in tuple(self._rounds.items()):
                self._carry_out(one, member, one.close())
            self._rounds.clear()
            self._outbox.clear()
            self._declining.clear()
            self._plan = answer.plan
        if answer.plan.round == self._plan.round:
            self._cursor = answer.cursor
            for member, briefing in answer.briefings:
                one = self._round(member)
                self._carry_out(one, member, one.asked(answer.step, briefing))
        self.poll()

    def _round(self, number: int) -> MemberRound | HolderRound:
        plan, world = self._plan, self._world
        if plan is None:
            raise AssertionError("a member without a plan")
        # A key holder has one machine for all its numbers.
        member = plan.numbers_of(number)[0]
        found = self._rounds.get(member)
        if found is None:
            journal = self._disk.journal(member)
            if member < len(plan.members):
                found = world.machines.member(plan, journal, lambda: world.member_half(plan, member))
            else:
                holder, _ = plan.asked_of(member)
                found = HolderRound(plan, journal, lambda: key_holder(plan, holder))
            self._rounds[member] = found
        return found

    def _carry_out(
        self, one: MemberRound | HolderRound, member: int, effects: Sequence[party.Effect]
    ) -> None:
        world = self._world
        for effect in effects:
            world.crash_point(f"host {self._name}")
            match effect:
                case party.Keep(journal):
                    self._disk.keep(one.plan.numbers_of(member)[0], journal)
                case party.Train():
                    self._train(one, member)
                case party.Send(step, message):
                    if step is Step.DECRYPT:
                        message = self._decrypted(one.plan.round, member, message)
                    world.watch.sends(one.plan, member, step, message)
                    self._submit(Submission(one.plan.round, member, step, message))
                case party.Decline():
                    for number in one.plan.numbers_of(member):
                        world.watch.declines(one.plan, number)
                    self._decline(one.plan.round, member)
                case party.SitOut():
                    pass
        if effects:
            world.crash_point(f"host {self._name}")

    def _decrypted(self, number: int, member: int, message: bytes) -> bytes:
        """Return a key holder's decryption of a part of the sum; a liar repeats the same falsified one."""
        if (number, member) not in self._said:
            fault = self._world.faults.at(f"decrypt {self._name}")
            self._said[number, member] = message if fault is None else false(message, member)
        return self._said[number, member]

    def _train(self, one: MemberRound | HolderRound, member: int) -> None:
        fault = self._world.faults.at(f"train {self._name}")
        if fault is not None and fault.what == "hang":
            return

        def trained() -> None:
            if self._rounds.get(member) is not one:
                return
            if fault is not None and fault.what == "fail":
                self._carry_out(one, member, one.failed("the local step failed"))
                return
            codes = self._world.codes(member)
            effects = one.trained(codes)
            for effect in effects:
                if isinstance(effect, party.Send):
                    self._world.watch.makes(one.plan, member, codes, effect.message)
            self._carry_out(one, member, effects)

        self._later(_TRAIN_S + (fault.amount if fault is not None and fault.what == "slow" else 0.0), trained)

    def _decline(self, number: int, member: int) -> None:
        if (number, member) not in self._declining:
            self._declining.add((number, member))
            self._say_declined(number, member)

    def _say_declined(self, number: int, member: int) -> None:
        if (number, member) in self._declining:
            world = self._world
            world.link(self._name, "cos", lambda: world.server.declined(self._name, number, member))
            self._later(_SUBMIT_S, lambda: self._say_declined(number, member))

    def _submit(self, submission: Submission) -> None:
        self._outbox[submission.member, submission.step] = submission
        self._send(submission)

    def _send(self, submission: Submission) -> None:
        if self._outbox.get((submission.member, submission.step)) is not submission:
            return
        world = self._world
        world.link(self._name, "cos", lambda: world.server.submitted(self._name, submission))
        self._later(_SUBMIT_S, lambda: self._send(submission))
