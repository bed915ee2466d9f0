"""The result of a run for the terminal: one table of metrics, and one-line facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from coterie.telemetry.experiment import EXPERIMENT
from coterie.telemetry.quantities import count, duration, measure, percent, volume
from coterie.telemetry.report import AttackFigures, Report
from coterie.telemetry.report_facts import (
    Metric,
    ResultRow,
    Score,
    costs,
    headline,
    leading_metric,
    restarted_note,
    rows,
    run_label,
    summary,
)
from coterie.telemetry.report_rounds import protection_lines, rounds_lines
from coterie.telemetry.report_services import services_lines

__all__ = ["tables"]


def tables(report: Report, *, plain: bool = False) -> list[RenderableType]:
    """Return the renderables that the command line prints at the end of a run.

    Parameters
    ----------
    report : Report
        The report, of which every part is optional.
    plain : bool
        Whether the output has no bold type, as that of a pipe: the best of each column is marked with a star then.

    Returns
    -------
    list of rich renderables
        What came of the run, in a sentence or two; the result table (systems by metrics, mean and standard deviation
        over the seeds, the best marked) if there are results; then one line for each known fact.
    """
    found: list[RenderableType] = [Text(sentence, style="bold") for sentence in summary(report)]
    if found:
        found.append("")
    columns = headline(report)
    if lines := rows(report, columns):
        found.append(_results(report, columns, lines, plain=plain))
    found += [_fact(name, value) for name, value in _facts(report)]
    return found


def _results(report: Report, columns: Sequence[Metric], lines: Sequence[ResultRow], *, plain: bool) -> Table:
    # Text, never markup: brackets in names from files and configuration must mean nothing.
    table = Table(
        title=Text(_title(report), style="bold"),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    table.add_column("System", no_wrap=True)
    for column in columns:
        heading = Text(column.label)
        if column.population:
            heading.append(f"\n{column.population}", style="dim")
        elif column.lower_is_better:
            heading.append("\nlower is better", style="dim")
        table.add_column(heading, justify="right")
    for row in lines:
        table.add_row(
            Text(row.label, style="bold" if row.is_run else ""),
            *(_cell(score, plain=plain) for score in row.scores),
        )
    notes = []
    if len(report.seeds) > 1:
        notes.append(f"Mean ± standard deviation over {len(report.seeds)} seeds.")
    if len(lines) > 1:
        notes.append("Best with a star." if plain else "Best in bold.")
    table.caption = Text(" ".join(notes))
    return table


def _cell(score: Score, *, plain: bool) -> Text:
    star = "* " if plain and score.best else ""
    cell = Text(star + score.mean_text, style="bold" if score.best else "")
    if score.spread_text:
        # On a line below the mean, so that five metrics fit in 80 columns.
        cell.append(f"\n{score.spread_text}", style="dim not bold")
    return cell


def _title(report: Report) -> str:
    name = report.dataset.name
    system = run_label(report, "Results")
    return f"{system} on {name}" if name else system


def _facts(report: Report) -> list[tuple[str, str]]:
    total = costs(report)
    found: list[tuple[str, str]] = []
    if report.experiment:
        found.append(("Experiment", EXPERIMENT))
    found += [*protection_lines(report), *rounds_lines(report), *services_lines(report)]
    if total.bytes_total is not None:
        sent = f"{volume(total.bytes_total)} in {count(total.calls)} calls"
        found.append(
            ("Messages", f"{sent}, {count(total.errors)} refused or repeated" if total.errors else sent)
        )
    if total.cpu_seconds is not None:
        services = len(report.cpu_seconds)
        words = f"{duration(total.cpu_seconds)} over {count(services)} services{restarted_note(report)}"
        found.append(("CPU time", words))
    if total.security_share is not None:
        found.append(("Security", f"{percent(total.security_share)} of the CPU time"))
        if shares := total.protection_shares:
            parts = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
            found.append(("  of it", parts))
    if refused := report.staleness.refused:
        found.append(("Stale gradients", f"{count(refused)} refused"))
    found += _attack_facts(report.attacks)
    if report.beside is not None:
        found += _beside_facts(report)
    if report.events:
        found.append(("Events", count(len(report.events))))
    if report.duration_s is not None:
        found.append(("Duration", duration(report.duration_s)))
    if report.taken_up:
        found.append(
            ("Taken up", f"after an interruption, at {', '.join(report.taken_up)}; costs count from then")
        )
    return found


def _beside_facts(report: Report) -> list[tuple[str, str]]:
    """Return lines on the second federation of a run: what it is, its quality and its attacks."""
    second = report.beside
    if second is None:
        return []
    leading = leading_metric(report)
    quality = second.metrics.get(leading.key) if leading is not None else None
    said = [second.label] if second.label else []
    said += [f"({', '.join(second.changes)})"]
    if leading is not None and quality is not None:
        said += [f"{leading.full_label} {measure(quality)}"]
    if second.failed:
        said += [f"failed: {second.failed}"]
    return [
        ("Beside it", " ".join(said)),
        *((f"  {name}", words) for name, words in _attack_facts(second.attacks)),
    ]


def _attack_facts(attacks: Mapping[str, AttackFigures]) -> list[tuple[str, str]]:
    return [
        (f"Attack, {name.replace('_', ' ')}", ", ".join(words))
        for name, known in attacks.items()
        if (words := known.words())
    ]


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"{name}: ", "dim"), value)
