"""Table of DRIFT with unseen items: both forms, SAROS with the same pairs, and trivial rows, compared user by user."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from coterie.config.run import RunSettings
from coterie.evaluation.selection import SelectedModel
from coterie.studies.run_data import Feed
from coterie.studies.tables.paper_table import PaperTable, PrintedTable, Results
from coterie.studies.tables.printed_tables import PaperLine, beside, differences
from coterie.studies.tables.row import Choices, Engine, Options, OverServices, Row, with_options
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.study.in_one_process import Trainer, train_here
from coterie.systems.drift.study.table import CHOOSE_BY, SHOWN, over_services, trivial_rows

__all__ = ["DRIFT_UNSEEN", "WITH_UNSEEN"]

_RATES_PUBLISHED = {"drift.rate": Choices((0.1, 0.2, 0.5))}
"""Step sizes of the published loss, a mean over the pairs of a block."""

_RATES = {"drift.rate": Choices((0.05, 0.1, 0.2))}
"""Step sizes of the loss with unseen items, a sum over the liked items of a block; equally many."""

_FORMS: Mapping[str, tuple[str, Trainer, str]] = {
    "own": ("DRIFT + own items", "published", "own"),
    "shielded-own": ("shielded, + own items", "shielded", "own"),
    "shielded-all": ("shielded, + all items", "shielded", "all"),
}
"""Label, form and source of unseen items of the rows in one process, by name."""

_SERVICES = {"services-own": "own", "services-shielded": "shielded-own"}
"""Rows that are runs of real services with the table's settings, without tuning, and the rows that they are runs of."""

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


def _figures(results: Results) -> PrintedTable | None:
    """Return the rows' figures, with the weights of the log-odds below them."""
    lines = tuple(PaperLine(row.name, row.label, variant=row.name in _SERVICES) for row in _rows())
    title = f"At the rate and epoch chosen by {CHOOSE_BY}"
    found = beside(title, {"": lines}, {}, SHOWN, digits=4)(results)
    return found and dataclasses.replace(found, notes=tuple(_weights(results)))


def _weights(results: Results) -> Iterator[str]:
    """Yield for each row with log-odds their weights in both rankings, seed by seed."""
    for row in results.rows:
        found = [cell.record["facts"].get("bias_weights") for cell in results.cells[row.name]]
        if all(found):
            shown = ("; ".join(f"{one[ranking]:g}" for one in found) for ranking in ("unseen", "items"))
            unseen, items = shown
            yield f"{row.label}: weight of the log-odds {unseen} among unseen items, {items} among a user's own."


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
        *(
            Row(name, label, _here(form), options=_of(form, unseen), space=_RATES)
            for name, (label, form, unseen) in _FORMS.items()
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
        *(
            Row(
                name,
                f"{label}, services",
                OverServices(over_services),
                options=_of(form, unseen),
                defaults=True,
            )
            for name, (label, form, unseen) in ((name, _FORMS[one]) for name, one in _SERVICES.items())
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
        _figures,
        differences("Paired differences over users", _PAIRS, _COMPARED_BY),
    ),
    headline="ndcg@10",
    choose_by=CHOOSE_BY,
    compared=_PAIRS,
    compared_by=_COMPARED_BY,
    enumerate_options=True,
    studies={"services": tuple(_SERVICES)},
    passes="drift.epochs",
    quick_passes=2,
)
"""Table of DRIFT with unseen items."""
