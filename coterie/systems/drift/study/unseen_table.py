"""Table of DRIFT with unseen items: both forms, SAROS with the same pairs, and trivial rows, compared user by user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.config.run import RunSettings
from coterie.evaluation.selection import SelectedModel
from coterie.studies.run_data import Feed
from coterie.studies.tables.paper_table import PaperTable, PrintedTable, Results
from coterie.studies.tables.printed_tables import ABSENT, PaperLine, beside
from coterie.studies.tables.row import Choices, Engine, Options, OverServices, Row, with_options
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.study.in_one_process import Trainer, train_here
from coterie.systems.drift.study.table import CHOOSE_BY, SHOWN, over_services, trivial_rows

__all__ = ["DRIFT_UNSEEN", "WITH_UNSEEN"]

_RATES_PUBLISHED = {"drift.rate": Choices((0.1, 0.2, 0.5))}
"""Step sizes of the published loss, a mean over the pairs of a block."""

_RATES = {"drift.rate": Choices((0.05, 0.1, 0.2))}
"""Step sizes of the loss with unseen items, a sum over the liked items of a block; equally many."""

_SERVICES = ("services-own", "services-shielded")
"""Rows that are runs of real services; they have the table's settings, without tuning."""

_PAIRS = (
    ("own", "published"),
    ("own", "popularity"),
    ("own", "saros"),
    ("shielded-own", "own"),
    ("shielded-all", "own"),
    ("shielded-all", "saros"),
)

_COMPARED_BY = ("ndcg@10", "ndcg_test_items@10")

WITH_UNSEEN: dict[str, Any] = {
    "name": "drift-unseen",
    "system": "drift",
    "drift": {
        "form": "shielded",
        "unseen": "own",
        "item_bias": True,
        "dim": 17,
        "rate": 0.05,
        "epochs": 10,
    },
    "federation": {"owners": 0, "owner_processes": 2, "hosts": 1},
}
"""The shielded form with unseen items, one owner for each genre."""


_THETA = {"drift.theta": 8}
"""Blocks of an update of the published form; more than the paper's two, for speed."""


def _of(form: str, unseen: str) -> dict[str, Any]:
    return {"drift.form": form, "drift.unseen": unseen, **(_THETA if form == "published" else {})}


def _here(what: Trainer) -> Engine:
    """Return the engine that trains in one process."""

    def engine(settings: RunSettings, options: Options, feed: Feed, seed: int) -> SelectedModel:
        return train_here(what, with_options(settings, options).table(DriftSettings), feed, seed)

    return engine


def _differences(results: Results) -> PrintedTable | None:
    """Return paired differences of rows, with their intervals over users and seeds."""
    labels = {row.name: row.label for row in results.rows}
    lines = []
    for first, second in _PAIRS:
        found = [results.difference(first, second, metric) for metric in _COMPARED_BY]
        if all(one is None for one in found):
            continue
        shown = (
            ABSENT
            if one is None
            else f"{one.mean:+.4f} ({one.low_with_seeds:+.4f} to {one.high_with_seeds:+.4f})"
            for one in found
        )
        lines.append((f"{labels[first]} minus {labels[second]}", *shown))
    if not lines:
        return None
    title = f"Differences of the same users (95% over users and seeds), {results.dataset}"
    return PrintedTable(title, ("rows", *(SHOWN[metric] for metric in _COMPARED_BY)), tuple(lines))


def _rows() -> tuple[Row, ...]:
    as_published: Mapping[str, Any] = {
        **_of("published", "none"),
        "drift.item_bias": False,
        "drift.dim": 16,
    }
    return (
        Row(
            "published",
            "DRIFT, as published",
            _here("published"),
            options=as_published,
            space=_RATES_PUBLISHED,
        ),
        Row("own", "DRIFT + own items", _here("published"), options=_of("published", "own"), space=_RATES),
        Row(
            "shielded-own",
            "shielded, + own items",
            _here("shielded"),
            options=_of("shielded", "own"),
            space=_RATES,
        ),
        Row(
            "shielded-all",
            "shielded, + all items",
            _here("shielded"),
            options=_of("shielded", "all"),
            space=_RATES,
        ),
        Row(
            "saros",
            "SAROS, the same pairs",
            _here("saros"),
            options=_of("published", "own"),
            space=_RATES,
            note="all data in one place",
        ),
        *trivial_rows(),
        Row(
            "services-own",
            "DRIFT + own items, services",
            OverServices(over_services),
            options=_of("published", "own"),
            defaults=True,
        ),
        Row(
            "services-shielded",
            "shielded, + own items, services",
            OverServices(over_services),
            options=_of("shielded", "own"),
            defaults=True,
        ),
    )


DRIFT_UNSEEN = PaperTable(
    name="drift-unseen",
    title="DRIFT with unseen items beside SAROS with the same pairs",
    paper="not in the paper: liked items are also compared with items that the user has not seen",
    settings=WITH_UNSEEN,
    prepare=lambda settings, dataset: settings,
    rows=_rows,
    sections=(
        beside(
            f"At the rate and epoch chosen by {CHOOSE_BY}",
            {"": tuple(PaperLine(row.name, row.label, variant=row.name in _SERVICES) for row in _rows())},
            {},
            SHOWN,
            digits=4,
        ),
        _differences,
    ),
    headline="ndcg@10",
    choose_by=CHOOSE_BY,
    compared=_PAIRS,
    compared_by=_COMPARED_BY,
    enumerate_options=True,
    studies={"services": _SERVICES},
    passes="drift.epochs",
    quick_passes=2,
)
"""Table of DRIFT with unseen items."""
