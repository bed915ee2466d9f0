"""Reading of a data set from a file or folder, in a layout that is given or detected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.data import movielens
from coterie.data.arrays import read_numpy
from coterie.data.assemble import Columns, assemble
from coterie.data.dataset import Dataset
from coterie.data.filters import NO_FILTER, Filter, filtered
from coterie.data.foursquare import names_check_ins, read_check_ins
from coterie.data.matlab import read_mat
from coterie.data.places import missing
from coterie.data.recbole import read_recbole
from coterie.data.tables import Dialect, FileTable, read_parquet, read_text
from coterie.errors import DataError, nearest

if TYPE_CHECKING:
    import polars as pl

__all__ = ["LAYOUTS", "USUAL_COLUMNS", "detect", "read", "read_frame"]

LAYOUTS = (
    "ml-100k",
    "ml-1m",
    "ml-latest",
    "recbole",
    "foursquare",
    "mat",
    "numpy",
    "csv",
    "tsv",
    "parquet",
)
"""Every layout that `read` knows."""

_BY_FILE = {"u.data": "ml-100k", "ratings.dat": "ml-1m", "ratings_no_timestamp.dat": "ml-1m"}
_BY_FOLDER = {**_BY_FILE, "ratings.csv": "ml-latest"}
"""Layout of a folder by a file in it."""
_BY_SUFFIX = {
    ".inter": "recbole",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".mat": "mat",
    ".npy": "numpy",
    ".npz": "numpy",
}
_BY_BEGINNING = {"dataset_TSMC2014_": "foursquare", "dataset_TIST2015_Checkins": "foursquare"}
"""Layout of a text file by the beginning of its name."""
_TEXT_SUFFIXES = ("", ".txt", ".tsv")
"""Suffixes with which the beginning of a name counts: others publish the same check-ins as CSV or Parquet."""

_ROLES = ("user", "item", "rating", "time")
USUAL_COLUMNS = {
    "user": ("user", "user_id", "userId", "userid"),
    "item": ("item", "item_id", "itemId", "itemid", "movieId", "venue_id", "venueId"),
    "rating": ("rating", "score", "stars"),
    "time": ("time", "timestamp", "utc", "utcTimestamp"),
}
"""Usual names of columns, by which a column is found that was not named."""


def read(
    path: str | Path,
    layout: str | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    rating_range: tuple[float, float] | None = None,
    keep: Filter = NO_FILTER,
) -> Dataset:
    """Read a data set.

    Parameters
    ----------
    path : str or Path
        A folder of a MovieLens or RecBole set, or a ``.csv``, ``.tsv``, ``.parquet``, ``.inter``, ``.mat``, ``.npy`` or
        ``.npz`` file.
    layout : str, optional
        One of `LAYOUTS`; found out by default (`detect`).
    columns : mapping of str to str, optional
        For CSV, TSV, Parquet and NumPy files: the column of ``user``, ``item``, ``rating`` and ``time``. A
        column that is not named is found under its usual names; ratings and times may be absent.
    rating_range : tuple of float, optional
        Lowest and highest possible rating; 0.5 to 5 for MovieLens by default, else any.
    keep : Filter
        Which users and items are kept; all by default.

    Returns
    -------
    Dataset
        Users and items that have interactions. An item without a genre is in ``unknown``. The last of
        repeated pairs is kept, and the notes count them.

    Raises
    ------
    DataError
        The file, line and column, what stands there and what was expected; or a filter that keeps nothing.

    Notes
    -----
    Reading needs polars (``pip install 'coterie[data]'``).
    """
    path = Path(path)
    if layout is None:
        layout = detect(path)
    elif layout not in LAYOUTS:
        guess = nearest(layout, LAYOUTS)
        raise DataError(
            f"layout {layout!r}; expected one of {', '.join(LAYOUTS)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    if not path.exists():
        raise missing(path)
    if rating_range is not None and not rating_range[0] <= rating_range[1]:
        raise DataError(f"rating_range is {rating_range}; expected the lowest rating, then the highest")
    return filtered(_read(path, layout, columns, rating_range), keep)


def read_frame(
    frame: pl.DataFrame,
    name: str,
    *,
    columns: Mapping[str, str] | None = None,
    rating_range: tuple[float, float] | None = None,
) -> Dataset:
    """Build a data set from a table in memory, as `read` does from a Parquet file.

    Parameters
    ----------
    frame : polars.DataFrame
    name : str
        Name of the data set, which errors give in place of a file.
    columns, rating_range
        As for `read`.

    Raises
    ------
    DataError
        The row and column, what stands there and what was expected.
    """
    if not frame.height:
        raise DataError(f"{name} has no rows; expected interactions")
    table = FileTable(Path(name), frame, dialect=None, header=False)
    return assemble(name, table, _columns(table, columns or {}), rating_range)


def _read(
    path: Path, layout: str, columns: Mapping[str, str] | None, rating_range: tuple[float, float] | None
) -> Dataset:
    if layout in _READERS_OF_FOLDERS:
        _refuse_columns(columns, layout)
        folder = path if path.is_dir() else path.parent
        return _READERS_OF_FOLDERS[layout](folder, rating_range or movielens.RATING_RANGE)
    if layout in _READERS_OF_FILES:
        _refuse_columns(columns, layout)
        return _READERS_OF_FILES[layout](path, rating_range)
    table = _table(path, layout)
    return assemble(path.stem, table, _columns(table, columns or {}), rating_range)


def detect(path: Path) -> str:
    """Detect the layout of a data set from the names of its files, and check-ins from the header of a ``.tsv`` file.

    Parameters
    ----------
    path : Path
        File or folder.

    Returns
    -------
    str
        One of `LAYOUTS`.

    Raises
    ------
    DataError
        Nothing there, or nothing that is known.
    """
    if not path.exists():
        raise missing(path)
    if path.is_dir():
        for name, layout in _BY_FOLDER.items():
            if (path / name).is_file():
                return layout
        if any(path.glob("*.inter")):
            return "recbole"
        raise DataError(
            f"{path} holds no data set that is known; expected {', '.join(_BY_FOLDER)} or *.inter in it",
            hint="give the path of a CSV, TSV or Parquet file and name its columns",
        )
    suffix = path.suffix.lower()
    named = _BY_BEGINNING.items() if suffix in _TEXT_SUFFIXES else ()
    begins = (layout for begin, layout in named if path.name.startswith(begin))
    found = _BY_FILE.get(path.name) or next(begins, None) or _BY_SUFFIX.get(suffix)
    if found == "tsv" and names_check_ins(path):
        return "foursquare"
    if found is None:
        raise DataError(
            f"{path} is of no known layout; expected {', '.join(_BY_SUFFIX)} or a folder",
            hint=f"name the layout: one of {', '.join(LAYOUTS)}",
        )
    return found


_READERS_OF_FOLDERS = {
    "ml-100k": movielens.read_100k,
    "ml-1m": movielens.read_1m,
    "ml-latest": movielens.read_latest,
}
_READERS_OF_FILES = {"recbole": read_recbole, "foursquare": read_check_ins, "mat": read_mat}


def _table(path: Path, layout: str) -> FileTable:
    if layout == "parquet":
        return read_parquet(path)
    if layout == "numpy":
        return read_numpy(path)
    return read_text(path, Dialect(",", quoted=True) if layout == "csv" else Dialect("\t"))


def _columns(table: FileTable, named: Mapping[str, str]) -> Columns:
    for role in named:
        if role not in _ROLES:
            guess = nearest(role, _ROLES)
            raise DataError(
                f"columns names a {role!r}; expected {', '.join(_ROLES)}",
                hint=f"did you mean {guess!r}?" if guess else None,
            )
    return Columns(
        user=_needed(table, named, "user"),
        item=_needed(table, named, "item"),
        rating=_found(table, named, "rating"),
        time=_found(table, named, "time"),
    )


def _found(table: FileTable, named: Mapping[str, str], role: str) -> str | None:
    """Return the column of a role: the named column, or one with a usual name, or None."""
    if role in named:
        table.require(named[role])
        return named[role]
    return next(filter(table.has, USUAL_COLUMNS[role]), None)


def _needed(table: FileTable, named: Mapping[str, str], role: str) -> str:
    column = _found(table, named, role) or role
    table.require(column)  # where nothing was found, this says which columns there are
    return column


def _refuse_columns(columns: Mapping[str, str] | None, layout: str) -> None:
    if columns:
        raise DataError(
            f"columns are named ({', '.join(columns.values())}) but the layout {layout} has fixed ones",
            hint="leave the columns out, or give the path of one file and its layout",
        )
