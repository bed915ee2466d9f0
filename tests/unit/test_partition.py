import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import Dataset, Partition, SyntheticSpec, by_genre, generate, spread_users
from coterie.errors import DataError

DATA = generate(SyntheticSpec(users=40, items=100, interactions=1500, genres=8))
BARE = dataclasses.replace(DATA, genres=(), item_genres=None)


def with_genres(*of_item: tuple[str, ...], genres: tuple[str, ...]) -> Dataset:
    """One user who rated every item."""
    count = len(of_item)
    return Dataset(
        name="named",
        users=("u",),
        items=tuple(map(str, range(count))),
        user=np.zeros(count, np.int32),
        item=np.arange(count, dtype=np.int32),
        rating=np.ones(count, np.float32),
        genres=genres,
        item_genres=np.array([[genre in mine for genre in genres] for mine in of_item], bool),
    )


def test_an_item_belongs_to_every_owner_with_one_of_its_genres() -> None:
    partition = by_genre(with_genres(("Drama",), ("Drama", "War"), genres=("Drama", "War")))
    assert partition.names == ("drama", "war")
    assert partition.member.tolist() == [[True, False], [True, True]]


def test_names_are_dns_labels() -> None:
    genres = ("Film-Noir", "Children's", "Sci-Fi", "Comédie", "R&B / Soul", "???")
    partition = by_genre(with_genres(genres, genres=genres))
    assert partition.names == ("film-noir", "childrens", "sci-fi", "comedie", "r-b-soul", "genre")


def test_names_that_fold_to_the_same_label_are_numbered() -> None:
    genres = ("Sci-Fi", "sci fi", "SCI.FI")
    assert by_genre(with_genres(genres, genres=genres)).names == ("sci-fi", "sci-fi-2", "sci-fi-3")


def test_a_genre_without_items_is_no_owner() -> None:
    assert by_genre(with_genres(("A",), ("C",), genres=("A", "B", "C"))).names == ("a", "c")


def test_groups_are_named_after_their_genres() -> None:
    genres = ("Action", "Drama", "Comedy")
    data = with_genres(("Drama",), ("Drama",), ("Drama",), ("Action",), ("Comedy",), genres=genres)
    partition = by_genre(data, owners=2)
    assert partition.names == ("action-comedy", "drama")
    assert partition.member.sum(axis=0).tolist() == [2, 3]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=9, unique=True),
    st.integers(1, 9),
)
def test_any_genre_names_become_distinct_short_labels(genres: list[str], owners: int) -> None:
    data = with_genres(*[(genre,) for genre in genres], genres=tuple(genres))
    names = by_genre(data, min(owners, len(genres))).names
    assert len(set(names)) == len(names) == min(owners, len(genres))
    assert all(len(name) <= 40 and re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) for name in names)


@pytest.mark.parametrize("owners", range(1, 9))
def test_grouping_covers_every_item_and_keeps_owners_with_the_genres(owners: int) -> None:
    partition = by_genre(DATA, owners)
    assert partition.member.shape == (100, owners)
    assert DATA.item_genres is not None
    # Each genre lies whole in one group, so its items are a subset of some owner's.
    for genre in DATA.item_genres.T:
        assert any(owned[genre].all() for owned in partition.member.T)


def test_groups_are_balanced_by_interactions() -> None:
    load = np.bincount(DATA.item, minlength=100) @ by_genre(DATA, 3).member
    assert load.max() < 1.35 * load.min()


def test_more_owners_than_genres_are_refused() -> None:
    with pytest.raises(DataError, match="9 owners; synthetic has 8 genres with items") as raised:
        by_genre(DATA, 9)
    assert raised.value.hint == "federation.owners at most 8, or 0 for one owner of each genre"


def test_no_owner_is_refused() -> None:
    with pytest.raises(DataError, match="0 owners; expected at least 1"):
        by_genre(DATA, 0)


def test_data_without_genres_needs_a_number_of_owners() -> None:
    with pytest.raises(DataError, match=r"synthetic has no genres.*give the number of owners"):
        by_genre(BARE)


def test_data_without_genres_is_dealt_evenly_each_item_to_one_owner() -> None:
    partition = by_genre(BARE, 12, seed=1)
    assert partition.names[0] == "owner-01"
    assert (partition.member.sum(axis=1) == 1).all()
    assert set(partition.member.sum(axis=0)) == {8, 9}
    assert np.array_equal(partition.member, by_genre(BARE, 12, seed=1).member)
    assert not np.array_equal(partition.member, by_genre(BARE, 12, seed=2).member)
    with pytest.raises(DataError, match="101 owners; synthetic has 100 items") as raised:
        by_genre(BARE, 101)
    assert raised.value.hint == "federation.owners at most 100"


@pytest.mark.parametrize(
    ("names", "member", "message"),
    [
        (("A",), [[1]], "owner name 'A'"),
        (("-a",), [[1]], "owner name '-a'"),
        (("a" * 41,), [[1]], "at most 40 characters"),
        (("a", "a"), [[1, 1]], "no name twice"),
        (("a",), [[1, 1]], "member is bool of shape"),
        (("a", "b"), [[1, 1], [0, 0]], "item index 1 has no owner"),
        (("a", "b"), [[1, 0], [1, 0]], "owner 'b' holds no item"),
    ],
)
def test_a_partition_that_leaves_something_out_is_refused(
    names: tuple[str, ...], member: list[list[int]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Partition(names, np.array(member, bool))


@given(st.integers(0, 300), st.integers(1, 20), st.integers(0, 2**32))
def test_users_are_spread_evenly_over_hosts(users: int, hosts: int, seed: int) -> None:
    load = np.bincount(spread_users(users, hosts, seed), minlength=hosts)
    assert len(load) == hosts
    assert load.sum() == users
    assert load.max() - load.min() <= 1


def test_the_spread_follows_the_seed() -> None:
    assert np.array_equal(spread_users(100, 4, 1), spread_users(100, 4, 1))
    assert not np.array_equal(spread_users(100, 4, 1), spread_users(100, 4, 2))
    with pytest.raises(DataError, match="0 hosts"):
        spread_users(10, 0, 1)
