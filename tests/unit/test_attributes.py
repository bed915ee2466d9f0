"""Attributes of users and features of items: matrices, MovieLens' files, the tag genome, missing values."""

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.data import Dataset, SyntheticSpec, generate, generate_user_attributes, read
from coterie.data.attributes import (
    AttributeTable,
    beside,
    in_order,
    item_attributes,
    one_of,
    read_attributes,
    write_attributes,
)
from coterie.data.demographics import AGES, REGIONS, read_user_attributes, us_region
from coterie.data.genome import has_genome, read_genome
from coterie.errors import DataError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files by their names and return the folder."""

    def write_files(**files: str) -> Path:
        for name, content in files.items():
            (tmp_path / name.replace("__", ".")).write_text(content, encoding="utf-8")
        return tmp_path

    return write_files


def columns(table: AttributeTable, row: int) -> set[str]:
    """Return the names of the columns that hold 1."""
    return {name for name, value in zip(table.names, table.values[row], strict=True) if value == 1}


def unknown(table: AttributeTable, row: int) -> set[str]:
    """Return the kinds of the columns that are missing."""
    missing = np.isnan(table.values[row])
    return {name.split(":")[0] for name, gone in zip(table.names, missing, strict=True) if gone}


RATINGS_100K = "7\t1\t4\t100\n8\t1\t2\t50\n9\t2\t5\t60\n"
USERS_100K = "7|17|F|writer|02139\n8|49|M|none|V3N4P\n9|56|M|writer|96101\n10|30|F|none|10001\n"


def test_users_of_100k_have_age_gender_occupation_and_region(write: Write) -> None:
    folder = write(u__data=RATINGS_100K, u__user=USERS_100K)
    table = read_user_attributes(folder, read(folder))
    assert len(table) == 3  # the fourth has no ratings
    assert columns(table, 0) == {"age: under 18", "gender: F", "occupation: writer", "region: northeast"}
    assert columns(table, 1) == {"age: 45-49", "gender: M", "occupation: none", "region: elsewhere"}
    assert columns(table, 2) == {"age: 56 and over", "gender: M", "occupation: writer", "region: west"}
    assert table.missing == 0
    assert table.values.dtype == np.float32


def test_occupations_that_100k_lists_are_columns_even_if_nobody_has_them(write: Write) -> None:
    folder = write(u__data=RATINGS_100K, u__user=USERS_100K, u__occupation="artist\nnone\nwriter\n")
    table = read_user_attributes(folder / "u.data", read(folder))
    named = [name for name in table.names if name.startswith("occupation")]
    assert named == ["occupation: artist", "occupation: none", "occupation: writer"]


def test_users_of_1m_are_read_by_the_publishers_codes(write: Write) -> None:
    folder = write(
        ratings_no_timestamp__dat="1::5::3\n2::6::4\n",
        users__dat="1::F::1::10::48067\n2::M::50::0::55117-1234\n",
    )
    table = read_user_attributes(folder, read(folder))
    assert columns(table, 0) == {"age: under 18", "gender: F", "occupation: K-12 student", "region: midwest"}
    assert columns(table, 1) == {"age: 50-55", "gender: M", "occupation: other", "region: midwest"}
    assert len(table.names) == 7 + 2 + 21 + 5


def test_what_a_file_leaves_empty_is_missing_and_not_zero(write: Write) -> None:
    folder = write(u__data=RATINGS_100K, u__user="7||F|writer|\n8|30||  |10001\n")
    table = read_user_attributes(folder, read(folder))
    assert unknown(table, 0) == {"age", "region"}
    assert unknown(table, 1) == {"gender", "occupation"}
    assert columns(table, 0) == {"gender: F", "occupation: writer"}
    assert columns(table, 1) == {"age: 25-34", "region: northeast"}


def test_a_user_that_the_file_does_not_name_has_nothing(write: Write) -> None:
    folder = write(u__data=RATINGS_100K, u__user="7|20|F|writer|02139\n9|20|F|writer|02139\n")
    table = read_user_attributes(folder, read(folder))
    assert np.isnan(table.values[1]).all()
    assert table.missing == pytest.approx(1 / 3)


def test_a_folder_without_users_has_no_columns(write: Write) -> None:
    folder = write(ratings__csv="userId,movieId,rating\n1,3,4.5\n2,1,0.5\n")
    table = read_user_attributes(folder, read(folder))
    assert (table.names, table.values.shape, table.missing) == ((), (2, 0), 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("8|x|F|writer|02139", r"line 2, column 'age': 'x'; expected a finite number"),
        ("8|121|F|writer|02139", r"line 2, column 'age': '121'; expected a number from 0 to 120"),
        ("8|20|Q|writer|02139", r"line 2, column 'gender': 'Q'; expected one of F, M"),
        ("7|20|F|writer|02139", r"names 1 users twice"),
        ("8|20|F|writer|02139|x", r"line 2: 6 fields; expected 5"),
    ],
)
def test_a_malformed_user_is_refused_with_its_line(write: Write, line: str, message: str) -> None:
    folder = write(u__data=RATINGS_100K, u__user=f"7|20|F|writer|02139\n{line}\n")
    with pytest.raises(DataError, match=message):
        read_user_attributes(folder, read(folder))


def test_an_occupation_beyond_the_codes_of_1m_is_refused(write: Write) -> None:
    folder = write(ratings_no_timestamp__dat="1::5::3\n", users__dat="1::F::1::21::48067\n")
    with pytest.raises(DataError, match=r"line 1, column 'Occupation': '21'; expected one of 0, 1"):
        read_user_attributes(folder, read(folder))


@pytest.mark.parametrize(
    ("code", "region"),
    [
        ("00501", "northeast"),  # Holtsville, New York
        ("00601", "elsewhere"),  # Puerto Rico
        ("02139", "northeast"),
        ("09012", "elsewhere"),  # army, Europe
        ("19104", "northeast"),
        ("19711", "south"),  # Delaware
        ("20500", "south"),
        ("32801", "south"),
        ("34001", "elsewhere"),  # army, Americas
        ("40202", "south"),
        ("43004", "midwest"),
        ("58103", "midwest"),
        ("59801", "west"),  # Montana
        ("60601", "midwest"),
        ("69361", "midwest"),
        ("73301", "south"),
        ("80202", "west"),
        ("88510", "south"),  # El Paso
        ("89101", "west"),
        ("96101", "west"),
        ("96205", "elsewhere"),  # army, Pacific
        ("96813", "west"),  # Hawaii
        ("96910", "elsewhere"),  # Guam
        ("99501", "west"),
        ("98101-2047", "west"),
        ("981012047", "west"),
        ("1234", "elsewhere"),
        ("T8H1N", "elsewhere"),
        ("", None),
    ],
)
def test_zip_codes_belong_to_regions(code: str, region: str | None) -> None:
    assert us_region(code) == region


# --- Items --------------------------------------------------------------------------------------------------------


def catalogue(titles: tuple[str, ...] | None, genres: tuple[str, ...], member: list[list[int]]) -> Dataset:
    return Dataset(
        name="films",
        users=("u",),
        items=tuple(f"i{index}" for index in range(len(member))),
        user=np.zeros(0, np.int32),
        item=np.zeros(0, np.int32),
        rating=np.zeros(0, np.float32),
        genres=genres,
        item_genres=np.array(member, np.bool_) if genres else None,
        item_titles=titles,
    )


def test_items_have_their_genres_and_the_year_of_their_title() -> None:
    titles = ("Metropolis (1927)", "Heat (1995)", "Alphaville", "2001: A Space Odyssey (1968)")
    data = catalogue(titles, ("Drama", "unknown", "War"), [[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1]])
    table = item_attributes(data)
    assert table.names == ("genre: Drama", "genre: War", "year")
    np.testing.assert_array_equal(table.values[[0, 2, 3], :2], [[1, 1], [1, 0], [0, 1]])
    assert unknown(table, 1) == {"genre"}
    assert unknown(table, 2) == {"year"}
    years = np.array([1927, 1995, 1968])
    np.testing.assert_allclose(
        table.values[[0, 1, 3], 2], (years - years.mean()) / years.std(), rtol=1e-5, atol=1e-6
    )


def test_items_of_one_year_do_not_differ_by_it() -> None:
    assert not item_attributes(catalogue(("A (1990)", "B (1990)"), (), [[], []])).values.any()


def test_items_of_which_nothing_is_known_have_no_columns() -> None:
    assert item_attributes(catalogue(None, (), [[], []])).values.shape == (2, 0)
    assert item_attributes(catalogue(("A", "B"), ("unknown",), [[1], [1]])).values.shape == (2, 0)


GENOME = [
    (movie, tag, relevance)
    for movie, row in ((4, (0.1, 0.9, 0.5)), (2, (0.2, 0.7, 0.1)), (7, (0.9, 0.1, 0.4)), (9, (0.5, 0.5, 0.3)))
    for tag, relevance in enumerate(row, 1)
]


def genome(folder: Path, rows: list[tuple[int, int, float]]) -> Path:
    lines = ["movieId,tagId,relevance", *(",".join(map(str, row)) for row in rows)]
    (folder / "genome-scores.csv").write_text("\n".join(lines) + "\n")
    return folder


def films(*keys: str) -> Dataset:
    return replace(catalogue(None, (), [[] for _ in keys]), items=keys)


def test_the_genome_is_brought_to_principal_components_of_the_own_items(tmp_path: Path) -> None:
    data = films("2", "5", "7", "4")  # 5 has no genome, and 9 is not in the data
    assert not has_genome(tmp_path)
    table = read_genome(genome(tmp_path, GENOME), data, components=2)
    assert has_genome(tmp_path)
    assert table.names == ("genome 1", "genome 2")
    assert np.isnan(table.values[1]).all()
    own = np.array([[0.2, 0.7, 0.1], [0.9, 0.1, 0.4], [0.1, 0.9, 0.5]])
    centred = own - own.mean(axis=0)
    _, size, vectors = np.linalg.svd(centred)
    found = table.values[[0, 2, 3]].astype(np.float64)
    np.testing.assert_allclose(np.abs(found), np.abs(centred @ vectors[:2].T), rtol=1e-5)
    np.testing.assert_allclose((found**2).sum(axis=0), size[:2] ** 2, rtol=1e-5)
    for column in range(2):
        loading = centred.T @ found[:, column]
        assert loading[np.abs(loading).argmax()] > 0


def test_the_genome_does_not_depend_on_the_order_of_its_rows(tmp_path: Path) -> None:
    data = films("2", "7", "4")
    first = read_genome(genome(tmp_path, GENOME), data, components=2)
    second = read_genome(genome(tmp_path, GENOME[::-1]), data, components=2)
    np.testing.assert_array_equal(first.values, second.values)


@pytest.mark.parametrize(
    ("rows", "components", "message"),
    [
        (GENOME[:-1], 2, "movie 9 lacks one of the 3 tags, or has one twice"),
        ([*GENOME, GENOME[0]], 2, "movie 4 lacks one of the 3 tags, or has one twice"),
        ([*GENOME[:-1], (9, 3, 1.5)], 2, "expected a number from 0 to 1"),
        (GENOME, 4, "4 components of 3 items with 3 tags"),
        (GENOME, 0, "0 components"),
    ],
)
def test_a_genome_that_cannot_be_used_is_refused(
    tmp_path: Path, rows: list[tuple[int, int, float]], components: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_genome(genome(tmp_path, rows), films("2", "7", "4"), components)


def test_a_folder_without_a_genome_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"genome-scores\.csv"):
        read_genome(tmp_path, films("2"))


# --- Tables -------------------------------------------------------------------------------------------------------


def test_tables_are_put_side_by_side() -> None:
    left, right = one_of("a", ("x", "y"), np.array([0, -1])), one_of("b", ("x",), np.array([0, 0]))
    both = beside(left, right)
    assert both.names == ("a: x", "a: y", "b: x")
    np.testing.assert_array_equal(both.values, np.array([[1, 0, 1], [np.nan, np.nan, 1]], np.float32))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: beside(one_of("a", ("x",), np.zeros(2, int)), one_of("b", ("x",), np.zeros(3, int))),
            "2, 3 rows",
        ),
        (
            lambda: beside(one_of("a", ("x",), np.zeros(2, int)), one_of("a", ("x",), np.zeros(2, int))),
            "same name",
        ),
        (lambda: AttributeTable(("a",), np.ones((2, 1))), "float64"),
        (lambda: AttributeTable(("a",), np.ones((2, 2), np.float32)), r"shape \(2, 2\)"),
        (lambda: AttributeTable(("a",), np.full((2, 1), np.inf, np.float32)), "infinite"),
    ],
)
def test_tables_that_are_none_are_refused(build: Callable[[], AttributeTable], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build()


def test_the_synthetic_set_has_users_whose_crowd_tells_of_their_taste() -> None:
    spec = SyntheticSpec(users=400, items=200, interactions=12_000)
    data, table = generate(spec), generate_user_attributes(spec)
    assert len(table) == 400
    np.testing.assert_array_equal(table.values, generate_user_attributes(spec).values)
    crowd = table.values[:, : spec.genres]
    untold = np.isnan(crowd).all(axis=1)
    assert 5 < untold.sum() < 40
    assert np.isnan(table.values).sum() == untold.sum() * spec.genres
    # What a crowd consumes has its genre more often than what others do.
    assert data.item_genres is not None
    for genre in range(spec.genres):
        own = (crowd[data.user, genre] == 1) & ~untold[data.user]
        other = (crowd[data.user, genre] == 0) & ~untold[data.user]
        has = data.item_genres[data.item, genre]
        assert has[own].mean() > 1.2 * has[other].mean()


# --- Real data ----------------------------------------------------------------------------------------------------


def real_set(name: str) -> Path:
    root = os.environ.get("COTERIE_DATA")
    if not root:
        pytest.skip("COTERIE_DATA is not set: it names a folder with real data sets")
    if not (path := Path(root) / name).exists():
        pytest.skip(f"COTERIE_DATA has no {name}")
    return path


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "under_18", "women", "genres"), [("ml-100k", 36, 273, 18), ("ml-1m", 222, 1_709, 18)]
)
def test_published_sets_have_their_published_users(name: str, under_18: int, women: int, genres: int) -> None:
    folder = real_set(name)
    data = read(folder)
    table = read_user_attributes(folder, data)
    assert table.missing == 0
    assert len(table.names) == len(AGES) + 2 + 21 + len(REGIONS)
    count = dict(zip(table.names, table.values.sum(axis=0).astype(int).tolist(), strict=True))
    assert (count["age: under 18"], count["gender: F"]) == (under_18, women)
    for kind, each in (("age", 1), ("gender", 1), ("occupation", 1), ("region", 1)):
        own = [column for column, named in enumerate(table.names) if named.startswith(kind)]
        assert (table.values[:, own].sum(axis=1) == each).all()
    assert min(count[f"region: {region}"] for region in REGIONS[:-1]) > len(data.users) / 8
    features = item_attributes(data)
    assert sum(name.startswith("genre") for name in features.names) == genres
    assert features.missing < 0.002


VALUES = st.one_of(st.just(math.nan), st.floats(width=32, allow_nan=False, allow_infinity=False))
KEYS = st.lists(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=5), unique=True, max_size=6
)


@given(KEYS, st.data())
def test_a_written_table_comes_back_to_the_bit(keys, data):
    rows = [data.draw(st.tuples(VALUES, VALUES)) for _ in keys]
    table = AttributeTable(("a", "b, c"), np.array(rows, np.float32).reshape(len(keys), 2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "known.csv"
        write_attributes(path, "user", keys, table)
        found, read = read_attributes(path, "user")
    assert list(found) == keys
    assert read.names == table.names
    np.testing.assert_array_equal(read.values, table.values)


def test_rows_are_put_into_an_order_and_who_has_none_has_nothing_known(tmp_path):
    (tmp_path / "known.csv").write_text("user,age\nann,1\nben,\n")
    found = in_order(["zoe", "ben", "ann"], *read_attributes(tmp_path / "known.csv", "user"))
    np.testing.assert_array_equal(found.values, [[np.nan], [np.nan], [1]])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("item,age\nann,1\n", "the first column is 'item'; expected 'user'"),
        ("", "the first column is None"),
        ("user,age\nann,1,2\n", "line 2: 3 fields; expected 2"),
        ("user,age\nann,1\nann,2\n", "line 3: the user is empty or named twice"),
        ("user,age\n,1\n", "line 2: the user is empty"),
        ("user,age,sex\nann,1,inf\n", "line 2, column 'sex': expected a finite number"),
        ("user,age\nann,nan\n", "line 2, column 'age': expected a finite number, or nothing"),
        ("user,age\nann,old\n", "line 2, column 'age'"),
        ("user,age,age\nann,1,2\n", "two attributes have the same name"),
    ],
)
def test_a_malformed_table_is_refused_with_its_place_and_no_value(text, words, tmp_path):
    path = tmp_path / "known.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words) as caught:
        read_attributes(path, "user")
    assert "old" not in caught.value.message


def test_a_table_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        read_attributes(tmp_path / "none.csv", "user")
