"""Filters of a data set: counted once, or until nothing more drops out, and what is kept of items and notes."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import Dataset, Filter, SyntheticSpec, generate, generate_user_attributes
from coterie.data.filters import filtered
from coterie.errors import DataError

SPEC = SyntheticSpec(users=30, items=60, interactions=300)


def of_pairs(*pairs: str) -> Dataset:
    """Build a data set of pairs such as ``"a1"``: a user's letter and an item's digit."""
    users, items = (tuple(sorted({pair[at] for pair in pairs})) for at in (0, 1))
    return Dataset(
        name="pairs",
        users=users,
        items=items,
        user=np.array([users.index(pair[0]) for pair in pairs], np.int32),
        item=np.array([items.index(pair[1]) for pair in pairs], np.int32),
        rating=np.arange(len(pairs), dtype=np.float32),
        notes=("read",),
    )


def pairs_of(data: Dataset) -> list[str]:
    return [data.users[user] + data.items[item] for user, item in zip(data.user, data.item, strict=True)]


def test_no_filter_returns_the_same_data_set() -> None:
    data = of_pairs("a1", "b2")
    assert filtered(data, Filter()) is data


def test_fewest_interactions_are_counted_once_and_in_the_data_as_read() -> None:
    data = of_pairs("a1", "a2", "b1", "c3")
    assert pairs_of(filtered(data, Filter(min_user=2))) == ["a1", "a2"]
    # Both counts are of the whole: a keeps one interaction of two, and 1 one of two.
    both = filtered(data, Filter(min_user=2, min_item=2))
    assert pairs_of(both) == ["a1"]
    assert both.notes == ("read", "min_user 2, min_item 2: 3 interactions, 2 users and 2 items left out")
    assert both.rating.tolist() == [0.0]


def test_the_core_is_counted_until_nothing_more_drops_out() -> None:
    square = ["a1", "a2", "b1", "b2"]
    chain = ["b3", "c3", "c4", "d4"]
    kept = filtered(of_pairs(*chain, *square), Filter(k_core=2))
    assert pairs_of(kept) == square
    assert kept.notes[-1] == "k_core 2: 4 interactions, 2 users and 2 items left out"


@settings(max_examples=50, deadline=None)
@given(
    st.sets(st.tuples(st.sampled_from("abcdef"), st.sampled_from("123456")), min_size=1), st.integers(1, 4)
)
def test_the_core_is_the_largest_part_in_which_all_have_enough(pairs: set[tuple[str, str]], k: int) -> None:
    # An independent way: leave out one user or item at a time.
    left = set(pairs)
    while few := [
        (at, key) for at in (0, 1) for key, count in Counter(pair[at] for pair in left).items() if count < k
    ]:
        at, key = few[0]
        left = {pair for pair in left if pair[at] != key}
    data = of_pairs(*("".join(pair) for pair in sorted(pairs)))
    if left:
        assert pairs_of(filtered(data, Filter(k_core=k))) == ["".join(pair) for pair in sorted(left)]
    else:
        with pytest.raises(DataError, match=f"k_core {k}: nothing is left of the {len(pairs)} interactions"):
            filtered(data, Filter(k_core=k))


def test_users_of_one_interaction_leave_nothing_of_a_filter_for_more() -> None:
    with pytest.raises(
        DataError, match="min_user 2: nothing is left of the 3 interactions of 3 users with 1 items"
    ) as caught:
        filtered(of_pairs("a1", "b1", "c1"), Filter(min_user=2))
    assert caught.value.hint == "lower numbers; no user has more than 1 interactions, and no item more than 3"


def test_titles_genres_and_times_of_what_is_kept_stay_with_it() -> None:
    data = generate(SPEC)
    kept = filtered(data, Filter(min_user=9, min_item=6))
    assert 0 < len(kept) < len(data)
    for one in (data, kept):
        assert one.item_titles is not None
        assert one.item_genres is not None
        assert one.time is not None
    facts = [
        {
            (one.users[user], one.items[item]): (
                float(rating),
                int(time),
                one.item_titles[item],
                {name for name, has in zip(one.genres, one.item_genres[item], strict=True) if has},
            )
            for user, item, rating, time in zip(one.user, one.item, one.rating, one.time, strict=True)
        }
        for one in (data, kept)
    ]
    assert all(facts[0][pair] == known for pair, known in facts[1].items())
    assert kept.item_genres.any(axis=0).all()
    assert set(kept.user.tolist()) == set(range(len(kept.users)))
    assert set(kept.item.tolist()) == set(range(len(kept.items)))


def test_a_genre_without_items_is_left_out() -> None:
    data = dataclasses.replace(
        of_pairs("a1", "b1", "b2"), genres=("x", "y"), item_genres=np.eye(2, dtype=np.bool_)
    )
    kept = filtered(data, Filter(min_item=2))
    assert (kept.items, kept.genres) == (("1",), ("x",))


def test_attributes_of_generated_users_are_those_of_the_users_that_are_kept() -> None:
    data = generate(SPEC)
    every = generate_user_attributes(SPEC)
    kept = filtered(data, Filter(min_user=9))
    told = generate_user_attributes(SPEC, kept.users)
    rows = [data.users.index(user) for user in kept.users]
    np.testing.assert_array_equal(told.values, every.values[rows])
    assert told.names == every.names


@pytest.mark.parametrize("name", ["min_user", "min_item", "k_core"])
def test_a_filter_below_1_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"{name} is 0; expected at least 1"):
        Filter(**{name: 0})
