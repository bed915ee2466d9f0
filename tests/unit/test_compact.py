"""Files of figures: a line for each row, and nothing lost."""

import json
from pathlib import Path

import numpy as np
import pytest

from coterie.studies.tables.compact import row_lines

KEPT = sorted((Path(__file__).parents[2] / "docs" / "results").glob("*.json"))


def test_each_key_and_each_row_has_a_line() -> None:
    made = {"table": "a", "seeds": [0, 1], "rows": [{"row": "x", "step": 1}, {"row": "y"}], "tried": []}
    assert row_lines(made).splitlines() == [
        "{",
        '"table":"a",',
        '"seeds":[0,1],',
        '"rows":[',
        '{"row":"x","step":1},',
        '{"row":"y"}',
        "],",
        '"tried":[]',
        "}",
    ]
    assert json.loads(row_lines(made)) == made


def test_numbers_of_arrays_become_plain_ones() -> None:
    assert json.loads(row_lines({"rows": [{"users": np.int64(3)}]})) == {"rows": [{"users": 3.0}]}


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_figures_have_a_line_for_each_row(path: Path) -> None:
    text = path.read_text("utf-8")
    made = json.loads(text)
    assert row_lines(made) == text
    assert len(text.splitlines()) <= 50 + sum(
        len(made[key]) for key in ("rows", "summary", "differences", "blocks")
    )
