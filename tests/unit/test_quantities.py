import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.telemetry import quantities
from coterie.telemetry.quantities import (
    ABSENT,
    MINUS,
    count,
    duration,
    finite,
    measure,
    percent,
    signed,
    significant,
    volume,
)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "3", True, [1]], ids=repr)
@pytest.mark.parametrize(
    "write", [count, duration, measure, percent, signed, significant, volume], ids=lambda f: f.__name__
)
def test_what_is_no_finite_number_is_a_dash(write: object, value: object) -> None:
    assert callable(write)
    assert finite(value) is None
    assert write(value) == ABSENT


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_499, "999 kB"),
        (999_501, "1.00 MB"),
        (67_200_000, "67.2 MB"),
        (3e12, "3.00 TB"),
    ],
)
def test_bytes_take_the_unit_that_fits(size: float, text: str) -> None:
    assert volume(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0042, "4.20 ms"),
        (12.34, "12.3 s"),
        (59.96, "1 min 00 s"),
        (252, "4 min 12 s"),
        (3599.7, "1 h 00 min"),
        (3840, "1 h 04 min"),
        (-90, f"{MINUS}1 min 30 s"),
    ],
)
def test_times_read_as_they_are_said(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(9.999, "10.0"), (999.6, "1,000"), (0.09999, "0.100"), (1234.5, "1,234"), (0, "0")]
)
def test_rounding_up_to_the_next_power_keeps_three_digits(value: float, text: str) -> None:
    assert significant(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0%"), (0.01523, "1.52%"), (0.257, "25.7%"), (0.9999, "100%"), (1, "100%")]
)
def test_shares_read_as_percentages(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_difference_that_rounds_to_nothing_has_no_sign() -> None:
    assert [signed(value) for value in (0.1284, -0.368, -0.0001, 0.0)] == [
        "+0.128",
        f"{MINUS}0.368",
        "0.000",
        "0.000",
    ]


@given(st.floats(min_value=1e-6, max_value=1e15))
def test_three_significant_digits_are_within_half_a_percent(value: float) -> None:
    assert math.isclose(float(significant(value).replace(",", "")), value, rel_tol=0.006)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e15, max_value=1e15))
def test_no_number_is_written_with_an_exponent(value: float) -> None:
    for write in (count, duration, measure, percent, signed, significant, volume):
        assert "e" not in write(value)


def test_the_documented_examples_hold() -> None:
    import doctest

    results = doctest.testmod(quantities)
    assert results.attempted > 5
    assert results.failed == 0
