"""Runs from Python in one process: figures, recommendations, saved models, comparisons."""

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import coterie as ct
from coterie.api import waiting
from coterie.api.waiting import awaited
from coterie.cli.main import invoke
from coterie.errors import ConfigError, CoterieError, DataError, RunError
from coterie.evaluation.unseen import best_unseen
from coterie.launch.children import toml
from coterie.launch.new_user import recommend_to_new
from coterie.studies.host_scores import host_scores
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import make_feed
from coterie.telemetry.report import Report
from coterie.telemetry.report_facts import row_label

from ..interactions import ratings

NAMES = {"user": "customer", "item": "sku", "rating": "stars", "time": "at", "name": "shop"}
ROUNDS = {
    "passes": 6,
    "evaluate_every": 1,
    "cohort": 30,
    "group": 30,
    "min_cohort": 10,
    "min_sum": 10,
    "patience": 0,
}


@pytest.fixture(scope="module")
def split() -> ct.DataSplit:
    return ct.load(ratings(), **NAMES).split("leave-last-out")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api") / "runs"


def neural(**keys: Any) -> ct.FederatedRecommender:
    return ct.FedNCF(**{"model": "neumf", "secure_sum": "masked", "rounds": ROUNDS, **keys})


@pytest.fixture(scope="module")
def run(split: ct.DataSplit, runs: Path) -> ct.FederatedRun:
    return neural(reference=True).fit(split, in_process=True, output=runs)


@pytest.fixture(scope="module")
def ease(split: ct.DataSplit, runs: Path) -> ct.FederatedRun:
    return ct.FedEASE(reference=False).fit(split, in_process=True, output=runs)


def refusal(call: Any, *arguments: Any, **keys: Any) -> str:
    with pytest.raises(CoterieError) as found:
        call(*arguments, **keys)
    return str(found.value)


# --- runs ------------------------------------------------------------------------------------------------------


def test_the_metrics_are_those_of_the_command_with_the_same_keys_in_a_file(
    run: ct.FederatedRun, split: ct.DataSplit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "system": "fedncf",
        "secure_sum": "masked",
        "data": {"path": split.data.write(tmp_path)},
        "split": {"kind": "leave-last-out"},
        "fedncf": {"model": "neumf"},
        "rounds": ROUNDS,
    }
    (tmp_path / "run.toml").write_text(toml(keys))
    monkeypatch.chdir(tmp_path)
    assert invoke(["run", "run.toml", "--in-process"]) == 0
    (path,) = tmp_path.glob("runs/*/report.json")
    report = Report.read(json.loads(path.read_text()))
    expected = {report.label: report.metrics}
    expected |= {row_label(report, name): row.metrics for name, row in report.reference.items()}
    found = {row["row"]: row for row in run.metrics.to_dicts()}
    assert found.keys() == expected.keys()
    for name, metrics in expected.items():
        assert {key: found[name][key] for key in metrics} == {key: one.mean for key, one in metrics.items()}
    assert report.dataset.split_sha256 == split.sha256


def test_runs_of_a_folder_are_listed_with_their_figures(run: ct.FederatedRun, tmp_path: Path) -> None:
    (run.folder.parent / "unfinished").mkdir(exist_ok=True)
    (run.folder.parent / "damaged").mkdir(exist_ok=True)
    (run.folder.parent / "damaged" / "report.json").write_text("{")
    listed = {row["run"]: row for row in ct.runs(run.folder.parent).to_dicts()}
    own = listed[run.folder.name]
    assert (own["system"], own["secure_sum"], own["dataset"]) == ("fedncf", "masked", "shop")
    assert own["hit_ratio@10"] == run.metrics["hit_ratio@10"][0]
    assert Path(own["folder"]) == run.folder
    assert not {"unfinished", "damaged"} & set(listed)
    assert ct.runs(tmp_path / "nowhere").height == 0


def test_a_run_keeps_everything_in_its_folder(run: ct.FederatedRun, runs: Path) -> None:
    assert run.folder.parent == runs.absolute()
    assert {"report.json", "report.html", "settings.json", "shop.csv"} <= {
        one.name for one in run.folder.iterdir()
    }
    assert json.loads((run.folder / "settings.json").read_text())["data"]["path"] == str(
        run.folder / "shop.csv"
    )


def test_a_run_shows_itself(run: ct.FederatedRun) -> None:
    assert "in process" in repr(run)
    assert "<table" in run._repr_html_()
    page = run.report._repr_html_()
    assert page.startswith('<iframe sandbox="" srcdoc="')
    assert "<html" not in page  # escaped, or it would end the attribute
    assert run.report.content.run_id in repr(run.report)


def test_the_history_has_every_evaluation(run: ct.FederatedRun) -> None:
    assert run.history["epoch"].to_list() == list(range(ROUNDS["passes"] + 1))
    assert "hit_ratio@10" in run.history.columns


def test_scores_are_those_that_hosts_give_at_the_chosen_version(split: ct.DataSplit, runs: Path) -> None:
    # A step that is too long: the version that counts is not the last one, nor is the users' state.
    model = neural(reference=False, rounds={**ROUNDS, "passes": 12}, secure_sum="clear")
    run = model.fit(split.data.split(split.settings.kind, seed=3), in_process=True, output=runs)
    feed = make_feed(run.settings, split.data.dataset, 3)
    tables: list[np.ndarray[Any, Any]] = []
    train_in_process(
        run.settings,
        feed,
        run_id="again",
        seed=3,
        see=lambda _: None,
        on_evaluation=lambda _, hosts, now: tables.append(host_scores(feed, 2, hosts, now)),
    )
    chosen = run.history["version"].to_list().index(run.report.content.chosen.version)
    assert 0 < chosen < len(tables) - 1
    dataset = split.data.dataset
    np.testing.assert_array_equal(run.score(dataset.users, feed.dataset.items), tables[chosen])
    assert not np.array_equal(tables[chosen], tables[-1])


def test_recommendations_are_the_best_items_that_users_have_not_had(
    run: ct.FederatedRun, split: ct.DataSplit
) -> None:
    dataset = split.data.dataset
    found = run.recommend(["u7", "u1"], k=4)
    assert found["user"].to_list() == ["u7"] * 4 + ["u1"] * 4
    assert found["rank"].to_list() == [1, 2, 3, 4] * 2
    for user in ("u7", "u1"):
        at = dataset.users.index(user)
        seen = set(dataset.item[(dataset.user == at) & split.split.train].tolist())
        expected, scores = best_unseen(dataset.items, run.score([user])[0], seen, 4)
        assert found.filter(pl.col("user") == user)["item"].to_list() == expected
        assert found.filter(pl.col("user") == user)["score"].to_list() == scores
    assert run.recommend("u1", k=4).equals(found.filter(pl.col("user") == "u1"))


def test_wrong_users_items_and_numbers_are_refused(run: ct.FederatedRun) -> None:
    assert refusal(run.recommend, ["u1", "u77"]).startswith(
        "shop has no user 'u77'; it has 60 (did you mean 'u7"
    )
    assert "shop has no item 'i399'" in refusal(run.score, ["u1"], ["i399"])
    assert "users are 'u1'; expected a list of users" in refusal(run.score, "u1")
    assert "k is 0; expected a whole number of at least 1" in refusal(run.recommend, "u1", 0)


def test_what_only_services_have_is_refused_in_process(run: ct.FederatedRun) -> None:
    assert "no host sent anything, so there is no receipt" in refusal(run.receipt, "u1")
    assert "recorded no messages" in refusal(run.attack)


def test_a_system_that_needs_services_is_refused_in_process(split: ct.DataSplit, runs: Path) -> None:
    assert "does not run in one process" in refusal(ct.DRIFT().fit, split, in_process=True, output=runs)


def test_several_seeds_have_means_and_deviations(split: ct.DataSplit, runs: Path) -> None:
    run = ct.FedEASE(reference=False, seeds=[0, 1]).fit(split, in_process=True, output=runs)
    (row,) = run.metrics.to_dicts()
    means = [one.chosen.metrics["hit_ratio@10"] for one in run.report.content.per_seed]
    assert row["hit_ratio@10"] == pytest.approx(np.mean(means))
    assert row["hit_ratio@10 std"] == pytest.approx(np.std(means, ddof=1))


def test_figures_of_a_kept_model_are_those_of_its_seed_the_first(split: ct.DataSplit, runs: Path) -> None:
    model = ct.FedMF(reference=False, rounds={"passes": 3}, seeds=[0, 1])
    run = model.fit(split.data.split("random"), in_process=True, output=runs)
    run.save(runs / "first-of-two")
    card = (runs / "first-of-two" / "card.md").read_text()
    errors = [one.chosen.metrics["rmse"] for one in run.report.content.per_seed]
    assert f"{errors[0]:.4f}" != f"{np.mean(errors):.4f}"
    assert f"| rmse | {errors[0]:.4f} |" in card


def test_a_model_with_other_seeds_than_the_split_is_refused(split: ct.DataSplit) -> None:
    assert "seeds [3]: a run begins with the split of its first seed, and this split has seed 0" in refusal(
        ct.FedEASE(seeds=[3]).fit, split, in_process=True
    )


def test_progress_is_told_on_standard_error(
    split: ct.DataSplit, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ct.FedEASE(reference=False).fit(split, in_process=True, output=runs, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "seed 0, pass 1: hit_ratio@10 " in captured.err
    rated = ct.FedMF(reference=False, rounds={"passes": 2})
    rated.fit(split.data.split("random"), in_process=True, output=runs, progress=True)
    assert "rmse" in capsys.readouterr().err


def test_a_fit_inside_a_running_loop_ends(split: ct.DataSplit, runs: Path) -> None:
    async def cell() -> ct.FederatedRun:
        return ct.FedEASE(reference=False).fit(split, in_process=True, output=runs)

    assert asyncio.run(cell()).in_process


# --- waiting ---------------------------------------------------------------------------------------------------


def test_an_error_of_the_work_is_raised_to_the_caller() -> None:
    async def work() -> None:
        raise DataError("no data")

    with pytest.raises(DataError, match="no data"):
        awaited(lambda: work())


def test_an_interrupt_cancels_the_work_waits_for_its_end_and_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            steps.append("begun")
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)
            steps.append("put in order")

    def interrupted(finished: threading.Event) -> None:
        finished.wait(0.05)
        # Twice: the second changes nothing.
        if steps and len(steps) < 3:
            steps.append("interrupt")
            raise KeyboardInterrupt

    monkeypatch.setattr(waiting, "_look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        awaited(work)
    assert steps[:3] == ["begun", "interrupt", "interrupt"]
    assert steps[-1] == "put in order"


def test_an_interrupt_waits_for_a_computation_a_few_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_LINGER_S", 0.3)
    release = threading.Event()
    interrupts: list[float] = []

    def interrupted(finished: threading.Event) -> None:
        finished.wait(0.05)
        if not interrupts:
            interrupts.append(time.monotonic())
            raise KeyboardInterrupt

    monkeypatch.setattr(waiting, "_look", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            awaited(lambda: asyncio.to_thread(release.wait, 30))
        assert 0.2 < time.monotonic() - interrupts[0] < 10
    finally:
        release.set()


# --- central models --------------------------------------------------------------------------------------------


def test_a_central_model_has_the_figures_of_the_same_row_in_a_report(
    run: ct.FederatedRun, split: ct.DataSplit
) -> None:
    fitted = ct.Popularity().fit(split)
    (row,) = fitted.metrics.to_dicts()
    expected = next(one for one in run.metrics.to_dicts() if one["row"] == "Popularity")
    assert row == {name: expected[name] for name in row}


def test_a_central_model_scores_and_recommends_as_a_run_does(split: ct.DataSplit) -> None:
    fitted = ct.EASE(ridge=50.0).fit(split)
    dataset = split.data.dataset
    assert fitted.model.ridge == 50.0
    scores = fitted.score(["u3", "u5"], ["i2", "i0"])
    assert scores.shape == (2, 2)
    whole = fitted.score(["u3", "u5"])
    np.testing.assert_array_equal(scores, whole[:, [dataset.items.index("i2"), dataset.items.index("i0")]])
    at = dataset.users.index("u3")
    assert fitted.recommend("u3", 3)["item"].to_list() == [
        dataset.items[one] for one in fitted.model.recommend(at, 3)
    ]


def test_a_model_of_ratings_predicts_them(split: ct.DataSplit) -> None:
    fitted = ct.UserAndItemBiases().fit(split.data.split("random"))
    (row,) = fitted.metrics.to_dicts()
    assert 0.5 < row["rmse"] < 2.5
    assert ((fitted.score(["u1"]) > 0) & (fitted.score(["u1"]) < 6)).all()


def test_a_model_that_ranks_is_measured_by_any_split(split: ct.DataSplit) -> None:
    assert 0 < ct.Popularity().fit(split.data.split("temporal")).metrics["ndcg@10"][0] < 1


# --- saved models ----------------------------------------------------------------------------------------------


def test_a_saved_model_is_loaded_with_the_same_scores_and_card(ease: ct.FederatedRun, tmp_path: Path) -> None:
    folder = ease.save(tmp_path / "model")
    again = ct.load_model(folder)
    own = ["i1", "i2", "i5"]
    np.testing.assert_array_equal(again.score(own), ease.model.score(own))
    card = (folder / "card.md").read_text()
    assert again.card() == card == ease.model.card()
    for word in (
        "shop",
        ease.split.sha256,
        "Secure sum: clear",
        "hit_ratio@10",
        "Differential privacy: none",
    ):
        assert word in card
    assert ease.save(folder) == folder  # written over


def test_a_person_is_recommended_to_from_own_items(ease: ct.FederatedRun) -> None:
    own = ["i1", "i2"]
    found = ease.model.recommend(own, 3)
    scores = ease.model.score(own)
    best, values = best_unseen(ease.model.items, scores, {ease.model.items.index(one) for one in own}, 3)
    assert found["item"].to_list() == best
    assert found["score"].to_list() == values
    np.testing.assert_array_equal(ease.model.score(own, best), np.array(values, np.float32))


def test_a_user_of_the_run_has_the_same_scores_by_own_items(ease: ct.FederatedRun) -> None:
    dataset, part = ease.split.data.dataset, ease.split.split
    at = dataset.users.index("u4")
    own = [dataset.items[one] for one in dataset.item[(dataset.user == at) & part.train]]
    np.testing.assert_array_equal(ease.model.score(own, dataset.items), ease.score(["u4"])[0])


def test_ratings_of_a_person_are_checked(split: ct.DataSplit, runs: Path) -> None:
    run = ct.FedMF(factors=4, rounds={"passes": 4, "evaluate_every": 2}, reference=False).fit(
        split.data.split("random"), in_process=True, output=runs
    )
    scores = run.model.score({"i1": 5, "i2": 1.0})
    assert np.isfinite(scores).all()
    assert "own ratings, row 2, column 'rating': 9; expected a number from" in refusal(
        run.model.score, {"i1": 5, "i2": 9}
    )
    assert "has no rating of an item that is known" in refusal(run.model.score, ["i1"])
    assert "no item of own ratings is known to the run: 'i1x'" in refusal(run.model.score, {"i1x": 3})
    assert "expected items with their ratings, or a list of items" in refusal(run.model.score, "i1")
    assert "expected items with their ratings, or a list of items" in refusal(run.model.score, [])


def test_a_model_of_a_system_that_serves_no_new_users_says_so(run: ct.FederatedRun) -> None:
    assert "has no recommendations for users who never took part" in refusal(run.model.recommend, ["i1"])
    assert "not served" in run.model.card()


def test_any_flipped_bit_of_a_saved_model_is_refused(ease: ct.FederatedRun, tmp_path: Path) -> None:
    whole = ease.save(tmp_path / "whole")
    for name in sorted(one.name for one in whole.iterdir()):
        folder = Path(shutil.copytree(whole, tmp_path / name))
        content = bytearray((folder / name).read_bytes())
        for at in (0, len(content) // 2, len(content) - 1):
            flipped = content.copy()
            flipped[at] ^= 1
            (folder / name).write_bytes(flipped)
            if name == "SHA256SUMS" and at == len(content) - 1:
                continue  # the end of the last line
            with pytest.raises(DataError):
                ct.load_model(folder)
        (folder / name).unlink()
        with pytest.raises(DataError):
            ct.load_model(folder)


def test_a_folder_that_is_no_models_is_refused(ease: ct.FederatedRun, tmp_path: Path) -> None:
    assert "holds no model" in refusal(ct.load_model, tmp_path)
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "thesis.tex" in refusal(ease.save, tmp_path)


def test_a_model_under_a_shared_key_is_not_given_away(split: ct.DataSplit, runs: Path) -> None:
    model = neural(
        secure_sum="shared-key",
        reference=False,
        rounds={**ROUNDS, "passes": 1},
        encryption={"bits": 1024, "comparison": True, "obfuscators": "short"},
    )
    run = model.fit(split, in_process=True, output=runs)
    with pytest.raises(RunError, match="sealed for its participants"):
        _ = run.model


def test_the_model_of_a_run_is_the_one_that_new_users_are_given_by_the_command(
    ease: ct.FederatedRun, tmp_path: Path
) -> None:
    # In process there are no stores: the command says so, and the Python interface has the model.
    file = tmp_path / "own.csv"
    file.write_text("item\ni1\n")
    with pytest.raises(RunError):
        recommend_to_new(ct_local_run(ease), file, 3)
    assert len(ease.model.recommend(["i1"], 3)) == 3


def ct_local_run(run: ct.FederatedRun) -> Any:
    from coterie.launch.local_run import LocalRun

    return LocalRun.at(run.folder)


# --- comparisons -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(split: ct.DataSplit, runs: Path) -> ct.ComparedRecommenders:
    models = [ct.Popularity(), ct.EASE(), ct.EASE(ridge=10.0), ct.FedEASE()]
    return ct.compare(models, split, seeds=2, output=runs)


def test_a_comparison_has_a_row_for_each_model_and_seed(
    compared: ct.ComparedRecommenders, runs: Path
) -> None:
    labels = list(dict.fromkeys(compared.table["row"].to_list()))
    assert labels == ["Popularity", "EASE, centralised (1)", "EASE, centralised (2)", "EASE"]
    assert compared.content["seeds"] == [0, 1]
    assert len(compared.content["rows"]) == 8
    assert compared.path.is_relative_to(runs.absolute())
    options = {row["row"]: row["options"] for row in compared.content["summary"]}
    assert [one["ridge"] for name, one in options.items() if name.startswith("ease")] == [300.0, 10.0]


def test_rows_of_a_comparison_are_those_of_single_fits(
    compared: ct.ComparedRecommenders, split: ct.DataSplit, ease: ct.FederatedRun
) -> None:
    first = {
        row["row"]: row["metrics"]["hit_ratio@10"] for row in compared.content["rows"] if row["seed"] == 0
    }
    assert first["popularity"] == ct.Popularity().fit(split).metrics["hit_ratio@10"][0]
    assert first["ease-central-2"] == ct.EASE(ridge=10.0).fit(split).metrics["hit_ratio@10"][0]
    assert first["fed-ease"] == ease.metrics["hit_ratio@10"][0]


def test_a_comparison_has_paired_intervals_and_a_verdict(compared: ct.ComparedRecommenders) -> None:
    lines = compared.table.filter((pl.col("metric") == "hit_ratio@10") & pl.col("difference").is_not_null())
    assert len(lines) == 3  # all but the best central one
    assert ((lines["low"] <= lines["difference"]) & (lines["difference"] <= lines["high"])).all()
    assert compared.verdict.startswith("Verdict: The best central model is")
    assert compared.verdict in repr(compared)
    labels = compared.table["row"].unique().to_list()
    assert all(
        any(line.strip().startswith(label) for line in repr(compared).splitlines()) for label in labels
    )
    assert compared._repr_html_().count("<tr>") == 1 + 4


@pytest.mark.parametrize(
    ("models", "kind", "seeds", "message"),
    [
        ([], "leave-last-out", 1, "there is no model to compare"),
        (["Popularity", "ItemMean"], "leave-last-out", 1, "solve other tasks"),
        (["DRIFT"], "leave-last-out", 1, "DRIFT() cannot be compared"),
        (["Popularity"], "temporal", 1, "split 'temporal': rankings are compared by one held-out item"),
        (["Popularity"], "leave-last-out", 0, "seeds is 0; expected a number of at least 1"),
        (["Popularity"], "leave-last-out", ["a"], "seeds holds 'a'; expected whole numbers"),
        (["Popularity"], "leave-last-out", [0, True], "seeds holds True; expected whole numbers"),
        (["Popularity"], "leave-last-out", [0, -1], "seeds holds -1; expected whole numbers"),
        (["Popularity"], "leave-last-out", [1, 1], "with one twice"),
        (["FedMVMF"], "leave-last-out", 1, "fedmvmf"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(
    split: ct.DataSplit, models: list[str], kind: str, seeds: Any, message: str, tmp_path: Path
) -> None:
    made = [getattr(ct, name)() for name in models]
    with pytest.raises(ConfigError) as found:
        ct.compare(made, split.data.split(kind), seeds=seeds, output=tmp_path / "runs")
    assert message in str(found.value)
    assert not (tmp_path / "runs").exists()


def test_models_of_ratings_are_compared_by_their_errors(split: ct.DataSplit, tmp_path: Path) -> None:
    models = [ct.ItemMean(), ct.FedMF(factors=4, rounds={"passes": 4, "evaluate_every": 2})]
    made = ct.compare(models, split.data.split("random"), output=tmp_path)
    assert set(made.table["metric"]) >= {"rmse", "mae"}
