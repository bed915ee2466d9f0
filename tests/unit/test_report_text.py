import io
import math
import re
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coterie.systems.reports import read_report
from coterie.telemetry.quantities import ABSENT
from coterie.telemetry.report import Report
from coterie.telemetry.report_text import tables

SAMPLE: Callable[[], dict[str, Any]] = runpy.run_path(str(Path(__file__).parents[1] / "sample_report.py"))[
    "sample_report"
]


def printed(report: Mapping[str, Any], *, width: int = 80, styled: bool = False, plain: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=styled, color_system="standard" if styled else None
    )
    for renderable in tables(read_report(report), plain=plain):
        console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_run_stands_first_and_every_reference_below_it() -> None:
    lines = printed(SAMPLE()).splitlines()
    first_words = [line.split()[0] for line in lines if line.strip()]
    rows = [word for word in first_words if word in {"SAROS", "Popularity", "Positive", "Random"}]
    assert rows == ["SAROS", "Popularity", "Positive", "Random"]
    assert first_words.index("DRIFT") < first_words.index("SAROS")


def test_five_metrics_fit_in_eighty_columns_unshortened() -> None:
    text = printed(SAMPLE())
    assert "…" not in text
    for mean in ("0.2144", "0.1219", "0.8792", "0.8371", "0.4621"):
        assert mean in text
    for std in ("± 0.0019", "± 0.0014", "± 0.0008", "± 0.0010", "± 0.0021"):
        assert std in text


def test_the_best_of_each_column_is_bold() -> None:
    text = printed(SAMPLE(), styled=True)
    assert re.search(r"\x1b\[1m *0\.9003", text)
    assert not re.search(r"\x1b\[1m *0\.8792", text)


def test_without_bold_type_the_best_has_a_star() -> None:
    text = printed(SAMPLE(), plain=True)
    assert re.search(r"\* 0\.9003", text)
    assert "* 0.8792" not in text
    assert "Best with a star." in text
    assert "bold" not in text


def test_what_came_of_the_run_stands_above_the_table() -> None:
    lines = printed(SAMPLE(), width=400).splitlines()
    assert lines[0].startswith("DRIFT is ")
    assert lines[1].startswith("From what the server received, the best attack")


def test_the_second_federation_has_lines_of_its_own() -> None:
    second = {
        "label": "in clear",
        "changes": ["secure_sum=clear"],
        "metrics": {"ndcg@10": 0.5},
        "attacks": {"cluster": {"auc": 0.9, "popularity_auc": 0.6}},
    }
    lines = printed({**SAMPLE(), "beside": second}, width=120).splitlines()
    at = lines.index("Beside it: in clear (secure_sum=clear) NDCG@10, all unseen items 0.5000")
    assert lines[at + 1] == "  Attack, cluster: AUC 0.9000 (popularity alone 0.6000)"


def test_the_facts_take_one_line_each() -> None:
    lines = printed(SAMPLE()).splitlines()
    assert "Messages: 597 MB in 42,285 calls, 3 refused or repeated" in lines
    assert "CPU time: 1 min 32 s over 7 services" in lines
    assert "Security: 1.41% of the CPU time" in lines
    assert "  of it: sealing and opening 0.85%, key agreement 0.42%, signatures 0.14%" in lines
    assert "Attack, requested rows: AUC 0.9989 (popularity alone 0.8712)" in lines
    assert "Duration: 3 min 27 s" in lines


def test_an_attack_on_ratings_has_its_accuracy_beside_the_guess() -> None:
    report = SAMPLE()
    report["system"] = "fedmf"
    report["attacks"] = {
        "reconstruction": {"auc": 1.0, "popularity_auc": 0.68, "rated": 0.99, "rated_guess": 0.5},
        "profiles": {"found": 0.25, "right": 1.0},
        "differencing": {"auc": None},
    }
    lines = [line for line in printed(report, width=120).splitlines() if line.startswith("Attack")]
    assert lines == [
        "Attack, reconstruction: AUC 1.0000 (popularity alone 0.6800), 99.0% of the ratings right (guessed 50.0%)",
        "Attack, profiles: 25.0% of the ratings in sums read off",
    ]


def test_brackets_in_a_name_are_no_markup() -> None:
    report = SAMPLE()
    report["dataset"]["name"] = "[red]set[/red]"
    report["label"] = "[bold]x"
    assert "[bold]x on [red]set[/red]" in printed(report)


def test_a_report_says_whether_floors_count_users() -> None:
    for experiment in (True, False):
        lines = printed({**SAMPLE(), "experiment": experiment}).splitlines()
        assert ("Experiment: floors count users, not devices" in lines) == experiment


def test_an_empty_report_prints_nothing() -> None:
    assert tables(Report()) == []


@pytest.mark.parametrize("name", sorted(SAMPLE()))
def test_any_section_may_be_missing(name: str) -> None:
    report = SAMPLE()
    del report[name]
    assert ("Duration" in printed(report)) == (name != "duration_s")


@pytest.mark.parametrize("nothing", [None, math.nan], ids=repr)
def test_a_score_that_was_not_measured_is_a_dash(nothing: float | None) -> None:
    report = {
        "system": "drift",
        "label": "DRIFT",
        "metrics": {"ndcg@10": {"mean": 0.25, "std": nothing}, "map@10": {"mean": nothing, "std": 0.1}},
    }
    row = next(line for line in printed(report).splitlines() if "0.2500" in line)
    assert row.split() == ["DRIFT", "0.2500", ABSENT]
    assert "±" not in printed(report)


def test_one_seed_alone_claims_no_spread_and_no_best() -> None:
    text = printed({"seeds": [7], "metrics": {"rmse": {"mean": 0.93, "std": None}}})
    assert "seeds" not in text
    assert "Best" not in text
