"""A host's check of cohorts: it computes who belongs to a sum and compares the sum's plan with that.

Hosts do not trust the server with cohorts: each cohort follows from the run's plan and the canonical order of the
population, and a host knows the positions of its own users in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.beacon import verify_beacon
from coterie.crypto.verification import VerificationError
from coterie.rounds import policy
from coterie.rounds.conductor import cohort_rule
from coterie.rounds.inputs import check_run
from coterie.rounds.sides import User
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["Membership"]


@dataclass(frozen=True, eq=False)
class Membership:
    """The users of a host in the population of a run, and the check of each sum's plan against them.

    Parameters
    ----------
    plan : RunPlan
        As this host accepted it.
    device : str
        Name of its connection.
    users : int
        Number of users in the population.
    index : ndarray of int, shape (n,)
        Positions at the host of those of its users that are in the population.
    position, group : ndarray of int, shape (n,)
        Position of each of these users in the canonical order, and its group in the first drawing, as the
        orchestration server gave them.
    participants : sequence of bytes
        Participant ids of all users of the host, by position at the host.
    directory_key : bytes
        Raw Ed25519 public key of the directory, which signs the beacon.

    Raises
    ------
    Declined
        When positions are out of range or repeated, or the groups are not those of the plan's rule.  Outside
        experiments also when the directory's signature of the beacon is missing or wrong, or groups are drawn anew too
        often.
    """

    plan: RunPlan
    device: str
    users: int
    index: NDArray[np.int64]
    position: NDArray[np.int64]
    group: NDArray[np.int64]
    participants: Sequence[bytes]
    directory_key: bytes = b""

    def __post_init__(self) -> None:
        self._check_drawing()
        if not len(self.index) == len(self.position) == len(self.group):
            raise Declined("the places of this host's users are no table")
        known = len(self.participants)
        for name, values, below in (
            ("users", self.index, known),
            ("places", self.position, self.users),
        ):
            if len(values) and not (int(values.min()) >= 0 and int(values.max()) < below):
                raise Declined(f"the {name} of this host in the population are out of range")
            if len(np.unique(values)) != len(values):
                raise Declined(f"the {name} of this host in the population are not distinct")
        if not np.array_equal(self._group_of(0)[self.position], self.group):
            raise Declined("the groups of this host's users are not those of the plan's rule")

    def _check_drawing(self) -> None:
        rounds = self.plan.rounds
        if not rounds.experiment and 0 < rounds.redraw < policy.LEAST_REDRAW:
            raise Declined(
                f"groups are drawn anew after {rounds.redraw} passes; accepted are {policy.LEAST_REDRAW} or more"
            )
        if rounds.experiment and not rounds.beacon_signature:
            return
        try:
            verify_beacon(self.plan.run_id, rounds.beacon, rounds.beacon_signature, self.directory_key)
        except VerificationError as error:
            raise Declined(f"the groups were not drawn by the third party: {error.message}") from error

    @cached_property
    def _rule(self) -> policy.CohortRule:
        return cohort_rule(self.plan.rounds)

    def _groups(self, pass_number: int) -> policy.Parts:
        return policy.groups(self._rule, self.users, self._rule.drawing(pass_number))

    def _group_of(self, pass_number: int) -> NDArray[np.int64]:
        return policy.group_of(self._rule, self.users, self._rule.drawing(pass_number))

    @cached_property
    def _at(self) -> dict[int, int]:
        """Row in ``position`` of each of the host's positions."""
        return {int(position): row for row, position in enumerate(self.position)}

    def cohort(self, purpose: Purpose, pass_number: int, part: int) -> NDArray[np.int64]:
        """Return a cohort by the plan's rule, as ascending positions.

        Raises
        ------
        Declined
            When the rule has no such cohort.
        """
        rounds = self.plan.rounds
        parts: policy.Parts
        if purpose is Purpose.SUPPORTS:
            # Only once for each drawing: a later sum over the same group would show what has changed since.
            parts = self._groups(pass_number) if self._rule.redrawn(pass_number) else ()
        elif purpose is Purpose.EVALUATE and not rounds.party_per_user:
            parts = (np.arange(self.users),)
        elif purpose is Purpose.EVALUATE:
            parts = policy.everybody(self._rule, self.users, pass_number)
        else:
            parts = policy.cohorts(self._rule, self.users, pass_number)
        last = rounds.passes if purpose is Purpose.EVALUATE else rounds.passes - 1
        if not (0 <= part < len(parts) and 0 <= pass_number <= last):
            raise Declined(f"the plan's rule has no part {part} of pass {pass_number} ({purpose.value})")
        return parts[part]

    def covered(self, plan: SumPlan) -> dict[int, list[User]]:
        """Check a sum's plan; return the host's members in it, by position in the plan, and the users that each covers.

        Parameters
        ----------
        plan : SumPlan

        Raises
        ------
        Declined
            When the plan differs from what the run's plan prescribes: another run, secure sum, cohort or floor, or a
            member of this host that is missing or at another position.
        """
        run, rounds = self.plan, self.plan.rounds
        check_run(plan, run)
        try:
            purpose = Purpose(plan.purpose)
        except ValueError:
            raise Declined(f"a sum for {plan.purpose!r}; known are train, evaluate and supports") from None
        cohort = self.cohort(purpose, plan.pass_number, plan.part)
        if plan.users != len(cohort):
            raise Declined(f"a cohort of {plan.users} users; by the plan's rule it has {len(cohort)}")
        counted, what = (plan.users, "users") if rounds.experiment else (len(plan.devices), "devices")
        if counted < rounds.min_cohort:
            raise Declined(f"a cohort of {counted} {what}; the plan's floor is {rounds.min_cohort}")
        floor = policy.min_sum(len(cohort), rounds.min_sum)
        if plan.min_sum != floor:
            raise Declined(f"a floor of {plan.min_sum} users for the sum; by the plan's rule it is {floor}")
        sparse = policy.sparse_floor(rounds, purpose)
        if plan.sparse_floor != sparse:
            raise Declined(
                f"a floor of {plan.sparse_floor} users for each place of the sum; by the plan's rule it is {sparse}, "
                "and 0 says that everybody sends all places"
            )
        return self._per_user(plan, cohort) if rounds.party_per_user else self._one(plan, cohort)

    def _own(self, plan: SumPlan, cohort: NDArray[np.int64]) -> dict[int, User]:
        """Return the host's users in a cohort, by position in ascending order."""
        group = self._group_of(plan.pass_number)
        return {
            position: User(int(self.index[self._at[position]]), int(group[position]))
            for position in cohort.tolist()
            if position in self._at
        }

    def _per_user(self, plan: SumPlan, cohort: NDArray[np.int64]) -> dict[int, list[User]]:
        if len(plan.members) != len(cohort):
            raise Declined(
                f"{len(plan.members)} members for a cohort of {len(cohort)} users, each one a member"
            )
        found, users = {}, self._own(plan, cohort)
        for member, (position, one) in enumerate(zip(cohort.tolist(), plan.members, strict=True)):
            if position not in users:
                if one.device == self.device:
                    raise Declined(f"member {member} is said to be this host's, and is not")
                continue
            user = users[position]
            if (one.participant, one.device) != (self.participants[user.index], self.device):
                raise Declined(f"member {member} should be a user of this host, and is not")
            found[member] = [user]
        return found

    def _one(self, plan: SumPlan, cohort: NDArray[np.int64]) -> dict[int, list[User]]:
        users = list(self._own(plan, cohort).values())
        own = [member for member, one in enumerate(plan.members) if one.device == self.device]
        if len(own) != (1 if users else 0):
            raise Declined(f"this host has {len(own)} members in a cohort with {len(users)} of its users")
        if not users:
            return {}
        one = plan.members[own[0]]
        if (one.participant, one.users) != (self.participants[users[0].index], len(users)):
            raise Declined(
                f"this host's member does not stand for the {len(users)} users that it has in the cohort"
            )
        return {own[0]: users}
