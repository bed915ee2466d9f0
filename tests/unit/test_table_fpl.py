"""The table of FPL: shares from 0 to 1, its forms and central models, in one process."""

import pytest

from coterie.config.run import RunSettings
from coterie.studies import tables
from coterie.studies.tables.row import with_options
from coterie.systems.fpl.study.table import CENTRAL, FORMS, FPL, SHARES, share_row

SETTINGS = RunSettings.model_validate(
    {
        "system": "fpl",
        "data": {"synthetic": {"users": 40, "items": 60, "interactions": 1000}},
        "rounds": {"passes": 4, "evaluate_every": 2},
        "fpl": {"factors": 4},
    }
)
WANTED = (share_row(0), share_row(1), "sfpl-plus", "popularity")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("tables")
    found, _ = tables.evaluate(FPL, SETTINGS, names=WANTED, seeds=(0, 1), out=out)
    return found


def test_usual_rows_are_shares_and_central_models():
    usual = [row.name for row in tables.chosen_rows(FPL, None, "ml-100k")]
    assert usual == [*map(share_row, SHARES), *(model.name for model in CENTRAL)]
    assert {row.name for row in FPL.rows()} - set(usual) == set(FORMS)


def test_rows_are_the_forms_that_they_are_named_after():
    for row in FPL.rows():
        if row.name in FORMS:
            run = with_options(SETTINGS, row.options)
            assert run.own.label(run) == row.label
    run = with_options(SETTINGS, {"fpl.pi": 0.1})
    assert run.own.label(run) == "pFPL+"


def test_rows_have_the_metrics_of_their_users(made):
    assert [one["row"] for one in made["summary"]] == list(WANTED)
    for one in made["summary"]:
        assert {"precision@10", "recall@10", "ndcg@10", "f1@10"} <= set(one["metrics"])
        assert 0 < one["metrics"]["precision@10"]["mean"] < 1
    # The cells of a row have a value for each user, so that rows are compared user by user.
    assert all(cell["per_user"] for cell in made["rows"])
    (block, *_) = made["blocks"]
    assert [line[0] for line in block["rows"]] == ["pFPL+, pi 0.0", "pFPL+, pi 1.0", "sFPL+", "Popularity"]


def test_rows_say_what_signs_would_tell_of_users(made):
    found = {one["row"]: one["metrics"] for one in made["summary"]}
    none, all_of_them = (found[share_row(pi)] for pi in (0, 1))
    # An item drawn twice keeps some of its ridge, so signs in clear are not quite certain.
    assert all_of_them["signs_auc"]["mean"] > 0.99
    assert none["signs_auc"]["mean"] < 0.9
    for one in (none, all_of_them):
        assert one["signs_auc_sum"]["mean"] < one["signs_auc"]["mean"]
    # Of the same data all rows have the same popularity, and central models have nobody who sends.
    assert none["popularity_auc"]["mean"] == all_of_them["popularity_auc"]["mean"]
    assert "signs_auc" not in found["popularity"]
    (block, *_) = made["blocks"]
    assert "signs\nin clear" in block["columns"]
