import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.telemetry.report_facts import (
    costs,
    entries,
    epoch_positions,
    flatten,
    headline,
    leading_metric,
    metric,
    metrics,
    rows,
    section,
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
    report = {
        "metrics": scores(test_loss=0.4) | {"ndcg_test_items@10": 0.8, "ndcg@10": 0.2},
        "reference": {"saros": {"metrics": {"map@10": 0.1}}},
    }
    assert [one.key for one in metrics(report)] == ["ndcg@10", "map@10", "ndcg_test_items@10", "test_loss"]


def test_of_many_metrics_ndcg_map_errors_and_losses_make_the_headline() -> None:
    names = ("ndcg", "map", "precision", "recall", "hit_ratio", "ndcg_printed")
    keys = [f"{name}{part}@10" for part in ("", "_test_items") for name in names]
    many = {"metrics": dict.fromkeys([*keys, "rmse", "test_loss"], 0.5)}
    assert [one.key for one in headline(many)] == [
        "ndcg@10",
        "map@10",
        "ndcg_test_items@10",
        "map_test_items@10",
        "rmse",
        "test_loss",
    ]
    few = {"metrics": dict.fromkeys(keys[:6], 0.5)}
    assert headline(few) == metrics(few)
    judged = {"metrics": {"validation_ndcg@10": 0.5, "ndcg@10": 0.4}}
    assert [one.key for one in headline(judged)] == ["ndcg@10"]
    unranked = {"metrics": dict.fromkeys([f"coverage@{k}" for k in range(9)], 0.5)}
    assert headline(unranked) == metrics(unranked)[:6]


def test_the_leading_metric_is_ndcg_over_all_unseen_items() -> None:
    found = leading_metric({"metrics": {"map@10": 0.1, "ndcg_test_items@10": 0.8, "ndcg@10": 0.2}})
    assert found is not None
    assert found.key == "ndcg@10"
    assert leading_metric({"metrics": {"test_loss": 0.4}}) is None


def test_where_whole_items_were_held_out_the_ranking_is_of_new_items() -> None:
    made = {"metrics": {"precision@10": {"mean": 0.1}, "ndcg_rated@10": {"mean": 0.2}}}
    cold = {**made, "settings": {"split": {"kind": "cold-items"}}}
    assert [one.population for one in metrics(cold)] == ["rated test items", "new items"]
    assert [one.population for one in metrics(made)] == ["rated test items", "all unseen items"]


def test_the_lower_error_is_best() -> None:
    report = {"metrics": scores(rmse=0.95), "reference": {"saros": {"metrics": scores(rmse=0.93)}}}
    found = rows(report, metrics(report))
    assert [row.scores[0].best for row in found] == [False, True]


def test_scores_equal_at_the_digits_shown_are_both_best() -> None:
    report = {"metrics": scores(f1=0.50001), "reference": {"random": {"metrics": scores(f1=0.50002)}}}
    found = rows(report, metrics(report))
    assert [row.scores[0].best for row in found] == [True, True]


def test_a_score_without_a_rival_is_not_called_best() -> None:
    report = {"metrics": scores(f1=0.5)}
    assert not rows(report, metrics(report))[0].scores[0].best


def test_references_without_any_score_have_no_row() -> None:
    report = {"metrics": scores(f1=0.5), "reference": {"saros": {"metrics": scores(f1=None)}, "random": None}}
    assert [row.name for row in rows(report, metrics(report))] == [""]


def test_costs_add_what_is_known_and_keep_unknown_apart_from_zero() -> None:
    total = costs(
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
    assert (total.calls, total.errors, total.bytes_out, total.bytes_in) == (2, None, 11, 5)
    assert total.bytes_total == 16
    assert total.security_share == 0.2
    assert costs({}).security_share is None


def test_evaluations_within_an_epoch_stand_at_their_share_of_its_versions() -> None:
    history = [
        {"epoch": 0, "version": 0},
        {"epoch": 1, "version": 25},
        {"epoch": 1, "version": 100},
        {"epoch": 2, "version": 150},
        {"epoch": 2, "version": 200},
    ]
    assert [place for place, _ in epoch_positions(history)] == [0, 0.25, 1, 1.5, 2]


def test_without_versions_evaluations_are_spread_evenly() -> None:
    assert [place for place, _ in epoch_positions([{"epoch": 1}, {"epoch": 1}, {"epoch": 2}])] == [0.5, 1, 2]


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
    placed = epoch_positions(history)
    assert len(placed) == sum(entry["epoch"] is not None for entry in history)
    for place, entry in placed:
        assert max(0, entry["epoch"] - 1) <= place <= max(0, entry["epoch"])
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


@given(st.one_of(st.none(), st.text(), st.integers(), st.floats(), st.lists(st.integers())))
def test_a_section_of_another_shape_reads_as_absent(value: object) -> None:
    assert section({"x": value}, "x") == {}
    assert entries({"x": value}, "x") == []
