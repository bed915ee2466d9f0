"""Histories in columns of numbers: the same interactions as before, in a tenth of the memory."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.evaluation.leave_one_out import RANKED
from coterie.parties.stored_host import history_arrays
from coterie.store.client import Interaction
from coterie.store.packed_history import PackedHistory

INTERACTIONS = st.lists(
    st.builds(
        Interaction,
        st.integers(1, 9000),
        st.sampled_from(["a", "b", "c", "ä" * 40]),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(0, RANKED),
        st.none() | st.floats(-5, 5, width=32),
    ),
    max_size=40,
)
PLACES = {"a": 2, "b": 0, "c": 1}


@given(INTERACTIONS)
def test_interactions_are_those_that_were_appended(interactions):
    held = PackedHistory(interactions)
    assert held == interactions
    assert held[1:] == interactions[1:]
    for user in {one.user for one in interactions}:
        rows = [n for n, one in enumerate(interactions) if one.user == user]
        assert held.rows_of(user).tolist() == rows


@given(INTERACTIONS)
def test_rows_of_the_catalogue_come_once_with_the_last_rating_and_ranked_ones_last(interactions):
    first, ranked, last = {}, [], {}
    for one in interactions:
        if one.item not in PLACES:
            continue
        if one.rating is not None:
            last[one.user, one.item, one.part] = one.rating
        if one.part == RANKED:
            ranked.append(one)
        else:
            first.setdefault((one.user, one.item), one)
    expected = [
        (one.user - 1, PLACES[one.item], one.part, last.get((one.user, one.item, one.part), math.nan))
        for one in [*first.values(), *ranked]
    ]
    found = history_arrays(PackedHistory(interactions).columns(lambda key: PLACES.get(key, -1)))
    np.testing.assert_array_equal(
        np.column_stack([each.astype(float) for each in found]), np.array(expected, float).reshape(-1, 4)
    )


@pytest.mark.parametrize(
    "wrong", [{"user": 1 << 32}, {"user": -1}, {"time": 1 << 63}, {"part": 128}], ids=str
)
def test_a_number_that_does_not_fit_is_refused_and_leaves_nothing(wrong):
    one = Interaction(1, "a", positive=True, time=7, part=0)
    held = PackedHistory([one])
    with pytest.raises(OverflowError):
        held.append(one._replace(**wrong))
    held.append(one)
    assert held == [one, one]


def test_an_interaction_takes_few_bytes():
    count = 50_000
    tracemalloc.start()
    try:
        held = PackedHistory(Interaction(n // 10, str(n % 200), True, n, 0) for n in range(count))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(held) == count
    assert taken / count < 25
