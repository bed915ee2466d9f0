"""Rounds in one process: the state machines of ``coterie.rounds`` called directly, without network and faults.

``--in-process`` runs these rounds, and benchmarks compare the time of a networked round with theirs.  So they contain
the state machines only: messages are handed over as they are, vectors are not copied, nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.rounds.denoiser_round import DenoiserRound, NoiseHalf
from coterie.rounds.holder_round import Half, HolderRound
from coterie.rounds.member_round import Decline, Journal, Keep, MemberRound, Send, SitOut, Train
from coterie.rounds.member_round import Effect as MemberEffect
from coterie.rounds.server_round import (
    Apply,
    Arrived,
    Effect,
    Event,
    RoundOpened,
    RoundState,
    SumApplied,
    SumPhase,
    Tick,
    Unmask,
    Unmasked,
    UnmaskFailed,
    advance,
)
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Failed, Formed, MemberHalf, ServerHalf, Step, Subject, Total, users_of
from coterie.wire.refusal import Refusal

__all__ = ["Holder", "MemberHost", "Members", "Outcome", "run_round"]

_STEP_S = 1.0
"""Time limit of one step on the round's own clock, which advances only when an answer is missing, seconds."""


class MemberHost(Protocol):
    """A connection that answers for some members of a round."""

    def answer(
        self, plan: SumPlan, step: Step, briefings: Mapping[int, bytes]
    ) -> Iterable[tuple[int, bytes]]:
        """Return the messages of those of its members that a step asks.

        Parameters
        ----------
        plan : SumPlan
        step : Step
        briefings : mapping of int to bytes
            The data for the step, by member that is asked.

        Returns
        -------
        iterable of (int, bytes)
            Members and their messages, in any order; a member without a message has dropped out of the round.  An
            iterator makes each message when it is summed, so that not all are in memory at once.
        """
        ...


@dataclass(frozen=True)
class Outcome:
    """The result of a round.

    Parameters
    ----------
    total : ndarray of uint32, shape (layout size,), or None
        Sum of the submitters' codes; None when the round was abandoned.
    users : int
        Number of users that the sum covers.
    submitters : tuple of int
        Members that the sum covers, ascending.
    reason : str
        Why the round was abandoned; empty when it was not.
    refused : tuple of (int, Refusal)
        Members whose messages were refused.
    wrong : tuple of int
        Members whose answers were found wrong when the sum was unmasked.
    dropped_places : int
        Number of places of a sparse sum that were dropped because too few users sent them.
    left_out : tuple of int
        Members whose contributions a robust rule left out of the sum, or that were withdrawn.
    withdrawn : tuple of str
        Why members of a denoised sum were withdrawn.
    bound : tuple of int
        As for `RoundState`.
    """

    total: Formed | None
    users: int = 0
    submitters: tuple[int, ...] = ()
    reason: str = ""
    refused: tuple[tuple[int, Refusal], ...] = ()
    wrong: tuple[int, ...] = ()
    dropped_places: int = 0
    left_out: tuple[int, ...] = ()
    withdrawn: tuple[str, ...] = ()
    bound: tuple[int, ...] = ()


def run_round(
    plan: SumPlan,
    layout: Layout,
    half: ServerHalf,
    hosts: Mapping[str, MemberHost],
    apply: Callable[[Formed, int], str] | None = None,
    subject: Subject | None = None,
    only: frozenset[int] = frozenset(),
) -> Outcome:
    """Carry out one round, from its opening to its end.

    Parameters
    ----------
    plan : SumPlan
        The round's plan, with the members in order and the device of each.
    layout : Layout
        Layout of the contributions.
    half : ServerHalf
        The server's half of the secure sum.
    hosts : mapping of str to MemberHost
        Connections by device, those of key holders included; members at a missing device drop out at once.
    apply : callable, optional
        Changes the model by a sum and its number of users; returns why the sum is impossible, else an empty string.
    subject : Subject, optional
        The model that the sum changes, where key holders apply it.
    only : frozenset of int
        As for `RoundState`.

    Returns
    -------
    Outcome
    """
    refused: list[tuple[int, Refusal]] = []
    wrong: tuple[int, ...] = ()
    found: Total | None = None
    event: Event = RoundOpened(0.0)
    state, effects = advance(RoundState.begin(plan, layout, half, _STEP_S, subject, only), event)
    now = 0.0
    while not state.phase.ended:
        if state.phase is SumPhase.COLLECT:
            step, wanted = state.step, set(state.asked)
            for device, members in plan.by_device.items():
                asked = [member for member in members if member in wanted]
                host = hosts.get(device)
                if not asked or host is None:
                    continue
                # Briefings depend on the state at the step's opening only, so `state` may advance below.
                briefings = {member: state.briefing(member) for member in asked}
                for member, message in host.answer(plan, step, briefings):
                    try:
                        state, effects = advance(state, Arrived(member, step, message, now))
                    except Refusal as refusal:
                        refused.append((member, refusal))
            if state.phase is SumPhase.COLLECT and state.step is step:
                now = state.deadline
                state, effects = advance(state, Tick(now))
            continue
        event, wrong, found = _carry_out(state, effects, now, apply, wrong, found)
        state, effects = advance(state, event)
    if state.phase is not SumPhase.DONE:
        found = None
    return Outcome(
        None if found is None else found.formed,
        state.users - (0 if found is None else users_of(plan, found.left_out)),
        state.submitters,
        state.reason,
        tuple(refused),
        wrong,
        0 if found is None else found.dropped_places,
        () if found is None else found.left_out,
        () if found is None else found.withdrawn,
        state.bound,
    )


def _carry_out(
    state: RoundState,
    effects: Sequence[Effect],
    now: float,
    apply: Callable[[Formed, int], str] | None,
    wrong: tuple[int, ...],
    total: Total | None,
) -> tuple[Event, tuple[int, ...], Total | None]:
    match effects[-1]:
        case Unmask():
            if state.running is None:
                raise AssertionError("a sum is unmasked without a running sum")
            try:
                found = state.half.unmask(state.plan, state.closed, state.running)
            except Failed as failed:
                return UnmaskFailed(str(failed), now, failed.wrong), (*wrong, *failed.wrong), None
            return Unmasked(found.formed, found.left_out), (*wrong, *found.wrong), found
        case Apply(formed, users):
            return SumApplied(apply(formed, users) if apply is not None else ""), wrong, total
        case other:
            raise AssertionError(f"a round cannot go on after {other}")


@dataclass
class Members:
    """A host whose members run ``coterie.rounds.member_round``, with their journals in memory.

    Parameters
    ----------
    half : callable
        Makes a member's half of the secure sum of a plan.
    train : callable
        Returns the contributions of the given members, in any order; a member without one drops out.
    denoiser : callable, optional
        Makes the host's half as a denoiser of a plan; a denoised sum needs it.
    """

    half: Callable[[SumPlan, int], MemberHalf]
    train: Callable[[SumPlan, Sequence[int]], Iterable[tuple[int, NDArray[np.uint32]]]]
    once: bool = False
    """Whether each member contributes only once to the sums of a place."""
    denoiser: Callable[[SumPlan], NoiseHalf] | None = None
    journals: dict[bytes, Journal] = field(default_factory=dict)
    """Journals by participant."""
    noted: Journal = field(default_factory=Journal)
    """Journal of the host as a denoiser."""
    sat_out: dict[int, str] = field(default_factory=dict)
    """Reasons of members that took no further part in the present round, by member."""
    _rounds: dict[int, MemberRound] = field(default_factory=dict)
    _denoising: DenoiserRound | None = None
    _plan: SumPlan | None = None

    def answer(
        self, plan: SumPlan, step: Step, briefings: Mapping[int, bytes]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the messages of members that a step asks; see `MemberHost.answer`."""
        if self._plan is not plan:
            self.close()
            self._plan = plan
        training = []
        for member, briefing in briefings.items():
            if member >= len(plan.members):
                yield from self._denoised(plan, step, member, briefing)
                continue
            effects = self._round(plan, member).asked(step, briefing)
            if effects and isinstance(effects[-1], Train):
                training.append(member)
            yield from self._carry_out(member, effects)
        if training:
            for member, codes in self.train(plan, training):
                yield from self._carry_out(member, self._rounds[member].trained(codes))

    def close(self) -> None:
        """End the present round for all members and forget it."""
        for member, one in self._rounds.items():
            for _ in self._carry_out(member, one.close()):
                pass
        self._rounds.clear()
        self.sat_out.clear()
        self._denoising = None

    def _denoised(
        self, plan: SumPlan, step: Step, respondent: int, briefing: bytes
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the host's answer as a denoiser."""
        make = self.denoiser
        if make is None:
            raise AssertionError("a host that cannot denoise is asked to")
        if self._denoising is None:
            self._denoising = DenoiserRound(plan, self.noted, lambda: make(plan))
        for effect in self._denoising.asked(step, briefing):
            match effect:
                case Keep(journal):
                    self.noted = journal
                case Send(_, message):
                    yield respondent, message
                case SitOut(reason):
                    self.sat_out[respondent] = reason
                case Train() | Decline():
                    raise AssertionError(f"a denoiser has no effect {effect}")

    def _round(self, plan: SumPlan, member: int) -> MemberRound:
        found = self._rounds.get(member)
        if found is None:
            journal = self.journals.get(plan.members[member].participant, Journal())
            found = MemberRound(plan, journal, lambda: self.half(plan, member), self.once)
            self._rounds[member] = found
        return found

    def _carry_out(self, member: int, effects: Sequence[MemberEffect]) -> Iterator[tuple[int, bytes]]:
        for effect in effects:
            match effect:
                case Keep(journal):
                    if self._plan is None:
                        raise AssertionError("a journal is kept outside a round")
                    self.journals[self._plan.members[member].participant] = journal
                case Send(_, message):
                    yield member, message
                case SitOut(reason):
                    self.sat_out[member] = reason
                case Train() | Decline():
                    # A member without an answer when all hosts have answered is not waited for.
                    pass


@dataclass
class Holder:
    """A connection that answers for one key holder, with its journal in memory.

    Parameters
    ----------
    half : callable
        Makes the key holder's half of the secure sum of a plan.
    """

    half: Callable[[SumPlan], Half]
    journal: Journal = field(default_factory=Journal)
    sat_out: str = ""
    """Why the holder took no further part in the present round."""
    _round: HolderRound | None = None

    def answer(
        self, plan: SumPlan, step: Step, briefings: Mapping[int, bytes]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the key holder's messages for a step; see `MemberHost.answer`."""
        if self._round is None or self._round.plan is not plan:
            self._round, self.sat_out = HolderRound(plan, self.journal, lambda: self.half(plan)), ""
        for respondent, briefing in briefings.items():
            for effect in self._round.asked(step, briefing):
                match effect:
                    case Keep(journal):
                        self.journal = journal
                    case Send(_, message):
                        yield respondent, message
                    case SitOut(reason):
                        self.sat_out = reason
                    case Train() | Decline():
                        # A holder without an answer when all have answered is not waited for.
                        pass
