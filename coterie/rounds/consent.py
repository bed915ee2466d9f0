"""The consent of clients and data owners: conditions for taking part, checked against a run's plan and each round's.

A condition that is not met gives an objection in words, which goes on the disclosure receipt of a client, and into the
log of a data owner; nothing is sent then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coterie.rounds.privacy import epsilon, most_sums, privacy_of
from coterie.secure_sum.plan import SumPlan
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan, RunPlan

__all__ = ["Consent", "OwnerConsent"]

_SPARSE = "contributions are sparse, and show the server in which places users have something"


@dataclass(frozen=True)
class Consent:
    """The conditions under which a client takes part in runs and rounds.

    Parameters
    ----------
    systems, secure_sums : tuple of str
        Accepted learning systems and secure sums; empty for any.
    min_cohort : int
        Smallest cohort, in devices (in users with ``experiment``).
    min_sum : int
        Smallest number of users over which a sum may be formed.
    experiment : bool
        Whether floors may count users instead of devices.
    rounds_per_day : int
        Most rounds of a UTC day in which a user takes part; 0 for any number.
    metrics : tuple of str, or None
        Metrics that may leave, inside sums; None for any.
    sparse : bool
        Whether encrypted contributions may leave out ciphertexts that hold only zeros, which shows the server near
        which items a user has something.
    max_epsilon : float
        Most epsilon that a run may cost a user, who then takes part in none without noise; 0 for any.
    """

    systems: tuple[str, ...] = ()
    secure_sums: tuple[str, ...] = ()
    min_cohort: int = 20
    min_sum: int = 20
    experiment: bool = False
    rounds_per_day: int = 0
    metrics: tuple[str, ...] | None = None
    sparse: bool = False
    max_epsilon: float = 0.0

    def objections(self, plan: RunPlan, metrics: Sequence[str] = ()) -> list[str]:
        """Return this client's objections to a run; empty when it takes part.

        Parameters
        ----------
        plan : RunPlan
            As the orchestration server announced it.
        metrics : sequence of str
            Metrics that contributions to the run hold.
        """
        found = _objections(plan, self.systems, self.secure_sums, experiment=self.experiment)
        if not plan.HasField("rounds"):
            return found
        rounds = plan.rounds
        if rounds.min_cohort < self.min_cohort:
            found.append(
                f"the floor of a cohort is {rounds.min_cohort}; accepted is {self.min_cohort} or more"
            )
        if rounds.min_sum < self.min_sum:
            found.append(f"the floor of a sum is {rounds.min_sum}; accepted is {self.min_sum} or more")
        if rounds.sparse and not self.sparse:
            found.append(_SPARSE)
        if self.max_epsilon:
            found += self._costly(rounds)
        if self.metrics is not None:
            outside = sorted(set(metrics) - set(self.metrics))
            if outside:
                found.append(f"metrics that may not leave are asked for: {', '.join(outside)}")
        return found

    def _costly(self, rounds: RoundsPlan) -> list[str]:
        terms = privacy_of(rounds)
        accepted = f"accepted is an epsilon of {self.max_epsilon:g} or less"
        if not terms.on:
            return [f"sums are exact, and cost users privacy without a bound; {accepted}"]
        # Computed here, whatever the plan says.
        most = epsilon(terms, most_sums(rounds))
        if most <= self.max_epsilon:
            return []
        return [f"the run may cost a user an epsilon of {most:.4g} at delta {terms.delta:g}; {accepted}"]

    def objections_to_round(
        self, plan: SumPlan, most_today: int, revoked: Collection[int] = frozenset()
    ) -> list[str]:
        """Return this client's objections to one round of a run that it accepted; empty when it takes part.

        Parameters
        ----------
        plan : SumPlan
        most_today : int
            Rounds of this UTC day in which the busiest of the round's users has taken part.
        revoked : collection of int
            Positions in the plan of members that are revoked: they count for no floor.
        """
        found = []
        there = [one for member, one in enumerate(plan.members) if member not in revoked]
        counted, what = (
            (sum(one.users for one in there), "users")
            if self.experiment
            else (len({one.device for one in there}), "devices")
        )
        if counted < self.min_cohort:
            without = f" without {len(revoked)} members that are revoked" if revoked else ""
            found.append(f"the cohort has {counted} {what}{without}; accepted is {self.min_cohort} or more")
        if plan.min_sum < self.min_sum:
            found.append(f"the floor of the sum is {plan.min_sum} users; accepted is {self.min_sum} or more")
        if plan.sparse_floor and not self.sparse:
            found.append(_SPARSE)
        elif 0 < plan.sparse_floor < self.min_sum:
            found.append(
                f"the floor of a place of the sum is {plan.sparse_floor} users; accepted is {self.min_sum} or more"
            )
        if self.rounds_per_day and most_today >= self.rounds_per_day:
            found.append(f"a user has been in {most_today} rounds today; accepted are {self.rounds_per_day}")
        return found


@dataclass(frozen=True)
class OwnerConsent:
    """The conditions under which data owners take part in runs.

    Parameters
    ----------
    systems, secure_sums : tuple of str
        Accepted learning systems and secure sums; empty for any.
    k_min : int
        Least floor of users behind a row that leaves an owner, in runs where owners hold rows back.
    experiment : bool
        Whether floors of the run may count users instead of devices.
    """

    systems: tuple[str, ...] = ()
    secure_sums: tuple[str, ...] = ()
    k_min: int = 5
    experiment: bool = False

    def objections(self, plan: RunPlan, k_min: int | None = None) -> list[str]:
        """Return these owners' objections to a run; empty when they take part.

        Parameters
        ----------
        plan : RunPlan
            As the orchestration server announced it.
        k_min : int, optional
            The plan's floor of users behind a row that leaves an owner; None where owners hold no rows back.
        """
        found = _objections(plan, self.systems, self.secure_sums, experiment=self.experiment)
        if k_min is not None and k_min < self.k_min:
            found.append(
                f"the floor of users behind a row that leaves an owner is {k_min}; accepted is {self.k_min} or more"
            )
        return found


def _objections(
    plan: RunPlan, systems: Sequence[str], secure_sums: Sequence[str], *, experiment: bool
) -> list[str]:
    found = []
    if systems and plan.system not in systems:
        found.append(f"the system {plan.system!r} is not among those accepted: {', '.join(systems)}")
    if secure_sums and plan.secure_sum not in secure_sums:
        found.append(f"sums are formed {plan.secure_sum!r}; accepted is: {', '.join(secure_sums)}")
    if plan.rounds.experiment and not experiment:
        found.append("floors count users, as in an experiment; accepted are floors that count devices")
    return found
