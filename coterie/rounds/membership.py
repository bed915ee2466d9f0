"""A host's check of cohorts: it computes who belongs to a sum and compares the sum's plan with that.

Hosts do not trust the server with cohorts: each cohort follows from the run's plan, the population that the third party
signed, and the beacon that it drew for this population.  A host that came later has an outline of the population, and
is shown the users of each cohort, with proofs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.verification import VerificationError
from coterie.rounds import policy
from coterie.rounds.conductor import population_rule
from coterie.rounds.inputs import check_run
from coterie.rounds.plan_hash import plan_hash
from coterie.rounds.population import ID_BYTES, Ids, Population
from coterie.rounds.privacy import evaluated_in
from coterie.rounds.sides import HostUsers, User
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined
from coterie.wire.refusal import Refusal
from coterie.wire.v1.common_pb2 import CohortUsers, Waves
from coterie.wire.v1.common_pb2 import Population as PopulationMessage
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["Membership", "purpose_of"]

_FACTS = ("participant", "device", "users")
"""Everything of a member in a plan."""

_AT_ONCE = 1 << 16
"""Most users of a population whose ids are looked up together."""


def purpose_of(plan: SumPlan) -> Purpose:
    """Return the purpose of a sum.

    Raises
    ------
    Declined
        When it is none that a run in rounds has.
    """
    try:
        return Purpose(plan.purpose)
    except ValueError:
        raise Declined(f"a sum for {plan.purpose!r}; known are train, evaluate and supports") from None


@dataclass(frozen=True, eq=False)
class Membership:
    """The users of a host in the population of a run, and the check of each sum's plan against them.

    Parameters
    ----------
    plan : RunPlan
        As this host accepted it.
    device : str
        Name of its connection.
    population : Population
        As the orchestration server gave it, or as this host has kept it; may be an outline.
    participants : sequence of bytes
        Participant ids of all users of the host, by position at the host.
    directory_key : bytes
        Raw Ed25519 public key of the directory, which signs the beacon.
    checked : int
        How many parts of the population, its beginning and its waves, this host has checked before.

    Raises
    ------
    Declined
        When the third party did not sign the population and its beacon, unless it is that of an experiment whose plan
        names the beacon; when users are in another order than that of their ids, or one comes twice; when the
        population names this host's connection for others than its users, or another connection for one of them; and
        outside experiments when groups are drawn anew too often.
    """

    plan: RunPlan
    device: str
    population: Population
    participants: Sequence[bytes]
    directory_key: bytes = b""
    checked: int = 0

    def __post_init__(self) -> None:
        rounds = self.plan.rounds
        if not rounds.experiment and 0 < rounds.redraw < policy.LEAST_REDRAW:
            raise Declined(
                f"groups are drawn anew after {rounds.redraw} passes; accepted are {policy.LEAST_REDRAW} or more"
            )
        try:
            self.population.check(self.plan, self.directory_key, self.checked)
        except VerificationError as error:
            raise Declined(
                f"the third party did not sign the population of the run: {error.message}"
            ) from error
        except ValueError as error:
            raise Declined(str(error)) from None
        if self.population.outline is not None:
            # This is checked of the users of each cohort, when they are shown.
            return
        # Whatever was checked before names no others, and this host's users are as they were.
        first = self.population.first_of(self.checked)
        self._check_own(
            self._at_from(first) if first else self._at,
            self._numbered(self.population.devices[first:]) if first else self._device,
        )

    def _check_own(self, at: NDArray[np.int32], devices: NDArray[np.int32]) -> None:
        """Require that users stand under this host's connection if they are its own, and only then."""
        own, here = at >= 0, devices == self._number.get(self.device, -1)
        if (own & ~here).any():
            raise Declined("the population names another connection for a user of this host")
        if (here & ~own).any():
            raise Declined("the population names somebody as a user of this host who is none")

    @cached_property
    def _plan_sha256(self) -> bytes:
        return plan_hash(self.plan)

    @cached_property
    def users(self) -> int:
        """Number of users in the population."""
        return len(self.population)

    @cached_property
    def sha256(self) -> bytes:
        """Hash of the population, which plans of sums have to name."""
        return self.population.hash(self.plan.run_id)

    def knows(self, population_sha256: bytes) -> bool:
        """Whether the population had a hash, at the beginning or with one of its waves."""
        return population_sha256 in self.population.hashes(self.plan.run_id)

    def in_pass(self, pass_number: int) -> Membership:
        """Return the membership in the population of a pass: without the waves that begin later."""
        count = self.population.waves_by(pass_number)
        if count == len(self.population.waves):
            return self
        if count not in self._earlier:
            found = replace(self, population=self.population.first_waves(count), checked=count + 1)
            self._share(found, lambda: (self._at[: found.users], self._device[: found.users]))
            self._earlier[count] = found
        return self._earlier[count]

    @cached_property
    def _earlier(self) -> dict[int, Membership]:
        """Memberships in the population as it was, by the number of waves that it had."""
        return {}

    def extended(self, message: Waves, taken_part: int) -> Membership:
        """Return the membership in the population with more waves, which alone are checked.

        The third party signed each over the hash of what was before it, so that another population than the one that
        this host knows cannot have them.

        Parameters
        ----------
        message : Waves
            The waves that follow those which this host knows; this membership is returned if there are none.
        taken_part : int
            Last pass in whose population the host took part; -1 before the first.

        Raises
        ------
        Declined
            As for the population; when a wave was left out of sums in which this host took part.
        """
        known, users = len(self.population.waves), self.users
        try:
            population = self.population.extended(message)
        except Refusal as refusal:
            raise Declined(refusal.message) from None
        if population is self.population:
            return self
        found = replace(self, population=population, checked=known + 1)
        for wave in population.waves[known:]:
            if wave.from_pass <= taken_part:
                raise Declined(
                    f"users were added to the population from pass {wave.from_pass} on; this host took part in pass "
                    f"{taken_part} without them"
                )
        # What follows from the users before is kept.
        self._share(
            found,
            lambda: (
                np.concatenate([self._at, found._at_from(users)]),
                np.concatenate([self._device, self._numbered(population.devices[users:])]),
            ),
        )
        return found

    # --- users of an outline -----------------------------------------------------------------------------------

    def lacks(self, plan: SumPlan) -> bool:
        """Whether this host is to be shown users of a plan's cohort before `covered` can check the plan.

        Raises
        ------
        Declined
            As for `covered`, when the plan has no such cohort.
        """
        if self.population.outline is None:
            return False
        _, cohort = self._cohort_of(plan)
        return not all(map(self._shown.__contains__, cohort.tolist()))

    def show(self, plan: SumPlan, message: CohortUsers) -> None:
        """Take note of the users of a plan's cohort, once their places in the population are proved.

        Raises
        ------
        Declined
            As for `lacks`; when the proofs do not hold; when one user comes twice; when users of this host stand under
            another connection, or others under its own.
        """
        here, cohort = self._cohort_of(plan)
        positions = cohort.tolist()
        try:
            participants, devices = here.population.check_shown(positions, message)
        except (Refusal, VerificationError) as error:
            raise Declined(f"the server does not show who is in the cohort: {error.message}") from error
        if len(set(participants)) != len(participants):
            raise Declined("a user is in the population twice")
        self._check_own(self._own_of(participants), self._numbered(devices))
        self._shown.update(zip(positions, zip(participants, devices, strict=True), strict=True))

    def completed(self, message: PopulationMessage) -> Membership:
        """Return the membership in the same population with its users in the place of an outline.

        Parameters
        ----------
        message : Population
            With users; may have further waves, which are left out.

        Raises
        ------
        Declined
            As for the population; when it is another one.
        """
        try:
            found = Population.from_wire(message)
        except Refusal as refusal:
            raise Declined(refusal.message) from None
        known = len(self.population.waves)
        if found.outline is None and len(found.waves) >= known:
            found = found.first_waves(known)
        if found.outline is not None or found.beacons != self.population.beacons:
            raise Declined("the population is not the one of which this host has an outline")
        return Membership(self.plan, self.device, found, self.participants, self.directory_key)

    @cached_property
    def _shown(self) -> dict[int, tuple[bytes, str]]:
        """Id and device of users of an outline, by position, which memberships before and after waves share."""
        return {}

    @cached_property
    def _own(self) -> dict[bytes, int]:
        """Position at the host of each of its users."""
        return {participant: at for at, participant in enumerate(self.participants)}

    def _own_of(self, participants: Iterable[bytes]) -> NDArray[np.int32]:
        """Return the position at the host of each user; -1 for those of others."""
        return np.array([self._own.get(one, -1) for one in participants], np.int32)

    # -----------------------------------------------------------------------------------------------------------

    @cached_property
    def _at(self) -> NDArray[np.int32]:
        """Position at the host of each user of the population, by position there; -1 for those of others."""
        return self._at_from(0)

    def _at_from(self, start: int) -> NDArray[np.int32]:
        """Return `_at` for the users from a position on."""
        own = _as_array(self.participants)
        order = np.argsort(own)
        own, found = own[order], np.full(len(self.population) - start, -1, np.int32)
        for first in range(0, len(found) if len(own) else 0, _AT_ONCE):
            at = start + first
            asked = _as_array(self.population.participants[at : at + _AT_ONCE])
            place = np.minimum(np.searchsorted(own, asked), len(own) - 1)
            same = own[place] == asked
            found[first : first + len(asked)][same] = order[place[same]]
        return found

    def _share(
        self, found: Membership, arrays: Callable[[], tuple[NDArray[np.int32], NDArray[np.int32]]]
    ) -> None:
        """Give another membership what this one has computed; ``arrays`` returns its `_at` and `_device`."""
        if self.population.outline is None:
            at, device = arrays()
            found.__dict__.update(_number=self._number, _at=at, _device=device)
        else:
            found.__dict__.update(_number=self._number, _shown=self._shown, _own=self._own)

    @cached_property
    def _number(self) -> dict[str, int]:
        """A number for each device, which memberships in the same population before and after waves share."""
        return {}

    @cached_property
    def _device(self) -> NDArray[np.int32]:
        """A number for the device of each user of the population, by position: equal for users of one device."""
        return self._numbered(self.population.devices)

    def _numbered(self, devices: Sequence[str]) -> NDArray[np.int32]:
        number = self._number
        return np.fromiter((number.setdefault(one, len(number)) for one in devices), np.int32, len(devices))

    @cached_property
    def _rule(self) -> policy.CohortRule:
        return population_rule(self.plan, self.population)

    def _groups(self, pass_number: int) -> policy.Parts:
        return policy.groups(self._rule, self.users, self._rule.drawing(pass_number))

    def _group_of(self, pass_number: int) -> NDArray[np.int64]:
        return policy.group_of(self._rule, self.users, self._rule.drawing(pass_number))

    def cohort(self, purpose: Purpose, pass_number: int, part: int) -> NDArray[np.int64]:
        """Return a cohort by the plan's rule, as ascending positions.

        Raises
        ------
        Declined
            When the rule has no such cohort.
        """
        rounds, first = self.plan.rounds, 0
        parts: policy.Parts
        if purpose is Purpose.SUPPORTS:
            # Only once for each drawing: a later sum over the same group would show what has changed since.
            waves = self.population.waves
            came = bool(waves) and waves[-1].from_pass == pass_number
            parts = self._groups(pass_number) if came or self._rule.redrawn(pass_number) else ()
            first = policy.first_asked(self._rule)
        elif purpose is Purpose.EVALUATE and not rounds.party_per_user:
            parts = (np.arange(self.users),)
        elif purpose is Purpose.EVALUATE:
            parts = policy.everybody(self._rule, self.users, pass_number)
        else:
            parts = policy.cohorts(self._rule, self.users, pass_number)
        last = rounds.passes if purpose is Purpose.EVALUATE else rounds.passes - 1
        if not (first <= part < len(parts) and 0 <= pass_number <= last):
            raise Declined(f"the plan's rule has no part {part} of pass {pass_number} ({purpose.value})")
        if (
            purpose is Purpose.EVALUATE
            and rounds.HasField("privacy")
            and not evaluated_in(rounds, pass_number)
        ):
            raise Declined(
                f"the plan has no evaluation after {pass_number} passes, and each costs users privacy"
            )
        return parts[part]

    def covered(self, plan: SumPlan) -> dict[int, Sequence[User]]:
        """Check a sum's plan; return the host's members in it, by position in the plan, and the users that each covers.

        Parameters
        ----------
        plan : SumPlan

        Raises
        ------
        Declined
            When the plan differs from what the run's plan and population prescribe: another run, population, secure
            sum, cohort or floor, or any member that is another one, or of another device.
        """
        run, rounds, purpose = self.plan, self.plan.rounds, purpose_of(plan)
        here, cohort = self._cohort_of(plan)
        covered = here._covered(plan, cohort)
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
        noise = policy.noise_floor(rounds, run.secure_sum, purpose)
        if plan.noise_floor != noise:
            raise Declined(
                f"a floor of {plan.noise_floor} users for noise that is added up; by the plan's rule it is {noise}"
            )
        return covered

    def _cohort_of(self, plan: SumPlan) -> tuple[Membership, NDArray[np.int64]]:
        """Return the membership in the population of a sum, and the positions of its cohort."""
        check_run(plan, self.plan, self._plan_sha256)
        purpose = purpose_of(plan)
        here = self.in_pass(policy.population_pass(purpose, plan.pass_number))
        if (plan.population_sha256, plan.beacon) != (here.sha256, here.population.drawn(self.plan)):
            raise Declined("the sum is over another population than the one that was fixed for the run")
        cohort = here.cohort(purpose, plan.pass_number, plan.part)
        if plan.users != len(cohort):
            raise Declined(f"a cohort of {plan.users} users; by the plan's rule it has {len(cohort)}")
        return here, cohort

    def _covered(self, plan: SumPlan, cohort: NDArray[np.int64]) -> dict[int, Sequence[User]]:
        """Require that a plan's members are those of a cohort; return the host's, and the users that each covers."""
        alone = self.plan.rounds.party_per_user
        devices, index, ids, names = self._people(cohort)
        first, users = np.arange(len(cohort)), np.ones(len(cohort), np.int64)
        if not alone:
            _, first, users = np.unique(devices, return_index=True, return_counts=True)
            order = np.argsort(first)
            first, users = first[order], users[order]
        at = cohort[first].tolist()
        expected = [ids[n] for n in at], [names[n] for n in at], users.tolist()
        if len(plan.members) != len(at):
            raise Declined(
                f"{len(plan.members)} members for a cohort of {len(cohort)} users; by the plan's rule "
                f"it has {len(at)}"
            )
        told = tuple([getattr(one, fact) for one in plan.members] for fact in _FACTS)
        if told != expected:
            pairs = zip(zip(*told, strict=True), zip(*expected, strict=True), strict=True)
            number = next(n for n, (one, other) in enumerate(pairs) if one != other)
            raise Declined(f"member {number} of the sum is not the one whom the run's population has there")
        own = np.flatnonzero(index >= 0)
        group = self._group_of(plan.pass_number)
        here = HostUsers(index[own], group[cohort[own]].astype(np.int32))
        if alone:
            return {number: [user] for number, user in zip(own.tolist(), here, strict=True)}
        return {expected[1].index(self.device): here} if len(here) else {}

    def _people(
        self, cohort: NDArray[np.int64]
    ) -> tuple[
        NDArray[np.int32],
        NDArray[np.int32],
        Sequence[bytes] | Mapping[int, bytes],
        Sequence[str] | Mapping[int, str],
    ]:
        """Return `_device` and `_at` of a cohort's users, and ids and devices by position in the population."""
        population = self.population
        if population.outline is None:
            return self._device[cohort], self._at[cohort], population.participants, population.devices
        positions = cohort.tolist()
        shown = {position: self._shown[position] for position in positions}
        ids = {position: one for position, (one, _) in shown.items()}
        names = {position: one for position, (_, one) in shown.items()}
        return self._numbered(list(names.values())), self._own_of(ids.values()), ids, names


def _as_array(participants: Sequence[bytes]) -> NDArray[np.bytes_]:
    """Return ids, each of 32 bytes, as an array that can be sorted."""
    return np.frombuffer(Ids.of(participants).packed, f"S{ID_BYTES}")
