"""Machines with one fault each: the schedules find every one of them, and say so in few events."""

import dataclasses
import io
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest

from coterie.rounds import server_round as cos
from coterie.rounds.member_round import MemberRound, Send
from coterie.secure_sum.clear import ClearServer
from coterie.secure_sum.protocol import Step
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import rounds_pb2 as wire
from tests.simulation.rig.durable import ServerDisk
from tests.simulation.rig.faults import Fault
from tests.simulation.rig.schedule import Found, Scenario, find, shorten
from tests.simulation.rig.world import Machines


def first_found(machines: Machines, secure_sum: str = "clear", most: int = 300) -> Found:
    for seed in range(most):
        found = find(Scenario.drawn(seed, secure_sum), machines)
        if found is not None:
            return found
    pytest.fail(f"no schedule of {most} finds it")


def forgets_repetitions(state, event):
    """Take each message as if its member had sent none."""
    if isinstance(event, cos.Arrived) and event.member in state.arrived:
        arrived = {member: note for member, note in state.arrived.items() if member != event.member}
        return cos.advance(dataclasses.replace(state, arrived=arrived), event)
    return cos.advance(state, event)


def adds_after_the_close(state, event):
    try:
        return cos.advance(state, event)
    except Refusal:
        if not isinstance(event, cos.Arrived) or event.step is not Step.SUBMIT or state.running is None:
            raise
        if event.member in state.submitters or event.member not in state.expected:
            raise
        vector = state.half.vector(
            state.plan, state.closed, state.submitters, event.member, event.message, state.layout
        )
        submitters = {**state.closed.get(Step.SUBMIT, {}), event.member: vector.note}
        late = dataclasses.replace(
            state, running=state.running + vector.addend, closed={**state.closed, Step.SUBMIT: submitters}
        )
        return late, [cos.Save(Step.SUBMIT)]


def adds_in_place(state, event):
    """Change the sum that the state before still holds, also by what is refused."""
    if isinstance(event, cos.Arrived) and state.running is not None and event.step is Step.SUBMIT:
        state.running[0] += 1
        after, effects = cos.advance(state, event)
        return after, effects
    return cos.advance(state, event)


def acts_before_it_saves(state, event):
    """Leave out the save at the close of a step."""
    after, effects = cos.advance(state, event)
    return after, [effect for effect in effects if effect != cos.Save(Step.SUBMIT)]


def closes_below_the_floor(state, event):
    after, effects = cos.advance(state, event)
    ended = after.phase is cos.SumPhase.ABANDONED and not state.phase.ended
    if ended and isinstance(event, cos.Tick) and after.step is Step.SUBMIT and after.arrived:
        closed = {**state.closed, Step.SUBMIT: after.arrived}
        after = dataclasses.replace(state, phase=cos.SumPhase.UNMASK, closed=closed)
        return after, [cos.Save(Step.SUBMIT), cos.Unmask()]
    return after, effects


def waits_for_ever(state, event):
    return (state, []) if isinstance(event, cos.Tick) else cos.advance(state, event)


def abandons_without_a_word(state, event):
    after, effects = cos.advance(state, event)
    return (dataclasses.replace(after, reason=""), effects)


def takes_strangers(state, event):
    try:
        return cos.advance(state, event)
    except Refusal as refusal:
        if refusal.name != "UNKNOWN_PARTICIPANT":
            raise
        return state, []


class ForgetsWhatItSent(MemberRound):
    """Makes another contribution after a restart."""

    def __post_init__(self) -> None:
        self.journal = dataclasses.replace(self.journal, joined=0, contribution=b"")
        super().__post_init__()


class SendsBeforeItKeeps(MemberRound):
    """Keeps its contribution after it has sent it."""

    def trained(self, codes):
        return super().trained(codes)[::-1]

    def __post_init__(self) -> None:
        if self.journal.joined == self.plan.round and not self.journal.contribution:
            self.journal = dataclasses.replace(self.journal, joined=self.plan.round - 1)
        super().__post_init__()


class MakesTwo(MemberRound):
    """Trains again when it is asked again."""

    def asked(self, step, briefing):
        if step is Step.SUBMIT and Step.SUBMIT in self._answers:
            del self._answers[Step.SUBMIT]
            self._training = False
        return super().asked(step, briefing)


class LosesTheSum(ServerDisk):
    """Does not write the sum at the close."""

    def save(self, state, closed):
        super().save(state, closed)
        self.running = np.zeros(state.layout.size, "<u4").tobytes() if self.running else b""


class ReopensSubmit(ServerDisk):
    """Comes back before the close of SUBMIT."""

    def load(self, layout, half, patience_s):
        state = super().load(layout, half, patience_s)
        if state is None or Step.SUBMIT not in state.closed or state.phase is not cos.SumPhase.UNMASK:
            return state
        return dataclasses.replace(
            state, phase=cos.SumPhase.COLLECT, step=Step.SUBMIT, closed={}, running=None
        )


class CountsTwice(ServerDisk):
    """Writes the version and the end of the round one after the other."""

    def apply(self, state):
        super().apply(state)
        self.head = self.head.replace(b"done", b"unmask")


class UsesNumbersAgain(ServerDisk):
    """Forgets the number of a round that was abandoned."""

    def save(self, state, closed):
        super().save(state, closed)
        if state.phase is cos.SumPhase.ABANDONED:
            self.round -= 1


FAULTY = {
    "a server that forgets repetitions": (Machines(advance=forgets_repetitions), "is not the sum of"),
    "a server that adds after the close": (Machines(advance=adds_after_the_close), "changed after"),
    "a server that adds in place": (Machines(advance=adds_in_place), "is not the sum of"),
    "a server that acts before it saves": (Machines(advance=acts_before_it_saves), ""),
    "a server that closes below the floor": (Machines(advance=closes_below_the_floor), "users only"),
    "a server that waits for ever": (Machines(advance=waits_for_ever), "has not ended"),
    "a server that gives no reason": (Machines(advance=abandons_without_a_word), "without a reason"),
    "a server that takes strangers": (Machines(advance=takes_strangers), "should be refused"),
    "a member that forgets what it sent": (Machines(member=ForgetsWhatItSent), "two different messages"),
    "a member that sends before it keeps": (Machines(member=SendsBeforeItKeeps), "two different messages"),
    "a member that makes two contributions": (Machines(member=MakesTwo), "two different messages"),
    "a store without the sum": (Machines(disk=LosesTheSum), "is not the sum of"),
    "a store that reopens SUBMIT": (Machines(disk=ReopensSubmit), ""),
    "a store that counts a round twice": (Machines(disk=CountsTwice), ""),
    "a store that forgets a number": (Machines(disk=UsesNumbersAgain), "used again"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_schedules_find(name):
    machines, words = FAULTY[name]
    found = first_found(machines)
    assert words in found.what
    assert len(found.faults) <= 4, f"the shortest list is short:\n{found}"
    # The list, as it would stand in the corpus, fails with the faulty machine and not with the right one.
    kept = Found.from_json(found.to_json())
    assert kept.again(machines) is not None
    assert kept.again() is None


class RevealsBoth(MemberRound):
    """Sends something for each of the two secrets of each neighbour."""

    def asked(self, step, briefing):
        effects = super().asked(step, briefing)
        if step is not Step.UNMASK or not effects or not isinstance(effects[-1], Send):
            return effects
        unmasking = wire.Unmasking.FromString(effects[-1].message)
        for share in list(unmasking.shares):
            other = "mask" if share.WhichOneof("share") == "seed" else "seed"
            unmasking.shares.add(member=share.member, **{other: bytes(33)})
        return [*effects[:-1], Send(step, unmasking.SerializeToString())]


def test_schedules_find_a_member_that_reveals_both_secrets():
    found = first_found(Machines(member=RevealsBoth), "masked", 20)
    assert "revealed both secrets" in found.what
    assert found.faults == ()


def test_new_keys_for_the_same_round_after_a_restart_are_found():
    """While one host is late for ADVERTISE, another restarts, and advertises once more."""
    scenario = Scenario(0, "masked", ((1,), (1,), (1,)), 1, 1)
    faults = (
        Fault("message h1>cos", 0, "drop"),
        Fault("message h0>cos", 1, "drop"),
        Fault("host h0", 2, "crash", 0.1),
    )
    kept = Found(scenario, faults, "")
    assert "two different messages for advertise" in (kept.again(Machines(member=ForgetsWhatItSent)) or "")
    assert kept.again() is None


def test_a_failing_list_is_shortened_to_what_is_needed():
    faults = [Fault("message h0>cos", number, "drop") for number in range(40)]
    tries = []

    def fails(some):
        tries.append(len(some))
        return {3, 17, 31} <= {fault.number for fault in some}

    assert [fault.number for fault in shorten(faults, fails)] == [3, 17, 31]
    assert len(tries) < 200


def test_a_failure_that_needs_no_fault_is_shortened_to_nothing():
    assert shorten([Fault("cos", 1, "crash")], lambda some: True) == []


def test_a_list_that_does_not_fail_again_stays_whole():
    faults = [Fault("cos", 1, "crash"), Fault("cos", 5, "crash")]
    assert shorten(faults, lambda some: False) == faults


def test_the_command_prints_a_failing_seed_and_writes_its_schedule(monkeypatch, tmp_path):
    from tests.simulation.rig import __main__ as command

    monkeypatch.setattr(ClearServer, "shortfall", lambda self, plan, closed, step, arrived: "")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = command.main(["--schedules", "40", "--found", str(tmp_path)])
    assert status == 1
    assert "seed " in err.getvalue()
    assert "users only" in err.getvalue()
    written = sorted(tmp_path.glob("clear-*.json"))
    assert written
    with redirect_stdout(out):
        assert command.main(["--replay", str(written[0])]) == 1
    monkeypatch.undo()
    with redirect_stdout(out):
        assert command.main(["--replay", str(written[0])]) == 0
        assert command.main(["--schedules", "3", "--seed", "5", "--sum", "masked"]) == 0
    assert "masked: seeds 5 to 7, 0 failed" in out.getvalue()
