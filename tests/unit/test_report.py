"""The typed report: what it reads of other versions, and what it writes."""

import json
import math
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coterie.systems.report_reference import main, markdown, with_tables
from coterie.systems.shared.factor_report import FactorAttack
from coterie.telemetry.report import AttackFigures, Course, EvaluationPart, Report, RoundRecord

SAMPLE: Callable[[], dict[str, Any]] = runpy.run_path(str(Path(__file__).parents[1] / "sample_report.py"))[
    "sample_report"
]
PAGE = Path(__file__).parents[2] / "docs" / "report.md"
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.text(max_size=5), st.integers(), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def test_a_report_is_written_with_the_keys_that_it_was_read_with() -> None:
    stored = json.loads(json.dumps(SAMPLE()))
    assert Report.model_validate(stored).content() == stored
    assert Report.read(stored) == Report.model_validate(stored)


def test_keys_that_this_version_does_not_know_are_kept_and_written_again() -> None:
    stored = {
        "later": {"deep": [1, {"x": None}]},
        "history": [{"epoch": 1, "battery": 0.5}],
        "traffic": {"Poll": {"calls": 2, "retried": 1}},
    }
    assert Report.read(stored).content() == stored


def test_a_report_without_a_label_or_any_other_key_is_read() -> None:
    found = Report.read({"system": "drift"})
    assert (found.label, found.form, found.seeds, found.traffic, found.chosen) == ("", "", (), {}, None)
    assert found.content() == {"system": "drift"}


def test_a_key_is_null_only_where_it_was_given_as_null() -> None:
    assert Course(chosen=None, closed_share=None).content() == {"chosen": None, "closed_share": None}
    assert Course().content() == {}


@pytest.mark.parametrize(
    "number", [math.nan, math.inf, -math.inf, 10**400], ids=["nan", "inf", "-inf", "big"]
)
def test_a_number_that_is_not_finite_is_null(number: float) -> None:
    found = Report.read(
        {"duration_s": number, "metrics": {"rmse": number}, "attacks": {"a": {"auc": number}}}
    )
    assert found.content() == {
        "duration_s": None,
        "metrics": {"rmse": {"mean": None}},
        "attacks": {"a": {"auc": None}},
    }


def test_whole_numbers_stay_whole_and_those_of_arrays_become_plain() -> None:
    found = EvaluationPart(
        epoch=2, version=np.int64(3), time_s=2.0, metrics={"rmse": np.float32(0.5)}, later=np.float64(1.5)
    )
    assert json.dumps(found.content()) == (
        '{"epoch": 2, "version": 3, "time_s": 2.0, "metrics": {"rmse": 0.5}, "later": 1.5}'
    )


def test_what_is_malformed_is_left_out_and_the_rest_is_still_there() -> None:
    found = Report.read(
        {
            "run_id": 3,
            "system": "fedncf",
            "seeds": [0, "one", None],
            "history": [None, {"epoch": 1, "metrics": {"ndcg@10": "high", "map@10": 0.5}}, "text"],
            "rounds": "none",
            "traffic": {"Poll": {"calls": "many", "errors": 1}, "Fetch": 3},
            "protection": {"warnings": ["small cohorts", 4], "devices": []},
            "network": None,
        }
    )
    assert found.content() == {
        "system": "fedncf",
        "seeds": [0],
        "history": [{"epoch": 1, "metrics": {"map@10": 0.5}}],
        "traffic": {"Poll": {"errors": 1}},
        "protection": {"warnings": ["small cohorts"]},
    }


@given(st.sampled_from(sorted(Report.model_fields)), ANYTHING)
def test_any_value_may_stand_at_any_key_without_harm_to_the_others(name: str, value: object) -> None:
    stored = {"later": 1, "events": [{"text": "joined"}], name: value}
    found = Report.read(stored)
    assert found.model_extra == {"later": 1}
    assert name == "events" or found.events[0].text == "joined"
    assert Report.model_validate(found.content()) == found
    json.dumps(found.content(), allow_nan=False)


@given(st.one_of(st.none(), st.text(), st.integers(), st.floats(), st.lists(st.integers())))
def test_a_section_of_another_shape_reads_as_absent(value: object) -> None:
    found = Report.read({"traffic": value, "history": value, "dataset": value})
    assert found.traffic == {}
    assert found.history == ()
    assert found.dataset.content() == {}


@given(ANYTHING)
def test_anything_reads_as_a_report(value: object) -> None:
    assert isinstance(Report.read(value), Report)


def test_a_run_cannot_write_a_part_of_another_shape() -> None:
    with pytest.raises(ValidationError, match="expected a number"):
        Course(updates="many")
    with pytest.raises(ValidationError, match="purpose"):
        Course().having(rounds=[{"purpose": 3}])


def test_a_copy_with_more_parts_keeps_those_that_were_given() -> None:
    made = Course(updates=3, later=1).having(rounds=[RoundRecord.model_validate({"pass": 2})])
    assert made.content() == {"updates": 3, "rounds": [{"pass": 2}], "later": 1}


def test_every_key_of_every_part_is_described_in_the_tables() -> None:
    lines = [line for line in markdown().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert [cell[0] for cell in cells[: len(Report.model_fields)]] == [
        f"`{key}`" for key in Report.model_fields
    ]
    assert all(len(cell) == 3 and cell[1] and cell[2].endswith((".", ")", "`")) for cell in cells)
    assert "| `pass` | number |" in markdown()


def test_the_tables_are_written_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "report.md"
    before, mark, after = PAGE.read_text("utf-8").partition("| key | takes |")
    page.write_text(f"{before}| old |\n{mark}{after}", "utf-8")
    main(["--write", str(page)])
    assert page.read_text("utf-8") == PAGE.read_text("utf-8")
    with pytest.raises(ValueError, match="no place for tables"):
        with_tables("a page")


def test_the_module_prints_the_tables() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "coterie.systems.report_reference"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout == markdown()
    assert printed.stderr == ""


def test_tags_that_are_named_are_said_in_words_beside_those_of_the_plain_form() -> None:
    named = AttackFigures(tags_named=0.025, unsplit_named=0.426, client_tags_named=1.0)
    said = "2.50% of the tags named (unsplit 42.6%, with a client 100%)"
    assert named.words() == [said]
    assert (named.reveals(), FactorAttack(**named.given()).reveals()) == (said, said)
    assert AttackFigures(tags=3).words() == []
    assert AttackFigures(auc=0.5).reveals() == ""
