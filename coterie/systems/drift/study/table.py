"""Table of DRIFT's paper: quality after the first epoch and at convergence, compared with SAROS."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.data import Dataset
from coterie.evaluation.selection import SelectedModel, best_of
from coterie.studies import experiment
from coterie.studies.run_data import Feed
from coterie.studies.run_plan import new_run_id
from coterie.studies.services_run import RunServices
from coterie.studies.tables.cell import Cell
from coterie.studies.tables.paper_table import PaperTable, PrintedTable, Results
from coterie.studies.tables.printed_tables import PaperLine, beside
from coterie.studies.tables.row import Choices, Engine, Options, OverServices, Row, with_options
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.study.in_one_process import rank_here
from coterie.systems.drift.study.references import references

__all__ = ["CHOOSE_BY", "DRIFT", "SHOWN", "after_first_epoch", "over_services", "trivial_rows"]

SHOWN = {
    "ndcg@10": "NDCG@10",
    "map@10": "MAP@10",
    "ndcg_test_items@10": "NDCG@10 test items",
    "map_test_items@10": "MAP@10 test items",
}
"""Metrics of the table: over all unseen items, and over the user's own test items."""

CHOOSE_BY = "validation_ndcg@10"
"""Metric by which rate and epoch are chosen: that of the headline, on the validation part."""

_RATES = {"drift.rate": Choices((0.1, 0.2, 0.5))}
"""Step sizes tried for both systems."""


def over_services(services: RunServices) -> Engine:
    """Return the engine that trains over the network: real services, as ``coterie run`` starts them."""

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        one = with_options(settings, options).model_copy(
            update={"seeds": (seed,), "reference": False, "federation": experiment.unrecorded(settings)}
        )
        run_id = new_run_id(settings.name)
        report, folder = asyncio.run(experiment.run(one, run_id, lambda _seed, _event: None, services))
        return _trained(
            [one.content() for one in report.history], {"run": folder.name, "secure_sum": settings.secure_sum}
        )

    return engine


def _saros(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
    own = with_options(settings, options).table(DriftSettings)
    return _trained(references(feed, own, seed, only=("saros",))["saros"].history, {})


def _trained(history: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> SelectedModel:
    # The last evaluation in an epoch, at its end, counts.
    by_epoch = {entry["epoch"]: entry for entry in history}
    ends = [
        {"step": epoch, "train_loss": entry["train_loss"], "metrics": entry["metrics"]}
        for epoch, entry in by_epoch.items()
    ]
    best = best_of(ends, CHOOSE_BY)
    return SelectedModel(ends, best, ends[best]["metrics"], facts=facts)


def after_first_epoch(results: Results) -> PrintedTable | None:
    """Compare DRIFT and SAROS after the first epoch, at every rate, as means over the seeds."""
    if not {"drift", "saros"} <= set(results.tried):
        return None
    lines = []
    for rate in dict.fromkeys(cell.record["options"]["drift.rate"] for cell in results.tried["drift"]):
        cells = {name: _at(results.tried[name], rate) for name in ("drift", "saros")}
        line = [str(rate)]
        for metric in SHOWN:
            drift, saros = (
                float(np.mean([cell.record["history"][0]["metrics"][metric] for cell in cells[name]]))
                for name in ("drift", "saros")
            )
            line.append(f"{drift:.4f} / {saros:.4f}{'' if drift > saros else ' (below)'}")
        lines.append(tuple(line))
    title = f"After epoch 1 on {results.dataset}: DRIFT / SAROS, means of {len(results.seeds)} seeds"
    return PrintedTable(title, ("rate", *SHOWN.values()), tuple(lines))


def _at(cells: Sequence[Cell], rate: float) -> list[Cell]:
    return [cell for cell in cells if cell.record["options"]["drift.rate"] == rate]


def _as_given(settings: RunSettings, dataset: Dataset) -> RunSettings:
    return settings


def trivial_rows() -> tuple[Row, ...]:
    """Return the rows that learn nothing of single users."""

    def engine(name: str) -> Engine:
        return lambda settings, options, feed, seed: rank_here(name, feed, seed)

    return tuple(
        Row(name, label, engine(name))
        for name, label in (
            ("popularity", "Popularity"),
            ("positive_share", "Positive share"),
            ("random", "Random order"),
        )
    )


def _rows() -> tuple[Row, ...]:
    return (
        Row("drift", "DRIFT", OverServices(over_services), space=_RATES),
        Row("saros", "SAROS", _saros, space=_RATES, note="all data in one place"),
        *trivial_rows(),
    )


AS_PUBLISHED: dict[str, Any] = {
    "name": "drift-genres",
    "system": "drift",
    "drift": {"dim": 16, "rate": 0.2, "theta": 2, "epochs": 10},
    "federation": {"owners": 0, "owner_processes": 2, "hosts": 1},
}
"""One data owner for each genre, as in the paper; the same as ``examples/drift-genres.toml``."""

DRIFT = PaperTable(
    name="drift",
    title="DRIFT beside SAROS",
    paper="DRIFT (2022), figure 6.2: MAP and NDCG above SAROS after the first epoch, equal at convergence",
    settings=AS_PUBLISHED,
    prepare=_as_given,
    rows=_rows,
    sections=(
        after_first_epoch,
        beside(
            f"At the rate and epoch chosen by {CHOOSE_BY}",
            {"": tuple(PaperLine(row.name, row.label) for row in _rows())},
            {},
            SHOWN,
            digits=4,
        ),
    ),
    headline="ndcg@10",
    choose_by=CHOOSE_BY,
    enumerate_options=True,
    passes="drift.epochs",
    quick_passes=2,
    suffix=lambda settings: "-bias" if settings.table(DriftSettings).item_bias else "",
)
