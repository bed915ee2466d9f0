"""The report of a run as one self-contained HTML page, without scripts, other files or network.

The page is made from the report alone, so it can be made again from a stored one (`Report.read`).  All text is
escaped; sections without content are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from coterie.data.whole_file import whole_file
from coterie.privacy.visibility import KINDS
from coterie.telemetry import plots
from coterie.telemetry.experiment import EXPERIMENT
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
from coterie.telemetry.report import AttackFigures, Report
from coterie.telemetry.report_facts import (
    costs,
    flatten,
    headline,
    leading_metric,
    metrics,
    restarted_note,
    row_label,
    rows,
    run_label,
    summary,
    taught,
)
from coterie.telemetry.report_parts import Fact, ReportTable
from coterie.telemetry.report_picture import picture
from coterie.telemetry.report_sections import sections

__all__ = ["render", "write"]

_POPULARITY_TOLERANCE = 0.02
"""Gain in AUC over the popularity-only attacker up to which an attack reveals no more than popularity."""


def render(report: Report) -> str:
    """Return a report as an HTML page.

    Parameters
    ----------
    report : Report
        The report, of which every part is optional.

    Returns
    -------
    str
        A complete HTML document.

    Raises
    ------
    PreflightError
        matplotlib or jinja2, the packages of the extra ``report``, are not installed.
    """
    with plots.report_extra():
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

    # All text is escaped; the only text marked safe is SVG from `plots`, which escapes its own input.
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("coterie.telemetry").joinpath("report.html.j2").read_text(encoding="utf-8")
    context = {
        "title": _title(report),
        "summary": " ".join(summary(report)),
        "picture": picture(report),
        "facts": _heading_facts(report),
        "tiles": _tiles(report),
        "columns": headline(report),
        "rows": rows(report, headline(report)),
        "every_metric": _every_metric(report),
        "seeds": _seeds(report),
        "result_note": _result_note(report),
        "sections": sections(report),
        "visibility": _visibility(report),
        "attacks": _attacks(report.attacks, "Attacks on the recorded transcript"),
        "second_attacks": _second_attacks(report),
        "attack_figures": _attack_figures(report),
        "about": [table for table in _about(report) if table.rows],
        "svg": Markup,  # only ever given `Plot.svg`
    }
    return environment.from_string(source).render(context).strip() + "\n"


def write(report: Report, path: Path) -> None:
    """Write a report as an HTML page to a file, atomically.

    Raises
    ------
    PreflightError
        matplotlib or jinja2 is not installed; nothing is written then.
    OSError
        The file cannot be written.
    """
    page = render(report)
    with whole_file(path) as beside:
        beside.write_text(page, encoding="utf-8")


def _title(report: Report) -> str:
    system = run_label(report, "Federated run")
    form = f", {report.form} form," if report.form and not report.rounds else ""
    dataset = report.dataset.name
    return f"{system}{form} on {dataset}" if dataset else f"{system}{form}".rstrip(",")


def _seeds(report: Report) -> list[str]:
    return [str(seed) for seed in report.seeds]


def _heading_facts(report: Report) -> list[Fact]:
    dataset, seeds = report.dataset, _seeds(report)
    found = [Fact("Run", report.run_id)] if report.run_id else []
    if report.started:
        found.append(Fact("Started", _moment(report.started)))
    if report.taken_up:
        moments = ", ".join(map(_moment, report.taken_up))
        found.append(Fact("Taken up after an interruption", moments, "costs count from then"))
    known = {"users": dataset.users, "items": dataset.items, "interactions": dataset.interactions}
    sizes = [f"{count(size)} {name}" for name, size in known.items() if size is not None]
    if sizes:
        found.append(Fact("Data", ", ".join(sizes)))
    found += [Fact("Data set", note) for note in dataset.notes]
    if report.secure_sum:
        found.append(Fact("Secure sum", report.secure_sum))
    if report.experiment:
        found.append(Fact("Experiment", EXPERIMENT))
    if seeds:
        found.append(Fact("Seed" if len(seeds) == 1 else "Seeds", ", ".join(seeds)))
    if dataset.split_sha256:
        found.append(Fact("Split, SHA-256", dataset.split_sha256))
    return found


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    zone = moment.strftime(" %Z") if moment.tzinfo else ""
    return moment.strftime("%-d %B %Y, %H:%M") + zone


def _tiles(report: Report) -> list[Fact]:
    found, total, leading = [], costs(report), leading_metric(report)
    if leading is not None:
        by_name = {row.name: row.scores[0].mean for row in rows(report, [leading])}
        name, _ = taught(report)
        ours, reference = by_name.get(""), by_name.get(name)
        note = leading.population
        if ours is not None and reference:
            gain = signed(100 * (ours / reference - 1), 1)
            note = f"{gain}% against {row_label(report, name)}" + (f" ({note})" if note else "")
        if ours is not None:
            found.append(Fact(leading.label, measure(ours), note))
    if total.security_share is not None:
        found.append(Fact("Security", percent(total.security_share), "of all CPU time"))
    if total.bytes_total is not None:
        calls = f"in {count(total.calls)} calls" if total.calls else ""
        found.append(Fact("Messages", volume(total.bytes_total), calls))
    if total.cpu_seconds is not None:
        services = len(report.cpu_seconds)
        found.append(
            Fact("CPU time", duration(total.cpu_seconds), f"over {services} services{restarted_note(report)}")
        )
    if report.duration_s is not None:
        found.append(Fact("Duration", duration(report.duration_s), "from start to report"))
    return found


def _every_metric(report: Report) -> ReportTable | None:
    """Return a table of all metrics, one a row; None when the first table has them all."""
    columns = metrics(report)
    if len(columns) == len(headline(report)):
        return None
    systems = rows(report, columns)
    return ReportTable(
        "Every metric",
        ["Metric", *(row.label for row in systems)],
        [
            [
                column.full_label,
                *(f"{row.scores[n].mean_text} {row.scores[n].spread_text}".strip() for row in systems),
            ]
            for n, column in enumerate(columns)
        ],
    )


def _result_note(report: Report) -> str:
    sentences = []
    if report.history and (users := report.history[-1].users):
        sentences.append(f"Means over {count(users)} users.")
    if share := _random_over_test_items(report):
        sentences.append(
            f"Over test items only what a user later interacted with is ranked: a random order already reaches {share} "
            "there. The ranking of all unseen items is the harder and more telling one."
        )
    return " ".join(sentences)


def _random_over_test_items(report: Report) -> str | None:
    random = report.reference.get("random")
    for column in metrics(report):
        if column.population == "test items" and column.label.startswith("NDCG"):
            scored = random.metrics.get(column.key) if random else None
            if scored and scored.mean is not None:
                return measure(scored.mean)
    return None


# Disclosures


def _visibility(report: Report) -> dict[str, Any] | None:
    """Return the table of visibility, kinds of data by party, each cell with its word and CSS class."""
    parties = report.visibility
    kinds = list(dict.fromkeys(kind for row in parties.values() for kind in row))
    if not kinds:
        return None
    classes = {"seen": "seen", "not seen": "unseen"}

    def cell(party: str, kind: str) -> tuple[str, str]:
        word = parties[party].get(kind) or "not stated"
        return word, classes.get(word, "unstated")

    rows = [
        (kind.replace("_", " "), KINDS.get(kind, ""), [cell(party, kind) for party in parties])
        for kind in kinds
    ]
    # What is not stated may have been seen.
    reached = [any(word not in ("not seen", "may not see") for word, _ in cells) for _, _, cells in rows]
    return {
        "parties": list(parties),
        "rows": [row for row, seen in zip(rows, reached, strict=True) if seen],
        "unseen": [row for row, seen in zip(rows, reached, strict=True) if not seen],
    }


def _attacks(attacks: Mapping[str, AttackFigures], caption: str) -> ReportTable | None:
    if not attacks:
        return None
    # An attack that saw nothing and breaks ties by popularity reaches popularity's AUC and not 0.5.
    helped = any(row.auc_with_popularity is not None for row in attacks.values())

    def line(name: str, row: AttackFigures) -> list[str]:
        difference = row.gained
        reading = ABSENT
        if difference is not None:
            more = difference > _POPULARITY_TOLERANCE
            reading = "more than popularity" if more else "no more than popularity"
        reading = row.reveals() or reading
        return [
            name.replace("_", " "),
            _auc(row.auc),
            *([_auc(row.auc_with_popularity)] if helped else []),
            _auc(row.popularity_auc),
            signed(difference),
            reading,
        ]

    return ReportTable(
        caption,
        [
            "Attack",
            "AUC",
            *(["AUC, ties by popularity"] if helped else []),
            "Popularity-only AUC",
            "Difference",
            "Reveals",
        ],
        [line(name, row) for name, row in attacks.items()],
    )


def _second_attacks(report: Report) -> ReportTable | None:
    """Return the table of attacks on the second federation of the run; None without any."""
    if (second := report.beside) is None:
        return None
    what = second.label or ", ".join(second.changes)
    return _attacks(second.attacks, f"Attacks on the second federation: {what}")


def _attack_figures(report: Report) -> ReportTable | None:
    """Return a table of the attacks' other figures, one a row; None without any."""
    attacks = report.attacks
    shown = {"auc", "auc_with_popularity", "popularity_auc"}
    figures = {name: row.given() for name, row in attacks.items()}
    keys = [key for key in dict.fromkeys(key for row in figures.values() for key in row) if key not in shown]
    if not keys:
        return None
    return ReportTable(
        "All figures of the attacks",
        ["Figure", *(name.replace("_", " ") for name in attacks)],
        [
            [
                key.replace("_", " "),
                *(_plain(row[key]) if key in row else "" for row in figures.values()),
            ]
            for key in keys
        ],
    )


def _auc(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"


def _plain(value: object) -> str:
    number = finite(value)
    if number is None:
        return str(value) if isinstance(value, str | bool) else ABSENT
    return count(number) if number == int(number) else significant(number)


# Data, settings and software


def _about(report: Report) -> list[ReportTable]:
    return [
        ReportTable(caption, columns, [list(pair) for pair in flatten(known)], numeric=False)
        for known, caption, columns in (
            (report.settings, "Settings", ["Setting", "Value"]),
            (report.versions, "Versions", ["Package", "Version"]),
            (report.machine, "Machine", ["Property", "Value"]),
        )
    ]
