"""DRIFT's table as an instance of the harness: what is compared after an epoch, what SAROS and trivial rows give."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.evaluate import _prepared
from coterie.config.run import FederationSettings, RunSettings
from coterie.errors import ConfigError, RunError
from coterie.studies import tables
from coterie.studies.run_data import load, make_feed
from coterie.studies.tables.cell import Cell
from coterie.studies.tables.paper_table import Results
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.study.references import references
from coterie.systems.drift.study.table import CHOOSE_BY, DRIFT, SHOWN, after_first_epoch

SETTINGS = RunSettings.model_validate(
    {
        "data": {"synthetic": {"users": 40, "items": 60, "interactions": 1100}},
        "drift": {"epochs": 3, "dim": 4},
    }
)


def cell(rate: float, first: float) -> Cell:
    history = [
        {"step": step, "metrics": dict.fromkeys(SHOWN, value)} for step, value in ((1, first), (2, 9.0))
    ]
    return Cell({"options": {"drift.rate": rate}, "history": history}, None)


def results(**tried: Any) -> Results:
    return Results("set", (0, 1), (), {}, {}, tried)


def test_the_first_epoch_compares_means_over_the_seeds_at_each_rate() -> None:
    drift = [cell(rate, value) for rate in (0.1, 0.2, 0.5) for value in (0.50, 0.52)]
    saros = [cell(rate, rate + 0.2 + more) for rate in (0.1, 0.2, 0.5) for more in (0.0, 0.02)]
    shown = after_first_epoch(results(drift=drift, saros=saros))
    assert shown is not None
    assert [line[0] for line in shown.rows] == ["0.1", "0.2", "0.5"]
    assert shown.rows[0][1] == "0.5100 / 0.3100"
    assert shown.rows[2][1:] == ("0.5100 / 0.7100 (below)",) * len(SHOWN)


def test_without_both_systems_there_is_nothing_to_compare() -> None:
    assert after_first_epoch(results(saros=[cell(0.1, 0.5)])) is None


def test_saros_and_the_trivial_rows_are_those_that_stand_beside_a_run() -> None:
    rows = {row.name: row for row in tables.find("drift").rows()}
    feed = make_feed(SETTINGS, load(SETTINGS), 1)
    options = {"drift.rate": 0.5}
    expected = references(feed, SETTINGS.drift.model_copy(update={"rate": 0.5}), 1)
    trained = rows["saros"].engine(SETTINGS, options, feed, 1)
    assert [entry["step"] for entry in trained.history] == [1, 2, 3]
    assert [entry["metrics"] for entry in trained.history] == [
        entry["metrics"] for entry in expected["saros"].history
    ]
    chosen = [entry["metrics"][CHOOSE_BY] for entry in trained.history]
    assert trained.best == chosen.index(max(chosen))
    for name in ("random", "popularity", "positive_share"):
        assert rows[name].engine(SETTINGS, {}, feed, 1).metrics == expected[name].metrics


def test_the_row_of_drift_is_trained_by_the_function_that_runs_services_and_only_by_it(
    tmp_path: Path,
) -> None:
    (row,) = (row for row in tables.find("drift").rows() if row.name == "drift")
    changes = {"federation": FederationSettings(attacks=True), "seeds": (0, 1), "output": tmp_path}
    settings = SETTINGS.model_copy(update=changes)
    feed = make_feed(SETTINGS, load(SETTINGS), 1)
    asked = []

    async def services(settings: RunSettings, feed: Any, folder: Path, **about: Any) -> Any:
        asked.append((settings.drift.rate, settings.federation.attacks, about["seed"]))
        raise RunError("no services here")

    with pytest.raises(RunError, match="no services here"):
        row.train(settings, {"drift.rate": 0.5}, feed, 1, services)
    assert asked == [(0.5, False, 1)]
    with pytest.raises(ConfigError, match="the row drift is trained over services, which are not run here"):
        row.train(settings, {"drift.rate": 0.5}, feed, 1)


def test_only_what_is_asked_for_is_trained() -> None:
    feed = make_feed(SETTINGS, load(SETTINGS), 1)
    assert set(references(feed, SETTINGS.drift, 1, only=("random",))) == {"random"}


def test_rows_that_run_in_one_process_make_the_table(tmp_path: Any) -> None:
    made, path = tables.evaluate(
        tables.find("drift"), SETTINGS, seeds=(0,), out=tmp_path, names=("saros", "popularity")
    )
    assert path.name == "drift-synthetic.json"
    assert {one["options"]["drift.rate"] for one in made["tried"]} == {0.1, 0.2, 0.5}
    assert made["summary"][0]["trials"] == 3
    assert len(made["blocks"]) == 1
    bias = SETTINGS.model_copy(update={"drift": SETTINGS.drift.model_copy(update={"item_bias": True})})
    assert tables.stem(tables.find("drift"), bias, load(bias)) == "drift-synthetic-bias"


@pytest.mark.parametrize("name", ["drift", "drift-unseen"])
def test_a_quick_table_tries_one_rate_for_two_epochs_and_says_so(name: str, tmp_path: Any) -> None:
    made, _ = tables.evaluate(
        tables.find(name), SETTINGS, seeds=(0,), out=tmp_path, names=("saros", "random"), quick=True
    )
    (saros,) = made["tried"]
    assert [entry["step"] for entry in saros["history"]] == [1, 2]
    assert made["settings"]["drift"]["epochs"] == 2
    assert "at most 2 passes" in made["blocks"][-1]["notes"][-1]


@pytest.mark.parametrize("name", ["drift", "saros"])
def test_both_systems_have_the_same_budget(name: str) -> None:
    rows = {row.name: row for row in tables.find("drift").rows()}
    assert rows[name].space == rows["drift"].space


def test_its_settings_are_those_of_the_example():
    root = Path(__file__).parents[2]
    example = tomllib.loads((root / "examples" / "drift-genres.toml").read_text())
    assert RunSettings.model_validate(DRIFT.settings) == RunSettings.model_validate(
        {key: value for key, value in example.items() if key != "seeds"}
    )
    assert example["seeds"] == [0]


def test_it_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, settings = _prepared("drift", None, None, ["drift.dim=3"])
    assert settings.federation.owners == 0
    assert settings.table(DriftSettings).dim == 3


def test_rates_and_epochs_are_chosen_by_the_headline_on_validation_data() -> None:
    for name in ("drift", "drift-unseen"):
        table = tables.find(name)
        assert table.choose_by == f"validation_{table.headline}"


def test_saros_has_the_pairs_with_unseen_items_that_drift_has(tmp_path: Any) -> None:
    table = tables.find("drift-unseen")
    changed = SETTINGS.drift.model_copy(update={"unseen": "own", "item_bias": True, "rate": 0.05})
    settings = SETTINGS.model_copy(update={"drift": changed})
    feed = make_feed(settings, load(settings), 1)
    rows = {row.name: row for row in table.rows()}
    with_pairs = rows["saros"].engine(settings, {"drift.rate": 0.05}, feed, 1)
    without = rows["saros"].engine(SETTINGS, {"drift.rate": 0.05}, feed, 1)
    assert with_pairs.history[-1]["train_loss"] != without.history[-1]["train_loss"]


def test_the_example_with_unseen_items_has_the_settings_of_its_table() -> None:
    example = tomllib.loads((Path(__file__).parents[2] / "examples" / "drift-unseen.toml").read_text())
    assert example["drift"] == tables.find("drift-unseen").settings["drift"]
