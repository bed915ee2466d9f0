"""The page on choosing quotes figures of the page of results, and systems that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coterie.systems.registry import systems

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line[1:-1].split("|")] for line in PAGE.splitlines() if line.startswith("|")
]
FIGURES = [row for row in ROWS if len(row) == 6 and row[1] in ("HR@10", "RMSE")]
FOLDED = re.findall(r"0\.\d+ ±\.\d+", PAGE.partition("283 of 943 users")[2])


def section(table: str) -> str:
    """Return the part of the page of results that is of a table."""
    (found,) = re.findall(
        rf"^## [^\n]*: {re.escape(table)}\n(.*?)(?=^## |\Z)", RESULTS, re.MULTILINE | re.DOTALL
    )
    return found


def figure(table: str, row: str, metric: str) -> str:
    """Return a cell of the first table of a section."""
    lines = [line for line in section(table).splitlines() if line.startswith("|")]
    head, *body = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return next(cells[head.index(metric)] for cells in body if cells[0] == row)


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: f"{row[0]}-{row[5]}")
def test_every_figure_is_in_the_table_that_it_names(row: list[str]) -> None:
    system, metric, federated, central, source, table = row
    table = table.strip("`")
    name, _, best = central.rpartition(", ")
    assert figure(table, system, metric) == federated
    assert figure(table, name, metric) == best
    data, split = source.split(", ")
    assert f"split {split}," in section(table)
    assert table.startswith(("compare-ranking-", "compare-rating-"))
    assert data in table


def test_the_best_central_models_are_the_best_of_their_tables() -> None:
    for row in FIGURES:
        name = row[3].rpartition(", ")[0]
        assert f"The best central model is {name} (" in section(row[5].strip("`"))


def test_figures_of_new_users_are_in_their_table() -> None:
    table = "fold-in-ranking-ml-100k"
    names = ("FCF", "EASE", "iALS")
    columns = ("never trained, folded in", "trained")
    assert [figure(table, name, column) for column in columns for name in names] == FOLDED


def test_every_system_has_a_line_and_new_users_are_served_by_those_that_say_so() -> None:
    named = {name for row in ROWS if len(row) == 3 for name in re.findall(r"`(\w+)`", row[1])}
    assert set(systems()) <= named
    served = " ".join(row[1] for row in ROWS if len(row) == 2 and row[0].startswith("gets")).lower()
    assert set(re.findall(r"\w+", served)) & set(systems()) == {
        name for name, system in systems().items() if system.folds_in
    }
