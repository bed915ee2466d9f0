"""What the report of a run of FPL says of the share of updates that users send."""

from __future__ import annotations

from coterie.errors import ConfigError
from coterie.systems.fpl.settings import FplSettings
from coterie.telemetry.report import Report

__all__ = ["FplReport"]


class FplReport(Report):
    """The report of a run of FPL."""

    def facts(self) -> list[tuple[str, str]]:
        """Return how users came by the shares of their updates that they send, by the run's settings."""
        try:
            settings = FplSettings.model_validate(self.settings["fpl"])
        except (KeyError, TypeError, ValueError, ConfigError):
            # A report of another release.
            return []
        return [("Share pi", settings.share_in_words)]
