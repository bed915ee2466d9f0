"""Layouts: the quantiser, sums of codes, averages."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.secure_sum.contribution import (
    Contribution,
    ImpossibleSumError,
    Layout,
    Segment,
    UnboundedValueError,
    quantise,
)

seeds = st.integers(0, 2**32)


@st.composite
def layouts(draw):
    """A layout with segments of several shapes and widths."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    bits = draw(st.integers(2, 24))
    bound = draw(st.floats(1e-3, 1e3))
    return Layout(
        (
            Segment("rows", (rows, columns), bound, bits, over="touch"),
            Segment.whole("touch", (rows,), draw(st.integers(1, 200))),
            Segment("dense", (draw(st.integers(0, 5)),), bound, bits, over="instances"),
            Segment.whole("instances", (), draw(st.integers(1, 500))),
        )
    )


def drawn(layout, rng):
    """One user's values, by segment: whole numbers where there is no rounding."""
    values = {}
    for segment in layout.segments:
        if segment.clip:
            values[segment.name] = rng.uniform(-segment.bound, segment.bound, segment.shape)
        else:
            values[segment.name] = rng.integers(0, segment.levels, segment.shape, endpoint=True).astype(float)
    return values


def contributed(layout, values, rng):
    found = Contribution(layout)
    for one in values:
        for name, each in one.items():
            found.add(name, np.asarray(each), rng)
        found.count()
    return found


@given(layouts(), seeds, st.integers(1, 6))
@settings(deadline=None)
def test_a_sum_is_decoded_to_within_a_step_of_each_user(layout, seed, users):
    rng = np.random.default_rng(seed)
    values = [drawn(layout, rng) for _ in range(users)]
    total = np.zeros(layout.size, np.uint32)
    for one in values:
        total = total + contributed(layout, [one], rng).codes()
    sums = layout.decode(total, users)
    for segment in layout.segments:
        exact = sum(one[segment.name] for one in values)
        if segment.clip:
            # Rounded up or down by less than a step; 32-bit arithmetic for narrow codes adds a little.
            assert np.all(np.abs(sums[segment.name] - exact) <= users * segment.step * 1.01)
        else:
            assert np.array_equal(sums[segment.name], exact)
        assert sums[segment.name].shape == segment.shape


@given(layouts(), seeds, st.integers(1, 6))
@settings(deadline=None)
def test_users_of_one_host_count_as_they_would_on_their_own(layout, seed, users):
    values = [drawn(layout, np.random.default_rng(seed + n)) for n in range(users)]
    alone = np.zeros(layout.size, np.uint32)
    hosted = Contribution(layout)
    for number, one in enumerate(values):
        alone = alone + contributed(layout, [one], np.random.default_rng(number)).codes()
        rng = np.random.default_rng(number)
        for name, each in one.items():
            hosted.add(name, np.asarray(each), rng)
        hosted.count()
    assert np.array_equal(hosted.codes(), alone)


@given(st.integers(2, 31), st.floats(1e-3, 1e3), seeds)
@settings(deadline=None)
def test_rounding_stays_within_a_step_and_zero_stays_zero(bits, bound, seed):
    segment, rng = Segment("values", (50,), bound, bits), np.random.default_rng(seed)
    values = rng.uniform(-bound, bound, 50)
    values[:10] = 0.0
    steps, clipped = quantise(values, segment, rng)
    assert np.all(steps[:10] == 0)
    assert np.all(np.abs(steps) <= segment.levels)
    assert np.all(np.abs(steps * segment.step - values) <= segment.step * (1 + 1e-3) + bound * 1e-6)
    # The bound itself may be passed by the last digit of 32-bit arithmetic, nothing else.
    assert clipped <= np.count_nonzero(np.abs(values) > bound * (1 - 1e-6))


def test_rounding_is_right_in_the_mean():
    segment, rng = Segment("values", (200_000,), 1.0, 4), np.random.default_rng(0)
    values = np.full(200_000, 0.3)
    steps, _ = quantise(values, segment, rng)
    # A step is 1/7: standard deviation of the mean is below step / 2 / sqrt(n).
    assert abs(steps.mean() * segment.step - 0.3) < 6 * segment.step / 2 / math.sqrt(200_000)
    assert set(np.unique(steps)) == {2, 3}


def test_values_beyond_the_bound_are_clipped_and_counted():
    segment = Segment("values", (4,), 0.5, 10)
    steps, clipped = quantise(np.array([0.6, -9.0, 0.5, 0.0]), segment, np.random.default_rng(0))
    assert clipped == 2
    assert steps.tolist() == [511, -511, 511, 0]
    found = Contribution(Layout((segment,)))
    found.add("values", np.array([0.6, -9.0, 0.5, 0.0]), np.random.default_rng(0))
    assert found.clipped == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_stay_at_the_client(value):
    with pytest.raises(UnboundedValueError, match="values"):
        quantise(np.array([value]), Segment("values", (1,), 1.0, 8), np.random.default_rng(0))


@pytest.mark.filterwarnings("error")
def test_a_value_too_large_for_arithmetic_is_refused_without_a_warning():
    with pytest.raises(UnboundedValueError, match="not a finite number"):
        quantise(np.array([1e38], np.float32), Segment("values", (1,), 0.1, 16), np.random.default_rng(0))


def test_a_count_beyond_its_bound_is_refused_rather_than_clipped():
    segment = Segment.whole("touch", (1,), 3)
    with pytest.raises(UnboundedValueError, match="touch"):
        quantise(np.array([4.0]), segment, np.random.default_rng(0))


@given(st.integers(1, 2**20), seeds)
def test_whole_numbers_are_carried_exactly(largest, seed):
    segment, rng = Segment.whole("count", (8,), largest), np.random.default_rng(seed)
    values = rng.integers(-largest, largest, 8, endpoint=True)
    steps, clipped = quantise(values.astype(float), segment, rng)
    assert np.array_equal(steps, values)
    assert clipped == 0


@given(layouts(), st.integers(1, 5))
@settings(deadline=None)
def test_a_sum_that_the_bounds_rule_out_is_refused(layout, users):
    largest = np.concatenate(
        [np.full(segment.size, users * (2**segment.bits - 1), np.uint32) for segment in layout.segments]
    )
    layout.decode(largest, users)
    assert layout.possible(largest, users)
    largest[0] += 1
    assert not layout.possible(largest, users)
    with pytest.raises(ImpossibleSumError):
        layout.decode(largest, users)
    # Zero is no code: it would be one below the smallest.
    assert not layout.possible(np.zeros(layout.size, np.uint32), 1)


@given(layouts())
def test_as_many_users_fit_as_it_says_and_no_more(layout):
    widest = max(segment.bits for segment in layout.segments)
    assert layout.capacity * (2**widest - 1) < 2**32 <= (layout.capacity + 1) * (2**widest - 1)
    layout.require_capacity(layout.capacity)
    with pytest.raises(ValueError, match=f"room for {layout.capacity}"):
        layout.require_capacity(layout.capacity + 1)


def test_averages_divide_by_what_a_segment_names():
    layout = Layout(
        (
            Segment("rows", (2, 2), 1.0, 8, over="touch"),
            Segment.whole("touch", (2,), 9),
            Segment("dense", (2,), 1.0, 8, over="instances"),
            Segment.whole("instances", (), 9),
        )
    )
    means = layout.average(
        {
            "rows": np.array([[2.0, 4.0], [0.0, 0.0]]),
            "touch": np.array([2.0, 0.0]),
            "dense": np.array([3.0, 6.0]),
            "instances": np.array(3.0),
        }
    )
    assert means["rows"].tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert means["dense"].tolist() == [1.0, 2.0]
    assert means["touch"].tolist() == [2.0, 0.0]


def test_some_rows_can_be_added_alone():
    layout = Layout((Segment.whole("rows", (4, 2), 9),))
    found = Contribution(layout)
    found.add("rows", np.array([[1.0, 2.0], [3.0, 4.0]]), np.random.default_rng(0), np.array([3, 1]))
    found.count()
    assert layout.decode(found.codes(), 1)["rows"].tolist() == [[0, 0], [3, 4], [0, 0], [1, 2]]


def test_values_of_another_shape_are_refused():
    found = Contribution(Layout((Segment("rows", (4, 2), 1.0, 8),)))
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"expected \(4, 2\)"):
        found.add("rows", np.zeros((2, 4)), rng)
    with pytest.raises(ValueError, match=r"expected \(1, 2\)"):
        found.add("rows", np.zeros((2, 2)), rng, np.array([0]))


@pytest.mark.parametrize(
    "given",
    [
        ("a", (), 1.0, 1),
        ("a", (), 1.0, 32),
        ("a", (), 0.0, 8),
        ("a", (), math.nan, 8),
        ("a", (), math.inf, 8),
    ],
)
def test_a_segment_that_cannot_be_carried_is_refused(given):
    with pytest.raises(ValueError, match="segment a"):
        Segment(*given)


def test_segments_with_one_name_or_a_divisor_of_another_shape_are_refused():
    one = Segment("a", (3,), 1.0, 8)
    with pytest.raises(ValueError, match="same name"):
        Layout((one, one))
    with pytest.raises(ValueError, match="cannot divide"):
        Layout((Segment("b", (2, 3), 1.0, 8, over="a"), one))
    with pytest.raises(KeyError):
        Layout((Segment("b", (2,), 1.0, 8, over="nowhere"),))
