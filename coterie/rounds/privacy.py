"""Differential privacy of a run: its terms from the plan, the sums in which users took part, and what they cost.

Each sum costs a user the same (`Privacy.cost`).  A user is in at most one sum of each place, and takes part there
once, so that the plan bounds what a run may cost.  Sums are composed over the whole run: no amplification by sampling
is counted, because the server knows every cohort.  Sums of items and of metrics count like those of training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.rounds.conductor import Conductor
from coterie.rounds.training import Purpose, Training
from coterie.secure_sum.privacy import EXACT, NoiseMechanism, NoisePlace, Privacy, check_privacy
from coterie.wire.v1.orchestrator_pb2 import CohortKind, PrivacyPlan, RoundsPlan, RunPlan

__all__ = [
    "SpentPrivacy",
    "Tally",
    "after_sum",
    "check_plan",
    "epsilon",
    "evaluated_in",
    "known",
    "most_sums",
    "privacy_of",
    "privacy_plan",
    "spent",
    "with_taken",
]

Tally = tuple[tuple[int, int, int, int], ...]
"""Sums of each user in the order of the population: so many users in a row, with so many sums of `_ORDER` each."""

_ORDER = (Purpose.SUPPORTS, Purpose.EVALUATE, Purpose.TRAIN)

_LARGEST_PURE = 30.0
"""Epsilon of one sum from which composition by a curve of privacy loss is no better than a sum of epsilons."""


def privacy_of(rounds: RoundsPlan) -> Privacy:
    """Return the terms of a run's plan; `EXACT` where it has none."""
    if not rounds.HasField("privacy"):
        return EXACT
    one = rounds.privacy
    place: NoisePlace = one.place  # type: ignore[assignment]
    mechanism: NoiseMechanism = one.mechanism  # type: ignore[assignment]
    return Privacy(
        place,
        mechanism,
        one.noise,
        one.clip,
        one.most_items,
        one.most_metrics,
        one.delta,
        one.colluders,
        one.per_value,
    )


def privacy_plan(terms: Privacy, rounds: RoundsPlan) -> PrivacyPlan | None:
    """Return terms as a plan of rounds carries them, with the most that the run may cost a user; None without noise."""
    if not terms.on:
        return None
    return PrivacyPlan(
        place=terms.place,
        mechanism=terms.mechanism,
        noise=terms.noise,
        clip=terms.clip,
        most_items=terms.most_items,
        most_metrics=terms.most_metrics,
        delta=terms.delta,
        colluders=terms.colluders,
        per_value=terms.per_value,
        epsilon=epsilon(terms, most_sums(rounds)),
    )


def check_plan(plan: RunPlan) -> None:
    """Check the terms of a run's plan, and that its epsilon covers all its sums.

    Raises
    ------
    ConfigError
        As `check_privacy`; a plan that states less epsilon than its sums may cost, or whose users may be in more sums.
    """
    rounds = plan.rounds
    if not rounds.HasField("privacy"):
        return
    terms = privacy_of(rounds)
    if not terms.on:
        raise ConfigError("rounds.privacy.place 'none' in a plan; expected no rounds.privacy")
    check_privacy(terms, plan.secure_sum)
    if rounds.cohorts == CohortKind.COHORT_KIND_INDEPENDENT:
        raise ConfigError(
            "rounds.privacy with cohorts drawn independently: a user may be in any number of them; expected others"
        )
    if rounds.sparse:
        raise ConfigError(
            "rounds.privacy with encryption.sparse: who sends which places has no noise; expected dense sums"
        )
    if terms.place == "distributed" and rounds.min_sum <= terms.colluders:
        raise ConfigError(
            f"rounds.privacy.colluders {terms.colluders} with rounds.min_sum {rounds.min_sum}: nobody's noise would be "
            f"left; expected fewer than {rounds.min_sum}"
        )
    most = epsilon(terms, most_sums(rounds))
    if not rounds.privacy.epsilon >= most * (1 - 1e-6):
        raise ConfigError(
            f"rounds.privacy.epsilon {rounds.privacy.epsilon:g}: the sums of this plan may cost {most:g}; expected "
            f"as much"
        )


def evaluated_in(rounds: RoundsPlan, pass_number: int) -> bool:
    """Return whether a plan has an evaluation after so many passes."""
    return pass_number == rounds.passes or pass_number % max(rounds.evaluate_every, 1) == 0


def most_sums(rounds: RoundsPlan) -> dict[Purpose, int]:
    """Return in how many sums of each purpose a user may be."""
    drawings = 1 + (rounds.passes - 1) // rounds.redraw if rounds.redraw else 1
    every = max(rounds.evaluate_every, 1)
    return {
        Purpose.SUPPORTS: drawings,
        Purpose.EVALUATE: 1 + -(-rounds.passes // every),
        Purpose.TRAIN: rounds.passes,
    }


def epsilon(
    terms: Privacy, sums: Mapping[Purpose, int], values: Mapping[Purpose, int] | None = None
) -> float:
    """Return what a user's sums cost together: epsilon at the delta of the terms.

    Parameters
    ----------
    terms : Privacy
        With noise.
    sums : mapping of Purpose to int
        Number of sums in which the user was.
    values : mapping of Purpose to int, optional
        Length of a sum of each purpose, for terms per value; infinite epsilon for those without it.

    Raises
    ------
    ConfigError
        The package that accounts is not installed.
    """
    if not any(sums.values()):
        return 0.0
    if terms.per_value:
        if values is None:
            return math.inf
        return sum(count * terms.cost(values[purpose]) for purpose, count in sums.items())
    try:
        # Late, because few runs have noise, and this takes long.
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError as error:
        raise ConfigError(
            "rounds.privacy needs the package dp-accounting", hint="pip install dp-accounting"
        ) from error
    count, cost = sum(sums.values()), terms.cost(1)
    if terms.mechanism == "gaussian":
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        renyi = rdp.RdpAccountant(_ORDERS, neighboring_relation=relation)
        renyi.compose(dp_accounting.ZCDpEvent(cost), count)
        return float(renyi.get_epsilon(terms.delta))
    if cost > _LARGEST_PURE:
        return count * cost
    # Every mechanism with so much epsilon is a randomised response of as much, processed further (Kairouz, Oh and
    # Viswanath, 2015).
    lying = dp_accounting.RandomizedResponseDpEvent(2 / (1 + math.exp(cost)), 2)
    loss = pld.PLDAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    loss.compose(lying, count)
    return min(float(loss.get_epsilon(terms.delta)), count * cost)


_ORDERS = (1 + np.logspace(-3, 4, 300)).tolist()
"""Orders of the Renyi divergence; for large epsilons those near 1 matter."""


@dataclass(frozen=True)
class SpentPrivacy:
    """Epsilon that a run has cost its users.

    Parameters
    ----------
    largest, median : float
        Of the user with most sums, and of the user in the middle.
    sums : int
        Sums of the user with most.
    users : int
        Users of the population.
    """

    largest: float
    median: float
    sums: int
    users: int


def spent(terms: Privacy, taken: Tally, values: Mapping[Purpose, int] | None = None) -> SpentPrivacy:
    """Return what a run has cost its users, from the sums in which they took part; ``values`` as for `epsilon`."""
    found = sorted(
        (epsilon(terms, dict(zip(_ORDER, counts, strict=True)), values), sum(counts), users)
        for users, *counts in taken
    )
    users = sum(one[2] for one in found)
    if not users:
        return SpentPrivacy(0.0, 0.0, 0, 0)
    middle = np.searchsorted(np.cumsum([one[2] for one in found]), (users + 1) // 2)
    return SpentPrivacy(found[-1][0], found[int(middle)][0], max(one[1] for one in found), users)


def known(conductor: Conductor, state: Training) -> dict[str, Any] | None:
    """Return what a run has cost its users, as the report has it (`coterie.telemetry.report.PrivacyPart`).

    None where sums are exact.
    """
    rounds = conductor.plan.rounds
    terms = privacy_of(rounds)
    if not terms.on:
        return None
    asked = [purpose for purpose in _ORDER if purpose is not Purpose.SUPPORTS or conductor.side.asks_supports]
    values = {purpose: conductor.side.layout(purpose).size for purpose in asked}
    values.setdefault(Purpose.SUPPORTS, 0)
    found = spent(terms, state.taken, values)
    planned = rounds.privacy.epsilon
    text = (
        f"epsilon {found.largest:.4g} at delta {terms.delta:g} for the user with most sums ({found.sums}), "
        f"{found.median:.4g} for the user in the middle; "
    )
    text += f"the plan allows {planned:.4g}" if math.isfinite(planned) else "the plan sets no bound"
    if terms.per_value:
        text += ". Noise is in proportion to single values, and protects no user as a whole"
    return {
        "place": terms.place,
        "mechanism": terms.mechanism,
        "per_value": terms.per_value,
        "noise": terms.noise,
        "clip": terms.clip,
        "delta": terms.delta,
        "epsilon": found.largest,
        "epsilon_median": found.median,
        "epsilon_planned": planned if math.isfinite(planned) else None,
        "sums": found.sums,
        "text": text,
    }


def after_sum(
    conductor: Conductor, before: Training, after: Training, submitters: Sequence[int] | None
) -> Training:
    """Return the state after a sum with the tally of who took part in it; the same state where sums are exact.

    Parameters
    ----------
    conductor : Conductor
    before, after : Training
        State of training before and after the sum.
    submitters : sequence of int, optional
        Members whose contributions are in the sum; None where it was abandoned.  Then local noise counts for the whole
        cohort, because the server may have its contributions; distributed noise is in no sum that was not formed.
    """
    terms = privacy_of(conductor.plan.rounds)
    if not terms.on or (submitters is None and terms.place != "local"):
        return after
    cohort = conductor.cohort(before)
    users = cohort
    if submitters is not None:
        members = conductor.members(cohort)
        users = np.array([user for member in submitters for user in members[member]], np.int64)
    taken = with_taken(before.taken, before.purpose, users, len(conductor.population))
    return replace(after, taken=taken)


def with_taken(taken: Tally, purpose: Purpose, users: NDArray[np.integer], population: int) -> Tally:
    """Return a tally with one more sum of some users.

    Parameters
    ----------
    taken : Tally
        Empty before the first sum.
    purpose : Purpose
    users : ndarray of int
        Positions in the population.
    population : int
        Number of all users.
    """
    each = np.zeros((population, len(_ORDER)), np.int64)
    if taken:
        each[:] = np.repeat([one[1:] for one in taken], [one[0] for one in taken], axis=0)
    each[users, _ORDER.index(purpose)] += 1
    rows: Sequence[tuple[int, ...]] = list(map(tuple, each.tolist()))
    return tuple((len(list(same)), *row) for row, same in groupby(rows))  # type: ignore[misc]
