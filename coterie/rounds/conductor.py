"""Builds the plan of a run's next sum and decodes the sum, in services and in one process alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.rounds import policy
from coterie.rounds.inputs import inputs_of, named_inputs
from coterie.rounds.last_layout import LastLayout
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.population import Population
from coterie.rounds.prefix import Prefix
from coterie.rounds.server_round import RoundState
from coterie.rounds.sides import SameMembers, ServerSide, Summed
from coterie.rounds.training import MOST_ABANDONED, Grown, Purpose, Started, Training
from coterie.secure_sum.aggregation import ADDED, Aggregation
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Failed, ServerHalf, Subject
from coterie.wire.tensor import from_wire, to_wire
from coterie.wire.v1.orchestrator_pb2 import CohortKind, Model, NamedTensor, RoundsPlan, RunPlan

__all__ = [
    "Conductor",
    "Cover",
    "aggregation_of",
    "bound_members",
    "cohort_rule",
    "decode_sum",
    "model_from_bytes",
    "model_to_bytes",
    "new_training",
    "population_rule",
]

_NOTHING: Mapping[str, bytes] = MappingProxyType({})

_KINDS: dict[CohortKind.ValueType, policy.Cohorts] = {
    CohortKind.COHORT_KIND_GROUPS: "groups",
    CohortKind.COHORT_KIND_RANDOM: "random",
    CohortKind.COHORT_KIND_ALL: "all",
    CohortKind.COHORT_KIND_INDEPENDENT: "independent",
}


def cohort_rule(
    rounds: RoundsPlan, beacon: bytes, waves: tuple[tuple[int, bytes], ...] = ()
) -> policy.CohortRule:
    """Return the rule by which a run's plan and its beacon (`Population.drawn`) draw cohorts.

    ``waves`` are first user and beacon of the beginning and of each wave, where users came later.
    """
    return policy.CohortRule(
        _KINDS[rounds.cohorts], rounds.cohort, rounds.group, beacon, rounds.redraw, waves
    )


def population_rule(plan: RunPlan, population: Population) -> policy.CohortRule:
    """Return the rule by which the cohorts of a population are drawn."""
    starts = [0, *(wave.first for wave in population.waves)]
    beacons = [beacon for beacon, _ in population.beacons]
    waves = tuple(zip(starts, beacons, strict=True)) if population.waves else ()
    return cohort_rule(plan.rounds, population.drawn(plan), waves)


def aggregation_of(rounds: RoundsPlan) -> Aggregation:
    """Return the terms on which a run's contributions to training become one sum."""
    if not rounds.HasField("aggregation"):
        return ADDED
    given = rounds.aggregation
    return Aggregation(given.rule, given.byzantine, given.norm_bound)


def model_to_bytes(model: Mapping[str, NDArray[np.float32]]) -> bytes:
    """Serialise a model to the payload that members fetch and hash: tensors by ascending name."""
    tensors = [NamedTensor(name=name, tensor=to_wire(model[name])) for name in sorted(model)]
    return Model(tensors=tensors).SerializeToString(deterministic=True)


def model_from_bytes(payload: bytes) -> dict[str, NDArray[np.float32]]:
    """Parse the payload that `model_to_bytes` writes.

    Raises
    ------
    Refusal
        When a tensor is malformed or holds a value that is not finite.
    """
    message = Model.FromString(payload)
    return {
        one.name: from_wire(one.tensor, np.float32, tuple([None] * len(one.tensor.shape)), field=one.name)
        for one in message.tensors
    }


def bound_members(plan: SumPlan, state: Training) -> frozenset[int]:
    """Return the members over whom alone the next sum can be formed; empty where it can be formed over any."""
    only = frozenset(state.only)
    return plan.positions(lambda participant: participant.hex() in only) if only else frozenset()


def new_training(plan: RunPlan, side: ServerSide, *, most_abandoned: int = MOST_ABANDONED) -> Training:
    """Return the initial state of a run, before any participant has joined.

    The system's side says which sums the run needs; ``most_abandoned`` is as for `Training`.
    """
    rounds = plan.rounds
    return Training(
        passes=rounds.passes,
        evaluate_every=max(rounds.evaluate_every, 1),
        patience=rounds.patience,
        choose_by=rounds.choose_by,
        supports=side.asks_supports,
        repeats_train=side.needs_every_sum,
        same_members=isinstance(side, SameMembers) and side.same_members,
        redraw=rounds.redraw,
        most_abandoned=most_abandoned,
    )


def _fixed(slots: Sequence[int]) -> Sequence[int]:
    """Return slots that nobody can change."""
    return slots if isinstance(slots, Prefix) else tuple(slots)


class Cover(NamedTuple):
    """The users that a sum covers: `decode_sum` needs them.

    Parameters
    ----------
    purpose : Purpose
    users, cohort, population : int
        Numbers of users: in the sum, in the cohort, in the run.
    shares : ndarray of float64, shape (groups,)
        Share of each group's users that is in the cohort.
    pass_number, part : int
        Pass, and number of the cohort in it; for SUPPORTS ``part`` is the group.
    """

    purpose: Purpose
    users: int
    cohort: int
    population: int
    shares: NDArray[np.float64]
    pass_number: int
    part: int


def decode_sum(
    side: ServerSide, total: NDArray[np.uint32], cover: Cover, layout: Layout | None = None
) -> Summed:
    """Decode a sum, so that ``side.apply`` and ``side.measured`` can take it.

    Parameters
    ----------
    side : ServerSide
    total : ndarray of uint32, shape (layout size,)
    cover : Cover
    layout : Layout, optional
        The side's for this purpose, where it is made already.

    Raises
    ------
    ImpossibleSumError
        When the sum is beyond its bounds.
    """
    layout = side.layout(cover.purpose) if layout is None else layout
    return Summed(
        purpose=cover.purpose,
        sums=layout.decode(total, cover.users),
        users=cover.users,
        pass_number=cover.pass_number,
        part=cover.part,
        shares=cover.shares * (cover.users / cover.cohort),
        population=cover.population,
    )


@dataclass(frozen=True)
class Conductor:
    """Builds the next round of a run: draws its cohort and writes the plan of its sum.

    Parameters
    ----------
    plan : RunPlan
    population : Population
    side : ServerSide
        The learning system's part at the server.
    half : ServerHalf
        The server's half of the secure sum.
    """

    plan: RunPlan
    population: Population
    side: ServerSide
    half: ServerHalf

    @cached_property
    def _layouts(self) -> LastLayout:
        return LastLayout(self.side.layout)

    @cached_property
    def _plan_sha256(self) -> bytes:
        return plan_hash(self.plan)

    @cached_property
    def _population_sha256(self) -> bytes:
        return self.population.hash(self.plan.run_id)

    @cached_property
    def rule(self) -> policy.CohortRule:
        """The rule by which the run's plan and beacon draw cohorts."""
        return population_rule(self.plan, self.population)

    def groups(self, pass_number: int = 0) -> policy.Parts:
        """Return the groups of a pass, each as the positions of its users."""
        return policy.groups(self.rule, len(self.population), self.rule.drawing(pass_number))

    def group_of(self, pass_number: int = 0) -> NDArray[np.int64]:
        """Return the group of each user in a pass, int64 (users,)."""
        return policy.group_of(self.rule, len(self.population), self.rule.drawing(pass_number))

    def started(self, slots: Sequence[int]) -> Started:
        """Return the event that fixes the population; ``slots`` are the users' slots in canonical order."""
        return Started(_fixed(slots), *self._numbers)

    def grown(self, slots: Sequence[int]) -> Grown:
        """Return the event that the population's last wave takes part; ``slots`` are those of all users, in order."""
        return Grown(_fixed(slots), *self._numbers, from_pass=self.population.waves[-1].from_pass)

    @property
    def _numbers(self) -> tuple[int, int, int]:
        """Numbers of groups, of cohorts of a pass, and of sums of an evaluation."""
        groups, parts = policy.numbers(self.rule, len(self.population))
        return groups, parts, parts if self.plan.rounds.party_per_user else 1

    def cohort(self, state: Training) -> NDArray[np.int64]:
        """Return the users of the next sum, as ascending positions."""
        if state.purpose is Purpose.SUPPORTS:
            return self.groups(state.pass_number)[state.part]
        if state.purpose is Purpose.EVALUATE and state.evaluation_parts == 1:
            return np.arange(len(self.population))
        if state.purpose is Purpose.EVALUATE:
            return policy.everybody(self.rule, len(self.population), state.pass_number)[state.part]
        return policy.cohorts(self.rule, len(self.population), state.pass_number)[state.part]

    def members(self, cohort: NDArray[np.int64]) -> dict[int, list[int]]:
        """Return the members of a cohort: by position in the plan, the positions of the users that each covers."""
        return self.population.members(cohort.tolist(), party_per_user=self.plan.rounds.party_per_user)

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of a purpose, as the system's side makes it."""
        return self._layouts.layout(purpose)

    def open(
        self,
        state: Training,
        model_sha256: bytes,
        patience_s: float,
        subject: Subject | None = None,
        told: Mapping[str, bytes] = _NOTHING,
    ) -> RoundState:
        """Return the next round's state, before its first step.

        Parameters
        ----------
        state : Training
        model_sha256 : bytes
            Hash of the model that members fetch.
        patience_s : float
            Longest duration of a step, seconds.
        subject : Subject, optional
            The model that the sum changes, for sums that key holders apply.
        told : mapping of str to bytes
            SHA-256 of the inputs that members are told, by name (`coterie.rounds.inputs`).

        Raises
        ------
        Failed
            When the cohort is below its floor or too large for the layout, the sum cannot be sparse as planned, or
            denoisers cannot serve its members.
        """
        cohort = self.cohort(state)
        layout = self.layout(state.purpose)
        covered = self.members(cohort)
        rounds = self.plan.rounds
        devices = {self.population.devices[position] for position in cohort.tolist()}
        counted, what = (len(cohort), "users") if rounds.experiment else (len(devices), "devices")
        if counted < rounds.min_cohort:
            raise Failed(f"a cohort of {counted} {what}; the plan's floor is {rounds.min_cohort}")
        try:
            layout.require_capacity(len(cohort))
        except ValueError as error:
            raise Failed(str(error)) from error
        fields = self.half.plan_fields(len(covered), layout)
        sparse = policy.sparse_floor(rounds, state.purpose)
        if sparse and not fields.holders:
            raise Failed("only sums under a key can be sparse")
        if sparse and any(segment.over for segment in layout.segments):
            # The divisor of a row may lie in a ciphertext that is dropped although the row's own is not.
            raise Failed("values that others of the same sum divide cannot be sparse")
        plan = SumPlan(
            run_id=self.plan.run_id,
            round=state.round,
            purpose=state.purpose.value,
            secure_sum=self.plan.secure_sum,
            run_plan_sha256=self._plan_sha256,
            model_version=state.version,
            model_sha256=model_sha256,
            layout_sha256=self._layouts.sha256(state.purpose),
            inputs=named_inputs(inputs_of(state.purpose, opens=self.side.asks_supports), told),
            population_sha256=self._population_sha256,
            beacon=self.population.drawn(self.plan),
            members=tuple(map(self.population.member, covered.values())),
            min_sum=policy.min_sum(len(cohort), rounds.min_sum),
            pass_number=state.pass_number,
            part=state.part,
            sparse_floor=sparse,
            noise_floor=policy.noise_floor(rounds, self.plan.secure_sum, state.purpose),
            **fields._asdict(),
        )
        if plan.noise_floor and (short := plan.denoisers.shortfall):
            raise Failed(short)
        return RoundState.begin(plan, layout, self.half, patience_s, subject, bound_members(plan, state))

    def cover(self, state: Training, users: int) -> Cover:
        """Return the cover of the next sum, given the number of users in it."""
        return Cover(
            purpose=state.purpose,
            users=users,
            cohort=len(self.cohort(state)),
            population=len(self.population),
            shares=self.shares(state),
            pass_number=state.pass_number,
            part=state.part,
        )

    def shares(self, state: Training) -> NDArray[np.float64]:
        """Return the share of each group's users that is in the next sum's cohort, float64 (groups,)."""
        sizes = np.array([len(group) for group in self.groups(state.pass_number)])
        members = self.group_of(state.pass_number)[self.cohort(state)]
        found: NDArray[np.float64] = np.bincount(members, minlength=len(sizes)) / sizes
        return found
