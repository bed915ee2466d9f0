"""Reader of RecBole's atomic files, which are tab-separated with a header of ``name:type`` fields."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from coterie.data.assemble import Catalogue, Columns, assemble
from coterie.data.dataset import Dataset
from coterie.data.tables import Dialect, FileTable, read_text
from coterie.errors import DataError

__all__ = ["read_recbole"]

_TITLES = ("movie_title", "item_name", "title", "name")
_GENRES = ("genre", "genres", "class", "categories", "category")
"""Names that RecBole's own conversions use for the genres of an item."""


def read_recbole(path: Path, rating_range: tuple[float, float] | None = None) -> Dataset:
    """Read an ``.inter`` file, or that of a folder, and titles and genres from the ``.item`` file beside it.

    Attributes of users (``.user``) have no place in a `Dataset` and are not read.

    Parameters
    ----------
    path : Path
        File or folder.
    rating_range : tuple of float, optional

    Returns
    -------
    Dataset
    """
    if path.is_dir():
        found = sorted(path.glob("*.inter"))
        if len(found) != 1:
            raise DataError(f"{path} has {len(found)} files *.inter; expected 1, or the path of one of them")
        path = found[0]
    inter = _untyped(read_text(path, Dialect("\t")))
    columns = Columns(
        user="user_id",
        item="item_id",
        rating="rating" if inter.has("rating") else None,
        time="timestamp" if inter.has("timestamp") else None,
    )
    item_file = path.with_suffix(".item")
    catalogue = _items(_untyped(read_text(item_file, Dialect("\t")))) if item_file.exists() else None
    return assemble(path.stem, inter, columns, rating_range, catalogue)


def _untyped(table: FileTable) -> FileTable:
    """Drop the types from the header: ``item_id:token`` becomes ``item_id``."""
    frame = table.frame.rename({column: column.partition(":")[0] for column in table.frame.columns})
    return replace(table, frame=frame)


def _items(table: FileTable) -> Catalogue:
    keys = table.texts("item_id")
    title = next(filter(table.has, _TITLES), None)
    genre = next(filter(table.has, _GENRES), None)
    return Catalogue(
        titles=None if title is None else dict(zip(keys, table.texts(title), strict=True)),
        # A token sequence is separated by spaces.
        genres=None
        if genre is None
        else {key: tuple(named.split()) for key, named in zip(keys, table.texts(genre), strict=True)},
    )
