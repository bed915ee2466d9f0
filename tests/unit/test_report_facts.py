import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.telemetry.report import EvaluationPart, Report
from coterie.telemetry.report_facts import (
    costs,
    epoch_positions,
    flatten,
    headline,
    leading_metric,
    metric,
    metrics,
    rows,
    verdict,
)


def scores(**means: float | None) -> dict[str, dict[str, float | None]]:
    return {key: {"mean": mean, "std": None} for key, mean in means.items()}


@pytest.mark.parametrize(
    ("key", "label", "lower"),
    [
        ("ndcg@10", "NDCG@10, all unseen items", False),
        ("map_test_items@10", "MAP@10, test items", False),
        ("ndcg_printed@10", "NDCG@10 as printed, all unseen items", False),
        ("validation_map@10", "MAP@10, all unseen items, on validation data", False),
        ("validation_ndcg_printed_items@5", "NDCG@5 as printed, validation items", False),
        ("validation_loss", "Validation loss, on validation data", True),
        ("rmse", "RMSE", True),
        ("test_loss", "Test loss", True),
        ("coverage@5", "coverage@5", False),
    ],
)
def test_a_metric_key_reads_as_its_name_and_population(key: str, label: str, lower: bool) -> None:
    assert metric(key).full_label == label
    assert metric(key).lower_is_better is lower


def test_metrics_are_ordered_by_population_with_losses_last() -> None:
    report = Report.read(
        {
            "metrics": scores(test_loss=0.4) | {"ndcg_test_items@10": 0.8, "ndcg@10": 0.2},
            "reference": {"saros": {"metrics": {"map@10": 0.1}}},
        }
    )
    assert [one.key for one in metrics(report)] == ["ndcg@10", "map@10", "ndcg_test_items@10", "test_loss"]


def test_of_many_metrics_ndcg_map_errors_and_losses_make_the_headline() -> None:
    names = ("ndcg", "map", "precision", "recall", "hit_ratio", "ndcg_printed")
    keys = [f"{name}{part}@10" for part in ("", "_test_items") for name in names]
    many = Report.read({"metrics": dict.fromkeys([*keys, "rmse", "test_loss"], 0.5)})
    assert [one.key for one in headline(many)] == [
        "ndcg@10",
        "map@10",
        "ndcg_test_items@10",
        "map_test_items@10",
        "rmse",
        "test_loss",
    ]
    few = Report.read({"metrics": dict.fromkeys(keys[:6], 0.5)})
    assert headline(few) == metrics(few)
    judged = Report.read({"metrics": {"validation_ndcg@10": 0.5, "ndcg@10": 0.4}})
    assert [one.key for one in headline(judged)] == ["ndcg@10"]
    unranked = Report.read({"metrics": dict.fromkeys([f"coverage@{k}" for k in range(9)], 0.5)})
    assert headline(unranked) == metrics(unranked)[:6]


def test_the_leading_metric_is_ndcg_over_all_unseen_items() -> None:
    found = leading_metric(
        Report.read({"metrics": {"map@10": 0.1, "ndcg_test_items@10": 0.8, "ndcg@10": 0.2}})
    )
    assert found is not None
    assert found.key == "ndcg@10"
    assert leading_metric(Report.read({"metrics": {"test_loss": 0.4}})) is None


def test_where_whole_items_were_held_out_the_ranking_is_of_new_items() -> None:
    made = {"metrics": {"precision@10": {"mean": 0.1}, "ndcg_rated@10": {"mean": 0.2}}}
    cold = {**made, "settings": {"split": {"kind": "cold-items"}}}
    assert [one.population for one in metrics(Report.read(cold))] == ["rated test items", "new items"]
    assert [one.population for one in metrics(Report.read(made))] == ["rated test items", "all unseen items"]


def test_the_lower_error_is_best() -> None:
    report = Report.read(
        {"metrics": scores(rmse=0.95), "reference": {"saros": {"metrics": scores(rmse=0.93)}}}
    )
    found = rows(report, metrics(report))
    assert [row.scores[0].best for row in found] == [False, True]


def test_scores_equal_at_the_digits_shown_are_both_best() -> None:
    report = Report.read(
        {"metrics": scores(f1=0.50001), "reference": {"random": {"metrics": scores(f1=0.50002)}}}
    )
    found = rows(report, metrics(report))
    assert [row.scores[0].best for row in found] == [True, True]


def test_a_score_without_a_rival_is_not_called_best() -> None:
    report = Report.read({"metrics": scores(f1=0.5)})
    assert not rows(report, metrics(report))[0].scores[0].best


def test_references_without_any_score_have_no_row() -> None:
    report = Report.read(
        {"metrics": scores(f1=0.5), "reference": {"saros": {"metrics": scores(f1=None)}, "random": None}}
    )
    assert [row.name for row in rows(report, metrics(report))] == [""]


def test_costs_add_what_is_known_and_keep_unknown_apart_from_zero() -> None:
    total = costs(
        Report.read(
            {
                "traffic": {
                    "A": {"calls": 2, "bytes_out": 10, "bytes_in": 5},
                    "B": {"calls": None, "bytes_out": 1},
                },
                "cpu_seconds": {
                    "cos": {"total": 8.0, "security": 2.0},
                    "host": {"total": 2.0, "security": math.nan},
                },
            }
        )
    )
    assert (total.calls, total.errors, total.bytes_out, total.bytes_in) == (2, None, 11, 5)
    assert total.bytes_total == 16
    assert total.security_share == 0.2
    assert costs(Report()).security_share is None


def test_evaluations_within_an_epoch_stand_at_their_share_of_its_versions() -> None:
    history = [
        EvaluationPart(epoch=epoch, version=version)
        for epoch, version in ((0, 0), (1, 25), (1, 100), (2, 150), (2, 200))
    ]
    assert [place for place, _ in epoch_positions(history)] == [0, 0.25, 1, 1.5, 2]


def test_without_versions_evaluations_are_spread_evenly() -> None:
    history = [EvaluationPart(epoch=epoch) for epoch in (1, 1, 2)]
    assert [place for place, _ in epoch_positions(history)] == [0.5, 1, 2]


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "epoch": st.one_of(st.none(), st.integers(0, 5)),
                "version": st.one_of(st.none(), st.integers(0, 1000)),
            }
        )
    )
)
def test_positions_never_leave_their_epoch_nor_go_back(history: list[dict[str, Any]]) -> None:
    placed = epoch_positions([EvaluationPart.model_validate(entry) for entry in history])
    assert len(placed) == sum(entry["epoch"] is not None for entry in history)
    for place, entry in placed:
        assert entry.epoch is not None
        assert max(0, entry.epoch - 1) <= place <= max(0, entry.epoch)
    places = [place for place, _ in placed]
    assert places == sorted(places)


def test_nested_settings_become_dotted_names() -> None:
    settings = {"a": {"b": True, "c": {"d": None}}, "e": [1, 2], "f": {}, "g": ""}
    assert list(flatten(settings)) == [
        ("a.b", "yes"),
        ("a.c.d", "not set"),
        ("e", "1, 2"),
        ("f", "none"),
        ("g", "empty"),
    ]


@pytest.mark.parametrize(
    ("ours", "others", "words"),
    [
        (0.4, {"als": 0.3, "popularity": 0.2}, "ahead of ALS, the best baseline, in NDCG@10"),
        (0.2, {"als": 0.3, "popularity": 0.1}, "behind ALS, the best baseline, in NDCG@10"),
        (0.30001, {"als": 0.3, "popularity": None}, "equal to ALS, the best baseline, in NDCG@10"),
    ],
)
def test_the_verdict_names_the_best_baseline(
    ours: float, others: dict[str, float | None], words: str
) -> None:
    report = Report.read(
        {
            "metrics": {"ndcg@10": ours},
            "reference": {name: {"metrics": {"ndcg@10": value}} for name, value in others.items()},
        }
    )
    assert verdict(report).startswith(f"{words}, all unseen items: {ours:.4f} and 0.3000")


def test_of_errors_the_lowest_baseline_is_the_best() -> None:
    report = Report.read(
        {
            "metrics": scores(rmse=0.95),
            "reference": {"means": {"metrics": scores(rmse=0.9)}, "random": {"metrics": scores(rmse=2.0)}},
        }
    )
    assert verdict(report).startswith("behind Item and user mean, the best baseline, in RMSE")


def test_without_a_baseline_or_a_figure_there_is_no_verdict() -> None:
    assert verdict(Report.read({})) == ""
    assert verdict(Report.read({"metrics": scores(rmse=0.9)})) == ""
    assert verdict(Report.read({"reference": {"als": {"metrics": scores(rmse=0.9)}}})) == ""
