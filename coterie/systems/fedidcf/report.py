"""Keys of FedIDCF in the report of a run: those of factorisations, and vectors of key users that the server read."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, SerializeAsAny

from coterie.systems.shared.factor_report import FactorAttack, FactorReport
from coterie.telemetry.quantities import percent
from coterie.telemetry.report import Number

__all__ = ["IdcfAttack", "IdcfReport"]


class IdcfAttack(FactorAttack):
    """Figures of one attack on a run of FedIDCF.

    `vectors` reads vectors of key users off contributions and sums that hold one key user's moments.
    """

    vectors: Number = Field(
        None,
        description="`vectors`: share of the users whose vector is read, of all whom the sums cover; "
        "in a sum of several users it is nobody's by name.",
    )
    correlation: Number = Field(
        None,
        description="`vectors`: mean correlation, over those of them who are known by name, of what their vectors "
        "predict with their ratings, both without the means of items and the user's own.",
    )

    def words(self) -> list[str]:
        """Return the figures that a line in the terminal shows."""
        found = super().words()
        if self.vectors is not None:
            found.append(f"vectors of {percent(self.vectors)} of the users read")
        return found


class IdcfReport(FactorReport):
    """The report of a run of FedIDCF."""

    attacks: Mapping[str, SerializeAsAny[IdcfAttack]] = Field(
        default_factory=dict,
        description="Figures by [attack](#attacks); only with `federation.attacks`.",
    )
