"""Run benchmarks, and compare their rows with targets and with an earlier run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.baseline import Baseline, moved, read
from bench.rows import Ask, Row, machine
from bench.targets import target
from coterie.telemetry.logs import configure

SUITES: dict[str, str] = {
    "sealed": "sealed:rows",
    "drift.epoch": "federation:epoch_rows",
    "drift.growth": "federation:growth_rows",
    "masked": "masked:rows",
    "noise": "noise:rows",
    "paillier": "paillier:rows",
    "bfv": "bfv:rows",
    "sparse": "sparse:rows",
    "ledger": "ledger:rows",
    "ease": "ease:rows",
    "local_step": "local_step:rows",
    "graph_step": "graph_step:rows",
    "round": "rounds:rows",
    "round.empty": "rounds:empty_rows",
    "submit": "submit:rows",
    "encrypted": "encrypted:rows",
    "expansion": "expansion:rows",
    "scale": "scale:rows",
    "serving": "serving:rows",
    "connections": "connections:rows",
    "intakes": "intakes:rows",
    "resets": "resets:rows",
    "wan": "wan:rows",
    "live_page": "live_page:rows",
    "api": "api:rows",
    "population": "population:rows",
    "waves": "waves:rows",
}
"""Module in this package and function of each suite; loaded when it runs, as some need packages of an extra."""

ON_REQUEST = frozenset(
    {
        "bfv",
        "encrypted",
        "expansion",
        "scale",
        "serving",
        "connections",
        "intakes",
        "resets",
        "wan",
        "live_page",
        "api",
        "population",
        "waves",
    }
)
"""Suites that run only when they are named."""


def main() -> int:
    """Run the requested benchmarks, print a table and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", metavar="NAME", help=f"one of {', '.join(SUITES)}")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write machine and rows as JSON")
    parser.add_argument(
        "--data", metavar="PATH", type=Path, help="a data set for drift.epoch; synthetic otherwise"
    )
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="measure each thing once, at its smallest size: that it works, not how fast",
    )
    parser.add_argument(
        "--baseline", metavar="FILE", type=Path, help="what --json wrote earlier: says which rows moved since"
    )
    arguments = parser.parse_args()
    if arguments.only is not None and arguments.only not in SUITES:
        parser.error(f"no benchmark {arguments.only!r}; there are: {', '.join(SUITES)}")

    baseline = None
    if arguments.baseline is not None:
        try:
            baseline = read(arguments.baseline)
        except ValueError as error:
            parser.error(str(error))

    configure("error", service="bench")
    console = Console(stderr=True)
    rows: list[Row] = []
    for name, suite in SUITES.items():
        if arguments.only == name or (arguments.only is None and name not in ON_REQUEST):
            try:
                for row in _suite(suite)(Ask(arguments.data, arguments.smallest)):
                    console.print(f"[dim]{row.name}[/dim] {row.ours:.4g} {row.unit}")
                    rows.append(row)
            except ModuleNotFoundError as error:
                if arguments.only == name:
                    parser.error(f"the benchmark {name} needs {error.name}, which is not installed")
                console.print(f"{name} is left out: {error.name} is not installed")
    told = Console(width=None if sys.stdout.isatty() else 200)
    told.print(_table(rows))
    if baseline is not None:
        _say_moved(rows, baseline, told)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1)
        )
    return 0


def _suite(place: str) -> Callable[[Ask], Iterator[Row]]:
    module, _, function = place.partition(":")
    found: Callable[[Ask], Iterator[Row]] = getattr(import_module(f"bench.{module}"), function)
    return found


def _table(rows: list[Row]) -> Table:
    here = machine()
    table = Table(title=", ".join(f"{key} {value}" for key, value in here.items()))
    for column in ("name", "ours", "theirs", "unit", "ratio", "target", "note"):
        right = column in ("ours", "theirs", "ratio", "target")
        table.add_column(column, justify="right" if right else "left")
    for row in rows:
        theirs = "" if row.theirs is None else f"{row.theirs:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        aim = target(row.name, str(here["class"]))
        asked = "" if aim is None else f"{aim:g}"
        if aim is not None and row.ratio is not None:
            asked += ", reached" if row.ratio >= aim else ", missed"
        table.add_row(row.name, f"{row.ours:.4g}", theirs, row.unit, ratio, asked, row.note)
    return table


def _say_moved(rows: list[Row], baseline: Baseline, told: Console) -> None:
    here = machine()
    for key in ("processor", "class", "cores", "kernels"):
        if (before := baseline.machine.get(key)) != here[key]:
            told.print(
                f"The earlier run was on another machine: {key} {before}, now {here[key]}.", markup=False
            )
    found = moved(rows, baseline)
    known = [row.name for row in rows if row.name in baseline.rows]
    told.print(
        f"{len(found)} of {len(known)} rows moved by a tenth or more; {len(rows) - len(known)} are new."
    )
    for one in found:
        line = f"  {one.name}: {one.what} {one.before:.3g} -> {one.now:.3g} ({one.change:+.0%})"
        told.print(line, markup=False, highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
