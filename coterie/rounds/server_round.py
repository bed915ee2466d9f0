"""One round at the orchestration server, as a pure state machine.

``SELECT -> [ADVERTISE -> SHARE] -> SUBMIT -> [CONFIRM -> UNMASK] -> APPLY -> done``, each with a deadline and a floor;
below the floor the round is abandoned and the model stays as it is.  Which steps there are is the secure sum's
affair; members train between being asked to submit and submitting.

``advance`` takes a state and an event and returns the next state and the effects that a service carries out, in
order.  A ``Save`` is durable before anything after it is acted on.  What is durable: the plan, the step that is open,
the messages of closed steps, and from the close of SUBMIT the running sum and the set of submitters, which never
changes afterwards.  Messages of an open step are not: after a restart the step opens again and members send the same
bytes.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import get_args

from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import ClosedSteps, Formed, Pieces, Running, ServerHalf, Step, Subject
from coterie.wire.refusal import ErrorReason, Refusal

__all__ = [
    "TRANSITIONS",
    "Applied",
    "Apply",
    "Arrived",
    "Ask",
    "Declined",
    "Effect",
    "End",
    "Event",
    "Keep",
    "Lost",
    "Opened",
    "Phase",
    "Resumed",
    "Revoked",
    "RoundState",
    "Save",
    "Tick",
    "Unmask",
    "UnmaskFailed",
    "Unmasked",
    "advance",
    "in_memory",
]

_NONE: Mapping[int, bytes] = MappingProxyType({})

Keep = Callable[[Mapping[int, bytes], int, bytes], Mapping[int, bytes]]
"""Returns messages with one more, a member's; those given stay as they are."""


def in_memory(held: Mapping[int, bytes], member: int, message: bytes) -> Mapping[int, bytes]:
    """Return messages with one more, in memory."""
    return {**held, member: message}


class Phase(enum.Enum):
    """Where a round stands."""

    COLLECT = "collect"
    """A step is open, ``RoundState.step``."""
    UNMASK = "unmask"
    """Every step is closed; the sum is being computed."""
    APPLY = "apply"
    """The sum is known; the model is being changed."""
    DONE = "done"
    ABANDONED = "abandoned"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self in (Phase.DONE, Phase.ABANDONED)


@dataclass(frozen=True)
class RoundState:
    """Everything about a round in progress.

    Parameters
    ----------
    plan : SumPlan
    layout : Layout
        What a contribution looks like; its hash stands in the plan.
    half : ServerHalf
        The secure sum.
    patience_s : float
        Longest time for one step, seconds.
    step : Step
        The open step, or the last one.
    closed : mapping
        Messages of closed steps; durable.
    arrived : mapping
        Messages of the open step (of SUBMIT each member's note); not durable.
    expected : frozenset of int
        Members that the open step asks; empty before the round is opened.
    running : Running or None
        Sum of what was submitted so far; durable once SUBMIT is closed.
    lost : frozenset of int
        Members nobody waits for: their connection is gone.
    declined : frozenset of int
        Members that said that they take no further part: they are neither asked nor waited for.
    deadline : float
        When the open step closes, by the server's clock, seconds.
    reason : str
        Why the round was abandoned.
    subject : Subject, optional
        What the sum changes, where key holders apply it and not the server.
    keep : Keep
        Takes the messages of the open step: where they lie is the service's affair.
    """

    plan: SumPlan
    layout: Layout
    half: ServerHalf
    patience_s: float
    step: Step
    phase: Phase = Phase.COLLECT
    closed: ClosedSteps = field(default_factory=ClosedSteps)
    arrived: Mapping[int, bytes] = field(default_factory=dict)
    expected: frozenset[int] = frozenset()
    running: Running | None = None
    lost: frozenset[int] = frozenset()
    declined: frozenset[int] = frozenset()
    deadline: float = 0.0
    reason: str = ""
    subject: Subject | None = None
    keep: Keep = in_memory

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
    ) -> RoundState:
        """Return the state before the first step."""
        return cls(plan, layout, half, patience_s, half.steps[0], subject=subject)

    @property
    def asked(self) -> tuple[int, ...]:
        """Members from whom the open step still wants a message, ascending."""
        if self.phase is not Phase.COLLECT:
            return ()
        return tuple(sorted(self.expected.difference(self.arrived, self.declined)))

    @property
    def waiting(self) -> bool:
        """Whether the open step should wait for somebody: whoever is lost or has declined is not waited for."""
        if self.half.enough(self.plan, self.closed, self.step, self.arrived):
            return False
        if not self.lost and not self.declined:
            return len(self.arrived) < len(self.expected)
        return not self.expected <= self.lost.union(self.declined, self.arrived)

    @property
    def submitters(self) -> tuple[int, ...]:
        """Members whose contributions are in the sum, ascending; final once SUBMIT is closed."""
        notes = self.arrived if self.step is Step.SUBMIT and self.phase is Phase.COLLECT else None
        return tuple(sorted(self.closed.get(Step.SUBMIT, _NONE) if notes is None else notes))

    @property
    def users(self) -> int:
        """Users that the sum covers."""
        return sum(self.plan.members[member].users for member in self.submitters)

    def briefing(self, member: int) -> bytes:
        """Return what a member needs for the open step."""
        return self.pieces(member).whole

    def pieces(self, member: int) -> Pieces:
        """Return the same in pieces."""
        return self.half.pieces(self.plan, self.closed, self.step, member, self.running, self.subject)


# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """The round begins."""

    now: float


@dataclass(frozen=True)
class Resumed:
    """The server has restarted: the open step gets its full time again."""

    now: float


@dataclass(frozen=True)
class Arrived:
    """A member's message for a step; ``sha256`` is the message's, where the transport has checked it already."""

    member: int
    step: Step
    message: bytes
    now: float
    sha256: bytes = b""


@dataclass(frozen=True)
class Lost:
    """Nobody waits for these members any more, until one of them is heard again; what they sent stays."""

    members: frozenset[int]
    now: float


@dataclass(frozen=True)
class Declined:
    """These members take no further part in the round, and said so; what they sent before stays.

    It is not durable: after a restart they are asked again, and say it again.
    """

    members: frozenset[int]
    now: float


@dataclass(frozen=True)
class Revoked:
    """These members are revoked.

    Whoever of them has not answered the first step takes no part, and nothing more of theirs is taken.  Who has
    answered it takes part to the end, because the others count with it.  It is not durable: after a restart it is said
    again.
    """

    members: frozenset[int]
    now: float


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    now: float


@dataclass(frozen=True)
class Unmasked:
    """The sum of the submitters' codes is known, or what key holders made of it."""

    total: Formed


@dataclass(frozen=True)
class UnmaskFailed:
    """The sum cannot be formed from the answers of these members, which are wrong, or not at all."""

    reason: str
    now: float
    wrong: tuple[int, ...] = ()


@dataclass(frozen=True)
class Applied:
    """The model was changed, durably; or the sum was impossible, with the reason."""

    reason: str = ""


Event = Opened | Resumed | Arrived | Lost | Declined | Revoked | Tick | Unmasked | UnmaskFailed | Applied


# --- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Save:
    """Write the state durably; ``closed`` names the step whose messages (and sum) are new."""

    closed: Step | None = None


@dataclass(frozen=True)
class Ask:
    """Tell those who wait that the open step asks others than before."""


@dataclass(frozen=True)
class Unmask:
    """Compute the sum, or find what was made of it; answer with Unmasked or UnmaskFailed."""


@dataclass(frozen=True)
class Apply:
    """Change the model by this sum, the version and the round's end in one transaction; answer with Applied."""

    total: Formed
    users: int


@dataclass(frozen=True)
class End:
    """The round is over; the next one may begin."""


Effect = Save | Ask | Unmask | Apply | End


_STEPPING = (Phase.COLLECT, Phase.UNMASK, Phase.ABANDONED)
"""What an event of an open step may lead to: the same or a later step, the end of the last one, or a step below its
floor."""

TRANSITIONS: Mapping[Phase, Mapping[type[Event], tuple[Phase, ...]]] = MappingProxyType(
    {
        Phase.COLLECT: {
            Opened: (Phase.COLLECT, Phase.ABANDONED),
            Resumed: (Phase.COLLECT,),
            Arrived: _STEPPING,
            Lost: _STEPPING,
            Declined: _STEPPING,
            Revoked: _STEPPING,
            Tick: _STEPPING,
        },
        Phase.UNMASK: {
            Resumed: (Phase.UNMASK,),
            Arrived: (Phase.UNMASK,),
            Lost: (Phase.UNMASK,),
            Declined: (Phase.UNMASK,),
            Revoked: (Phase.UNMASK,),
            Tick: (Phase.UNMASK,),
            Unmasked: (Phase.APPLY,),
            # The last step opens again for those who stand in for whoever answered wrongly.
            UnmaskFailed: (Phase.COLLECT, Phase.ABANDONED),
        },
        Phase.APPLY: {
            # The sum is computed again: it is not durable.
            Resumed: (Phase.UNMASK,),
            Arrived: (Phase.APPLY,),
            Lost: (Phase.APPLY,),
            Declined: (Phase.APPLY,),
            Revoked: (Phase.APPLY,),
            Tick: (Phase.APPLY,),
            Applied: (Phase.DONE, Phase.ABANDONED),
        },
        Phase.DONE: dict.fromkeys(get_args(Event), (Phase.DONE,)),
        Phase.ABANDONED: dict.fromkeys(get_args(Event), (Phase.ABANDONED,)),
    }
)
"""The phases to which each event may lead; an event that a phase does not have is a fault of the service."""


def advance(state: RoundState, event: Event) -> tuple[RoundState, list[Effect]]:
    """Return the state after an event, and what is to be done; `TRANSITIONS` has the phases.

    Raises
    ------
    Refusal
        When a message does not fit: the state does not change.
    AssertionError
        When a service reports what it was not asked for: a second opening, a sum or an application out of turn.
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
        case Opened(now):
            _require(not state.expected and not state.closed, "opened once")
            opened = _open(state, state.step, now)
            return _progress(opened, now, [Save()])
        case Resumed(now):
            return _resume(state, now)
        case Arrived(now=now):
            return _progress(_take(state, event), now, [])
        case Lost(members, now):
            return _progress(replace(state, lost=state.lost | members), now, [])
        case Declined(members, now):
            return _progress(replace(state, declined=state.declined | members), now, [])
        case Revoked(members, now):
            return _progress(_without(state, members), now, [])
        case Tick(now):
            return _progress(state, now, [])
        case Unmasked(total):
            # The same sum again after a restart; nothing of it has to be saved.
            return replace(state, phase=Phase.APPLY), [Apply(total, state.users)]
        case UnmaskFailed():
            return _without_wrong(state, event)
        case Applied(reason):
            return _abandon(state, reason) if reason else (replace(state, phase=Phase.DONE), [End()])


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"the machine of a round expects {what}")


def _open(state: RoundState, step: Step, now: float) -> RoundState:
    running = state.half.begin(state.plan, state.layout) if step is Step.SUBMIT else state.running
    return replace(
        state,
        step=step,
        arrived=_NONE,
        expected=frozenset(state.half.expected(state.plan, state.closed, step)),
        running=running,
        deadline=now + state.patience_s,
    )


def _resume(state: RoundState, now: float) -> tuple[RoundState, list[Effect]]:
    if state.phase is Phase.COLLECT:
        return _open(replace(state, lost=frozenset(), declined=frozenset()), state.step, now), []
    return replace(state, phase=Phase.UNMASK), [Unmask()]


def _take(state: RoundState, arrived: Arrived) -> RoundState:
    member, step, message = arrived.member, arrived.step, arrived.message
    if _repeated(state, arrived):
        return _heard(state, member)
    if state.phase is not Phase.COLLECT or step is not state.step:
        raise Refusal(
            ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
            f"step {step.value} of round {state.plan.round} is not open",
            field="round",
            expected=f"{state.step.value}" if state.phase is Phase.COLLECT else "the next round",
        )
    if member not in state.expected:
        raise Refusal(
            ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
            f"member {member} takes no part in step {step.value} of round {state.plan.round}",
            field="slots",
            expected="a member that took part in the steps before",
        )
    if step is Step.SUBMIT:
        if state.running is None:
            raise AssertionError("SUBMIT is open without a running sum")
        vector = state.half.vector(
            state.plan, state.closed, state.arrived, member, message, state.layout, arrived.sha256
        )
        state = replace(state, running=state.half.added(state.running, vector))
        kept = vector.note
    else:
        state.half.check(state.plan, state.closed, step, member, message)
        kept = message
    return replace(_heard(state, member), arrived=state.keep(state.arrived, member, kept))


def _without(state: RoundState, members: frozenset[int]) -> RoundState:
    if state.phase is not Phase.COLLECT or state.step is not state.half.steps[0]:
        return state
    return replace(state, expected=state.expected.difference(members.difference(state.arrived)))


def _heard(state: RoundState, member: int) -> RoundState:
    return replace(state, lost=state.lost - {member}) if member in state.lost else state


def _repeated(state: RoundState, arrived: Arrived) -> bool:
    """Whether the member's message of this step is there already; other bytes are refused."""
    member, step, message = arrived.member, arrived.step, arrived.message
    is_open = state.phase is Phase.COLLECT and step is state.step
    kept = (state.arrived if is_open else state.closed.get(step, _NONE)).get(member)
    if kept is None:
        return False
    # Of a contribution only the note is kept; it begins with the hash.
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
    """Close the open step if it can be closed, and those after it for which nobody has to be waited for."""
    while state.phase is Phase.COLLECT:
        late = now >= state.deadline
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
        _require(step not in state.closed, f"{step.value} closed once")
        closing = state.closed.with_step(step, state.arrived)
        short = state.half.shortfall(state.plan, closing, step, state.arrived)
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
            state = replace(state, phase=Phase.UNMASK)
            effects = [*effects, Unmask()]
    return state, effects


def _without_wrong(state: RoundState, failed: UnmaskFailed) -> tuple[RoundState, list[Effect]]:
    """Open the last step again for those who stand in for whoever answered wrongly; without any, abandon."""
    closed, arrived = state.closed.without(state.step), dict(state.closed[state.step])
    asked = frozenset(arrived)
    for member in failed.wrong:
        arrived.pop(member, None)
    others = state.half.stand_ins(
        state.plan, closed, state.step, arrived, asked | state.expected, frozenset(failed.wrong)
    )
    if not others:
        return _abandon(state, failed.reason)
    # Not durable: after a restart the same answers are found wrong once more.
    again = replace(
        state,
        phase=Phase.COLLECT,
        closed=closed,
        arrived=arrived,
        expected=frozenset(arrived).union(others),
        declined=state.declined.union(failed.wrong),
        deadline=failed.now + state.patience_s,
    )
    return again, [Ask()]


def _abandon(state: RoundState, reason: str) -> tuple[RoundState, list[Effect]]:
    # The model stays as it is, and nothing is kept of a sum that is not to be.
    return replace(state, phase=Phase.ABANDONED, reason=reason, running=None), [Save(), End()]
