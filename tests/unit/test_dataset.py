import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from coterie.data import Dataset, describe
from coterie.errors import DataError

TINY = Dataset(
    name="tiny",
    users=("a", "b"),
    items=("x", "y", "z"),
    user=np.array([0, 0, 1], np.int32),
    item=np.array([0, 2, 2], np.int32),
    rating=np.array([1, 3, 5], np.float32),
    time=np.array([0, 86_400, 172_800], np.int64),
    genres=("Drama", "War"),
    item_genres=np.array([[1, 0], [0, 1], [1, 1]], bool),
    item_titles=("X", "Y", "Z"),
)


def test_a_rating_at_the_threshold_is_positive() -> None:
    assert TINY.positive(3).tolist() == [False, True, True]


def test_the_length_is_the_number_of_interactions() -> None:
    assert len(TINY) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": np.array([0, 0, 2], np.int32)}, "user index 2; expected 0 to 1"),
        ({"item": np.array([0, -1, 2], np.int32)}, "item index -1; expected 0 to 2"),
        ({"user": np.array([0, 0, 1], np.int64)}, "user is int64"),
        ({"rating": np.array([1, 3], np.float32)}, r"rating is float32 of shape \(2,\)"),
        ({"rating": np.array([1, np.nan, 5], np.float32)}, r"rating\[1\] is nan"),
        ({"time": np.array([0, 1, 2], np.float64)}, "time is float64"),
        ({"users": ("a", "a")}, "users holds a key twice"),
        ({"item": np.array([2, 2, 2], np.int32)}, "user 'a' and item 'z' occur together in two rows"),
        ({"item_genres": np.ones((3, 1), bool)}, r"item_genres is bool of shape \(3, 1\)"),
        ({"item_genres": None}, "2 genres are named but item_genres is None"),
        ({"item_titles": ("X",)}, "1 titles for 3 items"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_its_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        dataclasses.replace(TINY, **change)


def test_a_description_counts_and_is_json() -> None:
    facts = json.loads(json.dumps(describe(TINY)))
    assert (facts["users"], facts["items"], facts["interactions"]) == (2, 3, 3)
    assert facts["sparsity"] == pytest.approx(0.5)
    assert facts["time_span"] == {
        "first": "1970-01-01T00:00:00Z",
        "last": "1970-01-03T00:00:00Z",
        "days": 2.0,
    }
    assert facts["ratings"] == {"1": 1, "3": 1, "5": 1}
    assert facts["genres"] == {"Drama": 3, "War": 2}
    assert facts["missing"] == []


def test_a_description_says_that_ratings_are_below_zero() -> None:
    (*_, note) = describe(dataclasses.replace(TINY, rating=np.array([-5, 1, 2], np.float32)))["missing"]
    assert note.startswith(
        "no positive scale: 33.3% of the ratings are below 0, the lowest -5; data.rating_range"
    )
    assert describe(TINY)["missing"] == []


def test_a_description_says_what_is_missing_and_what_that_prevents() -> None:
    bare = dataclasses.replace(
        TINY,
        rating=np.ones(3, np.float32),
        time=None,
        genres=(),
        item_genres=None,
        item_titles=None,
        notes=("no ratings",),
    )
    facts = describe(bare)
    assert [line.partition(":")[0] for line in facts["missing"]] == [
        "no timestamps",
        "no genres",
        "no titles",
        "all ratings are equal",
    ]
    assert facts["time_span"] is None
    assert facts["notes"] == ["no ratings"]


def test_many_distinct_ratings_are_counted_in_ranges() -> None:
    count = 200
    wide = Dataset(
        name="wide",
        users=tuple(map(str, range(count))),
        items=("x",),
        user=np.arange(count, dtype=np.int32),
        item=np.zeros(count, np.int32),
        rating=np.arange(count, dtype=np.float32),
    )
    histogram = describe(wide)["ratings"]
    assert len(histogram) == 10
    assert sum(histogram.values()) == count


def test_an_empty_data_set_can_be_described() -> None:
    none = np.array([], np.int32)
    facts = describe(Dataset("empty", (), (), none, none, np.array([], np.float32)))
    assert facts["interactions"] == 0
    assert facts["sparsity"] == 1.0
