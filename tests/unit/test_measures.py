"""Metrics inside a contribution: sums over users come out as they went in, also of metrics that may be large."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.rounds.measures import LARGEST, Measure, add_measures, measure_segments, measured_in, names_of
from coterie.rounds.training import means
from coterie.wire.layout import Contribution, Layout

MEASURES = ("hit", Measure("error", LARGEST), Measure("count", 40))
VALUES = (
    st.one_of(st.just(np.nan), st.floats(0, 1)),
    st.floats(0, 3e4),
    st.one_of(st.just(np.nan), st.integers(0, 40)),
)


def summed(users: list[tuple[float, ...]]) -> dict[str, tuple[float, float]]:
    layout = Layout(measure_segments(MEASURES))
    made = Contribution(layout)
    rng = np.random.default_rng(0)
    for values in users:
        add_measures(made, np.array(values, np.float64), rng)
        made.count()
    return measured_in(layout.decode(made.codes(), len(users)), MEASURES)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*VALUES), min_size=1, max_size=20))
def test_sums_and_numbers_of_users_come_out_as_they_went_in(users):
    found = summed(users)
    assert tuple(found) == names_of(MEASURES) == ("hit", "error", "count")
    for (total, count), column in zip(found.values(), np.array(users, np.float64).T, strict=True):
        assert count == np.count_nonzero(~np.isnan(column))
        # Whatever the size of a value, it is rounded to steps of 3e-5.
        assert total == pytest.approx(np.nansum(column), abs=len(users) / LARGEST, rel=1e-12)


def test_what_is_beyond_the_largest_value_is_cut_off_at_it():
    assert summed([(1.0, 1e6, 40.0)])["error"] == (LARGEST, 1.0)


def test_metrics_up_to_one_need_no_whole_parts_and_have_room_for_as_many_users():
    narrow, wide = Layout(measure_segments(("a", "b"))), Layout(measure_segments(MEASURES))
    assert [one.name for one in narrow.segments] == ["metrics", "measured"]
    assert [one.name for one in wide.segments] == ["metrics", "measured", "wholes"]
    assert narrow.capacity == wide.capacity == 65537


def test_a_metric_that_may_be_large_stands_behind_the_others():
    with pytest.raises(ValueError, match="expected it behind"):
        measure_segments((Measure("error", 2), "hit"))


@pytest.mark.parametrize("bound", [0, LARGEST + 1])
def test_a_bound_without_a_code_is_refused(bound):
    with pytest.raises(ValueError, match="expected 1 to 32767"):
        Measure("error", bound)


def test_a_mean_is_over_the_users_that_have_the_metric():
    assert means({"a": (3.0, 4.0), "b": (0.0, 0.0)}) == {"a": (0.75, 4)}
