"""Construction of a run's id and plan, which every participant receives, from the settings of the run."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import secrets
from collections.abc import Sequence

from coterie.config.run import RoundsSettings, RunSettings
from coterie.crypto.explicit import encode
from coterie.rounds.privacy import privacy_plan
from coterie.systems.description import Driver
from coterie.wire.v1.orchestrator_pb2 import (
    Aggregation,
    CohortKind,
    Holding,
    OptimiserPlan,
    RoundsPlan,
    RunPlan,
)

__all__ = ["new_run_id", "rounds_plan", "run_plan"]

_KINDS = {
    "groups": CohortKind.COHORT_KIND_GROUPS,
    "random": CohortKind.COHORT_KIND_RANDOM,
    "all": CohortKind.COHORT_KIND_ALL,
    "independent": CohortKind.COHORT_KIND_INDEPENDENT,
}


def new_run_id(name: str) -> str:
    """Return a new run id: a DNS label from a name, the time in UTC and four random digits."""
    return f"{name}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def rounds_plan(settings: RoundsSettings, seed: int, *, sparse: bool = False) -> RoundsPlan:
    """Return the part of a run's plan about its rounds.

    In an experiment the beacon is SHA-256 of a label and the seed, so that a run can be repeated; it does not keep an
    operator from trying seeds for convenient groups.  Otherwise the third party draws and signs the beacon.
    """
    terms = settings.aggregation.terms
    # Absent where contributions are added: the plan is then that of releases that knew nothing else.
    added = terms.adds and not terms.norm_bound
    seeded = hashlib.sha256(encode("experiment-beacon", seed)).digest()
    optimiser = settings.server_optimiser.optimiser
    planned = RoundsPlan(
        cohorts=_KINDS[settings.cohorts],
        cohort=settings.cohort,
        group=settings.group,
        beacon=seeded if settings.experiment else b"",
        redraw=settings.redraw,
        party_per_user=settings.party_per_user,
        min_cohort=settings.min_cohort,
        min_sum=settings.min_sum,
        experiment=settings.experiment,
        passes=settings.passes,
        evaluate_every=settings.evaluate_every,
        patience=settings.patience,
        choose_by=settings.choose_by,
        step_timeout_ms=round(settings.step_timeout_s * 1000),
        sparse=sparse,
        most_users=settings.most_users,
        channel_rounds=settings.channel_rounds,
        server_optimiser=None if optimiser is None else OptimiserPlan(**dataclasses.asdict(optimiser)),
        aggregation=None
        if added
        else Aggregation(rule=terms.rule, byzantine=terms.byzantine, norm_bound=terms.norm_bound),
    )
    private = privacy_plan(settings.privacy.terms, planned)
    if private is not None:
        planned.privacy.CopyFrom(private)
    return planned


def run_plan(
    settings: RunSettings,
    *,
    run_id: str,
    seed: int,
    attributes: Sequence[str] = (),
    holdings: Sequence[Holding] = (),
) -> RunPlan:
    """Return the plan of a run, as every participant receives it.

    Parameters
    ----------
    settings : RunSettings
    run_id : str
    seed : int
    attributes : sequence of str
        Names of the users' attributes (`Feed.attribute_names`).
    holdings : sequence of Holding
        Which data owner holds which items (`Feed.holdings`).  Without them, parties take the server's word for that.
    """
    plan = RunPlan(
        run_id=run_id,
        system=settings.system,
        form=settings.form,
        secure_sum=settings.secure_sum,
        seed=seed,
        min_users=settings.federation.min_users,
        holdings=holdings,
        oldest_protocol=settings.federation.oldest_protocol,
    )
    settings.own.fill(plan, settings, attributes)
    if settings.driver is not Driver.ASYNCHRONOUS:
        plan.rounds.CopyFrom(rounds_plan(settings.rounds, seed, sparse=settings.sparse))
    return plan
