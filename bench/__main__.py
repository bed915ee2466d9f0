"""Run benchmarks: ``python -m bench [--only NAME] [--json FILE] [--data PATH] [--smallest]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import (
    connections,
    ease,
    encrypted,
    expansion,
    federation,
    graph_step,
    ledger,
    local_step,
    masked,
    noise,
    paillier,
    resets,
    rounds,
    scale,
    sealed,
    serving,
    sparse,
    submit,
    wan,
)
from bench.rows import Ask, Row, machine
from coterie.telemetry.logs import configure

SUITES: dict[str, Callable[[Ask], Iterator[Row]]] = {
    "sealed": sealed.rows,
    "drift.epoch": federation.epoch_rows,
    "drift.growth": federation.growth_rows,
    "masked": masked.rows,
    "noise": noise.rows,
    "paillier": paillier.rows,
    "sparse": sparse.rows,
    "ledger": ledger.rows,
    "ease": ease.rows,
    "local_step": local_step.rows,
    "graph_step": graph_step.rows,
    "round": rounds.rows,
    "round.empty": rounds.empty_rows,
    "submit": submit.rows,
    "encrypted": encrypted.rows,
    "expansion": expansion.rows,
    "scale": scale.rows,
    "serving": serving.rows,
    "connections": connections.rows,
    "resets": resets.rows,
    "wan": wan.rows,
}

ON_REQUEST = frozenset({"encrypted", "expansion", "scale", "serving", "connections", "resets", "wan"})
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
    arguments = parser.parse_args()
    if arguments.only is not None and arguments.only not in SUITES:
        parser.error(f"no benchmark {arguments.only!r}; there are: {', '.join(SUITES)}")

    configure("error", service="bench")
    console = Console(stderr=True)
    rows: list[Row] = []
    for name, suite in SUITES.items():
        if arguments.only == name or (arguments.only is None and name not in ON_REQUEST):
            for row in suite(Ask(arguments.data, arguments.smallest)):
                console.print(f"[dim]{row.name}[/dim] {row.ours:.4g} {row.unit}")
                rows.append(row)
    table = Table(title=", ".join(f"{key} {value}" for key, value in machine().items()))
    for column in ("name", "ours", "theirs", "unit", "ratio", "note"):
        table.add_column(column, justify="right" if column in ("ours", "theirs", "ratio") else "left")
    for row in rows:
        theirs = "" if row.theirs is None else f"{row.theirs:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        table.add_row(row.name, f"{row.ours:.4g}", theirs, row.unit, ratio, row.note)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
