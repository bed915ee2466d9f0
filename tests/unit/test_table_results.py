"""Figures for readers: each one on a page comes from a table that is kept beside it."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.evaluation.central import Central, ItemKnn, UserItemBiases
from coterie.studies import tables
from coterie.studies.run_data import make_feed
from coterie.studies.tables import results
from coterie.studies.tables.central_rows import central_row
from coterie.studies.tables.compare import comparisons
from coterie.studies.tables.paper_table import evaluate
from coterie.studies.tables.printed_tables import shown
from coterie.studies.tables.tasks import RANKING, RATING, ComparedTask
from coterie.studies.tables.tuning import Trials, recomputed
from coterie.telemetry.report import Report

ROOT = Path(__file__).parents[2]
KEPT = results.read_kept(ROOT / "docs" / "results")

SETTINGS = RunSettings.model_validate(
    {
        "data": {"synthetic": {"users": 60, "items": 200, "interactions": 2400}},
        "rounds": {"cohort": 30, "group": 30, "passes": 1, "evaluate_every": 1},
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages made of a small table."""
    root = tmp_path_factory.mktemp("figures")
    names = ("fed-gmf", "gmf", "popularity")
    _, path = evaluate(tables.find("fedncf"), SETTINGS, seeds=(0, 1), out=root, names=names)
    readme = root / "README.md"
    readme.write_text(f"before\n{results._BEGIN}\nold\n{results._END}\nafter\n")
    results.main(
        [str(path), "--folder", str(root / "kept"), "--write", str(root / "page.md"), "--readme", str(readme)]
    )
    return root


def test_a_page_shows_every_line_with_figures_and_says_what_was_run(folder: Path) -> None:
    made = results.read_kept(folder / "kept")["fedncf-synthetic.json"]
    page = (folder / "page.md").read_text()
    values = [row["metrics"]["hit_ratio@10"] for row in made["rows"] if row["row"] == "fed-gmf"]
    assert len(values) == 2
    assert re.search(rf"^\| FedGMF \|.*\| {re.escape(shown(values))} \|", page, re.M)
    assert "FedMLP" not in page
    assert "secure sum clear" in page
    assert "`popularity`" in page


def test_the_readme_keeps_all_but_the_table_between_its_marks(folder: Path) -> None:
    readme = (folder / "README.md").read_text()
    assert readme.startswith("before\n")
    assert readme.endswith("\nafter\n")
    assert "old" not in readme
    assert "| FedGMF, synthetic, groups of 30 | clear | 2 |" in readme


def test_a_page_without_marks_is_left_alone() -> None:
    with pytest.raises(ValueError, match="no place for figures"):
        results.with_table("a page", "| a table |")


def test_what_is_kept_names_no_file_of_values_of_users_and_no_folder(folder: Path) -> None:
    text = (folder / "kept" / "fedncf-synthetic.json").read_text()
    assert '"per_user"' not in text
    assert str(folder) not in text
    for table in KEPT.values():
        assert all("per_user" not in row for row in table["rows"])
        assert table["settings"]["data"]["path"] == table["dataset"]["name"]


def test_runs_over_services_stand_side_by_side_and_only_when_they_are_of_the_same_data(
    tmp_path: Path,
) -> None:
    def report(name: str, value: float, data: str = "ml") -> Path:
        settings = SETTINGS.model_copy(update={"system": "fedncf", "name": name}).model_dump(mode="json")
        metrics = {"hit_ratio@10": value}
        made = {
            "settings": settings,
            "secure_sum": "masked",
            "system": "fedncf",
            "dataset": {"name": data, "users": 60, "items": 200, "interactions": 2400},
            "seeds": [0],
            "chosen": {"epoch": 1, "metrics": metrics},
            "history": [{"epoch": 1, "metrics": metrics}],
            "rounds": [{}],
            "versions": {},
            "machine": {"system": "some kernel"},
        }
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(made))
        return path

    (tmp_path / "README.md").write_text(f"{results._BEGIN}{results._END}")
    places = [
        *("--folder", str(tmp_path / "kept")),
        *("--write", str(tmp_path / "page.md")),
        *("--readme", str(tmp_path / "README.md")),
    ]
    pair = [str(report("one", 0.5)), str(report("two", 0.25))]
    results.main(["--runs", "pair", *pair, *places])
    page = (tmp_path / "page.md").read_text()
    assert "| one | masked | 2 | 1 | 0.500000 |\n| two | masked | 2 | 1 | 0.250000 |" in page
    assert "some kernel" not in (tmp_path / "kept" / "pair.json").read_text()
    with pytest.raises(ValueError, match="different data"):
        results.main(["--runs", "pair", pair[0], str(report("three", 0.5, "other")), *places])


@pytest.mark.parametrize(("label", "title"), [("PrivMVMF", "PrivMVMF"), ("", "fedmvmf")])
def test_runs_are_titled_by_what_their_report_calls_them_whatever_the_table_of_their_settings_is(
    label: str, title: str
) -> None:
    metrics = {"ndcg@10": 0.5}
    run = Report.read(
        {
            "system": "fedmvmf",
            "label": label,
            "settings": RunSettings.model_validate({"system": "fedmvmf"}).model_dump(mode="json"),
            "dataset": {"name": "ml"},
            "seeds": [0],
            "chosen": {"epoch": 1, "metrics": metrics},
            "history": [{"epoch": 1, "metrics": metrics}],
        }
    )
    assert results.of_runs([run])["title"] == f"{title} over services"


def test_the_pages_of_the_repository_are_what_the_kept_tables_say() -> None:
    assert (ROOT / "docs" / "results.md").read_text("utf-8") == results.page(KEPT)
    readme = (ROOT / "README.md").read_text("utf-8")
    assert results.with_table(readme, results.readme_table(KEPT)) == readme


@pytest.mark.parametrize("name", KEPT)
def test_the_figures_that_were_printed_are_those_of_the_seeds(name: str) -> None:
    table = KEPT[name]
    for one in table["summary"]:
        for metric, summary in one["metrics"].items():
            values = [row["metrics"][metric] for row in table["rows"] if row["row"] == one["row"]]
            assert summary["mean"] == pytest.approx(np.mean(values), abs=1e-9)
    printed = json.dumps(table["blocks"], ensure_ascii=False)
    for one in table["summary"]:
        rows = [row for row in table["rows"] if row["row"] == one["row"]]
        if any("failed" in row["facts"] for row in rows):
            assert "failed" in printed
            assert one["row"] in printed
            continue
        values = [row["metrics"][table["headline"]] for row in rows]
        # Tables of damages and of DRIFT have a fourth digit.
        assert shown(values) in printed or re.search(rf'"{np.mean(values):.4f}["  ]', printed)
    for difference in table["differences"]:
        if difference["metric"] == table["headline"]:
            assert f"{difference['mean']:+.4f}" in printed


def test_every_figure_of_the_page_is_in_a_kept_table() -> None:
    texts = "".join(json.dumps(table, ensure_ascii=False) for table in KEPT.values())
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    assert [number for number in set(re.findall(r"[+-]?\d*\.\d+", page)) if number not in texts] == []


# --- trials that are kept --------------------------------------------------------------------------------------

KEPT_TRIALS = sorted((ROOT / "docs" / "results" / results.TRIALS).glob("*.json"))


@pytest.mark.parametrize("path", KEPT_TRIALS, ids=lambda path: path.stem)
def test_kept_trials_are_of_their_table_equally_many_and_the_best_one_is_the_rows_own(path: Path) -> None:
    trials, table = Trials.read(path), KEPT[path.name]
    assert trials.about["dataset"] == table["dataset"]["name"]
    assert len({trials.budget(row) for row in trials.rows}) == 1
    tuned = {one["row"]: one for one in table["summary"] if one["tuned"] == "tuned"}
    assert tuned.keys() == trials.rows.keys()
    for row, one in tuned.items():
        assert one["options"] == trials.best(row)
        assert one["trials"] == trials.budget(row)


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("path", "model", "task"),
    [
        ("compare-ranking-ml-100k.json", ItemKnn, RANKING),
        ("compare-rating-ml-100k.json", UserItemBiases, RATING),
    ],
)
def test_a_kept_trial_computed_again_has_the_score_that_is_kept(
    path: str, model: type[Central], task: ComparedTask
) -> None:
    root = os.environ.get("COTERIE_DATA")
    if not root or not (Path(root) / "ml-100k").exists():
        pytest.skip("COTERIE_DATA names no folder with ml-100k")
    trials = Trials.read(ROOT / "docs" / "results" / results.TRIALS / path)
    (table,) = [one for one in comparisons({"data": {"path": f"{root}/ml-100k"}}) if one.task is task]
    feed = make_feed(table.settings, table.dataset, 0)
    kept, again = recomputed(trials, central_row(model, task), 3, table.settings, feed, 0)
    # A unit in the last place may change the place of an item of a few users.
    assert kept == pytest.approx(again, abs=0.004)


def test_trials_beside_a_table_are_kept_with_it_and_can_be_read(folder: Path, tmp_path: Path) -> None:
    table = folder / "fedncf-synthetic.json"
    trials = Trials({"table": "fedncf", "seed": 0}, {"gmf": [{"options": {"a": 1}, "score": 0.5}] * 2})
    beside = tmp_path / table.name
    beside.write_text(table.read_text())
    trials.write(tmp_path / "fedncf-synthetic-trials.json")
    readme = folder / "README.md"
    pages = [
        "--folder",
        str(tmp_path / "kept"),
        "--write",
        str(tmp_path / "page.md"),
        "--readme",
        str(readme),
    ]
    results.main([str(beside), *pages])
    kept = tmp_path / "kept" / results.TRIALS / table.name
    assert Trials.read(kept) == trials
    # One line for each trial, so that a change of one is a change of one line.
    assert kept.read_text().count("\n{") == 2
    assert results.read_kept(tmp_path / "kept").keys() == {table.name}
