"""Tables of the papers, run again: every cell a real federation, every row with the same tuning budget.

Rates and epochs are chosen on the validation part and never on the test part; trivial rows stand beside.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.launch import experiment

__all__ = ["PAPER", "RATES", "SHOWN", "drift_table", "epoch_one_cells", "summarise"]

RATES = (0.1, 0.2, 0.5)
"""Step sizes tried for both systems."""

SHOWN = ("ndcg@10", "map@10", "ndcg_test_items@10", "map_test_items@10")
"""Metrics of the table: over all unseen items, and over the user's own test items."""

CHOOSE_BY = "validation_ndcg_items@10"
"""Metric by which rate and epoch are chosen: the ranking of the user's own validation items."""

PAPER = "DRIFT (2022), figure 6.2: MAP and NDCG above SAROS after the first epoch, equal at convergence"

Say = Callable[[str], None]
History = Sequence[Mapping[str, Any]]


def drift_table(
    settings: RunSettings,
    *,
    rates: Sequence[float] = RATES,
    seeds: Sequence[int] = (0, 1, 2),
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Run DRIFT over the network and SAROS beside it, for every rate and seed.

    Returns
    -------
    dict
        JSON-ready: ``cells`` (system, rate, seed, history), ``trivial`` rows, and what `summarise` makes of them.
    """
    cells: list[dict[str, Any]] = []
    trivial: dict[str, dict[str, Any]] = {}
    about: dict[str, Any] = {}
    for rate in rates:
        for seed in seeds:
            one = settings.model_copy(
                update={
                    "seeds": (seed,),
                    "drift": settings.drift.model_copy(update={"rate": rate}),
                    "federation": experiment.unrecorded(settings),
                }
            )
            run_id = experiment.new_run_id(settings.name)
            report, folder = asyncio.run(experiment.run(one, run_id, lambda _seed, _event: None))
            about = {key: report[key] for key in ("dataset", "settings", "versions", "machine")}
            histories = {"drift": report["history"], "saros": report["reference"]["saros"]["history"]}
            for system, history in histories.items():
                cells.append({"system": system, "rate": rate, "seed": seed, "history": history})
            for name in ("random", "popularity", "positive_share"):
                trivial[name] = report["reference"][name]["metrics"]
            say(
                f"rate {rate} seed {seed}: {_brief(histories)}  ({report['duration_s']:.0f} s, {folder.name})"
            )
    return {
        "table": "drift",
        "paper": PAPER,
        "rates": list(rates),
        "seeds": list(seeds),
        "chosen_by": CHOOSE_BY,
        **about,
        "cells": cells,
        "trivial": trivial,
        "summary": summarise(cells, trivial),
    }


def _brief(histories: Mapping[str, History]) -> str:
    parts = []
    for system, history in histories.items():
        last = history[-1]["metrics"]
        parts.append(f"{system} ndcg {last['ndcg@10']:.4f} / test items {last['ndcg_test_items@10']:.4f}")
    return ", ".join(parts)


def _by_epoch(history: History) -> dict[int, Mapping[str, float]]:
    """Return the metrics at the end of each epoch."""
    return {entry["epoch"]: entry["metrics"] for entry in history}


def epoch_one_cells(cells: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compare the systems after the first epoch, for every rate and metric, as means over the seeds."""
    for rate in sorted({cell["rate"] for cell in cells}):
        for metric in SHOWN:
            means = {
                system: float(
                    np.mean(
                        [
                            _by_epoch(cell["history"])[1][metric]
                            for cell in cells
                            if cell["system"] == system and cell["rate"] == rate
                        ]
                    )
                )
                for system in ("drift", "saros")
            }
            yield {"rate": rate, "metric": metric, **means, "above": means["drift"] > means["saros"]}


def _chosen(cells: Sequence[Mapping[str, Any]], system: str) -> dict[str, Any]:
    """Choose rate and epoch of a system by validation, for all seeds together, and return its test metrics."""
    best: tuple[float, float, int] | None = None
    for rate in sorted({cell["rate"] for cell in cells}):
        mine = [_by_epoch(c["history"]) for c in cells if c["system"] == system and c["rate"] == rate]
        for epoch in mine[0]:
            score = float(np.mean([history[epoch].get(CHOOSE_BY, np.nan) for history in mine]))
            if np.isfinite(score) and (best is None or score > best[0]):
                best = (score, rate, epoch)
    if best is None:
        return {}
    _, rate, epoch = best
    rows = [_by_epoch(c["history"])[epoch] for c in cells if c["system"] == system and c["rate"] == rate]
    return {
        "rate": rate,
        "epoch": epoch,
        "validation": best[0],
        "metrics": {
            metric: {
                "mean": float(np.mean([row[metric] for row in rows])),
                "std": float(np.std([row[metric] for row in rows], ddof=1)) if len(rows) > 1 else None,
            }
            for metric in SHOWN
        },
    }


def summarise(cells: Sequence[Mapping[str, Any]], trivial: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the table shows: the cells after epoch 1, each system at its validated best, trivial rows."""
    return {
        "epoch_1": list(epoch_one_cells(cells)),
        "best": {system: _chosen(cells, system) for system in ("drift", "saros")},
        "trivial": {
            name: {metric: metrics[metric] for metric in SHOWN if metric in metrics}
            for name, metrics in trivial.items()
        },
    }


def write(table: Mapping[str, Any], folder: Path) -> Path:
    """Write a table as JSON and return where."""
    folder.mkdir(parents=True, exist_ok=True)
    bias = "-bias" if table["settings"]["drift"]["item_bias"] else ""
    path = folder / f"{table['table']}-{table['dataset']['name']}{bias}.json"
    path.write_text(json.dumps(table, indent=1, default=float))
    return path
