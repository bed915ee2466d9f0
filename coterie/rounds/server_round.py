"""State machine of one round at the orchestration server.

``SELECT -> [ADVERTISE -> SHARE] -> SUBMIT -> [CONFIRM -> UNMASK] -> APPLY -> done``, each with a deadline and a floor;
below the floor the round is abandoned and the model stays as it is.  The secure sum determines which steps there are;
members train between being asked to submit and submitting.

``advance`` takes a state and an event and returns the next state and the effects that a service carries out, in
order.  A ``Save`` is on disk before the service acts on any effect after it.  Durable are the plan, which step is
open, the messages of closed steps, and from the close of SUBMIT the running sum and the set of submitters, which
never changes afterwards.  Messages of an open step are not durable: after a restart the step opens again and members
send the same bytes.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import get_args

from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import (
    Closed,
    ClosedSteps,
    Formed,
    Pieces,
    Running,
    ServerHalf,
    Step,
    Subject,
    users_of,
)
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = [
    "TRANSITIONS",
    "Apply",
    "Arrived",
    "Ask",
    "Effect",
    "End",
    "Event",
    "KeepMessages",
    "MembersDeclined",
    "MembersLost",
    "MembersRevoked",
    "PartsArrived",
    "Resumed",
    "RoundOpened",
    "RoundState",
    "Save",
    "Seal",
    "SumApplied",
    "SumPhase",
    "Tick",
    "Unmask",
    "UnmaskFailed",
    "Unmasked",
    "advance",
    "bound_to",
    "in_memory",
]

_NONE: Mapping[int, bytes] = MappingProxyType({})

KeepMessages = Callable[[Mapping[int, bytes], int, bytes], Mapping[int, bytes]]
"""Returns a copy of the messages with one member's message added."""


def in_memory(held: Mapping[int, bytes], member: int, message: bytes) -> Mapping[int, bytes]:
    """Return a copy of the messages with one member's message added, in memory."""
    return {**held, member: message}


class SumPhase(enum.Enum):
    """The phases of a round; `TRANSITIONS` says which follow each other."""

    COLLECT = "collect"
    """A step is open: ``RoundState.step``."""
    UNMASK = "unmask"
    """Every step is closed; the sum is being computed."""
    APPLY = "apply"
    """The sum is known; the model is being changed."""
    DONE = "done"
    ABANDONED = "abandoned"

    @property
    def ended(self) -> bool:
        """Whether the round is over."""
        return self in (SumPhase.DONE, SumPhase.ABANDONED)


@dataclass(frozen=True)
class RoundState:
    """The whole state of a round in progress, which the orchestration server stores.

    Parameters
    ----------
    plan : SumPlan
    layout : Layout
        Segments of a contribution; the plan has the layout's hash.
    half : ServerHalf
        The server's half of the secure sum.
    patience_s : float
        Longest time for one step, seconds.
    step : Step
        The open step, or the last one.
    closed : mapping
        Messages of closed steps; durable.
    arrived : mapping
        Messages of the open step (for SUBMIT each member's note); not durable.
    expected : frozenset of int
        Members that the open step asks; empty before the round is opened.
    running : Running or None
        Sum of the contributions submitted so far; durable once SUBMIT is closed.
    lost : frozenset of int
        Members whose connection is gone; the round does not wait for them.
    declined : frozenset of int
        Members that take no further part, as they said; they are neither asked nor waited for.
    deadline : float
        When the open step closes, by the server's clock, seconds.
    reason : str
        Why the round was abandoned.
    subject : Subject, optional
        The model that the sum changes, for sums that key holders apply.
    only : frozenset of int
        Members that the sum must have, and no others: those of an abandoned sum at the same place that members or key
        holders are bound to.  Empty where nobody is bound.
    keep : KeepMessages
        Stores a message of the open step, in memory or wherever the service wants it.
    """

    plan: SumPlan
    layout: Layout
    half: ServerHalf
    patience_s: float
    step: Step
    phase: SumPhase = SumPhase.COLLECT
    closed: ClosedSteps = field(default_factory=ClosedSteps)
    arrived: Mapping[int, bytes] = field(default_factory=dict)
    expected: frozenset[int] = frozenset()
    running: Running | None = None
    lost: frozenset[int] = frozenset()
    declined: frozenset[int] = frozenset()
    deadline: float = 0.0
    reason: str = ""
    subject: Subject | None = None
    only: frozenset[int] = frozenset()
    keep: KeepMessages = in_memory
    parted: bool = False
    """Whether others take contributions and add them: they arrive in parts (`PartsArrived`)."""
    closing: bool = False
    """Whether those others were asked to take no more contributions, so that SUBMIT can be closed."""
    sealed: bool = False
    """Whether every contribution that they took has arrived."""

    def __post_init__(self) -> None:
        if not isinstance(self.closed, ClosedSteps):
            object.__setattr__(self, "closed", ClosedSteps(self.closed))

    @classmethod
    def begin(
        cls,
        plan: SumPlan,
        layout: Layout,
        half: ServerHalf,
        patience_s: float,
        subject: Subject | None = None,
        only: frozenset[int] = frozenset(),
    ) -> RoundState:
        """Return the state before the first step."""
        return cls(plan, layout, half, patience_s, half.steps[0], subject=subject, only=only)

    @property
    def asked(self) -> tuple[int, ...]:
        """Members that have neither answered the open step nor declined, ascending."""
        if self.phase is not SumPhase.COLLECT:
            return ()
        return tuple(sorted(self.expected.difference(self.arrived, self.declined)))

    def asks(self, member: int) -> bool:
        """Return whether a member is one of those that are `asked`, without a look at all others."""
        if self.phase is not SumPhase.COLLECT or member not in self.expected:
            return False
        return member not in self.arrived and member not in self.declined

    @property
    def waiting(self) -> bool:
        """Whether the open step has to wait for a member that is neither lost nor has declined."""
        if self.half.enough(self.plan, self.closed, self.step, self.arrived):
            return False
        if not self.lost and not self.declined:
            return len(self.arrived) < len(self.expected)
        return not self.expected <= self.lost.union(self.declined, self.arrived)

    @property
    def submitters(self) -> tuple[int, ...]:
        """Members whose contributions are in the sum, ascending; final once SUBMIT is closed."""
        notes = self.arrived if self.step is Step.SUBMIT and self.phase is SumPhase.COLLECT else None
        return tuple(sorted(self.closed.get(Step.SUBMIT, _NONE) if notes is None else notes))

    @property
    def answered(self) -> Collection[int]:
        """Numbers under which the open step, or the last one if it is closed, was answered; also after a restart."""
        return self.closed.get(self.step, self.arrived)

    @property
    def bound(self) -> tuple[int, ...]:
        """Submitters to whom somebody may be bound: a sum that repeats this one must have them, and no others."""
        return bound_to(self.half, self.step, self.closed)

    @property
    def users(self) -> int:
        """Number of users that the sum covers."""
        return sum(self.plan.members[member].users for member in self.submitters)

    def briefing(self, member: int) -> bytes:
        """Return the briefing that a member needs for the open step."""
        return self.pieces(member).whole

    def pieces(self, member: int) -> Pieces:
        """Return a member's briefing in pieces, some of which several members share."""
        return self.half.pieces(self.plan, self.closed, self.step, member, self.running, self.subject)


def bound_to(half: ServerHalf, step: Step, closed: Closed) -> tuple[int, ...]:
    """Return the submitters to whom members or key holders may be bound once a step was open, ascending.

    Parameters
    ----------
    half : ServerHalf
    step : Step
        The open step, or the last one.
    closed : Closed
    """
    if half.binding is None or half.steps.index(step) < half.steps.index(half.binding):
        return ()
    return tuple(sorted(closed.get(Step.SUBMIT, _NONE)))


# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundOpened:
    """Event: the round begins."""

    now: float


@dataclass(frozen=True)
class Resumed:
    """Event: the server has restarted; the open step gets its full time again."""

    now: float


@dataclass(frozen=True)
class Arrived:
    """Event: a member's message for a step arrived; ``sha256`` is its hash if the transport has checked it already."""

    member: int
    step: Step
    message: bytes
    now: float
    sha256: bytes = b""


@dataclass(frozen=True)
class PartsArrived:
    """Event: sums over contributions that others took and acknowledged, each with the notes of its members.

    ``last`` says that there are no further ones.  They are never refused: each was acknowledged, and has counted.
    """

    parts: tuple[tuple[Mapping[int, bytes], Running], ...]
    now: float
    last: bool = False


@dataclass(frozen=True)
class MembersLost:
    """Event: the connections of these members are gone; the round waits for none of them until it is heard again.

    Messages that they sent stay.
    """

    members: frozenset[int]
    now: float


@dataclass(frozen=True)
class MembersDeclined:
    """Event: these members said that they take no further part in the round; messages that they sent before stay.

    The event is not durable: after a restart the members are asked again, and decline again.
    """

    members: frozenset[int]
    now: float


@dataclass(frozen=True)
class MembersRevoked:
    """Event: these members are revoked.

    Revoked members that have not answered the first step are out of the round, and no message of theirs is accepted.
    Revoked members that have answered it stay to the end, because the other members count on them.  The event is not
    durable: the service sends it again after a restart.
    """

    members: frozenset[int]
    now: float


@dataclass(frozen=True)
class Tick:
    """Event: time has passed; the open step's deadline is checked."""

    now: float


@dataclass(frozen=True)
class Unmasked:
    """Event: the sum of the submitters' codes is known, or the model that key holders made of it.

    ``left_out`` are submitters whose contributions a robust rule left out of the sum.
    """

    total: Formed
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True)
class UnmaskFailed:
    """Event: the sum cannot be formed; the answers of the members in ``wrong`` are wrong."""

    reason: str
    now: float
    wrong: tuple[int, ...] = ()


@dataclass(frozen=True)
class SumApplied:
    """Event: the changed model is stored; or, with a reason, the sum was impossible."""

    reason: str = ""


Event = (
    RoundOpened
    | Resumed
    | Arrived
    | PartsArrived
    | MembersLost
    | MembersDeclined
    | MembersRevoked
    | Tick
    | Unmasked
    | UnmaskFailed
    | SumApplied
)


# --- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Save:
    """Effect: write the state durably; ``closed`` names the step whose messages (and sum) are new."""

    closed: Step | None = None


@dataclass(frozen=True)
class Ask:
    """Effect: tell waiting members that the open step asks other members than before."""


@dataclass(frozen=True)
class Seal:
    """Effect: let others take no more contributions, and answer with `PartsArrived` that has the last ones."""


@dataclass(frozen=True)
class Unmask:
    """Effect: compute the sum, or find the model made of it; answer with Unmasked or UnmaskFailed."""


@dataclass(frozen=True)
class Apply:
    """Effect: store model, version and the round's end after this sum in one transaction; answer with Applied."""

    total: Formed
    users: int


@dataclass(frozen=True)
class End:
    """Effect: end the round; the next one may begin."""


Effect = Save | Ask | Seal | Unmask | Apply | End


_STEPPING = (SumPhase.COLLECT, SumPhase.UNMASK, SumPhase.ABANDONED)
"""Phases to which an event of an open step may lead: the same or a later step, the end of the last step, or an
abandoned round when a step is below its floor."""

TRANSITIONS: Mapping[SumPhase, Mapping[type[Event], tuple[SumPhase, ...]]] = MappingProxyType(
    {
        SumPhase.COLLECT: {
            RoundOpened: (SumPhase.COLLECT, SumPhase.ABANDONED),
            Resumed: (SumPhase.COLLECT,),
            Arrived: _STEPPING,
            PartsArrived: _STEPPING,
            MembersLost: _STEPPING,
            MembersDeclined: _STEPPING,
            MembersRevoked: _STEPPING,
            Tick: _STEPPING,
        },
        SumPhase.UNMASK: {
            Resumed: (SumPhase.UNMASK,),
            Arrived: (SumPhase.UNMASK,),
            PartsArrived: (SumPhase.UNMASK,),
            MembersLost: (SumPhase.UNMASK,),
            MembersDeclined: (SumPhase.UNMASK,),
            MembersRevoked: (SumPhase.UNMASK,),
            Tick: (SumPhase.UNMASK,),
            Unmasked: (SumPhase.APPLY,),
            # The last step opens again for stand-ins of the members that answered wrongly.
            UnmaskFailed: (SumPhase.COLLECT, SumPhase.ABANDONED),
        },
        SumPhase.APPLY: {
            # The sum is not durable, so it is computed again.
            Resumed: (SumPhase.UNMASK,),
            Arrived: (SumPhase.APPLY,),
            PartsArrived: (SumPhase.APPLY,),
            MembersLost: (SumPhase.APPLY,),
            MembersDeclined: (SumPhase.APPLY,),
            MembersRevoked: (SumPhase.APPLY,),
            Tick: (SumPhase.APPLY,),
            SumApplied: (SumPhase.DONE, SumPhase.ABANDONED),
        },
        SumPhase.DONE: dict.fromkeys(get_args(Event), (SumPhase.DONE,)),
        SumPhase.ABANDONED: dict.fromkeys(get_args(Event), (SumPhase.ABANDONED,)),
    }
)
"""Phases to which each event may lead; an event that a phase does not list is a fault of the service."""


def advance(state: RoundState, event: Event) -> tuple[RoundState, list[Effect]]:
    """Return the state after an event, and the effects to carry out in order; `TRANSITIONS` lists the phases.

    Raises
    ------
    Refusal
        When a message does not fit; the state does not change.
    AssertionError
        When the service sends an event out of turn: a second opening, or a sum or application not asked for.
    """
    known = TRANSITIONS[state.phase].get(type(event))
    _require(known is not None, f"no {type(event).__name__} in phase {state.phase.value}")
    found, effects = _advanced(state, event)
    _require(
        found.phase in (known or ()), f"{type(event).__name__} to lead elsewhere than {found.phase.value}"
    )
    return found, effects


def _advanced(state: RoundState, event: Event) -> tuple[RoundState, list[Effect]]:
    if state.phase.ended and not isinstance(event, Arrived):
        return state, []
    match event:
        case RoundOpened(now):
            _require(not state.expected and not state.closed, "opened once")
            opened = _open(state, state.step, now)
            return _progress(opened, now, [Save()])
        case Resumed(now):
            return _resume(state, now)
        case Arrived(now=now):
            return _progress(_take(state, event), now, [])
        case PartsArrived(now=now):
            return _progress(_with_parts(state, event), now, [])
        case MembersLost(members, now):
            return _progress(replace(state, lost=state.lost | members), now, [])
        case MembersDeclined(members, now):
            return _progress(replace(state, declined=state.declined | members), now, [])
        case MembersRevoked(members, now):
            return _progress(_without(state, members), now, [])
        case Tick(now):
            return _progress(state, now, [])
        case Unmasked(total, left_out):
            # Nothing has to be saved: after a restart the same sum is computed again.
            users = state.users - users_of(state.plan, left_out)
            return replace(state, phase=SumPhase.APPLY), [Apply(total, users)]
        case UnmaskFailed():
            return _without_wrong(state, event)
        case SumApplied(reason):
            return _abandon(state, reason) if reason else (replace(state, phase=SumPhase.DONE), [End()])


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"the machine of a round expects {what}")


def _open(state: RoundState, step: Step, now: float) -> RoundState:
    running = state.half.begin(state.plan, state.layout) if step is Step.SUBMIT else state.running
    return replace(
        state,
        step=step,
        arrived=_NONE,
        expected=_asked_at(state, step),
        running=running,
        deadline=now + state.patience_s,
        closing=False,
        sealed=False,
    )


def _asked_at(state: RoundState, step: Step) -> frozenset[int]:
    found = frozenset(state.half.expected(state.plan, state.closed, step))
    return found & state.only if state.only and step is Step.SUBMIT else found


def _resume(state: RoundState, now: float) -> tuple[RoundState, list[Effect]]:
    if state.phase is SumPhase.COLLECT:
        return _open(replace(state, lost=frozenset(), declined=frozenset()), state.step, now), []
    return replace(state, phase=SumPhase.UNMASK), [Unmask()]


def _take(state: RoundState, arrived: Arrived) -> RoundState:
    member, step, message = arrived.member, arrived.step, arrived.message
    if _repeated(state, arrived):
        return _heard(state, member)
    if state.phase is not SumPhase.COLLECT or step is not state.step:
        raise Refusal(
            ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
            f"step {step.value} of round {state.plan.round} is not open",
            field="round",
            expected=f"{state.step.value}" if state.phase is SumPhase.COLLECT else "the next round",
        )
    if member not in state.expected:
        raise Refusal(
            ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
            f"member {member} takes no part in step {step.value} of round {state.plan.round}",
            field="slots",
            expected="a member that took part in the steps before",
        )
    if step is Step.SUBMIT:
        if state.parted:
            raise Refusal(
                ErrorReason.ERROR_REASON_NOT_READY,
                "contributions to this sum are taken by intakes only",
                field="kind",
                expected="the same again in a moment, through an intake",
            )
        if state.running is None:
            raise AssertionError("SUBMIT is open without a running sum")
        vector = state.half.vector(
            state.plan, state.closed, state.arrived, member, message, state.layout, arrived.sha256
        )
        running, kept = state.half.added(state.running, vector), vector.note
    else:
        state.half.check(state.plan, state.closed, step, member, message)
        running, kept = state.running, message
    # All at once: a state has many fields.
    return replace(
        state,
        running=running,
        arrived=state.keep(state.arrived, member, kept),
        lost=state.lost - {member} if member in state.lost else state.lost,
    )


def _with_parts(state: RoundState, event: PartsArrived) -> RoundState:
    if state.phase is not SumPhase.COLLECT or state.step is not Step.SUBMIT:
        return state
    running, arrived = state.running, state.arrived
    for notes, part in event.parts:
        _require(arrived.keys().isdisjoint(notes), "each contribution counted once")
        running = state.half.joined(running, part)
        for member, note in notes.items():
            arrived = state.keep(arrived, member, note)
    return replace(
        state,
        running=running,
        arrived=arrived,
        # A member may have been revoked after its contribution was acknowledged.
        expected=state.expected.union(*(notes for notes, _ in event.parts)),
        lost=state.lost.difference(*(notes for notes, _ in event.parts)),
        sealed=state.sealed or event.last,
    )


def _without(state: RoundState, members: frozenset[int]) -> RoundState:
    if state.phase is not SumPhase.COLLECT or state.step is not state.half.steps[0]:
        return state
    return replace(state, expected=state.expected.difference(members.difference(state.arrived)))


def _heard(state: RoundState, member: int) -> RoundState:
    return replace(state, lost=state.lost - {member}) if member in state.lost else state


def _repeated(state: RoundState, arrived: Arrived) -> bool:
    """Return whether the member's message of this step is there already; refuse a message with other bytes."""
    member, step, message = arrived.member, arrived.step, arrived.message
    is_open = state.phase is SumPhase.COLLECT and step is state.step
    kept = (state.arrived if is_open else state.closed.get(step, _NONE)).get(member)
    if kept is None:
        return False
    # Only the note of a contribution is kept; it begins with the message's hash.
    if step is Step.SUBMIT:
        same = kept[:32] == (arrived.sha256 or hashlib.sha256(message).digest())
    else:
        same = kept == message
    if not same:
        raise Refusal(
            ErrorReason.ERROR_REASON_CONFLICT,
            f"member {member} sent another message for step {step.value} of round {state.plan.round}",
            field="chunk.data",
            expected="the same bytes again, or nothing",
        )
    return True


def _progress(state: RoundState, now: float, effects: list[Effect]) -> tuple[RoundState, list[Effect]]:
    """Close the open step if it can be closed, and then later steps that need not wait for any member."""
    while state.phase is SumPhase.COLLECT:
        late = now >= state.deadline
        if not late and not state.lost and not state.declined and state.waiting:
            # As below, without a look at every member for each message of one.
            break
        missing = state.expected.difference(state.arrived)
        gone = missing if late else missing.intersection(state.lost | state.declined)
        others = gone and state.half.stand_ins(
            state.plan, state.closed, state.step, state.arrived, state.expected, gone
        )
        if others:
            state = replace(state, expected=state.expected.union(others), deadline=now + state.patience_s)
            effects = [*effects, Ask()]
            continue
        if state.waiting and not late:
            break
        step = state.step
        if state.parted and step is Step.SUBMIT and not state.sealed and _may_still_come(state):
            # Some of them may have been acknowledged already.
            return (state, effects) if state.closing else (replace(state, closing=True), [*effects, Seal()])
        _require(step not in state.closed, f"{step.value} closed once")
        closing = state.closed.with_step(step, state.arrived)
        short = state.half.shortfall(state.plan, closing, step, state.arrived) or _unbound(state)
        if short:
            when = "no time is left" if state.waiting else "nobody else is expected"
            abandoned, more = _abandon(state, f"{step.value}: {short}; {when}")
            return abandoned, effects + more
        state = replace(state, closed=closing)
        effects = [*effects, Save(step)]
        after = state.half.steps.index(step) + 1
        if after < len(state.half.steps):
            state = _open(state, state.half.steps[after], now)
        else:
            state = replace(state, phase=SumPhase.UNMASK)
            effects = [*effects, Unmask()]
    return state, effects


def _may_still_come(state: RoundState) -> bool:
    """Return whether others may take a contribution that has not arrived: also that of a member revoked meanwhile."""
    return not state.expected.union(_asked_at(state, state.step)) <= state.arrived.keys()


def _unbound(state: RoundState) -> str:
    """Return why the submitters are not those to whom members or key holders are bound; empty where they are."""
    missing = state.only.difference(state.arrived) if state.step is Step.SUBMIT else ()
    if not missing:
        return ""
    return (
        f"{len(missing)} of the {len(state.only)} members are missing over whom alone the sum may be formed; it is "
        "formed over all of them or not at all"
    )


def _without_wrong(state: RoundState, failed: UnmaskFailed) -> tuple[RoundState, list[Effect]]:
    """Open the last step again for stand-ins of the members that answered wrongly; without stand-ins, abandon."""
    closed, arrived = state.closed.without(state.step), dict(state.closed[state.step])
    asked = frozenset(arrived)
    for member in failed.wrong:
        arrived.pop(member, None)
    others = state.half.stand_ins(
        state.plan, closed, state.step, arrived, asked | state.expected, frozenset(failed.wrong)
    )
    if not others:
        return _abandon(state, failed.reason)
    # This state is not saved: after a restart the same answers are found wrong once more.
    again = replace(
        state,
        phase=SumPhase.COLLECT,
        closed=closed,
        arrived=arrived,
        expected=frozenset(arrived).union(others),
        declined=state.declined.union(failed.wrong),
        deadline=failed.now + state.patience_s,
    )
    return again, [Ask()]


def _abandon(state: RoundState, reason: str) -> tuple[RoundState, list[Effect]]:
    # The model stays as it is, and the running sum is dropped.
    return replace(state, phase=SumPhase.ABANDONED, reason=reason, running=None), [Save(), End()]
