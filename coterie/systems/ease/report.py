"""Keys of EASE in the report of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, SerializeAsAny, ValidationError, model_validator

from coterie.rounds.training import Purpose
from coterie.systems.ease.settings import EaseSettings
from coterie.telemetry.quantities import percent
from coterie.telemetry.report import AttackFigures, Number, Report

__all__ = ["EaseAttack", "EaseReport"]

_NOISY = (Purpose.SUPPORTS.value, Purpose.TRAIN.value)
"""Purposes of the sums to which users add noise."""


class EaseAttack(AttackFigures):
    """Figures of one attack on a run of EASE.

    `pairs` knows one item of each user, the one that fewest others have, and ranks all items by how many users have
    them together with it. `singles` reads the histories of items that a single user has; off a sketch it searches for
    the likeliest ones.
    """

    histories: Number = Field(
        None, description="`singles`: share of the users whose whole history is read off the sum."
    )

    def words(self) -> list[str]:
        """Return the figures that a line in the terminal shows."""
        found = super().words()
        return (
            found
            if self.exposed is None
            else [*found, f"whole history of {percent(self.exposed)} of the users"]
        )


class EaseReport(Report):
    """The report of a run of EASE."""

    attacks: Mapping[str, SerializeAsAny[EaseAttack]] = Field(
        default_factory=dict,
        description="Figures by [attack](#attacks); only with `federation.attacks`.",
    )
    epsilon: Number = Field(
        None,
        description="With `ease.noise`: epsilon at `ease.delta` of the two sums together, for the replacement of one "
        "user's history, over the users of the smaller sum. Null without noise, and where no sum was formed.",
    )

    @model_validator(mode="before")
    @classmethod
    def _accounted(cls, given: Any) -> Any:
        """Compute epsilon of a report that is being made, from its settings and rounds."""
        if not isinstance(given, Mapping) or "epsilon" in given:
            return given
        try:
            report = Report.model_validate(dict(given))
            settings = EaseSettings.model_validate(report.settings.get("ease"))
        except ValidationError:
            # A report of another version, whose settings are not known here.
            return given
        items = report.dataset.items
        summed = [one.summed for one in report.rounds if one.purpose in _NOISY and one.summed]
        if not items or not summed:
            return given
        return {**given, "epsilon": settings.epsilon(int(min(summed)), int(items))}

    def facts(self) -> list[tuple[str, str]]:
        """Return the differential privacy of a run with noise."""
        if self.epsilon is None:
            return []
        delta = self.settings["ease"]["delta"]
        return [
            ("Differential privacy", f"epsilon {self.epsilon:.3g} at delta {delta:g}, both sums together")
        ]
