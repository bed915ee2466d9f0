"""Keys of FedNCF in the report of a run."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, SerializeAsAny

from coterie.telemetry.report import AttackFigures, Number, Report

__all__ = ["FedNcfAttack", "FedNcfReport"]


class FedNcfAttack(AttackFigures):
    """Figures of one attack on a run of FedNCF."""

    updates: Number = Field(None, description="`inversion`: number of updates that were attacked.")
    exact: Number = Field(
        None,
        description="`inversion`: share of the updates of which all items of some participant were named, and no other "
        "as its own.",
    )


class FedNcfReport(Report):
    """The report of a run of FedNCF."""

    attacks: Mapping[str, SerializeAsAny[FedNcfAttack]] = Field(
        default_factory=dict,
        description="Figures by [attack](#attacks); only with `federation.attacks`.",
    )
