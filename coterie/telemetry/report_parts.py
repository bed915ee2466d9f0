"""Building blocks of a report's HTML page: sections with figures, facts and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coterie.telemetry import plots

__all__ = ["Fact", "ReportTable", "Section"]


@dataclass(frozen=True)
class ReportTable:
    """A table of texts, whose first column names the rows."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Fact:
    """A single figure with its name and a note, such as the figure that it is compared with."""

    name: str
    value: str
    note: str = ""


@dataclass
class Section:
    """A section of the page; it is false, and not shown, when it is empty."""

    name: str
    short: str
    title: str
    lead: str = ""
    figures: list[plots.Plot] = field(default_factory=list)
    more_figures: list[plots.Plot] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    tables: list[ReportTable] = field(default_factory=list)
    folded: list[ReportTable] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.figures or self.facts or self.tables or self.folded)
