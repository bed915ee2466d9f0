"""Tables of the papers: what is chosen on validation data, what is compared, what is written."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from coterie.launch.tables import CHOOSE_BY, SHOWN, epoch_one_cells, summarise, write


def history(validation: Sequence[float], test: Sequence[float]) -> list[dict[str, Any]]:
    """Return a history with one evaluation for each epoch; every test metric has the same value."""
    return [
        {"epoch": epoch, "metrics": {CHOOSE_BY: chosen, **dict.fromkeys(SHOWN, shown)}}
        for epoch, (chosen, shown) in enumerate(zip(validation, test, strict=True), start=1)
    ]


def cell(
    system: str, rate: float, seed: int, validation: Sequence[float], test: Sequence[float]
) -> dict[str, Any]:
    return {"system": system, "rate": rate, "seed": seed, "history": history(validation, test)}


CELLS = [
    # By validation, rate .2 at epoch 2 is best, although another cell has the best test metrics.
    cell("drift", 0.1, 0, [0.10, 0.11], [0.50, 0.90]),
    cell("drift", 0.1, 1, [0.10, 0.13], [0.50, 0.90]),
    cell("drift", 0.2, 0, [0.20, 0.30], [0.60, 0.70]),
    cell("drift", 0.2, 1, [0.20, 0.40], [0.60, 0.74]),
    cell("saros", 0.1, 0, [0.50, 0.40], [0.40, 0.80]),
    cell("saros", 0.1, 1, [0.50, 0.40], [0.46, 0.80]),
    cell("saros", 0.2, 0, [0.10, 0.10], [0.60, 0.80]),
    cell("saros", 0.2, 1, [0.10, 0.10], [0.62, 0.80]),
]
TRIVIAL: Mapping[str, Mapping[str, Any]] = {
    "random": {**{name: {"mean": 0.01, "std": None} for name in SHOWN}, "test_loss": {"mean": 1.0}}
}


def test_the_first_epoch_compares_means_over_the_seeds_at_each_rate() -> None:
    cells = {(one["rate"], one["metric"]): one for one in epoch_one_cells(CELLS)}
    assert len(cells) == 2 * len(SHOWN)
    at_one = cells[0.1, "ndcg@10"]
    assert (at_one["drift"], at_one["saros"], at_one["above"]) == (0.5, pytest.approx(0.43), True)
    at_two = cells[0.2, "ndcg@10"]
    assert (at_two["drift"], at_two["saros"], at_two["above"]) == (0.6, pytest.approx(0.61), False)


def test_rate_and_epoch_are_chosen_on_validation_data_for_all_seeds_together() -> None:
    best = summarise(CELLS, TRIVIAL)["best"]
    assert (best["drift"]["rate"], best["drift"]["epoch"]) == (0.2, 2)
    assert best["drift"]["validation"] == pytest.approx(0.35)
    assert best["drift"]["metrics"]["map@10"]["mean"] == pytest.approx(0.72)
    assert best["drift"]["metrics"]["map@10"]["std"] == pytest.approx(0.0282842, rel=1e-5)
    assert (best["saros"]["rate"], best["saros"]["epoch"]) == (0.1, 1)
    assert best["saros"]["metrics"]["ndcg@10"]["mean"] == pytest.approx(0.43)


def test_one_seed_has_no_spread() -> None:
    best = summarise([one for one in CELLS if one["seed"] == 0], TRIVIAL)["best"]
    assert best["drift"]["metrics"]["ndcg@10"] == {"mean": 0.7, "std": None}


def test_without_validation_nothing_is_chosen() -> None:
    cells = [{**one, "history": [{"epoch": 1, "metrics": dict.fromkeys(SHOWN, 0.5)}]} for one in CELLS]
    assert summarise(cells, TRIVIAL)["best"] == {"drift": {}, "saros": {}}


def test_trivial_rows_keep_only_what_the_table_shows() -> None:
    assert set(summarise(CELLS, TRIVIAL)["trivial"]["random"]) == set(SHOWN)


@pytest.mark.parametrize(("bias", "name"), [(False, "drift-set.json"), (True, "drift-set-bias.json")])
def test_a_table_is_written_under_the_name_of_its_data_set(tmp_path: Path, bias: bool, name: str) -> None:
    table = {
        "table": "drift",
        "dataset": {"name": "set"},
        "settings": {"drift": {"item_bias": bias}},
        "cells": CELLS,
    }
    path = write(table, tmp_path / "new" / "folder")
    assert path.name == name
    assert json.loads(path.read_text())["cells"] == CELLS
