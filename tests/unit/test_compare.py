"""The table that compares systems with central models: what is in it, on which data, and how it is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.cli.main import invoke
from coterie.config.run import RunSettings
from coterie.errors import ConfigError, DataError
from coterie.evaluation.central import PREDICTORS, RANKERS, Ease
from coterie.evaluation.paired import paired_difference
from coterie.evaluation.selection import SelectedModel
from coterie.rounds.sides import HostSide
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.tables.cell import read_pairs
from coterie.studies.tables.central_rows import central_row
from coterie.studies.tables.compare import Comparison, comparisons
from coterie.studies.tables.federated_rows import settings_of
from coterie.studies.tables.paper_table import PaperTable
from coterie.studies.tables.row import Row
from coterie.studies.tables.tasks import RANKING, RATING
from coterie.studies.tables.tuning import Trials, recomputed
from coterie.systems.registry import system_named, systems

ROUNDS = {"passes": 2, "evaluate_every": 1, "cohort": 20, "group": 20}
GIVEN: dict[str, Any] = {
    "data": {"synthetic": {"users": 40, "items": 60, "interactions": 900}},
    "rounds": ROUNDS,
}


def short(name: str) -> dict[str, Any]:
    """Return settings of a short run of a system; one that makes a single pass refuses more."""
    try:
        settings_of(system_named(name), GIVEN, RANKING)
    except ConfigError:
        return {**GIVEN, "rounds": {"cohort": 20, "group": 20}}
    return GIVEN


def written(folder: Path, columns: str, rows: list[str]) -> dict[str, Any]:
    """Write a data set and return what a run's file says of it."""
    path = folder / "data.csv"
    path.write_text("\n".join([columns, *rows]) + "\n")
    return {"data": {"path": str(path)}, "rounds": ROUNDS}


def timeless(folder: Path, *, ratings: str | None = None, users: int = 30) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows = [
        f"u{user},i{item}" + ("" if ratings is None else f",{ratings or rng.integers(1, 6)}")
        for user in range(users)
        for item in rng.choice(25, 8, replace=False)
    ]
    return written(folder, "user,item" + ("" if ratings is None else ",rating"), rows)


def named(found: list[Comparison]) -> dict[str, list[str]]:
    return {one.task.name: [row.name for row in one.table.rows()] for one in found}


def small(comparison: Comparison, *kept: str) -> Comparison:
    """Return a comparison with some of its rows."""
    from coterie.studies.tables.compared_table import compared_table

    rows = tuple(row for row in comparison.table.rows() if row.name in kept)
    return Comparison(
        comparison.task, compared_table(comparison.task, rows, ()), comparison.settings, comparison.dataset
    )


# --- what is in it ---------------------------------------------------------------------------------------------


def test_every_system_in_rounds_stands_in_the_table_of_its_task_beside_all_central_models() -> None:
    found = named(comparisons({**GIVEN, "rounds": {"cohort": 20, "group": 20}}))
    asked = {
        task.name: {f"fed-{name}" for name, system in systems().items() if task.solved_by(system)}
        for task in (RANKING, RATING)
    }
    assert asked["ranking"]
    assert asked["rating"]
    assert {f"fed-{name}" for name, system in systems().items() if system.in_rounds} == set.union(
        *asked.values()
    )
    for task, models in (("ranking", RANKERS), ("rating", PREDICTORS)):
        central = {model.name for model in models if not model.objection(60)}
        assert set(found[task]) == central | asked[task]
    assert {"random", "popularity"} <= set(found["ranking"])


def test_no_code_of_the_table_knows_a_systems_name() -> None:
    folder = Path(__file__).parents[2] / "coterie"
    names = {name for system in systems().values() for name in (system.name, system.title)}
    for path in (
        *(
            folder / "studies" / "tables" / f"{stem}.py"
            for stem in ("compare", "compared_table", "tasks", "federated_rows")
        ),
        folder / "studies" / "judges.py",
        folder / "cli" / "evaluate.py",
    ):
        text = path.read_text()
        assert not [name for name in names if f'"{name}"' in text], path


def test_systems_that_are_asked_for_are_the_only_federated_rows() -> None:
    found = named(comparisons(GIVEN, ["fcf", "fcf"]))
    assert set(found) == {"ranking"}
    assert [name for name in found["ranking"] if name.startswith("fed-")] == ["fed-fcf"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fcg", "no system 'fcg'.*'fcf'"),
        ("drift", "drift cannot be compared: its data owners work side by side"),
    ],
)
def test_a_system_that_is_unknown_or_cannot_be_compared_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        comparisons(GIVEN, [name])


def test_a_system_that_does_not_fit_the_data_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [f"u{u},i{i},{rng.integers(0, 100)}" for u in range(30) for i in rng.choice(20, 6, replace=False)]
    given = written(tmp_path, "user,item,rating", rows)
    with pytest.raises(ConfigError, match=r"fedmf does not fit data: .*ratings of data are out of range"):
        comparisons(given, ["fedmf"])
    # Unasked it is left out, with the reason below the table.
    ratings = next(one for one in comparisons(given) if one.task is RATING)
    assert [row.name for row in ratings.table.rows()] == [model.name for model in PREDICTORS]


def test_where_all_ratings_are_equal_only_rankings_are_compared(tmp_path: Path) -> None:
    given = timeless(tmp_path, ratings="3")
    said: list[str] = []
    assert set(named(comparisons(given, say=said.append))) == {"ranking"}
    assert said == [
        "Prediction of ratings is left out: all ratings of data are equal: there is nothing to predict"
    ]
    with pytest.raises(DataError, match="all ratings of data are equal"):
        comparisons(given, ["fedmf"])


def test_without_times_a_random_item_of_each_user_is_held_out_the_same_for_every_row(tmp_path: Path) -> None:
    (ranking,) = comparisons(timeless(tmp_path), ["fedncf"])
    feeds = [make_feed(ranking.settings, ranking.dataset, seed) for seed in (0, 0, 1)]
    held = [feed.leave_one_out().test for feed in feeds]
    assert (held[0] >= 0).all()
    assert (held[0] == held[1]).all()
    assert (held[0] != held[2]).any()


def test_a_catalogue_that_a_model_cannot_learn_leaves_its_row_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ease, "objection", classmethod(lambda cls, n: f"{n} items are too many"))
    (ranking,) = comparisons(GIVEN, ["fcf"])
    assert Ease.name not in named([ranking])["ranking"]


# --- how it is measured ----------------------------------------------------------------------------------------


def scored_alone(settings: RunSettings, feed: Feed) -> np.ndarray:
    """Train a run by itself and return its hosts' scores at the last evaluation."""
    tables: list[np.ndarray] = []

    def keep(state: object, hosts: Any, model: Any) -> None:
        table = np.full((len(feed.dataset.users), len(feed.dataset.items)), np.nan, np.float32)
        for number, host in enumerate(hosts):
            users = np.flatnonzero(feed.host == number)
            for place, user in enumerate(users):
                table[user] = host.recommend(model, place)
        tables.append(table)

    train_in_process(settings, feed, run_id="alone", seed=0, see=lambda _: None, on_evaluation=keep)
    return np.stack(tables)


def trained(comparison: Comparison, row: str, seed: int = 0) -> tuple[SelectedModel, Feed]:
    feed = make_feed(comparison.settings, comparison.dataset, seed)
    (chosen,) = [one for one in comparison.table.rows() if one.name == row]
    return chosen.train(comparison.settings, chosen.options, feed, seed), feed


@pytest.mark.parametrize("system", [name for name, one in systems().items() if RANKING.solved_by(one)])
def test_a_federated_row_is_measured_on_the_split_and_candidates_of_central_ones(system: str) -> None:
    given = short(system)
    (ranking,) = comparisons(given, [system])
    found, feed = trained(ranking, f"fed-{system}")
    assert found.per_user is not None
    run = settings_of(system_named(system), given, RANKING)
    alone = make_feed(run, ranking.dataset, 0)
    assert (alone.split.part == feed.split.part).all()
    assert (alone.leave_one_out().negatives == feed.leave_one_out().negatives).all()
    # The chosen version is one of those that were evaluated, by the scores that users' hosts compute.
    holdout = feed.leave_one_out()
    versions = [
        holdout.measure(lambda u, i, t=table: t[u[:, None], i], lambda u, t=table: t[u])
        for table in scored_alone(run, alone)
    ]
    assert any(
        all(np.array_equal(found.per_user[name], version[name], equal_nan=True) for name in version)
        for version in versions
    )


def test_a_federated_row_whose_model_diverges_has_no_figures_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (ranking,) = comparisons(GIVEN, ["fcf"])

    def wild(self: HostSide, model: Any, user: int) -> np.ndarray:
        return np.full(60, np.nan, np.float32)

    monkeypatch.setattr("coterie.systems.fcf.host.FcfHost.recommend", wild)
    one = small(ranking, "popularity", "fed-fcf")
    made, _ = one.evaluated(
        Trials(one.about(make_feed(one.settings, one.dataset, 0))), seeds=(0,), out=tmp_path
    )
    assert "FCF has no figures: a score is nan" in " ".join(made["blocks"][0]["notes"])
    assert made["verdict"]["federated"] is None
    assert "no federated row has figures" in made["verdict"]["text"]


def test_rows_stand_beside_the_best_central_model_by_validation_and_differ_by_their_users(
    tmp_path: Path,
) -> None:
    (ranking,) = comparisons(GIVEN, ["fcf"])
    one = small(ranking, "random", "popularity", Ease.name, "fed-fcf")
    trials = one.tuned(tmp_path, 3, central=True)
    made, path = one.evaluated(trials, seeds=(0, 1), out=tmp_path)
    assert json.loads(path.read_text())["verdict"] == json.loads(json.dumps(made["verdict"], default=float))
    scores = {
        row: np.mean(
            [cell["metrics"]["validation_hit_ratio@10"] for cell in made["rows"] if cell["row"] == row]
        )
        for row in ("random", "popularity", Ease.name)
    }
    best = max(scores, key=scores.__getitem__)
    assert made["verdict"]["central"] == best
    assert made["verdict"]["federated"] == "fed-fcf"
    assert {(one["first"], one["second"]) for one in made["differences"]} == {
        (row, best) for row in ("random", "popularity", Ease.name, "fed-fcf") if row != best
    }
    folder = tmp_path / "compare-ranking-synthetic"
    values = {
        row: [read_pairs(folder / f"{row}-seed-{seed}.csv")[1]["hit_ratio@10"] for seed in (0, 1)]
        for row in ("fed-fcf", best)
    }
    expected = paired_difference(values["fed-fcf"], values[best])
    found = made["verdict"]["difference"]
    assert (found["mean"], found["low"], found["high"]) == (expected.mean, expected.low, expected.high)
    tuned = {one["row"]: (one["tuned"], one["trials"]) for one in made["summary"]}
    assert tuned == {
        "random": ("fixed", 0), "popularity": ("fixed", 0), Ease.name: ("tuned", 3), "fed-fcf": ("untuned", 0),
    }  # fmt: skip


def test_ratings_are_compared_by_the_errors_of_each_user(tmp_path: Path) -> None:
    (ratings,) = comparisons(GIVEN, ["fedmf"])
    one = small(ratings, "global-mean", "biases", "fed-fedmf")
    made, _ = one.evaluated(one.tuned(tmp_path, 2, central=True), seeds=(0,), out=tmp_path)
    _, values = read_pairs(tmp_path / "compare-rating-synthetic" / "biases-seed-0.csv")
    (cell,) = [cell for cell in made["rows"] if cell["row"] == "biases"]
    total = np.nansum(values["squared_error"]) / np.nansum(values["ratings"])
    assert cell["metrics"]["rmse"] == pytest.approx(np.sqrt(total), rel=1e-5)
    assert values["user_rmse"] == pytest.approx(
        np.sqrt(values["squared_error"] / values["ratings"]), rel=1e-4, nan_ok=True
    )
    assert {one["metric"] for one in made["differences"]} == {"user_rmse", "user_mae"}


def test_users_with_a_single_interaction_train_and_are_not_counted(tmp_path: Path) -> None:
    given = timeless(tmp_path)
    path = Path(given["data"]["path"])
    path.write_text(path.read_text() + "lonely,i0\n" + "pair,i0\npair,i1\n")
    (ranking,) = comparisons(given, ["fcf"])
    found, feed = trained(ranking, "popularity")
    assert found.per_user is not None
    place = [feed.dataset.users.index(name) for name in ("lonely", "pair")]
    assert np.isnan(found.per_user["hit_ratio@10"][place]).all()
    assert np.count_nonzero(~np.isnan(found.per_user["hit_ratio@10"])) == 30
    assert feed.split.train[np.isin(feed.dataset.user, place)].all()


def test_the_same_pair_twice_counts_once(tmp_path: Path) -> None:
    given = timeless(tmp_path)
    (before,) = comparisons(given, ["fcf"])
    path = Path(given["data"]["path"])
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
    (after,) = comparisons(given, ["fcf"])
    assert len(after.dataset) == len(before.dataset)


# --- tuning ----------------------------------------------------------------------------------------------------


def test_every_kept_trial_can_be_computed_again(tmp_path: Path) -> None:
    (ranking,) = comparisons(GIVEN, ["fcf"])
    one = small(ranking, Ease.name, "item-knn", "popularity")
    one.tuned(tmp_path, 3)
    kept = Trials.read(one.trials_path(tmp_path))
    assert {row: kept.budget(row) for row in kept.rows} == {Ease.name: 3, "item-knn": 3}
    feed = make_feed(one.settings, one.dataset, 0)
    row = central_row(Ease, RANKING)
    for number in range(3):
        before, again = recomputed(kept, row, number, one.settings, feed, 0)
        assert before == again
        assert before is not None
    with pytest.raises(DataError, match="has no trial 3; it has 3, from 0"):
        recomputed(kept, row, 3, one.settings, feed, 0)
    with pytest.raises(DataError, match="another split"):
        recomputed(kept, row, 0, one.settings, make_feed(one.settings, one.dataset, 1), 1)


def test_a_search_sees_no_test_figure_and_a_larger_one_begins_with_a_smaller(tmp_path: Path) -> None:
    (ranking,) = comparisons(GIVEN, ["fcf"])
    one = small(ranking, Ease.name)
    few = list(one.tuned(tmp_path, 2).rows[Ease.name])
    assert one.tuned(tmp_path, 4).rows[Ease.name][:2] == few
    text = one.trials_path(tmp_path).read_text()
    assert '"hit_ratio@10"' not in text


def test_trials_of_another_file_tune_a_system_and_those_of_another_search_are_refused(tmp_path: Path) -> None:
    (ranking,) = comparisons(GIVEN, ["fcf"])
    one = small(ranking, "popularity", Ease.name, "fed-fcf")
    about = one.about(make_feed(one.settings, one.dataset, 0))
    found = {"options": {"fcf.ridge": 2.0}, "score": 0.5, "step": 1, "seconds": 0.1}
    trials = one.tuned(tmp_path, 1, given=Trials(about, {"fed-fcf": [found]}), central=True)
    made, _ = one.evaluated(trials, seeds=(0,), out=tmp_path)
    summary = {row["row"]: row for row in made["summary"]}
    assert (summary["fed-fcf"]["tuned"], summary["fed-fcf"]["trials"]) == ("tuned", 1)
    assert summary["fed-fcf"]["options"] == {"fcf.ridge": 2.0}
    with pytest.raises(DataError, match=r"made for another search \(other dataset\); expected those"):
        one.tuned(tmp_path, 1, given=Trials({**about, "dataset": "another"}))


def test_the_table_of_a_paper_takes_the_central_models_as_rows() -> None:
    row = central_row(Ease, RANKING)
    assert isinstance(row, Row)
    assert isinstance(comparisons(GIVEN, ["fcf"])[0].table, PaperTable)
    feed = make_feed(settings_of(system_named("fcf"), GIVEN, RANKING), load(RunSettings(**GIVEN)), 0)
    assert row.train(RunSettings(), {"ridge": 5.0}, feed, 0).metrics["hit_ratio@10"] > 0
    with pytest.raises(ConfigError, match="ridge is -1"):
        row.train(RunSettings(), {"ridge": -1}, feed, 0)


# --- the command -----------------------------------------------------------------------------------------------

SMALL = (
    *("--set", "data.synthetic.users=40", "--set", "data.synthetic.items=60"),
    *("--set", "data.synthetic.interactions=900", "--set", "rounds.cohort=20", "--set", "rounds.group=20"),
)


def test_the_command_compares_tunes_and_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "--table", "compare", "--quick", "--systems", "fcf", "--json"]
    arguments += ["--budget", "1", "--out", str(tmp_path), *SMALL]
    assert invoke(arguments) == 0
    printed = capsys.readouterr()
    (made,) = json.loads(printed.out)["result"]["tables"]
    assert {"random", "popularity", "fed-fcf"} <= {row["row"] for row in made["table"]["summary"]}
    assert "Verdict: The best central model is" in printed.err
    assert "Quick: rows that are runs train for at most 10 passes." in printed.err
    assert json.loads(Path(made["path"]).read_text())["verdict"] == made["table"]["verdict"]
    # Finished rows are taken over, to the second that they took.
    assert invoke([*arguments, "--resume"]) == 0
    (again,) = json.loads(capsys.readouterr().out)["result"]["tables"]
    assert again["table"]["rows"] == made["table"]["rows"]
    tune = [
        "tune",
        "--table",
        "compare",
        "--systems",
        "fcf",
        "--trials",
        "2",
        "--json",
        "--out",
        str(tmp_path),
    ]
    assert invoke([*tune, *SMALL, "--set", "rounds.passes=2"]) == 0
    (search,) = json.loads(capsys.readouterr().out)["result"]["tables"]
    budgets = {row: len(trials) for row, trials in search["trials"]["rows"].items()}
    assert set(budgets.values()) == {2}
    assert "fed-fcf" in budgets


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--table", "compare", "--systems", "fcg"], 10, "no system 'fcg'"),
        (["--table", "compare", "--systems", "drift"], 10, "drift cannot be compared"),
        (["--table", "compare", "--rows", "als"], 10, "--systems names the systems"),
        (["--table", "fedncf", "--systems", "fcf"], 10, "--systems with a paper's table"),
        (["--table", "fedncf", "--budget", "3"], 10, "--budget with a paper's table"),
        (["--table", "compared"], 10, "did you mean 'compare'?"),
        (["--table", "compare", "--set", "rounds.cohrt=20"], 10, "rounds.cohrt"),
    ],
)
def test_the_command_refuses_what_makes_no_comparison(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["evaluate", *arguments, *SMALL]) == status
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_search_for_the_comparison_has_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["tune", "--table", "compare", "--systems", "fcf", "--seed", "3", *SMALL]) == 10
    assert "whose search has the seed 0" in " ".join(capsys.readouterr().err.split())


def test_the_command_refuses_trials_of_no_table_that_it_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trials.json"
    Trials({"table": "fedncf"}, {}).write(path)
    assert invoke(["evaluate", "--table", "compare", "--systems", "fcf", "--trials", str(path), *SMALL]) == 20
    assert "trials of table fedncf; expected compare-ranking" in " ".join(capsys.readouterr().err.split())


def test_settings_that_not_every_system_has_are_checked_for_each_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "evaluate",
        "--table",
        "compare",
        "--quick",
        "--budget",
        "1",
        "--json",
        "--out",
        str(tmp_path),
    ]
    # A run of DRIFT's published form, the default system's, has no masked sum; runs in rounds have.
    assert invoke([*arguments, *SMALL, "--set", "secure_sum=masked", "--set", "rounds.passes=1"]) == 0
    made = json.loads(capsys.readouterr().out)["result"]["tables"]
    federated = [row for one in made for row in one["table"]["rows"] if row["row"].startswith("fed-")]
    assert federated
    assert {row["facts"]["secure_sum"] for row in federated} == {"masked"}
