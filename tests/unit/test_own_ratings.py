"""A person's own file of ratings: what it may say, what does not count, and what is refused with its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.data.own_ratings import OwnRatings, read_own_ratings
from coterie.errors import DataError

ITEMS = ("alien", "brazil", "casablanca", "dune")
STARS = (0.5, 5.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own.csv"


def read(path: Path, text: str | bytes, rating_range: tuple[float, float] | None = STARS) -> OwnRatings:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_own_ratings(path, ITEMS, rating_range=rating_range)


def refused(path: Path, text: str | bytes, rating_range: tuple[float, float] | None = STARS) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path, text, rating_range)
    assert str(path) in caught.value.message
    return caught.value


def test_items_are_in_the_order_of_the_catalogue_with_their_ratings(path: Path) -> None:
    found = read(path, "item,rating\ndune,4\nalien,2.5\n")
    assert found.item.tolist() == [0, 3]
    assert found.rating.tolist() == [2.5, 4.0]
    assert (found.unknown, found.repeated) == ((), 0)


def test_a_byte_order_mark_usual_names_and_other_columns_change_nothing(path: Path) -> None:
    plain = read(path, "item,rating\nbrazil,3\n")
    for text in (
        "\ufeffitem,rating\nbrazil,3\n",
        "userId,movieId,rating,comment\nme,brazil,3,good\n",
        "item , rating\r\n brazil , 3 \r\n\r\n",
    ):
        found = read(path, text)
        assert (found.item.tolist(), found.rating.tolist()) == (plain.item.tolist(), plain.rating.tolist())


def test_a_tsv_file_is_read_by_its_suffix(tmp_path: Path) -> None:
    assert read(tmp_path / "own.tsv", "item\trating\ndune\t1\n").rating.tolist() == [1.0]


def test_the_last_row_of_an_item_counts_and_the_others_are_counted(path: Path) -> None:
    found = read(path, "item,rating\ndune,1\nalien,3\ndune,2\ndune,5\n")
    assert found.item.tolist() == [0, 3]
    assert found.rating.tolist() == [3.0, 5.0]
    assert found.repeated == 2


def test_unknown_items_are_told_and_do_not_count(path: Path) -> None:
    found = read(path, "item,rating\nzardoz,1\nalien,3\nyojimbo,2\nzardoz,4\n")
    assert found.item.tolist() == [0]
    assert found.unknown == ("yojimbo", "zardoz")
    # Rows of an item that does not count take nobody's place.
    assert found.repeated == 0


def test_without_a_column_of_ratings_items_count_as_they_are(path: Path) -> None:
    found = read(path, "item\nalien\ndune\n", None)
    assert found.item.tolist() == [0, 3]
    assert np.isnan(found.rating).all()


def test_a_blank_rating_is_none(path: Path) -> None:
    np.testing.assert_array_equal(read(path, "item,rating\nalien,\ndune,2\n").rating, [np.nan, 2.0])


def test_where_all_items_are_unknown_five_are_named_and_a_name_is_suggested(path: Path) -> None:
    error = refused(path, "item,rating\n" + "".join(f"dune {n},3\n" for n in range(7)))
    assert "no item of" in error.message
    assert error.message.endswith("'dune 0', 'dune 1', 'dune 2', 'dune 3', 'dune 4' and 2 more")
    assert "did you mean 'dune' for 'dune 0'?" in (error.hint or "")


def test_where_no_name_is_near_the_hint_has_some_items_of_the_run(path: Path) -> None:
    assert "such as 'alien', 'brazil', 'casablanca'" in (refused(path, "item,rating\n1234,3\n").hint or "")


def test_escapes_in_unknown_items_are_written_out(path: Path) -> None:
    message = refused(path, "item,rating\n\x1b[31mred\x1b[0m,3\n").message
    assert "\x1b" not in message
    assert r"'\x1b[31mred\x1b[0m'" in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("\ufeff", "is empty"),
        ("item,rating\n", "no rows"),
        ("title,rating\ndune,3\n", "no column 'item'; it has 'title', 'rating'"),
        ("item;rating\ndune;3\n", "no column 'item'; it has 'item;rating'"),
        ("item,rating\ndune,3,1\n", "line 2: 3 fields; expected 2"),
        ("item,rating\ndune,three\n", "line 2, column 'rating': 'three'; expected a finite number"),
        ("item,rating\ndune,nan\n", "line 2, column 'rating': 'nan'; expected a finite number"),
        ("item,rating\ndune,1e999\n", "line 2, column 'rating': '1e999'; expected a finite number"),
        ("item,rating\nalien,3\ndune,6\n", "line 3, column 'rating': '6'; expected a number from 0.5 to 5"),
        ("item,rating\ndune,-1\n", "expected a number from 0.5 to 5"),
        ("item,rating\n,3\n", "line 2, column 'item': nothing; expected a key"),
        ("item\ndune\n", "no rating of an item that is known"),
        ("item,rating\nzardoz,3\ndune,\n", "no rating of an item that is known"),
        ("user,item,rating\nme,dune,3\nyou,alien,3\n", "column 'user': 2 users; expected the items of one"),
        (b"item,rating\ndune\xff,3\n", "line 2: byte 0xff; expected UTF-8"),
        ("item,rating\ndune,3\n".encode("utf-16"), "expected UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_place(
    text: str | bytes, told: str, path: Path
) -> None:
    assert told in refused(path, text).message


def test_a_rating_that_is_no_number_is_refused_even_where_ratings_do_not_count(path: Path) -> None:
    assert "expected a finite number" in refused(path, "item,rating\ndune,good\n", None).message


def test_a_file_that_is_none_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "none.csv", "does not exist"), (tmp_path, "is no file")):
        with pytest.raises(DataError, match=told) as caught:
            read_own_ratings(path, ITEMS)
        assert "item,rating" in (caught.value.hint or "")
