"""Pure state machine of a run of DRIFT's published form, which is asynchronous; the server drives it.

Within an epoch there is no barrier: each owner updates the model whenever it has work, and nobody waits for it.  An
epoch is one pass over the blocks of the owners that are present; it ends when each of them has reported its pass.
Evaluations hold nobody up either: each is made on a frozen version while training goes on.

``step`` takes a state and an event and returns the next state.  Tasks are a function of the state alone
(``owner_task``, ``host_tasks``), so asking twice gives the same answer and a lost answer loses nothing.

The table shows the phases to which ``step`` leads from each phase; a dash marks an event that cannot occur in a phase;
*(back)* is the phase in which a run failed that may be resumed.
A complete pass is no event: the server opens an evaluation and calls ``next_epoch`` as soon as ``pass_complete`` holds.

================  =============  =====================  ==============  ====  ======
event             gather         train                  evaluate        done  failed
================  =============  =====================  ==============  ====  ======
OwnerJoined       gather, train  train                  evaluate        done  failed
UsersJoined       gather, train  train                  evaluate        done  failed
CatalogueChanged  gather         train                  evaluate        done  failed
RecordsDelivered  gather         train                  evaluate        done  failed
PassDone          gather         train                  evaluate        done  failed
PointOpened       gather         train                  evaluate        done  failed
Measured          -              train                  evaluate, done  done  failed
ExchangesLost     gather         train                  evaluate        done  failed
PartyLost         gather         train                  evaluate, done  done  failed
PartySeen         gather, train  train                  evaluate        done  failed
Stopped           failed         failed                 failed          done  failed
RunResumed        gather         train                  evaluate        done  (back)
(pass complete)   -              train, evaluate        -               -     -
================  =============  =====================  ==============  ====  ======
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.wire.v1.orchestrator_pb2 import ExchangeRequest

__all__ = [
    "MOST_EXCHANGED",
    "MOST_EXCHANGES",
    "CatalogueChanged",
    "Event",
    "ExchangesLost",
    "Measured",
    "OwnerJoined",
    "PartyLost",
    "PartySeen",
    "PassDone",
    "Point",
    "PointOpened",
    "PublishedHost",
    "PublishedOwner",
    "PublishedPhase",
    "RecordsDelivered",
    "RunResumed",
    "RunState",
    "Stopped",
    "Task",
    "TaskKind",
    "UsersJoined",
    "advanced",
    "delivered",
    "exchanged",
    "host_tasks",
    "lacking",
    "next_epoch",
    "owner_task",
    "pass_complete",
    "step",
    "waiting_for",
    "without_unset",
]

MOST_EXCHANGES = 64
"""Most exchanges of owners in one message of ``ExchangeMany``."""

MOST_EXCHANGED = 1 << 20
"""Most bytes of a message of ``ExchangeMany`` with several exchanges and of its answer, counted as `exchanged` does."""


def exchanged(requests: Iterable[ExchangeRequest], dim: int) -> int:
    """Return the bytes of exchanges and of the rows that they ask for, ``dim`` values each."""
    # An id of 4 bytes is answered by a row of `dim` values of 4 bytes.
    return sum(one.ByteSize() + (len(one.users.data) + len(one.items.data)) * dim for one in requests)


_MOST_LOST = 100
"""Most ranges of lost exchanges that a state remembers; the oldest go first."""


class PublishedPhase(enum.Enum):
    """Phase of a run."""

    GATHER = "gather"
    TRAIN = "train"
    EVALUATE = "evaluate"
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self in (PublishedPhase.DONE, PublishedPhase.FAILED)


@dataclass(frozen=True)
class PublishedOwner:
    """State of a data owner: its party, first epoch, last completed epoch, and presence."""

    party: str
    joined_epoch: int
    done_epoch: int = 0
    present: bool = True


@dataclass(frozen=True)
class PublishedHost:
    """State of a client host: its users, last catalogue delivered to, last evaluation reported, presence."""

    users: int = 0
    delivered: int = 0
    reported: int = 0
    present: bool = True


@dataclass(frozen=True)
class Point:
    """Evaluation: its number from 1, its epoch, and the model version that it measures."""

    number: int
    epoch: int
    version: int


@dataclass(frozen=True)
class RunState:
    """State of a run, from which the tasks of all parties follow.

    ``lost`` has slot, first and last number of owners' exchanges that a server restored from a backup has no more.
    ``may_pass`` says whether the run has failed for a cause that may pass, so that `RunResumed` takes it up again in
    the phase ``failed_in``; it was resumed ``resumes`` times.
    """

    epochs: int
    expect_owners: int
    expect_users: int
    phase: PublishedPhase = PublishedPhase.GATHER
    epoch: int = 0
    catalogue: int = 0
    owners: Mapping[int, PublishedOwner] = field(default_factory=dict)
    hosts: Mapping[str, PublishedHost] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    points_opened: int = 0
    reason: str = ""
    may_pass: bool = False
    failed_in: str = ""
    resumes: int = 0
    lost: tuple[tuple[int, int, int], ...] = ()

    def to_json(self) -> str:
        """Return the state as JSON, for the store."""
        plain = dataclasses.asdict(self)
        plain["phase"] = self.phase.value
        return json.dumps(without_unset(plain))

    @classmethod
    def from_json(cls, text: str) -> RunState:
        """Return the state that ``to_json`` wrote."""
        plain: dict[str, Any] = json.loads(text)
        plain["phase"] = PublishedPhase(plain["phase"])
        plain["owners"] = {int(slot): PublishedOwner(**owner) for slot, owner in plain["owners"].items()}
        plain["hosts"] = {name: PublishedHost(**host) for name, host in plain["hosts"].items()}
        plain["points"] = tuple(Point(**point) for point in plain["points"])
        plain["lost"] = tuple((slot, first, last) for slot, first, last in plain.get("lost", ()))
        return cls(**plain)


def without_unset(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a state's fields without unset ones that only a failed, resumed or restored run has.

    Earlier releases know none of these.
    """
    unset = [key for key in ("may_pass", "failed_in", "resumes", "lost") if not plain.get(key)]
    return {key: value for key, value in plain.items() if key not in unset}


@dataclass(frozen=True)
class OwnerJoined:
    """Event: a data owner registered, for the first time or again."""

    slot: int
    party: str


@dataclass(frozen=True)
class UsersJoined:
    """Event: a host registered, and now speaks for ``users`` users in all."""

    host: str
    users: int


@dataclass(frozen=True)
class CatalogueChanged:
    """Event: the catalogue has a new version."""

    version: int


@dataclass(frozen=True)
class RecordsDelivered:
    """Event: a host has delivered all its records to the owners of this catalogue."""

    host: str
    catalogue: int


@dataclass(frozen=True)
class PassDone:
    """Event: an owner has applied all its blocks of this epoch."""

    slot: int
    epoch: int


@dataclass(frozen=True)
class PointOpened:
    """Event: a version of the model was frozen for evaluation."""

    epoch: int
    version: int


@dataclass(frozen=True)
class Measured:
    """Event: a host reported its sums for an evaluation, or withheld them as it has too few users."""

    host: str
    point: int


@dataclass(frozen=True)
class ExchangesLost:
    """Event: an owner's exchanges of these numbers were acknowledged; the server, from a backup, has them no more."""

    slot: int
    first: int
    last: int


@dataclass(frozen=True)
class PartyLost:
    """Event: a party left, or was silent for too long."""

    party: str


@dataclass(frozen=True)
class PartySeen:
    """Event: a party that counted as absent was heard again."""

    party: str


@dataclass(frozen=True)
class Stopped:
    """Event: the run was stopped before its end, for the reason given; ``may_pass`` is as for `RunState`."""

    reason: str
    may_pass: bool = False


@dataclass(frozen=True)
class RunResumed:
    """Event: the operator takes up a run that has failed, if its cause may pass."""


Event = (
    OwnerJoined
    | UsersJoined
    | CatalogueChanged
    | RecordsDelivered
    | PassDone
    | PointOpened
    | Measured
    | ExchangesLost
    | PartyLost
    | PartySeen
    | Stopped
    | RunResumed
)


class TaskKind(enum.Enum):
    """Kind of a task that the server gives a party."""

    DELIVER = "deliver"
    INTAKE = "intake"
    EPOCH = "epoch"
    EVALUATE = "evaluate"
    FINISH = "finish"


@dataclass(frozen=True)
class Task:
    """Open task of a party; ``version`` is the catalogue's (DELIVER) or the model's (EVALUATE)."""

    kind: TaskKind
    epoch: int = 0
    version: int = 0
    flush: bool = False
    reason: str = ""
    point: int = 0


def step(state: RunState, event: Event) -> RunState:
    """Return the state after an event; a run that has ended does not change.

    A run that may be resumed takes note of what parties have done, and goes on nowhere; once it is resumed, `advanced`
    does what has become due meanwhile.
    """
    if state.phase.ended:
        return state if not state.may_pass or isinstance(event, Stopped) else _take(state, event)
    return state if isinstance(event, RunResumed) else advanced(_take(state, event))


def _take(state: RunState, event: Event) -> RunState:
    match event:
        case OwnerJoined(slot, party):
            known = state.owners.get(slot)
            owner = (
                replace(known, present=True, party=party)
                if known is not None
                else PublishedOwner(party=party, joined_epoch=max(state.epoch, 1))
            )
            return replace(state, owners={**state.owners, slot: owner})
        case UsersJoined(host, users):
            known_host = state.hosts.get(host)
            # New users have their whole history still to deliver.
            delivered = known_host.delivered if known_host and known_host.users == users else 0
            # A host takes no part in evaluations that were opened before it came.
            reported = known_host.reported if known_host else state.points_opened
            return replace(
                state,
                hosts={
                    **state.hosts,
                    host: PublishedHost(users=users, delivered=delivered, reported=reported),
                },
            )
        case CatalogueChanged(version):
            return replace(state, catalogue=max(version, state.catalogue))
        case RecordsDelivered(host, catalogue):
            held = state.hosts[host]
            return _with_host(state, host, replace(held, delivered=max(catalogue, held.delivered)))
        case PassDone(slot, epoch):
            done = max(epoch, state.owners[slot].done_epoch)
            return replace(state, owners={**state.owners, slot: replace(state.owners[slot], done_epoch=done)})
        case PointOpened(epoch, version):
            point = Point(state.points_opened + 1, epoch, version)
            return replace(state, points=(*state.points, point), points_opened=point.number)
        case Measured(host, point):
            held = state.hosts[host]
            return _with_host(state, host, replace(held, reported=max(point, held.reported)))
        case ExchangesLost(slot, first, last):
            # An owner says so again when it got no answer, and after another restore.
            others = [one for one in state.lost if one[:2] != (slot, first)]
            return replace(state, lost=(*others, (slot, first, last))[-_MOST_LOST:])
        case PartyLost(party):
            return _with_presence(state, party, present=False)
        case PartySeen(party):
            return _with_presence(state, party, present=True)
        case Stopped(reason, may_pass):
            failed_in = state.phase.value if may_pass else ""
            return replace(
                state, phase=PublishedPhase.FAILED, reason=reason, may_pass=may_pass, failed_in=failed_in
            )
        case RunResumed():
            return replace(
                state,
                phase=PublishedPhase(state.failed_in),
                reason="",
                may_pass=False,
                failed_in="",
                resumes=state.resumes + 1,
            )


def _with_host(state: RunState, name: str, host: PublishedHost) -> RunState:
    return replace(state, hosts={**state.hosts, name: host})


def _with_presence(state: RunState, party: str, *, present: bool) -> RunState:
    owners = {
        slot: replace(owner, present=present) if owner.party == party else owner
        for slot, owner in state.owners.items()
    }
    hosts = {
        name: replace(host, present=present) if name == party else host for name, host in state.hosts.items()
    }
    return replace(state, owners=owners, hosts=hosts)


def advanced(state: RunState) -> RunState:
    """Return the state with everything done that is due: a phase that is over, points that every host has answered."""
    if state.phase is PublishedPhase.GATHER and _gathered(state):
        state = replace(state, phase=PublishedPhase.TRAIN, epoch=1)
    # A point is closed once every host that is present has answered it.  The newest one waits for the first answer.
    nobody = bool(state.hosts) and not any(
        host.present or host.reported >= state.points_opened for host in state.hosts.values()
    )
    state = replace(
        state,
        points=tuple(
            point
            for point in state.points
            if (nobody and point.number == state.points_opened)
            or any(host.present and host.reported < point.number for host in state.hosts.values())
        ),
    )
    if state.phase is PublishedPhase.EVALUATE and not state.points:
        state = replace(state, phase=PublishedPhase.DONE)
    return state


def _gathered(state: RunState) -> bool:
    owners = sum(owner.present for owner in state.owners.values())
    users = sum(host.users for host in state.hosts.values() if host.present)
    return owners >= state.expect_owners and users >= state.expect_users and owners > 0


def delivered(state: RunState) -> bool:
    """Return whether all hosts that are present, or all while none is, have delivered to the current catalogue."""
    hosts = list(state.hosts.values())
    asked = [host for host in hosts if host.present] or hosts
    return all(host.delivered >= state.catalogue for host in asked)


def pass_complete(state: RunState) -> bool:
    """Return whether an owner is present and all that are have reported the current epoch."""
    present = [owner for owner in state.owners.values() if owner.present]
    return bool(present) and all(owner.done_epoch >= state.epoch for owner in present)


def next_epoch(state: RunState) -> RunState:
    """Return the state after a complete pass: the next epoch, or the last evaluation."""
    if state.epoch < state.epochs:
        return replace(state, epoch=state.epoch + 1)
    return advanced(replace(state, phase=PublishedPhase.EVALUATE))


def owner_task(state: RunState, slot: int) -> Task | None:
    """Return the open task of a data owner; None where it has nothing to do."""
    owner = state.owners[slot]
    if state.phase.ended:
        return Task(TaskKind.FINISH, reason=state.reason)
    if state.phase is not PublishedPhase.TRAIN or owner.done_epoch >= state.epoch:
        return None
    if owner.joined_epoch == state.epoch:
        return Task(TaskKind.INTAKE, epoch=state.epoch, flush=delivered(state))
    return Task(TaskKind.EPOCH, epoch=state.epoch, flush=delivered(state))


def host_tasks(state: RunState, name: str) -> Iterator[Task]:
    """Yield the open tasks of a client host."""
    if state.phase.ended:
        yield Task(TaskKind.FINISH, reason=state.reason)
        return
    if state.phase is PublishedPhase.GATHER:
        return
    host = state.hosts[name]
    if host.delivered < state.catalogue:
        yield Task(TaskKind.DELIVER, epoch=state.epoch, version=state.catalogue)
    for point in state.points:
        if host.reported < point.number:
            yield Task(TaskKind.EVALUATE, epoch=point.epoch, version=point.version, point=point.number)
            # One at a time: the order of the answers is the order of the points.
            return


def lacking(state: RunState) -> tuple[str, tuple[str, ...]]:
    """Return what the run cannot go on without, in words, and the absent parties, one of which must come; or nothing.

    A run that gathers lacks nothing: it waits for parties that may never have come.
    """
    owners = tuple(sorted({owner.party for owner in state.owners.values() if not owner.present}))
    hosts = tuple(sorted(name for name, host in state.hosts.items() if not host.present))
    if state.phase is PublishedPhase.TRAIN and not any(owner.present for owner in state.owners.values()):
        return "no data owner is there", owners
    needs_hosts = state.phase is PublishedPhase.EVALUATE or (
        state.phase is PublishedPhase.TRAIN and not delivered(state)
    )
    if needs_hosts and hosts and len(hosts) == len(state.hosts):
        return "no client host is there", hosts
    return "", ()


def waiting_for(state: RunState) -> str:
    """Return, in words, the parties that the run is waiting for; the reason of a timeout."""
    if state.phase is PublishedPhase.GATHER:
        owners = sum(owner.present for owner in state.owners.values())
        users = sum(host.users for host in state.hosts.values() if host.present)
        return f"{owners} of {state.expect_owners} data owners and {users} of {state.expect_users} users came"
    late = sorted(
        owner.party for owner in state.owners.values() if owner.present and owner.done_epoch < state.epoch
    )
    slow = sorted(
        name
        for name, host in state.hosts.items()
        if host.present and (host.delivered < state.catalogue or host.reported < state.points_opened)
    )
    if not late and not slow:
        return "no data owner is left" if not any(o.present for o in state.owners.values()) else "nobody"
    return ", ".join(dict.fromkeys([*late, *slow]))
