"""Pure state machine of a run of DRIFT's shielded form, and the layout of its evaluation sums.

Users visit owners, in any order and without waiting for each other.  Whenever owners have taken enough visits, the
orchestration server opens a *window*: one sum over the owners that join, each with one vector over all items.  An
epoch's visits are over when every host has let each of its users visit once; then a last window sums the rest, and the
hosts evaluate the model, in a sum of their own.

``step`` takes a state and an event and returns the next state; `next_sum` says which sum a state asks for.

The table shows the phases to which ``step`` leads from each phase; a dash marks an event that cannot occur in a phase:
a sum ends only after it was opened, and a sum that was opened in *visit* may end in *close*.
*(back)* is the phase in which a run failed that may be resumed.

=================  =============  =============  =======================  ===================  ====  ======
event              gather         visit          close                    evaluate             done  failed
=================  =============  =============  =======================  ===================  ====  ======
OwnerJoined        gather, visit  visit          close                    evaluate             done  failed
UsersJoined        gather, visit  visit, close   close                    evaluate             done  failed
CatalogueChanged   gather         visit          close                    evaluate             done  failed
VisitsReported     gather         visit          close                    evaluate             done  failed
VisitsDelivered    gather         visit, close   close                    evaluate             done  failed
PartyLost          gather         visit, close   close                    evaluate             done  failed
PartySeen          gather, visit  visit, close   close                    evaluate             done  failed
NumberTaken        -              visit          close                    evaluate             done  failed
Windowed           -              visit          close, evaluate          -                    done  failed
EvaluationFormed   -              -              -                        visit, done          done  failed
ShieldedAbandoned  -              visit, failed  close, evaluate, failed  visit, done, failed  done  failed
Stopped            failed         failed         failed                   failed               done  failed
RunResumed         gather         visit          close                    evaluate             done  (back)
=================  =============  =============  =======================  ===================  ====  ======
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.evaluation.holdout import ranked_names
from coterie.rounds.training import MOST_ABANDONED
from coterie.secure_sum.contribution import Contribution, Layout, Segment
from coterie.systems.drift.published_run import (
    CatalogueChanged,
    OwnerJoined,
    PartyLost,
    PartySeen,
    RunResumed,
    Stopped,
    UsersJoined,
    without_unset,
)

__all__ = [
    "LOSSES",
    "EvaluationFormed",
    "Event",
    "NumberTaken",
    "Shielded",
    "ShieldedAbandoned",
    "ShieldedHost",
    "ShieldedOwner",
    "ShieldedPhase",
    "ShieldedPurpose",
    "VisitsDelivered",
    "VisitsReported",
    "Windowed",
    "add_measured",
    "due",
    "evaluation_layout",
    "lacking",
    "measured_in",
    "next_sum",
    "step",
    "waiting_for",
]

LOSSES = ("train_loss", "test_loss")
"""Metrics that have no natural bound."""

_LOSS_BOUND = 32.0
_BITS = 16
_TRIES = 3
"""Windows at the end of an epoch that may be abandoned before the run goes on without them."""


# --- what is summed ----------------------------------------------------------------------------------------------


class ShieldedPurpose(enum.Enum):
    """Purpose of a sum, as its plan names it."""

    WINDOW = "window"
    EVALUATE = "evaluate"


def evaluation_layout() -> Layout:
    """Return the layout of a host's metrics: sums over users, and the number of users in each."""
    names = ranked_names()
    return Layout(
        (
            Segment("metrics", (len(names),), 1.0, _BITS),
            Segment.whole("measured", (len(names),), 1),
            Segment("losses", (len(LOSSES),), _LOSS_BOUND, _BITS),
            Segment.whole("losses_measured", (len(LOSSES),), 1),
        )
    )


def add_measured(contribution: Contribution, values: Mapping[str, float], rng: np.random.Generator) -> None:
    """Add one user's metrics to a contribution; missing ones and NaN are not counted."""
    for segment, count, names in (
        ("metrics", "measured", ranked_names()),
        ("losses", "losses_measured", LOSSES),
    ):
        found = np.array([values.get(name, np.nan) for name in names])
        there = np.isfinite(found)
        contribution.add(segment, np.where(there, found, 0.0), rng)
        contribution.add(count, there.astype(np.float64), rng)
    contribution.count()


def measured_in(sums: Mapping[str, NDArray[np.float64]]) -> dict[str, tuple[float, int]]:
    """Return mean and number of users of each measured metric, from decoded sums."""
    found = {}
    for segment, count, names in (
        ("metrics", "measured", ranked_names()),
        ("losses", "losses_measured", LOSSES),
    ):
        for name, total, users in zip(names, sums[segment], sums[count], strict=True):
            if users > 0:
                found[name] = (float(total / users), round(float(users)))
    return found


# --- the run -----------------------------------------------------------------------------------------------------


class ShieldedPhase(enum.Enum):
    """Phase of a run."""

    GATHER = "gather"
    VISIT = "visit"
    CLOSE = "close"
    """All users have visited; a last window sums the rest of the epoch."""
    EVALUATE = "evaluate"
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self in (ShieldedPhase.DONE, ShieldedPhase.FAILED)


@dataclass(frozen=True)
class ShieldedOwner:
    """State of a data owner: its visits, the rows it holds back, the last window with its vector."""

    party: str
    present: bool = True
    visits: int = 0
    held: int = 0
    summed: int = 0


@dataclass(frozen=True)
class ShieldedHost:
    """State of a client host: the epoch and the catalogue for which its users have made their visits."""

    users: int = 0
    epoch: int = 0
    delivered: int = 0
    present: bool = True


@dataclass(frozen=True)
class Shielded:
    """State of a run in the shielded form, from which sums and tasks follow.

    Parameters
    ----------
    epochs, expect_owners, expect_users : int
    window : int
        Visits after which a window is opened.
    round : int
        Number of the last sum that was begun; numbers are never used again.
    closed : int
        Number of the last window that was applied or abandoned.
    version : int
        Number of windows applied.
    counted, captured : int
        Visits before the last applied window was opened, and before the last sum was opened.
    closing : bool
        Whether the last sum was opened after all visits of the epoch.
    evaluations : int
        Number of evaluations that were formed.
    most_abandoned : int
        Sums abandoned in a row after which the run has failed.
    may_pass : bool
        Whether the run has failed for a cause that may pass, so that `RunResumed` takes it up again.
    failed_in : str
        Phase in which it failed then; empty otherwise.
    resumes : int
        Number of times that the run was resumed.
    """

    epochs: int
    expect_owners: int
    expect_users: int
    window: int
    phase: ShieldedPhase = ShieldedPhase.GATHER
    epoch: int = 0
    catalogue: int = 0
    owners: Mapping[int, ShieldedOwner] = field(default_factory=dict)
    hosts: Mapping[str, ShieldedHost] = field(default_factory=dict)
    round: int = 0
    closed: int = 0
    version: int = 0
    counted: int = 0
    captured: int = 0
    closing: bool = False
    evaluations: int = 0
    abandoned: int = 0
    abandoned_in_a_row: int = 0
    reason: str = ""
    most_abandoned: int = MOST_ABANDONED
    may_pass: bool = False
    failed_in: str = ""
    resumes: int = 0

    @property
    def visits(self) -> int:
        """Number of visits that owners have reported."""
        return sum(owner.visits for owner in self.owners.values())

    def to_json(self) -> str:
        """Return the state as JSON, for the store."""
        plain = dataclasses.asdict(self)
        plain["phase"] = self.phase.value
        return json.dumps(without_unset(plain))

    @classmethod
    def from_json(cls, text: str) -> Shielded:
        """Return the state that ``to_json`` wrote."""
        plain: dict[str, Any] = json.loads(text)
        plain["phase"] = ShieldedPhase(plain["phase"])
        plain["owners"] = {int(slot): ShieldedOwner(**owner) for slot, owner in plain["owners"].items()}
        plain["hosts"] = {name: ShieldedHost(**host) for name, host in plain["hosts"].items()}
        return cls(**plain)


@dataclass(frozen=True)
class VisitsReported:
    """Event: an owner reported its number of visits in all, and of rows that it holds back."""

    slot: int
    visits: int
    held: int


@dataclass(frozen=True)
class VisitsDelivered:
    """Event: a host's users have made their visits of an epoch, to the owners of this catalogue."""

    host: str
    epoch: int
    catalogue: int


@dataclass(frozen=True)
class NumberTaken:
    """Event: a sum was opened, and has taken the next number."""


@dataclass(frozen=True)
class Windowed:
    """Event: a window's sum was applied, with the vectors of the owners at these slots."""

    slots: Collection[int]


@dataclass(frozen=True)
class EvaluationFormed:
    """Event: an evaluation was formed."""


@dataclass(frozen=True)
class ShieldedAbandoned:
    """Event: the sum that was opened last is not formed."""

    purpose: ShieldedPurpose
    reason: str


Event = (
    OwnerJoined
    | UsersJoined
    | CatalogueChanged
    | VisitsReported
    | VisitsDelivered
    | PartyLost
    | PartySeen
    | NumberTaken
    | Windowed
    | EvaluationFormed
    | ShieldedAbandoned
    | Stopped
    | RunResumed
)


_NOTED = (
    OwnerJoined,
    UsersJoined,
    CatalogueChanged,
    VisitsReported,
    VisitsDelivered,
    PartyLost,
    PartySeen,
    RunResumed,
)
"""Events that a failed run takes if it may be resumed."""


def step(state: Shielded, event: Event) -> Shielded:
    """Return the state after an event; a run that has ended does not change.

    A run that may be resumed takes note of what parties have done, and goes on nowhere.
    """
    if state.phase.ended:
        if not state.may_pass or not isinstance(event, _NOTED):
            return state
        taken = _take(state, event)
        return _advance(taken) if isinstance(event, RunResumed) else taken
    return state if isinstance(event, RunResumed) else _advance(_take(state, event))


def _take(state: Shielded, event: Event) -> Shielded:
    match event:
        case OwnerJoined(slot, party):
            owner = replace(state.owners.get(slot, ShieldedOwner(party)), party=party, present=True)
            return replace(state, owners={**state.owners, slot: owner})
        case UsersJoined(name, users):
            held = state.hosts.get(name, ShieldedHost())
            # New users have all their visits still to make.
            done = held if held.users == users else ShieldedHost()
            return _with_host(state, name, replace(done, users=users, present=True))
        case CatalogueChanged(version):
            return replace(state, catalogue=max(version, state.catalogue))
        case VisitsReported(slot, visits, rows):
            owner = state.owners[slot]
            # An owner that was restored from a backup reports fewer visits than before.
            owner = replace(owner, visits=max(visits, owner.visits), held=rows)
            return replace(state, owners={**state.owners, slot: owner})
        case VisitsDelivered(name, epoch, catalogue):
            held = state.hosts[name]
            done = replace(held, epoch=max(epoch, held.epoch), delivered=max(catalogue, held.delivered))
            return _with_host(state, name, done)
        case PartyLost(party) | PartySeen(party):
            there = isinstance(event, PartySeen)
            return replace(
                state,
                owners={slot: _seen(one, one.party == party, there) for slot, one in state.owners.items()},
                hosts={name: _seen(one, name == party, there) for name, one in state.hosts.items()},
            )
        case NumberTaken():
            closing = state.phase is ShieldedPhase.CLOSE
            return replace(state, round=state.round + 1, captured=state.visits, closing=closing)
        case Windowed(slots):
            owners = {
                slot: replace(owner, summed=state.round) if slot in slots else owner
                for slot, owner in state.owners.items()
            }
            return replace(
                state,
                # Every visit was answered before the last host was done, so this window is the last of the epoch.
                phase=ShieldedPhase.EVALUATE if state.closing else state.phase,
                owners=owners,
                closed=state.round,
                version=state.version + 1,
                counted=state.captured,
                abandoned_in_a_row=0,
            )
        case EvaluationFormed():
            state = replace(state, evaluations=state.evaluations + 1, abandoned_in_a_row=0)
            return _next_epoch(state)
        case ShieldedAbandoned(purpose, reason):
            return _abandoned(state, purpose, reason)
        case Stopped(reason, may_pass):
            return _failed(state, reason, may_pass=may_pass)
        case RunResumed():
            return replace(
                state,
                phase=ShieldedPhase(state.failed_in),
                reason="",
                may_pass=False,
                failed_in="",
                resumes=state.resumes + 1,
                abandoned_in_a_row=0,
            )


def _failed(state: Shielded, reason: str, *, may_pass: bool) -> Shielded:
    failed_in = state.phase.value if may_pass else ""
    return replace(state, phase=ShieldedPhase.FAILED, reason=reason, may_pass=may_pass, failed_in=failed_in)


_PartyT = TypeVar("_PartyT", ShieldedOwner, ShieldedHost)


def _seen(one: _PartyT, concerned: bool, there: bool) -> _PartyT:
    return replace(one, present=there) if concerned else one


def _with_host(state: Shielded, name: str, host: ShieldedHost) -> Shielded:
    return replace(state, hosts={**state.hosts, name: host})


def _abandoned(state: Shielded, purpose: ShieldedPurpose, reason: str) -> Shielded:
    row = state.abandoned_in_a_row + 1
    state = replace(state, abandoned=state.abandoned + 1, abandoned_in_a_row=row)
    if row >= state.most_abandoned:
        words = f"{row} sums in a row were abandoned; the last one: {reason}"
        if purpose is ShieldedPurpose.WINDOW:
            state = replace(state, closed=state.round)
        return _failed(state, words, may_pass=True)
    if purpose is ShieldedPurpose.EVALUATE:
        return _next_epoch(state)
    state = replace(state, closed=state.round)
    # Nothing is lost: owners hold their rows until a window has them.
    over = state.phase is ShieldedPhase.CLOSE and row >= _TRIES
    return replace(state, phase=ShieldedPhase.EVALUATE) if over else state


def _next_epoch(state: Shielded) -> Shielded:
    if state.epoch < state.epochs:
        return replace(state, phase=ShieldedPhase.VISIT, epoch=state.epoch + 1)
    if not state.evaluations:
        return replace(state, phase=ShieldedPhase.FAILED, reason="no evaluation could be formed")
    return replace(state, phase=ShieldedPhase.DONE)


def _advance(state: Shielded) -> Shielded:
    if state.phase is ShieldedPhase.GATHER and _gathered(state):
        state = replace(state, phase=ShieldedPhase.VISIT, epoch=1)
    if state.phase is ShieldedPhase.VISIT and _all_visited(state):
        state = replace(state, phase=ShieldedPhase.CLOSE)
    return state


def _gathered(state: Shielded) -> bool:
    owners = sum(owner.present for owner in state.owners.values())
    users = sum(host.users for host in state.hosts.values() if host.present)
    return owners >= max(state.expect_owners, 1) and users >= max(state.expect_users, 1)


def _all_visited(state: Shielded) -> bool:
    present = [host for host in state.hosts.values() if host.present]
    return bool(present) and all(
        host.epoch >= state.epoch and host.delivered >= state.catalogue for host in present
    )


def due(state: Shielded) -> bool:
    """Return whether owners have taken enough visits for a window."""
    return state.phase is ShieldedPhase.VISIT and state.visits - state.counted >= state.window


def next_sum(state: Shielded, *, in_time: bool = False) -> ShieldedPurpose | None:
    """Return the purpose of the sum to open now; None for no sum.

    Parameters
    ----------
    state : Shielded
    in_time : bool
        Whether enough time has passed since the last window that any new visit justifies one.
    """
    match state.phase:
        case ShieldedPhase.VISIT if due(state) or (in_time and state.visits > state.counted):
            return ShieldedPurpose.WINDOW
        case ShieldedPhase.CLOSE:
            return ShieldedPurpose.WINDOW
        case ShieldedPhase.EVALUATE:
            return ShieldedPurpose.EVALUATE
        case _:
            return None


def lacking(state: Shielded) -> tuple[str, tuple[str, ...]]:
    """Return what an epoch cannot go on without, in words, and the absent parties, one of which must come; or nothing.

    Sums have floors of their own.  A run that gathers lacks nothing: it waits for parties that may never have come.
    """
    visiting = state.phase is ShieldedPhase.VISIT
    if not visiting and state.phase is not ShieldedPhase.CLOSE:
        return "", ()
    owners = tuple(sorted({owner.party for owner in state.owners.values() if not owner.present}))
    if owners and not any(owner.present for owner in state.owners.values()):
        return "no data owner is there", owners
    hosts = tuple(sorted(name for name, host in state.hosts.items() if not host.present))
    if visiting and hosts and len(hosts) == len(state.hosts):
        return "no client host is there", hosts
    return "", ()


def waiting_for(state: Shielded) -> str:
    """Return, in words, the parties that the run is waiting for; the reason of a timeout."""
    if state.phase is ShieldedPhase.GATHER:
        owners = sum(owner.present for owner in state.owners.values())
        users = sum(host.users for host in state.hosts.values() if host.present)
        return f"{owners} of {state.expect_owners} data owners and {users} of {state.expect_users} users came"
    late: Sequence[str] = sorted(
        name
        for name, host in state.hosts.items()
        if host.present and (host.epoch < state.epoch or host.delivered < state.catalogue)
    )
    return ", ".join(late) or "nobody"
