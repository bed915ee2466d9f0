"""The table of fold-in: users who never train beside trained ones of the same run, and a central model that has all."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli.main import app
from coterie.errors import ConfigError
from coterie.evaluation.central import BiasedMf, Ease
from coterie.evaluation.selection import SelectedModel
from coterie.studies.run_data import Feed, make_feed
from coterie.studies.tables.folded import FOLDED, SHARE, UNSEEN, folded_tables
from coterie.studies.tables.prepared_table import PreparedTable
from coterie.studies.unseen_users import chosen_users

GIVEN = {
    "data": {"synthetic": {"users": 80, "items": 60, "interactions": 2400, "genres": 3}},
    "rounds": {"passes": 1},
}


@cache
def table_of(system: str) -> PreparedTable:
    (found,) = folded_tables(GIVEN, (system,))
    return found


def feed_of(table: PreparedTable) -> Feed:
    return make_feed(table.settings, table.dataset, 0)


def trained(table: PreparedTable, position: int) -> SelectedModel:
    row = table.table.rows()[position]
    return row.train(table.settings, row.options, feed_of(table), 0)


def test_without_names_every_system_that_serves_new_users_has_a_row_in_the_table_of_its_task() -> None:
    said: list[str] = []
    found = folded_tables(GIVEN, say=said.append)
    assert [one.table.name for one in found] == ["fold-in-ranking", "fold-in-rating"]
    assert [[row.name for row in one.table.rows()] for one in found] == [
        ["fed-ease", "fed-fcf", "fed-fpl", "fed-ials", "central"],
        ["fed-fedgnn", "fed-fedmf", "fed-fedmvmf", "central"],
    ]
    # The only one that one pass is too few for.
    (words,) = said
    assert "FedIDCF is left out" in words
    assert "no pass is left for the attention" in words


def test_a_system_without_fold_in_is_refused_where_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="FedNCF has no recommendations for users who never took part"):
        folded_tables(GIVEN, ("fedncf",))
    with pytest.raises(ConfigError, match="no system 'nobody'"):
        folded_tables(GIVEN, ("nobody",))


def test_a_quick_table_trains_for_a_few_passes() -> None:
    given = {**GIVEN, "rounds": {}}
    (quick,) = folded_tables(given, ("fedmf",), quick=True)
    assert quick.table.rows()[0].options == {"rounds.passes": 10}


def test_where_users_keep_nothing_trained_users_have_the_same_figures_folded_in() -> None:
    table = table_of("ease")
    found = trained(table, 0)
    for metric in ("hit_ratio@10", "ndcg@10", "validation_hit_ratio@10"):
        assert found.metrics[metric] == found.metrics[FOLDED + metric]
    assert found.metrics["hit_ratio@10"] != found.metrics[UNSEEN + "hit_ratio@10"]
    assert (found.facts["trained"], found.facts["unseen"]) == (56, 24)


@pytest.mark.parametrize(("system", "model"), [("ease", Ease), ("fedmf", BiasedMf)])
def test_figures_are_of_the_two_groups_and_the_central_model_learns_from_both(
    system: str, model: Any
) -> None:
    table = table_of(system)
    feed = feed_of(table)
    found = trained(table, 1)
    unseen = chosen_users(feed, SHARE)
    rates = system == "fedmf"
    fit = model().fit(feed.training(ratings=rates))
    if rates:
        values = feed.rated().measure(fit.score)
        for prefix, users in (("", ~unseen), (UNSEEN, unseen)):
            squares, count = (np.nansum(values[name][users]) for name in ("squared_error", "ratings"))
            assert found.metrics[prefix + "rmse"] == pytest.approx(np.sqrt(squares / count))
    else:
        values = feed.leave_one_out().measure(fit.score, fit.score)
        for prefix, users in (("", ~unseen), (UNSEEN, unseen)):
            assert found.metrics[prefix + "ndcg@10"] == pytest.approx(np.nanmean(values["ndcg@10"][users]))
    assert not any(name.startswith(FOLDED) for name in found.metrics)


def test_a_run_that_fails_has_no_figures_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.errors import RunError
    from coterie.studies.tables import folded

    def fails(*_: object) -> None:
        raise RunError("nobody came")

    monkeypatch.setattr(folded, "served", fails)
    found = trained(table_of("ease"), 0)
    assert (found.metrics, found.facts["failed"]) == ({}, "nobody came")


def test_the_command_prints_both_groups_and_writes_what_they_lose(tmp_path: Path) -> None:
    asked = [
        "evaluate",
        "--table",
        "fold-in",
        "--systems",
        "ease",
        "--seeds",
        "0,1",
        "--out",
        str(tmp_path),
        "--json",
    ]
    sets = [f"--set=data.synthetic.{key}={value}" for key, value in GIVEN["data"]["synthetic"].items()]
    result = CliRunner().invoke(app, [*asked, *sets])
    assert result.exit_code == 0, result.output
    made = json.loads((tmp_path / "fold-in-ranking-synthetic.json").read_text())
    verdict = made["verdict"]
    assert verdict["lost"].keys() == {"EASE"}
    rows = {row["row"]: row["metrics"] for row in made["summary"]}
    lost = rows["fed-ease"]["hit_ratio@10"]["mean"] - rows["fed-ease"][UNSEEN + "hit_ratio@10"]["mean"]
    assert verdict["lost"]["EASE"] == pytest.approx(lost)
    said = f"lose {lost:.4f} beside" if lost > 0 else f"are {-lost:.4f} better than"
    assert (
        f"In HR@10 users who never trained {said} trained ones with EASE; with the central model"
        in verdict["text"]
    )
    assert "never trained" in result.output
    assert "56 users train, 24 do not." in result.output


@pytest.mark.parametrize("option", [["--budget", "2"], ["--trials", "x.json"]])
def test_nothing_of_the_table_is_tuned(option: list[str]) -> None:
    result = CliRunner().invoke(app, ["evaluate", "--table", "fold-in", *option])
    assert result.exit_code != 0
    assert "the table fold-in, which tunes nothing" in str(result.exception)
