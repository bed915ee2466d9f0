"""Training in one process, round by round: the services' state machines and mathematics, without network and faults.

``coterie run --in-process`` trains by it, and every "same mathematics" ratio is measured against it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError
from coterie.rounds.conductor import Conductor, new_training
from coterie.rounds.denoiser_round import NoiseHalf
from coterie.rounds.model_state import ModelState, OpenModel, SealedVersions
from coterie.rounds.population import Population
from coterie.rounds.privacy import after_sum
from coterie.rounds.sides import Arrays, HostSide, ServerSide, User
from coterie.rounds.training import (
    RoundAbandoned,
    RoundSummed,
    Training,
    TrainingPhase,
    begin_round,
    step,
)
from coterie.secure_sum.contribution import ImpossibleSumError
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Failed, Formed, MemberHalf, ServerHalf, Subject
from coterie.studies.local_rounds import MemberHost, Members, Outcome, run_round
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["Before", "LocalHost", "LocallyTrained", "Shared", "Told", "train"]

Told = Callable[[Training, Arrays], Arrays]
"""Function that adds data owners' answers for the next sum to the server's arrays."""

Before = Callable[[SumPlan, Mapping[str, NDArray[np.float32]], Sequence[int]], None]
"""Function that finds neighbours or pseudo meta-latents for users of a host before a sum."""

_NOBODY: Mapping[str, MemberHost] = MappingProxyType({})


@dataclass(frozen=True)
class LocalHost:
    """A host in this process.

    Parameters
    ----------
    device : str
        Name of the host's connection.
    participants : sequence of bytes
        Ids of the host's users, in the order of their positions on the host.
    side : HostSide
        The host's side of the learning system.
    half : callable
        Makes a member's half of the secure sum.
    denoiser : callable, optional
        Makes the host's half as a denoiser; a denoised sum needs it.
    before : callable, optional
        Called before a sum with its plan, the model and the positions of its users at the host.
    """

    device: str
    participants: Sequence[bytes]
    side: HostSide
    half: Callable[[SumPlan, int], MemberHalf]
    denoiser: Callable[[SumPlan], NoiseHalf] | None = None
    before: Before | None = None


@dataclass(frozen=True)
class LocallyTrained:
    """The result of training in one process.

    Parameters
    ----------
    state : Training
        Final state with every evaluation; ``state.chosen`` is the best one.
    arrays : dict
        The server's arrays after the last round.
    best : dict
        The server's arrays at the chosen version.
    """

    state: Training
    arrays: Arrays
    best: Arrays


class Shared(Protocol):
    """Key that participants share, under which the server keeps sealed versions of the model."""

    def subject(self, conductor: Conductor, state: Training, model: bytes) -> Subject:
        """Return the subject of the next sum: the model that key holders change by it."""
        ...

    def opened(self, model: bytes, conductor: Conductor) -> Arrays:
        """Return a sealed version (``SealedModel``) as the arrays that a server keeps without a shared key."""
        ...


class _Host:
    """One host in training: its members, and the users of the run's population that each covers."""

    def __init__(self, host: LocalHost, first: int, conductor: Conductor) -> None:
        self._host = host
        self._first = first
        self._conductor = conductor
        self.model: Mapping[str, NDArray[np.float32]] = {}
        self.opened: NDArray[np.bool_] | None = None
        self.covered: dict[int, list[int]] = {}
        once = conductor.plan.rounds.HasField("privacy")
        self.members = Members(host.half, self._train, once=once, denoiser=host.denoiser)

    def _train(self, plan: SumPlan, members: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        group_of = self._conductor.group_of(plan.pass_number)
        users = {
            member: [
                User(position - self._first, int(group_of[position])) for position in self.covered[member]
            ]
            for member in members
        }
        if self._host.before is not None:
            taking_part = [user.index for several in users.values() for user in several]
            self._host.before(plan, self.model, taking_part)
        return self._host.side.contributions(plan, self.model, self.opened, users)


def train(
    plan: RunPlan,
    side: Callable[[int], ServerSide],
    half: ServerHalf,
    hosts: Sequence[LocalHost],
    holders: Mapping[str, MemberHost] = _NOBODY,
    shared: Shared | None = None,
    told: Told = lambda state, arrays: arrays,
    on_evaluation: Callable[[Training, Arrays], None] | None = None,
    on_round: Callable[[Training, Outcome], None] | None = None,
) -> LocallyTrained:
    """Train a run from the first round to the end.

    Parameters
    ----------
    plan : RunPlan
    side : callable
        Makes the system's server side for a number of groups.
    half : ServerHalf
        The server's half of the secure sum.
    hosts : sequence of LocalHost
    holders : mapping of str to MemberHost, optional
        Connections of an encrypted sum's key holders, by device.
    shared : Shared, optional
        The key that participants share, if they do; the server then keeps sealed versions.
    told : callable, optional
        Adds data owners' answers to the arrays to which a sum is applied, for systems that ask owners.
    on_evaluation : callable, optional
        Called after each evaluation, while the hosts' private state is that of the version measured.
    on_round : callable, optional
        Called after each round.

    Raises
    ------
    RunError
        The run fails; the message gives the reason.
    """
    ordered = sorted(hosts, key=lambda host: host.device)
    population = Population(
        [one for host in ordered for one in host.participants],
        [host.device for host in ordered for _ in host.participants],
    )
    groups = len(Conductor(plan, population, side(0), half).groups())
    server = side(groups)
    conductor = Conductor(plan, population, server, half)
    workers: dict[str, _Host] = {}
    first = 0
    for host in ordered:
        workers[host.device] = _Host(host, first, conductor)
        first += len(host.participants)

    kept: ModelState = OpenModel(conductor) if shared is None else SealedVersions(conductor)
    held = kept.initial()
    arrays = best = server.initial()
    state = new_training(plan, server)
    state = step(state, conductor.started(range(len(population))))
    while not state.phase.ended:
        state = begin_round(state)
        evaluations = len(state.evaluations)
        subject = None if shared is None else shared.subject(conductor, state, kept.model(held))
        state, held, outcome = _round(conductor, kept, state, held, arrays, workers, holders, subject, told)
        arrays = held if shared is None else shared.opened(kept.model(held), conductor)
        if on_round is not None:
            on_round(state, outcome)
        if len(state.evaluations) > evaluations:
            if state.best == len(state.evaluations) - 1:
                best = arrays
            if on_evaluation is not None:
                on_evaluation(state, arrays)
    if state.phase is TrainingPhase.FAILED:
        raise RunError(f"the run failed: {state.reason}")
    return LocallyTrained(state, arrays, best)


def _round(
    conductor: Conductor,
    kept: ModelState,
    state: Training,
    held: Arrays,
    arrays: Arrays,
    workers: Mapping[str, _Host],
    holders: Mapping[str, MemberHost],
    subject: Subject | None,
    told: Told,
) -> tuple[Training, Arrays, Outcome]:
    model = conductor.side.model(arrays)
    opened = conductor.side.opened(arrays)
    covered = conductor.members(conductor.cohort(state))
    for worker in workers.values():
        worker.model, worker.opened, worker.covered = model, opened, covered
    try:
        opening = conductor.open(state, hashlib.sha256(kept.model(held)).digest(), 1.0)
    except Failed as failed:
        return step(state, RoundAbandoned(str(failed))), held, Outcome(None, reason=str(failed))
    measured: dict[str, tuple[float, float]] = {}

    def apply(formed: Formed, users: int) -> str:
        nonlocal held, measured
        try:
            decoded = kept.decode(state, formed, users)
            held, measured = decoded.apply(told(state, held)), decoded.measured
        except ImpossibleSumError as error:
            return str(error)
        return ""

    hosts = {**{device: worker.members for device, worker in workers.items()}, **holders}
    plan = opening.plan
    outcome = run_round(plan, opening.layout, conductor.half, hosts, apply, subject, opening.only)
    event = (
        RoundSummed(measured, conductor.side.figures, plan.participants(outcome.submitters))
        if outcome.total is not None
        else RoundAbandoned(outcome.reason, plan.participants(outcome.bound))
    )
    submitters = None if outcome.total is None else outcome.submitters
    return after_sum(conductor, state, step(state, event), submitters), held, outcome
