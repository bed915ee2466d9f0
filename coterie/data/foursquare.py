"""Reader of Foursquare check-ins: files with a header, as the cities of FPL, and the dumps of Yang et al. without one.

The dumps (https://sites.google.com/site/yangdingqi/home/foursquare-dataset) have eight columns in the files of two
cities and four in the worldwide file.
"""

from __future__ import annotations

from pathlib import Path

from coterie.data.assemble import Catalogue, Columns, assemble
from coterie.data.dataset import Dataset
from coterie.data.tables import Dialect, read_text
from coterie.errors import DataError

__all__ = ["names_check_ins", "read_check_ins"]

_USER, _VENUE, _TIME = "user_id", "venue_id", "utc"
_CATEGORIES = ("type", "category")
_CITY = (_USER, _VENUE, "category_id", "category", "latitude", "longitude", "offset", _TIME)
_WORLD = (_USER, _VENUE, _TIME, "offset")
_WITHOUT_HEADER = {len(_CITY): _CITY, len(_WORLD): _WORLD}
_TAB = Dialect("\t", latin1=True)


def read_check_ins(path: Path, rating_range: tuple[float, float] | None = None) -> Dataset:
    """Read check-ins, tab-separated.

    Several check-ins of a user at a venue are one interaction, at the time of the last; a note counts the others.

    Parameters
    ----------
    path : Path
        With a header, which names ``user_id``, ``venue_id`` and maybe ``utc`` and ``type`` or ``category``; or without
        one, with the columns of the dumps.
    rating_range : tuple of float, optional
        Not used: check-ins have no ratings, and every interaction counts as 1.

    Returns
    -------
    Dataset
        The category of a venue is its genre, where the file has categories.

    Raises
    ------
    DataError
        Another number of columns, or a field that is wrong; names the line.
    """
    table = read_text(path, _TAB, _names(path))
    category = next(filter(table.has, _CATEGORIES), None)
    catalogue = None
    if category is not None:
        named = zip(table.texts(_VENUE), table.texts(category), strict=True)
        catalogue = Catalogue(genres={venue: (kind,) for venue, kind in named if kind})
    time = _TIME if table.has(_TIME) else None
    return assemble(path.stem, table, Columns(_USER, _VENUE, None, time), rating_range, catalogue)


def names_check_ins(path: Path) -> bool:
    """Return whether the first line of a file is a header of check-ins: users, venues, and nothing unknown."""
    header = set(_first_line(path))
    return {_USER, _VENUE} <= header <= {*_CITY, *_CATEGORIES}


def _names(path: Path) -> tuple[str, ...] | None:
    """Return the names of the columns of a file without a header; None where line 1 has them."""
    first = _first_line(path)
    if _VENUE in first:
        return None
    if len(first) not in _WITHOUT_HEADER:
        raise DataError(
            f"{path}, line 1: {len(first)} fields, none of them {_VENUE!r}; expected a header, or check-ins of "
            f"{' or '.join(map(str, sorted(_WITHOUT_HEADER)))} fields"
        )
    return _WITHOUT_HEADER[len(first)]


def _first_line(path: Path) -> list[str]:
    try:
        with path.open(encoding="latin-1") as file:
            return [field.strip() for field in file.readline().removeprefix("\xef\xbb\xbf").split("\t")]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
