"""The table of readings: one training, a line for each reading, the paper on top, a mark where both are near."""

import dataclasses
import json

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.studies import tables
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.studies.tables.cell import Cell
from coterie.studies.tables.paper_table import Results
from coterie.systems.fedmvmf.study.metric_variants import MODEL, NEW_USERS, off_by, predicted_by
from coterie.systems.fedmvmf.study.readings import RELEVANT, graded_readings, readings

TABLE = tables.find("privmvmf-readings")
SETTINGS = RunSettings.model_validate(
    {"system": "fedmvmf", "data": {"synthetic": {"users": 40, "items": 60, "interactions": 900}}}
)
QUICK = {"rounds.passes": 2, "rounds.evaluate_every": 1}
ABSENT = "\N{EN DASH}"


def quickly(row):
    """Return a row of two passes."""
    trained = row.name.startswith(MODEL)
    return dataclasses.replace(row, options={**row.options, **(QUICK if trained else {})})


def evaluated(out, **more):
    table = dataclasses.replace(TABLE, rows=lambda: tuple(map(quickly, TABLE.rows())))
    return tables.evaluate(table, SETTINGS, seeds=(0,), out=out, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("readings")


@pytest.fixture(scope="module")
def made(folder):
    return evaluated(folder)[0]


@pytest.fixture(scope="module")
def both(folder, made):
    """The table with the study; what stands already is taken up."""
    return evaluated(folder / "both", names=(*(row["row"] for row in made["rows"]), "new-users"))[0]


def test_every_reading_is_one_line_below_the_paper(made):
    nearest, *relevant, graded = made["blocks"]
    assert len(relevant) == len(RELEVANT)
    assert sum(len(block["rows"]) - 1 for block in relevant) == len(readings())
    assert len(graded["rows"]) - 1 == len(graded_readings())
    for block in made["blocks"]:
        assert block["rows"][0][0] == "the paper's PrivMVMF"
        assert all(len(line) == len(block["columns"]) for line in block["rows"])
        assert len({line[0] for line in block["rows"]}) == len(block["rows"])
    assert nearest["rows"][0][1:4] == ("0.293", "0.221", "0.831")
    off = [float(line[-1].split("%")[0]) for line in nearest["rows"][1:]]
    assert off[:8] == sorted(off)[:8]
    # Below the nearest stand those that other tables show.
    assert {"unseen/liked/having", "rated/liked/having"} >= {line[0] for line in nearest["rows"][9:]}
    assert "rated/liked/having" in {line[0] for line in nearest["rows"]}


def test_the_model_is_trained_as_in_the_table_of_the_paper():
    usual = next(row for row in tables.find("privmvmf").rows() if row.name == MODEL)
    ours = next(row for row in TABLE.rows() if row.name == MODEL)
    assert (ours.options, ours.label) == (usual.options, usual.label)


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}-{NEW_USERS}"])
def test_readings_are_of_the_version_that_counts(both, name):
    metrics = next(row for row in both["rows"] if row["row"] == name)["metrics"]
    # What hosts measured while it was trained; sums of these are rounded.
    for metric in ("precision@10", "recall@10"):
        assert metrics[f"{metric}/unseen/liked/having"] == pytest.approx(metrics[metric], abs=1e-5)
    assert metrics["ndcg/rated/printed/10"] == pytest.approx(metrics["ndcg_rated@10"], abs=1e-5)


def test_new_users_are_a_study_with_lines_beside_the_papers_figures_of_them(made, both):
    assert len(both["rows"]) == 2 * len(made["rows"])
    assert both["blocks"][:-2] == made["blocks"]
    splits = {row["row"].endswith(NEW_USERS): row["split_sha256"] for row in both["rows"]}
    assert splits[True] != splits[False]
    new, together = both["blocks"][-2:]
    assert new["rows"][0][1:4] == ("0.273", "0.042", "0.709")
    assert together["rows"][0][1:5] == ("0.293", "0.221", "0.273", "0.042")
    metrics = {row["row"]: row["metrics"] for row in both["rows"]}
    for line in together["rows"][1:]:
        values = [
            metrics[row][f"{metric}/{line[0]}"]
            for row in (MODEL, f"{MODEL}-{NEW_USERS}")
            for metric in ("precision@10", "recall@10")
        ]
        paper = (0.2931, 0.2208, 0.2728, 0.0423)
        assert list(line[1:5]) == [f"{value:.3f}" for value in values]
        farthest = max(abs(value / one - 1) for value, one in zip(values, paper, strict=True))
        assert line[-1].startswith(f"{farthest:.0%}")


def test_rankers_that_know_no_user_have_all_readings_that_they_can_have(made):
    rows = {row["row"]: row["metrics"] for row in made["rows"]}
    assert rows["item-mean"].keys() <= rows[MODEL].keys()
    missing = rows["item-mean"].keys() - rows["popularity"].keys()
    assert missing
    assert all("-predicted/" in name for name in missing)
    assert all(
        rows[name]["ndcg_rated@10"] == rows[name]["ndcg/rated/printed/10"] for name in rows if name != MODEL
    )
    line = next(
        line for block in made["blocks"] for line in block["rows"] if line[0] == "rated-predicted, having"
    )
    assert line[-4:-1] == (ABSENT,) * 3


def test_cells_that_stand_are_taken_up(folder, made, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr("coterie.systems.fedmvmf.study.metric_variants.train_in_process", fail)
    again, path = evaluated(folder, resume=True)
    assert json.loads(path.read_text())["rows"] == json.loads(json.dumps(made["rows"], default=float))
    assert again["blocks"] == made["blocks"]


def test_rows_that_were_not_asked_for_leave_their_columns_empty(tmp_path):
    found, _ = evaluated(tmp_path, names=("popularity",))
    assert [row["row"] for row in found["rows"]] == ["popularity"]
    first = found["blocks"][0]
    # Nothing is near where the model was not trained.
    assert first["title"].startswith("Precision and recall, relevant: rated 4 or more")
    for line in first["rows"][1:]:
        assert line[1:7] == (ABSENT,) * 6
        assert line[-1] == ABSENT


def results_of(*pairs, ndcg=0.5):
    reading = readings()[0]
    names = (f"precision@10/{reading.name}", f"recall@10/{reading.name}", "ndcg/unseen/printed/10")
    cells = [Cell({"metrics": dict(zip(names, (*pair, ndcg), strict=True))}, None) for pair in pairs]
    rows = tuple(row for row in TABLE.rows() if row.name == MODEL)
    return reading, Results("ml-1m", tuple(range(len(pairs))), rows, {MODEL: cells})


@pytest.mark.parametrize(
    ("precision", "recall", "mark"),
    [(0.2931, 0.2208, "0% *"), (0.2931 * 1.04, 0.2208 * 0.96, "4% *"), (0.2931, 0.2208 * 1.08, "8%")],
)
def test_a_reading_is_marked_where_precision_and_recall_are_both_near(precision, recall, mark):
    # Means over the seeds, which may each be far.
    reading, results = results_of((precision * 1.5, recall), (precision * 0.5, recall))
    assert off_by(results, reading) == pytest.approx(
        max(abs(precision / 0.2931 - 1), abs(recall / 0.2208 - 1))
    )
    lines = [line for section in TABLE.sections if (block := section(results)) for line in block.rows]
    shown = [
        line[-1] for line in lines if line[0] in (reading.name, f"{reading.candidates.name}, {reading.over}")
    ]
    assert mark in shown


@pytest.mark.parametrize(("ndcg", "whole"), [(0.8313 * 1.04, 1), (0.8313 * 1.06, 0)])
def test_whether_ndcg_is_near_in_the_same_reading_is_said_below(ndcg, whole):
    _, results = results_of((0.2931, 0.2208), ndcg=ndcg)
    expected = f"Among 1 readings of precision and recall 1 come within 5% of both; in {whole} of these NDCG"
    assert TABLE.sections[0](results).notes[0].startswith(expected)
    _, results = results_of((0.2931, 0.1), ndcg=ndcg)
    assert "recall 0 come within 5% of both; in 0 of these" in TABLE.sections[0](results).notes[0]


def test_a_reading_without_figures_is_near_nothing():
    reading, _ = results_of((0.1, 0.1))
    assert off_by(Results("ml-1m", (0,), (), {}), reading) is None
    assert all(section(Results("ml-1m", (0,), (), {})) is None for section in TABLE.sections)


def test_predicted_ratings_are_each_users_own_over_whichever_hosts_there_are():
    data = load(SETTINGS)
    scored = []
    for hosts in (1, 3):
        content = SETTINGS.model_dump()
        content["federation"]["hosts"] = hosts
        content["rounds"] |= {"passes": 2, "evaluate_every": 1, "cohorts": "all"}
        run = RunSettings.model_validate(content)
        feed = make_feed(run, data, 0)
        made = train_in_process(run, feed, run_id="table", seed=0, see=lambda _: None)
        scored.append(predicted_by(made, feed, hosts, 0)(np.arange(len(data.users))))
    assert scored[0].shape == (len(data.users), len(data.items))
    np.testing.assert_allclose(scored[0], scored[1], rtol=1e-4, atol=1e-5)
    assert np.ptp(scored[0], axis=0).max() > 0
