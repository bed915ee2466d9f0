"""``coterie evaluate``: a paper's table, run again over the network, ours beside the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.options import JsonOption, SetOption
from coterie.cli.output import Output

__all__ = ["evaluate"]


def evaluate(
    table: Annotated[str, typer.Option("--table", help="Which table: drift.")],
    file: Annotated[Path, typer.Argument(help="A run whose settings hold for every cell.")] = Path(
        "examples/drift-genres.toml"
    ),
    data: Annotated[Path | None, typer.Option("--data", help="A data set; synthetic when absent.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed instead of three.")] = False,
    sets: SetOption = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the table's JSON.")] = Path("runs/tables"),
    json: JsonOption = False,
) -> None:
    """Run a paper's table again and print ours beside the reference.

    Rate and epoch are chosen on validation data, with the same budget for every system.
    """
    if table != "drift":
        raise typer.BadParameter(f"{table!r} is no table; there is: drift", param_hint="--table")
    output = Output("evaluate", as_json=json)
    from coterie.config.load import load
    from coterie.config.run import RunSettings

    given = list(sets or ())
    if data is not None:
        given.append(f"data.path={str(data)!r}")
    settings = load(RunSettings, file, sets=given).settings

    from coterie.launch import tables
    from coterie.telemetry.logs import configure

    configure("error", service="launcher")
    made = tables.drift_table(settings, seeds=(0,) if quick else (0, 1, 2), say=output.say)
    path = tables.write(made, out)
    _print(output, made)
    output.say(f"table: {path}")
    output.finish({"path": path, "table": made})


def _print(output: Output, made: dict[str, Any]) -> None:
    from rich.table import Table

    summary, shown = made["summary"], ("ndcg@10", "map@10", "ndcg_test_items@10", "map_test_items@10")
    dataset = made["dataset"]
    first = Table(
        title=f"After epoch 1 on {dataset['name']}: DRIFT / SAROS (means of {len(made['seeds'])} seeds)"
    )
    first.add_column("rate")
    for metric in shown:
        first.add_column(metric, justify="right")
    for rate in made["rates"]:
        cells = {cell["metric"]: cell for cell in summary["epoch_1"] if cell["rate"] == rate}
        first.add_row(
            str(rate),
            *(
                f"{cells[m]['drift']:.4f} / {cells[m]['saros']:.4f}{'' if cells[m]['above'] else ' (below)'}"
                for m in shown
            ),
        )
    best = Table(title=f"At the rate and epoch chosen by {made['chosen_by']}")
    for name in ("system", "rate", "epoch", *shown):
        best.add_column(name, justify="left" if name == "system" else "right")
    for system, row in summary["best"].items():
        if not row:
            best.add_row(system, "", "", "no validation data to choose by")
            continue
        best.add_row(system, str(row["rate"]), str(row["epoch"]), *_cells(row["metrics"], shown))
    for name, metrics in summary["trivial"].items():
        best.add_row(name, "", "", *_cells(metrics, shown))
    output.say(first, best, f"paper: {made['paper']}")


def _cells(metrics: dict[str, Any], shown: tuple[str, ...]) -> list[str]:
    return [
        f"{metrics[name]['mean']:.4f}" + (f" ± {metrics[name]['std']:.4f}" if metrics[name]["std"] else "")
        for name in shown
    ]
