"""Sections of a report's HTML page on learning, traffic, CPU time, staleness and events.

Each builder takes the report and returns a section; a section without content is false.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from coterie.telemetry import plots
from coterie.telemetry.accounting import SECURITY
from coterie.telemetry.quantities import ABSENT, count, duration, measure, percent, significant, volume
from coterie.telemetry.report import CpuAccount, EvaluationPart, FurtherRun, Report
from coterie.telemetry.report_facts import (
    Metric,
    costs,
    epoch_positions,
    headline,
    leading_metric,
    metric,
    metrics,
    row_label,
    rows,
    run_label,
    taught,
)
from coterie.telemetry.report_parts import Fact, ReportTable, Section
from coterie.telemetry.report_rounds import rounds_section
from coterie.telemetry.report_services import services_section

__all__ = ["sections"]

_HISTORY_ROWS = 200
_BARS = 12


def sections(report: Report) -> list[Section]:
    """Return the sections that have something to show, in the order of the page."""
    builders = (_learning, _over_users, rounds_section, services_section, _traffic, _work, _staleness)
    made = [*(build(report) for build in builders), *_comparisons(report), _events(report)]
    return [found for found in made if found]


# Learning


def _over_users(report: Report) -> Section:
    """Return the section on how the leading metrics are spread over users."""
    found = Section("users", "Users", "Quality over users")
    shown = [one for one in headline(report) if one.key in report.over_users]
    for number, column in enumerate(shown):
        spread = report.over_users[column.key]
        counts, edges = [one or 0 for one in spread.counts], [one or 0.0 for one in spread.edges]
        # Of a metric that is 0 or 1 for each user, the mean says all.
        if len(edges) == len(counts) + 1 and any(counts[1:-1]):
            least = percent(counts[0] / sum(counts))
            found.figures.append(
                plots.histogram(
                    f"users-{number}",
                    f"{column.full_label}, by users",
                    f"{count(spread.users)} users; {least} of them are between {significant(edges[0])} and "
                    f"{significant(edges[1])}.",
                    edges,
                    counts,
                    x_label=column.label,
                    y_label="Users",
                    whole_x=False,
                )
            )
    # Metrics that were measured of the same users share a table.
    parts: dict[tuple[tuple[float | None, ...], ...], list[Metric]] = {}
    for column in shown:
        alike = tuple((one.least, one.most, one.users) for one in report.over_users[column.key].by_activity)
        parts.setdefault(alike, []).append(column)
    for ranges, columns in parts.items():
        means = zip(*(report.over_users[one.key].by_activity for one in columns), strict=True)
        rows_ = [
            [_range(least, most), count(users), *(measure(one.mean) for one in row)]
            for (least, most, users), row in zip(ranges, means, strict=True)
        ]
        if rows_:
            found.tables.append(
                ReportTable(
                    f"Means by activity: users in {len(rows_)} parts of nearly equal size",
                    ["Training items", "Users", *(one.full_label for one in columns)],
                    rows_,
                )
            )
    if found.tables:
        found.lead = "A mean hides whom a model serves badly. Users without anything to measure are left out."
    return found


def _range(least: object, most: object) -> str:
    return count(least) if least == most else f"{count(least)} to {count(most)}"


def _learning(report: Report) -> Section:
    found = Section("learning", "Learning", "Course of training")
    run = epoch_positions(report.history)
    if not run:
        return found
    in_rounds = bool(report.rounds)
    name, central = taught(report)
    reference = epoch_positions(central)
    label, reference_label = run_label(report), row_label(report, name)
    unit = "pass" if in_rounds else "epoch"
    found.lead = "One point for each evaluation; " + (
        "a pass visits every user once." if in_rounds else "an epoch is one pass over the blocks."
    )
    found.lead += _ending(report, run, unit)
    if len(report.seeds) > 1:
        found.lead += f" The curves, and all that follows, are of the first seed, {report.seeds[0]}."

    first = headline(report)
    for number, column in enumerate(metrics(report)):
        lines = [
            plots.Line(label, *_series(run, column.key), colour="s1", marker=True),
            plots.Line(
                reference_label, *_series(reference, column.key), colour="s2", style="--", marker=True
            ),
        ]
        lines = [line for line in lines if line.x]
        if column.is_loss or column.on_validation or not lines:
            continue
        levels = _levels(report, column)
        (found.figures if column in first else found.more_figures).append(
            plots.curves(
                f"curve-{number}",
                f"{column.full_label}, by {unit}",
                _ends(lines) + " " + _ends(levels, verb="stays at"),
                [*lines, *levels],
                x_label=unit.capitalize(),
                y_label=column.label,
            )
        )
    losses = [
        # One colour for each system, one dash pattern for each line.
        plots.Line(f"{label}, test", *_series(run, "test_loss"), colour="s1"),
        plots.Line(f"{label}, train", *_series(run, "train_loss"), colour="s1", style=":"),
        plots.Line(f"{reference_label}, test", *_series(reference, "test_loss"), colour="s2", style="--"),
        plots.Line(f"{reference_label}, train", *_series(reference, "train_loss"), colour="s2", style="-."),
    ]
    losses = [line for line in losses if line.x]
    if losses:
        found.figures.append(
            plots.curves(
                "loss",
                f"Training and test loss, by {unit}",
                _ends(losses),
                losses,
                x_label=unit.capitalize(),
                y_label="Loss",
            )
        )
    if (leading := leading_metric(report)) is not None:
        found.figures += _timed(report, leading, label)
    found.folded = [_history(run, unit.capitalize(), {one.key: one for one in metrics(report)})]
    return found


def _ending(report: Report, run: Sequence[tuple[float, EvaluationPart]], unit: str) -> str:
    """Return which version counts, and that training ended before its last pass, in sentences."""
    last = run[-1][1].epoch
    found = ""
    if report.chosen is not None and report.chosen.epoch is not None and report.chosen.epoch != last:
        found += (
            f" The version after {count(report.chosen.epoch)} {unit}es counts; validation items chose it."
        )
    rounds = report.settings.get("rounds")
    most = rounds.get("passes") if isinstance(rounds, Mapping) and report.rounds else None
    if isinstance(most, int) and last is not None and last < most:
        found += f" Training stopped early, after {count(last)} of at most {count(most)} {unit}es."
    return found


def _value(entry: EvaluationPart, key: str) -> float | None:
    return entry.train_loss if key == "train_loss" else entry.metrics.get(key)


def _series(placed: Sequence[tuple[float, EvaluationPart]], key: str) -> tuple[list[float], list[float]]:
    points = [(x, y) for x, y in ((x, _value(entry, key)) for x, entry in placed) if y is not None]
    return [x for x, _ in points], [y for _, y in points]


def _levels(report: Report, column: Metric) -> list[plots.Line]:
    """Return reference rows that do not learn, as level lines with three dash patterns in turn."""
    styles: tuple[plots.Style, ...] = ("-", "-.", ":")
    flat = [
        row
        for row in rows(report, [column])
        if not row.is_run and row.scores[0].mean is not None and not report.reference[row.name].history
    ]
    return [
        plots.Line(row.label, [], [row.scores[0].mean or 0.0], colour="muted", style=styles[n % 3])
        for n, row in enumerate(flat)
    ]


def _ends(lines: Sequence[plots.Line], *, verb: str = "ends at") -> str:
    return "; ".join(f"{line.label} {verb} {measure(line.y[-1])}" for line in lines) + "." if lines else ""


def _timed(report: Report, leading: Metric, label: str) -> list[plots.Plot]:
    timed = [(one.time_s, _value(one, leading.key)) for one in report.history]
    points = sorted((t, y) for t, y in timed if t is not None and y is not None)
    if not points:
        return []
    steps = _alive(report)
    changes = sorted({at for line in steps for at in line.x[1:]})
    last = max(points[-1][0], *(line.x[-1] for line in steps), 0.0)
    unit, unit_name = (60.0, "minutes") if last > 600 else (1.0, "seconds")
    line = plots.Line(label, [t / unit for t, _ in points], [y for _, y in points], colour="s1", marker=True)
    scaled = [
        # The last count holds until the end of the plot.
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
            marks=[at / unit for at in changes],
        )
    ]


def _alive(report: Report) -> list[plots.Line]:
    """Return the numbers of present owners and hosts over time; a number that never changes is left out."""
    timeline = [
        (one.time_s, one.version, {"owners": one.owners, "hosts": one.hosts})
        for one in report.owners_timeline
    ] or [(one.time_s, one.version, {"owners": one.owners}) for one in report.history]
    # Parties that join before the first update are no change during the run.
    before = [n for n, one in enumerate(timeline) if one[1] == 0]
    timeline = timeline[before[-1] if before else 0 :]
    found: list[plots.Line] = []
    colours: tuple[tuple[str, plots.Role, plots.Style], ...] = (("owners", "s3", "-"), ("hosts", "s4", "--"))
    for key, colour, style in colours:
        known = [(t, present.get(key)) for t, _, present in timeline]
        points = sorted((t, n) for t, n in known if t is not None and n is not None)
        steps = [point for n, point in enumerate(points) if n == 0 or point[1] != points[n - 1][1]]
        if len(steps) > 1:
            found.append(
                plots.Line(key.capitalize(), [t for t, _ in steps], [n for _, n in steps], colour, style)
            )
    return found


def _history(
    run: Sequence[tuple[float, EvaluationPart]], unit: str, known: Mapping[str, Metric]
) -> ReportTable:
    keys = list(dict.fromkeys(key for _, entry in run for key in entry.metrics))
    every = math.ceil(len(run) / _HISTORY_ROWS)
    shown = [one for n, one in enumerate(reversed(run)) if n % every == 0][::-1]
    # Not every system has training owners, or a loss.
    owners = any(entry.owners is not None for _, entry in run)
    losses = any(entry.train_loss is not None for _, entry in run)
    heads = [*(["Owners"] if owners else []), *(["Train loss"] if losses else [])]
    return ReportTable(
        "Every evaluation" if every == 1 else f"One evaluation in {every}, and the last",
        [unit, "Time", "Version", *heads, *((known.get(key) or metric(key)).full_label for key in keys)],
        [
            [
                f"{x:.2f}".rstrip("0").rstrip("."),
                duration(entry.time_s),
                count(entry.version),
                *([count(entry.owners)] if owners else []),
                *([measure(entry.train_loss)] if losses else []),
                *(measure(_value(entry, key)) for key in keys),
            ]
            for x, entry in shown
        ],
    )


# Costs


def _traffic(report: Report) -> Section:
    found = Section("traffic", "Traffic", "Traffic between services")
    records = {name: row for name, row in report.traffic.items() if row.calls != 0}  # never called
    if not records:
        return found
    found.lead = "Message bytes as counted at the calling side; the framing of HTTP/2 and TLS comes on top."
    sizes = {name: (row.bytes_out or 0.0, row.bytes_in or 0.0) for name, row in records.items()}
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
            Fact("All messages", volume(total.bytes_total)),
            Fact("Sent by callers", volume(total.bytes_out)),
            Fact("Received by callers", volume(total.bytes_in)),
            Fact(
                "Calls",
                count(total.calls),
                f"{count(total.errors)} refused or repeated" if total.errors else "none failed",
            ),
        ]
        found.facts += _network(report)
        interactions = report.dataset.interactions
        if interactions and total.bytes_total is not None:
            each = volume(total.bytes_total / interactions)
            found.facts.append(Fact("For each interaction in the data set", each))
    found.tables = [
        ReportTable(
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
                    count(row.calls),
                    count(row.errors),
                    volume(row.bytes_out),
                    volume(row.bytes_in),
                    significant(row.p50_ms),
                    significant(row.p99_ms),
                    significant(row.server_p50_ms),
                    significant(row.network_p50_ms),
                ]
                for name, row in ((name, records[name]) for name in order)
            ],
            note="p50 and p99: half and 99% of the calls took no longer, times in milliseconds. The last two "
            "columns give the median of the server's own time and of the rest: network, queues and encoding.",
        )
    ]
    return found


def _network(report: Report) -> list[Fact]:
    """Return the network's largest share of a round (or of training) among parties, as a fact; empty without any."""
    network = report.network
    shares = {party: one.share for party, one in network.by_party.items() if one.share is not None}
    if not shares:
        return []
    most = max(shares, key=lambda party: shares[party])
    what = "Network's share of training" if network.of is None else "Network's share of a round"
    return [Fact(what, percent(shares[most]), f"of {most}; at the others less. Calls overlap with work")]


def _work(report: Report) -> Section:
    found = Section("work", "CPU and memory", "CPU time and memory")
    services = report.cpu_seconds
    peaks = {name: value for name, value in report.peak_rss_mb.items() if value is not None}
    total = costs(report)
    activities = _activities(services.values())
    if services:
        found.figures.append(_cpu_plot(services, activities))
    if total.security_share is not None:
        found.facts.append(
            Fact(
                "Share of CPU time spent on security",
                percent(total.security_share),
                f"{duration(total.security_seconds)} of {duration(total.cpu_seconds)}. Sealing, opening, "
                "key agreement and signatures are counted; TLS runs inside gRPC and cannot be told apart.",
            )
        )
        found.facts += [
            Fact(f"Share spent on {name}", percent(share), duration(total.protections[name]))
            for name, share in total.protection_shares.items()
        ]
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
            ReportTable(
                "By service",
                [
                    "Service",
                    *(["CPU time", "Security", "Share of security"] if services else []),
                    *(["Peak memory"] if peaks else []),
                ],
                [
                    [
                        name,
                        *(_cpu_cells(services.get(name, CpuAccount())) if services else []),
                        *([_mebibytes(peaks.get(name))] if peaks else []),
                    ]
                    for name in names
                ],
            )
        )
    if activities:
        found.tables.append(
            ReportTable(
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


def _activities(services: Iterable[CpuAccount]) -> dict[str, float]:
    """Return seconds by activity over all services, the longest first."""
    found: dict[str, float] = {}
    for row in services:
        for name, value in row.activities.items():
            found[name] = found.get(name, 0.0) + (value or 0.0)
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _cpu_plot(services: Mapping[str, CpuAccount], activities: Mapping[str, float]) -> plots.Plot:
    """Plot CPU time by service: security, the five longest other activities, process start, and the rest."""
    colours: tuple[plots.Role, ...] = ("s1", "s3", "s2", "s4", "s5")
    named = [name for name in activities if name not in SECURITY and activities[name] > 0][: len(colours)]
    security = [row.security or 0.0 for row in services.values()]
    start = [row.start or 0.0 for row in services.values()]
    parts = [plots.Bars("security", security, "alert")]
    for name, colour in zip(named, colours, strict=False):
        values = [row.activities.get(name) or 0.0 for row in services.values()]
        parts.append(plots.Bars(name, values, colour))
    if any(start):
        parts.append(plots.Bars("process start", start, "s6"))
    claimed = [sum(part.values[n] for part in parts) for n in range(len(services))]
    totals = [row.total or 0.0 for row in services.values()]
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


def _cpu_cells(row: CpuAccount) -> list[str]:
    share = row.security / row.total if row.total and row.security is not None else None
    return [duration(row.total), duration(row.security), percent(share)]


def _mebibytes(number: float | None) -> str:
    if number is None:
        return ABSENT
    return f"{significant(number / 1024)} GiB" if number >= 1000 else f"{significant(number)} MiB"


def _staleness(report: Report) -> Section:
    found = Section("staleness", "Staleness", "Ages of gradients")
    record = report.staleness
    ages = {
        age: amount
        for age, amount in ((_whole(age), n) for age, n in record.histogram.items())
        if age is not None and amount
    }
    limit, refused = record.max_staleness, record.refused
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
            Fact("Median age", _versions(median)),
            Fact("99% were no older than", _versions(late)),
            Fact("Oldest applied", _versions(max(ages))),
        ]
    if refused is not None:
        share = f"{percent(refused / (accepted + refused))} of all" if refused else ""
        found.facts.append(Fact("Refused as too old", count(refused), share))
    if limit is not None:
        found.facts.append(Fact("Limit", _versions(limit)))
    return found


def _versions(number: float) -> str:
    return f"{count(number)} version{'' if number == 1 else 's'}"


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _bins(ages: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Return edges and counts of at most 40 bins of ages, of equal whole width."""
    width = max(1, math.ceil((max(ages) + 1) / 40))
    bins = max(ages) // width + 1
    counts = [0.0] * bins
    for age, amount in ages.items():
        counts[age // width] += amount
    # A bar for a single age is centred on it.
    shift = 0.5 if width == 1 else 0.0
    return [n * width - shift for n in range(bins + 1)], counts


def _quantile(ages: Mapping[int, float], share: float) -> int:
    wanted, passed = share * sum(ages.values()), 0.0
    for age in sorted(ages):
        passed += ages[age]
        if passed >= wanted:
            return age
    return max(ages)


def _comparisons(report: Report) -> Iterator[Section]:
    """Yield a section for each list of further runs that the report of a system has."""
    for name in type(report).model_fields:
        entries = getattr(report, name)
        if isinstance(entries, tuple) and entries and isinstance(entries[0], FurtherRun):
            yield _comparison(entries)


def _comparison(runs: Sequence[FurtherRun]) -> Section:
    kind = type(runs[0])
    found = Section(kind.setting, kind.symbol, kind.title)
    valued = ((getattr(one, kind.setting), one) for one in runs)
    study = sorted(((value, one) for value, one in valued if value is not None), key=lambda pair: pair[0])
    if not study:
        return found
    found.lead = kind.lead
    keys = list(dict.fromkeys(key for _, one in study for key in one.metrics))
    known = [metric(key) for key in keys]
    leading = next((one for one in known if one.key.startswith("ndcg@")), known[0] if known else None)

    def series(title: str, values: Sequence[float | None], name: str) -> None:
        points = [(at, value) for (at, _), value in zip(study, values, strict=True) if value is not None]
        if len(points) > 1:
            line = plots.Line(title, [x for x, _ in points], [y for _, y in points], "s1", marker=True)
            (first, begun), (last, ended) = points[0], points[-1]
            found.figures.append(
                plots.curves(
                    f"{kind.setting}-{name}",
                    f"{title}, by {kind.symbol}",
                    f"From {significant(begun)} at {kind.symbol} {first:g} to {significant(ended)} at {last:g}.",
                    [line],
                    x_label=kind.symbol,
                    y_label=title,
                    from_zero=True,
                )
            )

    if leading is not None:
        series(leading.label, [one.metrics.get(leading.key) for _, one in study], "quality")
    series("RPCs", [one.rpcs for _, one in study], "rpcs")
    found.tables = [
        ReportTable(
            f"One run for each {kind.symbol}",
            [kind.symbol, *(one.full_label for one in known), "RPCs", "CPU time"],
            [
                [
                    f"{at:g}",
                    *(measure(one.metrics.get(key)) for key in keys),
                    count(one.rpcs),
                    duration(one.cpu_seconds),
                ]
                for at, one in study
            ],
        )
    ]
    return found


def _events(report: Report) -> Section:
    found = Section("events", "Events", "Events during the run")
    events = [one for one in report.events if one.text]
    if events:
        table = ReportTable(
            "Events, by time since the start",
            ["Time", "Event"],
            [[duration(one.time_s), one.text] for one in events],
            numeric=False,
        )
        (found.tables if len(events) <= 20 else found.folded).append(table)
    return found
