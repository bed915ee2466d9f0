"""Attributes of MovieLens' users: age, gender, occupation and, from the zip code, the region of the United States."""

from __future__ import annotations

import re
from bisect import bisect_right
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable, beside, one_of
from coterie.data.dataset import Dataset
from coterie.data.tables import Dialect, FileTable, read_text
from coterie.errors import DataError

__all__ = ["AGES", "REGIONS", "read_user_attributes", "us_region"]

AGES = ("under 18", "18-24", "25-34", "35-44", "45-49", "50-55", "56 and over")
"""Bands of MovieLens 1M, which names each by its lowest age; the ages of MovieLens 100K are put into the same."""
_AGE_FROM = (0, 18, 25, 35, 45, 50, 56)
_OLDEST = 120

GENDERS = ("F", "M")

REGIONS = ("northeast", "midwest", "south", "west", "elsewhere")
"""Regions of the US Census Bureau; "elsewhere" is territories, military mail, and codes of other countries."""

_REGION_FROM = (
    (0, "elsewhere"),
    (5, "northeast"),
    (6, "elsewhere"),
    (10, "northeast"),
    (90, "elsewhere"),
    (100, "northeast"),
    (197, "south"),
    (340, "elsewhere"),
    (341, "south"),
    (430, "midwest"),
    (590, "west"),
    (600, "midwest"),
    (700, "south"),
    (800, "west"),
    (885, "south"),
    (886, "west"),
    (962, "elsewhere"),
    (967, "west"),
    (969, "elsewhere"),
    (970, "west"),
)
"""Region by a zip code's first three digits, each entry valid from its number on (Delaware and Maryland count as
south, Montana as west; 885 is El Paso)."""
_FIRST_DIGITS = tuple(first for first, _ in _REGION_FROM)

_ZIP = re.compile(r"\d{5}(-?\d{4})?")

_COLUMNS_100K = ("user id", "age", "gender", "occupation", "zip code")
_COLUMNS_1M = ("UserID", "Gender", "Age", "Occupation", "Zip-code")

_OCCUPATIONS_1M = (
    "other",
    "academic or educator",
    "artist",
    "clerical or admin",
    "college or graduate student",
    "customer service",
    "doctor or health care",
    "executive or managerial",
    "farmer",
    "homemaker",
    "K-12 student",
    "lawyer",
    "programmer",
    "retired",
    "sales or marketing",
    "scientist",
    "self-employed",
    "technician or engineer",
    "tradesman or craftsman",
    "unemployed",
    "writer",
)
"""Occupations in the order of their numbers in MovieLens 1M."""


def us_region(code: str) -> str | None:
    """Return the region of a zip code, one of `REGIONS`; None where none is given.

    >>> us_region("55117"), us_region("98101-2047"), us_region("V3N4P"), us_region("")
    ('midwest', 'west', 'elsewhere', None)
    """
    if not code:
        return None
    if not _ZIP.fullmatch(code):
        return "elsewhere"
    return _REGION_FROM[bisect_right(_FIRST_DIGITS, int(code[:3])) - 1][1]


def read_user_attributes(path: str | Path, dataset: Dataset) -> AttributeTable:
    """Read the attributes of a data set's users.

    Parameters
    ----------
    path : str or Path
        The folder of MovieLens 100K or 1M (or 10M), or a file in it.
    dataset : Dataset
        Data set with the users; others in the file are skipped.

    Returns
    -------
    AttributeTable
        Columns ``age: ...``, ``gender: ...``, ``occupation: ...`` and ``region: ...``.  Missing is what the file leaves
        empty, and everything of a user that it does not name.  Data without such a file has no columns at all: new
        users can then be told nothing but what suits everybody.

    Raises
    ------
    DataError
        A file that cannot be read, a user twice, or a value that is not known; names the line.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if (users := folder / "u.user").is_file():
        table = read_text(users, Dialect("|", latin1=True), _COLUMNS_100K)
        key, age, gender, occupation, code = _COLUMNS_100K
        occupations = _occupations_100k(table, folder)
        worked = table.choices(occupation, occupations)
    elif (users := folder / "users.dat").is_file():
        table = read_text(users, Dialect("::", latin1=True), _COLUMNS_1M)
        key, gender, age, occupation, code = _COLUMNS_1M
        occupations = _OCCUPATIONS_1M
        worked = table.choices(occupation, tuple(map(str, range(len(occupations)))))
    else:
        return AttributeTable((), np.empty((len(dataset.users), 0), np.float32))
    place = {region: index for index, region in enumerate(REGIONS)}
    lived = np.array([place.get(us_region(text) or "", -1) for text in table.texts(code)], np.int64)
    everybody = beside(
        one_of("age", AGES, _bands(table.numbers(age, 0, _OLDEST, blank=True))),
        one_of("gender", GENDERS, table.choices(gender, GENDERS)),
        one_of("occupation", occupations, worked),
        one_of("region", REGIONS, lived),
    )
    return AttributeTable(everybody.names, _of_users(table, key, everybody.values, dataset))


def _occupations_100k(table: FileTable, folder: Path) -> tuple[str, ...]:
    """Return the occupations that MovieLens 100K lists, or those that its users have."""
    if (listed := folder / "u.occupation").is_file():
        return tuple(read_text(listed, Dialect("|"), ("occupation",)).texts("occupation"))
    return tuple(sorted(set(table.texts("occupation")) - {""}))


def _bands(age: NDArray[np.float64]) -> NDArray[np.intp]:
    band = np.searchsorted(_AGE_FROM, np.nan_to_num(age), side="right") - 1
    return np.where(np.isnan(age), -1, band)


def _of_users(
    table: FileTable, column: str, values: NDArray[np.float32], dataset: Dataset
) -> NDArray[np.float32]:
    """Return the rows of the data set's users; NaN for users that are not in the table."""
    keys = table.texts(column)
    row_of = {key: row for row, key in enumerate(keys)}
    if len(row_of) < len(keys):
        raise DataError(f"{table.path} names {len(keys) - len(row_of)} users twice; expected each once")
    rows = np.array([row_of.get(key, -1) for key in dataset.users], np.int64)
    found = values[rows]
    found[rows < 0] = np.nan
    return found
