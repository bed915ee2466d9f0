"""Keys of DRIFT in the report of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, SerializeAsAny

from coterie.telemetry.quantities import count, percent
from coterie.telemetry.report import AttackFigures, FurtherRun, Number, Part, Report

__all__ = ["DriftAttack", "DriftReport", "LostExchanges", "ThetaRun"]


class ThetaRun(FurtherRun):
    """A federation trained beside the run with another value of Theta."""

    setting: ClassVar[str] = "theta"
    symbol: ClassVar[str] = "Theta"
    title: ClassVar[str] = "Effect of the threshold Theta"
    lead: ClassVar[str] = "Theta is the number of saved blocks at which an owner asks for an update."

    theta: Number = Field(None, description="Value of `theta`.")


class DriftAttack(AttackFigures):
    """Figures of one attack on a run of DRIFT.

    `requested_rows` guesses by the rows that requests name or windows touch, `gradient_sign` by the gradients.  A flag
    says whether a user liked an item.
    """

    exchanges: Number = Field(None, description="`requested_rows`: number of requests that named a user.")
    gradients: Number = Field(None, description="`gradient_sign`: number of gradients that could be solved.")
    unsolved: Number = Field(
        None, description="`gradient_sign`: number of gradients that could not be solved."
    )
    attributed: Number = Field(
        None,
        description="`gradient_sign`: number of pairs of which the attacker is sure; `precision` is the share of them "
        "that are true.",
    )
    coverage: Number = Field(
        None, description="`gradient_sign`: share of all true pairs that are attributed."
    )
    flag_accuracy: Number = Field(None, description="Share of right flags over the attributed pairs.")
    majority_accuracy: Number = Field(None, description="The same for guessing the flag that most have.")
    item_majority_accuracy: Number = Field(
        None, description="The same for guessing the flag that most have for the item."
    )
    flag_accuracy_all: Number = Field(None, description="As `flag_accuracy`, over all true pairs.")
    majority_accuracy_all: Number = Field(None, description="As `majority_accuracy`, over all true pairs.")
    item_majority_accuracy_all: Number = Field(
        None, description="As `item_majority_accuracy`, over all true pairs."
    )
    windows: Number = Field(None, description="Shielded form: number of windows.")
    rows: Number = Field(None, description="Shielded form: number of released rows that were examined.")
    traced: Number = Field(
        None, description="Shielded form: share of these rows that lie in a single user's direction."
    )

    def words(self) -> list[str]:
        """Return the figures that a line in the terminal shows."""
        flags = self.flag_accuracy
        return [*super().words(), *([] if flags is None else [f"{percent(flags)} of the signs right"])]


class LostExchanges(Part):
    """Exchanges of a data owner whose updates a COS restored from a backup has no more."""

    owner: Number = Field(None, description="Slot of the owner.")
    first: Number = Field(
        None, description="Number of the first lost exchange; each has up to `drift.local_updates` updates."
    )
    last: Number = Field(None, description="Number of the last one.")


class DriftReport(Report):
    """The report of a run of DRIFT."""

    attacks: Mapping[str, SerializeAsAny[DriftAttack]] = Field(
        default_factory=dict,
        description="Figures by [attack](#attacks); only with `federation.attacks`.",
    )
    visits: Number = Field(None, description="Shielded form: number of visits of users to data owners.")
    held_rows: Number = Field(
        None,
        description="Shielded form: number of rows that never left their owner, because fewer than `k_min` users were "
        "behind them.",
    )
    lost_exchanges: tuple[LostExchanges, ...] = Field(
        (),
        description="Published form: exchanges of data owners whose updates a COS restored from a backup has lost, as "
        "the owners say; blocks of a pass in progress were trained again.",
    )
    theta_study: tuple[ThetaRun, ...] = Field(
        (), description="A federation for each value of theta; only with `drift.compare_theta`."
    )

    def facts(self) -> list[tuple[str, str]]:
        """Return the visits of the shielded form."""
        if self.visits is None:
            return []
        text = f"{count(self.visits)} of users to owners; {count(self.held_rows)} rows never left their owner"
        return [("Visits", f"{text}: too few users behind them")]
