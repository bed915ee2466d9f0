"""Readers of the MovieLens folders (GroupLens): 100K, 1M (and 10M, laid out like it), and the CSV releases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from coterie.data.assemble import Catalogue, Columns, assemble
from coterie.data.dataset import UNKNOWN_GENRE, Dataset
from coterie.data.ncf import FOLDER
from coterie.data.tables import Dialect, FileTable, read_text
from coterie.errors import DataError

__all__ = ["RATING_RANGE", "read_1m", "read_100k", "read_latest"]

RATING_RANGE = (0.5, 5.0)
"""Lowest and highest rating, stars; in halves since 2003."""

_NO_GENRES = "(no genres listed)"
_COLUMNS_100K = ("user id", "item id", "rating", "timestamp")
_ITEM_FACTS_100K = ("movie id", "movie title", "release date", "video release date", "IMDb URL")
_COLUMNS_1M = ("UserID", "MovieID", "Rating", "Timestamp")


def read_100k(folder: Path, rating_range: tuple[float, float] = RATING_RANGE) -> Dataset:
    """Read a folder with ``u.data`` and, for titles and genres, ``u.item`` and ``u.genre``.

    Parameters
    ----------
    folder : Path
    rating_range : tuple of float

    Returns
    -------
    Dataset
    """
    ratings = read_text(folder / "u.data", Dialect("\t"), _COLUMNS_100K)
    items = folder / "u.item"
    return assemble(
        folder.name,
        ratings,
        Columns(*_COLUMNS_100K),
        rating_range,
        _items_100k(items) if items.exists() else None,
    )


def read_1m(folder: Path, rating_range: tuple[float, float] = RATING_RANGE) -> Dataset:
    """Read a folder with ``ratings.dat``, or ``ratings_no_timestamp.dat``, and ``movies.dat``.

    Parameters
    ----------
    folder : Path
    rating_range : tuple of float

    Returns
    -------
    Dataset
        Without times where only the second file is there. A note tells of a published hold-out that lies beside
        (`coterie.data.ncf`).
    """
    dialect = Dialect("::", latin1=True)
    if (timed := folder / "ratings.dat").exists():
        ratings = read_text(timed, dialect, _COLUMNS_1M)
        columns = Columns(*_COLUMNS_1M)
    else:
        ratings = read_text(folder / "ratings_no_timestamp.dat", dialect, _COLUMNS_1M[:3])
        columns = Columns(*_COLUMNS_1M[:3], time=None)
    catalogue = None
    if (movies := folder / "movies.dat").exists():
        catalogue = _movies(read_text(movies, dialect, ("MovieID", "Title", "Genres")))
    dataset = assemble(folder.name, ratings, columns, rating_range, catalogue)
    notes = []
    if columns.time is None:
        notes.append(f"{ratings.path.name} is no file of the publisher: a reconstruction without times")
    if (folder / FOLDER).is_dir():
        notes.append(f'{FOLDER}/ holds the hold-out of NCF\'s authors: split.kind = "published" uses it')
    return replace(dataset, notes=(*dataset.notes, *notes))


def read_latest(folder: Path, rating_range: tuple[float, float] = RATING_RANGE) -> Dataset:
    """Read a folder with ``ratings.csv`` and, for titles and genres, ``movies.csv``.

    Parameters
    ----------
    folder : Path
    rating_range : tuple of float

    Returns
    -------
    Dataset
    """
    dialect = Dialect(",", quoted=True)
    ratings = read_text(folder / "ratings.csv", dialect)
    catalogue = None
    if (movies := folder / "movies.csv").exists():
        catalogue = _movies(read_text(movies, dialect))
    columns = Columns("userId", "movieId", "rating", "timestamp" if ratings.has("timestamp") else None)
    return assemble(folder.name, ratings, columns, rating_range, catalogue)


def _items_100k(path: Path) -> Catalogue:
    genre_file = path.with_name("u.genre")
    listed = read_text(genre_file, Dialect("|"), ("genre", "column"))
    order = tuple(listed.texts("genre"))
    if len(set(order)) != len(order):
        raise DataError(f"{genre_file} names a genre twice; expected each once")
    table = read_text(path, Dialect("|", latin1=True), (*_ITEM_FACTS_100K, *order))
    keys = table.texts("movie id")
    genres: dict[str, list[str]] = {key: [] for key in keys}
    for genre in order:
        for key, flag in zip(keys, table.numbers(genre, 0, 1).tolist(), strict=True):
            if flag:
                genres[key].append(genre)
    return Catalogue(
        titles=dict(zip(keys, table.texts("movie title"), strict=True)),
        genres={key: tuple(named) for key, named in genres.items()},
        order=order,
    )


def _movies(table: FileTable) -> Catalogue:
    """Read movies.dat and movies.csv: key, title and genres in three columns, genres separated by ``|``."""
    key, title, genres = table.frame.columns[:3]
    keys = table.texts(key)
    return Catalogue(
        titles=dict(zip(keys, table.texts(title), strict=True)),
        genres={
            movie: (UNKNOWN_GENRE,) if named in ("", _NO_GENRES) else tuple(named.split("|"))
            for movie, named in zip(keys, table.texts(genres), strict=True)
        },
    )
