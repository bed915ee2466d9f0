"""Several tables one after the other: what fails or does not fit keeps none of the others from being made."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import invoke
from coterie.errors import DataError, RunError
from coterie.studies import tables
from coterie.studies.tables.every_table import SUMMARY, MadeTable, in_turn, side_by_side, spent, summary_of
from coterie.studies.tables.kept_file import write_whole

SMALL = (
    *("--set", "data.synthetic.users=40", "--set", "data.synthetic.items=60"),
    *("--set", "data.synthetic.interactions=900"),
)


def one(path: Path, seconds: float, *, by: str = "validation_rmse", **figures: float) -> MadeTable:
    """Return a table of rows with a value on validation data, and ten times as much on test data."""
    summary = [
        {"row": row, "label": row.upper(), "metrics": {by: {"mean": value}, "rmse": {"mean": 10 * value}}}
        for row, value in figures.items()
    ]
    rows = [{"row": row, "seed": seed, "seconds": seconds} for row in figures for seed in (0, 1)]
    content: dict[str, Any] = {
        "dataset": {"name": "tiny"},
        "headline": "rmse",
        "chosen_by": by,
        "rows": rows,
        "tried": [],
        "summary": summary,
    }
    return MadeTable(content, path)


def test_a_table_that_fails_or_does_not_fit_keeps_no_other_from_being_made(tmp_path: Path) -> None:
    def unfit() -> Sequence[MadeTable]:
        raise DataError("no ratings to predict")

    def broken() -> Sequence[MadeTable]:
        raise RunError("no sum was formed")

    said: list[str] = []
    outcomes = in_turn(
        {"unfit": unfit, "broken": broken, "good": lambda: [one(tmp_path / "good.json", 1.0, a=0.5)]},
        said.append,
    )
    found = summary_of(outcomes)
    assert [table["table"] for table in found["tables"]] == ["good"]
    assert found["left_out"] == {"unfit": "no ratings to predict"}
    assert found["failed"] == {"broken": "no sum was formed"}
    assert "--- good: table 3 of 3 ---" in said
    assert "broken: failed: no sum was formed" in said


def test_an_error_of_the_code_is_no_table_left_out() -> None:
    def wrong() -> Sequence[MadeTable]:
        raise KeyError("row")

    with pytest.raises(KeyError):
        in_turn({"wrong": wrong})


@pytest.mark.parametrize(("by", "best"), [("validation_rmse", "B"), ("validation_ndcg@10", "A")])
def test_the_best_row_of_the_summary_is_that_of_validation_and_its_figure_that_of_the_test(
    tmp_path: Path, by: str, best: str
) -> None:
    made = one(tmp_path / "tiny.json", 2.0, by=by, a=0.9, b=0.8)
    (found,) = summary_of(in_turn({"tiny": lambda: [made]}))["tables"]
    assert (found["best"], found["value"]) == (best, pytest.approx(9.0 if best == "A" else 8.0))
    assert (found["rows"], found["seconds"]) == (2, 8.0)


def test_the_time_of_a_row_counts_its_trials_and_every_combination_once(tmp_path: Path) -> None:
    trials = tmp_path / "trials.json"
    trials.write_text(
        json.dumps({"rows": {"a": [{"seconds": 5.0}, {"seconds": 6.0}], "other": [{"seconds": 9.0}]}})
    )
    plain = one(tmp_path / "plain.json", 1.0, a=0.5, b=0.4)
    tuned = MadeTable(plain.content, plain.path, trials)
    assert [(row.row, row.seconds) for row in spent(in_turn({"plain": lambda: [tuned]}))] == [
        ("a", 13.0),
        ("b", 2.0),
    ]
    # The row's own cells are among those of its combinations.
    content = {**plain.content, "tried": [{"row": "a", "seconds": 1.0}] * 6}
    found = spent(in_turn({"plain": lambda: [MadeTable(content, plain.path)]}))
    assert [(row.row, row.seconds) for row in found] == [("a", 6.0), ("b", 2.0)]


def test_a_file_that_could_not_be_written_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "trials.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    assert [one.name for one in path.parent.iterdir()] == ["trials.json"]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_the_command_makes_several_tables_and_sums_up(
    jobs: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", "--table", "privmvmf-readings,compare,compare", "--systems", "ease", "--quick"]
    arguments += ["--budget", "1", "--out", str(tmp_path), "--json", "--jobs", jobs, *SMALL]
    assert invoke(arguments) == 0
    printed = capfd.readouterr()
    found = json.loads(printed.out)["result"]
    assert [one["table"] for one in found["tables"]] == [
        "privmvmf-readings-synthetic",
        "compare-ranking-synthetic",
    ]
    assert json.loads((tmp_path / "quick" / SUMMARY).read_text())["tables"] == found["tables"]
    assert all(Path(one["path"]).parent == tmp_path / "quick" for one in found["tables"])
    assert "The rows that took longest:" in printed.err
    assert "Quick: rows that are runs train for at most 10 passes." in printed.err
    mvmf = json.loads(Path(found["tables"][0]["path"]).read_text())
    assert {one["options"]["rounds.passes"] for one in mvmf["rows"] if one["row"].startswith("fedmvmf")} == {
        10
    }
    # Whatever is done is taken over.
    assert invoke([*arguments, "--resume"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["result"]["rows"] == found["rows"]
    lines = [line for line in printed.err.splitlines() if ", seed 0: " in line]
    assert len(lines) == sum(one["rows"] for one in found["tables"])
    assert all("taken over" in line for line in lines)


def test_a_table_that_the_data_does_not_suit_is_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "liked.csv"
    lines = [f"u{user},i{(user + item) % 12},5,{item}" for user in range(12) for item in range(6)]
    path.write_text("\n".join(["user,item,rating,timestamp", *lines, ""]))
    arguments = [
        "evaluate",
        "--table",
        "drift,compare",
        "--systems",
        "ease",
        "--quick",
        "--budget",
        "1",
        "--json",
    ]
    assert invoke([*arguments, "--data", str(path), "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)["result"]
    assert [one["table"] for one in found["tables"]] == ["compare-ranking-liked"]
    assert "liked has no genres" in found["left_out"]["drift"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "all,fedncff"], "did you mean 'fedncf'?"),
        (["--table", "fpl,compare", "--rows", "bpr"], "--rows with several tables"),
        (["--table", "all", "--trials", "trials.json"], "--trials with several tables"),
        (["--table", "all", "run.toml"], "FILE with several tables"),
    ],
)
def test_the_command_refuses_what_several_tables_do_not_have(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["evaluate", *arguments]) == 10
    assert message in " ".join(capsys.readouterr().err.split())


def test_all_is_every_table_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def make(_: Any, name: str, *__: Any, **___: Any) -> list[MadeTable]:
        asked.append(name)
        return []

    monkeypatch.setattr("coterie.cli.evaluate._made", make)
    assert invoke(["evaluate", "--table", "all", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert asked == [
        *tables.tables(),
        tables.COMPARE,
        tables.FLOORS,
        tables.POISONING,
        tables.PRIVACY,
        tables.FOLD_IN,
    ]


# --- side by side ------------------------------------------------------------------------------------------------


def _good(path: Path) -> Sequence[MadeTable]:
    return [one(path, 1.0, a=0.5)]


def _unfit() -> Sequence[MadeTable]:
    raise DataError("no ratings to predict", hint="rate something")


def _broken() -> Sequence[MadeTable]:
    raise RunError("no sum was formed")


def _wrong() -> Sequence[MadeTable]:
    raise KeyError("row")


def test_tables_made_in_processes_come_in_their_order_with_what_failed(tmp_path: Path) -> None:
    said: list[str] = []
    jobs = {"unfit": _unfit, "good": partial(_good, tmp_path / "good.json"), "broken": _broken}
    outcomes = side_by_side(jobs, 2, said.append)
    assert [outcome.name for outcome in outcomes] == list(jobs)
    found = summary_of(outcomes)
    assert [table["table"] for table in found["tables"]] == ["good"]
    assert found["left_out"] == {"unfit": str(DataError("no ratings to predict", hint="rate something"))}
    assert found["failed"] == {"broken": "no sum was formed"}
    assert any("broken: failed: no sum was formed" in line for line in said)
    assert said[-1].endswith("(3 of 3 tables)")


def test_an_error_of_the_code_in_a_process_is_no_table_left_out(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        side_by_side({"wrong": _wrong, "good": partial(_good, tmp_path / "good.json")}, 2)
