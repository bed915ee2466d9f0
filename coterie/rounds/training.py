"""State machine of a run that trains in rounds: it decides which sum comes next, from the outcomes so far.

A run gathers its participants, asks each group once which items it has (if the system wants to know), then makes
passes over all users ("global rounds"): each pass visits every cohort once.  Every ``evaluate_every`` passes the model
is evaluated over the whole population, at the clients; this evaluation, on validation items, chooses the best version
and ends the run early.  An abandoned round does not change the model.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, get_args

import numpy as np

from coterie.evaluation.selection import better
from coterie.rounds.prefix import Prefix

__all__ = [
    "MOST_ABANDONED",
    "PURPOSES",
    "TRANSITIONS",
    "Evaluation",
    "Grown",
    "Purpose",
    "RoundAbandoned",
    "RoundSummed",
    "ServerBehind",
    "Started",
    "Training",
    "TrainingPhase",
    "TrainingResumed",
    "TrainingStopped",
    "means",
    "step",
]

MOST_ABANDONED = 100
"""Rounds abandoned in a row after which a run has failed, where nothing else is said."""


_ASKED = 3
"""Sums that are opened to ask a group for its items which came after the run had begun; then the run goes on."""


class TrainingPhase(enum.Enum):
    """The phases of a run; `TRANSITIONS` says which follow each other."""

    GATHER = "gather"
    ROUNDS = "rounds"
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self in (TrainingPhase.DONE, TrainingPhase.FAILED)


class Purpose(enum.Enum):
    """The purposes of a sum: groups' items, metrics of an evaluation, or updates of the model."""

    SUPPORTS = "supports"
    EVALUATE = "evaluate"
    TRAIN = "train"


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one model version over the population.

    Parameters
    ----------
    version, pass_number : int
        Model version, and the number of passes that it was trained for.
    metrics, users : mapping of str to float, of str to int
        Value of each metric, and the number of users counted for it.
    """

    version: int
    pass_number: int
    metrics: Mapping[str, float]
    users: Mapping[str, int]


@dataclass(frozen=True)
class Training:
    """The state of a run's training, which decides the next sum.

    Parameters
    ----------
    passes, evaluate_every, patience, choose_by : int, int, int, str
        As in the contract's ``RoundsPlan``.
    supports : bool
        Whether groups are asked for their items first, and again after groups are drawn anew.
    repeats_train : bool
        Whether an abandoned sum of TRAIN is formed again, as `ServerSide.needs_every_sum` says.
    same_members : bool
        Whether sums of TRAIN are all over the members of the first one, as `SameMembers` says.
    trained : tuple of str
        Participants, as hex, of the members of the last sum of TRAIN, where all are over the same ones.
    most_abandoned : int
        Rounds abandoned in a row after which the run has failed.
    redraw : int
        As in the contract's ``RoundsPlan``.
    groups, parts, evaluation_parts : int
        Numbers of groups of the population, cohorts of one pass, and sums of one evaluation; set by `Started`.
    users : sequence of int
        Slots of the population in canonical order; set by `Started`.
    users_apart : bool
        Whether the store has the slots of the population apart, so that the state only says how many there are.
    round : int
        Number of the last round that was begun; no number is used twice.
    purpose, part : Purpose, int
        Purpose of the round in progress or next, and its number in the row of rounds with this purpose.
    pass_number, version : int
        Numbers of complete passes and of updates applied.
    measured : mapping of str to (float, float)
        Sum and number of users by metric, in the evaluation in progress.
    bound : tuple of str
        Participants, as hex, over whom alone the next sum can be formed, because a sum at its place was about to be
        revealed (``coterie.rounds.ledger``); empty where it can be formed over any.
    partial : bool
        Whether a sum of this evaluation was abandoned; then it is not compared with evaluations of all users.
    may_pass : bool
        Whether the run has failed for a cause that may pass, so that `TrainingResumed` takes it up again.
    resumes : int
        Number of times that the run was resumed.
    tries : int
        Sums that were abandoned at the present place, while a group is asked for its items that came later.
    taken : tuple
        Sums in which users took part (`coterie.rounds.privacy.Tally`); empty in runs whose sums are exact.
    """

    passes: int
    evaluate_every: int
    patience: int
    choose_by: str
    supports: bool
    phase: TrainingPhase = TrainingPhase.GATHER
    groups: int = 0
    parts: int = 0
    evaluation_parts: int = 0
    users: Sequence[int] = ()
    round: int = 0
    purpose: Purpose = Purpose.SUPPORTS
    part: int = 0
    pass_number: int = 0
    version: int = 0
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    partial: bool = False
    evaluations: tuple[Evaluation, ...] = ()
    best: int = -1
    abandoned: int = 0
    abandoned_in_a_row: int = 0
    reason: str = ""
    redraw: int = 0
    bound: tuple[str, ...] = ()
    most_abandoned: int = MOST_ABANDONED
    may_pass: bool = False
    resumes: int = 0
    repeats_train: bool = False
    same_members: bool = False
    trained: tuple[str, ...] = ()
    taken: tuple[tuple[int, int, int, int], ...] = ()
    tries: int = 0
    users_apart: bool = False

    def to_json(self) -> str:
        """Return the state as JSON for the store, without the slots of users or with ranges of them.

        The state is written twice in each round.
        """
        plain = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        plain["phase"], plain["purpose"] = self.phase.value, self.purpose.value
        plain["users"] = len(self.users) if self.users_apart else _population_ranges(self.users)
        plain["evaluations"] = [vars(one) for one in self.evaluations]
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str, order: Sequence[int] | None = None) -> Training:
        """Return the state that ``to_json`` wrote.

        Parameters
        ----------
        text : str
        order : sequence of int, optional
            Slots of the population, in order, as the store has them apart.  Default: nobody asks for users that are
            kept apart.

        Raises
        ------
        ValueError
            When the state has more users than the order.
        """
        plain: dict[str, Any] = json.loads(text)
        plain["phase"], plain["purpose"] = TrainingPhase(plain["phase"]), Purpose(plain["purpose"])
        users = plain["users"]
        if isinstance(users, list):
            plain["users"] = tuple(slot for first, n in users for slot in range(first, first + n))
        elif order is None:
            plain["users"] = ()
        elif users > len(order):
            raise ValueError(f"a run of {users} users, of whom the store has {len(order)}")
        else:
            plain["users"] = Prefix(array("I", order[:users]))
        plain["measured"] = {name: (pair[0], pair[1]) for name, pair in plain["measured"].items()}
        plain["evaluations"] = tuple(Evaluation(**one) for one in plain["evaluations"])
        plain["bound"], plain["trained"] = tuple(plain["bound"]), tuple(plain.get("trained", ()))
        plain["taken"] = tuple(tuple(one) for one in plain.get("taken", ()))
        return cls(**plain)

    @property
    def repeats(self) -> bool:
        """Whether an abandoned sum is formed again at its place; others are lost, and the next one follows.

        A group of the beginning cannot train before it was asked for its items.  For one that came later and does not
        answer, they stay closed; its users are in cohorts of training all the same, which wait for them as for others.
        """
        if self.purpose is Purpose.SUPPORTS:
            return not self.asks_newcomers or self.tries < _ASKED
        return self.purpose is Purpose.TRAIN and self.repeats_train

    @property
    def asks_newcomers(self) -> bool:
        """Whether the next sum asks a group for its items that came after the run had begun."""
        return self.purpose is Purpose.SUPPORTS and self.pass_number > 0 and not self.redraw

    @property
    def only(self) -> tuple[str, ...]:
        """Participants, as hex, over whom alone the next sum can be formed; empty where it can be formed over any."""
        return self.bound or (self.trained if self.purpose is Purpose.TRAIN else ())

    @property
    def chosen(self) -> Evaluation | None:
        """The best evaluation so far by ``choose_by``; the first of equals."""
        return self.evaluations[self.best] if self.best >= 0 else None


def _ranges(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return slots as pairs of the first of a range and its length, in the order given."""
    if not slots:
        return []
    own = np.array(slots, np.int64)
    first = np.flatnonzero(np.diff(own, prepend=own[0] - 2) != 1)
    return list(zip(own[first].tolist(), np.diff(first, append=len(own)).tolist(), strict=True))


_written: tuple[Sequence[int], list[tuple[int, int]]] = (), []
"""The population that was written last, with its ranges: it is the same object in each round, and may be very large."""


def _population_ranges(users: Sequence[int]) -> list[tuple[int, int]]:
    """Return the slots of a population as `_ranges` does."""
    global _written
    known, found = _written
    if known is not users:
        found = _ranges(users)
        _written = users, found
    return found


@dataclass(frozen=True)
class Started:
    """Event: all expected participants have joined; the population is fixed."""

    users: Sequence[int]
    groups: int
    parts: int
    evaluation_parts: int


@dataclass(frozen=True)
class Grown:
    """Event: a wave of users takes part from a pass on; ``users`` are the slots of all users, the wave's last."""

    users: Sequence[int]
    groups: int
    parts: int
    evaluation_parts: int
    from_pass: int


_Figures = Callable[[Mapping[str, tuple[float, float]]], Mapping[str, tuple[float, int]]]


def means(totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, int]]:
    """Return each metric's mean and number of users, from its sum and count; skip metrics that no user has."""
    return {name: (total / count, round(count)) for name, (total, count) in totals.items() if count > 0}


@dataclass(frozen=True)
class RoundSummed:
    """Event: the round's sum was applied; ``measured`` has sum and count over its users by metric.

    ``figures`` computes an evaluation's figures, value and number of users by name, from such sums over all users.
    ``submitters`` are the participants of the members in the sum, as hex.
    """

    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    figures: _Figures = means
    submitters: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundAbandoned:
    """Event: the round was abandoned; ``bound`` are participants to whom others may be bound at its place, as hex."""

    reason: str
    bound: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerBehind:
    """Event: members have come further in this run than this state, which is from a backup; nothing else is known.

    Parameters
    ----------
    round : int
        Number of the last round that they joined.
    places : mapping of str to (int, int)
        Pass and part of the last sum of each purpose that they have revealed.
    """

    round: int
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingStopped:
    """Event: the run was stopped before its end, for the given reason; ``may_pass`` is as for `Training`."""

    reason: str
    may_pass: bool = False


@dataclass(frozen=True)
class TrainingResumed:
    """Event: the operator takes up a run that has failed, if its cause may pass."""


Event = Started | Grown | RoundSummed | RoundAbandoned | ServerBehind | TrainingStopped | TrainingResumed


TRANSITIONS: Mapping[TrainingPhase, Mapping[type[Event], tuple[TrainingPhase, ...]]] = MappingProxyType(
    {
        TrainingPhase.GATHER: {Started: (TrainingPhase.ROUNDS,), TrainingStopped: (TrainingPhase.FAILED,)},
        TrainingPhase.ROUNDS: {
            RoundSummed: (TrainingPhase.ROUNDS, TrainingPhase.DONE),
            Grown: (TrainingPhase.ROUNDS,),
            # The rest of the run may be behind them.
            ServerBehind: (TrainingPhase.ROUNDS, TrainingPhase.DONE, TrainingPhase.FAILED),
            # Too many in a row end the run.
            RoundAbandoned: (TrainingPhase.ROUNDS, TrainingPhase.DONE, TrainingPhase.FAILED),
            TrainingStopped: (TrainingPhase.FAILED,),
        },
        TrainingPhase.DONE: dict.fromkeys(get_args(Event), (TrainingPhase.DONE,)),
        TrainingPhase.FAILED: {
            **dict.fromkeys(get_args(Event), (TrainingPhase.FAILED,)),
            # Back to where it failed.  It is done if its last sum cannot be formed again.
            TrainingResumed: tuple(TrainingPhase),
        },
    }
)
"""Phases to which each event may lead."""

PURPOSES: Mapping[Purpose, tuple[Purpose, ...]] = MappingProxyType(
    {
        # One round per group, then the first evaluation; after groups were drawn anew or came later, training at once.
        Purpose.SUPPORTS: (Purpose.SUPPORTS, Purpose.EVALUATE, Purpose.TRAIN),
        # One round per part of the population, then the next pass.
        Purpose.EVALUATE: (Purpose.EVALUATE, Purpose.TRAIN, Purpose.SUPPORTS),
        # One round per cohort, then an evaluation if one is due, else the next pass.
        Purpose.TRAIN: (Purpose.TRAIN, Purpose.EVALUATE, Purpose.SUPPORTS),
    }
)
"""Purposes of the rounds that may follow a round of each purpose."""


def begin_round(state: Training) -> Training:
    """Return the state with the next round's number taken; the number is not used again, even if the round fails."""
    return replace(state, round=state.round + 1)


def step(state: Training, event: Event) -> Training:
    """Return the state after an event; `TRANSITIONS` lists the phases, `PURPOSES` the purposes that may follow.

    Raises
    ------
    AssertionError
        The event does not come in this phase.
    """
    known = TRANSITIONS[state.phase].get(type(event))
    if known is None:
        raise AssertionError(f"{event} does not come in phase {state.phase.value}")
    found = _stepped(state, event)
    # Members that are further may be anywhere.
    anywhere = state.phase is not TrainingPhase.ROUNDS or isinstance(event, ServerBehind)
    follows = anywhere or found.purpose in PURPOSES[state.purpose]
    if found.phase not in known or not follows:
        raise AssertionError(
            f"{event} led from {state.phase.value} to {found.phase.value}, {found.purpose.value}"
        )
    return found


def _stepped(state: Training, event: Event) -> Training:
    if state.phase.ended:
        return _resumed(state) if state.may_pass and isinstance(event, TrainingResumed) else state
    match event:
        case Started(users, groups, parts, evaluation_parts) if state.phase is TrainingPhase.GATHER:
            return replace(
                state,
                phase=TrainingPhase.ROUNDS,
                users=users,
                groups=groups,
                parts=parts,
                evaluation_parts=evaluation_parts,
                purpose=Purpose.SUPPORTS if state.supports else Purpose.EVALUATE,
                part=0,
            )
        case Grown():
            return _grown(state, event)
        case RoundSummed(measured, figures, submitters) if state.phase is TrainingPhase.ROUNDS:
            if state.same_members and state.purpose is Purpose.TRAIN:
                state = replace(state, trained=submitters)
            return _after(_counted(replace(state, abandoned_in_a_row=0), measured), figures)
        case RoundAbandoned(_, bound) if state.asks_newcomers:
            # No sign that the run cannot go on: a wave may have many groups, each of which is asked some times.
            state = replace(state, abandoned=state.abandoned + 1, tries=state.tries + 1)
            return replace(state, bound=bound or state.bound) if state.repeats else _after(state)
        case RoundAbandoned(reason, bound):
            row = state.abandoned_in_a_row + 1
            state = replace(state, abandoned=state.abandoned + 1, abandoned_in_a_row=row)
            if row >= state.most_abandoned:
                words = f"{row} rounds in a row were abandoned; the last one: {reason}"
                bound = bound or state.bound
                return replace(state, phase=TrainingPhase.FAILED, reason=words, may_pass=True, bound=bound)
            if state.repeats:
                return replace(state, bound=bound or state.bound)
            return _after(replace(state, partial=state.purpose is Purpose.EVALUATE))
        case ServerBehind():
            return _followed(state, event)
        case TrainingStopped(reason, may_pass):
            return replace(state, phase=TrainingPhase.FAILED, reason=reason, may_pass=may_pass)
        case _:
            raise AssertionError(f"{event} does not come in phase {state.phase.value}")


def _grown(state: Training, event: Grown) -> Training:
    """Take a wave in; its groups are asked for their items if the run comes to their first pass just now.

    A server that was behind its parties has lost what they said, and they say it once.
    """
    grown = replace(
        state,
        users=event.users,
        groups=event.groups,
        parts=event.parts,
        evaluation_parts=event.evaluation_parts,
    )
    begins = state.purpose is Purpose.TRAIN and not state.part and state.pass_number == event.from_pass
    if begins and state.supports:
        return replace(grown, purpose=Purpose.SUPPORTS, part=state.groups)
    if state.purpose is Purpose.TRAIN:
        return replace(grown, part=min(state.part, event.parts - 1))
    return grown


def _resumed(state: Training) -> Training:
    """Go on at the place where the run failed; a sum to which members are bound is repeated over them, or else lost."""
    bound = state.bound if state.repeats else ()
    lost = bool(state.bound) and not bound
    state = replace(
        state,
        phase=TrainingPhase.ROUNDS if state.users else TrainingPhase.GATHER,
        reason="",
        may_pass=False,
        resumes=state.resumes + 1,
        abandoned_in_a_row=0,
        bound=bound,
    )
    return _after(replace(state, partial=state.purpose is Purpose.EVALUATE)) if lost else state


_ORDER = (Purpose.EVALUATE, Purpose.SUPPORTS, Purpose.TRAIN)
"""Purposes in the order in which the sums of one pass are formed; the items of the first groups come before all."""


def place_of(purpose: Purpose, pass_number: int, part: int) -> tuple[int, int, int]:
    """Return a key by which places of all purposes are ordered as a run comes to them."""
    if purpose is Purpose.SUPPORTS and not pass_number:
        return -1, 0, part
    return pass_number, _ORDER.index(purpose), part


def _followed(state: Training, event: ServerBehind) -> Training:
    """Go on after the furthest place that members have revealed, if it is not behind; versions in between are lost.

    A sum of TRAIN that is needed is repeated at this place.

    The run fails when groups were asked for their items in between: they answer once.  It goes on where only groups
    that came later were: their items stay closed.
    """
    known = {purpose.value: purpose for purpose in Purpose}
    places = [
        (place_of(known[name], *place), known[name], place)
        for name, place in event.places.items()
        if name in known and 0 <= place[0] <= state.passes
    ]
    here = place_of(state.purpose, state.pass_number, state.part)
    furthest = max(places, key=lambda one: one[0], default=None)
    if event.round > state.round:
        state = replace(state, round=event.round, abandoned_in_a_row=0)
    if furthest is None or furthest[0] < here or (furthest[0] == here and state.repeats):
        return state
    _, purpose, (pass_number, part) = furthest
    drawings = [number // state.redraw if state.redraw else 0 for number in (state.pass_number, pass_number)]
    asks_first = state.purpose is Purpose.SUPPORTS and not state.asks_newcomers
    if asks_first or (state.supports and drawings[0] != drawings[1]):
        words = "this server is from a backup that lacks which items groups have; groups say it once"
        return replace(state, phase=TrainingPhase.FAILED, reason=words)
    partial = purpose is Purpose.EVALUATE
    there = replace(state, purpose=purpose, pass_number=pass_number, part=part, measured={}, partial=partial)
    there = replace(there, abandoned_in_a_row=0, tries=0)
    # Members help to repeat a sum that they have revealed; without it a run that needs it would have nothing.
    return there if there.purpose is Purpose.TRAIN and there.repeats else _after(there)


def _counted(state: Training, measured: Mapping[str, tuple[float, float]]) -> Training:
    if state.purpose is Purpose.TRAIN:
        return replace(state, version=state.version + 1)
    if state.purpose is Purpose.EVALUATE:
        totals = dict(state.measured)
        for name, (total, count) in measured.items():
            held = totals.get(name, (0.0, 0.0))
            totals[name] = (held[0] + total, held[1] + count)
        return replace(state, measured=totals)
    return state


def _after(state: Training, figures: _Figures = means) -> Training:
    """Move on to the next cohort; after the last cohort of a purpose, to the purpose that follows."""
    state = replace(state, bound=(), tries=0)
    rows = {
        Purpose.SUPPORTS: state.groups,
        Purpose.EVALUATE: state.evaluation_parts,
        Purpose.TRAIN: state.parts,
    }
    if state.part + 1 < rows[state.purpose]:
        return replace(state, part=state.part + 1)
    state = replace(state, part=0)
    match state.purpose:
        case Purpose.SUPPORTS:
            # Groups that were drawn anew train at once: the present version has been evaluated already.
            return replace(state, purpose=Purpose.TRAIN if state.pass_number else Purpose.EVALUATE)
        case Purpose.EVALUATE:
            return _evaluated(state, figures)
        case Purpose.TRAIN:
            passed = replace(state, pass_number=state.pass_number + 1)
            due = passed.pass_number >= passed.passes or passed.pass_number % passed.evaluate_every == 0
            return replace(passed, purpose=Purpose.EVALUATE) if due else _next_pass(passed)


def _next_pass(state: Training) -> Training:
    """Begin a pass; groups that were drawn anew are asked for their items first."""
    redrawn = state.redraw > 0 and state.pass_number > 0 and state.pass_number % state.redraw == 0
    return replace(state, purpose=Purpose.SUPPORTS if state.supports and redrawn else Purpose.TRAIN)


def _evaluated(state: Training, figures: _Figures) -> Training:
    partial, state = state.partial, replace(_next_pass(state), partial=False)
    if partial:
        state = replace(state, measured={})
    if state.measured:
        found = figures(state.measured)
        evaluation = Evaluation(
            state.version,
            state.pass_number,
            {name: value for name, (value, _) in found.items()},
            {name: users for name, (_, users) in found.items()},
        )
        evaluations = (*state.evaluations, evaluation)
        value = evaluation.metrics.get(state.choose_by)
        held = state.chosen.metrics.get(state.choose_by) if state.chosen else None
        wins = value is not None and (held is None or better(state.choose_by, value, held))
        best = len(evaluations) - 1 if wins else state.best
        state = replace(state, evaluations=evaluations, best=best, measured={})
    waited = len(state.evaluations) - 1 - state.best if state.best >= 0 else 0
    over = state.pass_number >= state.passes or (state.patience > 0 and waited >= state.patience)
    return replace(state, phase=TrainingPhase.DONE) if over else state
