import builtins
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.io
import scipy.sparse

from coterie.data import Dataset, Filter, describe, read
from coterie.data.matlab import published_parts
from coterie.data.readers import detect
from coterie.errors import DataError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files by their names and return the folder."""

    def write_files(**files: str | bytes) -> Path:
        for name, content in files.items():
            path = tmp_path / name.replace("__", ".")
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path

    return write_files


def rows(dataset: Dataset) -> list[tuple[str, str, float]]:
    return [
        (dataset.users[u], dataset.items[i], float(r))
        for u, i, r in zip(dataset.user, dataset.item, dataset.rating, strict=True)
    ]


def genres_of(dataset: Dataset, item: str) -> set[str]:
    assert dataset.item_genres is not None
    row = dataset.item_genres[dataset.items.index(item)]
    return {genre for genre, has in zip(dataset.genres, row, strict=True) if has}


ML_100K = {
    "u__data": "7\t10\t4\t100\n8\t9\t2\t50\n",
    "u__genre": "unknown|0\nAction|1\nFilm-Noir|2\n\n",
    "u__item": "9|Nine|||url|0|1|1\n10|Caf\xe9|||url|0|0|0\n11|Not rated|||url|1|0|0\n".encode("latin-1"),
}


def test_the_100k_layout_is_read_with_times_titles_and_genres(write: Write) -> None:
    data = read(write(**ML_100K))
    assert rows(data) == [("7", "10", 4.0), ("8", "9", 2.0)]
    assert data.time is not None
    assert data.time.tolist() == [100, 50]
    assert data.items == ("9", "10")  # numbers in numeric order, and rated items only
    assert data.item_titles == ("Nine", "Café")
    assert genres_of(data, "9") == {"Action", "Film-Noir"}


def test_an_item_without_a_genre_is_kept_as_unknown(write: Write) -> None:
    assert genres_of(read(write(**ML_100K)), "10") == {"unknown"}


def test_a_file_of_a_known_folder_stands_for_the_folder(write: Write) -> None:
    assert rows(read(write(**ML_100K) / "u.data")) == [("7", "10", 4.0), ("8", "9", 2.0)]


def test_the_1m_layout_is_read_with_and_without_times(write: Write) -> None:
    movies = "5::Am\xe9lie (2001)::Comedy|Romance\n6::Heat (1995)::Action\n".encode("latin-1")
    folder = write(ratings_no_timestamp__dat="1::5::3\n2::6::4\n", movies__dat=movies)
    untimed = read(folder)
    assert untimed.time is None
    assert untimed.item_titles == ("Amélie (2001)", "Heat (1995)")
    assert genres_of(untimed, "5") == {"Comedy", "Romance"}
    timed = read(write(ratings__dat="1::5::3::978300760\n2::6::4::978302109\n"))
    assert timed.time is not None
    assert timed.time.tolist() == [978300760, 978302109]


def test_the_csv_releases_are_read_with_quoted_titles(write: Write) -> None:
    data = read(
        write(
            ratings__csv="userId,movieId,rating,timestamp\n1,3,4.5,7\n2,1,0.5,8\n",
            movies__csv='movieId,title,genres\n1,"Hours, The",Drama|War\n3,X,(no genres listed)\n',
        )
    )
    assert rows(data) == [("1", "3", 4.5), ("2", "1", 0.5)]
    assert data.item_titles == ("Hours, The", "X")
    assert genres_of(data, "3") == {"unknown"}


def test_atomic_files_are_read_from_their_typed_headers(write: Write) -> None:
    data = read(
        write(
            toy__inter="user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
            "u\tb\t4\t9.0\nu\ta\t2\t8.5\n",
            toy__item="item_id:token\tmovie_title:token_seq\tclass:token_seq\n"
            "a\tAlpha\tWar Drama\nb\tBeta\t\n",
        )
    )
    assert data.name == "toy"
    assert rows(data) == [("u", "b", 4.0), ("u", "a", 2.0)]
    assert data.time is not None
    assert data.time.tolist() == [9, 8]
    assert genres_of(data, "a") == {"War", "Drama"}
    assert genres_of(data, "b") == {"unknown"}


def test_two_interaction_files_in_a_folder_are_ambiguous(write: Write) -> None:
    one = "user_id:token\titem_id:token\na\tb\n"
    with pytest.raises(DataError, match=r"2 files \*\.inter"):
        read(write(a__inter=one, b__inter=one))


def test_named_columns_are_read_from_csv(write: Write) -> None:
    path = write(
        log__csv="who,what,how,when\r\nann,007,5,2020-01-01T00:00:00\r\nbob,7,1,2020-01-02T00:00:00\r\n"
    )
    data = read(path / "log.csv", columns={"user": "who", "item": "what", "rating": "how", "time": "when"})
    assert rows(data) == [("ann", "007", 5.0), ("bob", "7", 1.0)]
    assert data.time is not None
    assert data.time.tolist() == [1577836800, 1577923200]


def test_usual_column_names_need_not_be_named(write: Write) -> None:
    path = write(c__tsv="user_id\tvenue_id\ttype\tutc\n1\tv\tGym\tTue Apr 03 18:07:30 +0000 2012\n")
    data = read(path / "c.tsv")
    assert data.time is not None
    assert data.time.tolist() == [1333476450]


def test_data_without_ratings_counts_every_interaction_as_one(write: Write) -> None:
    data = read(write(a__csv="user,item\n1,2\n") / "a.csv")
    assert data.rating.tolist() == [1.0]
    assert "no ratings" in data.notes[0]


def test_parquet_is_read_with_its_own_types(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    path = tmp_path / "log.parquet"
    polars.DataFrame(
        {
            "user": [3, 1],
            "item": [1.0, 2.0],
            "rating": [4, 5],
            "time": np.array([5000, 6000], "datetime64[ms]"),
        }
    ).write_parquet(path)
    data = read(path)
    assert rows(data) == [("3", "1", 4.0), ("1", "2", 5.0)]
    assert data.time is not None
    assert data.time.tolist() == [5, 6]


def test_a_gap_in_parquet_is_named_by_its_row(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    path = tmp_path / "log.parquet"
    polars.DataFrame({"user": [3, 1], "item": [1, 2], "rating": [4, None]}).write_parquet(path)
    with pytest.raises(DataError, match=r"row 2, column 'rating': nothing; expected a finite number"):
        read(path)


def test_of_repeated_pairs_the_last_by_time_is_kept_and_the_rest_counted(write: Write) -> None:
    path = write(a__csv="user,item,rating,time\n1,1,5,30\n1,2,4,5\n1,1,2,10\n1,1,3,30\n")
    data = read(path / "a.csv")
    assert rows(data) == [("1", "2", 4.0), ("1", "1", 3.0)]  # at equal times the later row wins
    assert describe(data)["notes"] == ["2 rows repeated a user and item: the last of each was kept"]


def test_of_repeated_pairs_without_times_the_last_in_the_file_is_kept(write: Write) -> None:
    path = write(a__csv="user,item,rating\n1,1,5\n1,1,2\n")
    assert rows(read(path / "a.csv")) == [("1", "1", 2.0)]


def test_a_missing_column_names_the_nearest_one(write: Write) -> None:
    path = write(a__csv="user,item,ratting\n1,1,5\n")
    with pytest.raises(DataError, match=r"no column 'rating'.*did you mean 'ratting'"):
        read(path / "a.csv", columns={"rating": "rating"})
    path = write(b__csv="usr,item\n1,1\n")
    with pytest.raises(DataError, match=r"no column 'user'.*did you mean 'usr'"):
        read(path / "b.csv")


def test_a_role_that_does_not_exist_is_refused(write: Write) -> None:
    path = write(a__csv="user,item\n1,1\n")
    with pytest.raises(DataError, match=r"names a 'ratings'.*did you mean 'rating'"):
        read(path / "a.csv", columns={"ratings": "item"})


def test_columns_cannot_be_named_for_a_fixed_layout(write: Write) -> None:
    with pytest.raises(DataError, match="ml-100k has fixed ones"):
        read(write(**ML_100K), columns={"user": "x"})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "1\t1\t4\t9\n\n1\tx\t4\n",
            r"u\.data, line 3, column 'timestamp': nothing; expected a finite number",
        ),
        (
            "1\t1\t4\t9\n2\t1\tgood\t9\n",
            r"u\.data, line 2, column 'rating': 'good'; expected a finite number",
        ),
        ("1\t1\t4\t9\n2\t1\tnan\t9\n", r"line 2, column 'rating': 'nan'"),
        ("1\t1\t4\t9\n2\t1\t6\t9\n", r"line 2, column 'rating': '6'; expected a number from 0\.5 to 5"),
        ("1\t1\t4\t9\n2\t1\t4\t9\t9\n", r"line 2: 5 fields; expected 4"),
        ("1\t1\t4\n", r"line 1: 3 fields; expected 4"),
        ("1\t1\t4\t9\n\t1\t4\t9\n", r"line 2, column 'user id': nothing; expected a key"),
        ("1\t1\t4\t881250949000\n", r"line 1, column 'timestamp': .* expected seconds since 1970"),
        ("", r"u\.data is empty"),
        ("\n\n", r"u\.data is empty"),
    ],
)
def test_a_malformed_line_is_named_with_what_was_expected(write: Write, lines: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write(u__data=lines))


def test_a_table_with_a_header_only_is_refused(write: Write) -> None:
    with pytest.raises(DataError, match="a header but no rows"):
        read(write(a__csv="user,item\n") / "a.csv")


def test_line_numbers_count_lines_inside_quotes(write: Write) -> None:
    path = write(a__csv='user,item,rating\n1,"two\nlines",3\n1,b,bad\n')
    with pytest.raises(DataError, match="line 4, column 'rating': 'bad'"):
        read(path / "a.csv")


def test_a_csv_that_is_not_utf_8_names_the_line(write: Write) -> None:
    with pytest.raises(DataError, match="line 2: byte 0xe9; expected UTF-8"):
        read(write(a__csv=b"user,item\n1,\xe9\n") / "a.csv")


def test_a_byte_order_mark_is_not_part_of_the_first_column(write: Write) -> None:
    assert rows(read(write(a__csv=b"\xef\xbb\xbfuser,item\n1,2\n") / "a.csv")) == [("1", "2", 1.0)]


def test_a_time_that_is_none_is_refused(write: Write) -> None:
    path = write(a__csv="user,item,time\n1,1,2020-01-01T00:00:00\n1,2,yesterday\n")
    with pytest.raises(DataError, match="line 3, column 'time': 'yesterday'; expected a time"):
        read(path / "a.csv")


def test_a_rating_range_can_be_given(write: Write) -> None:
    path = write(a__csv="user,item,rating\n1,1,11\n")
    assert rows(read(path / "a.csv")) == [("1", "1", 11.0)]
    with pytest.raises(DataError, match="expected a number from 0 to 10"):
        read(path / "a.csv", rating_range=(0, 10))
    with pytest.raises(DataError, match="expected the lowest rating, then the highest"):
        read(path / "a.csv", rating_range=(10, 0))


def test_what_is_not_there_or_not_known_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "none")
    with pytest.raises(DataError, match=r"holds no data set that is known; expected u\.data"):
        read(tmp_path)
    (tmp_path / "a.xlsx").touch()
    with pytest.raises(DataError, match="no known layout"):
        detect(tmp_path / "a.xlsx")
    with pytest.raises(DataError, match=r"layout 'ml100k'.*did you mean 'ml-100k'"):
        read(tmp_path, "ml100k")


def test_without_polars_the_error_says_what_to_install(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_polars(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "polars":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    folder = write(**ML_100K)
    monkeypatch.setattr(builtins, "__import__", without_polars)
    with pytest.raises(DataError, match=r"needs polars.*pip install 'coterie\[data\]'"):
        read(folder)


RATED = np.array([[5.0, 0.0, 3.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
OF_RATED = [("1", "1", 5.0), ("1", "3", 3.0), ("3", "2", 1.0)]
TESTED = RATED == 3
MASKS = {"Otraining": ((RATED > 0) & ~TESTED).astype(float), "Otest": TESTED.astype(float)}


def matlab_73(path: Path, **matrices: Any) -> Path:
    """Write a file as MATLAB 7.3 does: HDF5 after 512 bytes of its own, dense matrices column by column."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, matrix in matrices.items():
            if scipy.sparse.issparse(matrix):
                group = file.create_group(name)
                group.attrs["MATLAB_sparse"] = np.uint64(matrix.shape[0])
                columns = scipy.sparse.csc_matrix(matrix)
                group["data"], group["ir"], group["jc"] = columns.data, columns.indices, columns.indptr
            else:
                file[name] = np.asarray(matrix).T
    return path


def matlab_5(path: Path, **matrices: Any) -> Path:
    scipy.io.savemat(path, matrices)
    return path


@pytest.mark.parametrize("written", [matlab_73, matlab_5])
@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csc_matrix])
def test_a_matrix_of_matlab_is_read_dense_and_sparse_without_its_zeros(
    tmp_path: Path, written: Callable[..., Path], form: Callable[[np.ndarray], Any]
) -> None:
    data = read(written(tmp_path / "some.mat", M=form(RATED)))
    assert rows(data) == OF_RATED
    assert (data.users, data.items, data.time) == (("1", "3"), ("1", "2", "3"), None)
    assert data.notes == ()


@pytest.mark.parametrize("written", [matlab_73, matlab_5])
@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csc_matrix])
def test_the_published_split_of_a_matlab_file_is_found_for_any_part_of_its_ratings(
    tmp_path: Path, written: Callable[..., Path], form: Callable[[np.ndarray], Any]
) -> None:
    masks = {name: form(mask) for name, mask in MASKS.items()}
    path = written(tmp_path / "some.mat", M=form(RATED), **masks)
    data = read(path)
    assert 'split.kind = "published"' in data.notes[0]
    assert published_parts(path, data).tolist() == [False, True, False]
    assert published_parts(path, read(path, keep=Filter(min_user=2))).tolist() == [False, True]


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ({"M": RATED}, "has no published split: Otraining and Otest missing beside M"),
        (
            {"M": RATED, "Otraining": RATED, "Otest": MASKS["Otest"]},
            r"M\(1, 3\) is both in Otraining and in Otest",
        ),
        (
            {"M": RATED, "Otraining": MASKS["Otraining"], "Otest": np.zeros_like(RATED)},
            r"M\(1, 3\) is neither in Otraining nor in Otest",
        ),
        (
            {"M": RATED, "Otraining": RATED, "Otest": RATED[:2]},
            r"Otest is of shape \(2, 3\); expected that of M",
        ),
    ],
)
def test_a_published_split_of_matlab_that_does_not_fit_is_refused(
    tmp_path: Path, matrices: dict[str, np.ndarray], message: str
) -> None:
    data = read(matlab_73(tmp_path / "whole.mat", M=RATED))
    with pytest.raises(DataError, match=message):
        published_parts(matlab_73(tmp_path / "some.mat", **matrices), data)


@pytest.mark.parametrize("written", [matlab_73, matlab_5])
@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ({"N": RATED}, "has no matrix 'M'"),
        ({"M": np.zeros((2, 2))}, "M has no entry other than 0"),
        ({"M": np.ones((2, 2, 2))}, r"M is of shape \(2, 2, 2\); expected users by items"),
        ({"M": np.array([[1.0, np.nan]])}, r"M\(1, 2\), column 'rating': nan; expected a finite number"),
        ({"M": np.array([[1 + 2j, 0]])}, "M is of type"),
    ],
)
def test_a_matlab_file_without_ratings_is_refused(
    tmp_path: Path, written: Callable[..., Path], matrices: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(written(tmp_path / "some.mat", **matrices))


@pytest.mark.parametrize(
    ("written", "library"), [(matlab_73, "h5py"), (matlab_73, "scipy.sparse"), (matlab_5, "scipy.io")]
)
def test_without_the_library_of_a_matlab_file_the_error_says_what_to_install(
    tmp_path: Path, written: Callable[..., Path], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "some.mat", M=scipy.sparse.csc_matrix(RATED))
    monkeypatch.setitem(sys.modules, library, None)
    needed = library.partition(".")[0]
    with pytest.raises(DataError, match=rf"needs {needed}, which is not installed.*coterie\[data\]"):
        read(path)


def test_a_sparse_matrix_of_matlab_whose_rows_lie_outside_is_refused(tmp_path: Path) -> None:
    path = matlab_73(tmp_path / "some.mat", M=scipy.sparse.csc_matrix(RATED))
    with h5py.File(path, "r+") as file:
        file["M"]["ir"][0] = 7
    with pytest.raises(DataError, match="M is no sparse matrix"):
        read(path)
    with h5py.File(path, "r+") as file:
        del file["M"]["ir"]
    with pytest.raises(DataError, match="M is a structure; expected a matrix"):
        read(path)


@pytest.mark.parametrize("rows", [np.array([3, 3]), "three", -3, 3.5])
def test_a_sparse_matrix_of_matlab_with_another_number_of_rows_is_refused(tmp_path: Path, rows: Any) -> None:
    path = matlab_73(tmp_path / "some.mat", M=scipy.sparse.csc_matrix(RATED))
    with h5py.File(path, "r+") as file:
        file["M"].attrs["MATLAB_sparse"] = rows
    with pytest.raises(DataError, match=r"some\.mat: M is no sparse matrix: .*; expected values"):
        read(path)


def test_a_sparse_matrix_of_an_earlier_matlab_whose_columns_lie_outside_is_refused(tmp_path: Path) -> None:
    path = matlab_5(tmp_path / "some.mat", M=scipy.sparse.csc_matrix(RATED))
    starts, wrong = (np.array(columns, "<i4").tobytes() for columns in ([0, 1, 2, 3], [0, 9, 2, 3]))
    assert path.read_bytes().count(starts) == 1
    path.write_bytes(path.read_bytes().replace(starts, wrong))
    with pytest.raises(DataError, match=r"some\.mat is no MATLAB file"):
        read(path)


@pytest.mark.parametrize("place", ["M", "M/data", "M/ir", "M/jc"])
def test_an_array_of_matlab_that_would_fill_the_memory_is_refused(tmp_path: Path, place: str) -> None:
    path = matlab_73(tmp_path / "some.mat", M=scipy.sparse.csc_matrix(RATED))
    with h5py.File(path, "r+") as file:
        del file[place]
        # Nothing of it is allocated in the file.
        file.create_dataset(place, (10**6, 10**7), "f8", chunks=(1000, 1000))
    with pytest.raises(
        DataError, match=rf"{place} is of shape \(1000000, 10000000\), 80000000000000 bytes; expected at most"
    ):
        read(path)


def test_what_is_no_array_in_a_matlab_file_is_refused(tmp_path: Path) -> None:
    path = matlab_73(tmp_path / "some.mat", M=scipy.sparse.csc_matrix(RATED))
    with h5py.File(path, "r+") as file:
        del file["M"]["data"]
        file["M"].create_group("data")
    with pytest.raises(DataError, match=r"some\.mat cannot be read as HDF5: .*; expected a MATLAB 7.3 file"):
        read(path)
    with h5py.File(path, "w") as file:
        file["M"] = h5py.Empty("f8")
    with pytest.raises(DataError, match=r"some\.mat: M is empty; expected an array"):
        read(path)
    with h5py.File(path, "w") as file:
        file["M"] = np.dtype("f8")
    with pytest.raises(DataError, match=r"some\.mat cannot be read as HDF5"):
        read(path)


@pytest.mark.parametrize("name", ["some.mat", "some.npy", "some.npz", "some.parquet"])
@pytest.mark.parametrize(
    "content",
    [b"", b"user,item,rating\n1,2,3\n", b"\x89HDF\r\n\x1a\nno more", b"PK\x03\x04no more", b"\x93NUMPY"],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=name):
        read(path)


TRIPLES = [(7, 10, 4.0), (8, 9, 2.5), (7, 9, 100.0)]
OF_TRIPLES = [("7", "10", 4.0), ("8", "9", 2.5), ("7", "9", 100.0)]
OF_TEXT = np.array([("7", "10", "4"), ("8", "9", "2.5"), ("7", "9", "100")])
NAMED = np.array(TRIPLES, [("user_id", ">i4"), ("item", "<i8"), ("rating", "f2")])


@pytest.mark.parametrize("array", [np.array(TRIPLES), np.array(TRIPLES, np.float32), OF_TEXT, NAMED])
def test_an_array_of_triples_is_read_whatever_its_types(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "some.npy", array)
    np.savez(tmp_path / "some.npz", array)
    for name in ("some.npy", "some.npz"):
        data = read(tmp_path / name)
        assert (rows(data), data.time) == (OF_TRIPLES, None)


def test_arrays_of_columns_are_found_by_usual_or_given_names(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    np.savez_compressed(path, who=np.array(["b", "a"]), item=[1, 2], score=[1, 5], time=[10.7, 20])
    data = read(path, columns={"user": "who"})
    assert rows(data) == [("b", "1", 1.0), ("a", "2", 5.0)]
    assert data.time is not None
    assert data.time.tolist() == [10, 20]
    with pytest.raises(DataError, match="has no column 'user'; it has 'who', 'item'") as failed:
        read(path)
    assert failed.value.hint == "--column user=NAME says which it is, in a run `--set data.columns.user=NAME`"


def test_an_array_of_pairs_has_no_ratings_and_the_last_of_repeated_ones_counts(tmp_path: Path) -> None:
    np.save(tmp_path / "some.npy", np.array([(1, 2), (1, 3), (1, 2)]))
    data = read(tmp_path / "some.npy")
    assert sorted(rows(data)) == [("1", "2", 1.0), ("1", "3", 1.0)]
    assert any("1 rows repeated" in note for note in data.notes)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((0, 3)), "has no rows"),
        (np.zeros(3), r"the array is of shape \(3,\); expected \(N, 2\) to \(N, 4\)"),
        (np.zeros((3, 5)), r"of shape \(3, 5\)"),
        (np.zeros(3, []), r"of shape \(3,\)"),
        (np.zeros((2, 3), complex), "user is of type complex128; expected numbers or text"),
        (np.zeros((2, 3), bool), "user is of type bool"),
        (np.array([(1, 2, np.nan)]), "row 1, column 'rating': nan; expected a finite number"),
        (np.array([(1, 2, 3), (np.nan, 2, 3)]), "row 2, column 'user'"),
        (np.array([(1, 2, 1e39)]), "row 1, column 'rating'"),
        (np.array([(1, 2, "many")]), "row 1, column 'rating': 'many'"),
    ],
)
def test_an_array_that_holds_no_interactions_is_refused(
    tmp_path: Path, array: np.ndarray, message: str
) -> None:
    np.save(tmp_path / "some.npy", array)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "some.npy")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"user": [1, 2], "item": [1]}, r"holds user \(2,\), item \(1,\); expected one array of rows"),
        ({"user": [1, 2], "item": [[1, 2]]}, "expected one array of rows"),
        ({}, "holds no array"),
    ],
)
def test_columns_of_different_lengths_are_refused(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "some.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "some.npz")


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("the file ran code",)


def test_python_objects_in_a_file_of_numpy_are_never_loaded(tmp_path: Path) -> None:
    trap = np.array([_Trap()], object)
    np.save(tmp_path / "some.npy", trap, allow_pickle=True)
    np.savez(tmp_path / "some.npz", user=trap, item=trap)
    for name in ("some.npy", "some.npz"):
        with pytest.raises(DataError, match="holds Python objects"):
            read(tmp_path / name)


def npy(header: str) -> bytes:
    """Return a ``.npy`` file of a header and no array."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


HUGE = npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 3)}")
OF_NOTHING = npy("{'descr': '<U0', 'fortran_order': False, 'shape': (1000000000000, 3)}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            HUGE,
            r"of shape \(1000000000000, 3\) .* 24000000000000 bytes, but holds \d+; expected the whole array",
        ),
        (OF_NOTHING, "expected the whole array"),
        (npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-4, 3)}"), ""),
        (npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1, 3)}"), ""),
        (npy("{[]: 1}"), "expected an array as .npy"),
        (npy("(" + 3 * "'"), "expected an array as .npy"),
        (b"\x93NUMPY\x09\x00" + HUGE[8:], "expected an array as .npy"),
    ],
)
def test_a_header_of_numpy_that_does_not_fit_the_file_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "some.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "some.npz", "w") as archive:
        archive.writestr("user.npy", content)
    for name in ("some.npy", "some.npz"):
        with pytest.raises(DataError, match=f"{name}.*{message}"):
            read(tmp_path / name)


def test_a_damaged_archive_of_numpy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    np.savez_compressed(path, user=np.arange(1000), item=np.arange(1000))
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        start = archive.infolist()[0].header_offset + 80
    # No block of deflate begins with these bits.
    path.write_bytes(whole[:start] + b"\xff" * 20 + whole[start + 20 :])
    with pytest.raises(DataError, match=r"some\.npz cannot be read as a NumPy file: .*; expected an array"):
        read(path)
    # The two bytes after these of the directory name a method of compression that does not exist.
    directory = whole.index(b"PK\x01\x02")
    path.write_bytes(whole[: directory + 10] + b"\x63\x00" + whole[directory + 12 :])
    with pytest.raises(DataError, match=r"some\.npz cannot be read as a NumPy file"):
        read(path)


def test_a_member_that_is_no_array_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some.npz", "w") as archive:
        archive.writestr("readme.txt", "of users and items")
    with pytest.raises(DataError, match=r"some\.npz: readme\.txt is no array; expected arrays"):
        read(tmp_path / "some.npz")


def test_columns_of_several_values_or_of_no_text_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "some.npy", np.zeros(3, [("user", "<i4", (2,)), ("item", "<i4")]))
    with pytest.raises(DataError, match=r"user is of shape \(3, 2\); expected one value in each row"):
        read(tmp_path / "some.npy")
    np.save(tmp_path / "some.npy", np.array([("\ud800", "1"), ("2", "3")]))
    with pytest.raises(DataError, match=r"some\.npy holds text that is no Unicode"):
        read(tmp_path / "some.npy")


CHECK_INS = "5\tv1\tTue Apr 03 18:20:27 +0000 2012\t60\n7\tv2\tTue Apr 03 18:20:28 +0000 2012\t60\n"


def test_check_ins_with_a_header_have_categories_as_genres_and_one_interaction_a_venue(write: Write) -> None:
    lines = "user_id\tvenue_id\ttype\tutc\n5\tv1\tCaf\xe9\t10\n5\tv1\tCaf\xe9\t30\n6\tv2\t\t20\n"
    path = write(Rome__tsv=lines.encode("latin-1")) / "Rome.tsv"
    assert detect(path) == "foursquare"
    data = read(path)
    assert (data.name, rows(data)) == ("Rome", [("5", "v1", 1.0), ("6", "v2", 1.0)])
    assert data.time is not None
    assert data.time.tolist() == [30, 20]
    assert (genres_of(data, "v1"), genres_of(data, "v2")) == ({"Café"}, {"unknown"})
    assert data.notes == (
        "no ratings: every interaction counts as 1",
        "1 rows repeated a user and item: the last of each was kept",
    )


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("dataset_TIST2015_Checkins.txt", CHECK_INS),
        (
            "dataset_TSMC2014_NYC.txt",
            "".join(
                f"{user}\t{venue}\tc\tBar\t40.7\t-74\t-240\tTue Apr 03 18:20:2{second} +0000 2012\n"
                for user, venue, second in ((5, "v1", 7), (7, "v2", 8))
            ),
        ),
    ],
)
def test_dumps_of_check_ins_have_no_header(tmp_path: Path, name: str, lines: str) -> None:
    (tmp_path / name).write_text(lines)
    data = read(tmp_path / name)
    assert rows(data) == [("5", "v1", 1.0), ("7", "v2", 1.0)]
    assert data.time is not None
    assert data.time.tolist() == [1333477227, 1333477228]


def test_check_ins_that_others_published_as_csv_are_read_by_their_header(tmp_path: Path) -> None:
    path = tmp_path / "dataset_TSMC2014_NYC.csv"
    path.write_text(
        "userId,venueId,venueCategoryId,venueCategory,latitude,longitude,timezoneOffset,utcTimestamp\n"
        "470,49bbd6c0,4bf58dd8,Arts & Crafts Store,40.71,-74.00,-240,Tue Apr 03 18:00:09 +0000 2012\n"
        '979,4a43c0ae,4bf58dd8,"Bridge, Old",40.60,-74.04,-240,Tue Apr 03 18:00:25 +0000 2012\n'
    )
    assert detect(path) == "csv"
    data = read(path)
    assert rows(data) == [("470", "49bbd6c0", 1.0), ("979", "4a43c0ae", 1.0)]
    assert data.time is not None
    assert data.time.tolist() == [1333476009, 1333476025]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dataset_TSMC2014_TKY", "foursquare"),
        ("dataset_TSMC2014_TKY.TXT", "foursquare"),
        ("dataset_TIST2015_Checkins.tsv", "foursquare"),
        ("dataset_TIST2015_Checkins.parquet", "parquet"),
        ("dataset_TSMC2014_TKY.npz", "numpy"),
    ],
)
def test_the_name_of_a_dump_counts_only_for_text(tmp_path: Path, name: str, layout: str) -> None:
    (tmp_path / name).write_text(CHECK_INS)
    assert detect(tmp_path / name) == layout


def test_check_ins_of_other_columns_are_refused_with_their_line(write: Write) -> None:
    folder = write(short__tsv="5\tv1\n", wrong__tsv=CHECK_INS + "8\tv3\tsoon\t60\n")
    with pytest.raises(
        DataError, match=r"short.tsv, line 1: 2 fields, none of them 'venue_id'; .* 4 or 8 fields"
    ):
        read(folder / "short.tsv", "foursquare")
    with pytest.raises(DataError, match=r"wrong.tsv, line 3, column 'utc': 'soon'; expected a time"):
        read(folder / "wrong.tsv", "foursquare")


def test_a_table_with_venues_and_ratings_keeps_its_ratings(write: Write) -> None:
    path = write(venues__tsv="user_id\tvenue_id\trating\n5\tv1\t4\n") / "venues.tsv"
    assert (detect(path), rows(read(path))) == ("tsv", [("5", "v1", 4.0)])


@pytest.mark.parametrize(
    ("given", "lowest", "highest"), [("0,50,100", 0, 100), ("-10,-5.5,-1", -10, -1), ("3,3,3", 3, 3)]
)
def test_ratings_of_any_declared_range_are_read(
    write: Write, given: str, lowest: float, highest: float
) -> None:
    ratings = given.split(",")
    lines = "".join(f"{user},1,{rating}\n" for user, rating in enumerate(ratings))
    path = write(some__csv=f"user,item,rating\n{lines}") / "some.csv"
    data = read(path, rating_range=(lowest, highest))
    assert data.rating.tolist() == [float(rating) for rating in ratings]
    assert rows(read(path)) == rows(data)
    if lowest < highest:
        with pytest.raises(DataError, match=r"line \d, column 'rating': '.*'; expected a number from"):
            read(path, rating_range=(lowest + 0.5, highest - 0.5))


def real_set(name: str) -> Path:
    root = os.environ.get("COTERIE_DATA")
    if not root:
        pytest.skip("COTERIE_DATA is not set: it names a folder with real data sets")
    if not (path := Path(root) / name).exists():
        pytest.skip(f"COTERIE_DATA has no {name}")
    return path


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "users", "items", "interactions", "genres", "timed"),
    [
        ("ml-100k", 943, 1_682, 100_000, 19, True),
        ("ml-1m", 6_040, 3_706, 1_000_209, 18, None),
        ("ml-latest-small", 610, 9_724, 100_836, 20, True),
        ("foursquare/italy/Bologna.tsv", 1_166, 3_168, None, 297, True),
        ("monti/douban.mat", 2_999, 3_000, 136_891, 0, False),
        ("foursquare/italy/Milan.tsv", 2_957, 12_725, None, 377, True),
    ],
)
def test_published_sets_have_their_published_counts(
    name: str, users: int, items: int, interactions: int | None, genres: int, timed: bool | None
) -> None:
    data = read(real_set(name))
    assert (len(data.users), len(data.items), len(data.genres)) == (users, items, genres)
    assert interactions is None or len(data) == interactions
    assert timed is None or (data.time is not None) == timed
    assert data.item_genres is None or data.item_genres.any(axis=1).all()


@pytest.mark.realdata
def test_movielens_100k_has_1_72_owners_per_item() -> None:
    genres = read(real_set("ml-100k")).item_genres
    assert genres is not None
    assert genres.sum() / len(genres) == pytest.approx(1.72, abs=0.005)


# --- places


def test_an_error_about_a_set_that_is_not_there_says_where_it_was_looked_for_and_which_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "sets"))
    for name in ("sets/ml-1m", "sets/.cache", "data/mine"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "sets" / "README.md").touch()
    with pytest.raises(DataError) as failed:
        read(Path("ml-20m"))
    places = f"data/ml-20m and {tmp_path / 'sets' / 'ml-20m'}"
    assert failed.value.message == (
        f"ml-20m does not exist; expected a data set, here or at {places}; there are mine, ml-1m"
    )
    with pytest.raises(DataError) as failed:
        read(Path("/nowhere/set"))
    assert failed.value.message == "/nowhere/set does not exist; expected a data set"


def test_many_sets_are_not_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    with pytest.raises(DataError) as failed:
        read(Path("x"))
    assert failed.value.message.endswith("here or at data/x")
    for number in range(20):
        (tmp_path / "data" / f"set-{number:02}").mkdir(parents=True)
    with pytest.raises(DataError) as failed:
        read(Path("x"))
    assert failed.value.message.endswith("set-10, set-11, ...")
