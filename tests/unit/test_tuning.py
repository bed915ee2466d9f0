"""Tuning: equal budgets, validation data only, trials that survive being broken off."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import invoke
from coterie.config.run import RunSettings, SplitSettings
from coterie.errors import DataError, PreflightError, RunError
from coterie.evaluation.selection import SelectedModel
from coterie.studies.run_data import load, make_feed
from coterie.studies.tables.row import Choices, LogUniform, Row
from coterie.studies.tables.tuning import Trials, tune

SETTINGS = RunSettings(split=SplitSettings(kind="leave-last-out"))
FEED = make_feed(SETTINGS, load(SETTINGS), 0)
SCORE = "validation_hit_ratio@10"


def engine(asked: list[float]) -> Any:
    """Best on validation where the rate is near 1, on test where it is small."""

    def train(settings: RunSettings, options: Mapping[str, Any], feed: object, seed: int) -> SelectedModel:
        rate = options["rate"]
        asked.append(rate)
        if rate > 50:
            raise RunError("a score is nan; expected a finite one")
        history = [
            {"step": 1, "metrics": {SCORE: 0.0, "hit_ratio@10": 1 / rate}},
            {"step": 2, "metrics": {SCORE: -abs(rate - 1), "hit_ratio@10": 1 / rate}},
        ]
        return SelectedModel(history, 1, history[1]["metrics"])

    return train


def row(name: str, asked: list[float], **more: Any) -> Row:
    return Row(
        name, name, engine(asked), options={"rate": 90.0}, space={"rate": LogUniform(0.01, 100)}, **more
    )


def search(rows: list[Row], trials: int, known: Trials | None = None, **more: Any) -> Trials:
    known = known or Trials({"table": "t"})
    return tune(rows, SETTINGS, FEED, 0, trials=trials, choose_by=SCORE, known=known, **more)


def test_every_row_gets_the_same_number_of_trials_and_the_best_is_that_of_validation() -> None:
    asked: list[float] = []
    fixed = Row("fixed", "Fixed", engine(asked), options={"rate": 1.0})
    variant = row("variant", asked, like="a")
    made = search([row("a", asked), fixed, row("b", asked), variant], 20)
    assert {name: made.budget(name) for name in ("a", "b", "fixed", "variant")} == {
        "a": 20, "b": 20, "fixed": 0, "variant": 0,
    }  # fmt: skip
    for name in ("a", "b"):
        best = made.best(name)
        assert best is not None
        scored = [trial for trial in made.rows[name] if trial["score"] is not None]
        assert abs(best["rate"] - 1) == min(abs(trial["options"]["rate"] - 1) for trial in scored)


def test_where_an_error_is_tuned_by_the_lowest_wins() -> None:
    rows: dict[str, list[dict[str, Any]]] = {
        "a": [
            {"options": {"rate": rate}, "score": score}
            for rate, score in ((1, 0.9), (2, 0.8), (3, None), (4, 0.85))
        ]
    }
    assert Trials({"choose_by": "validation_rmse"}, rows).best("a") == {"rate": 2}
    assert Trials({"choose_by": SCORE}, rows).best("a") == {"rate": 1}


def test_no_figure_of_the_test_part_is_kept() -> None:
    made = search([row("a", [])], 5)
    assert "hit_ratio" not in json.dumps(made.rows).replace(SCORE, "")


def test_a_trial_that_diverges_is_kept_with_its_reason_and_never_chosen() -> None:
    made = search([row("a", [])], 3)
    assert made.rows["a"][0] == {
        "options": {"rate": 90.0},
        "score": None,
        "step": None,
        "failed": "a score is nan; expected a finite one",
        "seconds": made.rows["a"][0]["seconds"],
    }
    only = Trials({}, {"a": made.rows["a"][:1]})
    assert only.best("a") is None
    assert only.best("unknown") is None


def test_a_search_that_was_broken_off_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trials.json"
    asked: list[float] = []
    search([row("a", asked)], 4, keep=lambda these: these.write(path))
    again: list[float] = []
    resumed = search([row("a", again)], 7, Trials.read(path))
    assert len(again) == 3
    assert resumed.rows["a"] == [
        {**one, "seconds": two["seconds"]}
        for one, two in zip(search([row("a", [])], 7).rows["a"], resumed.rows["a"], strict=True)
    ]


def test_options_that_are_drawn_twice_are_two_trials_and_trained_once() -> None:
    asked: list[float] = []
    twice = Row("a", "A", engine(asked), options={"rate": 2.0}, space={"rate": Choices((2.0, 3.0))})
    made = search([twice], 6)
    assert made.budget("a") == 6
    assert sorted(asked) == [2.0, 3.0]
    scores = {(trial["options"]["rate"], trial["score"]) for trial in made.rows["a"]}
    assert scores == {(2.0, -1.0), (3.0, -2.0)}
    before = [dict(trial) for trial in made.rows["a"]]
    again = search([twice], 8, made)
    assert again.rows["a"][:6] == before
    assert again.budget("a") == 8
    assert len(asked) == 2


def test_without_validation_data_nothing_is_tuned() -> None:
    settings = RunSettings(split=SplitSettings(kind="leave-last-out", validation=0))
    feed = make_feed(settings, load(settings), 0)
    with pytest.raises(DataError, match="nothing to validate by"):
        tune([row("a", [])], settings, feed, 0, trials=1, choose_by=SCORE, known=Trials({}))
    with pytest.raises(ValueError, match="'hit_ratio@10'; expected a metric on validation data"):
        tune([row("a", [])], settings, FEED, 0, trials=1, choose_by="hit_ratio@10", known=Trials({}))


@pytest.mark.parametrize("content", ["{}", "[]", '{"rows": {"a": [{}]}}', "{"])
def test_a_file_that_holds_no_trials_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trials.json"
    path.write_text(content)
    with pytest.raises(DataError, match="cannot read trials"):
        Trials.read(path)
    with pytest.raises(DataError, match="cannot read trials"):
        Trials.read(tmp_path / "absent.json")


# --- by those that were tried --------------------------------------------------------------------------------------


def tpe(rows: list[Row], trials: int, known: Trials | None = None) -> Trials:
    pytest.importorskip("optuna", reason="optuna is not installed")
    return search(rows, trials, known, search="tpe")


def nearest(made: Trials, name: str = "a") -> list[float]:
    return [abs(trial["options"]["rate"] - 1) for trial in made.rows[name]]


def test_later_trials_of_the_estimator_are_nearer_to_the_best_than_random_ones() -> None:
    made = tpe([row("a", [])], 30)
    drawn = search([row("a", [])], 30)
    assert sum(one < 0.5 for one in nearest(made)[10:]) > sum(one < 0.5 for one in nearest(drawn)[10:])
    assert made.rows["a"][0]["options"] == {"rate": 90.0}
    assert {trial["search"] for trial in made.rows["a"]} == {"tpe"}
    assert not any("search" in trial for trial in drawn.rows["a"])


def test_a_search_that_was_interrupted_goes_on_as_an_undisturbed_one_and_rows_do_not_disturb_each_other() -> (
    None
):
    whole = tpe([row("a", []), row("b", [])], 12)
    part = tpe([row("a", [])], 5)
    rest = tpe([row("a", [])], 12, part)

    def options(made: Trials, name: str) -> list[Any]:
        return [trial["options"] for trial in made.rows[name]]

    assert options(rest, "a") == options(whole, "a")
    assert options(whole, "a") != options(whole, "b")


def test_choices_of_any_kind_failed_trials_and_options_outside_of_the_space_are_borne() -> None:
    asked: list[float] = []
    space = {"rate": LogUniform(0.01, 100), "way": Choices(((1, 2), None, "three"))}
    one = Row("a", "a", engine(asked), options={"rate": 500.0, "way": "other"}, space=space)
    made = tpe([one], 15)
    assert made.rows["a"][0]["score"] is None
    assert all(trial["options"]["way"] in ((1, 2), None, "three") for trial in made.rows["a"][1:])
    assert all(0.01 <= trial["options"]["rate"] <= 100 for trial in made.rows["a"][1:])


def test_trials_of_both_searches_share_one_budget() -> None:
    known = tpe([row("a", [])], 6)
    made = search([row("a", [])], 8, known)
    assert len(made.rows["a"]) == 8
    assert ["search" in trial for trial in made.rows["a"]] == [True] * 6 + [False] * 2


def test_a_missing_package_and_an_unknown_search_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "optuna"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(PreflightError, match="this search needs optuna") as refused:
        search([row("a", [])], 3, search="tpe")
    assert "coterie[tune]" in str(refused.value.hint)
    assert invoke(["tune", "--table", "fedncf", "--search", "grid"]) == 10
    assert "expected random or tpe" in capsys.readouterr().err
