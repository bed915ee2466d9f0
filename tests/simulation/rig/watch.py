"""Check invariants of every schedule from outside the machines, on bytes sent, stored and summed."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.server_round import RoundState, SumPhase
from coterie.secure_sum.codes import codes_of
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Running, Step
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import rounds_pb2 as wire
from tests.simulation.rig.sums import added, opened

__all__ = ["Violation", "Watch"]


class Violation(AssertionError):  # noqa: N818 - what it is called in the design
    """Raised by `Watch` when an invariant is violated; the message says which."""


class Watch:
    """Follows one schedule and checks its invariants; fed by `World`.

    Parameters
    ----------
    layout : Layout
        Layout of the contributions.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sent: dict[tuple[int, int, Step], bytes] = {}
        # Contributions as added, and as they were before masking, by round, member and SHA-256 of the message.
        self._added: dict[tuple[int, int, bytes], NDArray[np.uint32]] = {}
        self._plain: dict[tuple[int, int, bytes], NDArray[np.uint32]] = {}
        self._submitters: dict[int, Mapping[int, bytes]] = {}
        self._revealed: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
        self._shares: dict[tuple[int, int, str], set[int]] = defaultdict(set)
        # Submitters of the sums that each member or key holder helped to reveal, by its name and the sum's place.
        self._places: dict[tuple[str, str, int, int], tuple[int, ...]] = {}
        self._declined: set[tuple[int, int]] = set()
        self._read: tuple[Running, NDArray[np.uint32]] = (None, np.empty(0, np.uint32))
        self._rounds = 0
        self._version = 0
        self.applied: dict[int, tuple[int, ...]] = {}
        self.abandoned: dict[int, str] = {}
        self.refusals: Counter[str] = Counter()

    # --- members -------------------------------------------------------------------------------------------------

    def makes(self, plan: SumPlan, member: int, codes: NDArray[np.uint32], message: bytes) -> None:
        """Note a contribution that a member has made, before the member stores or sends it."""
        key = plan.round, member, hashlib.sha256(message).digest()
        self._plain[key] = codes.copy()
        # An encrypted vector counts by its plain codes, as `opened` decrypts the running sum.
        self._added[key] = codes if plan.holders else codes_of(message, self._layout.size)[1].copy()

    def sends(self, plan: SumPlan, member: int, step: Step, message: bytes) -> None:
        """Check a message that a member sends."""
        digest = hashlib.sha256(message).digest()
        key = (plan.round, member, step)
        if (plan.round, member) in self._declined and key not in self._sent:
            raise Violation(
                f"member {member} declined round {plan.round}, and sent something for {step.value}"
            )
        if self._sent.setdefault(key, digest) != digest:
            raise Violation(
                f"member {member} sent two different messages for {step.value} of round {plan.round}"
            )
        if step is Step.UNMASK:
            self._reveals_shares(plan, member, message)
            self._binds(f"member {member}", plan)
        elif step is Step.CONFIRM and plan.holders:
            self._binds(f"key holder {plan.asked_of(member)[0]}", plan)

    def _binds(self, who: str, plan: SumPlan) -> None:
        """Check that nobody helps to reveal two sums of one place over different members."""
        submitters = tuple(sorted(self._submitters[plan.round]))
        held = self._places.setdefault((who, plan.purpose, plan.pass_number, plan.part), submitters)
        if held != submitters:
            raise Violation(
                f"{who} helped to reveal sums of pass {plan.pass_number} over {held} and over {submitters}"
            )

    def declines(self, plan: SumPlan, member: int) -> None:
        """Note that a member takes no further part in a round."""
        self._declined.add((plan.round, member))

    def _reveals_shares(self, plan: SumPlan, member: int, message: bytes) -> None:
        known = self._revealed[plan.round, member]
        for share in wire.Unmasking.FromString(message).shares:
            which = str(share.WhichOneof("share"))
            if known.setdefault(share.member, which) != which:
                raise Violation(
                    f"member {member} revealed both secrets of {share.member} in round {plan.round}"
                )
            self._shares[plan.round, share.member, which].add(member)
            if all(
                len(self._shares[plan.round, share.member, one]) >= plan.threshold for one in ("seed", "mask")
            ):
                raise Violation(f"both secrets of member {share.member} were revealed in round {plan.round}")

    # --- server --------------------------------------------------------------------------------------------------

    def saved(self, state: RoundState) -> None:
        """Check a state that has become durable."""
        number = state.plan.round
        if number < self._rounds:
            raise Violation(f"round {number} was written after round {self._rounds}")
        self._rounds = number
        if Step.SUBMIT in state.closed:
            notes = dict(state.closed[Step.SUBMIT])
            if self._submitters.setdefault(number, notes) != notes:
                raise Violation(f"the submitters of round {number} changed after they were final")
        if state.phase is SumPhase.ABANDONED:
            if not state.reason:
                raise Violation(f"round {number} was abandoned without a reason")
            if number in self.applied:
                raise Violation(f"round {number} was abandoned after it was applied")
            self.abandoned[number] = state.reason

    def begins(self, number: int) -> None:
        """Check the number of a new round."""
        if number <= self._rounds:
            raise Violation(f"round number {number} was used again")

    def stepped(self, state: RoundState) -> None:
        """Check that the running sum is the sum of the contributions that its notes name, each once."""
        if state.running is None:
            return
        notes = _notes(state)
        if notes is None:
            return
        codes = self._codes(state.plan.round, notes, self._added)
        if not np.array_equal(self._opened(state, notes), self._sum(codes)):
            raise Violation(f"the running sum of round {state.plan.round} is not the sum of {sorted(notes)}")

    def _opened(self, state: RoundState, notes: Mapping[int, bytes]) -> NDArray[np.uint32]:
        """Return the codes of a running sum, cached for the last one."""
        if self._read[0] is not state.running:
            self._read = state.running, opened(state.running, state.plan, notes)
        return self._read[1]

    def applies(self, state: RoundState, total: NDArray[np.uint32], version: int) -> None:
        """Check a sum that has just been applied, and the model version that it made."""
        number = state.plan.round
        notes = state.closed[Step.SUBMIT]
        if number in self.applied:
            raise Violation(f"round {number} was applied twice")
        if number in self.abandoned:
            raise Violation(f"round {number} was applied after it was abandoned")
        if dict(notes) != self._submitters.get(number):
            raise Violation(f"round {number} was applied for other submitters than were final")
        expected = added(state.plan, self._layout, self._codes(number, notes, self._plain))
        if not np.array_equal(total, expected):
            raise Violation(f"the sum of round {number} is not the sum of the vectors of {sorted(notes)}")
        if state.users < state.plan.min_sum:
            raise Violation(f"the sum of round {number} covers {state.users} users only")
        if version != self._version + 1:
            raise Violation(f"round {number} took the model from version {self._version} to {version}")
        self._version = version
        self.applied[number] = tuple(sorted(notes))

    def refused(self, take: Callable[[], object], state: RoundState, what: str) -> None:
        """Check that a bad message is refused and changes nothing."""
        before = _print(state)
        try:
            take()
        except Refusal:
            self.refusals[what] += 1
        else:
            raise Violation(f"a message that should be refused was taken: {what}")
        if _print(state) != before:
            raise Violation(f"a message that was refused changed the state: {what}")

    def _codes(
        self, number: int, notes: Mapping[int, bytes], of: Mapping[tuple[int, int, bytes], NDArray[np.uint32]]
    ) -> dict[int, NDArray[np.uint32]]:
        found = {}
        for member, note in notes.items():
            codes = of.get((number, member, note[:32]))
            if codes is None:
                raise Violation(f"round {number} sums what member {member} never sent")
            found[member] = codes
        return found

    def _sum(self, codes: Mapping[int, NDArray[np.uint32]]) -> NDArray[np.uint32]:
        return sum(codes.values(), np.zeros(self._layout.size, np.uint32))


def _notes(state: RoundState) -> Mapping[int, bytes] | None:
    """Return the notes on the contributions in a running sum; None where there are none yet."""
    if state.step is Step.SUBMIT and state.phase is SumPhase.COLLECT:
        return state.arrived
    return state.closed.get(Step.SUBMIT)


def _print(state: RoundState) -> tuple[object, ...]:
    notes = _notes(state) or {}
    running = b"" if state.running is None else opened(state.running, state.plan, notes).tobytes()
    closed = {step: dict(messages) for step, messages in state.closed.items()}
    return (
        state.phase,
        state.step,
        closed,
        dict(state.arrived),
        running,
        state.deadline,
        state.lost,
        state.declined,
    )
