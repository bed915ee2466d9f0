"""The report of a run as one HTML page that needs nothing but itself: no script, no file, no network.

The page is made from ``report.json`` alone, so it can be made again from a stored report.  Everything in it
is escaped; a section that the report does not have is not on the page.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from coterie.telemetry import plots
from coterie.telemetry.accounting import SECURITY
from coterie.telemetry.quantities import (
    ABSENT,
    count,
    duration,
    finite,
    measure,
    percent,
    signed,
    significant,
    volume,
)
from coterie.telemetry.report_facts import (
    Metric,
    Report,
    costs,
    entries,
    epoch_positions,
    flatten,
    leading_metric,
    metric,
    metrics,
    rows,
    section,
    system_label,
)

__all__ = ["render", "write"]

_POPULARITY_TOLERANCE = 0.02
"""An attack within this of the popularity-only attacker's AUC tells no more than popularity does."""
_HISTORY_ROWS = 200
_BARS = 12
_MARKS = 40
"""More events than this are not drawn: their lines would hide the curve."""


@dataclass(frozen=True)
class _Table:
    """A table of texts; the first column heads its rows."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class _Fact:
    name: str
    value: str
    note: str = ""


@dataclass
class _Section:
    """A part of the page; empty ones are not shown."""

    name: str
    short: str
    title: str
    lead: str = ""
    figures: list[plots.Plot] = field(default_factory=list)
    facts: list[_Fact] = field(default_factory=list)
    tables: list[_Table] = field(default_factory=list)
    folded: list[_Table] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.figures or self.facts or self.tables or self.folded)


def render(report: Report) -> str:
    """Return the page.

    Parameters
    ----------
    report : mapping
        The content of ``report.json``.  Every part is optional; null and NaN read as not measured.

    Returns
    -------
    str
        A complete HTML document.

    Raises
    ------
    PreflightError
        When matplotlib or jinja2, the packages of the extra ``report``, are not installed.
    """
    with plots.report_extra():
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

    # Everything is escaped; the only text marked safe is an SVG of ours, whose writer escapes what it is given.
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("coterie.telemetry").joinpath("report.html.j2").read_text(encoding="utf-8")
    sections = [
        _learning(report),
        _traffic(report),
        _work(report),
        _staleness(report),
        _theta(report),
        _events(report),
    ]
    context = {
        "title": _title(report),
        "facts": _heading_facts(report),
        "tiles": _tiles(report),
        "columns": metrics(report),
        "rows": rows(report),
        "seeds": _seeds(report),
        "result_note": _result_note(report),
        "sections": [one for one in sections if one],
        "visibility": _visibility(report),
        "attacks": _attacks(report),
        "about": [table for table in _about(report) if table.rows],
        "svg": Markup,  # only ever given `Plot.svg`
    }
    return environment.from_string(source).render(context).strip() + "\n"


def write(report: Report, path: Path) -> None:
    """Write the page to a file, replacing it only once the new one is whole.

    Raises
    ------
    PreflightError
        When matplotlib or jinja2 is not installed; nothing is written then.
    OSError
        When the file cannot be written.
    """
    page = render(report)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _title(report: Report) -> str:
    parts = system_label(str(report.get("system") or "Federated run"))
    if report.get("form"):
        parts += f", {report['form']} form"
    dataset = section(report, "dataset").get("name")
    return f"{parts}, on {dataset}" if dataset else parts


def _seeds(report: Report) -> list[str]:
    seeds = report.get("seeds")
    return [str(seed) for seed in seeds] if isinstance(seeds, list | tuple) else []


def _heading_facts(report: Report) -> list[_Fact]:
    dataset, seeds = section(report, "dataset"), _seeds(report)
    found = [_Fact("Run", str(report["run_id"]))] if report.get("run_id") else []
    if report.get("started"):
        found.append(_Fact("Started", _moment(str(report["started"]))))
    sizes = [
        f"{count(dataset[name])} {name}"
        for name in ("users", "items", "interactions")
        if finite(dataset.get(name)) is not None
    ]
    if sizes:
        found.append(_Fact("Data", ", ".join(sizes)))
    if report.get("secure_sum"):
        found.append(_Fact("Secure sum", str(report["secure_sum"])))
    if seeds:
        found.append(_Fact("Seed" if len(seeds) == 1 else "Seeds", ", ".join(seeds)))
    if dataset.get("split_sha256"):
        found.append(_Fact("Split, SHA-256", str(dataset["split_sha256"])))
    return found


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    zone = moment.strftime(" %Z") if moment.tzinfo else ""
    return moment.strftime("%-d %B %Y, %H:%M") + zone


def _tiles(report: Report) -> list[_Fact]:
    found, total, leading = [], costs(report), leading_metric(report)
    if leading is not None:
        position = metrics(report).index(leading)
        by_name = {row.name: row.scores[position].mean for row in rows(report)}
        ours, saros = by_name.get(""), by_name.get("saros")
        note = leading.population
        if ours is not None and saros:
            gain = signed(100 * (ours / saros - 1), 1)
            note = f"{gain}% against {system_label('saros')}" + (f" ({note})" if note else "")
        if ours is not None:
            found.append(_Fact(leading.label, measure(ours), note))
    if total.security_share is not None:
        found.append(_Fact("Security", percent(total.security_share), "of all CPU time"))
    if total.bytes_total is not None:
        calls = f"in {count(total.calls)} calls" if total.calls else ""
        found.append(_Fact("Messages", volume(total.bytes_total), calls))
    if total.cpu_seconds is not None:
        services = len(section(report, "cpu_seconds"))
        found.append(_Fact("CPU time", duration(total.cpu_seconds), f"over {services} services"))
    if finite(report.get("duration_s")) is not None:
        found.append(_Fact("Duration", duration(report["duration_s"]), "from start to report"))
    return found


def _result_note(report: Report) -> str:
    random = section(section(report, "reference"), "random")
    for column in metrics(report):
        if column.population == "test items" and column.label.startswith("NDCG"):
            scored = section(random, "metrics").get(column.key)
            mean = finite(scored.get("mean")) if isinstance(scored, Mapping) else finite(scored)
            if mean is not None:
                return (
                    "Over test items only what a user later took up is ranked: a random order already "
                    f"reaches {measure(mean)} there. The ranking of all unseen items is the harder and more "
                    "telling one."
                )
    return ""


# How the run learned


def _learning(report: Report) -> _Section:
    found = _Section("learning", "Learning", "How it learned")
    run = epoch_positions(entries(report, "history"))
    if not run:
        return found
    reference = section(section(report, "reference"), "saros")
    saros = epoch_positions(entries(reference, "history"))
    label, saros_label = system_label(str(report.get("system") or "run")), system_label("saros")
    found.lead = "One point for each evaluation; an epoch is one pass over the blocks."

    for column in (one for one in metrics(report) if not one.is_loss):
        lines = [
            plots.Line(label, *_series(run, column.key), colour="s1", marker=True),
            plots.Line(saros_label, *_series(saros, column.key), colour="s2", style="--", marker=True),
        ]
        lines = [line for line in lines if line.x]
        if not lines:
            continue
        levels = _levels(report, column)
        found.figures.append(
            plots.curves(
                f"curve-{len(found.figures)}",
                f"{column.full_label}, by epoch",
                _ends(lines) + " " + _ends(levels, verb="stays at"),
                [*lines, *levels],
                x_label="Epoch",
                y_label=column.label,
            )
        )
    losses = [
        # One colour for a system, one pattern for each line.
        plots.Line(f"{label}, test", *_series(run, "test_loss"), colour="s1"),
        plots.Line(f"{label}, train", *_series(run, "train_loss"), colour="s1", style=":"),
        plots.Line(f"{saros_label}, test", *_series(saros, "test_loss"), colour="s2", style="--"),
        plots.Line(f"{saros_label}, train", *_series(saros, "train_loss"), colour="s2", style="-."),
    ]
    losses = [line for line in losses if line.x]
    if losses:
        found.figures.append(
            plots.curves(
                "loss",
                "Training and test loss, by epoch",
                _ends(losses),
                losses,
                x_label="Epoch",
                y_label="Loss",
            )
        )
    if (leading := leading_metric(report)) is not None:
        found.figures += _timed(report, leading, label)
    found.folded = [_history(run)]
    return found


def _value(entry: Report, key: str) -> float | None:
    if key == "train_loss":
        return finite(entry.get(key))
    return finite(section(entry, "metrics").get(key))


def _series(placed: Sequence[tuple[float, Report]], key: str) -> tuple[list[float], list[float]]:
    points = [(x, y) for x, y in ((x, _value(entry, key)) for x, entry in placed) if y is not None]
    return [x for x, _ in points], [y for _, y in points]


def _levels(report: Report, column: Metric) -> list[plots.Line]:
    """Return references that do not learn, as levels; three dash patterns tell the usual three apart."""
    position = metrics(report).index(column)
    styles: tuple[plots.Style, ...] = ("-", "-.", ":")
    flat = [
        row
        for row in rows(report)
        if not row.is_run
        and row.scores[position].mean is not None
        and not entries(section(section(report, "reference"), row.name), "history")
    ]
    return [
        plots.Line(row.label, [], [row.scores[position].mean or 0.0], colour="muted", style=styles[n % 3])
        for n, row in enumerate(flat)
    ]


def _ends(lines: Sequence[plots.Line], *, verb: str = "ends at") -> str:
    return "; ".join(f"{line.label} {verb} {measure(line.y[-1])}" for line in lines) + "." if lines else ""


def _timed(report: Report, leading: Metric, label: str) -> list[plots.Plot]:
    history = entries(report, "history")
    timed = [(t, y) for t, y in ((finite(one.get("time_s")), _value(one, leading.key)) for one in history)]
    points = sorted((t, y) for t, y in timed if t is not None and y is not None)
    if not points:
        return []
    steps = _alive(report)
    marks = [t for t in (finite(event.get("time_s")) for event in entries(report, "events")) if t is not None]
    last = max([points[-1][0], *marks, *(line.x[-1] for line in steps)])
    unit, unit_name = (60.0, "minutes") if last > 600 else (1.0, "seconds")
    line = plots.Line(label, [t / unit for t, _ in points], [y for _, y in points], colour="s1", marker=True)
    scaled = [
        # A count holds until the end of what is shown.
        plots.Line(one.label, [x / unit for x in (*one.x, last)], [*one.y, one.y[-1]], one.colour, one.style)
        for one in steps
    ]
    title, said = f"{leading.label} over time", _ends([line])
    step_label = "Alive" if len(steps) > 1 else steps[0].label if steps else ""
    if steps:
        title += " and who took part"
        said += " " + " ".join(
            f"{one.label}: between {count(min(one.y))} and {count(max(one.y))} alive." for one in steps
        )
    return [
        plots.over_time(
            "over-time",
            title,
            said,
            [line],
            scaled,
            x_label=f"Time, {unit_name}",
            y_label=leading.label,
            step_label=step_label,
            marks=[mark / unit for mark in marks] if len(marks) <= _MARKS else [],
        )
    ]


def _alive(report: Report) -> list[plots.Line]:
    """Return owners and hosts alive over time, each only where it changes."""
    timeline = entries(report, "owners_timeline") or entries(report, "history")
    found: list[plots.Line] = []
    colours: tuple[tuple[str, plots.Role, plots.Style], ...] = (("owners", "s3", "-"), ("hosts", "s4", "--"))
    for key, colour, style in colours:
        known = [(finite(one.get("time_s")), finite(one.get(key))) for one in timeline]
        points = sorted((t, n) for t, n in known if t is not None and n is not None)
        if len({n for _, n in points}) > 1:
            found.append(
                plots.Line(key.capitalize(), [t for t, _ in points], [n for _, n in points], colour, style)
            )
    return found


def _history(run: Sequence[tuple[float, Report]]) -> _Table:
    keys = list(dict.fromkeys(key for _, entry in run for key in section(entry, "metrics")))
    every = math.ceil(len(run) / _HISTORY_ROWS)
    shown = [one for n, one in enumerate(reversed(run)) if n % every == 0][::-1]
    return _Table(
        "Every evaluation" if every == 1 else f"One evaluation in {every}, and the last",
        ["Epoch", "Time", "Version", "Owners", "Train loss", *(metric(key).full_label for key in keys)],
        [
            [
                f"{x:.3g}",
                duration(entry.get("time_s")),
                count(entry.get("version")),
                count(entry.get("owners")),
                measure(entry.get("train_loss")),
                *(measure(_value(entry, key)) for key in keys),
            ]
            for x, entry in shown
        ],
    )


# What it cost


def _traffic(report: Report) -> _Section:
    found = _Section("traffic", "Traffic", "What crossed the network")
    records = {name: row for name, row in section(report, "traffic").items() if isinstance(row, Mapping)}
    if not records:
        return found
    found.lead = "Message bytes as counted at the calling side; the framing of HTTP/2 and TLS comes on top."
    sizes = {
        name: (finite(row.get("bytes_out")) or 0.0, finite(row.get("bytes_in")) or 0.0)
        for name, row in records.items()
    }
    order = sorted(sizes, key=lambda name: -sum(sizes[name]))
    shown = {name: sizes[name] for name in order[:_BARS] if sum(sizes[name])}
    if rest := [sizes[name] for name in order[_BARS:]]:
        shown[f"{len(rest)} others"] = (sum(out for out, _ in rest), sum(into for _, into in rest))
    total = costs(report)
    if shown:
        heaviest = next(iter(shown))
        share = sum(shown[heaviest]) / (total.bytes_total or 1)
        found.figures.append(
            plots.stacked_bars(
                "traffic-bytes",
                "Bytes by RPC",
                f"{heaviest} moved most: {volume(sum(shown[heaviest]))}, {percent(share)} of all bytes.",
                list(shown),
                [
                    plots.Bars("sent by callers", [out for out, _ in shown.values()], "s1"),
                    plots.Bars("received by callers", [into for _, into in shown.values()], "s3"),
                ],
                write=volume,
            )
        )
        found.facts = [
            _Fact("All messages", volume(total.bytes_total)),
            _Fact("Sent by callers", volume(total.bytes_out)),
            _Fact("Received by callers", volume(total.bytes_in)),
            _Fact(
                "Calls",
                count(total.calls),
                f"{count(total.errors)} failed" if total.errors else "none failed",
            ),
        ]
        interactions = finite(section(report, "dataset").get("interactions"))
        if interactions and total.bytes_total is not None:
            each = volume(total.bytes_total / interactions)
            found.facts.append(_Fact("For each interaction in the data set", each))
    found.tables = [
        _Table(
            "Calls by RPC",
            [
                "RPC",
                "Calls",
                "Errors",
                "Sent",
                "Received",
                "p50",
                "p99",
                "Server p50",
                "Network p50",
            ],
            [
                [
                    name,
                    count(records[name].get("calls")),
                    count(records[name].get("errors")),
                    volume(records[name].get("bytes_out")),
                    volume(records[name].get("bytes_in")),
                    *(
                        significant(records[name].get(key))
                        for key in ("p50_ms", "p99_ms", "server_p50_ms", "network_p50_ms")
                    ),
                ]
                for name in order
            ],
            note="p50 and p99: half and 99% of the calls took no longer, times in milliseconds. The last two "
            "columns give the median of the server's own time and of the rest: network, queues and encoding.",
        )
    ]
    return found


def _work(report: Report) -> _Section:
    found = _Section("work", "CPU and memory", "Where the work went")
    services = {name: row for name, row in section(report, "cpu_seconds").items() if isinstance(row, Mapping)}
    memory = {name: finite(value) for name, value in section(report, "peak_rss_mb").items()}
    peaks = {name: value for name, value in memory.items() if value is not None}
    total = costs(report)
    activities = _activities(services.values())
    if services:
        found.figures.append(_cpu_plot(services, activities))
    if total.security_share is not None:
        found.facts.append(
            _Fact(
                "Share of CPU time spent on security",
                percent(total.security_share),
                f"{duration(total.security_seconds)} of {duration(total.cpu_seconds)}. Sealing, opening, "
                "key agreement and signatures are counted; TLS runs inside gRPC and cannot be told apart.",
            )
        )
    if peaks:
        highest = max(peaks, key=lambda name: peaks[name])
        found.figures.append(
            plots.stacked_bars(
                "memory",
                "Peak memory by service",
                f"{highest} took most: {_mebibytes(peaks[highest])}.",
                list(peaks),
                [plots.Bars("peak", list(peaks.values()), "s6")],
                write=_mebibytes,
            )
        )
    if services or peaks:
        names = list(dict.fromkeys([*services, *peaks]))
        found.tables.append(
            _Table(
                "By service",
                ["Service", "CPU time", "Security", "Share of security", "Peak memory"],
                [
                    [
                        name,
                        duration(services.get(name, {}).get("total")),
                        duration(services.get(name, {}).get("security")),
                        percent(_share(services.get(name, {}))),
                        _mebibytes(peaks.get(name)),
                    ]
                    for name in names
                ],
            )
        )
    if activities:
        found.tables.append(
            _Table(
                "By activity, over all services",
                ["Activity", "CPU time", "Share of all", "Protects data"],
                [
                    [
                        name,
                        duration(seconds),
                        percent(seconds / total.cpu_seconds if total.cpu_seconds else None),
                        "yes" if name in SECURITY else "no",
                    ]
                    for name, seconds in activities.items()
                ],
            )
        )
    return found


def _activities(services: Iterable[Report]) -> dict[str, float]:
    """Return seconds by activity over all services, the longest first."""
    found: dict[str, float] = {}
    for row in services:
        for name, value in section(row, "activities").items():
            found[name] = found.get(name, 0.0) + (finite(value) or 0.0)
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _cpu_plot(services: Mapping[str, Report], activities: Mapping[str, float]) -> plots.Plot:
    """Stack security, the five longest other activities, process start and what no activity claims."""
    colours: tuple[plots.Role, ...] = ("s1", "s3", "s2", "s4", "s5")
    named = [name for name in activities if name not in SECURITY and activities[name] > 0][: len(colours)]
    security = [finite(row.get("security")) or 0.0 for row in services.values()]
    start = [finite(row.get("start")) or 0.0 for row in services.values()]
    parts = [plots.Bars("security", security, "alert")]
    for name, colour in zip(named, colours, strict=False):
        values = [finite(section(row, "activities").get(name)) or 0.0 for row in services.values()]
        parts.append(plots.Bars(name, values, colour))
    if any(start):
        parts.append(plots.Bars("process start", start, "s6"))
    claimed = [sum(part.values[n] for part in parts) for n in range(len(services))]
    totals = [finite(row.get("total")) or 0.0 for row in services.values()]
    rest = [max(0.0, total - known) for total, known in zip(totals, claimed, strict=True)]
    parts.append(plots.Bars("everything else", rest, "rule"))
    longest = max(zip(totals, services, strict=True))
    return plots.stacked_bars(
        "cpu",
        "CPU time by service and activity",
        f"{longest[1]} worked longest: {duration(longest[0])}.",
        list(services),
        [part for part in parts if any(part.values)],
        write=duration,
    )


def _share(row: Report) -> float | None:
    total, security = finite(row.get("total")), finite(row.get("security"))
    return security / total if total and security is not None else None


def _mebibytes(value: object) -> str:
    number = finite(value)
    if number is None:
        return ABSENT
    return f"{significant(number / 1024)} GiB" if number >= 1000 else f"{significant(number)} MiB"


def _staleness(report: Report) -> _Section:
    found = _Section("staleness", "Staleness", "How old the gradients were")
    record = section(report, "staleness")
    ages = {
        age: amount
        for age, amount in ((_whole(age), finite(n)) for age, n in section(record, "histogram").items())
        if age is not None and amount
    }
    limit, refused = finite(record.get("max_staleness")), finite(record.get("refused"))
    if not ages and refused is None:
        return found
    found.lead = (
        "Owners work on rows that they fetched some versions ago. The age of a gradient is the number of "
        "versions that the model moved on in the meantime."
    )
    accepted = sum(ages.values())
    if ages:
        edges, counts = _bins(ages)
        median, late = _quantile(ages, 0.5), _quantile(ages, 0.99)
        found.figures.append(
            plots.histogram(
                "ages",
                "Age of applied gradients",
                f"Half of the gradients were at most {count(median)} versions old, 99% at most "
                f"{count(late)}.",
                edges,
                counts,
                x_label="Versions behind",
                y_label="Updates",
                limit=limit,
            )
        )
        found.facts += [
            _Fact("Median age", f"{count(median)} versions"),
            _Fact("99% were no older than", f"{count(late)} versions"),
            _Fact("Oldest applied", f"{count(max(ages))} versions"),
        ]
    if refused is not None:
        share = f"{percent(refused / (accepted + refused))} of all" if accepted + refused else ""
        found.facts.append(_Fact("Refused as too old", count(refused), share))
    if limit is not None:
        found.facts.append(_Fact("Limit", f"{count(limit)} versions"))
    return found


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _bins(ages: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Gather ages in at most about 40 bins of equal whole width."""
    width = max(1, math.ceil((max(ages) + 1) / 40))
    bins = max(ages) // width + 1
    counts = [0.0] * bins
    for age, amount in ages.items():
        counts[age // width] += amount
    # Bars stand around their whole number where each bin holds one.
    shift = 0.5 if width == 1 else 0.0
    return [n * width - shift for n in range(bins + 1)], counts


def _quantile(ages: Mapping[int, float], share: float) -> int:
    wanted, passed = share * sum(ages.values()), 0.0
    for age in sorted(ages):
        passed += ages[age]
        if passed >= wanted:
            return age
    return max(ages)


def _theta(report: Report) -> _Section:
    found = _Section("theta", "Theta", "How much the threshold Theta matters")
    study = [one for one in entries(report, "theta_study") if finite(one.get("theta")) is not None]
    study.sort(key=lambda one: finite(one.get("theta")) or 0.0)
    if not study:
        return found
    found.lead = "Theta is the number of saved blocks at which an owner asks for an update."
    keys = list(dict.fromkeys(key for one in study for key in section(one, "metrics")))
    known = [metric(key) for key in keys]
    leading = next((one for one in known if one.key.startswith("ndcg@")), known[0] if known else None)

    def series(title: str, values: Sequence[float | None], name: str) -> None:
        points = [
            (finite(one.get("theta")) or 0.0, value)
            for one, value in zip(study, values, strict=True)
            if value is not None
        ]
        if len(points) > 1:
            line = plots.Line(title, [x for x, _ in points], [y for _, y in points], "s1", marker=True)
            (first, begun), (last, ended) = points[0], points[-1]
            found.figures.append(
                plots.curves(
                    f"theta-{name}",
                    f"{title}, by Theta",
                    f"From {significant(begun)} at Theta {first:g} to {significant(ended)} at {last:g}.",
                    [line],
                    x_label="Theta",
                    y_label=title,
                    from_zero=True,
                )
            )

    if leading is not None:
        series(leading.label, [_value(one, leading.key) for one in study], "quality")
    series("RPCs", [finite(one.get("rpcs")) for one in study], "rpcs")
    found.tables = [
        _Table(
            "One run for each Theta",
            ["Theta", *(one.full_label for one in known), "RPCs", "CPU time"],
            [
                [
                    f"{finite(one.get('theta')):g}",
                    *(measure(_value(one, key)) for key in keys),
                    count(one.get("rpcs")),
                    duration(one.get("cpu_seconds")),
                ]
                for one in study
            ],
        )
    ]
    return found


def _events(report: Report) -> _Section:
    found = _Section("events", "Events", "What happened during the run")
    events = [one for one in entries(report, "events") if one.get("text")]
    if events:
        timed = any(finite(one.get("time_s")) is not None for one in entries(report, "history"))
        if timed and leading_metric(report) is not None and len(events) <= _MARKS:
            found.lead = "The dotted lines in the plot over time mark these moments."
        table = _Table(
            "Events, by time since the start",
            ["Time", "Event"],
            [[duration(one.get("time_s")), str(one["text"])] for one in events],
            numeric=False,
        )
        (found.tables if len(events) <= 20 else found.folded).append(table)
    return found


# What it revealed


def _visibility(report: Report) -> dict[str, Any] | None:
    """Return kinds of data by party: words, and the class that colours them."""
    parties = {name: section({"of": row}, "of") for name, row in section(report, "visibility").items()}
    kinds = list(dict.fromkeys(kind for row in parties.values() for kind in row))
    if not kinds:
        return None
    classes = {"seen": "seen", "not seen": "unseen"}

    def cell(party: str, kind: str) -> tuple[str, str]:
        word = str(parties[party].get(kind) or "not stated")
        return word, classes.get(word, "unstated")

    return {
        "parties": list(parties),
        "rows": [(kind, [cell(party, kind) for party in parties]) for kind in kinds],
    }


def _attacks(report: Report) -> _Table | None:
    attacks = {name: row for name, row in section(report, "attacks").items() if isinstance(row, Mapping)}
    if not attacks:
        return None
    known = ("auc", "popularity_auc")
    extra = [
        key
        for key in dict.fromkeys(str(key) for row in attacks.values() for key in row)
        if key not in known
        and not any(isinstance(row.get(key), Mapping | list | tuple) for row in attacks.values())
    ]
    lines = []
    for name, row in attacks.items():
        auc, popularity = finite(row.get("auc")), finite(row.get("popularity_auc"))
        difference = None if auc is None or popularity is None else auc - popularity
        reading = ABSENT
        if difference is not None:
            reading = (
                "more than popularity" if difference > _POPULARITY_TOLERANCE else "no more than popularity"
            )
        lines.append(
            [
                name.replace("_", " "),
                signed(auc).lstrip("+"),
                signed(popularity).lstrip("+"),
                signed(difference),
                reading,
                *(_plain(row.get(key)) for key in extra),
            ]
        )
    headings = [key.replace("_", " ").capitalize() for key in extra]
    return _Table(
        "Attacks on the recorded transcript",
        ["Attack", "AUC", "Popularity-only AUC", "Difference", "Reveals", *headings],
        lines,
    )


def _plain(value: object) -> str:
    number = finite(value)
    if number is None:
        return str(value) if isinstance(value, str | bool) else ABSENT
    return count(number) if number == int(number) else significant(number)


# With what


def _about(report: Report) -> list[_Table]:
    return [
        _Table(caption, columns, [list(pair) for pair in flatten(section(report, name))], numeric=False)
        for name, caption, columns in (
            ("settings", "Settings", ["Setting", "Value"]),
            ("versions", "Versions", ["Package", "Version"]),
            ("machine", "Machine", ["Property", "Value"]),
        )
    ]
