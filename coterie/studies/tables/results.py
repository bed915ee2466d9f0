"""Generation of ``docs/results.md`` and the README's table of figures, from tables that `evaluate` wrote.

``python -m coterie.studies.tables.results TABLE.json ...`` copies the tables into ``docs/results``, without the data of
single users, and the trials beside them into ``docs/results/trials``, and writes both pages from all tables there.
``--runs NAME REPORT.json ...`` adds a table of runs over services, side by side.  No figure is written by hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.config.run import RoundsSettings
from coterie.studies.tables.compact import row_lines
from coterie.studies.tables.printed_tables import ABSENT
from coterie.systems.reports import read_report
from coterie.telemetry.report import Chosen, Report

__all__ = ["TRIALS", "kept", "main", "of_runs", "page", "read_kept", "readme_table", "with_table"]

_BEGIN = "<!-- figures: written by coterie.studies.tables.results -->"
_END = "<!-- end of figures -->"

TRIALS = "trials"
"""Folder below that of the tables, for the trials by which their rows were tuned; files are named like the tables'."""

_HEAD = """# Figures

Reference of all figures on real data, for readers who want more than the README's table. [metrics.md](metrics.md)
defines metrics, rows, and the choice of versions. The page is written by `python -m coterie.studies.tables.results`
from the files in [results](results/): do not edit it. The trials by which rows of a table were tuned are in
[results/trials](results/trials/), as far as they were kept.
"""


def kept(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table for the repository: without names of files, the operating system's version and single trials.

    Parameters
    ----------
    made : mapping
        The table, as `evaluate` wrote it.

    Returns
    -------
    dict
        A copy without names of files, digests of cells and single trials; each history is reduced to the steps and
        the metrics by which versions are chosen and shown.
    """
    shown = (made["headline"], made["chosen_by"])
    rows = [
        {
            **{key: value for key, value in row.items() if key not in ("per_user", "key", "history")},
            "history": [
                {
                    "step": one["step"],
                    **{m: round(one["metrics"][m], 4) for m in shown if m in one["metrics"]},
                }
                for one in row["history"]
            ],
        }
        for row in made["rows"]
    ]
    settings = {**made["settings"], "data": {**made["settings"]["data"], "path": made["dataset"]["name"]}}
    machine = {key: value for key, value in made["machine"].items() if key != "system"}
    others = {key: value for key, value in made.items() if key != "tried"}
    return {**others, "rows": rows, "settings": settings, "machine": machine}


def of_runs(reports: Sequence[Report]) -> dict[str, Any]:
    """Return runs over services, side by side, as a table.

    Parameters
    ----------
    reports : sequence of Report
        Reports of runs in rounds of one system on one data set with one split.

    Raises
    ------
    ValueError
        The runs are of different data.
    """
    first = reports[0]
    if any(report.dataset != first.dataset for report in reports):
        raise ValueError("these runs are of different data; expected the same data set and split")
    chosen = [report.chosen or Chosen() for report in reports]
    metrics = list(chosen[0].metrics)
    lines = [
        (
            report.settings["name"],
            report.secure_sum,
            str(report.settings["federation"]["hosts"]),
            str(one.epoch),
            *(f"{one.metrics[metric]:.6f}" for metric in metrics),
        )
        for report, one in zip(reports, chosen, strict=True)
    ]
    made = {
        "title": f"{first.label or first.system} over services",
        "dataset": first.dataset.content(),
        "seeds": list(first.seeds),
        "headline": metrics[0],
        "chosen_by": first.settings["rounds"]["choose_by"],
        "rows": [
            {
                "row": report.settings["name"],
                "seed": report.seeds[0],
                "metrics": one.metrics,
                "history": [{"step": point.epoch, "metrics": point.metrics} for point in report.history],
                "facts": {"secure_sum": report.secure_sum, "rounds": len(report.rounds)},
            }
            for report, one in zip(reports, chosen, strict=True)
        ],
        "summary": [],
        "differences": [],
        "blocks": [
            {
                "title": f"Version that counts, {first.dataset.name}, seed {first.seeds[0]}",
                "columns": ("run", "secure sum", "hosts", "passes", *metrics),
                "rows": lines,
                "notes": ("Each run is a federation of processes on one machine, under mutual TLS.",),
            }
        ],
        "settings": {**first.settings, "output": None},
        "versions": first.versions,
        "machine": first.machine,
    }
    return kept(made)


def read_kept(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the tables in a folder, by file name."""
    return {path.name: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}


def page(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of ``docs/results.md``.

    Parameters
    ----------
    tables : mapping of str to mapping
        Tables by file name.
    """
    parts = [_HEAD]
    for name, table in tables.items():
        parts.append(f"## {table['title']}: {name.removesuffix('.json')}\n\n{_about(name, table)}\n")
        for block in table["blocks"]:
            parts.append(f"### {block['title']}\n\n{_markdown(block['columns'], _with_figures(block))}\n")
            parts.extend(f"{note}\n" for note in block["notes"])
        parts.append(_rows(table))
    return "\n".join(part for part in parts if part)


def _about(name: str, table: Mapping[str, Any]) -> str:
    data, settings = table["dataset"], table["settings"]
    sums = sorted({row["facts"]["secure_sum"] for row in table["rows"] if "secure_sum" in row["facts"]})
    facts = [
        f"[{name}](results/{name})",
        f"{data['users']} users, {data['items']} items, {data['interactions']} interactions",
        f"split {settings['split']['kind']}, ties {settings['split']['ties']}",
        f"seeds {', '.join(map(str, table['seeds']))}",
        f"versions chosen by {table['chosen_by']}",
    ]
    if sums:
        facts.append(f"secure sum {', '.join(sums)}")
    return "; ".join(facts) + "."


def _with_figures(block: Mapping[str, Any]) -> list[Sequence[str]]:
    """Return the lines of a block that have figures of our own."""
    own = [
        at for at, column in enumerate(block["columns"]) if at and not column.startswith(("paper", "tuned"))
    ]
    return [line for line in block["rows"] if any(line[at] != ABSENT for at in own)]


def _rows(table: Mapping[str, Any]) -> str:
    """Return the section on options, chosen steps and last steps, row by row; empty without a summary."""
    if not table["summary"]:
        return ""
    lines = []
    for one in table["summary"]:
        cells = [row for row in table["rows"] if row["row"] == one["row"]]
        options = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in one["options"].items())
        steps = ", ".join(str(row["step"]) for row in cells)
        last = ", ".join(str(row["history"][-1]["step"]) for row in cells)
        lines.append((f"`{one['row']}`", options or ABSENT, one["tuned"], steps, last))
    columns = ("row", "settings", "how they were found", "step that counts", "last step")
    return f"### Settings and steps\n\n{_markdown(columns, lines)}\n"


def _markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = [column.replace("\n", " ") for column in columns]
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def readme_table(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the README's table: each federated model beside the same model with all data in one place."""
    lines = []
    for table in tables.values():
        rows = {one["row"]: one for one in table["summary"]}
        metric = table["headline"]
        named = table["dataset"]["name"]
        if table["settings"]["split"].get("ties") == "file":
            named += ", ties in the file's order"
        for difference in table["differences"]:
            first, second = rows[difference["first"]], rows[difference["second"]]
            ways = (f"fed-{second['row']}", f"fed-{second['row']}-exact")
            if difference["metric"] != metric or first["row"] not in ways:
                continue
            facts = [row["facts"] for row in table["rows"] if row["row"] == first["row"]]
            lines.append(
                (
                    f"{first['label']}, {named}{_groups(table, facts)}{_tuned(first, second)}",
                    ", ".join(sorted({one["secure_sum"] for one in facts})),
                    str(difference["seeds"]),
                    f"{first['metrics'][metric]['mean']:.3f}",
                    f"{second['metrics'][metric]['mean']:.3f}",
                    f"{difference['mean']:+.4f} ({difference['low']:+.4f} to {difference['high']:+.4f})",
                )
            )
    columns = ("HR@10", "sum", "seeds", "federated", "centralised", "difference (95% over users)")
    return _markdown(columns, lines)


def _groups(table: Mapping[str, Any], facts: Sequence[Mapping[str, Any]]) -> str:
    """Return the size of fixed groups as text; empty for the default size and for other cohorts."""
    group = table["settings"]["rounds"]["group"]
    usual = group == RoundsSettings().group or any(one["cohorts"] != "groups" for one in facts)
    return "" if usual else f", groups of {group}"


def _tuned(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Return the number of trials by which both rows were tuned, as text; empty unless it is the same for both."""
    both = first.get("trials"), second.get("trials")
    tuned = first.get("tuned") == second.get("tuned") == "tuned" and both[0] == both[1]
    return f", tuned with {both[0]} trials each" if tuned else ""


def with_table(text: str, table: str) -> str:
    """Return a page's text with the table between the page's two marks.

    Raises
    ------
    ValueError
        The page lacks the marks.
    """
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"no place for figures; expected {_BEGIN!r}, then {_END!r}")
    return f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Copy tables into the folder of results and write both pages."""
    parser = argparse.ArgumentParser(
        prog="python -m coterie.studies.tables.results",
        description="Keep tables; write the pages of figures.",
    )
    parser.add_argument("tables", nargs="*", type=Path, help="tables that `coterie evaluate` wrote")
    parser.add_argument(
        "--runs",
        nargs="+",
        metavar=("NAME", "REPORT"),
        action="append",
        default=[],
        help="reports of runs, kept side by side",
    )
    parser.add_argument("--folder", type=Path, default=Path("docs/results"), help="where tables are kept")
    parser.add_argument("--write", type=Path, default=Path("docs/results.md"), help="the page of all figures")
    parser.add_argument(
        "--readme", type=Path, default=Path("README.md"), help="the page with the short table"
    )
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    for path in given.tables:
        made = kept(json.loads(path.read_text("utf-8")))
        (given.folder / path.name).write_text(row_lines(made), "utf-8")
        trials = path.with_name(f"{path.stem}-trials.json")
        if trials.exists():
            (given.folder / TRIALS).mkdir(exist_ok=True)
            found = json.loads(trials.read_text("utf-8"))
            (given.folder / TRIALS / path.name).write_text(row_lines(found), "utf-8")
    for name, *paths in given.runs:
        made = of_runs([read_report(json.loads(Path(path).read_text("utf-8"))) for path in paths])
        (given.folder / f"{name}.json").write_text(row_lines(made), "utf-8")
    tables = read_kept(given.folder)
    given.write.write_text(page(tables), "utf-8")
    given.readme.write_text(with_table(given.readme.read_text("utf-8"), readme_table(tables)), "utf-8")


if __name__ == "__main__":
    main()
