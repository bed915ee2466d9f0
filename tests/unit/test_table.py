"""The table harness on rows that are really trained: what is kept, summarised, compared and taken up again."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.config.run import RoundsSettings, RunSettings, SplitSettings
from coterie.errors import ConfigError, DataError
from coterie.evaluation import from_table, headline, paired_difference, popularity, random_scores
from coterie.evaluation.selection import SelectedModel, Selection
from coterie.studies import tables
from coterie.studies.run_data import Feed, load, make_feed
from coterie.studies.tables.beside import POPULARITY, RANDOM
from coterie.studies.tables.cell import read_pairs, write_pairs
from coterie.studies.tables.paper_table import PaperTable, PrintedTable, chosen_rows, evaluate
from coterie.studies.tables.printed_tables import PaperLine, beside, curves, differences
from coterie.studies.tables.row import Choices, Row, draw, with_options
from coterie.studies.tables.tuning import Trials
from coterie.systems.fedncf.settings import FedNcfSettings, published
from coterie.systems.fedncf.study.table import FEDNCF, studies

SETTINGS = RunSettings.model_validate(
    {"data": {"synthetic": {"users": 60, "items": 200, "interactions": 2400}}}
)


def blended(asked: list[tuple[Any, int]] | None = None) -> Any:
    """Rank by popularity with some chance, more of it version by version: a row with a history."""

    def train(settings: RunSettings, options: Mapping[str, Any], feed: Feed, seed: int) -> SelectedModel:
        if asked is not None:
            asked.append((dict(options), seed))
        data, train = feed.dataset, feed.split.train
        known = popularity(data.item[train], np.ones(train.sum(), bool), len(data.items))
        chance = random_scores(len(data.users), len(data.items), seed)
        selection = Selection(feed.leave_one_out())
        for step in (1, 2, 3):
            selection.see(step, *from_table(known + options["noise"] * step * chance))
        return selection.trained(secure_sum="clear")

    return train


def table(*rows: Row, **more: Any) -> PaperTable:
    return replace(
        tables.tables()["fedncf"], name="tried", rows=lambda: rows, sections=(), compared=(), **more
    )


BLEND = Row("blend", "Blend", blended(), options={"noise": 1.0}, space={"noise": Choices((0.0, 1.0, 400.0))})


def test_every_row_and_seed_is_kept_with_its_figures_and_the_values_of_its_users(tmp_path: Path) -> None:
    made, path = evaluate(table(BLEND, POPULARITY, RANDOM), SETTINGS, seeds=(0, 1), out=tmp_path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(made, default=float))
    assert [(one["row"], one["seed"]) for one in made["rows"]] == [
        (name, seed) for name in ("blend", "popularity", "random") for seed in (0, 1)
    ]
    assert made["settings"]["split"]["kind"] == "leave-last-out"
    for one in made["rows"]:
        users, values = read_pairs(tmp_path / "tried-synthetic" / one["per_user"])
        assert len(users) == 60
        for name, value in headline(values).items():
            assert one["metrics"][name] == pytest.approx(value, abs=1e-6)
        assert one["users"]["hit_ratio@10"] == 60
        assert one["facts"] == ({"secure_sum": "clear"} if one["row"] == "blend" else {})
    assert [one["tuned"] for one in made["summary"]] == ["untuned", "fixed", "fixed"]
    first = made["summary"][0]["metrics"]["hit_ratio@10"]
    assert first["mean"] == pytest.approx(np.mean([r["metrics"]["hit_ratio@10"] for r in made["rows"][:2]]))
    assert first["std"] is not None


def test_the_version_of_the_papers_practice_stands_apart(tmp_path: Path) -> None:
    made, _ = evaluate(table(BLEND), SETTINGS, seeds=(0,), out=tmp_path)
    (cell,) = made["rows"]
    tested = [entry["metrics"]["hit_ratio@10"] for entry in cell["history"]]
    assert cell["best_on_test"]["metrics"]["hit_ratio@10"] == max(tested)
    chosen = [entry["metrics"]["validation_hit_ratio@10"] for entry in cell["history"]]
    assert cell["step"] == 1 + int(np.argmax(chosen))


def test_rows_are_compared_user_by_user(tmp_path: Path) -> None:
    pairs = (("blend", "random"),)
    made, _ = evaluate(
        replace(table(BLEND, RANDOM), compared=pairs, compared_by=("hit_ratio@10",)),
        SETTINGS, seeds=(0, 1), out=tmp_path,
    )  # fmt: skip
    (found,) = made["differences"]
    values = {
        name: [
            read_pairs(tmp_path / "tried-synthetic" / f"{name}-seed-{seed}.csv")[1]["hit_ratio@10"]
            for seed in (0, 1)
        ]
        for name in ("blend", "random")
    }
    expected = paired_difference(values["blend"], values["random"])
    assert (found["mean"], found["low"], found["users"], found["seeds"]) == (
        expected.mean, expected.low, 60, 2,
    )  # fmt: skip


def test_a_row_takes_its_best_trial_and_a_variant_that_of_its_model(tmp_path: Path) -> None:
    asked: list[tuple[Any, int]] = []
    row = replace(BLEND, engine=blended(asked))
    variant = Row("variant", "Variant", blended(asked), options={"other": 1}, like="blend")
    trials = Trials(
        {"table": "tried", "dataset": "synthetic"},
        {
            "blend": [
                {"options": {"noise": x}, "score": score}
                for x, score in ((0.5, 0.1), (2.0, 0.9), (3.0, None))
            ]
        },
    )
    made, _ = evaluate(table(row, variant), SETTINGS, seeds=(0,), out=tmp_path, trials=trials)
    assert asked == [({"noise": 2.0}, 0), ({"noise": 2.0, "other": 1}, 0)]
    assert [(one["tuned"], one["trials"]) for one in made["summary"]] == [("tuned", 3)] * 2


def test_trials_of_another_data_set_are_refused(tmp_path: Path) -> None:
    trials = Trials({"table": "tried", "dataset": "ml-100k"})
    with pytest.raises(DataError, match="made for table tried on ml-100k; expected tried on synthetic"):
        evaluate(table(BLEND), SETTINGS, seeds=(0,), out=tmp_path, trials=trials)


def test_options_are_enumerated_where_the_table_says_so_and_chosen_on_validation(tmp_path: Path) -> None:
    made, _ = evaluate(table(BLEND, enumerate_options=True), SETTINGS, seeds=(0, 1), out=tmp_path)
    scores: dict[float, list[float]] = {}
    for one in made["tried"]:
        scores.setdefault(one["options"]["noise"], []).append(one["metrics"]["validation_hit_ratio@10"])
    assert {noise: len(values) for noise, values in scores.items()} == {0.0: 2, 1.0: 2, 400.0: 2}
    best = max(scores, key=lambda noise: np.mean(scores[noise]))
    assert {one["options"]["noise"] for one in made["rows"]} == {best}
    assert (made["summary"][0]["tuned"], made["summary"][0]["trials"]) == ("tuned", 3)


def test_what_was_broken_off_is_taken_up_unless_anything_has_changed(tmp_path: Path) -> None:
    asked: list[tuple[Any, int]] = []
    row = replace(BLEND, engine=blended(asked))
    first, _ = evaluate(table(row), SETTINGS, seeds=(0,), out=tmp_path, resume=True)
    again, _ = evaluate(table(row), SETTINGS, seeds=(0, 1), out=tmp_path, resume=True)
    assert [seed for _, seed in asked] == [0, 1]
    assert again["rows"][0] == json.loads(json.dumps(first["rows"][0], default=float))
    evaluate(table(row), SETTINGS, seeds=(0,), out=tmp_path)
    assert len(asked) == 3  # not asked to resume
    changed = SETTINGS.model_copy(update={"split": SplitSettings(kind="leave-last-out", ties="file")})
    other = replace(row, options={"noise": 3.0})
    evaluate(table(row, suffix=lambda _: ""), changed, seeds=(0,), out=tmp_path, resume=True)
    evaluate(table(other), SETTINGS, seeds=(0,), out=tmp_path, resume=True)
    assert len(asked) == 5
    (tmp_path / "tried-synthetic" / "blend-seed-0.csv").unlink()
    evaluate(table(other), SETTINGS, seeds=(0,), out=tmp_path, resume=True)
    assert len(asked) == 6


def test_rows_can_be_asked_for_by_name() -> None:
    assert [row.name for row in chosen_rows(table(BLEND, RANDOM), ("random",), "synthetic")] == ["random"]
    with pytest.raises(ConfigError, match=r"no row 'blen'; it has blend, random.*'blend'"):
        chosen_rows(table(BLEND, RANDOM), ("blen",), "synthetic")


def test_studies_are_trained_only_when_they_are_asked_for() -> None:
    one = table(BLEND, POPULARITY, RANDOM, studies={"extra": ("popularity", "random")})
    assert [row.name for row in chosen_rows(one, None, "synthetic")] == ["blend"]
    assert [row.name for row in chosen_rows(one, ("extra",), "synthetic")] == ["popularity", "random"]
    assert [row.name for row in chosen_rows(one, ("random", "blend"), "synthetic")] == ["blend", "random"]
    shared = replace(one, always=("random",))
    assert [row.name for row in chosen_rows(shared, None, "synthetic")] == ["blend", "random"]
    assert [row.name for row in chosen_rows(shared, ("extra",), "synthetic")] == ["popularity", "random"]


def test_where_a_study_of_fedncf_is_as_the_paper_prints_it_the_printed_row_is_trained() -> None:
    rows = chosen_rows(FEDNCF, None, "ml-100k")
    as_printed = {row.name: row for row in rows if row.name in FEDNCF.always}
    assert list(as_printed) == list(FEDNCF.always)
    same = [row for row in studies() if row.name in as_printed]
    # Cohorts and local epochs of three models, one aggregation.
    assert len(same) == 7
    for row in same:
        printed = as_printed[row.name].options
        assert row.options.items() >= printed.items()
        assert with_options(SETTINGS, row.options) == with_options(SETTINGS, printed)
    names = [row.name for row in FEDNCF.rows()]
    assert len(names) == len(set(names))
    assert {name for study in FEDNCF.studies.values() for name in study} <= set(names)


def test_further_metrics_of_users_are_kept_summarised_and_counted(tmp_path: Path) -> None:
    def halved(values: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return {"half@10": np.where(np.arange(60) < 10, np.nan, values["ndcg@10"] / 2)}

    made, _ = evaluate(
        table(RANDOM, also=lambda _settings, _dataset: halved), SETTINGS, seeds=(0,), out=tmp_path
    )
    (one,) = made["rows"]
    _, values = read_pairs(tmp_path / "tried-synthetic" / one["per_user"])
    assert one["metrics"]["half@10"] == pytest.approx(values["ndcg@10"][10:].mean() / 2, abs=1e-6)
    assert one["users"]["half@10"] == 50


def test_a_table_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'fedncv' is no table.*did you mean 'fedncf'"):
        tables.find("fedncv")


def test_values_of_users_survive_their_file(tmp_path: Path) -> None:
    values = {"a@10": np.array([0.25, np.nan]), "b@10": np.array([1.0, 0.0])}
    write_pairs(tmp_path / "pairs.csv", ("u,1", "u2"), values)
    users, found = read_pairs(tmp_path / "pairs.csv")
    assert users == ("u,1", "u2")
    for name, one in values.items():
        np.testing.assert_array_equal(found[name], one)
    with pytest.raises(DataError, match="cannot read the values of users"):
        read_pairs(tmp_path / "none.csv")


# --- blocks ------------------------------------------------------------------------------------------------------


def block(tmp_path: Path, section: Any, *rows: Row, seeds: tuple[int, ...] = (0, 1)) -> PrintedTable | None:
    made, _ = evaluate(replace(table(*rows), sections=(section,)), SETTINGS, seeds=seeds, out=tmp_path)
    return PrintedTable(**made["blocks"][0]) if made["blocks"] else None


def test_our_figures_stand_beside_the_papers(tmp_path: Path) -> None:
    entries = (
        PaperLine("blend", "Blend", {"hit_ratio@10": 0.59}),
        PaperLine("blend", "on test", {"hit_ratio@10": 0.59}, best_on_test=True),
        PaperLine("unbuilt", "Unbuilt", {"hit_ratio@10": 0.61}),
        PaperLine("unbuilt", "Unbuilt variant", variant=True),
    )
    section = beside("Table 9", {"": entries}, {"hit_ratio@10": "HR"}, {"ndcg_all@10": "all"}, ("a note",))
    shown = block(tmp_path, section, BLEND)
    assert shown is not None
    assert shown.columns == ("row", "paper\nHR", "HR", "all", "tuned")
    assert [line[0] for line in shown.rows] == ["Blend", "on test", "Unbuilt"]
    assert [line[1] for line in shown.rows] == ["0.59", "0.59", "0.61"]
    assert shown.rows[2][2:] == ("\N{EN DASH}",) * 3
    assert shown.rows[0][-1] == "untuned"
    ours = [float(line[2].split(" ±")[0]) for line in shown.rows[:2]]
    assert ours[0] <= ours[1]
    assert shown.notes == ("a note",)
    assert "2 seeds" in shown.title


def test_a_block_without_a_row_of_ours_or_for_another_data_set_is_left_out(tmp_path: Path) -> None:
    for entries in ({"": (PaperLine("unbuilt", "U"),)}, {"ml-1m": (PaperLine("blend", "B"),)}):
        assert block(tmp_path, beside("T", entries, {"hit_ratio@10": "HR"}), BLEND, seeds=(0,)) is None
    assert block(tmp_path, curves("F", {"unbuilt": "U"}, "hit_ratio@10", (1,)), BLEND, seeds=(0,)) is None


def test_a_curve_shows_the_last_version_up_to_each_step_and_the_one_that_counts(tmp_path: Path) -> None:
    section = curves("Figure 9", {"blend": "Blend"}, "hit_ratio@10", (1, 3, 10))
    shown = block(tmp_path, section, BLEND, seeds=(0,))
    record = json.loads((tmp_path / "tried-synthetic" / "blend-seed-0.json").read_text())
    values = [entry["metrics"]["hit_ratio@10"] for entry in record["history"]]
    counts, highest = f"{record['metrics']['hit_ratio@10']:.3f}", f"{max(values):.3f}"
    assert shown is not None
    assert shown.columns[-2:] == ("version that counts", "highest")
    assert shown.rows == (("Blend", f"{values[0]:.3f}", f"{values[2]:.3f}", "\N{EN DASH}", counts, highest),)


def test_differences_are_shown_with_their_intervals(tmp_path: Path) -> None:
    section = differences("Differences", (("blend", "random"), ("blend", "unbuilt")), ("hit_ratio@10",))
    shown = block(tmp_path, section, BLEND, RANDOM)
    assert shown is not None
    (line,) = shown.rows
    assert line[0] == "Blend minus Random order"
    low, high = (float(part) for part in line[3].split(" to "))
    assert low < float(line[2]) < high


# --- the table of FedNCF -----------------------------------------------------------------------------------------


def test_the_table_of_fedncf_runs_on_the_synthetic_set_and_names_what_is_not_tuned(tmp_path: Path) -> None:
    pytest.importorskip("implicit", reason="the extra 'baselines' is not installed")
    made, path = evaluate(
        tables.find("fedncf"), SETTINGS, seeds=(0,), out=tmp_path, names=("als", "popularity", "random")
    )
    assert path.name == "fedncf-synthetic.json"
    found = {one["row"]: one for one in made["summary"]}
    assert (found["als"]["tuned"], found["popularity"]["tuned"]) == ("untuned", "fixed")
    hit = {name: one["metrics"]["hit_ratio@10"]["mean"] for name, one in found.items()}
    assert hit["random"] < hit["popularity"]
    assert made["blocks"][0]["title"].startswith("Table 5")


def test_data_without_times_is_divided_by_its_published_hold_out_or_as_asked() -> None:
    table = tables.find("fedncf")
    data = load(SETTINGS)
    assert table.prepare(SETTINGS, data).split.kind == "leave-last-out"
    # What the system's own settings say holds where it can.
    last_out = SETTINGS.model_copy(update={"split": SplitSettings(kind="leave-last-out")})
    for settings in (SETTINGS, last_out):
        assert table.prepare(settings, replace(data, time=None)).split.kind == "published"
    for asked in (
        SplitSettings(kind="published"),
        SplitSettings(kind="leave-random-out"),
        SplitSettings(kind="file", path=Path("split.csv")),
    ):
        given = SETTINGS.model_copy(update={"split": asked})
        assert table.prepare(given, data).split == asked
    assert table.prepare(SETTINGS, data).system == "fedncf"


def test_the_other_tie_rule_makes_another_file() -> None:
    table = tables.find("fedncf")
    by_file = SETTINGS.model_copy(update={"split": SplitSettings(kind="leave-last-out", ties="file")})
    assert tables.stem(table, by_file, load(SETTINGS)) == "fedncf-synthetic-file-order"
    masked = SETTINGS.model_copy(update={"secure_sum": "masked"})
    assert tables.stem(table, masked, load(SETTINGS)) == "fedncf-synthetic-masked"


def test_every_row_of_every_table_has_a_name_of_its_own_and_every_study_has_rows() -> None:
    for table in tables.tables().values():
        names = [row.name for row in table.rows()]
        assert len(set(names)) == len(names)
        assert {name for study in table.studies.values() for name in study} <= set(names)
        assert {row.like for row in table.rows()} - {None} <= set(names)


def test_the_options_of_every_federated_row_make_a_run_with_the_models_of_the_paper() -> None:
    table = tables.find("fedncf")
    settings = table.prepare(SETTINGS, load(SETTINGS))
    models = set()
    for row in table.rows():
        if row.name.startswith("fed-"):
            run = with_options(settings, row.options)
            models.add(run.fedncf.model)
            assert run.fedncf.model in row.name
            for options in draw(row, 3, seed=0):
                with_options(settings, options)
    assert models == {"gmf", "mlp", "neumf"}


SMALL = SETTINGS.model_copy(
    update={
        "rounds": RoundsSettings(cohort=30, group=30, passes=2, evaluate_every=1, patience=0),
        "fedncf": FedNcfSettings(dim=4),
    }
)


@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
def test_a_federated_row_keeps_the_values_of_its_users_at_the_version_that_counts(
    tmp_path: Path, secure_sum: str
) -> None:
    settings = SMALL.model_copy(update={"secure_sum": secure_sum})
    made, path = evaluate(
        tables.find("fedncf"), settings, seeds=(1,), out=tmp_path, names=("fed-gmf", "fed-gmf-exact")
    )
    for one in made["rows"]:
        assert [entry["step"] for entry in one["history"]] == [0, 1, 2]
        chosen = [entry["metrics"]["validation_hit_ratio@10"] for entry in one["history"]]
        assert one["step"] == int(np.argmax(chosen))
        users, values = read_pairs(path.with_suffix("") / one["per_user"])
        assert len(users) == 60
        reported = one["history"][one["step"]]["metrics"]
        for name, value in headline(values).items():
            # What the server learns is a quantised sum.
            assert reported[name] == pytest.approx(value, abs=0.003)
        assert one["facts"]["secure_sum"] == secure_sum
        assert one["facts"]["touch"] == ("exact" if one["row"].endswith("exact") else "once")
    assert 0 < made["rows"][0]["facts"]["withheld"] < 1
    assert made["differences"][0]["first"] == "fed-gmf"


def test_a_masked_table_has_the_figures_of_the_clear_one_to_the_last_digit(tmp_path: Path) -> None:
    made = {
        each: evaluate(
            tables.find("fedncf"),
            SMALL.model_copy(update={"secure_sum": each}),
            seeds=(0,),
            out=tmp_path,
            names=("fed-gmf",),
        )[0]["rows"][0]
        for each in ("clear", "masked")
    }
    assert made["clear"]["history"] == made["masked"]["history"]
    assert made["clear"]["metrics"] == made["masked"]["metrics"]


def test_options_found_on_a_data_set_are_marked_there_and_only_there(tmp_path: Path) -> None:
    for found_on, how in (("synthetic", "found before"), ("ml-100k", "untuned")):
        made, _ = evaluate(
            table(replace(BLEND, found={found_on: {}})), SETTINGS, seeds=(0,), out=tmp_path / found_on
        )
        assert made["rows"][0]["tuned"] == how


def test_a_row_begins_with_what_was_found_on_the_data_set() -> None:
    row = replace(BLEND, options={"share": 0.1}, found={"synthetic": {"share": 0.4}})
    names = ("blend",)
    assert [one.options for one in chosen_rows(table(row), names, "synthetic")] == [{"share": 0.4}]
    assert [one.options for one in chosen_rows(table(row), names, "ml-100k")] == [{"share": 0.1}]


def test_a_row_as_printed_has_every_setting_of_the_paper() -> None:
    fedncf = tables.find("fedncf")
    settings = fedncf.prepare(SETTINGS, load(SETTINGS))
    for row in fedncf.rows():
        if row.name.endswith("-printed"):
            run = with_options(settings, row.options)
            assert run.fedncf == published(run.fedncf.model)


def test_a_centralised_row_stops_early_and_beats_popularity(tmp_path: Path) -> None:
    made, _ = evaluate(tables.find("fedncf"), SETTINGS, seeds=(0,), out=tmp_path, names=("gmf", "popularity"))
    hit = {one["row"]: one["metrics"]["hit_ratio@10"] for one in made["rows"]}
    assert hit["gmf"] > hit["popularity"]
    history = made["rows"][0]["history"]
    assert len(history) == made["rows"][0]["step"] + 10 < 60
    assert history[5]["train_loss"] < history[0]["train_loss"]


def test_what_is_measured_is_what_the_feed_holds_out() -> None:
    settings = tables.find("fedncf").prepare(SETTINGS, load(SETTINGS))
    feed = make_feed(settings, load(settings), 2)
    trained = POPULARITY.engine(settings, {}, feed, 2)
    train = feed.split.train
    known = popularity(feed.dataset.item[train], np.ones(train.sum(), bool), 200)
    expected = headline(feed.leave_one_out().measure(*from_table(np.broadcast_to(known, (60, 200)))))
    assert trained.metrics == expected
