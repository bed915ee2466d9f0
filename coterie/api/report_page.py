"""What Python shows of a run's report: its page, its figures as a frame, and evaluations while it trains."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.api.frames import records_frame
from coterie.telemetry.report import Report
from coterie.telemetry.report_facts import row_label
from coterie.wire.v1 import operator_pb2 as wire

if TYPE_CHECKING:
    import polars as pl

__all__ = ["ReportPage", "metrics_frame", "tell"]


class ReportPage:
    """The report of a run; a notebook shows its page.

    Attributes
    ----------
    content : Report
        The content of ``report.json``.
    path : Path
        The page, ``report.html``.
    """

    def __init__(self, content: Report, path: Path) -> None:
        self.content = content
        self.path = path

    def __repr__(self) -> str:
        return f"report of {self.content.run_id}: {self.path}"

    def _repr_html_(self) -> str:
        # A frame of its own, without scripts: the page's style and a notebook's leave each other alone.
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe sandbox="" srcdoc="{page}" style="width:100%;height:40em;border:0"></iframe>'


def metrics_frame(report: Report) -> pl.DataFrame:
    """Return the figures of a run and of each baseline beside it; with several seeds, means and deviations."""
    rows = {report.label: report.metrics}
    rows |= {row_label(report, name): row.metrics for name, row in report.reference.items()}
    return records_frame((_figures(name, metrics) for name, metrics in rows.items()), ("row",))


def tell(seed: int, metrics: wire.MetricsEvent, shown: Sequence[str]) -> None:
    """Print an evaluation of a run on standard error."""
    means = dict(zip(metrics.names, metrics.means, strict=True))
    figures = ", ".join(f"{name} {means[name]:.4f}" for name in shown if name in means)
    print(f"seed {seed}, pass {metrics.epoch}: {figures}", file=sys.stderr)


def _figures(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"row": name, **{key: one.mean for key, one in metrics.items()}}
    return found | {f"{key} std": one.std for key, one in metrics.items() if one.std is not None}
