"""Pauses after rounds that were abandoned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.rounds.pace import pause_s


def test_there_is_no_pause_after_a_round_that_was_applied():
    assert pause_s(0, 60.0) == 0.0


def test_a_pause_doubles_with_each_round_abandoned_in_a_row_up_to_half_a_minute():
    assert [pause_s(row, 3600.0) for row in range(1, 8)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize("row", [1, 3, 10**9])
def test_a_pause_is_never_longer_than_a_step_may_take(row):
    assert pause_s(row, 0.5) == 0.5


@given(st.integers(0, 10_000), st.floats(0.001, 1e6))
def test_pauses_never_shrink(row, step_s):
    assert pause_s(row, step_s) <= pause_s(row + 1, step_s)
