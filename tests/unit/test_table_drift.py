"""DRIFT's table as an instance of the harness: what is compared after an epoch, what SAROS and trivial rows give."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.evaluate import _prepared
from coterie.config.run import FederationSettings, RunSettings
from coterie.errors import ConfigError, RunError
from coterie.evaluation.holdout import TRAIN
from coterie.studies import tables
from coterie.studies.run_data import load, make_feed
from coterie.studies.tables.cell import Cell
from coterie.studies.tables.paper_table import Results, chosen_rows
from coterie.studies.tables.row import enumerated
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.study.in_one_process import owner_streams, train_here
from coterie.systems.drift.study.references import in_time_order, references
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
    # SAROS beside unseen items has twice the epochs of DRIFT, whose items have two owners.
    assert [entry["step"] for entry in saros["history"]] == list(range(1, 5 if name == "drift-unseen" else 3))
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


TRAINED = ("published", "own", "shielded-own", "shielded-all", "saros")
"""Rows of the table with unseen items that are trained."""


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Content of the quick table with unseen items, on a tiny set."""
    table = tables.find("drift-unseen")
    settings = RunSettings.model_validate(
        {
            "data": {"synthetic": {"users": 40, "items": 60, "interactions": 1100}},
            "drift": {**table.settings["drift"], "dim": 4, "k_min": 2, "window": 16},
            "federation": {"owners": 2},
        }
    )
    made, _ = tables.evaluate(table, settings, seeds=(0,), out=tmp_path_factory.mktemp("tables"), quick=True)
    return made


def test_every_trained_row_of_the_table_with_unseen_items_is_another_model(unseen: dict[str, Any]) -> None:
    rows = {row["row"]: row for row in unseen["rows"]}
    assert tuple(rows) == (*TRAINED, "popularity", "positive_share", "random")
    assert len({rows[name]["history"][-1]["train_loss"] for name in TRAINED}) == len(TRAINED)
    for name in TRAINED[1:]:
        weights = rows[name]["history"][rows[name]["step"] - 1]["bias_weights"]
        assert rows[name]["facts"]["bias_weights"] == dict(zip(("unseen", "items"), weights, strict=True))
    assert "bias_weights" not in rows["published"]["facts"]


def test_rows_of_the_table_with_unseen_items_are_compared_user_by_user(unseen: dict[str, Any]) -> None:
    means = {row["row"]: row["metrics"]["ndcg@10"] for row in unseen["rows"]}
    compared = {
        (one["first"], one["second"]): one for one in unseen["differences"] if one["metric"] == "ndcg@10"
    }
    assert ("own", "saros") in compared
    assert ("shielded-own", "own") in compared
    for (first, second), one in compared.items():
        assert one["mean"] == pytest.approx(means[first] - means[second])
        assert one["users"] == 40
    assert [len(block["rows"]) for block in unseen["blocks"]] == [8, len(unseen["differences"])]


def test_the_weights_of_the_log_odds_stand_below_the_figures(unseen: dict[str, Any]) -> None:
    notes = unseen["blocks"][0]["notes"]
    assert len(notes) == len(TRAINED) - 1
    weights = next(row["facts"]["bias_weights"] for row in unseen["rows"] if row["row"] == "saros")
    assert f"log-odds {weights['unseen']:g} among unseen items, {weights['items']:g} among" in notes[-1]


def test_every_trained_row_of_the_table_with_unseen_items_tries_equally_many_rates() -> None:
    rows = {row.name: row for row in tables.find("drift-unseen").rows()}
    assert {len(list(enumerated(rows[name]))) for name in TRAINED} == {3}
    assert {rows[name].space["drift.rate"] for name in TRAINED[1:]} == {rows["saros"].space["drift.rate"]}


def test_drift_with_one_owner_learns_from_as_many_pairs_as_saros() -> None:
    options = DriftSettings(unseen="own", item_bias=True, dim=4, theta=1)
    settings = SETTINGS.model_copy(update={"drift": options, "federation": FederationSettings(owners=1)})
    feed = make_feed(settings, load(settings), 1)
    (stream,), (items,) = owner_streams(feed)
    one_place = in_time_order(feed, feed.split.part == TRAIN)
    assert all((ours == theirs).all() for ours, theirs in zip(stream, one_place, strict=True))
    assert items.tolist() == list(range(60))
    # At a rate of nearly nothing the model stays, so that the order of updates does not matter to the loss.
    still = options.model_copy(update={"rate": 1e-12, "epochs": 2})
    losses = [
        [entry["train_loss"] for entry in train_here(what, still, feed, 1).history]
        for what in ("published", "saros")
    ]
    assert losses[0] == pytest.approx(losses[1][:2], rel=1e-6)
    assert losses[0][0] != pytest.approx(losses[0][1], rel=1e-6)


def test_the_epoch_that_counts_is_the_best_on_validation_data() -> None:
    feed = make_feed(SETTINGS, load(SETTINGS), 1)
    for what, epochs in (("published", 12), ("saros", 24)):
        found = train_here(what, DriftSettings(dim=4, epochs=12, rate=0.5), feed, 1)
        chosen = [entry["metrics"][CHOOSE_BY] for entry in found.history]
        assert len(chosen) == epochs
        assert found.best == chosen.index(max(chosen)) < epochs - 1
        assert found.metrics == found.history[found.best]["metrics"]


def test_a_model_that_diverges_has_no_figures_and_says_why() -> None:
    feed = make_feed(SETTINGS, load(SETTINGS), 1)
    found = train_here("saros", DriftSettings(dim=4, rate=1e30, ridge=1.0), feed, 1)
    assert found.metrics == {}
    assert "the model has diverged" in found.facts["failed"]


def test_the_table_with_unseen_items_needs_services_only_for_the_rows_that_are_asked_for() -> None:
    table = tables.find("drift-unseen")
    assert not {"services-own", "services-shielded"} & {row.name for row in chosen_rows(table, None, "x")}
    rows = chosen_rows(table, ["services"], "x")
    assert [row.options["drift.form"] for row in rows] == ["published", "shielded"]


def test_the_example_with_unseen_items_has_the_settings_of_its_table() -> None:
    example = tomllib.loads((Path(__file__).parents[2] / "examples" / "drift-unseen.toml").read_text())
    assert example["drift"] == tables.find("drift-unseen").settings["drift"]


@pytest.mark.parametrize(("name", "form"), [("services-own", "published"), ("services-shielded", "shielded")])
def test_rows_over_services_run_the_form_that_they_name_with_unseen_items(
    name: str, form: str, tmp_path: Path
) -> None:
    table = tables.find("drift-unseen")
    settings = RunSettings.model_validate({**table.settings, "output": tmp_path})
    (row,) = (row for row in table.rows() if row.name == name)
    asked = []

    async def services(settings: RunSettings, feed: Any, folder: Path, **about: Any) -> Any:
        own = settings.table(DriftSettings)
        asked.append((own.form, own.unseen, own.item_bias, own.rate, settings.federation.owners))
        raise RunError("no services here")

    with pytest.raises(RunError, match="no services here"):
        row.train(settings, row.options, make_feed(SETTINGS, load(SETTINGS), 1), 1, services)
    assert asked == [(form, "own", True, table.settings["drift"]["rate"], 0)]
